//! Tests the weights in every form that engines have. Each must give the layer outputs of the plain
//! matrix, which the oracle has checked.

use mla_conformance::reference::decode_row;
use mla_cpu::Cpu;
use mla_runtime::Error;
use mla_runtime::backend::LayerConfig;
use mla_runtime::device::Fp8Blocks;
use mla_runtime::layer::{OwnedWeights, Weights, check_adapter};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::tensor::{ArrayRef, TensorMut};

use crate::world::{Case, Numbers, Outcome, Owned, World};
use crate::{MIXED, cpu_layer, refused, run};

/// The heads of this rank, and the number of all heads.
const HEADS: std::ops::Range<usize> = 2..5;
const ALL: usize = 6;
/// Widths that are no multiples of a block: 88 rows per head and 160 columns.
const DIMS: MlaDims = MlaDims::new(160, HeadDims::new(48, 8, 40));
const WIDTH: usize = 88;
const LATENT: usize = 160;

fn case(dtype: DType) -> Case {
    Case {
        dims: DIMS,
        heads: 3,
        dtype,
        kv_format: KvFormat::of(dtype),
        ..Case::small(MIXED)
    }
}

/// Element `[row, column]` of the matrix of all heads; NaN for heads of other ranks.
fn element(world: &World, row: usize, column: usize) -> f64 {
    let own = HEADS.start * WIDTH..HEADS.end * WIDTH;
    match own.contains(&row) {
        true => world.weights.values[(row - own.start) * LATENT + column],
        false => f64::NAN,
    }
}

fn outcome(world: &World, weights: Weights<'_, Cpu>) -> Outcome {
    let layer = cpu_layer(&world.case);
    let mut workspace = world.prepared(&layer);
    let places: Vec<usize> = (0..world.slots.len()).collect();
    let rows = (&places[..], places.len());
    let run = world.call(&layer, &mut workspace, rows, true, weights, None);
    run.unwrap()
}

fn same_bits(world: &World, expected: &Outcome, form: &str, weights: Weights<'_, Cpu>) {
    let outcome = outcome(world, weights);
    assert!(outcome == *expected, "{form} in {:?}", world.case);
}

/// An engine has the matrix of all heads, two tensors, rows that it dequantises, or a kernel that
/// makes the matrix.
#[test]
fn every_form_of_the_matrix() {
    let device = Cpu::new();
    for &dtype in DType::ALL {
        let (world, expected) = run(&case(dtype));
        let config = world.case.config();
        let of_all = |row, column| element(&world, row, column);
        let shape = [1, ALL * WIDTH, LATENT];
        let whole = Owned::new(dtype, shape, |[_, row, column]| of_all(row, column));
        let weights = Weights::from_checkpoint_heads(whole.view(), HEADS, &config).unwrap();
        same_bits(&world, &expected, "checkpoint", weights);
        let shape = [1, LATENT, ALL * WIDTH];
        let whole = Owned::new(dtype, shape, |[_, column, row]| of_all(row, column));
        let weights = Weights::from_transposed_heads(whole.view(), HEADS, &config).unwrap();
        // Products may be summed in another order.
        world.check(&outcome(&world, weights)).unwrap();

        let k_b = Owned::new(dtype, [ALL, LATENT, 48], |[head, column, key]| {
            of_all(head * WIDTH + key, column)
        });
        let v_b = Owned::new(dtype, [ALL, 40, LATENT], |[head, value, column]| {
            of_all(head * WIDTH + 48 + value, column)
        });
        let (k_b, v_b) = (k_b.view(), v_b.view());
        let split = OwnedWeights::from_split(&device, k_b, v_b, HEADS, &config);
        let mut rows = Vec::new();
        let by_rows = OwnedWeights::from_rows(&device, HEADS, &config, |row, to| {
            rows.push(row);
            for (column, to) in to.iter_mut().enumerate() {
                *to = of_all(row, column) as f32;
            }
            Ok::<(), Error>(())
        });
        assert!(rows.into_iter().eq(HEADS.start * WIDTH..HEADS.end * WIDTH));
        let own = world.weights.view();
        let copied = OwnedWeights::from_device(&device, &config, |mut to: TensorMut<'_, Cpu>| {
            assert_eq!(to.shape(), [1, 3 * WIDTH, LATENT]);
            let bytes = to.reborrow().into_bytes();
            bytes.copy_from_slice(&own.bytes()[..bytes.len()]);
            Ok::<(), Error>(())
        });
        for (form, owned) in [("split", split), ("rows", by_rows), ("device", copied)] {
            let owned = owned.unwrap();
            same_bits(&world, &expected, form, owned.weights(&config).unwrap());
        }
    }
}

