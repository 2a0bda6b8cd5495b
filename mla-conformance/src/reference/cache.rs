//! Cache rows, format by format.

use std::sync::LazyLock;

use half::{bf16, f16};

use mla_runtime::model::KvFormat;

/// Returns the value of an e4m3 code. It has a sign, four exponent bits with bias 7, and three
/// mantissa bits. There are no infinities. A code is NaN if all bits but the sign are set.
pub fn decode_e4m3(code: u8) -> f64 {
    static VALUES: LazyLock<[f64; 256]> =
        LazyLock::new(|| std::array::from_fn(|code| value_of_e4m3(code as u8)));
    VALUES[usize::from(code)]
}

fn value_of_e4m3(code: u8) -> f64 {
    let sign = if code >= 128 { -1.0 } else { 1.0 };
    let exponent = i32::from(code / 8 % 16);
    let mantissa = f64::from(code % 8);
    if exponent == 15 && mantissa == 7.0 {
        return f64::NAN;
    }
    let magnitude = if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
    };
    sign * magnitude
}

/// Returns the e4m3 code nearest to a value. Ties go to the even code. Values beyond ±448 give
/// ±448.
pub fn encode_e4m3(value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 128 } else { 0 };
    if value.is_nan() {
        return sign + 127;
    }
    let magnitude = value.abs().min(448.0);
    // These are the exponent and the first three mantissa bits of an f32, corrected for the other
    // bias.
    let guess = ((magnitude as f32).to_bits() >> 20).saturating_sub(120 << 3);
    sign + nearest(magnitude, 126, guess as u16, |code| decode_e4m3(code as u8)) as u8
}

/// Returns the code nearest to a value, in a format of sixteen bits whose positive codes ascend to
/// `infinity`. Ties go to the even code. The code of NaN is `infinity` + 1.
fn encode_half(
    value: f64,
    infinity: u16,
    guess: impl Fn(f64) -> u16,
    decode: impl Fn(u16) -> f64,
) -> [u8; 2] {
    let sign = if value.is_sign_negative() { 1 << 15 } else { 0 };
    if value.is_nan() {
        return (sign + infinity + 1).to_le_bytes();
    }
    // Infinity stands for the finite value that would come next. A value nearer to it than to the
    // last finite value becomes infinite.
    let place = |code: u16| {
        if code == infinity {
            2.0 * decode(infinity - 1) - decode(infinity - 2)
        } else {
            decode(code)
        }
    };
    let magnitude = value.abs().min(place(infinity));
    (sign + nearest(magnitude, infinity, guess(magnitude), place)).to_le_bytes()
}

/// Returns the code from 0 to `last` that is nearest to a magnitude. Ties go to the even code. The
/// codes' values must ascend, and the last one must not be below the magnitude. A good guess saves
/// steps.
fn nearest(magnitude: f64, last: u16, guess: u16, decode: impl Fn(u16) -> f64) -> u16 {
    let guess = guess.min(last);
    let (mut below, mut above) = (guess.saturating_sub(1), (guess + 1).min(last));
    if decode(below) > magnitude || decode(above) < magnitude {
        (below, above) = (0, last);
    }
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if decode(middle) <= magnitude {
            below = middle;
        } else {
            above = middle;
        }
    }
    let (down, up) = (magnitude - decode(below), decode(above) - magnitude);
    if down < up || (down == up && below % 2 == 0) {
        below
    } else {
        above
    }
}

/// Returns the bytes of the bf16 nearest to a value.
pub fn encode_bf16(value: f64) -> [u8; 2] {
    let guess = |magnitude| bf16::from_f64(magnitude).to_bits();
    encode_half(value, 0x7f80, guess, |code| bf16::from_bits(code).to_f64())
}

/// Returns the bytes of the f16 nearest to a value.
pub fn encode_f16(value: f64) -> [u8; 2] {
    let guess = |magnitude| f16::from_f64(magnitude).to_bits();
    encode_half(value, 0x7c00, guess, |code| f16::from_bits(code).to_f64())
}

/// Returns the bytes of a row of L + R values. `scale` is that of [`KvFormat::Fp8`].
pub fn encode_row(format: KvFormat, latent: usize, row: &[f64], scale: f64) -> Vec<u8> {
    match format {
        KvFormat::F32 => row.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        KvFormat::F16 => row.iter().flat_map(|x| encode_f16(*x)).collect(),
        KvFormat::BF16 => row.iter().flat_map(|x| encode_bf16(*x)).collect(),
        KvFormat::Fp8 => row.iter().map(|x| encode_e4m3(x / scale)).collect(),
        KvFormat::Fp8DsMla => {
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            for group in row[..latent].chunks(128) {
                let amax = group.iter().fold(1e-4, |amax: f64, x| amax.max(x.abs()));
                // The smallest power of two that is not below amax / 448.
                let mut scale = 2f64.powi(-40);
                while scale < amax / 448.0 {
                    scale *= 2.0;
                }
                codes.extend(group.iter().map(|x| encode_e4m3(x / scale)));
                scales.extend((scale as f32).to_le_bytes());
            }
            let rope = row[latent..].iter().flat_map(|x| encode_bf16(*x));
            codes.into_iter().chain(scales).chain(rope).collect()
        }
        KvFormat::Fp8PerToken => {
            let (latent, rope) = row.split_at(latent);
            let least = f64::from(1e-4f32);
            let amax = latent.iter().fold(least, |amax, x| amax.max(x.abs()));
            let scale = (amax.min(f32::MAX.into()) / 448.0) as f32;
            // Writers of the cache divide in f32.
            let codes = latent
                .iter()
                .map(|x| encode_e4m3((*x as f32 / scale).into()));
            let rope = rope.iter().flat_map(|x| encode_bf16(*x));
            let mut bytes: Vec<u8> = codes.chain(rope).collect();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(scale.to_le_bytes());
            bytes
        }
    }
}

/// Returns the L + R values of a stored row.
///
/// # Panics
///
/// If there are fewer bytes than the format has.
pub fn decode_row(
    format: KvFormat,
    latent: usize,
    rope: usize,
    row: &[u8],
    scale: f64,
) -> Vec<f64> {
    let half = |k: usize| [row[k], row[k + 1]];
    let single = |k: usize| f32::from_le_bytes([row[k], row[k + 1], row[k + 2], row[k + 3]]);
    let width = latent + rope;
    match format {
        KvFormat::F32 => (0..width).map(|k| single(4 * k).into()).collect(),
        KvFormat::F16 => (0..width)
            .map(|k| f16::from_le_bytes(half(2 * k)).to_f64())
            .collect(),
        KvFormat::BF16 => (0..width)
            .map(|k| bf16::from_le_bytes(half(2 * k)).to_f64())
            .collect(),
        KvFormat::Fp8 => (0..width).map(|k| decode_e4m3(row[k]) * scale).collect(),
        KvFormat::Fp8DsMla => {
            let tail = latent + latent / 128 * 4;
            let values =
                (0..latent).map(|k| decode_e4m3(row[k]) * f64::from(single(latent + k / 128 * 4)));
            let rope = (0..rope).map(|k| bf16::from_le_bytes(half(tail + 2 * k)).to_f64());
            values.chain(rope).collect()
        }
        KvFormat::Fp8PerToken => {
            let scale = f64::from(single(latent + (2 * rope).next_multiple_of(4)));
            let values = (0..latent).map(|k| decode_e4m3(row[k]) * scale);
            let rope = (0..rope).map(|k| bf16::from_le_bytes(half(latent + 2 * k)).to_f64());
            values.chain(rope).collect()
        }
    }
}
