//! Backends with other requirements than the CPU's own: packed keys and concatenated queries. Each
//! checks its inputs and computes with the CPU's backend.

use std::cell::Cell;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, Keys, LayerConfig, Output, PrefillBackend,
    PrefillBatch, PrefillCall, Query, StepLimits,
};
use mla_runtime::spec::{BackendSpec, Feature, FeatureSet, KeyLayout, QueryFormat};
use mla_runtime::tensor::{Layout, TensorMut};

use crate::world::indices;

/// A prefill backend that takes packed keys if `PACKED` is true, and split keys otherwise.
pub(crate) struct Demanding<const PACKED: bool> {
    cpu: CpuPrefill,
    config: LayerConfig,
}

impl<const PACKED: bool> Demanding<PACKED> {
    fn checked<'a>(&self, mut call: PrefillCall<'a, Cpu>) -> PrefillCall<'a, Cpu> {
        let problem = &self.config.problem;
        let head = problem.dims.head;
        let (heads, v) = (problem.heads as usize, head.v as usize);
        let (nope, qk) = (head.nope as usize, head.qk() as usize);
        let rows = call.values.shape()[0];
        match call.keys {
            Keys::Packed(keys) => {
                assert!(PACKED);
                assert_eq!(keys.shape(), [rows, heads, qk]);
                // Every head must have the same rotary part.
                for [row, head, column] in indices([rows, heads, qk - nope]) {
                    let [own, first] = [head, 0].map(|head| keys.at([row, head, nope + column]));
                    assert_eq!(own, first);
                }
            }
            Keys::Split { nope: own, .. } => {
                assert!(!PACKED);
                assert_eq!(own.shape(), [rows, heads, nope]);
            }
        }
        assert_eq!(call.values.shape(), [rows, heads, v]);
        let Output::Plain(out) = call.out else {
            panic!("the layer asks for plain outputs");
        };
        let [tokens, ..] = out.shape();
        assert_eq!(out.shape(), [tokens, heads, v]);
        call.out = Output::Plain(filled_with_nan(out));
        call
    }
}

/// Returns `out` with NaN in every element. Elements that are not written can thus be found.
fn filled_with_nan(out: TensorMut<'_, Cpu>) -> TensorMut<'_, Cpu> {
    let layout = *out.layout();
    let bytes = out.into_bytes();
    let end = layout.span_bytes().unwrap();
    assert_eq!(layout, Layout::contiguous(layout.dtype, layout.shape));
    bytes[..end].fill(0xff);
    TensorMut::new(bytes, layout).unwrap()
}

impl<const PACKED: bool> PrefillBackend for Demanding<PACKED> {
    type Device = Cpu;
    type State = <CpuPrefill as PrefillBackend>::State;
    type Metadata = Vec<(usize, usize)>;

    const SPEC: BackendSpec = CpuPrefill::SPEC
        .with_name("DEMANDING")
        .with_key_layout(if PACKED {
            KeyLayout::Packed
        } else {
            KeyLayout::Split
        });

    fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
        Ok(Self {
            cpu: CpuPrefill::new(device, config)?,
            config: *config,
        })
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
        PrefillBackend::state(&self.cpu, device, limits)
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<Self::Metadata> {
        Ok(Vec::new())
    }

    fn prepare(
        &self,
        _: &Cpu,
        batch: &PrefillBatch<'_>,
        _: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        // A backend that plans call by call would keep these numbers. The call of the new tokens
        // comes last.
        metadata.clear();
        for chunk in batch.chunks {
            let queries = &batch.query_lens[chunk.requests()];
            let tokens: u32 = queries.iter().sum();
            metadata.push((tokens as usize, chunk.rows() as usize));
        }
        let [tokens, keys] =
            [batch.query_lens, batch.key_lens].map(|lens| lens.iter().sum::<u32>() as usize);
        // All of the context is either in chunks or in this call.
        assert!(keys == tokens || batch.chunks.is_empty());
        metadata.push((tokens, keys));
        Ok(())
    }

    unsafe fn prefill(
        &self,
        device: &Cpu,
        call: PrefillCall<'_, Cpu>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()> {
        let index = call.chunk.map_or(metadata.len() - 1, |(index, _)| index);
        let sizes = (call.query.shape()[0], call.values.shape()[0]);
        assert_eq!(sizes, metadata[index]);
        // SAFETY: the caller keeps the same contract.
        unsafe { PrefillBackend::prefill(&self.cpu, device, self.checked(call), state, &()) }
    }
}

thread_local! {
    /// True if the decode backend below must panic in `prepare`.
    pub(crate) static PANICS: Cell<bool> = const { Cell::new(false) };
}

/// A decode backend that needs concatenated queries.
pub(crate) struct Concatenated {
    cpu: CpuDecode,
}

impl DecodeBackend for Concatenated {
    type Device = Cpu;
    type State = <CpuDecode as DecodeBackend>::State;
    type Metadata = <CpuDecode as DecodeBackend>::Metadata;

    const SPEC: BackendSpec = CpuDecode::SPEC
        .with_name("CONCATENATED")
        .with_query_format(QueryFormat::Concatenated)
        // All features except query tokens that see each other.
        .with_features(FeatureSet::of(&[
            Feature::Sinks,
            Feature::Deterministic,
            Feature::NanPropagation,
            Feature::StridedOutputs,
            Feature::DenseRequests,
            Feature::SecondCache,
        ]))
        .with_max_query_len(Some(3));

    fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
        Ok(Self {
            cpu: CpuDecode::new(device, config)?,
        })
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
        DecodeBackend::state(&self.cpu, device, limits)
    }

    fn metadata(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::Metadata> {
        DecodeBackend::metadata(&self.cpu, device, limits)
    }

    fn prepare(
        &self,
        device: &Cpu,
        batch: &DecodeBatch<'_, Cpu>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        assert!(!PANICS.get(), "as the test has it");
        // The host's lengths must equal those that the device gets.
        let [query_lens, seq_lens] = batch.host.expect("the layer knows the lengths");
        assert_eq!(query_lens.len(), batch.block_table.requests());
        for (request, (q, kv)) in query_lens.iter().zip(seq_lens).enumerate() {
            let [first, end] = [0, 1].map(|i| batch.query_starts.at(request + i));
            assert_eq!(end - first, *q as i32);
            assert_eq!(batch.seq_lens.at(request), *kv as i32);
        }
        DecodeBackend::prepare(&self.cpu, device, batch, state, metadata)
    }

    unsafe fn decode(
        &self,
        device: &Cpu,
        call: DecodeCall<'_, Cpu>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()> {
        assert!(matches!(call.query, Query::Concatenated(_)));
        // SAFETY: the caller keeps the same contract.
        unsafe { DecodeBackend::decode(&self.cpu, device, call, state, metadata) }
    }
}