#[test]
fn block_fp8_at_any_rank() {
    const ROWS: usize = ALL * WIDTH;
    let device = Cpu::new();
    let mut numbers = Numbers::new(7);
    // Values of about 1/16, in blocks with different scales.
    let codes: Vec<u8> = (0..ROWS * LATENT)
        .map(|_| (numbers.next() % 0x79) as u8 | (numbers.next() as u8 & 0x80))
        .collect();
    let width = LATENT.div_ceil(128);
    let blocks = [ROWS.div_ceil(128), width];
    let scales: Vec<f32> = (0..blocks[0] * blocks[1])
        .map(|_| (1.0 + (numbers.next() % 1000) as f32 / 1000.0) / 2900.0)
        .collect();
    let values = decode_row(KvFormat::Fp8, codes.len(), 0, &codes, 1.0);
    let value = |row: usize, column: usize| {
        let scale = scales[row / 128 * width + column / 128];
        // The product is exact in f64, and is rounded to f32 once.
        f64::from((values[row * LATENT + column] * f64::from(scale)) as f32)
    };
    for &dtype in DType::ALL {
        let case = case(dtype);
        let mut world = World::new(&case);
        world.weights = Owned::new(dtype, [1, 3 * WIDTH, LATENT], |[_, row, column]| {
            value(HEADS.start * WIDTH + row, column)
        });
        let config = case.config();
        let expected = world.run(&cpu_layer(&case));
        world.check(&expected).unwrap();
        let all = Fp8Blocks::<Cpu>::new(&codes, ArrayRef::from_slice(&scales), [ROWS, LATENT]);
        let owned = OwnedWeights::from_fp8_blocks(&device, all.unwrap(), HEADS, &config);
        let owned = owned.unwrap();
        same_bits(&world, &expected, "fp8", owned.weights(&config).unwrap());

        // The same for a part that an engine has cut out. It begins at row 176, which is row 48 of
        // its block.
        let (first, end) = (HEADS.start * WIDTH, HEADS.end * WIDTH);
        let own_scales = &scales[first / 128 * width..end.div_ceil(128) * width];
        let part = Fp8Blocks::<Cpu>::from_row(
            &codes[first * LATENT..end * LATENT],
            ArrayRef::from_slice(own_scales),
            [end - first, LATENT],
            first % 128,
        );
        let owned = OwnedWeights::from_fp8_blocks(&device, part.unwrap(), 0..3, &config);
        let owned = owned.unwrap();
        same_bits(&world, &expected, "a part", owned.weights(&config).unwrap());
    }
}

#[test]
fn adapters_are_refused() {
    let layer = "model.layers.3.self_attn.";
    check_adapter(["q_b_proj", &format!("{layer}kv_a_proj_with_mqa"), "o_proj"]).unwrap();
    for module in ["kv_b_proj", &format!("{layer}kv_b_proj"), "all-linear"] {
        assert_eq!(
            refused(check_adapter(["q_b_proj", module])),
            format!(
                "target_modules: given {module}, accepted modules other than kv_b_proj, by whose \
                 one matrix a step's queries and outputs are multiplied: merge the adapter into \
                 weights of its own, for steps of its own"
            )
        );
    }
}

