//! FLASHINFER_MLA: absorbed decode over a paged cache.
//!
//! FlashInfer plans on the host. [`prepare`](mla_runtime::backend::DecodeBackend::prepare) divides
//! the lengths that the host knows among the SMs, and copies the lists into buffers with fixed
//! addresses. A captured step can therefore be replayed after the next one was prepared, if that
//! has the same numbers of requests and query tokens.

use mla_runtime::mla_backend;

#[cfg(feature = "fa")]
use {
    crate::host::HostLists,
    crate::status::{check, dtype_code, int, launch, sms, stride, strides},
    crate::{compiled, ffi},
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{
        DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, StepLimits,
    },
    mla_runtime::room::filled,
    mla_runtime::spec::Problem,
    mla_runtime::tensor::Memory as _,
    mla_runtime::{Error, Result},
    std::iter,
};

/// Absorbed decode by FlashInfer: fa3 on Hopper if the feature `sm90` is on, otherwise fa2.
///
/// It takes any number of heads, any page size, and different query lengths. Rows begin at
/// multiples of 16 bytes.
#[derive(Debug)]
pub struct FlashInferMla {
    #[cfg(feature = "fa")]
    config: LayerConfig,
    #[cfg(feature = "fa")]
    launch: Launch,
}

/// One of the two functions of the C interface that attend.
#[cfg(feature = "fa")]
type Launch = unsafe extern "C" fn(*const ffi::FiMlaRun, *mut std::ffi::c_void) -> i32;

/// Partial results of split requests, and the log-sum-exp in FlashInfer's order.
#[cfg(feature = "fa")]
pub struct FlashInferMlaState {
    made_for: Problem,
    partial: Buffer,
    lse: Buffer,
}

/// The lists of a plan.
#[cfg(feature = "fa")]
pub struct FlashInferMlaPlan {
    /// The lists on the device: `[FI_MLA_LISTS, capacity]`.
    lists: Buffer,
    /// The lists on the host.
    written: Vec<i32>,
    host: HostLists,
    /// The number of CTAs of the launch, x and y.
    grid: [i32; 2],
    made_for: Problem,
    /// The batch for which the plan was made. It is `None` before the first batch, and after one
    /// that was refused.
    prepared_for: Option<Extents>,
}

/// Sizes of a batch, besides its lengths, on which the lists of a plan depend: query tokens,
/// requests, and pages of a request at most.
#[cfg(feature = "fa")]
type Extents = [usize; 3];

#[cfg(feature = "fa")]
fn shown([tokens, requests, max_pages]: Extents) -> String {
    format!("{tokens} query tokens of {requests} requests with at most {max_pages} pages")
}

#[cfg(feature = "fa")]
impl FlashInferMla {
    fn heads(&self) -> usize {
        self.config.problem.heads as usize
    }

    /// Returns the maximum number of query tokens of a step on the decode path.
    fn max_tokens(limits: &StepLimits) -> usize {
        let uniform = limits.requests.saturating_mul(limits.decode_query_len);
        uniform.min(limits.tokens)
    }

    /// Returns the number of entries that each list needs. It is the maximum number of work items
    /// of a plan within the limits, but at least one more than the number of SMs.
    fn capacity(&self, limits: &StepLimits, sms: usize) -> usize {
        let rows = Self::max_tokens(limits).saturating_mul(self.heads());
        let requests = limits.requests.saturating_mul(2);
        let tiles = requests.max((rows / 128).saturating_add(limits.requests));
        let entries = tiles.saturating_add(sms).max(sms + 1);
        entries.checked_next_multiple_of(4).unwrap_or(entries)
    }

    /// Returns the bytes of the partial results, of the log-sum-exp, and of the lists.
    fn sizes(&self, device: &Cuda, limits: &StepLimits) -> Result<[usize; 3]> {
        // SAFETY: the function only computes with its argument.
        let partial = unsafe { ffi::fi_mla_workspace_bytes(sms(device)?) };
        let sms = device.gpu().multiprocessors;
        let entry = size_of::<i32>();
        Ok([
            usize::try_from(partial).map_err(|_| Error::argument("SMs", sms, "fewer"))?,
            Self::max_tokens(limits).saturating_mul(self.heads() * size_of::<f32>()),
            (ffi::FI_MLA_LISTS as usize * entry).saturating_mul(self.capacity(limits, sms)),
        ])
    }
}

