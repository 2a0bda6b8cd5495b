//! WGMMA_MLA_SPARSE on a Hopper GPU against the CPU's decode backend, which gets the listed rows
//! alone and lists without the entries to skip. The CPU has the same queries in f32, and so
//! computes in f32: with queries of bf16 it would round rows of other formats to bf16.

use half::bf16;
use mla_cpu::{Cpu, CpuDecode};
use mla_kernels::Cuda;
use mla_kernels::backends::sm90::WgmmaMlaSparse;
use mla_kernels::device::{Bytes, BytesMut};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, ListedCache, Output, Query, SlotLists,
    StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheRef, Layout, LseLayout, LseMut, Memory, TensorMut,
    TensorRef,
};
use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::common::{download, get, gpu, put, rng, upload};
use crate::tensors::normal;

const LATENT: usize = 512;
const ROW: usize = 576;
const DTYPE: DType = DType::BF16;

/// Entries that no cache has, in any position; -3 stands for the first one behind it.
const WRONG: [i32; 6] = [-1, i32::MIN, i32::MAX, -123_456, END, END + 1];
const END: i32 = -3;

/// Maximum number of tokens of a request, and of their pages of 64.
const MAX_LEN: usize = 400;
const MAX_PAGES: usize = 7;

#[derive(Clone, Copy, Debug)]
struct Case {
    kv: KvFormat,
    heads: usize,
    tokens: usize,
    width: usize,
    page_size: usize,
    pages: usize,
    /// Bytes between one page and the next beyond its rows: a multiple of 16.
    page_slack: usize,
    /// The first page that a list names.
    first_page: usize,
    /// Number of valid entries among eight.
    valid: usize,
    with_counts: bool,
    /// Entries of a second list, of the same rows as a cache of one page; a cache whose pages
    /// adjoin.
    second_width: usize,
    with_sinks: bool,
}

impl Case {
    fn new(kv: KvFormat, heads: usize, tokens: usize, width: usize) -> Self {
        Self {
            kv,
            heads,
            tokens,
            width,
            page_size: 64,
            pages: 40,
            page_slack: 0,
            first_page: 0,
            valid: 6,
            with_counts: false,
            second_width: 0,
            with_sinks: false,
        }
    }

    fn layout(&self) -> CacheLayout {
        let mut layout = CacheLayout::contiguous(MlaDims::R1, self.kv, self.pages, self.page_size);
        layout.page_stride += self.page_slack;
        layout.scale = self.scale();
        layout
    }

    /// Returns a scale that is not a power of two.
    fn scale(&self) -> f32 {
        match self.kv {
            KvFormat::Fp8 => 0.0371,
            _ => 1.0,
        }
    }

    fn config(&self, page_size: usize, dtype: DType) -> LayerConfig {
        let problem = Problem::new(MlaDims::R1, self.heads as u32, dtype)
            .with_kv_format(self.kv)
            .with_page_size(page_size as u32)
            .with_sparse(true);
        LayerConfig::new(problem, 0.072_168_78)
    }
}

/// Entry of a list.
#[derive(Clone, Copy)]
enum Entry {
    /// A row of [`Numbers::rows`].
    Row(usize),
    Wrong(i32),
}

struct Lists {
    /// Entries of each token: those of the first list, then those of the second.
    entries: Vec<Entry>,
    counts: Option<Vec<i32>>,
}

impl Lists {
    fn random(case: &Case, rows: usize, rng: &mut StdRng) -> Self {
        let width = case.width + case.second_width;
        let entries = (0..case.tokens * width).map(|_| {
            if rng.random_range(0..8) < case.valid {
                return Entry::Row(rng.random_range(0..rows));
            }
            Entry::Wrong(WRONG[rng.random_range(0..WRONG.len())])
        });
        let entries = entries.collect();
        let counts = case.with_counts.then(|| {
            let mut count = || rng.random_range(-2..case.width as i32 + 3);
            (0..case.tokens).map(|_| count()).collect()
        });
        Self { entries, counts }
    }

