//! Absorbed attention: every head attends to the cache's own rows.

use std::any::Any;
use std::marker::PhantomData;

use super::entry::Entry;
use super::opaque::Opaque;
use super::{LayerConfig, Output, StepLimits};
use crate::availability::Availability;
use crate::cache::{BlockTable, CacheLayout, CacheRef};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::feature::Feature;
use crate::kernels::KernelFacts;
use crate::lse::LseMut;
use crate::spec::BackendSpec;
use crate::tensor::{ArrayRef, TensorRef};

/// The queries of a call, in the [format](BackendSpec::query_format) that the backend asks for.
pub enum Query<'a, D: Device> {
    /// `[T, H, L+R]`.
    Concatenated(TensorRef<'a, D>),
    /// The two parts.
    Split {
        /// `[T, H, L]`.
        latent: TensorRef<'a, D>,
        /// `[T, H, R]`.
        rope: TensorRef<'a, D>,
    },
}

/// The requests of a step that decode, whose lengths live on the device: what was captured into a
/// graph is replayed with other lengths in the same arrays.
#[non_exhaustive]
pub struct DecodeBatch<'a, D: Device> {
    /// The pages of each request: `[requests, max_pages]`.
    pub block_table: BlockTable<'a, D>,
    /// Tokens of each request in the cache, its query tokens included: `[requests]`. A length of 0
    /// is a request that attends to nothing.
    pub seq_lens: ArrayRef<'a, D, i32>,
    /// Where each request's query tokens begin, and the end of the last: `[requests + 1]`. Query
    /// token `i` of `n` of a request with `len` tokens sees rows `0 .. len − n + i + 1`.
    pub query_starts: ArrayRef<'a, D, i32>,
    /// The most query tokens of one request.
    pub max_query_len: usize,
    /// The most tokens of one request that the step may hold.
    pub max_seq_len: usize,
    /// The lengths as the host knows them, for backends that plan there. `None`: they are on the
    /// device alone. A step that is replayed from a graph is prepared anew with its own.
    pub host: Option<HostLens<'a>>,
}

/// The lengths of a decode batch's requests, in the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HostLens<'a> {
    /// The query tokens of each request.
    pub query_lens: &'a [u32],
    /// The tokens of each request in the cache, its query tokens included.
    pub seq_lens: &'a [u32],
}

impl<'a> HostLens<'a> {
    /// The query tokens and all tokens of each request.
    pub const fn new(query_lens: &'a [u32], seq_lens: &'a [u32]) -> Self {
        Self {
            query_lens,
            seq_lens,
        }
    }
}

impl<'a, D: Device> DecodeBatch<'a, D> {
    /// Requests by their pages, lengths and query tokens on the device; the host's lengths are not known.
    pub fn new(
        block_table: BlockTable<'a, D>,
        (seq_lens, max_seq_len): (ArrayRef<'a, D, i32>, usize),
        (query_starts, max_query_len): (ArrayRef<'a, D, i32>, usize),
    ) -> Self {
        Self {
            block_table,
            seq_lens,
            query_starts,
            max_query_len,
            max_seq_len,
            host: None,
        }
    }

    /// The same with the host's lengths.
    #[must_use]
    pub fn with_host(mut self, host: HostLens<'a>) -> Self {
        self.host = Some(host);
        self
    }
}

impl<D: Device> Clone for DecodeBatch<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for DecodeBatch<'_, D> {}

/// For each query token, the slots that it attends to instead of its whole context:
/// `[tokens, width]`. A slot below 0 or past the cache is skipped.
#[non_exhaustive]
pub struct SlotLists<'a, D: Device> {
    /// The slots, row-major without gaps.
    pub slots: ArrayRef<'a, D, i32>,
    /// The entries per token.
    pub width: usize,
    /// How many of its entries each token attends to, from the first on: `[tokens]`; below 0 counts as 0, above
    /// `width` as `width`. Absent: all. A second cache's lists have none.
    pub counts: Option<ArrayRef<'a, D, i32>>,
    /// Requests of at most so many tokens are dense: their query tokens attend to all that they see, by
    /// the block table, and their lists are not read. At most `width`; 0: there are none. It takes a
    /// backend with [`DenseRequests`](crate::feature::Feature::DenseRequests).
    pub dense_within: usize,
    /// What each token attends to beside that, in the same softmax. It takes a backend with
    /// [`SecondCache`](crate::feature::Feature::SecondCache).
    pub second: Option<ListedCache<'a, D>>,
}

/// A cache and the slots of it that each query token attends to, such as a window of rows that are not
/// compressed. Its format and scale are those of the call's cache; pages and strides are its own.
#[non_exhaustive]
pub struct ListedCache<'a, D: Device> {
    /// The cache.
    pub cache: CacheRef<'a, D>,
    /// The slots, `[tokens, width]`, as in [`SlotLists`].
    pub slots: ArrayRef<'a, D, i32>,
    /// The entries per token.
    pub width: usize,
}

