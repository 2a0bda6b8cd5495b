//! A device: its memory, and the operations around attention that need no backend of their own.

use std::ffi::CStr;

use crate::model::DType;
use crate::plan::crossover::Machine;
use crate::setters::options;
use crate::spec::{Cause, Platform, Target};
use crate::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Layout, LseConvention,
    LseMut, LseRef, Memory, Rotary, RotaryQuery, TensorMut, TensorRef,
};
use crate::{Error, Named as _, Result};

mod blocks;
mod check;

pub use blocks::{BLOCK, Fp8Blocks};
pub use check::{
    check_gather, check_merge, check_outputs, check_product, check_scatter, check_write,
};

#[doc(hidden)]
pub mod probe;

/// The rows of the cache that a gather reads, and their destination: segment `i` is the
/// `row_starts[i+1] - row_starts[i]` tokens of request `i` of the block table from token
/// `token_starts[i]` on; they go to output rows `row_starts[i] ..`.
#[non_exhaustive]
pub struct GatherRows<'a, D: Device> {
    /// The pages of the segments' requests, one row per segment.
    pub block_table: BlockTable<'a, D>,
    /// The first token of each segment: `[segments]`.
    pub token_starts: ArrayRef<'a, D, i32>,
    /// The start of each segment's rows in the output, and the end of the last: `[segments + 1]`,
    /// ascending from 0.
    pub row_starts: ArrayRef<'a, D, i32>,
    /// The last entry of `row_starts`, which the host knows from planning.
    pub rows: usize,
}

impl<'a, D: Device> GatherRows<'a, D> {
    /// Rows of these pages; `token_starts`, `row_starts` and `rows` as the fields say.
    pub const fn new(
        block_table: BlockTable<'a, D>,
        token_starts: ArrayRef<'a, D, i32>,
        row_starts: ArrayRef<'a, D, i32>,
        rows: usize,
    ) -> Self {
        Self {
            block_table,
            token_starts,
            row_starts,
            rows,
        }
    }
}

impl<D: Device> GatherRows<'_, D> {
    /// Gathers the rows, then multiplies their latents: does the work of
    /// [`Device::gather_cache_and_expand`] in two operations.
    ///
    /// # Errors
    ///
    /// The errors of [`Device::gather_cache_and_expand`].
    pub fn gather_then_expand(
        self,
        device: &D,
        cache: CacheRef<'_, D>,
        gathered: (TensorMut<'_, D>, TensorMut<'_, D>),
        weights: TensorRef<'_, D>,
        to: TensorMut<'_, D>,
    ) -> Result<()> {
        let (mut latent, rope) = gathered;
        device.gather_cache(cache, self, latent.reborrow(), rope)?;
        device.gemm(latent.as_ref().transpose(0, 1), weights, to)
    }
}

/// One page's rows of `row` bytes as a tensor of 16-bit elements. A copy does not look at their
/// type.
fn page_rows(layout: &CacheLayout, (row, strides): (usize, CacheStrides)) -> Result<Layout> {
    let odd = [row, strides.row_stride];
    if let Some(odd) = odd.into_iter().find(|bytes| bytes % 2 == 1) {
        let given = format!("{odd} bytes");
        let accepted = "an even number of bytes";
        return Err(Error::argument("cache row", given, accepted));
    }
    Ok(Layout {
        dtype: DType::F16,
        shape: [1, layout.page_size, row / 2],
        strides: [0, strides.row_stride / 2, 1],
    })
}

/// Copies one page to another within `bytes`, where pages are `page_stride` bytes apart.
fn copy_page_of<D: Device>(
    device: &D,
    bytes: D::BytesMut<'_>,
    (rows, page_stride): (Layout, usize),
    [from, to]: [usize; 2],
) -> Result<()> {
    let (low, high) = (from.min(to), from.max(to));
    let (below, high) = D::split_mut(bytes, high * page_stride);
    let (_, low) = D::split_mut(below, low * page_stride);
    let rows = |bytes| TensorMut::new(bytes, rows).named("cache");
    let (low, high) = (rows(low)?, rows(high)?);
    match from < to {
        true => device.copy(low.as_ref(), high),
        false => device.copy(high.as_ref(), low),
    }
}