    /// Returns the lists as slots: rows by `of_row`, wrong entries as they are.
    fn slots(&self, end: usize, of_row: impl Fn(usize) -> usize) -> Vec<i32> {
        let end = end.min(i32::MAX as usize - 1) as i32;
        let slot = |entry: &Entry| match *entry {
            Entry::Row(row) => of_row(row) as i32,
            Entry::Wrong(END) => end,
            Entry::Wrong(wrong) if wrong == END + 1 => end + 1,
            Entry::Wrong(wrong) => wrong,
        };
        self.entries.iter().map(slot).collect()
    }
}

/// A case's numbers in host memory: some rows, and where they lie in the cache.
struct Numbers {
    /// Values that DTYPE represents exactly.
    queries: Vec<f32>,
    rows: Vec<Vec<u8>>,
    slots: Vec<usize>,
    lists: Lists,
    sinks: Option<Vec<f32>>,
}

impl Numbers {
    fn random(case: &Case, rng: &mut StdRng) -> Self {
        let queries = (0..case.tokens * case.heads * ROW)
            .map(|_| bf16::from_f32(normal(rng)).to_f32())
            .collect();
        let first = case.first_page * case.page_size;
        let all = case.pages * case.page_size;
        let mut slots: Vec<usize> = (0..700).map(|_| rng.random_range(first..all)).collect();
        slots.extend([first, all - 1]);
        slots.sort_unstable();
        slots.dedup();
        let rows: Vec<_> = slots.iter().map(|_| random_row(case.kv, rng)).collect();
        let lists = Lists::random(case, rows.len(), rng);
        let sinks = case.with_sinks.then(|| {
            let sink = |head| match head % 4 {
                0 => f32::INFINITY,
                1 => f32::NEG_INFINITY,
                _ => normal(rng) * 3.0,
            };
            (0..case.heads).map(sink).collect()
        });
        Self {
            queries,
            rows,
            slots,
            lists,
            sinks,
        }
    }
}

fn random_row(kv: KvFormat, rng: &mut StdRng) -> Vec<u8> {
    let mut row = vec![0; kv.row_bytes(MlaDims::R1)];
    let byte = |rng: &mut StdRng| rng.random_range(0..0x70) | (rng.random_range(0..2) << 7);
    match kv {
        KvFormat::Fp8 => row.fill_with(|| byte(rng)),
        KvFormat::Fp8DsMla => {
            row[..LATENT].fill_with(|| byte(rng));
            for scale in row[LATENT..LATENT + 16].chunks_exact_mut(4) {
                scale.copy_from_slice(&rng.random_range(1e-4f32..3e-2).to_le_bytes());
            }
            for element in 0..64 {
                put(DTYPE, &mut row[LATENT + 16..], element, normal(rng) * 0.3);
            }
        }
        _ => (0..ROW).for_each(|element| put(DTYPE, &mut row, element, normal(rng) * 0.3)),
    }
    row
}

/// The arrays of a call in a device's memory, but for the cache, and room for the results.
struct Step<D: Device> {
    layout: CacheLayout,
    dtype: DType,
    queries: D::Buffer,
    lists: D::Buffer,
    second: Option<D::Buffer>,
    sinks: Option<D::Buffer>,
    counts: Option<D::Buffer>,
    /// Block table, lengths and query starts of requests of one query token each.
    requests: [D::Buffer; 3],
    dense_within: usize,
    out: D::Buffer,
    lse: D::Buffer,
}

