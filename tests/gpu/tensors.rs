//! Tensors of random numbers, and a way to run an operation on any device.

use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::DType;
use mla_runtime::tensor::{
    ArrayRef, Layout, LseConvention, LseLayout, LseMut, LseRef, TensorMut, TensorRef,
};
use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::common::{download, get, put, upload};

/// Draws a standard normal number.
pub(crate) fn normal(rng: &mut StdRng) -> f32 {
    let (u, v) = (rng.random::<f32>().max(1e-9), rng.random::<f32>());
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// Draws normal numbers of a dtype, times `scale`, as bytes.
#[cfg(feature = "sm90")]
pub(crate) fn normals(rng: &mut StdRng, dtype: DType, count: usize, scale: f32) -> Vec<u8> {
    let mut bytes = vec![0; count * dtype.bytes()];
    for element in 0..count {
        put(dtype, &mut bytes, element, normal(rng) * scale);
    }
    bytes
}

/// Returns the cosines and sines of a rotation of `pairs` pairs, for each position.
#[cfg(feature = "sm90")]
pub(crate) fn rotary_tables(positions: usize, pairs: usize) -> [Vec<f32>; 2] {
    let angle = |at: usize| {
        let frequency = 10_000f64.powf(-((at % pairs) as f64) / pairs as f64);
        (at / pairs) as f64 * frequency
    };
    [f64::cos, f64::sin].map(|of: fn(f64) -> f64| {
        let all = 0..positions * pairs;
        all.map(|at| of(angle(at)) as f32).collect()
    })
}

/// Views a buffer as a contiguous tensor.
#[cfg_attr(
    not(feature = "sm90"),
    allow(dead_code, reason = "layers need kernels")
)]
pub(crate) fn view<D: Device>(
    buffer: &D::Buffer,
    dtype: DType,
    shape: [usize; 3],
) -> Result<TensorRef<'_, D>> {
    TensorRef::new(D::bytes(buffer), Layout::contiguous(dtype, shape))
}

/// A tensor in host memory. Its first element lies `offset` bytes into the buffer, so that a
/// device's view of it can have any misalignment.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) bytes: Vec<u8>,
    pub(crate) offset: usize,
    pub(crate) layout: Layout,
}

impl Tensor {
    /// Draws normal numbers where the layout has elements, and NaN everywhere else.
    pub(crate) fn random(rng: &mut StdRng, layout: Layout, shift: usize) -> Self {
        let mut tensor = Self::poison(layout, shift);
        let layout = tensor.layout;
        tensor.fill(|_, _| normal(rng));
        debug_assert_eq!(layout, tensor.layout);
        tensor
    }

    /// Makes a tensor of NaN.
    pub(crate) fn poison(layout: Layout, shift: usize) -> Self {
        let offset = shift * layout.dtype.bytes();
        let bytes = vec![0xff; offset + layout.span_bytes().unwrap()];
        Self {
            bytes,
            offset,
            layout,
        }
    }

    pub(crate) fn fill(&mut self, mut value: impl FnMut([usize; 3], usize) -> f32) {
        let Layout {
            dtype,
            shape,
            strides,
        } = self.layout;
        let mut index = 0;
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                for k in 0..shape[2] {
                    let at = i * strides[0] + j * strides[1] + k * strides[2];
                    let value = value([i, j, k], index);
                    put(dtype, &mut self.bytes[self.offset..], at, value);
                    index += 1;
                }
            }
        }
    }

    pub(crate) fn at(&self, [i, j, k]: [usize; 3]) -> f32 {
        let strides = self.layout.strides;
        let at = i * strides[0] + j * strides[1] + k * strides[2];
        get(self.layout.dtype, &self.bytes[self.offset..], at)
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        let [a, b, c] = self.layout.shape;
        let mut values = Vec::with_capacity(a * b * c);
        for i in 0..a {
            for j in 0..b {
                values.extend((0..c).map(|k| self.at([i, j, k])));
            }
        }
        values
    }
}

/// A tensor in a device's memory.
pub(crate) struct On<D: Device> {
    buffer: D::Buffer,
    offset: usize,
    layout: Layout,
}

impl<D: Device> On<D> {
    pub(crate) fn new(device: &D, tensor: &Tensor) -> Result<Self> {
        let buffer = upload(device, &tensor.bytes)?;
        Ok(Self {
            buffer,
            offset: tensor.offset,
            layout: tensor.layout,
        })
    }

