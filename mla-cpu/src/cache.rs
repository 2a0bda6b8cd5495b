//! Writes and gathers rows of the paged cache, and finds them by slot.

use half::bf16;
use rayon::prelude::*;

use super::buffer::check_row;
use super::view::{Elements, Lane, Places, narrow, scalars, widen, with_element};
use super::{Cpu, fp8};
use mla_runtime::device::{GatherRows, check_gather, check_write};
use mla_runtime::model::{DType, Element, KvFormat};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

const GROUP: usize = KvFormat::DS_MLA_GROUP as usize;

// The number of rows per task: enough work to outweigh the cost of passing a task to a thread.
const ROWS_PER_TASK: usize = 64;

pub(crate) fn write(
    cpu: &Cpu,
    latent: TensorRef<'_, Cpu>,
    rope: TensorRef<'_, Cpu>,
    slots: ArrayRef<'_, Cpu, i64>,
    cache: CacheMut<'_, Cpu>,
) -> Result<()> {
    let layout = *cache.layout();
    let (l, r) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    check_write(&latent, &rope, &slots, &layout)?;
    let slots = scalars("slots", &slots)?;
    check_slots(slots, layout.slots())?;
    check_row(l + r)?;
    with_element!(latent.dtype(), T => {
        let latent = Elements::<T>::of("latent", &latent)?;
        let rope = Elements::<T>::of("rope", &rope)?;
        let places = RowPlaces::of(cache);
        cpu.install(|| {
            slots.par_iter().enumerate().with_min_len(ROWS_PER_TASK).for_each_init(
                || vec![0.0f32; l + r],
                |row, (token, slot)| {
                    let Ok(slot) = usize::try_from(*slot) else {
                        return;
                    };
                    latent.read_row(token, 0, &mut row[..l]);
                    rope.read_row(token, 0, &mut row[l..]);
                    // SAFETY: `check_slots` found no slot twice.
                    let to = unsafe { places.row(slot) };
                    encode_row(&layout, row, to);
                },
            );
        });
    });
    Ok(())
}

// Checks the slots to which threads write. A repeated slot would be a race. It is an error here,
// although the trait leaves this to the caller.
pub(crate) fn check_slots(slots: &[i64], available: usize) -> Result<()> {
    for slot in slots {
        if *slot < -1 || *slot >= available as i64 {
            return Err(Error::argument(
                "slot",
                slot,
                format!("-1 (skipped), or 0 and up below {available}"),
            ));
        }
    }
    // Slots usually ascend. Distinct slots can then be recognised without extra memory.
    let used = || slots.iter().filter(|slot| **slot >= 0);
    if used().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut sorted: Vec<i64> = used().copied().collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::argument(
            "slots",
            format!("slot {} twice", pair[0]),
            "slots that differ",
        )),
    }
}

/// A cache to which several threads write, each to its own rows.
struct RowPlaces<'a> {
    rows: Places<'a, u8>,
    // Rotary keys, if they are in a separate tensor.
    rope: Option<Places<'a, u8>>,
    layout: CacheLayout,
}

impl<'a> RowPlaces<'a> {
    fn of(cache: CacheMut<'a, Cpu>) -> Self {
        let layout = *cache.layout();
        let (rows, rope) = cache.into_parts();
        let places = |bytes| Places::<u8>::new(bytes, [0; 3], [0; 3]);
        Self {
            rows: places(rows),
            rope: rope.map(places),
            layout,
        }
    }

    /// Returns the bytes of a slot's latent and of its rotary key.
    ///
    /// # Safety
    ///
    /// While the slices live, nothing else reads or writes this slot.
    #[expect(clippy::mut_from_ref, reason = "the caller promises exclusive places")]
    unsafe fn row(&self, slot: usize) -> [&mut [u8]; 2] {
        let layout = &self.layout;
        let (format, dims) = (layout.format, layout.dims);
        let [latent, rope] = [format.latent_bytes(dims), format.rope_bytes(dims)];
        let row = layout.strides().offset(slot, layout.page_size);
        let (places, key) = match &self.rope {
            Some(places) => (places, layout.rope_strides().offset(slot, layout.page_size)),
            None => (&self.rows, row + latent),
        };
        // SAFETY: the cache's layout was checked: rows do not overlap, two tensors do not overlap,
        // and the rotary key of a row comes after its latent. Only this slot has these bytes, and
        // the caller has the slot.
        unsafe { [self.rows.slice(row, latent), places.slice(key, rope)] }
    }
}