impl<D: Device> Step<D> {
    fn new(
        device: &D,
        case: &Case,
        layout: CacheLayout,
        dtype: DType,
        numbers: &Numbers,
        slots: &[i32],
    ) -> Result<Self> {
        let mut queries = vec![0; case.tokens * case.heads * ROW * dtype.bytes()];
        for (element, query) in numbers.queries.iter().enumerate() {
            put(dtype, &mut queries, element, *query);
        }
        let ints = |ints: &[i32]| upload(device, bytemuck::cast_slice(ints));
        let starts: Vec<i32> = (0..=case.tokens as i32).collect();
        let rows = case.tokens * case.heads;
        let counts = numbers.lists.counts.as_deref();
        // A row of each list behind the other.
        let [first, second] =
            [0..case.width, case.width..case.width + case.second_width].map(|of| {
                let lists = slots.chunks_exact(case.width + case.second_width);
                lists
                    .flat_map(|list| list[of.clone()].to_vec())
                    .collect::<Vec<_>>()
            });
        let sinks = numbers.sinks.as_deref().map(bytemuck::cast_slice);
        Ok(Self {
            layout,
            dtype,
            queries: upload(device, &queries)?,
            lists: ints(&first)?,
            second: (case.second_width > 0).then(|| ints(&second)).transpose()?,
            sinks: sinks.map(|sinks| upload(device, sinks)).transpose()?,
            counts: counts.map(ints).transpose()?,
            requests: [
                ints(&vec![0; case.tokens * MAX_PAGES])?,
                ints(&vec![1; case.tokens])?,
                ints(&starts)?,
            ],
            dense_within: 0,
            out: upload(device, &vec![0xff; rows * LATENT * dtype.bytes()])?,
            lse: upload(device, &vec![0xff; rows * 4])?,
        })
    }

    fn enqueue<'a, B: DecodeBackend<Device = D>>(
        &'a mut self,
        device: &D,
        case: &Case,
        backend: &B,
        state: &mut B::State,
        cache: D::Bytes<'a>,
    ) -> Result<()> {
        let (tokens, heads) = (case.tokens, case.heads);
        let queries = Layout::contiguous(self.dtype, [tokens, heads, ROW]);
        let queries = TensorRef::new(D::bytes(&self.queries), queries)?;
        let [table, lens, starts] = &self.requests;
        let batch = DecodeBatch::new(
            BlockTable::new(
                ArrayRef::new(D::bytes(table), tokens * MAX_PAGES)?,
                tokens,
                MAX_PAGES,
            )?,
            (ArrayRef::new(D::bytes(lens), tokens)?, MAX_LEN),
            (ArrayRef::new(D::bytes(starts), tokens + 1)?, 1),
        );
        let counts = match &self.counts {
            Some(counts) => Some(ArrayRef::new(D::bytes(counts), tokens)?),
            None => None,
        };
        let lists = ArrayRef::new(D::bytes(&self.lists), tokens * case.width)?;
        let second = match &self.second {
            Some(second) => {
                let (kv, slots) = (self.layout.format, self.layout.slots());
                let mut layout = CacheLayout::contiguous(MlaDims::R1, kv, 1, slots);
                layout.scale = self.layout.scale;
                let slots = ArrayRef::new(D::bytes(second), tokens * case.second_width)?;
                let cache = CacheRef::new(cache, layout)?;
                Some(ListedCache::new(cache, slots, case.second_width))
            }
            None => None,
        };
        let sinks = match &self.sinks {
            Some(sinks) => Some(ArrayRef::new(D::bytes(sinks), heads)?),
            None => None,
        };
        let out = Layout::contiguous(self.dtype, [tokens, heads, LATENT]);
        let call = DecodeCall::new(
            Query::Split {
                latent: queries.narrow(2, 0..LATENT)?,
                rope: queries.narrow(2, LATENT..ROW)?,
            },
            CacheRef::new(cache, self.layout)?,
            batch,
            Output::Plain(TensorMut::new(D::bytes_mut(&mut self.out), out)?),
        )
        .with_lse(LseMut::new(
            D::bytes_mut(&mut self.lse),
            LseLayout::heads_first(heads, tokens),
        )?)
        .with_sinks(sinks)
        .with_slots(
            SlotLists::new(lists, case.width)
                .with_counts(counts)
                .with_dense_within(self.dense_within)
                .with_second(second),
        );
        let metadata = backend.metadata(device, &limits(case))?;
        // SAFETY: lengths, starts and pages are those of the case, for which all tensors were made.
        unsafe { backend.decode(device, call, state, &metadata) }
    }

    fn results(&self, device: &D) -> Result<(Vec<u8>, Vec<u8>)> {
        Ok((download(device, &self.out)?, download(device, &self.lse)?))
    }
}

fn limits(case: &Case) -> StepLimits {
    StepLimits::new(case.tokens, case.tokens, MAX_PAGES)
}