impl<'a, D: Device> ListedCache<'a, D> {
    /// A cache, and `width` of its slots for each token, row-major without gaps.
    pub const fn new(cache: CacheRef<'a, D>, slots: ArrayRef<'a, D, i32>, width: usize) -> Self {
        Self {
            cache,
            slots,
            width,
        }
    }
}

impl<'a, D: Device> SlotLists<'a, D> {
    /// `width` slots of one cache for each token, row-major without gaps.
    pub const fn new(slots: ArrayRef<'a, D, i32>, width: usize) -> Self {
        Self {
            slots,
            width,
            counts: None,
            dense_within: 0,
            second: None,
        }
    }

    /// The same with [counts](Self::counts).
    #[must_use]
    pub fn with_counts(mut self, counts: impl Into<Option<ArrayRef<'a, D, i32>>>) -> Self {
        self.counts = counts.into();
        self
    }

    /// The same with requests that are [dense](Self::dense_within).
    #[must_use]
    pub fn with_dense_within(mut self, tokens: usize) -> Self {
        self.dense_within = tokens;
        self
    }

    /// The same beside a [second cache](Self::second).
    #[must_use]
    pub fn with_second(mut self, second: impl Into<Option<ListedCache<'a, D>>>) -> Self {
        self.second = second.into();
        self
    }

    /// The same lists for a shorter time.
    pub fn shorten<'short>(&self) -> SlotLists<'short, D>
    where
        'a: 'short,
    {
        SlotLists {
            slots: self.slots.shorten(),
            width: self.width,
            counts: self.counts.as_ref().map(ArrayRef::shorten),
            dense_within: self.dense_within,
            second: self.second.as_ref().map(|second| ListedCache {
                cache: second.cache.shorten(),
                slots: second.slots.shorten(),
                width: second.width,
            }),
        }
    }

    /// Those of the first `tokens` tokens.
    ///
    /// # Errors
    ///
    /// If there are not so many.
    pub fn of_first(mut self, tokens: usize) -> Result<Self> {
        let first = |slots: &ArrayRef<'a, D, i32>, width: usize| {
            let entries = tokens.checked_mul(width).filter(|n| *n <= slots.len());
            let Some(entries) = entries else {
                let accepted = format!("{tokens} tokens of {width} slots");
                return Err(Error::argument("slots", slots.len(), accepted));
            };
            slots.range(0..entries)
        };
        self.slots = first(&self.slots, self.width)?;
        if let Some(counts) = &mut self.counts {
            *counts = counts.range(0..tokens)?;
        }
        if let Some(second) = &mut self.second {
            second.slots = first(&second.slots, second.width)?;
        }
        Ok(self)
    }

    /// Refuses what a backend of this spec does not take, for a call on this cache.
    ///
    /// # Errors
    ///
    /// If lists are wider than the backend takes; if a feature is missing; if requests are to be dense whose
    /// tokens the lists would have no room for; if the second cache's rows differ from the first one's.
    pub fn check(&self, spec: &BackendSpec, cache: &CacheLayout) -> Result<()> {
        let features = spec.features;
        let second = self.second.as_ref().map(|second| second.width);
        for (field, width) in [
            ("slot_lists.width", Some(self.width)),
            ("slot_lists.second.width", second),
        ] {
            if let (Some(width), Some(most)) = (width, spec.max_list_width)
                && width > most as usize
            {
                let accepted = format!("at most {most}, as {} takes", spec.name);
                return Err(Error::argument(field, width, accepted));
            }
        }
        if self.dense_within > 0 {
            if !features.contains(Feature::DenseRequests) {
                let accepted = "0: the backend has no dense_requests";
                return Err(Error::argument("dense_within", self.dense_within, accepted));
            }
            if self.dense_within > self.width {
                let accepted = format!("at most the lists' width, {}", self.width);
                return Err(Error::argument("dense_within", self.dense_within, accepted));
            }
        }
        let Some(second) = &self.second else {
            return Ok(());
        };
        if !features.contains(Feature::SecondCache) {
            let accepted = "absent: the backend has no second_cache";
            return Err(Error::argument("second cache", "present", accepted));
        }
        let layout = second.cache.layout();
        let row = |layout: &CacheLayout| (layout.dims.latent, layout.dims.head.rope);
        if layout.format != cache.format
            || row(layout) != row(cache)
            || layout.scale.to_bits() != cache.scale.to_bits()
        {
            let shown = |layout: &CacheLayout| {
                let scale = layout.scale;
                format!("{} rows of {:?}, scale {scale}", layout.format, row(layout))
            };
            return Err(Error::argument("second cache", shown(layout), shown(cache)));
        }
        Ok(())
    }
}

