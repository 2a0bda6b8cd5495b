//! Decode context parallelism: the cache of a request is spread over GPUs, and each GPU attends to
//! its own shard.
//!
//! [`plan::parallel`](mla_runtime::plan::parallel) says which rank holds which token. Each rank
//! runs an ordinary layer for all heads on its shard of the cache. For this layer, a request has
//! only the tokens, cached and new, that the rank holds ([`local_len`]). A request without any is
//! padding. The new token's slot comes from [`new_token_slots_on`]: one rank writes it, and the
//! others skip it. The product with W_UV is linear, so the ranks' results can be merged by their
//! log-sum-exps:
//!
//! ```text
//! rank r      (out_r, lse_r)  = layer on its shard of the cache      [T, H, V], [H, T]
//! NCCL        all ranks' (out, lse) to every rank
//! every rank  out, lse        = merge of all, in the order of the ranks
//! ```
//!
//! The ranks send V values per head and token instead of L, and every rank ends with the same bits.
//! Steps have one new token per request. With several, other ranks would hold some of them, and a
//! rank would see those too late.
//!
//! The engine has to do two things itself. First, sinks must take part only once: the ranks' layers
//! get none, and [`Device::scale_outputs`] follows the merge, with its log-sum-exp. Second, a
//! rank's layer counts only the tokens of its own shard, so it does not know their positions. The
//! layer rotates by positions that the caller gives. It has no [query
//! scaling](mla_runtime::backend::LayerConfig::query_scaling): the caller multiplies queries before
//! passing them.
//!
//! NCCL does not check that the ranks of a call agree: ranks with different lengths write past each
//! other's memory. The ranks therefore tell each other what they are about to send, on a second
//! group with its own stream. Every rank refuses a call on which they disagree before NCCL gets it.
//! Meanwhile the host waits for the hosts of the other ranks, but not for the stream. Replays of a
//! captured graph do not wait. An engine whose ranks agree by construction can skip this check with
//! [`Communicator::all_gather_unchecked`] and [`PartialResults::merge_unchecked`], which only
//! enqueue.
//!
//! [`local_len`]: mla_runtime::plan::parallel::ContextParallel::local_len
//! [`new_token_slots_on`]: mla_runtime::plan::slots::BlockTables::new_token_slots_on

use std::ffi::c_char;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};
use cudarc::driver::{CudaStream, result as driver};
use cudarc::nccl::{result, sys};
use mla_runtime::device::Device;
use mla_runtime::model::DType;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{Layout, LseLayout, LseMut, LseRef, Memory, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use crate::device::{Allocated, Buffer, Bytes, BytesMut, Cuda, failed as driver_failed};
use crate::library;

/// Identifier that the ranks of a group have in common. One rank makes it, and the engine sends it
/// to the others.
#[derive(Clone, Copy)]
pub struct GroupId([c_char; 128]);

impl GroupId {
    /// Makes the identifier of a new group.
    ///
    /// # Errors
    ///
    /// If NCCL is missing or refuses.
    pub fn new() -> Result<Self> {
        load()?;
        Ok(Self(
            result::get_uniqueid().map_err(failed("group id"))?.internal,
        ))
    }

    /// Returns the bytes, for another process.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0.map(|byte| byte as u8)
    }

    /// Makes the identifier from another process's bytes.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes.map(|byte| byte as c_char))
    }
}

/// Handle of one rank of a group of GPUs, in this process or several.
pub struct Communicator {
    group: Group,
    agreement: Agreement,
    device: Cuda,
    rank: usize,
    ranks: usize,
}

// SAFETY: NCCL asks that calls on one communicator do not overlap, from any thread. The type is not
// `Sync`.
unsafe impl Send for Communicator {}

/// NCCL's own handle.
struct Group {
    raw: sys::ncclComm_t,
    /// The stream that its calls are enqueued on.
    stream: Arc<CudaStream>,
}

