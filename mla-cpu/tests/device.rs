//! Compares the CPU device's operations with the f64 reference.

mod common;

use half::{bf16, f16};
use mla_conformance::reference;
use mla_cpu::{Buffer, Cpu, ReadRow as _, fp8};
use mla_runtime::device::{Device, GatherRows};
use mla_runtime::model::{DType, Element, HeadDims, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::tensor::{
    ArrayRef, Base2TokensFirst, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout,
    LseMut, LseRef, Memory, Rotary, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};
use proptest::prelude::*;

use common::Random;

#[test]
fn e4m3_decodes_every_code() {
    for code in 0..=255u8 {
        let (got, want) = (f64::from(fp8::decode(code)), reference::decode_e4m3(code));
        assert!(
            got == want || (got.is_nan() && want.is_nan()),
            "{code:#04x}: {got} for {want}"
        );
        assert_eq!(got.is_sign_negative(), code >= 128, "{code:#04x}");
        if !want.is_nan() {
            assert_eq!(fp8::encode(fp8::decode(code)), code);
        }
    }
    assert_eq!(fp8::decode(0x7e), fp8::MAX);
}

// Codes ascend with values, so the nearest code changes only half-way between two codes. The test
// covers these points and the f32 numbers next to them.
#[test]
fn e4m3_rounds_to_nearest_even() {
    for code in 0..0x7eu8 {
        let (low, high) = (fp8::decode(code), fp8::decode(code + 1));
        let middle = (low + high) / 2.0;
        for value in [
            low,
            low.next_up(),
            middle.next_down(),
            middle,
            middle.next_up(),
            high.next_down(),
        ] {
            for value in [value, -value] {
                let want = reference::encode_e4m3(value.into());
                assert_eq!(fp8::encode(value), want, "{value:e}");
            }
        }
    }
    for (value, want) in [
        (449.0, 0x7e),
        (f32::INFINITY, 0x7e),
        (f32::NEG_INFINITY, 0xfe),
        (f32::MIN_POSITIVE, 0),
        (-0.0, 0x80),
    ] {
        assert_eq!(fp8::encode(value), want, "{value}");
    }
    assert!(fp8::decode(fp8::encode(f32::NAN)).is_nan());
}

#[test]
fn e4m3_encodes_every_half() {
    for bits in 0..=u16::MAX {
        for value in [
            f16::from_bits(bits).to_f32(),
            bf16::from_bits(bits).to_f32(),
        ] {
            if value.is_nan() {
                assert!(fp8::decode(fp8::encode(value)).is_nan());
            } else {
                assert_eq!(
                    fp8::encode(value),
                    reference::encode_e4m3(value.into()),
                    "{value:e}"
                );
            }
        }
    }
}

#[test]
fn scales_are_minimal_powers_of_two() {
    for exponent in -30..30 {
        for factor in [448.0f32, 447.0, 449.0, 300.0, 224.5] {
            let amax = factor * 2f32.powi(exponent);
            let scale = fp8::power_of_two_scale(amax);
            let floored = amax.max(1e-4);
            assert_eq!(scale.log2().fract(), 0.0);
            assert!(
                floored <= 448.0 * scale && floored > 224.0 * scale,
                "{amax}: {scale}"
            );
        }
    }
    assert_eq!(fp8::power_of_two_scale(0.0), fp8::power_of_two_scale(1e-4));
    assert!(fp8::power_of_two_scale(f32::INFINITY).is_finite());
}

#[test]
fn buffers_are_aligned_and_zero() {
    for len in [0, 1, 63, 64, 65, 1000] {
        let mut buffer = Buffer::zeroed(len).unwrap();
        assert_eq!(buffer.len(), len);
        assert!(buffer.as_bytes().iter().all(|byte| *byte == 0));
        assert_eq!(
            buffer
                .as_bytes_mut()
                .as_ptr()
                .align_offset(Buffer::ALIGNMENT),
            0
        );
    }
    assert!(Buffer::zeroed(usize::MAX / 2).is_err() && Buffer::zeroed(usize::MAX).is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn buffers_take_memory_when_written() {
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
        4096 * pages
    };
    let before = resident();
    let buffer = Buffer::zeroed(4 << 30).unwrap();
    assert!(resident() < before + (1 << 30));
    assert_eq!(buffer.as_bytes()[1 << 30], 0);
}

fn gemm_case<T: Element>([batch, m, n, k]: [usize; 4], by_columns: bool, shared: bool, seed: u64) {
    let mut random = Random(seed);
    let a = random.fill::<T>(batch * m * k);
    let b = random.fill::<T>(if shared { k * n } else { batch * k * n });
    // Rows of the result have gaps of three elements.
    let mut c_layout = Layout::contiguous(T::DTYPE, [batch, m, n]);
    c_layout.strides = [m * (n + 3), n + 3, 1];
    let mut c = vec![T::from_f32(77.0); batch * m * (n + 3)];
    let mut b_layout = Layout::contiguous(T::DTYPE, [batch, k, n]);
    if by_columns {
        b_layout.strides = [k * n, 1, k];
    }
    if shared {
        b_layout.strides[0] = 0;
    }
    let portable = Cpu::new().portable();
    for cpu in [Cpu::new(), portable] {
        cpu.gemm(
            TensorRef::from_slice(&a, [batch, m, k]).unwrap(),
            TensorRef::new(bytemuck::cast_slice(&b), b_layout).unwrap(),
            TensorMut::new(bytemuck::cast_slice_mut(&mut c), c_layout).unwrap(),
        )
        .unwrap();
        // The tolerance covers a sum of k products below 1, whose additions are rounded to f32, and
        // one rounding at the end.
        let unit = match T::DTYPE.name() {
            "f32" => 2f64.powi(-24),
            "f16" => 2f64.powi(-11),
            _ => 2f64.powi(-8),
        };
        for i in 0..batch {
            for row in 0..m {
                for column in 0..n {
                    let want: f64 = (0..k)
                        .map(|x| {
                            let at = i * b_layout.strides[0]
                                + x * b_layout.strides[1]
                                + column * b_layout.strides[2];
                            f64::from(a[(i * m + row) * k + x].to_f32()) * f64::from(b[at].to_f32())
                        })
                        .sum();
                    let got = f64::from(c[(i * m + row) * (n + 3) + column].to_f32());
                    let bound =
                        unit * want.abs() + k as f64 * (k as f64).sqrt() * 2f64.powi(-24) + 1e-7;
                    assert!(
                        (got - want).abs() <= bound,
                        "[{i}, {row}, {column}]: {got} for {want}"
                    );
                }
                if row + 1 < m || i + 1 < batch {
                    assert_eq!(c[(i * m + row) * (n + 3) + n].to_f32(), 77.0);
                }
            }
        }
    }
}

// A cache in one tensor or in two. All bytes are 0xff until they are written.
#[derive(Clone)]
struct Stored {
    layout: CacheLayout,
    rows: Vec<u8>,
    rope: Vec<u8>,
}

impl Stored {
    fn new(layout: CacheLayout) -> Self {
        let of_rope = layout.split_rope.map_or(0, |strides| strides.page_stride);
        Self {
            layout,
            rows: vec![0xff; layout.pages * layout.page_stride],
            rope: vec![0xff; layout.pages * of_rope],
        }
    }

    fn read(&self) -> Result<CacheRef<'_, Cpu>> {
        match self.layout.is_split() {
            true => CacheRef::split(&self.rows[..], &self.rope[..], self.layout),
            false => CacheRef::new(&self.rows[..], self.layout),
        }
    }

    fn write(&mut self) -> Result<CacheMut<'_, Cpu>> {
        match self.layout.is_split() {
            true => CacheMut::split(&mut self.rows[..], &mut self.rope[..], self.layout),
            false => CacheMut::new(&mut self.rows[..], self.layout),
        }
    }

    // Returns the bytes of a slot's row: those in the first tensor, and those in the second one.
    fn parts(&mut self, slot: usize) -> [&mut [u8]; 2] {
        let layout = self.layout;
        let at = layout.strides().offset(slot, layout.page_size);
        let row = &mut self.rows[at..at + layout.row_bytes()];
        let rope = match layout.split_rope {
            Some(strides) => {
                let at = strides.offset(slot, layout.page_size);
                &mut self.rope[at..at + layout.format.rope_bytes(layout.dims)]
            }
            None => &mut [],
        };
        [row, rope]
    }

    fn row(&self, slot: usize) -> Vec<u8> {
        self.clone().parts(slot).concat()
    }

    fn clear(&mut self, slot: usize) {
        for part in self.parts(slot) {
            part.fill(0xff);
        }
    }

    fn is_clear(&self) -> bool {
        self.rows.iter().chain(&self.rope).all(|byte| *byte == 0xff)
    }
}

