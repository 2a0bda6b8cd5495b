//! The CPU's backends on the simulated device. Their kernels are right except for the mistakes that
//! a [`Conduct`] describes.

use mla_cpu::Cpu;
use mla_runtime::backend::{
    DecodeBatch, DecodeCall, LayerConfig, Output, PrefillBatch, PrefillCall, StepLimits,
};
use mla_runtime::spec::Cause;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use crate::simulated::{Graph, Kept, Simulated};

/// Behaviour of a backend's kernels. `F` is a function that changes a call.
pub(crate) struct Conduct<F> {
    /// True if the kernels wait for preceding ones.
    pub(crate) wait: bool,
    /// True if the last kernel ends after the others.
    pub(crate) end_last: bool,
    /// True if the kernels use the lengths of the time of the capture.
    pub(crate) bake: bool,
    /// Bytes of workspace for each request that the backend states.
    pub(crate) said: usize,
    /// Bytes for each request that the kernels write.
    pub(crate) written: usize,
    /// True if steps beyond the limits are refused.
    pub(crate) refuse: bool,
    /// The reason why a registry cannot run the backend.
    pub(crate) missing: Option<Cause>,
    /// Refuses a configuration, or changes it.
    pub(crate) new: fn(LayerConfig) -> Result<LayerConfig>,
    /// Changes a call. If it returns `None`, nothing is written.
    pub(crate) call: F,
    /// Changes the results of a call.
    pub(crate) after: fn(&mut Written<'_>),
}

pub(crate) type Decode = for<'a> fn(DecodeCall<'a, Cpu>) -> Result<Option<DecodeCall<'a, Cpu>>>;
pub(crate) type Prefill = for<'a> fn(PrefillCall<'a, Cpu>) -> Result<Option<PrefillCall<'a, Cpu>>>;

/// Bytes of workspace that are allocated for each request.
pub(crate) const ALLOCATED: usize = 16;

impl<F> Conduct<F> {
    pub(crate) const fn right(call: F) -> Self {
        Self {
            wait: true,
            end_last: true,
            bake: false,
            said: ALLOCATED,
            written: ALLOCATED,
            refuse: true,
            missing: None,
            new: Ok,
            call,
            after: |_| {},
        }
    }

    pub(crate) fn availability(&self) -> Result<(), Cause> {
        self.missing.map_or(Ok(()), Err)
    }
}

/// Results of a call.
pub(crate) struct Written<'a> {
    pub(crate) out: &'a mut [u8],
    /// The first byte between two rows of the output, if there are any.
    pub(crate) between: Option<usize>,
    pub(crate) lse: &'a mut [u8],
}

/// The requests of a batch or a call, and numbers that a graph has to read again.
pub(crate) trait Requests {
    fn requests(&self) -> usize;

    fn numbers(&self) -> Vec<i32> {
        Vec::new()
    }
}

impl Requests for DecodeBatch<'_, Simulated> {
    fn requests(&self) -> usize {
        self.block_table.requests()
    }
}

impl Requests for DecodeCall<'_, Simulated> {
    fn requests(&self) -> usize {
        self.batch.requests()
    }

    fn numbers(&self) -> Vec<i32> {
        let requests = 0..self.requests();
        requests.map(|i| self.batch.seq_lens.at(i)).collect()
    }
}

impl Requests for PrefillBatch<'_> {
    fn requests(&self) -> usize {
        self.query_lens.len()
    }
}

impl Requests for PrefillCall<'_, Simulated> {
    fn requests(&self) -> usize {
        self.query_starts.len() - 1
    }

    fn numbers(&self) -> Vec<i32> {
        let bytes = self.query.bytes().iter();
        bytes.map(|byte| i32::from(*byte)).collect()
    }
}

/// Workspaces of an engine.
pub(crate) struct State<S> {
    pub(crate) cpu: S,
    workspace: Kept,
    requests: usize,
    captured: Vec<i32>,
}

impl<S> State<S> {
    pub(crate) fn new(cpu: S, device: &Simulated, limits: &StepLimits) -> Result<Self> {
        Ok(Self {
            cpu,
            workspace: device.allocate(limits.requests * ALLOCATED)?,
            requests: limits.requests,
            captured: Vec::new(),
        })
    }

    /// Refuses more requests than the state was made for, if the backend refuses any.
    pub(crate) fn check<F>(&self, batch: &impl Requests, conduct: &Conduct<F>) -> Result<()> {
        let requests = batch.requests();
        match conduct.refuse && requests > self.requests {
            true => Err(Error::argument("requests", requests, self.requests)),
            false => Ok(()),
        }
    }

    /// Launches kernels. Returns true if they see the call's present numbers. Results of other
    /// numbers would be wrong, so then none are written.
    pub(crate) fn begin<F>(
        &mut self,
        device: &Simulated,
        call: &impl Requests,
        conduct: &Conduct<F>,
    ) -> bool {
        self.workspace.write(call.requests() * conduct.written);
        let sees = match device.graph() {
            Graph::None => true,
            Graph::Captures => {
                self.captured = call.numbers();
                true
            }
            Graph::Replays => !conduct.bake || self.captured == call.numbers(),
        };
        device.begin(conduct.wait) && sees
    }
}