impl Group {
    /// Joins a group, and waits for all ranks. The stream's context must be current.
    fn join(stream: &Arc<CudaStream>, rank: usize, ranks: usize, id: GroupId) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let id = sys::ncclUniqueId { internal: id.0 };
        // SAFETY: the context is current, and NCCL writes the communicator before it returns.
        unsafe { result::comm_init_rank(&mut raw, ranks as i32, id, rank as i32) }
            .map_err(failed("join group"))?;
        Ok(Self {
            raw,
            stream: stream.clone(),
        })
    }

    /// Copies every rank's bytes to every rank.
    ///
    /// # Safety
    ///
    /// `from` is the address of `len` bytes, and `to` that of `len` bytes for each rank, on the
    /// stream's device and in order with the stream. Every rank calls this with the same length, as
    /// its next call on the group. The context is current.
    unsafe fn all_gather(&self, from: u64, to: u64, len: usize) -> Result<()> {
        // SAFETY: the contract of `ncclAllGather`, which is this function's own.
        unsafe {
            result::all_gather(
                from as *const _,
                to as *mut _,
                len,
                sys::ncclDataType_t::ncclUint8,
                self.raw,
                self.stream.cu_stream().cast(),
            )
        }
        .map(drop)
        .map_err(failed("all gather"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: stream and context live.
        let waited = unsafe {
            driver::ctx::set_current(self.stream.context().cu_ctx())
                .and_then(|()| driver::stream::synchronize(self.stream.cu_stream()))
        };
        // SAFETY: the communicator was made once and is destroyed once, and nothing of it is left
        // on the stream.
        let destroyed = unsafe { result::comm_destroy(self.raw) }.map(drop);
        if waited.is_err() || destroyed.is_err() {
            tracing::error!(?waited, ?destroyed, "a group of GPUs was not left");
        }
    }
}

/// A call that a rank is about to make: its number, and the number of bytes that the rank sends or
/// the sizes of its tensors. Intents have the same size for every call, so exchanging them cannot
/// itself go wrong.
type Intent = [u64; 5];

const ALL_GATHER: u64 = 1;
/// Memory for partial results: tokens, heads, width, and the bytes of an element.
const PARTIAL_RESULTS: u64 = 2;
/// A merge: tokens, heads, width, and the bytes of an element.
const MERGE: u64 = 3;

/// Value of the first extent if a rank refuses its call. Without it, the other ranks would wait for
/// that rank.
const REFUSED: u64 = u64::MAX;

fn intent(call: u64, extents: [usize; 4]) -> Intent {
    let [a, b, c, d] = extents.map(|extent| extent as u64);
    [call, a, b, c, d]
}

/// Refuses the ranks' intents, in the order of the ranks, unless all equal that of `rank`.
fn check_intents(rank: usize, own: Intent, all: &[Intent]) -> Result<()> {
    let Some(other) = all.iter().position(|other| *other != own) else {
        return Ok(());
    };
    let (shown, theirs) = (shown(own), shown(all[other]));
    Err(Error::argument(
        "ranks",
        format!("{shown} on rank {rank}, {theirs} on rank {other}"),
        "the same call of the same extents on every rank",
    ))
}

/// Returns an intent in words.
fn shown([call, a, b, c, d]: Intent) -> String {
    let extents = format!("{a} tokens, {b} heads, {c} values of {d} bytes");
    match call {
        _ if a == REFUSED => "a call that the rank itself refuses".to_owned(),
        ALL_GATHER => format!("all_gather of {a} bytes"),
        PARTIAL_RESULTS => format!("results of up to {extents}"),
        MERGE => format!("merge of {extents}"),
        other => format!("call {other}"),
    }
}

/// The second group, on its own stream. Through it, ranks learn what the others intend.
struct Agreement {
    group: Group,
    /// Memory for one intent, and for those of all ranks.
    buffers: [Buffer; 2],
}

impl Agreement {
    /// Makes a second group of the ranks of `first`. Rank 0 makes its identifier. This waits for
    /// all ranks.
    fn of(first: &Group, device: &Cuda, rank: usize, ranks: usize) -> Result<Self> {
        let id = match rank {
            0 => GroupId::new()?,
            _ => GroupId([0; 128]),
        };
        let buffers = |stream: &Arc<CudaStream>, len: usize| {
            let account = Allocated::default();
            let own = Buffer::zeroed(stream, len, &account)?;
            Ok::<_, Error>([own, Buffer::zeroed(stream, len * ranks, &account)?])
        };
        let ids = exchange(first, id.0, &buffers(&first.stream, size_of::<GroupId>())?)?;
        let stream = device.new_stream()?;
        let agreement = Self {
            group: Group::join(&stream, rank, ranks, GroupId(ids[0]))?,
            buffers: buffers(&stream, size_of::<Intent>())?,
        };
        // NCCL allocates at a group's first call, so that call is made here, before any capture.
        agreement.intents([0; 5])?;
        Ok(agreement)
    }

    /// Sends this rank's intent to every rank, and returns the intents of all ranks.
    fn intents(&self, own: Intent) -> Result<Vec<Intent>> {
        exchange(&self.group, own, &self.buffers)
    }
}

/// Gathers a value of every rank's host. The buffers are of the group's stream. The first has the
/// size of the value, and the second that of the values of all ranks.
fn exchange<T: Pod>(group: &Group, own: T, [from, to]: &[Buffer; 2]) -> Result<Vec<T>> {
    let stream = group.stream.cu_stream();
    let mut all = vec![T::zeroed(); to.len() / size_of::<T>()];
    // SAFETY: the context is current, and the buffers were made on the stream with these lengths.
    // The source is ordinary memory, which the driver has read when the call returns; the
    // destination lives until the stream has been waited for.
    let upload =
        unsafe { driver::memcpy_htod_async(from.address(), std::slice::from_ref(&own), stream) };
    upload.map_err(driver_failed("exchange"))?;
    // SAFETY: the contract of `Group::all_gather`: the buffers are of the group's stream, and every
    // rank exchanges the same number of bytes.
    unsafe { group.all_gather(from.address(), to.address(), from.len()) }?;
    // SAFETY: the context is current; the destination lives until the stream has been waited for.
    let download = unsafe { driver::memcpy_dtoh_async(&mut all, to.address(), stream) };
    // SAFETY: the stream lives as long as the group.
    let waited = unsafe { driver::stream::synchronize(stream) };
    download.and(waited).map_err(driver_failed("exchange"))?;
    Ok(all)
}

/// Lets this thread make calls that are not captured while one of its streams captures a graph.
struct Uncaptured {
    mode: CUstreamCaptureMode,
}

impl Uncaptured {
    fn new() -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver takes the mode in `mode` and writes the previous one there.
        unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }
            .result()
            .map_err(driver_failed("exchange"))?;
        Ok(Self { mode })
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        // SAFETY: the driver takes the mode in `self.mode`, which is the previous one, and writes
        // the current one there.
        let restored = unsafe { cuThreadExchangeStreamCaptureMode(&raw mut self.mode) };
        if let Err(error) = restored.result() {
            tracing::error!(%error, "a thread's capture mode was not restored");
        }
    }
}

