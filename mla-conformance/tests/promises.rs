//! Promises of a spec other than correct numbers: a backend that breaks one is reported, and a
//! backend that keeps it or does not make it is not.

mod simulated;

use mla_conformance::{self as conformance, DecodeTopic, PrefillTopic};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, PrefillBackend, PrefillBatch, PrefillCall,
    StepLimits,
};
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result, mla_backend};

use simulated::{Graph, Kept, OnCpu as _, Simulated};

/// Behaviour of a backend's kernels.
struct Conduct {
    /// True if the kernels wait for those before them.
    wait: bool,
    /// True if the last one ends behind the others.
    end_last: bool,
    /// True if they take lengths as they were when the launch was captured.
    bake: bool,
    /// Bytes of workspace for each request, as the backend says.
    said: usize,
    /// Bytes for each request that the kernels write.
    written: usize,
    /// True if steps beyond the limits are refused.
    refuse: bool,
}

/// Bytes of workspace for each request that is allocated.
const ALLOCATED: usize = 16;

const RIGHT: Conduct = Conduct {
    wait: true,
    end_last: true,
    bake: false,
    said: ALLOCATED,
    written: ALLOCATED,
    refuse: true,
};

/// Workspaces of an engine.
struct State<Cpu = <CpuDecode as DecodeBackend>::State> {
    cpu: Cpu,
    workspace: Kept,
    requests: usize,
    captured: Vec<i32>,
}

impl<Cpu> State<Cpu> {
    fn new(cpu: Cpu, device: &Simulated, limits: &StepLimits) -> Result<Self> {
        Ok(Self {
            cpu,
            workspace: device.allocate(limits.requests * ALLOCATED)?,
            requests: limits.requests,
            captured: Vec::new(),
        })
    }

    /// Refuses more requests than it was made for, if the backend refuses any.
    fn check(&self, requests: usize, conduct: &Conduct) -> Result<()> {
        match conduct.refuse && requests > self.requests {
            true => Err(Error::argument("requests", requests, self.requests)),
            false => Ok(()),
        }
    }

    /// True if the kernels of a call see the numbers that it has now.
    fn sees(&mut self, device: &Simulated, lens: Vec<i32>, bake: bool) -> bool {
        match device.graph() {
            Graph::None => true,
            Graph::Captures => {
                self.captured = lens;
                true
            }
            Graph::Replays => !bake || self.captured == lens,
        }
    }
}

// The processor's decode on the simulated device, with kernels of this behaviour.
macro_rules! conducted {
    ($name:ident, [$($key:tt)*], $conduct:expr) => {
        struct $name(CpuDecode);

        impl $name {
            const CONDUCT: Conduct = $conduct;
        }

        #[mla_backend(sm = "any", dtypes = "f32", $($key)*)]
        impl DecodeBackend for $name {
            type Device = Simulated;
            type State = State;
            type Metadata = ();

            fn new(_: &Simulated, config: &LayerConfig) -> Result<Self> {
                CpuDecode::new(&Cpu::new(), config).map(Self)
            }

            fn workspace_bytes(&self, _: &Simulated, limits: &StepLimits) -> Result<u64> {
                Ok((limits.requests * Self::CONDUCT.said) as u64)
            }

            fn state(&self, device: &Simulated, limits: &StepLimits) -> Result<State> {
                let cpu = DecodeBackend::state(&self.0, &Cpu::new(), limits)?;
                State::new(cpu, device, limits)
            }

            fn metadata(&self, _: &Simulated, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                _: &Simulated,
                batch: &DecodeBatch<'_, Simulated>,
                state: &mut State,
                (): &mut (),
            ) -> Result<()> {
                state.check(batch.block_table.requests(), &Self::CONDUCT)
            }

            unsafe fn decode(
                &self,
                device: &Simulated,
                call: DecodeCall<'_, Simulated>,
                state: &mut State,
                (): &(),
            ) -> Result<()> {
                let requests = call.batch.block_table.requests();
                state.workspace.write(requests * Self::CONDUCT.written);
                let lens = (0..requests).map(|i| call.batch.seq_lens.at(i)).collect();
                let sees = state.sees(device, lens, Self::CONDUCT.bake);
                if !device.begin(Self::CONDUCT.wait) || !sees {
                    // Results of other inputs would be wrong, so none are written.
                    return Ok(());
                }
                let call = call.on_cpu()?;
                // SAFETY: the call is the caller's own, who keeps to the contract.
                unsafe { DecodeBackend::decode(&self.0, &Cpu::new(), call, &mut state.cpu, &()) }?;
                device.end(Self::CONDUCT.end_last);
                Ok(())
            }
        }
    };
}

conducted! { Right, [dependent_launch = true, graphs = "single_token"], RIGHT }

conducted! { Impatient, [dependent_launch = true], Conduct { wait: false, ..RIGHT } }
conducted! { ImpatientAlone, [], Conduct { wait: false, ..RIGHT } }

conducted! { Hasty, [dependent_launch = true], Conduct { end_last: false, ..RIGHT } }
conducted! { HastyAlone, [], Conduct { end_last: false, ..RIGHT } }

