//! Checks that every operation of the device does the same on a cache of two tensors as on a cache
//! of one.

use mla_cpu::{Cpu, ReadRow as _};
use mla_runtime::Result;
use mla_runtime::device::{Device as _, GatherRows};
use mla_runtime::model::{HeadDims, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Rotary, TensorMut,
    TensorRef,
};

const DIMS: MlaDims = MlaDims::new(16, HeadDims::new(8, 4, 8));
const L: usize = 16;
const R: usize = 4;
const ROW: usize = L + R;
const PAGES: usize = 5;
const PAGE: usize = 3;
/// The byte that fills the gaps between rows. It must stay unchanged.
const GAP: u8 = 0x5a;

/// The same cache as one tensor and as two, all with gaps.
struct Both {
    row: Vec<u8>,
    row_layout: CacheLayout,
    latents: Vec<u8>,
    keys: Vec<u8>,
    layout: CacheLayout,
}

impl Both {
    fn new(format: KvFormat, gap: usize) -> Self {
        let scale = if format.has_tensor_scale() { 0.25 } else { 1.0 };
        let strides = |row: usize, gap: usize| CacheStrides {
            row_stride: row + gap,
            page_stride: PAGE * (row + gap) + 2 * gap,
        };
        let latent = strides(format.latent_bytes(DIMS), gap);
        let rope = strides(format.rope_bytes(DIMS), 3 * gap);
        let row_layout = CacheLayout::contiguous(DIMS, format, PAGES, PAGE).with_scale(scale);
        let layout = CacheLayout::split(DIMS, format, PAGES, PAGE)
            .with_scale(scale)
            .with_page_stride(latent.page_stride)
            .with_row_stride(latent.row_stride)
            .with_split_rope(Some(rope));
        Self {
            row: vec![GAP; PAGES * row_layout.page_stride],
            row_layout,
            latents: vec![GAP; PAGES * latent.page_stride],
            keys: vec![GAP; PAGES * rope.page_stride],
            layout,
        }
    }

    /// Applies `work` to both caches.
    fn each(&mut self, mut work: impl FnMut(CacheMut<'_, Cpu>) -> Result<()>) -> Result<()> {
        work(CacheMut::new(&mut self.row[..], self.row_layout)?)?;
        work(self.split()?)
    }

    fn split(&mut self) -> Result<CacheMut<'_, Cpu>> {
        CacheMut::split(&mut self.latents[..], &mut self.keys[..], self.layout)
    }

    fn views(&self) -> Result<[CacheRef<'_, Cpu>; 2]> {
        Ok([
            CacheRef::new(&self.row[..], self.row_layout)?,
            CacheRef::split(&self.latents[..], &self.keys[..], self.layout)?,
        ])
    }

    /// Compares every byte of every row, and checks that the gaps are unchanged.
    fn check(&self) {
        let (mut latents, mut keys) = (self.latents.clone(), self.keys.clone());
        let latent = self.layout.row_bytes();
        for slot in 0..self.layout.slots() {
            let row = &self.row[self.row_layout.strides().offset(slot, PAGE)..];
            let row = &row[..self.row_layout.row_bytes()];
            let to = &mut latents[self.layout.strides().offset(slot, PAGE)..][..latent];
            assert_eq!(to, &row[..latent], "latent of slot {slot}");
            to.fill(GAP);
            let rope = row.len() - latent;
            let to = &mut keys[self.layout.rope_strides().offset(slot, PAGE)..][..rope];
            assert_eq!(to, &row[latent..], "rotary key of slot {slot}");
            to.fill(GAP);
        }
        assert!([latents, keys].concat().iter().all(|byte| *byte == GAP));
    }
}

fn values(count: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 16.0 - 3.0;
    (0..count).map(value).collect()
}

fn formats() -> impl Iterator<Item = (KvFormat, usize)> {
    let split = KvFormat::ALL.iter().filter(|format| format.splits());
    split.flat_map(|format| [(*format, 0), (*format, 4), (*format, 1)])
}