// Returns the bits of each row of a product of `rows` rows of `a`, beginning at row `first`.
fn product_rows<T: Element>(
    cpu: &Cpu,
    a: &[T],
    (b, b_layout): (&[T], Layout),
    rows: std::ops::Range<usize>,
) -> Vec<Vec<u8>> {
    let [_, k, n] = b_layout.shape;
    let mut c = vec![T::from_f32(77.0); rows.len() * n];
    cpu.gemm(
        TensorRef::from_slice(&a[rows.start * k..rows.end * k], [1, rows.len(), k]).unwrap(),
        TensorRef::new(bytemuck::cast_slice(b), b_layout).unwrap(),
        TensorMut::from_slice(&mut c, [1, rows.len(), n]).unwrap(),
    )
    .unwrap();
    let rows = c.chunks_exact(n);
    rows.map(|row| bytemuck::cast_slice(row).to_vec()).collect()
}

/// Checks that a row of a product has the same bits in any product as alone.
fn rows_alone<T: Element>([m, n, k]: [usize; 3], by_columns: bool, seed: u64) {
    let mut random = Random(seed);
    let (a, b) = (random.fill::<T>(m * k), random.fill::<T>(k * n));
    let mut layout = Layout::contiguous(T::DTYPE, [1, k, n]);
    if by_columns {
        layout.strides = [k * n, 1, k];
    }
    for cpu in [Cpu::new(), Cpu::new().portable()] {
        let all = product_rows(&cpu, &a, (&b, layout), 0..m);
        for row in [0, m / 2, m - 1] {
            let alone = product_rows(&cpu, &a, (&b, layout), row..row + 1);
            assert!(all[row] == alone[0], "row {row} of {m}, {n} columns of {k}");
            let behind = product_rows(&cpu, &a, (&b, layout), row..m);
            assert!(
                all[row] == behind[0],
                "row {row} of {m} to the end, {n} columns of {k}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn gemm_matches_the_definition(
        // Long products are summed in parts.
        shape in prop_oneof![
            4 => (0usize..3, 0usize..150, 0usize..150, 0usize..80),
            1 => (1usize..3, 1usize..20, 1usize..20, 1000usize..2200),
        ],
        by_columns: bool,
        shared: bool,
        seed: u64,
    ) {
        let shape = [shape.0, shape.1, shape.2, shape.3];
        gemm_case::<f32>(shape, by_columns, shared, seed);
        gemm_case::<f16>(shape, by_columns, shared, seed);
        gemm_case::<bf16>(shape, by_columns, shared, seed);
    }

    #[test]
    fn rows_of_products_do_not_depend_on_others(
        m in prop_oneof![1usize..6, 1usize..300],
        n in prop_oneof![1usize..6, 60usize..70, 1usize..150],
        k in prop_oneof![1usize..4, 500usize..600, 1usize..1100],
        by_columns: bool,
        seed: u64,
    ) {
        rows_alone::<f32>([m, n, k], by_columns, seed);
        rows_alone::<f16>([m, n, k], by_columns, seed);
        rows_alone::<bf16>([m, n, k], by_columns, seed);
    }

    #[test]
    fn copies_follow_both_strides(
        shape in (0usize..6, 0usize..6, 0usize..40),
        order in prop::sample::select(vec![[0usize, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]]),
        seed: u64,
    ) {
        let shape = [shape.0, shape.1, shape.2];
        let from = Random(seed).fill::<f16>(shape[0] * shape[1] * shape[2]);
        // The destination has its axes in another order, with gaps.
        let mut layout = Layout::contiguous(mla_runtime::model::DType::F16, shape);
        let mut stride = 2;
        for axis in order.iter().rev() {
            layout.strides[*axis] = stride;
            stride *= shape[*axis].max(1) + 1;
        }
        let mut to = vec![f16::from_f32(77.0); stride + 1];
        let place = |i: usize, j: usize, k: usize| {
            i * layout.strides[0] + j * layout.strides[1] + k * layout.strides[2]
        };
        let cpu = Cpu::new();
        let source = TensorRef::from_slice(&from, shape).unwrap();
        let destination = TensorMut::new(bytemuck::cast_slice_mut(&mut to), layout).unwrap();
        cpu.copy(source, destination).unwrap();
        let mut written = 0;
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                for k in 0..shape[2] {
                    let want = from[(i * shape[1] + j) * shape[2] + k];
                    prop_assert_eq!(to[place(i, j, k)], want);
                    written += 1;
                }
            }
        }
        let filled = to.iter().filter(|x| x.to_f32() == 77.0).count();
        prop_assert_eq!(filled + written, to.len());
        cpu.clear(TensorMut::new(bytemuck::cast_slice_mut(&mut to), layout).unwrap()).unwrap();
        let zeros = to.iter().filter(|x| x.to_bits() == 0).count();
        let untouched = to.iter().filter(|x| x.to_f32() == 77.0).count();
        prop_assert_eq!((zeros, untouched), (written, to.len() - written));
    }

    #[test]
    fn written_rows_are_gathered_back(
        format in prop::sample::select(KvFormat::ALL),
        rope in 0u32..20,
        page_size in 1usize..9,
        lens in prop::collection::vec(0usize..30, 1..4),
        skip in 0usize..5,
        (odd_stride, is_split) in any::<(bool, bool)>(),
        seed: u64,
    ) {
        let dims = MlaDims::new(128, HeadDims::new(8, rope, 8));
        let (l, r) = (128, rope as usize);
        let mut random = Random(seed);
        let max_pages = 40;
        let pages: usize = lens.iter().map(|len| len.div_ceil(page_size)).sum();
        let mut layout = match is_split && format.splits() && rope > 0 {
            true => CacheLayout::split(dims, format, pages + 2, page_size),
            false => CacheLayout::contiguous(dims, format, pages + 2, page_size),
        };
        // Rows may also begin at odd bytes.
        let odd = usize::from(odd_stride);
        layout.row_stride += odd;
        layout.page_stride = layout.row_stride * page_size + 5 * odd;
        if let Some(rope) = &mut layout.split_rope {
            rope.row_stride += 3 * odd;
            rope.page_stride = rope.row_stride * page_size + odd;
        }
        layout.scale = if format == KvFormat::Fp8 { 0.25 } else { 1.0 };
        let mut stored = Stored::new(layout);
        let mut table = vec![i32::MAX; lens.len() * max_pages];
        let mut next = layout.pages;
        let mut slots = Vec::new();
        for (request, len) in lens.iter().enumerate() {
            for token in 0..*len {
                if token % page_size == 0 {
                    next -= 1;
                    table[request * max_pages + token / page_size] = next as i32;
                }
                slots.push((next * page_size + token % page_size) as i64);
            }
        }
        let values: Vec<f32> = random.fill(slots.len() * (l + r));
        let column = |range: std::ops::Range<usize>| -> Vec<f32> {
            values.chunks(l + r).flat_map(|row| row[range.clone()].to_vec()).collect()
        };
        let (latent, rotary) = (column(0..l), column(l..l + r));
        // A slot of −1 leaves its row unwritten.
        let kept: Vec<i64> = slots
            .iter()
            .enumerate()
            .map(|(row, slot)| if skip > 0 && row % (skip + 1) == skip { -1 } else { *slot })
            .collect();
        let cpu = Cpu::new();
        cpu.write_cache(
            TensorRef::from_slice(&latent, [slots.len(), 1, l]).unwrap(),
            TensorRef::from_slice(&rotary, [slots.len(), 1, r]).unwrap(),
            ArrayRef::from_slice(&kept),
            stored.write().unwrap(),
        ).unwrap();
        for (row, slot) in slots.iter().enumerate().filter(|(row, _)| kept[*row] >= 0) {
            let row = &values[row * (l + r)..(row + 1) * (l + r)];
            let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            let want = reference::encode_row(format, l, &row, layout.scale.into());
            prop_assert_eq!(stored.row(*slot as usize), want);
        }
        // Nothing else is written.
        let mut rest = stored.clone();
        for slot in kept.iter().filter(|slot| **slot >= 0) {
            rest.clear(*slot as usize);
        }
        prop_assert!(rest.is_clear());

        // The gather begins in the middle of each request.
        let token_starts: Vec<i32> = lens.iter().map(|len| (len / 2) as i32).collect();
        let mut row_starts = vec![0i32];
        for len in &lens {
            row_starts.push(row_starts[row_starts.len() - 1] + (len - len / 2) as i32);
        }
        let rows = row_starts[lens.len()] as usize;
        let mut got_latent = vec![77.0f32; (rows + 1) * l];
        let mut got_rope = vec![77.0f32; (rows + 1) * r];
        cpu.gather_cache(
            stored.read().unwrap(),
            GatherRows::new(
                BlockTable::new(ArrayRef::from_slice(&table), lens.len(), max_pages).unwrap(),
                ArrayRef::from_slice(&token_starts),
                ArrayRef::from_slice(&row_starts),
                rows,
            ),
            TensorMut::from_slice(&mut got_latent, [rows + 1, 1, l]).unwrap(),
            TensorMut::from_slice(&mut got_rope, [rows + 1, 1, r]).unwrap(),
        ).unwrap();
        let mut row = 0;
        let mut first = 0;
        for len in &lens {
            for token in len / 2..*len {
                let bytes = stored.row(slots[first + token] as usize);
                let want = reference::decode_row(format, l, r, &bytes, layout.scale.into());
                let latent = &got_latent[row * l..(row + 1) * l];
                let got = latent.iter().chain(&got_rope[row * r..(row + 1) * r]);
                for (got, want) in got.zip(want) {
                    // The product of a value and a token's scale is rounded once.
                    let (got, want) = (f64::from(*got), f64::from(want as f32));
                    let both_nan = got.is_nan() && want.is_nan();
                    prop_assert!(got == want || both_nan, "{} for {}", got, want);
                }
                row += 1;
            }
            first += len;
        }
        let mut rest = got_latent[rows * l..].iter().chain(&got_rope[rows * r..]);
        prop_assert!(rest.all(|x| *x == 77.0));
    }

    #[test]
    fn merges_match_the_reference(
        shape in (0usize..5, 1usize..4, 1usize..20),
        kinds in prop::collection::vec((0usize..6, 0usize..6), 20),
        gap in 0usize..3,
        seed: u64,
    ) {
        let (tokens, heads, width) = shape;
        let mut random = Random(seed);
        let special = |kind: usize, value: f32| match kind {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => f32::NAN,
            // Some of these values give weights that round to 0 in f32.
            3 => value * 300.0,
            _ => value * 30.0,
        };
        let pick = |index: usize| kinds[index % kinds.len()];
        let mut lse: Vec<f32> = (0..heads * tokens)
            .map(|i| special(pick(i).0, random.next()))
            .collect();
        let other_lse: Vec<f32> = (0..heads * tokens)
            .map(|i| special(pick(i).1, random.next()))
            .collect();
        let head_stride = width + gap;
        let mut out = random.fill::<f32>(tokens * heads * head_stride);
        let mut other = random.fill::<f32>(tokens * heads * width);
        // Empty parts hold NaN here, and no result may contain it. A NaN of any other part must be
        // in the result.
        for token in 0..tokens {
            for head in 0..heads {
                let at = head * tokens + token;
                if other_lse[at].is_infinite() || pick(at).1 == 3 {
                    other[(token * heads + head) * width] = f32::NAN;
                }
            }
        }
        let (before, lse_before) = (out.clone(), lse.clone());
        let mut layout = Layout::contiguous(mla_runtime::model::DType::F32, [tokens, heads, width]);
        layout.strides = [heads * head_stride, head_stride, 1];
        Cpu::new().merge(
            TensorMut::new(bytemuck::cast_slice_mut(&mut out), layout).unwrap(),
            LseMut::from_slice(&mut lse, heads, tokens).unwrap(),
            TensorRef::from_slice(&other, [tokens, heads, width]).unwrap(),
            LseRef::from_slice(&other_lse, heads, tokens).unwrap(),
        ).unwrap();
        for token in 0..tokens {
            for head in 0..heads {
                let at = head * tokens + token;
                let row = |data: &[f32], stride: usize| -> Vec<f64> {
                    let start = (token * heads + head) * stride;
                    data[start..start + width].iter().map(|x| f64::from(*x)).collect()
                };
                let (want, want_lse) = reference::merge(
                    (&row(&before, head_stride), lse_before[at].into()),
                    (&row(&other, width), other_lse[at].into()),
                );
                let got_lse = f64::from(lse[at]);
                let near = |got: f64, want: f64, by: f64| {
                    got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= by
                };
                let by = 4e-6 * want_lse.abs().max(1.0);
                prop_assert!(near(got_lse, want_lse, by), "{} for {}", got_lse, want_lse);
                for (got, want) in row(&out, head_stride).iter().zip(&want) {
                    // The tolerance covers e^x of a difference of up to 600, which is itself
                    // rounded to f32.
                    prop_assert!(near(*got, *want, 4e-5), "{} for {}", got, want);
                }
            }
        }
    }
}

