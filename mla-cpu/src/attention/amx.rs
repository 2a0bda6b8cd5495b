//! bf16 products on Intel's matrix unit (AMX), for Linux on x86-64.
//!
//! The unit has eight tile registers of sixteen rows of 64 bytes. `tdpbf16ps c, a, b` adds the
//! product of `a` [16, 32] and `b` [32, 16] to the f32 tile `c` [16, 16]. The rows of `a` are rows
//! in memory. The rows of `b` are *pairs* of rows: row `i` of the register holds `b[2i][0],
//! b[2i+1][0], b[2i][1], b[2i+1][1], …`.
//!
//! A kernel multiplies two tiles of `a` by two of `b`. It needs four loads for four products, which
//! the first-level cache can deliver. [`Tiles`] arranges the tiles for any [`Unit`]. Tests have a
//! unit that multiplies in Rust. They can check the order of tiles without a matrix unit, too.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::bf16::{BLOCK, Bf16Products, DEPTH, pair_queries};
use super::softmax::LANES;
use super::vectors::PairVectors;
use super::{KEYS, Rows};

/// A unit that multiplies tiles of bf16.
///
/// # Safety
///
/// A value exists only if the processor has the vector instructions around the unit,
/// `avx512f,avx512bw,avx512vl,avx512bf16`.
pub(crate) unsafe trait Unit: Copy + Send {
    /// Configures all tile registers as sixteen rows of 64 bytes.
    fn configure(self);

    /// Releases the tile registers, so that context switches need not save them.
    fn release(self);

    /// Sets `c[i][j]` to the sum of `a[i] · b[j]` over `steps` steps of 32, or adds the sum to it,
    /// as `kernel` says.
    ///
    /// # Safety
    ///
    /// This thread has called [`configure`](Self::configure), and not `release` since. `steps` is
    /// not 0. For each of the kernel's tiles: `a[i]` is readable for 16 rows of `a_pitch` bytes,
    /// and the first 64 · `steps` bytes of each are used; `b[j]` is readable for `steps` · 1024
    /// bytes; `c[i]` is readable and writable for 16 rows of `c_pitch` bytes, and the first 64
    /// bytes per column tile of each are used.
    unsafe fn multiply(self, kernel: Kernel, operands: Operands);
}

/// The shape of one multiplication, in tiles of rows by tiles of columns. `Set` overwrites the
/// result; `Add` adds to it.
#[derive(Clone, Copy)]
pub(crate) enum Kernel {
    Set2x2,
    Set2x1,
    Add2x2,
    Add1x2,
}

/// The addresses of up to two row tiles and two column tiles. Along a row, tiles of `a` are 64
/// bytes apart. Tiles of `b` are contiguous, one after another. The two tiles in a row of `c` are
/// adjacent.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    a: [*const u8; 2],
    a_pitch: usize,
    b: [*const u8; 2],
    c: [*mut u8; 2],
    c_pitch: usize,
    steps: usize,
}

/// A proof that this process may use the matrix unit and the vector instructions around it.
#[derive(Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    /// Returns the proof if the processor has the unit and the operating system permits its
    /// registers.
    pub(crate) fn new() -> Option<Self> {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        AVAILABLE.get_or_init(detect).then_some(Self(()))
    }
}

// SAFETY: `detect` asks for the vector instructions first.
unsafe impl Unit for Amx {
    fn configure(self) {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        const CONFIG: Config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        // SAFETY: `self` proves that the instruction exists and is permitted; the operand is a
        // valid configuration of 64 bytes. The compiler never uses tile registers itself.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
    }

    fn release(self) {
        // SAFETY: `self` proves that the instruction exists and is permitted.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    #[inline(always)]
    unsafe fn multiply(self, kernel: Kernel, operands: Operands) {
        // SAFETY: `self` proves that the instructions exist; the rest is the caller's promise.
        unsafe {
            match kernel {
                Kernel::Set2x2 => set_2x2(operands),
                Kernel::Set2x1 => set_2x1(operands),
                Kernel::Add2x2 => add_2x2(operands),
                Kernel::Add1x2 => add_1x2(operands),
            }
        }
    }
}

fn detect() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // Bits of edx in leaf 7 of `cpuid`.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    if !PairVectors::detect() {
        return false;
    }
    // SAFETY: every x86-64 processor has the instruction `cpuid`. The system call requests
    // permission to use the tile registers and touches no memory. A kernel that does not know the
    // call returns an error.
    unsafe {
        __cpuid(0).eax >= 7
            && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
            && libc::syscall(
                libc::SYS_arch_prctl,
                ARCH_REQ_XCOMP_PERM,
                XFEATURE_XTILEDATA,
            ) == 0
    }
}

