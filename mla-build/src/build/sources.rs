//! The sources to compile, and their targets.

use std::path::Path;

use crate::{Error, Kernels, family::Families, headers::Headers, unit::Unit};

pub(super) struct Sources {
    pub(super) globs: Vec<String>,
    pub(super) headers: Headers,
    pub(super) families: Families,
    pub(super) units: Vec<Unit>,
}

impl Sources {
    pub(super) fn of(kernels: &Kernels, families: Families, root: &Path) -> Result<Self, Error> {
        Ok(Self {
            globs: kernels.sources.clone(),
            headers: kernels.headers(&families, root)?,
            units: kernels.units(root, &families)?,
            families,
        })
    }
}
