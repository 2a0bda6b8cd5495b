//! The layer over two GPUs, one thread for each: the cache split, and the heads split.

use std::sync::Barrier;

use mla_kernels::Cuda;
use mla_kernels::context_parallel::{Communicator, GroupId, PartialResults};
use mla_runtime::batch::Request;
use mla_runtime::device::Device;
use mla_runtime::plan::parallel::ContextParallel;
use mla_runtime::plan::slots::BlockTables;

use super::batch::{Batch, Case, Distance, Engine, Outcome, gpu_layer};
use crate::common::{download, gpu};

const RANKS: usize = 2;

/// Runs `work` as each rank of a group, in threads of this process.
fn as_ranks<T: Send>(work: impl Fn(&Cuda, &Communicator, usize) -> T + Sync) -> Vec<T> {
    let id = GroupId::new().unwrap();
    let together = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (work, together) = (&work, &together);
                scope.spawn(move || {
                    let device = Cuda::new(rank).unwrap();
                    let communicator = Communicator::new(&device, rank, RANKS, id).unwrap();
                    let result = work(&device, &communicator, rank);
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
    // Parts are rounded once more each, and merged.
    let u = 2f64.powi(-9);
    assert!(
        distance.worst <= 8.0 * u && distance.mean <= 3.0 * u && (!lse || distance.lse <= 4.0 * u),
        "{distance:?}"
    );
}

/// The part of a batch of decodes that a rank has: its tokens, dealt by the plan, in a cache of its own.
fn part_of(batch: &Batch, parallel: ContextParallel, rank: u32) -> Batch {
    let page = batch.case.page_size as usize;
    let mut part = batch.clone();
    part.cache.fill(0xff);
    let whole = BlockTables::new(&batch.tables, batch.max_pages, batch.case.page_size).unwrap();
    // As many pages as the whole has are more than enough, in the opposite order.
    part.tables = batch
        .tables
        .iter()
        .map(|page| match usize::try_from(*page) {
            Ok(page) if page < batch.cache_layout.pages => {
                (batch.cache_layout.pages - 1 - page) as i32
            }
            _ => *page,
        })
        .collect();
    let tables = BlockTables::new(&part.tables, batch.max_pages, batch.case.page_size).unwrap();
    let row = batch.cache_layout.row_stride;
    let place = |slot: i64| {
        let slot = slot as usize;
        slot / page * batch.cache_layout.page_stride + slot % page * row
    };
    for (index, request) in batch.requests.iter().enumerate() {
        // The new token's row is written by the step itself.
        for position in 0..u64::from(request.kv - 1) {
            if parallel.rank_of(position) == rank {
                let from = place(whole.slot(index, position).unwrap());
                let to = place(
                    tables
                        .slot(index, parallel.local_position(position))
                        .unwrap(),
                );
                part.cache[to..to + row].copy_from_slice(&batch.cache[from..from + row]);
            }
        }
    }
    part.slots = tables
        .new_token_slots_on(&batch.requests, parallel, rank)
        .unwrap();
    part.requests = batch
        .requests
        .iter()
        .map(|request| Request {
            q: 1,
            kv: parallel.local_len(request.kv, rank).unwrap(),
        })
        .collect();
    part
}

#[test]
#[ignore = "needs two Hopper GPUs and NCCL: cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn a_cache_over_two_gpus_is_one_cache() {
    // Also requests so short that a rank holds nothing of them.
    let lens = [1, 2, 16, 17, 700, 64, 1500, 33, 999];
    let case = Case::new(16, &lens.map(|len| (1, len)));
    let whole = Batch::new(&case);
    // Held to the end: the ranks' devices are this test's turn too.
    let gpu = gpu();
    let expected = whole.run(&gpu_layer(&gpu, &case)).unwrap();
    for interleave in [1, 16, 64] {
        let parallel = ContextParallel::new(RANKS as u32, interleave).unwrap();
        let outcomes = as_ranks(|device, communicator, rank| {
            let part = part_of(&whole, parallel, rank as u32);
            let layer = gpu_layer(device, &case);
            let mut workspace = layer.workspace(&case.limits()).unwrap();
            workspace.prepare(&layer, &part.step()).unwrap();
            let mut engine = Engine::new(device, &part).unwrap();
            let mut results =
                PartialResults::new(communicator, &case.config().problem, part.tokens()).unwrap();
            // Twice, since the second step finds what the first left.
            for _ in 0..2 {
                engine
                    .forward(&layer, &mut workspace, part.tokens())
                    .unwrap();
                let call = engine.call(part.tokens()).unwrap();
                let lse = call.lse.expect("the engine asks for it");
                results.merge(communicator, call.out, lse).unwrap();
            }
            engine.outcome(device).unwrap()
        });
        assert!(outcomes[0].out == outcomes[1].out && outcomes[0].lse == outcomes[1].lse);
        let distance = outcomes[0].distance(&expected, &case);
        println!("interleave {interleave}: {distance:?}");
        close(distance, true);
    }
}

#[test]
#[ignore = "needs two Hopper GPUs and NCCL: cargo test --release --features sm90,nccl --test gpu -- --include-ignored two_gpus"]
fn heads_over_two_gpus_are_all_heads() {
    let case = Case::new(
        32,
        &[
            (1, 700),
            (3, 200),
            (70, 500),
            (12, 13),
            (1, 1500),
            (300, 900),
        ],
    );
    let whole = Batch::new(&case);
    // Held to the end: the ranks' devices are this test's turn too.
    let gpu = gpu();
    let expected = whole.run(&gpu_layer(&gpu, &case)).unwrap();
    let half = Case {
        heads: case.heads / RANKS as u32,
        ..case.clone()
    };
    let tokens = whole.tokens();
    let gathered = as_ranks(|device, communicator, rank| {
        // The rank's heads of every token, and their rows of the weights.
        let mut part = whole.clone();
        part.case = half.clone();
        let row = whole.query.len() / tokens;
        let own = rank * row / RANKS..(rank + 1) * row / RANKS;
        part.query = whole
            .query
            .chunks(row)
            .flat_map(|row| &row[own.clone()])
            .copied()
            .collect();
        let share = whole.weights.len() / RANKS;
        part.weights = whole.weights[rank * share..(rank + 1) * share].to_vec();
        let layer = gpu_layer(device, &half);
        let mut workspace = layer.workspace(&half.limits()).unwrap();
        workspace.prepare(&layer, &part.step()).unwrap();
        let mut engine = Engine::new(device, &part).unwrap();
        engine.forward(&layer, &mut workspace, tokens).unwrap();
        let bytes = engine.out.len();
        let mut all = device.allocate(RANKS * bytes).unwrap();
        communicator
            .all_gather(engine.out.bytes(), all.bytes_mut())
            .unwrap();
        download(device, &all).unwrap()
    });
    assert!(gathered[0] == gathered[1]);
    // From [ranks, T, H/2, V] to [T, H, V].
    let row = expected.out.len() / tokens / RANKS;
    let mut out = Vec::new();
    for token in 0..tokens {
        for rank in 0..RANKS {
            let at = (rank * tokens + token) * row;
            out.extend(&gathered[0][at..at + row]);
        }
    }
    let given = Outcome {
        out,
        ..expected.clone()
    };
    close(given.distance(&expected, &case), false);
}
