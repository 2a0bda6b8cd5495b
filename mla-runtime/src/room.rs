//! Lists in host memory with a length that the caller chose. A failed allocation is an error.
//!
//! `Vec::with_capacity` and `vec!` end the program instead. A backend calls these functions for a
//! list whose length depends on [`StepLimits`](crate::backend::StepLimits):
//!
//! ```
//! use mla_runtime::{Error, Result, room};
//!
//! fn lens(requests: usize) -> Result<Vec<u32>> {
//!     room::with_room(requests)
//! }
//! assert!(matches!(lens(usize::MAX / 8), Err(Error::OutOfMemory { .. })));
//! ```

use crate::{Error, Result};

fn refused<T>(elements: usize) -> Error {
    let bytes = (elements as u64).saturating_mul(size_of::<T>() as u64);
    Error::OutOfMemory {
        device: "host",
        bytes,
        free: None,
    }
}

/// An empty list with room for `len` elements.
///
/// # Errors
///
/// If the allocator refuses the memory.
pub fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    reserve(&mut list, len)?;
    Ok(list)
}

/// A list of `len` copies of `value`.
///
/// # Errors
///
/// If the allocator refuses the memory.
pub fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut list = with_room(len)?;
    list.resize(len, value);
    Ok(list)
}

/// Makes room for `more` further elements.
pub(crate) fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve_exact(more).map_err(|_| refused::<T>(more))
}

/// `len` bytes of zeros.
pub(crate) fn zeros(len: usize) -> Result<Vec<u8>> {
    let bytes = bytemuck::try_zeroed_vec(len);
    bytes.map_err(|()| refused::<u8>(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_list_is_longer_than_memory() {
        let refused = || with_room::<u64>(usize::MAX / 4).unwrap_err();
        let text = "memory: given a need of 18446744073709551615 bytes on host, accepted as many \
                    as are free";
        assert_eq!(refused().to_string(), text);
        assert!(zeros(usize::MAX).is_err() && zeros(1 << 62).is_err());
        assert!(filled(7u64, usize::MAX / 4).is_err());
        assert_eq!(filled(7u64, 2).unwrap(), [7, 7]);
        let mut list = vec![1u8];
        assert!(reserve(&mut list, usize::MAX).is_err());
        assert_eq!(list, [1]);
        assert_eq!(
            (zeros(3).unwrap(), with_room::<u8>(3).unwrap()),
            (vec![0; 3], vec![])
        );
    }
}
