//! Tests of the layer over two GPUs: with a divided cache, and with divided heads. Each has a
//! thread per GPU or a process per GPU.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use mla_kernels::Cuda;
use mla_kernels::context_parallel::{Communicator, GroupId, PartialResults};
use mla_runtime::batch::Request;
use mla_runtime::model::DType;
use mla_runtime::plan::parallel::ContextParallel;
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::tensor::{Layout, LseLayout, LseMut, Memory, TensorMut};

use super::batch::{Batch, Case, Distance, Engine, Outcome};
use super::gpu_layer;
use crate::common::{download, gpu, message, on_new_stream, upload};

const RANKS: usize = 2;

/// A member of a group, with its GPU.
struct Rank {
    device: Cuda,
    communicator: Communicator,
}

impl Rank {
    fn join(rank: usize, id: GroupId) -> Self {
        let device = Cuda::new(rank).unwrap();
        let communicator = Communicator::new(&device, rank, RANKS, id).unwrap();
        Self {
            device,
            communicator,
        }
    }
}

/// Runs `work` as each rank of a group, in threads of this process.
fn in_threads<T: Send>(work: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let id = GroupId::new().unwrap();
    let together = Barrier::new(RANKS);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (work, together) = (&work, &together);
                scope.spawn(move || {
                    let rank = Rank::join(rank, id);
                    let result = work(&rank);
                    together.wait();
                    result
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn close(distance: Distance, lse: bool) {
    println!("{distance:?}");
    // Each partial result is rounded once more before the merge.
    let u = 2f64.powi(-9);
    assert!(
        distance.worst <= 8.0 * u && distance.mean <= 3.0 * u && (!lse || distance.lse <= 4.0 * u),
        "{distance:?}"
    );
}

/// Returns a rank's shard of a batch of decodes. It has the tokens that the plan assigns to the
/// rank, in its own cache.
fn shard_of(batch: &Batch, parallel: ContextParallel, rank: u32) -> Batch {
    let page = batch.case.page_size as usize;
    let mut shard = batch.clone();
    shard.cache.fill(0xff);
    let whole = BlockTables::new(&batch.tables, batch.max_pages, batch.case.page_size).unwrap();
    // The shard has the number of pages of the whole cache, which is more than enough, in the
    // opposite order.
    shard.tables = batch
        .tables
        .iter()
        .map(|page| match usize::try_from(*page) {
            Ok(page) if page < batch.cache_layout.pages => {
                (batch.cache_layout.pages - 1 - page) as i32
            }
            _ => *page,
        })
        .collect();
    let tables = BlockTables::new(&shard.tables, batch.max_pages, batch.case.page_size).unwrap();
    let row = batch.cache_layout.row_stride;
    let place = |slot: i64| {
        let slot = slot as usize;
        slot / page * batch.cache_layout.page_stride + slot % page * row
    };
    for (index, request) in batch.requests.iter().enumerate() {
        // The step itself writes the new token's row.
        for position in 0..u64::from(request.kv - 1) {
            if parallel.rank_of(position) == rank {
                let from = place(whole.slot(index, position).unwrap());
                let to = place(
                    tables
                        .slot(index, parallel.local_position(position))
                        .unwrap(),
                );
                shard.cache[to..to + row].copy_from_slice(&batch.cache[from..from + row]);
            }
        }
    }
    shard.slots = tables
        .new_token_slots_on(&batch.requests, parallel, rank)
        .unwrap();
    shard.requests = batch
        .requests
        .iter()
        .map(|request| Request::new(1, parallel.local_len(request.kv, rank).unwrap()))
        .collect();
    shard
}

/// Makes requests of one new token. Some are so short that a rank holds no token of them.
fn decodes() -> Case {
    let lens = [1, 2, 16, 17, 700, 64, 1500, 33, 999];
    Case::new(16, &lens.map(|len| (1, len)))
}

/// Computes a rank's result from its own shard of the cache and from the other ranks' results, and
/// compares it with that of the whole on the rank's own GPU.
fn with_a_part_of_the_cache(rank: &Rank, interleave: u32) -> Outcome {
    let (device, communicator) = (&rank.device, &rank.communicator);
    let whole = &Batch::new(&decodes());
    let case = &whole.case;
    let expected = whole.run(&gpu_layer(device, case)).unwrap();
    let parallel = ContextParallel::new(RANKS as u32, interleave).unwrap();
    let shard = shard_of(whole, parallel, communicator.rank() as u32);
    let layer = gpu_layer(device, case);
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    shard.prepare(&layer, &mut workspace).unwrap();
    let mut engine = Engine::new(device, &shard).unwrap();
    let mut results =
        PartialResults::new(communicator, &case.config().problem, shard.tokens()).unwrap();
    // Two steps are run, since the second finds the state that the first left.
    for _ in 0..2 {
        engine
            .forward(&layer, &mut workspace, shard.tokens())
            .unwrap();
        let call = engine.call(shard.tokens()).unwrap();
        let lse = call.lse.expect("the engine asks for it");
        results.merge(communicator, call.out, lse).unwrap();
    }
    let given = engine.outcome(device).unwrap();
    close(given.distance(&expected, case), true);
    given
}

fn mixed() -> Case {
    Case::new(
        32,
        &[
            (1, 700),
            (3, 200),
            (70, 500),
            (12, 13),
            (1, 1500),
            (300, 900),
        ],
    )
}

/// Computes a rank's heads, and gathers the results of all ranks: `[ranks, T, H/ranks, V]`.
/// Compares them with those of all heads on the rank's own GPU.
fn with_a_part_of_the_heads(rank: &Rank) -> Vec<u8> {
    let (device, communicator) = (&rank.device, &rank.communicator);
    let whole = &Batch::new(&mixed());
    let expected = whole.run(&gpu_layer(device, &whole.case)).unwrap();
    let tokens = whole.tokens();
    // The rank has its heads of every token, and the weights' rows for these heads.
    let mut shard = whole.clone();
    shard.case.heads /= RANKS as u32;
    let at = communicator.rank();
    let row = whole.query.len() / tokens;
    let own = at * row / RANKS..(at + 1) * row / RANKS;
    shard.query = whole
        .query
        .chunks(row)
        .flat_map(|row| &row[own.clone()])
        .copied()
        .collect();
    let share = whole.weights.len() / RANKS;
    shard.weights = whole.weights[at * share..(at + 1) * share].to_vec();
    let layer = gpu_layer(device, &shard.case);
    let mut workspace = layer.workspace(&shard.case.limits()).unwrap();
    shard.prepare(&layer, &mut workspace).unwrap();
    let mut engine = Engine::new(device, &shard).unwrap();
    engine.forward(&layer, &mut workspace, tokens).unwrap();
    let bytes = engine.out.len();
    let mut all = device.allocate(RANKS * bytes).unwrap();
    communicator
        .all_gather(engine.out.bytes(), all.bytes_mut())
        .unwrap();
    let gathered = download(device, &all).unwrap();
    let given = joined(&gathered, &expected, tokens);
    close(given.distance(&expected, &whole.case), false);
    gathered
}

/// Reorders the gathered results to the layout of one GPU: `[T, H, V]`.
fn joined(gathered: &[u8], expected: &Outcome, tokens: usize) -> Outcome {
    let row = expected.out.len() / tokens / RANKS;
    let mut out = Vec::new();
    for token in 0..tokens {
        for rank in 0..RANKS {
            let at = (rank * tokens + token) * row;
            out.extend(&gathered[at..at + row]);
        }
    }
    Outcome {
        out,
        ..expected.clone()
    }
}

#[test]
#[ignore = "needs two Hopper GPUs and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn a_cache_over_two_gpus_is_one_cache() {
    // The lock is held to the end, since it also covers the ranks' devices.
    let _gpu = gpu();
    for interleave in [1, 16, 64] {
        let outcomes = in_threads(|rank| with_a_part_of_the_cache(rank, interleave));
        assert!(outcomes[0].out == outcomes[1].out && outcomes[0].lse == outcomes[1].lse);
    }
}

#[test]
#[ignore = "needs two Hopper GPUs and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn heads_over_two_gpus_are_all_heads() {
    // The lock is held to the end, since it also covers the ranks' devices.
    let _gpu = gpu();
    let gathered = in_threads(with_a_part_of_the_heads);
    assert!(gathered[0] == gathered[1]);
}

/// Checks a refusal, since NCCL itself would write past the shorter rank's memory.
#[test]
#[ignore = "needs two Hopper GPUs and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn ranks_of_other_lengths_are_refused_and_go_on() {
    // The lock is held to the end, since it also covers the ranks' devices.
    let _gpu = gpu();
    let messages = in_threads(|rank| {
        let (device, communicator) = (&rank.device, &rank.communicator);
        let at = communicator.rank();
        let gather = |bytes: usize| {
            let own = upload(device, &vec![at as u8; bytes]).unwrap();
            let mut all = device.allocate(RANKS * bytes).unwrap();
            communicator.all_gather(own.bytes(), all.bytes_mut())?;
            download(device, &all)
        };
        let apart = message(gather(64 * (1 + at)));
        let own = device.allocate(64).unwrap();
        let mut room = device.allocate(if at == 0 { 100 } else { 128 }).unwrap();
        let short = message(communicator.all_gather(own.bytes(), room.bytes_mut()));
        let together = gather(1 << 20).unwrap();
        assert!(together[..1 << 20].iter().all(|byte| *byte == 0));
        assert!(together[1 << 20..].iter().all(|byte| *byte == 1));
        (apart, short)
    });
    for (rank, (apart, _)) in messages.iter().enumerate() {
        let (own, other) = (64 * (1 + rank), 64 * (2 - rank));
        let expected = format!(
            "ranks: given all_gather of {own} bytes on rank {rank}, all_gather of {other} bytes on \
             rank {}, accepted the same call of the same extents on every rank",
            1 - rank
        );
        assert_eq!(*apart, expected);
    }
    assert_eq!(
        messages[0].1,
        "to: given 100 bytes, accepted 64 from each of 2 ranks"
    );
    assert!(
        messages[1]
            .1
            .contains("a call that the rank itself refuses on rank 0")
    );
}

