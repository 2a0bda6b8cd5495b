//! Topics of the tests of a backend.

/// An enumeration of topics, each with the name of its test, and a macro that defines the tests:
/// one phase's own topics, and those of both. `$d` is a dollar of that macro.
macro_rules! topics {
    (
        ($d:tt) $(#[$about:meta])* $name:ident
        $(#[$about_macro:meta])* $macro:ident, $run:ident { $($own:tt)* }
    ) => {
        topics! {
            @ ($d) $(#[$about])* $name
            $(#[$about_macro])* $macro, $run {
                $($own)*
                /// Quantised outputs, where the spec has them.
                QuantisedOutputs = quantised_outputs,
                /// The same call again, bit for bit, where the spec says that it is deterministic.
                Repetition = repetition,
                /// Each request alone and among others, bit for bit, where the spec says that it is
                /// batch-invariant.
                BatchInvariance = batch_invariance,
                /// Programmatic dependent launch: inputs that the kernel before writes late, and a
                /// kernel behind that begins early. It is tried whatever the spec says, since the
                /// device fences other backends, and only on a device whose kernels overlap.
                DependentLaunch = dependent_launch,
                /// Captured into a graph and replayed with other inputs, where the spec says that
                /// it can be and the device has graphs.
                Graphs = graphs,
                /// State and metadata have the size that `workspace_bytes` says. Nothing is written
                /// beyond them, if the device has guards to tell, and a step that exceeds their
                /// limits is refused, or right.
                Workspace = workspace_bytes,
                /// Tensors that are as aligned as the spec asks for, and no better.
                Alignment = alignment,
                /// The backend as a registry gives it by name.
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

            /// Returns the name of the topic, which is that of its test.
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
    /// Topic of a test of a decode backend.
    DecodeTopic

    /// Defines a test of each [`DecodeTopic`], for a backend on a device:
    /// `decode_conformance!(#[attributes]… Backend, device)`. See [the crate](crate).
    decode_conformance, decode {
        /// Requests of one query token each, with contexts around the ends of pages, and with none.
        SingleTokens = single_tokens,
        /// Equal and different numbers of query tokens.
        QueryLengths = query_lengths,
        /// Every dtype with every cache format.
        Formats = dtypes_and_cache_formats,
        /// Every width of a cache row.
        Dimensions = dimensions,
        /// Few heads, many, odd numbers.
        Heads = heads,
        /// Every page size, or some.
        PageSizes = page_sizes,
        /// Contexts that are worth splitting.
        LongContexts = long_contexts,
        /// Batches whose maximum length is above the lengths of their requests, in the block table
        /// or the lists of slots: a backend may choose other kernels by the maximum.
        LongTables = long_tables,
        /// Queries with gaps between tokens, and outputs if the spec says so; no log-sum-exp.
        Strides = strides,
        /// No request, no query token, no context.
        EmptyBatches = empty_batches,
        /// A NaN in a query: in its row's output, and in no other, where the spec promises that.
        NanQueries = nan_queries,
        /// A NaN in a cache row: in the outputs of those that see the row, and in no other, where
        /// the spec promises that.
        NanRows = nan_rows,
        /// Scales that are far apart, of groups of latent values within a row and from row to row,
        /// for cache formats whose rows have scales. Each group's outputs are held to a tolerance
        /// of its own.
        GroupScales = group_scales,
        /// Lists of slots, where the spec has them.
        SlotLists = slot_lists,
        /// Requests of a sparse call that attend to all of their tokens, where the spec has them.
        DenseRequests = dense_requests,
        /// A second cache with lists of its own, where the spec has it.
        SecondCache = second_cache,
        /// A cache of two tensors with strides of their own, where the spec has it: the cases of
        /// the topics that read a cache.
        SplitCache = split_cache,
        /// Query tokens that see all of their request, where the spec has them.
        NonCausal = non_causal,
        /// A score for each head that takes part in the softmax without a value, where the spec has
        /// it.
        Sinks = sinks,
        /// A factor on the softmax scale for each query token, where the spec has them.
        QueryScales = query_scales,
    }
}

topics! {
    ($)
    /// Topic of a test of a prefill backend.
    PrefillTopic

    /// Defines a test of each [`PrefillTopic`], for a backend on a device:
    /// `prefill_conformance!(#[attributes]… Backend, device)`. See [the crate](crate).
    prefill_conformance, prefill {
        /// Causal attention of prompts of different lengths.
        NewTokens = new_tokens,
        /// More keys than queries, and fewer, aligned at the end.
        MoreOrFewerKeys = more_or_fewer_keys,
        /// Attention to context, not causal, with requests that have none.
        ContextChunks = context_chunks,
        /// New tokens that see each other, where the spec has them.
        NonCausal = non_causal,
        /// A factor on the softmax scale for each query token, where the spec has them.
        QueryScales = query_scales,
        /// Every dtype.
        DTypes = dtypes,
        /// Every (P,R,V).
        Dimensions = dimensions,
        /// Few heads, many, odd numbers.
        Heads = heads,
        /// Prompts of several tiles, and batches of which one request has most of the keys.
        LongPrompts = long_prompts,
        /// Inputs with gaps between tokens, and outputs if the spec says so; no log-sum-exp.
        Strides = strides,
        /// No request, no token, no key.
        EmptyBatches = empty_batches,
        /// A NaN in a query: in its row's output, and in no other, where the spec promises that.
        NanQueries = nan_queries,
        /// A NaN in a key: in the outputs of the rows that see it, and in no other, where the spec
        /// promises that.
        NanKeys = nan_keys,
        /// A NaN in a value: in its column of the rows that see it, and nowhere else, where the
        /// spec promises that.
        NanValues = nan_values,
    }
}
