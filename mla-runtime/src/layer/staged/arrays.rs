//! The arrays of a step. The host writes and uploads them, and the device reads them.

use std::ops::Range;

use bytemuck::Pod;

use super::context::chunk_elements;
use super::{StagedStep, starts};
use crate::Result;
use crate::backend::DecodeBatch;
use crate::device::Device;
use crate::layer::step_plan::StepPlan;
use crate::tensor::{ArrayRef, BlockTable};

impl StagedStep {
    // Every number below fits its array's integer type, as the checks of the limits and the plan
    // ensure.
    pub(super) fn write_arrays(&mut self, plan: &StepPlan) {
        self.write_chunks();
        let (layout, staging) = (&self.layout, &mut self.staging);
        let requests = plan.requests();
        write(staging, &layout.slots, self.slots.iter().copied());
        let positions = requests.iter().flat_map(|request| {
            // Padding has no positions of its own.
            let first = i64::from(request.context_len());
            (0..i64::from(request.q)).map(move |token| first + token)
        });
        write(staging, &layout.positions, positions);
        if let Some(scaling) = self.query_scaling {
            let factors = requests.iter().flat_map(|request| {
                let first = request.context_len();
                (0..request.q).map(move |token| scaling.factor(first.saturating_add(token)) as f32)
            });
            write(staging, &layout.query_scales, factors);
        }
        let seq_lens = requests.iter().map(|r| r.kv as i32);
        write(staging, &layout.seq_lens, seq_lens);
        let absorbed = self.absorbed_query_lens.iter().copied();
        write(staging, &layout.absorbed_starts, starts(absorbed));
        let expanded = self.expanded_query_lens.iter().copied();
        write(staging, &layout.expanded_starts, starts(expanded));

        let row_bytes = 4 * self.limits.pages_per_request;
        for (index, pages) in plan.pages().enumerate() {
            let start = layout.block_table.start + index * row_bytes;
            let row = start..start + row_bytes;
            write(staging, &row, pages.iter().copied());
        }
        let [tokens, rows] = self.order.index();
        write(staging, &layout.row_tokens, tokens.iter().copied());
        write(staging, &layout.token_rows, rows.iter().copied());
    }

    /// Writes query starts, key starts and token starts of each chunk. If there are no chunks,
    /// writes those of the one call for context and new tokens.
    fn write_chunks(&mut self) {
        let expanded = &self.expanded_starts;
        let mut chunks = Writer::new(&mut self.staging, &self.layout.chunks);
        let mut end = 0;
        super::replace(&mut self.chunk_starts, std::iter::once(0));
        if self.context_in_one_call {
            end += chunk_elements(self.expanded_key_lens.len());
            self.chunk_starts.push(end);
            chunks.extend(expanded.iter().map(|start| *start as i32));
            chunks.extend(starts(self.expanded_key_lens.iter().copied()));
            chunks.extend(self.expanded_key_lens.iter().map(|_| 0i32));
        }
        for chunk in &self.context {
            end += chunk_elements(chunk.seq_lens.len());
            self.chunk_starts.push(end);
            let first = expanded[chunk.request_start];
            let ends = &expanded[chunk.request_start..=chunk.request_end];
            chunks.extend(ends.iter().map(|start| (start - first) as i32));
            chunks.extend(starts(chunk.seq_lens.iter().copied()));
            chunks.extend(chunk.starts.iter().map(|start| *start as i32));
        }
    }

    /// Uploads the part of the arrays that this step uses.
    pub(in crate::layer) fn upload<D: Device>(
        &self,
        device: &D,
        mut arrays: D::BytesMut<'_>,
    ) -> Result<()> {
        let layout = &self.layout;
        let chunk_bytes = 4 * self.chunk_starts.last().copied().unwrap_or(0);
        let table_bytes = 4 * self.requests * self.limits.pages_per_request;
        let [tokens, rows] = self.order.index();
        for range in [
            0..layout.expanded_starts.end,
            layout.chunks.start..layout.chunks.start + chunk_bytes,
            layout.block_table.start..layout.block_table.start + table_bytes,
            layout.row_tokens.start..layout.row_tokens.start + size_of_val(tokens),
            layout.token_rows.start..layout.token_rows.start + size_of_val(rows),
        ] {
            if !range.is_empty() {
                let (_, to) = D::split_mut(D::reborrow(&mut arrays), range.start);
                let (to, _) = D::split_mut(to, range.len());
                device.upload(&self.staging[range], to)?;
            }
        }
        Ok(())
    }