#[test]
#[ignore = "needs two Hopper GPUs and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn ranks_of_other_problems_are_refused_and_go_on() {
    let _gpu = gpu();
    let messages = in_threads(|rank| {
        let (device, communicator) = (&rank.device, &rank.communicator);
        let at = communicator.rank();
        let problem = |heads| Case::new(heads, &[]).config().problem;
        let results = |heads, tokens| PartialResults::new(communicator, &problem(heads), tokens);
        let heads = message(results(16 * (1 + at as u32), 4));
        let room = message(results(16, 4 + at));
        let mut results = results(16, 4).unwrap();
        let mut merge = |tokens: usize| {
            let rows = 16 * tokens;
            let mut out = device.allocate(rows * 128 * 2).unwrap();
            let mut lse = device.allocate(4 * rows).unwrap();
            let layout = Layout::contiguous(DType::BF16, [tokens, 16, 128]);
            results.merge(
                communicator,
                TensorMut::new(out.bytes_mut(), layout)?,
                LseMut::new(lse.bytes_mut(), LseLayout::heads_first(16, tokens))?,
            )
        };
        let tokens = message(merge(2 + at));
        merge(3).unwrap();
        device.synchronize().unwrap();
        [heads, room, tokens]
    });
    for (rank, messages) in messages.iter().enumerate() {
        for (message, what) in messages.iter().zip(["results", "results", "merge"]) {
            let expected = format!("ranks: given {what} of ");
            assert!(message.starts_with(&expected), "rank {rank}: {message}");
        }
    }
}

