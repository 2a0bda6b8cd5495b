//! The attention on an engine's own tensors: views, lists, refusals, and tensors that are lent at
//! the same time.

use candle_core::{D, DType, Device, Result, Tensor};
use mla_candle::{Attention, IndexInputs, IndexWeights, Layer, Lending, Workspace, attend, select};
use mla_cpu::Cpu;
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::StepRequest;
use mla_runtime::model::{HeadDims, IndexerConfig, KvFormat, MlaDims, Rope};
use mla_runtime::spec::{Problem, QueryLen};

const HEADS: usize = 3;
const LATENT: usize = 64;
const NOPE: usize = 24;
const ROPE: usize = 16;
const V: usize = 40;
const DIMS: MlaDims = MlaDims::new(64, HeadDims::new(24, 16, 40));
const PAGE: usize = 16;
const PAGES: usize = 8;
const SCALE: f64 = 0.2;

fn problem() -> Problem {
    Problem::new(DIMS, HEADS as u32, mla_runtime::model::DType::F32)
        .with_page_size(PAGE as u32)
        .with_query_len(QueryLen::Ragged)
}

fn limits() -> StepLimits {
    StepLimits::new(4, 64, PAGES).with_context_rows(64)
}

fn random(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
}

fn zeros(shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
}

fn cache() -> Result<Tensor> {
    zeros(&[PAGES, PAGE, LATENT + ROPE])
}

fn kv_b() -> Result<Tensor> {
    random(&[HEADS * (NOPE + V), LATENT])
}

/// Makes a layer of these weights, and a workspace in which these requests are prepared.
fn prepared_for(
    problem: &Problem,
    kv_b: Tensor,
    requests: &[StepRequest<'_>],
) -> Result<(Layer, Workspace)> {
    let attention = Attention::new(&Device::Cpu, problem, SCALE)?;
    let mut step = attention.workspace(&limits())?;
    let planned = step.plan(requests)?;
    step.prepare(&attention, &planned)?;
    Ok((Layer::new(attention, kv_b), step))
}

/// Makes a layer, and a step with a decode of a fourth token, which is row 0, and a prompt of 20
/// tokens.
fn prepared() -> Result<(Layer, Workspace)> {
    let requests = [
        StepRequest::new(20, 20, &[5, 2]),
        StepRequest::new(1, 4, &[0]),
    ];
    let (layer, step) = prepared_for(&problem(), kv_b()?, &requests)?;
    let planned = step.plan(&requests)?;
    assert_eq!((planned.rows(1), planned.rows(0)), (0..1, 1..21));
    Ok((layer, step))
}

fn largest(tensor: &Tensor) -> Result<f32> {
    tensor.abs()?.max_all()?.to_scalar()
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    largest(&(a - b)?)
}

#[test]
fn views_say_what_contiguous_tensors_say() -> Result<()> {
    let (layer, mut step) = prepared()?;
    let query = random(&[21, HEADS, NOPE + ROPE])?;
    // A fused projection leaves latents and rotary keys in one row.
    let kv = random(&[21, LATENT + ROPE])?;
    let (latent, rope) = (kv.narrow(1, 0, LATENT)?, kv.narrow(1, LATENT, ROPE)?);
    let (own, plain) = (cache()?, zeros(&[21, HEADS, V])?);
    let packed = [latent.contiguous()?, rope.contiguous()?];
    attend(
        &mut step, &layer, &query, &packed[0], &packed[1], &own, &plain,
    )?;
    assert!(largest(&plain)? > 0.1);

    // Queries have heads before tokens, and inputs are rows of a longer tensor. The output lies
    // within a larger tensor. Each page is followed by a page of another layer.
    let by_head = query.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
    let layers = zeros(&[PAGES, 2, PAGE, LATENT + ROPE])?;
    let pages = layers.narrow(1, 1, 1)?.squeeze(1)?;
    let wide = Tensor::full(7f32, (23, HEADS, V + 3), &Device::Cpu)?;
    let out = wide.narrow(0, 1, 21)?.narrow(2, 2, V)?;
    attend(&mut step, &layer, &by_head, &latent, &rope, &pages, &out)?;
    assert!(difference(&out, &plain)? < 1e-5);
    assert_eq!(difference(&pages, &own)?, 0.0);
    // The memory outside them was not written.
    assert_eq!(largest(&layers.narrow(1, 0, 1)?)?, 0.0);
    let around = wide.sum_all()?.to_scalar::<f32>()? - out.sum_all()?.to_scalar::<f32>()?;
    let expected = 7.0 * (wide.elem_count() - out.elem_count()) as f32;
    assert!((around - expected).abs() < 1e-2, "{around} {expected}");

    // The rows are those of a batch with more axes.
    let [batched, latent, rope] = [
        query.reshape((3, 7, HEADS, NOPE + ROPE))?,
        packed[0].reshape((3, 7, LATENT))?,
        packed[1].reshape((3, 7, ROPE))?,
    ];
    let out = zeros(&[3, 7, HEADS, V])?;
    attend(&mut step, &layer, &batched, &latent, &rope, &own, &out)?;
    assert_eq!(difference(&out.flatten_to(1)?, &plain)?, 0.0);
    Ok(())
}

#[test]
fn a_tensor_that_does_not_fit_is_refused_by_name_with_nothing_written() -> Result<()> {
    let (layer, mut step) = prepared()?;
    let query = random(&[21, HEADS, NOPE + ROPE])?;
    let (latent, rope) = (random(&[21, LATENT])?, random(&[21, ROPE])?);
    let (own, out) = (cache()?, zeros(&[21, HEADS, V])?);
    let shared = zeros(&[42, HEADS, V])?;
    let halves = [shared.narrow(0, 0, 21)?, shared.narrow(0, 21, 21)?];
    let same_storage = "shares its storage with another tensor of the call";
    let in_pages = own.flatten_to(1)?.narrow(0, 0, 21)?;
    let out_of_pages = own.flatten_all()?.narrow(0, 0, 21 * HEADS * V)?;
    let out_of_pages = out_of_pages.reshape((21, HEADS, V))?;
    let narrow = &halves[0].narrow(2, 1, V - 1)?;
    let [own, out, query, latent] = [&own, &out, &query, &latent];
    for (message, query, latent, cache, out) in [
        ("query", &query.narrow(0, 0, 20)?, latent, own, out),
        ("query", &query.to_dtype(DType::F64)?, latent, own, out),
        ("latent", query, &random(&[21, LATENT + 1])?, own, out),
        ("out", query, latent, own, narrow),
        (
            "cache: given f32 [8, 16, 79]",
            query,
            latent,
            &own.narrow(2, 0, 79)?,
            out,
        ),
        (
            "cache: given u8",
            query,
            latent,
            &own.to_dtype(DType::U8)?,
            out,
        ),
        (
            "cache: given f32 [4, 32, 80]",
            query,
            latent,
            &own.reshape((4, 32, 80))?,
            out,
        ),
        (
            same_storage,
            query,
            &in_pages.narrow(1, 0, LATENT)?,
            own,
            out,
        ),
        (same_storage, query, latent, own, &query.narrow(2, 0, V)?),
        (same_storage, query, latent, own, &out_of_pages),
    ] {
        let refused = attend(&mut step, &layer, query, latent, &rope, cache, out);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(message), "{message}: {refused}");
    }
    for written in [own, out, &shared] {
        assert_eq!(largest(written)?, 0.0);
    }
    // The step still runs after the refusals.
    attend(&mut step, &layer, query, latent, &rope, own, &halves[1])?;
    assert_eq!(largest(&halves[0])?, 0.0);
    assert!(largest(&halves[1])? > 0.0);
    Ok(())
}

