//! Sampled rows of the output against attention in f64.
//!
//! A row is one head's output for one token. It is computed anew from what the layer read: the
//! queries, the weights, the cache rows as they are stored, dequantised, and on the expanded path
//! the new rows as they were given, since that path does not read them back from the cache.

use std::ops::Range;

use fastrand::Rng;
use mla_runtime::backend::{DecodeStage, LayerConfig, PrefillStage};
use mla_runtime::device::Device;
use mla_runtime::dtype::DType;
use mla_runtime::layer::Workspace;
use mla_runtime::reference::{attend, decode_row};
use rayon::prelude::*;
use serde::Serialize;

use super::data::Data;
use super::progress::Progress;
use super::workload::Workload;
use crate::error::CliError;

/// How far the sampled rows of a phase are from the reference.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Errors {
    /// The rows that were compared.
    pub(crate) samples: usize,
    /// The largest difference of an element.
    pub(crate) max_absolute: f64,
    /// The largest |difference| / |reference| of a row, as vectors.
    pub(crate) max_relative: f64,
    /// 1 − cos of the angle between all rows and their references, as one vector each.
    pub(crate) cosine_difference: f64,
    /// What `max_relative` may be.
    pub(crate) tolerance: f64,
    /// Whether both are within their tolerances.
    pub(crate) pass: bool,
}

/// The errors of the two phases; `None` for one without tokens.
pub(crate) struct PhaseErrors {
    pub(crate) absorbed: Option<Errors>,
    pub(crate) expanded: Option<Errors>,
}

/// What a row's relative error may be.
///
/// In f16 and bf16 what counts is rounding to u, half the distance from 1 to the next number. A
/// score is a sum over a query or key that was rounded once, so with scores of a standard deviation
/// of about 2 a weight is off by 2u or so, at random from key to key; values, the attention's
/// output, and the product that follows are each rounded once more, which adds three times about u
/// at most. And each context chunk rounds the output once, at random: √chunks. That is some 5u in
/// all for a typical row; the worst of many rows, and the few whose values cancel, are allowed
/// three times as much.
///
/// In f32, where u is 2⁻²⁴, sums of hundreds to thousands of terms and the exponential count
/// instead, each with a few hundred u at worst.
fn tolerance(dtype: DType, chunks: usize) -> f64 {
    let rounding = 15.0 + 2.0 * (chunks as f64).sqrt();
    match dtype {
        DType::BF16 => rounding * 2f64.powi(-9),
        DType::F16 => rounding * 2f64.powi(-12),
        DType::F32 => 40.0 * rounding * 2f64.powi(-24),
    }
}

/// Compares `samples` rows of each phase, chosen at random beside the first and the last.
#[expect(
    clippy::too_many_arguments,
    reason = "each is another thing of the run"
)]
pub(crate) fn compare<P, B>(
    device: &P::Device,
    config: &LayerConfig,
    workload: &Workload,
    data: &Data<P::Device>,
    workspace: &Workspace<P, B>,
    samples: u32,
    seed: u32,
    progress: &Progress,
) -> Result<PhaseErrors, CliError>
where
    P: PrefillStage,
    B: DecodeStage<Device = P::Device>,
{
    let mut rng = Rng::with_seed(u64::from(seed) ^ 0x5eed);
    let chunks = workspace.context().chunks.len();
    let mut phase = |name: &str, requests: Range<usize>, chunks| {
        let tokens = workload.tokens_of(&requests);
        if tokens.is_empty() {
            return Ok(None);
        }
        let rows = choose(&mut rng, &tokens, config.problem.heads as usize, samples);
        let mut sums = Sums::default();
        for (done, of_request) in rows
            .chunk_by(|a, b| workload.request_of(a.0) == workload.request_of(b.0))
            .enumerate()
        {
            progress.step(format!("checking {name}: request {}", done + 1));
            compare_request(device, config, workload, data, of_request, &mut sums)?;
        }
        Ok::<_, CliError>(Some(sums.errors(tolerance(config.problem.dtype, chunks))))
    };
    Ok(PhaseErrors {
        absorbed: phase("decode", workload.absorbed.clone(), 0)?,
        expanded: phase("prefill", workload.expanded(), chunks)?,
    })
}

