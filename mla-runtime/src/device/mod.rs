//! A device: its memory, and the operations around attention that need no backend.

use std::ffi::CStr;

use crate::model::DType;
use crate::plan::crossover::Machine;
use crate::setters::options;
use crate::spec::{Cause, Feature, Platform, Problem, Target};
use crate::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Layout, LseConvention,
    LseMut, LseRef, Memory, Rotary, TensorMut, TensorRef,
};
use crate::{Error, Result, named};

mod blocks;
mod check;

pub use blocks::{BLOCK, Fp8Blocks};
pub use check::{
    check_gather, check_merge, check_outputs, check_product, check_scatter, check_write,
};

#[doc(hidden)]
pub mod probe;

/// The cache rows that a gather reads, and their destination. Segment `i` consists of
/// `row_starts[i+1] - row_starts[i]` tokens of request `i` of the block table, beginning at token
/// `token_starts[i]`. Its rows go to the output rows `row_starts[i] ..`.
#[non_exhaustive]
pub struct GatherRows<'a, D: Device> {
    /// The pages of the segments' requests, one row per segment.
    pub block_table: BlockTable<'a, D>,
    /// The first token of each segment: `[segments]`.
    pub token_starts: ArrayRef<'a, D, i32>,
    /// The start of each segment's rows in the output, and the end of the last: `[segments + 1]`,
    /// ascending from 0.
    pub row_starts: ArrayRef<'a, D, i32>,
    /// The last entry of `row_starts`. The host knows it from planning.
    pub rows: usize,
}

impl<'a, D: Device> GatherRows<'a, D> {
    /// Rows of these pages. The fields describe `token_starts`, `row_starts` and `rows`.
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
    /// Gathers the rows and then multiplies their latents. The two operations do the work of
    /// [`Device::gather_cache_and_expand`].
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

/// Returns the handle whose operations keep what the problem asks for.
///
/// # Errors
///
/// If the problem is batch-invariant, and the device refuses it.
pub(crate) fn for_problem<D: Device>(device: &D, problem: &Problem) -> Result<D> {
    match problem.features.contains(Feature::BatchInvariant) {
        true => device.batch_invariant(problem),
        false => Ok(device.clone()),
    }
}

/// The rows of one page, `row` bytes each, as a tensor of 16-bit elements. A copy does not depend
/// on the type of the elements.
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

/// Copies one page to another within `bytes`. Pages are `page_stride` bytes apart.
fn copy_page_of<D: Device>(
    device: &D,
    bytes: D::BytesMut<'_>,
    (rows, page_stride): (Layout, usize),
    [from, to]: [usize; 2],
) -> Result<()> {
    let (low, high) = (from.min(to), from.max(to));
    let (below, high) = D::split_mut(bytes, high * page_stride);
    let (_, low) = D::split_mut(below, low * page_stride);
    let rows = |bytes| named("cache", TensorMut::new(bytes, rows));
    let (low, high) = (rows(low)?, rows(high)?);
    match from < to {
        true => device.copy(low.as_ref(), high),
        false => device.copy(high.as_ref(), low),
    }
}

/// The cache rows of new tokens, and their destination.
#[non_exhaustive]
pub struct CacheRows<'a, D: Device> {
    /// `[T, 1, L]`.
    pub latent: TensorRef<'a, D>,
    /// `[T, 1, R]`.
    pub rope: TensorRef<'a, D>,
    /// The slot of each token, or −1 for none: `[T]`.
    pub slots: ArrayRef<'a, D, i64>,
    /// The cache into which the rows are written.
    pub cache: CacheMut<'a, D>,
    /// The rotation that `rope` and the queries' rotary parts still need, if any.
    pub rotary: Option<Rotary<'a, D>>,
}

