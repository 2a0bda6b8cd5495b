//! FLASHMLA: absorbed decode over a paged cache.
//!
//! In `prepare`, FlashMLA's own kernel divides the lengths on the device among the SMs, once for
//! all layers of a step. Only the numbers of requests and of query tokens come from the host. A
//! captured step can therefore be replayed with other lengths after it was prepared.

use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::ffi,
    crate::rows::{Strides, partial_rows, parts},
    crate::status::{int, launch},
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{
        DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, StepLimits,
    },
    mla_runtime::device::Device as _,
    mla_runtime::model::DType,
    mla_runtime::spec::Problem,
    mla_runtime::tensor::{CacheLayout, Memory as _, TensorRef},
    mla_runtime::{Error, Result},
};

/// Absorbed decode by FlashMLA on Hopper GPUs.
///
/// It takes any number of heads, pages of 64 tokens, and the same number of query tokens for all
/// requests of a batch. Both parts of the queries are side by side.
#[derive(Debug)]
pub struct FlashMla {
    #[cfg(feature = "sm90")]
    config: LayerConfig,
}

/// Partial results of split requests, the log-sum-exp in FlashMLA's order, and queries without
/// gaps.
#[cfg(feature = "sm90")]
pub struct FlashMlaState {
    made_for: Problem,
    out_parts: Buffer,
    lse_parts: Buffer,
    lse: Buffer,
    queries: Buffer,
}

/// A schedule for one batch.
#[cfg(feature = "sm90")]
pub struct FlashMlaSchedule {
    made_for: Problem,
    lens: Buffer,
    parts: Buffer,
    splits: Buffer,
    /// The batch of the schedule. It is `None` before the first batch, and after one that was
    /// refused.
    prepared_for: Option<Extents>,
}

/// The sizes of a batch, besides its lengths, on which a schedule depends.
#[cfg(feature = "sm90")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Extents {
    requests: usize,
    query_len: usize,
    parts: usize,
}

#[cfg(feature = "sm90")]
const FLOAT: usize = size_of::<f32>();
#[cfg(feature = "sm90")]
const INT: usize = size_of::<i32>();
#[cfg(feature = "sm90")]
const LATENT: usize = ffi::FM_LATENT as usize;

#[cfg(feature = "sm90")]
impl FlashMla {
    fn heads(&self) -> usize {
        self.config.problem.heads as usize
    }

    /// Returns the bytes of the buffers of a state and of a schedule, in their order.
    fn sizes(&self, device: &Cuda, limits: &StepLimits) -> [usize; 7] {
        let (heads, sms) = (self.heads(), device.gpu().multiprocessors);
        let query_len = limits.decode_query_len;
        let uniform = limits.requests.saturating_mul(query_len);
        let tokens = uniform.min(limits.tokens);
        let partial = partial_rows(sms, heads, [tokens, query_len.min(limits.tokens)]);
        [
            partial * LATENT * FLOAT,
            partial * FLOAT,
            tokens * heads * FLOAT,
            tokens * heads * ffi::FM_WIDTH as usize * self.config.problem.dtype.bytes(),
            limits.requests * INT,
            parts(sms, 1) * ffi::FM_PART_BYTES as usize,
            (limits.requests + 1) * INT,
        ]
    }

    /// Returns the sizes of a batch. Those that FlashMLA counts in 32 bits are refused if they are
    /// larger.
    fn extents(&self, device: &Cuda, batch: &DecodeBatch<'_, Cuda>) -> Result<Extents> {
        let (requests, query_len) = (batch.block_table.requests(), batch.max_query_len);
        let max = ffi::FM_MAX_REQUESTS as usize;
        if requests > max {
            let accepted = format!("at most {max}");
            return Err(Error::argument("requests", requests, accepted));
        }
        let rows = query_len * self.heads();
        let parts = parts(device.gpu().multiprocessors, rows);
        int("partial results", (requests + parts) * rows * LATENT)?;
        // This is the cost of all requests, in blocks of 64 tokens.
        let blocks = batch.block_table.max_pages() + 5;
        int("blocks of the block table", requests * blocks)?;
        Ok(Extents {
            requests,
            query_len,
            parts,
        })
    }
}

