//! What was compiled, as constants that the package's own code is checked against.

use std::{fmt::Write as _, fs, path::Path};

use crate::{
    Error,
    family::Families,
    target::{self, Target},
};

/// Writes a constant for each family, and one for the sources of none.
pub(crate) fn write(families: &Families, output: &Path) -> Result<(), Error> {
    let text = text(families);
    // An equal file keeps its time, or what includes it would be compiled again.
    if fs::read_to_string(output).is_ok_and(|known| known == text) {
        return Ok(());
    }
    fs::write(output, text).map_err(Error::file("write", output))
}

fn text(families: &Families) -> String {
    let mut text = String::new();
    for family in &families.declared {
        let what = format!("the family `{}` was compiled for", family.name);
        constant(&mut text, &what, &family.constant(), family.compiled());
    }
    let what = "sources in no family's folder were compiled for";
    constant(&mut text, what, "ALL", &families.of_all);
    text
}

fn constant(text: &mut String, what: &str, name: &str, targets: &[Target]) {
    let names = target::names(targets);
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "/// Targets that {what}, under nvcc's names.\npub const {name}: &[&str] = &{names:?};\n"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_declared_family_has_a_constant_also_if_it_is_off() {
        let families = Families::new(&[], &["sm80".to_owned()], |_| None).unwrap();
        assert_eq!(
            text(&families),
            "/// Targets that the family `sm80` was compiled for, under nvcc's names.\n\
             pub const SM80: &[&str] = &[\"sm_80\", \"sm_90\", \"sm_100\", \"sm_120\", \"compute_80\"];\n\
             /// Targets that the family `sm90` was compiled for, under nvcc's names.\n\
             pub const SM90: &[&str] = &[];\n\
             /// Targets that the family `sm100` was compiled for, under nvcc's names.\n\
             pub const SM100: &[&str] = &[];\n\
             /// Targets that sources in no family's folder were compiled for, under nvcc's names.\n\
             pub const ALL: &[&str] = &[\"sm_80\", \"sm_90\", \"sm_100\", \"sm_120\", \"compute_80\"];\n"
        );
    }
}
