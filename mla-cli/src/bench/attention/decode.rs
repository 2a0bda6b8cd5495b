//! Absorbed attention to a paged cache.

use mla_conformance::reference::attend;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBatch, DecodeCall, DecodeStage, Query, SelectedDecode, SlotLists,
};
use mla_runtime::batch::Request;
use mla_runtime::device::Device;
use mla_runtime::select::Registry;
use mla_runtime::spec::QueryFormat;
use mla_runtime::tensor::{ArrayRef, BlockTable};
use rayon::prelude::*;

use super::outcome::{Outcome, chosen, request_of};
use crate::bench::lists::Lists;
use crate::bench::work::Attention;
use crate::device::memory::{CacheBuffer, upload};
use crate::device::tensor::{Tensor, filled_cache};
use crate::error::CliError;
use crate::run::deviation::Errors;
use crate::run::workload::block_tables;

/// Absorbed attention.
pub struct Decode<'a, D: Device> {
    what: &'a Attention,
    pub backend: SelectedDecode<D>,
    state: <SelectedDecode<D> as DecodeStage>::State,
    metadata: <SelectedDecode<D> as DecodeStage>::Metadata,
    query: Tensor<D>,
    /// One cache for each layer.
    caches: Vec<CacheBuffer<D>>,
    table: Vec<i32>,
    /// The block table, the lengths and the starts of the queries.
    arrays: [D::Buffer; 3],
    /// The query lengths of the requests, and their total lengths.
    host_lens: [Vec<u32>; 2],
    /// The positions in each query token's list, and the lists of slots. Both are only for sparse
    /// attention.
    positions: Vec<Vec<u32>>,
    slots: Option<D::Buffer>,
    outcome: Outcome<D>,
}

impl<'a, D: Device> Decode<'a, D> {
    pub fn new(
        what: &'a Attention,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Self, CliError> {
        let problem = &what.config.problem;
        let (dims, dtype) = (problem.dims, problem.dtype);
        let backend = registry.instantiate_decode(what.backend, device, &what.config)?;
        let limits = what.limits();
        let (tokens, heads) = (what.tokens(), problem.heads as usize);
        let row = dims.row() as usize;

        let (table, _) = block_tables(&what.requests, problem.page_size, what.seed);
        let pages: usize = what.requests.iter().map(|r| what.pages_of(r)).sum();
        let (seed, deviation) = (what.seed, what.deviation);
        let caches = (0..what.layers as u64)
            .map(|layer| filled_cache(device, problem, pages, seed + 2 + 2 * layer, deviation))
            .collect::<Result<_>>()?;
        let lens: Vec<i32> = what.requests.iter().map(|r| r.kv as i32).collect();
        let positions = what.positions();
        let slots = match what.lists {
            None => None,
            Some(lists) => {
                let slots = slots_of(what, lists, &positions, &table);
                Some(upload(device, &slots)?)
            }
        };
        let host_lens = [|r: &Request| r.q, |r: &Request| r.kv]
            .map(|of| what.requests.iter().map(of).collect());
        let mut work = Self {
            positions,
            slots,
            host_lens,
            state: backend.state(device, &limits)?,
            metadata: backend.metadata(device, &limits)?,
            query: Tensor::random(device, seed + 1, dtype, [tokens, heads, row], deviation)?,
            caches,
            arrays: [
                upload(device, &table)?,
                upload(device, &lens)?,
                upload(device, &what.starts(|r| r.q))?,
            ],
            table,
            outcome: Outcome::new(device, dtype, [tokens, heads, dims.latent as usize])?,
            what,
            backend,
        };
        work.prepare(device)?;
        Ok(work)
    }

    pub fn prepare(&mut self, device: &D) -> Result<()> {
        let batch = batch(self.what, &self.arrays)?;
        let [query_lens, lens] = &self.host_lens;
        let batch = match self.backend.spec().plans_on_host {
            true => batch.with_host(query_lens, lens),
            false => batch,
        };
        self.backend
            .prepare(device, &batch, &mut self.state, &mut self.metadata)
    }