/// Changes what a call has written.
pub(crate) fn change(
    out: Output<'_, Simulated>,
    lse: Option<&mut [u8]>,
    after: fn(&mut Written<'_>),
) {
    let (out, between) = match out {
        Output::Plain(out) => {
            let layout = *out.layout();
            let row = layout.shape[1] * layout.shape[2];
            let has_gaps = layout.strides[0] > row;
            (
                out.into_bytes(),
                has_gaps.then(|| row * layout.dtype.bytes()),
            )
        }
        Output::Fp8 { bytes, .. } => (bytes, None),
    };
    let lse = lse.unwrap_or_default();
    after(&mut Written { out, between, lse });
}

/// Defines a backend with this conduct.
macro_rules! conducted {
    (
        $backend:ident for $cpu:ident: $method:ident($of_call:ident), $batch:ty;
        $(#[$about:meta])* $name:ident, [$($key:tt)*], $conduct:expr
    ) => {
        $(#[$about])*
        pub(crate) struct $name($cpu);

        impl $name {
            const CONDUCT: Conduct<Hook> = $conduct;
        }

        #[mla_backend(sm = "any", $($key)*)]
        impl $backend for $name {
            type Device = Simulated;
            type State = State<<$cpu as $backend>::State>;
            type Metadata = ();

            fn availability() -> Result<(), Cause> {
                Self::CONDUCT.availability()
            }

            fn new(_: &Simulated, config: &LayerConfig) -> Result<Self> {
                $cpu::new(&Cpu::new(), &(Self::CONDUCT.new)(*config)?).map(Self)
            }

            fn workspace_bytes(&self, _: &Simulated, limits: &StepLimits) -> Result<u64> {
                Ok((limits.requests * Self::CONDUCT.said) as u64)
            }

            fn state(&self, device: &Simulated, limits: &StepLimits) -> Result<Self::State> {
                let cpu = $backend::state(&self.0, &Cpu::new(), limits)?;
                State::new(cpu, device, limits)
            }

            fn metadata(&self, _: &Simulated, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                _: &Simulated,
                batch: &$batch,
                state: &mut Self::State,
                (): &mut (),
            ) -> Result<()> {
                state.check(batch, &Self::CONDUCT)
            }

            unsafe fn $method(
                &self,
                device: &Simulated,
                mut call: $of_call<'_, Simulated>,
                state: &mut Self::State,
                (): &(),
            ) -> Result<()> {
                if !state.begin(device, &call, &Self::CONDUCT) {
                    return Ok(());
                }
                if let Some(call) = (Self::CONDUCT.call)(call.on_cpu()?)? {
                    // SAFETY: the caller's call keeps to the contract of calls. No conduct gives it
                    // other arrays than the call's own.
                    unsafe { self.0.$method(&Cpu::new(), call, &mut state.cpu, &()) }?;
                    device.end(Self::CONDUCT.end_last);
                }
                let lse = call.lse.map(LseMut::into_bytes);
                change(call.out, lse, Self::CONDUCT.after);
                Ok(())
            }
        }
    };
}

/// A backend that breaks a promise.
pub(crate) struct Wrong {
    pub(crate) name: &'static str,
    /// The rows of the guide's table that the backend breaks.
    pub(crate) rows: &'static [&'static str],
    /// The topics that find the backend.
    pub(crate) topics: &'static [Tried],
    /// Words that the message has to contain.
    pub(crate) says: &'static [&'static str],
    /// The plainest topic, for the backend by type and by name.
    pub(crate) plain: [fn() -> Outcome; 2],
}

/// The cases of a topic for one backend.
pub(crate) struct Tried {
    pub(crate) topic: &'static str,
    /// The results for the backend by type, and by name.
    pub(crate) wrong: [fn() -> Outcome; 2],
    /// The results for other backends with the same conduct. They do not promise anything that they
    /// break.
    pub(crate) kept: &'static [fn() -> Outcome],
}

pub(crate) type Outcome = std::result::Result<(), String>;

/// Defines backends, and a table of them.
macro_rules! table {
    ($(
        $(#[$about:meta])*
        $name:ident [$($key:tt)*] breaks [$($row:literal),+] at $topics:tt
        { $($field:ident: $value:expr),* $(,)? } says $($says:literal),+
        $(but not $kept:ident [$($kept_key:tt)*])?;
    )*) => {
        $(
            backend! {
                $(#[$about])* $name, [$($key)*], Conduct { $($field: $value,)* ..RIGHT }
            }
            $(backend! { $kept, [$($kept_key)*], $name::CONDUCT })?
        )*

        pub(crate) const WRONG: &[Wrong] = &[$(
            Wrong {
                name: stringify!($name),
                rows: &[$($row),+],
                topics: table!(@ $name $topics [$($kept)?]),
                says: &[$($says),+],
                plain: [|| by_type::<$name>(PLAIN), || by_name($name::ENTRY, PLAIN)],
            },
        )*];
    };
    (@ $name:ident [$($topic:ident),+] $kept:tt) => {
        &[$(
            Tried {
                topic: Topic::$topic.name(),
                wrong: [
                    || by_type::<$name>(Topic::$topic),
                    || by_name($name::ENTRY, Topic::$topic),
                ],
                kept: table!(@kept $topic $kept),
            },
        )+]
    };
    (@kept $topic:ident []) => { &[] };
    (@kept $topic:ident [$kept:ident]) => {
        &[
            || by_type::<$kept>(Topic::$topic),
            || by_name($kept::ENTRY, Topic::$topic),
        ]
    };
}

/// Defines backends that break a promise: those of both phases, and those of one phase.
macro_rules! wrong {
    (plain $plain:ident, dtypes $dtypes:ident; $($own:tt)*) => {
        table! {
            WrongScale [dtypes = "f32,bf16"] breaks ["(all)"]
            at [$plain, $dtypes, ThroughTheRegistry]
            { new: |mut config| {
                config.softmax_scale *= 1.2;
                Ok(config)
            } }
            says ", but should be ";

            SaysLess [dtypes = "f32"] breaks ["(all)"] at [Workspace]
            { said: ALLOCATED - 1 }
            says "state and metadata allocate ", " bytes, but `workspace_bytes` says ";

            WritesMore [dtypes = "f32"] breaks ["(all)"] at [Workspace]
            { written: ALLOCATED + 1 }
            says "wrote beyond its workspace, behind a buffer of ";

            // The state is made for one request, and is given more.
            TakesMore [dtypes = "f32"] breaks ["(all)"] at [Workspace]
            { refuse: false }
            says "wrote beyond its workspace, behind a buffer of 16 bytes, for ";

            OneDType [dtypes = "f32,bf16"] breaks ["dtypes"] at [$dtypes]
            { new: |config| mistakes::only(config, config.problem.dtype == DType::F32) }
            says "`new` refuses it: problem: given another";

            OnlyR1 [dtypes = "f32"] breaks ["requires_r1", "dims"] at [Dimensions]
            { new: |config| mistakes::only(config, config.problem.dims.head.nope == 128) }
            says "`new` refuses it: problem: given another";

            Impatient [dtypes = "f32", dependent_launch = true] breaks ["dependent_launch"]
            at [DependentLaunch]
            { wait: false }
            says "IMPATIENT: between a kernel that writes its inputs late and one that reads its \
                  results early: IMPATIENT: out[0, 0, 0] is NaN, but should be ",
                 "or remove the key `dependent_launch`"
            but not ImpatientAlone [dtypes = "f32"];

            Hasty [dtypes = "f32", dependent_launch = true] breaks ["dependent_launch"]
            at [DependentLaunch]
            { end_last: false }
            says "out[0, 0, 0] is NaN"
            but not HastyAlone [dtypes = "f32"];

            OtherBase [dtypes = "f32"] breaks ["lse"] at [$plain]
            { after: |written| mistakes::in_base_2(written.lse) }
            says "OTHER_BASE: lse[0, 0] is ";

            RoundedWeights [dtypes = "bf16"] breaks ["lse_precision"] at [$plain]
            { after: |written| mistakes::rounded(written.lse) }
            says "ROUNDED_WEIGHTS: lse[0, 0] is "
            but not RoundedAsSaid [dtypes = "bf16", lse_precision = "dtype"];

            OtherScale [dtypes = "bf16", quant_output = true] breaks ["quant_output"]
            at [QuantisedOutputs]
            { call: |mut call| {
                if let Output::Fp8 { bytes, scale } = call.out {
                    call.out = Output::Fp8 { bytes, scale: 2.0 * scale };
                }
                Ok(Some(call))
            } }
            says "OTHER_SCALE: out[0, 0, 0] is ";

            Absent [dtypes = "f32"] breaks ["name"] at [ThroughTheRegistry]
            { missing: Some(Cause::LibraryMissing("libabsent.so")) }
            says "ABSENT: the registry does not give it: ";

            EachTimeAnother [dtypes = "f32", features = "deterministic"]
            breaks ["feature deterministic"] at [Repetition]
            { new: |mut config| {
                static CALLS: AtomicU32 = AtomicU32::new(0);
                let calls = CALLS.fetch_add(1, Ordering::Relaxed) % 8;
                config.softmax_scale *= 1.0 + 1e-6 * calls as f32;
                Ok(config)
            } }
            says "EACH_TIME_ANOTHER: a second run gives other bits than the first";

            Crowded [dtypes = "f32", features = "batch_invariant", graphs = "single_token"]
            breaks ["feature batch_invariant"] at [BatchInvariance]
            { after: mistakes::by_rows }
            says "CROWDED: a request has other bits among all others than alone",
                 "or remove the feature `batch_invariant`"
            but not CrowdedAsSaid [dtypes = "f32", graphs = "single_token"];

            OneScaleOfAll [dtypes = "bf16", features = "query_scales"]
            breaks ["feature query_scales"] at [QueryScales]
            { call: |mut call| {
                call.query_scales = mistakes::one_scale(call.query_scales);
                Ok(Some(call))
            } }
            says "ONE_SCALE_OF_ALL: ", ", but should be ";

            $($own)*
        }
    };
}
