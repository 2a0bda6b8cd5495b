//! The rotary embedding. The two products of each element are computed in f32 one after the other,
//! and the result is rounded to the dtype.

use super::buffer::Scratch;
use super::view::{Elements, Places, scalars, with_element};
use super::{Cpu, cache};
use mla_runtime::model::{Element, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, CacheMut, Rotary, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

pub(crate) fn write_cache(
    cpu: &Cpu,
    latent: TensorRef<'_, Cpu>,
    rope: TensorRef<'_, Cpu>,
    rotary: &Rotary<'_, Cpu>,
    query: Option<(TensorRef<'_, Cpu>, TensorMut<'_, Cpu>)>,
    slots: ArrayRef<'_, Cpu, i64>,
    cache: CacheMut<'_, Cpu>,
) -> Result<()> {
    let tokens = latent.shape()[0];
    let width = cache.layout().dims.head.rope as usize;
    rope.layout()
        .require("rope", rope.dtype(), [tokens, 1, width])?;
    let rotation = TokenRotation::new(rotary, tokens, width)?;
    with_element!(rope.dtype(), T => {
        let from = Elements::<T>::of("rope", &rope)?;
        let mut row = Scratch::new(width)?;
        let mut rotated = Scratch::<T>::new(tokens.saturating_mul(width))?;
        for (token, to) in rotated.chunks_mut(width.max(1)).enumerate() {
            from.read_row(token, 0, &mut row);
            rotation.apply(token, &mut row);
            for (to, value) in to.iter_mut().zip(&*row) {
                *to = T::from_f32(*value);
            }
        }
        let rotated = TensorRef::from_slice(&rotated[..tokens * width], [tokens, 1, width])?;
        cache::write(cpu, latent, rotated, slots, cache)?;
        if let Some((from, to)) = query {
            rotate_queries::<T>(&rotation, Some(from), to, [tokens, width])?;
        }
    });
    Ok(())
}

pub(crate) fn rotate(rotary: &Rotary<'_, Cpu>, vectors: TensorMut<'_, Cpu>) -> Result<()> {
    let layout = *vectors.layout();
    let [tokens, _, width] = layout.shape;
    let rotation = TokenRotation::new(rotary, tokens, width)?;
    with_element!(layout.dtype, T => {
        rotate_queries::<T>(&rotation, None, vectors, [tokens, width])?
    });
    Ok(())
}

/// Rotates `from` into `to`, or `to` in place.
fn rotate_queries<T: Element>(
    rotation: &TokenRotation<'_>,
    from: Option<TensorRef<'_, Cpu>>,
    to: TensorMut<'_, Cpu>,
    [tokens, width]: [usize; 2],
) -> Result<()> {
    let shape = [tokens, to.shape()[1], width];
    for layout in from.iter().map(TensorRef::layout).chain([to.layout()]) {
        layout.require("query", T::DTYPE, shape)?;
    }
    let from = from.map(|from| Elements::<T>::of("query", &from));
    let from = from.transpose()?;
    // A tensor without elements may have any extents.
    if to.layout().elements() == 0 {
        return Ok(());
    }
    let to = Places::<T>::of("query", to)?;
    let mut row = Scratch::new(width)?;
    for token in 0..tokens {
        for head in 0..shape[1] {
            match &from {
                Some(from) => from.read_row(token, head, &mut row),
                // SAFETY: the contract of `Places::read_row`: only this thread has the tensor,
                // which it borrowed mutably.
                None => unsafe { to.read_row(token, head, &mut row) },
            }
            rotation.apply(token, &mut row);
            // SAFETY: the contract of `Places::write_row`: only this thread has the tensor, as
            // above.
            unsafe { to.write_row(token, head, &row) };
        }
    }
    Ok(())
}

/// The rotation of each token, from the table rows of its position.
pub(crate) struct TokenRotation<'a> {
    positions: &'a [i64],
    cos: Elements<'a, f32>,
    sin: Elements<'a, f32>,
    style: RotaryStyle,
}

impl<'a> TokenRotation<'a> {
    pub(crate) fn new(rotary: &Rotary<'a, Cpu>, tokens: usize, width: usize) -> Result<Self> {
        rotary.check(tokens, width)?;
        let positions = &scalars("positions", &rotary.positions()?)?[..tokens];
        let max = rotary.cos.shape()[1];
        for position in positions {
            if !usize::try_from(*position).is_ok_and(|position| position < max) {
                return Err(Error::argument(
                    "positions",
                    position,
                    format!("0 and up below the tables' {max}"),
                ));
            }
        }
        Ok(Self {
            positions,
            cos: Elements::of("cos", &rotary.cos)?,
            sin: Elements::of("sin", &rotary.sin)?,
            style: rotary.style,
        })
    }

    pub(crate) fn apply(&self, token: usize, row: &mut [f32]) {
        let half = row.len() / 2;
        let position = self.positions[token] as usize;
        for pair in 0..half {
            let (first, second) = match self.style {
                RotaryStyle::Interleaved => (2 * pair, 2 * pair + 1),
                RotaryStyle::Halves => (pair, pair + half),
            };
            let cos = self.cos.data[self.cos.at(0, position) + pair];
            let sin = self.sin.data[self.sin.at(0, position) + pair];
            let (a, b) = (row[first], row[second]);
            row[first] = a * cos - b * sin;
            row[second] = b * cos + a * sin;
        }
    }
}
