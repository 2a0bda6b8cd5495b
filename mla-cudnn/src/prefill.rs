//! CUDNN: expanded prefill over ragged batches.
//!
//! cuDNN builds a plan for each number of requests and each power of two that bounds their lengths,
//! when that first occurs. If all requests have one length, and it is a power of two or a multiple of
//! 512, as chunks of prompts are, it is a plan for equal requests of this length, which is faster.
//! Requests without queries or keys are left out of what it is given, and query tokens that see no
//! key are filled here: versions below 9.25 give NaN for them.

use mla_runtime::mla_backend;

#[cfg(feature = "cudnn")]
use {
    crate::ffi,
    crate::library::library,
    crate::session::Session,
    cudarc::driver::sys,
    mla_kernels::Cuda,
    mla_kernels::device::Buffer,
    mla_runtime::availability::Availability,
    mla_runtime::backend::{
        Keys, LayerConfig, Output, PrefillBackend, PrefillBatch, PrefillCall, StepLimits,
    },
    mla_runtime::device::{Device, Memory},
    mla_runtime::dtype::DType,
    mla_runtime::error::{Error, Result},
    mla_runtime::tensor::Layout,
    std::ops::Range,
};

/// Expanded attention by the machine's own cuDNN. Addresses, and strides in bytes, are multiples of
/// 16.
#[derive(Debug)]
pub struct Cudnn {
    #[cfg(feature = "cudnn")]
    config: LayerConfig,
}

/// The session with cuDNN, and the lengths and offsets of the step's calls.
#[cfg(feature = "cudnn")]
pub struct CudnnState {
    session: Session,
    query_lens: Vec<u32>,
    key_lens: Vec<u32>,
    lists: Lists,
    unseen: Vec<Range<usize>>,
}

/// How many lists a call has.
#[cfg(feature = "cudnn")]
const LISTS: usize = 7;

/// For how many calls of a step lists are kept: those of its new tokens and of its first context
/// chunks.
#[cfg(feature = "cudnn")]
const KEPT_CALLS: usize = 9;

/// The tokens of one request that cuDNN is given.
#[cfg(feature = "cudnn")]
struct Seen {
    query: Range<usize>,
    key: Range<usize>,
}

/// The tensors of a call, once they are checked: in the order query, keys, values, output.
#[cfg(feature = "cudnn")]
struct Tensors {
    layouts: [Layout; 4],
    addresses: [u64; 4],
    /// The address of the log-sum-exp, or 0, and its stride between heads.
    lse: (u64, usize),
}

