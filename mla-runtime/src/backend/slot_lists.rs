//! The cache rows that the query tokens of a sparse call attend to.

use crate::device::Device;
use crate::setters::{options, setters};
use crate::spec::{BackendSpec, Feature};
use crate::tensor::{ArrayRef, CacheLayout, CacheRef};
use crate::{Error, Result};

/// For each query token, the slots that it attends to instead of its whole context: `[tokens,
/// width]`. A slot below 0 or beyond the end of the cache is skipped.
#[non_exhaustive]
pub struct SlotLists<'a, D: Device> {
    /// The slots, row-major without gaps.
    pub slots: ArrayRef<'a, D, i32>,
    /// The number of entries per token.
    pub width: usize,
    /// The number of entries that each token attends to, counted from the first: `[tokens]`. A
    /// count below 0 means 0, and one above `width` means `width`. `None` means all entries. The
    /// lists of a second cache have no counts.
    pub counts: Option<ArrayRef<'a, D, i32>>,
    /// The maximum number of tokens of a dense request. The query tokens of a dense request attend
    /// to all tokens that they see, by the block table, and their lists are not read. At most
    /// `width`; with 0 no request is dense. Dense requests take a backend with
    /// [`DenseRequests`](crate::spec::Feature::DenseRequests).
    pub dense_within: usize,
    /// A second cache, the lists of its slots that each query token attends to, `[tokens, width]`,
    /// and their width. They join the first lists in the same softmax. The cache can hold a window
    /// of uncompressed rows, for example. It has the format and the scale of the call's cache, but
    /// pages and strides of its own. It takes a backend with
    /// [`SecondCache`](crate::spec::Feature::SecondCache).
    pub second: Option<(CacheRef<'a, D>, ArrayRef<'a, D, i32>, usize)>,
}

impl<'a, D: Device> SlotLists<'a, D> {
    /// Lists of `width` slots of one cache for each token, row-major without gaps.
    pub const fn new(slots: ArrayRef<'a, D, i32>, width: usize) -> Self {
        Self {
            slots,
            width,
            counts: None,
            dense_within: 0,
            second: None,
        }
    }

    setters! {
        with_dense_within(dense_within: usize);
    }

    options! {
        with_counts(counts: ArrayRef<'a, D, i32>);
        with_second(second: (CacheRef<'a, D>, ArrayRef<'a, D, i32>, usize));
    }

    /// The same lists with a shorter lifetime.
    pub fn shorten<'short>(&self) -> SlotLists<'short, D>
    where
        'a: 'short,
    {
        SlotLists {
            slots: self.slots.shorten(),
            width: self.width,
            counts: self.counts.as_ref().map(ArrayRef::shorten),
            dense_within: self.dense_within,
            second: (self.second.as_ref())
                .map(|(cache, slots, width)| (cache.shorten(), slots.shorten(), *width)),
        }
    }

    /// The lists of the first `tokens` tokens.
    ///
    /// # Errors
    ///
    /// If there are fewer than `tokens`.
    pub fn of_first(mut self, tokens: usize) -> Result<Self> {
        let first = |slots: &ArrayRef<'a, D, i32>, width: usize| {
            let entries = tokens.checked_mul(width).filter(|n| *n <= slots.len());
            let Some(entries) = entries else {
                let accepted = format!("{tokens} tokens of {width} slots");
                return Err(Error::argument("slots", slots.len(), accepted));
            };
            slots.range(0..entries)
        };
        self.slots = first(&self.slots, self.width)?;
        if let Some(counts) = &mut self.counts {
            *counts = counts.range(0..tokens)?;
        }
        if let Some((_, slots, width)) = &mut self.second {
            *slots = first(slots, *width)?;
        }
        Ok(self)
    }

    /// Refuses lists that a backend of this spec does not support, in a call on this cache.
    ///
    /// # Errors
    ///
    /// If lists are wider than the backend supports, if a feature is missing, if `dense_within`
    /// exceeds the entries of a list, or if the rows of the second cache differ from those of the
    /// first.
    pub fn check(&self, spec: &BackendSpec, cache: &CacheLayout) -> Result<()> {
        let features = spec.features;
        let second = self.second.as_ref().map(|(.., width)| *width);
        for (field, width) in [
            ("slot_lists.width", Some(self.width)),
            ("slot_lists.second.width", second),
        ] {
            if let (Some(width), Some(max)) = (width, spec.max_list_width)
                && width > max as usize
            {
                let accepted = format!("at most {max}, as {} takes", spec.name);
                return Err(Error::argument(field, width, accepted));
            }
        }
        if self.dense_within > 0 {
            if !features.contains(Feature::DenseRequests) {
                let accepted = "0: the backend has no dense_requests";
                return Err(Error::argument("dense_within", self.dense_within, accepted));
            }
            if self.dense_within > self.width {
                let accepted = format!("at most the lists' width, {}", self.width);
                return Err(Error::argument("dense_within", self.dense_within, accepted));
            }
        }
        let Some((second, ..)) = &self.second else {
            return Ok(());
        };
        if !features.contains(Feature::SecondCache) {
            let accepted = "absent: the backend has no second_cache";
            return Err(Error::argument("second cache", "present", accepted));
        }
        let layout = second.layout();
        let row = |layout: &CacheLayout| (layout.dims.latent, layout.dims.head.rope);
        if layout.format != cache.format
            || row(layout) != row(cache)
            || layout.scale.to_bits() != cache.scale.to_bits()
            || layout.is_split() != cache.is_split()
        {
            let shown = |layout: &CacheLayout| {
                let scale = layout.scale;
                let split = if layout.is_split() { ", split" } else { "" };
                format!(
                    "{} rows of {:?}, scale {scale}{split}",
                    layout.format,
                    row(layout)
                )
            };
            return Err(Error::argument("second cache", shown(layout), shown(cache)));
        }
        Ok(())
    }
}
