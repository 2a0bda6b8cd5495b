//! The paged cache in a device's memory, and the block table that assigns its pages to requests.

use std::fmt;

use crate::model::{KvFormat, MlaDims};
use crate::setters::{copies, setters};
use crate::tensor::{ArrayRef, Memory};
use crate::{Error, Result, check_range};

/// The distances between rows, in bytes. Slot `page · page_size + offset` begins at `page ·
/// page_stride + offset · row_stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheStrides {
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Bytes from one row to the next within a page. Fewer than 2²⁷, because kernels count them in
    /// 32 bits.
    pub row_stride: usize,
}

impl CacheStrides {
    const ROW_STRIDE_END: usize = 1 << 27;

    // Rows of `row` bytes without gaps.
    const fn contiguous(row: usize, page_size: usize) -> Self {
        Self {
            // A saturated length exceeds any memory, so no view is made with it.
            page_stride: page_size.saturating_mul(row),
            row_stride: row,
        }
    }

    /// Returns the first byte of a slot, in pages of `page_size` tokens.
    pub const fn offset(&self, slot: usize, page_size: usize) -> usize {
        slot / page_size * self.page_stride + slot % page_size * self.row_stride
    }

    // With a single page or a single row there is no distance, and the given stride may be
    // anything. It is replaced by one that every kernel accepts.
    fn settled(mut self, layout: &CacheLayout, row: usize) -> Self {
        const WIDEST_ACCESS: usize = 16;
        let apart = row.next_multiple_of(WIDEST_ACCESS);
        match (layout.pages > 1, layout.page_size > 1) {
            (true, true) => {}
            (true, false) => self.row_stride = apart,
            (false, true) => self.page_stride = layout.page_size.saturating_mul(self.row_stride),
            (false, false) => {
                self.row_stride = apart;
                self.page_stride = apart;
            }
        }
        self
    }

    // Returns the end of the last row, unless rows of `row` bytes overlap.
    fn end(&self, layout: &CacheLayout, row: usize) -> Option<usize> {
        let (pages, page_size) = (layout.pages, layout.page_size);
        let page = (page_size - 1)
            .checked_mul(self.row_stride)?
            .checked_add(row)?;
        let end = (pages - 1)
            .checked_mul(self.page_stride)?
            .checked_add(page)?;
        let apart =
            (page_size == 1 || self.row_stride >= row) && (pages == 1 || self.page_stride >= page);
        apart.then_some(end)
    }
}

/// The location of each token's row in the cache: slot `page · page_size + offset` begins at `page
/// · page_stride + offset · row_stride` bytes. A row is a latent with the rotary key after it. In a
/// split cache a row is only a latent, and rotary keys are in a separate tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct CacheLayout {
    /// The model's dimensions. Only L and R matter here.
    pub dims: MlaDims,
    /// The format of a row.
    pub format: KvFormat,
    /// The number of pages.
    pub pages: usize,
    /// The number of tokens in a page.
    pub page_size: usize,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Bytes from one row to the next within a page. Fewer than 2²⁷, because kernels count them in
    /// 32 bits.
    pub row_stride: usize,
    /// The strides of rotary keys in a separate tensor; `None` if each comes after its latent.
    /// [`KvFormat::Fp8DsMla`] and [`KvFormat::Fp8PerToken`] cannot be split.
    pub split_rope: Option<CacheStrides>,
    /// The scale of [`KvFormat::Fp8`]: value = stored · scale. It is between 2⁻⁶⁰ and 2⁶⁰. In every
    /// other format it is 1.
    pub scale: f32,
}

impl CacheLayout {
    /// Pages without gaps, with rows at their format's [`pitch`](KvFormat::pitch), and a scale of
    /// 1.
    pub const fn contiguous(
        dims: MlaDims,
        format: KvFormat,
        pages: usize,
        page_size: usize,
    ) -> Self {
        let strides = CacheStrides::contiguous(format.pitch(dims), page_size);
        Self {
            dims,
            format,
            pages,
            page_size,
            page_stride: strides.page_stride,
            row_stride: strides.row_stride,
            split_rope: None,
            scale: 1.0,
        }
    }

