//! Files that tests compare with what the code makes of them, and rewrite where `BLESS=1` is set.

use std::path::Path;

/// Fails where the file at `path` in this crate is not `actual`.
pub(crate) fn check(path: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("BLESS").is_some_and(|it| it == "1") {
        std::fs::write(&path, actual).expect("the golden file can be written");
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        golden == actual,
        "{} is stale; run `BLESS=1 cargo test -p mla-macros`. It should be:\n{actual}",
        path.display()
    );
}
