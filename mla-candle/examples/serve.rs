//! Many requests at once, by continuous batching. A request joins when there is room. It processes
//! its prompt in parts, then generates a token per step, and leaves when it is done, while the
//! others go on.
//!
//! The model is small and its weights are random. Everything around the attention is candle's.
//! Afterwards each request runs alone over the same tokens, and must generate the same ones.
//!
//! ```console
//! $ cargo run --example serve
//! $ cargo run --release --features sm90 --example serve -- cuda   # or sm80, for other GPUs
//! ```

use std::collections::VecDeque;

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope_i;
use mla_candle::{Attention, Layer, Workspace, attend};
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::StepRequest;
use mla_runtime::model::{HeadDims, MlaDims, Rope};
use mla_runtime::spec::{Problem, QueryLen};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const HIDDEN: usize = 128;
const WORDS: usize = 256;
/// The dimensions of DeepSeek's caches, which GPU kernels accept.
const DIMS: MlaDims = MlaDims::R1;

const PAGE: usize = 16;
const PAGES: usize = 24;
/// Maximum number of new tokens of a step. Decodes come first, and prompts get the rest.
const BUDGET: usize = 48;
const MAX_REQUESTS: usize = 4;
const MAX_LEN: usize = 160;

fn main() -> Result<()> {
    let (device, dtype) = match std::env::args().nth(1).as_deref() {
        None => (Device::Cpu, DType::F32),
        Some("cuda") => (Device::new_cuda_with_stream(0)?, DType::BF16),
        Some(other) => candle_core::bail!("device: given {other:?}, accepted cuda, or nothing"),
    };
    let model = Model::new(&device, dtype)?;
    let requests: Vec<Request> = [
        (70, 9),
        (5, 20),
        (33, 4),
        (1, 12),
        (90, 6),
        (17, 15),
        (48, 3),
    ]
    .into_iter()
    .enumerate()
    .map(|(number, (prompt, wanted))| Request::new(number, prompt, wanted))
    .collect();
    let served = Server::new(&model)?.serve(requests.clone(), true)?;
    for (request, served) in requests.iter().zip(&served) {
        // The same tokens alone, including the sampled ones.
        let alone = Request {
            forced: served.tokens.clone(),
            ..request.clone()
        };
        let alone = Server::new(&model)?.serve(vec![alone], false)?;
        let apart = relative_error(&served.last_logits()?, &alone[0].last_logits()?)?;
        let accepted = if dtype == DType::F32 { 1e-4 } else { 5e-2 };
        println!(
            "request {}: {apart:.1e} from what it says alone",
            request.number
        );
        if apart > accepted {
            candle_core::bail!("request {}: {apart:.1e} > {accepted:.1e}", request.number);
        }
    }
    Ok(())
}

/// A request with its outcome.
#[derive(Clone)]
struct Request {
    number: usize,
    tokens: Vec<u32>,
    /// The length at which the request is done.
    end: usize,
    /// The number of tokens in the cache.
    cached: usize,
    pages: Vec<i32>,
    /// Tokens that replace sampled ones.
    forced: Vec<u32>,
    logits: Option<Tensor>,
}

impl Request {
    fn new(number: usize, prompt: usize, wanted: usize) -> Self {
        let token = |at| ((number * 131 + at * 29 + 7) % WORDS) as u32;
        Self {
            number,
            tokens: (0..prompt).map(token).collect(),
            end: prompt + wanted,
            cached: 0,
            pages: Vec::new(),
            forced: Vec::new(),
            logits: None,
        }
    }

    fn last_logits(&self) -> Result<Tensor> {
        self.logits
            .clone()
            .ok_or_else(|| Error::msg("a request that was served has logits"))
    }
}

/// The weights of a layer, and its attention.
struct Block {
    query: Tensor,
    kv_a: Tensor,
    attention: Layer,
    out: Tensor,
}

struct Model {
    device: Device,
    dtype: DType,
    attention: Attention,
    words: Tensor,
    blocks: Vec<Block>,
    ones: [Tensor; 2],
    /// Cosines and sines of every position.
    angles: [Tensor; 2],
}

