//! GEMMs of few tokens with a matrix per head, computed by this crate's own kernel. A row's sums
//! have one order, whatever the number of tokens. For batch-invariant problems the kernel therefore
//! computes GEMMs of any number of tokens.

use mla_runtime::model::DType;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use super::Cuda;
use super::argument::{dtype_code, narrow, wide};
use crate::raw;

/// Work that shares a GEMM's launch.
#[derive(Clone, Copy)]
pub(super) enum Fusion {
    Alone,
    /// A cache write in the same launch. A GEMM of cuBLAS would have to wait for it.
    CacheWrite,
}

impl Fusion {
    /// Returns the maximum number of tokens for which this crate's kernel is faster than cuBLAS, as
    /// measured. The kernel reads the weights again for every 32 tokens. For many tokens, cuBLAS
    /// has better tiles.
    fn max_tokens(self, heads: usize) -> usize {
        match (self, heads <= 32) {
            (_, false) => 32,
            (Self::Alone, true) => 64,
            (Self::CacheWrite, true) => 128,
        }
    }
}

/// Returns true if the kernel takes `c[i] = a[i] · b[i]`.
pub(super) fn takes(
    a: &TensorRef<'_, Cuda>,
    b: &TensorRef<'_, Cuda>,
    c: &TensorMut<'_, Cuda>,
) -> bool {
    let (a_layout, b_layout, c_layout) = (a.layout(), b.layout(), c.layout());
    let [heads, tokens, n] = c_layout.shape;
    let k = a_layout.shape[2];
    // `b` is contiguous along n or along k.
    let (along, k_multiple, n_multiple) = match b_layout.strides {
        [_, along, 1] => (along, 16, 64),
        [_, 1, along] => (along, 32, 16),
        _ => return false,
    };
    let aligned = |stride: usize, extent: usize| extent <= 1 || counted(stride);
    c_layout.dtype != DType::F32
        && k > 0
        && k.is_multiple_of(k_multiple)
        && n.is_multiple_of(n_multiple)
        && [a.bytes(), b.bytes(), c.as_ref().bytes()]
            .iter()
            .all(|bytes| bytes.address().is_multiple_of(16))
        && a_layout.has_unit_columns()
        && c_layout.has_unit_columns()
        && [a_layout, c_layout]
            .iter()
            .all(|layout| aligned(layout.strides[0], heads) && aligned(layout.strides[1], tokens))
        && aligned(b_layout.strides[0], heads)
        && counted(along)
}

/// The kernel counts strides in units of eight elements, with 32 bits.
fn counted(stride: usize) -> bool {
    stride.is_multiple_of(8) && u32::try_from(stride / 8).is_ok()
}

/// Returns true if the kernel is faster than cuBLAS for a GEMM with this result.
pub(super) fn is_faster(fusion: Fusion, c: &TensorMut<'_, Cuda>) -> bool {
    let [heads, tokens, _] = c.layout().shape;
    heads > 1 && tokens <= fusion.max_tokens(heads)
}

/// Refuses a problem of whose layers the kernel does not take every GEMM.
pub(super) fn check_problem(problem: &Problem) -> Result<()> {
    if problem.dtype == DType::F32 {
        let accepted = "bf16 or f16, with batch_invariant";
        return Err(Error::argument("dtype", problem.dtype, accepted));
    }
    let dims = problem.dims;
    // Weights may come in either orientation, so that each width is a GEMM's k and its n, and
    // either may be contiguous.
    for (field, given) in [
        ("latent", dims.latent),
        ("nope", dims.head.nope),
        ("v", dims.head.v),
    ] {
        if given % 64 != 0 {
            let accepted = "a multiple of 64, with batch_invariant";
            return Err(Error::argument(field, given, accepted));
        }
    }
    Ok(())
}

/// Refuses a factor or a result whose strides or address the kernel does not take.
pub(super) fn check_operand(field: &'static str, tensor: TensorRef<'_, Cuda>) -> Result<()> {
    let layout = tensor.layout();
    let past = tensor.bytes().address() % 16;
    if past != 0 && layout.elements() > 0 {
        let given = format!("an address {past} bytes past a multiple of 16");
        let accepted = "a multiple of 16 bytes, with batch_invariant";
        return Err(Error::argument(field, given, accepted));
    }
    let axes = layout.shape.into_iter().zip(layout.strides);
    for (extent, stride) in axes {
        if extent > 1 && stride != 1 && !counted(stride) {
            let accepted = "strides of 1 or multiples of 8, with batch_invariant";
            return Err(Error::argument(field, layout, accepted));
        }
    }
    Ok(())
}

