//! The form of a candle tensor: the places of its numbers in its storage.

use std::ops::Range;

use candle_core::{DType, Error, Result, Tensor};
use mla_runtime::tensor::Layout;

/// The extents and strides of a tensor in its storage.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    dtype: DType,
    layout: candle_core::Layout,
}

impl Form {
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        let (dtype, layout) = (tensor.dtype(), tensor.layout().clone());
        match is_plain(dtype) {
            true => Ok(Self { dtype, layout }),
            false => Err(Self::refused()),
        }
    }

    pub(super) fn refused() -> Error {
        Error::msg("tensor: given numbers of another dtype, accepted f32, f16, bf16, or u8 for fp8")
    }

    /// Returns the range of the tensor's numbers in its storage. A view of candle's lies within it.
    pub(super) fn numbers(&self) -> Range<usize> {
        let start = self.layout.start_offset();
        let last = |(dim, stride): (&usize, &usize)| dim.saturating_sub(1) * stride;
        let extents = self.dims().iter().zip(self.layout.stride());
        match self.layout.shape().elem_count() {
            0 => start..start,
            _ => start..start + extents.map(last).sum::<usize>() + 1,
        }
    }

    /// Returns the bytes of the storage that the tensor spans.
    pub(super) fn range(&self) -> Range<usize> {
        let (size, numbers) = (self.dtype.size_in_bytes(), self.numbers());
        numbers.start * size..numbers.end * size
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Returns the strides of the axes, in bytes.
    pub(crate) fn strides(&self) -> impl Iterator<Item = usize> + '_ {
        let size = self.dtype.size_in_bytes();
        self.layout.stride().iter().map(move |stride| stride * size)
    }

    fn refusal(&self, name: &'static str, accepted: String) -> mla_runtime::Error {
        let (dims, strides) = (self.dims(), self.layout.stride());
        let given = format!("{dims:?} with strides {strides:?}");
        mla_runtime::Error::argument(name, given, accepted)
    }

    /// Returns the layout of [`Lent::rows`](super::Lent::rows).
    pub(super) fn layout(&self, name: &'static str, inner: usize) -> mla_runtime::Result<Layout> {
        let dtype = layer_dtype(self.dtype, name)?;
        let (dims, strides) = (self.dims(), self.layout.stride());
        let Some(outer) = dims.len().checked_sub(inner) else {
            return Err(self.refusal(name, format!("{inner} axes and up")));
        };
        // The distance between rows is the stride of the last axis that has more than one element.
        let (mut rows, mut stride) = (1, None);
        for (&dim, &apart) in dims[..outer].iter().zip(strides).rev() {
            if dim != 1 && *stride.get_or_insert(apart) * rows != apart {
                let accepted = "leading axes whose rows are at one distance";
                return Err(self.refusal(name, accepted.to_owned()));
            }
            rows *= dim;
        }
        let (inner_dims, inner_strides) = (&dims[outer..], &strides[outer..]);
        let (width, between) = (inner_dims[inner - 1], inner_strides[inner - 1]);
        let (middle, apart) = match inner {
            2 => (inner_dims[0], inner_strides[0]),
            _ => (1, width * between),
        };
        Ok(Layout {
            dtype,
            shape: [rows, middle, width],
            strides: [stride.unwrap_or(middle * apart), apart, between],
        })
    }

    /// Refuses a tensor with gaps between its numbers, or with its numbers in another order.
    pub(super) fn check_dense(&self, name: &'static str) -> mla_runtime::Result<()> {
        match self.layout.is_contiguous() {
            true => Ok(()),
            false => Err(self.refusal(name, "a contiguous tensor".to_owned())),
        }
    }
}

const fn is_plain(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::U8 | DType::U32 | DType::I64 | DType::BF16 | DType::F16 | DType::F32 | DType::F64
    )
}

/// Converts candle's dtype to the layer's.
pub(crate) fn layer_dtype(
    dtype: DType,
    name: &'static str,
) -> mla_runtime::Result<mla_runtime::model::DType> {
    match dtype {
        DType::F32 => Ok(mla_runtime::model::DType::F32),
        DType::BF16 => Ok(mla_runtime::model::DType::BF16),
        DType::F16 => Ok(mla_runtime::model::DType::F16),
        other => Err(mla_runtime::Error::argument(
            name,
            other.as_str(),
            "f32, bf16 or f16",
        )),
    }
}