/// One attention of a prepared batch to the cache.
#[non_exhaustive]
pub struct DecodeCall<'a, D: Device> {
    /// The queries, in the format that the spec asks for.
    pub query: Query<'a, D>,
    /// The cache.
    pub cache: CacheRef<'a, D>,
    /// The requests.
    pub batch: DecodeBatch<'a, D>,
    /// `[T, H, L]`.
    pub out: Output<'a, D>,
    /// `[H, T]`; absent where the caller does not need it.
    pub lse: Option<LseMut<'a, D>>,
    /// Present where the problem is sparse, and only there.
    pub slots: Option<SlotLists<'a, D>>,
    /// A score for each head, `[H]`, that takes part in the softmax without a value: a head's output
    /// is multiplied by `1 / (1 + e^(sink − lse))`, as in FlashMLA's `attn_sink`. It is in the scores' own
    /// units, behind the softmax scale: −∞ changes nothing, +∞ makes the output 0. The log-sum-exp
    /// leaves it out. It takes a backend with [`Sinks`](crate::feature::Feature::Sinks).
    pub sinks: Option<ArrayRef<'a, D, f32>>,
}

impl<'a, D: Device> DecodeCall<'a, D> {
    /// Attention to whole contexts, without a log-sum-exp.
    pub fn new(
        query: Query<'a, D>,
        cache: CacheRef<'a, D>,
        batch: DecodeBatch<'a, D>,
        out: Output<'a, D>,
    ) -> Self {
        Self {
            query,
            cache,
            batch,
            out,
            lse: None,
            slots: None,
            sinks: None,
        }
    }

