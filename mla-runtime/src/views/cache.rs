//! The paged cache in a device's memory, and what maps requests to it.

use std::fmt;

use crate::dims::MlaDims;
use crate::error::{Error, Result};
use crate::kv_format::KvFormat;
use crate::setters::setters;
use crate::tensor::ArrayRef;
use crate::views::memory::Memory;

/// Where a token's row lies in the cache: slot `page · page_size + offset` begins at
/// `page · page_stride + offset · row_stride` bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct CacheLayout {
    /// The model's dimensions, of which L and R matter here.
    pub dims: MlaDims,
    /// The format of a row.
    pub format: KvFormat,
    /// The number of pages.
    pub pages: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Bytes from one row to the next within a page, fewer than 2²⁷: kernels count them in 32 bits.
    pub row_stride: usize,
    /// The scale of [`KvFormat::Fp8`]: value = stored · scale, 2⁻⁶⁰ to 2⁶⁰. 1 in every other
    /// format.
    pub scale: f32,
}

impl CacheLayout {
    const ROW_STRIDE_END: usize = 1 << 27;

    /// Pages and rows without gaps, and a scale of 1.
    pub const fn contiguous(
        dims: MlaDims,
        format: KvFormat,
        pages: usize,
        page_size: usize,
    ) -> Self {
        let row_stride = format.row_bytes(dims);
        Self {
            dims,
            format,
            pages,
            page_size,
            // No memory is as long as what saturates, so no view is made of it.
            page_stride: page_size.saturating_mul(row_stride),
            row_stride,
            scale: 1.0,
        }
    }

    setters! {
        with_page_stride(page_stride: usize);
        with_row_stride(row_stride: usize);
        with_scale(scale: f32);
    }

    /// The number of slots.
    pub const fn slots(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }

    // Between single pages and rows there is no distance, and a stride may be anything. It gets one
    // that every kernel takes.
    fn settled(mut self) -> Self {
        match (self.pages > 1, self.page_size > 1) {
            (true, true) => {}
            (true, false) => self.row_stride = self.row_apart(),
            (false, true) => self.page_stride = self.page_size.saturating_mul(self.row_stride),
            (false, false) => {
                self.row_stride = self.row_apart();
                self.page_stride = self.row_stride;
            }
        }
        self
    }

    // A distance between rows that every kernel takes.
    fn row_apart(&self) -> usize {
        const WIDEST_ACCESS: usize = 16;
        self.format
            .row_bytes(self.dims)
            .next_multiple_of(WIDEST_ACCESS)
    }

    /// The products of scales and values stay far from what f32 holds on every device.
    fn check_scale(&self) -> Result<()> {
        const LARGEST: f32 = (1u64 << 60) as f32;
        let given = || format!("{:?}", self.scale);
        match self.format.has_tensor_scale() {
            true if (1.0 / LARGEST..=LARGEST).contains(&self.scale) => Ok(()),
            true => Err(Error::argument("cache scale", given(), "2^-60 to 2^60")),
            false if self.scale == 1.0 => Ok(()),
            false => {
                let accepted = format!("1, as {} rows have no scale", self.format);
                Err(Error::argument("cache scale", given(), accepted))
            }
        }
    }

    fn check(&self, available: usize) -> Result<()> {
        let row = self.format.row_bytes(self.dims);
        if !self.format.holds(self.dims) {
            return Err(Error::argument(
                "cache format",
                format!("{} with {}", self.format, self.dims),
                format!("a latent of a multiple of {}", KvFormat::DS_MLA_GROUP),
            ));
        }
        self.check_scale()?;
        if self.page_size == 0 {
            return Err(Error::argument("page_size", 0, "1 and up"));
        }
        if self.pages == 0 {
            return Ok(());
        }
        if self.page_size > 1 && self.row_stride >= Self::ROW_STRIDE_END {
            let given = format!("{} bytes", self.row_stride);
            return Err(Error::argument("row stride", given, "less than 2^27 bytes"));
        }
        let page = (self.page_size - 1)
            .checked_mul(self.row_stride)
            .and_then(|last| last.checked_add(row));
        let end = page.and_then(|page| {
            (self.pages - 1)
                .checked_mul(self.page_stride)?
                .checked_add(page)
        });
        match (page, end) {
            (Some(page), Some(end))
                if end <= available
                    && (self.page_size == 1 || self.row_stride >= row)
                    && (self.pages == 1 || self.page_stride >= page) =>
            {
                Ok(())
            }
            _ => Err(Error::argument(
                "cache layout",
                self,
                format!("rows of {row} bytes that do not overlap and lie within {available} bytes"),
            )),
        }
    }
}