#[test]
fn split_rows_match_one_row() -> Result<()> {
    let cpu = Cpu::new();
    for (format, gap) in formats() {
        let mut both = Both::new(format, gap);
        let (latent, rope) = (values(4 * L, 1), values(4 * R, 2));
        let latent = TensorRef::from_slice(&latent, [4, 1, L])?;
        let rope = TensorRef::from_slice(&rope, [4, 1, R])?;
        both.each(|cache| {
            cpu.write_cache(latent, rope, ArrayRef::from_slice(&[14, -1, 0, 7]), cache)
        })?;
        both.check();
        let (cos, sin) = (values(8 * R / 2, 3), values(8 * R / 2, 4));
        let rotary = Rotary::new(
            ArrayRef::from_slice(&[7, 0, 3, 1]),
            [&cos, &sin].map(|table| TensorRef::from_slice(table, [1, 8, R / 2]).unwrap()),
            RotaryStyle::Interleaved,
        );
        let slots = ArrayRef::from_slice(&[1, 13, 2, 3]);
        both.each(|cache| cpu.write_cache_rotated(latent, rope, &rotary, None, slots, cache))?;
        both.check();
        let [row, split] = both.views()?;
        for slot in 0..both.layout.slots() {
            let [mut own, mut other] = [[0.0; ROW]; 2];
            row.read_row(slot, &mut own)?;
            split.read_row(slot, &mut other)?;
            assert_eq!(own.map(f32::to_bits), other.map(f32::to_bits), "{format}");
        }
    }
    Ok(())
}

#[test]
fn split_rows_gather() -> Result<()> {
    let cpu = Cpu::new();
    for (format, gap) in formats() {
        let mut both = Both::new(format, gap);
        let slots: Vec<i64> = (0..(PAGES * PAGE) as i64).collect();
        let (latent, rope) = (values(slots.len() * L, 5), values(slots.len() * R, 6));
        both.each(|cache| {
            cpu.write_cache(
                TensorRef::from_slice(&latent, [slots.len(), 1, L])?,
                TensorRef::from_slice(&rope, [slots.len(), 1, R])?,
                ArrayRef::from_slice(&slots),
                cache,
            )
        })?;
        let gathered = both.views()?.map(|cache| -> Result<_> {
            let (mut latent, mut rope) = (vec![0.0f32; 8 * L], vec![0.0f32; 8 * R]);
            let pages = ArrayRef::from_slice(&[4, 0, 2, 3, -1, -1]);
            cpu.gather_cache(
                cache,
                GatherRows::new(
                    BlockTable::new(pages, 2, 3)?,
                    ArrayRef::from_slice(&[2, 0]),
                    ArrayRef::from_slice(&[0, 6, 8]),
                    8,
                ),
                TensorMut::from_slice(&mut latent, [8, 1, L])?,
                TensorMut::from_slice(&mut rope, [8, 1, R])?,
            )?;
            Ok([latent, rope].concat())
        });
        let [row, split] = gathered;
        assert_eq!(row?, split?, "{format}");
    }
    Ok(())
}

#[test]
fn split_pages_copy() -> Result<()> {
    let cpu = Cpu::new();
    for (format, gap) in formats().filter(|(_, gap)| gap % 2 == 0) {
        let mut both = Both::new(format, gap);
        let slots: Vec<i64> = (0..PAGE as i64)
            .map(|slot| slot + 3 * PAGE as i64)
            .collect();
        let (latent, rope) = (values(PAGE * L, 7), values(PAGE * R, 8));
        both.each(|cache| {
            cpu.write_cache(
                TensorRef::from_slice(&latent, [PAGE, 1, L])?,
                TensorRef::from_slice(&rope, [PAGE, 1, R])?,
                ArrayRef::from_slice(&slots),
                cache,
            )
        })?;
        both.each(|cache| cpu.copy_page(cache, 3, 1))?;
        both.each(|cache| cpu.copy_page(cache, 1, 4))?;
        both.check();
        let [_, split] = both.views()?;
        let [mut from, mut to] = [[0.0; ROW]; 2];
        split.read_row(3 * PAGE + 1, &mut from)?;
        split.read_row(4 * PAGE + 1, &mut to)?;
        assert_eq!(from, to, "{format}");
    }
    // Neither tensor is copied if the other one cannot be.
    let mut both = Both::new(KvFormat::Fp8, 2);
    let odd = both.layout.split_rope.map(|strides| CacheStrides {
        row_stride: strides.row_stride + 1,
        page_stride: strides.page_stride + PAGE,
    });
    both.layout.split_rope = odd;
    both.keys
        .resize(PAGES * odd.map_or(0, |strides| strides.page_stride), GAP);
    both.latents[0] = 1;
    let refused = cpu.copy_page(both.split()?, 0, 1).unwrap_err().to_string();
    assert_eq!(
        refused,
        "cache row: given 11 bytes, accepted an even number of bytes"
    );
    let second_page = both.layout.page_stride;
    assert_eq!(both.latents[second_page], GAP);
    Ok(())
}