/// The new tokens' cache rows, and where they go.
#[non_exhaustive]
pub struct CacheRows<'a, D: Device> {
    /// `[T, 1, L]`.
    pub latent: TensorRef<'a, D>,
    /// `[T, 1, R]`.
    pub rope: TensorRef<'a, D>,
    /// The slot of each token, −1 for none: `[T]`.
    pub slots: ArrayRef<'a, D, i64>,
    /// The cache that they are written to.
    pub cache: CacheMut<'a, D>,
    /// The rotation that `rope` and the queries' rotary parts still need, if any.
    pub rotary: Option<Rotary<'a, D>>,
}

impl<'a, D: Device> CacheRows<'a, D> {
    /// Rows that need no rotation, for these slots of `cache`.
    pub const fn new(
        latent: TensorRef<'a, D>,
        rope: TensorRef<'a, D>,
        slots: ArrayRef<'a, D, i64>,
        cache: CacheMut<'a, D>,
    ) -> Self {
        Self {
            latent,
            rope,
            slots,
            cache,
            rotary: None,
        }
    }

    options! {
        with_rotary(rotary: Rotary<'a, D>);
    }
}

impl<D: Device> CacheRows<'_, D> {
    /// Writes the rows and, if there is a rotation, `query`.
    ///
    /// # Errors
    ///
    /// Same as [`Device::write_cache`] and [`Device::write_cache_rotated`].
    pub fn write(self, device: &D, query: Option<RotaryQuery<'_, D>>) -> Result<()> {
        let Self {
            latent,
            rope,
            slots,
            cache,
            rotary,
        } = self;
        match rotary {
            None => device.write_cache(latent, rope, slots, cache),
            Some(rotary) => device.write_cache_rotated(latent, rope, &rotary, query, slots, cache),
        }
    }

    /// Writes the rows, then rotates and multiplies `queries`: [`Device::write_cache_and_absorb`]
    /// one after the other.
    ///
    /// # Errors
    ///
    /// The errors of [`Device::write_cache_and_absorb`].
    pub fn write_then_absorb(self, device: &D, mut queries: AbsorbedQueries<'_, D>) -> Result<()> {
        let rotation = queries.rotation(&self)?;
        self.write(device, rotation)?;
        let (query, weights, to) = queries.product()?;
        device.gemm(query, weights, to)
    }
}

/// Queries on their way to the latent space, where the absorbed path takes them.
#[non_exhaustive]
pub struct AbsorbedQueries<'a, D: Device> {
    /// `[A, H, P + R]`.
    pub query: TensorRef<'a, D>,
    /// W_UK: `[H, P, L]`.
    pub weights: TensorRef<'a, D>,
    /// `[A, H, L]`, or `[A, H, L + R]` where there is a rotation, whose result stands behind.
    pub to: TensorMut<'a, D>,
}

impl<'a, D: Device> AbsorbedQueries<'a, D> {
    /// `query` by `weights` goes to `to`; shapes as the fields say.
    pub const fn new(
        query: TensorRef<'a, D>,
        weights: TensorRef<'a, D>,
        to: TensorMut<'a, D>,
    ) -> Self {
        Self { query, weights, to }
    }
}

/// Two factors and where their product goes, as [`Device::gemm`] takes them.
pub(crate) type Product<'a, D> = (TensorRef<'a, D>, TensorRef<'a, D>, TensorMut<'a, D>);

impl<D: Device> AbsorbedQueries<'_, D> {
    /// `to[.., ..L] = query[.., ..P] · W_UK`, a product per head.
    ///
    /// # Errors
    ///
    /// If the weights are wider than the tensors.
    pub fn product(&mut self) -> Result<Product<'_, D>> {
        let [_, nope, latent] = self.weights.shape();
        let query = self.query.shorten().narrow(2, 0..nope).named("query")?;
        let to = self.to.reborrow().narrow(2, 0..latent);
        let to = to.named("absorbed queries")?;
        Ok((
            query.transpose(0, 1),
            self.weights.shorten(),
            to.transpose(0, 1),
        ))
    }

    /// The rotation of `query[.., P..]` into `to[.., L..]`, if the rows are rotated, too.
    ///
    /// # Errors
    ///
    /// If the weights are wider than the tensors.
    pub fn rotation(&mut self, rows: &CacheRows<'_, D>) -> Result<Option<RotaryQuery<'_, D>>> {
        if rows.rotary.is_none() {
            return Ok(None);
        }
        let [_, nope, latent] = self.weights.shape();
        let [from, to] = [self.query.shape()[2], self.to.shape()[2]];
        Ok(Some(RotaryQuery::Into {
            from: self.query.shorten().narrow(2, nope..from).named("query")?,
            to: (self.to.reborrow().narrow(2, latent..to)).named("absorbed queries")?,
        }))
    }
}

