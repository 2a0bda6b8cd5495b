//! Checks the programs' machine code, instruction counts and allocations.
//!
//! objdump, which comes with the linker, reads the code from the linked programs. The test compares
//! the programs with each other. It also compares them with the files of `mla-runtime/dispatch`,
//! which the documentation shows and `cargo xtask goldens --bless` writes. These files are valid
//! for the compiler that they name. With another compiler, only the comparison between the programs
//! applies.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

const BY_HAND: &str = env!("CARGO_BIN_EXE_by_hand");
const CHOSEN: &str = env!("CARGO_BIN_EXE_chosen");
const SELECTED: &str = env!("CARGO_BIN_EXE_selected");
const REGISTRY: &str = env!("CARGO_BIN_EXE_registry");

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program} does not start: {error}"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A linked program in the output of objdump.
struct Program {
    code: String,
    // The functions in the table of addresses. Calls of other crates' functions and of C functions
    // go through this table.
    addresses: HashMap<u64, String>,
    compiler: String,
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

impl Program {
    fn read(path: &str) -> Self {
        let names: HashMap<u64, String> = output("nm", &["-C", path])
            .lines()
            .filter_map(|line| {
                let (address, rest) = line.split_once(' ')?;
                Some((hex(address)?, rest.get(2..)?.to_owned()))
            })
            .collect();
        let addresses = output("objdump", &["-R", path])
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let (slot, value) = (hex(words.next()?)?, words.nth(1)?);
                let target = hex(value.strip_prefix("*ABS*+")?)?;
                Some((slot, names.get(&target)?.clone()))
            })
            .collect();
        let comment = output("objdump", &["-s", "-j", ".comment", path]);
        // The last column contains the bytes as text. Its lines are joined.
        let comment: String = comment.lines().filter_map(|line| line.get(43..)).collect();
        let compiler = comment
            .find("rustc version")
            .map_or("", |at| &comment[at + 14..]);
        Self {
            code: output(
                "objdump",
                &["-d", "-C", "-M", "intel", "--no-show-raw-insn", path],
            ),
            addresses,
            compiler: compiler.split_whitespace().next().unwrap_or("").to_owned(),
        }
    }

    /// The functions of this name. A generic function can have several instances.
    fn functions(&self, name: &str) -> Vec<Vec<String>> {
        let head = format!("<{name}>:");
        let starts = self.code.match_indices(&head);
        starts
            .map(|(at, _)| self.function(name, &self.code[at..]))
            .collect()
    }

    // Returns the instructions of a function whose code begins in the next line. Addresses are
    // replaced by numbered labels, and slots of the table by names.
    fn function(&self, name: &str, code: &str) -> Vec<String> {
        let lines: Vec<(&str, &str)> = code
            .lines()
            .skip(1)
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.trim().split_once(":\t"))
            // These instructions fill the space before the next function.
            .filter(|(_, code)| *code != "int3" && !code.starts_with("nop"))
            .collect();
        let jump = |code: &str| -> Option<String> {
            let mut words = code.split_whitespace();
            let is_jump = words.next()?.starts_with('j');
            let target = words.next()?;
            (is_jump && code.contains(&format!("<{name}+"))).then(|| target.to_owned())
        };
        let mut targets: Vec<String> = lines.iter().filter_map(|(_, code)| jump(code)).collect();
        targets.sort_by_key(|target| hex(target));
        targets.dedup();
        let label = |address: &str| targets.iter().position(|target| target == address);
        let mut instructions = Vec::new();
        for (address, code) in &lines {
            if let Some(number) = label(address) {
                instructions.push(format!(".{number}:"));
            }
            let text = match jump(code) {
                Some(target) => {
                    let mnemonic = code.split_whitespace().next().unwrap();
                    format!("{mnemonic} .{}", label(&target).unwrap())
                }
                None => self.named(code),
            };
            instructions.push(format!("    {text}"));
        }
        instructions
    }

    // Writes an instruction with one space. If it goes through the table of addresses, the name
    // replaces the slot.
    fn named(&self, code: &str) -> String {
        let (code, comment) = code.split_once('#').unwrap_or((code, ""));
        let slot = comment.split_whitespace().next().and_then(hex);
        let words: Vec<&str> = code.split_whitespace().collect();
        match slot.and_then(|slot| self.addresses.get(&slot)) {
            Some(name) => format!("{} {name}", words[0]),
            None => words.join(" ").replacen(" QWORD PTR ", " ", 1),
        }
    }
}

