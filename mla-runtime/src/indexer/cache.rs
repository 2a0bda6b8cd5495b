//! The paged index cache in a device's memory.

use std::fmt;

use crate::device::Device;
use crate::model::IndexerConfig;
use crate::setters::setters;
use crate::{Error, Result};

/// Bytes of a key's scale.
const SCALE_BYTES: usize = 4;

/// The location of an index key. A page has the values of all its keys, then their scales, then its
/// tail.
///
/// ```text
/// value d of slot s   page · page_stride + offset · width + d                    e4m3
/// scale of slot s     page · page_stride + page_size · width + offset · 4        f32, native order
///                     with page = s / page_size and offset = s % page_size
/// entry e of a tail   page · page_stride + page_size · (width + 4) + e · 4 · width
/// ```
///
/// Normally each token has a key, and there is no tail. If keys are [pooled](IndexerConfig::pool),
/// K tokens share a key. The slot of the key is that of its first token divided by K. An entry of
/// the tail has a token's own key and then its gate, as bf16. The token at index i of its page has
/// the entry i modulo the length of the tail, until a later token overwrites it.
///
/// With pages of 64 tokens and keys of 128 values, this is the layout of DeepGEMM, vLLM and SGLang:
/// 8448 bytes per page. Slots are those of the layer's own cache, so one block table serves both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct IndexCacheLayout {
    /// D: the number of values in a key.
    pub width: usize,
    /// The number of pages.
    pub pages: usize,
    /// The number of keys in a page: that of its tokens, or of its pools.
    pub page_size: usize,
    /// Bytes from one page to the next, a multiple of 4.
    pub page_stride: usize,
    /// The number of entries in a page's tail.
    pub tail: usize,
}

impl IndexCacheLayout {
    /// Pages of `page_size` tokens without gaps.
    pub const fn contiguous(config: &IndexerConfig, pages: usize, page_size: usize) -> Self {
        Self {
            width: config.width as usize,
            pages,
            page_size: page_size / config.tokens_per_key(),
            page_stride: config.page_bytes(page_size),
            tail: config.tail as usize,
        }
    }

    setters! {
        with_width(width: usize);
        with_page_stride(page_stride: usize);
        with_tail(tail: usize);
    }

    /// The number of slots.
    pub const fn slots(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }

    /// Returns the first byte of a slot's values.
    ///
    /// # Panics
    ///
    /// If pages have no tokens. No view has such a layout.
    pub const fn values_at(&self, slot: usize) -> usize {
        slot / self.page_size * self.page_stride + slot % self.page_size * self.width
    }

    /// Returns the first byte of a slot's scale.
    ///
    /// # Panics
    ///
    /// Same as [`values_at`](Self::values_at).
    pub const fn scale_at(&self, slot: usize) -> usize {
        slot / self.page_size * self.page_stride
            + self.page_size * self.width
            + slot % self.page_size * SCALE_BYTES
    }

    /// Returns the first byte of an entry of a page's tail: of its key, after which comes its gate.
    pub const fn tail_at(&self, page: usize, entry: usize) -> usize {
        page * self.page_stride
            + self.page_size * (self.width + SCALE_BYTES)
            + entry * 4 * self.width
    }

