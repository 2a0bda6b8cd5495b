//! Checks that the driver loaded the code that was compiled for this GPU. This is machine code if
//! the build made it, and otherwise code from the family's PTX.

use mla_kernels::device::Buffer;
use mla_kernels::{Cuda, FAMILIES};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, Query, SlotLists, StepLimits,
};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Capability, Problem};
use mla_runtime::tensor::{ArrayRef, BlockTable, CacheLayout, CacheRef, Layout};

use crate::common::{gpu, upload, upload_all};
use crate::tensors::{On, Tensor};

const HEADS: usize = 16;
const PAGE: usize = 64;

/// Makes a tensor on the device that nothing reads.
fn tensor(gpu: &Cuda, shape: [usize; 3]) -> On<Cuda> {
    let layout = Layout::contiguous(DType::BF16, shape);
    On::new(gpu, &Tensor::poison(layout, 0)).unwrap()
}

/// A kernel, and the GPUs of its machine code and of its PTX.
type Loaded = (Option<String>, [Capability; 2]);

/// Returns the kernels of a decode of one token. Sparse ones have a list of `list` slots.
fn decode<B: DecodeBackend<Device = Cuda>>(
    gpu: &Cuda,
    format: KvFormat,
    list: Option<usize>,
) -> Vec<Loaded> {
    let dims = MlaDims::R1;
    let problem = Problem::new(dims, HEADS as u32, DType::BF16)
        .with_kv_format(format)
        .with_sparse(list.is_some());
    let backend = B::new(gpu, &LayerConfig::new(problem, 0.1)).unwrap();
    let limits = StepLimits::new(1, 1, 1).with_decode_query_len(1);
    let mut state = backend.state(gpu, &limits).unwrap();
    let mut metadata = backend.metadata(gpu, &limits).unwrap();
    let (latent, row) = (dims.latent as usize, dims.row() as usize);
    let query = tensor(gpu, [1, HEADS, row]);
    let mut out = tensor(gpu, [1, HEADS, latent]);
    let layout = CacheLayout::contiguous(dims, format, 1, PAGE);
    let cache = upload(gpu, &vec![0; layout.pages * layout.page_stride]).unwrap();
    let (table, lens, starts) = (
        upload_all(gpu, &[0i32]),
        upload_all(gpu, &[64i32]),
        upload_all(gpu, &[0i32, 1]),
    );
    let slots = upload_all(gpu, &vec![0i32; list.unwrap_or(0)]);
    let batch = || {
        fn array(buffer: &Buffer, len: usize) -> ArrayRef<'_, Cuda, i32> {
            ArrayRef::new(buffer.bytes(), len).unwrap()
        }
        let table = BlockTable::new(array(&table, 1), 1, 1).unwrap();
        DecodeBatch::new(table, (array(&lens, 1), PAGE), (array(&starts, 2), 1))
    };
    backend
        .prepare(gpu, &batch(), &mut state, &mut metadata)
        .unwrap();
    let graph = gpu
        .capture(|gpu| {
            let query = Query::Split {
                latent: query.read()?.narrow(2, 0..latent)?,
                rope: query.read()?.narrow(2, latent..row)?,
            };
            let lists = list.map(|width| {
                let slots = ArrayRef::new(slots.bytes(), width)?;
                Ok::<_, mla_runtime::Error>(SlotLists::new(slots, width))
            });
            let cache = CacheRef::new(cache.bytes(), layout)?;
            let call = DecodeCall::new(query, cache, batch(), Output::Plain(out.write()?))
                .with_slots(lists.transpose()?);
            // SAFETY: there is one request, whose numbers are those of the tensors. Nothing is run.
            unsafe { backend.decode(gpu, call, &mut state, &metadata) }
        })
        .unwrap();
    gpu.loaded_kernels(&graph).unwrap()
}