    /// The same in two tensors without gaps: latents `[pages, page_size, L]` and rotary keys
    /// `[pages, page_size, R]`.
    pub const fn split(dims: MlaDims, format: KvFormat, pages: usize, page_size: usize) -> Self {
        let latent = CacheStrides::contiguous(format.latent_bytes(dims), page_size);
        let rope = CacheStrides::contiguous(format.rope_bytes(dims), page_size);
        Self::contiguous(dims, format, pages, page_size)
            .with_page_stride(latent.page_stride)
            .with_row_stride(latent.row_stride)
            .with_split_rope(Some(rope))
    }

    setters! {
        with_page_stride(page_stride: usize);
        with_row_stride(row_stride: usize);
        with_split_rope(split_rope: Option<CacheStrides>);
        with_scale(scale: f32);
    }

    /// The number of slots.
    pub const fn slots(&self) -> usize {
        self.pages.saturating_mul(self.page_size)
    }

    /// Returns true if rotary keys are in a separate tensor.
    pub const fn is_split(&self) -> bool {
        self.split_rope.is_some()
    }

    /// The strides of rows. In a split cache a row is a latent.
    pub const fn strides(&self) -> CacheStrides {
        CacheStrides {
            page_stride: self.page_stride,
            row_stride: self.row_stride,
        }
    }

    /// The strides of rotary keys, which begin at [`CacheRef::rope_bytes`]. Unless the cache is
    /// split, they are those of rows.
    pub const fn rope_strides(&self) -> CacheStrides {
        match self.split_rope {
            Some(strides) => strides,
            None => self.strides(),
        }
    }

    /// Bytes of a row. In a split cache a row is a latent.
    pub const fn row_bytes(&self) -> usize {
        match self.split_rope {
            Some(_) => self.format.latent_bytes(self.dims),
            None => self.format.row_bytes(self.dims),
        }
    }

    fn settled(mut self) -> Self {
        let rows = self.strides().settled(&self, self.row_bytes());
        let rope = self.format.rope_bytes(self.dims);
        self.split_rope = self.split_rope.map(|strides| strides.settled(&self, rope));
        self.page_stride = rows.page_stride;
        self.row_stride = rows.row_stride;
        self
    }

    /// Checks the scale. Within its bounds, products of scales and values stay far from the limits
    /// of f32 on every device.
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

    /// Checks the layout against the sizes of the tensors: that of rows, or those of latents and of
    /// rotary keys. Returns how many bytes of each are used.
    fn check(&self, available: usize, rope: Option<usize>) -> Result<[usize; 2]> {
        if !self.format.holds(self.dims) {
            return Err(Error::argument(
                "cache format",
                format!("{} with {}", self.format, self.dims),
                format!(
                    "a latent of a multiple of {}",
                    self.format.latent_multiple()
                ),
            ));
        }
        self.check_tensors(rope.is_some())?;
        self.check_scale()?;
        if self.page_size == 0 {
            return Err(Error::argument("page_size", 0, "1 and up"));
        }
        // Memory sets no limit on the number of rows if a row has no bytes.
        if i64::try_from(self.slots()).is_err() {
            return Err(Error::argument(
                "cache layout",
                self,
                "fewer than 2^63 slots",
            ));
        }
        // Kernels read the whole pitch of every row, even of the last one. The stride between
        // single rows or pages may be anything, so it does not limit the pitch.
        let apart = match (self.page_size > 1, self.pages > 1) {
            (true, _) => self.row_stride,
            (false, true) => self.page_stride,
            (false, false) => usize::MAX,
        };
        let pitch = match self.is_split() {
            true => 0,
            false => self.format.pitch(self.dims).min(apart),
        };
        let row = self.row_bytes().max(pitch);
        let rows = self.check_strides(["row stride", "rows"], self.strides(), row, available)?;
        let rope = match (self.split_rope, rope) {
            (Some(strides), Some(available)) => self.check_strides(
                ["rope row stride", "rotary keys"],
                strides,
                self.format.rope_bytes(self.dims),
                available,
            )?,
            _ => 0,
        };
        Ok([rows, rope])
    }

