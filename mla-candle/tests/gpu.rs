//! Compares the attention on a GPU with the attention on the CPU, dense and with DeepSeek-V3.2's
//! indexer.
#![cfg(feature = "sm90")]

use candle_core::{DType, Device, Result, Tensor};
use mla_candle::{Attention, IndexInputs, IndexWeights, Layer, attend, select};
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::StepRequest;
use mla_runtime::model::{IndexerConfig, MlaDims, Rope};
use mla_runtime::spec::{Problem, QueryLen};

const HEADS: usize = 16;
const PAGE: usize = 64;
const PAGES: usize = 4;
const TOKENS: usize = 70;
const QUERY_RANK: usize = 256;

/// The tensors of a step on the CPU.
struct Inputs {
    kv_b: Tensor,
    hidden: [Tensor; 3],
    index: [Tensor; 3],
    index_weights: [Tensor; 3],
}

impl Inputs {
    fn new() -> Result<Self> {
        let random = |shape: &[usize]| {
            let width = shape.last().copied().unwrap_or(1) as f64;
            let values = Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?;
            (values / width.sqrt())?.to_dtype(DType::BF16)
        };
        Ok(Self {
            kv_b: random(&[HEADS * 256, 512])?,
            hidden: [
                (random(&[TOKENS, HEADS, 192])? * 8.0)?,
                (random(&[TOKENS, 512])? * 20.0)?,
                (random(&[TOKENS, 64])? * 8.0)?,
            ],
            index: [
                random(&[TOKENS, QUERY_RANK])?,
                random(&[TOKENS, 128])?,
                random(&[TOKENS, 64])?,
            ],
            index_weights: [
                random(&[64 * 128, QUERY_RANK])?,
                random(&[128])?,
                random(&[128])?,
            ],
        })
    }

    /// Returns the outputs of a prompt of 69 tokens and of a decode behind 69 other tokens, on this
    /// device.
    fn run(&self, device: &Device, sparse: bool) -> Result<Tensor> {
        let problem = Problem::new(MlaDims::R1, HEADS as u32, mla_runtime::model::DType::BF16)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged)
            .with_sparse(sparse);
        let mut attention = Attention::new(device, &problem, 0.1)?;
        if sparse {
            attention = attention.with_indexer(&IndexerConfig::DEEPSEEK_V3_2)?;
        }
        let limits = StepLimits::new(2, 128, PAGES).with_decode_query_len(128);
        let mut step = attention.workspace(&limits.with_context_rows(256))?;
        let here = |tensor: &Tensor| tensor.to_device(device);
        let [weights, norm, bias] = &self.index_weights;
        let tables = Rope::plain(1e4).cos_sin(64, 256).expect("tables");
        let [cos, sin] = tables.map(|it| Tensor::from_vec(it, (256, 32), device));
        let layer = Layer::new(attention.clone(), here(&self.kv_b)?).with_indexer(IndexWeights {
            query: here(weights)?,
            norm: [here(norm)?, here(bias)?],
            angles: Some([cos?, sin?]),
            pool: None,
        });
        let cache = Tensor::zeros((PAGES, PAGE, 576), DType::BF16, device)?;
        let index_cache = Tensor::zeros((PAGES, PAGE * 132), DType::U8, device)?;
        let mut outs = Vec::new();
        // First comes the prompt alone, then the prompt with the first token of another request.
        for requests in [
            vec![StepRequest::new(69, 69, &[2, 0])],
            vec![
                StepRequest::new(1, 70, &[2, 0]),
                StepRequest::new(1, 1, &[3]),
            ],
        ] {
            let planned = step.plan(&requests)?;
            step.prepare(&attention, &planned)?;
            let rows = planned.tokens();
            let first = |tensor: &Tensor| here(&tensor.narrow(0, TOKENS - rows, rows)?);
            if sparse {
                let [query_latent, keys, head_weights] = &self.index;
                let inputs = IndexInputs {
                    query_latent: &first(query_latent)?,
                    keys: &first(keys)?,
                    head_weights: &first(head_weights)?,
                    gates: None,
                };
                select(&mut step, &layer, &inputs, &index_cache)?;
            }
            let [query, latent, rope] = &self.hidden;
            let [query, latent, rope] = [first(query)?, first(latent)?, first(rope)?];
            let out = Tensor::zeros((rows, HEADS, 128), DType::BF16, device)?;
            attend(&mut step, &layer, &query, &latent, &rope, &cache, &out)?;
            outs.push(out.to_device(&Device::Cpu)?.to_dtype(DType::F32)?);
        }
        Tensor::cat(&outs, 0)
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored"]
fn a_gpu_says_what_the_processor_says() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let inputs = Inputs::new()?;
    for sparse in [false, true] {
        let right = inputs.run(&Device::Cpu, sparse)?;
        let given = inputs.run(&device, sparse)?;
        let apart = (&given - &right)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
        let whole = right.sqr()?.sum_all()?.to_scalar::<f32>()?;
        let apart = (apart / whole).sqrt();
        // NaN is not accepted either.
        assert!(apart <= 1e-2, "sparse {sparse}: {apart:.1e}");
    }
    Ok(())
}
