//! Random steps, either right or with random faults. A refused step gives one error and writes
//! nothing. Any other step must write the results of the formulas in f64, and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fastrand::Rng;
use mla_runtime::batch::Request;
use mla_runtime::model::KvFormat;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{CacheLayout, LseLayout};

use crate::aligned::LIST;
use crate::cases;
use crate::reference::{self, Expected};
use crate::setup::{DIMS, HEADS, Prepared, Ran, Rotation, Setup};

const CASES: usize = 3000;

#[test]
fn random_steps() {
    attack(1);
}

/// Uses other steps each time. `MLA_ATTACK_SEED` repeats a run.
#[test]
fn other_random_steps() {
    attack(seed());
}

/// Returns the seed of `MLA_ATTACK_SEED`, or prints and returns a new one.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("MLA_ATTACK_SEED").map_or_else(
        |_| fastrand::u64(..),
        |seed| seed.parse().expect("MLA_ATTACK_SEED is a number"),
    );
    println!("MLA_ATTACK_SEED={seed}");
    seed
}

fn attack(seed: u64) {
    let faults = cases::all();
    let mut rng = Rng::with_seed(seed);
    let (mut refused, mut right) = (0, 0);
    for case in 0..CASES {
        let mut setup = random(&mut rng);
        let mut names = Vec::new();
        for _ in 0..rng.usize(0..3) {
            let (name, _, change) = &faults[rng.usize(..faults.len())];
            let mut changed = setup.clone();
            // Changes that need more requests panic here, and are skipped.
            if catch_unwind(AssertUnwindSafe(|| change(&mut changed))).is_ok() {
                setup = changed;
                names.push(name.as_str());
            }
        }
        if rng.u8(..) < 80 {
            names.push(disturb(&mut rng, &mut setup));
        }
        if rng.bool() {
            poison(&mut setup);
        }
        let at = |setup: &Setup| format!("seed {seed}, case {case}, {names:?}: {setup:#?}");
        let ran = catch_unwind(AssertUnwindSafe(|| setup.run_whole()));
        let Ok(ran) = ran else {
            panic!("a panic in {}", at(&setup));
        };
        match &ran.result {
            Err(error) => {
                refused += 1;
                let said = error.to_string();
                let is_one = said.contains(": given ") && said.contains(", accepted ");
                assert!(is_one, "{said}: {}", at(&setup));
                assert!(
                    !ran.touched(),
                    "refused after something was written: {said}: {}",
                    at(&setup)
                );
                assert!(
                    !names.is_empty(),
                    "a right step is refused: {said}: {}",
                    at(&setup)
                );
            }
            Ok(done) => {
                right += 1;
                if setup.prepared == Prepared::Another {
                    // The prepared step must have the number of tokens that the tensors have.
                    setup.requests.truncate(1);
                    (setup.slots, setup.dense_within) = (None, 0);
                }
                let expected = reference::expected(&setup, done.absorbed_tokens);
                if let Err(difference) = compare(&setup, &ran, &expected) {
                    panic!("{difference} in {}", at(&setup));
                }
            }
        }
    }
    println!("{right} right, {refused} refused");
    assert!(
        right > CASES / 4 && refused > CASES / 8,
        "{right} right, {refused} refused"
    );
}

/// Fails if an output differs from the formulas, or if anything except the outputs was written.
fn compare(setup: &Setup, ran: &Ran, expected: &Expected) -> Result<(), String> {
    let close = |given: f32, wanted: f64| {
        f64::from(given) == wanted
            || (f64::from(given) - wanted).abs() < 2e-4 * (1.0 + wanted.abs())
    };
    let wanted = expected.out.iter().flatten();
    let mut rest = ran.out.clone();
    for (index, (at, wanted)) in setup.outputs().zip(wanted).enumerate() {
        let given = ran.out[1][at];
        if !close(given, *wanted) {
            return Err(format!("output {index} is {given} for {wanted}"));
        }
        rest[0][at] = 0.0;
        rest[1][at] = 0.0;
    }
    same(&rest, "the output's memory")?;
    if let (Some(layout), Ok(done)) = (setup.lse, &ran.result) {
        let given = done.lse.as_ref().expect("it was asked for");
        for (token, heads) in expected.lse.iter().enumerate() {
            for (head, wanted) in heads.iter().enumerate() {
                let given = given[head * layout.row_stride + token];
                if !close(given, *wanted) {
                    return Err(format!("lse [{head}][{token}] is {given} for {wanted}"));
                }
            }
        }
    }
    let mut rest = ran.cache.clone();
    for (slot, row) in &expected.written {
        let first = reference::place(setup, *slot);
        for (k, wanted) in row.iter().enumerate() {
            let given = rest[1][first + k];
            if !close(given, *wanted) {
                return Err(format!("slot {slot} has {given} for {wanted} at {k}"));
            }
            rest[0][first + k] = 0.0;
            rest[1][first + k] = 0.0;
        }
    }
    same(&rest, "the cache's memory")
}

