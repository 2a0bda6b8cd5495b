//! Checks that a failure of the device leaves the engine intact. Any allocation, upload or
//! operation of a step may fail. The next step of the layer, and that of another layer on the
//! device, must then be right.

#[macro_use]
#[path = "../../../mla-runtime/tests/common/forward.rs"]
mod forward;

mod device;

use device::{Failing, Faulty, Kind};
use mla_cpu::{CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, MlaDims, Rope};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{CacheLayout, CacheMut, RotaryTables, TensorMut, TensorRef};
use mla_runtime::{Error, Result, named};

type Layer = MlaLayer<Failing<CpuPrefill>, Failing<CpuDecode>>;
type Memory = Workspace<Failing<CpuPrefill>, Failing<CpuDecode>>;

const DIMS: MlaDims = MlaDims::new(32, HeadDims::new(16, 8, 16));
const LIMITS: StepLimits = StepLimits::new(4, 16, 6)
    .with_decode_query_len(2)
    .with_context_rows(8);

/// The first step has only decodes. The second has a decode and prompts, whose context takes
/// several chunks.
const STEPS: [&[StepRequest<'static>]; 2] = [
    &[
        StepRequest::new(1, 6, &[3, 1]),
        StepRequest::new(2, 9, &[0, 4, 2]),
    ],
    &[
        StepRequest::new(1, 7, &[3, 1]),
        StepRequest::new(5, 22, &[0, 4, 2, 5, 6, 7]),
        StepRequest::new(3, 3, &[8]),
    ],
];

/// A layer with its workspace, and the results of its steps.
struct Lab {
    layer: Layer,
    workspace: Memory,
    rotary: RotaryTables<Faulty>,
    expected: Vec<Vec<f32>>,
}

impl Lab {
    fn new(device: &Faulty, heads: u32) -> Result<Self> {
        let problem = Problem::new(DIMS, heads, DType::F32)
            .with_page_size(4)
            .with_query_len(QueryLen::Ragged);
        let layer = Layer::of(device, &LayerConfig::new(problem, 0.2))?;
        let mut lab = Self {
            workspace: layer.workspace(&LIMITS)?,
            rotary: RotaryTables::new(device, &Rope::plain(1e4), 8, 32)?,
            layer,
            expected: Vec::new(),
        };
        for step in STEPS {
            let outputs = lab.run(step)?;
            lab.expected.push(outputs);
        }
        Ok(lab)
    }

    /// Runs a step. Returns its outputs and the cache after it.
    fn run(&mut self, requests: &[StepRequest<'_>]) -> Result<Vec<f32>> {
        let step = StepPlan::new(&self.workspace, requests)?;
        self.workspace.prepare(&self.layer, &step)?;
        self.forward(step.tokens())
    }

    fn forward(&mut self, tokens: usize) -> Result<Vec<f32>> {
        let config = *self.layer.config();
        let heads = config.problem.heads as usize;
        let [mut query, latent, mut rope] =
            [heads * 24, 32, 8].map(|width| numbers(tokens * width));
        let weights = numbers(32 * heads * 32);
        let layout = CacheLayout::contiguous(DIMS, config.problem.kv_format, 9, 4);
        let mut cache = numbers(9 * layout.page_stride / 4);
        let mut out = vec![f32::NAN; tokens * heads * 16];
        self.layer.forward_unrotated(
            &mut self.workspace,
            LayerCall::unrotated(
                Weights::from_checkpoint(
                    named(
                        "W_kv_b",
                        TensorRef::from_slice(&weights, [1, heads * 32, 32]),
                    )?,
                    &config,
                )?,
                named(
                    "query",
                    TensorMut::from_slice(&mut query, [tokens, heads, 24]),
                )?,
                named("latent", TensorRef::from_slice(&latent, [tokens, 1, 32]))?,
                named("rope", TensorMut::from_slice(&mut rope, [tokens, 1, 8]))?,
                self.rotary.rotation()?,
                named(
                    "cache",
                    CacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout),
                )?,
                named("out", TensorMut::from_slice(&mut out, [tokens, heads, 16]))?,
            ),
        )?;
        out.extend(cache);
        Ok(out)
    }

    fn assert_right(&mut self, after: &str) {
        for (index, step) in STEPS.into_iter().enumerate() {
            let given = self
                .run(step)
                .unwrap_or_else(|error| panic!("{after}: {error}"));
            assert!(given.iter().all(|value| value.is_finite()), "{after}");
            assert_eq!(given, self.expected[index], "{after}, step {index}");
        }
    }
}

/// Returns pseudorandom numbers.
fn numbers(count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(count as u64);
    (0..count).map(|_| 2.0 * random.f32() - 1.0).collect()
}

/// Lets each operation of one kind in `work` fail in turn, and checks the layers after each
/// failure. Returns the number of operations.
fn walk(
    device: &Faulty,
    labs: &mut [Lab; 2],
    kind: Kind,
    mut work: impl FnMut(&mut Lab) -> Result<()>,
) -> usize {
    for n in 1.. {
        device.fail(kind, n);
        let result = work(&mut labs[0]);
        if device.mend(kind) {
            result.expect("nothing failed");
            return n - 1;
        }
        let after = format!("{kind:?} {n}");
        match result {
            Err(Error::Device {
                device: "faulty", ..
            }) => {}
            Err(error) => panic!("{after}: {error}"),
            Ok(()) => panic!("{after}: the failure is not told"),
        }
        for lab in labs.iter_mut() {
            lab.assert_right(&after);
        }
    }
    unreachable!("there are more numbers than operations")
}

#[test]
fn next_step_survives_failures() {
    let device = Faulty::default();
    let mut labs = [2, 3].map(|heads| Lab::new(&device, heads).unwrap());
    for (index, requests) in STEPS.into_iter().enumerate() {
        for kind in [Kind::Upload, Kind::Operation] {
            let count = walk(&device, &mut labs, kind, |lab| lab.run(requests).map(drop));
            // The second step has chunks, merges and the expansion of prompts as further
            // operations.
            let min = match (kind, index) {
                (Kind::Operation, 0) => 4,
                (Kind::Operation, _) => 20,
                _ => 2,
            };
            assert!(count >= min, "{count} of {kind:?} in step {index}");
        }
        let none = walk(&device, &mut labs, Kind::Allocation, |lab| {
            lab.run(requests).map(drop)
        });
        assert_eq!(none, 0, "a step allocates nothing");
    }
}

#[test]
fn workspace_survives_failures() {
    let device = Faulty::default();
    let mut labs = [2, 3].map(|heads| Lab::new(&device, heads).unwrap());
    for (kind, min) in [(Kind::Allocation, 7), (Kind::Upload, 2)] {
        let of = device.clone();
        let count = walk(&device, &mut labs, kind, |lab| {
            lab.workspace = lab.layer.workspace(&LIMITS)?;
            lab.rotary = RotaryTables::new(&of, &Rope::plain(1e4), 8, 32)?;
            Ok(())
        });
        assert!(count >= min, "{count} of {kind:?}");
    }
}

#[test]
fn unprepared_step_is_refused() {
    let device = Faulty::default();
    let mut lab = Lab::new(&device, 2).unwrap();
    for (index, requests) in STEPS.into_iter().enumerate() {
        for kind in [Kind::Upload, Kind::Operation] {
            device.fail(kind, 1);
            let step = StepPlan::new(&lab.workspace, requests).unwrap();
            lab.workspace.prepare(&lab.layer, &step).unwrap_err();
            assert!(!device.mend(kind));
            assert_eq!(
                lab.forward(step.tokens()).unwrap_err().to_string(),
                "workspace: given one without a prepared step, accepted one whose last `prepare` \
                 succeeded"
            );
            lab.assert_right(&format!("{kind:?} in step {index}"));
        }
    }
}

#[test]
fn step_reruns_after_failure() {
    let device = Faulty::default();
    let mut lab = Lab::new(&device, 2).unwrap();
    for (index, requests) in STEPS.into_iter().enumerate() {
        let step = StepPlan::new(&lab.workspace, requests).unwrap();
        lab.workspace.prepare(&lab.layer, &step).unwrap();
        for n in 1.. {
            device.fail(Kind::Operation, n);
            let result = lab.forward(step.tokens());
            if device.mend(Kind::Operation) {
                break;
            }
            assert!(result.is_err(), "operation {n}");
            assert_eq!(lab.forward(step.tokens()).unwrap(), lab.expected[index]);
        }
    }
}