// Defines one kernel of `Amx` by its instructions before, in and after the steps.
macro_rules! kernel {
    ($name:ident, [$($start:literal),*], [$($step:literal),*], [$($end:literal),*]) => {
        /// # Safety
        ///
        /// The conditions of [`Unit::multiply`] hold, and the process may use the matrix unit.
        unsafe fn $name(operands: Operands) {
            let Operands { a, a_pitch, b, c, c_pitch, steps } = operands;
            // SAFETY: reads and writes the operands of `Unit::multiply`, whose contract is this
            // function's own. The tile registers are declared as overwritten; their configuration
            // is untouched.
            unsafe {
                asm!(
                    $($start,)*
                    "2:",
                    $($step,)*
                    "add {a0}, 64",
                    "add {a1}, 64",
                    "add {b0}, 1024",
                    "add {b1}, 1024",
                    "dec {steps}",
                    "jnz 2b",
                    $($end,)*
                    a0 = inout(reg) a[0] => _,
                    a1 = inout(reg) a[1] => _,
                    b0 = inout(reg) b[0] => _,
                    b1 = inout(reg) b[1] => _,
                    steps = inout(reg) steps => _,
                    ap = in(reg) a_pitch,
                    bp = in(reg) 64usize,
                    c0 = in(reg) c[0],
                    c1 = in(reg) c[1],
                    cp = in(reg) c_pitch,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

kernel!(
    set_2x2,
    [
        "tilezero tmm0",
        "tilezero tmm1",
        "tilezero tmm2",
        "tilezero tmm3",
        "/* {c1} */"
    ],
    [
        "tileloadd tmm4, [{a0} + {ap}*1]",
        "tileloadd tmm6, [{b0} + {bp}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {bp}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {ap}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    [
        "tilestored [{c0} + {cp}*1], tmm0",
        "tilestored [{c0} + {cp}*1 + 64], tmm1",
        "tilestored [{c1} + {cp}*1], tmm2",
        "tilestored [{c1} + {cp}*1 + 64], tmm3"
    ]
);

kernel!(
    set_2x1,
    ["tilezero tmm0", "tilezero tmm2"],
    [
        "tileloadd tmm6, [{b0} + {bp}*1]",
        "tileloadd tmm4, [{a0} + {ap}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a1} + {ap}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6"
    ],
    [
        "tilestored [{c0} + {cp}*1], tmm0",
        "tilestored [{c1} + {cp}*1], tmm2"
    ]
);

kernel!(
    add_2x2,
    [
        "tileloadd tmm0, [{c0} + {cp}*1]",
        "tileloadd tmm1, [{c0} + {cp}*1 + 64]",
        "tileloadd tmm2, [{c1} + {cp}*1]",
        "tileloadd tmm3, [{c1} + {cp}*1 + 64]"
    ],
    [
        "tileloadd tmm4, [{a0} + {ap}*1]",
        "tileloadd tmm6, [{b0} + {bp}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {bp}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {ap}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    [
        "tilestored [{c0} + {cp}*1], tmm0",
        "tilestored [{c0} + {cp}*1 + 64], tmm1",
        "tilestored [{c1} + {cp}*1], tmm2",
        "tilestored [{c1} + {cp}*1 + 64], tmm3"
    ]
);

kernel!(
    add_1x2,
    [
        "tileloadd tmm0, [{c0} + {cp}*1]",
        "tileloadd tmm1, [{c0} + {cp}*1 + 64]"
    ],
    [
        "tileloadd tmm4, [{a0} + {ap}*1]",
        "tileloadd tmm6, [{b0} + {bp}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {bp}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7"
    ],
    [
        "tilestored [{c0} + {cp}*1], tmm0",
        "tilestored [{c0} + {cp}*1 + 64], tmm1",
        "/* {c1} */"
    ]
);

/// The products of attention, computed by tiles.
#[derive(Clone, Copy)]
pub(crate) struct Tiles<U>(pub(crate) U);

// SAFETY: the unit proves the instructions.
unsafe impl<U: Unit> Bf16Products for Tiles<U> {
    const IN_PLACE: bool = false;
    const STEP: usize = 2 * LANES;

    fn begin(self) {
        self.0.configure();
    }

    fn arrange(self, _: usize, queries: &[bf16], width: usize, to: &mut [bf16]) {
        if width == 0 {
            return;
        }
        let group = LANES * width;
        for (from, to) in queries.chunks(group).zip(to.chunks_mut(group)) {
            // SAFETY: the unit proves the instructions.
            unsafe { pair_queries(from, width, to) };
        }
    }

    // Queries are paired: `[groups][width / 2][16][2]`.
    fn score(
        self,
        keys: Rows<'_, bf16>,
        _: &[bf16],
        [count, rows, width]: [usize; 3],
        queries: &[bf16],
        scores: &mut [f32],
    ) {
        let (steps, groups) = (width / DEPTH, rows.div_ceil(LANES));
        let scores = &mut scores[..count * BLOCK];
        if steps == 0 {
            scores.fill(0.0);
            return;
        }
        let queries = &queries[..groups * LANES * width];
        let keys = &keys.loaded()[..count * width];
        let kernel = match groups {
            2 => Kernel::Set2x2,
            _ => Kernel::Set2x1,
        };
        let second = (groups - 1) * LANES * width;
        let b = [queries.as_ptr().cast(), queries[second..].as_ptr().cast()];
        for key in (0..count).step_by(2 * LANES) {
            let operands = Operands {
                a: [key, key + LANES].map(|key| keys[key * width..].as_ptr().cast()),
                a_pitch: width * size_of::<bf16>(),
                b,
                c: [key, key + LANES].map(|key| scores[key * BLOCK..].as_mut_ptr().cast()),
                c_pitch: BLOCK * size_of::<f32>(),
                steps,
            };
            // SAFETY: `begin` configured the tiles. Each `a` is 16 whole rows of keys, since
            // `count` is a multiple of 32; each `b` is one group's paired queries, width · 16
            // elements or `steps` tiles; each `c` is 16 whole rows of 32 scores.
            unsafe { self.0.multiply(kernel, operands) };
        }
    }

    fn accumulate(
        self,
        values: &[bf16],
        [count, rows, width]: [usize; 3],
        weights: &[bf16],
        out: &mut [f32],
    ) {
        let (steps, tile, groups) = (count / DEPTH, KEYS * LANES, rows.div_ceil(LANES));
        if steps == 0 {
            return;
        }
        let out = &mut out[..groups * LANES * width];
        let second = (groups - 1) * LANES;
        let a = [0, second].map(|row| weights[row * KEYS..(row + LANES) * KEYS].as_ptr().cast());
        let kernel = match groups {
            2 => Kernel::Add2x2,
            _ => Kernel::Add1x2,
        };
        for column in (0..width).step_by(2 * LANES) {
            let operands = Operands {
                a,
                a_pitch: KEYS * size_of::<bf16>(),
                b: [column, column + LANES]
                    .map(|column| values[column / LANES * tile..][..tile].as_ptr().cast()),
                c: [0, second].map(|row| out[row * width + column..].as_mut_ptr().cast()),
                c_pitch: width * size_of::<f32>(),
                steps,
            };
            // SAFETY: `begin` configured the tiles. Each `a` is a group's 16 rows of KEYS weights;
            // each `b` is KEYS / 32 tiles, and at most `steps` of them are used; each `c` is 32
            // columns of 16 rows of `out`, whose width is a multiple of 32.
            unsafe { self.0.multiply(kernel, operands) };
        }
    }

    fn end(self) {
        self.0.release();
    }
}

#[cfg(test)]
mod tests {
    use super::super::bf16::Bf16Engine;
    use super::super::{Source, Widths, Workspace};
    use super::*;

    // The unit's products by their definition, with a proof of the vector instructions.
    #[derive(Clone, Copy)]
    struct Emulated(PairVectors);

    // SAFETY: its field proves the instructions.
    unsafe impl Unit for Emulated {
        fn configure(self) {}

        fn release(self) {}

        unsafe fn multiply(self, kernel: Kernel, operands: Operands) {
            let (adds, rows, columns) = match kernel {
                Kernel::Set2x2 => (false, 2, 2),
                Kernel::Set2x1 => (false, 2, 1),
                Kernel::Add2x2 => (true, 2, 2),
                Kernel::Add1x2 => (true, 1, 2),
            };
            for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                for (row, column) in (0..16).flat_map(|row| (0..16).map(move |c| (row, c))) {
                    // SAFETY: within the operands of `multiply`, by its contract.
                    unsafe {
                        let a = operands.a[i].add(row * operands.a_pitch).cast::<bf16>();
                        let b = operands.b[j].cast::<bf16>();
                        let c = operands.c[i].add(row * operands.c_pitch + 64 * j);
                        let c = c.cast::<f32>().add(column);
                        let mut sum = if adds { c.read() } else { 0.0 };
                        for k in 0..DEPTH * operands.steps {
                            let b = b.add(k / 2 * 2 * LANES + 2 * column + k % 2);
                            sum += a.add(k).read().to_f32() * b.read().to_f32();
                        }
                        c.write(sum);
                    }
                }
            }
        }
    }

    // Random rows. Some of them have a NaN in a column.
    struct Random {
        widths: Widths,
        queries: Vec<bf16>,
        keys: Vec<bf16>,
        values: Vec<bf16>,
        limits: Vec<usize>,
    }

    impl Random {
        fn new(random: &mut fastrand::Rng, rows: usize, keys: usize, widths: Widths) -> Self {
            let mut fill = |rows: usize, width: usize| {
                let value = |random: &mut fastrand::Rng| bf16::from_f32(random.f32() - 0.5);
                let mut data: Vec<_> = (0..rows * width).map(|_| value(random)).collect();
                if !data.is_empty() && random.bool() {
                    let at = random.usize(..data.len());
                    data[at] = bf16::NAN;
                }
                data
            };
            Self {
                queries: fill(rows, widths.key),
                keys: fill(keys, widths.key),
                values: fill(keys, widths.value),
                limits: (0..rows).map(|_| random.usize(..=keys)).collect(),
                widths,
            }
        }
    }

    impl Source<bf16> for Random {
        fn query(&self, row: usize, to: &mut [bf16]) {
            let width = self.widths.key;
            to[..width].copy_from_slice(&self.queries[row * width..][..width]);
        }

        fn scale(&self, _: usize) -> f32 {
            0.3
        }

        fn limit(&self, row: usize) -> usize {
            self.limits[row]
        }

        fn key(&self, position: usize, to: &mut [bf16]) {
            let width = self.widths.key;
            to[..width].copy_from_slice(&self.keys[position * width..][..width]);
        }

        fn key_in_place(&self, position: usize) -> Option<&[bf16]> {
            Some(&self.keys[position * self.widths.key..][..self.widths.key])
        }

        fn value(&self, position: usize, to: &mut [bf16]) {
            let width = self.widths.value;
            to[..width].copy_from_slice(&self.values[position * width..][..width]);
        }
    }

    // Returns the outputs of all rows, each after its log-sum-exp.
    fn attend<P: Bf16Products>(products: P, source: &Random, keys: usize) -> Vec<Vec<f32>> {
        let rows = source.limits.len();
        let mut workspace =
            Workspace::<Bf16Engine<P>>::new(products, rows, source.widths, false).unwrap();
        let splits = std::iter::once(0..keys);
        let mut total = workspace.attend_splits(source, rows, splits);
        let row = |row| {
            let (lse, out) = total.finish(row, 1.0);
            [&[lse], &out[..source.widths.value]].concat()
        };
        (0..rows).map(row).collect()
    }

    // Checks that all tiles are read and written at the right addresses, also with NaN and masks.
    // The test compares with the vector instructions, which the conformance suite compares with the
    // reference.
    #[test]
    fn tiles_multiply_what_vectors_do() {
        let Some(pairs) = PairVectors::new() else {
            return;
        };
        let mut random = fastrand::Rng::with_seed(3);
        for case in 0..200 {
            let (rows, keys) = (random.usize(1..70), random.usize(1..600));
            let shared = random.bool();
            let key = random.usize(1..80);
            let value = random.usize(1..if shared { key + 1 } else { 80 });
            let widths = Widths {
                key,
                value,
                shared,
                fixed_rows: random.bool(),
            };
            let source = Random::new(&mut random, rows, keys, widths);
            let got = attend(Tiles(Emulated(pairs)), &source, keys);
            let want = attend(pairs, &source, keys);
            for (row, (got, want)) in got.iter().zip(&want).enumerate() {
                for (column, (got, want)) in got.iter().zip(want).enumerate() {
                    // The sums are in another order. A weight may therefore be rounded the other
                    // way.
                    let near = (got - want).abs() < 4e-3 || got == want;
                    let both_nan = got.is_nan() && want.is_nan();
                    assert!(
                        near || both_nan,
                        "case {case}, [{row}, {column}]: {got} for {want}"
                    );
                }
            }
        }
    }
}