    /// The same with the log-sum-exp written there.
    #[must_use]
    pub fn with_lse(mut self, lse: impl Into<Option<LseMut<'a, D>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// The same with attention to lists of slots.
    #[must_use]
    pub fn with_slots(mut self, slots: impl Into<Option<SlotLists<'a, D>>>) -> Self {
        self.slots = slots.into();
        self
    }

    /// The same with a [sink](Self::sinks) for each head.
    #[must_use]
    pub fn with_sinks(mut self, sinks: impl Into<Option<ArrayRef<'a, D, f32>>>) -> Self {
        self.sinks = sinks.into();
        self
    }
}

/// A decode backend. `#[mla_backend(…)]` on the `impl` block writes [`SPEC`](Self::SPEC) and links
/// the [`ENTRY`](Self::ENTRY).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no decode backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] impl DecodeBackend for {Self} {{ … }}`"
)]
pub trait DecodeBackend: Sized + Send + Sync + 'static {
    /// The device whose memory it reads and writes.
    type Device: Device;
    /// Made once per engine: workspaces.
    type State: Send + 'static;
    /// Made once per engine and prepared per step, in buffers that never move: a graph that was
    /// captured with them stays valid.
    type Metadata: Send + 'static;

    /// What it supports; written by `#[mla_backend]`.
    const SPEC: BackendSpec;

    /// Its registry entry, for a registry made by hand.
    const ENTRY: Entry = Entry::decode::<Self>();

    /// What is known of its kernels: what they are compiled for, and where they have run; written by
    /// `#[mla_backend]` from the keys `compiled` and `run_on`.
    const KERNELS: KernelFacts = KernelFacts::UNKNOWN;

    /// Whether it can run on this machine.
    fn availability() -> Availability {
        Self::Device::availability()
    }

    /// The implementation for one layer.
    ///
    /// # Errors
    ///
    /// Where the device fails. The problem has been validated against the spec.
    fn new(device: &Self::Device, config: &LayerConfig) -> Result<Self>;

    /// The bytes of device memory that the state and the metadata for `limits` allocate together.
    ///
    /// # Errors
    ///
    /// If the backend takes no steps of these limits; [`Self::state`] refuses them as well.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64> {
        let _ = (device, limits);
        Ok(0)
    }

    /// The workspaces for steps within `limits`.
    ///
    /// # Errors
    ///
    /// Where the device has not as much memory left.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// Room for the metadata of steps within `limits`.
    ///
    /// # Errors
    ///
    /// Where the device has not as much memory left.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// Prepares the metadata of a step, such as a schedule, from the lengths on the device. If this is left out,
    /// nothing is prepared.
    ///
    /// # Errors
    ///
    /// Where the batch exceeds the limits that the metadata was made for, or the device fails.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &DecodeBatch<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        let _ = (device, batch, state, metadata);
        Ok(())
    }

    /// Attends each query token to its request's rows, with the whole row as key and its latent as
    /// value. A token that sees nothing gives 0 and −inf.
    ///
    /// # Errors
    ///
    /// Where the call's shapes disagree, or the device fails.
    fn decode(
        &self,
        device: &Self::Device,
        call: DecodeCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;

    /// Divides each request's rows into at most `splits` splits instead of as many as the backend
    /// thinks best: for benchmarks that look for the best number.
    ///
    /// # Errors
    ///
    /// Where the backend lets nobody else decide, or takes no such number.
    fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        let accepted = format!("none: {} divides rows by itself", Self::SPEC.name);
        Err(Error::argument("num_splits", splits, accepted))
    }
}

/// A decode backend as the layer calls it: chosen by type, or at run time. Its methods are those of
/// [`DecodeBackend`].
pub trait DecodeStage: Send + Sync + 'static {
    /// As [`DecodeBackend::Device`].
    type Device: Device;
    /// As [`DecodeBackend::State`].
    type State: Send + 'static;
    /// As [`DecodeBackend::Metadata`].
    type Metadata: Send + 'static;

    /// As [`DecodeBackend::SPEC`].
    fn spec(&self) -> &'static BackendSpec;

    /// As [`DecodeBackend::workspace_bytes`].
    ///
    /// # Errors
    ///
    /// The backend's.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64>;

    /// As [`DecodeBackend::state`].
    ///
    /// # Errors
    ///
    /// The backend's.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// As [`DecodeBackend::metadata`].
    ///
    /// # Errors
    ///
    /// The backend's.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// As [`DecodeBackend::prepare`].
    ///
    /// # Errors
    ///
    /// The backend's.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &DecodeBatch<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()>;

    /// As [`DecodeBackend::decode`].
    ///
    /// # Errors
    ///
    /// The backend's.
    fn decode(
        &self,
        device: &Self::Device,
        call: DecodeCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;
}

// As in the prefill module: two implementations that must never differ in anything but where their
// methods come from.
macro_rules! stage {
    ($source:ident, |$this:ident| $receiver:expr) => {
        fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64> {
            let $this = self;
            $source::workspace_bytes($receiver, device, limits)
        }

        fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State> {
            let $this = self;
            $source::state($receiver, device, limits)
        }

        fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata> {
            let $this = self;
            $source::metadata($receiver, device, limits)
        }

        fn prepare(
            &self,
            device: &Self::Device,
            batch: &DecodeBatch<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &mut Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $source::prepare($receiver, device, batch, state, metadata)
        }

        fn decode(
            &self,
            device: &Self::Device,
            call: DecodeCall<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $source::decode($receiver, device, call, state, metadata)
        }
    };
}

impl<B: DecodeBackend> DecodeStage for B {
    type Device = B::Device;
    type State = B::State;
    type Metadata = B::Metadata;

    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    stage!(DecodeBackend, |this| this);
}

/// A decode backend chosen at run time: a call goes through one pointer into the backend's own
/// code. Made by [`Registry::instantiate_decode`](crate::registry::Registry::instantiate_decode).
pub struct SelectedDecode<D: Device> {
    object: Box<dyn DecodeObject<D>>,
    config: LayerConfig,
}