#[mla_backend(
    name = "FLASHMLA",
    provider = "flashmla",
    feature = "sm90",
    sm = "90",
    compiled = crate::compiled::SM90,
    run_on = crate::RUN_ON,
    dtypes = "f16,bf16",
    cache_dims = "(512,64)",
    page_sizes = "64",
    query_len = "uniform",
    query_format = "concatenated",
    alignment = 16,
    graphs = "uniform_batch",
    features = "deterministic",
    priority = "85"
)]
impl DecodeBackend for FlashMla {
    type Device = Cuda;
    type State = FlashMlaState;
    type Metadata = FlashMlaSchedule;

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        Ok(self.sizes(device, limits).iter().sum::<usize>() as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashMlaState> {
        let [out_parts, lse_parts, lse, queries, ..] = self.sizes(device, limits);
        Ok(FlashMlaState {
            made_for: self.config.problem,
            out_parts: device.allocate(out_parts)?,
            lse_parts: device.allocate(lse_parts)?,
            lse: device.allocate(lse)?,
            queries: device.allocate(queries)?,
        })
    }

    fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashMlaSchedule> {
        let [.., lens, parts, splits] = self.sizes(device, limits);
        Ok(FlashMlaSchedule {
            made_for: self.config.problem,
            lens: device.allocate(lens)?,
            parts: device.allocate(parts)?,
            splits: device.allocate(splits)?,
            prepared_for: None,
        })
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        _: &mut FlashMlaState,
        schedule: &mut FlashMlaSchedule,
    ) -> Result<()> {
        schedule
            .made_for
            .check_same("metadata", &self.config.problem)?;
        schedule.prepared_for = None;
        let extents = self.extents(device, batch)?;
        let room = schedule.lens.len() / INT;
        for (field, given, accepted) in [
            ("requests", extents.requests > room, room),
            (
                "seq_lens",
                batch.seq_lens.len() != extents.requests,
                extents.requests,
            ),
        ] {
            if given {
                return Err(Error::argument(field, batch.seq_lens.len(), accepted));
            }
        }
        if extents.requests > 0 && extents.query_len > 0 {
            let max_len = batch.block_table.max_pages() * ffi::FM_PAGE as usize;
            let call = ffi::FmSchedule {
                seq_lens: batch.seq_lens.bytes().address() as *const _,
                lens: schedule.lens.address() as *mut _,
                parts: schedule.parts.address() as *mut _,
                splits: schedule.splits.address() as *mut _,
                requests: int("requests", extents.requests)?,
                query_len: int("query tokens", extents.query_len)?,
                num_parts: int("parts", extents.parts)?,
                max_len: int("block table", max_len)?,
            };
            // SAFETY: the lengths and the lists have an entry for each request and part. The
            // lengths may have any value, since the first kernel bounds them by the block table's
            // size. With bounded lengths, the second kernel writes only parts within the requests.
            unsafe { launch(device, "schedule of FLASHMLA", ffi::fm_schedule, &call)? };
        }
        schedule.prepared_for = Some(extents);
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut FlashMlaState,
        schedule: &FlashMlaSchedule,
    ) -> Result<()> {
        call.check(&self.config, &Self::SPEC)?;
        state.made_for.check_same("state", &self.config.problem)?;
        schedule
            .made_for
            .check_same("metadata", &self.config.problem)?;
        let (Query::Concatenated(query), Output::Plain(out)) = (call.query, call.out) else {
            let given = "a query in two, or an output in e4m3";
            return Err(Error::argument("call", given, "concatenated and plain"));
        };
        let (batch, cache) = (call.batch, call.cache);
        let extents = self.extents(device, &batch)?;
        if schedule.prepared_for != Some(extents) {
            let given = format!("{extents:?}");
            let accepted = format!("{:?}, for which it was prepared", schedule.prepared_for);
            return Err(Error::argument("batch", given, accepted));
        }
        let tokens = query.shape()[0];
        if tokens != extents.requests * extents.query_len {
            let Extents {
                requests,
                query_len,
                ..
            } = extents;
            let accepted = format!("{query_len} for each of {requests} requests");
            return Err(Error::argument("query tokens", tokens, accepted));
        }
        if tokens == 0 {
            return Ok(());
        }
        let rows = extents.query_len * self.heads();
        if state.lse.len() < tokens * self.heads() * FLOAT
            || state.lse_parts.len() < (extents.requests + extents.parts) * rows * FLOAT
        {
            let accepted = "no more than the limits that the state was made for";
            return Err(Error::argument("query tokens", tokens, accepted));
        }
        let (query, strides) = self.rows(device, &query, extents.query_len, state)?;
        let layout = cache.layout();
        let [page_stride, row_stride] = cache_strides(layout, self.config.problem.dtype);
        let run = ffi::FmDecode {
            query: query as *const _,
            cache: cache.bytes().address() as *const _,
            block_table: batch.block_table.entries().bytes().address() as *const _,
            lens: schedule.lens.address() as *const _,
            parts: schedule.parts.address() as *const _,
            splits: schedule.splits.address() as *const _,
            out: out.into_bytes().address() as *mut _,
            lse: state.lse.address() as *mut _,
            out_parts: state.out_parts.address() as *mut _,
            lse_parts: state.lse_parts.address() as *mut _,
            query_request_stride: strides.request as i64,
            query_row_stride: strides.row as i64,
            page_stride: page_stride as i64,
            row_stride: row_stride as i64,
            requests: int("requests", extents.requests)?,
            query_len: int("query tokens", extents.query_len)?,
            heads: int("heads", self.heads())?,
            pages: int("pages", layout.pages)?,
            max_pages: int("block table", batch.block_table.max_pages())?,
            num_parts: int("parts", extents.parts)?,
            is_bf16: i32::from(self.config.problem.dtype == DType::BF16),
            softmax_scale: self.config.softmax_scale,
        };
        // SAFETY: every tensor was checked to hold what its layout says, the layouts agree, and the
        // output has no gaps. The workspaces hold what the header asks for. The lists are those of
        // a schedule for this batch. Pages and lengths keep to the contract of a call, by the
        // caller's promise.
        unsafe { launch(device, "FLASHMLA", ffi::fm_attend, &run)? };
        // The combine kernel may end before the preceding kernel, and the following kernel waits
        // only for the last one.
        device.fence()?;
        // SAFETY: this is the same run. `fm_combine` reads its workspaces and writes its outputs.
        unsafe { launch(device, "FLASHMLA", ffi::fm_combine, &run)? };
        let Some(lse) = call.lse else {
            return Ok(());
        };
        let lse = ffi::FmLse {
            from: run.lse,
            head_stride: lse.layout().row_stride as i64,
            to: lse.into_bytes().address() as *mut _,
            tokens: int("query tokens", tokens)?,
            heads: run.heads,
        };
        // SAFETY: the source holds tokens × heads, and the target holds what its layout says.
        unsafe { launch(device, "log-sum-exp of FLASHMLA", ffi::fm_finish_lse, &lse) }
    }
}

#[cfg(feature = "sm90")]
impl FlashMla {
    /// Returns the address of the queries and the distances between their rows. Queries whose rows
    /// have no common distance are copied.
    fn rows(
        &self,
        device: &Cuda,
        query: &TensorRef<'_, Cuda>,
        query_len: usize,
        state: &FlashMlaState,
    ) -> Result<(u64, Strides)> {
        let layout = query.layout();
        let address = query.bytes().address();
        if let Some(strides) = Strides::of(layout, query_len) {
            return Ok((address, strides));
        }
        let [tokens, heads, _] = layout.shape;
        int("query rows", tokens * heads)?;
        let queries = ffi::FmQueries {
            from: address as *const _,
            to: state.queries.address() as *mut _,
            token_stride: layout.strides[0] as i64,
            head_stride: layout.strides[1] as i64,
            tokens: int("query tokens", tokens)?,
            heads: int("heads", heads)?,
        };
        // SAFETY: the source holds what its layout says, and its rows are at multiples of 16 bytes,
        // as `check` compared. The target has room for the tokens of a step within its limits.
        unsafe {
            launch(
                device,
                "queries of FLASHMLA",
                ffi::fm_pack_queries,
                &queries,
            )?
        };
        // FlashMLA's kernel does not wait for the preceding kernel.
        device.fence()?;
        Ok((state.queries.address(), Strides::packed(query_len * heads)))
    }
}

/// Returns the distances of pages and rows in elements. With only one page, the distance of pages
/// may have any value.
#[cfg(feature = "sm90")]
fn cache_strides(layout: &CacheLayout, dtype: DType) -> [usize; 2] {
    let row = layout.row_stride / dtype.bytes();
    let page = match layout.pages {
        0 | 1 => row * layout.page_size,
        _ => layout.page_stride / dtype.bytes(),
    };
    [page, row]
}
