//! Attention of a block of query rows to a range of keys, tile by tile. Both phases use it. In
//! prefill the rows are tokens of one head; in decode they are the heads of a request's tokens.
//!
//! ```text
//! load the query rows
//! for each tile of 256 keys:
//!     load the keys and values of the tile, converted     once for all rows
//!     for each block of rows that sees a key of it:
//!         scores = keys · queriesᵀ                          [keys, rows]
//!         softmax of the scores, rescaling what there is
//!         out += scoresᵀ · values                           [rows, V]
//! ```
//!
//! Tiles begin at multiples of 256 from the range's first key, and every row is computed by itself.
//! A row's result thus depends neither on other rows nor on the thread. If a row sees a NaN, its
//! result is NaN. A key that a row does not see never affects it, although a block is multiplied as
//! a whole (see [`Seen`]).

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use multiversion::multiversion;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod single;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod vectors;

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::Instructions;
use super::buffer::Scratch;
use super::fp8;
use super::view::{Lane, Places};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use amx::{Amx, Tiles};
#[cfg(target_arch = "x86_64")]
use bf16::Bf16Engine;
use mla_runtime::backend::Output;
use mla_runtime::model::{DType, Element};
use mla_runtime::{Error, Result};
use single::{F32Engine, Gemm};
pub(crate) use softmax::{LANES, Running};
#[cfg(target_arch = "x86_64")]
use vectors::{PairVectors, Vectors};

/// The number of keys in a tile.
pub(crate) const KEYS: usize = 256;

/// The maximum number of query rows in an engine's block.
const MAX_BLOCK: usize = 4 * LANES;

/// The queries, keys and values of a unit of work.
pub(crate) trait Source<S: Lane> {
    /// Writes the query of a row.
    fn query(&self, row: usize, to: &mut [S]);

    /// Returns the factor of a row's scores before they become exponents of 2.
    fn scale(&self, row: usize) -> f32;

    /// Returns the number of keys that a row sees, counted from the unit's first key.
    fn limit(&self, row: usize) -> usize;

    /// Writes the key at a position.
    fn key(&self, position: usize, to: &mut [S]);

    /// Returns the key at a position without a copy, if the source holds it in the engine's type.
    fn key_in_place(&self, position: usize) -> Option<&[S]>;

    /// Writes the value at a position. This is not called if values are the first part of keys.
    fn value(&self, position: usize, to: &mut [S]);
}

/// The widths that an engine is made for.
#[derive(Clone, Copy)]
pub(crate) struct Widths {
    /// The width of queries and keys.
    pub(crate) key: usize,
    /// The width of values.
    pub(crate) value: usize,
    /// True if a value is the first part of its key.
    pub(crate) shared: bool,
    /// True if a row has the same number in its unit of work whatever the batch is. The last rows
    /// of a unit, up to eight, may then be summed in another order than the rest, and still a row's
    /// result does not depend on other rows.
    pub(crate) fixed_rows: bool,
}

impl Widths {
    // Returns the number of rows whose scores are computed. If rows have fixed places, it is their
    // number; otherwise it is rounded up to a multiple of sixteen.
    fn scored(self, rows: usize) -> usize {
        match self.fixed_rows {
            true => rows,
            false => rows.next_multiple_of(LANES),
        }
    }
}

/// The keys of a tile that the rows of a block see.
///
/// The weight of a key that a row does not see is 0, but 0 times a NaN is NaN. If some row of the
/// block does not see a key, an engine therefore leaves values of this key that are not finite out
/// of the product. It adds them to the rows that see the key ([`add_value`](Self::add_value)).
#[derive(Clone, Copy)]
pub(crate) struct Seen<'a> {
    /// The rows of the block.
    pub(crate) rows: usize,
    /// The number of keys in the tile that each row sees, in groups of sixteen rows. It is 0 for
    /// rows that pad the last group.
    pub(crate) limits: &'a [[u32; LANES]],
    /// The factors of each row's scores, in the same groups.
    pub(crate) scales: &'a [[f32; LANES]],
    /// The number of keys that every row of the unit sees. Their values need no check.
    pub(crate) by_all: usize,
    /// The number of keys that some row sees.
    pub(crate) by_some: usize,
}

impl Seen<'_> {
    // Adds weight · value to an output of each row that sees the key. `out` begins at that of row
    // 0.
    pub(crate) fn add_value(
        &self,
        key: usize,
        value: f32,
        weight: impl Fn(usize) -> f32,
        out: &mut [f32],
        pitch: usize,
    ) {
        for (row, limit) in self.limits.as_flattened().iter().enumerate() {
            if key < *limit as usize {
                out[row * pitch] += weight(row) * value;
            }
        }
    }
}