#[mla_backend(
    name = "FLASHINFER_MLA",
    provider = "flashinfer",
    feature = "sm80|sm90",
    sm = "80+",
    compiled = "compiled::SM90|compiled::SM80",
    run_on = crate::RUN_ON,
    dtypes = "f16,bf16",
    lse_precision = "dtype",
    cache_dims = "(512,64)",
    alignment = 16,
    query_len = "ragged",
    graphs = "uniform_batch",
    plans_on_host = true,
    features = "strided_outputs,split_cache",
    priority = "80"
)]
impl DecodeBackend for FlashInferMla {
    type Device = Cuda;
    type State = FlashInferMlaState;
    type Metadata = FlashInferMlaPlan;

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self {
            config: *config,
            launch: fa(device)?,
        })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        let sizes = self.sizes(device, limits)?;
        Ok(sizes.into_iter().fold(0, usize::saturating_add) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashInferMlaState> {
        let [partial, lse, _] = self.sizes(device, limits)?;
        Ok(FlashInferMlaState {
            made_for: self.config.problem,
            partial: device.allocate(partial)?,
            lse: device.allocate(lse)?,
        })
    }

    fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashInferMlaPlan> {
        let [_, _, lists] = self.sizes(device, limits)?;
        // SAFETY: the function only computes with its argument.
        let staging = unsafe { ffi::fi_mla_staging_bytes(sms(device)?) };
        Ok(FlashInferMlaPlan {
            written: filled(0, lists / size_of::<i32>())?,
            host: HostLists::new(limits.requests, staging as usize)?,
            lists: device.allocate(lists)?,
            grid: [0; 2],
            made_for: self.config.problem,
            prepared_for: None,
        })
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        _: &mut FlashInferMlaState,
        plan: &mut FlashInferMlaPlan,
    ) -> Result<()> {
        plan.made_for.check_same("metadata", &self.config.problem)?;
        let extents = plan.read(batch, self.config.problem.page_size as usize)?;
        let [tokens, ..] = extents;
        if tokens == 0 {
            plan.prepared_for = Some(extents);
            return Ok(());
        }
        let capacity = plan.capacity();
        let mut call = ffi::FiMlaPlan {
            query_starts: plan.host.query_starts.as_ptr(),
            table_starts: plan.host.starts.as_ptr(),
            seq_lens: plan.host.lens.as_ptr(),
            staging: plan.host.staging.as_mut_ptr().cast(),
            lists: plan.written.as_mut_ptr(),
            staging_bytes: size_of_val(&plan.host.staging[..]) as i64,
            requests: int("requests", plan.host.lens.len())?,
            heads: int("heads", self.heads())?,
            capacity: int("capacity", capacity)?,
            sms: sms(device)?,
            ..Default::default()
        };
        device.bind()?;
        // SAFETY: each list has the length that the header gives for these numbers of requests and
        // entries. The staging has the size that `fi_mla_staging_bytes` returned. All of them
        // outlive the call. The number of SMs is that of the current device.
        check("plan of FLASHINFER_MLA", unsafe {
            ffi::fi_mla_plan(&raw mut call)
        })?;
        plan.grid = [call.grid_x, call.grid_y];
        let bytes: Vec<u8> = plan.written.iter().flat_map(|n| n.to_ne_bytes()).collect();
        device.upload(&bytes, plan.lists.bytes_mut())?;
        plan.prepared_for = Some(extents);
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut FlashInferMlaState,
        plan: &FlashInferMlaPlan,
    ) -> Result<()> {
        call.check(&self.config, &Self::SPEC)?;
        state.made_for.check_same("state", &self.config.problem)?;
        plan.made_for.check_same("metadata", &self.config.problem)?;
        let problem = &self.config.problem;
        let [latent, rope] = call.query.parts(LATENT)?;
        let Output::Plain(out) = call.out else {
            return Err(Error::argument("out", "e4m3", problem.dtype));
        };
        let table = &call.batch.block_table;
        let tokens = latent.shape()[0];
        let given = [tokens, table.requests(), table.max_pages()];
        if plan.prepared_for != Some(given) {
            let none = || "a batch that was prepared".to_owned();
            let extents = plan.prepared_for.map_or_else(none, shown);
            let accepted = format!("{extents}, for which it was prepared");
            return Err(Error::argument("batch", shown(given), accepted));
        }
        if tokens == 0 || table.requests() == 0 {
            return Ok(());
        }
        if state.lse.len() < tokens * self.heads() * size_of::<f32>() {
            let accepted = "no more than the limits that the state was made for";
            return Err(Error::argument("query tokens", tokens, accepted));
        }
        let own_lse = state.lse.address() as *mut _;
        let (lse, transposed) = match call.lse {
            None => (std::ptr::null_mut(), None),
            Some(lse) => {
                let head_stride = lse.layout().row_stride as i64;
                let to = lse.into_bytes().address() as *mut _;
                match (tokens, head_stride) {
                    // With one query token, FlashInfer's order equals ours.
                    (1, 1) => (to, None),
                    _ => (own_lse, Some((to, head_stride))),
                }
            }
        };
        let (element, rows) = (problem.dtype.bytes(), call.cache.layout());
        let rope_rows = rows.rope_strides();
        let row_stride = |field, bytes: usize| stride(field, bytes / element, rows.page_size);
        let latent_strides = strides("query latent", latent.layout())?;
        let rope_strides = strides("query rope", rope.layout())?;
        let out_strides = strides("out", out.layout())?;
        let run = ffi::FiMlaRun {
            query_latent: latent.bytes().address() as *const _,
            query_rope: rope.bytes().address() as *const _,
            cache: call.cache.bytes().address() as *const _,
            cache_rope: call.cache.rope_bytes().address() as *const _,
            block_table: table.entries().bytes().address() as *const _,
            lists: plan.lists.address() as *const _,
            workspace: state.partial.address() as *mut _,
            out: out.into_bytes().address() as *mut _,
            lse,
            workspace_bytes: state.partial.len() as i64,
            query_latent_token_stride: latent_strides[0],
            query_latent_head_stride: latent_strides[1],
            query_rope_token_stride: rope_strides[0],
            query_rope_head_stride: rope_strides[1],
            // The kernels multiply these two in 64 bits.
            page_stride: stride("page stride", rows.page_stride / element, 1)?,
            rope_page_stride: stride("rope page stride", rope_rows.page_stride / element, 1)?,
            row_stride: row_stride("row stride", rows.row_stride)?,
            rope_row_stride: row_stride("rope row stride", rope_rows.row_stride)?,
            out_token_stride: out_strides[0],
            out_head_stride: out_strides[1],
            heads: int("heads", self.heads())?,
            page_size: int("page_size", rows.page_size)?,
            capacity: int("capacity", plan.capacity())?,
            grid_x: plan.grid[0],
            grid_y: plan.grid[1],
            dtype: dtype_code(problem.dtype)?,
            softmax_scale: self.config.softmax_scale,
        };
        // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree. The
        // lists are those of a plan for this batch, and the workspace has the size that the plan
        // assumes. Pages and lengths keep to the contract of a call, by the caller's promise.
        unsafe { launch(device, "FLASHINFER_MLA", self.launch, &run)? };
        let Some((to, head_stride)) = transposed else {
            return Ok(());
        };
        let lse = ffi::FiLse {
            from: own_lse,
            to,
            head_stride,
            tokens: int("query tokens", tokens)?,
            heads: run.heads,
            dependent: (device.gpu().capability.major >= 9).into(),
            factor: 1.0,
        };
        let operation = "log-sum-exp of FLASHINFER_MLA";
        // SAFETY: the source holds tokens × heads, as was checked above. The target holds what its
        // layout says.
        unsafe { launch(device, operation, ffi::fi_transpose_lse, &lse) }
    }
}

