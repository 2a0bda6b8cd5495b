//! Turns a selection made at run time back into types.

use crate::backend::list::{DecodeList, DecodeMember, Listed, PrefillList, PrefillMember};
use crate::backend::{DecodeBackend, PrefillBackend};
use crate::device::Device;
use crate::select::{Selection, SelectionError};
use crate::spec::{BackendSpec, Phase};

/// An operation that is generic over the types of a layer's two backends.
pub trait LayerVisitor<D: Device> {
    /// The result, the same for all types.
    type Output;

    /// Executes the operation for the selected backends.
    fn visit<P: PrefillBackend<Device = D>, B: DecodeBackend<Device = D>>(self) -> Self::Output;
}

/// The result of a visit, or the reason why there was none.
type Visited<D, V> = Result<<V as LayerVisitor<D>>::Output, SelectionError>;

/// An element of a list of prefill backends for one type of device. It can be a backend that this
/// build leaves out; no visitor is sent to it.
pub trait PrefillArm<D: Device>: PrefillMember {
    /// Sends the visitor to this backend and to the decode backend of `selection`. Returns `None`
    /// if this backend is left out.
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>,
    {
        let _ = (selection, visitor);
        None
    }
}

/// An element of a list of decode backends for one type of device. It can be a backend that this
/// build leaves out; no visitor is sent to it.
pub trait DecodeArm<D: Device>: DecodeMember {
    /// Sends the visitor to this backend. Returns `None` if the backend is left out.
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

/// A list of prefill backends for one type of device. A visitor can be sent to each of them.
pub trait PrefillArms<D: Device>: PrefillList {
    /// Sends the visitor to the backends of `selection`. Returns `None` if the list lacks the
    /// prefill backend.
    fn visit<L, V>(selection: &Selection, visitor: V) -> Option<Visited<D, V>>
    where
        L: DecodeArms<D>,
        V: LayerVisitor<D>;
}

/// A list of decode backends for one type of device. A visitor can be sent to each of them.
pub trait DecodeArms<D: Device>: DecodeList {
    /// Sends the visitor to the backend with this spec. Returns `None` if the list lacks it.
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

// The whole spec is compared and not only the name, because the name may have been given to another
// backend.
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
/// If one of the two is not in its list.
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
