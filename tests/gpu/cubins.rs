//! A launcher that knows only a kernel's cubin and its row of `code.json`. It links none of the
//! kernel's code, and works a launch out of the row (`launcher`).
//!
//! `cargo xtask cubins` makes the folder, which `MLA_CUBINS` names.

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};

use cudarc::driver::sys::{CUfunction_attribute_enum as Function, CUlaunchAttributeID as Id};
use cudarc::driver::{result, sys};
use half::bf16;
use mla_kernels::Cuda;
#[cfg(feature = "sm90")]
use mla_kernels::raw::MlaSparseParams;
#[cfg(any(feature = "sm80", feature = "sm90"))]
use mla_kernels::raw::{self, MlaStatus};
#[cfg(feature = "sm90")]
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::tensor::Memory;
use serde_json::Value;

#[cfg(feature = "sm90")]
use crate::calls;
#[cfg(any(feature = "sm80", feature = "sm90"))]
use crate::common::download;
use crate::common::{download_all, gpu, upload, upload_all};

/// Returns the fields of a call that a description takes under the same names, behind a prefix.
#[cfg(any(feature = "sm80", feature = "sm90"))]
macro_rules! fields {
    ($prefix:literal, $call:expr; $($field:ident)*) => {
        $crate::cubins::numbers([$((concat!($prefix, stringify!($field)), $call.$field as i64),)*])
    };
}

#[cfg(any(feature = "sm80", feature = "sm90"))]
mod decode;
#[cfg(feature = "sm90")]
mod indexer;
#[path = "../launcher/mod.rs"]
mod launcher;
#[cfg(any(feature = "sm80", feature = "sm90"))]
mod prefill;

use launcher::{Numbers, TensorMap, launch, numbers};

fn encode(map: &TensorMap) -> sys::CUtensorMap {
    use sys::CUtensorMapDataType_enum as Type;
    use sys::CUtensorMapFloatOOBfill_enum as Fill;
    let kind = match map.kind.as_str() {
        "bf16" => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f16" => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "f32" => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "u8" => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        other => panic!("no type is called {other:?}"),
    };
    let [swizzle, promotion, fill] = &map.modes;
    assert_eq!(promotion, 128);
    let swizzle = match swizzle.as_u64() {
        Some(0) => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_NONE,
        Some(64) => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_64B,
        Some(128) => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => panic!("no swizzle has {swizzle} bytes"),
    };
    let fill = match fill.as_str() {
        Some("zero") => Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        Some("nan") => Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
        _ => panic!("no value outside is called {fill}"),
    };
    let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
    let steps = vec![1u32; map.boxes.len()];
    // SAFETY: the arrays have an element for each of the axes, that of strides one less. The
    // tensor is not read here.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut encoded,
            kind,
            map.boxes.len() as u32,
            map.address as *mut c_void,
            map.extents.as_ptr(),
            map.strides.as_ptr(),
            map.boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            fill,
        )
    };
    result.result().unwrap();
    encoded
}

/// Returns the folder of cubins, and its description.
fn manifest() -> (PathBuf, Value) {
    let folder = std::env::var_os("MLA_CUBINS").map_or("target/cubins".into(), PathBuf::from);
    let text = std::fs::read(folder.join("code.json")).unwrap_or_else(|error| {
        panic!(
            "{}: {error}; `cargo xtask cubins` makes it, MLA_CUBINS names it",
            folder.display()
        )
    });
    (folder, serde_json::from_slice(&text).unwrap())
}

/// Two buffers: one for the launch by the description, and one for the library's.
#[cfg(any(feature = "sm80", feature = "sm90"))]
fn pair(gpu: &Cuda, bytes: usize, byte: u8) -> [Buffer; 2] {
    [(); 2].map(|()| upload(gpu, &vec![byte; bytes]).unwrap())
}

/// Checks that the library has launched, and that both launches have written the same bytes.
#[cfg(any(feature = "sm80", feature = "sm90"))]
fn agree(gpu: &Cuda, call: &str, library: MlaStatus, written: &[&[Buffer; 2]]) {
    // SAFETY: the status was returned by a function of `raw`.
    let launched = unsafe { raw::check("launch", library) };
    launched.unwrap_or_else(|error| panic!("{call}: {error}"));
    gpu.synchronize().unwrap();
    for [own, other] in written {
        let [own, other] = [own, other].map(|it| download(gpu, it).unwrap());
        assert!(
            own.windows(2).any(|it| it[0] != it[1]),
            "{call}: nothing written"
        );
        assert!(own == other, "{call}");
    }
}