impl<'a, D: Device> CacheRows<'a, D> {
    /// Rows for these slots of `cache` that need no rotation.
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
    /// Writes the rows. If there is a rotation, also rotates `query` into its destination.
    ///
    /// # Errors
    ///
    /// Same as [`Device::write_cache`] and [`Device::write_cache_rotated`].
    pub fn write(
        self,
        device: &D,
        query: Option<(TensorRef<'_, D>, TensorMut<'_, D>)>,
    ) -> Result<()> {
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

    /// Writes the rows, then rotates and multiplies the queries. The operations one after another
    /// do the work of [`Device::write_cache_and_absorb`].
    ///
    /// # Errors
    ///
    /// The errors of [`Device::write_cache_and_absorb`].
    pub fn write_then_absorb(
        self,
        device: &D,
        query: &TensorRef<'_, D>,
        weights: &TensorRef<'_, D>,
        mut to: TensorMut<'_, D>,
    ) -> Result<()> {
        let rotation = self.query_rotation(query, weights, &mut to)?;
        self.write(device, rotation)?;
        let (query, weights, to) = absorption(query, weights, &mut to)?;
        device.gemm(query, weights, to)
    }

    /// The rotation of the queries' rotary parts, `query[.., P..]`, into `to[.., L..]`, if the rows
    /// have a rotation. P and L are those of the weights W_UK, `[H, P, L]`.
    ///
    /// # Errors
    ///
    /// If the weights are wider than the tensors.
    pub fn query_rotation<'q>(
        &self,
        query: &'q TensorRef<'_, D>,
        weights: &TensorRef<'_, D>,
        to: &'q mut TensorMut<'_, D>,
    ) -> Result<Option<(TensorRef<'q, D>, TensorMut<'q, D>)>> {
        if self.rotary.is_none() {
            return Ok(None);
        }
        let [_, nope, latent] = weights.shape();
        let [from, width] = [query.shape()[2], to.shape()[2]];
        Ok(Some((
            named("query", query.shorten().narrow(2, nope..from))?,
            named("absorbed queries", to.reborrow().narrow(2, latent..width))?,
        )))
    }
}

/// Two factors and the destination of their product, as [`Device::gemm`] takes them.
pub(crate) type Product<'a, D> = (TensorRef<'a, D>, TensorRef<'a, D>, TensorMut<'a, D>);

/// The product that projects queries `[A, H, P + R]` into the latent space, per head:
/// `to[.., ..L] = query[.., ..P] · W_UK`, for weights `[H, P, L]`.
///
/// # Errors
///
/// If the weights are wider than the tensors.
pub fn absorption<'q, D: Device>(
    query: &'q TensorRef<'_, D>,
    weights: &'q TensorRef<'_, D>,
    to: &'q mut TensorMut<'_, D>,
) -> Result<Product<'q, D>> {
    let [_, nope, latent] = weights.shape();
    let query = named("query", query.shorten().narrow(2, 0..nope))?;
    let to = named("absorbed queries", to.reborrow().narrow(2, 0..latent))?;
    Ok((query.transpose(0, 1), weights.shorten(), to.transpose(0, 1)))
}

/// A device on which attention runs: its [`Memory`], and the operations around attention.
///
/// Every operation is enqueued. On an asynchronous device it returns at once. No operation
/// allocates or waits. A handle is cheap to clone and refers to the same device and stream.
pub trait Device: Memory {
    /// The kind of device.
    const PLATFORM: Platform;

    /// Tells if this machine can have such a device at all. The error is the reason why not.
    fn availability() -> Result<(), Cause>;

    /// The hardware of a selection for this device.
    fn target(&self) -> Target;

    /// The number of the device within its type. Memory of a device with another number must not be
    /// used.
    fn ordinal(&self) -> usize {
        0
    }

    /// The speeds from which the times of a step's two paths follow. By default only arithmetic
    /// counts.
    fn machine(&self) -> Machine {
        Machine::ARITHMETIC
    }

    /// Checks that the operations on rows accept a tensor with this layout. The layer calls this
    /// before it enqueues anything. `field` is the tensor's name in the call.
    ///
    /// # Errors
    ///
    /// If an operation does not support the strides.
    fn check_tensor(&self, field: &'static str, layout: &Layout) -> Result<()> {
        let _ = (field, layout);
        Ok(())
    }

    /// Checks that [`gemm`](Self::gemm) supports this factor or product `[B, M, N]`. The layer
    /// calls this before it enqueues anything.
    ///
    /// # Errors
    ///
    /// If it does not support the strides or the address.
    fn check_operand(&self, field: &'static str, tensor: TensorRef<'_, Self>) -> Result<()> {
        let _ = (field, tensor);
        Ok(())
    }

