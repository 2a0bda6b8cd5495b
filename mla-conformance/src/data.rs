//! Numbers of a case in host memory and on a device, and their comparison.

use super::Failure;
use super::trial::Placement;
use crate::reference;
use std::ops::Range;

use half::{bf16, f16};
use mla_runtime::Result;
use mla_runtime::backend::{LayerConfig, Output};
use mla_runtime::device::Device;
use mla_runtime::device::probe::Dependents;
use mla_runtime::model::DType;
use mla_runtime::spec::{BackendSpec, Feature, Problem};
use mla_runtime::tensor::{ArrayRef, Layout, LseLayout, LseMut, Memory, TensorMut, TensorRef};

/// Byte of poison. Memory that is filled with it holds NaN in all formats, and no valid address.
pub(super) const POISON: u8 = 0xff;

/// Random numbers, uniform in [−1, 1). They are the same on every machine and in every version, so
/// a failure repeats.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / 8_388_608.0 - 1.0
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * bound as f64) as usize % bound.max(1)
    }
}

/// Returns the maximum difference between the reference and an output in `dtype`, an average of
/// values below 1 in magnitude.
///
/// f32 computes within a few roundings of the largest score, at most 8 here, times 2^−24. In f16
/// and bf16 the output is rounded, and a kernel may round the softmax's weights to the same dtype
/// before it multiplies them. Each rounding moves an average by at most half a unit in the last
/// place of a value below 1. That is 2^−12 for f16 and 2^−9 for bf16.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 1e-3,
        DType::BF16 => 6e-3,
    }
}

/// Maximum difference of a log-sum-exp in f32, relative to its magnitude if that is above 1. It
/// holds for every dtype, unless the spec says that weights are rounded to that dtype.
const LSE_TOLERANCE: f64 = 5e-5;

/// Returns the maximum difference between a backend's log-sum-exp and `want`. It is 0 if `want` is
/// that of no keys.
fn lse_tolerance(spec: &BackendSpec, dtype: DType, want: f64) -> f64 {
    if want.is_infinite() {
        return 0.0;
    }
    LSE_TOLERANCE * want.abs().max(1.0) + spec.lse_precision.error(dtype)
}

/// The bits of a result, for comparison with another one.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Bits {
    pub(super) out: Vec<u8>,
    pub(super) lse: Option<Vec<u8>>,
}

impl Bits {
    /// Returns the bits of a part of the `tokens` tokens. Their rows are contiguous.
    pub(super) fn of(&self, some: Range<usize>, tokens: usize) -> Self {
        let row = self.out.len() / tokens.max(1);
        let of_head = |lse: &[u8]| lse[4 * some.start..4 * some.end].to_vec();
        let lse = self.lse.as_deref();
        Self {
            out: self.out[row * some.start..row * some.end].to_vec(),
            lse: lse.map(|lse| {
                lse.chunks_exact(4 * tokens.max(1))
                    .flat_map(of_head)
                    .collect()
            }),
        }
    }
}

/// Random numbers of a case: one sequence, or one for each request.
pub(super) struct Sequences {
    pub(super) shared: Random,
    own: Vec<Random>,
}

impl Sequences {
    pub(super) fn new(seed: u64, own_seeds: &[u64]) -> Self {
        Self {
            shared: Random::new(seed),
            own: own_seeds.iter().copied().map(Random::new).collect(),
        }
    }

    pub(super) fn of(&mut self, request: usize) -> &mut Random {
        match self.own.get_mut(request) {
            Some(random) => random,
            None => &mut self.shared,
        }
    }
}

/// Returns the request of each token.
pub(super) fn owners(lens: &[usize]) -> Vec<usize> {
    let requests = lens.iter().enumerate();
    requests
        .flat_map(|(request, len)| std::iter::repeat_n(request, *len))
        .collect()
}

pub(super) fn config(problem: Problem) -> LayerConfig {
    LayerConfig::new(problem, 1.0 / (problem.dims.head.qk().max(1) as f32).sqrt())
}

/// Returns a factor on the softmax scale for each query token of these requests, if the problem has
/// such factors.
pub(super) fn query_scales(
    random: &mut Sequences,
    owners: &[usize],
    problem: &Problem,
) -> Option<Vec<f32>> {
    let has_any = problem.features.contains(Feature::QueryScales);
    let mut factor = |owner: &usize| 1.0 + 0.75 * random.of(*owner).next() as f32;
    has_any.then(|| owners.iter().map(&mut factor).collect())
}

