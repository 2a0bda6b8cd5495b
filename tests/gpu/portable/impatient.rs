//! A backend that begins with a kernel of programmatic dependent launch which does not wait, as
//! some kernels from elsewhere do: conformance finds it if it says that its kernels wait, and the
//! fences around its calls make it right if it does not.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::CUlaunchAttributeID_enum as LaunchAttribute;
use cudarc::driver::sys::{self, CUfunction, CUlaunchAttribute, CUlaunchConfig};
use mla_conformance::DecodeTopic;
use mla_kernels::Cuda;
use mla_kernels::backends::sm80::MmaMla;
use mla_kernels::device::{Buffer, Bytes};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Query, StepLimits,
};
use mla_runtime::device::Memory as _;
use mla_runtime::spec::BackendSpec;
use mla_runtime::tensor::TensorRef;

use crate::common::gpu;

/// The kernel's text, which ends in a zero byte as the driver wants it.
const PTX: &str = concat!(include_str!("impatient.ptx"), "\0");

/// A portable decode of copies of its queries, which a kernel makes that waits for nothing.
struct Impatient<const SAYS_THAT_IT_WAITS: bool> {
    decode: MmaMla,
    copy: CUfunction,
}

// SAFETY: the function belongs to a module that is never unloaded, and the driver takes a launch of
// it from any thread.
unsafe impl<const WAITS: bool> Send for Impatient<WAITS> {}
// SAFETY: as above; nothing of it changes.
unsafe impl<const WAITS: bool> Sync for Impatient<WAITS> {}

/// Size of the memory for the copies of one call. An allocation within the call would come between
/// the kernels on the stream, and nothing would overlap.
const COPY_BYTES: usize = 32 << 20;

/// The inner state, and memory for the copies.
struct State {
    decode: <MmaMla as DecodeBackend>::State,
    copies: Buffer,
}

impl<const WAITS: bool> Impatient<WAITS> {
    /// Enqueues the kernel that copies a tensor to this address of the memory for copies, and
    /// returns the copy.
    fn copied<'a>(
        &self,
        device: &Cuda,
        tensor: TensorRef<'a, Cuda>,
        to: u64,
    ) -> Result<TensorRef<'a, Cuda>> {
        let from = tensor.bytes();
        assert!(
            from.len() <= COPY_BYTES / 2,
            "{} bytes of queries",
            from.len()
        );
        let mut values = [from.address(), to, from.len() as u64];
        let mut parameters = values
            .each_mut()
            .map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: a struct of plain numbers, for which zeros are values.
        let mut early: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        early.id = LaunchAttribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1024,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: device.stream().cu_stream(),
            attrs: &raw mut early,
            numAttrs: 1,
        };
        // SAFETY: the parameters are those of the function in the PTX, both regions have that many
        // bytes, and the copies are freed with the state, behind the stream's work.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.copy,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .expect("a launch of the copy");
        // SAFETY: the buffer of copies has that many bytes there, and lives as long as the state.
        let bytes = unsafe { Bytes::from_raw(to, from.len()) };
        TensorRef::new(bytes, *tensor.layout())
    }
}

impl<const WAITS: bool> DecodeBackend for Impatient<WAITS> {
    type Device = Cuda;
    type State = State;
    type Metadata = ();

    const SPEC: BackendSpec = MmaMla::SPEC.with_dependent_launch(WAITS);

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        device.bind()?;
        // SAFETY: the image is text that ends in a zero byte.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }.expect("the module");
        // SAFETY: the module is loaded, and never unloaded.
        let copy = unsafe { result::module::get_function(module, c"copy_at_once".to_owned()) };
        Ok(Self {
            decode: MmaMla::new(device, config)?,
            copy: copy.expect("the kernel"),
        })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        self.decode.workspace_bytes(device, limits)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<State> {
        Ok(State {
            decode: self.decode.state(device, limits)?,
            copies: device.allocate(COPY_BYTES)?,
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
        let first = state.copies.address();
        let second = first + COPY_BYTES as u64 / 2;
        call.query = match call.query {
            Query::Concatenated(q) => Query::Concatenated(self.copied(device, q, first)?),
            Query::Split { latent, rope } => Query::Split {
                latent: self.copied(device, latent, first)?,
                rope: self.copied(device, rope, second)?,
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
