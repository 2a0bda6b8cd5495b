//! A decode loop of an engine on cudarc: it has its own context, stream and slices, and a CUDA
//! graph per batch size. Requests come and go.
//!
//! ```console
//! $ cargo run --release --features sm90 --example decode_loop
//! ```
//!
//! Every latent is a vector of ones. A head's output is therefore the sum of its value weights over
//! the latent, whatever the scores are. The end of the loop compares outputs with these sums.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use mla_kernels::backends::sm90::{WgmmaAttn, WgmmaMla};
use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_kernels::device::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use mla_kernels::{Cuda, present_gpu};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{CacheLayout, CacheMut, Layout, TensorMut, TensorRef};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const HEADS: usize = 16;
const PAGE: usize = 64;
const MAX_REQUESTS: usize = 32;
const MAX_LEN: usize = 2048;
const PAGES: usize = MAX_LEN / PAGE;
const STEPS: usize = 500;

/// The engine's tensors.
struct Tensors {
    weights: CudaSlice<bf16>,
    query: CudaSlice<bf16>,
    latent: CudaSlice<bf16>,
    rope: CudaSlice<bf16>,
    cache: CudaSlice<bf16>,
    out: CudaSlice<bf16>,
}

impl Tensors {
    fn new(stream: &Arc<CudaStream>, weights: &[bf16]) -> Result<Self, Box<dyn Error>> {
        let mut rng = StdRng::seed_from_u64(3);
        let mut random = |elements| random(&mut rng, elements, 1.0);
        Ok(Self {
            weights: stream.clone_htod(weights)?,
            query: stream.clone_htod(&random(MAX_REQUESTS * HEADS * 192))?,
            latent: stream.clone_htod(&vec![bf16::ONE; MAX_REQUESTS * 512])?,
            rope: stream.clone_htod(&random(MAX_REQUESTS * 64))?,
            cache: stream.alloc_zeros(MAX_REQUESTS * PAGES * PAGE * 576)?,
            out: stream.alloc_zeros(MAX_REQUESTS * HEADS * 128)?,
        })
    }

    /// Enqueues the layer for a step of `tokens` tokens.
    fn forward(
        &mut self,
        layer: &Layer,
        workspace: &mut Workspace<WgmmaAttn, WgmmaMla>,
        tokens: usize,
    ) -> mla_runtime::Result<()> {
        let (gpu, config) = (layer.device(), layer.config());
        let layout = |shape| Layout::contiguous(DType::BF16, shape);
        let cache_layout = CacheLayout::contiguous(
            config.problem.dims,
            config.problem.kv_format,
            MAX_REQUESTS * PAGES,
            PAGE,
        );
        gpu.lending(|loans| {
            let kv_b = TensorRef::new(loans.lend(&self.weights)?, layout([1, HEADS * 256, 512]))?;
            layer.forward(
                workspace,
                LayerCall::new(
                    Weights::from_checkpoint(kv_b, config)?,
                    TensorRef::new(loans.lend(&self.query)?, layout([tokens, HEADS, 192]))?,
                    [
                        TensorRef::new(loans.lend(&self.latent)?, layout([tokens, 1, 512]))?,
                        TensorRef::new(loans.lend(&self.rope)?, layout([tokens, 1, 64]))?,
                    ],
                    CacheMut::new(loans.lend_mut(&mut self.cache)?, cache_layout)?,
                    TensorMut::new(loans.lend_mut(&mut self.out)?, layout([tokens, HEADS, 128]))?,
                ),
            )
        })
    }
}

fn random(rng: &mut StdRng, elements: usize, max: f32) -> Vec<bf16> {
    (0..elements)
        .map(|_| bf16::from_f32((2.0 * rng.random::<f32>() - 1.0) * max))
        .collect()
}

/// A running request: its number of tokens so far, and the length at which it stops.
struct Running {
    len: usize,
    end: usize,
    /// The index of its row in the preallocated rows of pages.
    seat: usize,
}

/// Requests that arrive, grow by a token per step, and leave.
struct Requests {
    rng: StdRng,
    running: Vec<Running>,
    free_seats: Vec<usize>,
    decoded: usize,
    finished: usize,
}

impl Requests {
    fn new() -> Self {
        Self {
            rng: StdRng::seed_from_u64(2),
            running: Vec::new(),
            free_seats: (0..MAX_REQUESTS).rev().collect(),
            decoded: 0,
            finished: 0,
        }
    }

