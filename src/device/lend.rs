//! cudarc's slices, lent for a while as memory of the device.

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DriverError,
    SyncOnDrop, result,
};
use mla_runtime::{Error, Result};

use super::memory::{Bytes, BytesMut};
use super::stream::StreamId;
use super::{Cuda, failed, stream};

mod sealed {
    /// Trait that other crates cannot implement. Their implementations could name memory that does
    /// not exist.
    pub trait Sealed {}
}

/// A slice or view of cudarc's that can be lent for reading. Any bytes are a valid value of its
/// elements.
pub trait Lend: sealed::Sealed + DevicePtr<<Self as Lend>::Element> {
    /// The type of the elements.
    type Element: Pod;
}

/// A slice or view of cudarc's that can be lent for writing.
pub trait LendMut: Lend + DevicePtrMut<<Self as Lend>::Element> {}

impl<T: Pod> sealed::Sealed for CudaSlice<T> {}
impl<T: Pod> sealed::Sealed for CudaView<'_, T> {}
impl<T: Pod> sealed::Sealed for CudaViewMut<'_, T> {}

impl<T: Pod> Lend for CudaSlice<T> {
    type Element = T;
}

impl<T: Pod> Lend for CudaView<'_, T> {
    type Element = T;
}

impl<T: Pod> Lend for CudaViewMut<'_, T> {
    type Element = T;
}

impl<T: Pod> LendMut for CudaSlice<T> {}
impl<T: Pod> LendMut for CudaViewMut<'_, T> {}

/// Lends slices for as long as the closure of [`Cuda::lending`] runs.
#[derive(Clone, Copy)]
pub struct Loans<'scope, 'env> {
    open: &'scope Open<'env>,
}

/// The loans of a closure. They end with the closure, even if it unwinds.
struct Open<'env> {
    device: &'env Cuda,
    returns: RefCell<Vec<Return<'env>>>,
}

/// The means by which the owner of a slice waits for the device's stream.
enum Return<'env> {
    /// cudarc's own event of the slice. Later users of the slice wait for it.
    Record(&'env CudaEvent),
    /// The stream that frees the slice, if cudarc does not track the slice.
    Join(Arc<CudaStream>),
}

impl Cuda {
    /// Calls `work` with loans, which lend cudarc's slices and views.
    ///
    /// The device's stream waits for the last write of each slice. For a slice that is lent for
    /// writing, it also waits for the last reads. Later users of the slice wait for everything that
    /// is enqueued here until `work` returns. They wait for cudarc's event if cudarc tracks the
    /// slice; otherwise the slice's stream waits. In a [capture](Self::capture) nothing waits,
    /// since nothing runs. The caller has to order each replay. A capture that begins within `work`
    /// ends within it.
    ///
    /// # Errors
    ///
    /// The error of `work`, or the driver's.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use mla_kernels::{Cuda, Result};
    /// # use mla_kernels::runtime::device::Device as _;
    /// # use mla_kernels::runtime::tensor::{Layout, TensorMut, TensorRef};
    /// # use mla_kernels::device::cudarc::driver::CudaSlice;
    /// # type Slice = CudaSlice<f32>;
    /// # fn copy(gpu: &Cuda, from: &Slice, to: &mut Slice, layout: Layout) -> Result<()> {
    /// gpu.lending(|loans| {
    ///     let (from, to) = (loans.lend(from)?, loans.lend_mut(to)?);
    ///     gpu.copy(TensorRef::new(from, layout)?, TensorMut::new(to, layout)?)
    /// })
    /// # }
    /// ```
    ///
    /// A loan ends with the closure:
    ///
    /// ```compile_fail,E0521
    /// # use mla_kernels::device::{Bytes, cudarc::driver::CudaSlice};
    /// fn keep<'a>(gpu: &'a mla_kernels::Cuda, slice: &'a CudaSlice<f32>) {
    ///     let mut kept: Option<Bytes<'a>> = None;
    ///     gpu.lending(|loans| {
    ///         kept = Some(loans.lend(slice)?);
    ///         Ok(())
    ///     });
    /// }
    /// ```
    ///
    /// Elements must be valid for any bytes, which `bool` and enums are not:
    ///
    /// ```compile_fail,E0277
    /// # use mla_kernels::device::cudarc::driver::CudaSlice;
    /// fn write(gpu: &mla_kernels::Cuda, slice: &mut CudaSlice<bool>) {
    ///     gpu.lending(|loans| loans.lend_mut(slice).map(|_| ()));
    /// }
    /// ```
    ///
    /// Implementing cudarc's safe trait is not enough, since an implementation may return any
    /// address:
    ///
    /// ```compile_fail,E0277
    /// # use std::sync::Arc;
    /// # use mla_kernels::device::cudarc::driver::{CudaStream, DevicePtr, DeviceSlice, SyncOnDrop};
    /// struct Liar(Arc<CudaStream>);
    /// # impl DeviceSlice<f32> for Liar {
    /// #     fn len(&self) -> usize { 1 << 30 }
    /// #     fn stream(&self) -> &Arc<CudaStream> { &self.0 }
    /// # }
    /// impl DevicePtr<f32> for Liar {
    ///     fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
    ///         (16, SyncOnDrop::Sync(None))
    ///     }
    /// }
    /// fn read(gpu: &mla_kernels::Cuda, liar: &Liar) {
    ///     gpu.lending(|loans| loans.lend(liar).map(|_| ()));
    /// }
    /// ```
    pub fn lending<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(Loans<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        let open = Open {
            device: self,
            returns: RefCell::default(),
        };
        let done = work(Loans { open: &open });
        let returned = open.give_back();
        let done = done?;
        returned.map(|()| done).map_err(failed("return slices"))
    }
}