// Rows of 64 bytes of e4m3, 16 rotary values in bf16 and a scale are 100 bytes. Engines fill them
// up.
#[test]
fn rows_of_fp8_per_token_may_be_filled_up() -> Result<()> {
    let problem = problem().with_kv_format(KvFormat::Fp8PerToken);
    let request = StepRequest::new(20, 20, &[5, 2]);
    let (layer, mut step) = prepared_for(&problem, kv_b()?, &[request])?;
    let query = random(&[20, HEADS, NOPE + ROPE])?;
    let (latent, rope) = (random(&[20, LATENT])?, random(&[20, ROPE])?);
    let mut run = |width: usize| -> Result<[Tensor; 2]> {
        let cache = Tensor::zeros((PAGES, PAGE, width), DType::U8, &Device::Cpu)?;
        let out = zeros(&[20, HEADS, V])?;
        attend(&mut step, &layer, &query, &latent, &rope, &cache, &out)?;
        Ok([out, cache])
    };
    let [[out, rows], [filled, filled_rows]] = [run(100)?, run(112)?];
    assert!(largest(&out)? > 0.1);
    assert_eq!(difference(&out, &filled)?, 0.0);
    let bytes = |cache: &Tensor| cache.narrow(2, 0, 100)?.flatten_all()?.to_vec1::<u8>();
    assert_eq!(bytes(&rows)?, bytes(&filled_rows)?);
    let refused = run(101).unwrap_err().to_string();
    assert!(
        refused.contains("[pages, 16, 100 or 112 values of 1 bytes]"),
        "{refused}"
    );
    Ok(())
}

#[test]
fn an_engine_s_threads_share_layers_and_hand_on_workspaces() {
    const fn shared<T: Send + Sync>() {}
    const fn sent<T: Send>() {}
    shared::<Attention>();
    shared::<Layer>();
    sent::<Workspace>();
}

