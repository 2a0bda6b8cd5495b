//! The engine's attention before and after the port, over the nine kinds of step that engines make.

use candle_core::{DType, Device, Result, Tensor};
use candle_port::engine::{Batch, Config, PagedCache, Weights, noise};
use candle_port::{after, before};
use mla_runtime::model::MlaDims;

const CONFIG: Config = Config {
    hidden: 64,
    heads: 4,
    dims: MlaDims::R1,
    max_len: 128,
};
const PAGES: usize = 40;
const MAX_REQUESTS: usize = 8;
const MAX_ROWS: usize = 256;
const DRAFTS: usize = 3;

/// Returns the pages of each sequence. B shares the tokens of A's first two pages.
fn pages(sequence: char) -> Vec<usize> {
    let own = |first: usize| (0..6).map(move |at| (first + at * 7) % PAGES);
    match sequence {
        'B' => pages('A').into_iter().take(2).chain(own(1)).collect(),
        'A' => own(0).collect(),
        'C' => own(2).collect(),
        'D' => own(3).collect(),
        'E' => own(4).collect(),
        _ => own(5).collect(),
    }
}

/// A kind of step: sequences with their new and cached tokens, and the number of rows of its padded
/// batch.
struct Kind {
    name: &'static str,
    sequences: &'static [(char, usize, usize)],
    bucket: usize,
}

const fn kind(name: &'static str, sequences: &'static [(char, usize, usize)]) -> Kind {
    Kind {
        name,
        sequences,
        bucket: sequences.len(),
    }
}

const KINDS: [Kind; 9] = [
    kind("prompt", &[('A', 40, 0)]),
    kind("chunk", &[('A', 25, 40)]),
    kind("shared prefix", &[('B', 20, 32)]),
    kind("padded", &[('C', 37, 0), ('D', 5, 0), ('E', 18, 0)]),
    kind(
        "decode",
        &[
            ('A', 1, 65),
            ('B', 1, 52),
            ('C', 1, 37),
            ('D', 1, 5),
            ('E', 1, 18),
        ],
    ),
    Kind {
        bucket: MAX_REQUESTS,
        ..kind(
            "graph bucket",
            &[
                ('A', 1, 66),
                ('B', 1, 53),
                ('C', 1, 38),
                ('D', 1, 6),
                ('E', 1, 19),
            ],
        )
    },
    kind("drafts", &[('A', 4, 67), ('B', 4, 54), ('D', 4, 7)]),
    // For A two drafts were right, for B none, and for D all of them.
    kind(
        "rejected drafts",
        &[('A', 1, 69), ('B', 1, 55), ('D', 1, 11)],
    ),
    kind(
        "mixed",
        &[
            ('F', 21, 0),
            ('A', 1, 70),
            ('C', 30, 39),
            ('B', 3, 56),
            ('D', 4, 12),
        ],
    ),
];

impl Kind {
    fn batch(&self) -> Batch {
        let of = |part: fn(&(char, usize, usize)) -> usize| -> Vec<usize> {
            self.sequences.iter().map(part).collect()
        };
        let new = of(|sequence| sequence.1);
        Batch {
            max_len: new.iter().copied().max().unwrap_or(0),
            rows: self.bucket,
            new,
            cached: of(|sequence| sequence.2),
            block_tables: self.sequences.iter().map(|it| pages(it.0)).collect(),
        }
    }
}

/// Returns the outputs of all steps, without padding, in f32.
fn run(
    dtype: DType,
    device: &Device,
    mut forward: impl FnMut(&Tensor, &Batch, &PagedCache) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let cache = PagedCache::new(&CONFIG, PAGES, dtype, device)?;
    let step = |(number, kind): (usize, &Kind)| {
        let batch = kind.batch();
        let shape = [batch.rows, batch.max_len, CONFIG.hidden];
        // Hidden states have values of about 1.
        let hidden = (noise(100 + number as u64, &shape, device)? * 8.0)?.to_dtype(dtype)?;
        let out = forward(&hidden, &batch, &cache)?;
        let tokens = batch.new.iter().enumerate();
        let tokens = tokens.map(|(index, &new)| out.get(index)?.narrow(0, 0, new));
        let tokens = Tensor::cat(&tokens.collect::<Result<Vec<_>>>()?, 0)?;
        tokens.to_dtype(DType::F32)
    };
    KINDS.iter().enumerate().map(step).collect()
}

fn before(dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let layer = before::Attention::new(Weights::new(CONFIG, dtype, device)?);
    run(dtype, device, |hidden, batch, cache| {
        layer.forward(hidden, batch, cache)
    })
}

/// Runs the engine after the port. `told` may change a step before it is passed to the layer.
fn after(dtype: DType, device: &Device, told: impl Fn(&Batch) -> Batch) -> Result<Vec<Tensor>> {
    let steps = after::Steps::new(&CONFIG, dtype, device, [MAX_REQUESTS, MAX_ROWS, DRAFTS])?;
    let layer = after::Attention::new(Weights::new(CONFIG, dtype, device)?, &steps);
    run(dtype, device, |hidden, batch, cache| {
        steps.prepare(&told(batch))?;
        layer.forward(hidden, batch, cache, &steps)
    })
}

/// Returns the distance from the right result, relative to its size.
fn error(given: &Tensor, right: &Tensor) -> Result<f32> {
    let right = right.to_device(given.device())?;
    let apart = (given - &right)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
    Ok((apart / right.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt())
}

/// Compares the port with the engine's own attention in f32.
fn check(dtype: DType, device: &Device, accepted: f32) -> Result<()> {
    let right = before(DType::F32, &Device::Cpu)?;
    let (own, ported) = (before(dtype, device)?, after(dtype, device, Batch::clone)?);
    for (kind, ((right, own), ported)) in KINDS.iter().zip(right.iter().zip(&own).zip(&ported)) {
        let (own, ported) = (error(own, right)?, error(ported, right)?);
        println!(
            "{dtype:?} {}: engine {own:.1e}, ported {ported:.1e}",
            kind.name
        );
        // A NaN fails this check, too.
        assert!(
            ported <= accepted,
            "{}: {ported:.1e} > {accepted:.1e}",
            kind.name
        );
        assert!(
            own <= accepted,
            "{}: the engine's own, {own:.1e}",
            kind.name
        );
    }
    Ok(())
}

#[test]
fn the_same_in_f32() -> Result<()> {
    check(DType::F32, &Device::Cpu, 2e-6)
}

#[test]
fn the_same_in_bf16() -> Result<()> {
    check(DType::BF16, &Device::Cpu, 1e-2)
}

#[test]
fn a_step_that_is_told_wrong_shows() -> Result<()> {
    let right = before(DType::F32, &Device::Cpu)?;
    // Each context is shorter by a token, and a new token overwrites the last cached one.
    let given = after(DType::F32, &Device::Cpu, |batch| {
        let mut batch = batch.clone();
        for cached in &mut batch.cached {
            *cached = cached.saturating_sub(1);
        }
        batch
    })?;
    assert!(error(&given[0], &right[0])? <= 2e-6);
    assert!(error(&given[1], &right[1])? > 1e-2);
    Ok(())
}

#[cfg(any(feature = "sm80", feature = "sm90"))]
#[test]
#[ignore = "needs a GPU: cargo test -r -p candle-port --features sm90 -- --ignored, in mla-candle"]
fn the_same_on_a_gpu() -> Result<()> {
    check(DType::BF16, &Device::new_cuda_with_stream(0)?, 1e-2)
}