conducted! { Baked, [graphs = "single_token"], Conduct { bake: true, ..RIGHT } }
conducted! { BakedWithoutGraphs, [], Conduct { bake: true, ..RIGHT } }

conducted! { SaysLess, [], Conduct { said: ALLOCATED - 1, ..RIGHT } }
conducted! { WritesMore, [], Conduct { written: ALLOCATED + 1, ..RIGHT } }
conducted! { TakesMore, [], Conduct { refuse: false, ..RIGHT } }

// The processor's prefill, in the same way.
macro_rules! prefilling {
    ($name:ident, [$($key:tt)*], $conduct:expr) => {
        struct $name(CpuPrefill);

        impl $name {
            const CONDUCT: Conduct = $conduct;
        }

        #[mla_backend(sm = "any", dtypes = "f32", $($key)*)]
        impl PrefillBackend for $name {
            type Device = Simulated;
            type State = State<<CpuPrefill as PrefillBackend>::State>;
            type Metadata = ();

            fn new(_: &Simulated, config: &LayerConfig) -> Result<Self> {
                CpuPrefill::new(&Cpu::new(), config).map(Self)
            }

            fn workspace_bytes(&self, _: &Simulated, limits: &StepLimits) -> Result<u64> {
                Ok((limits.requests * Self::CONDUCT.said) as u64)
            }

            fn state(&self, device: &Simulated, limits: &StepLimits) -> Result<Self::State> {
                let cpu = PrefillBackend::state(&self.0, &Cpu::new(), limits)?;
                State::new(cpu, device, limits)
            }

            fn metadata(&self, _: &Simulated, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                _: &Simulated,
                batch: &PrefillBatch<'_>,
                state: &mut Self::State,
                (): &mut (),
            ) -> Result<()> {
                state.check(batch.query_lens.len(), &Self::CONDUCT)
            }

            unsafe fn prefill(
                &self,
                device: &Simulated,
                call: PrefillCall<'_, Simulated>,
                state: &mut Self::State,
                (): &(),
            ) -> Result<()> {
                let requests = call.query_starts.len() - 1;
                state.workspace.write(requests * Self::CONDUCT.written);
                let numbers = call.query.bytes().iter().map(|byte| i32::from(*byte));
                let sees = state.sees(device, numbers.collect(), Self::CONDUCT.bake);
                if !device.begin(Self::CONDUCT.wait) || !sees {
                    return Ok(());
                }
                let call = call.on_cpu()?;
                // SAFETY: the call is the caller's own, who keeps to the contract.
                unsafe { self.0.prefill(&Cpu::new(), call, &mut state.cpu, &()) }?;
                device.end(Self::CONDUCT.end_last);
                Ok(())
            }
        }
    };
}

prefilling! { RightPrefill, [dependent_launch = true, graphs = "always"], RIGHT }

prefilling! { ImpatientPrefill, [dependent_launch = true], Conduct { wait: false, ..RIGHT } }
prefilling! { ImpatientPrefillAlone, [], Conduct { wait: false, ..RIGHT } }

prefilling! { HastyPrefill, [dependent_launch = true], Conduct { end_last: false, ..RIGHT } }
prefilling! { HastyPrefillAlone, [], Conduct { end_last: false, ..RIGHT } }

prefilling! { BakedPrefill, [graphs = "always"], Conduct { bake: true, ..RIGHT } }
prefilling! { BakedPrefillWithoutGraphs, [], Conduct { bake: true, ..RIGHT } }

prefilling! { SaysLessPrefill, [], Conduct { said: ALLOCATED - 1, ..RIGHT } }
prefilling! { WritesMorePrefill, [], Conduct { written: ALLOCATED + 1, ..RIGHT } }
prefilling! { TakesMorePrefill, [], Conduct { refuse: false, ..RIGHT } }

fn check<B: DecodeBackend<Device = Simulated>>(
    topic: DecodeTopic,
) -> std::result::Result<(), String> {
    conformance::decode::<B>(&Simulated::default(), topic).map_err(|failure| failure.to_string())
}

fn said<B: DecodeBackend<Device = Simulated>>(topic: DecodeTopic) -> String {
    check::<B>(topic).expect_err("a broken promise")
}

#[test]
fn promises_that_are_kept_pass() {
    for topic in [
        DecodeTopic::SingleTokens,
        DecodeTopic::DependentLaunch,
        DecodeTopic::Graphs,
        DecodeTopic::Workspace,
        DecodeTopic::Alignment,
    ] {
        assert_eq!(check::<Right>(topic), Ok(()), "{topic:?}");
    }
}

#[test]
fn a_kernel_that_does_not_wait_is_found_if_it_is_declared_to() {
    let message = said::<Impatient>(DecodeTopic::DependentLaunch);
    let between = "IMPATIENT: between a kernel that writes its inputs late and one that reads its \
                   results early: IMPATIENT: out[0, 0, 0] is NaN, but should be ";
    assert!(message.starts_with(between), "{message}");
    assert!(
        message.ends_with("or remove the key `dependent_launch`"),
        "{message}"
    );
    // The inputs are there in time if no kernels overlap.
    assert_eq!(check::<Impatient>(DecodeTopic::SingleTokens), Ok(()));
    let selected = |entry| {
        let device = Simulated::default();
        conformance::decode_entry(entry, &device, DecodeTopic::DependentLaunch)
    };
    assert!(selected(Impatient::ENTRY).is_err());
    // The device keeps apart what does not promise to wait, chosen by type or at run time.
    assert!(selected(ImpatientAlone::ENTRY).is_ok());
    assert_eq!(
        check::<ImpatientAlone>(DecodeTopic::DependentLaunch),
        Ok(())
    );
}

