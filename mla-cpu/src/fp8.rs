//! The e4m3 format (the "fn" variant: no infinities, one NaN per sign, largest value 448).

/// The largest finite value.
pub const MAX: f32 = 448.0;

// Decodes a code. The exponent has a bias of 7, and there are three mantissa bits. The code s eeee
// mmm is ±(1 + m/8)·2^(e − 7), or ±m·2^−9 if e is 0. It is NaN if all bits of e and m are 1.
const fn decode_once(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let (exponent, mantissa) = ((code >> 3 & 0xf) as u32, (code & 7) as u32);
    let magnitude = if code & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        // 2^−9 is exact in f32.
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

const TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = decode_once(code as u8);
        code += 1;
    }
    table
};

/// Returns the exact value of a code.
#[inline]
pub const fn decode(code: u8) -> f32 {
    TABLE[code as usize]
}

/// Returns the nearest code, ties to even. Values beyond ±448 become ±448, and NaN stays NaN.
#[inline]
pub fn encode(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = f32::from_bits(bits & 0x7fff_ffff);
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    let magnitude = magnitude.min(MAX);
    let code = if magnitude < 1.0 / 64.0 {
        // Codes below the smallest normal number are multiples of 2^−9. Rounding up to 8 of them
        // gives that number.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        // Rounds at bit 20. A carry into the exponent is correct. Then the bias is changed.
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | code
}

/// Writes the codes of values that share a scale, and returns the scale. `scale_of` computes it
/// from the largest magnitude, in which NaN does not count.
pub(crate) fn quantise(values: &[f32], scale_of: fn(f32) -> f32, codes: &mut [u8]) -> f32 {
    let amax = values
        .iter()
        .fold(0.0f32, |amax, value| amax.max(value.abs()));
    let scale = scale_of(amax);
    for (code, value) in codes.iter_mut().zip(values) {
        *code = encode(value / scale);
    }
    scale
}

/// The minimum of the magnitude from which a scale is computed. Even a row of zeros thus has a
/// scale.
const MIN_AMAX: f32 = 1e-4;

/// Returns the scale of a latent in the fp8_per_token format: amax / 448. `amax` is first clamped
/// to the range from 1e-4 to the largest finite number.
pub fn token_scale(amax: f32) -> f32 {
    amax.clamp(MIN_AMAX, f32::MAX) / MAX
}

/// Returns the scale of a group in the fp8_ds_mla format: the same scale, rounded up to a power of
/// two.
pub fn power_of_two_scale(amax: f32) -> f32 {
    let bits = token_scale(amax).to_bits();
    let mantissa = bits & 0x7f_ffff;
    f32::from_bits(bits - mantissa + if mantissa == 0 { 0 } else { 1 << 23 })
}