/// Returns the parameters of the kernel for a GEMM that [`takes`] accepts.
///
/// The kernel reads constant weights before the preceding launches are done. If the GEMM is
/// `ready`, it waits only for the last of these launches. That launch begins when all before it are
/// done, and it neither writes `a` nor accesses `c`.
pub(super) fn params(
    a: &TensorRef<'_, Cuda>,
    b: &TensorRef<'_, Cuda>,
    c: TensorMut<'_, Cuda>,
    ready: bool,
) -> Result<raw::MlaHeadGemmParams> {
    let (a_layout, b_layout, c_layout) = (a.layout(), b.layout(), *c.layout());
    let [heads, tokens, n] = c_layout.shape;
    Ok(raw::MlaHeadGemmParams {
        input: a.bytes().address() as *const _,
        weights: b.bytes().address() as *const _,
        out: c.into_bytes().address() as *mut _,
        input_token_stride: wide("gemm a", a_layout.strides[1])?,
        input_head_stride: wide("gemm a", a_layout.strides[0])?,
        weights_head_stride: wide("gemm b", b_layout.strides[0])?,
        weights_k_stride: wide("gemm b", b_layout.strides[1])?,
        weights_n_stride: wide("gemm b", b_layout.strides[2])?,
        out_token_stride: wide("gemm c", c_layout.strides[1])?,
        out_head_stride: wide("gemm c", c_layout.strides[0])?,
        tokens: narrow("gemm m", tokens)?,
        heads: narrow("gemm batch", heads)?,
        k: narrow("gemm k", a_layout.shape[2])?,
        n: narrow("gemm n", n)?,
        dtype: dtype_code(c_layout.dtype),
        constant_weights: b.is_constant().into(),
        ready: (ready && b.is_constant()).into(),
    })
}

#[cfg(test)]
mod tests {
    use mla_runtime::model::MlaDims;
    use mla_runtime::tensor::Layout;

    use super::*;
    use crate::device::{Bytes, BytesMut};

    #[test]
    fn weights_that_may_still_be_written_are_waited_for() {
        let layout = Layout::contiguous(DType::BF16, [2, 16, 64]);
        // SAFETY: nothing reads or writes at these addresses.
        let (from, to) = unsafe { (Bytes::from_raw(256, 4096), BytesMut::from_raw(8192, 4096)) };
        let weights = TensorRef::new(from, layout).unwrap();
        // SAFETY: nothing writes at this address.
        let constant = unsafe { weights.assume_constant() };
        let mut to = TensorMut::new(to, layout).unwrap();
        let mut flags = |weights: &TensorRef<'_, Cuda>, ready| {
            let params = params(&weights.transpose(1, 2), weights, to.reborrow(), ready).unwrap();
            (params.constant_weights, params.ready)
        };
        assert_eq!(flags(&weights, false), (0, 0));
        assert_eq!(flags(&weights, true), (0, 0));
        assert_eq!(flags(&constant, false), (1, 0));
        assert_eq!(flags(&constant, true), (1, 1));
    }
    #[test]
    fn addresses_that_the_kernel_does_not_take_are_refused() {
        let layout = Layout::contiguous(DType::BF16, [2, 16, 64]);
        let at = |address| {
            // SAFETY: nothing reads or writes at this address.
            let bytes = unsafe { Bytes::from_raw(address, 4096) };
            check_operand("out", TensorRef::new(bytes, layout).unwrap())
        };
        assert_eq!(at(256), Ok(()));
        assert_eq!(
            at(264).unwrap_err().to_string(),
            "out: given an address 8 bytes past a multiple of 16, accepted a multiple of 16 \
             bytes, with batch_invariant"
        );
    }

    #[test]
    fn widths_whose_gemms_the_kernel_does_not_take_are_refused() {
        let refused = |field: &str, given: u32| {
            let mut dims = MlaDims::R1;
            match field {
                "latent" => dims.latent = given,
                "nope" => dims.head.nope = given,
                _ => dims.head.v = given,
            }
            check_problem(&Problem::new(dims, 16, DType::BF16)).map_err(|error| error.to_string())
        };
        for field in ["latent", "nope", "v"] {
            assert_eq!(refused(field, 192), Ok(()));
            assert_eq!(
                refused(field, 96),
                Err(format!(
                    "{field}: given 96, accepted a multiple of 64, with batch_invariant"
                ))
            );
        }
    }
}
