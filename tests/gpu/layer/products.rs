//! Tests of GEMMs of few tokens with a matrix per head, on both sides of the size from which on
//! cuBLAS is used, and of the GEMMs of batch-invariant layers.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::Layout;
use rand::RngExt as _;

use crate::common::{get, gpu, message, rng};
use crate::tensors::{On, Tensor, pick, strided, unit};

/// Multiplies `[tokens, heads, k] · [heads, k, n]` into `[tokens, heads, n]`, as the layer views
/// them.
fn run<D: Device>(device: &D, input: &Tensor, weights: &Tensor, out: &Tensor) -> Result<Tensor> {
    let input = On::new(device, input)?;
    let weights = On::new(device, weights)?;
    let mut out = On::new(device, out)?;
    device.gemm(
        input.read()?.transpose(0, 1),
        weights.read()?.constant(device)?,
        out.write()?.transpose(0, 1),
    )?;
    out.host(device)
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn products_per_head_agree_with_the_cpu() {
    let (gpu, cpu) = (&*gpu(), Cpu::new());
    let mut rng = rng(3);
    let mut max = 0f64;
    for round in 0..120 {
        let dtype = pick(&mut rng, &[DType::BF16, DType::F16]);
        let heads = pick(&mut rng, &[2, 3, 16, 33]);
        let tokens = match round % 3 {
            0 => pick(&mut rng, &[1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65]),
            _ => rng.random_range(1..80),
        };
        // These are the shapes of W_UK and W_UV, and others that barely fit or do not fit.
        let (k, n): (usize, usize) = pick(
            &mut rng,
            &[
                (128, 512),
                (512, 128),
                (192, 512),
                (512, 256),
                (16, 64),
                (32, 16),
                (48, 192),
                (96, 80),
                (40, 72),
                (24, 56),
            ],
        );
        // Each head's part lies in a row of both weights, as in W_kv_b. It is contiguous along
        // either axis.
        let spread = (k * n).next_multiple_of(8) + pick(&mut rng, &[0, 8, 640]);
        let strides = match rng.random_bool(0.5) {
            true => [spread.max(k * (n + 8)), n + 8, 1],
            false => [spread.max(n * (k + 8)), 1, k + 8],
        };
        let weights = strided(dtype, [heads, k, n], strides);
        let gap = pick(&mut rng, &[0, 8, 64]);
        let rows = |width: usize| {
            let pitch = width + gap;
            strided(dtype, [tokens, heads, width], [heads * pitch, pitch, 1])
        };
        let shift = pick(&mut rng, &[0, 0, 0, 1]);
        let input = Tensor::random(&mut rng, rows(k), shift);
        let weights = Tensor::random(&mut rng, weights, 0);
        let out = Tensor::poison(rows(n), 0);
        let given = run(gpu, &input, &weights, &out).unwrap();
        let expected = run(&cpu, &input, &weights, &out).unwrap();
        // Bytes that do not belong to the output must not be written.
        let mut cleared = [given.clone(), expected.clone()];
        for tensor in &mut cleared {
            tensor.fill(|_, _| 0.0);
        }
        assert!(cleared[0].bytes == cleared[1].bytes);
        // Both sides sum in f32 and round once. At worst they round to neighbours, apart from the
        // order of k terms.
        let u = f64::from(unit(dtype, 0.0));
        for (given, expected) in given.values().iter().zip(expected.values()) {
            let accepted = 1.01 * u * f64::from(expected.abs()) + 1e-5 * (k as f64).sqrt();
            let apart = f64::from((given - expected).abs());
            assert!(
                apart <= accepted,
                "{given} against {expected}: {dtype} {tokens} x {heads} x {k} x {n}"
            );
            max = max.max(apart / accepted);
        }
    }
    println!("at most {max:.2} of what is accepted");
}

/// Checks that a token's row does not depend on the number of other tokens in this crate's kernel.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_row_is_the_same_among_however_many() {
    let gpu = &*gpu();
    let mut rng = rng(5);
    for strides in [[128 * 512, 512, 1], [128 * 512, 1, 128]] {
        let weights = strided(DType::BF16, [16, 128, 512], strides);
        let weights = Tensor::random(&mut rng, weights, 0);
        let rows = |tokens, width| Layout::contiguous(DType::BF16, [tokens, 16, width]);
        let all = Tensor::random(&mut rng, rows(32, 128), 0);
        let whole = run(gpu, &all, &weights, &Tensor::poison(rows(32, 512), 0)).unwrap();
        for tokens in [1, 5, 8, 13, 16, 20, 31] {
            let mut part = all.clone();
            part.layout.shape[0] = tokens;
            let out = Tensor::poison(rows(tokens, 512), 0);
            let given = run(gpu, &part, &weights, &out).unwrap();
            for element in 0..tokens * 16 * 512 {
                let [a, b] =
                    [&given, &whole].map(|t| get(DType::BF16, &t.bytes, element).to_bits());
                assert_eq!(a, b, "{tokens} tokens, element {element}");
            }
        }
    }
}