impl Communicator {
    /// Joins the group. This waits until every rank has called it.
    ///
    /// # Errors
    ///
    /// If there is no such rank, or NCCL is missing or refuses.
    pub fn new(device: &Cuda, rank: usize, ranks: usize, id: GroupId) -> Result<Self> {
        if ranks == 0 || i32::try_from(ranks).is_err() {
            return Err(Error::argument("ranks", ranks, "1 to 2147483647"));
        }
        if rank >= ranks {
            let accepted = format!("below the {ranks} ranks");
            return Err(Error::argument("rank", rank, accepted));
        }
        load()?;
        device.bind()?;
        let group = Group::join(device.stream(), rank, ranks, id)?;
        let agreement = Agreement::of(&group, device, rank, ranks)?;
        Ok(Self {
            group,
            agreement,
            device: device.clone(),
            rank,
            ranks,
        })
    }

    /// Returns the number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Copies every rank's `from` to every rank's `to`, in the order of the ranks. Every rank has
    /// to call this, and each call waits for all ranks.
    ///
    /// # Errors
    ///
    /// - On this rank: if `to` is not as long as the ranks' `from` together, if the memory belongs
    ///   to another stream, or if NCCL refuses.
    /// - On every rank: if the lengths of `from` differ.
    pub fn all_gather(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        let checked = self.check_gather(from, &to);
        self.agree(checked, intent(ALL_GATHER, [from.len(), 0, 0, 0]))?;
        // SAFETY: the ranks agreed to send the same number of bytes.
        unsafe { self.enqueue_gather(from, to) }
    }

