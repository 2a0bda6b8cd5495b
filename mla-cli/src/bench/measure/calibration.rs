//! Measures a CPU's speed in the GEMMs of each form, by a short run of both.

use std::time::Instant;

use mla_runtime::plan::crossover::{Machine, multiply_adds};
use mla_runtime::spec::QueryLen;

use super::{Sampling, layer};
use crate::bench::crossover::Known;
use crate::bench::plan::rows::BenchContext;
use crate::bench::record::Basis;
use crate::bench::settings::Route;
use crate::bench::work::Layer;
use crate::device::statistics::Summary;
use crate::device::stopwatch::{Protocol, Stopwatch};
use crate::error::CliError;

/// The context of the run, and its two numbers of new tokens. The expansion takes nearly the same
/// time for either number, so the difference gives the attention's time.
const CONTEXT: u32 = 1024;
const QUERIES: [u32; 2] = [16, 256];

/// The maximum number of heads of the run. All heads take the same time.
const HEADS: u32 = 8;

/// Samples of each measurement. The fastest counts, since others are slower because of other work.
const SAMPLES: usize = 3;

/// Measures the figures of this CPU for a layer's dimensions, dtype and backends.
pub(crate) fn calibrate<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    flush: &mut D::Buffer,
    layer: &Layer,
) -> Result<Known, CliError> {
    let begin = Instant::now();
    let mut problem = layer.config.problem.with_query_len(QueryLen::Ragged);
    problem.heads = problem.heads.min(HEADS);
    let mut run = Run {
        context,
        flush,
        layer: Layer {
            config: layer.config.with_problem(problem),
            layers: 1,
            ..layer.clone()
        },
    };
    let [few, many] = QUERIES;
    let absorbed = run.seconds(Route::Absorbed, many)?;
    let expanded = [
        run.seconds(Route::Expanded, few)?,
        run.seconds(Route::Expanded, many)?,
    ];
    let [[_, expanded_few], [absorbed_work, expanded_many]] =
        [few, many].map(|queries| multiply_adds(&problem, CONTEXT, queries));
    let [product, pair] = solve([expanded_few, expanded_many], expanded);
    let [products, pairs] = absorbed_work;
    let absorbed_pair = (absorbed - products * product) / pairs;
    Ok(match Machine::processor(product, absorbed_pair, pair) {
        Ok(machine) => Known {
            machine,
            basis: Basis::Run {
                seconds: begin.elapsed().as_secs_f64(),
            },
        },
        // Other work took so long that more tokens seemed to take less time.
        Err(_) => Known::NOTHING,
    })
}

/// Solves the linear equations for two numbers. The products of each row with them add up to the
/// row's sum.
fn solve([[a, b], [c, d]]: [[f64; 2]; 2], [first, second]: [f64; 2]) -> [f64; 2] {
    let determinant = a * d - b * c;
    [
        (first * d - second * b) / determinant,
        (a * second - c * first) / determinant,
    ]
}

struct Run<'a, D: Stopwatch> {
    context: &'a BenchContext<'a, D>,
    flush: &'a mut D::Buffer,
    layer: Layer,
}

impl<D: Stopwatch> Run<'_, D> {
    fn seconds(&mut self, route: Route, queries: u32) -> Result<f64, CliError> {
        self.layer.spec = format!("q{queries}s{}", CONTEXT + queries)
            .parse()
            .map_err(CliError::batch_spec)?;
        self.layer.threshold = match route {
            Route::Absorbed => u32::MAX,
            Route::Expanded => 0,
        };
        let mut sampling = Sampling {
            protocol: &Protocol {
                samples: SAMPLES,
                warm_up: 1,
                cold_cache: true,
                graphs: self.context.graphs,
            },
            rounds: 1,
            after_round: &mut |_| Ok(()),
        };
        let measured = layer(self.context, self.flush, &self.layer, &mut sampling, 1)?;
        Ok(Summary::of(&measured.sampled.samples).min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sums_tell_two_parts_apart() {
        let [rows, pairs] = solve([[1000.0, 30.0], [1200.0, 190.0]], [1030.0, 1390.0]);
        assert!((rows - 1.0).abs() < 1e-12 && (pairs - 1.0).abs() < 1e-12);
        let [rows, pairs] = solve([[10.0, 1.0], [11.0, 4.0]], [25.0, 42.0]);
        assert!((10.0 * rows + pairs - 25.0).abs() < 1e-12);
        assert!((11.0 * rows + 4.0 * pairs - 42.0).abs() < 1e-12);
    }
}
