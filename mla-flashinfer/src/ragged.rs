//! FLASHINFER: expanded prefill over ragged batches.
//!
//! FlashInfer plans on the host. The plans of the new tokens and of the first context chunks are
//! made once per step for all layers, in
//! [`prepare`](mla_runtime::backend::PrefillBackend::prepare). The plan of a further chunk is made
//! in each call, since the number of chunks of a step has no limit. The kernels' log-sum-exp is
//! `[tokens, heads]` in base 2. A kernel of this crate converts it to `[heads, tokens]` in natural
//! logarithms. Another one writes 0 and −inf for query tokens that see no key.

use mla_runtime::mla_backend;

#[cfg(feature = "gpu")]
use {
    crate::host::HostLists,
    crate::status::{check, dtype_code, int, launch, sms, within},
    crate::{compiled, ffi},
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{
        Keys, LayerConfig, Output, PrefillBackend, PrefillBatch, PrefillCall, StepLimits,
    },
    mla_runtime::spec::Problem,
    mla_runtime::tensor::Memory as _,
    mla_runtime::{Error, Result},
};

/// Expanded attention by FlashInfer: fa3 on Hopper if the feature `sm90` is on, CUTLASS's kernel on
/// Blackwell if `sm100` is on, otherwise fa2.
///
/// Outputs of CUTLASS's kernel and of fa2 have no gaps. Rows begin at multiples of 16 bytes.
#[derive(Debug)]
pub struct FlashInfer {
    #[cfg(feature = "gpu")]
    config: LayerConfig,
    #[cfg(feature = "gpu")]
    version: Version,
}

/// A version of FlashInfer's kernel: 2, 3, or CUTLASS's.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug)]
struct Version {
    number: i32,
    launch: Launch,
}

#[cfg(feature = "gpu")]
impl Version {
    /// Returns the maximum number of elements that the kernel can count in a tensor. Returns `None`
    /// if memory cannot hold more.
    fn max_elements(self) -> Option<usize> {
        match self.number {
            2 => Some(u32::MAX as usize),
            3 => None,
            _ => Some(i32::MAX as usize),
        }
    }
}

/// A function of the C interface that attends.
#[cfg(feature = "gpu")]
type Launch = unsafe extern "C" fn(*const ffi::FiRaggedRun, *mut std::ffi::c_void) -> i32;

/// The maximum number of context chunks of a step with plans that are made once for all layers.
#[cfg(feature = "gpu")]
const PLANNED_CHUNKS: usize = 8;

/// The plans of a step: those of its new tokens, and of its first context chunks.
#[cfg(feature = "gpu")]
pub struct FlashInferPlans {
    made_for: Problem,
    new_tokens: Plan,
    chunks: Vec<Plan>,
}

/// The division of a call's work among the SMs.
#[cfg(feature = "gpu")]
struct Plan {
    /// The lists on the device.
    lists: Buffer,
    host: HostLists,
    /// FlashInfer's description of the plan.
    numbers: [i64; 15],
    causal: bool,
}

/// The plan of a context chunk without a plan among the step's, partial results, and the
/// log-sum-exp in FlashInfer's order.
#[cfg(feature = "gpu")]
pub struct FlashInferState {
    made_for: Problem,
    requests: usize,
    tokens: usize,
    chunk: Plan,
    workspace: Buffer,
    lse: Buffer,
}

#[cfg(feature = "gpu")]
impl FlashInfer {
    fn heads(&self) -> usize {
        self.config.problem.heads as usize
    }

    fn sizes(&self, device: &Cuda, limits: &StepLimits) -> Result<ffi::FiRaggedSizes> {
        let mut sizes = ffi::FiRaggedSizes::default();
        // SAFETY: the address is that of a value on this stack.
        let status = unsafe {
            ffi::fi_ragged_sizes(
                self.version.number,
                int("requests", limits.requests)?,
                int("tokens", limits.tokens)?,
                int("heads", self.heads())?,
                sms(device)?,
                &raw mut sizes,
            )
        };
        check("sizes of FLASHINFER", status)?;
        Ok(sizes)
    }

    fn lse_bytes(&self, limits: &StepLimits) -> usize {
        limits
            .tokens
            .saturating_mul(self.heads() * size_of::<f32>())
    }

    /// Returns the number of chunks with plans in the state, for steps within the limits.
    fn planned_chunks(limits: &StepLimits) -> usize {
        if limits.context_rows > 0 {
            PLANNED_CHUNKS
        } else {
            0
        }
    }