/// The keys or values of a tile.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'r, S> {
    /// Copies, one after another.
    Loaded(&'r [S]),
    /// References to rows in the caller's memory.
    InPlace(&'r [&'r [S]]),
}

impl<'r, S> Rows<'r, S> {
    fn of(loaded: &'r [S], in_place: Option<&'r [&'r [S]]>) -> Self {
        in_place.map_or(Self::Loaded(loaded), Self::InPlace)
    }

    // Returns the rows if they are copies.
    fn loaded(self) -> &'r [S] {
        match self {
            Self::Loaded(rows) => rows,
            Self::InPlace(_) => unreachable!("only what takes keys in place is given them so"),
        }
    }

    // Returns the first `count` rows. Copies are `pitch` apart. Among rows in place, `filler`
    // replaces missing ones.
    #[cfg(target_arch = "x86_64")]
    fn list(self, pitch: usize, count: usize, filler: &'r [S]) -> [&'r [S]; KEYS] {
        std::array::from_fn(|row| match self {
            _ if row >= count => &[][..],
            Self::Loaded(rows) => &rows[row * pitch..(row + 1) * pitch],
            Self::InPlace(rows) => rows.get(row).copied().unwrap_or(filler),
        })
    }
}

/// The two products and the softmax between them, for one kind of arithmetic.
pub(crate) trait Engine: Sized + Send {
    /// The type of the elements that the engine multiplies.
    type Lane: Lane;

    /// The number of query rows in a block: a multiple of sixteen, at most `MAX_BLOCK`.
    const BLOCK: usize;

    /// A proof that the processor has the instructions of this engine.
    type Proof: Copy;

    /// Allocates scratch for units of at most `rows` rows.
    fn new(proof: Self::Proof, rows: usize, widths: Widths) -> Result<Self>;

    /// Returns the distance between rows of queries or keys.
    fn key_pitch(&self) -> usize;

    /// Returns the distance between rows of values or outputs.
    fn value_pitch(&self) -> usize;

    /// Returns the buffer into which queries are written before [`begin`](Self::begin).
    fn queries(&mut self) -> &mut [Self::Lane];

    /// Returns the buffer into which the keys of a tile are written before [`tile`](Self::tile).
    fn keys(&mut self) -> &mut [Self::Lane];

    /// Returns the buffer into which the values of a tile are written before [`tile`](Self::tile).
    /// It is not used if values are part of the keys.
    fn values(&mut self) -> &mut [Self::Lane];

    /// Begins a unit of work with the first `rows` queries in the buffer.
    fn begin(&mut self, rows: usize);

    /// Returns true if [`block`](Self::block) can read keys from the caller's memory without a
    /// copy.
    fn in_place(&self) -> bool;

    /// Begins a tile of `keys` keys and values. They are the first ones in the buffers, unless they
    /// are read in place.
    fn tile(&mut self, keys: usize, in_place: bool);

    /// Attends the rows of block `block` to the keys of the tile that they see. There is one
    /// `running` per sixteen rows. `in_place` contains the keys of the tile if they are read in
    /// place: every row then sees all of them, and their first parts are the values. Without it the
    /// tile is in the buffers.
    fn block(
        &mut self,
        in_place: Option<&[&[Self::Lane]]>,
        block: usize,
        seen: Seen<'_>,
        running: &mut [Running],
        out: &mut [f32],
    );

    /// Ends a unit of work.
    fn end(&mut self) {}
}

/// Multiplies each of sixteen rows by its factor.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma"))]
pub(crate) fn rescale(factors: &[f32; LANES], out: &mut [f32], pitch: usize) {
    if pitch == 0 || factors.iter().all(|factor| *factor == 1.0) {
        return;
    }
    for (row, factor) in out.chunks_mut(pitch).zip(factors) {
        for value in row {
            *value *= factor;
        }
    }
}

/// The partial results of a unit's rows: outputs that are not yet divided by the sum.
pub(crate) struct Partial<'a> {
    /// The state of the softmax, one for every sixteen rows.
    pub(crate) running: &'a mut [Running],
    /// Outputs, `[rows, pitch]`.
    pub(crate) out: &'a mut [f32],
    /// The distance between rows of `out`.
    pub(crate) pitch: usize,
}