/// Returns a view of numbers, if there are any.
pub(super) fn floats<D: Device>(
    buffer: &Option<D::Buffer>,
    len: usize,
) -> Result<Option<ArrayRef<'_, D, f32>>> {
    buffer.as_ref().map(|buffer| array(buffer, len)).transpose()
}

/// Returns the factor of a query token.
pub(super) fn factor(scales: &Option<Vec<f32>>, token: usize) -> f64 {
    scales
        .as_ref()
        .map_or(1.0, |scales| f64::from(scales[token]))
}

/// Returns the placement of an output. It has distances between rows only if the spec supports
/// them.
pub(super) fn of_output(spec: &BackendSpec, placement: Placement) -> Placement {
    match spec.features.contains(Feature::StridedOutputs) {
        true => placement,
        false => placement.contiguous(),
    }
}

/// Returns the longest of some lengths.
pub(super) fn longest(lens: &[usize]) -> usize {
    lens.iter().copied().max().unwrap_or(0)
}

/// Returns the first token of each request, and the end of the last one.
pub(super) fn starts(lens: &[usize]) -> Vec<i32> {
    let mut starts = vec![0];
    for len in lens {
        starts.push(starts[starts.len() - 1] + *len as i32);
    }
    starts
}

/// A tensor in host memory, with poison in front of it and between its rows.
#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) bytes: Vec<u8>,
    pub(super) layout: Layout,
    /// The number of bytes in front of it.
    start: usize,
}

impl Tensor {
    /// Makes a tensor of poison.
    pub(super) fn poison(dtype: DType, shape: [usize; 3], placement: Placement) -> Self {
        let mut layout = Layout::contiguous(dtype, shape);
        layout.strides[0] = placement.stride(dtype, layout.strides[0]);
        let (elements, start) = (shape[0] * layout.strides[0], placement.start(dtype.bytes()));
        Self {
            bytes: vec![POISON; start + elements * dtype.bytes()],
            layout,
            start,
        }
    }

    /// Makes a tensor of random numbers. `owners` has the request of each row.
    pub(super) fn random(
        (random, owners): (&mut Sequences, &[usize]),
        amplitude: f64,
        dtype: DType,
        shape: [usize; 3],
        placement: Placement,
    ) -> Self {
        let mut tensor = Self::poison(dtype, shape, placement);
        tensor.fill(|t, _, _| random.of(owners[t]).next() * amplitude);
        tensor
    }

    pub(super) fn fill(&mut self, mut value: impl FnMut(usize, usize, usize) -> f64) {
        let [tokens, heads, width] = self.layout.shape;
        for t in 0..tokens {
            for h in 0..heads {
                for k in 0..width {
                    self.set([t, h, k], value(t, h, k));
                }
            }
        }
    }

    pub(super) fn set(&mut self, [t, h, k]: [usize; 3], value: f64) {
        let at = self.offset(t, h, k);
        let to = &mut self.bytes[at..];
        match self.layout.dtype {
            DType::F32 => to[..4].copy_from_slice(&(value as f32).to_le_bytes()),
            DType::F16 => to[..2].copy_from_slice(&f16::from_f64(value).to_le_bytes()),
            DType::BF16 => to[..2].copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        }
    }

    fn offset(&self, t: usize, h: usize, k: usize) -> usize {
        let strides = self.layout.strides;
        let element = t * strides[0] + h * strides[1] + k * strides[2];
        self.start + element * self.layout.dtype.bytes()
    }

    pub(super) fn at(&self, t: usize, h: usize, k: usize) -> f64 {
        read(self.layout.dtype, &self.bytes, self.offset(t, h, k))
    }

    /// Returns the first byte between the rows that no longer is poison.
    fn touched(&self) -> Option<usize> {
        let [tokens, heads, width] = self.layout.shape;
        let size = self.layout.dtype.bytes();
        let (stride, row) = (self.layout.strides[0] * size, heads * width * size);
        let rows = (0..tokens).map(|token| self.start + token * stride);
        let between = rows.map(|at| at + row..at + stride);
        let mut gaps = std::iter::once(0..self.start).chain(between).flatten();
        gaps.find(|byte| self.bytes[*byte] != POISON)
    }

    pub(super) fn upload<D: Device>(&self, device: &D) -> Result<OnDevice<D>> {
        Ok(OnDevice {
            buffer: upload(device, &self.bytes)?,
            range: self.start..self.bytes.len(),
            layout: self.layout,
        })
    }
}

