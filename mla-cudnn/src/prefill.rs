//! CUDNN: expanded prefill over ragged batches.
//!
//! cuDNN builds a plan for each number of requests and each power of two that bounds their lengths,
//! when this combination first occurs. If all requests have the same length, and it is among the
//! [exact](crate::ExactLengths) ones, the plan is for exactly this length, which is faster.
//!
//! Requests without queries or keys are not passed to cuDNN. Query tokens that see no key are
//! filled here, since versions below 9.25 give NaN for them. A plan contains the stride of the
//! log-sum-exp. The log-sum-exp is therefore written with one stride for all steps, and then
//! copied.

use mla_runtime::mla_backend;

#[cfg(feature = "cudnn")]
use {
    crate::ffi,
    crate::lengths::{ExactLengths, chosen},
    crate::library::library,
    crate::lists::{LISTS, Lists, Seen, are_equal, int, split},
    crate::session::Session,
    cudarc::driver::sys,
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::backend::{
        Keys, LayerConfig, Output, PrefillBackend, PrefillBatch, PrefillCall, StepLimits,
    },
    mla_runtime::device::Device,
    mla_runtime::model::DType,
    mla_runtime::room::with_room,
    mla_runtime::spec::{Cause, Problem},
    mla_runtime::tensor::{Layout, Memory},
    mla_runtime::{Error, Result},
    std::ops::Range,
};

/// Expanded attention by the machine's own cuDNN. Addresses and strides in bytes are multiples of
/// 16.
#[derive(Debug)]
pub struct Cudnn {
    #[cfg(feature = "cudnn")]
    config: LayerConfig,
    #[cfg(feature = "cudnn")]
    exact: ExactLengths,
}

/// The session with cuDNN, the lengths and offsets of the step's calls, and a log-sum-exp.
#[cfg(feature = "cudnn")]
pub struct CudnnState {
    made_for: Problem,
    session: Session,
    query_lens: Vec<u32>,
    key_lens: Vec<u32>,
    lists: Lists,
    /// Log-sum-exp, `[heads, lse_stride]`.
    lse: Buffer,
    lse_stride: usize,
}

/// Properties of a call on which its plan depends: the query tokens and keys of its requests, and
/// the number of its context chunk, if it is not the call for new tokens.
#[cfg(feature = "cudnn")]
#[derive(Clone, Copy)]
struct Lens<'a> {
    query: &'a [u32],
    key: &'a [u32],
    chunk: Option<usize>,
}

#[cfg(feature = "cudnn")]
impl Lens<'_> {
    fn causal(self) -> bool {
        self.chunk.is_none()
    }

    /// Returns the index among the step's calls.
    fn call(self) -> usize {
        self.chunk.map_or(0, |index| index.saturating_add(1))
    }
}

/// The checked tensors of a call, in the order query, keys, values, output.
#[cfg(feature = "cudnn")]
struct Tensors {
    layouts: [Layout; 4],
    addresses: [u64; 4],
    /// The address of the log-sum-exp, or 0, and its stride between heads.
    lse: (u64, usize),
}

/// cuDNN compiles for the GPU that it finds.
#[cfg(feature = "cudnn")]
const ANY_GPU: &[&str] = &["compute_80"];

#[mla_backend(
    name = "CUDNN",
    provider = "cudnn",
    feature = "cudnn",
    sm = "8x|90|10x|12x",
    compiled = ANY_GPU,
    run_on = crate::RUN_ON,
    dtypes = "f16,bf16",
    requires_r1 = true,
    alignment = 16,
    features = "strided_outputs",
    priority = "50"
)]
impl PrefillBackend for Cudnn {
    type Device = Cuda;
    type State = CudnnState;
    type Metadata = ();

