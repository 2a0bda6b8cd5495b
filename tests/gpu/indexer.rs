//! Compares the lightning indexer on a GPU with that of the CPU device: keys, queries, logits, and
//! complete lists.

use mla_cpu::Cpu;
use mla_kernels::Cuda;
use mla_runtime::Result;
use mla_runtime::backend::DecodeBatch;
use mla_runtime::indexer::{
    IndexCacheLayout, IndexCacheMut, IndexDevice, IndexKeys, IndexQueries, IndexRows,
};
use mla_runtime::model::{DType, IndexerConfig, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, BlockTable, Layout, Rotary, TensorMut, TensorRef};
use rand::RngExt as _;
use rand::seq::SliceRandom as _;

use crate::common::{download, download_all, gpu, rng, upload, upload_all};
use crate::tensors::{normal, normals, rotary_tables, view};

const PAGE: usize = 64;
const WIDTH: usize = 128;

/// Requests, their pages, and all other data that both devices share.
struct World {
    config: IndexerConfig,
    dtype: DType,
    requests: usize,
    tokens: usize,
    columns: usize,
    max_pages: usize,
    layout: IndexCacheLayout,
    lens: Vec<i32>,
    starts: Vec<i32>,
    tables: Vec<i32>,
    /// The cache slot of every token.
    slots: Vec<i64>,
    positions: Vec<i64>,
    keys: Vec<u8>,
    norm: [Vec<u8>; 2],
    queries: Vec<u8>,
    query_positions: Vec<i64>,
    head_weights: Vec<u8>,
    tables_cos_sin: [Vec<f32>; 2],
}

