//! CUTLASS_MLA: absorbed decode on Blackwell, one query token per request.
//!
//! The kernel reads whole tiles of 128 keys, even beyond a request's end. Each request is therefore
//! divided into its whole tiles, and a copy of the rest followed by zeros. The kernel attends to
//! both parts, and a kernel of this crate merges the results. All of this is enqueued from lengths
//! on the device, so a captured step can be replayed with others.

use mla_runtime::mla_backend;

#[cfg(feature = "sm100")]
use {
    crate::status::{dtype_code, int, launch, sms},
    crate::{compiled, ffi},
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{DecodeBackend, DecodeCall, LayerConfig, Output, StepLimits},
    mla_runtime::spec::Problem,
    mla_runtime::tensor::Memory as _,
    mla_runtime::{Error, Result},
};

/// Absorbed decode by CUTLASS's kernel for Blackwell, with FlashInfer's fixes. It has not run on
/// any GPU yet, so it is only chosen by name.
#[derive(Debug)]
pub struct CutlassMla {
    #[cfg(feature = "sm100")]
    config: LayerConfig,
    #[cfg(feature = "sm100")]
    attend: Attend,
}

/// The function of the C interface that attends.
#[cfg(feature = "sm100")]
type Attend = unsafe extern "C" fn(*const ffi::FiCutlassMla, *mut std::ffi::c_void) -> i32;

/// The number of heads that the kernel computes, and of keys that it reads at once.
#[cfg(feature = "sm100")]
const HEADS: usize = ffi::FI_CUTLASS_MLA_HEADS as usize;
#[cfg(feature = "sm100")]
const TILE: usize = ffi::FI_CUTLASS_MLA_TILE as usize;

/// The latent and the rotary width of a cache row.
#[cfg(feature = "sm100")]
const LATENT: usize = 512;
#[cfg(feature = "sm100")]
const ROPE: usize = 64;

/// Copies of the call's tensors for the kernel, and the kernel's results.
#[cfg(feature = "sm100")]
pub struct CutlassMlaState {
    made_for: Problem,
    /// Queries, `[requests, 128, 512 + 64]`.
    query: Buffer,
    /// Keys of the tails, `[requests, 128, 512 + 64]`.
    tail: Buffer,
    /// Outputs of the whole tiles and of the tails, `[requests, 128, 512]` each.
    outs: [Buffer; 2],
    /// Log-sum-exps, `[requests, 128]` each.
    lses: [Buffer; 2],
    /// Lengths, `[requests]` each.
    lens: [Buffer; 2],
    /// Block tables, `[requests, table_width]`, and `[requests, 1]`.
    tables: [Buffer; 2],
    partial: Buffer,
    requests: usize,
    table_width: usize,
}

#[cfg(feature = "sm100")]
impl CutlassMla {
    fn with(config: &LayerConfig, attend: Attend) -> Self {
        Self {
            config: *config,
            attend,
        }
    }

    /// Returns the number of block table entries for `tokens` tokens, rounded up to whole tiles.
    fn table_width(&self, tokens: usize) -> usize {
        tokens.max(1).div_ceil(TILE).saturating_mul(TILE) / self.config.problem.page_size as usize
    }

    /// Returns the bytes of rows of 512 + 64, of an output, of a log-sum-exp, of lengths, of the
    /// block table and of the partial results.
    fn sizes(&self, device: &Cuda, limits: &StepLimits) -> Result<[usize; 6]> {
        let page_size = self.config.problem.page_size as usize;
        let tokens = limits.pages_per_request.saturating_mul(page_size);
        let requests = limits.requests;
        let rows = requests.saturating_mul(HEADS);
        let element = self.config.problem.dtype.bytes();
        // SAFETY: the function only computes with its arguments.
        let partial = unsafe {
            ffi::fi_cutlass_mla_workspace_bytes(int("requests", requests)?, sms(device)?)
        };
        Ok([
            rows.saturating_mul((LATENT + ROPE) * element),
            rows.saturating_mul(LATENT * element),
            rows.saturating_mul(size_of::<f32>()),
            requests.saturating_mul(size_of::<i32>()),
            (requests * size_of::<i32>()).saturating_mul(self.table_width(tokens)),
            partial as usize,
        ])
    }
}