/// Launches the kernel of a source whose row describes this call.
fn run(
    gpu: &Cuda,
    (folder, manifest): &(PathBuf, Value),
    [source, call]: [&str; 2],
    given: &Numbers,
) {
    let capability = gpu.gpu().capability;
    let own = format!("sm_{}{}", capability.major, capability.minor);
    let file = manifest["files"].as_array().unwrap().iter().find(|file| {
        let target = file["target"]
            .as_str()
            .unwrap()
            .trim_end_matches(['a', 'f']);
        file["source"] == source && target == own
    });
    let file = file.unwrap_or_else(|| panic!("no cubin of {source} for {own}"));
    let kernels = file["kernels"].as_array().unwrap().iter();
    let mut fitting = kernels.filter(|kernel| {
        let when = kernel["launch"]["when"].as_str();
        when.is_some_and(|when| when.starts_with(call))
    });
    let kernel = fitting
        .next()
        .unwrap_or_else(|| panic!("{source}: no kernel for {call:?}"));
    let mut launch = launch(kernel, given);
    let path: &Path = &folder.join(file["file"].as_str().unwrap());
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let entry = CString::new(kernel["entry"].as_str().unwrap()).unwrap();
    for map in &launch.maps {
        let own = &mut launch.parameters[map.parameter][map.offset..];
        own[..128].copy_from_slice(bytemuck::cast_slice(&encode(map).opaque));
    }
    let mut parameters: Vec<*mut c_void> = launch
        .parameters
        .iter_mut()
        .map(|bytes| bytes.as_mut_ptr().cast())
        .collect();
    let mut attributes = Vec::new();
    let mut attribute = |id, value| {
        attributes.push(sys::CUlaunchAttribute {
            id,
            pad: [0; 4],
            value,
        });
    };
    let [x, y, z] = launch.cluster;
    if [x, y, z] != [1; 3] {
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
    }
    if launch.dependent {
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.programmaticStreamSerializationAllowed = 1;
        attribute(
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            value,
        );
    }
    let config = sys::CUlaunchConfig {
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.block[0],
        blockDimY: launch.block[1],
        blockDimZ: launch.block[2],
        sharedMemBytes: launch.shared,
        hStream: gpu.raw_stream().cast(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    gpu.bind().unwrap();
    let module = result::module::load(path).unwrap();
    // SAFETY: the module is loaded, and the entry is one of its kernels, or there is an error. Each
    // parameter has the size that the cubin states. The memory that parameters point to belongs to
    // the caller. It lives until the device has finished the launch, which is waited for here.
    unsafe {
        let function = result::module::get_function(module, entry).unwrap();
        // More than 48 KB have to be asked for.
        let shared = Function::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let asked = sys::cuFuncSetAttribute(function, shared, launch.shared as i32);
        asked.result().unwrap();
        let launched = sys::cuLaunchKernelEx(
            &config,
            function,
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        );
        launched.result().unwrap();
        gpu.synchronize().unwrap();
        result::module::unload(module).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn kernels_run_by_their_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let (tokens, heads) = (70usize, 33usize);
    let from: Vec<f32> = (0..tokens * heads).map(|i| i as f32 / 8.0).collect();
    let source = upload_all(gpu, &from);
    for heads_first in [0, 1] {
        let target = upload(gpu, &vec![0xff; from.len() * 4]).unwrap();
        let rows = if heads_first == 1 { tokens } else { heads };
        let given = numbers([
            ("p.from", at(&source)),
            ("p.to", at(&target)),
            ("p.from_row_stride", rows as i64),
            ("p.to_head_stride", tokens as i64),
            ("p.tokens", tokens as i64),
            ("p.heads", heads as i64),
            ("p.heads_first", heads_first),
            ("p.unit", 2f32.to_bits().into()),
        ]);
        let call = format!("p.heads_first is {heads_first}");
        run(gpu, &manifest, ["cuda/all/lse.cu", &call], &given);
        for (at, value) in download_all::<_, f32>(gpu, &target).into_iter().enumerate() {
            let (head, token) = (at / tokens, at % tokens);
            let place = [token * heads + head, at][heads_first as usize];
            assert_eq!(value, 2.0 * from[place], "head {head}, token {token}");
        }
    }

    // In e4m3, 0x38 is 1, 0x40 is 2, and 0xb8 is -1.
    let (rows, columns) = (5usize, 24usize);
    let codes: Vec<u8> = (0..rows * columns)
        .map(|i| [0x38, 0x40, 0xb8][i % 3])
        .collect();
    let codes_on_gpu = upload_all(gpu, &codes);
    let scale = upload_all(gpu, &[3f32]);
    let out = upload(gpu, &vec![0xff; codes.len() * 4]).unwrap();
    let given = numbers([
        ("p.codes", at(&codes_on_gpu)),
        ("p.scales", at(&scale)),
        ("p.out", at(&out)),
        ("p.out_row_stride", columns as i64),
        ("p.rows", rows as i64),
        ("p.columns", columns as i64),
        ("p.first_row", 0),
        ("p.dtype", 3),
    ]);
    let call = "p.dtype is MLA_DTYPE_F32; p.columns is a multiple of 8";
    run(gpu, &manifest, ["cuda/all/dequantize.cu", call], &given);
    let expected: Vec<f32> = (0..codes.len()).map(|i| [3.0, 6.0, -3.0][i % 3]).collect();
    assert_eq!(download_all::<_, f32>(gpu, &out), expected);
}

type Buffer = <Cuda as Memory>::Buffer;

/// Numbers of this GPU that launches depend on: SMs, bytes of L2, and maximum bytes of shared
/// memory of a CTA and of an SM.
#[cfg(any(feature = "sm80", feature = "sm90"))]
fn device(gpu: &Cuda) -> [i64; 4] {
    use sys::CUdevice_attribute_enum as Attribute;
    let context = gpu.stream().context();
    [
        Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    ]
    .map(|it| context.attribute(it).unwrap().into())
}

const LATENT: usize = 512;
const ROPE: usize = 64;

/// A bf16 tensor of small numbers whose products add up exactly, and its values.
fn small(gpu: &Cuda, elements: usize, seed: usize) -> (Buffer, Vec<f64>) {
    let values = (0..elements).map(|i| ((i * 7 + i / 64 * 5 + seed) % 9) as f32 / 4.0 - 1.0);
    let values: Vec<bf16> = values.map(bf16::from_f32).collect();
    let buffer = upload_all(gpu, &values);
    (buffer, values.iter().map(|value| value.to_f64()).collect())
}

fn at(buffer: &Buffer) -> i64 {
    buffer.address() as i64
}

#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn copies_and_merges_run_by_their_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let from: Vec<f32> = (0..30u8).map(f32::from).collect();
    let from_on_gpu = upload_all(gpu, &from);
    let to = upload(gpu, &[0xff; 30 * 4]).unwrap();
    let given = numbers([
        ("p.from", at(&from_on_gpu)),
        ("p.to", at(&to)),
        ("p.shape[0]", 2),
        ("p.shape[1]", 3),
        ("p.shape[2]", 5),
        ("p.from_strides[0]", 15),
        ("p.from_strides[1]", 5),
        ("p.from_strides[2]", 1),
        ("p.to_strides[0]", 1),
        ("p.to_strides[1]", 2),
        ("p.to_strides[2]", 6),
    ]);
    let call = "in units of 4 bytes, of which p.units is at most";
    run(gpu, &manifest, ["cuda/all/copy.cu", call], &given);
    for (place, value) in download_all::<_, f32>(gpu, &to).into_iter().enumerate() {
        let [i, j, k] = [place % 2, place / 2 % 3, place / 6];
        assert_eq!(value, from[i * 15 + j * 5 + k]);
    }

    // Three rows of two heads with five columns, of which the second goes nowhere.
    let places = upload_all(gpu, &[3i64, -1, 0]);
    let to = upload(gpu, &[0; 4 * 10 * 4]).unwrap();
    let given = numbers([
        ("p.from", at(&from_on_gpu)),
        ("p.places", at(&places)),
        ("p.to", at(&to)),
        ("p.to_rows", 4),
        ("rows", 3),
        ("p.heads", 2),
        ("p.width", 5),
        ("p.from_strides[0]", 10),
        ("p.from_strides[1]", 5),
        ("p.from_strides[2]", 1),
        ("p.to_strides[0]", 10),
        ("p.to_strides[1]", 5),
        ("p.to_strides[2]", 1),
    ]);
    run(gpu, &manifest, ["cuda/all/copy_rows.cu", call], &given);
    let copied = download_all::<_, f32>(gpu, &to);
    assert_eq!((&copied[..10], &copied[30..]), (&from[20..], &from[..10]));
    assert_eq!(copied[10..30], [0.0; 20]);

    let (tokens, heads, width) = (37usize, 9usize, 40usize);
    let results = [1, 2].map(|seed| {
        let value = |i: usize| ((i * 7 + seed) % 11) as f32 / 4.0;
        let out: Vec<f32> = (0..tokens * heads * width).map(value).collect();
        let lse: Vec<f32> = (0..tokens * heads).map(value).collect();
        (out, lse)
    });
    let [a, b] = &results;
    let buffers = [&a.0, &a.1, &b.0, &b.1].map(|values| upload_all(gpu, values));
    let [out, lse, other, other_lse] = &buffers;
    let rows = (heads * width) as i64;
    let given = numbers([
        ("p.out", at(out)),
        ("p.other", at(other)),
        ("p.lse", at(lse)),
        ("p.other_lse", at(other_lse)),
        ("p.out_token_stride", rows),
        ("p.out_head_stride", width as i64),
        ("p.other_token_stride", rows),
        ("p.other_head_stride", width as i64),
        ("p.lse_head_stride", tokens as i64),
        ("p.other_lse_head_stride", tokens as i64),
        ("p.tokens", tokens as i64),
        ("p.heads", heads as i64),
        ("p.width", width as i64),
        ("p.dtype", 3),
    ]);
    let call = "p.dtype is MLA_DTYPE_F32; p.width is a multiple of 8";
    run(gpu, &manifest, ["cuda/all/merge.cu", call], &given);
    let [merged, merged_lse] = [out, lse].map(|buffer| download_all::<_, f32>(gpu, buffer));
    for (place, value) in merged.iter().enumerate() {
        let [token, head] = [place / width / heads, place / width % heads];
        let of = head * tokens + token;
        let [x, y] = [a.1[of], b.1[of]].map(|lse| f64::from(lse).exp());
        let expected = (x * f64::from(a.0[place]) + y * f64::from(b.0[place])) / (x + y);
        assert!(
            (f64::from(*value) - expected).abs() < 1e-5,
            "{place}: {value}, not {expected}"
        );
        assert!((f64::from(merged_lse[of]) - (x + y).ln()).abs() < 1e-5);
    }
}

#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn a_gemm_that_is_launched_as_a_dependent_runs_by_its_description_alone() {
    let gpu = &*gpu();
    let (tokens, heads, n, k) = (20usize, 2usize, 32usize, 512usize);
    let (input, x) = small(gpu, tokens * heads * k, 1);
    let (weights, w) = small(gpu, heads * n * k, 4);
    let out = upload(gpu, &vec![0xff; tokens * heads * n * 2]).unwrap();
    // Strides are of 16 bytes, which are 8 elements.
    let given = numbers([
        ("p.input", at(&input)),
        ("p.weights", at(&weights)),
        ("p.out", at(&out)),
        ("p.input_token_stride", (heads * k / 8) as i64),
        ("p.input_head_stride", (k / 8) as i64),
        ("p.weights_head_stride", (n * k / 8) as i64),
        ("p.weights_stride", (k / 8) as i64),
        ("p.out_token_stride", (heads * n / 8) as i64),
        ("p.out_head_stride", (n / 8) as i64),
        ("p.tokens", tokens as i64),
        ("p.k", k as i64),
        ("p.constant_weights", 1),
        ("heads", heads as i64),
        ("n", n as i64),
    ]);
    let call = "BF16: more than 16 tokens; p.k is 512; weights are contiguous along k";
    run(gpu, &manifest(), ["cuda/all/head_gemm.cu", call], &given);
    for (place, value) in download_all::<_, bf16>(gpu, &out).into_iter().enumerate() {
        let [token, head, column] = [place / n / heads, place / n % heads, place % n];
        let x = &x[(token * heads + head) * k..][..k];
        let w = &w[(head * n + column) * k..][..k];
        let sum: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
        assert_eq!(
            value,
            bf16::from_f64(sum),
            "token {token}, head {head}, column {column}"
        );
    }
}

#[cfg(feature = "sm90")]
#[test]
#[ignore = "needs a Hopper GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn a_decode_in_clusters_runs_by_its_description_alone() {
    const ROW: usize = LATENT + ROPE;
    let gpu = &*gpu();
    let manifest = manifest();
    let (tokens, heads, width, slots) = (3usize, 10usize, 300usize, 320usize);
    let (cache, _) = small(gpu, slots * ROW, 2);
    let (query, _) = small(gpu, tokens * heads * ROW, 5);
    // Every seventh entry is none, and the last token has three entries.
    let lists: Vec<i32> = (0..tokens * width)
        .map(|i| match (i / width, i % width) {
            (2, 3..) => -1,
            (_, i) if i % 7 == 6 => -1,
            (token, i) => ((i * 13 + token * 50) % slots) as i32,
        })
        .collect();
    let lists = upload_all(gpu, &lists);
    let mut out = pair(gpu, tokens * heads * LATENT * 2, 0xff);
    let mut lse = pair(gpu, tokens * heads * 4, 0xff);
    let extents = [tokens, width, slots / 64].map(|extent| extent as i32);
    // Both launches have outputs of their own.
    let call = |own: usize| MlaSparseParams {
        q_latent: at(&query) as *const _,
        q_rope: (at(&query) + 2 * LATENT as i64) as *const _,
        cache: at(&cache) as *const _,
        lists: at(&lists) as *const _,
        out: at(&out[own]) as *mut _,
        lse: at(&lse[own]) as *mut _,
        ..calls::sparse(
            MlaDims::R1,
            DType::BF16,
            KvFormat::BF16,
            heads as i32,
            extents,
        )
    };
    // SAFETY: the arguments are those of memory that lives until the end of this test.
    let status = unsafe { raw::mla_sparse_sm90(&call(1), gpu.raw_stream()) };
    // SAFETY: the status was returned by a function of `raw`.
    unsafe { raw::check("sparse decode", status) }.unwrap();
    let expected = download_all::<_, bf16>(gpu, &out[1]);
    let expected_lse = download_all::<_, f32>(gpu, &lse[1]);
    let p = call(0);
    for splits in [1, 2, 4] {
        gpu.upload(&vec![0xff; tokens * heads * LATENT * 2], out[0].bytes_mut())
            .unwrap();
        gpu.upload(&vec![0xff; tokens * heads * 4], lse[0].bytes_mut())
            .unwrap();
        let mut given = fields! {
            "p.", p;
            q_latent q_rope out lse q_latent_token_stride q_latent_head_stride q_rope_token_stride
            q_rope_head_stride out_token_stride out_head_stride lse_head_stride tokens heads
        };
        given.extend(fields!("p.sources[0].", p; lists list_stride width cache page_size));
        given.extend(numbers([
            ("p.sources[0].slots", slots as i64),
            ("p.sources[0].page_stride", p.cache_page_stride),
            ("p.sources[0].slot_stride", p.cache_slot_stride),
            ("p.sources[0].pages_adjoin", 1),
            (
                "p.scale_log2",
                (p.softmax_scale * std::f32::consts::LOG2_E)
                    .to_bits()
                    .into(),
            ),
            ("p.out_scale", 1f32.to_bits().into()),
            ("splits", splits),
            ("clusters", if splits == 1 { 2 } else { tokens as i64 }),
        ]));
        let source = "cuda/sm90/decode/sparse/instantiations/bf16_same.cu";
        let kernel = "sparse decode of bf16 queries, tiles of at most 16 heads";
        run(gpu, &manifest, [source, kernel], &given);
        // The library has splits of its own, and rounds in other places.
        let given = download_all::<_, bf16>(gpu, &out[0]);
        for (at, (given, expected)) in given.iter().zip(&expected).enumerate() {
            let apart = (given.to_f64() - expected.to_f64()).abs();
            assert!(
                apart < 1e-2,
                "splits {splits}, {at}: {given}, not {expected}"
            );
        }
        let given = download_all::<_, f32>(gpu, &lse[0]);
        for (at, (given, expected)) in given.iter().zip(&expected_lse).enumerate() {
            let apart = (given - expected).abs();
            assert!(
                apart < 1e-3,
                "splits {splits}, {at}: {given}, not {expected}"
            );
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn an_expansion_by_tensor_maps_runs_by_its_description_alone() {
    const ROW: usize = LATENT + ROPE;
    let gpu = &*gpu();
    let (page_size, pages, columns) = (64usize, 5usize, 256usize);
    let (cache, rows) = small(gpu, pages * page_size * ROW, 3);
    let (weights, w) = small(gpu, columns * LATENT, 6);
    // Two segments: one begins with a page, the other within one.
    let (tables, starts, row_starts) = ([[3i32, 0], [4, 1]], [0i32, 40], [0i32, 70, 100]);
    let total = row_starts[2] as usize;
    let table = upload_all(gpu, &tables);
    let [starts_there, row_starts_there] =
        [&starts[..], &row_starts[..]].map(|values| upload_all(gpu, values));
    let out = upload(gpu, &vec![0xff; total * columns * 2]).unwrap();
    let rope = upload(gpu, &vec![0xff; total * ROPE * 2]).unwrap();
    let row_bytes = (2 * ROW) as i64;
    let given = numbers([
        ("plan.rows.cache", at(&cache)),
        ("plan.rows.cache_rope", at(&cache) + 2 * LATENT as i64),
        ("plan.rows.block_table", at(&table)),
        ("plan.rows.token_starts", at(&starts_there)),
        ("plan.rows.row_starts", at(&row_starts_there)),
        ("plan.rows.rope", at(&rope)),
        ("plan.rows.cache_page_stride", row_bytes * page_size as i64),
        ("plan.rows.cache_slot_stride", row_bytes),
        (
            "plan.rows.cache_rope_page_stride",
            row_bytes * page_size as i64,
        ),
        ("plan.rows.cache_rope_slot_stride", row_bytes),
        ("plan.rows.block_table_stride", 2),
        ("plan.rows.rope_row_stride", ROPE as i64),
        ("plan.rows.pages", pages as i64),
        ("plan.rows.rows", total as i64),
        ("plan.rows.segments", 2),
        ("plan.rows.max_pages", 2),
        ("plan.rows.page_size", page_size as i64),
        ("plan.rows.latent_dim", LATENT as i64),
        ("plan.rows.rope_dim", ROPE as i64),
        ("plan.rows.cache_format", 2),
        ("plan.out", at(&out)),
        ("plan.out_row_stride", 2 * columns as i64),
        ("plan.runs", 2),
        ("weights", at(&weights)),
        ("weights_stride", 2 * LATENT as i64),
        ("columns", columns as i64),
        ("clusters", 2),
    ]);
    let call = "expansion of bf16";
    run(gpu, &manifest(), ["cuda/all/cache_expand.cu", call], &given);
    let (out, rope) = (
        download_all::<_, bf16>(gpu, &out),
        download_all::<_, bf16>(gpu, &rope),
    );
    for row in 0..total {
        let segment = usize::from(row >= 70);
        let token = starts[segment] as usize + row - row_starts[segment] as usize;
        let slot = tables[segment][token / page_size] as usize * page_size + token % page_size;
        let cached = &rows[slot * ROW..][..ROW];
        for column in 0..columns {
            let w = &w[column * LATENT..][..LATENT];
            let sum: f64 = cached.iter().zip(w).map(|(x, w)| x * w).sum();
            let place = row * columns + column;
            assert_eq!(
                out[place],
                bf16::from_f64(sum),
                "row {row}, column {column}"
            );
        }
        let keys = rope[row * ROPE..][..ROPE].iter().map(|key| key.to_f64());
        assert!(keys.eq(cached[LATENT..].iter().copied()), "row {row}");
    }
}