fn same([before, after]: &[Vec<f32>; 2], name: &str) -> Result<(), String> {
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match before.iter().zip(after).position(differs) {
        None => Ok(()),
        Some(at) => Err(format!(
            "{name} was written at {at}, which is none of its rows"
        )),
    }
}

/// Makes a step that must be right.
fn random(rng: &mut Rng) -> Setup {
    let mut setup = Setup::default();
    let page = *rng
        .choice([1, 2, 3, 4, 8, 16].iter())
        .expect("there are some");
    let is_sparse = rng.u8(..4) == 0;
    let query_len = match is_sparse {
        true => QueryLen::Ragged,
        false => *rng.choice(QueryLen::ALL).expect("there are some"),
    };
    let problem = &mut setup.config.problem;
    *problem = problem
        .with_page_size(page as u32)
        .with_query_len(query_len)
        .with_sparse(is_sparse);
    setup.aligned = rng.u8(..5) == 0;
    setup.limits.decode_query_len = if is_sparse { 8 } else { rng.usize(..5) };
    requests(rng, &mut setup);
    pages(rng, &mut setup, page);
    tensors(rng, &mut setup);
    if is_sparse {
        lists(rng, &mut setup);
    }
    if rng.u8(..5) == 0 {
        setup.rotation = Some(Rotation {
            width: DIMS.head.rope,
            positions: 64,
            fused: false,
        });
    }
    setup
}

/// Makes requests in the order that a layer requires, and limits for them.
fn requests(rng: &mut Rng, setup: &mut Setup) {
    let problem = setup.config.problem;
    let mut requests: Vec<Request> = (0..rng.usize(..5))
        .map(|_| {
            let q = rng.u32(1..8);
            Request::new(q, q + rng.u32(..20))
        })
        .collect();
    requests.sort_unstable_by_key(|request| request.q);
    // Padding comes first and has the query length of the absorbed path.
    let first = requests.first().map_or(1, |request| request.q);
    let max = match problem.query_len {
        QueryLen::Single => setup.limits.decode_query_len.min(1),
        _ => setup.limits.decode_query_len,
    };
    if first as usize <= max && rng.u8(..4) == 0 {
        requests.insert(0, Request::new(first, 0));
    }
    if rng.u8(..4) == 0 {
        requests.push(Request::new(0, rng.u32(..9)));
    }
    setup.threshold = (rng.bool()).then(|| rng.u32(..6));
    setup.max_len = (rng.u8(..4) == 0).then(|| rng.u32(..40));
    let tokens: u32 = requests.iter().map(|request| request.q).sum();
    let spare = rng.usize(..3);
    setup.limits.requests = requests.len().max(1) + spare;
    setup.limits.tokens = (tokens as usize).max(1) + spare;
    // A context chunk has at least a page of rows. Sparse steps without dense requests need no such
    // rows.
    let rows = [problem.page_size as usize, 64, 200];
    setup.limits.context_rows = match problem.sparse {
        true => 0,
        false => *rng.choice(rows.iter()).expect("there are some"),
    };
    setup.requests = requests;
}