fn only(mut functions: Vec<Vec<String>>) -> Vec<String> {
    assert_eq!(functions.len(), 1, "{functions:#?}");
    functions.remove(0)
}

fn count(code: &[String]) -> usize {
    code.iter().filter(|line| line.starts_with(' ')).count()
}

fn check_golden(name: &str, program: &Program, code: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../../dispatch/{name}.asm"));
    let actual = format!("; rustc {}\n{code}", program.compiler);
    if std::env::var_os("MLA_BLESS").is_some() {
        std::fs::write(&path, actual).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    if golden.lines().next() != actual.lines().next() {
        eprintln!("{} is of another compiler", path.display());
        return;
    }
    assert!(
        golden == actual,
        "{} is stale; run `cargo xtask goldens --bless`. It should be:\n{actual}",
        path.display()
    );
}

#[test]
fn static_path_costs_nothing() {
    let (by_hand, chosen) = (Program::read(BY_HAND), Program::read(CHOSEN));
    let by_hand_code = only(by_hand.functions("by_hand"));
    let chosen_code = only(chosen.functions("chosen"));
    assert_eq!(chosen_code, by_hand_code);
    assert!(
        chosen_code
            .iter()
            .any(|line| line == "    call example_decode"),
        "{chosen_code:#?}"
    );
    for (name, program, code) in [
        ("by_hand", &by_hand, &by_hand_code),
        ("chosen", &chosen, &chosen_code),
    ] {
        let text = format!("{name}:\n{}\n", code.join("\n"));
        check_golden(name, program, &text);
    }
}

#[test]
fn selected_path_costs_one_indirection() {
    let (chosen, selected) = (Program::read(CHOSEN), Program::read(SELECTED));
    // There is one instance for each backend that could have been selected. The other backend's
    // calls it.
    let steps = selected.functions("<mla_dispatch::Engine<B> as selected::Step>::step");
    let step = only(chosen.functions("chosen"));
    assert!(steps.contains(&step), "{step:#?} is none of {steps:#?}");
    // The code before the instance loads the method's address and calls it.
    let way = only(selected.functions("selected"));
    let loads = way.iter().filter(|line| line.contains('[')).count();
    let jumps = way
        .iter()
        .filter(|line| line.starts_with("    jmp "))
        .count();
    assert!(loads == 1 && jumps == 1 && count(&way) <= 3, "{way:#?}");
    let text = format!(
        "selected:\n{}\n\nstep:\n{}\n",
        way.join("\n"),
        step.join("\n")
    );
    check_golden("selected", &selected, &text);
}

#[test]
fn no_way_to_dispatch_allocates() {
    for program in [BY_HAND, CHOSEN, SELECTED, REGISTRY] {
        let said = output(program, &["1000000"]);
        assert_eq!(said, "1000000 dispatches, 0 allocations\n", "{program}");
    }
}

// Counts the instructions of a million dispatches, without those of the program around them.
fn instructions(program: &str) -> i64 {
    let run = |dispatches: &str| -> i64 {
        let folder = env!("CARGO_TARGET_TMPDIR");
        let file = format!(
            "--callgrind-out-file={folder}/callgrind.out.{}",
            std::process::id()
        );
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", &file, program, dispatches])
            .output()
            .expect("valgrind starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let collected = said
            .lines()
            .find_map(|line| line.split_once("Collected : "));
        collected
            .expect("callgrind counts")
            .1
            .trim()
            .parse()
            .unwrap()
    };
    run("1000000") - run("0")
}

#[test]
#[ignore = "needs valgrind: cargo test -p mla-dispatch -- --include-ignored"]
fn a_million_dispatches() {
    // The programs also print two numbers, whose lengths differ. This is the bound on that
    // difference.
    const PRINTING: i64 = 1000;
    let million = |instructions: i64| (instructions + PRINTING / 2).div_euclid(1_000_000);
    let [by_hand, chosen, selected, registry] =
        [BY_HAND, CHOSEN, SELECTED, REGISTRY].map(instructions);
    println!(
        "instructions per dispatch, with the making of its arguments: by hand {}, chosen {}, \
         selected {}, through the registry {}",
        million(by_hand),
        million(chosen),
        million(selected),
        million(registry)
    );
    assert!((chosen - by_hand).abs() < PRINTING, "{by_hand} {chosen}");
    // The additional instructions are a load and an indirect call instead of a direct one.
    let more = selected - by_hand;
    assert!(more <= 2_000_000 + PRINTING, "{by_hand} {selected}");
}