    fn plan(&self, device: &Cuda, limits: &StepLimits) -> Result<Plan> {
        let bytes = self.sizes(device, limits)?.lists as usize;
        Ok(Plan {
            host: HostLists::new(limits.requests, bytes)?,
            lists: device.allocate(bytes)?,
            numbers: [0; 15],
            causal: false,
        })
    }

    /// Divides the work of query and key lengths, and copies the lists to the device.
    fn divide(
        &self,
        device: &Cuda,
        lens: [&[u32]; 2],
        causal: bool,
        workspace: usize,
        plan: &mut Plan,
    ) -> Result<()> {
        plan.causal = causal;
        let divided = self.plan_on_the_host(device, lens, workspace, plan);
        if divided.is_err() {
            plan.host.clear();
        }
        divided
    }

    fn plan_on_the_host(
        &self,
        device: &Cuda,
        lens: [&[u32]; 2],
        workspace: usize,
        plan: &mut Plan,
    ) -> Result<()> {
        let [query_lens, key_lens] = lens;
        if key_lens.len() != query_lens.len() {
            let accepted = format!("{}, as many as query lengths", query_lens.len());
            return Err(Error::argument("key lengths", key_lens.len(), accepted));
        }
        let keys = key_lens.iter().map(|len| *len as usize);
        plan.host.read(lens, "key tokens", keys)?;
        // FlashInfer divides by the number of requests, and without keys there is nothing to plan.
        if plan.tokens().contains(&0) {
            return Ok(());
        }
        let mut call = ffi::FiRaggedPlan {
            query_starts: plan.host.query_starts.as_ptr(),
            key_starts: plan.host.starts.as_ptr(),
            key_lens: plan.host.lens.as_ptr(),
            staging: plan.host.staging.as_mut_ptr().cast(),
            lists: plan.lists.address() as *mut _,
            lists_bytes: plan.lists.len() as i64,
            workspace_bytes: workspace as i64,
            fa: self.version.number,
            requests: int("requests", plan.host.lens.len())?,
            heads: int("heads", self.heads())?,
            causal: plan.causal.into(),
            numbers: plan.numbers,
        };
        device.bind()?;
        // SAFETY: each list has the length that the header gives for this number of requests. The
        // staging and the lists on the device have the sizes that are passed, and FlashInfer
        // refuses to write more.
        let status = unsafe { ffi::fi_ragged_plan(&raw mut call, device.raw_stream()) };
        plan.numbers = call.numbers;
        check("plan of FLASHINFER", status)
    }