    /// Returns a handle to this device whose operations give a row the same bits, whatever other
    /// rows an operation has. Layers and indexers use this handle for problems with
    /// [`BatchInvariant`](crate::spec::Feature::BatchInvariant).
    ///
    /// # Errors
    ///
    /// If the device has no such operations for this problem. By default it has none.
    fn batch_invariant(&self, problem: &Problem) -> Result<Self> {
        let _ = problem;
        let accepted = "none: this device chooses the order of a product's sums by its rows";
        Err(Error::argument("features", "batch_invariant", accepted))
    }

    /// Computes `c[i] = a[i] · b[i]` for every `i` of the first axis: `[B, M, K] · [B, K, N] → [B,
    /// M, N]`. All have one dtype. `a` and `b` may have any strides; a stride of 0 repeats. Sums
    /// are accumulated in f32 and rounded once. If `b` is [constant](TensorRef::constant), the
    /// device may read it before work that was enqueued earlier is done.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or if the device does not support the strides.
    fn gemm(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Multiplies as [`gemm`](Self::gemm) does, but concurrently with the operation that was
    /// enqueued last.
    ///
    /// # Errors
    ///
    /// Same as [`gemm`](Self::gemm).
    ///
    /// # Safety
    ///
    /// The operation that was enqueued last begins only when all before it is done (a selection of
    /// lists is such an operation). It neither writes `a` nor accesses `c`.
    unsafe fn gemm_ready(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.gemm(a, b, c)
    }

    /// Copies `from` to `to`. Both have the same shape and dtype, and any strides.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree.
    fn copy(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Copies rows to the places of an index: `to[places[n]] = from[n]` for each row n of `from`,
    /// `[N, H, W]`. A row is skipped if its place is −1 or any other number that is no row of `to`,
    /// `[M, H, W]`. No two rows may have the same place. Rows of `to` without a place keep their
    /// values. Any strides are allowed.
    ///
    /// # Errors
    ///
    /// If dtypes, heads or widths disagree, or if the number of places is not N.
    fn scatter_rows(
        &self,
        from: TensorRef<'_, Self>,
        places: ArrayRef<'_, Self, i64>,
        to: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Writes the values of a matrix in block fp8, `[rows, columns]`, to `to`, `[1, rows,
    /// columns]`. The destination may have any stride of rows, but columns must be adjacent. The
    /// products of codes and scales are in f32 and rounded once. An engine calls this when it loads
    /// weights.
    ///
    /// # Errors
    ///
    /// If the shapes disagree, or the device fails.
    fn dequantize_blocks(&self, from: Fp8Blocks<'_, Self>, to: TensorMut<'_, Self>) -> Result<()>;

    /// Copies the rows of page `from` to page `to` of a cache. An engine calls this before a
    /// request writes to a page that other requests share.
    ///
    /// # Errors
    ///
    /// If the cache lacks one of the pages, if its rows have an odd number of bytes, or if the
    /// device fails.
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

    /// Writes one cache row per token: `latent` `[T, 1, L]` and `rope` `[T, 1, R]` go to slot
    /// `slots[t]`, quantised for the cache's format. A token whose slot is −1 is skipped. No two
    /// tokens may have the same slot.
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

    /// Writes as [`write_cache`](Self::write_cache) does. In the same launch it also rotates `rope`
    /// and the queries' rotary parts, `[T, H, R]`, from the first tensor of `query` into the
    /// second. The result is the same as after a rotation in place, in f32 and rounded to the
    /// dtype.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or R is odd.
    fn write_cache_rotated(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        rotary: &Rotary<'_, Self>,
        query: Option<(TensorRef<'_, Self>, TensorMut<'_, Self>)>,
        slots: ArrayRef<'_, Self, i64>,
        cache: CacheMut<'_, Self>,
    ) -> Result<()>;

    /// Rotates vectors `[T, H, R]` in place by the positions of their tokens, in f32 and rounded to
    /// the dtype. This is needed if queries or keys are read before the cache write has rotated
    /// them.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or R is odd.
    fn rotate(&self, rotary: &Rotary<'_, Self>, vectors: TensorMut<'_, Self>) -> Result<()>;

    /// Begins a step on the absorbed path, in one launch if the device can. It writes the new
    /// tokens' rows to the cache. It also projects queries into the latent space, either all or
    /// only the first ones: `query` `[A, H, P + R]` by W_UK `[H, P, L]` into `to` `[A, H, L]`. If
    /// the rows have a rotation, `to` is `[A, H, L + R]`, with the rotary part after the latent
    /// part. The work is that of [`write_cache`](Self::write_cache) or
    /// [`write_cache_rotated`](Self::write_cache_rotated), and of [`gemm`](Self::gemm).
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree with each other or with the cache, if the rotated width is odd,
    /// or if the device fails.
    fn write_cache_and_absorb(
        &self,
        rows: CacheRows<'_, Self>,
        query: TensorRef<'_, Self>,
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        rows.write_then_absorb(self, &query, &weights, to)
    }

    /// Reads and dequantises cache rows into `latent` `[W, 1, L]` and `rope` `[W, 1, R]`. Only the
    /// first `rows.rows` rows of these are written.
    ///
    /// # Errors
    ///
    /// If shapes disagree with each other or with the cache, or if there are more than W rows.
    fn gather_cache(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        latent: TensorMut<'_, Self>,
        rope: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Expands cached rows for the expanded path, in one launch if the device can. As
    /// [`gather_cache`](Self::gather_cache) does, it gathers rows into `gathered`: latents `[W, 1,
    /// L]` and rotary parts `[W, 1, R]`, with W = `rows.rows`. As [`gemm`](Self::gemm) does, it
    /// multiplies the latents by `weights` `[1, L, N]` into `to` `[1, W, N]`. The device may leave
    /// the gathered latents unwritten.
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

    /// Merges a partial result into another over the same queries. Let `a` be a value of `lse` and
    /// `b` the value of `other_lse` for the same token and head. The result is
    /// `lse = ln(e^a + e^b)` and `out = out·e^(a − lse) + other·e^(b − lse)`. A value of +inf
    /// counts as −inf. Two empty results give 0 and −inf. Outputs are `[T, H, V]` with any strides
    /// of tokens and heads.
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

    /// Returns true if the device supports [`scale_outputs`](Self::scale_outputs).
    fn scales_outputs(&self) -> bool {
        false
    }

    /// Multiplies the output `[T, H, V]` of each token and head by the given factors, in f32 and
    /// rounded once. A sink `[H]`, a score after the softmax scale, gives the factor `1 / (1 +
    /// e^(sink − lse))`. A gate `[T, H, V]` or `[T, H, 1]` in the output's dtype gives its sigmoid.
    /// A sink does not change an output whose log-sum-exp is −inf. Any strides are allowed. Sinks
    /// are applied once, after the last [`merge`](Self::merge) of partial results, including those
    /// of other ranks.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree, or if the device does not [support
    /// this](Self::scales_outputs).
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

    /// Orders all work enqueued from now on after all work enqueued until now, even a kernel that
    /// was launched to begin early. A device whose kernels never begin early does nothing here.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn fence(&self) -> Result<()> {
        Ok(())
    }

    /// For conformance tests: kernels that overlap with others, if the device supports that.
    ///
    /// # Errors
    ///
    /// If the kernels cannot be loaded.
    #[doc(hidden)]
    fn probe_dependents(&self) -> Result<Option<Box<dyn probe::Dependents<Self> + '_>>> {
        Ok(None)
    }

    /// For conformance tests. First enqueues `work` once, so that all code is loaded. Then captures
    /// it into a graph, changes its inputs, and replays the graph twice. Returns false without
    /// doing anything if the device has no graphs.
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

    /// Executes `work`. A profiler may show it as a range of this name on the host's time line.
    fn profile_range<R>(&self, name: &'static CStr, work: impl FnOnce() -> R) -> R {
        let _ = name;
        work()
    }

    /// Converts a log-sum-exp of another convention to the natural one, heads first.
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
