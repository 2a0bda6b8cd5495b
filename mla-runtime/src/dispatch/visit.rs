//! The way from a selection at run time back to types.

use crate::backend::list::{DecodeList, DecodeMember, Listed, PrefillList, PrefillMember};
use crate::backend::{DecodeBackend, PrefillBackend};
use crate::device::Device;
use crate::select::{Selection, SelectionError};
use crate::spec::{BackendSpec, Phase};

/// An operation on the types of both backends of a layer.
pub trait LayerVisitor<D: Device> {
    /// The result, for any types.
    type Output;

    /// Does it for the backends that were selected.
    fn visit<P: PrefillBackend<Device = D>, B: DecodeBackend<Device = D>>(self) -> Self::Output;
}

/// The result of a visit, or the reason why there was none.
type Visited<D, V> = Result<<V as LayerVisitor<D>>::Output, SelectionError>;

/// An element of a list that a visitor can be sent to: a prefill backend for this type of device,
/// or one that this build leaves out, to which no visitor is sent.
pub trait PrefillArm<D: Device>: PrefillMember {
    /// Sends the visitor there and on to the decode backend of `selection`, or returns `None` if
    /// the backend is left out.
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>,
    {
        let _ = (selection, visitor);
        None
    }
}

/// An element of a list that a visitor can be sent to: a decode backend for this type of device, or
/// one that this build leaves out, to which no visitor is sent.
pub trait DecodeArm<D: Device>: DecodeMember {
    /// Sends the visitor there, or returns `None` if the backend is left out.
    fn visit<P: PrefillBackend<Device = D>, V: LayerVisitor<D>>(visitor: V) -> Option<V::Output> {
        drop(visitor);
        None
    }
}

impl<D: Device, P: PrefillBackend<Device = D>> PrefillArm<D> for P {
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>,
    {
        let spec = &selection.decode;
        let visited = L::visit::<P, V>(spec, visitor);
        Some(visited.ok_or_else(|| no_arm(Phase::Decode, spec, L::LISTED)))
    }
}

impl<D: Device, B: DecodeBackend<Device = D>> DecodeArm<D> for B {
    fn visit<P: PrefillBackend<Device = D>, V: LayerVisitor<D>>(visitor: V) -> Option<V::Output> {
        Some(visitor.visit::<P, B>())
    }
}

/// A list of prefill backends for one type of device, each of which a visitor can be sent to.
pub trait PrefillArms<D: Device>: PrefillList {
    /// Sends the visitor to the backends of `selection`, or returns `None` if the list has not its
    /// prefill backend.
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>;
}

/// A list of decode backends for one type of device, each of which a visitor can be sent to.
pub trait DecodeArms<D: Device>: DecodeList {
    /// Sends the visitor to the backend with this spec, or returns `None` if there is none.
    fn visit<P, V>(spec: &BackendSpec, visitor: V) -> Option<V::Output>
    where
        P: PrefillBackend<Device = D>,
        V: LayerVisitor<D>;
}

impl<D: Device> PrefillArms<D> for () {
    fn visit<L, V>(_: &Selection, _: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>,
    {
        None
    }
}

impl<D: Device> DecodeArms<D> for () {
    fn visit<P, V>(_: &BackendSpec, _: V) -> Option<V::Output>
    where
        P: PrefillBackend<Device = D>,
        V: LayerVisitor<D>,
    {
        None
    }
}

// The whole spec is compared, not the name alone: a name may have been given to another backend.
impl<D: Device, M: PrefillArm<D>, T: PrefillArms<D>> PrefillArms<D> for (M, T) {
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>,
    {
        if &selection.prefill == M::MEMBER.spec() {
            M::visit::<L, V>(selection, visitor)
        } else {
            T::visit::<L, V>(selection, visitor)
        }
    }
}

impl<D: Device, M: DecodeArm<D>, T: DecodeArms<D>> DecodeArms<D> for (M, T) {
    fn visit<P, V>(spec: &BackendSpec, visitor: V) -> Option<V::Output>
    where
        P: PrefillBackend<Device = D>,
        V: LayerVisitor<D>,
    {
        if spec == M::MEMBER.spec() {
            M::visit::<P, V>(visitor)
        } else {
            T::visit::<P, V>(spec, visitor)
        }
    }
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
    P::visit::<B, V>(selection, visitor)
        .unwrap_or_else(|| Err(no_arm(Phase::Prefill, &selection.prefill, P::LISTED)))
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
