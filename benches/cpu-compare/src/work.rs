//! The cases, their inputs, and their computation by us and by candle.

use std::path::Path;

use candle_core::{D, DType, Device as CandleDevice, Tensor, WithDType};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill, DecodeState, PrefillState};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend, PrefillCall,
    Query, StepLimits,
};
use mla_runtime::model::{Element, MlaDims};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{ArrayRef, BlockTable, CacheLayout, CacheRef, TensorMut, TensorRef};

use crate::Failure;

const PAGE: usize = 64;

/// Attention of several equal requests.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    phase: Phase,
    requests: usize,
    heads: usize,
    /// The number of tokens of each request: new ones in prefill, cached ones in decode.
    tokens: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// Causal attention of new tokens alone: QK 192 wide, V 128.
    Prefill,
    /// Absorbed attention of one token per request: rows of 576, values of 512.
    Decode,
}

impl Case {
    pub(crate) fn prefill(requests: usize, heads: usize, tokens: usize) -> Self {
        Self {
            phase: Phase::Prefill,
            requests,
            heads,
            tokens,
        }
    }

    pub(crate) fn decode(requests: usize, heads: usize, tokens: usize) -> Self {
        Self {
            phase: Phase::Decode,
            ..Self::prefill(requests, heads, tokens)
        }
    }

    pub(crate) fn name<T: Element>(self) -> String {
        let Self {
            requests,
            heads,
            tokens,
            ..
        } = self;
        let (phase, dtype) = (self.phase_name(), T::DTYPE);
        let symbol = match self.phase {
            Phase::Prefill => 'q',
            Phase::Decode => 's',
        };
        format!("{phase} {dtype} b{requests} h{heads} {symbol}{tokens}")
    }

    fn phase_name(self) -> &'static str {
        match self.phase {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        }
    }

    // Pairs of a query row and a key that it sees.
    fn scores(self) -> usize {
        let of_a_head = match self.phase {
            Phase::Prefill => self.tokens * (self.tokens + 1) / 2,
            Phase::Decode => self.tokens,
        };
        self.requests * self.heads * of_a_head
    }

    /// Returns the number of multiplications and additions of the two products.
    pub(crate) fn flop(self) -> f64 {
        let widths = match self.phase {
            Phase::Prefill => 192 + 128,
            Phase::Decode => 576 + 512,
        };
        2.0 * (self.scores() * widths) as f64
    }

    /// Returns about the bytes that candle needs in f32, most of them for scores.
    pub(crate) fn bytes(self) -> usize {
        let rows = match self.phase {
            Phase::Prefill => self.tokens * self.heads,
            Phase::Decode => self.tokens,
        };
        4 * (3 * self.requests * rows * 576 + 4 * self.scores())
    }

    pub(crate) fn arguments(self, folder: &Path, dtype: &str) -> Vec<String> {
        let sizes = [self.requests, self.heads, self.tokens];
        let first = [
            self.phase_name().to_owned(),
            folder.display().to_string(),
            dtype.to_owned(),
        ];
        let sizes = sizes.iter().map(usize::to_string);
        first.into_iter().chain(sizes).collect()
    }

    fn problem<T: Element>(self) -> LayerConfig {
        LayerConfig::new(
            Problem::new(MlaDims::R1, self.heads as u32, T::DTYPE),
            1.0 / 192f32.sqrt(),
        )
    }
}

/// Random numbers, repeatable.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 40
    }

    /// Returns a number below `end`, which is below 2^24.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() as usize * end) >> 24
    }

    /// Returns a number from `least` to `most`: it is as often below as above their geometric mean.
    pub(crate) fn spread(&mut self, least: usize, most: usize) -> usize {
        let share = self.next() as f64 / 16_777_216.0;
        let span = (most + 1) as f64 / least as f64;
        (least as f64 * span.powf(share)) as usize
    }

    // Draws sums of four uniform numbers in [-1, 1), near enough to normal.
    fn fill<T: Element>(&mut self, len: usize) -> Vec<T> {
        let mut uniform = || self.next() as f32 / 8_388_608.0 - 1.0;
        (0..len)
            .map(|_| T::from_f32(uniform() + uniform() + uniform() + uniform()))
            .collect()
    }
}

pub(crate) struct Work<T> {
    pub(crate) case: Case,
    // Prefill: [B, T, H, 192], [B, T, H, 192], [B, T, H, 128]. Decode: [B, H, 576], [B, T, 576],
    // none.
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    // Decode: the same rows in shuffled pages, the block table, and the lengths.
    cache: Vec<T>,
    table: Vec<i32>,
    seq_lens: Vec<i32>,
    starts: Vec<i32>,
    cpu: Cpu,
}