#[test]
fn bad_weights_are_refused() {
    let config = case(DType::F32).config();
    let device = &Cpu::new();
    let tensor = |dtype, shape| Owned::new(dtype, shape, |_| 0.0);
    let heads = |shape: [usize; 3], heads| {
        let kv_b = tensor(DType::F32, shape);
        refused(Weights::from_checkpoint_heads(kv_b.view(), heads, &config))
    };
    let split = |k_b: (DType, [usize; 3]), v_b: (DType, [usize; 3])| {
        let [k_b, v_b] = [k_b, v_b].map(|(dtype, shape)| tensor(dtype, shape));
        refused(OwnedWeights::from_split(
            device,
            k_b.view(),
            v_b.view(),
            0..3,
            &config,
        ))
    };
    let (k_b, v_b) = ((DType::F32, [3, 160, 48]), (DType::F32, [3, 40, 160]));
    let (codes, scales) = (vec![0u8; 264 * 160], vec![1.0f32; 6]);
    let blocks = |codes: &[u8], scales: &[f32], first_row| {
        let scales = ArrayRef::from_slice(scales);
        refused(Fp8Blocks::<Cpu>::from_row(
            codes,
            scales,
            [264, 160],
            first_row,
        ))
    };
    let whole = Fp8Blocks::<Cpu>::new(&codes, ArrayRef::from_slice(&scales), [264, 160]);
    let wrong = LayerConfig::new(config.problem.with_heads(4), config.softmax_scale);
    let rows = |heads| OwnedWeights::from_rows(device, heads, &config, |_, _| Ok::<(), Error>(()));
    for (said, message) in [
        (
            heads([1, 6 * 88, 160], 0..2),
            "heads: given 0..2, accepted a range of the problem's 3 heads of the tensor's 6",
        ),
        (
            heads([1, 6 * 88, 160], 4..7),
            "heads: given 4..7, accepted a range of the problem's 3 heads of the tensor's 6",
        ),
        (
            heads([1, 160, 6 * 88], 0..3),
            "W_kv_b: given 160 outputs of 528 inputs, accepted heads of P + V = 88 outputs each, \
             of L = 160 inputs",
        ),
        (
            split((DType::F32, [3, 48, 160]), v_b),
            "k_b: given f32 [3, 48, 160], accepted f32 [3, 160, 48], that is [heads, L, P]",
        ),
        (
            split(k_b, (DType::F32, [4, 40, 160])),
            "v_b: given f32 [4, 40, 160], accepted f32 [3, 40, 160], that is [heads, V, L]",
        ),
        (
            split(k_b, (DType::F16, [3, 40, 160])),
            "v_b: given f16 [3, 40, 160], accepted f32 [3, 40, 160], that is [heads, V, L]",
        ),
        (
            blocks(&codes[1..], &scales, 0),
            "weight: given 42239 bytes, accepted [264, 160] e4m3, a byte each",
        ),
        (
            blocks(&codes, &scales[1..], 0),
            "weight_scale_inv: given 5 scales, accepted f32 [3, 2], one for each block of 128 × \
             128",
        ),
        (
            blocks(&codes, &scales, 127),
            "weight_scale_inv: given 6 scales, accepted f32 [4, 2], one for each block of 128 × \
             128",
        ),
        (
            blocks(&codes, &scales, 128),
            "first_row: given 128, accepted 0 to 127: a row of the first block",
        ),
        (
            refused(OwnedWeights::from_fp8_blocks(
                device,
                whole.unwrap(),
                0..4,
                &wrong,
            )),
            "heads: given 0..4, accepted a range of the problem's 4 heads of the tensor's 3",
        ),
        // The number of these heads' rows exceeds the integer type.
        (
            refused(rows(usize::MAX - 3..usize::MAX)),
            "heads: given 18446744073709551612..18446744073709551615, accepted a range of the \
             problem's 3 heads",
        ),
    ] {
        assert_eq!(said, message);
    }
    // The weights are made for other heads, with the same number of elements.
    let other = MlaDims::new(160, HeadDims::new(40, 8, 48));
    let other = LayerConfig::new(config.problem.with_dims(other), config.softmax_scale);
    let said = refused(rows(0..3).unwrap().weights(&other));
    assert!(said.starts_with("W_kv_b: given f32 for 3"), "{said}");
}