    fn check(&self, available: usize) -> Result<()> {
        for (field, value) in [
            ("index_cache.page_size", self.page_size),
            ("index_head_dim", self.width),
        ] {
            if value == 0 {
                return Err(Error::argument(field, 0, "1 and up"));
            }
        }
        if self.pages == 0 {
            return Ok(());
        }
        let page = self
            .width
            .checked_add(SCALE_BYTES)
            .and_then(|token| token.checked_mul(self.page_size))
            .and_then(|keys| keys.checked_add(self.tail.checked_mul(4)?.checked_mul(self.width)?));
        let end = page.and_then(|page| {
            (self.pages - 1)
                .checked_mul(self.page_stride)?
                .checked_add(page)
        });
        // The values alone, and the page they are in, cannot be longer than the integer type can
        // count.
        let aligned = || {
            (self.width * self.page_size).is_multiple_of(SCALE_BYTES)
                && self.page_stride.is_multiple_of(SCALE_BYTES)
        };
        match (page, end) {
            (Some(page), Some(end))
                if aligned()
                    && end <= available
                    && (self.pages == 1 || self.page_stride >= page) =>
            {
                Ok(())
            }
            _ => Err(Error::argument(
                "index cache layout",
                self,
                format!(
                    "pages that do not overlap and lie within {available} bytes, with scales at \
                     multiples of {SCALE_BYTES} bytes"
                ),
            )),
        }
    }
}

impl fmt::Display for IndexCacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} pages of {} keys of {} values, a stride of {} bytes",
            self.pages, self.page_size, self.width, self.page_stride
        )
    }
}

/// An index cache.
pub struct IndexCacheMut<'a, D: Device> {
    bytes: D::BytesMut<'a>,
    layout: IndexCacheLayout,
}

impl<'a, D: Device> IndexCacheMut<'a, D> {
    /// A view that begins at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// If a key lies outside `bytes`, pages overlap, or scales are not aligned.
    pub fn new(bytes: D::BytesMut<'a>, layout: IndexCacheLayout) -> Result<Self> {
        layout.check(D::byte_len_mut(&bytes))?;
        crate::tensor::check_alignment::<D>(D::freeze(&bytes), SCALE_BYTES)?;
        Ok(Self { bytes, layout })
    }

    /// The bytes, which begin at slot 0, to read.
    pub fn bytes(&self) -> D::Bytes<'_> {
        D::freeze(&self.bytes)
    }

    /// The bytes, which begin at slot 0.
    pub fn into_bytes(self) -> D::BytesMut<'a> {
        self.bytes
    }

    /// Pages and strides.
    pub fn layout(&self) -> &IndexCacheLayout {
        &self.layout
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> IndexCacheMut<'_, D> {
        IndexCacheMut {
            bytes: D::reborrow(&mut self.bytes),
            layout: self.layout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_format() {
        let layout = IndexCacheLayout::contiguous(&IndexerConfig::DEEPSEEK_V3_2, 3, 64);
        assert_eq!((layout.page_stride, layout.slots()), (8448, 192));
        assert_eq!(layout.values_at(0), 0);
        assert_eq!(layout.scale_at(0), 8192);
        assert_eq!(layout.values_at(130), 2 * 8448 + 2 * 128);
        assert_eq!(layout.scale_at(130), 2 * 8448 + 8192 + 8);
    }

    #[test]
    fn refusals() {
        let layout = IndexCacheLayout::contiguous(&IndexerConfig::DEEPSEEK_V3_2, 2, 64);
        layout.check(2 * 8448).unwrap();
        let refused = |layout: IndexCacheLayout, bytes: usize| -> String {
            layout.check(bytes).unwrap_err().to_string()
        };
        assert_eq!(
            refused(layout, 2 * 8448 - 1),
            "index cache layout: given 2 pages of 64 keys of 128 values, a stride of 8448 bytes, \
             accepted pages that do not overlap and lie within 16895 bytes, with scales at \
             multiples of 4 bytes"
        );
        for page_stride in [8447, 8444, 8450, usize::MAX] {
            let strided = IndexCacheLayout {
                page_stride,
                ..layout
            };
            assert!(refused(strided, 1 << 20).starts_with("index cache layout: given 2 pages"));
        }
        let empty = IndexCacheLayout {
            page_size: 0,
            ..layout
        };
        assert_eq!(
            refused(empty, 9),
            "index_cache.page_size: given 0, accepted 1 and up"
        );
        let nothing = IndexCacheLayout { pages: 0, ..layout };
        nothing.check(0).unwrap();
    }
}