    /// Checks that the number of tensors is that of the layout, and that the format can be split if
    /// there are two.
    fn check_tensors(&self, two: bool) -> Result<()> {
        let named = |two| if two { "two tensors" } else { "one tensor" };
        if self.is_split() != two {
            let accepted = format!("{}, as the layout says", named(self.is_split()));
            return Err(Error::argument("cache", named(two), accepted));
        }
        if two && !self.format.splits() {
            let given = format!("{} in two tensors", self.format);
            let accepted = "f32, f16, bf16 or fp8 in two tensors, or one row";
            return Err(Error::argument("cache format", given, accepted));
        }
        if two && self.dims.head.rope == 0 {
            let accepted = "R of 1 and up, or one row";
            return Err(Error::argument(
                "cache dims",
                "two tensors with R = 0",
                accepted,
            ));
        }
        Ok(())
    }

    /// Returns the number of bytes that are used.
    fn check_strides(
        &self,
        [field, rows]: [&'static str; 2],
        strides: CacheStrides,
        row: usize,
        available: usize,
    ) -> Result<usize> {
        if self.pages == 0 {
            return Ok(0);
        }
        if self.page_size > 1 && strides.row_stride >= CacheStrides::ROW_STRIDE_END {
            let given = format!("{} bytes", strides.row_stride);
            return Err(Error::argument(field, given, "less than 2^27 bytes"));
        }
        match strides.end(self, row) {
            Some(end) if end <= available => Ok(end),
            _ => Err(Error::argument(
                "cache layout",
                self,
                format!(
                    "{rows} of {row} bytes that do not overlap and lie within {available} bytes"
                ),
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
        )?;
        match self.split_rope {
            Some(rope) => write!(
                f,
                ", of rotary keys {} and {} bytes",
                rope.page_stride, rope.row_stride
            ),
            None => Ok(()),
        }
    }
}

/// A view of a cache for reading.
pub struct CacheRef<'a, D: Memory> {
    bytes: D::Bytes<'a>,
    rope: Option<D::Bytes<'a>>,
    layout: CacheLayout,
}

copies!([D: Memory] CacheRef<'_, D>);

impl<'a, D: Memory> CacheRef<'a, D> {
    /// A view of rows. The first row begins at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// If a row lies outside `bytes`, if rows overlap, if the format cannot hold the dimensions or
    /// does not allow the scale, or if the layout has two tensors.
    pub fn new(bytes: D::Bytes<'a>, layout: CacheLayout) -> Result<Self> {
        Self::of(bytes, None, layout)
    }

    /// A view of latents and rotary keys in two tensors. The first element of each is at the first
    /// of its bytes.
    ///
    /// # Errors
    ///
    /// If [`new`](Self::new) would refuse one of the two tensors, if the layout has one tensor, if
    /// the format cannot be split, such as [`KvFormat::Fp8DsMla`], or if R is 0.
    pub fn split(latent: D::Bytes<'a>, rope: D::Bytes<'a>, layout: CacheLayout) -> Result<Self> {
        Self::of(latent, Some(rope), layout)
    }

    fn of(bytes: D::Bytes<'a>, rope: Option<D::Bytes<'a>>, layout: CacheLayout) -> Result<Self> {
        layout.check(D::byte_len(bytes), rope.map(D::byte_len))?;
        let layout = layout.settled();
        Ok(Self {
            bytes,
            rope,
            layout,
        })
    }

    /// The bytes of the rows, beginning at slot 0. In a split cache these are the bytes of the
    /// latents.
    pub fn bytes(&self) -> D::Bytes<'a> {
        self.bytes
    }

    /// The bytes from the rotary key of slot 0 on. They are in a separate tensor, or after the
    /// first latent. The distances between rotary keys are [`CacheLayout::rope_strides`].
    pub fn rope_bytes(&self) -> D::Bytes<'a> {
        self.rope.unwrap_or_else(|| {
            let len = D::byte_len(self.bytes);
            let latent = self.layout.format.latent_bytes(self.layout.dims);
            D::byte_range(self.bytes, latent.min(len)..len)
        })
    }

    /// The format, the pages and the strides.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The same view with a shorter lifetime.
    pub fn shorten<'short>(&self) -> CacheRef<'short, D>
    where
        'a: 'short,
    {
        CacheRef {
            bytes: D::shorten(self.bytes),
            rope: self.rope.map(D::shorten),
            layout: self.layout,
        }
    }
}

/// A view of a cache for writing.
pub struct CacheMut<'a, D: Memory> {
    bytes: D::BytesMut<'a>,
    rope: Option<D::BytesMut<'a>>,
    layout: CacheLayout,
}

