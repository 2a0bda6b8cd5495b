//! Checks the time of products with weights in the layout of checkpoints. It must be in proportion
//! to the number of rows.

use std::time::Duration;

use half::{bf16, f16};
use mla_cpu::Cpu;
use mla_runtime::device::Device;
use mla_runtime::model::Element;
use mla_runtime::tensor::{TensorMut, TensorRef};
use rustix::time::{ClockId, clock_gettime};

const INPUTS: usize = 2048;
const OUTPUTS: usize = 1024;

/// Returns the processor time of this process. Unlike wall-clock time, it does not include other
/// processes, so a busy machine gives the same result as an idle one.
fn computed() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime)
        .try_into()
        .expect("no process has computed for a negative time")
}

/// Measures the product of `rows` tokens and weights `[out, in]` several times on one thread.
/// Returns the shortest time.
fn shortest<T: Element>(cpu: &Cpu, rows: usize) -> Duration {
    let (a, b) = (
        vec![T::from_f32(0.5); rows * INPUTS],
        vec![T::from_f32(0.25); OUTPUTS * INPUTS],
    );
    let mut c = vec![T::from_f32(0.0); rows * OUTPUTS];
    let mut shortest = Duration::MAX;
    for _ in 0..7 {
        let start = computed();
        cpu.gemm(
            TensorRef::from_slice(&a, [1, rows, INPUTS]).unwrap(),
            TensorRef::from_slice(&b, [1, OUTPUTS, INPUTS])
                .unwrap()
                .transpose(1, 2),
            TensorMut::from_slice(&mut c, [1, rows, OUTPUTS]).unwrap(),
        )
        .unwrap();
        shortest = shortest.min(computed() - start);
    }
    assert!(c.iter().all(|x| x.to_f32() == 256.0));
    shortest
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[test]
fn time_grows_with_rows() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let cpu = Cpu::with_pool(pool.unwrap().into());
    let check = |name: &str, time: fn(&Cpu, usize) -> Duration| {
        let times = [1, 2, 3, 4, 16, 64].map(|rows| (rows, time(&cpu, rows)));
        println!("{name}: {times:?}");
        // Products with AVX-512 rearrange nothing. Products without it do. That takes a few times
        // as long as reading the weights, for any number of rows.
        for (rows, time) in &times[2..] {
            let max = match has_avx512() {
                true => 2 + *rows as u32 / 2,
                false => 8 + *rows as u32,
            };
            let max = times[0].1 * max;
            assert!(*time < max, "{name}, {rows} rows: {time:?} of {times:?}");
        }
    };
    check("f32", shortest::<f32>);
    check("f16", shortest::<f16>);
    check("bf16", shortest::<bf16>);
}
