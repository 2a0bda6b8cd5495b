//! A decode loop as an engine on cudarc would have it: its own context, stream and slices, a CUDA graph
//! per batch size, requests that come and go.
//!
//! ```console
//! $ cargo run --release --features sm90 --example decode_loop
//! ```
//!
//! Every latent is a vector of ones, so whatever the scores, a head's output is the sum of its value
//! weights over the latent: that is what the end of the loop compares with.

use std::error::Error;
use std::time::Instant;

use half::bf16;
use mla_kernels::backends::sm90::FlashAttn;
use mla_kernels::backends::sm90::FlashMla;
use mla_kernels::decode_graph::DecodeGraphs;
use mla_kernels::device::cudarc::driver::{CudaContext, CudaSlice};
use mla_kernels::{Cuda, present_gpu};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::cache::{CacheLayout, CacheMut};
use mla_runtime::dims::MlaDims;
use mla_runtime::dtype::DType;
use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights};
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::problem::Problem;
use mla_runtime::tensor::{Layout, TensorMut, TensorRef};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const HEADS: usize = 16;
const PAGE: usize = 64;
const MAX_REQUESTS: usize = 32;
const MAX_LEN: usize = 2048;
const PAGES: usize = MAX_LEN / PAGE;
const STEPS: usize = 500;

/// A running request: its tokens so far, and where it stops.
struct Running {
    len: usize,
    end: usize,
    /// Which of the preallocated rows of pages it has.
    seat: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    // Without a driver, cudarc would panic.
    present_gpu().map_err(|cause| format!("{cause}; {}", cause.remedy()))?;
    // The engine's own.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let mut rng = StdRng::seed_from_u64(1);
    let mut random = |elements: usize, most: f32| -> Vec<bf16> {
        (0..elements)
            .map(|_| bf16::from_f32((2.0 * rng.random::<f32>() - 1.0) * most))
            .collect()
    };
    let host_weights = random(HEADS * 256 * 512, 0.05);
    let weights = stream.clone_htod(&host_weights)?;
    let mut query = stream.clone_htod(&random(MAX_REQUESTS * HEADS * 192, 1.0))?;
    let latent = stream.clone_htod(&vec![bf16::ONE; MAX_REQUESTS * 512])?;
    let rope = stream.clone_htod(&random(MAX_REQUESTS * 64, 1.0))?;
    let mut cache: CudaSlice<bf16> = stream.alloc_zeros(MAX_REQUESTS * PAGES * PAGE * 576)?;
    let mut out: CudaSlice<bf16> = stream.alloc_zeros(MAX_REQUESTS * HEADS * 128)?;

    // The layer on the engine's stream.
    let gpu = Cuda::on_stream(stream.clone())?;
    let config = LayerConfig::new(
        Problem::new(MlaDims::R1, HEADS as u32, DType::BF16),
        192f32.powf(-0.5),
    );
    let layer = MlaLayer::<FlashAttn, FlashMla>::of(&gpu, &config)?;
    let mut workspace = layer.workspace(&StepLimits::new(MAX_REQUESTS, MAX_REQUESTS, PAGES))?;
    let cache_layout = CacheLayout::contiguous(
        config.problem.dims,
        config.problem.kv_format,
        MAX_REQUESTS * PAGES,
        PAGE,
    );

    // A graph for each of some sizes; a model would record all of its layers here.
    let sizes = [1, 2, 4, 8, 16, 24, 32];
    let mut graphs = DecodeGraphs::capture(
        &layer,
        &mut workspace,
        &sizes,
        1,
        MAX_LEN as u32,
        |workspace, shape| {
            let tokens = shape.tokens();
            let layout = |shape| Layout::contiguous(DType::BF16, shape);
            let (weights, query) = (gpu.lend(&weights), gpu.lend(&query));
            let (latent, rope) = (gpu.lend(&latent), gpu.lend(&rope));
            let (mut cache, mut out) = (gpu.lend_mut(&mut cache), gpu.lend_mut(&mut out));
            let kv_b = TensorRef::new(weights.bytes(), layout([1, HEADS * 256, 512]))?;
            layer.forward(
                workspace,
                LayerCall::new(
                    Weights::new(kv_b.transpose(1, 2), &config)?,
                    TensorRef::new(query.bytes(), layout([tokens, HEADS, 192]))?,
                    [
                        TensorRef::new(latent.bytes(), layout([tokens, 1, 512]))?,
                        TensorRef::new(rope.bytes(), layout([tokens, 1, 64]))?,
                    ],
                    CacheMut::new(cache.bytes_mut(), cache_layout)?,
                    TensorMut::new(out.bytes_mut(), layout([tokens, HEADS, 128]))?,
                ),
            )
        },
    )?;

    // The loop: requests arrive, grow by a token per step, and leave.
    let mut rng = StdRng::seed_from_u64(2);
    let mut seats: Vec<usize> = (0..MAX_REQUESTS).rev().collect();
    let mut running: Vec<Running> = Vec::new();
    let (mut requests, mut tables) = (Vec::new(), Vec::new());
    let (mut decoded, mut finished) = (0, 0);
    let start = Instant::now();
    for _ in 0..STEPS {
        running.retain(|request| {
            let stays = request.len < request.end;
            if !stays {
                seats.push(request.seat);
                finished += 1;
            }
            stays
        });
        while running.len() < MAX_REQUESTS && (running.is_empty() || rng.random_bool(0.2)) {
            let Some(seat) = seats.pop() else { break };
            let end = rng.random_range(20..200);
            running.push(Running { len: 0, end, seat });
        }
        requests.clear();
        tables.clear();
        for request in &mut running {
            request.len += 1;
            requests.push(Request::new(1, request.len as u32));
            let first = (request.seat * PAGES) as i32;
            tables.extend(first..first + PAGES as i32);
        }
        let block_tables = BlockTables::new(&tables, PAGES, PAGE as u32)?;
        // What the layer before would have left there.
        let new = vec![bf16::from_f32(rng.random::<f32>()); requests.len() * HEADS * 192];
        stream.memcpy_htod(&new, &mut query)?;
        let graph = graphs
            .for_requests(requests.len())
            .ok_or("no graph is large enough")?;
        let batch = StepBatch::new(&requests, block_tables);
        // SAFETY: the slices outlive the loop, only this stream uses them, and the cache has a row of pages
        // for every seat.
        unsafe { graph.replay(&layer, &mut workspace, &batch) }?;
        decoded += requests.len();
    }
    let out = stream.clone_dtoh(&out)?;
    let time = start.elapsed();
    println!(
        "{decoded} tokens of {finished} finished requests in {STEPS} steps, {:.1} µs each",
        time.as_secs_f64() * 1e6 / STEPS as f64
    );

    let mut largest = 0f32;
    for (row, values) in out.chunks(128).take(requests.len() * HEADS).enumerate() {
        for (v, value) in values.iter().enumerate() {
            let at = ((row % HEADS) * 256 + 128 + v) * 512;
            let sum: f32 = host_weights[at..at + 512].iter().map(|w| w.to_f32()).sum();
            largest = largest.max((value.to_f32() - sum).abs());
        }
    }
    println!("largest error {largest:.1e}");
    // Sums of about 1, rounded to bf16 once or twice.
    if largest < 0.02 {
        Ok(())
    } else {
        Err(format!("an error of {largest}").into())
    }
}
