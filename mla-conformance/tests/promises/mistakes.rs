//! Mistakes that backends of both phases can make.

use mla_cpu::Cpu;
use mla_runtime::backend::LayerConfig;
use mla_runtime::tensor::ArrayRef;
use mla_runtime::{Error, Result};

use crate::backend::Written;

/// Refuses all problems but one kind.
pub(crate) fn only(config: LayerConfig, is_taken: bool) -> Result<LayerConfig> {
    match is_taken {
        true => Ok(config),
        false => Err(Error::argument("problem", "another", "the plainest")),
    }
}

static ONES: [f32; 4096] = [1.0; 4096];

/// Ignores the factors of query tokens.
pub(crate) fn one_scale<'a>(
    scales: Option<ArrayRef<'a, Cpu, f32>>,
) -> Option<ArrayRef<'a, Cpu, f32>> {
    scales.map(|scales| ArrayRef::from_slice(&ONES[..scales.len()]))
}

pub(crate) fn few_heads(config: LayerConfig) -> Result<LayerConfig> {
    match config.problem.heads {
        128 => Err(Error::argument("heads", 128, "1 to 64")),
        _ => Ok(config),
    }
}

/// Changes each f32 number.
fn each(bytes: &mut [u8], change: impl Fn(f32) -> f32) {
    for number in bytes.as_chunks_mut().0 {
        *number = change(f32::from_le_bytes(*number)).to_le_bytes();
    }
}

/// Sets small numbers to 0.
pub(crate) fn flush(numbers: &mut [u8]) {
    each(numbers, |x| if x.abs() < 1e-5 { 0.0 } else { x });
}

pub(crate) fn in_base_2(lse: &mut [u8]) {
    each(lse, |lse| lse * std::f32::consts::LOG2_E);
}

/// Adds the error of weights that were rounded to bf16 before they were summed.
pub(crate) fn rounded(lse: &mut [u8]) {
    each(lse, |lse| lse + 3e-3);
}

/// Rounds differently for some numbers of rows, as another order of sums would.
pub(crate) fn by_rows(written: &mut Written<'_>) {
    let last_bit = u32::from(written.out.len() / 8192 % 5 == 1);
    each(written.out, |x| f32::from_bits(x.to_bits() ^ last_bit));
}

pub(crate) fn clear_nan(numbers: &mut [u8]) {
    each(numbers, |x| if x.is_nan() { 0.0 } else { x });
}

pub(crate) fn spread_nan(numbers: &mut [u8]) {
    let chunks = numbers.as_chunks().0;
    if chunks.iter().any(|x| f32::from_le_bytes(*x).is_nan()) {
        numbers.fill(0xff);
    }
}

pub(crate) fn between_rows(written: &mut Written<'_>) {
    if let Some(byte) = written.between {
        written.out[byte] = 0;
    }
}