/// A place where attention runs: its [`Memory`], and the operations around attention.
///
/// Every operation is enqueued and returns at once if the device is asynchronous; none allocates
/// and none waits. A handle is cheap to clone and refers to the same device and stream.
pub trait Device: Memory {
    /// The kind of device that this is.
    const PLATFORM: Platform;

    /// Tells if this machine can have such a device at all, and if not, why.
    fn availability() -> Result<(), Cause>;

    /// The hardware of a selection for this device.
    fn target(&self) -> Target;

    /// The number of the device within its type: memory of a device of one number is not for
    /// another.
    fn ordinal(&self) -> usize {
        0
    }

    /// The figures from which the times of a step's two paths follow. A device that knows none of
    /// its own leaves them to arithmetic alone.
    fn machine(&self) -> Machine {
        Machine::ARITHMETIC
    }

    /// Checks that the operations on rows take a tensor with this layout. The layer asks before it
    /// enqueues anything. `field` is the tensor's name in the call.
    ///
    /// # Errors
    ///
    /// If an operation would refuse the strides.
    fn check_tensor(&self, field: &'static str, layout: &Layout) -> Result<()> {
        let _ = (field, layout);
        Ok(())
    }

    /// Checks that [`gemm`](Self::gemm) takes a factor, or writes a product, `[B, M, N]` that lies
    /// so: the layer asks before it enqueues anything.
    ///
    /// # Errors
    ///
    /// If it would refuse the strides.
    fn check_operand(&self, field: &'static str, layout: &Layout) -> Result<()> {
        let _ = (field, layout);
        Ok(())
    }

    /// Checks that a row has the same bits in every operation, whatever rows stand beside it: the
    /// layer asks for problems with [`BatchInvariant`](crate::spec::Feature::BatchInvariant).
    ///
    /// # Errors
    ///
    /// If the device does not promise that. The default is to promise nothing.
    fn check_batch_invariant(&self) -> Result<()> {
        let accepted = "none: this device chooses the order of a product's sums by its rows";
        Err(Error::argument("features", "batch_invariant", accepted))
    }