    fn availability() -> Result<(), Cause> {
        <Cuda as Device>::availability()?;
        library().map(|_| ())
    }

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        let version = library().map_err(|cause| Error::Device {
            device: "cuda",
            operation: "open cuDNN",
            message: cause.to_string(),
        })?;
        let capability = device.gpu().capability;
        if capability.major == 8 && version < [9, 18, 1] {
            let [major, minor, patch] = version;
            let given = format!("{major}.{minor}.{patch} on sm {capability}");
            let accepted = "9.18.1 and up, which takes ragged batches there";
            return Err(Error::argument("libcudnn", given, accepted));
        }
        Ok(Self {
            config: *config,
            exact: chosen(),
        })
    }

    fn workspace_bytes(&self, _: &Cuda, limits: &StepLimits) -> Result<u64> {
        // Workspaces of plans are not included, since their sizes are known only after the plans
        // are built.
        let lists = Lists::bytes(limits.requests);
        Ok(lists.saturating_add(self.lse_bytes(limits)) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<CudnnState> {
        Ok(CudnnState {
            made_for: self.config.problem,
            session: Session::new(device)?,
            query_lens: with_room(limits.requests)?,
            key_lens: with_room(limits.requests)?,
            lists: Lists::new(device, limits.requests)?,
            lse: device.allocate(self.lse_bytes(limits))?,
            lse_stride: lse_stride(limits),
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &PrefillBatch<'_>,
        state: &mut CudnnState,
        (): &mut (),
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        for (to, from) in [
            (&mut state.query_lens, batch.query_lens),
            (&mut state.key_lens, batch.key_lens),
        ] {
            to.clear();
            to.extend_from_slice(from);
        }
        let (query, key) = (batch.query_lens, batch.key_lens);
        let chunk = None;
        self.prepare_lists(device, state, Lens { query, key, chunk })?;
        for (index, chunk) in batch.chunks.iter().enumerate() {
            let requests = chunk.request_start..chunk.request_end;
            let Some(query) = query.get(requests) else {
                let accepted = format!("at most {}", batch.query_lens.len());
                let given = chunk.request_end;
                return Err(Error::argument("chunk's requests", given, accepted));
            };
            let (key, chunk) = (&chunk.seq_lens[..], Some(index));
            self.prepare_lists(device, state, Lens { query, key, chunk })?;
        }
        Ok(())
    }

    unsafe fn prefill(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut CudnnState,
        (): &(),
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        if let Some((index, [query, key])) = call.chunk {
            let chunk = Some(index);
            return self.attend(device, call, state, Lens { query, key, chunk });
        }
        let lens = [&mut state.query_lens, &mut state.key_lens].map(std::mem::take);
        let ([query, key], chunk) = (&lens, None);
        let done = self.attend(device, call, state, Lens { query, key, chunk });
        [state.query_lens, state.key_lens] = lens;
        done
    }
}

/// Returns the distance between the heads of a log-sum-exp that fits any step. It is a multiple of
/// 256 bytes.
#[cfg(feature = "cudnn")]
fn lse_stride(limits: &StepLimits) -> usize {
    limits.tokens.max(1).div_ceil(64).saturating_mul(64)
}

#[cfg(feature = "cudnn")]
impl Cudnn {
    fn lse_bytes(&self, limits: &StepLimits) -> usize {
        let heads = self.config.problem.heads as usize;
        (heads * size_of::<f32>()).saturating_mul(lse_stride(limits))
    }

    /// Writes the lists of a call of the step, if the call will read any.
    fn prepare_lists(&self, device: &Cuda, state: &mut CudnnState, lens: Lens<'_>) -> Result<()> {
        let (seen, _) = split(lens.query, lens.key, lens.causal())?;
        if seen.is_empty() || self.exact_lens(&seen).is_some() {
            return Ok(());
        }
        state.lists.prepare(device, lens.call(), &seen)
    }

    fn attend(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut CudnnState,
        lens: Lens<'_>,
    ) -> Result<()> {
        let tensors = self.tensors(call, lens)?;
        let query_tokens = tensors.layouts[0].shape[0];
        if tensors.lse.0 != 0 && query_tokens > state.lse_stride {
            let accepted = format!("at most {}, the limits of the state", state.lse_stride);
            return Err(Error::argument("query tokens", query_tokens, accepted));
        }
        let (seen, unseen) = split(lens.query, lens.key, lens.causal())?;
        if !seen.is_empty() {
            let (lse, lse_stride) = match tensors.lse.0 {
                0 => (0, 0),
                _ => (state.lse.address(), state.lse_stride),
            };
            let key = self.key(&tensors, &seen, lens.causal(), lse_stride)?;
            let key = state.session.built(key)?;
            let lists = if key.equal == 0 {
                let strides = tensors.layouts.map(|layout| layout.strides[0]);
                state.lists.of(device, lens.call(), &seen, strides)?
            } else {
                [0; LISTS]
            };
            let [query, keys, values, out] = tensors.addresses;
            let list = |index: usize| lists[index] as *const i32;
            let run = ffi::McRun {
                query: query as *const _,
                key: keys as *const _,
                value: values as *const _,
                out: out as *mut _,
                lse: lse as *mut _,
                query_lens: list(0),
                key_lens: list(1),
                query_offsets: list(2),
                key_offsets: list(3),
                value_offsets: list(4),
                out_offsets: list(5),
                lse_offsets: list(6),
                workspace: std::ptr::null_mut(),
            };
            // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree.
            // The state's log-sum-exp has room for all query tokens. The lists were written for
            // these requests and lie within the tensors, or the requests are equal and the plan
            // reads no list.
            unsafe { state.session.run(&key, run)? };
            // SAFETY: the log-sum-exp was checked to hold its heads and tokens and is borrowed
            // mutably. The state's log-sum-exp has room for them.
            unsafe { copy_lse(device, &state.lse, state.lse_stride, &tensors)? };
        }
        for rows in &unseen {
            // SAFETY: the rows belong to the output and the log-sum-exp, which were checked and are
            // borrowed mutably.
            unsafe { fill(device, rows, &tensors)? };
        }
        Ok(())
    }

    /// Returns the tensors of a call, whose sizes have to fit the lengths.
    fn tensors(&self, call: PrefillCall<'_, Cuda>, lens: Lens<'_>) -> Result<Tensors> {
        call.check(&self.config, &Self::SPEC)?;
        let (Keys::Packed(keys), Output::Plain(out)) = (call.keys, call.out) else {
            let given = "keys in two, or an output in e4m3";
            return Err(Error::argument("call", given, "packed and plain"));
        };
        let [query_tokens, key_tokens]: [usize; 2] =
            [lens.query, lens.key].map(|lens| lens.iter().map(|len| *len as usize).sum());
        let layouts = [
            *call.query.layout(),
            *keys.layout(),
            *call.values.layout(),
            *out.layout(),
        ];
        let addresses = [
            call.query.bytes().address(),
            keys.bytes().address(),
            call.values.bytes().address(),
            out.into_bytes().address(),
        ];
        for (field, given, accepted) in [
            ("query tokens", layouts[0].shape[0], query_tokens),
            ("key tokens", layouts[1].shape[0], key_tokens),
        ] {
            if given != accepted {
                let accepted = format!("{accepted}, for which it was prepared");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let lse = match call.lse {
            None => (0, 0),
            Some(lse) => {
                let stride = lse.layout().row_stride;
                (lse.into_bytes().address(), stride)
            }
        };
        Ok(Tensors {
            layouts,
            addresses,
            lse,
        })
    }

    /// Returns the numbers of query tokens and keys of each request, if they are equal for all
    /// requests and have their own plans.
    fn exact_lens(&self, seen: &[Seen]) -> Option<[usize; 2]> {
        let first = seen.first()?;
        let [query_len, key_len] = [first.query.len(), first.key.len()];
        let is_exact = self.exact.has(query_len)
            && self.exact.has(key_len)
            && are_equal(seen, query_len, key_len);
        is_exact.then_some([query_len, key_len])
    }

    /// Returns the key of the plan for these requests. Without a log-sum-exp, its stride is 0.
    fn key(
        &self,
        tensors: &Tensors,
        seen: &[Seen],
        causal: bool,
        lse_stride: usize,
    ) -> Result<ffi::McKey> {
        let problem = &self.config.problem;
        let bucket = |max: Option<usize>| max.unwrap_or(0).next_power_of_two().max(64);
        let equal = self.exact_lens(seen);
        let [max_query_len, max_key_len] = equal.unwrap_or_else(|| {
            let queries = bucket(seen.iter().map(|seen| seen.query.len()).max());
            // A mask that is aligned to the bottom right needs at least as many keys as queries.
            let min = if causal { queries } else { 0 };
            let keys = bucket(seen.iter().map(|seen| seen.key.len()).max());
            [queries, keys.max(min)]
        });
        let wide = |stride: usize| stride as i64;
        let [query, keys, values, out] = tensors.layouts.map(|layout| layout.strides);
        Ok(ffi::McKey {
            query_token_stride: wide(query[0]),
            query_head_stride: wide(query[1]),
            key_token_stride: wide(keys[0]),
            key_head_stride: wide(keys[1]),
            value_token_stride: wide(values[0]),
            value_head_stride: wide(values[1]),
            out_token_stride: wide(out[0]),
            out_head_stride: wide(out[1]),
            lse_head_stride: wide(lse_stride),
            requests: int("requests", seen.len())?,
            max_query_len: int("max_query_len", max_query_len)?,
            max_key_len: int("max_key_len", max_key_len)?,
            heads: int("heads", problem.heads as usize)?,
            key_dim: int("query width", problem.dims.head.qk() as usize)?,
            value_dim: int("value width", problem.dims.head.v as usize)?,
            dtype: i32::from(problem.dtype == DType::BF16),
            causal: causal.into(),
            equal: equal.is_some().into(),
            softmax_scale: self.config.softmax_scale,
        })
    }
}

/// Copies the log-sum-exp of a call to its destination.
///
/// # Safety
///
/// Both hold the heads and query tokens of the call, and the caller may write the target.
#[cfg(feature = "cudnn")]
unsafe fn copy_lse(device: &Cuda, from: &Buffer, stride: usize, tensors: &Tensors) -> Result<()> {
    let (to, to_stride) = tensors.lse;
    if to == 0 {
        return Ok(());
    }
    let [tokens, heads, _] = tensors.layouts[3].shape;
    let bytes = size_of::<f32>();
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: from.address(),
        srcArray: std::ptr::null_mut(),
        srcPitch: stride * bytes,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        // With one head, the stride may have any value, so the pitch is made large enough.
        dstPitch: to_stride.max(tokens) * bytes,
        WidthInBytes: tokens * bytes,
        Height: heads,
    };
    device.bind()?;
    // SAFETY: this function's own contract covers source and destination.
    let status = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, device.raw_stream().cast()) };
    check("log-sum-exp of CUDNN", status)
}

/// Returns the error of a call that the driver refused.
#[cfg(feature = "cudnn")]
fn check(operation: &'static str, status: sys::CUresult) -> Result<()> {
    status.result().map_err(|error| Error::Device {
        device: "cuda",
        operation,
        message: error.to_string(),
    })
}

/// Writes 0 and −inf into rows of query tokens that see no key.
///
/// # Safety
///
/// The rows lie within the output and the log-sum-exp, which the caller may write.
#[cfg(feature = "cudnn")]
unsafe fn fill(device: &Cuda, rows: &Range<usize>, tensors: &Tensors) -> Result<()> {
    let operation = "empty rows of CUDNN";
    let stream = device.raw_stream().cast();
    let (out, address) = (&tensors.layouts[3], tensors.addresses[3]);
    let ([_, heads, width], [token, head, _]) = (out.shape, out.strides);
    let bytes = out.dtype.bytes();
    device.bind()?;
    // A row is a token if its heads are contiguous, and otherwise one head of a token.
    let (columns, parts) = if head == width {
        (heads * width, 1)
    } else {
        (width, heads)
    };
    for part in 0..parts {
        let begin = address + ((rows.start * token + part * head) * bytes) as u64;
        // SAFETY: this function's own contract covers the rows. An element has 16 bits.
        let status = unsafe {
            sys::cuMemsetD2D16Async(begin, token * bytes, 0, columns, rows.len(), stream)
        };
        check(operation, status)?;
    }
    let (lse, stride) = tensors.lse;
    if lse == 0 {
        return Ok(());
    }
    let (begin, pitch) = (lse + (rows.start * 4) as u64, stride * 4);
    let infinity = f32::NEG_INFINITY.to_bits();
    // SAFETY: this function's own contract covers a row of each head.
    let status =
        unsafe { sys::cuMemsetD2D32Async(begin, pitch, infinity, rows.len(), heads, stream) };
    check(operation, status)
}