impl Model {
    fn new(device: &Device, dtype: DType) -> Result<Self> {
        let HeadDims { nope, rope, v, .. } = DIMS.head;
        let [nope, rope, v, latent] = [nope, rope, v, DIMS.latent].map(|width| width as usize);
        let of_layer = match dtype {
            DType::F32 => mla_runtime::model::DType::F32,
            _ => mla_runtime::model::DType::BF16,
        };
        let problem = Problem::new(DIMS, HEADS as u32, of_layer)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged);
        let attention = Attention::new(device, &problem, 1.0 / ((nope + rope) as f64).sqrt())?;
        let mut seed = 1;
        let mut weight = |shape: (usize, usize)| {
            seed += 1;
            noise(seed, shape, device)?.to_dtype(dtype)
        };
        let words = weight((WORDS, HIDDEN))?.affine((HIDDEN as f64).sqrt(), 0.0)?;
        let mut blocks = Vec::new();
        for _ in 0..LAYERS {
            blocks.push(Block {
                query: weight((HEADS * (nope + rope), HIDDEN))?,
                kv_a: weight((latent + rope, HIDDEN))?,
                attention: Layer::new(attention.clone(), weight((HEADS * (nope + v), latent))?),
                out: weight((HIDDEN, HEADS * v))?,
            });
        }
        let ones = |width| Tensor::ones(width, dtype, device);
        let tables = Rope::plain(1e4)
            .cos_sin(rope as u32, MAX_LEN)
            .map_err(Error::wrap)?;
        let [cos, sin] = tables
            .map(|table| Tensor::from_vec(table, (MAX_LEN, rope / 2), device)?.to_dtype(dtype));
        Ok(Self {
            device: device.clone(),
            dtype,
            attention,
            words,
            blocks,
            ones: [ones(HIDDEN)?, ones(latent)?],
            angles: [cos?, sin?],
        })
    }

    /// Computes the logits of these rows. They are in the step's order, one request's tokens after
    /// the other's.
    fn forward(
        &self,
        step: &mut Workspace,
        caches: &[Tensor],
        tokens: &Tensor,
        positions: &Tensor,
        wanted: &Tensor,
    ) -> Result<Tensor> {
        let HeadDims { nope, rope, v, .. } = DIMS.head;
        let [nope, rope, v, latent] = [nope, rope, v, DIMS.latent].map(|width| width as usize);
        let rows = tokens.elem_count();
        let [of_hidden, of_latent] = &self.ones;
        let [cos, sin] = &self.angles;
        let (cos, sin) = (
            cos.index_select(positions, 0)?,
            sin.index_select(positions, 0)?,
        );
        // candle rotates [batch, heads, rows, R].
        let turn = |x: &Tensor| rope_i(&x.transpose(0, 1)?.contiguous()?.unsqueeze(0)?, &cos, &sin);
        let mut hidden = self.words.index_select(tokens, 0)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            let normed = rms_norm(&hidden, of_hidden, 1e-6)?;
            let query = normed
                .matmul(&block.query.t()?)?
                .reshape((rows, HEADS, nope + rope))?;
            let turned = turn(&query.narrow(2, nope, rope)?)?
                .squeeze(0)?
                .transpose(0, 1)?;
            let query = Tensor::cat(&[&query.narrow(2, 0, nope)?, &turned.contiguous()?], 2)?;
            let compressed = normed.matmul(&block.kv_a.t()?)?;
            let key = compressed.narrow(1, latent, rope)?.unsqueeze(1)?;
            let key = turn(&key)?.reshape((rows, rope))?;
            let kv = rms_norm(
                &compressed.narrow(1, 0, latent)?.contiguous()?,
                of_latent,
                1e-6,
            )?;
            let out = Tensor::zeros((rows, HEADS, v), self.dtype, &self.device)?;
            attend(step, &block.attention, &query, &kv, &key, cache, &out)?;
            let out = out.reshape((rows, HEADS * v))?.matmul(&block.out.t()?)?;
            hidden = (hidden + out)?;
        }
        let last = rms_norm(&hidden.index_select(wanted, 0)?, of_hidden, 1e-6)?;
        last.matmul(&self.words.t()?)?.to_dtype(DType::F32)
    }
}

/// The pages of all layers' caches, and the steps.
struct Server<'m> {
    model: &'m Model,
    step: Workspace,
    caches: Vec<Tensor>,
    free: Vec<i32>,
}

impl<'m> Server<'m> {
    fn new(model: &'m Model) -> Result<Self> {
        let limits = StepLimits::new(MAX_REQUESTS, BUDGET, MAX_LEN / PAGE);
        let cache = || {
            let shape = (PAGES, PAGE, DIMS.row() as usize);
            Tensor::zeros(shape, model.dtype, &model.device)
        };
        Ok(Self {
            model,
            step: model
                .attention
                .workspace(&limits.with_context_rows(MAX_LEN))?,
            caches: (0..LAYERS).map(|_| cache()).collect::<Result<_>>()?,
            free: (0..PAGES as i32).rev().collect(),
        })
    }

