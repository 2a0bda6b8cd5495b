//! Checks that a launch depends on its arguments alone.
//!
//! Every kernel runs thousands of times after launches of other shapes, and after a kernel that
//! fills the shared memory of all SMs with a pattern. Its output first holds NaN, and its bits must
//! be those of its first launch. A watchdog ends the program if the GPU makes no progress.

pub(crate) mod cases;
pub(crate) mod machine;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::RngExt as _;

use crate::common::{gpu, rng};
use cases::kernels;
use machine::{Machine, Memory};

/// Minimum numbers of launches, in total and of each kernel.
const LAUNCHES: usize = 100_000;
const OF_EACH: usize = 5_000;
/// Number of problems for each kernel.
const CASES: usize = 24;
/// Number of launches between two synchronisations.
const BURST: usize = 32;

#[test]
#[ignore = "needs a GPU: cargo test -r --features sm80,sm90 --test gpu -- --ignored stress::"]
fn bits_depend_on_no_launch_before() {
    let seed = std::env::var("MLA_STRESS_SEED").map_or(1, |seed| seed.parse().unwrap());
    let started = Instant::now();
    let gpu = gpu();
    let machine = Machine::new(gpu.stream().clone());
    let mut rng = rng(seed);
    let kernels = kernels(&machine, &mut rng, CASES);
    let watchdog = Watchdog::new();

    let mut memory = Memory::default();
    let references: Vec<Vec<_>> = kernels
        .iter()
        .flat_map(|kernel| &kernel.cases)
        .map(|case| {
            watchdog.expect(case.name.clone());
            case.enqueue(&machine);
            let references = case.outputs.iter().map(|&output| {
                let reference = machine.zeros(&mut memory, output.bytes);
                machine.copy(output, reference);
                reference
            });
            let references = references.collect();
            machine.synchronize();
            references
        })
        .collect();
    let differences = machine.zeros(&mut memory, references.len() * 4);

    let mut launches = vec![0; kernels.len()];
    let mut burst = Vec::new();
    for launch in 0.. {
        let rarest = (0..kernels.len())
            .min_by_key(|&kernel| launches[kernel])
            .unwrap();
        if launch >= LAUNCHES && launches[rarest] >= OF_EACH {
            break;
        }
        // Any kernel can follow any other, and all are run about equally often.
        let at = match rng.random_bool(0.5) {
            true => rarest,
            false => rng.random_range(0..kernels.len()),
        };
        let number = rng.random_range(0..CASES);
        let case = &kernels[at].cases[number];
        let index = at * CASES + number;
        if rng.random_bool(0.75) {
            machine.poison(launch as u32);
        }
        for &output in &case.outputs {
            machine.fill(output, 0, 0xff);
        }
        let keeps_others = ["index logits", "cache write", "copy rows", "dequantize"];
        if keeps_others.iter().any(|name| case.name.starts_with(name)) {
            // These kernels do not write some rows, or the rest of the last word. The reference has
            // zeros there.
            for &output in &case.outputs {
                machine.fill(output, 0, 0);
            }
        }
        case.enqueue(&machine);
        for (&output, &reference) in case.outputs.iter().zip(&references[index]) {
            machine.compare(output, reference, differences.address + 4 * index as u64);
        }
        launches[at] += 1;
        burst.push(case.name.as_str());
        if burst.len() == BURST {
            watchdog.expect(burst.join("\n"));
            machine.synchronize();
            burst.clear();
        }
    }
    machine.synchronize();
    watchdog.end();

    for (kernel, launches) in kernels.iter().zip(&launches) {
        println!("{launches:>7} launches  {}", kernel.name);
    }
    let total: usize = launches.iter().sum();
    println!(
        "{total:>7} launches in {:.1?}, seed {seed}",
        started.elapsed()
    );
    let wrong: Vec<_> = machine
        .download(differences)
        .into_iter()
        .zip(kernels.iter().flat_map(|kernel| &kernel.cases))
        .filter(|(words, _)| *words > 0)
        .map(|(words, case)| format!("{words} words of {}", case.name))
        .collect();
    assert!(wrong.is_empty(), "bits differ:\n{}", wrong.join("\n"));
}

/// Ends the program if there is no progress for too long. A kernel that hangs cannot be stopped in
/// another way.
struct Watchdog {
    said: Arc<Mutex<Option<(Instant, String)>>>,
}

impl Watchdog {
    const TIMEOUT: Duration = Duration::from_secs(20);

    fn new() -> Self {
        let said = Arc::new(Mutex::new(Some((Instant::now(), "begin".to_owned()))));
        let heard = said.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let heard = heard.lock().unwrap();
                let Some((at, what)) = heard.as_ref() else {
                    return;
                };
                if at.elapsed() > Self::TIMEOUT {
                    eprintln!("the GPU hangs in one of:\n{what}");
                    std::process::abort();
                }
            }
        });
        Self { said }
    }

    /// Names the work for which the program waits from now on.
    fn expect(&self, what: String) {
        *self.said.lock().unwrap() = Some((Instant::now(), what));
    }

    fn end(&self) {
        *self.said.lock().unwrap() = None;
    }
}