#[mla_backend(
    name = "CUDNN",
    provider = "cudnn",
    feature = "cudnn",
    sm = "8x|90|10x|12x",
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

    fn availability() -> Availability {
        let library = match library() {
            Ok(_) => Availability::Available,
            Err(cause) => Availability::Unavailable(cause),
        };
        <Cuda as Device>::availability().and(library)
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
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, _: &Cuda, limits: &StepLimits) -> Result<u64> {
        // Without what plans ask for once they are built.
        Ok((KEPT_CALLS * LISTS * (limits.requests + 1) * size_of::<i32>()) as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<CudnnState> {
        Ok(CudnnState {
            session: Session::new(device)?,
            query_lens: Vec::with_capacity(limits.requests),
            key_lens: Vec::with_capacity(limits.requests),
            lists: Lists::new(device, limits.requests)?,
            unseen: Vec::new(),
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cuda,
        batch: &PrefillBatch<'_>,
        state: &mut CudnnState,
        (): &mut (),
    ) -> Result<()> {
        for (to, from) in [
            (&mut state.query_lens, batch.query_lens),
            (&mut state.key_lens, batch.key_lens),
        ] {
            to.clear();
            to.extend_from_slice(from);
        }
        state.lists.kept = 0;
        Ok(())
    }

    fn prefill(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut CudnnState,
        (): &(),
    ) -> Result<()> {
        if let Some(chunk) = call.chunk {
            let lens = (chunk.query_lens, chunk.key_lens);
            return self.attend(device, call, state, lens, false);
        }
        let query_lens = std::mem::take(&mut state.query_lens);
        let key_lens = std::mem::take(&mut state.key_lens);
        let done = self.attend(device, call, state, (&query_lens, &key_lens), true);
        (state.query_lens, state.key_lens) = (query_lens, key_lens);
        done
    }
}

#[cfg(feature = "cudnn")]
impl Cudnn {
    fn attend(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut CudnnState,
        (query_lens, key_lens): (&[u32], &[u32]),
        causal: bool,
    ) -> Result<()> {
        let tensors = self.tensors(call, query_lens, key_lens)?;
        let seen = split(query_lens, key_lens, causal, &mut state.unseen)?;
        if !seen.is_empty() {
            let strides = tensors.layouts.map(|layout| layout.strides[0]);
            let key = self.key(&tensors, &seen, causal)?;
            let key = state.session.built(device, key)?;
            let (lists, room) = match key.equal {
                0 => (state.lists.of(device, &seen, strides)?, state.lists.room),
                _ => (0, 0),
            };
            let list =
                |index: usize| (lists + (index * room * size_of::<i32>()) as u64) as *const i32;
            let [query, keys, values, out] = tensors.addresses;
            let run = ffi::McRun {
                query: query as *const _,
                key: keys as *const _,
                value: values as *const _,
                out: out as *mut _,
                lse: tensors.lse.0 as *mut _,
                query_lens: list(0),
                key_lens: list(1),
                query_offsets: list(2),
                key_offsets: list(3),
                value_offsets: list(4),
                out_offsets: list(5),
                lse_offsets: list(6),
                workspace: std::ptr::null_mut(),
            };
            // SAFETY: every tensor was checked to hold what its layout says and the layouts to
            // agree; the lists were written for these requests and lie within the tensors, or the
            // requests are equal and the plan reads no list.
            unsafe { state.session.run(device, &key, run)? };
        }
        for rows in &state.unseen {
            // SAFETY: the rows are of the output and the log-sum-exp, which were checked and are
            // borrowed mutably.
            unsafe { fill(device, rows, &tensors)? };
        }
        Ok(())
    }

    /// The tensors of a call, which have to be those of the lengths.
    fn tensors(
        &self,
        call: PrefillCall<'_, Cuda>,
        query_lens: &[u32],
        key_lens: &[u32],
    ) -> Result<Tensors> {
        call.check(&self.config, &Self::SPEC)?;
        let (Keys::Packed(keys), Output::Plain(out)) = (call.keys, call.out) else {
            let given = "keys in two, or an output in e4m3";
            return Err(Error::argument("call", given, "packed and plain"));
        };
        let [query_tokens, key_tokens]: [usize; 2] =
            [query_lens, key_lens].map(|lens| lens.iter().map(|len| *len as usize).sum());
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

    /// What a plan for these requests is built for.
    fn key(&self, tensors: &Tensors, seen: &[Seen], causal: bool) -> Result<ffi::McKey> {
        let problem = &self.config.problem;
        let bucket = |lens: &mut dyn Iterator<Item = usize>| {
            let most: usize = lens.max().unwrap_or(0);
            most.next_power_of_two().max(64)
        };
        let own = seen.first().map(|it| [it.query.len(), it.key.len()]);
        let equal = own.filter(|[query_len, key_len]| {
            has_own_plan(*query_len)
                && has_own_plan(*key_len)
                && are_equal(seen, *query_len, *key_len)
        });
        let [max_query_len, max_key_len] = equal.unwrap_or_else(|| {
            let queries = bucket(&mut seen.iter().map(|seen| seen.query.len()));
            // A mask that is aligned to the bottom right wants no more queries than keys.
            let least = if causal { queries } else { 0 };
            let keys = bucket(&mut seen.iter().map(|seen| seen.key.len()));
            [queries, keys.max(least)]
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
            lse_head_stride: wide(tensors.lse.1),
            requests: int("requests", seen.len())?,
            max_query_len: int("longest query", max_query_len)?,
            max_key_len: int("most keys", max_key_len)?,
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

/// Lengths and offsets on the device. All layers of a step have the same, so each call's are copied
/// once per step.
#[cfg(feature = "cudnn")]
struct Lists {
    /// `[KEPT_CALLS, LISTS, room]`: of each call two lists of lengths and five of offsets.
    device: Buffer,
    /// What each call's lists hold, of which only the first so many are this step's.
    written: Vec<Vec<i32>>,
    kept: usize,
    /// Entries of a list: one for each request and one more.
    room: usize,
    scratch: Vec<i32>,
}

#[cfg(feature = "cudnn")]
impl Lists {
    fn new(device: &Cuda, requests: usize) -> Result<Self> {
        let room = requests + 1;
        Ok(Self {
            device: device.allocate(KEPT_CALLS * LISTS * room * size_of::<i32>())?,
            written: vec![Vec::new(); KEPT_CALLS],
            kept: 0,
            room,
            scratch: Vec::with_capacity(LISTS * room),
        })
    }

    /// The address of a call's lists. Past the calls for which they are kept, each call takes the
    /// last place.
    fn of(&mut self, device: &Cuda, seen: &[Seen], strides: [usize; 4]) -> Result<u64> {
        if seen.len() >= self.room {
            let accepted = format!("at most {}", self.room.saturating_sub(1));
            return Err(Error::argument("requests", seen.len(), accepted));
        }
        write_lists(seen, strides, self.room, &mut self.scratch)?;
        let bytes = LISTS * self.room * size_of::<i32>();
        let kept = &self.written[..self.kept];
        let known = kept.iter().position(|lists| *lists == self.scratch);
        let place = known.unwrap_or(self.kept.min(KEPT_CALLS - 1));
        if known.is_none() {
            self.kept = place + 1;
            let copied: Vec<u8> = self.scratch.iter().flat_map(|n| n.to_ne_bytes()).collect();
            let (_, behind) = Cuda::split_mut(self.device.bytes_mut(), place * bytes);
            let (to, _) = Cuda::split_mut(behind, bytes);
            device.upload(&copied, to)?;
            self.written[place].clone_from(&self.scratch);
        }
        Ok(self.device.address() + (place * bytes) as u64)
    }
}

/// What cuDNN is given of each request, and into `unseen` the query tokens that see no key.
#[cfg(feature = "cudnn")]
fn split(
    query_lens: &[u32],
    key_lens: &[u32],
    causal: bool,
    unseen: &mut Vec<Range<usize>>,
) -> Result<Vec<Seen>> {
    if query_lens.len() != key_lens.len() {
        let accepted = format!("{}, as many as query lengths", query_lens.len());
        return Err(Error::argument("key lengths", key_lens.len(), accepted));
    }
    unseen.clear();
    let (mut seen, mut query, mut key) = (Vec::with_capacity(key_lens.len()), 0, 0);
    for (queries, keys) in query_lens.iter().zip(key_lens) {
        let (end, key_end) = (query + *queries as usize, key + *keys as usize);
        // The last query token sees all keys, and each before it one less.
        let first = match (causal, key_end - key) {
            (_, 0) => end,
            (true, keys) => query.max(end.saturating_sub(keys)),
            (false, _) => query,
        };
        if query < first {
            unseen.push(query..first);
        }
        if first < end {
            seen.push(Seen {
                query: first..end,
                key: key..key_end,
            });
        }
        (query, key) = (end, key_end);
    }
    Ok(seen)
}

/// Whether equal requests of this length have a plan of their own. So few lengths have that all of their plans can be
/// kept, and those of prompts in chunks are among them.
#[cfg(feature = "cudnn")]
const fn has_own_plan(len: usize) -> bool {
    len >= 64 && len.is_power_of_two() || len > 0 && len.is_multiple_of(512)
}

/// Whether all requests have these lengths, one behind the other from the first token on.
#[cfg(feature = "cudnn")]
fn are_equal(seen: &[Seen], query_len: usize, key_len: usize) -> bool {
    let is_nth = |tokens: &Range<usize>, len: usize, n: usize| *tokens == (n * len..(n + 1) * len);
    let mut numbered = seen.iter().enumerate();
    numbered.all(|(n, it)| is_nth(&it.query, query_len, n) && is_nth(&it.key, key_len, n))
}

/// The lengths and offsets of a call, each list with room for `room` entries.
#[cfg(feature = "cudnn")]
fn write_lists(
    seen: &[Seen],
    [query, key, value, out]: [usize; 4],
    room: usize,
    written: &mut Vec<i32>,
) -> Result<()> {
    written.clear();
    written.resize(LISTS * room, 0);
    let offset = |field, token: usize, stride: usize| {
        let elements = token.checked_mul(stride).map(i32::try_from);
        elements.and_then(std::result::Result::ok).ok_or_else(|| {
            let given = format!("{token} tokens of {stride} elements");
            Error::argument(field, given, "at most 2147483647 elements in all")
        })
    };
    for (i, request) in seen.iter().enumerate() {
        written[i] = int("query tokens", request.query.len())?;
        written[room + i] = int("keys", request.key.len())?;
    }
    let last = seen.last();
    let last = last.map_or((0, 0), |last| (last.query.end, last.key.end));
    let begins = seen.iter().map(|seen| (seen.query.start, seen.key.start));
    for (i, (first_query, first_key)) in begins.chain([last]).enumerate() {
        let offsets = [
            offset("query", first_query, query)?,
            offset("keys", first_key, key)?,
            offset("values", first_key, value)?,
            offset("output", first_query, out)?,
            offset("lse", first_query, 1)?,
        ];
        for (list, offset) in offsets.into_iter().enumerate() {
            written[(2 + list) * room + i] = offset;
        }
    }
    Ok(())
}

/// Writes 0 and −inf into rows of query tokens that see no key.
///
/// # Safety
///
/// The rows lie within the output and the log-sum-exp, which the caller may write.
#[cfg(feature = "cudnn")]
unsafe fn fill(device: &Cuda, rows: &Range<usize>, tensors: &Tensors) -> Result<()> {
    let failed = |error: cudarc::driver::DriverError| Error::Device {
        device: "cuda",
        operation: "empty rows of CUDNN",
        message: error.to_string(),
    };
    let stream = device.raw_stream().cast();
    let (out, address) = (&tensors.layouts[3], tensors.addresses[3]);
    let ([_, heads, width], [token, head, _]) = (out.shape, out.strides);
    let bytes = out.dtype.bytes();
    device.bind()?;
    // A row per token if its heads lie beside each other, otherwise one per token and head.
    let (columns, parts) = if head == width {
        (heads * width, 1)
    } else {
        (width, heads)
    };
    for part in 0..parts {
        let begin = address + ((rows.start * token + part * head) * bytes) as u64;
        // SAFETY: the caller vouches for the rows; 16 bits are one element.
        let status = unsafe {
            sys::cuMemsetD2D16Async(begin, token * bytes, 0, columns, rows.len(), stream)
        };
        status.result().map_err(failed)?;
    }
    let (lse, stride) = tensors.lse;
    if lse == 0 {
        return Ok(());
    }
    let (begin, pitch) = (lse + (rows.start * 4) as u64, stride * 4);
    let infinity = f32::NEG_INFINITY.to_bits();
    // SAFETY: as above, with a row for each head.
    let status =
        unsafe { sys::cuMemsetD2D32Async(begin, pitch, infinity, rows.len(), heads, stream) };
    status.result().map_err(failed)
}

#[cfg(feature = "cudnn")]
fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

#[cfg(all(test, feature = "cudnn"))]
mod tests {
    use super::*;

    #[test]
    fn requests_without_queries_or_keys_are_left_out_and_their_rows_filled() {
        let mut unseen = Vec::new();
        let ranges = |seen: Vec<Seen>| -> Vec<_> {
            seen.into_iter()
                .map(|seen| (seen.query, seen.key))
                .collect()
        };
        let seen = split(&[3, 0, 2, 4], &[3, 5, 0, 1], true, &mut unseen).unwrap();
        assert_eq!(ranges(seen), [(0..3, 0..3), (8..9, 8..9)]);
        assert_eq!(unseen, [3..5, 5..8]);
        let seen = split(&[3, 0, 2, 4], &[3, 5, 0, 1], false, &mut unseen).unwrap();
        assert_eq!(ranges(seen), [(0..3, 0..3), (5..9, 8..9)]);
        assert_eq!((unseen.len(), &unseen[0]), (1, &(3..5)));
        assert!(split(&[1], &[1, 2], true, &mut unseen).is_err());
    }

    #[test]
    fn requests_are_equal_if_nothing_lies_between_them() {
        let seen = |queries: &[u32], keys: &[u32], causal| {
            split(queries, keys, causal, &mut Vec::new()).unwrap()
        };
        let equal = seen(&[64, 0, 64], &[128, 0, 128], true);
        assert!(are_equal(&equal, 64, 128));
        assert!(!are_equal(&equal, 64, 256));
        // Keys that no query token sees, another length, and rows that see nothing.
        assert!(!are_equal(
            &seen(&[64, 0, 64], &[128, 1, 128], true),
            64,
            128
        ));
        assert!(!are_equal(&seen(&[64, 63], &[64, 63], true), 64, 64));
        assert!(!are_equal(&seen(&[64, 64], &[63, 64], true), 64, 64));
        assert!(!are_equal(&seen(&[1, 64], &[0, 64], false), 64, 64));
        let own = [
            0, 1, 32, 64, 96, 500, 512, 1000, 1024, 1536, 3000, 3072, 8192,
        ];
        let own = own.into_iter().filter(|len| has_own_plan(*len));
        assert_eq!(own.collect::<Vec<_>>(), [64, 512, 1024, 1536, 3072, 8192]);
    }

    #[test]
    fn offsets_are_elements_of_each_tensor_and_bounded() {
        let seen = [Seen {
            query: 2..5,
            key: 7..9,
        }];
        let mut written = Vec::new();
        write_lists(&seen, [10, 20, 30, 40], 2, &mut written).unwrap();
        let lists: Vec<_> = written.chunks(2).collect();
        let expected = [
            [3, 0],
            [2, 0],
            [20, 50],
            [140, 180],
            [210, 270],
            [80, 200],
            [2, 5],
        ];
        assert_eq!(lists, expected);
        let error = write_lists(&seen, [1 << 30, 1, 1, 1], 2, &mut written).unwrap_err();
        assert!(error.to_string().starts_with("query: given 2 tokens of"));
    }
}