impl Partial<'_> {
    pub(crate) fn clear(&mut self) {
        self.running.fill(Running::EMPTY);
        self.out.fill(0.0);
    }

    /// Merges the partial result over other keys into this one.
    pub(crate) fn merge(&mut self, other: &Partial<'_>) {
        debug_assert_eq!(self.pitch, other.pitch);
        let pairs = self.running.iter_mut().zip(&*other.running).enumerate();
        for (group, (a, b)) in pairs {
            for lane in 0..LANES {
                let max = a.max[lane].max(b.max[lane]);
                if b.sum[lane] == 0.0 {
                    continue;
                }
                let weight = |own: f32| {
                    if own == f32::NEG_INFINITY {
                        0.0
                    } else {
                        (own - max).exp2()
                    }
                };
                let (x, y) = (weight(a.max[lane]), weight(b.max[lane]));
                a.max[lane] = max;
                a.sum[lane] = a.sum[lane] * x + b.sum[lane] * y;
                let row =
                    (group * LANES + lane) * self.pitch..(group * LANES + lane + 1) * self.pitch;
                for (a, b) in self.out[row.clone()].iter_mut().zip(&other.out[row]) {
                    *a = *a * x + b * y;
                }
            }
        }
    }

    /// Divides a row's output by the sum in place. Returns the log-sum-exp and the output.
    pub(crate) fn finish(&mut self, row: usize, scale: f32) -> (f32, &mut [f32]) {
        let running = &self.running[row / LANES];
        let (max, sum) = (running.max[row % LANES], running.sum[row % LANES]);
        let out = &mut self.out[row * self.pitch..(row + 1) * self.pitch];
        if sum == 0.0 {
            out.fill(0.0);
            return (f32::NEG_INFINITY, out);
        }
        let factor = scale / sum;
        for value in &mut *out {
            *value *= factor;
        }
        ((max + sum.log2()) * std::f32::consts::LN_2, out)
    }
}

/// An engine with the memory for one unit's result.
pub(crate) struct Workspace<E> {
    pub(crate) engine: E,
    running: Vec<Running>,
    out: Scratch<f32>,
    // The sums over the splits of a unit.
    total_running: Vec<Running>,
    total_out: Scratch<f32>,
}

impl<E: Engine> Workspace<E> {
    pub(crate) fn new(proof: E::Proof, rows: usize, widths: Widths, splits: bool) -> Result<Self> {
        let rows = rows.next_multiple_of(E::BLOCK);
        let engine = E::new(proof, rows, widths)?;
        let total = if splits { rows } else { 0 };
        Ok(Self {
            running: vec![Running::EMPTY; rows / LANES],
            out: Scratch::new(rows * engine.value_pitch())?,
            total_running: vec![Running::EMPTY; total / LANES],
            total_out: Scratch::new(total * engine.value_pitch())?,
            engine,
        })
    }

    /// Attends `rows` rows to the keys of each of `splits`, and adds up the results in order.
    pub(crate) fn attend_splits<S: Source<E::Lane>>(
        &mut self,
        source: &S,
        rows: usize,
        mut splits: impl Iterator<Item = Range<usize>>,
    ) -> Partial<'_> {
        let pitch = self.engine.value_pitch();
        let padded = rows.next_multiple_of(LANES);
        let mut partial = Partial {
            running: &mut self.running[..padded / LANES],
            out: &mut self.out[..padded * pitch],
            pitch,
        };
        attend(
            &mut self.engine,
            source,
            rows,
            splits.next().unwrap_or(0..0),
            &mut partial,
        );
        let Some(mut split) = splits.next() else {
            return partial;
        };
        let mut total = Partial {
            running: &mut self.total_running[..padded / LANES],
            out: &mut self.total_out[..padded * pitch],
            pitch,
        };
        total.running.copy_from_slice(partial.running);
        total.out.copy_from_slice(partial.out);
        loop {
            attend(&mut self.engine, source, rows, split, &mut partial);
            total.merge(&partial);
            match splits.next() {
                Some(next) => split = next,
                None => return total,
            }
        }
    }
}