/// Returns the CPU's results for the rows side by side, and for lists without the entries that do
/// not count.
fn expected(case: &Case, numbers: &Numbers) -> (Vec<u8>, Vec<u8>) {
    let device = Cpu::new();
    let page_size = 64;
    let pages = numbers.rows.len().div_ceil(page_size);
    let mut layout = CacheLayout::contiguous(MlaDims::R1, case.kv, pages, page_size);
    layout.scale = case.scale();
    let mut cache = numbers.rows.concat();
    cache.resize(pages * layout.page_stride, 0xff);
    let slots = numbers.lists.slots(usize::MAX, |row| row);
    let skipped = |slot: i32| {
        if slot as usize >= numbers.rows.len() {
            -1
        } else {
            slot
        }
    };
    let slots: Vec<i32> = slots.into_iter().map(skipped).collect();
    let mut step = Step::new(&device, case, layout, DType::F32, numbers, &slots).unwrap();
    let cache = upload(&device, &cache).unwrap();
    let backend = CpuDecode::new(&device, &case.config(page_size, DType::F32)).unwrap();
    let mut state = backend.state(&device, &limits(case)).unwrap();
    step.enqueue(&device, case, &backend, &mut state, Cpu::bytes(&cache))
        .unwrap();
    step.results(&device).unwrap()
}

/// Makes a GPU's step, on a cache that the caller holds.
fn step(gpu: &Cuda, case: &Case, numbers: &Numbers) -> Step<Cuda> {
    let layout = case.layout();
    let slots = numbers
        .lists
        .slots(layout.slots(), |row| numbers.slots[row]);
    Step::new(gpu, case, layout, DTYPE, numbers, &slots).unwrap()
}

fn run(gpu: &Cuda, case: &Case, numbers: &Numbers, cache: Bytes<'_>) -> (Vec<u8>, Vec<u8>) {
    let mut step = step(gpu, case, numbers);
    let backend = WgmmaMlaSparse::new(gpu, &case.config(case.page_size, DTYPE)).unwrap();
    step.enqueue(gpu, case, &backend, &mut (), cache).unwrap();
    step.results(gpu).unwrap()
}

/// Uploads the rows to their slots in `to`, which begins at byte `begin` of the cache.
fn place(gpu: &Cuda, case: &Case, numbers: &Numbers, mut to: BytesMut<'_>, begin: usize) {
    let layout = case.layout();
    for (slot, row) in numbers.slots.iter().zip(&numbers.rows) {
        let (page, place) = (slot / case.page_size, slot % case.page_size);
        let at = page * layout.page_stride + place * layout.row_stride - begin;
        // SAFETY: the row lies within `to`, which is borrowed as a whole.
        let to = unsafe { BytesMut::from_raw(to.address() + at as u64, row.len()) };
        gpu.upload(row, to).unwrap();
    }
    let _ = &mut to;
}

/// Makes a cache of NaN but for the rows.
fn cache(gpu: &Cuda, case: &Case, numbers: &Numbers) -> <Cuda as Memory>::Buffer {
    let layout = case.layout();
    let mut buffer = gpu.allocate(layout.pages * layout.page_stride).unwrap();
    let poison = vec![0xff; 64 << 20];
    let mut rest = Cuda::bytes_mut(&mut buffer);
    while !rest.is_empty() {
        let now = rest.len().min(poison.len());
        let (to, behind) = Cuda::split_mut(rest, now);
        gpu.upload(&poison[..now], to).unwrap();
        rest = behind;
    }
    place(gpu, case, numbers, Cuda::bytes_mut(&mut buffer), 0);
    buffer
}

/// Compares a GPU's results with the CPU's in f32, by the tolerances of FlashMLA's tests.
fn assert_close(case: &Case, got: &(Vec<u8>, Vec<u8>), want: &(Vec<u8>, Vec<u8>)) {
    // The kernel rounds probabilities to bf16, a relative 2^-9 at most, or to f16. If rows have
    // scales of their own, it rounds the scaled probabilities, too, 2^-10 in all. Values are up to
    // 1.5, or 4.5 in e4m3.
    let min = match case.kv {
        KvFormat::BF16 => 3e-3,
        _ => 4.5e-3,
    };
    for element in 0..want.0.len() / 4 {
        let got = get(DTYPE, &got.0, element);
        let want = get(DType::F32, &want.0, element);
        let max = (2.01 / 128.0 * want.abs()).max(min);
        assert!(
            (got - want).abs() <= max,
            "{case:?}: out {element}: {got}, not {want}"
        );
    }
    for element in 0..want.1.len() / 4 {
        let [got, want] = [got, want].map(|(_, lse)| get(DType::F32, lse, element));
        let close = got == want || (got - want).abs() <= 8.01 / 65536.0 * want.abs().max(1.0);
        assert!(close, "{case:?}: lse {element}: {got}, not {want}");
    }
}