fn read(dtype: DType, bytes: &[u8], at: usize) -> f64 {
    let half = [bytes[at], bytes[at + 1]];
    match dtype {
        DType::F32 => f32::from_le_bytes([half[0], half[1], bytes[at + 2], bytes[at + 3]]).into(),
        DType::F16 => f16::from_le_bytes(half).into(),
        DType::BF16 => bf16::from_le_bytes(half).into(),
    }
}

/// A tensor in a device's memory.
pub(super) struct OnDevice<D: Device> {
    pub(super) buffer: D::Buffer,
    range: Range<usize>,
    layout: Layout,
}

impl<D: Device> OnDevice<D> {
    pub(super) fn view(&self) -> Result<TensorRef<'_, D>> {
        let bytes = D::byte_range(D::bytes(&self.buffer), self.range.clone());
        TensorRef::new(bytes, self.layout)
    }
}

/// Buffers that can be written.
pub(super) type Buffers<'a, D> = Vec<&'a mut <D as Memory>::Buffer>;

/// Copies the content of each buffer to another one of the same length.
pub(super) fn copy_all<D: Device>(
    device: &D,
    from: Buffers<'_, D>,
    to: Buffers<'_, D>,
) -> Result<()> {
    for (from, to) in from.into_iter().zip(to) {
        let bytes = download(device, from, D::byte_len(D::bytes(from)))?;
        device.upload(&bytes, D::bytes_mut(to))?;
    }
    Ok(())
}

/// Inputs of a call that a kernel writes late, with their later contents. Their memory holds poison
/// until then.
pub(super) struct FilledLater<D: Device>(Vec<D::Buffer>);

impl<D: Device> FilledLater<D> {
    pub(super) fn new(device: &D, inputs: Buffers<'_, D>) -> Result<Self> {
        let mut staged = Vec::new();
        for input in inputs {
            let bytes = download(device, input, D::byte_len(D::bytes(input)))?;
            staged.push(upload(device, &bytes)?);
            device.upload(&vec![POISON; bytes.len()], D::bytes_mut(input))?;
        }
        Ok(Self(staged))
    }

    /// Enqueues the writes. The last of them is still running when this returns.
    pub(super) fn write(
        &self,
        dependents: &dyn Dependents<D>,
        inputs: Buffers<'_, D>,
    ) -> Result<()> {
        for (staged, input) in self.0.iter().zip(inputs) {
            dependents.copy_late(D::bytes(staged), D::bytes_mut(input))?;
        }
        Ok(())
    }
}

/// Copies bytes to the device. Even an empty array gets some memory, so that it has an address.
pub(super) fn upload<D: Device>(device: &D, bytes: &[u8]) -> Result<D::Buffer> {
    let mut buffer = device.allocate(bytes.len().max(256))?;
    let (to, _) = D::split_mut(D::bytes_mut(&mut buffer), bytes.len());
    device.upload(bytes, to)?;
    Ok(buffer)
}

fn download<D: Device>(device: &D, buffer: &D::Buffer, bytes: usize) -> Result<Vec<u8>> {
    let mut host = vec![0; bytes];
    device.download(D::byte_range(D::bytes(buffer), 0..bytes), &mut host)?;
    Ok(host)
}

pub(super) fn array<D: Device, T: bytemuck::Pod>(
    buffer: &D::Buffer,
    len: usize,
) -> Result<ArrayRef<'_, D, T>> {
    ArrayRef::new(D::bytes(buffer), len)
}

/// The outputs of a call.
pub(super) struct Outputs<D: Device> {
    problem: Problem,
    shape: [usize; 3],
    out: Tensor,
    out_buffer: D::Buffer,
    lse_buffer: Option<D::Buffer>,
}

/// Scale of a quantised output.
const OUT_SCALE: f32 = 1.0 / 256.0;

impl<D: Device> Outputs<D> {
    /// Makes outputs of poison, `[tokens, heads, columns]`.
    pub(super) fn new(
        device: &D,
        problem: Problem,
        shape: [usize; 3],
        placement: Placement,
        lse: bool,
    ) -> Result<Self> {
        let mut out = Tensor::poison(problem.dtype, shape, placement);
        if problem.quant_output {
            (out.bytes, out.start) = (vec![POISON; shape.iter().product()], 0);
        }
        let lse_bytes = vec![POISON; 4 * shape[0] * shape[1]];
        Ok(Self {
            problem,
            shape,
            out_buffer: upload(device, &out.bytes)?,
            out,
            lse_buffer: if lse {
                Some(upload(device, &lse_bytes)?)
            } else {
                None
            },
        })
    }