impl World {
    fn new(config: IndexerConfig, dtype: DType, requests: &[(usize, usize)], seed: u64) -> Self {
        let mut rng = rng(seed);
        let heads = config.heads as usize;
        let needed: Vec<usize> = requests.iter().map(|(_, kv)| kv.div_ceil(PAGE)).collect();
        let pages = needed.iter().sum::<usize>() + 2;
        let max_pages = needed.iter().max().copied().unwrap_or(0) + 1;
        let mut free: Vec<i32> = (0..pages as i32).collect();
        free.shuffle(&mut rng);
        let (mut tables, mut starts) = (Vec::new(), vec![0i32]);
        let (mut slots, mut positions, mut query_positions) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (q, kv)) in requests.iter().enumerate() {
            let own: Vec<i32> = free.drain(..needed[index]).collect();
            for position in 0..*kv {
                let page = own[position / PAGE] as usize;
                slots.push((page * PAGE + position % PAGE) as i64);
                positions.push(position as i64);
            }
            query_positions.extend((0..*q).map(|i| (kv + i).saturating_sub(*q) as i64));
            tables.extend(own);
            tables.resize((index + 1) * max_pages, i32::MAX);
            starts.push(starts[index] + *q as i32);
        }
        let tokens = starts[requests.len()] as usize;
        let columns = requests.iter().map(|(_, kv)| *kv).max().unwrap_or(0);
        Self {
            config,
            dtype,
            requests: requests.len(),
            tokens,
            columns,
            max_pages,
            layout: IndexCacheLayout::contiguous(&config, pages, PAGE),
            lens: requests.iter().map(|(_, kv)| *kv as i32).collect(),
            starts,
            tables,
            keys: normals(&mut rng, dtype, slots.len() * WIDTH, 1.0),
            norm: [0; 2].map(|_: i32| normals(&mut rng, DType::F32, WIDTH, 1.0)),
            queries: normals(&mut rng, dtype, tokens * heads * WIDTH, 1.0),
            head_weights: normals(&mut rng, DType::F32, tokens * heads, 1.0),
            slots,
            positions,
            query_positions,
            tables_cos_sin: rotary_tables(columns, 32),
        }
    }

    fn heads(&self) -> usize {
        self.config.heads as usize
    }

    fn rotary<'a, D: IndexDevice>(
        &self,
        positions: &'a D::Buffer,
        len: usize,
        [cos, sin]: [&'a D::Buffer; 2],
    ) -> Result<Rotary<'a, D>> {
        let table = |buffer| view::<D>(buffer, DType::F32, [1, self.columns, 32]);
        let positions = ArrayRef::new(D::bytes(positions), len)?;
        Ok(Rotary::new(
            positions,
            [table(cos)?, table(sin)?],
            self.config.rotary,
        ))
    }

    /// Writes keys to an index cache filled with 0xff, and returns it.
    fn write<D: IndexDevice>(&self, device: &D) -> Result<Vec<u8>> {
        let count = self.slots.len();
        let [keys, weight, bias] =
            [&self.keys, &self.norm[0], &self.norm[1]].map(|b| upload(device, b).unwrap());
        let [slots, positions] = [&self.slots, &self.positions].map(|a| upload_all(device, a));
        let tables = [0, 1].map(|i| upload_all(device, &self.tables_cos_sin[i]));
        let mut cache = upload(
            device,
            &vec![0xff; self.layout.pages * self.layout.page_stride],
        )?;
        let norm = |buffer| view::<D>(buffer, DType::F32, [1, 1, WIDTH]);
        device.write_index_keys(
            &self.config,
            IndexKeys::new(
                view::<D>(&keys, self.dtype, [count, 1, WIDTH])?,
                [norm(&weight)?, norm(&bias)?],
                ArrayRef::new(D::bytes(&slots), count)?,
                IndexCacheMut::new(D::bytes_mut(&mut cache), self.layout)?,
            )
            .with_rotary(self.rotary(&positions, count, [&tables[0], &tables[1]])?),
        )?;
        download(device, &cache)
    }

    /// Returns the quantised queries, and their weights.
    fn quantise<D: IndexDevice>(&self, device: &D) -> Result<[Vec<u8>; 2]> {
        let (tokens, heads) = (self.tokens, self.heads());
        let [queries, head_weights] =
            [&self.queries, &self.head_weights].map(|b| upload(device, b).unwrap());
        let positions = upload_all(device, &self.query_positions);
        let tables = [0, 1].map(|i| upload_all(device, &self.tables_cos_sin[i]));
        let mut values = upload(device, &vec![0xff; tokens * heads * WIDTH])?;
        let mut weights = upload(device, &vec![0xff; tokens * heads * 4])?;
        let shape = [tokens, heads, WIDTH];
        let of_weights = Layout::contiguous(DType::F32, [tokens, 1, heads]);
        device.quantise_index_queries(
            &self.config,
            IndexQueries::new(
                [
                    TensorRef::new(D::bytes(&queries), Layout::contiguous(self.dtype, shape))?,
                    TensorRef::new(D::bytes(&head_weights), of_weights)?,
                ],
                D::bytes_mut(&mut values),
                TensorMut::new(D::bytes_mut(&mut weights), of_weights)?,
            )
            .with_rotary(self.rotary(&positions, tokens, [&tables[0], &tables[1]])?),
        )?;
        Ok([download(device, &values)?, download(device, &weights)?])
    }

    /// Calls `work` with the rows of some tokens.
    fn rows<D: IndexDevice, R>(
        &self,
        device: &D,
        work: impl FnOnce(&IndexRows<'_, D>) -> Result<R>,
    ) -> Result<R> {
        let [lens, starts, tables] =
            [&self.lens, &self.starts, &self.tables].map(|a| upload_all(device, a));
        let entries = ArrayRef::new(D::bytes(&tables), self.tables.len())?;
        work(&IndexRows::new(
            DecodeBatch::new(
                BlockTable::new(entries, self.requests, self.max_pages)?,
                (ArrayRef::new(D::bytes(&lens), self.requests)?, self.columns),
                (
                    ArrayRef::new(D::bytes(&starts), self.requests + 1)?,
                    self.tokens,
                ),
            ),
            0..self.tokens,
        ))
    }

    /// Computes logits of quantised queries over a cache. Unwritten logits are NaN.
    fn logits<D: IndexDevice>(
        &self,
        device: &D,
        cache: &[u8],
        [values, weights]: &[Vec<u8>; 2],
    ) -> Result<Vec<f32>> {
        let [mut cache, values, weights] =
            [cache, values, weights].map(|b| upload(device, b).unwrap());
        let count = self.tokens * self.columns;
        let mut logits = upload(device, &vec![0xff; count * 4])?;
        let layout = Layout::contiguous(DType::F32, [1, self.tokens, self.columns]);
        let of_weights = Layout::contiguous(DType::F32, [self.tokens, 1, self.heads()]);
        self.rows(device, |rows| {
            device.index_logits(
                &self.config,
                D::bytes(&values),
                TensorRef::new(D::bytes(&weights), of_weights)?,
                &IndexCacheMut::new(D::bytes_mut(&mut cache), self.layout)?,
                rows,
                TensorMut::new(D::bytes_mut(&mut logits), layout)?,
            )
        })?;
        Ok(download_all(device, &logits))
    }

    fn lists<D: IndexDevice>(&self, device: &D, logits: &[f32]) -> Result<Vec<i32>> {
        let width = self.config.topk as usize;
        let logits = upload_all(device, logits);
        let mut lists = upload(device, &vec![0x55; self.tokens * width * 4])?;
        let layout = Layout::contiguous(DType::F32, [1, self.tokens, self.columns]);
        self.rows(device, |rows| {
            let bytes = D::bytes_mut(&mut lists);
            let (slots, _) = D::split_mut(bytes, self.tokens * width * 4);
            device.select_slots(
                TensorRef::new(D::bytes(&logits), layout)?,
                rows,
                PAGE,
                slots,
                width,
            )
        })?;
        Ok(download_all(device, &lists))
    }

    /// Returns the number of positions that each token sees.
    fn seen(&self) -> Vec<usize> {
        let of = |request: usize| {
            let count = self.starts[request + 1] - self.starts[request];
            (0..count).map(move |i| (self.lens[request] - count + i + 1).max(0) as usize)
        };
        (0..self.requests).flat_map(of).collect()
    }
}