fn check(gpu: &Cuda, case: &Case, seed: u64) {
    let numbers = Numbers::random(case, &mut rng(seed));
    let cache = cache(gpu, case, &numbers);
    let got = run(gpu, case, &numbers, Cuda::bytes(&cache));
    assert_close(case, &got, &expected(case, &numbers));
}

const FORMATS: [KvFormat; 3] = [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla];

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn lists_with_wrong_entries_anywhere_agree_with_the_cpu() {
    let gpu = &*gpu();
    let mut rng = rng(41);
    for kv in FORMATS {
        for heads in [1, 16, 24, 64, 96, 128] {
            let case = Case {
                page_size: [1, 3, 61, 64, 576][rng.random_range(0..5)],
                pages: rng.random_range(3..90),
                page_slack: 16 * rng.random_range(0..3),
                valid: [0, 1, 4, 8][rng.random_range(0..4)],
                with_counts: rng.random_range(0..2) == 0,
                ..Case::new(
                    kv,
                    heads,
                    rng.random_range(1..6),
                    [1, 63, 500, 2048, 2051, 8192][rng.random_range(0..6)],
                )
            };
            check(gpu, &case, rng.random());
        }
    }
    // Cases with more tokens than SMs, so that a second launch may take some of them, and with
    // whole gaps.
    for kv in FORMATS {
        for (heads, tokens) in [(16, 137), (128, 69)] {
            let case = Case::new(kv, heads, tokens, 300);
            check(gpu, &Case { valid: 0, ..case }, 7);
            check(gpu, &case, 8);
        }
    }
}