/// Makes a cache. The tokens that a request writes are in pages of its own.
fn pages(rng: &mut Rng, setup: &mut Setup, page: usize) {
    let needed = |request: &Request| (request.kv as usize).div_ceil(page);
    let longest = setup.requests.iter().map(needed).max().unwrap_or(0).max(1);
    let all: usize = setup.requests.iter().map(needed).sum();
    setup.max_pages = longest + rng.usize(..2);
    setup.limits.pages_per_request = setup.max_pages + rng.usize(..2);
    setup.table_page = page as u32;
    let pages = all.max(1) + rng.usize(..3);
    let mut free: Vec<i32> = (0..pages as i32).collect();
    rng.shuffle(&mut free);
    setup.tables.clear();
    for request in &setup.requests {
        let own = free.split_off(free.len() - needed(request));
        setup.tables.extend(&own);
        let behind = [-7, i32::MIN, i32::MAX, 0];
        for _ in own.len()..setup.max_pages {
            setup.tables.push(behind[rng.usize(..behind.len())]);
        }
    }
    share(rng, setup, page);
    let layout = CacheLayout::contiguous(DIMS, KvFormat::F32, pages, page);
    let layout = layout.with_row_stride(layout.row_stride + 16 * rng.usize(..2));
    setup.cache = layout.with_page_stride(page * layout.row_stride + 16 * rng.usize(..3));
    setup.cache_bytes = pages * setup.cache.page_stride;
    setup.cache_offset = 16 * rng.usize(..2);
    if rng.u8(..4) == 0 {
        setup.slots = Some(slots(rng, setup));
    }
}

/// Lets a request read the first page of another one, if neither writes to it.
fn share(rng: &mut Rng, setup: &mut Setup, page: usize) {
    let is_read = |request: &Request| {
        request.kv > 0 && request.q > 0 && request.context_len() as usize >= page
    };
    let readers: Vec<usize> = (0..setup.requests.len())
        .filter(|at| is_read(&setup.requests[*at]))
        .collect();
    if let [first, .., last] = readers[..]
        && rng.bool()
    {
        setup.tables[last * setup.max_pages] = setup.tables[first * setup.max_pages];
    }
}

/// Returns the slots of the new tokens by the block table. A few of them are replaced by −1.
fn slots(rng: &mut Rng, setup: &Setup) -> Vec<i64> {
    let page = setup.table_page;
    let mut slots = Vec::new();
    for (index, request) in setup.requests.iter().enumerate() {
        for new in 0..request.q {
            let is_written = request.kv > 0 && rng.u8(..8) > 0;
            slots.push(if is_written {
                let position = request.kv - request.q + new;
                let entry = setup.tables[index * setup.max_pages + (position / page) as usize];
                i64::from(entry) * i64::from(page) + i64::from(position % page)
            } else {
                -1
            });
        }
    }
    slots
}

/// Makes tensors for the step's tokens. Some have gaps, and some begin at an offset.
fn tensors(rng: &mut Rng, setup: &mut Setup) {
    let tokens: usize = setup
        .requests
        .iter()
        .map(|request| request.q as usize)
        .sum();
    for view in [
        &mut setup.query,
        &mut setup.latent,
        &mut setup.rope,
        &mut setup.out,
    ] {
        let [_, heads, width] = view.layout.shape;
        view.shape([tokens, heads, width]);
        view.offset = 16 * rng.usize(..2);
        view.layout.strides[0] += 4 * rng.usize(..3);
        if rng.u8(..4) == 0 {
            view.bytes = view.layout.span_bytes().map(|bytes| bytes + 400);
        }
    }
    let row_stride = tokens + rng.usize(..3);
    setup.lse = rng.bool().then(|| LseLayout {
        row_stride,
        ..LseLayout::heads_first(HEADS, tokens)
    });
    setup.lse_bytes = 4 * HEADS * row_stride;
}

/// Makes lists with slots of any token, and with slots outside the cache.
fn lists(rng: &mut Rng, setup: &mut Setup) {
    let tokens: usize = setup
        .requests
        .iter()
        .map(|request| request.q as usize)
        .sum();
    let width = rng.usize(1..=LIST as usize);
    let slots = setup.cache.pages * setup.cache.page_size;
    setup.slot_lists = Some((width, width * tokens));
    setup.list_entries = (0..(width * tokens).max(1))
        .map(|_| match rng.u8(..8) {
            0 => -1,
            1 => *rng
                .choice([i32::MIN, i32::MAX, slots as i32].iter())
                .expect("there are some"),
            _ => rng.i32(0..slots as i32),
        })
        .collect();
    setup.slot_counts = (rng.u8(..4) == 0).then_some(tokens);
    if rng.u8(..3) == 0 {
        setup.dense_within = rng.u32(0..=width as u32);
    }
}

