//! Compares the helpers of the GPU with those of the CPU device, bit by bit if a format is exact,
//! and otherwise within rounding errors.
//!
//! Each operation is a function over any device, run on both devices with the same bytes. Inputs
//! are surrounded by NaN, and outputs are compared together with everything around them.

use mla_cpu::Cpu;
use mla_kernels::{Cuda, present_gpu, raw};
use mla_runtime::Result;
use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{
    ArrayRef, Base2TokensFirst, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Layout,
    LseConvention, LseLayout, LseRef, Memory, Natural, Rotary, TensorMut, TensorRef,
};
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::common::{
    cache_bytes, cache_mut, download, download_all, get, gpu, message, put, rng, rope_start,
    upload, upload_all,
};
use crate::tensors::{
    On, Tensor, assert_close, difference, indices, lse, lse_mut, normal, padded, pick, strided,
    strides, unit,
};

/// Makes a call on the GPU and on the CPU.
macro_rules! both {
    ($gpu:ident, $cpu:ident, $run:ident $(::<_, $convention:ty>)? ($($argument:expr),*)) => {(
        $run$(::<_, $convention>)?($gpu, $($argument),*).unwrap(),
        $run$(::<_, $convention>)?(&$cpu, $($argument),*).unwrap(),
    )};
}

// ---- Cache write --------------------------------------------------------------------------------

struct Write {
    latent: Tensor,
    rope: Tensor,
    slots: Vec<i64>,
    cache: Vec<u8>,
    layout: CacheLayout,
}

fn dims(latent: usize, rope: usize) -> MlaDims {
    MlaDims::new(latent as u32, HeadDims::new(128, rope as u32, 128))
}

// Draws dimensions, padding and pages of all kinds. Half of the cases have an engine's alignment.
fn random_cache(rng: &mut StdRng, format: KvFormat, pages: usize) -> CacheLayout {
    let (latent, rope) = if rng.random_bool(0.5) {
        pick(rng, &[(512, 64), (256, 32), (512, 0), (128, 64)])
    } else if !format.splits() {
        let multiple = format.latent_multiple() as usize;
        let latent = multiple * rng.random_range(1..640 / multiple + 1);
        (latent, rng.random_range(0..70))
    } else {
        (rng.random_range(1..700), rng.random_range(0..300))
    };
    let dims = dims(latent, rope);
    // Alignment of a row's values, of its f32 scales, or of the row.
    let element = match format.dtype() {
        Some(dtype) => dtype.bytes(),
        None if format.has_tensor_scale() => 1,
        None if format == KvFormat::Fp8PerToken => 16,
        None => 4,
    };
    let gap = |rng: &mut StdRng| pick(rng, &[0, 0, 16, 48, element, 3 * element]);
    let page_size = pick(rng, &[1, 5, 16, 64]);
    let strides = |rng: &mut StdRng, row: usize| {
        let row_stride = (row + gap(rng)).next_multiple_of(element);
        CacheStrides {
            page_stride: page_size * row_stride + gap(rng),
            row_stride,
        }
    };
    let is_split = format.splits() && rope > 0 && rng.random_bool(0.4);
    let rows = match is_split {
        true => strides(rng, format.latent_bytes(dims)),
        false => strides(rng, format.row_bytes(dims)),
    };
    let split_rope = is_split.then(|| strides(rng, format.rope_bytes(dims)));
    CacheLayout::contiguous(dims, format, pages, page_size)
        .with_page_stride(rows.page_stride)
        .with_row_stride(rows.row_stride)
        .with_split_rope(split_rope)
        .with_scale(if format == KvFormat::Fp8 {
            pick(rng, &[1.0, 0.25, 0.013, 3.7])
        } else {
            1.0
        })
}

