//! The sizes of GPU code in an object, for each target.

use std::collections::BTreeMap;

use object::{Object as _, ObjectSection as _};

/// The target of an entry of a fat binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Code {
    /// The compute capability as nvcc writes it, such as 90 or 100.
    pub(crate) number: u32,
    pub(crate) is_ptx: bool,
}

/// Returns the bytes of GPU code in an object, by target.
///
/// The section `.nv_fatbin` is a row of fat binaries. Each has a header of 16 bytes (a magic
/// number, a version, the header's length, the body's length) and a body of entries. The header of
/// an entry has its kind at 0 (1 is PTX), its length at 4, its payload's length at 8, and its
/// capability at 28, all little-endian. An object of another form counts as having no fat binary,
/// since the numbers are only for the report.
pub(crate) fn code_by_target(object: &[u8]) -> BTreeMap<Code, u64> {
    let mut bytes = BTreeMap::new();
    let Ok(file) = object::File::parse(object) else {
        return bytes;
    };
    for section in file.sections() {
        if section.name().is_ok_and(|name| name == ".nv_fatbin")
            && let Ok(data) = section.data()
        {
            // Entries before the first of an unknown form still count.
            let _ = count(data, &mut bytes);
        }
    }
    bytes
}

fn count(data: &[u8], bytes: &mut BTreeMap<Code, u64>) -> Option<()> {
    const MAGIC: u32 = 0xba55_ed50;
    let mut at = 0;
    while at < data.len() {
        let head = data.get(at..)?;
        if word(head, 0)? != MAGIC {
            return None;
        }
        let mut entry = at.checked_add(usize::from(half_word(head, 6)?))?;
        let body = usize::try_from(u64::from_le_bytes(head.get(8..16)?.try_into().ok()?)).ok()?;
        let end = entry.checked_add(body)?;
        while entry < end {
            let head = data.get(entry..)?;
            let length = word(head, 4)?.checked_add(word(head, 8)?)?;
            let code = Code {
                number: word(head, 28)?,
                is_ptx: half_word(head, 0)? == 1,
            };
            *bytes.entry(code).or_default() += u64::from(length);
            // An entry of length 0 would be read for ever.
            entry =
                entry.checked_add(usize::try_from(length).ok().filter(|&length| length > 0)?)?;
        }
        at = end.checked_next_multiple_of(8)?;
    }
    Some(())
}

pub(crate) fn word(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn half_word(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(data.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: u16, number: u32, payload: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64 + payload as usize];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&64_u32.to_le_bytes());
        bytes[8..12].copy_from_slice(&payload.to_le_bytes());
        bytes[28..32].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn binary(entries: &[Vec<u8>]) -> Vec<u8> {
        let body = entries.concat();
        let mut bytes = 0xba55_ed50_u32.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn each_entry_counts_for_its_target() {
        let mut data = binary(&[entry(2, 90, 100), entry(1, 90, 30)]);
        data.resize(data.len().next_multiple_of(8), 0);
        data.extend(binary(&[entry(2, 90, 8)]));
        let mut bytes = BTreeMap::new();
        assert_eq!(count(&data, &mut bytes), Some(()));
        let code = |is_ptx| Code { number: 90, is_ptx };
        let expected = [(code(false), 164 + 72), (code(true), 94)];
        assert_eq!(bytes, BTreeMap::from(expected));
    }

    #[test]
    fn no_cut_and_no_nonsense_panics_or_loops() {
        let data = binary(&[entry(2, 90, 100), entry(1, 90, 30)]);
        for length in 0..data.len() {
            count(&data[..length], &mut BTreeMap::new());
        }
        for at in 0..data.len() {
            let mut damaged = data.clone();
            damaged[at] = 0xff;
            count(&damaged, &mut BTreeMap::new());
            damaged[at] = 0;
            count(&damaged, &mut BTreeMap::new());
        }
        assert!(code_by_target(b"no object").is_empty());
    }
}
