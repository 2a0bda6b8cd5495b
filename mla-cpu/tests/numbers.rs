//! Writes extreme numbers to a cache and reads them back: docs/numbers.md.

use half::f16;
use mla_cpu::Cpu;
use mla_runtime::device::{Device, GatherRows};
use mla_runtime::model::{Element, HeadDims, KvFormat, MlaDims};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, TensorMut, TensorRef,
};

const LATENT: usize = 128;

/// Writes the latent part of one row to a cache and gathers it.
fn through<To: Element + Default + Clone>(
    format: KvFormat,
    scale: f32,
    first: &[f32],
) -> (Vec<u8>, Vec<To>) {
    let dims = MlaDims::new(LATENT as u32, HeadDims::new(8, 2, 8));
    let mut layout = CacheLayout::contiguous(dims, format, 1, 1);
    layout.scale = scale;
    let mut bytes = vec![0u8; layout.page_stride];
    let mut latent = vec![1.0f32; LATENT];
    latent[..first.len()].copy_from_slice(first);
    let cpu = Cpu::new();
    cpu.write_cache(
        TensorRef::from_slice(&latent, [1, 1, LATENT]).unwrap(),
        TensorRef::from_slice(&[1.0f32; 2], [1, 1, 2]).unwrap(),
        ArrayRef::from_slice(&[0i64]),
        CacheMut::new(&mut bytes[..], layout).unwrap(),
    )
    .unwrap();
    let mut gathered = vec![To::default(); LATENT];
    let mut rope = vec![To::default(); 2];
    cpu.gather_cache(
        CacheRef::new(&bytes[..], layout).unwrap(),
        GatherRows::new(
            BlockTable::new(ArrayRef::from_slice(&[0]), 1, 1).unwrap(),
            ArrayRef::from_slice(&[0]),
            ArrayRef::from_slice(&[0, 1]),
            1,
        ),
        TensorMut::from_slice(&mut gathered, [1, 1, LATENT]).unwrap(),
        TensorMut::from_slice(&mut rope, [1, 1, 2]).unwrap(),
    )
    .unwrap();
    (bytes, gathered)
}

#[test]
fn quantised_cache_saturates() {
    let given = [f32::INFINITY, f32::NEG_INFINITY, 1e6, f32::NAN, 1e-9, 2e-3];
    let (_, got) = through::<f32>(KvFormat::Fp8, 1.0, &given);
    assert_eq!(got[..3], [448.0, -448.0, 448.0]);
    assert!(got[3].is_nan());
    // One value is below half of the smallest code, and one is that code.
    assert_eq!(got[4..7], [0.0, 2f32.powi(-9), 1.0]);
}

#[test]
fn nan_and_infinity_in_groups() {
    let (_, got) = through::<f32>(KvFormat::Fp8DsMla, 1.0, &[f32::NAN, 100.0]);
    assert!(got[0].is_nan());
    assert_eq!(got[1..3], [96.0, 1.0]);

    let (bytes, got) = through::<f32>(KvFormat::Fp8DsMla, 1.0, &[f32::INFINITY]);
    let scale = f32::from_le_bytes(bytes[LATENT..LATENT + 4].try_into().unwrap());
    assert!(scale.is_finite() && scale > 1e35, "{scale}");
    assert_eq!(got[..2], [448.0 * scale, 0.0]);
}

#[test]
fn scales_of_tokens() {
    let scale = |bytes: &[u8]| f32::from_le_bytes(bytes[LATENT + 4..][..4].try_into().unwrap());
    let format = KvFormat::Fp8PerToken;
    // The largest magnitude is exact except for the scale's rounding. NaN does not count as the
    // largest.
    let (bytes, got) = through::<f32>(format, 1.0, &[f32::NAN, -100.0]);
    assert_eq!(scale(&bytes), 100.0 / 448.0);
    assert!(got[0].is_nan());
    assert_eq!(got[1], -448.0 * (100.0 / 448.0));
    assert!((got[2] - 1.0).abs() < 1.0 / 16.0, "{}", got[2]);

    let (bytes, got) = through::<f32>(format, 1.0, &[f32::NEG_INFINITY]);
    assert_eq!(scale(&bytes), f32::MAX / 448.0);
    assert_eq!(got[..2], [-448.0 * (f32::MAX / 448.0), 0.0]);

    let (bytes, got) = through::<f32>(format, 1.0, &[0.0; LATENT]);
    assert_eq!(scale(&bytes), 1e-4 / 448.0);
    assert_eq!(got, [0.0; LATENT]);
}

#[test]
fn sixteen_bit_cache_range() {
    let min = 2f32.powi(-24);
    let given = [65519.0, -65520.0, 3.0 * min, min / 2.0, f32::NAN];
    let (_, got) = through::<f32>(KvFormat::F16, 1.0, &given);
    assert_eq!(got[..4], [65504.0, f32::NEG_INFINITY, 3.0 * min, 0.0]);
    assert!(got[4].is_nan());
    let given = [f32::MAX, f32::MIN_POSITIVE / 2.0];
    let (_, got) = through::<f32>(KvFormat::BF16, 1.0, &given);
    assert_eq!(got[..2], [f32::INFINITY, f32::MIN_POSITIVE / 2.0]);
}

#[test]
fn gathers_to_f16_range() {
    let (_, got) = through::<f16>(KvFormat::Fp8, 1024.0, &[448.0 * 1024.0, 32.0 * 1024.0]);
    assert_eq!(got[..2], [f16::INFINITY, f16::from_f32(32768.0)]);
    let scale = 2f32.powi(-20);
    let (_, got) = through::<f16>(KvFormat::Fp8, scale, &[3.0 * scale, 2f32.powi(-6) * scale]);
    // Three times 2^-20 becomes a subnormal number, and 2^-26 becomes 0.
    assert_eq!(got[..2], [f16::from_bits(48), f16::ZERO]);
}