    /// Returns the length and the pages of each request of the next step.
    fn next(&mut self) -> Vec<(u32, Vec<i32>)> {
        let Self {
            rng,
            running,
            free_seats,
            ..
        } = self;
        for done in running.extract_if(.., |request| request.len == request.end) {
            free_seats.push(done.seat);
            self.finished += 1;
        }
        while running.len() < MAX_REQUESTS && (running.is_empty() || rng.random_bool(0.2)) {
            let Some(seat) = free_seats.pop() else { break };
            let end = rng.random_range(20..200);
            running.push(Running { len: 0, end, seat });
        }
        self.decoded += running.len();
        let grown = running.iter_mut().map(|request| {
            request.len += 1;
            let first = (request.seat * PAGES) as i32;
            (request.len as u32, (first..first + PAGES as i32).collect())
        });
        grown.collect()
    }
}

type Layer = MlaLayer<WgmmaAttn, WgmmaMla>;

fn main() -> Result<(), Box<dyn Error>> {
    // The presence of a driver is checked first, since cudarc would panic without one.
    present_gpu().map_err(|cause| format!("{cause}; {}", cause.remedy()))?;
    // The engine's own context and stream.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let host_weights = random(&mut StdRng::seed_from_u64(1), HEADS * 256 * 512, 0.05);
    let mut tensors = Tensors::new(&stream, &host_weights)?;

    // The layer on the engine's stream.
    let gpu = Cuda::on_stream(stream.clone())?;
    let problem = Problem::new(MlaDims::R1, HEADS as u32, DType::BF16);
    let layer = Layer::of(&gpu, &LayerConfig::new(problem, 192f32.powf(-0.5)))?;
    let mut workspace = layer.workspace(&StepLimits::new(MAX_REQUESTS, MAX_REQUESTS, PAGES))?;

    // There is a graph for each of these sizes. A model would record all of its layers here.
    let sizes = [1, 2, 4, 8, 16, 24, 32];
    let record =
        |workspace: &mut _, shape: DecodeShape| tensors.forward(&layer, workspace, shape.tokens());
    let longest = MAX_LEN as u32;
    let mut graphs =
        DecodeGraph::capture_sizes(&layer, &mut workspace, &sizes, 1, longest, record)?;

    let mut requests = Requests::new();
    let mut last_step = 0;
    let start = Instant::now();
    for _ in 0..STEPS {
        let batch = requests.next();
        // In a model, the preceding layer writes the queries.
        let value = bf16::from_f32(requests.rng.random::<f32>());
        stream.memcpy_htod(&vec![value; batch.len() * HEADS * 192], &mut tensors.query)?;
        let graph = DecodeGraph::for_requests(&mut graphs, batch.len())
            .ok_or("no graph is large enough")?;
        last_step = batch.len();
        let batch: Vec<StepRequest<'_>> = batch
            .iter()
            .map(|(len, pages)| StepRequest::new(1, *len, pages))
            .collect();
        let step = StepPlan::new(&workspace, &batch)?;
        // SAFETY: the slices outlive the loop, and only this stream uses them. The cache has a row
        // of pages for every request.
        unsafe { graph.replay(&layer, &mut workspace, &step) }?;
    }
    let out = stream.clone_dtoh(&tensors.out)?;
    println!(
        "{} tokens of {} finished requests in {STEPS} steps, {:.1} µs each",
        requests.decoded,
        requests.finished,
        start.elapsed().as_secs_f64() * 1e6 / STEPS as f64
    );
    let largest = largest_error(&out[..last_step * HEADS * 128], &host_weights);
    println!("largest error {largest:.1e}");
    // The outputs are sums of about 1, rounded to bf16 once or twice.
    if largest < 0.02 {
        Ok(())
    } else {
        Err(format!("an error of {largest}").into())
    }
}

/// Returns the largest difference from the sums of each head's value weights over the latent.
fn largest_error(out: &[bf16], weights: &[bf16]) -> f32 {
    let mut largest = 0f32;
    for (row, values) in out.chunks(128).enumerate() {
        for (v, value) in values.iter().enumerate() {
            let at = ((row % HEADS) * 256 + 128 + v) * 512;
            let sum: f32 = weights[at..at + 512].iter().map(|w| w.to_f32()).sum();
            // A NaN counts as an error here. `max` would ignore it.
            let error = (value.to_f32() - sum).abs();
            largest = if error.is_nan() {
                f32::MAX
            } else {
                largest.max(error)
            };
        }
    }
    largest
}
