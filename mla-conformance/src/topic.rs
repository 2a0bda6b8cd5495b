//! Topics of the tests for a backend.

/// Defines an enumeration of topics, each with the name of its test, and a macro that defines the
/// tests.
///
/// The topics are those of one phase, and those of both. `$d` is a dollar of that macro.
macro_rules! topics {
    (
        ($d:tt) $(#[$about:meta])* $name:ident
        $(#[$about_macro:meta])* $macro:ident, $run:ident { $($own:tt)* }
    ) => {
        topics! {
            @ ($d) $(#[$about])* $name
            $(#[$about_macro])* $macro, $run {
                $($own)*
                /// Quantised outputs, if the spec has them.
                QuantisedOutputs = quantised_outputs,
                /// The same call twice with equal bits, if the spec says that it is deterministic.
                Repetition = repetition,
                /// Each request alone and among others with equal bits, if the spec says that it is
                /// batch-invariant.
                BatchInvariance = batch_invariance,
                /// Programmatic dependent launch: the preceding kernel writes inputs late, and the
                /// following kernel begins early. All backends are tried, since the device puts
                /// fences around those whose specs do not declare dependent launch. The device must
                /// be one whose kernels overlap.
                DependentLaunch = dependent_launch,
                /// Capture into a graph, which is replayed with other inputs, if the spec says that
                /// it can be captured and the device has graphs.
                Graphs = graphs,
                /// State and metadata have the size that `workspace_bytes` says. If the device has
                /// guards, they show that nothing is written beyond state and metadata. A step that
                /// exceeds their limits is refused, or gives the right results.
                Workspace = workspace_bytes,
                /// Tensors with exactly the alignment that the spec asks for.
                Alignment = alignment,
                /// The backend as a registry returns it by name.
                ThroughTheRegistry = through_the_registry,
            }
        }
    };
    (
        @ ($d:tt) $(#[$about:meta])* $name:ident
        $(#[$about_macro:meta])* $macro:ident, $run:ident {
            $($(#[$of:meta])* $topic:ident = $test:ident,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$of])* $topic,)*
        }

        impl $name {
            /// All topics.
            pub const ALL: &[Self] = &[$(Self::$topic,)*];

            /// Returns the name of the topic, which is also the name of its test.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$topic => stringify!($test),)*
                }
            }
        }

        $(#[$about_macro])*
        #[macro_export]
        macro_rules! $macro {
            ($d(#[$d attribute:meta])* $d backend:ty, $d device:expr $d(,)?) => {
                $crate::$macro!(@ [$d(#[$d attribute])*] $d backend, $d device);
            };
            (@ $d attributes:tt $d backend:ty, $d device:expr) => {
                $($crate::__conformance_test!(
                    $d attributes $test,
                    $crate::$run::<$d backend>(&$d device, $crate::$name::$topic)
                );)*
            };
        }
    };
}

topics! {
    ($)
    /// A topic of the tests for a decode backend.
    DecodeTopic

    /// Defines a test for each [`DecodeTopic`], for a backend on a device:
    /// `decode_conformance!(#[attributes]… Backend, device)`. See [the crate](crate).
    decode_conformance, decode {
        /// Requests of one query token each, with contexts around the ends of pages, and without
        /// context.
        SingleTokens = single_tokens,
        /// Equal and different numbers of query tokens.
        QueryLengths = query_lengths,
        /// Every dtype with every cache format.
        Formats = dtypes_and_cache_formats,
        /// Every width of a cache row.
        Dimensions = dimensions,
        /// Few heads, many heads, and odd numbers of heads.
        Heads = heads,
        /// Every page size, or some.
        PageSizes = page_sizes,
        /// Contexts that are worth splitting.
        LongContexts = long_contexts,
        /// Batches whose stated maximum length exceeds the lengths of their requests, in the block
        /// table or in the lists of slots. A backend may choose other kernels by the maximum.
        LongTables = long_tables,
        /// Gaps between tokens in queries, and in outputs if the spec allows them, without
        /// log-sum-exp.
        Strides = strides,
        /// Batches without requests, without query tokens, or without context.
        EmptyBatches = empty_batches,
        /// A NaN in a query. It must appear in the output of its row and in no other, if the spec
        /// promises that.
        NanQueries = nan_queries,
        /// A NaN in a cache row. It must appear in the outputs of queries that see the row and in
        /// no other, if the spec promises that.
        NanRows = nan_rows,
        /// Scales that are far apart between groups of latent values in a row, and between rows.
        /// This is for cache formats with scales in their rows. Each group's outputs have a
        /// tolerance of their own.
        GroupScales = group_scales,
        /// Lists of slots, if the spec has them.
        SlotLists = slot_lists,
        /// Requests of a sparse call that attend to all of their tokens, if the spec has them.
        DenseRequests = dense_requests,
        /// A second cache with its own lists, if the spec has it.
        SecondCache = second_cache,
        /// A cache of two tensors with separate strides, if the spec has it. The cases are those of
        /// the topics that read a cache.
        SplitCache = split_cache,
        /// Query tokens that see their whole request, if the spec has them.
        NonCausal = non_causal,
        /// A score for each head that takes part in the softmax without a value, if the spec has
        /// it.
        Sinks = sinks,
        /// A factor on the softmax scale for each query token, if the spec has such factors.
        QueryScales = query_scales,
    }
}

topics! {
    ($)
    /// A topic of the tests for a prefill backend.
    PrefillTopic

    /// Defines a test for each [`PrefillTopic`], for a backend on a device:
    /// `prefill_conformance!(#[attributes]… Backend, device)`. See [the crate](crate).
    prefill_conformance, prefill {
        /// Causal attention of prompts of different lengths.
        NewTokens = new_tokens,
        /// More keys than queries, and fewer. Both are aligned at the end.
        MoreOrFewerKeys = more_or_fewer_keys,
        /// Attention to a context without causal mask, with some requests that have no context.
        ContextChunks = context_chunks,
        /// New tokens that see each other, if the spec has them.
        NonCausal = non_causal,
        /// A factor on the softmax scale for each query token, if the spec has such factors.
        QueryScales = query_scales,
        /// Every dtype.
        DTypes = dtypes,
        /// Every (P,R,V).
        Dimensions = dimensions,
        /// Few heads, many heads, and odd numbers of heads.
        Heads = heads,
        /// Prompts of several tiles, and batches in which one request has most of the keys.
        LongPrompts = long_prompts,
        /// Gaps between tokens in inputs, and in outputs if the spec allows them, without
        /// log-sum-exp.
        Strides = strides,
        /// Batches without requests, without tokens, or without keys.
        EmptyBatches = empty_batches,
        /// A NaN in a query. It must appear in the output of its row and in no other, if the spec
        /// promises that.
        NanQueries = nan_queries,
        /// A NaN in a key. It must appear in the outputs of rows that see the key and in no other,
        /// if the spec promises that.
        NanKeys = nan_keys,
        /// A NaN in a value. It must appear in its column of the rows that see it and nowhere else,
        /// if the spec promises that.
        NanValues = nan_values,
    }
}