#[test]
fn outputs_are_scaled_by_sinks_and_gates() {
    let (tokens, heads, width) = (3, 4, 5);
    let mut random = Random(7);
    let out: Vec<f32> = random.fill(tokens * heads * width);
    let mut lse: Vec<f32> = random.fill(heads * tokens);
    lse[1] = f32::NEG_INFINITY;
    lse[2] = f32::NAN;
    let sinks = [0.3, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    for columns in [0, 1, width] {
        let gate: Vec<f32> = random.fill(tokens * heads * columns);
        for with_sinks in [true, false] {
            let mut scaled = out.clone();
            let view = TensorRef::from_slice(&gate, [tokens, heads, columns]).unwrap();
            let lse_view = LseRef::from_slice(&lse, heads, tokens).unwrap();
            let of_sinks = with_sinks.then(|| (ArrayRef::from_slice(&sinks), lse_view));
            let out_view = TensorMut::from_slice(&mut scaled, [tokens, heads, width]).unwrap();
            Cpu::new()
                .scale_outputs(out_view, of_sinks, (columns > 0).then_some(view))
                .unwrap();
            for (at, (given, before)) in scaled.iter().zip(&out).enumerate() {
                let (row, column) = (at / width, at % width);
                let (token, head) = (row / heads, row % heads);
                let lse = f64::from(lse[head * tokens + token]);
                let left = match with_sinks {
                    true if lse.is_nan() => 1.0,
                    true => reference::left_by_sink(f64::from(sinks[head]), lse),
                    false => 1.0,
                };
                let gate = match columns {
                    0 => 1.0,
                    _ => {
                        let gate = gate[row * columns + column.min(columns - 1)];
                        1.0 / (1.0 + (-f64::from(gate)).exp())
                    }
                };
                let want = f64::from(*before) * left * gate;
                assert!(
                    (f64::from(*given) - want).abs() < 1e-6,
                    "{at}: {given}, not {want}"
                );
            }
        }
    }
}

#[test]
fn other_conventions_become_natural() {
    let (heads, tokens) = (2, 3);
    let from: Vec<f32> = [1.0, 2.0, 3.0, f32::NEG_INFINITY, 5.0, 6.0].to_vec();
    let mut to = [0.0f32; 6];
    let layout = LseLayout {
        heads,
        tokens,
        row_stride: heads,
    };
    Cpu::new()
        .convert_lse(
            LseRef::<Cpu, Base2TokensFirst>::new(bytemuck::cast_slice(&from), layout).unwrap(),
            LseMut::from_slice(&mut to, heads, tokens).unwrap(),
        )
        .unwrap();
    for token in 0..tokens {
        for head in 0..heads {
            assert_eq!(
                to[head * tokens + token],
                from[token * heads + head] * std::f32::consts::LN_2
            );
        }
    }
}

#[test]
fn split_caches_match_whole_ones() -> Result<()> {
    let (cpu, dims, mut random) = (
        Cpu::new(),
        MlaDims::new(16, HeadDims::new(8, 4, 8)),
        Random(8),
    );
    // The rows and pages of the split cache have gaps.
    let layouts = |format, gap| {
        let mut split = CacheLayout::split(dims, format, 5, 3);
        split.row_stride += gap;
        split.page_stride += 5 * gap;
        if let Some(rope) = &mut split.split_rope {
            rope.row_stride += 3 * gap;
            rope.page_stride += 11 * gap;
        }
        [CacheLayout::contiguous(dims, format, 5, 3), split]
    };
    let splits = KvFormat::ALL.iter().filter(|format| format.splits());
    for (format, gap) in splits.flat_map(|format| [(format, 0), (format, 4)]) {
        let (latent, rope) = (random.fill::<f32>(4 * 16), random.fill::<f32>(4 * 4));
        let (cos, sin) = (random.fill::<f32>(16), random.fill::<f32>(16));
        let tables = [&cos, &sin].map(|table| TensorRef::from_slice(table, [1, 8, 2]).unwrap());
        let positions = ArrayRef::from_slice(&[7, 0, 3, 1]);
        let rotary = Rotary::new(positions, tables, RotaryStyle::Interleaved);
        let mut caches = layouts(*format, gap).map(Stored::new);
        for cache in &mut caches {
            cpu.write_cache_rotated(
                TensorRef::from_slice(&latent, [4, 1, 16])?,
                TensorRef::from_slice(&rope, [4, 1, 4])?,
                &rotary,
                None,
                ArrayRef::from_slice(&[9, 13, 2, 3]),
                cache.write()?,
            )?;
            cpu.copy_page(cache.write()?, 3, 1)?;
            cpu.copy_page(cache.write()?, 1, 4)?;
        }
        let [whole, split] = &caches;
        for slot in 0..15 {
            assert_eq!(whole.row(slot), split.row(slot), "slot {slot} of {format}");
            let rows = [whole, split].map(|cache| -> Result<_> {
                let mut row = [0.0; 20];
                cache.read()?.read_row(slot, &mut row)?;
                Ok(row.map(f32::to_bits))
            });
            let [whole, split] = rows;
            assert_eq!(whole?, split?, "slot {slot} of {format}");
        }
        assert_eq!(split.row(9), split.row(12), "{format}");
    }
    // Neither tensor is copied if the other one cannot be.
    let mut odd = layouts(KvFormat::Fp8, 0)[1];
    if let Some(rope) = &mut odd.split_rope {
        (rope.row_stride, rope.page_stride) = (5, 15);
    }
    let mut cache = Stored::new(odd);
    cache.rows[0] = 1;
    let refused = cpu.copy_page(cache.write()?, 0, 1).unwrap_err().to_string();
    assert_eq!(
        refused,
        "cache row: given 5 bytes, accepted an even number of bytes"
    );
    cache.rows[0] = 0xff;
    assert!(cache.is_clear());
    Ok(())
}

/// A rotation by a quarter turn is exact: (a, b) becomes (−b, a).
#[test]
fn cache_write_rotates() {
    let cpu = Cpu::new();
    let dims = MlaDims::new(2, HeadDims::new(1, 4, 1));
    let layout = CacheLayout::contiguous(dims, KvFormat::F32, 1, 4);
    // Position 1 rotates the first pair by a quarter turn. Position 2 rotates the second pair by
    // half a turn.
    let cos = [1.0f32, 1.0, 0.0, 1.0, 1.0, -1.0];
    let sin = [0.0f32, 0.0, 1.0, 0.0, 0.0, 0.0];
    let latent = [9.0f32; 4];
    let rope = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    type Query<'a> = Option<(TensorRef<'a, Cpu>, TensorMut<'a, Cpu>)>;
    let write = |query: Query<'_>, rotary: &Rotary<'_, Cpu>, cache: &mut Buffer| {
        cpu.write_cache_rotated(
            TensorRef::from_slice(&latent, [2, 1, 2]).unwrap(),
            TensorRef::from_slice(&rope, [2, 1, 4]).unwrap(),
            rotary,
            query,
            ArrayRef::from_slice(&[3, 0]),
            CacheMut::new(Cpu::bytes_mut(cache), layout).unwrap(),
        )
    };
    for (style, first, second) in [
        (
            RotaryStyle::Interleaved,
            [-2.0f32, 1.0, 3.0, 4.0],
            [5.0f32, 6.0, -7.0, -8.0],
        ),
        (
            RotaryStyle::Halves,
            [-3.0, 2.0, 1.0, 4.0],
            [5.0, -6.0, 7.0, -8.0],
        ),
    ] {
        let tables = [&cos, &sin].map(|table| TensorRef::from_slice(table, [1, 3, 2]).unwrap());
        let rotary = Rotary::<Cpu>::new(ArrayRef::from_slice(&[1, 2]), tables, style);
        let mut cache = cpu.allocate(layout.page_stride).unwrap();
        let mut query = rope;
        let in_place = TensorMut::from_slice(&mut query, [2, 1, 4]).unwrap();
        cpu.rotate(&rotary, in_place).unwrap();
        assert_eq!(query, [first, second].concat()[..], "{style:?}");
        // The query is rotated from one tensor into another.
        let mut elsewhere = [0.0f32; 8];
        let query = (
            TensorRef::from_slice(&rope, [2, 1, 4]).unwrap(),
            TensorMut::from_slice(&mut elsewhere, [2, 1, 4]).unwrap(),
        );
        write(Some(query), &rotary, &mut cache).unwrap();
        assert_eq!(elsewhere, [first, second].concat()[..], "{style:?}");
        let rows: &[f32] = bytemuck::cast_slice(Cpu::bytes(&cache));
        assert_eq!(rows[3 * 6 + 2..][..4], first, "{style:?}");
        assert_eq!(rows[2..6], second, "{style:?}");
        let outside = Rotary::new(
            ArrayRef::from_slice(&[1, 3]),
            [rotary.cos, rotary.sin],
            rotary.style,
        );
        assert_eq!(
            write(None, &outside, &mut cache).unwrap_err().to_string(),
            "positions: given 3, accepted 0 and up below the tables' 3"
        );
    }
}

#[test]
fn out_of_memory() {
    // The size exceeds any address space.
    let wanted = usize::MAX / 4;
    let error = Cpu::new().allocate(wanted).err().unwrap();
    let as_said = matches!(
        error,
        Error::OutOfMemory { device: "cpu", bytes, free: None } if bytes == wanted as u64
    );
    assert!(as_said, "{error:?}");
    let said = error.to_string();
    let begin = format!("memory: given a need of {wanted} bytes on cpu, accepted ");
    assert!(said.starts_with(&begin), "{said}");
}

#[test]
fn bad_arguments_are_named() {
    let cpu = Cpu::new();
    mla_conformance::refusals(&cpu).unwrap();
    mla_conformance::refusals(&cpu.clone().portable()).unwrap();
}

#[test]
fn constant_views_stay_constant() {
    let mut bytes = [0u8; 96];
    let layout = Layout::contiguous(DType::F32, [1, 4, 6]);
    let view = TensorRef::<Cpu>::new(&bytes, layout).unwrap();
    let constant = view.constant(&Cpu::new()).unwrap();
    assert!(!view.is_constant() && constant.is_constant());
    let views = |it: TensorRef<'_, Cpu>| {
        let narrowed = it.narrow(1, 1..3).unwrap();
        let repeated = it.broadcast(0, 2).unwrap();
        [it.shorten(), it.transpose(0, 1), narrowed, repeated].map(|it| it.is_constant())
    };
    assert_eq!((views(view), views(constant)), ([false; 4], [true; 4]));
    let written = TensorMut::<Cpu>::new(&mut bytes, layout).unwrap();
    assert!(!written.as_ref().is_constant());
}