    /// Does an [`all_gather`](Self::all_gather) without asking the other ranks. This only enqueues.
    ///
    /// # Safety
    ///
    /// Every rank must call this with a `from` of the same length, as its next call on the group.
    ///
    /// # Errors
    ///
    /// If `to` is not as long as the ranks' `from` together, if the memory is of another stream, or
    /// if NCCL refuses.
    pub unsafe fn all_gather_unchecked(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        self.check_gather(from, &to)?;
        // SAFETY: the contract of `enqueue_gather`, which is this function's own.
        unsafe { self.enqueue_gather(from, to) }
    }

    fn check_gather(&self, from: Bytes<'_>, to: &BytesMut<'_>) -> Result<()> {
        self.device.check_bytes("from", from)?;
        self.device.check_bytes("to", Cuda::freeze(to))?;
        if from.len().checked_mul(self.ranks) == Some(to.len()) {
            return Ok(());
        }
        Err(Error::argument(
            "to",
            format!("{} bytes", to.len()),
            format!("{} from each of {} ranks", from.len(), self.ranks),
        ))
    }

    /// Refuses, on every rank, a call on which the ranks disagree, or which this rank refuses as
    /// `checked` says. This waits for the ranks' hosts.
    fn agree(&self, checked: Result<()>, mut intent: Intent) -> Result<()> {
        if checked.is_err() {
            intent[1] = REFUSED;
        }
        checked.and(self.ask(intent))
    }

    fn ask(&self, intent: Intent) -> Result<()> {
        self.device.bind()?;
        let _uncaptured = Uncaptured::new()?;
        check_intents(self.rank, intent, &self.agreement.intents(intent)?)
    }

    /// # Safety
    ///
    /// The caller keeps the contract of [`all_gather_unchecked`](Self::all_gather_unchecked), for
    /// bytes that [`check_gather`](Self::check_gather) accepted.
    unsafe fn enqueue_gather(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: both ranges are memory of the device's stream, and their lengths were checked.
        // The second is borrowed mutably. The ranks send equal numbers of bytes, as the caller
        // says.
        unsafe {
            self.group
                .all_gather(from.address(), to.address(), from.len())
        }
    }
}

/// Memory for the results of all ranks in a step.
pub struct PartialResults {
    outputs: Buffer,
    lses: Buffer,
    dtype: DType,
    heads: usize,
    width: usize,
}

