//! Three ways to call a backend, and the cost of each.
//!
//! | who chooses | when | how | cost of a call, besides the backend's own code |
//! |---|---|---|---|
//! | you, or the compiler | you build for one GPU | types by hand, or [`best_prefill!`](crate::best_prefill) and [`best_decode!`](crate::best_decode) | nothing |
//! | the program, among types that you list | you support several GPUs, with backends you know | [`with_backends`], once; then a `match`, or a pointer that you keep | one load and an indirect call |
//! | the program, among all linked backends | backends come from crates that you do not know | [`Registry::instantiate_decode`](crate::select::Registry::instantiate_decode) | an indirect call, and checks that state and metadata belong to the backend: 62 instructions |
//!
//! All three follow the same rules, which are `const fn`s.
//! [`BackendSpec::reasons`](crate::spec::BackendSpec::reasons) lists the reasons against a backend,
//! and [`tried_before`](crate::select::tried_before) orders two backends.
//!
//! # One GPU: the compiler chooses
//!
//! ```
//! use mla_runtime::best_decode;
//! use mla_runtime::model::{DType, MlaDims};
//! use mla_runtime::spec::{Problem, Target};
//! use mla_cpu::CpuDecode;
//!
//! const PROBLEM: Problem = Problem::new(MlaDims::R1, 128, DType::BF16);
//!
//! // For a GPU: `Target::dry_run(Capability::new(9, 0))`, and `mla_kernels::DecodeBackends`.
//! type Decode = best_decode!([CpuDecode], Target::CPU, PROBLEM);
//!
//! fn engine(decode: Decode) -> CpuDecode {
//!     decode
//! }
//! ```
//!
//! If no backend fits, the program does not compile. The error lists the reasons against each:
//!
//! ```compile_fail
//! # use mla_runtime::best_decode;
//! # use mla_runtime::model::{DType, MlaDims};
//! # use mla_runtime::spec::{Capability, Problem, Target};
//! # use mla_cpu::CpuDecode;
//! # const PROBLEM: Problem = Problem::new(MlaDims::R1, 128, DType::BF16);
//! // decode: no backend fits on sm 9.0
//! //   CPU: platform: given cuda, accepted cpu
//! fn engine(_: best_decode!([CpuDecode], Target::dry_run(Capability::new(9, 0)), PROBLEM)) {}
//! ```
//!
//! A list is `[A, B]`, or `[A, B, ..Rest]` with a named list such as `mla_kernels::DecodeBackends`.
//! A list can thus contain the built-in backends and those of any other crate.
//!
//! # Several GPUs: one pointer to code that was compiled for the choice
//!
//! The program selects, and [`with_backends`] turns the selection into types again. The code that
//! follows is compiled for these types. In this example that is a whole engine behind its own
//! trait. A call of `step` is one load and an indirect call; every call within `step` is direct.
//!
//! ```
//! use mla_runtime::backend::{DecodeBackend, LayerConfig, PrefillBackend};
//! use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
//! use mla_runtime::device::Device;
//! # use mla_runtime::model::{DType, MlaDims};
//! use mla_runtime::dispatch::{LayerVisitor, backends, with_backends};
//! use mla_runtime::layer::MlaLayer;
//! use mla_runtime::select::{Registry, SelectionError, SelectionRequest};
//! use mla_runtime::spec::Problem;
//!
//! type Prefill = backends![CpuPrefill];
//! type Decode = backends![CpuDecode];
//!
//! trait Engine {
//!     fn step(&mut self) -> mla_runtime::Result<()>;
//! }
//!
//! impl<P: PrefillBackend, B: DecodeBackend<Device = P::Device>> Engine for MlaLayer<P, B> {
//!     fn step(&mut self) -> mla_runtime::Result<()> {
//!         // self.forward(…)
//!         Ok(())
//!     }
//! }
//!
//! struct Start<'a> {
//!     device: &'a Cpu,
//!     config: LayerConfig,
//! }
//!
//! impl LayerVisitor<Cpu> for Start<'_> {
//!     type Output = mla_runtime::Result<Box<dyn Engine>>;
//!
//!     fn visit<P, B>(self) -> Self::Output
//!     where
//!         P: PrefillBackend<Device = Cpu>,
//!         B: DecodeBackend<Device = Cpu>,
//!     {
//!         Ok(Box::new(MlaLayer::<P, B>::of(self.device, &self.config)?))
//!     }
//! }
//!
//! let device = Cpu::new();
//! let registry = Registry::of::<Prefill, Decode>()?;
//! let problem = Problem::new(MlaDims::R1, 16, DType::BF16);
//! let selection = registry.select(&SelectionRequest::new(device.target(), problem))?;
//! let config = selection.config(0.1);
//! let start = Start { device: &device, config };
//! let mut engine = with_backends::<Prefill, Decode, Cpu, _>(&selection, start)??;
//! engine.step()?;
//! # Ok::<(), SelectionError>(())
//! ```
//!
//! For two or three kinds of GPU an enumeration suffices, and a call is one `match`. Each arm has
//! the types that the compiler chooses for one GPU.
//!
//! ```
//! # use mla_runtime::best_decode;
//! # use mla_runtime::model::{DType, MlaDims};
//! # use mla_runtime::spec::{Problem, Target};
//! # use mla_cpu::CpuDecode;
//! # const PROBLEM: Problem = Problem::new(MlaDims::R1, 128, DType::BF16);
//! # const HOPPER: Target = Target::CPU;
//! # const BLACKWELL: Target = Target::CPU;
//! # type Backends = mla_runtime::dispatch::backends![CpuDecode];
//! enum Decode {
//!     Hopper(best_decode!(Backends, HOPPER, PROBLEM)),
//!     Blackwell(best_decode!(Backends, BLACKWELL, PROBLEM)),
//! }
//! ```

//! # Dispatch in machine code
//!
//! The listings below show the call of a backend that only launches, in three ways. The tests of
//! `mla-dispatch` (`mla-runtime/tests/crates/dispatch`) compare these listings with the linked
//! programs. They also count a million dispatches with callgrind, and they check that nothing is
//! allocated.
//!
//! A program without this crate takes the addresses and calls the C function:
//!
#![doc = concat!("```text\n", include_str!("../../dispatch/by_hand.asm"), "```")]
//!
//! A call through the type that the compiler chose has exactly the same instructions:
//!
#![doc = concat!("```text\n", include_str!("../../dispatch/chosen.asm"), "```")]
//!
//! A call through a pointer that was kept when the program selected. Here `selected` represents any
//! call of `step`; it contains the same code again.
//!
#![doc = concat!("```text\n", include_str!("../../dispatch/selected.asm"), "```")]

mod choice;
mod visit;

// The expansions of the attribute and of the macros name these types.
#[doc(hidden)]
pub use crate::backend::list::{
    Absent, DecodeList, DecodeMember, Listed, Member, Nth, PrefillList, PrefillMember,
};
#[doc(hidden)]
pub use choice::choose;
#[doc(hidden)]
pub use visit::{DecodeArm, PrefillArm};
pub use visit::{LayerVisitor, with_backends};

pub use crate::{backends, best_decode, best_prefill};
