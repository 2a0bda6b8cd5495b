//! Counts the lines of the engine that use the library in a step.

const ATTENTION: &str = include_str!("../src/attention.rs");
const RUNNER: &str = include_str!("../src/runner.rs");
const CUDA: &str = include_str!("../src/graphs/cuda.rs");

/// Returns the lines of code after each comment `// The library, for …:`, up to `// End of the
/// library.`
fn marked(source: &str) -> Vec<(&str, Vec<&str>)> {
    let mut parts: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut within = false;
    for line in source.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("// The library, for ") {
            parts.push((name, Vec::new()));
            within = true;
        } else if line == "// End of the library." {
            within = false;
        } else if within && !line.is_empty() && !line.starts_with("//") {
            parts.last_mut().expect("one has begun").1.push(line);
        }
    }
    assert!(!within, "a part of the library's use has no end");
    parts
}

#[test]
fn a_step_takes_at_most_25_lines_of_the_library() {
    let parts = [ATTENTION, RUNNER, CUDA].map(marked).concat();
    let of = |name: &str| -> &Vec<&str> {
        let found = parts.iter().find(|(of, _)| *of == name);
        &found.unwrap_or_else(|| panic!("no part is {name:?}")).1
    };
    let (layer, plan) = (of("each layer of a step:"), of("every step:"));
    let (prepare, replay) = (
        of("a step that is not replayed:"),
        of("a step that is replayed:"),
    );
    println!(
        "{} lines a layer, {} to plan, {} to prepare, {} to replay",
        layer.len(),
        plan.len(),
        prepare.len(),
        replay.len()
    );
    assert!(layer.len() + plan.len() + prepare.len() <= 25);
    assert!(plan.len() + replay.len() <= 25);
    // Each call that belongs to a step is within one of these parts.
    for (call, part, source) in [
        (".forward_unrotated(", layer, ATTENTION),
        ("StepPlan::new(", plan, RUNNER),
        (".prepare(", prepare, RUNNER),
        (".replay(", replay, CUDA),
    ] {
        let in_part = part.iter().filter(|line| line.contains(call)).count();
        assert_eq!((in_part, source.matches(call).count()), (1, 1), "{call}");
    }
}