/// Rows of a cache, found by slot.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    latents: &'a [u8],
    rope: &'a [u8],
    layout: CacheLayout,
}

impl<'a> Rows<'a> {
    pub(crate) fn of(cache: &CacheRef<'a, Cpu>) -> Self {
        Self {
            latents: cache.bytes(),
            rope: cache.rope_bytes(),
            layout: *cache.layout(),
        }
    }

    pub(crate) fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the bytes of a slot's row, if the latent and the rotary key are in one tensor.
    pub(crate) fn whole(&self, slot: usize) -> Option<&'a [u8]> {
        if self.layout.is_split() {
            return None;
        }
        let offset = self.layout.strides().offset(slot, self.layout.page_size);
        Some(&self.latents[offset..offset + self.layout.row_bytes()])
    }

    /// Decodes the values of a slot's row, without the scale of [`KvFormat::Fp8`]. The caller
    /// applies that scale where it costs least.
    pub(crate) fn decode<S: Lane>(&self, slot: usize, row: &mut [S]) {
        let layout = &self.layout;
        let (format, dims) = (layout.format, layout.dims);
        let offset = layout.strides().offset(slot, layout.page_size);
        let latent = &self.latents[offset..offset + format.latent_bytes(dims)];
        let offset = layout.rope_strides().offset(slot, layout.page_size);
        let rope = &self.rope[offset..offset + format.rope_bytes(dims)];
        decode_row(layout, [latent, rope], row);
    }
}

// Stores a row. Rows may begin at any byte, so elements are written and read as bytes.
fn store<T: Element>(row: &[f32], to: &mut [u8]) {
    for (to, value) in to.chunks_exact_mut(size_of::<T>()).zip(row) {
        to.copy_from_slice(bytemuck::bytes_of(&T::from_f32(*value)));
    }
}

fn load<T: Element, S: Lane>(from: &[u8], row: &mut [S]) {
    if let Ok(from) = bytemuck::try_cast_slice::<u8, T>(from) {
        S::convert(from, row);
    } else {
        for (from, to) in from.chunks_exact(size_of::<T>()).zip(row) {
            *to = S::from_f32(bytemuck::pod_read_unaligned::<T>(from).to_f32());
        }
    }
}

// Encodes a row into the bytes of its latent and of its rotary key.
fn encode_row(layout: &CacheLayout, row: &[f32], to: [&mut [u8]; 2]) {
    let width = layout.dims.latent as usize;
    let (latent, rope) = row.split_at(width);
    let [to, to_rope] = to;
    let mut both = |store: &dyn Fn(&[f32], &mut [u8])| {
        store(latent, to);
        store(rope, to_rope);
    };
    match layout.format {
        KvFormat::F32 => both(&store::<f32>),
        KvFormat::F16 => both(&store::<half::f16>),
        KvFormat::BF16 => both(&store::<bf16>),
        KvFormat::Fp8 => both(&|row, to| {
            for (to, value) in to.iter_mut().zip(row) {
                *to = fp8::encode(value / layout.scale);
            }
        }),
        KvFormat::Fp8DsMla => {
            let (codes, scales) = to.split_at_mut(width);
            let groups = codes
                .chunks_exact_mut(GROUP)
                .zip(latent.chunks_exact(GROUP));
            for ((codes, values), to) in groups.zip(scales.chunks_exact_mut(4)) {
                let scale = fp8::quantise(values, fp8::power_of_two_scale, codes);
                to.copy_from_slice(&scale.to_le_bytes());
            }
            store::<bf16>(rope, to_rope);
        }
        KvFormat::Fp8PerToken => {
            let (to_rope, scale) = to_rope.split_at_mut(to_rope.len() - 4);
            scale.copy_from_slice(&fp8::quantise(latent, fp8::token_scale, to).to_le_bytes());
            store::<bf16>(rope, to_rope);
            to_rope[2 * rope.len()..].fill(0);
        }
    }
}

