//! From a selection at run time back to types.

use crate::backend::list::{DecodeList, DecodeMember, Listed, PrefillList, PrefillMember};
use crate::backend::{DecodeBackend, PrefillBackend};
use crate::device::Device;
use crate::select::{Selection, SelectionError};
use crate::spec::{BackendSpec, Phase};

/// An operation on the type of a prefill backend.
pub trait PrefillVisitor<D: Device> {
    /// The result, for any type.
    type Output;

    /// Does it for the backend that was selected.
    fn visit<P: PrefillBackend<Device = D>>(self) -> Self::Output;
}

/// An operation on the type of a decode backend.
pub trait DecodeVisitor<D: Device> {
    /// The result, for any type.
    type Output;

    /// Does it for the backend that was selected.
    fn visit<B: DecodeBackend<Device = D>>(self) -> Self::Output;
}

/// An operation on the types of both backends of a layer.
pub trait LayerVisitor<D: Device> {
    /// The result, for any types.
    type Output;

    /// Does it for the backends that were selected.
    fn visit<P: PrefillBackend<Device = D>, B: DecodeBackend<Device = D>>(self) -> Self::Output;
}

/// An element of a list that a visitor can be sent to: a prefill backend for this type of device,
/// or one that this build leaves out, to which no visitor is sent.
pub trait PrefillArm<D: Device>: PrefillMember {
    /// Sends the visitor there, or returns `None` if the backend is left out.
    fn visit<V: PrefillVisitor<D>>(visitor: V) -> Option<V::Output> {
        drop(visitor);
        None
    }
}

/// An element of a list that a visitor can be sent to: a decode backend for this type of device, or
/// one that this build leaves out, to which no visitor is sent.
pub trait DecodeArm<D: Device>: DecodeMember {
    /// Sends the visitor there, or returns `None` if the backend is left out.
    fn visit<V: DecodeVisitor<D>>(visitor: V) -> Option<V::Output> {
        drop(visitor);
        None
    }
}

impl<D: Device, B: PrefillBackend<Device = D>> PrefillArm<D> for B {
    fn visit<V: PrefillVisitor<D>>(visitor: V) -> Option<V::Output> {
        Some(visitor.visit::<B>())
    }
}

impl<D: Device, B: DecodeBackend<Device = D>> DecodeArm<D> for B {
    fn visit<V: DecodeVisitor<D>>(visitor: V) -> Option<V::Output> {
        Some(visitor.visit::<B>())
    }
}

/// A list of prefill backends for one type of device, each of which a visitor can be sent to.
pub trait PrefillArms<D: Device>: PrefillList {
    /// Sends the visitor to the backend with this spec, or returns `None` if there is none.
    fn visit<V: PrefillVisitor<D>>(spec: &BackendSpec, visitor: V) -> Option<V::Output>;
}

/// A list of decode backends for one type of device, each of which a visitor can be sent to.
pub trait DecodeArms<D: Device>: DecodeList {
    /// Sends the visitor to the backend with this spec, or returns `None` if there is none.
    fn visit<V: DecodeVisitor<D>>(spec: &BackendSpec, visitor: V) -> Option<V::Output>;
}

impl<D: Device> PrefillArms<D> for () {
    fn visit<V: PrefillVisitor<D>>(_: &BackendSpec, _: V) -> Option<V::Output> {
        None
    }
}

impl<D: Device> DecodeArms<D> for () {
    fn visit<V: DecodeVisitor<D>>(_: &BackendSpec, _: V) -> Option<V::Output> {
        None
    }
}

// The whole spec is compared, not the name alone: a name may have been given to another backend.
impl<D: Device, M: PrefillArm<D>, T: PrefillArms<D>> PrefillArms<D> for (M, T) {
    fn visit<V: PrefillVisitor<D>>(spec: &BackendSpec, visitor: V) -> Option<V::Output> {
        if spec == M::MEMBER.spec() {
            M::visit(visitor)
        } else {
            T::visit(spec, visitor)
        }
    }
}

impl<D: Device, M: DecodeArm<D>, T: DecodeArms<D>> DecodeArms<D> for (M, T) {
    fn visit<V: DecodeVisitor<D>>(spec: &BackendSpec, visitor: V) -> Option<V::Output> {
        if spec == M::MEMBER.spec() {
            M::visit(visitor)
        } else {
            T::visit(spec, visitor)
        }
    }
}

/// Calls the visitor with the type of the prefill backend that has this spec, as
/// [`Selection::prefill`] says it.
///
/// # Errors
///
/// If the list has no such backend.
pub fn with_prefill<L, D, V>(spec: &BackendSpec, visitor: V) -> Result<V::Output, SelectionError>
where
    L: PrefillArms<D>,
    D: Device,
    V: PrefillVisitor<D>,
{
    L::visit(spec, visitor).ok_or_else(|| no_arm(Phase::Prefill, spec, L::LISTED))
}

/// Calls the visitor with the type of the decode backend that has this spec, as
/// [`Selection::decode`] says it.
///
/// # Errors
///
/// If the list has no such backend.
pub fn with_decode<L, D, V>(spec: &BackendSpec, visitor: V) -> Result<V::Output, SelectionError>
where
    L: DecodeArms<D>,
    D: Device,
    V: DecodeVisitor<D>,
{
    L::visit(spec, visitor).ok_or_else(|| no_arm(Phase::Decode, spec, L::LISTED))
}

/// Calls the visitor with the types of both backends of a selection.
///
/// # Errors
///
/// If one of them is not in its list.
pub fn with_backends<P, B, D, V>(
    selection: &Selection,
    visitor: V,
) -> Result<V::Output, SelectionError>
where
    P: PrefillArms<D>,
    B: DecodeArms<D>,
    D: Device,
    V: LayerVisitor<D>,
{
    let decode = DecodeNext::<B, V> {
        spec: &selection.decode,
        visitor,
        list: std::marker::PhantomData,
    };
    with_prefill::<P, D, _>(&selection.prefill, decode)?
}

// Goes on to the decode backend once the prefill backend has a type, and then to the visitor.
struct DecodeNext<'a, B, V> {
    spec: &'a BackendSpec,
    visitor: V,
    list: std::marker::PhantomData<B>,
}

impl<D: Device, B: DecodeArms<D>, V: LayerVisitor<D>> PrefillVisitor<D> for DecodeNext<'_, B, V> {
    type Output = Result<V::Output, SelectionError>;

    fn visit<P: PrefillBackend<Device = D>>(self) -> Self::Output {
        let both = Both::<P, V> {
            visitor: self.visitor,
            prefill: std::marker::PhantomData,
        };
        with_decode::<B, D, _>(self.spec, both)
    }
}

struct Both<P, V> {
    visitor: V,
    prefill: std::marker::PhantomData<P>,
}

impl<D: Device, P: PrefillBackend<Device = D>, V: LayerVisitor<D>> DecodeVisitor<D> for Both<P, V> {
    type Output = V::Output;

    fn visit<B: DecodeBackend<Device = D>>(self) -> V::Output {
        self.visitor.visit::<P, B>()
    }
}

#[cold]
fn no_arm(phase: Phase, spec: &BackendSpec, list: Option<&'static Listed>) -> SelectionError {
    SelectionError::NoArm {
        phase,
        name: spec.name,
        provider: spec.provider,
        listed: std::iter::successors(list, |listed| listed.next)
            .map(|listed| listed.spec.name)
            .collect(),
    }
}