fn check(world: &World, gpu: &Cuda) -> Result<()> {
    let cpu = Cpu::new();
    // Sums in f64 may differ in their last bit, and so may one of very many values.
    let differing = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let (expected, given) = (world.write(&cpu)?, world.write(gpu)?);
    let count = differing(&expected, &given);
    assert!(
        count * 100_000 <= expected.len(),
        "{count} bytes of the cache"
    );
    let (expected_queries, given_queries) = (world.quantise(&cpu)?, world.quantise(gpu)?);
    assert!(expected_queries == given_queries, "quantised queries");

    // Both devices get the same inputs from here on.
    let expected_logits = world.logits(&cpu, &expected, &expected_queries)?;
    let given_logits = world.logits(gpu, &expected, &expected_queries)?;
    let max = expected_logits.iter().filter(|x| x.is_finite());
    let max = max.fold(0.0, |max: f32, x| max.max(x.abs()));
    for (token, seen) in world.seen().into_iter().enumerate() {
        for position in 0..world.columns {
            let at = token * world.columns + position;
            let (expected, given) = (expected_logits[at], given_logits[at]);
            if position < seen {
                let difference = (expected - given).abs();
                assert!(
                    difference <= 1e-3 * max,
                    "[{token}, {position}]: {given}, not {expected}"
                );
            } else {
                assert_eq!(given.to_bits(), u32::MAX, "[{token}, {position}]");
            }
        }
    }
    let again = world.logits(gpu, &expected, &expected_queries)?;
    assert!(
        bytemuck::cast_slice::<_, u8>(&again) == bytemuck::cast_slice::<_, u8>(&given_logits),
        "repeats differ"
    );
    let expected_lists = world.lists(&cpu, &given_logits)?;
    for _ in 0..2 {
        assert!(world.lists(gpu, &given_logits)? == expected_lists, "lists");
    }
    Ok(())
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored indexer"]
fn the_indexer_is_that_of_the_cpu_device() -> Result<()> {
    let gpu = gpu();
    let ragged = [
        (1, 70),
        (3, 33),
        (1, 1),
        (0, 5),
        (2, 2),
        (2, 0),
        (5, 131),
        (1, 3000),
        (4, 2500),
    ];
    let decode: Vec<(usize, usize)> = (0..40).map(|i| (1, 100 * i + 1)).collect();
    let mut seed = 1;
    for base in [IndexerConfig::DEEPSEEK_V3_2, IndexerConfig::GLM_5] {
        for (topk, hadamard, dtype) in [
            (2048, false, DType::BF16),
            (100, true, DType::F32),
            (1, false, DType::F16),
        ] {
            for requests in [&ragged[..], &decode] {
                let style = [RotaryStyle::Halves, RotaryStyle::Interleaved][seed as usize % 2];
                let config = base
                    .with_topk(topk)
                    .with_rotary(style)
                    .with_hadamard(hadamard);
                check(&World::new(config, dtype, requests, seed), &gpu)?;
                seed += 1;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored indexer"]
fn any_number_of_query_tokens_agrees_with_the_cpu_device() -> Result<()> {
    let gpu = gpu();
    for base in [IndexerConfig::DEEPSEEK_V3_2, IndexerConfig::GLM_5] {
        let config = base.with_topk(300);
        // The kernel multiplies blocks of 1 to 16 tokens, depending on the average number of tokens
        // of a request.
        for tokens in [2, 3, 4, 5, 6, 8, 9, 12, 16, 20, 40] {
            let requests: Vec<(usize, usize)> = (0..9)
                .map(|i| match i {
                    3 => (0, 200),
                    5 => (2 * tokens, 90),
                    _ => (tokens, 64 * i + 150 * (i % 3)),
                })
                .collect();
            check(
                &World::new(config, DType::BF16, &requests, tokens as u64),
                &gpu,
            )?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored indexer"]
fn lists_of_clustered_and_special_logits_are_exact() -> Result<()> {
    let gpu = gpu();
    // Some rows fit one CTA, some fit a cluster, and some do not. Clusters of eight, four and three
    // keep rows in registers; there are rows around their limits.
    let several = [
        (1, 2047),
        (1, 2048),
        (1, 2049),
        (3, 20_000),
        (2, 9000),
        (1, 200_000),
    ];
    let eight = [(1, 131_072), (2, 50_000), (1, 2049), (1, 9000), (1, 33_000)];
    let sized: [&[(usize, usize)]; 12] = [
        &several,
        &[(1, 200_000)],
        &[(2, 40_000)],
        &[(1, 3000); 140],
        &eight,
        &[(15, 32_900), (1, 70_001)],
        &[(30, 32_900), (1, 70_001)],
        &[(39, 32_900), (1, 70_001)],
        &[(31, 32_700), (1, 32_767)],
        &[(1, 32_767)],
        &[(1, 32_768)],
        &[(1, 262_144)],
    ];
    for requests in sized {
        for kind in 0..KINDS {
            for topk in [1, 2048] {
                check_lists(&gpu, topk, requests, kind)?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored indexer"]
fn lists_of_ten_thousand_rows_are_exact() -> Result<()> {
    let gpu = gpu();
    let mut rng = rng(79);
    let mut rows = 0;
    for turn in 0.. {
        let topk = [1, 64, 500, 2048][turn % 4];
        let lengths = [0, 1, topk - 1, topk, topk + 1];
        let requests: Vec<(usize, usize)> = (0..40)
            .map(|_| {
                let tokens = rng.random_range(0..60);
                let any = rng.random_range(0..lengths.len() + 5);
                let long = rng.random_range(0..3000);
                (tokens, lengths.get(any).copied().unwrap_or(long))
            })
            .collect();
        check_lists(&gpu, topk, &requests, turn % KINDS)?;
        rows += requests.iter().map(|(tokens, _)| tokens).sum::<usize>();
        if rows >= 10_000 {
            break;
        }
    }
    Ok(())
}

/// Number of kinds of rows that are hard to select from.
const KINDS: usize = 7;

fn check_lists(gpu: &Cuda, topk: usize, requests: &[(usize, usize)], kind: usize) -> Result<()> {
    let base = IndexerConfig::GLM_5;
    let config = base.with_topk(topk as u32);
    let world = World::new(config, DType::BF16, requests, 77);
    let mut rng = rng(78);
    let special = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 0.0, -0.0, 1e-45];
    let logits: Vec<f32> = (0..world.tokens * world.columns)
        .map(|at| match kind {
            0 => 8.2 + 1e-5 * normal(&mut rng),
            1 => 3.0,
            2 => (at % world.columns) as f32,
            3 => special[rng.random_range(0..special.len())],
            // These values are equal in all but the lowest bits.
            4 => f32::from_bits(8.2f32.to_bits() & !0x3ff | rng.random_range(0..0x400)),
            5 if at % world.columns > world.columns / 2 => f32::NEG_INFINITY,
            _ => normal(&mut rng),
        })
        .collect();
    let expected = world.lists(&Cpu::new(), &logits)?;
    let given = world.lists(gpu, &logits)?;
    assert!(given == expected, "kind {kind}, {requests:?}");
    Ok(())
}
