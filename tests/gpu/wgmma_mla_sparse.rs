//! Compares WGMMA_MLA_SPARSE on a Hopper GPU with the f64 reference, on more problems than the
//! conformance tests, and as a raw call.

use mla_conformance::{DecodeCase, GroupScales, Trial};
use mla_kernels::Cuda;
use mla_kernels::backends::sm90::WgmmaMlaSparse;
use mla_kernels::raw;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use rand::RngExt as _;

use crate::calls::dims_of;
use crate::common::{gpu, rng};
use crate::stress::cases::{Draw, Listed, Lists, rotary_keys};
use crate::stress::machine::{Machine, Memory, Region};
use crate::tensors::pick;

const FORMATS: [KvFormat; 3] = [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla];

/// Rows with a rotary part and without.
const ROWS: [MlaDims; 2] = [MlaDims::R1, dims_of(512, 0)];

/// Returns each of `values` with both kinds of rows.
fn with_rows<T: Copy>(values: impl IntoIterator<Item = T>) -> impl Iterator<Item = (T, MlaDims)> {
    let values = values.into_iter();
    values.flat_map(|value| ROWS.map(|dims| (value, dims)))
}

/// Makes a request with this number of query tokens, each with a list of `width` of its 700 slots.
fn case(kv: KvFormat, heads: u32, tokens: usize, width: usize) -> DecodeCase {
    let problem = Problem::new(MlaDims::R1, heads, DType::BF16)
        .with_kv_format(kv)
        .with_sparse(true)
        .with_page_size(64)
        .with_query_len(QueryLen::Ragged);
    DecodeCase {
        query_lens: vec![tokens],
        list_width: width,
        ..DecodeCase::new(problem, &[700])
    }
}

