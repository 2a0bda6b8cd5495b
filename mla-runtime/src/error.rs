//! Errors of preparing and enqueuing work on a device.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// An error of a device, a backend or the layer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument does not fit. Nothing was enqueued, unless the function says otherwise.
    #[error("{field}: given {given}, accepted {accepted}")]
    Argument {
        /// The argument, or a part of it. An element of a list has its index: `context_lens[3]`.
        field: Cow<'static, str>,
        /// The value that was passed.
        given: String,
        /// The values that would have been accepted.
        accepted: String,
    },
    /// A model's attention needs what no backend here has.
    #[error(
        "{field}: given {given}, accepted a model without {missing}, which no backend here has"
    )]
    Unsupported {
        /// The field of the configuration that asks for it, with the object it is in.
        field: String,
        /// Its value.
        given: String,
        /// The property that no backend has.
        missing: &'static str,
    },
    /// A computed quantity exceeds the integer type that holds it.
    #[error("{quantity}: given more than fits, accepted at most {limit}")]
    Overflow {
        /// The quantity that was computed.
        quantity: &'static str,
        /// The largest value it may have.
        limit: u64,
    },
    /// Not even the smallest plan fits into the given memory.
    #[error("bytes: given {given}, accepted at least {needed}, for {smallest}")]
    DoesNotFit {
        /// The bytes given.
        given: u64,
        /// The bytes that the smallest plan takes.
        needed: u64,
        /// A description of the smallest plan.
        smallest: String,
    },
    /// The device has too little free memory. A smaller cache or workspace may fit.
    #[error(
        "memory: given a need of {bytes} bytes on {device}, accepted {}",
        accepted_bytes(*.free)
    )]
    OutOfMemory {
        /// The device's platform.
        device: &'static str,
        /// The bytes that were asked for.
        bytes: u64,
        /// The bytes that were free, if the device says.
        free: Option<u64>,
    },
    /// The device refused an operation.
    #[error("{operation} failed on {device}: {message}")]
    Device {
        /// The device's platform.
        device: &'static str,
        /// The operation that was attempted.
        operation: &'static str,
        /// The device's own error message.
        message: String,
    },
}

fn accepted_bytes(free: Option<u64>) -> String {
    free.map_or("as many as are free".into(), |free| {
        format!("at most the {free} that are free")
    })
}

impl Error {
    /// An [`Error::Argument`] from displayable parts.
    pub fn argument(
        field: impl Into<Cow<'static, str>>,
        given: impl fmt::Display,
        accepted: impl fmt::Display,
    ) -> Self {
        Self::Argument {
            field: field.into(),
            given: given.to_string(),
            accepted: accepted.to_string(),
        }
    }

    /// The error for a quantity that exceeds 64 bits.
    pub(crate) const fn overflow(quantity: &'static str) -> Self {
        Self::Overflow {
            quantity,
            limit: u64::MAX,
        }
    }

    /// Names the argument that the error is about. An [`Error::Argument`] gets `name` as its field,
    /// and its old field moves into the text of what was given. Every other error stays unchanged.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        match self {
            Self::Argument {
                field,
                given,
                accepted,
            } if field != name => Self::Argument {
                field: name.into(),
                given: format!("{field} {given}"),
                accepted,
            },
            error => error,
        }
    }
}

/// The result type of most functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names the argument that an error is about. Constructors of views know no argument names, so the
/// caller of a constructor adds the name.
///
/// ```
/// # use mla_cpu::Cpu;
/// use mla_runtime::named;
/// use mla_runtime::tensor::TensorRef;
///
/// let q_latent = [0.0f32; 8];
/// let view = TensorRef::<Cpu>::from_slice(&q_latent, [2, 1, 8]);
/// let error = named("q_latent", view).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "q_latent: given layout f32 [2, 1, 8] strides [8, 8, 1], accepted one that lies within 32 \
///      bytes"
/// );
/// ```
///
/// # Errors
///
/// The error of `result`, with [`Error::named`] applied to it.
pub fn named<T>(name: &'static str, result: Result<T>) -> Result<T> {
    result.map_err(|error| error.named(name))
}

/// Refuses a list of another length. `of` says what each of its elements is for.
pub(crate) fn check_len(
    field: &'static str,
    given: usize,
    accepted: usize,
    of: &str,
) -> Result<()> {
    if given == accepted {
        return Ok(());
    }
    Err(Error::argument(field, given, format!("{accepted}, {of}")))
}

/// Refuses a range that does not lie within `0..len`.
pub(crate) fn check_range(field: &'static str, range: &Range<usize>, len: usize) -> Result<()> {
    if range.start <= range.end && range.end <= len {
        return Ok(());
    }
    let accepted = format!("within 0..{len}");
    Err(Error::argument(field, format!("{range:?}"), accepted))
}
