//! candle's tensors on a GPU.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use candle_core::{CudaStorage, Error, Result, Storage, Tensor};
use half::{bf16, f16};
use mla_kernels::Cuda;
use mla_kernels::device::{Bytes, BytesMut, Loans};

use super::hold::{Held, Written};
use super::{Form, Lending, Lent, LentMut, Place, hold, other_device, places};

impl Lending for Cuda {
    fn lending<R, W>(&self, read: &[&Tensor], written: &[&Tensor], work: W) -> Result<R>
    where
        W: for<'a> FnOnce(Vec<Lent<'a, Self>>, Vec<LentMut<'a, Self>>) -> mla_runtime::Result<R>,
    {
        let (of_read, of_written) = (places(read)?, places(written)?);
        hold::hold(read, written, |mut held: Held<'_>| {
            let views = of_read.iter().map(|place| match held.read(place.storage) {
                Storage::Cuda(storage) => view(storage, &place.form),
                _ => Err(other_device()),
            });
            let views = views.collect::<Result<Vec<_>>>()?;
            let mut written = Vec::with_capacity(of_written.len());
            for place in &of_written {
                match held.take_written(place.storage) {
                    Written::Cuda(storage) => written.push(view_mut(storage, &place.form)?),
                    Written::Cpu(_) => return Err(other_device()),
                }
            }
            self.lending(|loans| {
                let mut lent = Vec::with_capacity(views.len());
                for (view, Place { form, .. }) in views.iter().zip(of_read) {
                    let bytes = view.lend(loans)?;
                    lent.push(Lent { bytes, form });
                }
                let mut lent_mut = Vec::with_capacity(written.len());
                for (view, Place { form, .. }) in written.iter_mut().zip(of_written) {
                    let bytes = view.lend(loans)?;
                    lent_mut.push(LentMut { bytes, form });
                }
                work(lent, lent_mut)
            })
            .map_err(Error::wrap)
        })
    }
}

/// Defines views of slices of each dtype, and how they are lent.
macro_rules! views {
    ($($variant:ident: $number:ty),*) => {
        enum View<'a> {
            $($variant(CudaView<'a, $number>),)*
        }

        enum ViewMut<'a> {
            $($variant(CudaViewMut<'a, $number>),)*
        }

        fn view<'a>(storage: &'a CudaStorage, form: &Form) -> Result<View<'a>> {
            match &storage.slice {
                $(CudaStorageSlice::$variant(slice) => {
                    Ok(View::$variant(slice.slice(form.numbers())))
                })*
                _ => Err(Form::refused()),
            }
        }

        fn view_mut<'a>(storage: &'a mut CudaStorage, form: &Form) -> Result<ViewMut<'a>> {
            match &mut storage.slice {
                $(CudaStorageSlice::$variant(slice) => {
                    Ok(ViewMut::$variant(slice.slice_mut(form.numbers())))
                })*
                _ => Err(Form::refused()),
            }
        }

        impl<'v> View<'v> {
            fn lend<'scope, 'env>(
                &'env self,
                loans: Loans<'scope, 'env>,
            ) -> mla_runtime::Result<Bytes<'scope>> {
                match self {
                    $(Self::$variant(view) => loans.lend(view),)*
                }
            }
        }

        impl<'v> ViewMut<'v> {
            fn lend<'scope, 'env>(
                &'env mut self,
                loans: Loans<'scope, 'env>,
            ) -> mla_runtime::Result<BytesMut<'scope>> {
                match self {
                    $(Self::$variant(view) => loans.lend_mut(view),)*
                }
            }
        }
    };
}

views!(U8: u8, U32: u32, I64: i64, BF16: bf16, F16: f16, F32: f32, F64: f64);