impl fmt::Display for CacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} pages of {} {} rows of ({},{}), strides of {} and {} bytes",
            self.pages,
            self.page_size,
            self.format,
            self.dims.latent,
            self.dims.head.rope,
            self.page_stride,
            self.row_stride
        )
    }
}

/// A cache that is read.
pub struct CacheRef<'a, D: Memory> {
    bytes: D::Bytes<'a>,
    layout: CacheLayout,
}

impl<D: Memory> Clone for CacheRef<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Memory> Copy for CacheRef<'_, D> {}

impl<'a, D: Memory> CacheRef<'a, D> {
    /// A view that begins at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// If a row lies outside `bytes`, rows overlap, the format cannot hold the dimensions, or the
    /// scale is not one that the format has.
    pub fn new(bytes: D::Bytes<'a>, layout: CacheLayout) -> Result<Self> {
        layout.check(D::byte_len(bytes))?;
        let layout = layout.settled();
        Ok(Self { bytes, layout })
    }

    /// The bytes, which begin at slot 0.
    pub fn bytes(&self) -> D::Bytes<'a> {
        self.bytes
    }

    /// Format, pages and strides.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The same view for a shorter time.
    pub fn shorten<'short>(&self) -> CacheRef<'short, D>
    where
        'a: 'short,
    {
        CacheRef {
            bytes: D::shorten(self.bytes),
            layout: self.layout,
        }
    }
}

/// A cache that is written.
pub struct CacheMut<'a, D: Memory> {
    bytes: D::BytesMut<'a>,
    layout: CacheLayout,
}

impl<'a, D: Memory> CacheMut<'a, D> {
    /// A view that begins at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// As [`CacheRef::new`].
    pub fn new(bytes: D::BytesMut<'a>, layout: CacheLayout) -> Result<Self> {
        layout.check(D::byte_len_mut(&bytes))?;
        let layout = layout.settled();
        Ok(Self { bytes, layout })
    }

    /// The bytes, which begin at slot 0.
    pub fn into_bytes(self) -> D::BytesMut<'a> {
        self.bytes
    }

    /// Format, pages and strides.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> CacheMut<'_, D> {
        CacheMut {
            bytes: D::reborrow(&mut self.bytes),
            layout: self.layout,
        }
    }

    /// The same view, read.
    pub fn as_ref(&self) -> CacheRef<'_, D> {
        CacheRef {
            bytes: D::freeze(&self.bytes),
            layout: self.layout,
        }
    }
}

/// The pages of each request: entry `[request, n]` is the page that holds tokens
/// `n · page_size ..` of the request. Entries past a request's length may hold anything.
pub struct BlockTable<'a, D: Memory> {
    entries: ArrayRef<'a, D, i32>,
    requests: usize,
    max_pages: usize,
}

impl<D: Memory> Clone for BlockTable<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Memory> Copy for BlockTable<'_, D> {}

impl<'a, D: Memory> BlockTable<'a, D> {
    /// `entries` as `[requests, max_pages]`, row-major without gaps.
    ///
    /// # Errors
    ///
    /// If there are fewer or more entries: rows of another width would be read as others.
    pub fn new(entries: ArrayRef<'a, D, i32>, requests: usize, max_pages: usize) -> Result<Self> {
        match requests.checked_mul(max_pages) {
            Some(needed) if needed == entries.len() => Ok(Self {
                entries,
                requests,
                max_pages,
            }),
            _ => Err(Error::argument(
                "block table",
                format!("{requests} requests of {max_pages} pages"),
                format!("rows that make up its {} entries", entries.len()),
            )),
        }
    }

    /// The entries, row-major.
    pub fn entries(&self) -> ArrayRef<'a, D, i32> {
        self.entries
    }

    /// The number of requests.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// The entries of one request.
    pub fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// The rows of the requests in `range`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the requests.
    pub fn range(&self, range: std::ops::Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.requests {
            return Err(Error::argument(
                "request range",
                format!("{range:?}"),
                format!("within 0..{}", self.requests),
            ));
        }
        let entries = self
            .entries
            .range(range.start * self.max_pages..range.end * self.max_pages)?;
        Ok(Self {
            entries,
            requests: range.len(),
            max_pages: self.max_pages,
        })
    }
}