    pub(super) fn views(&mut self) -> Result<(Output<'_, D>, Option<LseMut<'_, D>>)> {
        let (len, start) = (self.out.bytes.len(), self.out.start);
        let (bytes, _) = D::split_mut(D::bytes_mut(&mut self.out_buffer), len);
        let (_, bytes) = D::split_mut(bytes, start);
        let out = if self.problem.quant_output {
            Output::Fp8 {
                bytes,
                scale: OUT_SCALE,
            }
        } else {
            Output::Plain(TensorMut::new(bytes, self.out.layout)?)
        };
        let layout = LseLayout::heads_first(self.shape[1], self.shape[0]);
        let lse = match &mut self.lse_buffer {
            Some(buffer) => Some(LseMut::new(D::bytes_mut(buffer), layout)?),
            None => None,
        };
        Ok((out, lse))
    }

    /// Allocates memory for copies of the outputs.
    pub(super) fn copies(&self, device: &D) -> Result<Vec<D::Buffer>> {
        let copy = |buffer| device.allocate(D::byte_len(D::bytes(buffer)));
        self.buffers().into_iter().map(copy).collect()
    }

    fn buffers(&self) -> Vec<&D::Buffer> {
        [&self.out_buffer]
            .into_iter()
            .chain(&self.lse_buffer)
            .collect()
    }

    /// Enqueues copies of the outputs. The first begins as early as it can.
    pub(super) fn copy_to(
        &self,
        copies: &mut [D::Buffer],
        dependents: &dyn Dependents<D>,
    ) -> Result<()> {
        let mut pairs = self.buffers().into_iter().zip(copies);
        pairs.try_for_each(|(from, to)| dependents.copy_dependent(D::bytes(from), D::bytes_mut(to)))
    }

    /// Returns the same outputs with these copies in place of the memory that the backend wrote.
    pub(super) fn with(mut self, copies: Vec<D::Buffer>) -> Self {
        let mut copies = copies.into_iter();
        self.out_buffer = copies.next().unwrap_or(self.out_buffer);
        self.lse_buffer = copies.next();
        self
    }

    /// Waits for the backend, and downloads its results.
    pub(super) fn finish(mut self, device: &D) -> Result<Written> {
        device.synchronize()?;
        self.out.bytes = download(device, &self.out_buffer, self.out.bytes.len())?;
        let lse = match &self.lse_buffer {
            Some(buffer) => Some(download(device, buffer, 4 * self.shape[0] * self.shape[1])?),
            None => None,
        };
        Ok(Written {
            problem: self.problem,
            width: self.shape[2],
            out: self.out,
            lse,
        })
    }
}

/// The value to which the tolerances of a row's outputs are relative.
#[derive(Clone, Copy)]
pub(super) enum Tolerances {
    /// The output itself, or 1 if that is larger.
    Plain,
    /// The largest output in a group of this many columns, for rows with their own scales. The
    /// second number is a tolerance of the log-sum-exp, relative to itself or to 1. It is above 0
    /// if the scales are no powers of two: a backend may then round scores after it has multiplied
    /// them by scales.
    Group(usize, f64),
    /// The same as `Plain`, for queries and keys of this amplitude above 1. Small scores are then
    /// sums of large terms, and they keep the rounding errors of these terms.
    Amplitude(f64),
}

/// Results of a backend, in host memory.
pub(super) struct Written {
    problem: Problem,
    width: usize,
    out: Tensor,
    lse: Option<Vec<u8>>,
}

impl Written {
    pub(super) fn bits(self) -> Bits {
        Bits {
            out: self.out.bytes,
            lse: self.lse,
        }
    }

