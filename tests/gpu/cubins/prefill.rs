//! Prefills by their descriptions, beside the library's launches of the same problems.

use half::bf16;
use mla_kernels::Cuda;
use mla_kernels::raw::{self, MlaPrefillParams, MlaStatus};
use mla_runtime::model::DType;

use super::{
    Buffer, Numbers, agree, at, device, download_all, gpu, manifest, numbers, pair, run, small,
    upload, upload_all,
};
use crate::calls;

const NOPE: usize = 128;
const ROPE: usize = 64;
const VALUE: usize = 128;
const HEADS: usize = 4;

/// A causal batch of two requests, whose lengths differ.
struct Prefill {
    params: MlaPrefillParams,
    /// The starts in host memory, from which Hopper's plan is made.
    #[cfg(feature = "sm90")]
    starts: [[i32; 3]; 2],
    /// Outputs by the description, and by the library.
    out: [Buffer; 2],
    lse: [Buffer; 2],
    _inputs: Vec<Buffer>,
}

impl Prefill {
    fn new(gpu: &Cuda, queries: [i32; 2], keys: [i32; 2]) -> Self {
        let starts = [queries, keys].map(|[a, b]| [0, a, a + b]);
        let [query_tokens, key_tokens] = starts.map(|it| it[2]);
        let [q, k] = [query_tokens, key_tokens].map(|it| it as usize * HEADS);
        let tensors = [q * (NOPE + ROPE), k * NOPE, k / HEADS * ROPE, k * VALUE];
        let tensors = tensors
            .iter()
            .zip(1..)
            .map(|(&elements, seed)| small(gpu, elements, seed).0);
        let mut inputs: Vec<Buffer> = tensors.collect();
        inputs.extend(starts.map(|it| upload_all(gpu, &it)));
        inputs.push(upload(gpu, &vec![0; 64 << 20]).unwrap());
        let out = pair(gpu, q * VALUE * 2, 0xff);
        let lse = pair(gpu, q * 4, 0xff);
        let [query, nope, rope, value, cu_q, cu_k, workspace] =
            [0, 1, 2, 3, 4, 5, 6].map(|i| at(&inputs[i]));
        let dims = [NOPE, ROPE, VALUE].map(|width| width as i32);
        let longest = [queries, keys].map(|lens| lens[0].max(lens[1]));
        let tokens = [query_tokens, key_tokens];
        let params = MlaPrefillParams {
            query: query as *const _,
            key_nope: nope as *const _,
            key_rope: rope as *const _,
            value: value as *const _,
            out: at(&out[1]) as *mut _,
            lse: at(&lse[1]) as *mut _,
            cu_query_lens: cu_q as *const _,
            cu_key_lens: cu_k as *const _,
            workspace: workspace as *mut _,
            workspace_bytes: 64 << 20,
            ..calls::prefill(dims, DType::BF16, [HEADS as i32, 2], tokens, longest)
        };
        Self {
            params,
            #[cfg(feature = "sm90")]
            starts,
            out,
            lse,
            _inputs: inputs,
        }
    }

    /// Numbers of both families. Strides are in units of `unit` bytes.
    fn numbers(&self, unit: i64) -> Numbers {
        let p = &self.params;
        let p = MlaPrefillParams {
            out: at(&self.out[0]) as *mut _,
            lse: at(&self.lse[0]) as *mut _,
            query_token_stride: p.query_token_stride * unit,
            query_head_stride: p.query_head_stride * unit,
            key_rope_token_stride: p.key_rope_token_stride * unit,
            value_token_stride: p.value_token_stride * unit,
            value_head_stride: p.value_head_stride * unit,
            out_token_stride: p.out_token_stride * unit,
            out_head_stride: p.out_head_stride * unit,
            ..*p
        };
        let mut given = fields! {
            "p.", p;
            query key_rope value out lse query_token_stride query_head_stride key_rope_token_stride
            value_token_stride value_head_stride out_token_stride out_head_stride lse_head_stride
            requests heads causal
        };
        let scale = p.softmax_scale * std::f32::consts::LOG2_E;
        given.insert("p.scale_log2".to_owned(), scale.to_bits().into());
        given.extend(fields!("", p; query_tokens));
        given
    }