impl<'scope, 'env> Loans<'scope, 'env> {
    /// Lends all bytes of a slice for reading.
    ///
    /// # Errors
    ///
    /// If the slice belongs to another context, or the driver refuses. Also if the slice belongs to
    /// the per-thread default stream and cudarc does not track it.
    pub fn lend(&self, slice: &'env impl Lend) -> Result<Bytes<'scope>> {
        let len = slice.num_bytes();
        let owner = slice.stream().clone();
        let address = self.open.borrow(owner, |stream| slice.device_ptr(stream))?;
        // SAFETY: cudarc's slice has this length and is borrowed for longer than the scope. The
        // stream waits for its last write, and its next writes and its release wait for the stream.
        Ok(unsafe { Bytes::ordered(address, len, StreamId::of(self.open.device.stream())) })
    }

    /// Lends all bytes of a slice for writing.
    ///
    /// # Errors
    ///
    /// The same as for [`lend`](Self::lend).
    pub fn lend_mut(&self, slice: &'env mut impl LendMut) -> Result<BytesMut<'scope>> {
        let len = slice.num_bytes();
        let owner = slice.stream().clone();
        let address = self
            .open
            .borrow(owner, move |stream| slice.device_ptr_mut(stream))?;
        // SAFETY: cudarc has `len` bytes there. This is their only borrow, and it outlasts the
        // scope. The stream waits for what wrote them, and later users wait for the stream.
        Ok(unsafe { BytesMut::ordered(address, len, StreamId::of(self.open.device.stream())) })
    }
}

impl<'env> Open<'env> {
    /// Returns the address of a slice of the stream `owner`, after making the device's stream wait
    /// for the slice.
    fn borrow(
        &self,
        owner: Arc<CudaStream>,
        pointer: impl FnOnce(&'env CudaStream) -> (u64, SyncOnDrop<'env>),
    ) -> Result<u64> {
        let own = self.device.stream();
        let (context, theirs) = (own.context(), owner.context());
        if context != theirs {
            let shown = |stream: &CudaStream| StreamId::of(stream).to_string();
            return Err(Error::argument("slice", shown(&owner), shown(own)));
        }
        let is_capturing = self.device.is_capturing()?;
        let waiting = if is_capturing {
            self.device.aside()?
        } else {
            own
        };
        let (address, mut guard) =
            stream::apart(context, || Ok(pointer(waiting))).map_err(failed("wait for a slice"))?;
        // `give_back` records the event instead of the guard, since it can report an error.
        let event = match &mut guard {
            SyncOnDrop::Record(target) => mem::take(target).map(|(event, _)| event),
            SyncOnDrop::Sync(_) => None,
        };
        if is_capturing {
            return Ok(address);
        }
        let tracked = [context, theirs]
            .iter()
            .all(|context| context.is_managing_stream_synchronization());
        match event.filter(|_| tracked) {
            Some(event) => self.returns.borrow_mut().push(Return::Record(event)),
            None if owner == *own => {}
            None => {
                // Another thread may have enqueued the owner's work. This thread's handle of the
                // per-thread stream would not wait for it.
                stream::check_shared("slice's stream", &owner)?;
                stream::join(own, &owner).map_err(failed("wait for a slice"))?;
                self.returns.borrow_mut().push(Return::Join(owner));
            }
        }
        Ok(address)
    }

    /// Makes the slices' later users wait for the stream. If that fails, the host waits for the
    /// stream.
    fn give_back(&self) -> std::result::Result<(), DriverError> {
        let own = self.device.stream();
        let returns = self.returns.take();
        if returns.is_empty() {
            return Ok(());
        }
        let returned = returns.iter().try_for_each(|back| match back {
            Return::Record(event) => stream::bind(own.context())
                // SAFETY: event and stream live, and are of one context.
                .and_then(|()| unsafe { result::event::record(event.cu_event(), own.cu_stream()) }),
            Return::Join(owner) => stream::join(owner, own),
        });
        match returned {
            Ok(()) => Ok(()),
            Err(error) => stream::synchronize(own).and(Err(error)),
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            stream::log("return slices", &error);
        }
    }
}