    /// Compares the row of one token and head with the reference's.
    pub(super) fn check_row(
        &self,
        spec: &BackendSpec,
        [token, head]: [usize; 2],
        want: &[f64],
        want_lse: f64,
        tolerances: Tolerances,
    ) -> std::result::Result<(), Failure> {
        let (name, [tokens, heads, _]) = (spec.name, self.out.layout.shape);
        let dtype = self.problem.dtype;
        let allowed = |k: usize| match tolerances {
            Tolerances::Plain => tolerance(dtype) * want[k].abs().max(1.0),
            Tolerances::Amplitude(_) => tolerance(dtype).max(1e-2),
            Tolerances::Group(group, _) => {
                let own = want[k / group * group..].iter().take(group);
                let largest = own.fold(0.0, |max: f64, x| max.max(x.abs()));
                // Roundings of weights do not cancel if values have both signs. Half of f16's
                // smallest number is added.
                let rounding = if dtype == DType::F16 {
                    2f64.powi(-25)
                } else {
                    0.0
                };
                2.0 * tolerance(dtype) * largest + rounding
            }
        };
        for (k, want) in want.iter().enumerate().take(self.width) {
            let mut tolerance = allowed(k);
            let got = if self.problem.quant_output {
                let code = self.out.bytes[(token * heads + head) * self.width + k];
                // Rounding to e4m3 adds half a unit in the last of three places, and half of the
                // smallest number.
                tolerance += want.abs() / 16.0 + f64::from(OUT_SCALE) / 1024.0;
                reference::decode_e4m3(code) * f64::from(OUT_SCALE)
            } else {
                self.out.at(token, head, k)
            };
            let what = || format!("out[{token}, {head}, {k}]");
            self.compare(name, what, got, *want, tolerance)?;
        }
        if let Some(lse) = &self.lse {
            let got = read(DType::F32, lse, 4 * (head * tokens + token));
            let terms = match tolerances {
                Tolerances::Amplitude(amplitude) => amplitude.powi(2) / 3.0 * 1e-6,
                Tolerances::Group(_, rounded) => rounded * want_lse.abs().max(1.0),
                Tolerances::Plain => 0.0,
            };
            let tolerance = lse_tolerance(spec, self.problem.dtype, want_lse) + terms;
            let what = || format!("lse[{head}, {token}]");
            self.compare(name, what, got, want_lse, tolerance)?;
        }
        Ok(())
    }

    fn compare(
        &self,
        name: &'static str,
        what: impl Fn() -> String,
        got: f64,
        want: f64,
        tolerance: f64,
    ) -> std::result::Result<(), Failure> {
        let both_nan = got.is_nan() && want.is_nan();
        if got == want || both_nan || (got - want).abs() <= tolerance {
            return Ok(());
        }
        Err(Failure::Wrong {
            name,
            problem: Box::new(self.problem),
            what: what(),
            got,
            want,
            tolerance,
        })
    }

    /// Checks that nothing was written between the rows.
    pub(super) fn check_gaps(&self, name: &'static str) -> std::result::Result<(), Failure> {
        let plain = !self.problem.quant_output;
        match plain.then(|| self.out.touched()).flatten() {
            Some(byte) => Err(Failure::Touched {
                name,
                problem: Box::new(self.problem),
                tensor: "out",
                byte,
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_runtime::model::MlaDims;
    use mla_runtime::spec::{LsePrecision, Phase, Platform};

    /// Returns true if `got` passes as a log-sum-exp of `want`.
    fn passes(precision: LsePrecision, dtype: DType, got: f32, want: f64) -> bool {
        let spec =
            BackendSpec::new("ROUNDED", Phase::Decode, Platform::Cpu).with_lse_precision(precision);
        let written = Written {
            problem: Problem::new(MlaDims::R1, 1, dtype),
            width: 0,
            out: Tensor::poison(dtype, [1, 1, 0], Placement::default()),
            lse: Some(got.to_le_bytes().to_vec()),
        };
        written
            .check_row(&spec, [0, 0], &[], want, Tolerances::Plain)
            .is_ok()
    }

    #[test]
    fn lse_within_declared_precision() {
        for (dtype, rounding) in [(DType::F16, 4.8e-4), (DType::BF16, 3.9e-3)] {
            for want in [-3.0, 0.5, 1.5] {
                let off = |error: f64| (want + error) as f32;
                assert!(passes(LsePrecision::DType, dtype, off(rounding), want));
                assert!(passes(LsePrecision::DType, dtype, off(-rounding), want));
                assert!(!passes(LsePrecision::F32, dtype, off(rounding), want));
                // Larger differences than rounding explains are still refused.
                assert!(!passes(
                    LsePrecision::DType,
                    dtype,
                    off(2.0 * rounding),
                    want
                ));
                let base_2 = want * std::f64::consts::LOG2_E;
                assert!(!passes(LsePrecision::DType, dtype, base_2 as f32, want));
                assert!(!passes(LsePrecision::DType, dtype, f32::NAN, want));
            }
            let empty = f64::NEG_INFINITY;
            assert!(passes(LsePrecision::DType, dtype, f32::NEG_INFINITY, empty));
            assert!(!passes(LsePrecision::DType, dtype, -1e30, empty));
        }
    }
}