#[test]
fn a_last_kernel_that_ends_before_others_is_found_if_it_is_declared_to_be_last() {
    let message = said::<Hasty>(DecodeTopic::DependentLaunch);
    assert!(message.contains("out[0, 0, 0] is NaN"), "{message}");
    assert_eq!(check::<HastyAlone>(DecodeTopic::DependentLaunch), Ok(()));
}

#[test]
fn a_graph_that_keeps_the_lengths_of_its_capture_is_found_if_graphs_are_promised() {
    let message = said::<Baked>(DecodeTopic::Graphs);
    let replayed = "BAKED: captured into a graph and replayed with other inputs: BAKED: ";
    assert!(message.starts_with(replayed), "{message}");
    assert!(message.ends_with("or narrow the key `graphs`"), "{message}");
    assert_eq!(check::<BakedWithoutGraphs>(DecodeTopic::Graphs), Ok(()));
}

#[test]
fn a_workspace_is_as_large_as_is_said_and_nothing_is_written_beyond() {
    let message = said::<SaysLess>(DecodeTopic::Workspace);
    let said_less = "SAYS_LESS: state and metadata allocate 96 bytes, but `workspace_bytes` says \
                     90, for ";
    assert!(message.starts_with(said_less), "{message}");
    let beyond = "wrote beyond its workspace, behind a buffer of 96 bytes, for ";
    let message = said::<WritesMore>(DecodeTopic::Workspace);
    assert!(message.contains(beyond), "{message}");
    // The state is for one request, and is given six.
    let beyond = "wrote beyond its workspace, behind a buffer of 16 bytes, for ";
    let message = said::<TakesMore>(DecodeTopic::Workspace);
    assert!(message.contains(beyond), "{message}");
}

fn check_prefill<B: PrefillBackend<Device = Simulated>>(
    topic: PrefillTopic,
) -> std::result::Result<(), String> {
    conformance::prefill::<B>(&Simulated::default(), topic).map_err(|failure| failure.to_string())
}

/// The message of a broken promise, and the same behaviour without the promise passes.
fn said_prefill<B, Alone>(topic: PrefillTopic) -> String
where
    B: PrefillBackend<Device = Simulated>,
    Alone: PrefillBackend<Device = Simulated>,
{
    assert_eq!(check_prefill::<B>(PrefillTopic::NewTokens), Ok(()));
    assert_eq!(check_prefill::<Alone>(topic), Ok(()), "{topic:?}");
    check_prefill::<B>(topic).expect_err("a broken promise")
}

#[test]
fn a_prefill_that_keeps_its_promises_passes() {
    for topic in [
        PrefillTopic::NewTokens,
        PrefillTopic::DependentLaunch,
        PrefillTopic::Graphs,
        PrefillTopic::Workspace,
        PrefillTopic::Alignment,
    ] {
        assert_eq!(check_prefill::<RightPrefill>(topic), Ok(()), "{topic:?}");
    }
}

#[test]
fn a_prefill_that_overlaps_what_it_must_not_is_found() {
    let topic = PrefillTopic::DependentLaunch;
    for message in [
        said_prefill::<ImpatientPrefill, ImpatientPrefillAlone>(topic),
        said_prefill::<HastyPrefill, HastyPrefillAlone>(topic),
    ] {
        assert!(message.contains(" is NaN, but should be "), "{message}");
        let remedy = "or remove the key `dependent_launch`";
        assert!(message.ends_with(remedy), "{message}");
    }
}

#[test]
fn a_prefill_whose_graph_keeps_the_numbers_of_its_capture_is_found() {
    let topic = PrefillTopic::Graphs;
    let message = said_prefill::<BakedPrefill, BakedPrefillWithoutGraphs>(topic);
    let replayed = "BAKED_PREFILL: captured into a graph and replayed with other inputs: ";
    assert!(message.starts_with(replayed), "{message}");
    assert!(message.ends_with("or narrow the key `graphs`"), "{message}");
}

#[test]
fn a_workspace_of_prefill_is_as_large_as_is_said_and_nothing_is_written_beyond() {
    let topic = PrefillTopic::Workspace;
    let message = said_prefill::<SaysLessPrefill, RightPrefill>(topic);
    assert!(
        message.contains(", but `workspace_bytes` says "),
        "{message}"
    );
    let beyond = "wrote beyond its workspace, behind a buffer of ";
    for message in [
        said_prefill::<WritesMorePrefill, RightPrefill>(topic),
        said_prefill::<TakesMorePrefill, RightPrefill>(topic),
    ] {
        assert!(message.contains(beyond), "{message}");
    }
}
