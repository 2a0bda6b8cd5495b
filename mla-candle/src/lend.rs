//! candle's tensors as memory of a device of the MLA layer, for the time of a call.
//!
//! candle keeps a tensor's numbers behind a lock that all tensors of the same storage share.
//! Readers share it, and a writer holds it alone. candle gives write access to storage only within
//! its in-place operations, so a lent tensor is written within such an operation. Every storage is
//! locked once, in the order of addresses. candle's own operations keep this order, too. Two
//! threads that lend the same tensors therefore cannot deadlock.

mod form;
mod hold;

use candle_core::{CpuStorage, Error, Result, Storage, Tensor};
use mla_cpu::Cpu;
use mla_runtime::device::Device;
use mla_runtime::tensor::{ArrayRef, Memory, TensorMut, TensorRef};

use self::form::Form;
pub(crate) use self::form::layer_dtype;
use self::hold::{Held, storage_of};

/// A device that candle's tensors can be lent to.
pub trait Lending: Device {
    /// Lends tensors to `work`: those of `read` for reading, and those of `written` for writing.
    ///
    /// A tensor may be a view with any strides. Tensors that are read may share storage. A written
    /// tensor must not share its storage with another tensor of the call.
    ///
    /// On a GPU the work is enqueued on candle's own stream, if this device was made from that
    /// stream with [`Cuda::on_stream`].
    ///
    /// # Errors
    ///
    /// If a written tensor shares its storage with another one, if a tensor is on another device or
    /// has a dtype that this project does not have, or if `work` fails.
    ///
    /// [`Cuda::on_stream`]: https://docs.rs/mla-kernels/latest/mla_kernels/struct.Cuda.html
    fn lending<R, W>(&self, read: &[&Tensor], written: &[&Tensor], work: W) -> Result<R>
    where
        W: for<'a> FnOnce(Vec<Lent<'a, Self>>, Vec<LentMut<'a, Self>>) -> mla_runtime::Result<R>;
}

/// A tensor that is lent for reading.
pub struct Lent<'a, D: Memory> {
    bytes: D::Bytes<'a>,
    form: Form,
}

/// A tensor that is lent for writing.
pub struct LentMut<'a, D: Memory> {
    bytes: D::BytesMut<'a>,
    form: Form,
}