impl PartialResults {
    /// Allocates the memory for layers of this problem and steps of up to `tokens` tokens. Every
    /// rank has to call this, and each call waits for all ranks.
    ///
    /// # Errors
    ///
    /// - On this rank: if the device's memory cannot hold the tokens.
    /// - On every rank: if one of them names another number of tokens or heads, another width, or a
    ///   dtype of another size.
    pub fn new(communicator: &Communicator, problem: &Problem, tokens: usize) -> Result<Self> {
        let (heads, width) = (problem.heads as usize, problem.dims.head.v as usize);
        let extents = [tokens, heads, width, problem.dtype.bytes()];
        communicator.agree(Ok(()), intent(PARTIAL_RESULTS, extents))?;
        let too_many = || Error::argument("tokens", tokens, "as many as memory can hold");
        let bytes = |row: usize| {
            let row = row.checked_mul(heads)?.checked_mul(communicator.ranks)?;
            row.checked_mul(tokens)
        };
        let outputs = bytes(width * problem.dtype.bytes()).ok_or_else(too_many)?;
        let lses = bytes(4).ok_or_else(too_many)?;
        let device = &communicator.device;
        Ok(Self {
            outputs: device.allocate(outputs)?,
            lses: device.allocate(lses)?,
            dtype: problem.dtype,
            heads,
            width,
        })
    }

    /// Replaces each rank's own `out` `[T, H, V]` and `lse` `[H, T]`, both without gaps, by those
    /// of the whole cache. Every rank has to call this, and each call waits for all ranks.
    ///
    /// # Errors
    ///
    /// - On this rank: if a tensor has another shape, dtype or strides, if it belongs to another
    ///   stream, or if there are too many tokens.
    /// - On every rank: if their numbers of tokens differ.
    pub fn merge(
        &mut self,
        communicator: &Communicator,
        out: TensorMut<'_, Cuda>,
        lse: LseMut<'_, Cuda>,
    ) -> Result<()> {
        let checked = self.check(communicator, &out, &lse);
        let extents = [out.shape()[0], self.heads, self.width, self.dtype.bytes()];
        communicator.agree(checked, intent(MERGE, extents))?;
        // SAFETY: the ranks agreed to merge the same number of rows.
        unsafe { self.enqueue_merge(communicator, out, lse) }
    }

    /// Does a [`merge`](Self::merge) without asking the other ranks. This only enqueues.
    ///
    /// # Safety
    ///
    /// Every rank must call this with the same number of tokens, as its next call on the group. The
    /// results were made for the same problem on all ranks.
    ///
    /// # Errors
    ///
    /// If a tensor has another shape, dtype or strides, if it belongs to another stream, or if
    /// there are too many tokens.
    pub unsafe fn merge_unchecked(
        &mut self,
        communicator: &Communicator,
        out: TensorMut<'_, Cuda>,
        lse: LseMut<'_, Cuda>,
    ) -> Result<()> {
        self.check(communicator, &out, &lse)?;
        // SAFETY: the contract of `enqueue_merge`, which is this function's own.
        unsafe { self.enqueue_merge(communicator, out, lse) }
    }

    /// Refuses tensors that do not fit.
    fn check(
        &self,
        communicator: &Communicator,
        out: &TensorMut<'_, Cuda>,
        lse: &LseMut<'_, Cuda>,
    ) -> Result<()> {
        let (device, ranks) = (&communicator.device, communicator.ranks);
        let tokens = out.shape()[0];
        let whole = Layout::contiguous(self.dtype, [tokens, self.heads, self.width]);
        if *out.layout() != whole {
            return Err(Error::argument("out", out.layout(), whole));
        }
        let lse_layout = LseLayout::heads_first(self.heads, tokens);
        if lse.layout() != lse_layout {
            return Err(Error::argument("lse", lse.layout(), lse_layout));
        }
        device.check_bytes("results", self.outputs.bytes())?;
        device.check_bytes("out", out.as_ref().bytes())?;
        device.check_bytes("lse", lse.as_ref().bytes())?;
        let row = ranks * self.heads * self.width * self.dtype.bytes();
        if tokens * row > self.outputs.len() {
            let accepted = format!("at most {}", self.outputs.len() / row);
            return Err(Error::argument("tokens", tokens, accepted));
        }
        Ok(())
    }

