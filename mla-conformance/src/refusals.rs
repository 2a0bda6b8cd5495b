//! The refusals of a device's operations, in one table for all devices.

use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, LseRef,
    TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

use super::Failure;
use super::data::{POISON, upload};

/// Bytes of the memory that holds the operands.
const BYTES: usize = 4096;
/// A cache with pages of two rows. A row has four latent and two rotary values.
const CACHE: CacheLayout = CacheLayout::contiguous(
    MlaDims::new(4, HeadDims::new(2, 2, 2)),
    KvFormat::BF16,
    2,
    2,
);

/// Views of memory for reading. Its contents do not matter, since operands that do not fit are
/// refused first.
struct Read<'a, D: Device>(D::Bytes<'a>);

impl<'a, D: Device> Read<'a, D> {
    fn of(&self, dtype: DType, shape: [usize; 3]) -> Result<TensorRef<'a, D>> {
        TensorRef::new(self.0, Layout::contiguous(dtype, shape))
    }

    fn rows(&self, shape: [usize; 3]) -> Result<TensorRef<'a, D>> {
        self.of(DType::BF16, shape)
    }

    fn array<T: bytemuck::Pod>(&self, len: usize) -> Result<ArrayRef<'a, D, T>> {
        ArrayRef::new(self.0, len)
    }

    fn lse(&self, heads: usize, tokens: usize) -> Result<LseRef<'a, D>> {
        LseRef::new(self.0, LseLayout::heads_first(heads, tokens))
    }
}

/// Memory that an operation would write.
struct Write<'a, D: Device>(D::BytesMut<'a>);

impl<D: Device> Write<'_, D> {
    fn rows(&mut self, shape: [usize; 3]) -> Result<TensorMut<'_, D>> {
        let layout = Layout::contiguous(DType::BF16, shape);
        TensorMut::new(D::reborrow(&mut self.0), layout)
    }

    /// Returns two tensors.
    fn two(&mut self, shapes: [[usize; 3]; 2]) -> Result<[TensorMut<'_, D>; 2]> {
        let (a, b) = D::split_mut(D::reborrow(&mut self.0), BYTES / 2);
        let [first, second] = shapes.map(|shape| Layout::contiguous(DType::BF16, shape));
        Ok([TensorMut::new(a, first)?, TensorMut::new(b, second)?])
    }

    /// Returns a result with its log-sum-exp.
    fn result(
        &mut self,
        shape: [usize; 3],
        heads: usize,
    ) -> Result<(TensorMut<'_, D>, LseMut<'_, D>)> {
        let (out, lse) = D::split_mut(D::reborrow(&mut self.0), BYTES / 2);
        let out = TensorMut::new(out, Layout::contiguous(DType::BF16, shape))?;
        Ok((
            out,
            LseMut::new(lse, LseLayout::heads_first(heads, shape[0]))?,
        ))
    }

    fn cache(&mut self) -> Result<CacheMut<'_, D>> {
        CacheMut::new(D::reborrow(&mut self.0), CACHE)
    }
}

/// The name of an operand, and an operation with such an operand that does not fit.
type Refused<D> = (
    &'static str,
    fn(&D, Read<'_, D>, Write<'_, D>) -> Result<()>,
);

/// Lists the operations of a device that [scales outputs](Device::scales_outputs).
fn of_outputs<D: Device>() -> Vec<Refused<D>> {
    vec![
        ("sinks", |device, from, mut to| {
            let sinks = (from.array(2)?, from.lse(3, 2)?);
            device.scale_outputs(to.rows([2, 3, 4])?, Some(sinks), None)
        }),
        ("lse", |device, from, mut to| {
            let sinks = (from.array(3)?, from.lse(3, 1)?);
            device.scale_outputs(to.rows([2, 3, 4])?, Some(sinks), None)
        }),
        ("gate", |device, from, mut to| {
            let gate = from.rows([2, 3, 3])?;
            device.scale_outputs(to.rows([2, 3, 4])?, None, Some(gate))
        }),
        ("gate", |device, from, mut to| {
            let gate = from.of(DType::F16, [2, 3, 1])?;
            device.scale_outputs(to.rows([2, 3, 4])?, None, Some(gate))
        }),
    ]
}

