//! The Cargo features of the package that is being compiled.

/// The features that Cargo declares to the compiler. The attribute runs in the compiler's process
/// and reads its arguments. A process without such arguments, such as an editor's macro server, has
/// no features.
pub(crate) fn features() -> Vec<String> {
    read(std::env::args())
}

/// The name of the family whose targets a constant lists. mla-build names the constant after the
/// family, and so after its Cargo feature, but in upper case. A constant without a feature keeps
/// its own spelling. The runtime thereby knows that no feature can turn it on.
pub(crate) fn family(constant: String, declared: &[String]) -> String {
    let lower = constant.to_ascii_lowercase();
    let digits = lower.strip_prefix("sm").unwrap_or_default();
    // A family of GPUs may be a feature of another package, from which the constant comes.
    let is_of_gpus = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match is_of_gpus || declared.contains(&lower) {
        true => lower,
        false => constant,
    }
}

// Reads the declared features from `--check-cfg`. The features of `--cfg` are those that are on.
fn read(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut features = Vec::new();
    let mut option = String::new();
    for argument in arguments {
        let (name, value) = match argument.split_once('=') {
            Some((name @ ("--check-cfg" | "--cfg"), value)) => (name, value),
            _ => (option.as_str(), argument.as_str()),
        };
        let declared = match name {
            "--check-cfg" => value.trim_start().strip_prefix("cfg(feature,"),
            "--cfg" => value.trim_start().strip_prefix("feature="),
            _ => None,
        };
        // Every second part is between quotes.
        let quoted = declared.unwrap_or_default().split('"').skip(1).step_by(2);
        features.extend(quoted.map(str::to_owned));
        option = argument;
    }
    features
}

#[cfg(test)]
mod tests {
    #[test]
    fn constant_named_after_feature() {
        let declared = ["hopper".to_owned()];
        for (constant, family) in [
            ("SM90", "sm90"),
            ("HOPPER", "hopper"),
            ("NONE", "NONE"),
            ("ALL", "ALL"),
            ("SM", "SM"),
            ("SMALL", "SMALL"),
        ] {
            assert_eq!(super::family(constant.to_owned(), &declared), family);
        }
    }

    #[test]
    fn declared_features_from_rustc() {
        let read = |arguments: &[&str]| super::read(arguments.iter().map(|it| (*it).to_owned()));
        let declared = r#"cfg(feature, values("default", "sm90", "sm100"))"#;
        assert_eq!(
            read(&[
                "rustc",
                "--check-cfg",
                "cfg(docsrs,test)",
                "--check-cfg",
                declared
            ]),
            ["default", "sm90", "sm100"]
        );
        assert_eq!(read(&[&format!("--check-cfg={declared}")]).len(), 3);
        assert_eq!(read(&["--cfg", r#"feature="sm120""#, "-o", "x"]), ["sm120"]);
        assert_eq!(read(&["--check-cfg", "cfg(feature, values())"]), [""; 0]);
        assert_eq!(read(&[r#"cfg(feature, values("sm90"))"#]), [""; 0]);
    }
}