    /// `c[i] = a[i] · b[i]` for every `i` of the first axis: `[B, M, K] · [B, K, N] → [B, M, N]`,
    /// one dtype, any strides on `a` and `b` (a stride of 0 repeats), accumulated in f32 and
    /// rounded once. A device may read `b` before the work is done that was enqueued earlier, if it
    /// is [constant](TensorRef::constant).
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or the device cannot take the strides.
    fn gemm(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Multiplies like [`gemm`](Self::gemm), at the same time as the operation that was enqueued
    /// last.
    ///
    /// # Errors
    ///
    /// Same as [`gemm`](Self::gemm).
    ///
    /// # Safety
    ///
    /// The operation that was enqueued last begins only when all before it is done (a selection of
    /// lists is such an operation), and it neither writes `a` nor accesses `c`.
    unsafe fn gemm_ready(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.gemm(a, b, c)
    }

    /// Copies `from` to `to`, of the same shape and dtype, with any strides.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree.
    fn copy(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Copies rows to the places that an index names: `to[places[n]] = from[n]` for each row n of
    /// `from`, `[N, H, W]`. A row whose place is −1, or any other number that is no row of `to`
    /// `[M, H, W]`, is skipped; no two rows have one place; the rows of `to` that no place names
    /// are left as they are. Any strides.
    ///
    /// # Errors
    ///
    /// If dtypes, heads or widths disagree, or there are not N places.
    fn scatter_rows(
        &self,
        from: TensorRef<'_, Self>,
        places: ArrayRef<'_, Self, i64>,
        to: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Writes the values of a matrix in block fp8, `[rows, columns]`, to `to` `[1, rows, columns]`
    /// with any stride of rows and unit stride of columns: products of codes and scales in f32,
    /// rounded once. An engine does this when it loads weights.
    ///
    /// # Errors
    ///
    /// If the shapes disagree, or the device fails.
    fn dequantize_blocks(&self, from: Fp8Blocks<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Copies the rows of page `from` to page `to` of a cache. An engine does this before a request
    /// writes to a page that other requests share.
    ///
    /// # Errors
    ///
    /// If the cache has not both pages, its rows are of an odd number of bytes, or the device
    /// fails.
    fn copy_page(&self, cache: CacheMut<'_, Self>, from: usize, to: usize) -> Result<()> {
        let layout = *cache.layout();
        for (field, page) in [("from", from), ("to", to)] {
            if page >= layout.pages {
                let accepted = format!("below the cache's {} pages", layout.pages);
                return Err(Error::argument(field, format!("page {page}"), accepted));
            }
        }
        if from == to {
            return Ok(());
        }
        let rope = layout.format.rope_bytes(layout.dims);
        let rope = layout.split_rope.map(|strides| (rope, strides));
        let rows = page_rows(&layout, (layout.row_bytes(), layout.strides()))?;
        let rope_rows = rope.map(|rope| page_rows(&layout, rope)).transpose()?;
        let (bytes, rope_bytes) = cache.into_parts();
        copy_page_of(self, bytes, (rows, layout.page_stride), [from, to])?;
        match (rope_bytes, rope_rows, rope) {
            (Some(bytes), Some(rows), Some((_, strides))) => {
                copy_page_of(self, bytes, (rows, strides.page_stride), [from, to])
            }
            _ => Ok(()),
        }
    }

    /// Writes zeros to every element.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn clear(&self, to: TensorMut<'_, Self>) -> Result<()>;

    /// Writes one cache row per token: `latent` `[T, 1, L]` and `rope` `[T, 1, R]` to slot
    /// `slots[t]`, quantised as the cache's format says. A token whose slot is −1 is skipped; no
    /// two tokens have one slot.
    ///
    /// # Errors
    ///
    /// If shapes disagree with each other or with the cache.
    fn write_cache(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()>;

    /// Writes like [`write_cache`](Self::write_cache), and in the same launch rotates `rope` and
    /// the queries' rotary parts, which are not rotated yet. The result is the same as if they had
    /// been rotated in place beforehand, in f32 and rounded to their dtype.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or R is odd.
    fn write_cache_rotated(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        rotary: &Rotary<'_, Self>,
        query: Option<RotaryQuery<'_, Self>>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()>;

    /// Rotates vectors `[T, H, R]` by their tokens' positions, in f32 and rounded to their dtype:
    /// for a step whose queries or keys something reads before the cache write has rotated them.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or R is odd.
    fn rotate(&self, rotary: &Rotary<'_, Self>, vectors: RotaryQuery<'_, Self>) -> Result<()>;

    /// Begins a step on the absorbed path, in one launch if the device can: writes the new tokens'
    /// rows to the cache, and projects the queries of all of them, or of the first ones, to the
    /// latent space. It is [`write_cache`](Self::write_cache) or
    /// [`write_cache_rotated`](Self::write_cache_rotated), and
    /// [`gemm`](Self::gemm).
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree with each other or with the cache, the width that is rotated is
    /// odd, or the device fails.
    fn write_cache_and_absorb(
        &self,
        rows: CacheRows<'_, Self>,
        queries: AbsorbedQueries<'_, Self>,
    ) -> Result<()> {
        rows.write_then_absorb(self, queries)
    }

    /// Reads cache rows, dequantised, into `latent` `[W, 1, L]` and `rope` `[W, 1, R]`, of which
    /// the first `rows.rows` are written.
    ///
    /// # Errors
    ///
    /// If shapes disagree with each other or with the cache, or more than W rows are asked for.
    fn gather_cache(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        latent: TensorMut<'_, Self>,
        rope: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Expands cached rows for the expanded path, in one launch if the device can. It gathers them
    /// as [`gather_cache`](Self::gather_cache) does into `gathered`, a latent `[W, 1, L]` and a
    /// rotary part `[W, 1, R]` with W = `rows.rows`, and multiplies the latents by `weights` `[1,
    /// L, N]` into `to` `[1, W, N]`, as [`gemm`](Self::gemm) does. The device may
    /// leave the gathered latents unwritten.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree with each other or with the cache, or the device fails.
    fn gather_cache_and_expand(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        gathered: (TensorMut<'_, Self>, TensorMut<'_, Self>),
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        rows.gather_then_expand(self, cache, gathered, weights, to)
    }

    /// Merges a partial result into another over the same queries: with `a` in `out`, `lse` and `b`
    /// in `other`, `other_lse`, per token and head `lse = ln(e^a + e^b)` and
    /// `out = out·e^(a − lse) + other·e^(b − lse)`. +inf is taken as −inf. Both empty give 0 and
    /// −inf. Outputs are `[T, H, V]` with any strides of tokens and heads.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree.
    fn merge(
        &self,
        out: TensorMut<'_, Self>,
        lse: LseMut<'_, Self>,
        other: TensorRef<'_, Self>,
        other_lse: LseRef<'_, Self>,
    ) -> Result<()>;

    /// True if the device has [`scale_outputs`](Self::scale_outputs).
    fn scales_outputs(&self) -> bool {
        false
    }

    /// Multiplies the output `[T, H, V]` of each token and head by what is given, in f32 and
    /// rounded once: the part `1 / (1 + e^(sink − lse))` that a sink leaves, one of `[H]` in the
    /// scores' own units, and the sigmoid of a gate `[T, H, V]` or `[T, H, 1]` in the output's
    /// dtype. An output whose log-sum-exp is −inf is not changed by its sink. Any strides. Sinks
    /// come once, behind the last [`merge`](Self::merge) of partial results, those of ranks too.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or the device does not [do this](Self::scales_outputs).
    fn scale_outputs(
        &self,
        out: TensorMut<'_, Self>,
        sinks: Option<(ArrayRef<'_, Self, f32>, LseRef<'_, Self>)>,
        gate: Option<TensorRef<'_, Self>>,
    ) -> Result<()> {
        let _ = (out, sinks, gate);
        Err(Error::argument(
            "outputs",
            "to be scaled",
            "as they are: the device scales none",
        ))
    }

    /// Orders everything enqueued from now on behind everything enqueued until now, even a kernel
    /// that was launched to begin early. A device that lets no kernel begin early has nothing to
    /// do.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn fence(&self) -> Result<()> {
        Ok(())
    }

    /// For conformance tests: kernels that overlap with others, if kernels of this device can.
    ///
    /// # Errors
    ///
    /// If they cannot be loaded.
    #[doc(hidden)]
    fn probe_dependents(&self) -> Result<Option<Box<dyn probe::Dependents<Self> + '_>>> {
        Ok(None)
    }

    /// For conformance tests: runs what `work` enqueues once, so that all code is loaded, captures
    /// it into a graph, changes its inputs, and replays the graph twice. Returns false if the
    /// device has no graphs; then nothing was done.
    ///
    /// # Errors
    ///
    /// If `work` or the device fails.
    #[doc(hidden)]
    fn probe_replay(&self, work: &mut dyn probe::Replayed) -> Result<bool> {
        let _ = work;
        Ok(false)
    }

    /// For conformance tests: guards around the buffers of this device, if it has any.
    #[doc(hidden)]
    fn probe_guards(&self) -> Option<&dyn probe::Guards> {
        None
    }

    /// Does `work`, which a profiler may show as a range of this name on the host's time line.
    fn profile_range<R>(&self, name: &'static CStr, work: impl FnOnce() -> R) -> R {
        let _ = name;
        work()
    }

    /// Rewrites a log-sum-exp of another convention as natural, heads first.
    ///
    /// # Errors
    ///
    /// If the extents differ.
    fn convert_lse<C: LseConvention>(
        &self,
        from: LseRef<'_, Self, C>,
        to: LseMut<'_, Self>,
    ) -> Result<()>;
}
