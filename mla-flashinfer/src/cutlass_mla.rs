//! CUTLASS_MLA: absorbed decode on Blackwell, one query token per request.
//!
//! The kernel reads whole tiles of 128 keys, even beyond a request's end. Each request is therefore
//! divided into its whole tiles, and a copy of the rest followed by zeros. The kernel attends to
//! both parts, and a kernel of this crate merges the results. All of this is enqueued from lengths
//! on the device, so a captured step can be replayed with others.

use mla_runtime::mla_backend;

#[cfg(feature = "sm100")]
use {
    crate::absorbed::Absorbed,
    crate::status::{check, dtype_code, int, sms},
    crate::{compiled, ffi},
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits},
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
    sms: usize,
}

/// The sizes of a state's buffers in bytes.
#[cfg(feature = "sm100")]
struct Sizes {
    rows: usize,
    out: usize,
    lse: usize,
    lens: usize,
    table: usize,
    partial: usize,
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

    fn sizes(&self, limits: &StepLimits, sms: usize) -> Result<Sizes> {
        let page_size = self.config.problem.page_size as usize;
        let tokens = limits.pages_per_request.saturating_mul(page_size);
        let requests = limits.requests;
        let rows = requests.saturating_mul(HEADS);
        let element = self.config.problem.dtype.bytes();
        // SAFETY: the function only computes with its arguments.
        let partial = unsafe {
            ffi::fi_cutlass_mla_workspace_bytes(int("requests", requests)?, int("SMs", sms)?)
        };
        Ok(Sizes {
            rows: rows.saturating_mul((LATENT + ROPE) * element),
            out: rows.saturating_mul(LATENT * element),
            lse: rows.saturating_mul(size_of::<f32>()),
            lens: requests.saturating_mul(size_of::<i32>()),
            table: (requests * size_of::<i32>()).saturating_mul(self.table_width(tokens)),
            partial: partial as usize,
        })
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
        let sizes = self.sizes(limits, sms(device)?)?;
        let twice = [sizes.rows, sizes.out, sizes.lse, sizes.lens];
        let once = [sizes.table, sizes.lens, sizes.partial];
        let bytes = twice.into_iter().chain(twice).chain(once);
        Ok(bytes.fold(0, usize::saturating_add) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<CutlassMlaState> {
        let sms = sms(device)?;
        let sizes = self.sizes(limits, sms)?;
        let two = |bytes| Ok::<_, Error>([device.allocate(bytes)?, device.allocate(bytes)?]);
        Ok(CutlassMlaState {
            made_for: self.config.problem,
            query: device.allocate(sizes.rows)?,
            tail: device.allocate(sizes.rows)?,
            outs: two(sizes.out)?,
            lses: two(sizes.lse)?,
            lens: two(sizes.lens)?,
            tables: [device.allocate(sizes.table)?, device.allocate(sizes.lens)?],
            partial: device.allocate(sizes.partial)?,
            requests: limits.requests,
            table_width: sizes.table / sizes.lens.max(1),
            sms,
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
        let (batch, cache) = (call.batch, call.cache);
        let absorbed = Absorbed::of(call)?;
        let requests = batch.block_table.requests();
        if absorbed.tokens != requests {
            return Err(Error::argument("query tokens", absorbed.tokens, requests));
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
        device.bind()?;
        let step = Step {
            backend: self,
            device,
            batch,
            state,
            width,
        };
        let has_tiles = batch.max_seq_len >= TILE && cache.layout().pages > 0;
        // SAFETY: the caller keeps to the same contract.
        unsafe {
            step.split(&absorbed, &cache)?;
            if has_tiles {
                step.attend(step.tiles(&cache)?)?;
            }
            step.attend(step.tails()?)?;
            step.merge(absorbed)
        }
    }
}

/// A call that fits the state.
#[cfg(feature = "sm100")]
struct Step<'a, 'b> {
    backend: &'a CutlassMla,
    device: &'a Cuda,
    batch: DecodeBatch<'b, Cuda>,
    state: &'a CutlassMlaState,
    width: usize,
}

/// The keys of one launch.
#[cfg(feature = "sm100")]
struct Keys {
    cache: u64,
    pages: usize,
    page_size: usize,
    page_stride: usize,
    row_stride: usize,
    width: usize,
    /// Index into the state's pairs of buffers: 0 for whole tiles, 1 for tails.
    part: usize,
}

#[cfg(feature = "sm100")]
type Cache<'a> = mla_runtime::tensor::CacheRef<'a, Cuda>;

#[cfg(feature = "sm100")]
impl Step<'_, '_> {
    fn requests(&self) -> usize {
        self.batch.block_table.requests()
    }

    fn element(&self) -> usize {
        self.backend.config.problem.dtype.bytes()
    }

    /// Returns the keys of whole tiles, which are in the request's own pages.
    fn tiles(&self, cache: &Cache<'_>) -> Result<Keys> {
        let layout = cache.layout();
        Ok(Keys {
            cache: cache.bytes().address(),
            pages: layout.pages,
            page_size: layout.page_size,
            page_stride: layout.page_stride / self.element(),
            row_stride: layout.row_stride / self.element(),
            width: self.width,
            part: 0,
        })
    }

    /// Returns the keys of the tails. These are copies, and each is a separate page.
    fn tails(&self) -> Result<Keys> {
        let row = LATENT + ROPE;
        Ok(Keys {
            cache: self.state.tail.address(),
            pages: self.requests(),
            page_size: TILE,
            page_stride: TILE * row,
            row_stride: row,
            width: 1,
            part: 1,
        })
    }

    /// # Safety
    ///
    /// The contract of [`DecodeBackend::decode`] holds for the step's batch.
    unsafe fn split(&self, absorbed: &Absorbed<'_>, cache: &Cache<'_>) -> Result<()> {
        let (state, layout, element) = (self.state, cache.layout(), self.element());
        let wide = |stride: usize| stride as i64;
        let [latent, rope] = [absorbed.latent, absorbed.rope].map(|place| place.layout.strides);
        let call = ffi::FiCutlassMlaSplit {
            query_latent: absorbed.latent.address as *const _,
            query_rope: absorbed.rope.address as *const _,
            cache: cache.bytes().address() as *const _,
            seq_lens: self.batch.seq_lens.bytes().address() as *const _,
            block_table: self.batch.block_table.entries().bytes().address() as *const _,
            query: state.query.address() as *mut _,
            tail: state.tail.address() as *mut _,
            tile_lens: state.lens[0].address() as *mut _,
            tail_lens: state.lens[1].address() as *mut _,
            tile_table: state.tables[0].address() as *mut _,
            tail_table: state.tables[1].address() as *mut _,
            query_latent_token_stride: wide(latent[0]),
            query_latent_head_stride: wide(latent[1]),
            query_rope_token_stride: wide(rope[0]),
            query_rope_head_stride: wide(rope[1]),
            page_stride: wide(layout.page_stride / element),
            row_stride: wide(layout.row_stride / element),
            requests: int("requests", self.requests())?,
            heads: int("heads", self.backend.config.problem.heads as usize)?,
            page_size: int("page_size", layout.page_size)?,
            max_pages: int("max pages", self.batch.block_table.max_pages())?,
            table_width: int("entries of the block table", self.width)?,
        };
        // SAFETY: every tensor was checked to hold what its layout says. Rows begin at multiples of
        // 16 bytes. The state's buffers have room for this number of requests and entries. Lengths
        // and pages keep to the contract of a call, by the caller's promise.
        check("division of CUTLASS_MLA", unsafe {
            ffi::fi_cutlass_mla_split(&raw const call, self.device.raw_stream())
        })
    }

    /// # Safety
    ///
    /// The contract of [`DecodeBackend::decode`] holds for the step's batch, which was divided
    /// before.
    unsafe fn attend(&self, keys: Keys) -> Result<()> {
        let (state, config) = (self.state, &self.backend.config);
        let row = LATENT + ROPE;
        let [token_stride, head_stride] = [HEADS * row, row].map(|stride| stride as i64);
        let query = state.query.address();
        let call = ffi::FiCutlassMla {
            query_latent: query as *const _,
            query_rope: (query + (LATENT * self.element()) as u64) as *const _,
            cache: keys.cache as *const _,
            seq_lens: state.lens[keys.part].address() as *const _,
            block_table: state.tables[keys.part].address() as *const _,
            out: state.outs[keys.part].address() as *mut _,
            lse: state.lses[keys.part].address() as *mut _,
            workspace: state.partial.address() as *mut _,
            workspace_bytes: state.partial.len() as i64,
            query_latent_token_stride: token_stride,
            query_latent_head_stride: head_stride,
            query_rope_token_stride: token_stride,
            query_rope_head_stride: head_stride,
            page_stride: keys.page_stride as i64,
            row_stride: keys.row_stride as i64,
            requests: int("requests", self.requests())?,
            table_width: int("entries of the block table", keys.width)?,
            page_count: int("pages", keys.pages)?,
            page_size: int("page_size", keys.page_size)?,
            sms: int("SMs", state.sms)?,
            dtype: dtype_code(config.problem.dtype)?,
            softmax_scale: config.softmax_scale,
        };
        // SAFETY: the division wrote lengths of at least 1, tables whose entries name pages of the
        // keys, and queries for all heads. The state's buffers have room for this number of
        // requests.
        check("CUTLASS_MLA", unsafe {
            (self.backend.attend)(&raw const call, self.device.raw_stream())
        })
    }

    /// # Safety
    ///
    /// The contract of [`DecodeBackend::decode`] holds for the step's batch, which was attended to
    /// before.
    unsafe fn merge(&self, absorbed: Absorbed<'_>) -> Result<()> {
        let (state, out) = (self.state, absorbed.out);
        let (lse, lse_head_stride) = match absorbed.lse {
            None => (0, 0),
            Some(lse) => {
                let stride = lse.layout().row_stride;
                (lse.into_bytes().address(), stride as i64)
            }
        };
        let call = ffi::FiCutlassMlaMerge {
            tile_out: state.outs[0].address() as *const _,
            tail_out: state.outs[1].address() as *const _,
            tile_lse: state.lses[0].address() as *const _,
            tail_lse: state.lses[1].address() as *const _,
            seq_lens: self.batch.seq_lens.bytes().address() as *const _,
            out: out.address as *mut _,
            lse: lse as *mut _,
            out_token_stride: out.layout.strides[0] as i64,
            out_head_stride: out.layout.strides[1] as i64,
            lse_head_stride,
            requests: int("requests", self.requests())?,
            heads: int("heads", self.backend.config.problem.heads as usize)?,
            dtype: dtype_code(self.backend.config.problem.dtype)?,
        };
        // SAFETY: the state's buffers have room for this number of requests. The output and the
        // log-sum-exp were checked to hold what their layouts say. Lengths keep to the contract of
        // a call, which is this function's own.
        check("merge of CUTLASS_MLA", unsafe {
            ffi::fi_cutlass_mla_merge(&raw const call, self.device.raw_stream())
        })
    }
}

#[cfg(all(test, feature = "sm100"))]
mod stand_in;
