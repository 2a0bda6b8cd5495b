//! Products of rows with columns that are both contiguous along the inner dimension. The weights of
//! a checkpoint, `[out, in]`, have this layout. Nothing is rearranged. The lanes of a vector are
//! summed last.

use std::arch::x86_64::*;

use half::bf16;

// The number of entries that are multiplied before their sums are added up. It is small: the
// entries of four columns stay in the first-level cache while all rows are multiplied by them.
const CHUNK: usize = 1024;

// The numbers of rows and of columns that are multiplied together. A register of each is loaded at
// a time.
const ROWS: usize = 4;
const COLUMNS: usize = 4;

const LANES: usize = 16;

/// Dot products of f32. A value proves that the processor has AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Singles(());

impl Singles {
    pub(crate) fn new() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }

    /// Computes sums[row][column] += a[row] · b[column]. Rows of sums are `pitch` apart.
    ///
    /// # Panics
    ///
    /// If the rows and columns have different lengths, or if `sums` is too short for them.
    pub(crate) fn add(self, a: &[&[f32]], b: &[&[f32]], sums: &mut [f32], pitch: usize) {
        // SAFETY: `self` proves the instructions.
        unsafe { singles::add(a, b, sums, pitch) };
    }
}

/// Dot products of bf16. A value proves that the processor has AVX-512's products of pairs.
#[derive(Clone, Copy)]
pub(crate) struct Pairs(());

impl Pairs {
    pub(crate) fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        has.then_some(Self(()))
    }

    /// Computes the same as [`Singles::add`] for rows and columns of even lengths.
    ///
    /// # Panics
    ///
    /// If the rows and columns have different or odd lengths, or if `sums` is too short for them.
    pub(crate) fn add(self, a: &[&[bf16]], b: &[&[bf16]], sums: &mut [f32], pitch: usize) {
        // SAFETY: `self` proves the instructions.
        unsafe { pairs::add(a, b, sums, pitch) };
    }
}

// The dot products of one kind of arithmetic. An entry is an f32 or two bf16, and `$add(sum, a, b)`
// computes sum + a · b in each lane.
macro_rules! dots {
    ($module:ident, $lane:ty, $features:literal, $add:expr) => {
        mod $module {
            use super::*;

            // The number of elements in an entry.
            const WIDE: usize = size_of::<u32>() / size_of::<$lane>();

            #[target_feature(enable = $features)]
            pub(super) fn add(a: &[&[$lane]], b: &[&[$lane]], sums: &mut [f32], pitch: usize) {
                let (Some(first), Some(_)) = (a.first(), b.first()) else {
                    return;
                };
                let entries = first.len() / WIDE;
                let is_whole = |row: &&[$lane]| row.len() == entries * WIDE;
                assert!(
                    a.iter().chain(b).all(is_whole),
                    "one length, of whole entries"
                );
                assert!(b.len() <= pitch && sums.len() >= (a.len() - 1) * pitch + b.len());
                for start in (0..entries).step_by(CHUNK) {
                    let count = CHUNK.min(entries - start);
                    for column in (0..b.len()).step_by(COLUMNS) {
                        let b = from_entry(&b[column..], start);
                        for row in (0..a.len()).step_by(ROWS) {
                            let sums = &mut sums[row * pitch + column..];
                            // SAFETY: rows and columns have `start + count` entries.
                            unsafe {
                                match a.len() - row {
                                    1 => add_some::<1>(&a[row..], &b, start, count, sums, pitch),
                                    2 => add_some::<2>(&a[row..], &b, start, count, sums, pitch),
                                    _ => add_some::<ROWS>(&a[row..], &b, start, count, sums, pitch),
                                }
                            }
                        }
                    }
                }
            }

            // Returns the addresses of entry `start` of the first `N` rows, and the number of rows
            // that exist. Missing rows repeat the last one.
            fn from_entry<const N: usize>(
                rows: &[&[$lane]],
                start: usize,
            ) -> ([*const u32; N], usize) {
                let row = |i: usize| rows[i.min(rows.len() - 1)].as_ptr().cast::<u32>();
                let pointers = std::array::from_fn(|i| row(i).wrapping_add(start));
                (pointers, rows.len().min(N))
            }

            // SAFETY of the caller: all rows have `count` entries from `start` on, and each pointer
            // of `b` points to `count` entries.
            #[target_feature(enable = $features)]
            unsafe fn add_some<const R: usize>(
                a: &[&[$lane]],
                (b, columns): &([*const u32; COLUMNS], usize),
                start: usize,
                count: usize,
                sums: &mut [f32],
                pitch: usize,
            ) {
                let (a, rows) = from_entry::<R>(a, start);
                // SAFETY: the contract of `multiply`, which is this function's own.
                let products = unsafe { multiply(&a, b, count) };
                for (row, products) in products.iter().enumerate().take(rows) {
                    for (column, product) in products.iter().enumerate().take(*columns) {
                        sums[row * pitch + column] += product;
                    }
                }
            }

            // SAFETY of the caller: each pointer points to `count` entries.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn multiply<const R: usize>(
                a: &[*const u32; R],
                b: &[*const u32; COLUMNS],
                count: usize,
            ) -> [[f32; COLUMNS]; R] {
                let mut sums = [[_mm512_setzero_ps(); COLUMNS]; R];
                for entry in (0..count).step_by(LANES) {
                    let left = count - entry;
                    let mask: __mmask16 = if left < LANES { (1 << left) - 1 } else { !0 };
                    // SAFETY: the masked loads only access entries that exist.
                    unsafe {
                        let mut columns = [_mm512_setzero_ps(); COLUMNS];
                        for (column, from) in columns.iter_mut().zip(b) {
                            *column = _mm512_maskz_loadu_ps(mask, from.add(entry).cast());
                        }
                        for (from, sums) in a.iter().zip(&mut sums) {
                            let row = _mm512_maskz_loadu_ps(mask, from.add(entry).cast());
                            for (column, sum) in columns.iter().zip(sums) {
                                *sum = $add(*sum, row, *column);
                            }
                        }
                    }
                }
                // This is a loop, because `map` is neither compiled for these instructions nor
                // inlined here.
                let mut products = [[0.0; COLUMNS]; R];
                for (sums, products) in sums.iter().zip(&mut products) {
                    for (sum, product) in sums.iter().zip(products) {
                        *product = _mm512_reduce_add_ps(*sum);
                    }
                }
                products
            }
        }
    };
}

dots!(singles, f32, "avx512f", |sum, a, b| _mm512_fmadd_ps(
    a, b, sum
));

dots!(pairs, bf16, "avx512f,avx512bf16", |sum, a, b| {
    // Both types have the same 512 bits.
    let bits = |x: __m512| std::mem::transmute::<__m512, __m512bh>(x);
    _mm512_dpbf16_ps(sum, bits(a), bits(b))
});
