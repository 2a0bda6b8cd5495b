//! GEMMs through cuBLAS.
//!
//! cuBLAS stores matrices by columns, so it sees a row-major matrix as its transpose. It is
//! therefore asked for `cᵀ = bᵀ · aᵀ`, with the operands exchanged. Each operand needs one axis
//! that is contiguous in memory; cuBLAS's "transposed" flag says which.

use std::sync::Arc;

use cudarc::cublas::{result, sys};
use cudarc::driver::CudaStream;
use mla_runtime::model::DType;
use mla_runtime::tensor::Layout;
use mla_runtime::{Error, Result};

use super::memory::{Allocated, Buffer, Bytes};
use super::{failed, stream};
use crate::library;

// The size that cuBLAS recommends for Hopper and later. A cuBLAS handle that is given a workspace
// allocates nothing, so its calls can be captured.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A cuBLAS handle that is tied to one stream. There is none if the library is missing.
pub(super) struct Blas {
    handle: Option<Handle>,
}

struct Handle {
    raw: sys::cublasHandle_t,
    // The workspace. `drop` destroys the handle before this field is freed.
    workspace: Buffer,
}

// SAFETY: "the library is thread safe and its functions can be called from multiple host threads,
// even with the same handle" (cuBLAS documentation), as long as its configuration does not change.
// Stream and workspace are set once, before any other code has the handle.
unsafe impl Send for Handle {}
// SAFETY: cuBLAS takes calls with one handle from several threads, as quoted for `Send`.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle was created once and is destroyed once.
        if let Err(error) = unsafe { result::destroy_handle(self.raw) } {
            stream::log("destroy cublas handle", &error);
        }
    }
}

