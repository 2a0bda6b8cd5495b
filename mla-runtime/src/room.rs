//! Lists of the host whose length somebody else chose: what its allocator refuses is an error.

use crate::error::{Error, PlanError};

/// The bytes that were refused.
#[derive(Debug)]
pub(crate) struct Refused {
    bytes: u64,
}

impl Refused {
    fn of<T>(elements: usize) -> Self {
        let bytes = (elements as u64).saturating_mul(size_of::<T>() as u64);
        Self { bytes }
    }
}

impl From<Refused> for PlanError {
    fn from(Refused { bytes }: Refused) -> Self {
        Self::OutOfMemory { bytes }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        PlanError::from(refused).into()
    }
}

type Result<T> = std::result::Result<T, Refused>;

/// An empty list with room for `len` elements.
pub(crate) fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    reserve(&mut list, len)?;
    Ok(list)
}

/// Makes room for `more` elements behind those of a list.
pub(crate) fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve_exact(more)
        .map_err(|_| Refused::of::<T>(more))
}

/// `len` bytes of zeros.
pub(crate) fn zeros(len: usize) -> Result<Vec<u8>> {
    let bytes = bytemuck::try_zeroed_vec(len);
    bytes.map_err(|()| Refused::of::<u8>(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_list_is_longer_than_memory() {
        let refused = || with_room::<u64>(usize::MAX / 4).unwrap_err();
        let text = "memory: given a need of 18446744073709551615 bytes on host, accepted as many \
                    as are free";
        assert_eq!(Error::from(refused()).to_string(), text);
        assert_eq!(PlanError::from(refused()).to_string(), text);
        assert_eq!(Error::from(PlanError::from(refused())).to_string(), text);
        assert!(zeros(usize::MAX).is_err() && zeros(1 << 62).is_err());
        let mut list = vec![1u8];
        assert!(reserve(&mut list, usize::MAX).is_err());
        assert_eq!(list, [1]);
        assert_eq!(
            (zeros(3).unwrap(), with_room::<u8>(3).unwrap()),
            (vec![0; 3], vec![])
        );
    }
}
