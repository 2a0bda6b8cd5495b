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
use std::fmt;
use std::sync::Arc;

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

/// A call that a rank is about to make. Intents have the same size for every call, so exchanging
/// them cannot itself go wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Intent {
    call: Call,
    /// The number of bytes that the rank sends, or the sizes of its tensors.
    extents: [u64; 4],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
enum Call {
    AllGather = 1,
    /// Memory for partial results: tokens, heads, width, and the bytes of an element.
    PartialResults = 2,
    /// A merge: tokens, heads, width, and the bytes of an element.
    Merge = 3,
}

const INTENT_BYTES: usize = 40;

/// Value of the first extent if a rank refuses its call. Without it, the other ranks would wait for
/// that rank.
const REFUSED: u64 = u64::MAX;

impl Intent {
    fn to_bytes(self) -> [u8; INTENT_BYTES] {
        let mut bytes = [0; INTENT_BYTES];
        let words = std::iter::once(self.call as u64).chain(self.extents);
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Refuses the ranks' intents, in the order of the ranks, unless all equal this rank's own.
    fn check(self, rank: usize, all: &[u8]) -> Result<()> {
        let own = self.to_bytes();
        let other = all
            .chunks_exact(INTENT_BYTES)
            .position(|other| other != own);
        let Some(other) = other else { return Ok(()) };
        let theirs = Shown(&all[other * INTENT_BYTES..][..INTENT_BYTES]);
        Err(Error::argument(
            "ranks",
            format!("{} on rank {rank}, {theirs} on rank {other}", Shown(&own)),
            "the same call of the same extents on every rank",
        ))
    }
}

/// Displays an intent in words.
struct Shown<'a>(&'a [u8]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = [0; INTENT_BYTES / 8];
        for (to, from) in words.iter_mut().zip(self.0.chunks_exact(8)) {
            *to = u64::from_ne_bytes(from.try_into().unwrap_or_default());
        }
        let [call, a, b, c, d] = words;
        let extents = format!("{a} tokens, {b} heads, {c} values of {d} bytes");
        match call {
            _ if a == REFUSED => write!(f, "a call that the rank itself refuses"),
            call if call == Call::AllGather as u64 => write!(f, "all_gather of {a} bytes"),
            call if call == Call::PartialResults as u64 => write!(f, "results of up to {extents}"),
            call if call == Call::Merge as u64 => write!(f, "merge of {extents}"),
            other => write!(f, "call {other}"),
        }
    }
}

/// The second group, on its own stream. Through it, ranks learn what the others intend.
struct Agreement {
    group: Group,
    own: Buffer,
    all: Buffer,
}

impl Agreement {
    /// Makes a second group of the ranks of `first`. Rank 0 makes its identifier. This waits for
    /// all ranks.
    fn of(first: &Group, device: &Cuda, rank: usize, ranks: usize) -> Result<Self> {
        let id = match rank {
            0 => GroupId::new()?,
            _ => GroupId([0; 128]),
        };
        let ids = exchange(first, &id.to_bytes(), ranks)?;
        let (first_id, _) = ids.split_first_chunk().ok_or_else(no_rank)?;
        let stream = device.new_stream()?;
        let agreement = Self {
            group: Group::join(&stream, rank, ranks, GroupId::from_bytes(*first_id))?,
            own: Buffer::zeroed(&stream, INTENT_BYTES, &Allocated::default())?,
            all: Buffer::zeroed(&stream, INTENT_BYTES * ranks, &Allocated::default())?,
        };
        // NCCL allocates at a group's first call, so that call is made here, before any capture.
        agreement.intents(&[0; INTENT_BYTES])?;
        Ok(agreement)
    }

    /// Sends this rank's intent to every rank, and returns the intents of all ranks.
    fn intents(&self, own: &[u8; INTENT_BYTES]) -> Result<Vec<u8>> {
        gather_host(&self.group, own, &self.own, &self.all)
    }
}

fn no_rank() -> Error {
    Error::argument("ranks", 0, "1 and up")
}

