//! The cases, their inputs, and how we and candle do them.

use std::path::Path;

use candle_core::{D, DType, Device as CandleDevice, Tensor, WithDType};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill, DecodeState, PrefillState};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend, PrefillCall,
    Query, StepLimits,
};
use mla_runtime::cache::{BlockTable, CacheLayout, CacheRef};
use mla_runtime::dims::MlaDims;
use mla_runtime::dtype::Element;
use mla_runtime::problem::Problem;
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

use crate::Failure;

const PAGE: usize = 64;

#[derive(Clone, Copy)]
pub(crate) enum Case {
    /// One request's new tokens, causal: QK 192 wide, V 128.
    Prefill { heads: usize, tokens: usize },
    /// One token per request, absorbed: rows of 576, values of 512.
    Decode {
        batch: usize,
        heads: usize,
        tokens: usize,
    },
}

impl Case {
    pub(crate) fn name<T: Element>(self) -> String {
        let dtype = T::DTYPE;
        match self {
            Self::Prefill { heads, tokens } => format!("prefill {dtype} h{heads} q{tokens}"),
            Self::Decode {
                batch,
                heads,
                tokens,
            } => {
                format!("decode {dtype} b{batch} h{heads} kv{tokens}")
            }
        }
    }

    /// Multiplications and additions of the two products.
    pub(crate) fn flop(self) -> f64 {
        match self {
            Self::Prefill { heads, tokens } => {
                2.0 * heads as f64 * (tokens * (tokens + 1) / 2) as f64 * (192.0 + 128.0)
            }
            Self::Decode {
                batch,
                heads,
                tokens,
            } => 2.0 * (batch * heads * tokens) as f64 * (576.0 + 512.0),
        }
    }

    pub(crate) fn arguments(self, folder: &Path, dtype: &str) -> Vec<String> {
        let folder = folder.display().to_string();
        let dtype = dtype.to_owned();
        let text = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>();
        let (phase, sizes) = match self {
            Self::Prefill { heads, tokens } => ("prefill", text(&[heads, tokens])),
            Self::Decode {
                batch,
                heads,
                tokens,
            } => ("decode", text(&[batch, heads, tokens])),
        };
        [vec![phase.to_owned(), folder, dtype], sizes].concat()
    }

    fn problem<T: Element>(self) -> LayerConfig {
        let (Self::Prefill { heads, .. } | Self::Decode { heads, .. }) = self;
        LayerConfig::new(
            Problem::new(MlaDims::R1, heads as u32, T::DTYPE),
            1.0 / 192f32.sqrt(),
        )
    }
}