    /// Checks that the bits of both launches are the same.
    fn agrees(&self, gpu: &Cuda, call: &str, library: MlaStatus) {
        agree(gpu, call, library, &[&self.out, &self.lse]);
        let values: Vec<bf16> = download_all(gpu, &self.out[0]);
        assert!(values.iter().all(|it| it.is_finite()), "{call}");
    }
}

#[cfg(feature = "sm90")]
#[test]
#[ignore = "needs a Hopper GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn hoppers_prefill_has_the_librarys_bits_by_its_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let multiprocessors = device(gpu)[0];
    // Keys so few that no CTAs divide them, and so many that some do.
    for (queries, keys, divided) in [
        ([200, 70], [500, 90], false),
        ([130, 20], [9000, 300], true),
    ] {
        let prefill = Prefill::new(gpu, queries, keys);
        let p = &prefill.params;
        let on_host = MlaPrefillParams {
            cu_query_lens: prefill.starts[0].as_ptr(),
            cu_key_lens: prefill.starts[1].as_ptr(),
            ..*p
        };
        let mut count = 0;
        let ctas = multiprocessors as i32;
        // SAFETY: the starts are in host memory, and there is no room for items.
        let planned = unsafe {
            raw::mla_prefill_sm90_work_items(&on_host, ctas, std::ptr::null_mut(), 0, &mut count)
        };
        assert_eq!((planned.code, count > 0), (0, divided));
        let mut given = prefill.numbers(1);
        given.extend(fields!("p.", p; max_query_len max_key_len));
        given.extend(fields!("", p; key_tokens));
        given.extend(numbers([
            ("p.key", p.key_nope.addr() as i64),
            ("p.key_token_stride", p.key_nope_token_stride),
            ("p.key_head_stride", p.key_nope_head_stride),
            ("p.cu_q", p.cu_query_lens.addr() as i64),
            ("p.cu_k", p.cu_key_lens.addr() as i64),
            ("p.claimed", p.workspace.addr() as i64),
            ("p.swizzle_requests", 2),
            ("p.swizzle_heads", HEADS as i64),
            ("multiprocessors", multiprocessors),
        ]));
        let how = if divided {
            "CTAs divide"
        } else {
            "no CTAs divide"
        };
        let call = format!("expanded attention of bf16, (128, 64, 128) wide: {how}");
        let source = "cuda/sm90/prefill/instantiations/bf16_128_64_128.cu";
        run(gpu, &manifest, [source, &call], &given);
        // SAFETY: the arguments are those of memory that lives until the end of this test.
        let status = unsafe { raw::mla_prefill_sm90(p, gpu.raw_stream()) };
        prefill.agrees(gpu, &call, status);
    }
}

#[cfg(feature = "sm80")]
#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm80 --test gpu -- --ignored cubins"]
fn portable_prefill_has_the_librarys_bits_by_its_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let [multiprocessors, _, _, shared_of_sm] = device(gpu);
    for (queries, rows, which) in [
        ([200, 70], 128, ""),
        ([60, 30], 64, ", p.max_request_tiles is 1"),
    ] {
        let prefill = Prefill::new(gpu, queries, [500, 190]);
        let p = &prefill.params;
        let mut given = prefill.numbers(2);
        given.extend(fields!("p.", p; key_nope nope_dim cu_query_lens cu_key_lens));
        given.extend(fields!("", p; max_query_len max_key_len));
        given.extend(numbers([
            ("p.key_nope_token_stride", p.key_nope_token_stride * 2),
            ("p.key_nope_head_stride", p.key_nope_head_stride * 2),
            ("p.head_group", HEADS as i64),
            ("p.splits", 1),
            ("multiprocessors", multiprocessors),
            ("shared_of_sm", shared_of_sm),
        ]));
        let call = format!(
            "expanded attention of bf16, keys of 192 columns, values of 128, tiles of {rows} \
             rows{which}"
        );
        let source = "cuda/sm80/prefill/instantiations/bf16_192_128.cu";
        run(gpu, &manifest, [source, &call], &given);
        // Without a workspace, the library divides no keys either.
        let p = MlaPrefillParams {
            workspace: std::ptr::null_mut(),
            ..*p
        };
        // SAFETY: the arguments are those of memory that lives until the end of this test.
        let status = unsafe { raw::mla_prefill_sm80(&p, std::ptr::null(), gpu.raw_stream()) };
        prefill.agrees(gpu, &call, status);
    }
}