#[mla_backend(
    name = "CUTLASS_MLA",
    provider = "cutlass",
    feature = "sm100",
    sm = "10x",
    compiled = "compiled::SM100",
    run_on = crate::CUTLASS_RUN_ON,
    dtypes = "f16,bf16",
    cache_dims = "(512,64)",
    alignment = 16,
    heads = "1..=128",
    page_sizes = "16|32|64|128",
    query_len = "single",
    graphs = "single_token",
    features = "strided_outputs",
    priority = "60"
)]
impl DecodeBackend for CutlassMla {
    type Device = Cuda;
    type State = CutlassMlaState;
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self::with(config, ffi::fi_cutlass_mla))
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        let [rows, out, lse, lens, table, partial] = self.sizes(device, limits)?;
        let twice = [rows, out, lse, lens];
        let bytes = twice.into_iter().chain(twice).chain([table, lens, partial]);
        Ok(bytes.fold(0, usize::saturating_add) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<CutlassMlaState> {
        let [rows, out, lse, lens, table, partial] = self.sizes(device, limits)?;
        let two = |bytes| Ok::<_, Error>([device.allocate(bytes)?, device.allocate(bytes)?]);
        Ok(CutlassMlaState {
            made_for: self.config.problem,
            query: device.allocate(rows)?,
            tail: device.allocate(rows)?,
            outs: two(out)?,
            lses: two(lse)?,
            lens: two(lens)?,
            tables: [device.allocate(table)?, device.allocate(lens)?],
            partial: device.allocate(partial)?,
            requests: limits.requests,
            table_width: table / lens.max(1),
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut CutlassMlaState,
        (): &(),
    ) -> Result<()> {
        call.check(&self.config, &Self::SPEC)?;
        state.made_for.check_same("state", &self.config.problem)?;
        let problem = &self.config.problem;
        let [latent, rope] = call.query.parts(LATENT)?;
        let Output::Plain(out) = call.out else {
            return Err(Error::argument("out", "e4m3", problem.dtype));
        };
        let (batch, cache) = (call.batch, call.cache);
        let (table, layout) = (&batch.block_table, *cache.layout());
        let (tokens, requests) = (latent.shape()[0], table.requests());
        if tokens != requests {
            return Err(Error::argument("query tokens", tokens, requests));
        }
        if requests == 0 {
            return Ok(());
        }
        let width = self.table_width(batch.max_seq_len);
        for (field, given, max) in [
            ("requests", requests, state.requests),
            ("entries of the block table", width, state.table_width),
        ] {
            if given > max {
                let accepted = format!("at most {max}, for which the state was made");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let (count, heads) = (
            int("requests", requests)?,
            int("heads", problem.heads as usize)?,
        );
        let dtype = dtype_code(problem.dtype)?;
        let [page_stride, row_stride] = [layout.page_stride, layout.row_stride]
            .map(|bytes| (bytes / problem.dtype.bytes()) as i64);
        let [latent_strides, rope_strides, out_strides] =
            [latent.layout(), rope.layout(), out.layout()]
                .map(|layout| layout.strides.map(|stride| stride as i64));
        let split = ffi::FiCutlassMlaSplit {
            query_latent: latent.bytes().address() as *const _,
            query_rope: rope.bytes().address() as *const _,
            cache: cache.bytes().address() as *const _,
            seq_lens: batch.seq_lens.bytes().address() as *const _,
            block_table: table.entries().bytes().address() as *const _,
            query: state.query.address() as *mut _,
            tail: state.tail.address() as *mut _,
            tile_lens: state.lens[0].address() as *mut _,
            tail_lens: state.lens[1].address() as *mut _,
            tile_table: state.tables[0].address() as *mut _,
            tail_table: state.tables[1].address() as *mut _,
            query_latent_token_stride: latent_strides[0],
            query_latent_head_stride: latent_strides[1],
            query_rope_token_stride: rope_strides[0],
            query_rope_head_stride: rope_strides[1],
            page_stride,
            row_stride,
            requests: count,
            heads,
            page_size: int("page_size", layout.page_size)?,
            max_pages: int("max pages", table.max_pages())?,
            table_width: int("entries of the block table", width)?,
        };
        // The tails are copies, and each is a separate page.
        let tails = ffi::FiCutlassMla {
            query: state.query.address() as *const _,
            cache: state.tail.address() as *const _,
            seq_lens: state.lens[1].address() as *const _,
            block_table: state.tables[1].address() as *const _,
            out: state.outs[1].address() as *mut _,
            lse: state.lses[1].address() as *mut _,
            workspace: state.partial.address() as *mut _,
            workspace_bytes: state.partial.len() as i64,
            page_stride: (TILE * (LATENT + ROPE)) as i64,
            row_stride: (LATENT + ROPE) as i64,
            requests: count,
            table_width: 1,
            page_count: count,
            page_size: TILE as i32,
            sms: sms(device)?,
            dtype,
            softmax_scale: self.config.softmax_scale,
        };
        // Whole tiles are in the request's own pages.
        let tiles = ffi::FiCutlassMla {
            cache: split.cache,
            seq_lens: state.lens[0].address() as *const _,
            block_table: state.tables[0].address() as *const _,
            out: state.outs[0].address() as *mut _,
            lse: state.lses[0].address() as *mut _,
            page_stride,
            row_stride,
            table_width: split.table_width,
            page_count: int("pages", layout.pages)?,
            page_size: split.page_size,
            ..tails
        };
        let (lse, lse_head_stride) = call.lse.map_or((0, 0), |lse| {
            let head_stride = lse.layout().row_stride as i64;
            (lse.into_bytes().address(), head_stride)
        });
        let merge = ffi::FiCutlassMlaMerge {
            tile_out: tiles.out,
            tail_out: tails.out,
            tile_lse: tiles.lse,
            tail_lse: tails.lse,
            seq_lens: split.seq_lens,
            out: out.into_bytes().address() as *mut _,
            lse: lse as *mut _,
            out_token_stride: out_strides[0],
            out_head_stride: out_strides[1],
            lse_head_stride,
            requests: count,
            heads,
            dtype,
        };
        let [division, merged] = ["division of CUTLASS_MLA", "merge of CUTLASS_MLA"];
        // SAFETY: every tensor was checked to hold what its layout says. Rows begin at multiples of
        // 16 bytes. The state's buffers have room for this number of requests and entries. Lengths
        // and pages keep to the contract of a call, by the caller's promise. The division writes
        // lengths of at least 1, tables whose entries name pages of the keys, and queries for all
        // heads.
        unsafe {
            launch(device, division, ffi::fi_cutlass_mla_split, &split)?;
            if batch.max_seq_len >= TILE && layout.pages > 0 {
                launch(device, "CUTLASS_MLA", self.attend, &tiles)?;
            }
            launch(device, "CUTLASS_MLA", self.attend, &tails)?;
            launch(device, merged, ffi::fi_cutlass_mla_merge, &merge)
        }
    }
}

#[cfg(all(test, feature = "sm100"))]
mod stand_in;
