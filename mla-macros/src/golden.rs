//! Files that tests compare with generated text. With `MLA_BLESS` set, as in `cargo xtask goldens
//! --bless`, the tests write the files instead.

use std::path::Path;

/// Fails if the file at `path` in this crate differs from `actual`.
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