/// Attends rows `0..rows` of `source` to the keys in `range`.
pub(crate) fn attend<E: Engine, S: Source<E::Lane>>(
    engine: &mut E,
    source: &S,
    rows: usize,
    range: Range<usize>,
    partial: &mut Partial<'_>,
) {
    partial.clear();
    let pitch = engine.key_pitch();
    if pitch > 0 {
        let queries = engine.queries().chunks_mut(pitch);
        for (row, to) in queries.take(rows).enumerate() {
            source.query(row, to);
        }
    }
    engine.begin(rows);
    let seen_by_all = (0..rows).map(|row| source.limit(row)).min().unwrap_or(0);
    let mut start = range.start;
    while start < range.end {
        let keys = KEYS.min(range.end - start);
        let in_place = match start + keys <= seen_by_all && engine.in_place() {
            true => keys_in_place(source, start, keys),
            false => None,
        };
        if in_place.is_none() {
            fetch(engine, source, start, keys);
        }
        engine.tile(keys, in_place.is_some());
        let in_place = in_place.as_ref().map(|lying| &lying[..keys]);
        let range = start..start + keys;
        attend_to_tile(engine, source, rows, range, in_place, partial);
        start += keys;
    }
    engine.end();
}

/// Returns the first `keys` keys of a tile without a copy, if that is possible for all of them.
fn keys_in_place<L: Lane, S: Source<L>>(
    source: &S,
    start: usize,
    keys: usize,
) -> Option<[&[L]; KEYS]> {
    let mut lying = [&[][..]; KEYS];
    for (key, lying) in lying[..keys].iter_mut().enumerate() {
        *lying = source.key_in_place(start + key)?;
    }
    Some(lying)
}

/// Copies the keys and values of a tile into the engine's buffers.
fn fetch<E: Engine, S: Source<E::Lane>>(engine: &mut E, source: &S, start: usize, keys: usize) {
    let (key_pitch, value_pitch) = (engine.key_pitch(), engine.value_pitch());
    if key_pitch > 0 {
        let places = engine.keys().chunks_mut(key_pitch);
        for (key, to) in places.take(keys).enumerate() {
            source.key(start + key, to);
        }
    }
    if value_pitch > 0 {
        let places = engine.values().chunks_mut(value_pitch);
        for (key, to) in places.take(keys).enumerate() {
            source.value(start + key, to);
        }
    }
}

/// Attends to the keys of one tile, block by block of rows.
fn attend_to_tile<E: Engine, S: Source<E::Lane>>(
    engine: &mut E,
    source: &S,
    rows: usize,
    range: Range<usize>,
    in_place: Option<&[&[E::Lane]]>,
    partial: &mut Partial<'_>,
) {
    let (keys, pitch) = (range.len(), engine.value_pitch());
    for block in 0..rows.div_ceil(E::BLOCK) {
        let first = block * E::BLOCK;
        let of_block = (rows - first).min(E::BLOCK);
        let groups = of_block.div_ceil(LANES);
        let mut limits = [[0; LANES]; MAX_BLOCK / LANES];
        let mut scales = [[1.0; LANES]; MAX_BLOCK / LANES];
        let (mut max, mut min) = (0, keys);
        for row in first..first + of_block {
            let seen = source.limit(row).saturating_sub(range.start).min(keys);
            limits[(row - first) / LANES][row % LANES] = seen as u32;
            scales[(row - first) / LANES][row % LANES] = source.scale(row);
            max = max.max(seen);
            min = min.min(seen);
        }
        if max == 0 {
            continue;
        }
        engine.block(
            in_place,
            block,
            Seen {
                rows: of_block,
                limits: &limits[..groups],
                scales: &scales[..groups],
                by_all: min,
                by_some: max,
            },
            &mut partial.running[first / LANES..first / LANES + groups],
            &mut partial.out[first * pitch..(first + groups * LANES) * pitch],
        );
    }
}

/// The workspaces of the engine that suits the dtype and the processor best, one per thread.
pub(crate) enum Engines {
    Gemm(Vec<Workspace<F32Engine<Gemm>>>),
    #[cfg(target_arch = "x86_64")]
    Vectors(Vec<Workspace<F32Engine<Vectors>>>),
    #[cfg(target_arch = "x86_64")]
    Pairs(Vec<Workspace<Bf16Engine<PairVectors>>>),
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(Vec<Workspace<Bf16Engine<Tiles<Amx>>>>),
}

/// Evaluates an expression in which `$workspaces` are those of the chosen engine.
macro_rules! with_workspaces {
    ($engines:expr, $workspaces:ident => $body:expr) => {
        match $engines {
            crate::attention::Engines::Gemm($workspaces) => $body,
            #[cfg(target_arch = "x86_64")]
            crate::attention::Engines::Vectors($workspaces) => $body,
            #[cfg(target_arch = "x86_64")]
            crate::attention::Engines::Pairs($workspaces) => $body,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            crate::attention::Engines::Amx($workspaces) => $body,
        }
    };
}
pub(crate) use with_workspaces;

