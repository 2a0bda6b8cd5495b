//! Compares sampled rows of the output with attention in f64.
//!
//! A row is one head's output for one token. It is computed again from what the layer read: the
//! queries, the weights, and the cache rows as they are stored, dequantised. On the expanded path
//! the new rows are used as they were given, since that path does not read them back from the
//! cache.

use std::collections::HashMap;
use std::ops::Range;

use fastrand::Rng;
use mla_conformance::reference::attend;
use mla_runtime::backend::{DecodeStage, LayerConfig, PrefillStage};
use mla_runtime::device::Device;
use mla_runtime::layer::Workspace;
use mla_runtime::model::DType;
use rayon::prelude::*;
use serde::Serialize;

use super::data::{Data, HostLists};
use super::deviation::{self, Deviation, choose, worst};
use super::workload::Workload;
use crate::device::progress::Progress;
use crate::error::CliError;

/// The errors of the sampled rows of a phase against the reference.
#[derive(Clone, Copy, Serialize)]
pub struct Errors {
    /// The rows that were compared.
    pub samples: usize,
    /// The largest difference of an element.
    pub max_absolute: f64,
    /// The largest |difference| / |reference| of a row, as vectors.
    pub max_relative: f64,
    /// 1 − cos of the angle between all rows, as one vector, and their references, as another.
    pub cosine_difference: f64,
    /// The maximum for `max_relative`.
    pub tolerance: f64,
    /// True if both errors are within their tolerances.
    pub pass: bool,
}

impl Errors {
    fn new(deviation: &Deviation, tolerance: f64) -> Self {
        Self {
            samples: deviation.rows,
            max_absolute: deviation.max_absolute,
            max_relative: deviation.max_relative,
            cosine_difference: deviation.cosine_difference(),
            tolerance,
            pass: deviation.is_within(tolerance),
        }
    }
}

impl deviation::Errors {
    /// Combines the errors of a layer's paths.
    pub fn of_paths(paths: [Option<Errors>; 2]) -> Self {
        let paths: Vec<_> = paths.into_iter().flatten().collect();
        let max = |of: fn(&Errors) -> f64| paths.iter().map(of).fold(0.0, worst);
        Self {
            rows: paths.iter().map(|path| path.samples).sum(),
            relative: max(|path| path.max_relative),
            cosine_difference: max(|path| path.cosine_difference),
            lse: None,
            tolerance: max(|path| path.tolerance),
            pass: !paths.is_empty() && paths.iter().all(|path| path.pass),
        }
    }
}

/// The errors of the two phases, `None` for a phase without tokens.
pub struct PhaseErrors {
    pub absorbed: Option<Errors>,
    pub expanded: Option<Errors>,
}

/// Returns the tolerance of a row's relative error.
///
/// In f16 and bf16 the errors are those of rounding to u, half the distance from 1 to the next
/// number. A score is a sum over a query or key that was rounded once. With scores of a standard
/// deviation of about 2, a weight is off by about 2u, at random from key to key. Values, the
/// attention's output, and the product that follows are each rounded once more. This adds at most
/// three times about u. Each context chunk rounds the output once, at random, which adds √chunks.
/// Together that is about 5u for a typical row. The worst of many rows, and rows whose values
/// cancel, may have three times that error.
///
/// In f32, where u is 2⁻²⁴, errors come from sums of hundreds to thousands of terms and from the
/// exponential. Each gives a few hundred u at worst.
fn tolerance(dtype: DType, chunks: usize) -> f64 {
    let rounding = 15.0 + 2.0 * (chunks as f64).sqrt();
    match dtype {
        DType::BF16 => rounding * 2f64.powi(-9),
        DType::F16 => rounding * 2f64.powi(-12),
        DType::F32 => 40.0 * rounding * 2f64.powi(-24),
    }
}

/// Compares `samples` rows of each phase: the first, the last, and others at random.
#[expect(
    clippy::too_many_arguments,
    reason = "each is another thing of the run"
)]
pub fn compare<P, B>(
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
    let chunks = workspace.context().len();
    let mut phase = |name: &str, requests: Range<usize>, chunks| {
        let tokens = workload.tokens_of(&requests);
        if tokens.is_empty() {
            return Ok(None);
        }
        let rows = choose(
            &mut rng,
            &tokens,
            config.problem.heads as usize,
            samples as usize,
        );
        let mut deviation = Deviation::default();
        for (done, of_request) in rows
            .chunk_by(|a, b| workload.request_of(a.0) == workload.request_of(b.0))
            .enumerate()
        {
            progress.step(format!("checking {name}: request {}", done + 1));
            compare_request(device, config, workload, data, of_request, &mut deviation)?;
        }
        Ok::<_, CliError>(Some(Errors::new(
            &deviation,
            tolerance(config.problem.dtype, chunks),
        )))
    };
    Ok(PhaseErrors {
        absorbed: phase("decode", workload.absorbed.clone(), 0)?,
        expanded: phase("prefill", workload.expanded(), chunks)?,
    })
}

