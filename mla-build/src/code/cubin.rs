//! The kernels of a cubin, with their parameters.
//!
//! A cubin is an ELF file. The section `.nv.info.<kernel>` is a row of attributes. An attribute has
//! a form, a number, and two bytes. These are its value, or the length of the following value if
//! the form is 4. Attribute 0x17 describes a parameter by its number (16 bits at 4), its offset (16
//! bits at 6) and its size in bytes (the upper 14 of 32 bits at 8). Attribute 0x05 is the maximum
//! number of threads of a CTA on each axis.

use std::collections::BTreeMap;

use object::{Object as _, ObjectSection as _};

use super::{Kernel, Parameter};
use crate::{
    fatbin::{half_word, word},
    ptxas,
};

const SIZED: u8 = 4;
const PARAMETER: u8 = 0x17;
const MAX_THREADS: u8 = 0x05;

/// Maximum number of threads of a CTA on any GPU, for a kernel that declares no bound.
const ANY: u32 = 1024;

/// Returns all kernels of a cubin, without launches, or `None` if it does not have this form.
pub(crate) fn kernels(cubin: &[u8]) -> Option<Vec<Kernel>> {
    let file = object::File::parse(cubin).ok()?;
    let mut kernels = Vec::new();
    for section in file.sections() {
        let name = section.name().ok()?;
        let Some(name) = name.strip_prefix(".nv.info.") else {
            continue;
        };
        let shared = file.section_by_name(&format!(".nv.shared.{name}"));
        let (max_threads, parameters) = read(section.data().ok()?)?;
        kernels.push(Kernel {
            entry: name.to_owned(),
            name: ptxas::demangled(name),
            static_shared: shared.map_or(0, |section| section.size()),
            max_threads,
            parameters,
            launch: None,
        });
    }
    kernels.sort_by(|a, b| a.entry.cmp(&b.entry));
    Some(kernels)
}

/// Returns the maximum number of threads and the parameters in order.
fn read(mut attributes: &[u8]) -> Option<(u32, Vec<Parameter>)> {
    let (mut max_threads, mut parameters) = (ANY, BTreeMap::new());
    while let [form, number, low, high, rest @ ..] = attributes {
        let length = match *form {
            SIZED => usize::from(u16::from_le_bytes([*low, *high])),
            _ => 0,
        };
        let (value, behind) = rest.split_at_checked(length)?;
        match (*form, *number) {
            (SIZED, PARAMETER) => {
                let [ordinal, offset] = [4, 6].map(|at| half_word(value, at));
                let parameter = Parameter {
                    offset: offset?.into(),
                    bytes: word(value, 8)? >> 18,
                    ..Parameter::default()
                };
                parameters.insert(ordinal?, parameter);
            }
            (SIZED, MAX_THREADS) => {
                let axes = [0, 4, 8].map(|at| word(value, at));
                let [x, y, z] = [axes[0]?, axes[1]?, axes[2]?];
                max_threads = x.checked_mul(y)?.checked_mul(z)?;
            }
            _ => {}
        }
        attributes = behind;
    }
    let read = (max_threads, parameters.into_values().collect());
    attributes.is_empty().then_some(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The attributes that CUDA 13.0 writes for a structure of 48 bytes followed by a number.
    #[test]
    fn parameters_and_threads_are_read() {
        let attributes = [
            &[4, 0x37, 4, 0, 0x82, 0, 0, 0][..],
            &[4, 0x17, 12, 0, 0, 0, 0, 0, 1, 0, 0x30, 0, 0, 0xf0, 0x11, 0],
            &[4, 0x17, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xf0, 0xc1, 0],
            &[3, 0x50, 0, 0],
            &[4, 5, 12, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        ]
        .concat();
        let (max_threads, parameters) = read(&attributes).unwrap();
        let places = parameters.iter().map(|it| (it.offset, it.bytes));
        assert_eq!(places.collect::<Vec<_>>(), [(0, 48), (48, 4)]);
        assert_eq!(max_threads, 256);
        // Neither cut-off nor meaningless attributes cause a panic.
        for length in 0..attributes.len() {
            read(&attributes[..length]);
        }
        assert_eq!(kernels(b"no cubin"), None);
    }
}