impl<T: Element + WithDType> Work<T> {
    pub(crate) fn new(case: Case) -> Self {
        let Case {
            phase,
            requests,
            heads,
            tokens,
        } = case;
        let mut numbers = Numbers::new(1);
        let mut work = Self {
            case,
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            cache: Vec::new(),
            table: Vec::new(),
            seq_lens: Vec::new(),
            starts: Vec::new(),
            cpu: Cpu::new(),
        };
        match phase {
            Phase::Prefill => {
                work.q = numbers.fill(requests * tokens * heads * 192);
                work.k = numbers.fill(requests * tokens * heads * 192);
                work.v = numbers.fill(requests * tokens * heads * 128);
                work.starts = (0..=requests).map(|i| (i * tokens) as i32).collect();
            }
            Phase::Decode => {
                work.q = numbers.fill(requests * heads * 576);
                work.k = numbers.fill(requests * tokens * 576);
                work.fill_pages(&mut numbers);
                work.seq_lens = vec![tokens as i32; requests];
                work.starts = (0..=requests as i32).collect();
            }
        }
        work
    }

    fn fill_pages(&mut self, numbers: &mut Numbers) {
        let of_each = self.case.tokens.div_ceil(PAGE);
        let pages = self.case.requests * of_each;
        self.table = (0..pages as i32).collect();
        for page in (1..pages).rev() {
            self.table.swap(page, numbers.below(page + 1));
        }
        self.cache = vec![<T as Element>::from_f32(0.0); pages * PAGE * 576];
        let requests = self.k.chunks(self.case.tokens * 576);
        for (rows, pages) in requests.zip(self.table.chunks(of_each)) {
            for (rows, page) in rows.chunks(PAGE * 576).zip(pages) {
                let at = *page as usize * PAGE * 576;
                self.cache[at..at + rows.len()].copy_from_slice(rows);
            }
        }
    }

    pub(crate) fn ours(&self) -> Result<Ours<'_, T>, Failure> {
        let Case {
            phase,
            requests,
            heads,
            tokens,
        } = self.case;
        let config = self.case.problem::<T>();
        let limits = StepLimits::new(64, requests * tokens, 4096).with_context_rows(4096);
        let (backend, len) = match phase {
            Phase::Prefill => {
                let backend = CpuPrefill::new(&self.cpu, &config)?;
                let state = backend.state(&self.cpu, &limits)?;
                let len = requests * tokens * heads * 128;
                (Backend::Prefill(backend, state), len)
            }
            Phase::Decode => {
                let backend = CpuDecode::new(&self.cpu, &config)?;
                let state = backend.state(&self.cpu, &limits)?;
                (Backend::Decode(backend, state), requests * heads * 512)
            }
        };
        Ok(Ours {
            work: self,
            backend,
            out: vec![<T as Element>::from_f32(0.0); len],
        })
    }

    // Returns the tensors in the layout that suits candle: queries and outputs by head, keys as
    // columns, and in prefill a mask.
    fn tensors(&self) -> Result<[Option<Tensor>; 4], Failure> {
        let cpu = CandleDevice::Cpu;
        let Case {
            phase,
            requests,
            heads,
            tokens,
        } = self.case;
        if phase == Phase::Decode {
            let q = Tensor::from_slice(&self.q, (requests, heads, 576), &cpu)?;
            let rows = Tensor::from_slice(&self.k, (requests, tokens, 576), &cpu)?;
            let v = rows.narrow(D::Minus1, 0, 512)?;
            return Ok([Some(q), Some(rows.transpose(1, 2)?), Some(v), None]);
        }
        let heads_first = |data: &[T], width: usize| {
            Tensor::from_slice(data, (requests, tokens, heads, width), &cpu)?
                .transpose(1, 2)?
                .contiguous()
        };
        let hidden = |at: usize| match at % tokens > at / tokens {
            true => f32::NEG_INFINITY,
            false => 0.0,
        };
        let mask: Vec<f32> = (0..tokens * tokens).map(hidden).collect();
        let mask = Tensor::from_vec(mask, (1, 1, tokens, tokens), &cpu)?
            .to_dtype(<T as WithDType>::DTYPE)?;
        Ok([
            Some(heads_first(&self.q, 192)?),
            Some(heads_first(&self.k, 192)?.transpose(2, 3)?),
            Some(heads_first(&self.v, 128)?),
            Some(mask),
        ])
    }

    // candle multiplies bf16 on the CPU if it can. If it cannot, its users convert to f32 first,
    // which is timed apart from products in f32 alone.
    pub(crate) fn candle(&self) -> Result<Vec<(String, Variant<'_>)>, Failure> {
        let scale = 1.0 / 192f64.sqrt();
        let mut variants: Vec<(String, Variant<'_>)> = Vec::new();
        let attend = move |q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>| {
            let scores = (q.matmul(k)? * scale)?;
            let scores = match mask {
                Some(mask) => scores.broadcast_add(mask)?,
                None => scores,
            };
            candle_nn::ops::softmax_last_dim(&scores)?.matmul(v)
        };
        let [Some(q), Some(k), Some(v), mask] = self.tensors()? else {
            unreachable!("only the mask is ever missing");
        };
        // The values, copied without gaps beforehand if candle needs that.
        let v = if q.matmul(&k)?.matmul(&v).is_ok() {
            v
        } else {
            v.contiguous()?
        };
        let prefill = self.case.phase == Phase::Prefill;
        let finish = move |out: Tensor| {
            if prefill {
                out.transpose(1, 2)?.contiguous()
            } else {
                Ok(out)
            }
        };
        if q.dtype() != DType::F32 {
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let mask = mask
                .as_ref()
                .map(|mask| mask.to_dtype(DType::F32))
                .transpose()?;
            let convert = move || -> Result<Tensor, Failure> {
                let [q, k, v] = [
                    q.to_dtype(DType::F32)?,
                    k.to_dtype(DType::F32)?,
                    v.to_dtype(DType::F32)?,
                ];
                Ok(finish(
                    attend(&q, &k, &v, mask.as_ref())?.to_dtype(<T as WithDType>::DTYPE)?,
                )?)
            };
            variants.push(("candle, converted to f32".to_owned(), Box::new(convert)));
        }
        let direct =
            move || -> Result<Tensor, Failure> { Ok(finish(attend(&q, &k, &v, mask.as_ref())?)?) };
        match direct() {
            Ok(_) => variants.push(("candle".to_owned(), Box::new(direct))),
            Err(error) => eprintln!("{}: candle: {error}", self.case.name::<T>()),
        }
        Ok(variants)
    }
}

