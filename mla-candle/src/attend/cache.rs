//! An engine's cache of latents, as candle tensors.

use candle_core::Tensor;
use mla_runtime::Error;
use mla_runtime::cache::{CacheLayout, CacheMut};
use mla_runtime::kv_format::KvFormat;
use mla_runtime::problem::Problem;

use crate::lend::{Lending, LentMut, layer_dtype};

/// The cache of one layer: a tensor of rows `[pages, page size, L + R]`, in which the latent of a
/// token stands before its rotary key.
///
/// Its dtype is that of the problem's cache format; of `fp8` and `fp8_ds_mla` it is u8, and the last
/// axis is the bytes of a row. Pages and rows may be apart.
#[derive(Clone, Copy)]
pub struct Cache<'t> {
    pub(super) rows: &'t Tensor,
    scale: f32,
}

impl<'t> From<&'t Tensor> for Cache<'t> {
    fn from(rows: &'t Tensor) -> Self {
        Self { rows, scale: 1.0 }
    }
}

impl<'t> Cache<'t> {
    /// The same with the scale of `fp8`: value = stored · scale.
    #[must_use]
    pub const fn with_scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// The tensors that are written.
    pub(super) fn tensors(&self) -> Vec<&'t Tensor> {
        vec![self.rows]
    }

    /// The view of its tensors, once they are lent.
    pub(super) fn view<'a, D: Lending>(
        &self,
        problem: &Problem,
        rows: LentMut<'a, D>,
    ) -> mla_runtime::Result<CacheMut<'a, D>> {
        let width = problem.kv_format.row_bytes(problem.dims);
        let [pages, page_stride, row_stride] = pages_of(&rows, problem, "cache", width)?;
        let page_size = problem.page_size as usize;
        let layout = CacheLayout::contiguous(problem.dims, problem.kv_format, pages, page_size)
            .with_page_stride(page_stride)
            .with_row_stride(row_stride)
            .with_scale(self.scale);
        CacheMut::new(rows.into_bytes(), layout)
    }
}

/// The pages of a tensor `[pages, page size, width]`, and its strides in bytes.
fn pages_of<D: Lending>(
    tensor: &LentMut<'_, D>,
    problem: &Problem,
    name: &'static str,
    row_bytes: usize,
) -> mla_runtime::Result<[usize; 3]> {
    let form = tensor.form();
    let strides: Vec<usize> = form.strides().collect();
    let size = form.dtype().size_in_bytes();
    let page_size = problem.page_size as usize;
    let right_dtype = match problem.kv_format {
        KvFormat::Fp8 | KvFormat::Fp8DsMla => form.dtype() == candle_core::DType::U8,
        format => layer_dtype(form.dtype(), name).is_ok_and(|it| KvFormat::of(it).same(format)),
    };
    match (form.dims(), &*strides) {
        (&[pages, tokens, width], &[page, row, value])
            if right_dtype && tokens == page_size && width * size == row_bytes && value == size =>
        {
            Ok([pages, page, row])
        }
        (dims, _) => {
            let given = format!("{} {dims:?}", form.dtype().as_str());
            let accepted = format!(
                "a cache of {}: [pages, {page_size}, {} values of {size} bytes], contiguous rows",
                problem.kv_format,
                row_bytes / size
            );
            Err(Error::argument(name, given, accepted))
        }
    }
}
