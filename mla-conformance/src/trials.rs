//! The trials of a case, written once for both phases.

use mla_runtime::backend::StepLimits;
use mla_runtime::device::Device;
use mla_runtime::device::probe::Replayed;
use mla_runtime::spec::{BackendSpec, Feature, GraphSupport, Problem, QueryLen};
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use super::data::{
    Bits, Buffers, FilledLater, Outputs, Random, Written, copy_all, of_output, starts,
};
use super::failure::{Failure, Promise, refused};
use super::trial::{Placement, Trial};

type Tried<T> = std::result::Result<T, Failure>;

/// A case of one phase, with the calls of its stages `S`.
pub(super) trait Case<S>: Clone {
    type Device: Device;
    type State;
    type Metadata;
    /// The case's numbers in host memory.
    type Numbers;
    /// The case's inputs in a device's memory.
    type Inputs;

    /// Name of the backend's function that a case calls.
    const CALL: &'static str;
    /// Limits of a step that is smaller than the step of any case.
    const SMALLEST: StepLimits;
    /// True if a replay has other lengths than the capture, and is therefore prepared again.
    const REPLAYS_LENGTHS: bool;

    fn problem(&self) -> Problem;
    fn trial(&self) -> Trial;
    /// Elements between one token's rows and the next.
    fn gap(&self) -> usize;
    fn limits(&self) -> StepLimits;
    /// Returns the case with other numbers, which need memory of the same sizes.
    fn changed(&self) -> Self;
    /// Returns a case of these requests in this order, each with its own numbers. `None` is
    /// padding. If `wide`, everything that is random has its maximum.
    fn of_requests(&self, requests: &[Option<usize>], random: &mut Random, wide: bool) -> Self;
    fn query_lens(&self) -> &[usize];
    fn own_seeds(&self) -> &[u64];
    fn numbers(&self, placement: Placement) -> Self::Numbers;
    /// Uploads the inputs in the form that a spec asks for.
    fn upload(
        &self,
        numbers: &Self::Numbers,
        spec: &BackendSpec,
        device: &Self::Device,
    ) -> Result<Self::Inputs>;
    /// Returns the shape of the output, and true if the log-sum-exp is asked for.
    fn output(&self, numbers: &Self::Numbers) -> ([usize; 3], bool);
    fn compare(&self, numbers: &Self::Numbers, spec: &BackendSpec, written: &Written) -> Tried<()>;
    /// Returns all buffers of inputs, always in the same order.
    fn buffers(inputs: &mut Self::Inputs) -> Buffers<'_, Self::Device>;
    /// Returns the inputs that the trial writes late. The last write is still running when the call
    /// begins.
    fn late<'a>(&self, inputs: &'a mut Self::Inputs) -> Buffers<'a, Self::Device>;

    fn spec(stage: &S) -> &'static BackendSpec;
    fn workspace_bytes(stage: &S, device: &Self::Device, limits: &StepLimits) -> Result<u64>;
    fn state(stage: &S, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;
    fn metadata(stage: &S, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;
    fn prepare(call: &mut Call<'_, Self, S>) -> Result<()>;
    fn enqueue(call: &mut Call<'_, Self, S>) -> Result<()>;
}

/// A stage's state and metadata.
type Kept<C, S> = (<C as Case<S>>::State, <C as Case<S>>::Metadata);

/// Maximum number of padding requests in a random batch.
const MAX_PADDING: usize = 2;

/// Returns the seeds of the requests' own numbers. The seed of padding is 0.
pub(super) fn own_seeds(requests: &[Option<usize>]) -> Vec<u64> {
    let seeds = requests.iter();
    seeds
        .map(|request| request.map_or(0, |at| at as u64 + 1))
        .collect()
}

/// Returns some of `count` requests and padding, in any order.
fn some_of(count: usize, random: &mut Random) -> Vec<Option<usize>> {
    let mut some: Vec<_> = (0..count).map(Some).chain([None; MAX_PADDING]).collect();
    for i in (1..some.len()).rev() {
        some.swap(i, random.below(i + 1));
    }
    some.truncate(1 + random.below(some.len()));
    some
}

/// Functions of a case of either phase, for the given traits of a stage and of a backend.
macro_rules! checks {
    ($backend:ident, $stage:ident) => {
        /// Runs the case and compares every number with the reference. If two runs of one case
        /// return equal [`Bits`], their results are equal.
        ///
        /// # Errors
        ///
        /// Returns the first failure of the backend.
        pub fn check<B: $backend>(&self, device: &B::Device) -> std::result::Result<Bits, Failure> {
            self.check_stage(&Self::backend::<B>(device, self.problem)?, device)
        }

        pub(super) fn backend<B: $backend>(
            device: &B::Device,
            problem: Problem,
        ) -> std::result::Result<B, Failure> {
            B::new(device, &config(problem))
                .map_err(|error| refused(problem, B::SPEC.name, "new", error))
        }

        /// Runs the case through an existing backend, which was made by type or by a registry.
        ///
        /// # Errors
        ///
        /// Fails as [`check`](Self::check) does.
        pub fn check_stage<S: $stage>(
            &self,
            stage: &S,
            device: &S::Device,
        ) -> std::result::Result<Bits, Failure> {
            let case = self;
            On {
                case,
                stage,
                device,
            }
            .run()
        }
    };
}
pub(super) use checks;

/// Items that a stage of either phase has under the same names.
macro_rules! stage_items {
    () => {
        type Device = S::Device;
        type State = S::State;
        type Metadata = S::Metadata;

        fn problem(&self) -> Problem {
            self.problem
        }

        fn trial(&self) -> Trial {
            self.trial
        }

        fn gap(&self) -> usize {
            self.gap
        }

        fn spec(stage: &S) -> &'static BackendSpec {
            stage.spec()
        }

        fn workspace_bytes(stage: &S, device: &S::Device, limits: &StepLimits) -> Result<u64> {
            stage.workspace_bytes(device, limits)
        }

        fn state(stage: &S, device: &S::Device, limits: &StepLimits) -> Result<S::State> {
            stage.state(device, limits)
        }

        fn metadata(stage: &S, device: &S::Device, limits: &StepLimits) -> Result<S::Metadata> {
            stage.metadata(device, limits)
        }
    };
}
pub(super) use stage_items;

/// A case, with the backend that it tests.
pub(super) struct On<'a, C: Case<S>, S> {
    pub(super) case: &'a C,
    pub(super) stage: &'a S,
    pub(super) device: &'a C::Device,
}

impl<'a, C: Case<S>, S> On<'a, C, S> {
    /// Runs the case as its trial says.
    pub(super) fn run(&self) -> Tried<Bits> {
        match self.case.trial() {
            Trial::Once => self.once(),
            Trial::Repeated => self.repeated(),
            Trial::ExactlyAligned => self.once().map_err(Promise::Alignment.broken(self.name())),
            Trial::LateQueries | Trial::LateRows => self.overlapped(),
            Trial::Replayed => self.replayed(),
            Trial::Guarded => self.guarded(),
            Trial::BeyondLimits => self.beyond_limits(),
            Trial::AmongOthers(batches) => self.among_others(batches),
        }
    }

    fn once(&self) -> Tried<Bits> {
        let mut call = self.call(self.kept(&self.case.limits())?)?;
        self.enqueued(&mut call)?;
        call.compare()
    }

    fn repeated(&self) -> Tried<Bits> {
        let mut call = self.call(self.kept(&self.case.limits())?)?;
        self.enqueued(&mut call)?;
        let untouched = self.outputs(&call.numbers, call.placement)?;
        let first = std::mem::replace(&mut call.outputs, untouched);
        let first = first.finish(self.device)?.bits();
        self.enqueued(&mut call)?;
        let bits = call.compare()?;
        match bits == first {
            true => Ok(bits),
            false => Err(Failure::Differs {
                name: self.name(),
                problem: Box::new(self.case.problem()),
                feature: Feature::Deterministic,
                how: "a second launch gives other bits than the first",
            }),
        }
    }

    fn enqueued(&self, call: &mut Call<'_, C, S>) -> Tried<()> {
        C::prepare(call).map_err(self.refused("prepare"))?;
        C::enqueue(call).map_err(self.refused(C::CALL))
    }

    /// Runs the call between kernels that overlap with the call's own kernels, if these allow it.
    fn overlapped(&self) -> Tried<Bits> {
        let device = self.device;
        let Some(dependents) = device.probe_dependents()? else {
            return Ok(Bits::default());
        };
        let mut call = self.call(self.kept(&self.case.limits())?)?;
        let late = FilledLater::new(device, self.case.late(&mut call.inputs))?;
        let mut copies = call.outputs.copies(device)?;
        // The first call has early inputs. It loads everything, so the late call loads nothing.
        self.enqueued(&mut call)?;
        device.synchronize()?;
        late.write(&*dependents, self.case.late(&mut call.inputs))?;
        C::enqueue(&mut call).map_err(self.refused(C::CALL))?;
        call.outputs.copy_to(&mut copies, &*dependents)?;
        device.synchronize()?;
        call.outputs = call.outputs.with(copies);
        let broken = Promise::DependentLaunch.broken(self.name());
        call.compare().map_err(broken)
    }

    /// Replays a graph that was captured with other numbers and, in decode, with other lengths.
    fn replayed(&self) -> Tried<Bits> {
        let mut call = self.call(self.kept(&self.case.limits())?)?;
        C::prepare(&mut call).map_err(self.refused("prepare"))?;
        let replayed = match self.device.probe_replay(&mut call) {
            Ok(false) => return Ok(Bits::default()),
            Ok(true) => call.compare(),
            Err(error) => Err(self.refused(C::CALL)(error)),
        };
        replayed.map_err(Promise::Graphs.broken(self.name()))
    }

    /// Runs with guards around the state and the metadata.
    fn guarded(&self) -> Tried<Bits> {
        if self.device.probe_guards().is_none() {
            return Ok(Bits::default());
        }
        let limits = self.case.limits();
        let said = C::workspace_bytes(self.stage, self.device, &limits);
        let said = said.map_err(self.refused("workspace_bytes"))?;
        let mut call = self.call(self.kept_within(said, &limits)?)?;
        self.enqueued(&mut call)?;
        self.check_guards()?;
        call.compare()
    }

    /// Runs with a state and metadata that are made for less. The call must be refused with an
    /// argument's name, or give the right result.
    fn beyond_limits(&self) -> Tried<Bits> {
        let mut call = self.call(self.kept_within(u64::MAX, &C::SMALLEST)?)?;
        let enqueued = C::prepare(&mut call).and_then(|()| C::enqueue(&mut call));
        self.check_guards()?;
        match enqueued {
            Ok(()) => call.compare(),
            Err(Error::Argument { .. }) => Ok(Bits::default()),
            Err(error) => Err(self.refused(C::CALL)(error)),
        }
    }

    /// Compares each request's bits in batches with its bits when it runs alone. One state, made
    /// for the largest batch, serves all of them.
    fn among_others(&self, batches: u32) -> Tried<Bits> {
        let case = self.case;
        let count = case.query_lens().len();
        let all: Vec<_> = (0..count).map(Some).chain([None; MAX_PADDING]).collect();
        let mut random = Random::new(1);
        let largest = case.of_requests(&all, &mut random, true);
        let whole = self.with(&largest).once()?;
        let mut kept = self.kept(&largest.limits())?;
        let mut alone = Vec::new();
        for request in 0..count {
            let case = case.of_requests(&[Some(request)], &mut random, false);
            let (bits, state) = self.with(&case).bits(kept)?;
            alone.push(bits);
            kept = state;
        }
        let check = |how, case: &C, bits: &Bits| self.check_alone(how, case, bits, &alone);
        check(
            "a request has other bits among all others than alone",
            &largest,
            &whole,
        )?;
        for _ in 0..batches {
            let some = some_of(count, &mut random);
            let case = case.of_requests(&some, &mut random, false);
            let (bits, state) = self.with(&case).bits(kept)?;
            check(
                "a request has other bits in a random batch than alone",
                &case,
                &bits,
            )?;
            kept = state;
        }
        let level = match case.problem().query_len {
            QueryLen::Single => GraphSupport::SingleToken,
            QueryLen::Uniform => GraphSupport::UniformBatch,
            QueryLen::Ragged => GraphSupport::Always,
        };
        if C::spec(self.stage).graphs < level {
            return Ok(whole);
        }
        let mut call = self.with(&largest).call(kept)?;
        C::prepare(&mut call).map_err(self.refused("prepare"))?;
        match self.device.probe_replay(&mut call) {
            Ok(false) => {}
            Ok(true) => {
                let case = call.case.clone();
                let bits = call.outputs.finish(self.device)?.bits();
                check(
                    "a request has other bits in a replayed graph than alone",
                    &case,
                    &bits,
                )?;
            }
            Err(error) => return Err(self.refused(C::CALL)(error)),
        }
        Ok(whole)
    }

    fn check_alone(&self, how: &'static str, case: &C, bits: &Bits, alone: &[Bits]) -> Tried<()> {
        let starts = starts(case.query_lens());
        let tokens = starts[starts.len() - 1] as usize;
        for (pair, seed) in starts.windows(2).zip(case.own_seeds()) {
            let own = bits.of(pair[0] as usize..pair[1] as usize, tokens);
            let request = (*seed as usize).checked_sub(1);
            if request.is_some_and(|request| alone[request] != own) {
                return Err(Failure::Differs {
                    name: self.name(),
                    problem: Box::new(case.problem()),
                    feature: Feature::BatchInvariant,
                    how,
                });
            }
        }
        Ok(())
    }

    /// Runs the call once, without a comparison with the reference.
    fn bits(&self, kept: Kept<C, S>) -> Tried<(Bits, Kept<C, S>)> {
        let mut call = self.call(kept)?;
        self.enqueued(&mut call)?;
        let bits = call.outputs.finish(self.device)?.bits();
        Ok((bits, (call.state, call.metadata)))
    }

    fn with<'c>(&self, case: &'c C) -> On<'c, C, S>
    where
        'a: 'c,
    {
        On { case, ..*self }
    }

    fn name(&self) -> &'static str {
        C::spec(self.stage).name
    }

    /// Makes the failure for a case that one of the backend's functions refuses.
    fn refused(&self, operation: &'static str) -> impl FnOnce(Error) -> Failure + use<C, S> {
        let (problem, name) = (self.case.problem(), self.name());
        move |error| refused(problem, name, operation, error)
    }

    /// Makes a state and metadata for limits.
    fn kept(&self, limits: &StepLimits) -> Tried<Kept<C, S>> {
        let state = C::state(self.stage, self.device, limits).map_err(self.refused("state"))?;
        let metadata = C::metadata(self.stage, self.device, limits);
        Ok((state, metadata.map_err(self.refused("metadata"))?))
    }

    /// Makes state and metadata of at most `said` bytes, between guards if the device has any.
    fn kept_within(&self, said: u64, limits: &StepLimits) -> Tried<Kept<C, S>> {
        let Some(guards) = self.device.probe_guards() else {
            return self.kept(limits);
        };
        let before = guards.guarded_bytes();
        guards.guard(true);
        let kept = self.kept(limits);
        guards.guard(false);
        let (kept, allocated) = (kept?, guards.guarded_bytes() - before);
        if allocated <= said {
            return Ok(kept);
        }
        Err(Failure::Workspace {
            name: self.name(),
            problem: Box::new(self.case.problem()),
            said,
            allocated,
        })
    }

    /// Fails if a guard of live memory was overwritten.
    fn check_guards(&self) -> Tried<()> {
        let damage = self.device.probe_guards().map(|guards| guards.damage());
        match damage.transpose()?.flatten() {
            None => Ok(()),
            Some(damage) => Err(Failure::Beyond {
                name: self.name(),
                problem: Box::new(self.case.problem()),
                damage,
            }),
        }
    }

    /// Makes outputs of poison.
    fn outputs(&self, numbers: &C::Numbers, placement: Placement) -> Result<Outputs<C::Device>> {
        let (shape, lse) = self.case.output(numbers);
        let of_output = of_output(C::spec(self.stage), placement);
        Outputs::new(self.device, self.case.problem(), shape, of_output, lse)
    }

    /// Makes the call with an existing state and metadata.
    fn call(&self, (state, metadata): Kept<C, S>) -> Tried<Call<'a, C, S>> {
        let Self {
            case,
            stage,
            device,
        } = *self;
        let spec = C::spec(stage);
        let placement = Placement::new(case.trial(), spec, case.gap());
        let numbers = case.numbers(placement);
        Ok(Call {
            inputs: case.upload(&numbers, spec, device)?,
            outputs: self.outputs(&numbers, placement)?,
            case: case.clone(),
            placement,
            numbers,
            stage,
            device,
            state,
            metadata,
        })
    }
}