    pub(crate) fn read(&self) -> Result<TensorRef<'_, D>> {
        let bytes = D::bytes(&self.buffer);
        TensorRef::new(
            D::byte_range(bytes, self.offset..D::byte_len(bytes)),
            self.layout,
        )
    }

    pub(crate) fn write(&mut self) -> Result<TensorMut<'_, D>> {
        let (_, bytes) = D::split_mut(D::bytes_mut(&mut self.buffer), self.offset);
        TensorMut::new(bytes, self.layout)
    }

    /// Downloads all bytes of the buffer, including those between the elements.
    pub(crate) fn download(&self, device: &D) -> Result<Vec<u8>> {
        download::<D>(device, &self.buffer)
    }

    pub(crate) fn host(&self, device: &D) -> Result<Tensor> {
        Ok(Tensor {
            bytes: self.download(device)?,
            offset: self.offset,
            layout: self.layout,
        })
    }

    pub(crate) fn set(&mut self, device: &D, tensor: &Tensor) -> Result<()> {
        device.upload(&tensor.bytes, D::bytes_mut(&mut self.buffer))
    }
}

pub(crate) fn indices<D: Device, T: bytemuck::Pod>(
    buffer: &D::Buffer,
    len: usize,
) -> Result<ArrayRef<'_, D, T>> {
    ArrayRef::new(D::bytes(buffer), len)
}

pub(crate) fn lse<D: Device, C: LseConvention>(
    buffer: &D::Buffer,
    layout: LseLayout,
) -> Result<LseRef<'_, D, C>> {
    LseRef::new(D::bytes(buffer), layout)
}

pub(crate) fn lse_mut<D: Device>(
    buffer: &mut D::Buffer,
    layout: LseLayout,
) -> Result<LseMut<'_, D>> {
    LseMut::new(D::bytes_mut(buffer), layout)
}

/// Returns strides with up to `slack` elements between the rows of each axis. `order` names the
/// axes from the outermost to the innermost.
pub(crate) fn strides(
    rng: &mut StdRng,
    shape: [usize; 3],
    order: [usize; 3],
    slack: usize,
    multiple: usize,
) -> [usize; 3] {
    let mut strides = [0; 3];
    let mut reach = 1;
    for (position, axis) in order.into_iter().rev().enumerate() {
        if position > 0 {
            reach += rng.random_range(0..=slack);
            reach = reach.next_multiple_of(multiple);
        }
        strides[axis] = reach;
        reach *= shape[axis].max(1);
    }
    strides
}

pub(crate) const fn strided(dtype: DType, shape: [usize; 3], strides: [usize; 3]) -> Layout {
    Layout {
        dtype,
        shape,
        strides,
    }
}

/// Returns the distance between neighbours of 1 in a 16-bit dtype, or `of_f32`.
pub(crate) fn unit(dtype: DType, of_f32: f32) -> f32 {
    match dtype {
        DType::F32 => of_f32,
        DType::F16 => 2f32.powi(-10),
        DType::BF16 => 2f32.powi(-7),
    }
}

/// Checks each number beside the expected one.
pub(crate) fn assert_close(
    got: &[f32],
    want: &[f32],
    close: impl Fn(f32, f32) -> bool,
    what: &str,
) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(close(*got, *want), "{i}: {got} against {want}, {what}");
    }
}

/// Returns a layout `[tokens, heads, width]` with gaps, aligned for vector access or not.
pub(crate) fn padded(rng: &mut StdRng, dtype: DType, shape: [usize; 3], aligned: bool) -> Layout {
    let (slack, multiple) = if aligned { (24, 8) } else { (7, 1) };
    strided(
        dtype,
        shape,
        strides(rng, shape, [0, 1, 2], slack, multiple),
    )
}

/// Draws one of `choices`.
pub(crate) fn pick<T: Copy>(rng: &mut StdRng, choices: &[T]) -> T {
    choices[rng.random_range(0..choices.len())]
}

/// Returns the first place where two buffers differ, if there is one.
pub(crate) fn difference(a: &[u8], b: &[u8]) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{} bytes against {}", a.len(), b.len()));
    }
    let at = a.iter().zip(b).position(|(a, b)| a != b)?;
    let count = a.iter().zip(b).filter(|(a, b)| a != b).count();
    Some(format!(
        "{count} of {} bytes differ, first byte {at}: {:#04x} against {:#04x}",
        a.len(),
        a[at],
        b[at]
    ))
}