pub(crate) struct Work<T> {
    pub(crate) case: Case,
    // Prefill: [T, H, 192], [T, H, 192], [T, H, 128]. Decode: [B, H, 576], [B, T, 576], none.
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
        let mut state = 1u64;
        // The sum of four uniform numbers, near enough to normal.
        let mut random = |len: usize| -> Vec<T> {
            let mut uniform = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / 8_388_608.0 - 1.0
            };
            (0..len)
                .map(|_| <T as Element>::from_f32(uniform() + uniform() + uniform() + uniform()))
                .collect()
        };
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
        match case {
            Case::Prefill { heads, tokens } => {
                work.q = random(tokens * heads * 192);
                work.k = random(tokens * heads * 192);
                work.v = random(tokens * heads * 128);
                work.starts = vec![0, tokens as i32];
            }
            Case::Decode {
                batch,
                heads,
                tokens,
            } => {
                work.q = random(batch * heads * 576);
                work.k = random(batch * tokens * 576);
                let pages = batch * tokens / PAGE;
                // An odd step through a power of two visits every page once.
                work.table = (0..pages).map(|page| (page * 5 % pages) as i32).collect();
                work.cache = vec![<T as Element>::from_f32(0.0); work.k.len()];
                for (rows, page) in work.k.chunks(PAGE * 576).zip(&work.table) {
                    let at = *page as usize * PAGE * 576;
                    work.cache[at..at + PAGE * 576].copy_from_slice(rows);
                }
                work.seq_lens = vec![tokens as i32; batch];
                work.starts = (0..=batch as i32).collect();
            }
        }
        work
    }

    pub(crate) fn ours(&self) -> Result<Ours<'_, T>, Failure> {
        let config = self.case.problem::<T>();
        let limits = StepLimits::new(64, 4096, 4096).with_context_rows(4096);
        let (backend, width) = match self.case {
            Case::Prefill { .. } => {
                let backend = CpuPrefill::new(&self.cpu, &config)?;
                let state = backend.state(&self.cpu, &limits)?;
                (Backend::Prefill(backend, state), 128)
            }
            Case::Decode { .. } => {
                let backend = CpuDecode::new(&self.cpu, &config)?;
                let state = backend.state(&self.cpu, &limits)?;
                (Backend::Decode(backend, state), 512)
            }
        };
        let rows = match self.case {
            Case::Prefill { heads, tokens } => heads * tokens,
            Case::Decode { batch, heads, .. } => batch * heads,
        };
        Ok(Ours {
            work: self,
            backend,
            out: vec![<T as Element>::from_f32(0.0); rows * width],
        })
    }

    // candle multiplies bf16 on the CPU where it can; converting to f32 first is what its users do
    // where it cannot, and is timed apart from products in f32 alone.
    pub(crate) fn candle(&self) -> Result<Vec<(String, Variant<'_>)>, Failure> {
        let scale = 1.0 / 192f64.sqrt();
        let cpu = CandleDevice::Cpu;
        let mut variants: Vec<(String, Variant<'_>)> = Vec::new();
        let attend = move |q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>| {
            let scores = (q.matmul(k)? * scale)?;
            let scores = match mask {
                Some(mask) => scores.broadcast_add(mask)?,
                None => scores,
            };
            candle_nn::ops::softmax_last_dim(&scores)?.matmul(v)
        };
        let (q, k, v, mask) = match self.case {
            Case::Prefill { heads, tokens } => {
                let heads_first = |data: &[T], width: usize| {
                    Tensor::from_slice(data, (tokens, heads, width), &cpu)?
                        .transpose(0, 1)?
                        .contiguous()
                };
                let mask: Vec<f32> = (0..tokens * tokens)
                    .map(|at| {
                        if at % tokens > at / tokens {
                            f32::NEG_INFINITY
                        } else {
                            0.0
                        }
                    })
                    .collect();
                let mask = Tensor::from_vec(mask, (1, tokens, tokens), &cpu)?
                    .to_dtype(<T as WithDType>::DTYPE)?;
                (
                    heads_first(&self.q, 192)?,
                    heads_first(&self.k, 192)?.transpose(1, 2)?,
                    heads_first(&self.v, 128)?,
                    Some(mask),
                )
            }
            Case::Decode {
                batch,
                heads,
                tokens,
            } => {
                let q = Tensor::from_slice(&self.q, (batch, heads, 576), &cpu)?;
                let rows = Tensor::from_slice(&self.k, (batch, tokens, 576), &cpu)?;
                let v = rows.narrow(D::Minus1, 0, 512)?;
                (q, rows.transpose(1, 2)?, v, None)
            }
        };
        // Values of which a copy without gaps is made beforehand, where candle wants that.
        let v = if q.matmul(&k)?.matmul(&v).is_ok() {
            v
        } else {
            v.contiguous()?
        };
        let prefill = matches!(self.case, Case::Prefill { .. });
        let finish = move |out: Tensor| {
            if prefill {
                out.transpose(0, 1)?.contiguous()
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
            cache,
            table,
            seq_lens,
            starts,
            cpu,
        } = self.work;
        match (&mut self.backend, *case) {
            (Backend::Prefill(backend, state), Case::Prefill { heads, tokens }) => {
                let call = PrefillCall::new(
                    TensorRef::from_slice(q, [tokens, heads, 192])?,
                    Keys::Packed(TensorRef::from_slice(k, [tokens, heads, 192])?),
                    TensorRef::from_slice(v, [tokens, heads, 128])?,
                    Output::Plain(TensorMut::from_slice(&mut self.out, [tokens, heads, 128])?),
                    (ArrayRef::from_slice(starts), tokens),
                    (ArrayRef::from_slice(starts), tokens),
                );
                backend.prefill(cpu, call, state, &())?;
            }
            (
                Backend::Decode(backend, state),
                Case::Decode {
                    batch,
                    heads,
                    tokens,
                },
            ) => {
                let query = TensorRef::from_slice(q, [batch, heads, 576])?;
                let pages = batch * tokens / PAGE;
                let format = mla_runtime::kv_format::KvFormat::of(T::DTYPE);
                let layout = CacheLayout::contiguous(MlaDims::R1, format, pages, PAGE);
                let entries = ArrayRef::from_slice(table);
                let call = DecodeCall::new(
                    Query::Split {
                        latent: query.narrow(2, 0..512)?,
                        rope: query.narrow(2, 512..576)?,
                    },
                    CacheRef::new(bytemuck::cast_slice(cache), layout)?,
                    DecodeBatch::new(
                        BlockTable::new(entries, batch, tokens / PAGE)?,
                        (ArrayRef::from_slice(seq_lens), tokens),
                        (ArrayRef::from_slice(starts), 1),
                    ),
                    Output::Plain(TensorMut::from_slice(&mut self.out, [batch, heads, 512])?),
                );
                backend.decode(cpu, call, state, &())?;
            }
            _ => unreachable!("a work's backend is that of its case"),
        }
        Ok(())
    }
}
