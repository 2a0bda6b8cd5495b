//! The layer on the device of a module's tensors, with candle's memory lent to it.

use std::ops::{Deref, Range};

use candle_core::{DType, Device, Error, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::dtype::Element;

use crate::config::{Config, Room};
use crate::paged::{Inputs, Paged, Span};

/// One layer's attention.
pub(crate) enum Attention {
    Cpu(Paged<CpuPrefill, CpuDecode>),
    #[cfg(feature = "cuda")]
    Cuda(Paged<mla_kernels::backends::sm90::WgmmaAttn, mla_kernels::backends::sm90::WgmmaMla>),
}

impl Attention {
    /// For tensors of this device and dtype.
    pub(crate) fn new(device: &Device, dtype: DType, config: &Config, room: Room) -> Result<Self> {
        let dtype = match dtype {
            DType::F32 => mla_runtime::dtype::DType::F32,
            DType::BF16 => mla_runtime::dtype::DType::BF16,
            DType::F16 => mla_runtime::dtype::DType::F16,
            other => crate::dtype_refused(other)?,
        };
        match device {
            Device::Cpu => Paged::new(&Cpu::new(), config, room, dtype).map(Self::Cpu),
            // On the stream of candle's own, so that neither waits for the other.
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => mla_kernels::Cuda::on_stream(device.cuda_stream())
                .and_then(|gpu| Paged::new(&gpu, config, room, dtype))
                .map(Self::Cuda),
            other => candle_core::bail!(
                "device: given {other:?}, accepted the CPU or, built with cuda, a GPU"
            ),
        }
        .map_err(Error::wrap)
    }

    /// `[B, T, H·V]` from contiguous tensors.
    pub(crate) fn attend(
        &mut self,
        span: Span,
        tensors: &Inputs<&Tensor>,
        width: usize,
    ) -> Result<Tensor> {
        let shape = (span.batch, span.len, width);
        match tensors.query.dtype() {
            DType::F32 => self.attend_of::<f32>(span, tensors, shape),
            DType::BF16 => self.attend_of::<bf16>(span, tensors, shape),
            DType::F16 => self.attend_of::<f16>(span, tensors, shape),
            other => crate::dtype_refused(other),
        }
    }

    fn attend_of<T: Number>(
        &mut self,
        span: Span,
        tensors: &Inputs<&Tensor>,
        shape: (usize, usize, usize),
    ) -> Result<Tensor> {
        let count = shape.0 * shape.1 * shape.2;
        let (query, latent) = (elements(tensors.query)?, elements(tensors.latent)?);
        let (rope, kv_b) = (elements(tensors.rope)?, elements(tensors.kv_b)?);
        match self {
            Self::Cpu(paged) => {
                let mut out = vec![T::zero(); count];
                let inputs = Inputs {
                    query: query.bytes::<T>()?,
                    latent: latent.bytes::<T>()?,
                    rope: rope.bytes::<T>()?,
                    kv_b: kv_b.bytes::<T>()?,
                };
                paged
                    .attend(span, inputs, bytemuck::cast_slice_mut(&mut out))
                    .map_err(Error::wrap)?;
                Tensor::from_vec(out, shape, &Device::Cpu)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(paged) => {
                let gpu = paged.device().clone();
                let device = tensors.query.device().as_cuda_device()?.clone();
                // SAFETY: every element is written by the layer before anyone reads it.
                let mut out = unsafe { device.alloc::<T>(count) }?;
                let (query, latent) = (query.view::<T>()?, latent.view::<T>()?);
                let (rope, kv_b) = (rope.view::<T>()?, kv_b.view::<T>()?);
                gpu.lending(|loans| {
                    let inputs = Inputs {
                        query: loans.lend(&query)?,
                        latent: loans.lend(&latent)?,
                        rope: loans.lend(&rope)?,
                        kv_b: loans.lend(&kv_b)?,
                    };
                    paged.attend(span, inputs, loans.lend_mut(&mut out)?)
                })
                .map_err(Error::wrap)?;
                let out = candle_core::CudaStorage::wrap_cuda_slice(out, device);
                let none = candle_core::op::BackpropOp::none();
                Ok(Tensor::from_storage(Storage::Cuda(out), shape, none, false))
            }
        }
    }
}

/// An element of both candle and the layer.
#[cfg(not(feature = "cuda"))]
trait Number: WithDType + Element {}
#[cfg(not(feature = "cuda"))]
impl<T: WithDType + Element> Number for T {}

/// An element of both candle and the layer.
#[cfg(feature = "cuda")]
trait Number:
    WithDType
    + Element
    + candle_core::cuda_backend::CudaDType
    + candle_core::cuda_backend::cudarc::driver::DeviceRepr
{
}
#[cfg(feature = "cuda")]
impl<T> Number for T where
    T: WithDType
        + Element
        + candle_core::cuda_backend::CudaDType
        + candle_core::cuda_backend::cudarc::driver::DeviceRepr
{
}

/// The elements of a contiguous tensor, where candle keeps them.
struct Elements<S> {
    storage: S,
    range: Range<usize>,
}

fn elements(tensor: &Tensor) -> Result<Elements<impl Deref<Target = Storage>>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("given {tensor:?}, accepted a contiguous tensor");
    };
    Ok(Elements {
        storage,
        range: start..end,
    })
}

impl<S: Deref<Target = Storage>> Elements<S> {
    fn bytes<T: Number>(&self) -> Result<&[u8]> {
        let Storage::Cpu(storage) = &*self.storage else {
            candle_core::bail!("given a tensor of another device, accepted one of the CPU");
        };
        let elements = T::cpu_storage_as_slice(storage)?;
        Ok(bytemuck::cast_slice(&elements[self.range.clone()]))
    }

    #[cfg(feature = "cuda")]
    fn view<T: Number>(
        &self,
    ) -> Result<candle_core::cuda_backend::cudarc::driver::CudaView<'_, T>> {
        let Storage::Cuda(storage) = &*self.storage else {
            candle_core::bail!("given a tensor of another device, accepted one of the GPU");
        };
        Ok(storage.as_cuda_slice::<T>()?.slice(self.range.clone()))
    }
}