/// Returns true if the rows of some numbers of tokens have other bits than those of all tokens.
fn rows_differ<D: Device>(device: &D, shape: [usize; 3], strides: [usize; 3]) -> bool {
    let mut rng = rng(7);
    let [heads, k, n] = shape;
    let weights = strided(DType::BF16, shape, strides);
    let weights = Tensor::random(&mut rng, weights, 0);
    let rows = |tokens, width| Layout::contiguous(DType::BF16, [tokens, heads, width]);
    let max = if heads == 1 { 1200 } else { 200 };
    let all = Tensor::random(&mut rng, rows(max, k), 0);
    let whole = run(device, &all, &weights, &Tensor::poison(rows(max, n), 0)).unwrap();
    let counts = [
        1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025,
    ];
    let mut differ = false;
    for tokens in counts.into_iter().filter(|tokens| *tokens <= max) {
        let first = rng.random_range(0..=max - tokens);
        let part = Tensor {
            bytes: all.bytes[first * heads * k * 2..(first + tokens) * heads * k * 2].to_vec(),
            layout: rows(tokens, k),
            ..all
        };
        let given = run(device, &part, &weights, &Tensor::poison(rows(tokens, n), 0)).unwrap();
        let row = heads * n * 2;
        differ |= given.bytes != whole.bytes[first * row..(first + tokens) * row];
    }
    differ
}

/// Checks that a row of a batch-invariant device's GEMM has the same bits among any number of rows,
/// at any place. The shapes are those of W_UK, W_UV, W_kv_b and an indexer's W_qb.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_batch_invariant_row_is_the_same_among_however_many() {
    let free = &*gpu();
    let device = free
        .batch_invariant(&Problem::new(MlaDims::R1, 16, DType::BF16))
        .unwrap();
    let mut freely = 0;
    for (shape, strides) in [
        ([16, 128, 512], [128 * 512, 512, 1]),
        ([128, 128, 512], [128 * 512, 512, 1]),
        ([16, 512, 128], [128 * 512, 1, 512]),
        ([16, 512, 128], [512 * 128, 128, 1]),
        ([1, 512, 4096], [0, 1, 512]),
        ([1, 512, 4096], [0, 4096, 1]),
        ([1, 256, 1024], [0, 1, 256]),
        ([1, 1536, 1024], [0, 1, 1536]),
    ] {
        assert!(
            !rows_differ(&device, shape, strides),
            "{shape:?}, strides {strides:?}"
        );
        freely += usize::from(rows_differ(free, shape, strides));
    }
    // The control experiment.
    assert!(freely > 0);
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn products_without_an_own_kernel_are_refused_by_a_batch_invariant_device() {
    let gpu = &*gpu();
    let problem = |dtype| Problem::new(MlaDims::R1, 16, dtype);
    assert_eq!(
        message(gpu.batch_invariant(&problem(DType::F32))),
        "dtype: given f32, accepted bf16 or f16, with batch_invariant"
    );
    let device = gpu.batch_invariant(&problem(DType::BF16)).unwrap();
    let mut rng = rng(8);
    let rows = |width| Layout::contiguous(DType::BF16, [5, 2, width]);
    let input = Tensor::random(&mut rng, rows(24), 0);
    let weights = Tensor::random(&mut rng, Layout::contiguous(DType::BF16, [2, 24, 56]), 0);
    let refused = message(run(&device, &input, &weights, &Tensor::poison(rows(56), 0)));
    assert!(refused.starts_with("gemm: given "), "{refused}");
}
