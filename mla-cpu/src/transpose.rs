//! Transposes matrices, in blocks that stay in registers.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// The number of rows, and of columns, in a block: one vector of f32.
const BLOCK: usize = 16;

/// Transposes `from` `[rows, columns]` into `to` `[columns, rows]`. Rows are `from_pitch` and
/// `to_pitch` elements apart.
///
/// # Panics
///
/// If an operand is too short for its shape and pitch.
pub(crate) fn transpose(
    [rows, columns]: [usize; 2],
    from: &[f32],
    from_pitch: usize,
    to: &mut [f32],
    to_pitch: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let vectors = is_x86_feature_detected!("avx512f");
    for column in (0..columns).step_by(BLOCK) {
        for row in (0..rows).step_by(BLOCK) {
            let shape = [BLOCK.min(rows - row), BLOCK.min(columns - column)];
            let from = &from[row * from_pitch + column..];
            let to = &mut to[column * to_pitch + row..];
            #[cfg(target_arch = "x86_64")]
            if vectors && shape == [BLOCK; 2] {
                // SAFETY: the processor has the instructions.
                unsafe { transpose_block(from, from_pitch, to, to_pitch) };
                continue;
            }
            transpose_part(shape, from, from_pitch, to, to_pitch);
        }
    }
}

fn transpose_part(
    [rows, columns]: [usize; 2],
    from: &[f32],
    from_pitch: usize,
    to: &mut [f32],
    to_pitch: usize,
) {
    for column in 0..columns {
        let to = &mut to[column * to_pitch..][..rows];
        for (row, to) in to.iter_mut().enumerate() {
            *to = from[row * from_pitch + column];
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn transpose_block(from: &[f32], from_pitch: usize, to: &mut [f32], to_pitch: usize) {
    let mut block = [_mm512_setzero_si512(); BLOCK];
    for (row, block) in block.iter_mut().enumerate() {
        let from = &from[row * from_pitch..][..BLOCK];
        // SAFETY: 64 bytes, unaligned.
        *block = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
    }
    exchange(&mut block);
    for (column, block) in block.into_iter().enumerate() {
        let to = &mut to[column * to_pitch..][..BLOCK];
        // SAFETY: 64 bytes, unaligned.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), block) };
    }
}

/// Transposes 16 × 16 elements of 32 bits, by pairs, fours, and quarters of a register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(crate) fn exchange(rows: &mut [__m512i; BLOCK]) {
    let mut t = *rows;
    for i in (0..16).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut u = t;
    for i in (0..16).step_by(4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // Quarter q of u[4g + j] now holds rows 4g .. 4g + 4 of column 4q + j.
    for i in 0..4 {
        let a = _mm512_shuffle_i32x4::<0x88>(u[i], u[4 + i]);
        let b = _mm512_shuffle_i32x4::<0xdd>(u[i], u[4 + i]);
        let c = _mm512_shuffle_i32x4::<0x88>(u[8 + i], u[12 + i]);
        let d = _mm512_shuffle_i32x4::<0xdd>(u[8 + i], u[12 + i]);
        rows[i] = _mm512_shuffle_i32x4::<0x88>(a, c);
        rows[8 + i] = _mm512_shuffle_i32x4::<0xdd>(a, c);
        rows[4 + i] = _mm512_shuffle_i32x4::<0x88>(b, d);
        rows[12 + i] = _mm512_shuffle_i32x4::<0xdd>(b, d);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_any_shape() {
        for [rows, columns] in [
            [16, 16],
            [1, 40],
            [33, 1],
            [48, 31],
            [0, 5],
            [5, 0],
            [17, 64],
        ] {
            let (from_pitch, to_pitch) = (columns + 3, rows + 2);
            let from: Vec<f32> = (0..rows * from_pitch).map(|i| i as f32).collect();
            let mut to = vec![-1.0; columns * to_pitch];
            transpose([rows, columns], &from, from_pitch, &mut to, to_pitch);
            for (at, to) in to.iter().enumerate() {
                let (column, row) = (at / to_pitch, at % to_pitch);
                let expected = match row < rows {
                    true => (row * from_pitch + column) as f32,
                    false => -1.0,
                };
                assert_eq!(*to, expected, "[{row}, {column}] of [{rows}, {columns}]");
            }
        }
    }
}
