//! An engine's cache of latents, as candle tensors.

use candle_core::Tensor;
use mla_runtime::Error;
use mla_runtime::model::KvFormat;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{CacheLayout, CacheMut, CacheStrides};

use crate::lend::{Lending, LentMut, layer_dtype, next};

/// The cache of one layer, in one tensor or two.
///
/// One tensor has rows `[pages, page size, L + R]`. Each row is a token's latent and its rotary
/// key. Two tensors have latents `[pages, page size, L]` and rotary keys `[pages, page size, R]`,
/// for a problem with [`Feature::SplitCache`]. Their dtype is that of the problem's cache format.
/// For `fp8`, `fp8_ds_mla` and `fp8_per_token` it is u8, and the last axis is the bytes of a row.
/// Rows of `fp8_per_token` in one tensor may be filled up to a multiple of 16 bytes: 656 for 644.
/// There may be gaps between pages and between rows.
///
/// [`Feature::SplitCache`]: mla_runtime::spec::Feature::SplitCache
#[derive(Clone, Copy)]
pub struct Cache<'t> {
    /// The whole rows, or only latents.
    rows: &'t Tensor,
    rope: Option<&'t Tensor>,
    scale: f32,
}

impl<'t> From<&'t Tensor> for Cache<'t> {
    fn from(rows: &'t Tensor) -> Self {
        Self {
            rows,
            rope: None,
            scale: 1.0,
        }
    }
}

impl<'t> Cache<'t> {
    /// Makes a cache of two tensors, of latents and of rotary keys.
    pub const fn split(latent: &'t Tensor, rope: &'t Tensor) -> Self {
        Self {
            rows: latent,
            rope: Some(rope),
            scale: 1.0,
        }
    }

    /// Returns the same cache with the scale of `fp8`: value = stored · scale.
    #[must_use]
    pub const fn with_scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// Returns the tensors that a call writes.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &'t Tensor> {
        [self.rows].into_iter().chain(self.rope)
    }

    /// Returns the view of the cache's tensors once they are lent.
    pub(super) fn view<'a, D: Lending>(
        &self,
        problem: &Problem,
        lent: &mut impl Iterator<Item = LentMut<'a, D>>,
    ) -> mla_runtime::Result<CacheMut<'a, D>> {
        let (format, dims) = (problem.kv_format, problem.dims);
        let page_size = problem.page_size as usize;
        let rows = next(lent);
        if self.rope.is_none() {
            let widths = [format.row_bytes(dims), format.pitch(dims)];
            let (pages, strides) = pages_of(&rows, problem, "cache", widths)?;
            let layout = CacheLayout::contiguous(dims, format, pages, page_size)
                .with_page_stride(strides.page_stride)
                .with_row_stride(strides.row_stride)
                .with_scale(self.scale);
            return CacheMut::new(rows.into_bytes(), layout);
        }
        let rope = next(lent);
        let widths = [format.latent_bytes(dims); 2];
        let (pages, strides) = pages_of(&rows, problem, "cache (latent)", widths)?;
        let widths = [format.rope_bytes(dims); 2];
        let (of_rope, rope_strides) = pages_of(&rope, problem, "cache (rope)", widths)?;
        if pages != of_rope {
            let accepted = format!("{pages}, as there are of latents");
            return Err(Error::argument("pages of rotary keys", of_rope, accepted));
        }
        let layout = CacheLayout::split(dims, format, pages, page_size)
            .with_page_stride(strides.page_stride)
            .with_row_stride(strides.row_stride)
            .with_split_rope(Some(rope_strides))
            .with_scale(self.scale);
        CacheMut::split(rows.into_bytes(), rope.into_bytes(), layout)
    }
}

/// Returns the number of pages of a tensor `[pages, page size, width]`, and its strides. `bytes`
/// are those of a row, and those of a row that is filled up.
fn pages_of<D: Lending>(
    tensor: &LentMut<'_, D>,
    problem: &Problem,
    name: &'static str,
    bytes: [usize; 2],
) -> mla_runtime::Result<(usize, CacheStrides)> {
    let form = tensor.form();
    let strides: Vec<usize> = form.strides().collect();
    let size = form.dtype().size_in_bytes();
    let page_size = problem.page_size as usize;
    let right_dtype = match problem.kv_format {
        KvFormat::Fp8 | KvFormat::Fp8DsMla | KvFormat::Fp8PerToken => {
            form.dtype() == candle_core::DType::U8
        }
        format => layer_dtype(form.dtype(), name).is_ok_and(|it| KvFormat::of(it).same(format)),
    };
    match (form.dims(), &*strides) {
        (&[pages, tokens, width], &[page, row, value])
            if right_dtype
                && tokens == page_size
                && bytes.contains(&(width * size))
                && value == size =>
        {
            let strides = CacheStrides {
                page_stride: page,
                row_stride: row,
            };
            Ok((pages, strides))
        }
        (dims, _) => {
            let given = format!("{} {dims:?}", form.dtype().as_str());
            let [own, filled] = bytes.map(|bytes| bytes / size);
            let or = (own != filled).then(|| format!(" or {filled}"));
            let accepted = format!(
                "a cache of {}: [pages, {page_size}, {own}{} values of {size} bytes], contiguous \
                 rows",
                problem.kv_format,
                or.unwrap_or_default()
            );
            Err(Error::argument(name, given, accepted))
        }
    }
}