/// Gathers bytes of every rank's host, with the same length on all of them.
fn exchange(group: &Group, own: &[u8], ranks: usize) -> Result<Vec<u8>> {
    let account = Allocated::default();
    let from = Buffer::zeroed(&group.stream, own.len(), &account)?;
    let to = Buffer::zeroed(&group.stream, own.len() * ranks, &account)?;
    gather_host(group, own, &from, &to)
}

/// Does an [`exchange`] through these buffers of the group's stream. `from` is as long as `own`,
/// and `to` as long as the bytes of all ranks.
fn gather_host(group: &Group, own: &[u8], from: &Buffer, to: &Buffer) -> Result<Vec<u8>> {
    let stream = group.stream.cu_stream();
    let mut all = vec![0; to.len()];
    // SAFETY: the context is current, and the buffers were made on the stream with these lengths.
    // The source is ordinary memory, which the driver has read when the call returns; the
    // destination lives until the stream has been waited for.
    let upload = unsafe { driver::memcpy_htod_async(from.address(), own, stream) };
    upload.map_err(driver_failed("exchange"))?;
    // SAFETY: the contract of `Group::all_gather`: the buffers are of the group's stream, and every
    // rank exchanges the same number of bytes.
    unsafe { group.all_gather(from.address(), to.address(), own.len()) }?;
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
        let len = if checked.is_ok() {
            from.len() as u64
        } else {
            REFUSED
        };
        let agreed = self.agree(Call::AllGather, [len, 0, 0, 0]);
        checked.and(agreed)?;
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

    /// Refuses, on every rank, a call on which the ranks disagree. This waits for the ranks' hosts.
    fn agree(&self, call: Call, extents: [u64; 4]) -> Result<()> {
        self.device.bind()?;
        let intent = Intent { call, extents };
        let _uncaptured = Uncaptured::new()?;
        let all = self.agreement.intents(&intent.to_bytes())?;
        intent.check(self.rank, &all)
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
        let extents = [tokens, heads, width, problem.dtype.bytes()].map(|extent| extent as u64);
        communicator.agree(Call::PartialResults, extents)?;
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
        let tokens = if checked.is_ok() {
            out.shape()[0] as u64
        } else {
            REFUSED
        };
        let [heads, width, bytes] =
            [self.heads, self.width, self.dtype.bytes()].map(|extent| extent as u64);
        let agreed = communicator.agree(Call::Merge, [tokens, heads, width, bytes]);
        checked.and(agreed)?;
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

    fn intent(call: Call, extents: [u64; 4]) -> Intent {
        Intent { call, extents }
    }

    #[test]
    fn ranks_that_agree_go_on_and_others_are_refused_by_what_they_say() {
        let own = intent(Call::Merge, [8, 16, 128, 2]);
        let all = |others: &[Intent]| -> Vec<u8> {
            others.iter().flat_map(|other| other.to_bytes()).collect()
        };
        own.check(1, &all(&[own, own, own])).unwrap();
        let fewer = intent(Call::Merge, [7, 16, 128, 2]);
        assert_eq!(
            own.check(1, &all(&[own, own, fewer]))
                .unwrap_err()
                .to_string(),
            "ranks: given merge of 8 tokens, 16 heads, 128 values of 2 bytes on rank 1, merge of 7 \
             tokens, 16 heads, 128 values of 2 bytes on rank 2, accepted the same call of the same \
             extents on every rank"
        );
        let gather = intent(Call::AllGather, [8, 16, 128, 2]);
        let itself = intent(Call::Merge, [REFUSED, 16, 128, 2]);
        let refused = own.check(0, &all(&[own, itself])).unwrap_err().to_string();
        assert!(
            refused.contains("a call that the rank itself refuses on rank 1"),
            "{refused}"
        );
        let refused = own.check(0, &all(&[own, gather])).unwrap_err().to_string();
        assert!(
            refused.contains("all_gather of 8 bytes on rank 1"),
            "{refused}"
        );
    }
}