fn table<D: Device>() -> Vec<Refused<D>> {
    fn gather<D: Device>(
        device: &D,
        (from, mut to): (Read<'_, D>, Write<'_, D>),
        shapes: [[usize; 3]; 2],
        rows: usize,
    ) -> Result<()> {
        let table = BlockTable::new(from.array(1)?, 1, 1)?;
        let rows = GatherRows::new(table, from.array(1)?, from.array(2)?, rows);
        let [latent, rope] = to.two(shapes)?;
        device.gather_cache(CacheRef::new(from.0, CACHE)?, rows, latent, rope)
    }
    vec![
        ("gemm a", |device, from, mut to| {
            let (a, b) = (from.rows([1, 2, 4])?, from.rows([1, 4, 4])?);
            device.gemm(a, b, to.rows([1, 3, 4])?)
        }),
        ("gemm b", |device, from, mut to| {
            let (a, b) = (from.rows([1, 3, 4])?, from.rows([1, 3, 4])?);
            device.gemm(a, b, to.rows([1, 3, 4])?)
        }),
        ("copy source", |device, from, mut to| {
            device.copy(from.rows([1, 2, 4])?, to.rows([1, 3, 4])?)
        }),
        ("copy source", |device, from, mut to| {
            device.copy(from.of(DType::F16, [1, 3, 4])?, to.rows([1, 3, 4])?)
        }),
        ("rows to copy", |device, from, mut to| {
            device.scatter_rows(from.rows([3, 1, 4])?, from.array(3)?, to.rows([5, 2, 4])?)
        }),
        ("places", |device, from, mut to| {
            device.scatter_rows(from.rows([3, 1, 4])?, from.array(2)?, to.rows([5, 1, 4])?)
        }),
        ("dequantized matrix", |device, from, mut to| {
            let codes = D::byte_range(from.0, 0..32);
            let blocks = Fp8Blocks::new(codes, from.array(1)?, [4, 8])?;
            device.dequantize_blocks(blocks, to.rows([1, 4, 4])?)
        }),
        ("latent", |device, from, mut to| {
            let (latent, rope) = (from.rows([2, 1, 3])?, from.rows([2, 1, 2])?);
            device.write_cache(latent, rope, from.array(2)?, to.cache()?)
        }),
        ("rope", |device, from, mut to| {
            let (latent, rope) = (from.rows([2, 1, 4])?, from.rows([1, 1, 2])?);
            device.write_cache(latent, rope, from.array(2)?, to.cache()?)
        }),
        ("slots", |device, from, mut to| {
            let (latent, rope) = (from.rows([2, 1, 4])?, from.rows([2, 1, 2])?);
            device.write_cache(latent, rope, from.array(3)?, to.cache()?)
        }),
        ("gathered latent", |device, from, to| {
            gather(device, (from, to), [[2, 1, 3], [2, 1, 2]], 1)
        }),
        ("gathered rope", |device, from, to| {
            gather(device, (from, to), [[2, 1, 4], [1, 1, 2]], 1)
        }),
        ("rows", |device, from, to| {
            gather(device, (from, to), [[2, 1, 4], [2, 1, 2]], 3)
        }),
        ("other", |device, from, mut to| {
            let (out, lse) = to.result([2, 3, 4], 3)?;
            device.merge(out, lse, from.rows([2, 2, 4])?, from.lse(3, 2)?)
        }),
        ("lse", |device, from, mut to| {
            let (out, lse) = to.result([2, 3, 4], 2)?;
            device.merge(out, lse, from.rows([2, 3, 4])?, from.lse(3, 2)?)
        }),
        ("other lse", |device, from, mut to| {
            let (out, lse) = to.result([2, 3, 4], 3)?;
            device.merge(out, lse, from.rows([2, 3, 4])?, from.lse(3, 1)?)
        }),
        ("lse", |device, from, mut to| {
            let (_, lse) = to.result([2, 3, 4], 3)?;
            device.convert_lse(from.lse(3, 1)?, lse)
        }),
        ("from", |device, _, mut to| {
            device.copy_page(to.cache()?, 2, 0)
        }),
        ("to", |device, _, mut to| {
            device.copy_page(to.cache()?, 0, 2)
        }),
    ]
}

/// Runs operations of a device with operands that do not fit. Each has to be refused with the
/// operand's name, and nothing may be written.
///
/// # Errors
///
/// Names the first operation that does otherwise, or returns the device's failure.
pub fn refusals<D: Device>(device: &D) -> std::result::Result<(), Failure> {
    let poison = [POISON; BYTES];
    let from = upload(device, &poison)?;
    let mut to = upload(device, &poison)?;
    let of_outputs = device.scales_outputs().then(of_outputs::<D>);
    for (name, operation) in table::<D>()
        .into_iter()
        .chain(of_outputs.into_iter().flatten())
    {
        let said = match operation(device, Read(D::bytes(&from)), Write(D::bytes_mut(&mut to))) {
            Err(Error::Argument { field, .. }) if field == name => continue,
            Err(error) => error.to_string(),
            Ok(()) => "taken".to_owned(),
        };
        return Err(Failure::NotRefused { name, said });
    }
    device.synchronize()?;
    let mut written = vec![0; BYTES];
    device.download(D::bytes(&to), &mut written)?;
    let said = "refused after something was written".to_owned();
    match written == poison {
        true => Ok(()),
        false => Err(Failure::NotRefused {
            name: "operands",
            said,
        }),
    }
}