    pub fn attend(&mut self, device: &D) -> Result<()> {
        let problem = &self.what.config.problem;
        let latent = problem.dims.latent as usize;
        let row = problem.dims.row() as usize;
        let query = self.query.view()?;
        for cache in &self.caches {
            let batch = batch(self.what, &self.arrays)?;
            let (out, lse) = self.outcome.write()?;
            let slots = match (&self.slots, self.what.lists) {
                (Some(slots), Some(lists)) => {
                    let width = lists.topk as usize;
                    let entries = self.what.tokens() * width;
                    let slots = ArrayRef::new(D::bytes(slots), entries)?;
                    Some(SlotLists::new(slots, width))
                }
                _ => None,
            };
            let call = DecodeCall::new(
                match self.backend.spec().query_format {
                    QueryFormat::Concatenated => Query::Concatenated(query.shorten()),
                    QueryFormat::Split => Query::Split {
                        latent: query.shorten().narrow(2, 0..latent)?,
                        rope: query.shorten().narrow(2, latent..row)?,
                    },
                },
                cache.view()?,
                batch,
                out,
            )
            .with_lse(lse)
            .with_slots(slots);
            // SAFETY: starts, lengths and pages are those of the requests. Every tensor and the
            // cache were made for them, and the metadata was prepared for them. State and metadata
            // are this backend's.
            unsafe {
                self.backend
                    .decode(device, call, &mut self.state, &self.metadata)?;
            }
        }
        Ok(())
    }

    pub fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        let what = self.what;
        let problem = &what.config.problem;
        let latent = problem.dims.latent as usize;
        let starts = what.starts(|r| r.q);
        let max_pages = what.max_pages();
        let cache = &self.caches[self.caches.len() - 1];
        // Fields are borrowed one by one, since threads cannot share `self`.
        let (query, positions) = (&self.query, &self.positions);
        let mut compared = Vec::new();
        for rows in chosen(what, count)
            .chunk_by(|a, b| request_of(&starts, a.0) == request_of(&starts, b.0))
        {
            let index = request_of(&starts, rows[0].0);
            let request = what.requests[index];
            let kv = request.kv as usize;
            let table = &self.table[index * max_pages..][..what.pages_of(&request)];
            let pages: Vec<usize> = table.iter().map(|page| *page as usize).collect();
            let stored = cache.rows(device, &pages, kv)?;
            let keys: Vec<&[f64]> = stored.iter().map(Vec::as_slice).collect();
            let values: Vec<&[f64]> = stored.iter().map(|row| &row[..latent]).collect();
            let expected = rows.par_iter().map(|&(token, head)| {
                let query = query.row(token, head);
                let own = token - starts[index] as usize;
                let seen = kv - request.q as usize + own + 1;
                let scale = what.config.softmax_scale.into();
                let Some(list) = positions.get(token) else {
                    let all = attend(&query, &keys[..seen], &values[..seen], scale);
                    return ((token, head), all);
                };
                let listed = list.iter().map(|at| *at as usize);
                let own_keys: Vec<_> = listed.clone().map(|at| keys[at]).collect();
                let own_values: Vec<_> = listed.map(|at| values[at]).collect();
                let listed = attend(&query, &own_keys, &own_values, scale);
                ((token, head), listed)
            });
            compared.par_extend(expected);
        }
        Ok(self.outcome.compare(device, compared)?)
    }
}

/// Converts the lists to a backend's form: a token's position becomes a slot in its request's
/// pages.
fn slots_of(what: &Attention, lists: Lists, positions: &[Vec<u32>], table: &[i32]) -> Vec<i32> {
    let (page_size, max_pages) = (what.config.problem.page_size, what.max_pages());
    let width = lists.topk as usize;
    let starts = what.starts(|r| r.q);
    let mut slots = Vec::with_capacity(positions.len() * width);
    for (token, list) in positions.iter().enumerate() {
        let pages = &table[request_of(&starts, token) * max_pages..];
        slots.extend(list.iter().map(|position| {
            let page = pages[(position / page_size) as usize];
            page * page_size as i32 + (position % page_size) as i32
        }));
        slots.resize((token + 1) * width, -1);
    }
    slots
}

fn batch<'b, D: Device>(
    what: &Attention,
    [block_table, lens, starts]: &'b [D::Buffer; 3],
) -> Result<DecodeBatch<'b, D>> {
    let (requests, max_pages) = (what.requests.len(), what.max_pages());
    let table = ArrayRef::new(D::bytes(block_table), requests * max_pages)?;
    Ok(DecodeBatch::new(
        BlockTable::new(table, requests, max_pages)?,
        (
            ArrayRef::new(D::bytes(lens), requests)?,
            what.longest(|r| r.kv),
        ),
        (
            ArrayRef::new(D::bytes(starts), requests + 1)?,
            what.longest(|r| r.q),
        ),
    ))
}