impl<'a, D: Memory> CacheMut<'a, D> {
    /// A view of rows. The first row begins at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// Same as [`CacheRef::new`].
    pub fn new(bytes: D::BytesMut<'a>, layout: CacheLayout) -> Result<Self> {
        Self::of(bytes, None, layout)
    }

    /// A view of latents and rotary keys in two tensors. The first element of each is at the first
    /// of its bytes.
    ///
    /// # Errors
    ///
    /// The errors of [`CacheRef::split`]. Also if the bytes of the two tensors overlap, counted
    /// from the first to the last row of each.
    pub fn split(
        latent: D::BytesMut<'a>,
        rope: D::BytesMut<'a>,
        layout: CacheLayout,
    ) -> Result<Self> {
        Self::of(latent, Some(rope), layout)
    }

    fn of(
        bytes: D::BytesMut<'a>,
        rope: Option<D::BytesMut<'a>>,
        layout: CacheLayout,
    ) -> Result<Self> {
        let len = D::byte_len_mut(&bytes);
        let [rows, keys] = layout.check(len, rope.as_ref().map(D::byte_len_mut))?;
        if let Some(rope) = &rope {
            let [first, second] = [&bytes, rope].map(|bytes| D::address(D::freeze(bytes)));
            if first < second + keys && second < first + rows {
                let given = format!("{rows} bytes at {first:#x} and {keys} at {second:#x}");
                return Err(Error::argument(
                    "cache",
                    given,
                    "tensors that do not overlap",
                ));
            }
        }
        let layout = layout.settled();
        Ok(Self {
            bytes,
            rope,
            layout,
        })
    }

    /// The bytes of the rows and, in a split cache, those of the rotary keys. Both begin at slot 0.
    pub fn into_parts(self) -> (D::BytesMut<'a>, Option<D::BytesMut<'a>>) {
        (self.bytes, self.rope)
    }

    /// The format, the pages and the strides.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> CacheMut<'_, D> {
        CacheMut {
            bytes: D::reborrow(&mut self.bytes),
            rope: self.rope.as_mut().map(D::reborrow),
            layout: self.layout,
        }
    }

    /// The same view for reading.
    pub fn as_ref(&self) -> CacheRef<'_, D> {
        CacheRef {
            bytes: D::freeze(&self.bytes),
            rope: self.rope.as_ref().map(D::freeze),
            layout: self.layout,
        }
    }
}

/// The pages of each request: entry `[request, n]` is the page that holds the tokens `n · page_size
/// ..` of the request. Entries beyond a request's length may hold anything.
pub struct BlockTable<'a, D: Memory> {
    entries: ArrayRef<'a, D, i32>,
    requests: usize,
    max_pages: usize,
}