    /// # Safety
    ///
    /// The contract of [`PrefillBackend::prefill`].
    unsafe fn attend(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        plan: &Plan,
        state: &FlashInferState,
    ) -> Result<()> {
        call.check(&self.config, &Self::SPEC)?;
        let (Keys::Packed(keys), Output::Plain(out)) = (call.keys, call.out) else {
            let given = "keys in two, or an output in e4m3";
            return Err(Error::argument("call", given, "packed and plain"));
        };
        let layouts = [
            ("query", *call.query.layout()),
            ("keys", *keys.layout()),
            ("values", *call.values.layout()),
            ("out", *out.layout()),
        ];
        let tokens = [call.query.shape()[0], call.values.shape()[0]];
        for ((field, given), accepted) in ["query tokens", "key tokens"]
            .into_iter()
            .zip(tokens)
            .zip(plan.tokens())
        {
            if given != accepted {
                let accepted = format!("{accepted}, for which it was prepared");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let [query_tokens, key_tokens] = tokens;
        if state.lse.len() < query_tokens * self.heads() * size_of::<f32>() {
            let accepted = "no more than the limits that the state was made for";
            return Err(Error::argument("query tokens", query_tokens, accepted));
        }
        if let Some(max) = self.version.max_elements() {
            for (field, layout) in &layouts {
                within(field, layout, max)?;
            }
        }
        let [query_strides, key_strides, value_strides, out_strides] =
            layouts.map(|(_, layout)| layout.strides.map(|stride| stride as i64));
        let own_lse = match call.lse {
            Some(_) => state.lse.address() as *mut _,
            None => std::ptr::null_mut(),
        };
        let run = ffi::FiRaggedRun {
            query: call.query.bytes().address() as *const _,
            key: keys.bytes().address() as *const _,
            value: call.values.bytes().address() as *const _,
            query_starts: call.query_starts.bytes().address() as *const _,
            key_starts: call.key_starts.bytes().address() as *const _,
            numbers: plan.numbers.as_ptr(),
            lists: plan.lists.address() as *const _,
            workspace: state.workspace.address() as *mut _,
            out: out.into_bytes().address() as *mut _,
            lse: own_lse,
            query_token_stride: query_strides[0],
            query_head_stride: query_strides[1],
            key_token_stride: key_strides[0],
            key_head_stride: key_strides[1],
            value_token_stride: value_strides[0],
            value_head_stride: value_strides[1],
            out_token_stride: out_strides[0],
            out_head_stride: out_strides[1],
            query_tokens: int("query tokens", query_tokens)?,
            key_tokens: int("key tokens", key_tokens)?,
            heads: int("heads", self.heads())?,
            causal: plan.causal.into(),
            dtype: dtype_code(self.config.problem.dtype)?,
            softmax_scale: self.config.softmax_scale,
        };
        if query_tokens == 0 {
            return Ok(());
        }
        let (lse, lse_head_stride) = call.lse.map_or((std::ptr::null_mut::<f32>(), 0), |lse| {
            let head_stride = lse.layout().row_stride as i64;
            (lse.into_bytes().address() as *mut _, head_stride)
        });
        if key_tokens > 0 {
            // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree.
            // The plan is for these numbers of tokens, and the workspace has the size that the plan
            // was made for. The starts on the device are those of the plan, by the caller's
            // promise.
            unsafe { launch(device, "FLASHINFER", self.version.launch, &run)? };
        }
        if key_tokens > 0 && !lse.is_null() {
            let params = ffi::FiLse {
                from: own_lse,
                to: lse,
                head_stride: lse_head_stride,
                tokens: run.query_tokens,
                heads: run.heads,
                dependent: (device.gpu().capability.major >= 9).into(),
                factor: std::f32::consts::LN_2,
            };
            let operation = "log-sum-exp of FLASHINFER";
            // SAFETY: the source holds query tokens × heads, as was checked above. The target holds
            // what its layout says.
            unsafe { launch(device, operation, ffi::fi_transpose_lse, &params)? };
        }
        if !plan.has_unseen() {
            return Ok(());
        }
        // Fills the rows of query tokens that see no key.
        let unseen = ffi::FiUnseen {
            query_starts: run.query_starts,
            key_starts: run.key_starts,
            out: run.out,
            lse,
            out_token_stride: run.out_token_stride,
            out_head_stride: run.out_head_stride,
            lse_head_stride,
            requests: int("requests", plan.host.lens.len())?,
            query_tokens: run.query_tokens,
            heads: run.heads,
            width: 128,
            causal: run.causal,
        };
        let operation = "empty rows of FLASHINFER";
        // SAFETY: the tensors were checked to hold what their layouts say. Both arrays of starts
        // have one entry more than there are requests.
        unsafe { launch(device, operation, ffi::fi_clear_unseen, &unseen) }
    }
}

#[mla_backend(
    name = "FLASHINFER",
    provider = "flashinfer",
    feature = "sm80|sm90|sm100",
    sm = "80+",
    compiled = "compiled::SM100|compiled::SM90|compiled::SM80",
    run_on = crate::RUN_ON,
    dtypes = "f16,bf16",
    lse_precision = "dtype",
    requires_r1 = true,
    alignment = 16,
    priority = "10x:80,*:90"
)]
impl PrefillBackend for FlashInfer {
    type Device = Cuda;
    type State = FlashInferState;
    type Metadata = FlashInferPlans;

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        let capability = device.gpu().capability;
        let family = Self::KERNELS
            .family_on(capability)
            .map(|family| family.name);
        let (number, launch): (_, Launch) = match family {
            #[cfg(feature = "sm90")]
            Some("sm90") => (3, ffi::fi_ragged_fa3),
            #[cfg(feature = "sm100")]
            Some("sm100") => (ffi::FI_CUTLASS as i32, ffi::fi_ragged_cutlass),
            #[cfg(feature = "sm80")]
            Some("sm80") => (2, ffi::fi_ragged_fa2),
            _ => {
                let accepted = "one that it is compiled for";
                return Err(Error::argument("device", capability, accepted));
            }
        };
        Ok(Self {
            config: *config,
            version: Version { number, launch },
        })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        let plans = 2 + Self::planned_chunks(limits) as u64;
        let sizes = self.sizes(device, limits)?;
        Ok(plans * sizes.lists as u64 + sizes.workspace as u64 + self.lse_bytes(limits) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashInferState> {
        Ok(FlashInferState {
            made_for: self.config.problem,
            requests: limits.requests,
            tokens: limits.tokens,
            chunk: self.plan(device, limits)?,
            workspace: device.allocate(self.sizes(device, limits)?.workspace as usize)?,
            lse: device.allocate(self.lse_bytes(limits))?,
        })
    }

    fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashInferPlans> {
        let chunks = (0..Self::planned_chunks(limits)).map(|_| self.plan(device, limits));
        Ok(FlashInferPlans {
            made_for: self.config.problem,
            new_tokens: self.plan(device, limits)?,
            chunks: chunks.collect::<Result<_>>()?,
        })
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &PrefillBatch<'_>,
        state: &mut FlashInferState,
        plans: &mut FlashInferPlans,
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        plans
            .made_for
            .check_same("metadata", &self.config.problem)?;
        let tokens = batch.query_lens.iter().map(|len| *len as usize).sum();
        for (field, given, max) in [
            ("requests", batch.query_lens.len(), state.requests),
            ("tokens", tokens, state.tokens),
        ] {
            if given > max {
                return Err(Error::argument(field, given, format!("at most {max}")));
            }
        }
        let workspace = state.workspace.len();
        let lens = [batch.query_lens, batch.key_lens];
        self.divide(device, lens, true, workspace, &mut plans.new_tokens)?;
        for (chunk, plan) in batch.chunks.iter().zip(&mut plans.chunks) {
            let requests = chunk.request_start..chunk.request_end;
            let Some(query_lens) = batch.query_lens.get(requests) else {
                let accepted = format!("at most {}", batch.query_lens.len());
                return Err(Error::argument(
                    "chunk's requests",
                    chunk.request_end,
                    accepted,
                ));
            };
            let lens = [query_lens, &chunk.seq_lens[..]];
            self.divide(device, lens, false, workspace, plan)?;
        }
        Ok(())
    }

    unsafe fn prefill(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut FlashInferState,
        plans: &FlashInferPlans,
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        plans
            .made_for
            .check_same("metadata", &self.config.problem)?;
        let plan = match call.chunk {
            None => &plans.new_tokens,
            Some((index, lens)) => {
                let planned = plans.chunks.get(index);
                match planned.filter(|plan| plan.is_for(lens)) {
                    Some(plan) => plan,
                    None => {
                        refuse_capture(device)?;
                        let bytes = state.workspace.len();
                        self.divide(device, lens, false, bytes, &mut state.chunk)?;
                        &state.chunk
                    }
                }
            }
        };
        // SAFETY: the caller keeps to the same contract.
        unsafe { self.attend(device, call, plan, state) }
    }
}

/// Refuses a capture. At each replay, a graph would copy the plan again from host memory, which
/// holds another chunk's plan by then.
#[cfg(feature = "gpu")]
fn refuse_capture(device: &Cuda) -> Result<()> {
    if !device.is_capturing()? {
        return Ok(());
    }
    Err(Error::argument(
        "context chunks",
        "one that is planned within a capture",
        format!("the first {PLANNED_CHUNKS} of a step, which it plans before"),
    ))
}

#[cfg(feature = "gpu")]
impl Plan {
    /// Returns true if the plan was made for requests of these query tokens and keys.
    fn is_for(&self, [query_lens, key_lens]: [&[u32]; 2]) -> bool {
        let queries = self.host.query_lens();
        let keys = self.host.lens.iter().copied();
        queries.eq(query_lens.iter().map(|len| *len as i32))
            && keys.eq(key_lens.iter().map(|len| *len as i32))
    }

    /// Returns the numbers of query and key tokens.
    fn tokens(&self) -> [usize; 2] {
        [&self.host.query_starts, &self.host.starts]
            .map(|starts| starts.last().map_or(0, |end| *end as usize))
    }

    /// Returns true if some query token sees no key.
    fn has_unseen(&self) -> bool {
        let min = |queries: i32| if self.causal { queries } else { 1 };
        let mut requests = self.host.query_lens().zip(&self.host.lens);
        requests.any(|(queries, keys)| queries > 0 && *keys < min(queries))
    }
}