/// The latent width of a cache row.
#[cfg(feature = "fa")]
const LATENT: usize = 512;

/// Returns the kernel for the GPU. If this build has several, the order of `compiled` above
/// decides.
#[cfg(feature = "fa")]
fn fa(device: &Cuda) -> Result<Launch> {
    let capability = device.gpu().capability;
    let facts = FlashInferMla::KERNELS;
    match facts.family_on(capability).map(|family| family.name) {
        #[cfg(feature = "sm90")]
        Some("sm90") => Ok(ffi::fi_mla_fa3),
        #[cfg(feature = "sm80")]
        Some("sm80") => Ok(ffi::fi_mla_fa2),
        _ => Err(Error::argument(
            "device",
            capability,
            "one that it is compiled for",
        )),
    }
}

#[cfg(feature = "fa")]
impl FlashInferMlaPlan {
    fn capacity(&self) -> usize {
        self.written.len() / ffi::FI_MLA_LISTS as usize
    }

    /// Copies the lengths of a batch. There is no plan until one is made for them.
    fn read(&mut self, batch: &DecodeBatch<'_, Cuda>, page_size: usize) -> Result<Extents> {
        self.prepared_for = None;
        let accepted =
            "the query tokens and the length of each request: FlashInfer plans on the host";
        let [query_lens, seq_lens] = batch
            .host
            .ok_or_else(|| Error::argument("host lengths", "none", accepted))?;
        let (requests, max_pages) = (batch.block_table.requests(), batch.block_table.max_pages());
        for (field, given) in [
            ("host query lengths", query_lens.len()),
            ("host lengths", seq_lens.len()),
        ] {
            if given != requests {
                return Err(Error::argument(field, given, requests));
            }
        }
        // The kernels count the slots of all rows of the block table in 32 bits.
        let slots = requests * max_pages * page_size;
        if u32::try_from(slots).is_err() {
            let given = format!("{requests} requests of {max_pages} pages of {page_size}");
            return Err(Error::argument(
                "block table",
                given,
                "at most 4294967295 tokens",
            ));
        }
        // The kernels would read entries of the block table beyond the request's own.
        let room = max_pages * page_size;
        if let Some(len) = seq_lens.iter().find(|len| **len as usize > room) {
            let accepted = format!("at most {max_pages} pages of {page_size}");
            return Err(Error::argument("host lengths", len, accepted));
        }
        let entries = iter::repeat_n(max_pages, requests);
        let lens = [query_lens, seq_lens];
        self.host.read(lens, "block table", entries)?;
        let tokens = self.host.query_starts[requests] as usize;
        Ok([tokens, requests, max_pages])
    }
}