fn scale_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn decode_row<S: Lane>(layout: &CacheLayout, [from, from_rope]: [&[u8]; 2], row: &mut [S]) {
    let width = layout.dims.latent as usize;
    let (latent, rope) = row.split_at_mut(width);
    let mut both = |load: fn(&[u8], &mut [S])| {
        load(from, latent);
        load(from_rope, rope);
    };
    match layout.format {
        KvFormat::F32 => both(load::<f32, S>),
        KvFormat::F16 => both(load::<half::f16, S>),
        KvFormat::BF16 => both(load::<bf16, S>),
        KvFormat::Fp8 => both(|from, row| S::decode_fp8(from, 1.0, row)),
        KvFormat::Fp8DsMla => {
            let (codes, scales) = from.split_at(width);
            let groups = codes
                .chunks_exact(GROUP)
                .zip(latent.chunks_exact_mut(GROUP));
            for ((codes, values), scale) in groups.zip(scales.chunks_exact(4)) {
                S::decode_fp8(codes, scale_of(scale), values);
            }
            load::<bf16, S>(from_rope, rope);
        }
        KvFormat::Fp8PerToken => {
            let (from_rope, scale) = from_rope.split_at(from_rope.len() - 4);
            S::decode_fp8(from, scale_of(scale), latent);
            load::<bf16, S>(&from_rope[..2 * layout.dims.head.rope as usize], rope);
        }
    }
}

/// A block table whose used entries have been checked.
#[derive(Clone, Copy)]
pub(crate) struct Pages<'a> {
    entries: &'a [i32],
    max_pages: usize,
    page_size: usize,
}

impl<'a> Pages<'a> {
    pub(crate) fn of(table: &BlockTable<'a, Cpu>, page_size: usize) -> Result<Self> {
        Ok(Self {
            entries: scalars("block table", &table.entries())?,
            max_pages: table.max_pages(),
            page_size,
        })
    }

    /// Checks the entries for the tokens `start..end` of a request. They must be pages of a cache
    /// with `available` pages.
    pub(crate) fn check(
        &self,
        request: usize,
        start: usize,
        end: usize,
        available: usize,
    ) -> Result<()> {
        if end <= start {
            return Ok(());
        }
        let pages = end.div_ceil(self.page_size);
        if pages > self.max_pages {
            return Err(Error::argument(
                "sequence length",
                format!("{end} of request {request}"),
                format!(
                    "at most {} ({} pages of {})",
                    self.max_pages * self.page_size,
                    self.max_pages,
                    self.page_size
                ),
            ));
        }
        for page in start / self.page_size..pages {
            let entry = self.entries[request * self.max_pages + page];
            if usize::try_from(entry).is_ok_and(|entry| entry < available) {
                continue;
            }
            return Err(Error::argument(
                "block table entry",
                format!("{entry} at [{request}, {page}]"),
                format!("0 and up below {available}"),
            ));
        }
        Ok(())
    }

    /// Returns the slot of a token whose entry has been checked.
    pub(crate) fn slot(&self, request: usize, token: usize) -> usize {
        let page = self.entries[request * self.max_pages + token / self.page_size];
        page as usize * self.page_size + token % self.page_size
    }
}

pub(crate) fn gather(
    cpu: &Cpu,
    cache: CacheRef<'_, Cpu>,
    rows: GatherRows<'_, Cpu>,
    latent: TensorMut<'_, Cpu>,
    rope: TensorMut<'_, Cpu>,
) -> Result<()> {
    let layout = *cache.layout();
    let (l, r) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    check_gather(rows.rows, &latent, &rope, &layout)?;
    let Segments {
        row_starts,
        token_starts,
        pages,
    } = Segments::of(&rows, layout.page_size, layout.pages)?;
    check_row(l + r)?;
    let cached = Rows::of(&cache);
    with_element!(latent.dtype(), T => {
        let latent = Places::<T>::of("latent", latent)?;
        let rope = Places::<T>::of("rope", rope)?;
        cpu.install(|| {
            (0..rows.rows).into_par_iter().with_min_len(ROWS_PER_TASK).for_each_init(
                || vec![0.0f32; l + r],
                |values, row| {
                    let segment = row_starts.partition_point(|start| *start as usize <= row) - 1;
                    let token = token_starts[segment] as usize + row - row_starts[segment] as usize;
                    cached.decode(pages.slot(segment, token), values);
                    for value in values.iter_mut() {
                        *value *= layout.scale;
                    }
                    // SAFETY: each row is visited once, and the outputs' elements are distinct.
                    unsafe {
                        latent.write_row(row, 0, &values[..l]);
                        rope.write_row(row, 0, &values[l..]);
                    }
                },
            );
        });
    });
    Ok(())
}