// Views a cache in a buffer of `cache_bytes`.
fn cache_ref<D: Device>(bytes: D::Bytes<'_>, layout: CacheLayout) -> Result<CacheRef<'_, D>> {
    if !layout.is_split() {
        return CacheRef::new(bytes, layout);
    }
    let (start, len) = (rope_start(&layout), D::byte_len(bytes));
    let rope = D::byte_range(bytes, start..len);
    CacheRef::split(D::byte_range(bytes, 0..start), rope, layout)
}

// Draws different slots, a few of which are skipped.
fn random_slots(rng: &mut StdRng, slots: usize, tokens: usize) -> Vec<i64> {
    let mut all: Vec<i64> = (0..slots as i64).collect();
    all.shuffle(rng);
    all.truncate(tokens);
    for slot in &mut all {
        if rng.random_bool(0.1) {
            *slot = -1;
        }
    }
    all
}

fn random_write(rng: &mut StdRng, format: KvFormat, dtype: DType) -> Write {
    let pages = rng.random_range(1..40);
    let layout = random_cache(rng, format, pages);
    let tokens = rng.random_range(0..=layout.slots().min(70));
    let aligned = rng.random_bool(0.5);
    let (latent, rope) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    let shift = if aligned { 0 } else { rng.random_range(0..4) };
    let latent = padded(rng, dtype, [tokens, 1, latent], aligned);
    let rope = padded(rng, dtype, [tokens, 1, rope], aligned);
    let mut write = Write {
        latent: Tensor::random(rng, latent, shift),
        rope: Tensor::random(rng, rope, shift),
        slots: random_slots(rng, layout.slots(), tokens),
        cache: vec![0; cache_bytes(&layout)],
        layout,
    };
    rng.fill(&mut write.cache[..]);
    write
}

fn run_write<D: Device>(device: &D, case: &Write) -> Result<Vec<u8>> {
    let (latent, rope) = (On::new(device, &case.latent)?, On::new(device, &case.rope)?);
    let slots = upload_all(device, &case.slots);
    let mut cache = upload(device, &case.cache)?;
    device.write_cache(
        latent.read()?,
        rope.read()?,
        indices::<D, i64>(&slots, case.slots.len())?,
        cache_mut(D::bytes_mut(&mut cache), case.layout)?,
    )?;
    download(device, &cache)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn cache_rows_are_written_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for format in KvFormat::ALL.iter().copied() {
        for dtype in DType::ALL.iter().copied() {
            for seed in 0..12 {
                let case = random_write(&mut rng(seed), format, dtype);
                let (got, want) = both!(gpu, cpu, run_write(&case));
                let what = format!("{dtype} to {format}, seed {seed}, {:?}", case.layout);
                assert_eq!(difference(&got, &want), None, "{what}");
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn every_finite_16_bit_value_is_quantised_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for dtype in [DType::BF16, DType::F16] {
        for (format, scale) in [
            (KvFormat::Fp8, 1.0),
            (KvFormat::Fp8, 0.013),
            (KvFormat::Fp8, 1.0 / 3.0),
            (KvFormat::Fp8, 7.7e5),
            (KvFormat::Fp8, 2.5e-7),
            (KvFormat::Fp8DsMla, 1.0),
            (KvFormat::Fp8PerToken, 1.0),
            (KvFormat::BF16, 1.0),
            (KvFormat::F16, 1.0),
            (KvFormat::F32, 1.0),
        ] {
            let tokens = 128;
            let mut layout = CacheLayout::contiguous(dims(512, 64), format, 2, 64);
            layout.scale = scale;
            let mut latent = Tensor::poison(Layout::contiguous(dtype, [tokens, 1, 512]), 0);
            // These are all 65536 patterns in numeric order, so that neighbours in a group have
            // similar sizes. NaN is replaced by 1, since the formats store NaN differently.
            for (pattern, bytes) in latent.bytes.chunks_exact_mut(2).enumerate() {
                bytes.copy_from_slice(&(pattern as u16).to_le_bytes());
                if get(dtype, bytes, 0).is_nan() {
                    put(dtype, bytes, 0, 1.0);
                }
            }
            let rope = Tensor::random(&mut rng(1), Layout::contiguous(dtype, [tokens, 1, 64]), 0);
            let slots = (0..tokens as i64).rev().collect();
            let cache = vec![0; cache_bytes(&layout)];
            let case = Write {
                latent,
                rope,
                slots,
                cache,
                layout,
            };
            let (got, want) = both!(gpu, cpu, run_write(&case));
            let what = format!("{dtype} to {format} scale {scale}");
            assert_eq!(difference(&got, &want), None, "{what}");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn slots_outside_the_cache_are_skipped() {
    let gpu = &*gpu();
    let mut case = random_write(&mut rng(3), KvFormat::BF16, DType::BF16);
    let end = case.layout.slots() as i64;
    for (i, slot) in case.slots.iter_mut().enumerate() {
        *slot = [
            -1,
            -2,
            i64::MIN,
            end,
            end + 1,
            i64::MAX,
            i64::from(i32::MAX) + 1,
            1 << 40,
        ][i % 8];
    }
    assert!(!case.slots.is_empty());
    assert_eq!(
        difference(&run_write(gpu, &case).unwrap(), &case.cache),
        None
    );
}

// ---- Rotary embedding ---------------------------------------------------------------------------

// Rotates pairs in f32, one product after the other, and rounds to the dtype. This is the
// reference.
fn turn(tensor: &mut Tensor, cos: &Tensor, sin: &Tensor, positions: &[i64], style: RotaryStyle) {
    let before = tensor.clone();
    let half = before.layout.shape[2] / 2;
    tensor.fill(|[token, head, element], _| {
        let (pair, second) = match style {
            RotaryStyle::Interleaved => (element / 2, element % 2 == 1),
            RotaryStyle::Halves => (element % half, element >= half),
        };
        let (first, other) = match style {
            RotaryStyle::Interleaved => (2 * pair, 2 * pair + 1),
            RotaryStyle::Halves => (pair, pair + half),
        };
        let (a, b) = (
            before.at([token, head, first]),
            before.at([token, head, other]),
        );
        let position = positions[token] as usize;
        let (cos, sin) = (cos.at([0, position, pair]), sin.at([0, position, pair]));
        if second {
            b * cos + a * sin
        } else {
            a * cos - b * sin
        }
    });
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn a_fused_rotation_is_one_beforehand() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for seed in 0..60 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, DType::ALL);
        let style = pick(rng, &[RotaryStyle::Interleaved, RotaryStyle::Halves]);
        let mut case = loop {
            let format = pick(rng, KvFormat::ALL);
            let case = random_write(rng, format, dtype);
            let rope = case.rope.layout.shape[2];
            if rope > 0 && rope.is_multiple_of(2) && !case.slots.is_empty() {
                break case;
            }
        };
        let [tokens, _, width] = case.rope.layout.shape;
        let aligned = rng.random_bool(0.5);
        let shape = [1, 50, width / 2];
        let slack = rng.random_range(0..3) * if aligned { 4 } else { 1 };
        let table = strided(DType::F32, shape, [0, width / 2 + slack, 1]);
        let (mut cos, mut sin) = (Tensor::poison(table, 0), Tensor::poison(table, 0));
        let angle = |i: [usize; 3]| i[1] as f32 * 0.37f32.powi(i[2] as i32);
        cos.fill(|i, _| angle(i).cos());
        sin.fill(|i, _| angle(i).sin());
        let positions: Vec<i64> = (0..tokens).map(|_| rng.random_range(0..50)).collect();
        let heads = rng.random_range(1..20);
        let layout = padded(rng, dtype, [tokens, heads, width], aligned);
        let query = Tensor::random(rng, layout, 0);

        let on_gpu = || -> Result<_> {
            let (latent, rope) = (On::new(gpu, &case.latent)?, On::new(gpu, &case.rope)?);
            let (cos, sin) = (On::new(gpu, &cos)?, On::new(gpu, &sin)?);
            let (mut query, source) = (On::new(gpu, &query)?, On::new(gpu, &query)?);
            let mut elsewhere = On::new(gpu, &Tensor::poison(layout, 0))?;
            let slots = upload_all(gpu, &case.slots);
            let positions = upload_all(gpu, &positions);
            let rotary = Rotary::new(
                indices::<Cuda, i64>(&positions, tokens)?,
                [cos.read()?, sin.read()?],
                style,
            );
            gpu.rotate(&rotary, query.write()?)?;
            let mut caches = Vec::new();
            for query in [None, Some((source.read()?, elsewhere.write()?))] {
                let mut cache = upload(gpu, &case.cache)?;
                gpu.write_cache_rotated(
                    latent.read()?,
                    rope.read()?,
                    &rotary,
                    query,
                    indices::<Cuda, i64>(&slots, tokens)?,
                    cache_mut(cache.bytes_mut(), case.layout)?,
                )?;
                caches.push(download(gpu, &cache)?);
            }
            Ok((caches, query.host(gpu)?, elsewhere.host(gpu)?))
        };
        let (caches, in_place, elsewhere) = on_gpu().unwrap();
        let mut turned = query.clone();
        turn(&mut turned, &cos, &sin, &positions, style);
        turn(&mut case.rope, &cos, &sin, &positions, style);
        let want = run_write(&cpu, &case).unwrap();
        let what = format!("{dtype} {style:?} {:?}, seed {seed}", case.layout);
        for got in caches {
            assert_eq!(difference(&got, &want), None, "cache, {what}");
        }
        assert_eq!(
            difference(&in_place.bytes, &turned.bytes),
            None,
            "query, {what}"
        );
        assert_eq!(
            elsewhere.values(),
            turned.values(),
            "query elsewhere, {what}"
        );
    }
}

// ---- Gather -------------------------------------------------------------------------------------

struct Gather {
    cache: Vec<u8>,
    layout: CacheLayout,
    table: Vec<i32>,
    max_pages: usize,
    token_starts: Vec<i32>,
    row_starts: Vec<i32>,
    latent: Tensor,
    rope: Tensor,
}

impl Gather {
    fn rows(&self) -> usize {
        *self.row_starts.last().unwrap() as usize
    }
}

// Makes segments over shuffled pages, some of them empty.
//
// Slots that no segment reads are NaN in every format, and so are the scales in a page's padding.
// Table entries after a segment are arbitrary numbers.
fn random_gather(rng: &mut StdRng, format: KvFormat, dtype: DType) -> Gather {
    let segments = rng.random_range(1..80);
    let layout = random_cache(rng, format, 1);
    let lens: Vec<(usize, usize)> = (0..segments)
        .map(|_| {
            let len = if rng.random_bool(0.3) {
                0
            } else {
                rng.random_range(1..60)
            };
            (rng.random_range(0..3 * layout.page_size), len)
        })
        .collect();
    let more = rng.random_range(0..5);
    gather_of(rng, layout, dtype, &lens, more)
}

// Makes a gather of segments from their first tokens and lengths, with room for some more rows.
fn gather_of(
    rng: &mut StdRng,
    mut layout: CacheLayout,
    dtype: DType,
    lens: &[(usize, usize)],
    more: usize,
) -> Gather {
    let page_size = layout.page_size;
    let max_pages = lens
        .iter()
        .map(|(start, len)| (start + len).div_ceil(page_size))
        .max()
        .unwrap()
        .max(1);
    let needed: usize = lens
        .iter()
        .map(|(start, len)| (start + len).div_ceil(page_size))
        .sum();
    let pages = needed + rng.random_range(1..5);
    layout.pages = pages;
    let mut free: Vec<i32> = (0..pages as i32).collect();
    free.shuffle(rng);
    let mut table = Vec::new();
    let (mut row_starts, mut token_starts) = (vec![0], Vec::new());
    let mut read = vec![false; layout.slots()];
    for (start, len) in lens {
        let used = (start + len).div_ceil(page_size);
        let own: Vec<i32> = free.drain(..used).collect();
        for token in *start..start + len {
            read[own[token / page_size] as usize * page_size + token % page_size] = true;
        }
        table.extend(&own);
        table.extend((used..max_pages).map(|_| pick(rng, &[i32::MIN, -1, 2147480000, i32::MAX])));
        token_starts.push(*start as i32);
        row_starts.push(row_starts.last().unwrap() + *len as i32);
    }

    // The CPU writes the rows.
    let slots: Vec<i64> = (0..layout.slots())
        .filter(|slot| read[*slot])
        .map(|slot| slot as i64)
        .collect();
    let (latent, rope) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    let rows = |width| Layout::contiguous(DType::F32, [slots.len(), 1, width]);
    let write = Write {
        latent: Tensor::random(rng, rows(latent), 0),
        rope: Tensor::random(rng, rows(rope), 0),
        slots,
        cache: vec![0xff; cache_bytes(&layout)],
        layout,
    };
    let cache = run_write(&Cpu::new(), &write).unwrap();

    let total = *row_starts.last().unwrap() as usize;
    let room = total + more;
    let aligned = more == 0 || rng.random_bool(0.5);
    let shift = if aligned { 0 } else { rng.random_range(0..4) };
    let latent = padded(rng, dtype, [room, 1, latent], aligned);
    let rope = padded(rng, dtype, [room, 1, rope], aligned);
    Gather {
        cache,
        layout,
        table,
        max_pages,
        token_starts,
        row_starts,
        latent: Tensor::poison(latent, shift),
        rope: Tensor::poison(rope, shift),
    }
}

fn run_gather<D: Device>(device: &D, case: &Gather) -> Result<(Vec<u8>, Vec<u8>)> {
    run_expansion(device, case, None)
}

// Gathers rows, and multiplies them by weights.
fn run_expansion<D: Device>(
    device: &D,
    case: &Gather,
    expansion: Option<(&On<D>, &mut On<D>)>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let cache = upload(device, &case.cache)?;
    let table = upload_all(device, &case.table);
    let token_starts = upload_all(device, &case.token_starts);
    let row_starts = upload_all(device, &case.row_starts);
    let (mut latent, mut rope) = (On::new(device, &case.latent)?, On::new(device, &case.rope)?);
    let segments = case.token_starts.len();
    let cache = cache_ref(D::bytes(&cache), case.layout)?;
    let rows = GatherRows::new(
        BlockTable::new(indices(&table, case.table.len())?, segments, case.max_pages)?,
        indices(&token_starts, segments)?,
        indices(&row_starts, segments + 1)?,
        case.rows(),
    );
    match expansion {
        None => device.gather_cache(cache, rows, latent.write()?, rope.write()?)?,
        Some((weights, to)) => {
            let gathered = (latent.write()?, rope.write()?);
            let weights = weights.read()?.constant(device)?;
            device.gather_cache_and_expand(cache, rows, gathered, weights, to.write()?)?;
        }
    }
    Ok((latent.download(device)?, rope.download(device)?))
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn cache_rows_are_gathered_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for format in KvFormat::ALL.iter().copied() {
        for dtype in DType::ALL.iter().copied() {
            for seed in 0..12 {
                let case = random_gather(&mut rng(seed), format, dtype);
                let (got, want) = both!(gpu, cpu, run_gather(&case));
                let what = format!("{format} to {dtype}, seed {seed}, {:?}", case.layout);
                assert_eq!(difference(&got.0, &want.0), None, "latent, {what}");
                assert_eq!(difference(&got.1, &want.1), None, "rope, {what}");
            }
        }
    }
}

/// Gathers rows and multiplies them by weights, in one operation or in two. Returns the product and
/// the rotary parts.
fn expanded(gpu: &Cuda, case: &Gather, weights: &Tensor, in_two: bool) -> (Tensor, Vec<u8>) {
    let [_, _, columns] = weights.layout.shape;
    let product = Layout::contiguous(weights.layout.dtype, [1, case.rows(), columns]);
    let weights = On::new(gpu, weights).unwrap();
    let mut to = On::new(gpu, &Tensor::poison(product, 0)).unwrap();
    let rope = if in_two {
        let (bytes, rope) = run_gather(gpu, case).unwrap();
        let latent = Tensor {
            bytes,
            ..case.latent.clone()
        };
        let latent = On::new(gpu, &latent).unwrap();
        let a = latent.read().unwrap().transpose(0, 1);
        let constant = weights.read().and_then(|it| it.constant(gpu)).unwrap();
        gpu.gemm(a, constant, to.write().unwrap()).unwrap();
        rope
    } else {
        run_expansion(gpu, case, Some((&weights, &mut to)))
            .unwrap()
            .1
    };
    (to.host(gpu).unwrap(), rope)
}

/// Checks that a batch-invariant device expands rows to the same bits, whatever the number of rows
/// and of segments, and whether they come from pages or from a tensor.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn batch_invariant_rows_are_expanded_alike() {
    let problem = Problem::new(dims(512, 64), 16, DType::BF16);
    let gpu = &*gpu();
    let device = &gpu.batch_invariant(&problem).unwrap();
    for seed in 0..16 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, &[DType::BF16, DType::F16]);
        let page_size = pick(rng, &[64, 128, 192]);
        let layout = CacheLayout::contiguous(dims(512, 64), KvFormat::of(dtype), 1, page_size);
        let weights = strided(dtype, [1, 512, 512], [512 * 512, 1, 512]);
        let weights = Tensor::random(rng, weights, 0);
        let segments = pick(rng, &[1, 2, 31, 32, 33, 40]);
        let lens: Vec<(usize, usize)> = (0..segments)
            .map(|_| {
                let start = pick(rng, &[0, 0, 64, page_size, 37]);
                let max = 1 + 1200 / segments;
                (start, rng.random_range(0..max))
            })
            .chain([(0, 1)])
            .collect();
        let case = gather_of(rng, layout, dtype, &lens, 0);
        let run = |device, in_two| expanded(device, &case, &weights, in_two).0;
        let (one, two) = (run(device, false), run(device, true));
        assert_eq!(
            difference(&one.bytes, &two.bytes),
            None,
            "seed {seed}, {} rows of {segments} segments",
            case.rows()
        );
        // Each row alone, as a row of a tensor.
        let latent = run_gather(device, &case).unwrap().0;
        let ([_, _, columns], pitch) = (weights.layout.shape, case.latent.layout.strides[0] * 2);
        for row in [0, case.rows() / 2, case.rows() - 1] {
            let layout = |width| Layout::contiguous(dtype, [1, 1, width]);
            // A lone row may have any stride.
            let mut alone = layout(512);
            alone.strides = [1; 3];
            let latent = Tensor {
                bytes: latent[row * pitch..row * pitch + 1024].to_vec(),
                offset: 0,
                layout: alone,
            };
            let latent = On::new(device, &latent).unwrap();
            let weights = On::new(device, &weights).unwrap();
            let mut to = On::new(device, &Tensor::poison(layout(columns), 0)).unwrap();
            let [a, b] = [latent.read().unwrap(), weights.read().unwrap()];
            device.gemm(a, b, to.write().unwrap()).unwrap();
            let alone = to.download(device).unwrap();
            let whole = &one.bytes[row * columns * 2..(row + 1) * columns * 2];
            assert_eq!(difference(&alone, whole), None, "seed {seed}, row {row}");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn cached_rows_are_expanded_as_gathered_rows_are() {
    let gpu = &*gpu();
    for seed in 0..24 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, &[DType::BF16, DType::F16]);
        let format = KvFormat::of(dtype);
        let page_size = pick(rng, &[64, 128, 192]);
        let layout = match seed % 3 {
            0 => CacheLayout::split(dims(512, 64), format, 1, page_size),
            _ => CacheLayout::contiguous(dims(512, 64), format, 1, page_size),
        };
        let lens: Vec<(usize, usize)> = (0..rng.random_range(1..9))
            .map(|_| {
                let start = pick(rng, &[0, 0, 64, page_size, 37]);
                let len = pick(rng, &[0, 1, 64, 127, 128, 129, 500, 1100]);
                (start, len + rng.random_range(0..3))
            })
            // The batch has more rows than the kernel's minimum.
            .chain([(0, 1100)])
            .collect();
        let case = gather_of(rng, layout, dtype, &lens, 0);
        let (rows, columns) = (case.rows(), 256 * rng.random_range(1..4));
        let weights = strided(dtype, [1, 512, columns], [512 * columns, 1, 512]);
        let weights = Tensor::random(rng, weights, 0);
        let run = |alone| expanded(gpu, &case, &weights, alone);
        let (want, want_rope) = run(true);
        let (got, rope) = run(false);
        assert_eq!(difference(&rope, &want_rope), None, "rope, seed {seed}");
        let (again, _) = run(false);
        assert_eq!(
            difference(&again.bytes, &got.bytes),
            None,
            "bits, seed {seed}"
        );
        let what = format!("seed {seed}, {rows} x {columns}");
        let near = |got: f32, want: f32| (got - want).abs() <= 0.02 + 0.01 * want.abs();
        assert_close(&got.values(), &want.values(), near, &what);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn every_e4m3_code_is_dequantised_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for dtype in DType::ALL.iter().copied() {
        for scale in [1.0, 0.013, 448.0, 3.1e-5] {
            let mut layout = CacheLayout::contiguous(dims(256, 0), KvFormat::Fp8, 1, 1);
            layout.scale = scale;
            let tensor = |width| Tensor::poison(Layout::contiguous(dtype, [1, 1, width]), 0);
            let case = Gather {
                // The two codes of NaN are left out, since the result may be any NaN.
                cache: (0..=255u8)
                    .map(|code| if code & 0x7f == 0x7f { 0 } else { code })
                    .collect(),
                layout,
                table: vec![0],
                max_pages: 1,
                token_starts: vec![0],
                row_starts: vec![0, 1],
                latent: tensor(256),
                rope: tensor(0),
            };
            let (got, want) = both!(gpu, cpu, run_gather(&case));
            assert_eq!(difference(&got.0, &want.0), None, "{dtype}, scale {scale}");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn a_page_that_does_not_exist_gives_nan() {
    let gpu = &*gpu();
    let mut case = random_gather(&mut rng(5), KvFormat::BF16, DType::BF16);
    let pages = case.layout.pages as i32;
    for (i, entry) in case.table.iter_mut().enumerate() {
        *entry = [-1, i32::MIN, pages, i32::MAX][i % 4];
    }
    case.latent.fill(|_, _| 0.0);
    let (latent, _) = run_gather(gpu, &case).unwrap();
    let latent = Tensor {
        bytes: latent,
        ..case.latent.clone()
    };
    let values = latent.values();
    let (gathered, rest) = values.split_at(case.rows() * case.layout.dims.latent as usize);
    assert!(!gathered.is_empty() && gathered.iter().all(|value| value.is_nan()));
    assert!(rest.iter().all(|value| *value == 0.0));
}

// ---- Merge --------------------------------------------------------------------------------------

struct Merge {
    out: Tensor,
    lse: Vec<f32>,
    lse_layout: LseLayout,
    other: Tensor,
    other_lse: Vec<f32>,
    other_lse_layout: LseLayout,
}

fn random_lse(rng: &mut StdRng, layout: LseLayout) -> Vec<f32> {
    (0..layout.heads * layout.row_stride)
        .map(|_| match rng.random_range(0..10) {
            0 => f32::NEG_INFINITY,
            1 => f32::INFINITY,
            2 => 50.0 * normal(rng),
            _ => 3.0 + normal(rng),
        })
        .collect()
}

fn random_merge(rng: &mut StdRng, dtype: DType) -> Merge {
    let (tokens, heads) = (rng.random_range(1..70), rng.random_range(1..40));
    let width = if rng.random_bool(0.6) {
        pick(rng, &[128, 512, 64, 256, 8])
    } else {
        rng.random_range(1..600)
    };
    let shape = [tokens, heads, width];
    let aligned = rng.random_bool(0.5);
    let out = padded(rng, dtype, shape, aligned);
    let order = pick(rng, &[[0, 1, 2], [1, 0, 2]]);
    let other = Layout {
        strides: strides(rng, shape, order, 16, if aligned { 8 } else { 1 }),
        ..out
    };
    let lse_layout = |rng: &mut StdRng| LseLayout {
        heads,
        tokens,
        row_stride: tokens + rng.random_range(0..9),
    };
    let (lse_layout, other_lse_layout) = (lse_layout(rng), lse_layout(rng));
    let mut merge = Merge {
        out: Tensor::random(rng, out, 0),
        lse: random_lse(rng, lse_layout),
        lse_layout,
        other: Tensor::random(rng, other, 0),
        other_lse: random_lse(rng, other_lse_layout),
        other_lse_layout,
    };
    // Rows that attended to nothing may contain anything.
    for (tensor, lse, layout) in [
        (&mut merge.out, &merge.lse, lse_layout),
        (&mut merge.other, &merge.other_lse, other_lse_layout),
    ] {
        let before = tensor.clone();
        tensor.fill(|at, _| {
            let lse = lse[at[1] * layout.row_stride + at[0]];
            if lse.is_infinite() {
                f32::NAN
            } else {
                before.at(at)
            }
        });
    }
    merge
}

fn run_merge<D: Device>(device: &D, case: &Merge) -> Result<(Tensor, Vec<f32>)> {
    let (mut out, other) = (On::new(device, &case.out)?, On::new(device, &case.other)?);
    let mut lse_buffer = upload_all(device, &case.lse);
    let other_lse = upload_all(device, &case.other_lse);
    device.merge(
        out.write()?,
        lse_mut::<D>(&mut lse_buffer, case.lse_layout)?,
        other.read()?,
        lse(&other_lse, case.other_lse_layout)?,
    )?;
    Ok((out.host(device)?, download_all(device, &lse_buffer)))
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn merges_agree_with_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for dtype in DType::ALL.iter().copied() {
        // The error is a unit in the last place of numbers up to 2, plus the weights' own error.
        let unit = unit(dtype, 1e-6);
        for seed in 0..40 {
            let case = random_merge(&mut rng(seed), dtype);
            let ((got, got_lse), (want, want_lse)) = both!(gpu, cpu, run_merge(&case));
            let what = format!("{dtype}, seed {seed}, {}", case.out.layout);
            let near = |got: f32, want: f32| {
                got == want || (got - want).abs() <= 1e-6 * want.abs().max(1.0)
            };
            assert_close(&got_lse, &want_lse, near, &format!("lse, {what}"));
            let near = |got: f32, want: f32| (got - want).abs() <= unit * want.abs().max(0.25);
            assert_close(&got.values(), &want.values(), near, &format!("out, {what}"));
            // Nothing between the rows is written.
            let mut gaps = case.out.clone();
            gaps.fill(|at, _| got.at(at));
            assert_eq!(difference(&gaps.bytes, &got.bytes), None, "{what}");
            let LseLayout {
                tokens, row_stride, ..
            } = case.lse_layout;
            let rows = got_lse.chunks(row_stride).zip(case.lse.chunks(row_stride));
            for (got, before) in rows {
                assert_eq!(got[tokens..], before[tokens..], "{what}");
            }
        }
    }
}

/// Scales the outputs of a merge by sinks, with the merge's log-sum-exp, and by a gate of
/// `columns`.
fn run_outputs<D: Device>(device: &D, case: &Merge, columns: usize) -> Result<Tensor> {
    // An output of no keys is 0, and stays 0 for any sink.
    let mut rows = case.out.clone();
    rows.fill(|at, _| match case.out.at(at) {
        value if value.is_nan() => 0.0,
        value => value,
    });
    let (mut out, gate) = (On::new(device, &rows)?, On::new(device, &case.other)?);
    let lse_buffer = upload_all(device, &case.lse);
    let [_, heads, _] = case.out.layout.shape;
    let sink = |head: usize| match head % 5 {
        0 => f32::INFINITY,
        1 => f32::NEG_INFINITY,
        _ => head as f32 / 4.0 - 3.0,
    };
    let sinks: Vec<f32> = (0..heads).map(sink).collect();
    let sinks = upload_all(device, &sinks);
    let of_sinks = (
        ArrayRef::new(D::bytes(&sinks), heads)?,
        lse(&lse_buffer, case.lse_layout)?,
    );
    let gate = match columns {
        0 => None,
        1 => Some(gate.read()?.narrow(2, 0..1)?),
        _ => Some(gate.read()?),
    };
    device.scale_outputs(out.write()?, Some(of_sinks), gate)?;
    out.host(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn scaled_outputs_agree_with_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for dtype in DType::ALL.iter().copied() {
        let unit = unit(dtype, 1e-6);
        for seed in 0..40 {
            let case = random_merge(&mut rng(seed), dtype);
            for columns in [0, 1, 2] {
                let (got, want) = both!(gpu, cpu, run_outputs(&case, columns));
                let what = format!("{dtype}, seed {seed}, gate {columns}, {}", case.out.layout);
                let near = |got: f32, want: f32| {
                    let close = (got - want).abs() <= unit * want.abs().max(0.25);
                    close || (got.is_nan() && want.is_nan())
                };
                assert_close(&got.values(), &want.values(), near, &what);
            }
        }
    }
}

// ---- Log-sum-exps -------------------------------------------------------------------------------

fn run_convert<D: Device, C: LseConvention>(
    device: &D,
    (from, from_layout): (&[f32], LseLayout),
    to_layout: LseLayout,
) -> Result<Vec<u8>> {
    let from = upload_all(device, from);
    let poison = vec![0xff; 4 * to_layout.heads * to_layout.row_stride];
    let mut to = upload(device, &poison)?;
    device.convert_lse(
        lse::<D, C>(&from, from_layout)?,
        lse_mut::<D>(&mut to, to_layout)?,
    )?;
    download(device, &to)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn log_sum_exps_are_converted_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for seed in 0..30 {
        let rng = &mut rng(seed);
        let (tokens, heads) = (rng.random_range(1..200), rng.random_range(1..140));
        let to = LseLayout {
            heads,
            tokens,
            row_stride: tokens + rng.random_range(0..5),
        };
        let from = LseLayout {
            row_stride: heads + rng.random_range(0..5),
            ..to
        };
        let values: Vec<f32> = (0..tokens * from.row_stride).map(|_| normal(rng)).collect();
        let (got, want) = both!(
            gpu,
            cpu,
            run_convert::<_, Base2TokensFirst>((&values, from), to)
        );
        assert_eq!(difference(&got, &want), None, "base 2, seed {seed}");
        let from = LseLayout {
            row_stride: tokens + rng.random_range(0..5),
            ..to
        };
        let values = random_lse(rng, from);
        let (got, want) = both!(gpu, cpu, run_convert::<_, Natural>((&values, from), to));
        assert_eq!(difference(&got, &want), None, "natural, seed {seed}");
    }
}

// ---- Copies -------------------------------------------------------------------------------------

fn run_copy<D: Device>(device: &D, from: Option<&Tensor>, to: &Tensor) -> Result<Vec<u8>> {
    let mut out = On::new(device, to)?;
    match from {
        Some(from) => device.copy(On::new(device, from)?.read()?, out.write()?)?,
        None => device.clear(out.write()?)?,
    }
    out.download(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn copies_agree_with_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    let orders = [[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1], [1, 2, 0]];
    for seed in 0..150 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, DType::ALL);
        let shape = [0; 3].map(|_| pick(rng, &[1, 2, 7, 8, 16, 33, 64]));
        let (slack, multiple) = pick(rng, &[(0, 1), (5, 1), (16, 8)]);
        let order = pick(rng, &orders);
        let to = strided(dtype, shape, strides(rng, shape, order, slack, multiple));
        let order = pick(rng, &orders);
        let mut from = strided(dtype, shape, strides(rng, shape, order, slack, multiple));
        if rng.random_bool(0.3) {
            from.strides[rng.random_range(0..2)] = 0;
        }
        let shift = pick(rng, &[0, 0, 1, 4]);
        let from = Tensor::random(rng, from, shift);
        let shift = pick(rng, &[0, 0, 1, 4]);
        let to = Tensor::poison(to, shift);
        for source in [Some(&from), None] {
            let (got, want) = both!(gpu, cpu, run_copy(source, &to));
            let what = format!("seed {seed}, {} to {}", from.layout, to.layout);
            assert_eq!(difference(&got, &want), None, "{what}");
        }
    }
}

fn run_scatter<D: Device>(
    device: &D,
    from: &Tensor,
    places: &[i64],
    to: &Tensor,
) -> Result<Vec<u8>> {
    let mut out = On::new(device, to)?;
    let index = upload_all(device, places);
    let index = ArrayRef::new(D::bytes(&index), places.len())?;
    device.scatter_rows(On::new(device, from)?.read()?, index, out.write()?)?;
    out.download(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn rows_are_scattered_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for seed in 0..150 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, DType::ALL);
        let [heads, width] = [0; 2].map(|_| pick(rng, &[1, 2, 7, 8, 16, 33, 192]));
        let [rows, to_rows] = [0; 2].map(|_| pick(rng, &[0, 1, 5, 64, 300]));
        let (slack, multiple) = pick(rng, &[(0, 1), (5, 1), (16, 8)]);
        // The tokens of a log-sum-exp are contiguous.
        let order = pick(rng, &[[0, 1, 2], [0, 1, 2], [2, 1, 0], [1, 0, 2]]);
        let tensor = |rng: &mut StdRng, rows| {
            let shape = [rows, heads, width];
            let strides = strides(rng, shape, order, slack, multiple);
            let layout = strided(dtype, shape, strides);
            let shift = pick(rng, &[0, 0, 1, 4]);
            (layout, shift)
        };
        let (layout, shift) = tensor(rng, rows);
        let from = Tensor::random(rng, layout, shift);
        let (layout, shift) = tensor(rng, to_rows);
        let to = Tensor::poison(layout, shift);
        // Some rows have no place, and some places belong to rows that do not exist.
        let mut places: Vec<i64> = (0..to_rows as i64).chain([-1, -7, 1 << 40]).collect();
        places.resize(places.len().max(rows), -1);
        places.shuffle(rng);
        places.truncate(rows);
        let (got, want) = both!(gpu, cpu, run_scatter(&from, &places, &to));
        let what = format!("seed {seed}, {} to {}", from.layout, to.layout);
        assert_eq!(difference(&got, &want), None, "{what}");
    }
}

fn run_dequantize<D: Device>(
    device: &D,
    (codes, scales): (&[u8], &[f32]),
    (shape, first_row): ([usize; 2], usize),
    to: &Tensor,
) -> Result<Vec<u8>> {
    let mut out = On::new(device, to)?;
    let codes = upload(device, codes)?;
    let on_device = upload_all(device, scales);
    let scales = ArrayRef::new(D::bytes(&on_device), scales.len())?;
    let blocks = Fp8Blocks::from_row(D::bytes(&codes), scales, shape, first_row)?;
    device.dequantize_blocks(blocks, out.write()?)?;
    out.download(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn block_fp8_is_dequantised_as_on_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for seed in 0..60 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, DType::ALL);
        let rows = pick(rng, &[1, 100, 128, 129, 300]);
        let columns = pick(rng, &[1, 7, 128, 160, 512, 513]);
        let first_row = pick(rng, &[0, 0, 1, 48, 127]);
        let blocks = [first_row + rows, columns].map(|extent: usize| extent.div_ceil(128));
        // These are all codes except NaN, whose bits are arbitrary.
        let codes: Vec<u8> = (0..rows * columns)
            .map(|_| rng.random_range(0..0x7fu8) | rng.random_range(0..2u8) << 7)
            .collect();
        let scales: Vec<f32> = (0..blocks[0] * blocks[1])
            .map(|_| normal(rng) / 64.0)
            .collect();
        let stride = columns + pick(rng, &[0, 0, 3, 8]);
        let layout = strided(dtype, [1, rows, columns], [rows * stride, stride, 1]);
        let shift = pick(rng, &[0, 0, 1, 4]);
        let to = Tensor::poison(layout, shift);
        let (matrix, place) = ((&codes[..], &scales[..]), ([rows, columns], first_row));
        let (got, want) = both!(gpu, cpu, run_dequantize(matrix, place, &to));
        let what = format!("seed {seed}, [{rows}, {columns}] from {first_row} to {layout}");
        assert_eq!(difference(&got, &want), None, "{what}");
    }
}

// ---- Products -----------------------------------------------------------------------------------

fn run_gemm<D: Device>(device: &D, [a, b, c]: [&Tensor; 3]) -> Result<Tensor> {
    let (a, b, mut c) = (
        On::new(device, a)?,
        On::new(device, b)?,
        On::new(device, c)?,
    );
    device.gemm(a.read()?, b.read()?, c.write()?)?;
    c.host(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn products_agree_with_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    for seed in 0..80 {
        let rng = &mut rng(seed);
        let dtype = pick(rng, DType::ALL);
        let batch = pick(rng, &[1, 3, 16]);
        let [m, n, k] = [0; 3].map(|_| pick(rng, &[1, 2, 8, 17, 64, 128]));
        let orders = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 0, 1]];
        let mut tensor = |shape: [usize; 3], repeat: bool| {
            let order = pick(rng, &orders);
            let (slack, multiple) = pick(rng, &[(0, 1), (9, 1), (16, 8)]);
            let mut strides = strides(rng, shape, order, slack, multiple);
            if repeat {
                strides[0] = 0;
            }
            Tensor::random(rng, strided(dtype, shape, strides), 0)
        };
        let a = tensor([batch, m, k], seed % 5 == 0);
        let b = tensor([batch, k, n], seed % 7 == 0);
        let c = tensor([batch, m, n], false);
        let (got, want) = both!(gpu, cpu, run_gemm([&a, &b, &c]));
        let unit = unit(dtype, 2f32.powi(-18));
        let what = format!("seed {seed}: {} · {} = {}", a.layout, b.layout, c.layout);
        let near = |got: f32, want: f32| {
            (got - want).abs() <= unit * want.abs().max((k as f32).sqrt() / 4.0)
        };
        assert_close(&got.values(), &want.values(), near, &what);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn an_empty_inner_axis_gives_zeros() {
    let gpu = &*gpu();
    let tensor = |shape| Tensor::poison(Layout::contiguous(DType::BF16, shape), 0);
    let tensors = [[2, 3, 0], [2, 0, 4], [2, 3, 4]].map(tensor);
    let c = run_gemm(gpu, tensors.each_ref()).unwrap();
    assert_eq!(c.values(), [0.0; 24]);
}

// ---- Size ---------------------------------------------------------------------------------------

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn offsets_go_beyond_31_bits_of_elements() -> Result<()> {
    let gpu = &*gpu();
    // There are 4.9 GB of bf16 rows. The last elements are beyond 2^31, and their bytes beyond
    // 2^32.
    let layout = CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, 66_000, 64);
    assert!(cache_bytes(&layout) > (1 << 32) + (1 << 29) && cache_bytes(&layout) / 2 > 1 << 31);
    let mut cache = gpu.allocate(cache_bytes(&layout))?;
    let last = layout.slots() as i64 - 1;
    // An offset that is cut to 32 bits would lead to these rows, so they are checked as well.
    let cut = |bits: u32| last - (1i64 << bits) / 1152;
    let slots = [last, 0, last - 64 * 1000, (1 << 31) / 1152 + 1];
    let untouched = [cut(32), cut(32) - 1, cut(31), cut(31) - 1, 1, last - 1];
    let rng = &mut rng(9);
    let latent = Tensor::random(rng, Layout::contiguous(DType::BF16, [4, 1, 512]), 0);
    let rope = Tensor::random(rng, Layout::contiguous(DType::BF16, [4, 1, 64]), 0);
    let (on_latent, on_rope) = (On::new(gpu, &latent)?, On::new(gpu, &rope)?);
    let on_slots = upload_all(gpu, &slots);
    gpu.write_cache(
        on_latent.read()?,
        on_rope.read()?,
        indices(&on_slots, 4)?,
        CacheMut::new(cache.bytes_mut(), layout)?,
    )?;

    // The gather reads one segment of one row per slot.
    let read: Vec<i64> = slots.iter().chain(&untouched).copied().collect();
    let table: Vec<i32> = read.iter().map(|slot| (slot / 64) as i32).collect();
    let token_starts: Vec<i32> = read.iter().map(|slot| (slot % 64) as i32).collect();
    let row_starts: Vec<i32> = (0..=read.len() as i32).collect();
    let [table, token_starts, row_starts] =
        [table, token_starts, row_starts].map(|list| upload_all(gpu, &list));
    let count = read.len();
    let out = |width| Tensor::poison(Layout::contiguous(DType::BF16, [count, 1, width]), 0);
    let (mut got_latent, mut got_rope) = (On::new(gpu, &out(512))?, On::new(gpu, &out(64))?);
    gpu.gather_cache(
        CacheRef::new(cache.bytes(), layout)?,
        GatherRows::new(
            BlockTable::new(indices(&table, count)?, count, 1)?,
            indices(&token_starts, count)?,
            indices(&row_starts, count + 1)?,
            count,
        ),
        got_latent.write()?,
        got_rope.write()?,
    )?;
    for (got, want, width) in [(got_latent, latent, 512), (got_rope, rope, 64)] {
        let got = got.host(gpu)?.values();
        assert_eq!(got[..4 * width], want.values());
        assert!(got[4 * width..].iter().all(|value| *value == 0.0));
    }

    // A tensor of two rows, far apart, views the same memory.
    let far = (1 << 31) + 4096;
    let wide = strided(DType::BF16, [2, 1, 128], [far, 128, 1]);
    let near = Layout::contiguous(DType::BF16, [2, 1, 128]);
    let source = Tensor::random(rng, near, 0);
    let on_source = On::new(gpu, &source)?;
    gpu.copy(on_source.read()?, TensorMut::new(cache.bytes_mut(), wide)?)?;
    let mut back = On::new(gpu, &Tensor::poison(near, 0))?;
    gpu.copy(TensorRef::new(cache.bytes(), wide)?, back.write()?)?;
    assert_eq!(back.host(gpu)?.values(), source.values());

    let states = LseLayout::heads_first(1, 2);
    let mut ours = upload_all(gpu, &[0.5f32, 0.5]);
    let theirs = upload_all(gpu, &[0.5f32, 0.5]);
    gpu.merge(
        TensorMut::new(cache.bytes_mut(), wide)?,
        lse_mut::<Cuda>(&mut ours, states)?,
        on_source.read()?,
        lse(&theirs, states)?,
    )?;
    gpu.copy(TensorRef::new(cache.bytes(), wide)?, back.write()?)?;
    // The merge is of two equal halves.
    assert_eq!(back.host(gpu)?.values(), source.values());

    // These rows of a write's source and of a gather's output have the same distance.
    let wide = strided(DType::BF16, [2, 1, 512], [far, 512, 1]);
    let near = Layout::contiguous(DType::BF16, [2, 1, 512]);
    let [source, poison] = [Tensor::random(rng, near, 0), Tensor::poison(near, 0)];
    let rope = Tensor::random(rng, Layout::contiguous(DType::BF16, [2, 1, 64]), 0);
    let mut on_rope = On::new(gpu, &rope)?;
    let mut put = |tensor: &Tensor| {
        let on = On::new(gpu, tensor)?;
        let to = TensorMut::new(cache.bytes_mut(), wide)?;
        gpu.copy(on.read()?, to)
    };
    put(&source)?;
    let layout = CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, 1, 64);
    let mut small = gpu.allocate(cache_bytes(&layout))?;
    let slots = upload_all(gpu, &[3i64, 5]);
    gpu.write_cache(
        TensorRef::new(cache.bytes(), wide)?,
        on_rope.read()?,
        indices(&slots, 2)?,
        CacheMut::new(small.bytes_mut(), layout)?,
    )?;
    let to = TensorMut::new(cache.bytes_mut(), wide)?;
    gpu.copy(On::new(gpu, &poison)?.read()?, to)?;
    let lists = [[0i32, 0, 0], [3, 5, 0], [0, 1, 2]].map(|list| upload_all(gpu, &list));
    gpu.gather_cache(
        CacheRef::new(small.bytes(), layout)?,
        GatherRows::new(
            BlockTable::new(indices(&lists[0], 2)?, 2, 1)?,
            indices(&lists[1], 2)?,
            indices(&lists[2], 3)?,
            2,
        ),
        TensorMut::new(cache.bytes_mut(), wide)?,
        on_rope.write()?,
    )?;
    let mut back = On::new(gpu, &poison)?;
    gpu.copy(TensorRef::new(cache.bytes(), wide)?, back.write()?)?;
    assert_eq!(back.host(gpu)?.values(), source.values());
    assert_eq!(on_rope.host(gpu)?.values(), rope.values());
    drop(cache);

    // These log-sum-exps of two tokens have the same distance.
    let (heads, tokens) = (8, 2);
    let states: Vec<f32> = (0..heads * tokens).map(|_| normal(rng)).collect();
    let mut memory = gpu.allocate(4 * (far + heads))?;
    let values = upload_all(gpu, &states);
    let near = Layout::contiguous(DType::F32, [tokens, 1, heads]);
    let wide = Layout {
        strides: [far, heads, 1],
        ..near
    };
    gpu.copy(
        TensorRef::new(values.bytes(), near)?,
        TensorMut::new(memory.bytes_mut(), wide)?,
    )?;
    let natural = LseLayout::heads_first(heads, tokens);
    let apart = LseLayout {
        row_stride: far,
        ..natural
    };
    let mut got = gpu.allocate(4 * heads * tokens)?;
    gpu.convert_lse(
        LseRef::<Cuda, Base2TokensFirst>::new(memory.bytes(), apart)?,
        lse_mut::<Cuda>(&mut got, natural)?,
    )?;
    let got: Vec<f32> = download_all(gpu, &got);
    for (at, got) in got.into_iter().enumerate() {
        let (head, token) = (at / tokens, at % tokens);
        let want = states[token * heads + head] * std::f32::consts::LN_2;
        assert_eq!(got, want, "token {token}, head {head}");
    }
    Ok(())
}

// ---- Graphs and tiers ---------------------------------------------------------------------------

// A step that uses every operation once, on memory with fixed addresses.
struct Step {
    // latent, rope, states' outputs, weights
    inputs: [On<Cuda>; 4],
    slots: <Cuda as Memory>::Buffer,
    states: <Cuda as Memory>::Buffer,
    cache: <Cuda as Memory>::Buffer,
    lists: [<Cuda as Memory>::Buffer; 3],
    // latent, rope, rope of each head, product, merged
    outputs: [On<Cuda>; 5],
    natural: <Cuda as Memory>::Buffer,
}

impl Step {
    const TOKENS: usize = 24;
    const HEADS: usize = 16;
    const ROWS: usize = 128;
    const CACHE: CacheLayout = CacheLayout::contiguous(MlaDims::R1, KvFormat::Fp8DsMla, 8, 16);
    const STATES: usize = Self::TOKENS * Self::HEADS;
    const INPUTS: [Layout; 4] = [
        Layout::contiguous(DType::BF16, [Self::TOKENS, 1, 512]),
        Layout::contiguous(DType::BF16, [Self::TOKENS, 1, 64]),
        Layout::contiguous(DType::BF16, [Self::TOKENS, Self::HEADS, 512]),
        Layout::contiguous(DType::BF16, [1, 512, 256]),
    ];
    const OUTPUTS: [Layout; 5] = [
        Layout::contiguous(DType::BF16, [Self::ROWS, 1, 512]),
        Layout::contiguous(DType::BF16, [Self::ROWS, 1, 64]),
        Layout::contiguous(DType::BF16, [Self::ROWS, Self::HEADS, 64]),
        Layout::contiguous(DType::BF16, [1, Self::ROWS, 256]),
        Layout::contiguous(DType::BF16, [Self::TOKENS, Self::HEADS, 512]),
    ];

    fn new(gpu: &Cuda) -> Result<Self> {
        let empty = |layout| On::new(gpu, &Tensor::poison(layout, 0)).unwrap();
        let mut step = Self {
            inputs: Self::INPUTS.map(empty),
            slots: gpu.allocate(8 * Self::TOKENS)?,
            states: gpu.allocate(8 * Self::STATES)?,
            cache: gpu.allocate(cache_bytes(&Self::CACHE))?,
            lists: [
                upload_all(gpu, &[0i32, 1, 2, 3, 4, 5, 6, 7]),
                upload_all(gpu, &[0i32]),
                upload_all(gpu, &[0i32, Self::ROWS as i32]),
            ],
            outputs: Self::OUTPUTS.map(empty),
            natural: gpu.allocate(4 * Self::STATES)?,
        };
        step.set(gpu, 0)?;
        Ok(step)
    }

    fn set(&mut self, gpu: &Cuda, seed: u64) -> Result<()> {
        let rng = &mut rng(seed);
        for (on, layout) in self.inputs.iter_mut().zip(Self::INPUTS) {
            on.set(gpu, &Tensor::random(rng, layout, 0))?;
        }
        let slots = random_slots(rng, Self::CACHE.slots(), Self::TOKENS);
        let states: Vec<f32> = (0..2 * Self::STATES).map(|_| normal(rng)).collect();
        gpu.upload(bytemuck::cast_slice(&slots), self.slots.bytes_mut())?;
        gpu.upload(bytemuck::cast_slice(&states), self.states.bytes_mut())
    }

    fn enqueue(&mut self, gpu: &Cuda) -> Result<()> {
        let [latent, rope, other, weights] = &self.inputs;
        let [gathered, gathered_rope, spread, product, merged] = &mut self.outputs;
        gpu.write_cache(
            latent.read()?,
            rope.read()?,
            indices(&self.slots, Self::TOKENS)?,
            CacheMut::new(self.cache.bytes_mut(), Self::CACHE)?,
        )?;
        let [table, token_starts, row_starts] = &self.lists;
        gpu.gather_cache(
            CacheRef::new(self.cache.bytes(), Self::CACHE)?,
            GatherRows::new(
                BlockTable::new(indices(table, 8)?, 1, 8)?,
                indices(token_starts, 1)?,
                indices(row_starts, 2)?,
                Self::ROWS,
            ),
            gathered.write()?,
            gathered_rope.write()?,
        )?;
        let of_heads = gathered_rope.read()?.broadcast(1, Self::HEADS)?;
        gpu.copy(of_heads, spread.write()?)?;
        let rows = gathered.read()?.transpose(0, 1);
        gpu.gemm(rows, weights.read()?, product.write()?)?;
        gpu.copy(other.read()?, merged.write()?)?;
        let natural = LseLayout::heads_first(Self::HEADS, Self::TOKENS);
        let states = |range| Cuda::byte_range(self.states.bytes(), range);
        let (first, second) = (
            states(0..4 * Self::STATES),
            states(4 * Self::STATES..8 * Self::STATES),
        );
        let base_2 = LseLayout {
            row_stride: Self::HEADS,
            ..natural
        };
        gpu.convert_lse(
            LseRef::<Cuda, Base2TokensFirst>::new(first, base_2)?,
            lse_mut::<Cuda>(&mut self.natural, natural)?,
        )?;
        gpu.merge(
            merged.write()?,
            lse_mut::<Cuda>(&mut self.natural, natural)?,
            other.read()?,
            LseRef::new(second, natural)?,
        )
    }

    fn results(&self, gpu: &Cuda) -> Result<Vec<Vec<u8>>> {
        let mut results = vec![download(gpu, &self.cache)?, download(gpu, &self.natural)?];
        for tensor in &self.outputs {
            results.push(tensor.download(gpu)?);
        }
        Ok(results)
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn a_captured_step_replays_with_other_inputs_as_it_runs_without() {
    let gpu = &*gpu();
    let (mut captured, mut eager) = (Step::new(gpu).unwrap(), Step::new(gpu).unwrap());
    // The capture is the first launch. It must not rely on anything that an earlier launch would
    // load.
    let graph = gpu.capture(|gpu| captured.enqueue(gpu)).unwrap();
    let cache = download(gpu, &captured.cache).unwrap();
    assert!(
        cache.iter().all(|byte| *byte == 0),
        "capturing ran something"
    );
    for seed in 1..5 {
        captured.set(gpu, seed).unwrap();
        // SAFETY: `captured` holds everything that was captured, and only this stream uses it.
        unsafe { graph.replay() }.unwrap();
        eager.set(gpu, seed).unwrap();
        eager.enqueue(gpu).unwrap();
        let (got, want) = (captured.results(gpu).unwrap(), eager.results(gpu).unwrap());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(difference(got, want), None, "result {i} of replay {seed}");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn a_capture_that_fails_leaves_the_stream_usable() {
    let gpu = &*gpu();
    let refused = gpu.capture(|_| Err(mla_runtime::Error::argument("capture", 1, 2)));
    assert!(refused.is_err());
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        gpu.capture(|_| panic!("in a capture"))
    }));
    assert!(unwound.is_err());
    let mut step = Step::new(gpu).unwrap();
    step.enqueue(gpu).unwrap();
    gpu.synchronize().unwrap();
    assert!(
        gpu.capture(|gpu| gpu.synchronize()).is_err(),
        "a wait cannot be captured"
    );
    let mut buffer = gpu.allocate(4).unwrap();
    let refused = gpu.capture(|gpu| gpu.upload(&[0; 4], buffer.bytes_mut()));
    let message = message(refused);
    assert!(message.contains("prepare a step before"), "{message}");
    step.enqueue(gpu).unwrap();
    gpu.synchronize().unwrap();
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored helpers"]
fn what_does_not_fit_is_refused_by_name() {
    let gpu = &*gpu();
    assert_eq!(Cuda::availability(), Ok(()));
    assert_eq!(gpu.target(), present_gpu().unwrap().target());
    assert!(Cuda::new(1000).is_err());

    let mut case = random_write(&mut rng(4), KvFormat::Fp8, DType::BF16);
    case.layout.scale = 1e30;
    let error = message(run_write(gpu, &case));
    assert_eq!(error, "cache scale: given 1e30, accepted 2^-60 to 2^60");

    mla_conformance::refusals(gpu).unwrap();
    let mut buffer = gpu.allocate(8).unwrap();
    let error = message(gpu.upload(&[0; 9], buffer.bytes_mut()));
    assert_eq!(error, "host bytes: given 9, accepted the device's 8");

    // Engines may call this C interface without the typed tier.
    let refused = |params: raw::MlaMergeParams| {
        // SAFETY: the parameters are refused before anything is launched.
        message(unsafe { raw::check("merge", raw::mla_merge(&params, gpu.raw_stream())) })
    };
    let valid = raw::MlaMergeParams {
        tokens: 2,
        heads: 2,
        width: 8,
        ..Default::default()
    };
    let wrong = raw::MlaMergeParams { dtype: 7, ..valid };
    assert!(refused(wrong).starts_with("dtype: given 7, accepted MLA_DTYPE_BF16"));
    let wrong = raw::MlaMergeParams { heads: -1, ..valid };
    assert!(refused(wrong).starts_with("heads: given -1, accepted 0..=65536"));
    assert!(refused(valid).starts_with("out: given 0, accepted a device pointer"));
}