impl Workload {
    /// Returns the request that a token belongs to.
    pub fn request_of(&self, token: usize) -> usize {
        self.token_starts.partition_point(|start| *start <= token) - 1
    }
}

/// The rows that the tokens of a request attend to.
struct Attended {
    /// Latent and rotary part of each token.
    rows: Vec<Vec<f64>>,
    /// The index of each cache page among the request's pages.
    pages: HashMap<usize, usize>,
}

impl Attended {
    /// Reads the rows page by page from the cache. New rows are used as given, unless the device
    /// also reads them from the cache.
    fn read<D: Device>(
        device: &D,
        workload: &Workload,
        data: &Data<D>,
        index: usize,
    ) -> Result<Self, CliError> {
        let request = workload.requests[index];
        let (context, start) = (request.context_len() as usize, workload.token_starts[index]);
        let layout = &data.cache.layout;
        let stored = match workload.absorbed.contains(&index) {
            true => request.kv as usize,
            false => context,
        };
        let tables = workload.tables()?;
        let numbers_of_pages = (0..stored)
            .step_by(layout.page_size)
            .map(|first| Ok(tables.slot(index, first as u64)? as usize / layout.page_size))
            .collect::<Result<Vec<usize>, CliError>>()?;
        let mut rows = data.cache.rows(device, &numbers_of_pages, stored)?;
        let nth = numbers_of_pages.iter().enumerate();
        let pages = nth
            .map(|(nth, page)| (*page, nth * layout.page_size))
            .collect();
        for position in stored..request.kv as usize {
            let token = workload.row_of(index, start + position - context);
            let mut row = data.latent.row(token, 0);
            row.extend(data.rope.row(token, 0));
            rows.push(row);
        }
        Ok(Self { rows, pages })
    }

    /// Returns the positions that a token attends to: all that it sees, or those on its list.
    fn positions(
        &self,
        lists: Option<&HostLists>,
        token: usize,
        seen: usize,
        page_size: usize,
    ) -> Vec<usize> {
        match lists {
            None => (0..seen).collect(),
            Some(lists) => positions(&self.pages, lists.of(token), page_size)
                .filter(|position| *position < seen)
                .collect(),
        }
    }
}

/// Compares rows of the tokens of one request.
fn compare_request<D: Device>(
    device: &D,
    config: &LayerConfig,
    workload: &Workload,
    data: &Data<D>,
    rows: &[(usize, usize)],
    deviation: &mut Deviation,
) -> Result<(), CliError> {
    let Some((first, _)) = rows.first() else {
        return Ok(());
    };
    let dims = config.problem.dims;
    let [latent, nope, v] = [dims.latent, dims.head.nope, dims.head.v].map(|n| n as usize);
    let scale = f64::from(config.softmax_scale);
    let index = workload.request_of(*first);
    let context = workload.requests[index].context_len() as usize;
    let start = workload.token_starts[index];
    let attended = Attended::read(device, workload, data, index)?;

    let compared: Vec<(Vec<f64>, Vec<f64>)> = rows
        .par_iter()
        .map(|&(token, head)| {
            // Since k_nope = c · W_UK, the score q_nope · k_nope is (q_nope · W_UK) · c. The same
            // holds for values. Both paths are therefore equal to attention among latents.
            let columns = head * (nope + v);
            let own_row = workload.row_of(index, token);
            let query = data.query.row(own_row, head);
            let mut absorbed = vec![0.0; latent];
            for (p, query) in query[..nope].iter().enumerate() {
                for (sum, weight) in absorbed.iter_mut().zip(data.weights.row(0, columns + p)) {
                    *sum += query * weight;
                }
            }
            absorbed.extend(&query[nope..]);
            let seen = context + token - start + 1;
            let page_size = data.cache.layout.page_size;
            let (keys, latents): (Vec<&[f64]>, Vec<&[f64]>) = attended
                .positions(data.lists.as_ref(), token, seen, page_size)
                .into_iter()
                .map(|at| (&attended.rows[at][..], &attended.rows[at][..latent]))
                .unzip();
            let (mean, _) = attend(&absorbed, &keys, &latents, scale);
            let expected: Vec<f64> = (0..v)
                .map(|j| {
                    let weights = data.weights.row(0, columns + nope + j);
                    weights.iter().zip(&mean).map(|(w, c)| w * c).sum()
                })
                .collect();
            let given = data.out.read(device, own_row, head)?;
            Ok((given, expected))
        })
        .collect::<Result<_, CliError>>()?;
    for (given, expected) in compared {
        deviation.add(&given, &expected);
    }
    Ok(())
}

/// Returns the positions of a list's slots.
fn positions(
    pages: &HashMap<usize, usize>,
    list: &[i32],
    page_size: usize,
) -> impl Iterator<Item = usize> {
    list.iter().filter_map(move |slot| {
        let slot = usize::try_from(*slot).ok()?;
        Some(pages.get(&(slot / page_size))? + slot % page_size)
    })
}