copies!([D: Memory] BlockTable<'_, D>);

impl<'a, D: Memory> BlockTable<'a, D> {
    /// A block table from `entries`, `[requests, max_pages]`, row-major without gaps.
    ///
    /// # Errors
    ///
    /// If there are not exactly `requests` · `max_pages` entries. With rows of another width, the
    /// table would take entries of one request for those of another.
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

    /// The number of entries per request.
    pub fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// The rows of the requests in `range`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the requests.
    pub fn range(&self, range: std::ops::Range<usize>) -> Result<Self> {
        check_range("request range", &range, self.requests)?;
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

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::model::HeadDims;

    /// Memory that consists only of addresses. Bytes are a first address and a length.
    #[derive(Clone)]
    struct Addresses;

    impl Memory for Addresses {
        type Buffer = ();
        type Bytes<'a> = (usize, usize);
        type BytesMut<'a> = (usize, usize);

        fn allocate(&self, _: usize) -> Result<()> {
            Ok(())
        }

        fn bytes((): &()) -> Self::Bytes<'_> {
            (0, 0)
        }

        fn bytes_mut((): &mut ()) -> Self::BytesMut<'_> {
            (0, 0)
        }

        fn byte_len(bytes: Self::Bytes<'_>) -> usize {
            bytes.1
        }

        fn byte_len_mut(bytes: &Self::BytesMut<'_>) -> usize {
            bytes.1
        }

        fn address(bytes: Self::Bytes<'_>) -> usize {
            bytes.0
        }

        fn byte_range(bytes: Self::Bytes<'_>, range: Range<usize>) -> Self::Bytes<'_> {
            (bytes.0 + range.start, range.len())
        }

        fn split_mut(
            bytes: Self::BytesMut<'_>,
            at: usize,
        ) -> (Self::BytesMut<'_>, Self::BytesMut<'_>) {
            ((bytes.0, at), (bytes.0 + at, bytes.1 - at))
        }

        fn shorten<'short, 'long: 'short>(bytes: Self::Bytes<'long>) -> Self::Bytes<'short> {
            bytes
        }

        fn reborrow<'a>(bytes: &'a mut Self::BytesMut<'_>) -> Self::BytesMut<'a> {
            *bytes
        }

        fn freeze<'a>(bytes: &'a Self::BytesMut<'_>) -> Self::Bytes<'a> {
            *bytes
        }

        fn upload(&self, _: &[u8], _: Self::BytesMut<'_>) -> Result<()> {
            Ok(())
        }

        fn download(&self, _: Self::Bytes<'_>, _: &mut [u8]) -> Result<()> {
            Ok(())
        }

        fn synchronize(&self) -> Result<()> {
            Ok(())
        }
    }

    const DIMS: MlaDims = MlaDims::new(8, HeadDims::new(4, 4, 4));

    #[test]
    fn tensors_that_share_bytes_are_refused() {
        // Latents take 128 bytes and rotary keys 64. Other tensors may use the bytes after the last
        // row.
        let layout = CacheLayout::split(DIMS, KvFormat::F32, 2, 2);
        let said = |latents, rope| {
            let view = CacheMut::<Addresses>::split(latents, rope, layout).map(drop);
            view.err().map(|error| error.to_string())
        };
        assert_eq!(said((1000, 500), (1128, 64)), None);
        assert_eq!(said((1064, 128), (1000, 500)), None);
        for rope in [1000, 937, 1127, 1063] {
            let refused = format!(
                "cache: given 128 bytes at 0x3e8 and 64 at {rope:#x}, accepted tensors that do \
                 not overlap"
            );
            assert_eq!(said((1000, 128), (rope, 64)), Some(refused));
        }
    }

    #[test]
    fn the_last_row_has_all_bytes_of_its_pitch() {
        // A row of 12 bytes, with a pitch of 16 bytes or with the caller's strides.
        let format = KvFormat::Fp8PerToken;
        let wide = CacheLayout::contiguous(MlaDims::new(4, HeadDims::new(8, 2, 8)), format, 1, 2);
        let narrow = CacheLayout {
            page_stride: 24,
            row_stride: 12,
            ..wide
        };
        // Pages of one row. The stride within a page does not matter.
        let pages = CacheLayout {
            pages: 2,
            page_size: 1,
            page_stride: 16,
            row_stride: 0,
            ..wide
        };
        let narrow_pages = CacheLayout {
            page_stride: 12,
            ..pages
        };
        let alone = CacheLayout { pages: 1, ..pages };
        for (layout, bytes) in [
            (wide, 32),
            (narrow, 24),
            (pages, 32),
            (narrow_pages, 24),
            (alone, 16),
        ] {
            let taken = |bytes| CacheRef::<Addresses>::new((0, bytes), layout).is_ok();
            assert!(taken(bytes) && !taken(bytes - 1), "{layout}");
        }
    }

    #[test]
    fn rotary_keys_begin_behind_the_first_latent_or_in_their_tensor() {
        for (format, latent) in [(KvFormat::F32, 32), (KvFormat::Fp8, 8)] {
            let row = CacheLayout::contiguous(DIMS, format, 2, 2);
            let cache = CacheRef::<Addresses>::new((1000, 500), row).unwrap();
            assert_eq!(cache.rope_bytes(), (1000 + latent, 500 - latent));
            assert_eq!(row.rope_strides(), row.strides());
            let split = CacheLayout::split(DIMS, format, 2, 2);
            let cache = CacheRef::<Addresses>::split((1000, 500), (7000, 64), split).unwrap();
            assert_eq!(cache.rope_bytes(), (7000, 64));
        }
        // A cache without pages has no bytes.
        let none = CacheLayout::contiguous(DIMS, KvFormat::F32, 0, 2);
        let cache = CacheRef::<Addresses>::new((1000, 0), none).unwrap();
        assert_eq!(cache.rope_bytes(), (1000, 0));
    }
}
