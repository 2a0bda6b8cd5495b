//! The form of a candle tensor: the places of its numbers in its storage.

use std::ops::Range;

use candle_core::{DType, Error, Result, Tensor};
use mla_runtime::tensor::Layout;

/// The extents and strides of a tensor, and the part of its storage that it spans.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    dtype: DType,
    dims: Vec<usize>,
    strides: Vec<usize>,
    /// The range of its numbers in the storage.
    numbers: Range<usize>,
}

impl Form {
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        let (dtype, layout) = (tensor.dtype(), tensor.layout());
        if !is_plain(dtype) {
            return Err(Self::refused());
        }
        let (dims, strides) = (layout.dims().to_vec(), layout.stride().to_vec());
        let start = layout.start_offset();
        // A view of candle's lies within its storage.
        let last = |(dim, stride): (&usize, &usize)| dim.saturating_sub(1) * stride;
        let end = match tensor.elem_count() {
            0 => start,
            _ => start + dims.iter().zip(&strides).map(last).sum::<usize>() + 1,
        };
        Ok(Self {
            dtype,
            dims,
            strides,
            numbers: start..end,
        })
    }

    pub(super) fn refused() -> Error {
        Error::msg("tensor: given numbers of another dtype, accepted f32, f16, bf16, or u8 for fp8")
    }

    /// Returns the bytes of the storage that the tensor spans.
    pub(super) fn range(&self) -> Range<usize> {
        let size = self.dtype.size_in_bytes();
        self.numbers.start * size..self.numbers.end * size
    }

    #[cfg(feature = "cuda")]
    pub(super) fn numbers(&self) -> Range<usize> {
        self.numbers.clone()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Returns the strides of the axes, in bytes.
    pub(crate) fn strides(&self) -> impl Iterator<Item = usize> + '_ {
        let size = self.dtype.size_in_bytes();
        self.strides.iter().map(move |stride| stride * size)
    }

    /// Returns the layout of [`Lent::rows`](super::Lent::rows).
    pub(super) fn layout(&self, name: &'static str, inner: usize) -> mla_runtime::Result<Layout> {
        let dtype = layer_dtype(self.dtype, name)?;
        let refused = |accepted: String| {
            let given = format!("{:?} with strides {:?}", self.dims, self.strides);
            Err(mla_runtime::Error::argument(name, given, accepted))
        };
        let Some(outer) = self.dims.len().checked_sub(inner) else {
            return refused(format!("{inner} axes and up"));
        };
        // The distance between rows is the stride of the last axis that has more than one element.
        let axes = || self.dims[..outer].iter().zip(&self.strides).rev();
        let (mut rows, mut stride) = (1, None);
        for (&dim, &apart) in axes() {
            if dim != 1 && *stride.get_or_insert(apart) * rows != apart {
                return refused("leading axes whose rows are at one distance".to_owned());
            }
            rows *= dim;
        }
        let inner_dims = &self.dims[outer..];
        let inner_strides = &self.strides[outer..];
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
        let mut expected = 1;
        for (&dim, &stride) in self.dims.iter().zip(&self.strides).rev() {
            if dim != 1 && stride != expected {
                let given = format!("{:?} with strides {:?}", self.dims, self.strides);
                return Err(mla_runtime::Error::argument(
                    name,
                    given,
                    "a contiguous tensor",
                ));
            }
            expected *= dim;
        }
        Ok(())
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
