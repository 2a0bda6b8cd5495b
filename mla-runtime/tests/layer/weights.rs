//! Tests the weights in every form that engines have. Each must give the layer outputs of the plain
//! matrix, which the oracle has checked.

use half::{bf16, f16};
use mla_cpu::Cpu;
use mla_runtime::backend::LayerConfig;
use mla_runtime::device::Fp8Blocks;
use mla_runtime::layer::{OwnedWeights, Weights, check_adapter};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::tensor::{ArrayRef, Layout, Memory, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use crate::world::{Case, Numbers, Outcome, World};
use crate::{MIXED, cpu_layer, run};

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

/// A row-major host tensor of a dtype.
struct Host {
    bytes: Vec<u8>,
    layout: Layout,
}

impl Host {
    fn new(dtype: DType, shape: [usize; 3], value: impl Fn([usize; 3]) -> f64) -> Self {
        let mut bytes = Vec::new();
        let [a, b, c] = shape;
        for index in (0..a * b * c).map(|at| [at / (b * c), at / c % b, at % c]) {
            let value = value(index) as f32;
            match dtype {
                DType::F32 => bytes.extend(value.to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            }
        }
        let layout = Layout::contiguous(dtype, shape);
        Self { bytes, layout }
    }

    fn view(&self) -> TensorRef<'_, Cpu> {
        TensorRef::new(&self.bytes[..], self.layout).unwrap()
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
    let mut workspace = layer.workspace(&world.case.limits()).unwrap();
    world.prepare(&layer, &mut workspace).unwrap();
    let run = world.forward_with(&layer, &mut workspace, true, weights);
    run.unwrap()
}

fn same_bits(world: &World, expected: &Outcome, form: &str, weights: Weights<'_, Cpu>) {
    let outcome = outcome(world, weights);
    assert!(outcome == *expected, "{form} in {:?}", world.case);
}

#[test]
fn rank_heads_are_views() {
    for dtype in DType::ALL {
        let (world, expected) = run(&case(*dtype));
        let config = world.case.config();
        let shape = [1, ALL * WIDTH, LATENT];
        let whole = Host::new(*dtype, shape, |[_, row, column]| {
            element(&world, row, column)
        });
        let weights = Weights::from_checkpoint_heads(whole.view(), HEADS, &config).unwrap();
        same_bits(&world, &expected, "checkpoint", weights);
        let shape = [1, LATENT, ALL * WIDTH];
        let whole = Host::new(*dtype, shape, |[_, column, row]| {
            element(&world, row, column)
        });
        let weights = Weights::from_transposed_heads(whole.view(), HEADS, &config).unwrap();
        // Products may be summed in another order.
        world.check(&outcome(&world, weights)).unwrap();
    }
}

#[test]
fn matrices_per_head_are_joined() {
    for dtype in DType::ALL {
        let (world, expected) = run(&case(*dtype));
        let config = world.case.config();
        let k_b = Host::new(*dtype, [ALL, LATENT, 48], |[head, column, key]| {
            element(&world, head * WIDTH + key, column)
        });
        let v_b = Host::new(*dtype, [ALL, 40, LATENT], |[head, value, column]| {
            element(&world, head * WIDTH + 48 + value, column)
        });
        let (k_b, v_b) = (k_b.view(), v_b.view());
        let owned = OwnedWeights::from_split(&world.device, k_b, v_b, HEADS, &config).unwrap();
        let weights = owned.weights(&config).unwrap();
        same_bits(&world, &expected, "split", weights);
    }
}

#[test]
fn closure_dequantises_rows() {
    for dtype in DType::ALL {
        let (world, expected) = run(&case(*dtype));
        let config = world.case.config();
        let mut rows = Vec::new();
        let owned = OwnedWeights::from_rows(&world.device, HEADS, &config, |row, to| {
            rows.push(row);
            for (column, to) in to.iter_mut().enumerate() {
                *to = element(&world, row, column) as f32;
            }
            Ok::<(), mla_runtime::Error>(())
        })
        .unwrap();
        assert!(rows.into_iter().eq(HEADS.start * WIDTH..HEADS.end * WIDTH));
        let weights = owned.weights(&config).unwrap();
        same_bits(&world, &expected, "rows", weights);

        // The matrix is made on the device, here by a copy.
        let own = world.weights.view();
        let owned =
            OwnedWeights::from_device(&world.device, &config, |mut to: TensorMut<'_, Cpu>| {
                assert_eq!(to.shape(), [1, 3 * WIDTH, LATENT]);
                let bytes = to.reborrow().into_bytes();
                bytes.copy_from_slice(&own.bytes()[..bytes.len()]);
                Ok::<(), mla_runtime::Error>(())
            })
            .unwrap();
        let weights = owned.weights(&config).unwrap();
        same_bits(&world, &expected, "device", weights);
    }
}

/// The value of an e4m3 code other than NaN.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[test]
fn block_fp8_at_any_rank() {
    const ROWS: usize = ALL * WIDTH;
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
    let value = |row: usize, column: usize| {
        let scale = scales[row / 128 * width + column / 128];
        // The product is exact in f64, and is rounded to f32 once.
        f64::from((e4m3(codes[row * LATENT + column]) * f64::from(scale)) as f32)
    };
    for dtype in DType::ALL {
        let case = case(*dtype);
        let mut world = World::new(&case);
        let rounded = Host::new(*dtype, [1, 3 * WIDTH, LATENT], |[_, row, column]| {
            value(HEADS.start * WIDTH + row, column)
        });
        for (row, column) in (0..3 * WIDTH).flat_map(|r| (0..LATENT).map(move |c| (r, c))) {
            let value = rounded.view().at([0, row, column]);
            world.weights.set([0, row, column], value.into());
        }
        let config = case.config();
        let expected = world.run(&cpu_layer(&case));
        world.check(&expected).unwrap();
        let all = Fp8Blocks::<Cpu>::new(&codes, ArrayRef::from_slice(&scales), [ROWS, LATENT]);
        let owned = OwnedWeights::from_fp8_blocks(&world.device, all.unwrap(), HEADS, &config);
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
        let owned = OwnedWeights::from_fp8_blocks(&world.device, part.unwrap(), 0..3, &config);
        let owned = owned.unwrap();
        same_bits(&world, &expected, "a part", owned.weights(&config).unwrap());
    }
}

#[test]
fn adapters_are_refused() {
    check_adapter([
        "q_b_proj",
        "model.layers.3.self_attn.kv_a_proj_with_mqa",
        "o_proj",
    ])
    .unwrap();
    for module in [
        "kv_b_proj",
        "model.layers.3.self_attn.kv_b_proj",
        "all-linear",
    ] {
        let refused = check_adapter(["q_b_proj", module]).unwrap_err();
        assert_eq!(
            refused.to_string(),
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
    let world = World::new(&case(DType::F32));
    let config = world.case.config();
    let device = &world.device;
    let tensor = |dtype, shape| Host::new(dtype, shape, |_| 0.0);
    let refused = |result: Result<()>| result.unwrap_err().to_string();
    let heads = |shape: [usize; 3], heads| {
        let kv_b = tensor(DType::F32, shape);
        refused(Weights::from_checkpoint_heads(kv_b.view(), heads, &config).map(drop))
    };
    assert_eq!(
        heads([1, 6 * 88, 160], 0..2),
        "heads: given 0..2, accepted a range of the problem's 3 heads of the tensor's 6"
    );
    assert_eq!(
        heads([1, 6 * 88, 160], 4..7),
        "heads: given 4..7, accepted a range of the problem's 3 heads of the tensor's 6"
    );
    assert_eq!(
        heads([1, 160, 6 * 88], 0..3),
        "W_kv_b: given 160 outputs of 528 inputs, accepted heads of P + V = 88 outputs each, of L \
         = 160 inputs"
    );
    let split = |k_b: (DType, [usize; 3]), v_b: (DType, [usize; 3])| {
        let [k_b, v_b] = [k_b, v_b].map(|(dtype, shape)| tensor(dtype, shape));
        let owned = OwnedWeights::from_split(device, k_b.view(), v_b.view(), 0..3, &config);
        refused(owned.map(drop))
    };
    let (k_b, v_b) = ((DType::F32, [3, 160, 48]), (DType::F32, [3, 40, 160]));
    assert_eq!(
        split((DType::F32, [3, 48, 160]), v_b),
        "k_b: given f32 [3, 48, 160], accepted f32 [3, 160, 48], that is [heads, L, P]"
    );
    assert_eq!(
        split(k_b, (DType::F32, [4, 40, 160])),
        "v_b: given f32 [4, 40, 160], accepted f32 [3, 40, 160], that is [heads, V, L]"
    );
    assert_eq!(
        split(k_b, (DType::F16, [3, 40, 160])),
        "v_b: given f16 [3, 40, 160], accepted f32 [3, 40, 160], that is [heads, V, L]"
    );
    let (codes, scales) = (vec![0u8; 264 * 160], vec![1.0f32; 6]);
    let blocks = |codes: &[u8], scales: &[f32], first_row| {
        let scales = ArrayRef::from_slice(scales);
        refused(Fp8Blocks::<Cpu>::from_row(codes, scales, [264, 160], first_row).map(drop))
    };
    assert_eq!(
        blocks(&codes[1..], &scales, 0),
        "weight: given 42239 bytes, accepted [264, 160] e4m3, a byte each"
    );
    assert_eq!(
        blocks(&codes, &scales[1..], 0),
        "weight_scale_inv: given 5 scales, accepted f32 [3, 2], one for each block of 128 × 128"
    );
    assert_eq!(
        blocks(&codes, &scales, 127),
        "weight_scale_inv: given 6 scales, accepted f32 [4, 2], one for each block of 128 × 128"
    );
    assert_eq!(
        blocks(&codes, &scales, 128),
        "first_row: given 128, accepted 0 to 127: a row of the first block"
    );
    let whole = Fp8Blocks::<Cpu>::new(&codes, ArrayRef::from_slice(&scales), [264, 160]);
    let wrong = LayerConfig::new(config.problem.with_heads(4), config.softmax_scale);
    let owned = OwnedWeights::from_fp8_blocks(device, whole.unwrap(), 0..4, &wrong);
    assert_eq!(
        refused(owned.map(drop)),
        "heads: given 0..4, accepted a range of the problem's 4 heads of the tensor's 3"
    );
    // The number of these heads' rows exceeds the integer type.
    let last = usize::MAX - 3..usize::MAX;
    let owned = OwnedWeights::from_rows(device, last, &config, |_, _| Ok::<(), Error>(()));
    assert_eq!(
        refused(owned.map(drop)),
        "heads: given 18446744073709551612..18446744073709551615, accepted a range of the \
         problem's 3 heads"
    );
    // The weights are made for other heads, with the same number of elements.
    let owned = OwnedWeights::from_rows(device, 0..3, &config, |_, _| {
        Ok::<(), mla_runtime::Error>(())
    });
    let other = MlaDims::new(160, HeadDims::new(40, 8, 48));
    let other = LayerConfig::new(config.problem.with_dims(other), config.softmax_scale);
    assert!(
        refused(owned.unwrap().weights(&other).map(drop)).starts_with("W_kv_b: given f32 for 3")
    );
    assert_eq!(Cpu::byte_len(&codes[..]), codes.len());
}
