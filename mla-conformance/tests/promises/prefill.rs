//! Prefill backends that break a promise.

use std::sync::atomic::{AtomicU32, Ordering};

use mla_conformance::{self as conformance, PrefillTopic as Topic};
use mla_cpu::{Cpu, CpuPrefill};
use mla_runtime::backend::{Entry, LayerConfig, PrefillBackend, PrefillBatch, StepLimits};
use mla_runtime::model::DType;
use mla_runtime::spec::Cause;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, mla_backend};

use crate::backend::{ALLOCATED, Conduct, Outcome, Prefill as Hook, State, Tried, Wrong, change};
use crate::forward::*;
use crate::mistakes;
use crate::simulated::Simulated;

const RIGHT: Conduct<Hook> = Conduct::right(|call| Ok(Some(call)));
const PLAIN: Topic = Topic::NewTokens;

pub(crate) fn by_type<B: PrefillBackend<Device = Simulated>>(topic: Topic) -> Outcome {
    let outcome = conformance::prefill::<B>(&Simulated::default(), topic);
    outcome.map_err(|failure| failure.to_string())
}

fn by_name(entry: Entry, topic: Topic) -> Outcome {
    let outcome = conformance::prefill_entry(entry, &Simulated::default(), topic);
    outcome.map_err(|failure| failure.to_string())
}

macro_rules! backend {
    ($($of:tt)*) => {
        conducted! {
            PrefillBackend for CpuPrefill: prefill(PrefillCall), PrefillBatch<'_>; $($of)*
        }
    };
}

backend! {
    Right, [dtypes = "f32", dependent_launch = true, graphs = "always",
            features = "batch_invariant"],
    RIGHT
}

wrong! {
    plain NewTokens, dtypes DTypes;

    OneTile [dtypes = "f32"] breaks ["(all)"] at [LongPrompts]
    { call: |call| Ok((call.max_query_len < 128).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    OneLength [dtypes = "f32"] breaks ["(all)"] at [MoreOrFewerKeys]
    { call: |call| Ok((call.max_key_len == call.max_query_len).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    NoChunks [dtypes = "f32"] breaks ["(all)"] at [ContextChunks]
    { call: |call| Ok(call.chunk.is_none().then_some(call)) }
    says "out[0, 0, 0] is NaN";

    AnyRequest [dtypes = "f32"] breaks ["(all)"] at [EmptyBatches]
    { call: |call| match call.query_starts.len() {
        1 => Err(Error::argument("requests", 0, "1 and up")),
        _ => Ok(Some(call)),
    } }
    says "`prefill` refuses it: requests: given 0, accepted 1 and up";

    FewHeads [dtypes = "bf16", heads = "1..=128"] breaks ["heads"] at [Heads]
    { new: mistakes::few_heads }
    says "`new` refuses it: heads: given 128, accepted 1 to 64";

    TwoTensors [dtypes = "f32", key_layout = "packed"] breaks ["key_layout"] at [NewTokens]
    { call: |call| match &call.keys {
        Keys::Split { .. } => Ok(Some(call)),
        Keys::Packed(_) => Err(Error::argument("keys", "one tensor", "two")),
    } }
    says "`prefill` refuses it: keys: given one tensor, accepted two";

    ReadsLines [dtypes = "f32,bf16", alignment = 16] breaks ["alignment"] at [Alignment]
    { call: |mut call| {
        if !Cpu::address(call.query.bytes()).is_multiple_of(32) {
            call.lse = None;
        }
        Ok(Some(call))
    } }
    says "READS_LINES: with tensors that are no better aligned than the spec asks for: \
          READS_LINES: lse[0, 0] is NaN";

    Baked [dtypes = "f32", graphs = "always"] breaks ["graphs"] at [Graphs]
    { bake: true }
    says "BAKED: captured into a graph and replayed with other inputs: ",
         "or narrow the key `graphs`"
    but not BakedWithoutGraphs [dtypes = "f32"];

    ClearsNan [dtypes = "f32", features = "nan_propagation"] breaks ["feature nan_propagation"]
    at [NanQueries, NanKeys, NanValues]
    { after: |written| mistakes::clear_nan(written.out) }
    says " is 0, but should be NaN";

    SpreadsNan [dtypes = "f32", features = "nan_propagation"] breaks ["feature nan_propagation"]
    at [NanQueries, NanKeys, NanValues]
    { after: |written| mistakes::spread_nan(written.out) }
    says " is NaN, but should be ";

    BetweenRows [dtypes = "bf16", features = "strided_outputs"] breaks ["feature strided_outputs"]
    at [Strides]
    { after: mistakes::between_rows }
    says "of out, which lies between its rows";

    AlwaysCausal [dtypes = "bf16", features = "non_causal"] breaks ["feature non_causal"]
    at [NonCausal]
    { call: |call| Ok(Some(call.with_causal(true))) }
    says "ALWAYS_CAUSAL: out[";
}
