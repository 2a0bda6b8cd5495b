//! The rotary embedding that a cache write applies on its way.

use mla_runtime::dtype::DType;
use mla_runtime::error::{Error, Result};
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

use super::Cuda;
use crate::raw;

/// Which elements of a rotary vector form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RotaryStyle {
    /// 2i and 2i + 1, as DeepSeek's own weights expect.
    Interleaved,
    /// i and i + R/2.
    Halves,
}

/// A rotation by position: pair `i` of a token at position `p` turns by the angle whose cosine and
/// sine are at `[0, p, i]` of the tables.
#[derive(Clone, Copy)]
pub struct Rotary<'a> {
    /// The position of each token: `[T]`. One outside the tables gives NaN.
    pub positions: ArrayRef<'a, Cuda, i64>,
    /// f32 `[1, positions, R/2]`.
    pub cos: TensorRef<'a, Cuda>,
    /// f32 `[1, positions, R/2]`.
    pub sin: TensorRef<'a, Cuda>,
    /// How elements pair.
    pub style: RotaryStyle,
}

/// The rotary parts of the queries, which are rotated in the same launch.
pub enum RotaryQuery<'a> {
    /// `[T, H, R]`, turned in place.
    InPlace(TensorMut<'a, Cuda>),
    /// `[T, H, R]` each.
    Into {
        /// What is turned.
        from: TensorRef<'a, Cuda>,
        /// Where the result goes.
        to: TensorMut<'a, Cuda>,
    },
}

impl Rotary<'_> {
    /// Writes the rotation into the parameters of a cache write of `tokens` rotary keys of `dtype`
    /// and `width`.
    pub(super) fn fill(
        &self,
        query: Option<RotaryQuery<'_>>,
        tokens: usize,
        width: usize,
        dtype: DType,
        params: &mut raw::MlaCacheWriteParams,
    ) -> Result<()> {
        if self.positions.len() < tokens {
            return Err(Error::argument(
                "positions",
                self.positions.len(),
                format!("at least {tokens}"),
            ));
        }
        let (cos, sin) = (self.cos.layout(), self.sin.layout());
        let expected = [1, cos.shape[1], width / 2];
        for (name, table) in [("cos", cos), ("sin", sin)] {
            if table.dtype != DType::F32 || table.shape != expected || !table.has_unit_columns() {
                return Err(Error::argument(
                    name,
                    table,
                    format!("f32 {expected:?} with unit columns"),
                ));
            }
        }
        if cos.shape[1] > 1 && cos.strides[1] != sin.strides[1] {
            return Err(Error::argument(
                "sin",
                sin,
                format!("the strides of cos ({:?})", cos.strides),
            ));
        }
        params.positions = self.positions.bytes().address() as *const _;
        params.cos = self.cos.bytes().address() as *const _;
        params.sin = self.sin.bytes().address() as *const _;
        params.table_stride = cos.strides[1] as i64;
        params.positions_len = cos.shape[1] as i64;
        params.rotary_style = match self.style {
            RotaryStyle::Interleaved => raw::MLA_ROTARY_INTERLEAVED as i32,
            RotaryStyle::Halves => raw::MLA_ROTARY_HALVES as i32,
        };
        let Some(query) = query else { return Ok(()) };
        let (from, from_layout, to) = match query {
            RotaryQuery::InPlace(tensor) => {
                let layout = *tensor.layout();
                let address = tensor.into_bytes().address();
                (address, layout, (address, layout))
            }
            RotaryQuery::Into { from, to } => {
                let layout = *to.layout();
                (
                    from.bytes().address(),
                    *from.layout(),
                    (to.into_bytes().address(), layout),
                )
            }
        };
        let shape = [tokens, from_layout.shape[1], width];
        for (name, layout) in [("query", from_layout), ("rotated query", to.1)] {
            if layout.dtype != dtype || layout.shape != shape || !layout.has_unit_columns() {
                return Err(Error::argument(
                    name,
                    layout,
                    format!("{dtype} {shape:?} with unit columns"),
                ));
            }
        }
        params.query_rope = from as *const _;
        params.query_rope_out = to.0 as *mut _;
        params.query_token_stride = from_layout.strides[0] as i64;
        params.query_head_stride = from_layout.strides[1] as i64;
        params.query_out_token_stride = to.1.strides[0] as i64;
        params.query_out_head_stride = to.1.strides[1] as i64;
        params.heads = i32::try_from(shape[1])
            .map_err(|_| Error::argument("heads", shape[1], "at most 65536"))?;
        Ok(())
    }
}
