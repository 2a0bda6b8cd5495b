//! Files with the errors of refused cases.

use std::collections::BTreeSet;
use std::path::Path;

use mla_runtime::Result;

/// A name and a result that has to be an error, case by case.
pub(crate) type Refused = Vec<(String, Result<()>)>;

/// Lists refused cases. Each row has a name and a result, or calls that return early with an error.
macro_rules! refused {
    ($($name:expr, $result:expr;)*) => {
        vec![$(($name.to_string(), crate::refusals::attempt(|| {
            $result?;
            Ok(())
        }))),*]
    };
}
pub(crate) use refused;

pub(crate) fn attempt(case: impl FnOnce() -> Result<()>) -> Result<()> {
    case()
}

/// Compares the errors of cases with a file of `tests`, in which each name is followed by its
/// error. If the environment has `BLESS`, the file is written anew.
///
/// # Panics
///
/// If a case is not refused, if two cases have one name, or if an error differs from the file.
pub(crate) fn compare(file: &str, cases: impl IntoIterator<Item = (String, Result<()>)>) {
    let (mut names, mut said) = (BTreeSet::new(), String::new());
    for (name, result) in cases {
        match result {
            Err(error) => said += &format!("{name}\n    {error}\n"),
            Ok(()) => panic!("{name}: not refused"),
        }
        assert!(names.insert(name.clone()), "two cases are named {name}");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(file);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &said).unwrap();
    }
    let filed = std::fs::read_to_string(&path).unwrap_or_default();
    for (said, filed) in said.lines().zip(filed.lines()) {
        assert_eq!(
            said, filed,
            "tests/{file} is to be written anew, by BLESS=1"
        );
    }
    assert_eq!(said.lines().count(), filed.lines().count(), "tests/{file}");
}