impl Engines {
    pub(crate) fn new(
        cpu: &Cpu,
        dtype: DType,
        rows: usize,
        widths: Widths,
        splits: bool,
    ) -> Result<Self> {
        fn each<E: Engine>(
            cpu: &Cpu,
            proof: E::Proof,
            (rows, widths, splits): (usize, Widths, bool),
        ) -> Result<Vec<Workspace<E>>> {
            let workspace = |_| Workspace::new(proof, rows, widths, splits);
            (0..cpu.threads()).map(workspace).collect()
        }
        let size = (rows, widths, splits);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (cpu.instructions, dtype);
        #[cfg(target_arch = "x86_64")]
        let bf16 = dtype == DType::BF16;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if bf16
            && cpu.takes(Instructions::Tiles)
            && let Some(amx) = Amx::new()
        {
            return Ok(Self::Amx(each(cpu, Tiles(amx), size)?));
        }
        #[cfg(target_arch = "x86_64")]
        if cpu.takes(Instructions::Vectors) {
            if bf16 && let Some(pairs) = PairVectors::new() {
                return Ok(Self::Pairs(each(cpu, pairs, size)?));
            }
            if let Some(vectors) = Vectors::new() {
                return Ok(Self::Vectors(each(cpu, vectors, size)?));
            }
        }
        Ok(Self::Gemm(each(cpu, Gemm, size)?))
    }

    /// Returns the distance between rows of outputs.
    pub(crate) fn value_pitch(&self) -> usize {
        with_workspaces!(self, workspaces => {
            workspaces.first().map_or(0, |workspace| workspace.engine.value_pitch())
        })
    }
}

/// Calls `work` once for each of `count` units, with one thread per workspace. Units are handed out
/// in order, so the longest should come first.
///
/// The calling thread works, too. It begins at once, while threads of the pool wake up.
pub(crate) fn for_each_unit<W: Send>(
    cpu: &Cpu,
    workspaces: &mut [W],
    count: usize,
    work: impl Fn(&mut W, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let threads = workspaces.len().min(count);
    let work_on = |workspace: &mut W| {
        loop {
            let unit = next.fetch_add(1, Ordering::Relaxed);
            if unit >= count {
                break;
            }
            work(workspace, unit);
        }
    };
    let Some((own, others)) = workspaces[..threads].split_first_mut() else {
        return;
    };
    if others.is_empty() {
        return work_on(own);
    }
    cpu.in_place_scope(|scope| {
        for workspace in others {
            scope.spawn(|_| work_on(workspace));
        }
        work_on(own);
    });
}

/// The destination of the results.
pub(crate) enum OutPlaces<'a, T> {
    Plain(Places<'a, T>),
    Fp8 { codes: Places<'a, u8>, scale: f32 },
}

impl<'a, T: Element> OutPlaces<'a, T> {
    pub(crate) fn of(out: Output<'a, Cpu>, shape: [usize; 3]) -> Result<Self> {
        match out {
            Output::Plain(tensor) => {
                tensor.layout().require("out", T::DTYPE, shape)?;
                Ok(Self::Plain(Places::of("out", tensor)?))
            }
            Output::Fp8 { bytes, scale } => {
                let [_, heads, width] = shape;
                // The product may saturate, but no memory has that number of bytes.
                let needed = shape.into_iter().fold(1, usize::saturating_mul);
                if bytes.len() < needed {
                    return Err(Error::argument(
                        "out",
                        format!("{} bytes", bytes.len()),
                        format!("{needed} bytes, {shape:?} without gaps"),
                    ));
                }
                if !(scale.is_finite() && scale > 0.0) {
                    return Err(Error::argument(
                        "out scale",
                        scale,
                        "a finite number above 0",
                    ));
                }
                let codes = Places::new(bytes, shape, [heads * width, width, 1]);
                Ok(Self::Fp8 { codes, scale })
            }
        }
    }

    /// Writes the output of a token and head.
    ///
    /// # Safety
    ///
    /// Nothing else reads or writes these elements at the same time.
    pub(crate) unsafe fn write(&self, token: usize, head: usize, values: &[f32]) {
        match self {
            // SAFETY: the contract of `Places::write_row`, which is this function's own.
            Self::Plain(places) => unsafe { places.write_row(token, head, values) },
            Self::Fp8 { codes, scale } => {
                let offset = codes.at(token, head, 0);
                // SAFETY: the contract of `Places::slice`, which is this function's own.
                let codes = unsafe { codes.slice(offset, codes.shape[2]) };
                for (code, value) in codes.iter_mut().zip(values) {
                    *code = fp8::encode(value / scale);
                }
            }
        }
    }
}