/// A case with all its memory on a device.
pub(super) struct Call<'a, C: Case<S>, S> {
    pub(super) case: C,
    placement: Placement,
    pub(super) numbers: C::Numbers,
    pub(super) stage: &'a S,
    pub(super) device: &'a C::Device,
    pub(super) state: C::State,
    pub(super) metadata: C::Metadata,
    pub(super) inputs: C::Inputs,
    pub(super) outputs: Outputs<C::Device>,
}

impl<C: Case<S>, S> Call<'_, C, S> {
    /// Compares every number with the reference.
    fn compare(self) -> Tried<Bits> {
        let spec = C::spec(self.stage);
        let written = self.outputs.finish(self.device)?;
        self.case.compare(&self.numbers, spec, &written)?;
        written.check_gaps(spec.name)?;
        Ok(written.bits())
    }
}

impl<C: Case<S>, S> Replayed for Call<'_, C, S> {
    fn enqueue(&mut self) -> Result<()> {
        C::enqueue(self)
    }

    fn change(&mut self) -> Result<()> {
        self.case = self.case.changed();
        self.numbers = self.case.numbers(self.placement);
        let spec = C::spec(self.stage);
        let mut changed = self.case.upload(&self.numbers, spec, self.device)?;
        copy_all(
            self.device,
            C::buffers(&mut changed),
            C::buffers(&mut self.inputs),
        )?;
        match C::REPLAYS_LENGTHS {
            true => C::prepare(self),
            false => Ok(()),
        }
    }
}
