//! Files that tests compare with what the code makes of them. With `MLA_BLESS` set, as by
//! `cargo xtask goldens --bless`, they are written anew.

use std::path::Path;

/// Fails where the file at `path` in this crate is not `actual`.
pub(crate) fn check(path: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("MLA_BLESS").is_some() {
        std::fs::write(&path, actual).expect("the golden file can be written");
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        golden == actual,
        "{} is stale; run `cargo xtask goldens --bless`. It should be:\n{actual}",
        path.display()
    );
}