/// Fills the cache with NaN except where a step may read: in the pages of its requests, and in
/// listed slots.
fn poison(setup: &mut Setup) {
    let page = setup.cache.page_size;
    let strides = setup.cache.page_stride.max(setup.cache.row_stride);
    if page == 0 || strides > setup.cache_bytes {
        return;
    }
    let mut slots: Vec<usize> = Vec::new();
    let rows = setup.tables.chunks(setup.max_pages.max(1));
    for (request, row) in setup.requests.iter().zip(rows) {
        let pages = row.iter().take((request.kv as usize).div_ceil(page));
        let pages = pages.filter_map(|entry| usize::try_from(*entry).ok());
        slots.extend(pages.flat_map(|entry| entry * page..(entry + 1) * page));
    }
    if setup.slot_lists.is_some() {
        let listed = setup.list_entries.iter();
        slots.extend(listed.filter_map(|slot| usize::try_from(*slot).ok()));
    }
    slots.retain(|slot| *slot < setup.cache.pages * page);
    slots.sort_unstable();
    slots.dedup();
    let width = DIMS.row() as usize;
    let rows = slots.iter().map(|slot| reference::place(setup, *slot));
    setup.cache_numbers = Some(rows.map(|first| first..first + width).collect());
}

/// Changes a setup with a 32-bit number or a small number.
type Fault = fn(&mut Rng, &mut Setup, u32, usize);

/// Lists faults in the data that an engine makes anew for each step. An entry may also leave the
/// data valid.
macro_rules! faults {
    ($($name:literal, $fault:expr;)*) => {
        const FAULTS: &[(&str, Fault)] = &[$(($name, $fault)),*];
    };
}

faults! {
    "new tokens", |rng, s, number, _| pick(rng, &mut s.requests, |request| request.q = number);
    "tokens", |rng, s, number, _| pick(rng, &mut s.requests, |request| request.kv = number);
    "order", |rng, s, _, _| rng.shuffle(&mut s.requests);
    "page", |rng, s, number, _| pick(rng, &mut s.tables, |page| *page = number as i32);
    "pages of a row", |_, s, _, small| s.max_pages = small;
    "slot", |rng, s, number, _| {
        let slots = s.slots.as_deref_mut().unwrap_or_default();
        pick(rng, slots, |slot| *slot = i64::from(number) - 2);
    };
    "rows", |_, s, _, small| s.limits.context_rows = small;
    "query length of decodes", |_, s, _, small| s.limits.decode_query_len = small;
    "pages of a request", |_, s, _, small| s.limits.pages_per_request = small;
    "width of lists", |_, s, _, small| s.slot_lists = s.slot_lists.map(|lists| (small, lists.1));
    "lists", |_, s, _, small| s.slot_lists = s.slot_lists.map(|lists| (lists.0, small));
    "strides", |rng, s, _, small| {
        let mut views = [&mut s.query, &mut s.latent, &mut s.rope, &mut s.out];
        let axis = rng.usize(..3);
        pick(rng, &mut views, |view| view.layout.strides[axis] = small);
    };
    "pages of the cache", |_, s, _, small| s.cache.pages = small;
    "dense requests", |_, s, number, _| s.dense_within = number;
    "workspace", |rng, s, _, _| {
        let prepared = [Prepared::Nothing, Prepared::Refused, Prepared::OtherProblem];
        s.prepared = prepared[rng.usize(..prepared.len())];
    };
}

/// Changes one of the items, if there are any.
fn pick<T>(rng: &mut Rng, items: &mut [T], change: impl FnOnce(&mut T)) {
    if !items.is_empty() {
        change(&mut items[rng.usize(..items.len())]);
    }
}

fn disturb(rng: &mut Rng, setup: &mut Setup) -> &'static str {
    const MAX: u32 = u32::MAX;
    let numbers = [0, 1, 2, 3, 7, 8, 16, 63, 64, MAX - 1, MAX, 1 << 31];
    let (number, small) = (numbers[rng.usize(..numbers.len())], rng.usize(..20));
    let (name, fault) = FAULTS[rng.usize(..FAULTS.len())];
    fault(rng, setup, number, small);
    name
}
