//! Times whole steps of the layer on the GPU, and the products per head in them.
//!
//! Times are by the protocol of `protocol/mod.rs`. `layer_peer.py` beside this file times the same
//! cases with torch and the kernels that it is shown.
//!
//! ```text
//! cargo bench --features sm90 --bench layer -- --out target/bench
//! ```

#[cfg(feature = "sm90")]
mod protocol;

#[cfg(feature = "sm90")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpu::main()
}

#[cfg(not(feature = "sm90"))]
fn main() {
    eprintln!("nothing to time: build with --features sm90");
}

#[cfg(feature = "sm90")]
mod gpu {
    use clap::Parser as _;
    use half::bf16;
    use mla_kernels::Cuda;
    use mla_kernels::backends::sm90::WgmmaAttn;
    use mla_kernels::backends::sm90::WgmmaMla;
    use mla_kernels::device::Buffer;
    use mla_kernels::raw;
    use mla_runtime::backend::{LayerConfig, StepLimits};
    use mla_runtime::batch::Request;
    use mla_runtime::device::Device;
    use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights};
    use mla_runtime::model::{DType, KvFormat, MlaDims};
    use mla_runtime::plan::slots::BlockTables;
    use mla_runtime::spec::{Problem, QueryLen};
    use mla_runtime::tensor::{CacheLayout, CacheMut, Layout, Memory as _, TensorMut, TensorRef};
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom as _;
    use rand::{RngExt as _, SeedableRng as _};
    use serde::Serialize;

    use super::protocol::{Arguments, Result, Stopwatch, Times, upload};

    const PAGE: usize = 64;
    const DIMS: MlaDims = MlaDims::R1;
    const LATENT: usize = 512;
    const NOPE: usize = 128;
    const ROPE: usize = 64;
    const V: usize = 128;

    #[derive(Serialize)]
    struct Figure {
        id: String,
        median_us: f64,
        least_us: f64,
    }

    struct Bench {
        gpu: Cuda,
        stopwatch: Stopwatch,
        arguments: Arguments,
        figures: Vec<Figure>,
    }

    pub(super) fn main() -> Result<()> {
        let arguments = Arguments::parse();
        let gpu = Cuda::new(0)?;
        println!("{gpu:?}");
        println!("{:32} {:>10} {:>10}", "case", "median us", "least us");
        let mut bench = Bench {
            stopwatch: Stopwatch::new(&gpu, arguments.samples)?,
            gpu,
            arguments,
            figures: Vec::new(),
        };
        for heads in [16, 128] {
            for tokens in [1, 8, 32, 64, 128] {
                bench.products(heads, tokens)?;
            }
            for requests in [1, 32, 128] {
                bench.decode(heads, requests)?;
            }
        }
        bench.chunk(128, 512, 8192)?;
        bench.arguments.save("layer.json", &bench.figures)
    }

    // Makes numbers from −`most` to `most`, a million of them over and over.
    fn random(gpu: &Cuda, elements: usize, most: f32) -> Result<Buffer> {
        let mut rng = StdRng::seed_from_u64(7);
        let block: Vec<u8> = (0..elements.min(1 << 20))
            .flat_map(|_| bf16::from_f32((2.0 * rng.random::<f32>() - 1.0) * most).to_le_bytes())
            .collect();
        let bytes: Vec<u8> = block.iter().copied().cycle().take(2 * elements).collect();
        let buffer = upload(gpu, &bytes)?;
        gpu.synchronize()?;
        Ok(buffer)
    }

    fn view(buffer: &Buffer, shape: [usize; 3]) -> mla_runtime::Result<TensorRef<'_, Cuda>> {
        TensorRef::new(buffer.bytes(), Layout::contiguous(DType::BF16, shape))
    }

    fn view_mut(
        buffer: &mut Buffer,
        shape: [usize; 3],
    ) -> mla_runtime::Result<TensorMut<'_, Cuda>> {
        TensorMut::new(buffer.bytes_mut(), Layout::contiguous(DType::BF16, shape))
    }

    fn config(heads: usize) -> LayerConfig {
        LayerConfig::new(
            Problem::new(DIMS, heads as u32, DType::BF16).with_query_len(QueryLen::Ragged),
            192f32.powf(-0.5),
        )
    }

    /// Inputs and outputs of a step's products per head.
    struct Tensors {
        weights: Buffer,
        query: Buffer,
        absorbed: Buffer,
        attended: Buffer,
        out: Buffer,
    }

    impl Tensors {
        fn new(gpu: &Cuda, heads: usize, tokens: usize) -> Result<Self> {
            Ok(Self {
                weights: random(gpu, heads * (NOPE + V) * LATENT, 0.1)?,
                query: random(gpu, tokens * heads * (NOPE + ROPE), 1.0)?,
                absorbed: random(gpu, tokens * heads * LATENT, 1.0)?,
                attended: random(gpu, tokens * heads * LATENT, 1.0)?,
                out: random(gpu, tokens * heads * V, 1.0)?,
            })
        }

        /// Returns the parameters of q_nope · W_UK and o · W_UV for the own kernel.
        fn params(&self, heads: usize, tokens: usize) -> [raw::MlaHeadProductParams; 2] {
            let head = ((NOPE + V) * LATENT) as i64;
            let common = |width: usize, k: usize, n: usize| raw::MlaHeadProductParams {
                input: std::ptr::null(),
                weights: self.weights.address() as *const _,
                out: std::ptr::null_mut(),
                input_token_stride: (heads * width) as i64,
                input_head_stride: width as i64,
                weights_head_stride: head,
                weights_k_stride: LATENT as i64,
                weights_n_stride: 1,
                out_token_stride: (heads * n) as i64,
                out_head_stride: n as i64,
                tokens: tokens as i32,
                heads: heads as i32,
                k: k as i32,
                n: n as i32,
                dtype: raw::MLA_DTYPE_BF16 as i32,
                constant_weights: 1,
                ready: 0,
            };
            [
                raw::MlaHeadProductParams {
                    input: self.query.address() as *const _,
                    out: self.absorbed.address() as *mut _,
                    ..common(NOPE + ROPE, NOPE, LATENT)
                },
                raw::MlaHeadProductParams {
                    input: self.attended.address() as *const _,
                    weights: (self.weights.address() + (2 * NOPE * LATENT) as u64) as *const _,
                    out: self.out.address() as *mut _,
                    weights_k_stride: 1,
                    weights_n_stride: LATENT as i64,
                    ..common(LATENT, LATENT, V)
                },
            ]
        }
    }

    impl Bench {
        fn time(
            &mut self,
            id: String,
            work: impl FnMut(&Cuda) -> mla_runtime::Result<()>,
        ) -> Result<()> {
            let Times { median, least } = self.stopwatch.time(&self.gpu, work)?;
            println!("{id:32} {median:10.2} {least:10.2}");
            self.figures.push(Figure {
                id,
                median_us: median,
                least_us: least,
            });
            Ok(())
        }

        /// Times q_nope · W_UK and o · W_UV by the device's choice and by the own kernel alone.
        fn products(&mut self, heads: usize, tokens: usize) -> Result<()> {
            let id = format!("products-h{heads}-b{tokens}");
            if self.arguments.skips(&id) {
                return Ok(());
            }
            let mut tensors = Tensors::new(&self.gpu, heads, tokens)?;
            let mut chosen = |gpu: &Cuda, [keys, values]: [bool; 2]| {
                // Checkpoints store the weights as [H · (P + V), L], seen here as [H, P, L] and [H,
                // L, V].
                let rows = view(&tensors.weights, [heads, NOPE + V, LATENT])?;
                // SAFETY: `random` waits for its upload, and nothing writes the weights again.
                let rows = unsafe { rows.assume_constant() };
                let queries = rows.narrow(1, 0..NOPE)?;
                let columns = rows.narrow(1, NOPE..NOPE + V)?.transpose(1, 2);
                if keys {
                    let query = view(&tensors.query, [tokens, heads, NOPE + ROPE])?;
                    let query = query.narrow(2, 0..NOPE)?;
                    let to = view_mut(&mut tensors.absorbed, [tokens, heads, LATENT])?;
                    gpu.gemm_weights(query.transpose(0, 1), queries, to.transpose(0, 1))?;
                }
                if values {
                    let attended = view(&tensors.attended, [tokens, heads, LATENT])?;
                    let to = view_mut(&mut tensors.out, [tokens, heads, V])?;
                    gpu.gemm_weights(attended.transpose(0, 1), columns, to.transpose(0, 1))?;
                }
                Ok(())
            };
            self.time(format!("{id}-uk"), |gpu| chosen(gpu, [true, false]))?;
            self.time(format!("{id}-uv"), |gpu| chosen(gpu, [false, true]))?;
            self.time(id.clone(), |gpu| chosen(gpu, [true, true]))?;
            let params = tensors.params(heads, tokens);
            self.time(format!("{id}-own"), |gpu| {
                for params in &params {
                    // SAFETY: the buffers are as large as the extents say, and live until the
                    // figures are taken.
                    unsafe {
                        raw::check("product", raw::mla_head_product(params, gpu.raw_stream()))
                    }?;
                }
                Ok(())
            })
        }

        /// Times a whole step of decodes: W_UK, cache write, attention, W_UV.
        fn decode(&mut self, heads: usize, requests: usize) -> Result<()> {
            let id = format!("decode-h{heads}-b{requests}");
            if self.arguments.skips(&id) {
                return Ok(());
            }
            let requests = vec![Request::new(1, 4096); requests];
            self.step(id, heads, &requests, 0)
        }

        /// Times a prefill of `new` tokens on `context` cached ones in one chunk.
        fn chunk(&mut self, heads: usize, new: u32, context: u32) -> Result<()> {
            let id = format!("chunk-h{heads}-q{new}-s{context}");
            if self.arguments.skips(&id) {
                return Ok(());
            }
            let requests = [Request::new(new, new + context)];
            self.step(id, heads, &requests, context as usize)
        }

        fn step(
            &mut self,
            id: String,
            heads: usize,
            requests: &[Request],
            context_rows: usize,
        ) -> Result<()> {
            let gpu = self.gpu.clone();
            let config = config(heads);
            let layer: MlaLayer<WgmmaAttn, WgmmaMla> = MlaLayer::of(&gpu, &config)?;
            let tokens: usize = requests.iter().map(|r| r.q as usize).sum();
            let max_pages = requests[0].kv as usize / PAGE;
            let pages = requests.len() * max_pages;
            let mut workspace = layer.workspace(
                &StepLimits::new(requests.len(), tokens, max_pages).with_context_rows(context_rows),
            )?;
            let mut tables: Vec<i32> = (0..pages as i32).collect();
            tables.shuffle(&mut StdRng::seed_from_u64(11));
            let block_tables = BlockTables::new(&tables, max_pages, PAGE as u32)?;
            workspace.prepare(
                &layer,
                &StepBatch::new(requests, block_tables).with_threshold(Some(1)),
            )?;
            let weights = random(&gpu, heads * (NOPE + V) * LATENT, 0.05)?;
            let query = random(&gpu, tokens * heads * (NOPE + ROPE), 1.7)?;
            let latent = random(&gpu, tokens * LATENT, 1.7)?;
            let rope = random(&gpu, tokens * ROPE, 1.7)?;
            let mut cache = random(&gpu, pages * PAGE * (LATENT + ROPE), 1.7)?;
            let mut out = random(&gpu, tokens * heads * V, 1.0)?;
            let layout = CacheLayout::contiguous(DIMS, KvFormat::BF16, pages, PAGE);
            self.time(id, |_| {
                let kv_b = view(&weights, [1, heads * (NOPE + V), LATENT])?;
                // SAFETY: `random` waits for its upload, and nothing writes the weights again.
                let kv_b = unsafe { kv_b.assume_constant() };
                layer.forward(
                    &mut workspace,
                    LayerCall::new(
                        Weights::from_checkpoint(kv_b, &config)?,
                        view(&query, [tokens, heads, NOPE + ROPE])?,
                        [
                            view(&latent, [tokens, 1, LATENT])?,
                            view(&rope, [tokens, 1, ROPE])?,
                        ],
                        CacheMut::new(cache.bytes_mut(), layout)?,
                        view_mut(&mut out, [tokens, heads, V])?,
                    ),
                )
            })
        }
    }
}