    /// Serves all requests, and returns them in their order.
    fn serve(&mut self, requests: Vec<Request>, tell: bool) -> Result<Vec<Request>> {
        let mut waiting = VecDeque::from(requests);
        let (mut running, mut done) = (Vec::<Request>::new(), Vec::new());
        let mut steps = 0;
        while !(waiting.is_empty() && running.is_empty()) {
            self.admit(&mut waiting, &mut running);
            let new_tokens = share(&running);
            if tell {
                let of = |(request, new): (&Request, &usize)| format!("{}+{new}", request.number);
                let of: Vec<_> = running.iter().zip(&new_tokens).map(of).collect();
                println!("step {steps}: {}", of.join(" "));
            }
            self.run(&mut running, &new_tokens)?;
            let (ended, left): (Vec<_>, Vec<_>) = running
                .into_iter()
                .partition(|it| it.tokens.len() >= it.end);
            running = left;
            for mut request in ended {
                self.free.append(&mut request.pages);
                done.push(request);
            }
            steps += 1;
        }
        done.sort_by_key(|request| request.number);
        Ok(done)
    }

    /// Admits requests while there is room for everything that each will need.
    fn admit(&mut self, waiting: &mut VecDeque<Request>, running: &mut Vec<Request>) {
        while let Some(mut request) = waiting.pop_front() {
            let needed = request.end.div_ceil(PAGE);
            if running.len() == MAX_REQUESTS || self.free.len() < needed {
                waiting.push_front(request);
                return;
            }
            request.pages = self.free.split_off(self.free.len() - needed);
            running.push(request);
        }
    }

    fn run(&mut self, running: &mut [Request], new_tokens: &[usize]) -> Result<()> {
        let of_step: Vec<_> = running
            .iter()
            .zip(new_tokens)
            .map(|(request, &new)| {
                StepRequest::new(new as u32, (request.cached + new) as u32, &request.pages)
            })
            .collect();
        let planned = self.step.plan(&of_step)?;
        self.step.prepare(&self.model.attention, &planned)?;
        // The layer puts decodes before prompts, in any order of the requests.
        let rows = planned.tokens();
        let (mut tokens, mut positions) = (vec![0u32; rows], vec![0u32; rows]);
        for (index, request) in running.iter().enumerate() {
            for (at, row) in planned.rows(index).enumerate() {
                tokens[row] = request.tokens[request.cached + at];
                positions[row] = (request.cached + at) as u32;
            }
        }
        let wanted: Vec<u32> = planned
            .last_rows()
            .flatten()
            .map(|row| row as u32)
            .collect();
        let brings: Vec<usize> = (0..running.len())
            .filter(|&it| new_tokens[it] > 0)
            .collect();
        let array = |numbers: Vec<u32>| Tensor::new(numbers, &self.model.device);
        let logits = self.model.forward(
            &mut self.step,
            &self.caches,
            &array(tokens)?,
            &array(positions)?,
            &array(wanted)?,
        )?;
        let sampled = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        for (row, index) in brings.into_iter().enumerate() {
            let request = &mut running[index];
            request.cached += new_tokens[index];
            // A prompt that is still incomplete gives no token.
            if request.cached == request.tokens.len() {
                let forced = request.forced.get(request.cached);
                request.tokens.push(*forced.unwrap_or(&sampled[row]));
                request.logits = Some(logits.get(row)?);
            }
        }
        Ok(())
    }
}

/// Returns the number of new tokens of each request: one for a decode, and for prompts what the
/// budget leaves.
fn share(running: &[Request]) -> Vec<usize> {
    let left = |request: &Request| request.tokens.len() - request.cached;
    let decodes = running.iter().filter(|request| left(request) == 1).count();
    let mut room = BUDGET - decodes;
    let of = |request: &Request| match left(request) {
        1 => 1,
        more => {
            let taken = more.min(room);
            room -= taken;
            taken
        }
    };
    running.iter().map(of).collect()
}

/// Draws numbers around 0, in rows with a norm of about 1. The same seed always gives the same
/// numbers.
fn noise(seed: u64, shape: (usize, usize), device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let scale = (3.0 / shape.1 as f32).sqrt();
    let number = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    let numbers: Vec<f32> = (0..shape.0 * shape.1).map(number).collect();
    Tensor::from_vec(numbers, shape, device)
}

fn relative_error(given: &Tensor, expected: &Tensor) -> Result<f32> {
    let apart = (given - expected)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
    let whole = expected.sqr()?.sum_all()?.to_scalar::<f32>()?;
    Ok((apart / whole).sqrt())
}