/// Checks that the ranks' agreement is not captured, but the gather is.
#[test]
#[ignore = "needs a Hopper GPU and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn a_group_of_one_gathers_in_a_capture_as_without() {
    let gpu = &*gpu();
    let communicator = Communicator::new(gpu, 0, 1, GroupId::new().unwrap()).unwrap();
    let own = upload(gpu, &[5; 64]).unwrap();
    let mut all = gpu.allocate(64).unwrap();
    communicator
        .all_gather(own.bytes(), all.bytes_mut())
        .unwrap();
    assert_eq!(download(gpu, &all).unwrap(), [5; 64]);
    gpu.upload(&[0; 64], all.bytes_mut()).unwrap();
    let graph = gpu
        .capture(|_| communicator.all_gather(own.bytes(), all.bytes_mut()))
        .unwrap();
    assert_eq!(download(gpu, &all).unwrap(), [0; 64]);
    // SAFETY: buffers and group live, and only this stream uses them.
    unsafe { graph.replay() }.unwrap();
    assert_eq!(download(gpu, &all).unwrap(), [5; 64]);

    let second = on_new_stream(gpu);
    let theirs = second.allocate(64).unwrap();
    let refused = message(communicator.all_gather(theirs.bytes(), all.bytes_mut()));
    assert!(
        refused.starts_with("from: given memory of stream"),
        "{refused}"
    );
}