    /// # Safety
    ///
    /// The caller keeps the contract of [`merge_unchecked`](Self::merge_unchecked), for tensors
    /// that [`check`](Self::check) accepted.
    unsafe fn enqueue_merge(
        &mut self,
        communicator: &Communicator,
        mut out: TensorMut<'_, Cuda>,
        mut lse: LseMut<'_, Cuda>,
    ) -> Result<()> {
        let (device, ranks) = (&communicator.device, communicator.ranks);
        let (whole, lse_layout) = (*out.layout(), lse.layout());
        let tokens = whole.shape[0];
        let each = whole.elements() * self.dtype.bytes();
        let each_lse = 4 * self.heads * tokens;
        if tokens == 0 {
            return Ok(());
        }
        let (outputs, _) = Cuda::split_mut(self.outputs.bytes_mut(), ranks * each);
        let (lses, _) = Cuda::split_mut(self.lses.bytes_mut(), ranks * each_lse);
        // SAFETY: tokens, heads and width are the same on every rank, as the caller says.
        unsafe {
            communicator.all_gather_unchecked(first(out.as_ref().bytes(), each), outputs)?;
            communicator.all_gather_unchecked(first(lse.as_ref().bytes(), each_lse), lses)?;
        }
        for rank in 0..ranks {
            let other = TensorRef::new(nth(&self.outputs, rank, each), whole)?;
            let other_lse = nth(&self.lses, rank, each_lse);
            if rank == 0 {
                // All ranks begin with the same result and merge in the same order, so they get the
                // same bits.
                device.copy(other, out.reborrow())?;
                let row = Layout::contiguous(DType::F32, [1, 1, self.heads * tokens]);
                let to = TensorMut::new(lse.reborrow().into_bytes(), row)?;
                device.copy(TensorRef::new(other_lse, row)?, to)?;
            } else {
                let other_lse = LseRef::new(other_lse, lse_layout)?;
                device.merge(out.reborrow(), lse.reborrow(), other, other_lse)?;
            }
        }
        Ok(())
    }
}

// Returns the bytes of one rank's result.
fn nth(buffer: &Buffer, rank: usize, len: usize) -> Bytes<'_> {
    Cuda::byte_range(buffer.bytes(), rank * len..(rank + 1) * len)
}

// Returns the first `len` bytes. A tensor's view may have more bytes than it needs.
fn first(bytes: Bytes<'_>, len: usize) -> Bytes<'_> {
    Cuda::byte_range(bytes, 0..len)
}

fn load() -> Result<()> {
    if library::has_nccl() {
        return Ok(());
    }
    Err(Error::Device {
        device: "cuda",
        operation: "load nccl",
        message: "library nccl is missing; install it where the loader finds it".to_owned(),
    })
}

fn failed(operation: &'static str) -> impl FnOnce(result::NcclError) -> Error {
    move |error| Error::Device {
        device: "cuda",
        operation,
        message: format!("{error:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_agree_go_on_and_others_are_refused_by_what_they_say() {
        let own = intent(MERGE, [8, 16, 128, 2]);
        check_intents(1, own, &[own, own, own]).unwrap();
        let refused = |rank, all: &[Intent]| check_intents(rank, own, all).unwrap_err().to_string();
        assert_eq!(
            refused(1, &[own, own, intent(MERGE, [7, 16, 128, 2])]),
            "ranks: given merge of 8 tokens, 16 heads, 128 values of 2 bytes on rank 1, merge of 7 \
             tokens, 16 heads, 128 values of 2 bytes on rank 2, accepted the same call of the same \
             extents on every rank"
        );
        for (other, said) in [
            (
                [MERGE, REFUSED, 16, 128, 2],
                "a call that the rank itself refuses",
            ),
            ([ALL_GATHER, 8, 16, 128, 2], "all_gather of 8 bytes"),
        ] {
            let refused = refused(0, &[own, other]);
            assert!(refused.contains(&format!("{said} on rank 1")), "{refused}");
        }
    }
}