/// Different (token, head) pairs, in order.
fn choose(rng: &mut Rng, tokens: &Range<usize>, heads: usize, count: u32) -> Vec<(usize, usize)> {
    let all = tokens.len().saturating_mul(heads);
    let count = (count as usize).min(all);
    let mut rows =
        std::collections::BTreeSet::from([(tokens.start, 0), (tokens.end - 1, heads - 1)]);
    while rows.len() < count {
        rows.insert((rng.usize(tokens.clone()), rng.usize(0..heads)));
    }
    rows.into_iter().collect()
}

impl Workload {
    /// The request that a token belongs to.
    fn request_of(&self, token: usize) -> usize {
        self.token_starts.partition_point(|start| *start <= token) - 1
    }
}

/// Compares rows of tokens of one request.
fn compare_request<D: Device>(
    device: &D,
    config: &LayerConfig,
    workload: &Workload,
    data: &Data<D>,
    rows: &[(usize, usize)],
    sums: &mut Sums,
) -> Result<(), CliError> {
    let Some((first, _)) = rows.first() else {
        return Ok(());
    };
    let problem = &config.problem;
    let dims = problem.dims;
    let [latent, rope, nope, v] =
        [dims.latent, dims.head.rope, dims.head.nope, dims.head.v].map(|n| n as usize);
    let scale = f64::from(config.softmax_scale);
    let index = workload.request_of(*first);
    let request = workload.requests[index];
    let (context, start) = (request.context_len() as usize, workload.token_starts[index]);
    let reads_new_rows = workload.absorbed.contains(&index);

    // What the request's tokens attend to: page by page from the cache, and new rows as given.
    let layout = &data.cache_layout;
    let stored = if reads_new_rows {
        request.kv as usize
    } else {
        context
    };
    let tables = workload.tables()?;
    let mut keys: Vec<Vec<f64>> = Vec::with_capacity(request.kv as usize);
    let mut page = vec![0; layout.page_stride];
    for first in (0..stored).step_by(layout.page_size) {
        let slot = tables.slot(index, first as u64)? as usize;
        let start = slot / layout.page_size * layout.page_stride;
        let bytes = D::byte_range(D::bytes(&data.cache), start..start + page.len());
        device.download(bytes, &mut page)?;
        let count = layout.page_size.min(stored - first);
        keys.extend(
            page.chunks(layout.row_stride)
                .take(count)
                .map(|row| decode_row(layout.format, latent, rope, row, layout.scale.into())),
        );
    }
    for position in stored..request.kv as usize {
        let token = start + position - context;
        let mut row = data.latent.row(token, 0);
        row.extend(data.rope.row(token, 0));
        keys.push(row);
    }
    let latents: Vec<&[f64]> = keys.iter().map(|row| &row[..latent]).collect();
    let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();

    let compared: Vec<Compared> = rows
        .par_iter()
        .map(|&(token, head)| {
            // Since k_nope = c · W_UK, the score q_nope · k_nope is (q_nope · W_UK) · c, and
            // likewise for values: attention among latents, which both paths come to.
            let columns = head * (nope + v);
            let query = data.query.row(token, head);
            let mut absorbed = vec![0.0; latent];
            for (p, query) in query[..nope].iter().enumerate() {
                for (sum, weight) in absorbed.iter_mut().zip(data.weights.row(0, columns + p)) {
                    *sum += query * weight;
                }
            }
            absorbed.extend(&query[nope..]);
            let seen = context + token - start + 1;
            let (mean, _) = attend(&absorbed, &keys[..seen], &latents[..seen], scale);
            let expected: Vec<f64> = (0..v)
                .map(|j| {
                    let weights = data.weights.row(0, columns + nope + j);
                    weights.iter().zip(&mean).map(|(w, c)| w * c).sum()
                })
                .collect();
            let given = data.out.read(device, token, head)?;
            Ok(Compared::new(&given, &expected))
        })
        .collect::<Result<_, CliError>>()?;
    for compared in compared {
        sums.add(&compared);
    }
    Ok(())
}