impl<D: Device> SelectedDecode<D> {
    pub(crate) fn new<B: DecodeBackend<Device = D>>(
        device: &D,
        config: &LayerConfig,
    ) -> Result<Self> {
        Ok(Self {
            object: Box::new(B::new(device, config)?),
            config: *config,
        })
    }

    /// What it was made for.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// As [`DecodeBackend::set_num_splits`].
    ///
    /// # Errors
    ///
    /// The backend's.
    pub fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        self.object.set_num_splits(splits)
    }
}

impl<D: Device> DecodeStage for SelectedDecode<D> {
    type Device = D;
    type State = Opaque;
    type Metadata = Opaque;

    fn spec(&self) -> &'static BackendSpec {
        self.object.spec()
    }

    stage!(DecodeObject, |this| &*this.object);
}

impl Entry {
    /// The entry of a decode backend.
    pub const fn decode<B: DecodeBackend>() -> Self {
        Self::implemented(
            B::SPEC,
            B::KERNELS,
            B::availability,
            Made::<B>::MAKER,
            std::any::type_name::<B>,
        )
    }

    /// The decode implementation for one layer, or `None` where this is no decode backend for
    /// devices of type `D`.
    pub fn make_decode<D: Device>(
        &self,
        device: &D,
        config: &LayerConfig,
    ) -> Option<Result<SelectedDecode<D>>> {
        self.maker?
            .downcast_ref::<Maker<D>>()
            .map(|maker| (maker.make)(device, config))
    }
}

struct Maker<D: Device> {
    make: fn(&D, &LayerConfig) -> Result<SelectedDecode<D>>,
}

// Holds the maker as a constant, because a reference to it has to outlive the function that makes
// an entry.
struct Made<B>(PhantomData<B>);

impl<B: DecodeBackend> Made<B> {
    const MAKER: &'static (dyn Any + Send + Sync) = &Maker {
        make: SelectedDecode::new::<B>,
    };
}

// A backend whose state and metadata are opaque, so that a pointer to it needs no type but the
// device's.
trait DecodeObject<D: Device>: Send + Sync {
    fn spec(&self) -> &'static BackendSpec;
    fn workspace_bytes(&self, device: &D, limits: &StepLimits) -> Result<u64>;
    fn state(&self, device: &D, limits: &StepLimits) -> Result<Opaque>;
    fn metadata(&self, device: &D, limits: &StepLimits) -> Result<Opaque>;
    fn prepare(
        &self,
        device: &D,
        batch: &DecodeBatch<'_, D>,
        state: &mut Opaque,
        metadata: &mut Opaque,
    ) -> Result<()>;
    fn decode(
        &self,
        device: &D,
        call: DecodeCall<'_, D>,
        state: &mut Opaque,
        metadata: &Opaque,
    ) -> Result<()>;
    fn set_num_splits(&mut self, splits: u32) -> Result<()>;
}

impl<D: Device, B: DecodeBackend<Device = D>> DecodeObject<D> for B {
    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    fn workspace_bytes(&self, device: &D, limits: &StepLimits) -> Result<u64> {
        DecodeBackend::workspace_bytes(self, device, limits)
    }

    fn state(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        DecodeBackend::state(self, device, limits).map(|state| Opaque::new(B::SPEC.name, state))
    }

    fn metadata(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        DecodeBackend::metadata(self, device, limits)
            .map(|metadata| Opaque::new(B::SPEC.name, metadata))
    }

    fn prepare(
        &self,
        device: &D,
        batch: &DecodeBatch<'_, D>,
        state: &mut Opaque,
        metadata: &mut Opaque,
    ) -> Result<()> {
        DecodeBackend::prepare(
            self,
            device,
            batch,
            state.get_mut(B::SPEC.name)?,
            metadata.get_mut(B::SPEC.name)?,
        )
    }

    fn decode(
        &self,
        device: &D,
        call: DecodeCall<'_, D>,
        state: &mut Opaque,
        metadata: &Opaque,
    ) -> Result<()> {
        DecodeBackend::decode(
            self,
            device,
            call,
            state.get_mut(B::SPEC.name)?,
            metadata.get(B::SPEC.name)?,
        )
    }

    fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        DecodeBackend::set_num_splits(self, splits)
    }
}
