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
use mla_runtime::device::Device;
use mla_runtime::layer::SelectedWorkspace;
use rayon::prelude::*;

use super::data::{Data, HostLists};
use super::deviation::{Deviation, Errors, choose, tolerance};
use super::step::Step;
use super::workload::Workload;
use crate::device::progress::Progress;
use crate::error::CliError;

/// Returns the error of the worst row, in roundings.
///
/// A score is a sum over a query or key that was rounded once. With scores of a standard deviation
/// of about 2, a weight is off by about 2u, at random from key to key. Values, the attention's
/// output, and the product that follows are each rounded once more. This adds at most three times
/// about u. Each context chunk rounds the output once, at random, which adds √chunks. Together that
/// is about 5u for a typical row. The worst of many rows, and rows whose values cancel, may have
/// three times that error.
fn roundings(chunks: usize) -> f64 {
    15.0 + 2.0 * (chunks as f64).sqrt()
}

/// Compares `samples` rows of each phase: the first, the last, and others at random. Returns the
/// errors of the absorbed and of the expanded path, `None` for a path without tokens.
pub fn compare<D: Device>(
    step: &Step<D>,
    data: &Data<D>,
    workspace: &SelectedWorkspace<D>,
    samples: u32,
    progress: &Progress,
) -> Result<[Option<Errors>; 2], CliError> {
    let mut rng = Rng::with_seed(u64::from(step.seed) ^ 0x5eed);
    let (workload, problem) = (&step.workload, step.layer.config().problem);
    let mut phase = |name: &str, requests: Range<usize>, chunks| {
        let tokens = workload.tokens_of(&requests);
        if tokens.is_empty() {
            return Ok(None);
        }
        let rows = choose(&mut rng, &tokens, problem.heads as usize, samples as usize);
        let mut deviation = Deviation::default();
        let of_requests =
            rows.chunk_by(|a, b| workload.request_of(a.0) == workload.request_of(b.0));
        for (done, of_request) in of_requests.enumerate() {
            progress.step(format!("checking {name}: request {}", done + 1));
            compare_request(step, data, of_request, &mut deviation)?;
        }
        let tolerance = tolerance(problem.dtype, roundings(chunks));
        Ok::<_, CliError>(Some(deviation.errors(tolerance)))
    };
    Ok([
        phase("decode", workload.absorbed.clone(), 0)?,
        phase("prefill", workload.expanded(), workspace.context().len())?,
    ])
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
    fn read<D: Device>(step: &Step<D>, data: &Data<D>, index: usize) -> Result<Self, CliError> {
        let workload = &step.workload;
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
        let mut rows = data
            .cache
            .rows(step.layer.device(), &numbers_of_pages, stored)?;
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
    step: &Step<D>,
    data: &Data<D>,
    rows: &[(usize, usize)],
    deviation: &mut Deviation,
) -> Result<(), CliError> {
    let (device, config, workload) = (step.layer.device(), step.layer.config(), &step.workload);
    let Some((first, _)) = rows.first() else {
        return Ok(());
    };
    let dims = config.problem.dims;
    let [latent, nope, v] = [dims.latent, dims.head.nope, dims.head.v].map(|n| n as usize);
    let scale = f64::from(config.softmax_scale);
    let index = workload.request_of(*first);
    let context = workload.requests[index].context_len() as usize;
    let start = workload.token_starts[index];
    let attended = Attended::read(step, data, index)?;

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