#[test]
fn tensors_that_two_threads_lend_crosswise_block_neither_for_ever() -> Result<()> {
    let tensors = [random(&[64])?, random(&[64])?];
    std::thread::scope(|scope| {
        let lend = |read: usize, written: usize| {
            let tensors = &tensors;
            scope.spawn(move || {
                for _ in 0..2000 {
                    let (read, written) = ([&tensors[read]], [&tensors[written]]);
                    Cpu::new().lending(&read, &written, |mut read, mut written| {
                        let from = read.remove(0).bytes("read")?;
                        written.remove(0).bytes("written")?.copy_from_slice(from);
                        Ok(())
                    })?;
                }
                Ok::<_, candle_core::Error>(())
            })
        };
        let threads = [lend(0, 1), lend(1, 0)];
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    assert_eq!(difference(&tensors[0], &tensors[1])?, 0.0);
    Ok(())
}

const INDEX_HEADS: usize = 4;
const INDEX_WIDTH: usize = 32;
const QUERY_RANK: usize = 48;
const SLOTS: u32 = 8;

/// The tensors of a prompt's tokens: query, latent and rotary key; the query's latent, keys and
/// weights of heads for the indexer; the gates of its keys.
struct Prompt(Vec<Tensor>);

impl Prompt {
    fn new(tokens: usize) -> Result<Self> {
        let of_token: [&[usize]; 7] = [
            &[HEADS, NOPE + ROPE],
            &[LATENT],
            &[ROPE],
            &[QUERY_RANK],
            &[INDEX_WIDTH],
            &[INDEX_HEADS],
            &[INDEX_WIDTH],
        ];
        let tensors = of_token.map(|shape| random(&[&[tokens], shape].concat()));
        tensors.into_iter().collect::<Result<_>>().map(Self)
    }

    /// Returns `tokens` tokens of the prompt from `start` on.
    fn part(&self, start: usize, tokens: usize) -> Result<Self> {
        let parts = self.0.iter().map(|it| it.narrow(0, start, tokens));
        parts.collect::<Result<_>>().map(Self)
    }

    fn tensors(&self) -> &[Tensor; 7] {
        self.0.first_chunk().expect("seven tensors")
    }
}

/// A sparse model of two layers. The second layer shares the lists of the first.
struct Sparse {
    attention: Attention,
    layers: [Layer; 2],
    caches: [Tensor; 2],
    index_cache: Tensor,
    step: Workspace,
    /// True if the prompt's gates are handed over.
    gated: bool,
}

impl Sparse {
    /// Makes the model with an indexer of `slots` slots, whose keys are pooled and not rotated if
    /// its weights have a table of pools, and rotated otherwise.
    fn new(slots: u32, kv_b: &Tensor, index: &IndexWeights) -> Result<Self> {
        let [heads, width, rope] = [INDEX_HEADS, INDEX_WIDTH, ROPE].map(|n| n as u32);
        let config = IndexerConfig::new(heads, width, rope, slots);
        let config = match index.pool {
            None => config,
            Some(_) => config.with_rope(0).with_pool(4).with_tail(8),
        };
        let problem = problem().with_sparse(true);
        let attention = Attention::new(&Device::Cpu, &problem, SCALE)?.with_indexer(&config)?;
        let page = config.page_bytes(PAGE);
        Ok(Self {
            layers: [
                Layer::new(attention.clone(), kv_b.clone()).with_indexer(index.clone()),
                Layer::new(attention.clone(), kv_b.clone()),
            ],
            caches: [cache()?, cache()?],
            index_cache: Tensor::zeros((PAGES, page), DType::U8, &Device::Cpu)?,
            gated: index.pool.is_some(),
            step: attention.workspace(&limits().with_decode_query_len(64))?,
            attention,
        })
    }

    /// Computes the output of both layers for new tokens. Together with earlier ones there are
    /// `total` tokens.
    fn forward(&mut self, prompt: &Prompt, total: u32) -> Result<[Tensor; 2]> {
        let [query, latent, rope, query_latent, keys, head_weights, gates] = prompt.tensors();
        let tokens = query.dim(0)?;
        let requests = [StepRequest::new(tokens as u32, total, &[3, 6, 1])];
        let planned = self.step.plan(&requests)?;
        self.step.prepare(&self.attention, &planned)?;
        let inputs = IndexInputs {
            query_latent,
            keys,
            head_weights,
            gates: self.gated.then_some(gates),
        };
        select(&mut self.step, &self.layers[0], &inputs, &self.index_cache)?;
        let outs = [zeros(&[tokens, HEADS, V])?, zeros(&[tokens, HEADS, V])?];
        for ((layer, cache), out) in self.layers.iter().zip(&self.caches).zip(&outs) {
            attend(&mut self.step, layer, query, latent, rope, cache, out)?;
        }
        Ok(outs)
    }
}

fn index_weights() -> Result<IndexWeights> {
    let tables = Rope::plain(1e4).cos_sin(ROPE as u32, 64).unwrap();
    let [cos, sin] = tables.map(|it| Tensor::from_vec(it, (64, ROPE / 2), &Device::Cpu));
    Ok(IndexWeights {
        query: random(&[INDEX_HEADS * INDEX_WIDTH, QUERY_RANK])?,
        norm: [random(&[INDEX_WIDTH])?, random(&[INDEX_WIDTH])?],
        angles: Some([cos?, sin?]),
        pool: None,
    })
}

/// Returns weights of an indexer that pools four keys.
fn pooled_index_weights() -> Result<IndexWeights> {
    Ok(IndexWeights {
        angles: None,
        pool: Some(random(&[4, INDEX_WIDTH])?),
        ..index_weights()?
    })
}

#[test]
fn a_sparse_layer_attends_to_what_its_indexer_chooses() -> Result<()> {
    for index in [index_weights()?, pooled_index_weights()?] {
        attends_to_what_its_indexer_chooses(&index)?;
    }
    Ok(())
}

fn attends_to_what_its_indexer_chooses(index: &IndexWeights) -> Result<()> {
    let kv_b = kv_b()?;
    let prompt = Prompt::new(40)?;
    let mut few = Sparse::new(SLOTS, &kv_b, index)?;
    let mut all = Sparse::new(64, &kv_b, index)?;
    let [chosen, shared] = few.forward(&prompt, 40)?;
    let [everything, _] = all.forward(&prompt, 40)?;
    // The second layer has the same tensors and shares the lists, so it gives the same result.
    assert_eq!(difference(&chosen, &shared)?, 0.0);
    // The first tokens do not see more tokens than a list holds.
    let first = |out: &Tensor| out.narrow(0, 0, SLOTS as usize);
    assert!(difference(&first(&chosen)?, &first(&everything)?)? < 1e-5);
    assert!(difference(&chosen, &everything)? > 1e-2);

    // Lists as long as the context give the result of a dense layer.
    let request = StepRequest::new(40, 40, &[3, 6, 1]);
    let (layer, mut step) = prepared_for(&problem(), kv_b.clone(), &[request])?;
    let [query, latent, rope, ..] = prompt.tensors();
    let dense = zeros(&[40, HEADS, V])?;
    attend(&mut step, &layer, query, latent, rope, &cache()?, &dense)?;
    // The two paths add in other orders, and the tensors are drawn anew in each run.
    assert!(difference(&everything, &dense)? < 1e-3);

    // The prompt is run in two parts. The second part reads the keys that the first one wrote.
    let mut parts = Sparse::new(SLOTS, &kv_b, index)?;
    parts.forward(&prompt.part(0, 30)?, 30)?;
    let [rest, _] = parts.forward(&prompt.part(30, 10)?, 40)?;
    assert!(difference(&rest, &chosen.narrow(0, 30, 10)?)? < 1e-5);
    Ok(())
}

#[test]
fn a_selection_without_an_indexer_is_refused() -> Result<()> {
    let (layer, mut step) = prepared()?;
    let tensor = random(&[21, 4])?;
    let inputs = IndexInputs {
        query_latent: &tensor,
        keys: &tensor,
        head_weights: &tensor,
        gates: None,
    };
    let refused = select(&mut step, &layer, &inputs, &cache()?).unwrap_err();
    assert!(
        refused.to_string().contains("indexer: given none"),
        "{refused}"
    );
    let config = IndexerConfig::new(4, 32, 16, 8);
    let dense = Attention::new(&Device::Cpu, &problem(), SCALE)?.with_indexer(&config);
    let refused = dense.err().expect("the problem is dense").to_string();
    assert!(refused.contains("problem.sparse"), "{refused}");
    let kv_b = kv_b()?;
    let mut sparse = Sparse::new(SLOTS, &kv_b, &index_weights()?)?;
    sparse.index_cache = sparse.index_cache.narrow(D::Minus1, 0, 7)?;
    let refused = sparse.forward(&Prompt::new(4)?, 4).unwrap_err().to_string();
    assert!(
        refused.contains("index cache: given u8 [8, 7]"),
        "{refused}"
    );
    for (index, gated, message) in [
        (index_weights()?, true, "index gates: given some without"),
        (pooled_index_weights()?, false, "index gates: given none"),
    ] {
        let mut sparse = Sparse::new(SLOTS, &kv_b, &index)?;
        sparse.gated = gated;
        let refused = sparse.forward(&Prompt::new(4)?, 4).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }
    Ok(())
}