    pub(in crate::layer) fn slots<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i64>> {
        array::<D, _>(arrays, &self.layout.slots, self.tokens)
    }

    pub(in crate::layer) fn positions<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i64>> {
        array::<D, _>(arrays, &self.layout.positions, self.tokens)
    }

    /// The scale factors of these tokens, if the problem has any.
    pub(in crate::layer) fn query_scales<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
        tokens: Range<usize>,
    ) -> Result<Option<ArrayRef<'a, D, f32>>> {
        let all = |_| array::<D, _>(arrays, &self.layout.query_scales, self.tokens);
        let all = self.query_scaling.map(all).transpose()?;
        all.map(|all| all.range(tokens)).transpose()
    }

    pub(in crate::layer) fn expanded_starts<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i32>> {
        let len = self.expanded_starts.len();
        array::<D, _>(arrays, &self.layout.expanded_starts, len)
    }

    /// The token of each row and the row of each token, if rows are out of order.
    pub(in crate::layer) fn row_index<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<[ArrayRef<'a, D, i64>; 2]> {
        let [tokens, rows] = self.order.index().map(<[i64]>::len);
        Ok([
            array::<D, _>(arrays, &self.layout.row_tokens, tokens)?,
            array::<D, _>(arrays, &self.layout.token_rows, rows)?,
        ])
    }

    pub(super) fn block_table<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
        requests: Range<usize>,
    ) -> Result<BlockTable<'a, D>> {
        let width = self.limits.pages_per_request;
        let entries = array::<D, _>(arrays, &self.layout.block_table, self.requests * width)?;
        BlockTable::new(entries, self.requests, width)?.range(requests)
    }

    pub(in crate::layer) fn decode_batch<'a, D: Device>(
        &'a self,
        arrays: D::Bytes<'a>,
    ) -> Result<DecodeBatch<'a, D>> {
        let requests = self.absorbed_requests;
        let layout = &self.layout;
        Ok(DecodeBatch {
            block_table: self.block_table(arrays, 0..requests)?,
            seq_lens: array::<D, _>(arrays, &layout.seq_lens, requests)?,
            query_starts: array::<D, _>(arrays, &layout.absorbed_starts, requests + 1)?,
            max_query_len: self.max_absorbed_query_len,
            max_seq_len: self.max_seq_len,
            causal: self.absorbed_causal(),
            host: Some([&self.absorbed_query_lens, &self.absorbed_seq_lens]),
        })
    }
}

/// The first `len` elements of an array of a step.
fn array<'a, D: Device, T: Pod>(
    arrays: D::Bytes<'a>,
    range: &Range<usize>,
    len: usize,
) -> Result<ArrayRef<'a, D, T>> {
    ArrayRef::new(D::byte_range(arrays, range.clone()), len)
}

fn write<T: Pod>(staging: &mut [u8], range: &Range<usize>, values: impl Iterator<Item = T>) {
    Writer::new(staging, range).extend(values);
}

/// Writes numbers one after another.
struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(staging: &'a mut [u8], range: &Range<usize>) -> Self {
        Self {
            bytes: &mut staging[range.clone()],
            at: 0,
        }
    }

    fn extend<T: Pod>(&mut self, values: impl Iterator<Item = T>) {
        for value in values {
            let end = self.at + size_of::<T>();
            self.bytes[self.at..end].copy_from_slice(bytemuck::bytes_of(&value));
            self.at = end;
        }
    }
}