impl<'a, D: Device> Lent<'a, D> {
    /// Returns a view as `[rows, 1, W]` or `[rows, H, W]`.
    ///
    /// Its last axes are the tensor's last `inner` axes, one or two. The first axis combines all
    /// axes before them.
    ///
    /// # Errors
    ///
    /// If these axes have no common distance between rows, or the layer does not have the dtype.
    pub fn rows(self, name: &'static str, inner: usize) -> mla_runtime::Result<TensorRef<'a, D>> {
        let layout = self.form.layout(name, inner)?;
        mla_runtime::named(name, TensorRef::new(self.bytes, layout))
    }

    /// Returns the numbers of a tensor without gaps, as bytes.
    ///
    /// # Errors
    ///
    /// If the tensor has gaps.
    pub fn bytes(self, name: &'static str) -> mla_runtime::Result<D::Bytes<'a>> {
        self.form.check_dense(name)?;
        Ok(self.bytes)
    }

    /// Returns the numbers of a tensor without gaps, as an array of f32.
    ///
    /// # Errors
    ///
    /// If the tensor has gaps or another dtype.
    pub fn floats(self, name: &'static str) -> mla_runtime::Result<ArrayRef<'a, D, f32>> {
        let (dtype, len) = (self.form.dtype(), self.form.dims().iter().product());
        if dtype != candle_core::DType::F32 {
            return Err(mla_runtime::Error::argument(name, dtype.as_str(), "f32"));
        }
        ArrayRef::new(self.bytes(name)?, len)
    }
}

impl<'a, D: Device> LentMut<'a, D> {
    /// Returns a view for writing, of the shape of [`Lent::rows`].
    ///
    /// # Errors
    ///
    /// Fails as [`Lent::rows`] does.
    pub fn rows(self, name: &'static str, inner: usize) -> mla_runtime::Result<TensorMut<'a, D>> {
        let layout = self.form.layout(name, inner)?;
        mla_runtime::named(name, TensorMut::new(self.bytes, layout))
    }

    /// Returns the numbers of a tensor without gaps, as bytes.
    ///
    /// # Errors
    ///
    /// If the tensor has gaps.
    pub fn bytes(self, name: &'static str) -> mla_runtime::Result<D::BytesMut<'a>> {
        self.form.check_dense(name)?;
        Ok(self.bytes)
    }

    /// Returns the tensor's form, for a cache with gaps between its rows: extents and strides in
    /// elements, and the bytes of an element.
    pub(crate) fn form(&self) -> &Form {
        &self.form
    }

    pub(crate) fn into_bytes(self) -> D::BytesMut<'a> {
        self.bytes
    }
}

/// Returns the next tensor. Tensors come in the order in which they were lent.
pub(crate) fn next<T>(lent: &mut impl Iterator<Item = T>) -> T {
    lent.next().expect("as many as were lent")
}

/// A tensor's form, and the number of the storage that holds its numbers.
struct Place {
    form: Form,
    storage: usize,
}

fn places(tensors: &[&Tensor]) -> Result<Vec<Place>> {
    let place = |tensor: &&Tensor| {
        Ok(Place {
            form: Form::of(tensor)?,
            storage: storage_of(tensor),
        })
    };
    tensors.iter().map(place).collect()
}

impl Lending for Cpu {
    fn lending<R, W>(&self, read: &[&Tensor], written: &[&Tensor], work: W) -> Result<R>
    where
        W: for<'a> FnOnce(Vec<Lent<'a, Self>>, Vec<LentMut<'a, Self>>) -> mla_runtime::Result<R>,
    {
        let (of_read, of_written) = (places(read)?, places(written)?);
        hold::hold(read, written, |mut held: Held<'_>| {
            let mut lent = Vec::with_capacity(of_read.len());
            for Place { form, storage } in of_read {
                let Storage::Cpu(numbers) = held.read(storage) else {
                    return Err(other_device());
                };
                let bytes = &bytes(numbers)?[form.range()];
                lent.push(Lent { bytes, form });
            }
            let mut lent_mut = Vec::with_capacity(of_written.len());
            for Place { form, storage } in of_written {
                let numbers = held.take_written(storage).cpu();
                let numbers = numbers.ok_or_else(other_device)?;
                let bytes = &mut bytes_mut(numbers)?[form.range()];
                lent_mut.push(LentMut { bytes, form });
            }
            work(lent, lent_mut).map_err(Error::wrap)
        })
    }
}

fn other_device() -> Error {
    Error::msg("tensor: given one of another device, accepted one of the device of the layer")
}

/// Returns the numbers of a storage on the CPU as bytes. `$cast` is for shared or for mutable
/// borrows.
macro_rules! plain_bytes {
    ($storage:expr, $cast:path) => {
        match $storage {
            CpuStorage::U8(numbers) => Ok($cast(numbers)),
            CpuStorage::U32(numbers) => Ok($cast(numbers)),
            CpuStorage::I64(numbers) => Ok($cast(numbers)),
            CpuStorage::BF16(numbers) => Ok($cast(numbers)),
            CpuStorage::F16(numbers) => Ok($cast(numbers)),
            CpuStorage::F32(numbers) => Ok($cast(numbers)),
            CpuStorage::F64(numbers) => Ok($cast(numbers)),
            _ => Err(Form::refused()),
        }
    };
}

fn bytes(storage: &CpuStorage) -> Result<&[u8]> {
    plain_bytes!(storage, bytemuck::cast_slice)
}

fn bytes_mut(storage: &mut CpuStorage) -> Result<&mut [u8]> {
    plain_bytes!(storage, bytemuck::cast_slice_mut)
}

#[cfg(feature = "cuda")]
mod cuda;
