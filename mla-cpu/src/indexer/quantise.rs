//! Normalises, rotates and rounds index keys and queries to e4m3.

use rayon::prelude::*;

use crate::cache::check_slots;
use crate::rotary::TokenRotation;
use crate::view::{Elements, Places, scalars, with_element};
use crate::{Cpu, fp8};
use mla_runtime::Result;
use mla_runtime::indexer::{IndexKeys, IndexQueries};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{Rotary, TensorRef};

// The number of keys per task: enough work to outweigh the cost of passing a task to a thread.
const KEYS_PER_TASK: usize = 64;

pub(super) fn keys(cpu: &Cpu, config: &IndexerConfig, keys: IndexKeys<'_, Cpu>) -> Result<()> {
    let tokens = keys.check(config)?;
    let layout = *keys.cache.layout();
    let slots = scalars("slots", &keys.slots)?;
    check_slots(slots, layout.slots())?;
    let norm = Norm::new(&keys.norm, config)?;
    let finish = Finish::new(config, keys.rotary.as_ref(), tokens)?;
    let places = Places::<u8>::new(keys.cache.into_bytes(), [0; 3], [0; 3]);
    with_element!(keys.keys.dtype(), T => {
        let from = Elements::<T>::of("index keys", &keys.keys)?;
        cpu.install(|| {
            slots.par_iter().enumerate().with_min_len(KEYS_PER_TASK).for_each_init(
                || vec![0.0f32; layout.width],
                |key, (token, slot)| {
                    let Ok(slot) = usize::try_from(*slot) else {
                        return;
                    };
                    from.read_row(token, 0, key);
                    norm.apply(key);
                    finish.apply(token, key);
                    // SAFETY: `check_slots` found no slot twice, and the layout was checked to have
                    // pages that do not overlap: no other thread has these values or this scale.
                    let [values, to] = unsafe {
                        [
                            places.slice(layout.values_at(slot), layout.width),
                            places.slice(layout.scale_at(slot), 4),
                        ]
                    };
                    to.copy_from_slice(&quantise(key, values).to_ne_bytes());
                },
            );
        });
    });
    Ok(())
}

pub(super) fn queries(
    cpu: &Cpu,
    config: &IndexerConfig,
    from: IndexQueries<'_, Cpu>,
) -> Result<()> {
    let tokens = from.check(config)?;
    let [heads, width] = [config.heads, config.width].map(|n| n as usize);
    let finish = Finish::new(config, from.rotary.as_ref(), tokens)?;
    let scale = config.weight_scale();
    let mut weights = rows("index head weights", &from.weights)?;
    let values = &mut from.quantised[..tokens * heads * width];
    let scaled = Places::<f32>::of("scaled head weights", from.scaled_weights)?;
    with_element!(from.queries.dtype(), T => {
        let from = Elements::<T>::of("index queries", &from.queries)?;
        cpu.install(|| {
            values
                .par_chunks_exact_mut(heads * width)
                .zip(weights.par_chunks_exact_mut(heads))
                .enumerate()
                .for_each_init(
                    || vec![0.0f32; width],
                    |query, (token, (values, weights))| {
                        let heads = values.chunks_exact_mut(width).zip(weights).enumerate();
                        for (head, (values, weight)) in heads {
                            from.read_row(token, head, query);
                            finish.apply(token, query);
                            *weight *= scale * quantise(query, values);
                        }
                    },
                );
        });
    });
    for (token, weights) in weights.chunks_exact(heads).enumerate() {
        // SAFETY: only this thread has the tensor, which it borrowed mutably.
        unsafe { scaled.write_row(token, 0, weights) };
    }
    Ok(())
}

/// Returns the elements of a tensor as f32, row by row.
pub(super) fn rows(field: &'static str, tensor: &TensorRef<'_, Cpu>) -> Result<Vec<f32>> {
    let [outer, inner, width] = tensor.shape();
    let mut rows = vec![0.0; outer * inner * width];
    with_element!(tensor.dtype(), T => {
        let from = Elements::<T>::of(field, tensor)?;
        for (at, to) in rows.chunks_exact_mut(width).enumerate() {
            from.read_row(at / inner, at % inner, to);
        }
    });
    Ok(rows)
}

/// LayerNorm. Sums are in f64, in the order of the elements.
pub(super) struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    epsilon: f32,
}

impl Norm {
    pub(super) fn new(norm: &[TensorRef<'_, Cpu>; 2], config: &IndexerConfig) -> Result<Self> {
        Ok(Self {
            weight: rows("index norm weight", &norm[0])?,
            bias: rows("index norm bias", &norm[1])?,
            epsilon: config.epsilon,
        })
    }

    pub(super) fn apply(&self, row: &mut [f32]) {
        let count = row.len() as f64;
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        let deviations = row.iter().map(|x| f64::from(*x) - mean);
        let variance = deviations.map(|x| x * x).sum::<f64>() / count;
        let factor = 1.0 / (variance + f64::from(self.epsilon)).sqrt();
        for ((x, weight), bias) in row.iter_mut().zip(&self.weight).zip(&self.bias) {
            let normalised = (f64::from(*x) - mean) * factor;
            *x = (normalised * f64::from(*weight) + f64::from(*bias)) as f32;
        }
    }
}

/// The last steps for keys and queries: the rotation of the first values, and the Hadamard
/// transform.
pub(super) struct Finish<'a> {
    rotation: Option<TokenRotation<'a>>,
    rope: usize,
    hadamard: bool,
    // True if rows are rounded to bf16 before and after the transform. This applies to pools.
    rounds: bool,
}

impl<'a> Finish<'a> {
    pub(super) fn new(
        config: &IndexerConfig,
        rotary: Option<&Rotary<'a, Cpu>>,
        tokens: usize,
    ) -> Result<Self> {
        let rope = config.rope as usize;
        Ok(Self {
            rotation: rotary
                .map(|rotary| TokenRotation::new(rotary, tokens, rope))
                .transpose()?,
            rope,
            hadamard: config.hadamard,
            rounds: config.pool > 1,
        })
    }

    pub(super) fn apply(&self, token: usize, row: &mut [f32]) {
        if let Some(rotation) = &self.rotation {
            rotation.apply(token, &mut row[..self.rope]);
        }
        if self.rounds {
            round(row);
        }
        if self.hadamard {
            hadamard(row);
        }
        if self.rounds {
            round(row);
        }
    }
}

/// Applies the Hadamard transform in Sylvester's order, divided by √n. The number of values in
/// `row` must be a power of two.
fn hadamard(row: &mut [f32]) {
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let factor = (1.0 / (row.len() as f64).sqrt()) as f32;
    row.iter_mut().for_each(|x| *x *= factor);
}

/// Rounds a row to bf16.
fn round(row: &mut [f32]) {
    row.iter_mut()
        .for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
}

/// Rounds a row to e4m3 and returns its scale.
pub(super) fn quantise(row: &[f32], to: &mut [u8]) -> f32 {
    fp8::quantise(row, fp8::power_of_two_scale, to)
}
