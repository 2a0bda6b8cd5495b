//! Decode backends that break a promise.

use std::sync::atomic::{AtomicU32, Ordering};

use mla_conformance::{self as conformance, DecodeTopic as Topic};
use mla_cpu::{Cpu, CpuDecode};
use mla_runtime::backend::{DecodeBackend, Entry, LayerConfig, StepLimits};
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::Cause;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, mla_backend};

use crate::backend::{ALLOCATED, Conduct, Decode as Hook, Outcome, State, Tried, Wrong, change};
use crate::forward::*;
use crate::mistakes;
use crate::simulated::Simulated;

const RIGHT: Conduct<Hook> = Conduct::right(|call| Ok(Some(call)));
const PLAIN: Topic = Topic::SingleTokens;

pub(crate) fn by_type<B: DecodeBackend<Device = Simulated>>(topic: Topic) -> Outcome {
    let outcome = conformance::decode::<B>(&Simulated::default(), topic);
    outcome.map_err(|failure| failure.to_string())
}

fn by_name(entry: Entry, topic: Topic) -> Outcome {
    let outcome = conformance::decode_entry(entry, &Simulated::default(), topic);
    outcome.map_err(|failure| failure.to_string())
}

macro_rules! backend {
    ($($of:tt)*) => {
        conducted! {
            DecodeBackend for CpuDecode: decode(DecodeCall), DecodeBatch<'_, Simulated>; $($of)*
        }
    };
}

backend! {
    Right, [dtypes = "f32", query_len = "ragged", dependent_launch = true, graphs = "always",
            features = "batch_invariant"],
    RIGHT
}

