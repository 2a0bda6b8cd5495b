//! A backend whose first kernel is a programmatic dependent launch that does not wait, like some
//! third-party kernels. If the backend declares that its kernels wait, conformance finds the fault.
//! If it does not, the fences around its calls make its results right.

use mla_conformance::DecodeTopic;
use mla_kernels::Cuda;
use mla_kernels::backends::sm80::MmaMla;
use mla_kernels::device::{Buffer, Bytes};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Query, StepLimits,
};
use mla_runtime::device::Device as _;
use mla_runtime::device::probe::Dependents;
use mla_runtime::spec::BackendSpec;
use mla_runtime::tensor::{Memory as _, TensorRef};

use crate::common::gpu;

/// A portable decode of copies of its queries. The kernel that makes the copies waits for nothing.
struct Impatient<const SAYS_THAT_IT_WAITS: bool> {
    decode: MmaMla,
    copies: Box<dyn Dependents<Cuda>>,
}

/// Size of the memory for the copies of one call. An allocation within the call would come between
/// the kernels on the stream, and nothing would overlap.
const COPY_BYTES: usize = 16 << 20;

/// The inner state, and memory for the copies.
struct State {
    decode: <MmaMla as DecodeBackend>::State,
    copies: [Buffer; 2],
}

impl<const WAITS: bool> Impatient<WAITS> {
    /// Enqueues the kernel that copies a tensor, and returns the copy.
    fn copied<'a>(
        &self,
        tensor: TensorRef<'a, Cuda>,
        to: &mut Buffer,
    ) -> Result<TensorRef<'a, Cuda>> {
        let from = tensor.bytes();
        let (to, _) = Cuda::split_mut(to.bytes_mut(), from.len());
        let (address, len) = (to.address(), to.len());
        self.copies.copy_at_once(from, to)?;
        // SAFETY: the buffer has this number of bytes there, and lives as long as the state.
        let bytes = unsafe { Bytes::from_raw(address, len) };
        TensorRef::new(bytes, *tensor.layout())
    }
}

impl<const WAITS: bool> DecodeBackend for Impatient<WAITS> {
    type Device = Cuda;
    type State = State;
    type Metadata = ();

    const SPEC: BackendSpec = MmaMla::SPEC.with_dependent_launch(WAITS);

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        // The copies borrow a device that lives as long as the test's process.
        let lasting: &'static Cuda = Box::leak(Box::new(device.clone()));
        let copies = lasting.probe_dependents()?;
        Ok(Self {
            decode: MmaMla::new(device, config)?,
            copies: copies.expect("a GPU since Hopper"),
        })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        self.decode.workspace_bytes(device, limits)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<State> {
        Ok(State {
            decode: self.decode.state(device, limits)?,
            copies: [device.allocate(COPY_BYTES)?, device.allocate(COPY_BYTES)?],
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        state: &mut State,
        (): &mut (),
    ) -> Result<()> {
        self.decode
            .prepare(device, batch, &mut state.decode, &mut ())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        mut call: DecodeCall<'_, Cuda>,
        state: &mut State,
        (): &(),
    ) -> Result<()> {
        let [first, second] = &mut state.copies;
        call.query = match call.query {
            Query::Concatenated(q) => Query::Concatenated(self.copied(q, first)?),
            Query::Split { latent, rope } => Query::Split {
                latent: self.copied(latent, first)?,
                rope: self.copied(rope, second)?,
            },
        };
        // SAFETY: the caller keeps to the same contract.
        unsafe { self.decode.decode(device, call, &mut state.decode, &()) }
    }
}

#[test]
#[ignore = "needs a GPU since Hopper: \
            cargo test -r --features sm80 --test gpu -- --ignored impatient"]
fn a_kernel_that_does_not_wait_is_found_if_it_says_that_it_does() {
    let device = gpu();
    let topic = DecodeTopic::DependentLaunch;
    let failure = mla_conformance::decode::<Impatient<true>>(&device, topic).unwrap_err();
    let message = failure.to_string();
    assert!(
        message.ends_with("or remove the key `dependent_launch`"),
        "{message}"
    );
}

#[test]
#[ignore = "needs a GPU since Hopper: \
            cargo test -r --features sm80 --test gpu -- --ignored impatient"]
fn a_kernel_that_does_not_wait_is_right_between_fences() {
    let device = gpu();
    for topic in [DecodeTopic::DependentLaunch, DecodeTopic::QueryLengths] {
        mla_conformance::decode::<Impatient<false>>(&device, topic).unwrap();
    }
}