/// Tries lists whose ends are found ahead of the walk: CTAs that take several items, whole lists
/// among short and empty ones, and lists of a second cache.
#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn lists_that_end_anywhere_agree_with_the_cpu() {
    let gpu = &*gpu();
    for kv in FORMATS {
        for (heads, tokens) in [(4, 420), (20, 140), (40, 280), (128, 3)] {
            let case = Case {
                second_width: 200,
                ..Case::new(kv, heads, tokens, 500)
            };
            let mut rng = rng(tokens as u64);
            let mut numbers = Numbers::random(&case, &mut rng);
            for list in numbers
                .lists
                .entries
                .chunks_mut(case.width + case.second_width)
            {
                let (first, second) = list.split_at_mut(case.width);
                for list in [first, second] {
                    let end = match rng.random_range(0..4) {
                        0 => list.len(),
                        1 => 0,
                        _ => rng.random_range(0..list.len()),
                    };
                    list[end..].fill(Entry::Wrong(-1));
                }
            }
            let cache = cache(gpu, &case, &numbers);
            let got = run(gpu, &case, &numbers, Cuda::bytes(&cache));
            assert_close(&case, &got, &expected(&case, &numbers));
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn rows_beyond_two_to_the_31_elements_agree_with_the_cpu() {
    let gpu = &*gpu();
    for (kv, heads) in [(KvFormat::BF16, 16), (KvFormat::BF16, 128)] {
        let case = Case {
            pages: (1usize << 31) / (64 * ROW) + 2,
            ..Case::new(kv, heads, 3, 1000)
        };
        check(gpu, &case, 5);
    }
    for kv in [KvFormat::Fp8, KvFormat::Fp8DsMla] {
        let case = Case {
            pages: 4500,
            page_slack: 1 << 20,
            ..Case::new(kv, 64, 3, 1000)
        };
        check(gpu, &case, 6);
    }
}

/// Two pages of addresses, of which the second has memory.
struct HalfMapped {
    base: u64,
    half: usize,
    handle: u64,
}

impl HalfMapped {
    fn new(gpu: &Cuda) -> Self {
        use cudarc::driver::sys;
        gpu.stream().context().bind_to_thread().unwrap();
        // Multiple in which every device allocates memory.
        let half = 2 << 20;
        let (mut base, mut handle) = (0, 0);
        // SAFETY: plain numbers, for which zeros are values: device 0.
        let mut memory: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        memory.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        memory.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let access = sys::CUmemAccessDesc {
            location: memory.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a context is current, and what is passed lives until the calls return.
        unsafe {
            sys::cuMemAddressReserve(&mut base, 2 * half, half, 0, 0)
                .result()
                .unwrap();
            sys::cuMemCreate(&mut handle, half, &memory, 0)
                .result()
                .unwrap();
            sys::cuMemMap(base + half as u64, half, 0, handle, 0)
                .result()
                .unwrap();
            sys::cuMemSetAccess(base + half as u64, half, &access, 1)
                .result()
                .unwrap();
        }
        Self { base, half, handle }
    }
}

impl Drop for HalfMapped {
    fn drop(&mut self) {
        use cudarc::driver::sys;
        // SAFETY: mapped, created and reserved by `new`; the test has waited for all that uses it.
        unsafe {
            let _ = sys::cuMemUnmap(self.base + self.half as u64, self.half);
            let _ = sys::cuMemRelease(self.handle);
            let _ = sys::cuMemAddressFree(self.base, 2 * self.half);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn a_page_0_without_memory_is_never_read() {
    let gpu = &*gpu();
    let memory = HalfMapped::new(gpu);
    for kv in FORMATS {
        for heads in [16, 32, 128] {
            let rows = 64 * kv.row_bytes(MlaDims::R1);
            let case = Case {
                pages: 2,
                first_page: 1,
                page_slack: memory.half - rows,
                valid: 4,
                ..Case::new(kv, heads, 4, 700)
            };
            let numbers = Numbers::random(&case, &mut rng(3));
            let second = memory.base + memory.half as u64;
            // SAFETY: the second page has memory, which nothing else uses.
            let to = unsafe { BytesMut::from_raw(second, memory.half) };
            gpu.upload(&vec![0xff; memory.half], to).unwrap();
            // SAFETY: the second page has memory, which nothing else uses.
            let to = unsafe { BytesMut::from_raw(second, memory.half) };
            place(gpu, &case, &numbers, to, memory.half);
            // SAFETY: no list names the first page, and what no list names is not read: that is
            // what is tested.
            let cache = unsafe { Bytes::from_raw(memory.base, 2 * memory.half) };
            let got = run(gpu, &case, &numbers, cache);
            assert_close(&case, &got, &expected(&case, &numbers));
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn a_captured_step_replays_with_other_lists_and_counts() {
    let gpu = &*gpu();
    for (kv, heads, tokens) in [
        (KvFormat::Fp8DsMla, 16, 5),
        (KvFormat::BF16, 128, 70),
        (KvFormat::Fp8, 40, 140),
    ] {
        let case = Case {
            with_counts: true,
            ..Case::new(kv, heads, tokens, 600)
        };
        let mut rng = rng(15);
        let mut numbers = Numbers::random(&case, &mut rng);
        let cache = cache(gpu, &case, &numbers);
        let backend = WgmmaMlaSparse::new(gpu, &case.config(case.page_size, DTYPE)).unwrap();
        let mut step = step(gpu, &case, &numbers);
        let graph = gpu
            .capture(|gpu| step.enqueue(gpu, &case, &backend, &mut (), Cuda::bytes(&cache)))
            .unwrap();
        for valid in [6, 0, 1, 8] {
            let case = Case { valid, ..case };
            numbers.lists = Lists::random(&case, numbers.rows.len(), &mut rng);
            let end = case.layout().slots();
            let slots = numbers.lists.slots(end, |row| numbers.slots[row]);
            gpu.upload(
                bytemuck::cast_slice(&slots),
                Cuda::bytes_mut(&mut step.lists),
            )
            .unwrap();
            let counts = numbers.lists.counts.as_deref().unwrap();
            let to = Cuda::bytes_mut(step.counts.as_mut().unwrap());
            gpu.upload(bytemuck::cast_slice(counts), to).unwrap();
            // SAFETY: `step` and `cache` hold everything that the capture was given, and only this
            // stream uses it.
            unsafe { graph.replay() }.unwrap();
            let got = step.results(gpu).unwrap();
            assert!(got == run(gpu, &case, &numbers, Cuda::bytes(&cache)));
            assert_close(&case, &got, &expected(&case, &numbers));
        }
    }
}

/// Tries every kernel: each takes another number of heads.
#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn two_caches_and_sinks_agree_with_the_cpu() {
    let gpu = &*gpu();
    let mut rng = rng(33);
    for kv in FORMATS {
        for (heads, tokens) in [(16, 3), (32, 140), (64, 9), (128, 70)] {
            for (width, second_width) in [(128, 2048), (700, 1)] {
                let case = Case {
                    second_width,
                    with_sinks: true,
                    with_counts: rng.random_range(0..2) == 0,
                    page_size: [1, 61, 64][rng.random_range(0..3)],
                    valid: [1, 6, 8][rng.random_range(0..3)],
                    ..Case::new(kv, heads, tokens, width)
                };
                check(gpu, &case, rng.random());
            }
        }
    }
}

// A replay of a graph decides on the device which requests are dense.
#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn dense_requests_beside_listed_ones_agree_with_the_cpu_in_replays() {
    const BOUND: usize = 200;
    let gpu = &*gpu();
    for (kv, heads) in [
        (KvFormat::Fp8DsMla, 16),
        (KvFormat::Fp8DsMla, 100),
        (KvFormat::BF16, 128),
    ] {
        let case = Case::new(kv, heads, 30, 300);
        let mut rng = rng(21);
        let mut numbers = Numbers::random(&case, &mut rng);
        // A row for every slot.
        numbers.slots = (0..case.pages * case.page_size).collect();
        let more = numbers.slots.iter().map(|_| random_row(kv, &mut rng));
        numbers.rows = more.collect();
        let cache = cache(gpu, &case, &numbers);
        let backend = WgmmaMlaSparse::new(gpu, &case.config(case.page_size, DTYPE)).unwrap();
        let mut step = step(gpu, &case, &numbers);
        step.dense_within = BOUND;
        let graph = gpu
            .capture(|gpu| step.enqueue(gpu, &case, &backend, &mut (), Cuda::bytes(&cache)))
            .unwrap();
        for _ in 0..3 {
            numbers.lists = Lists::random(&case, numbers.rows.len(), &mut rng);
            let table =
                (0..case.tokens * MAX_PAGES).map(|_| rng.random_range(0..case.pages as i32));
            let table: Vec<i32> = table.collect();
            let lens = (0..case.tokens).map(|_| rng.random_range(0..=MAX_LEN as i32));
            let mut lens: Vec<i32> = lens.collect();
            lens[..3].copy_from_slice(&[BOUND as i32, BOUND as i32 + 1, 0]);
            let slots = numbers.lists.slots(case.layout().slots(), |row| row);
            let [to_table, to_lens, _] = &mut step.requests;
            for (ints, to) in [
                (&slots, &mut step.lists),
                (&table, to_table),
                (&lens, to_lens),
            ] {
                gpu.upload(bytemuck::cast_slice(ints), Cuda::bytes_mut(to))
                    .unwrap();
            }
            // SAFETY: `step` and `cache` hold everything that the capture was given, and only this
            // stream uses it.
            unsafe { graph.replay() }.unwrap();
            let got = step.results(gpu).unwrap();
            // The CPU has lists of all that a dense request sees.
            for token in (0..case.tokens).filter(|token| lens[*token] as usize <= BOUND) {
                let list = &mut numbers.lists.entries[token * case.width..][..case.width];
                for (position, entry) in list.iter_mut().enumerate() {
                    let page = table[token * MAX_PAGES + position / case.page_size] as usize;
                    *entry = match position < lens[token] as usize {
                        true => Entry::Row(page * case.page_size + position % case.page_size),
                        false => Entry::Wrong(-1),
                    };
                }
            }
            assert_close(&case, &got, &expected(&case, &numbers));
        }
    }
}