/// The cached tokens to gather: for each segment, its first row of the result and its first token.
struct Segments<'a> {
    row_starts: &'a [i32],
    token_starts: &'a [i32],
    pages: Pages<'a>,
}

impl<'a> Segments<'a> {
    /// Checks the segments against a cache of `available` pages of `page_size` tokens.
    fn of(rows: &GatherRows<'a, Cpu>, page_size: usize, available: usize) -> Result<Self> {
        let row_starts = scalars("row starts", &rows.row_starts)?;
        let token_starts = scalars("token starts", &rows.token_starts)?;
        let segments = token_starts.len();
        if rows.block_table.requests() != segments {
            return Err(Error::argument(
                "block table requests",
                rows.block_table.requests(),
                format!("{segments}, one per segment"),
            ));
        }
        check_starts("row starts", row_starts, segments, rows.rows, true)?;
        let pages = Pages::of(&rows.block_table, page_size)?;
        for (segment, start) in token_starts.iter().enumerate() {
            let start = usize::try_from(*start).map_err(|_| {
                Error::argument(
                    "token start",
                    format!("{start} of segment {segment}"),
                    "0 and up",
                )
            })?;
            let len = (row_starts[segment + 1] - row_starts[segment]) as usize;
            pages.check(segment, start, start + len, available)?;
        }
        Ok(Self {
            row_starts,
            token_starts,
            pages,
        })
    }
}

/// Checks that `starts` has one entry more than there are parts and ascends from 0. Its last entry
/// must be `total`, or at most `total` if `exact` is false.
pub(crate) fn check_starts(
    field: &'static str,
    starts: &[i32],
    parts: usize,
    total: usize,
    exact: bool,
) -> Result<()> {
    if starts.len() != parts + 1 {
        return Err(Error::argument(
            field,
            format!("{} entries", starts.len()),
            format!("{} entries, one more than there are parts", parts + 1),
        ));
    }
    let last = i64::from(starts[parts]);
    let ends = if exact {
        last == total as i64
    } else {
        last <= total as i64
    };
    // Only the first wrong entry is reported, because a batch may have very many.
    let wrong = match starts.windows(2).position(|pair| pair[0] > pair[1]) {
        _ if starts[0] != 0 => 0,
        Some(before) => before + 1,
        None if !ends => parts,
        None => return Ok(()),
    };
    Err(Error::argument(
        field,
        format!("{} at [{wrong}]", starts[wrong]),
        format!(
            "ascending numbers from 0 to {}{total}",
            if exact { "" } else { "at most " }
        ),
    ))
}

impl Lane for f32 {
    fn convert<T: Element>(from: &[T], to: &mut [Self]) {
        widen(from, to);
    }

    fn decode_fp8(from: &[u8], scale: f32, to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = fp8::decode(*from) * scale;
        }
    }
}

impl Lane for bf16 {
    fn convert<T: Element>(from: &[T], to: &mut [Self]) {
        match T::DTYPE {
            DType::BF16 => to[..from.len()].copy_from_slice(bytemuck::cast_slice(from)),
            DType::F32 => narrow(bytemuck::cast_slice(from), &mut to[..from.len()]),
            DType::F16 => {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = Self::from_f32(from.to_f32());
                }
            }
        }
    }

    // The three mantissa bits fit into the seven of bf16. The result is exact if the scale is a
    // power of two.
    fn decode_fp8(from: &[u8], scale: f32, to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::from_bits(super::view::bf16_bits(fp8::decode(*from) * scale));
        }
    }
}
