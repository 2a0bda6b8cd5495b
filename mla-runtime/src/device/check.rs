//! The checks that every device makes on the operands of its operations.

use super::Device;
use crate::tensor::{ArrayRef, CacheLayout, LseMut, LseRef, TensorMut, TensorRef};
use crate::{Error, Result, check_len};

/// Refuses factors that do not fit each other or the product.
///
/// # Errors
///
/// If shapes or dtypes disagree.
pub fn check_product<D: Device>(
    a: &TensorRef<'_, D>,
    b: &TensorRef<'_, D>,
    c: &TensorMut<'_, D>,
) -> Result<()> {
    let ([batch, m, n], k, dtype) = (c.shape(), a.shape()[2], c.dtype());
    a.layout().require("gemm a", dtype, [batch, m, k])?;
    b.layout().require("gemm b", dtype, [batch, k, n])
}

/// Refuses rows that do not fit their destination, and a wrong number of places.
///
/// # Errors
///
/// If dtypes, heads or widths disagree, or if the number of places is not that of the rows.
pub fn check_scatter<D: Device>(
    from: &TensorRef<'_, D>,
    places: &ArrayRef<'_, D, i64>,
    to: &TensorMut<'_, D>,
) -> Result<()> {
    let ([rows, ..], [_, heads, width]) = (from.shape(), to.shape());
    from.layout()
        .require("rows to copy", to.dtype(), [rows, heads, width])?;
    check_len("places", places.len(), rows, "one for each row")
}

/// Refuses rows that do not fit the cache, and a wrong number of slots.
///
/// # Errors
///
/// If shapes or dtypes disagree, or if the number of slots is not that of the tokens.
pub fn check_write<D: Device>(
    latent: &TensorRef<'_, D>,
    rope: &TensorRef<'_, D>,
    slots: &ArrayRef<'_, D, i64>,
    cache: &CacheLayout,
) -> Result<()> {
    let [l, r] = widths(cache);
    let (tokens, dtype) = (latent.shape()[0], latent.dtype());
    latent.layout().require("latent", dtype, [tokens, 1, l])?;
    rope.layout().require("rope", dtype, [tokens, 1, r])?;
    check_len("slots", slots.len(), tokens, "one per token")
}

/// Refuses destinations that do not fit `rows` rows of the cache.
///
/// # Errors
///
/// If shapes or dtypes disagree, or if there is too little room for the rows.
pub fn check_gather<D: Device>(
    rows: usize,
    latent: &TensorMut<'_, D>,
    rope: &TensorMut<'_, D>,
    cache: &CacheLayout,
) -> Result<()> {
    let [l, r] = widths(cache);
    let (room, dtype) = (latent.shape()[0], latent.dtype());
    latent
        .layout()
        .require("gathered latent", dtype, [room, 1, l])?;
    rope.layout()
        .require("gathered rope", dtype, [room, 1, r])?;
    match rows <= room {
        true => Ok(()),
        false => Err(Error::argument("rows", rows, format!("at most {room}"))),
    }
}

/// Refuses partial results that do not fit each other.
///
/// # Errors
///
/// If shapes or dtypes disagree.
pub fn check_merge<D: Device>(
    out: &TensorMut<'_, D>,
    lse: &LseMut<'_, D>,
    other: &TensorRef<'_, D>,
    other_lse: &LseRef<'_, D>,
) -> Result<()> {
    let [tokens, heads, _] = out.shape();
    other.layout().require("other", out.dtype(), out.shape())?;
    lse.layout().require("lse", heads, tokens)?;
    other_lse.layout().require("other lse", heads, tokens)
}

/// The widths L and R of a cache.
fn widths(cache: &CacheLayout) -> [usize; 2] {
    [cache.dims.latent, cache.dims.head.rope].map(|width| width as usize)
}

/// Refuses sinks and gates that do not fit the outputs they scale.
///
/// # Errors
///
/// If shapes or dtypes disagree.
pub fn check_outputs<D: Device>(
    out: &TensorMut<'_, D>,
    sinks: Option<&(ArrayRef<'_, D, f32>, LseRef<'_, D>)>,
    gate: Option<&TensorRef<'_, D>>,
) -> Result<()> {
    let [tokens, heads, width] = out.shape();
    if let Some((sinks, lse)) = sinks {
        check_len("sinks", sinks.len(), heads, "one for each head")?;
        lse.layout().require("lse", heads, tokens)?;
    }
    match gate.map(TensorRef::layout) {
        Some(gate) if gate.shape != [tokens, heads, 1] => {
            gate.require("gate", out.dtype(), [tokens, heads, width])
        }
        Some(gate) => gate.require("gate", out.dtype(), [tokens, heads, 1]),
        None => Ok(()),
    }
}
