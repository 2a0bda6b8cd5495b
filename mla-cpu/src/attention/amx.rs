//! bf16 products on Intel's matrix unit (AMX), for Linux on x86-64.
//!
//! The unit has eight tile registers of sixteen rows of 64 bytes. `tdpbf16ps c, a, b` adds to the
//! f32 tile `c` [16, 16] the product of `a` [16, 32], whose rows are rows in memory, and `b`
//! [32, 16], whose rows are *pairs* of rows: row `i` of the register holds
//! `b[2i][0], b[2i+1][0], b[2i][1], b[2i+1][1], …`.
//!
//! A kernel multiplies two tiles of `a` by two of `b`: four loads for four products, which the
//! first-level cache can feed.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::bf16::{BLOCK, Bf16Products, DEPTH};
use super::softmax::LANES;
use super::vectors::PairVectors;
use super::{KEYS, Rows};

/// A proof that this process may use the matrix unit and the vector instructions around it.
#[derive(Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    /// The proof, where the processor has the unit and the kernel grants its registers.
    pub(crate) fn new() -> Option<Self> {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        AVAILABLE.get_or_init(detect).then_some(Self(()))
    }

    // Sets the shape of all tile registers: sixteen rows of 64 bytes.
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

    // Gives the tile registers back, so that the thread's switches need not save them.
    fn release(self) {
        // SAFETY: `self` proves that the instruction exists and is permitted.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

fn detect() -> bool {
    if !PairVectors::detect() || __cpuid(0).eax < 7 {
        return false;
    }
    // Leaf 7, edx: bit 22 is AMX-BF16, bit 24 AMX-TILE.
    let features = __cpuid_count(7, 0).edx;
    if features & (1 << 22) == 0 || features & (1 << 24) == 0 {
        return false;
    }
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this call asks for the permission to use the tile registers and touches no memory;
    // where the kernel does not know it, it returns an error.
    unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

// One kernel: `c[i][j] = c[i][j]? + Σ a[i] · b[j]` over `steps` steps of 32, for up to two tiles
// each of rows and columns. `a` tiles have rows `a_pitch` bytes apart and step by 64 bytes; `b`
// tiles lie whole, one after the other; the two tiles of a row of `c` are neighbours.
macro_rules! kernel {
    ($name:ident, [$($start:literal),*], [$($step:literal),*], [$($end:literal),*]) => {
        /// # Safety
        ///
        /// The tile registers are configured. `a[i]` is readable for 16 rows of `a_pitch` bytes of
        /// which the first 64 · `steps` are used, `b[j]` for `steps` · 1024 bytes, and `c[i]`
        /// readable and writable for 16 rows of `c_pitch` bytes of which the first 64 per column
        /// tile are used, for as many tiles as the kernel has. `steps` is not 0.
        unsafe fn $name(
            a: [*const u8; 2],
            a_pitch: usize,
            b: [*const u8; 2],
            c: [*mut u8; 2],
            c_pitch: usize,
            steps: usize,
        ) {
            // SAFETY: reads and writes what the caller vouches for. The tile registers are declared
            // as overwritten; their configuration is untouched.
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

impl Bf16Products for Amx {
    const IN_PLACE: bool = false;

    fn begin(self) {
        self.configure();
    }

    fn score(
        self,
        keys: Rows<'_, bf16>,
        [count, groups, width]: [usize; 3],
        queries: &[bf16],
        scores: &mut [f32],
    ) {
        let steps = width / DEPTH;
        let scores = &mut scores[..count * BLOCK];
        if steps == 0 {
            scores.fill(0.0);
            return;
        }
        let (queries, rows) = (
            &queries[..groups * LANES * width],
            &keys.loaded()[..count * width],
        );
        for key in (0..count).step_by(2 * LANES) {
            let a = [key, key + LANES].map(|key| rows[key * width..].as_ptr().cast());
            let c = [key, key + LANES].map(|key| scores[key * BLOCK..].as_mut_ptr().cast());
            let second = (groups - 1) * LANES * width;
            let b = [queries.as_ptr().cast(), queries[second..].as_ptr().cast()];
            let (a_pitch, c_pitch) = (width * size_of::<bf16>(), BLOCK * size_of::<f32>());
            // SAFETY: `begin` configured the tiles. Each `a` is 16 whole rows of keys, since
            // `count` is a multiple of 32; each `b` is one group's paired queries, width · 16
            // elements, which is `steps` tiles; each `c` is 16 whole rows of 32 scores.
            unsafe {
                if groups == 2 {
                    set_2x2(a, a_pitch, b, c, c_pitch, steps);
                } else {
                    set_2x1(a, a_pitch, b, c, c_pitch, steps);
                }
            }
        }
    }

    fn accumulate(
        self,
        values: &[bf16],
        [count, groups, width]: [usize; 3],
        weights: &[bf16],
        out: &mut [f32],
    ) {
        let (steps, tile) = (count / DEPTH, KEYS * LANES);
        if steps == 0 {
            return;
        }
        let out = &mut out[..groups * LANES * width];
        let second = (groups - 1) * LANES;
        let a = [0, second].map(|row| weights[row * KEYS..(row + LANES) * KEYS].as_ptr().cast());
        for column in (0..width).step_by(2 * LANES) {
            let b = [column, column + LANES]
                .map(|column| values[column / LANES * tile..][..tile].as_ptr().cast());
            let c = [0, second].map(|row| out[row * width + column..].as_mut_ptr().cast());
            let (a_pitch, c_pitch) = (KEYS * size_of::<bf16>(), width * size_of::<f32>());
            // SAFETY: `begin` configured the tiles. Each `a` is a group's 16 rows of KEYS weights;
            // each `b` is KEYS / 32 tiles, of which `steps` at most are used; each `c` is 32
            // columns of 16 rows of `out`, whose width is a multiple of 32.
            unsafe {
                if groups == 2 {
                    add_2x2(a, a_pitch, b, c, c_pitch, steps);
                } else {
                    add_1x2(a, a_pitch, b, c, c_pitch, steps);
                }
            }
        }
    }

    fn end(self) {
        self.release();
    }
}