fn check(gpu: &Cuda, case: &DecodeCase) {
    if let Err(failure) = case.check::<WgmmaMlaSparse>(gpu) {
        panic!("{case:?}: {failure}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn lists_with_wrong_entries_anywhere_agree_with_the_reference() {
    let gpu = &*gpu();
    let mut rng = rng(41);
    for (kv, dims) in with_rows(FORMATS) {
        for heads in [1, 8, 16, 24, 64, 96, 128] {
            let widths = [1, 63, 500, 2048, 2051, 8192];
            let mut case = case(kv, heads, rng.random_range(1..6), pick(&mut rng, &widths));
            case.problem.dims = dims;
            case.problem.page_size = pick(&mut rng, &[1, 3, 61, 64, 576]);
            case.with_counts = rng.random_bool(0.5);
            case.gap = pick(&mut rng, &[0, 8]);
            // In some cases, the rows of the cache are further apart.
            case.trial = pick(&mut rng, &[Trial::Once, Trial::ExactlyAligned]);
            case.seed = rng.random();
            check(gpu, &case);
        }
        // Some cases have more tokens than SMs, so that a second launch may take some of them. Some
        // have no slots.
        for (heads, tokens) in [(16, 137), (128, 69)] {
            for len in [0, 700] {
                let mut case = case(kv, heads, tokens, 300);
                case.problem.dims = dims;
                case.seq_lens = vec![len];
                check(gpu, &case);
            }
        }
        // The ends of these lists are found before they are processed. CTAs take several items, and
        // there are lists of a second cache.
        for (heads, tokens) in [(4, 420), (20, 140), (40, 280), (128, 3)] {
            let mut case = case(kv, heads, tokens, 500);
            case.problem.dims = dims;
            case.second_width = 200;
            check(gpu, &case);
        }
    }
    for (heads, dims) in with_rows([16, 128]) {
        let mut case = case(KvFormat::Fp8DsMla, heads, 3, 600);
        case.problem.dims = dims;
        // Scales of rows may be any numbers.
        case.group_scales = Some(GroupScales {
            exponents: [[0, -3, 2, 1], [-1, 0, 0, 2]],
            factor: 1.37,
            queries: 0,
            lead: 0.0,
        });
        check(gpu, &case);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn rows_beyond_two_to_the_31_elements_agree_with_the_reference() {
    let gpu = &*gpu();
    for (kv, heads) in [
        (KvFormat::BF16, 16),
        (KvFormat::BF16, 128),
        (KvFormat::Fp8, 64),
        (KvFormat::Fp8DsMla, 64),
    ] {
        check(
            gpu,
            &DecodeCase {
                unused_pages: (1 << 32) / (64 * kv.row_bytes(MlaDims::R1)) + 2,
                ..case(kv, heads, 3, 1000)
            },
        );
    }
}

/// Two pages of addresses, of which only the second has memory.
struct HalfMapped {
    base: u64,
    half: usize,
    handle: u64,
}

impl HalfMapped {
    fn new(gpu: &Cuda) -> Self {
        use cudarc::driver::sys;
        gpu.stream().context().bind_to_thread().unwrap();
        // Every device allocates memory in multiples of this.
        let half = 2 << 20;
        let (mut base, mut handle) = (0, 0);
        // SAFETY: all fields of the struct are numbers. Zeros are valid, and mean device 0.
        let mut memory: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        memory.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        memory.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let access = sys::CUmemAccessDesc {
            location: memory.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a context is current, and all arguments live until the calls return.
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
        // SAFETY: `new` reserved, created and mapped this memory, and the test has waited for
        // everything that uses it.
        unsafe {
            let _ = sys::cuMemUnmap(self.base + self.half as u64, self.half);
            let _ = sys::cuMemRelease(self.handle);
            let _ = sys::cuMemAddressFree(self.base, 2 * self.half);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn a_page_0_without_memory_is_never_read() {
    let gpu = &*gpu();
    let (machine, mapped) = (Machine::new(gpu.stream().clone()), HalfMapped::new(gpu));
    let (mut rng, mut memory) = (rng(3), Memory::default());
    for kv in FORMATS {
        for heads in [16, 32, 128] {
            // The lists have only slots of the second page, among entries that no cache has.
            let wrong = [-1, i32::MIN, i32::MAX, -123_456, 128, 129];
            let entries = (0..4 * 700).map(|_| match rng.random_bool(0.5) {
                true => rng.random_range(64..128),
                false => pick(&mut rng, &wrong),
            });
            let listed = Listed {
                heads,
                pages: 2,
                first: Lists {
                    width: 700,
                    entries: entries.collect(),
                    counts: None,
                },
                second: None,
            };
            let mut draw = Draw::new(&machine, &mut rng, &mut memory);
            let call = draw.sparse_of(DType::BF16, kv, &listed);
            let (mut params, bytes) = (call.params, 64 * kv.row_bytes(MlaDims::R1));
            let page = |address| Region { address, bytes };
            let second = mapped.base + mapped.half as u64;
            machine.copy(page(params.cache as u64 + bytes as u64), page(second));
            params.cache = mapped.base as *const _;
            params.cache_rope = rotary_keys(kv, MlaDims::R1, params.cache);
            params.cache_page_stride = mapped.half as i64;
            params.cache_rope_page_stride = mapped.half as i64;
            let [whole, half] = [call.params, params].map(|params| {
                // SAFETY: no list names the first page, and the test checks that only listed rows
                // are read. All other memory lives as long as the call.
                call.launched(&machine, &params, |params| unsafe {
                    raw::mla_sparse_sm90(params, gpu.raw_stream())
                })
            });
            assert!(whole == half, "{kv}, {heads} heads");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90 --test gpu -- --ignored wgmma_mla_sparse"]
fn queries_have_the_same_bits_with_and_without_gaps() {
    let gpu = &*gpu();
    let machine = Machine::new(gpu.stream().clone());
    let (mut rng, mut memory) = (rng(4), Memory::default());
    for kv in FORMATS {
        for heads in [16, 128] {
            let listed = Listed {
                heads,
                pages: 2,
                first: Lists {
                    width: 300,
                    entries: (0..3 * 300).map(|at| at % 128).collect(),
                    counts: None,
                },
                second: None,
            };
            let mut draw = Draw::new(&machine, &mut rng, &mut memory);
            let call = draw.sparse_of(DType::BF16, kv, &listed);
            let mut close = call.params;
            let parts = [close.q_latent, close.q_rope];
            [close.q_latent, close.q_rope] = machine.without_gaps(&mut memory, parts, 3 * heads);
            let heads = i64::from(heads);
            (close.q_latent_token_stride, close.q_latent_head_stride) = (heads * 512, 512);
            (close.q_rope_token_stride, close.q_rope_head_stride) = (heads * 64, 64);
            let [gaps, close] = [call.params, close].map(|params| {
                // SAFETY: the parameters describe memory that lives as long as the call.
                call.launched(&machine, &params, |params| unsafe {
                    raw::mla_sparse_sm90(params, gpu.raw_stream())
                })
            });
            assert!(gaps == close, "{kv}, {heads} heads");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn a_captured_step_replays_with_other_lists_and_counts() {
    let gpu = &*gpu();
    for (kv, heads, tokens) in [
        (KvFormat::Fp8DsMla, 16, 5),
        (KvFormat::BF16, 128, 70),
        (KvFormat::Fp8, 40, 140),
        (KvFormat::BF16, 8, 32),
    ] {
        for (seed, dims) in with_rows(15..18) {
            let mut case = case(kv, heads, tokens, 600);
            case.problem.dims = dims;
            case.with_counts = true;
            case.trial = Trial::Replayed;
            case.seed = seed;
            check(gpu, &case);
        }
    }
}

/// Tries every kernel, since each takes another number of heads.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn two_caches_and_sinks_agree_with_the_reference() {
    let gpu = &*gpu();
    let mut rng = rng(33);
    for (kv, dims) in with_rows(FORMATS) {
        for (heads, tokens) in [(16, 3), (32, 140), (64, 9), (128, 70)] {
            for (width, second_width) in [(128, 2048), (700, 1)] {
                let mut case = case(kv, heads, tokens, width);
                case.problem.dims = dims;
                case.second_width = second_width;
                case.with_sinks = true;
                case.with_counts = rng.random_bool(0.5);
                case.problem.page_size = pick(&mut rng, &[1, 61, 64]);
                case.seed = rng.random();
                check(gpu, &case);
            }
        }
    }
}

// A replay of a graph decides on the device which requests are dense.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored mla_sparse"]
fn dense_requests_beside_listed_ones_agree_with_the_reference_in_replays() {
    const BOUND: usize = 200;
    let gpu = &*gpu();
    let mut rng = rng(21);
    for (kv, heads) in [
        (KvFormat::Fp8DsMla, 16),
        (KvFormat::Fp8DsMla, 100),
        (KvFormat::BF16, 128),
    ] {
        for seed in 0..3 {
            let mut seq_lens: Vec<usize> = (0..30).map(|_| rng.random_range(0..=400)).collect();
            seq_lens[..3].copy_from_slice(&[BOUND, BOUND + 1, 0]);
            check(
                gpu,
                &DecodeCase {
                    query_lens: vec![1; 30],
                    seq_lens,
                    dense_within: BOUND,
                    trial: Trial::Replayed,
                    seed,
                    ..case(kv, heads, 30, 300)
                },
            );
        }
    }
}