impl Blas {
    /// Makes a handle. The context of `stream` must be current.
    pub(super) fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        if !library::has_cublas() {
            return Ok(Self { handle: None });
        }
        let workspace = Buffer::zeroed(stream, WORKSPACE_BYTES, &Allocated::default())?;
        let raw = result::create_handle().map_err(failed("create cublas handle"))?;
        let handle = Handle { raw, workspace };
        // SAFETY: handle and stream live. cuBLAS and the driver have different names for the same
        // stream type. The workspace outlives the handle. The stream comes first, since setting it
        // resets the workspace.
        unsafe {
            result::set_stream(raw, stream.cu_stream().cast())
                .map_err(failed("set cublas stream"))?;
            sys::cublasSetWorkspace_v2(raw, handle.workspace.address() as *mut _, WORKSPACE_BYTES)
                .result()
                .map_err(failed("set cublas workspace"))?;
        }
        Ok(Self {
            handle: Some(handle),
        })
    }

    /// Computes `c[i] = a[i] · b[i]`, as [`Device::gemm`](mla_runtime::device::Device::gemm) says.
    /// Extents and dtypes agree, no extent is 0, and nothing else writes `c`.
    pub(super) fn gemm(
        &self,
        (a, a_layout): (Bytes<'_>, &Layout),
        (b, b_layout): (Bytes<'_>, &Layout),
        (c, c_layout): (u64, &Layout),
    ) -> Result<()> {
        let Some(handle) = &self.handle else {
            return Err(Error::Device {
                device: "cuda",
                operation: "gemm",
                message: "library cublas is missing; install it where the loader finds it"
                    .to_owned(),
            });
        };
        // A column-major output is the row-major output of the transposed product.
        let is_row_major = is_contiguous(c_layout, 2);
        let operand = |name, layout: &Layout| {
            let turned = if is_row_major {
                *layout
            } else {
                transposed(layout)
            };
            Operand::new(&turned).ok_or_else(|| strides_refused(name, layout))
        };
        let out = operand("gemm c", c_layout)?;
        if out.transposed {
            return Err(strides_refused("gemm c", c_layout));
        }
        let a = (a.address(), operand("gemm a", a_layout)?);
        let b = (b.address(), operand("gemm b", b_layout)?);
        let [batch, rows, columns] = c_layout.shape;
        let ([(left, left_rows), (right, right_rows)], [m, n]) = match is_row_major {
            true => ([a, b], [rows, columns]),
            false => ([b, a], [columns, rows]),
        };
        let dtype = match c_layout.dtype {
            DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
            DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        };
        let (alpha, beta) = (1f32, 0f32);
        // SAFETY: the layouts were checked to lie within their bytes, and the operands describe the
        // same elements in the order that cuBLAS counts them. `alpha` and `beta` are on the host
        // and have the compute type. They are read before the call returns. The handle's stream and
        // workspace live.
        unsafe {
            sys::cublasGemmStridedBatchedEx_64(
                handle.raw,
                right_rows.operation(),
                left_rows.operation(),
                n as i64,
                m as i64,
                a_layout.shape[2] as i64,
                (&raw const alpha).cast(),
                right as *const _,
                dtype,
                right_rows.row_stride,
                right_rows.batch_stride,
                left as *const _,
                dtype,
                left_rows.row_stride,
                left_rows.batch_stride,
                (&raw const beta).cast(),
                c as *mut _,
                dtype,
                out.row_stride,
                out.batch_stride,
                batch as i64,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
            .result()
            .map_err(failed("gemm"))
        }
    }
}

// A batch of matrices in which either the columns (plain) or the rows (transposed) are contiguous.
struct Operand {
    transposed: bool,
    row_stride: i64,
    batch_stride: i64,
}

impl Operand {
    /// Returns `None` if neither columns nor rows are contiguous, or if rows overlap.
    fn new(layout: &Layout) -> Option<Self> {
        let transposed = !is_contiguous(layout, 2);
        let (rows, columns) = if transposed { (2, 1) } else { (1, 2) };
        let row_stride = if layout.shape[rows] > 1 {
            layout.strides[rows]
        } else {
            layout.shape[columns]
        };
        if !is_contiguous(layout, columns) || row_stride < layout.shape[columns] {
            return None;
        }
        let batch_stride = if layout.shape[0] > 1 {
            layout.strides[0]
        } else {
            0
        };
        Some(Self {
            transposed,
            row_stride: row_stride as i64,
            batch_stride: batch_stride as i64,
        })
    }

    fn operation(&self) -> sys::cublasOperation_t {
        if self.transposed {
            sys::cublasOperation_t::CUBLAS_OP_T
        } else {
            sys::cublasOperation_t::CUBLAS_OP_N
        }
    }
}

/// Refuses a matrix with a layout that cuBLAS does not take.
pub(super) fn check_operand(field: &'static str, layout: &Layout) -> Result<()> {
    if layout.elements() == 0 || Operand::new(layout).is_some() {
        return Ok(());
    }
    Err(strides_refused(field, layout))
}

fn is_contiguous(layout: &Layout, axis: usize) -> bool {
    layout.shape[axis] <= 1 || layout.strides[axis] == 1
}

fn transposed(layout: &Layout) -> Layout {
    let mut layout = *layout;
    layout.shape.swap(1, 2);
    layout.strides.swap(1, 2);
    layout
}

fn strides_refused(operand: &'static str, layout: &Layout) -> Error {
    Error::argument(
        operand,
        layout,
        "rows or columns of stride 1, and the other stride no smaller than their extent",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns if the operand is transposed, and its strides of rows and of the batch.
    fn operand(shape: [usize; 3], strides: [usize; 3]) -> Option<(bool, i64, i64)> {
        let dtype = DType::BF16;
        let operand = Operand::new(&Layout {
            dtype,
            shape,
            strides,
        })?;
        Some((operand.transposed, operand.row_stride, operand.batch_stride))
    }

    #[test]
    fn operands_are_plain_or_transposed() {
        assert_eq!(operand([2, 3, 4], [0, 8, 1]), Some((false, 8, 0)));
        assert_eq!(operand([2, 3, 4], [12, 1, 3]), Some((true, 3, 12)));
    }

    #[test]
    fn strides_of_single_rows_do_not_matter() {
        assert_eq!(operand([1, 1, 4], [7, 0, 1]), Some((false, 4, 0)));
        assert_eq!(operand([1, 4, 1], [0, 5, 9]), Some((false, 5, 0)));
    }

    #[test]
    fn scattered_and_overlapping_matrices_are_refused() {
        for strides in [[1, 8, 2], [1, 2, 1]] {
            assert_eq!(operand([1, 3, 4], strides), None);
        }
    }
}