// Variables that tell a process its rank, and the folder through which the group's processes
// exchange files.
const RANK: &str = "MLA_TEST_RANK";
const FOLDER: &str = "MLA_TEST_FOLDER";
const TIMEOUT: Duration = Duration::from_secs(100);

/// Starts the program itself once per GPU, to run this same test.
#[test]
#[ignore = "needs two Hopper GPUs and NCCL: \
            cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn a_process_per_gpu_works_as_a_thread_does() {
    if let Ok(rank) = env::var(RANK) {
        let folder = env::var_os(FOLDER).expect("set beside the rank");
        return as_a_process(rank.parse().unwrap(), Path::new(&folder));
    }
    // The lock is held to the end, since it also covers the processes' devices.
    let _gpu = gpu();
    let folder = env::temp_dir().join(format!("mla-two-gpus-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (_, module) = module_path!().split_once("::").unwrap();
    let start = |rank: usize| {
        Command::new(env::current_exe().unwrap())
            .args(["--include-ignored", "--nocapture", "--exact"])
            .arg(format!(
                "{module}::a_process_per_gpu_works_as_a_thread_does"
            ))
            .env(RANK, rank.to_string())
            .env(FOLDER, &folder)
            .spawn()
            .unwrap()
    };
    let ended = wait(&mut (0..RANKS).map(start).collect::<Vec<_>>());
    let results = [0, 1].map(|rank| fs::read(folder.join(format!("result-{rank}"))));
    fs::remove_dir_all(&folder).unwrap();
    ended.unwrap();
    let [first, second] = results.map(Result::unwrap);
    assert!(!first.is_empty() && first == second);
}

/// Waits for all children. If one fails, ends the others, which would wait for it.
fn wait(children: &mut [Child]) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let states: Vec<_> = children.iter_mut().map(|c| c.try_wait().unwrap()).collect();
        if states.iter().all(|s| s.is_some_and(|s| s.success())) {
            return Ok(());
        }
        let failed = states.iter().flatten().any(|status| !status.success());
        if failed || start.elapsed() > TIMEOUT {
            for child in children {
                // A child that has already ended cannot be ended.
                let _ = child.kill();
                let _ = child.wait();
            }
            return Err(format!("after {:?}: {states:?}", start.elapsed()));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Stores the results of both divisions, on which all ranks have to agree.
fn as_a_process(rank: usize, folder: &Path) {
    let rank = Rank::join(rank, exchange(rank, folder));
    let given = with_a_part_of_the_cache(&rank, 16);
    let gathered = with_a_part_of_the_heads(&rank);
    let result = [given.out, given.lse, gathered].concat();
    let rank = rank.communicator.rank();
    fs::write(folder.join(format!("result-{rank}")), result).unwrap();
}

/// Returns the group that rank 0 makes. It is passed in a file that exists only when it is
/// complete.
fn exchange(rank: usize, folder: &Path) -> GroupId {
    let (draft, file) = (folder.join("draft"), folder.join("group"));
    if rank == 0 {
        let id = GroupId::new().unwrap();
        fs::write(&draft, id.to_bytes()).unwrap();
        fs::rename(&draft, &file).unwrap();
        return id;
    }
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < TIMEOUT, "rank 0 made no group");
        thread::sleep(Duration::from_millis(5));
    }
    GroupId::from_bytes(fs::read(&file).unwrap().try_into().unwrap())
}
