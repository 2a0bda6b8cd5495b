//! Errors in the input of a planning function.

/// An input that no plan can be made for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A field, or one element of it, has a value that is not accepted.
    #[error("{field}: given {given}, accepted {accepted}")]
    Invalid {
        /// The field, with an index if it is a list: `context_lens[3]`.
        field: String,
        /// The value as it was given.
        given: String,
        /// The accepted range or form.
        accepted: String,
    },
    /// A derived quantity exceeds the integers it is counted in.
    #[error("{quantity}: given more than fits, accepted at most {limit}")]
    Overflow {
        /// The quantity that was computed.
        quantity: &'static str,
        /// The largest value it may have.
        limit: u64,
    },
    /// The host has not as much memory left as a list takes.
    #[error("memory: given a need of {bytes} bytes on host, accepted as many as are free")]
    OutOfMemory {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// Not even the smallest plan fits into the memory given.
    #[error("bytes: given {given}, accepted at least {needed}, for {smallest}")]
    DoesNotFit {
        /// The bytes given.
        given: u64,
        /// The bytes that the smallest plan takes.
        needed: u64,
        /// A description of the smallest plan.
        smallest: String,
    },
}

impl PlanError {
    /// An [`PlanError::Invalid`] from anything that can be shown.
    pub(crate) fn invalid(
        field: impl Into<String>,
        given: impl ToString,
        accepted: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            field: field.into(),
            given: given.to_string(),
            accepted: accepted.into(),
        }
    }

    /// An overflow of a 64-bit quantity.
    pub(crate) const fn overflow(quantity: &'static str) -> Self {
        Self::Overflow {
            quantity,
            limit: u64::MAX,
        }
    }
}
