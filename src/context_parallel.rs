//! Decode context parallelism: a request's cache spread over GPUs, each of which attends to its own
//! shard.
//!
//! Which rank holds which token is [`plan::parallel`](mla_runtime::plan::parallel)'s. Each rank
//! runs an ordinary layer for all heads on its shard of the cache: its requests have the new token
//! and as many cached ones as the rank holds ([`local_len`]; none makes the request padding), and
//! the new token's slot is [`new_token_slots_on`]'s, skipped on all ranks but one. Since the
//! product with W_UV is linear, what the ranks then hold merges by log-sum-exp as it is:
//!
//! ```text
//! rank r      (out_r, lse_r)  = layer on its shard of the cache      [T, H, V], [H, T]
//! NCCL        all ranks' (out, lse) to every rank
//! every rank  out, lse        = merge of all, in the order of the ranks
//! ```
//!
//! So V values per head and token travel instead of L, and every rank ends with the same bits. It
//! is for steps of one new token per request: of several, those that another rank holds would be
//! seen too late. Everything but [`Communicator::new`] and [`PartialResults::new`] only enqueues.
//!
//! [`local_len`]: mla_runtime::plan::parallel::ContextParallel::local_len
//! [`new_token_slots_on`]: mla_runtime::plan::slots::BlockTables::new_token_slots_on

use std::ffi::c_char;

use cudarc::nccl::{result, sys};
use mla_runtime::device::{Device, Memory};
use mla_runtime::dtype::DType;
use mla_runtime::error::{Error, Result};
use mla_runtime::lse::{LseLayout, LseMut, LseRef};
use mla_runtime::problem::Problem;
use mla_runtime::tensor::{Layout, TensorMut, TensorRef};

use crate::device::{Buffer, Bytes, BytesMut, Cuda};
use crate::library;

/// What the ranks of a group have in common: made by one of them, and carried to the others by
/// whatever means the engine has.
#[derive(Clone, Copy)]
pub struct GroupId([c_char; 128]);

impl GroupId {
    /// A new group.
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

    /// The bytes, for another process.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0.map(|byte| byte as u8)
    }

    /// From another process's bytes.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes.map(|byte| byte as c_char))
    }
}

/// One rank of a group of GPUs, in this process or several.
pub struct Communicator {
    raw: sys::ncclComm_t,
    device: Cuda,
    rank: usize,
    ranks: usize,
}

// SAFETY: NCCL asks that calls on one communicator do not overlap, from whatever thread. It is not
// `Sync`.
unsafe impl Send for Communicator {}

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
        let mut raw = std::ptr::null_mut();
        let id = sys::ncclUniqueId { internal: id.0 };
        // SAFETY: the device's context is current, and NCCL writes the communicator before it
        // returns.
        unsafe { result::comm_init_rank(&mut raw, ranks as i32, id, rank as i32) }
            .map_err(failed("join group"))?;
        Ok(Self {
            raw,
            device: device.clone(),
            rank,
            ranks,
        })
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Every rank's `from` to every rank's `to`, in the order of the ranks. Every rank has to call
    /// it.
    ///
    /// # Errors
    ///
    /// If `to` has not as many bytes as all ranks send, or NCCL refuses.
    pub fn all_gather(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<()> {
        if from.len().checked_mul(self.ranks) != Some(to.len()) {
            return Err(Error::argument(
                "to",
                format!("{} bytes", to.len()),
                format!("{} from each of {} ranks", from.len(), self.ranks),
            ));
        }
        if from.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: both ranges are device memory of the lengths that are checked above, the second
        // is borrowed mutably; the stream is the device's.
        unsafe {
            result::all_gather(
                from.address() as *const _,
                to.address() as *mut _,
                from.len(),
                sys::ncclDataType_t::ncclUint8,
                self.raw,
                self.device.raw_stream().cast(),
            )
        }
        .map(drop)
        .map_err(failed("all gather"))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // There is nobody to tell of an error.
        let _ = self.device.synchronize();
        // SAFETY: made once, destroyed once, with nothing of it on the stream any more.
        let _ = unsafe { result::comm_destroy(self.raw) };
    }
}

/// Room for all ranks' results of a step.
pub struct PartialResults {
    outputs: Buffer,
    lses: Buffer,
    dtype: DType,
    heads: usize,
    width: usize,
}

impl PartialResults {
    /// For layers of this problem and steps of up to so many tokens.
    ///
    /// # Errors
    ///
    /// If there are more tokens than memory could hold, or the device has not as much left.
    pub fn new(communicator: &Communicator, problem: &Problem, tokens: usize) -> Result<Self> {
        let (heads, width) = (problem.heads as usize, problem.dims.head.v as usize);
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

    /// Makes of each rank's own `out` `[T, H, V]` and `lse` `[H, T]`, both without gaps, those of
    /// the whole cache. Every rank has to call it.
    ///
    /// # Errors
    ///
    /// If a tensor has another shape, dtype or strides, or there are too many tokens.
    pub fn merge(
        &mut self,
        communicator: &Communicator,
        mut out: TensorMut<'_, Cuda>,
        mut lse: LseMut<'_, Cuda>,
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
        let each = whole.elements() * self.dtype.bytes();
        let each_lse = 4 * self.heads * tokens;
        if ranks * each > self.outputs.len() {
            let most = self.outputs.len() / (ranks * self.heads * self.width * self.dtype.bytes());
            return Err(Error::argument("tokens", tokens, format!("at most {most}")));
        }
        if tokens == 0 {
            return Ok(());
        }
        let (outputs, _) = Cuda::split_mut(self.outputs.bytes_mut(), ranks * each);
        let (lses, _) = Cuda::split_mut(self.lses.bytes_mut(), ranks * each_lse);
        communicator.all_gather(first(out.as_ref().bytes(), each), outputs)?;
        communicator.all_gather(first(lse.as_ref().bytes(), each_lse), lses)?;
        for rank in 0..ranks {
            let other = TensorRef::new(nth(&self.outputs, rank, each), whole)?;
            let other_lse = nth(&self.lses, rank, each_lse);
            if rank == 0 {
                // The same beginning and order on every rank, and so the same bits.
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

// The bytes of one rank's result.
fn nth(buffer: &Buffer, rank: usize, len: usize) -> Bytes<'_> {
    Cuda::byte_range(buffer.bytes(), rank * len..(rank + 1) * len)
}

// A view may be made from more bytes than it needs.
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