wrong! {
    plain SingleTokens, dtypes Formats;

    OneSplit [dtypes = "f32"] breaks ["(all)"] at [LongContexts]
    { call: |call| Ok((call.batch.max_seq_len < 1000).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    ShortTables [dtypes = "f32"] breaks ["(all)"] at [LongTables]
    { call: |call| Ok((call.batch.max_seq_len < 10_000).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    AnyRequest [dtypes = "f32"] breaks ["(all)"] at [EmptyBatches]
    { call: |call| match call.batch.seq_lens.len() {
        0 => Err(Error::argument("requests", 0, "1 and up")),
        _ => Ok(Some(call)),
    } }
    says "`decode` refuses it: requests: given 0, accepted 1 and up";

    OneRow [dtypes = "f32", cache_dims = "(512,64)|(256,64)"] breaks ["cache_dims"] at [Dimensions]
    { new: |config| mistakes::only(config, config.problem.dims.latent == 512) }
    says "`new` refuses it: problem: given another";

    FewHeads [dtypes = "bf16", heads = "1..=128"] breaks ["heads"] at [Heads]
    { new: mistakes::few_heads }
    says "FEW_HEADS: the spec accepts L=512 (P,R,V)=(128,64,128), heads = 128, dtype = bf16, kv = \
          bf16, page size = 64, query_len = single, but `new` refuses it: heads: given 128, \
          accepted 1 to 64. Narrow the key of #[mla_backend] that lets it through, or make the \
          implementation take it";

    OneFormat [dtypes = "f32", kv = "f32,fp8"] breaks ["kv"] at [Formats]
    { new: |config| mistakes::only(config, config.problem.kv_format == KvFormat::F32) }
    says "`new` refuses it: problem: given another";

    // The groups with small scales are lost.
    OneScale [dtypes = "f32", kv = "f32,fp8_ds_mla"] breaks ["kv"] at [GroupScales]
    { after: |written| mistakes::flush(written.out) }
    says " is 0, but should be ";

    OnePageSize [dtypes = "f32", page_sizes = "64|16"] breaks ["page_sizes"] at [PageSizes]
    { new: |config| mistakes::only(config, config.problem.page_size == 64) }
    says "`new` refuses it: problem: given another";

    OneToken [dtypes = "f32", query_len = "ragged"] breaks ["query_len"] at [QueryLengths]
    { call: |call| Ok((call.batch.max_query_len < 2).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    FewTokens [dtypes = "f32", query_len = "uniform", max_query_len = 8] breaks ["max_query_len"]
    at [QueryLengths]
    { call: |call| Ok((call.batch.max_query_len < 8).then_some(call)) }
    says "out[0, 0, 0] is NaN";

    TwoTensors [dtypes = "f32", query_format = "concatenated"] breaks ["query_format"]
    at [SingleTokens]
    { call: |call| match &call.query {
        Query::Split { .. } => Ok(Some(call)),
        Query::Concatenated(_) => Err(Error::argument("query", "one tensor", "two")),
    } }
    says "`decode` refuses it: query: given one tensor, accepted two";

    ReadsLines [dtypes = "f32,bf16", alignment = 16] breaks ["alignment"] at [Alignment]
    { call: |mut call| {
        if let Query::Split { latent, .. } = &call.query
            && !Cpu::address(latent.bytes()).is_multiple_of(32)
        {
            call.lse = None;
        }
        Ok(Some(call))
    } }
    says "READS_LINES: with tensors that are no better aligned than the spec asks for: \
          READS_LINES: lse[0, 0] is NaN";

    Baked [dtypes = "f32", graphs = "single_token"] breaks ["graphs"] at [Graphs]
    { bake: true }
    says "BAKED: captured into a graph and replayed with other inputs: BAKED: ",
         "or narrow the key `graphs`"
    but not BakedWithoutGraphs [dtypes = "f32"];

    PlansInSecret [dtypes = "f32"] breaks ["plans_on_host"] at [SingleTokens]
    { call: |call| match call.batch.host {
        Some(_) => Ok(Some(call)),
        None => Err(Error::argument("host lengths", "none", "each request's")),
    } }
    says "`decode` refuses it: host lengths: given none, accepted each request's"
    but not PlansOnHost [dtypes = "f32", plans_on_host = true];

    NoLse [dtypes = "bf16", lse_precision = "dtype"] breaks ["lse"] at [SingleTokens]
    { call: |mut call| {
        call.lse = None;
        Ok(Some(call))
    } }
    says "NO_LSE: lse[0, 0] is NaN, but should be ";

    NoCounts [dtypes = "bf16", sparse = "required"] breaks ["sparse"] at [SlotLists]
    { call: |mut call| {
        call.slots = call.slots.map(|slots| slots.with_counts(None));
        Ok(Some(call))
    } }
    says "NO_COUNTS: out[";

    ShortLists [dtypes = "f32", sparse = "required", max_list_width = 8192]
    breaks ["max_list_width"] at [LongTables]
    { call: |call| {
        let is_short = call.slots.as_ref().is_some_and(|slots| slots.width < 4096);
        Ok(is_short.then_some(call))
    } }
    says "out[0, 0, 0] is NaN";

    NoSinks [dtypes = "bf16", features = "sinks"] breaks ["feature sinks"] at [Sinks]
    { call: |mut call| {
        call.sinks = None;
        Ok(Some(call))
    } }
    says "NO_SINKS: out[";

    ClearsNan [dtypes = "f32", features = "nan_propagation"] breaks ["feature nan_propagation"]
    at [NanQueries, NanRows]
    { after: |written| mistakes::clear_nan(written.out) }
    says " is 0, but should be NaN";

    SpreadsNan [dtypes = "f32", features = "nan_propagation"] breaks ["feature nan_propagation"]
    at [NanQueries, NanRows]
    { after: |written| mistakes::spread_nan(written.out) }
    says " is NaN, but should be ";

    BetweenRows [dtypes = "bf16", features = "strided_outputs"] breaks ["feature strided_outputs"]
    at [Strides]
    { after: mistakes::between_rows }
    says "BETWEEN_ROWS: wrote byte 16384 of out, which lies between its rows";

    NoDenseRequests [
        dtypes = "bf16", query_len = "ragged", sparse = "required", features = "dense_requests",
    ] breaks ["feature dense_requests"] at [DenseRequests]
    { call: |mut call| {
        call.slots = call.slots.map(|slots| slots.with_dense_within(0));
        Ok(Some(call))
    } }
    says "NO_DENSE_REQUESTS: out[0, 0, 0] is ";

    NoSecondCache [
        dtypes = "bf16", query_len = "ragged", sparse = "required", features = "second_cache",
    ] breaks ["feature second_cache"] at [SecondCache]
    { call: |mut call| {
        call.slots = call.slots.map(|slots| slots.with_second(None));
        Ok(Some(call))
    } }
    says "NO_SECOND_CACHE: out[0, 0, 0] is ";

    OwnStrides [dtypes = "bf16", query_len = "ragged", features = "split_cache"]
    breaks ["feature split_cache"] at [SplitCache]
    { call: |mut call| {
        let mut layout = *call.cache.layout();
        if let Some(strides) = &mut layout.split_rope {
            // Pages of rotary keys are treated as if nothing lay between them.
            strides.page_stride = layout.page_size * strides.row_stride;
            let (latents, rope) = (call.cache.bytes(), call.cache.rope_bytes());
            call.cache = CacheRef::split(latents, rope, layout)?;
        }
        Ok(Some(call))
    } }
    says "OWN_STRIDES: out[0, 0, ";

    AlwaysCausal [dtypes = "bf16", query_len = "ragged", features = "non_causal"]
    breaks ["feature non_causal"] at [NonCausal]
    { call: |mut call| {
        call.batch.causal = true;
        Ok(Some(call))
    } }
    says "ALWAYS_CAUSAL: out[";
}