/// One row and its reference.
struct Compared {
    max_absolute: f64,
    /// Sums of squares: of the difference, the row, the reference; and of their products.
    difference: f64,
    given: f64,
    expected: f64,
    product: f64,
}

impl Compared {
    fn new(given: &[f64], expected: &[f64]) -> Self {
        let sum = |of: &dyn Fn(f64, f64) -> f64| {
            let pairs = given.iter().zip(expected);
            pairs.map(|(given, expected)| of(*given, *expected)).sum()
        };
        let differences = given.iter().zip(expected).map(|(a, b)| (a - b).abs());
        Self {
            // A NaN counts as infinitely far.
            max_absolute: differences.fold(0.0, |most, difference| {
                if difference.is_nan() {
                    f64::INFINITY
                } else {
                    difference.max(most)
                }
            }),
            difference: sum(&|a, b| (a - b) * (a - b)),
            given: sum(&|a, _| a * a),
            expected: sum(&|_, b| b * b),
            product: sum(&|a, b| a * b),
        }
    }
}

/// What rows add up to.
#[derive(Default)]
struct Sums {
    samples: usize,
    max_absolute: f64,
    max_relative: f64,
    given: f64,
    expected: f64,
    product: f64,
}

impl Sums {
    fn add(&mut self, row: &Compared) {
        let relative = if row.difference == 0.0 {
            0.0
        } else {
            (row.difference / row.expected).sqrt()
        };
        self.samples += 1;
        self.max_absolute = self.max_absolute.max(row.max_absolute);
        // A NaN counts as infinitely far.
        let relative = if relative.is_nan() {
            f64::INFINITY
        } else {
            relative
        };
        self.max_relative = self.max_relative.max(relative);
        self.given += row.given;
        self.expected += row.expected;
        self.product += row.product;
    }

    fn errors(&self, tolerance: f64) -> Errors {
        let cosine_difference = 1.0 - self.product / (self.given * self.expected).sqrt();
        Errors {
            samples: self.samples,
            max_absolute: self.max_absolute,
            max_relative: self.max_relative,
            cosine_difference,
            tolerance,
            // An angle of at most the tolerance: 1 − cos α is α²/2 for small α.
            pass: self.max_relative <= tolerance
                && cosine_difference <= tolerance * tolerance / 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(given: &[f64], expected: &[f64]) -> Errors {
        let mut sums = Sums::default();
        sums.add(&Compared::new(given, expected));
        sums.errors(0.01)
    }

    #[test]
    fn errors_are_those_of_the_definitions() {
        let same = errors(&[3.0, 4.0], &[3.0, 4.0]);
        assert!(same.pass);
        assert_eq!((same.max_absolute, same.max_relative), (0.0, 0.0));
        let off = errors(&[3.0, 4.1], &[3.0, 4.0]);
        assert!(!off.pass);
        assert!((off.max_absolute - 0.1).abs() < 1e-12);
        assert!((off.max_relative - 0.02).abs() < 1e-12);
        let turned = errors(&[-4.0, 3.0], &[3.0, 4.0]);
        assert!((turned.cosine_difference - 1.0).abs() < 1e-12);
    }

    #[test]
    fn what_is_no_number_never_passes() {
        for given in [[f64::NAN, 1.0], [f64::INFINITY, 1.0], [0.0, 0.0]] {
            assert!(!errors(&given, &[1.0, 1.0]).pass, "{given:?}");
        }
        assert!(!errors(&[1.0, 1.0], &[0.0, 0.0]).pass);
    }

    #[test]
    fn rows_are_chosen_once_each_with_the_first_and_the_last() {
        let rows = choose(&mut Rng::with_seed(1), &(5..9), 3, 8);
        assert_eq!((rows.len(), rows[0], rows[7]), (8, (5, 0), (8, 2)));
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
        let all = choose(&mut Rng::with_seed(1), &(5..9), 3, 1000);
        assert_eq!(all.len(), 12);
        assert_eq!(choose(&mut Rng::with_seed(1), &(5..6), 1, 9), [(5, 0)]);
    }
}