/// Returns the kernels of a prefill of one request.
fn prefill<B: PrefillBackend<Device = Cuda>>(gpu: &Cuda) -> Vec<Loaded> {
    const TOKENS: usize = 128;
    let head = MlaDims::R1.head;
    let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
    let problem = Problem::new(MlaDims::R1, HEADS as u32, DType::BF16);
    let backend = B::new(gpu, &LayerConfig::new(problem, 0.1)).unwrap();
    let limits = StepLimits::new(1, TOKENS, 2).with_context_rows(TOKENS);
    let mut state = backend.state(gpu, &limits).unwrap();
    let mut metadata = backend.metadata(gpu, &limits).unwrap();
    let lens = [TOKENS as u32];
    backend
        .prepare(
            gpu,
            &PrefillBatch::new(&lens, &lens),
            &mut state,
            &mut metadata,
        )
        .unwrap();
    let query = tensor(gpu, [TOKENS, HEADS, qk]);
    let (keys, shared) = (
        tensor(gpu, [TOKENS, HEADS, nope]),
        tensor(gpu, [TOKENS, 1, rope]),
    );
    let (values, mut out) = (
        tensor(gpu, [TOKENS, HEADS, v]),
        tensor(gpu, [TOKENS, HEADS, v]),
    );
    let starts = upload_all(gpu, &[0, TOKENS as i32]);
    let graph = gpu
        .capture(|gpu| {
            let starts = || ArrayRef::new(starts.bytes(), 2);
            let call = PrefillCall::new(
                query.read()?,
                Keys::Split {
                    nope: keys.read()?,
                    rope: shared.read()?,
                },
                values.read()?,
                Output::Plain(out.write()?),
                (starts()?, TOKENS),
                (starts()?, TOKENS),
            );
            // SAFETY: there is one request, whose numbers are those of the tensors. Nothing is run.
            unsafe { backend.prefill(gpu, call, &mut state, &metadata) }
        })
        .unwrap();
    gpu.loaded_kernels(&graph).unwrap()
}

/// Compares kernels with the build's record of their family.
fn check(gpu: &Cuda, family: &str, kernels: &[Loaded]) {
    let compiled = FAMILIES.iter().find(|it| it.name == family).unwrap();
    let here = gpu.gpu().capability;
    assert!(!kernels.is_empty(), "{family}: no kernel was launched");
    // This is `mla::sm80::decode::…`, mangled.
    let namespace = format!("3mla{}{family}", family.len());
    for kernel in kernels {
        let (symbol, [machine_code, ptx]) = kernel;
        let symbol = symbol.as_deref().unwrap();
        assert!(symbol.contains(&namespace), "{family}: {kernel:?}");
        match compiled.machine_code_on(here) {
            Some((target, of)) => {
                assert_eq!(*machine_code, of, "{target}: {kernel:?}");
                assert!(*ptx <= of, "{target}: {kernel:?}");
            }
            None => {
                let (target, of) = compiled.ptx_on(here).expect("code that this GPU runs");
                assert_eq!(*machine_code, here, "{target}: {kernel:?}");
                assert_eq!(*ptx, of, "{target}: {kernel:?}");
            }
        }
    }
}

#[cfg(feature = "sm80")]
#[test]
#[ignore = "needs a GPU: cargo test -r --features sm80 --test gpu -- --ignored loaded"]
fn of_the_portable_family_the_code_for_this_gpu_is_loaded() {
    use mla_kernels::backends::sm80::{MmaAttn, MmaMla, MmaMlaScaled, MmaMlaSparse};

    let gpu = &*gpu();
    check(gpu, "sm80", &decode::<MmaMla>(gpu, KvFormat::BF16, None));
    for format in [KvFormat::Fp8DsMla, KvFormat::Fp8PerToken] {
        check(gpu, "sm80", &decode::<MmaMlaScaled>(gpu, format, None));
    }
    check(
        gpu,
        "sm80",
        &decode::<MmaMlaSparse>(gpu, KvFormat::BF16, Some(64)),
    );
    check(gpu, "sm80", &prefill::<MmaAttn>(gpu));
}

#[cfg(feature = "sm90")]
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored loaded"]
fn of_the_hopper_family_machine_code_is_loaded() {
    use mla_kernels::backends::sm90::{WgmmaAttn, WgmmaMla, WgmmaMlaSparse};

    let gpu = &*gpu();
    check(gpu, "sm90", &decode::<WgmmaMla>(gpu, KvFormat::BF16, None));
    check(
        gpu,
        "sm90",
        &decode::<WgmmaMlaSparse>(gpu, KvFormat::BF16, Some(64)),
    );
    check(gpu, "sm90", &prefill::<WgmmaAttn>(gpu));
}