impl<T> Work<T> {
    pub(crate) fn files(&self) -> Vec<(&'static str, &[T])> {
        vec![("q", &self.q), ("k", &self.k), ("v", &self.v)]
    }
}

pub(crate) type Variant<'a> = Box<dyn Fn() -> Result<Tensor, Failure> + 'a>;

pub(crate) fn to_f32(tensor: &Tensor) -> Result<Vec<f32>, Failure> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

enum Backend {
    Prefill(CpuPrefill, PrefillState),
    Decode(CpuDecode, DecodeState),
}

pub(crate) struct Ours<'a, T> {
    work: &'a Work<T>,
    backend: Backend,
    out: Vec<T>,
}

impl<T: Element> Ours<'_, T> {
    pub(crate) fn output(&mut self) -> Result<Vec<f32>, Failure> {
        self.run()?;
        Ok(self.out.iter().map(|x| x.to_f32()).collect())
    }

    pub(crate) fn run(&mut self) -> Result<(), Failure> {
        let Work {
            case,
            q,
            k,
            v,
            starts,
            cpu,
            ..
        } = self.work;
        let (heads, tokens) = (case.heads, case.tokens);
        let rows = case.requests * tokens;
        match &mut self.backend {
            Backend::Prefill(backend, state) => {
                let call = PrefillCall::new(
                    TensorRef::from_slice(q, [rows, heads, 192])?,
                    Keys::Packed(TensorRef::from_slice(k, [rows, heads, 192])?),
                    TensorRef::from_slice(v, [rows, heads, 128])?,
                    Output::Plain(TensorMut::from_slice(&mut self.out, [rows, heads, 128])?),
                    (ArrayRef::from_slice(starts), tokens),
                    (ArrayRef::from_slice(starts), tokens),
                );
                // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
                unsafe { backend.prefill(cpu, call, state, &())? };
            }
            Backend::Decode(backend, state) => {
                let call = self.work.decode_call(&mut self.out)?;
                // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
                unsafe { backend.decode(cpu, call, state, &())? };
            }
        }
        Ok(())
    }
}

impl<T: Element> Work<T> {
    fn decode_call<'a>(&'a self, out: &'a mut [T]) -> Result<DecodeCall<'a, Cpu>, Failure> {
        let Case {
            requests,
            heads,
            tokens,
            ..
        } = self.case;
        let query = TensorRef::from_slice(&self.q, [requests, heads, 576])?;
        let pages = tokens.div_ceil(PAGE);
        let format = mla_runtime::model::KvFormat::of(T::DTYPE);
        let layout = CacheLayout::contiguous(MlaDims::R1, format, requests * pages, PAGE);
        Ok(DecodeCall::new(
            Query::Split {
                latent: query.narrow(2, 0..512)?,
                rope: query.narrow(2, 512..576)?,
            },
            CacheRef::new(bytemuck::cast_slice(&self.cache), layout)?,
            DecodeBatch::new(
                BlockTable::new(ArrayRef::from_slice(&self.table), requests, pages)?,
                (ArrayRef::from_slice(&self.seq_lens), tokens),
                (ArrayRef::from_slice(&self.starts), 1),
            ),
            Output::Plain(TensorMut::from_slice(out, [requests, heads, 512])?),
        ))
    }
}
