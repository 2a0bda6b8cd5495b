//! The prefill backend.

use std::cmp::Reverse;

use super::Cpu;
use super::attention::{
    Engine, Engines, OutPlaces, Source, Widths, Workspace, for_each_unit, with_workspaces,
};
use super::cache::check_starts;
use super::view::{Elements, Lane, Parts, Places, lse_places, scalars, with_element};
use mla_runtime::backend::{Keys, LayerConfig, PrefillBackend, PrefillCall, StepLimits};
use mla_runtime::mla_backend;
use mla_runtime::model::Element;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::ArrayRef;
use mla_runtime::{Error, Result};

// The maximum number of query tokens in a unit. They share the conversion of each tile of keys and
// values.
const ROWS: usize = 512;

/// Expanded attention on the CPU, with any dimensions and number of heads, in f32, f16 and bf16.
#[derive(Debug)]
pub struct CpuPrefill {
    config: LayerConfig,
}

/// Workspaces of [`CpuPrefill`].
pub struct PrefillState {
    made_for: Problem,
    engines: Engines,
    units: Vec<Unit>,
}

// A block of a request's query tokens, for one head.
struct Unit {
    request: usize,
    head: usize,
    first: usize,
    rows: usize,
}

#[mla_backend(
    name = "CPU",
    provider = "native",
    sm = "any",
    dtypes = "f32,f16,bf16",
    key_layout = "split",
    quant_output = true,
    features = "deterministic,batch_invariant,nan_propagation,strided_outputs,non_causal,\
                query_scales"
)]
impl PrefillBackend for CpuPrefill {
    type Device = Cpu;
    type State = PrefillState;
    type Metadata = ();

    fn new(_: &Cpu, config: &LayerConfig) -> Result<Self> {
        check_scale(config.softmax_scale)?;
        Ok(Self { config: *config })
    }

    fn state(&self, device: &Cpu, _: &StepLimits) -> Result<PrefillState> {
        let head = self.config.problem.dims.head;
        let widths = Widths {
            key: head.qk() as usize,
            value: head.v as usize,
            shared: false,
            fixed_rows: false,
        };
        let dtype = self.config.problem.dtype;
        Ok(PrefillState {
            made_for: self.config.problem,
            engines: Engines::new(device, dtype, ROWS, widths, false)?,
            units: Vec::new(),
        })
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn prefill(
        &self,
        device: &Cpu,
        call: PrefillCall<'_, Cpu>,
        state: &mut PrefillState,
        (): &(),
    ) -> Result<()> {
        state.made_for.check_same("state", &self.config.problem)?;
        with_element!(self.config.problem.dtype, T => {
            let call = self.check::<T>(call)?;
            call.schedule(self.config.problem.heads as usize, &mut state.units);
            with_workspaces!(&mut state.engines, workspaces => {
                call.run(device, workspaces, &state.units)
            });
        });
        Ok(())
    }
}

pub(crate) fn check_scale(scale: f32) -> Result<()> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(());
    }
    Err(Error::argument(
        "softmax_scale",
        scale,
        "a finite number above 0",
    ))
}

// Returns the scale factors of query tokens, if there are any.
pub(crate) fn factors<'a>(scales: Option<&ArrayRef<'a, Cpu, f32>>) -> Result<Option<&'a [f32]>> {
    let scales = scales.map(|scales| scalars("query_scales", scales));
    let scales: Option<&[f32]> = scales.transpose()?;
    let is_taken = |scale: &f32| scale.is_finite() && *scale > 0.0;
    match scales.and_then(|scales| scales.iter().find(|scale| !is_taken(scale))) {
        None => Ok(scales),
        Some(odd) => Err(Error::argument(
            "query_scales",
            odd,
            "finite numbers above 0",
        )),
    }
}

// The arguments of a call, checked and typed.
struct Call<'a, T> {
    query: Elements<'a, T>,
    keys: Parts<'a, T>,
    values: Elements<'a, T>,
    out: OutPlaces<'a, T>,
    lse: Option<Places<'a, f32>>,
    query_starts: &'a [i32],
    key_starts: &'a [i32],
    causal: bool,
    // The softmax scale in units of log2, and the factor of each query token on it.
    scale: f32,
    query_scales: Option<&'a [f32]>,
}

impl CpuPrefill {
    fn check<'a, T: Element>(&self, call: PrefillCall<'a, Cpu>) -> Result<Call<'a, T>> {
        call.check(&self.config, &Self::SPEC)?;
        let problem = &self.config.problem;
        let head = problem.dims.head;
        let v = head.v as usize;
        let heads = problem.heads as usize;
        let (tq, tk) = (call.query.shape()[0], call.values.shape()[0]);
        let keys = match &call.keys {
            Keys::Packed(keys) => Parts {
                first: Elements::of("keys", keys)?,
                second: None,
            },
            Keys::Split { nope, rope } => Parts {
                first: Elements::of("keys (nope)", nope)?,
                // All heads share this part.
                second: Some(Elements::of("keys (rope)", &rope.broadcast(1, heads)?)?),
            },
        };
        let query_starts = scalars("query starts", &call.query_starts)?;
        let key_starts = scalars("key starts", &call.key_starts)?;
        let requests = query_starts.len().saturating_sub(1);
        check_starts("query starts", query_starts, requests, tq, false)?;
        check_starts("key starts", key_starts, requests, tk, false)?;
        let longest = |starts: &[i32]| {
            let lens = starts.windows(2).map(|pair| pair[1] - pair[0]);
            lens.max().unwrap_or(0) as usize
        };
        for (field, max, starts) in [
            ("max_query_len", call.max_query_len, query_starts),
            ("max_key_len", call.max_key_len, key_starts),
        ] {
            if longest(starts) > max {
                return Err(Error::argument(
                    field,
                    longest(starts),
                    format!("at most {max}, as the call says"),
                ));
            }
        }
        let causal = call.is_causal();
        Ok(Call {
            query: Elements::of("query", &call.query)?,
            keys,
            values: Elements::of("values", &call.values)?,
            out: OutPlaces::of(call.out, [tq, heads, v])?,
            lse: call.lse.map(lse_places).transpose()?,
            query_starts,
            key_starts,
            causal,
            scale: self.config.softmax_scale * std::f32::consts::LOG2_E,
            query_scales: factors(call.query_scales.as_ref())?,
        })
    }
}

impl<T: Element> Call<'_, T> {
    fn source(&self, unit: &Unit) -> UnitSource<'_, '_, T> {
        let lens = |starts: &[i32]| {
            let (start, end) = (starts[unit.request], starts[unit.request + 1]);
            (start as usize, (end - start) as usize)
        };
        let (query_start, queries) = lens(self.query_starts);
        let (key_start, keys) = lens(self.key_starts);
        UnitSource {
            call: self,
            head: unit.head,
            first_query: query_start + unit.first,
            first_key: key_start,
            keys,
            // The number of keys that row 0 of the unit sees in a causal call. It is 0 or less if
            // the row sees no key.
            seen: keys as i64 - queries as i64 + unit.first as i64 + 1,
        }
    }

    // Lists the blocks of all requests and heads, the longest first. Otherwise a single thread
    // might still work on a long block at the end.
    fn schedule(&self, heads: usize, units: &mut Vec<Unit>) {
        units.clear();
        for (request, pair) in self.query_starts.windows(2).enumerate() {
            let queries = (pair[1] - pair[0]) as usize;
            for first in (0..queries).step_by(ROWS) {
                let rows = ROWS.min(queries - first);
                units.extend((0..heads).map(|head| Unit {
                    request,
                    head,
                    first,
                    rows,
                }));
            }
        }
        units.sort_unstable_by_key(|unit| {
            let cost = unit.rows * self.source(unit).visible(unit.rows - 1);
            (Reverse(cost), unit.request, unit.first, unit.head)
        });
    }

    fn run<E: Engine>(&self, device: &Cpu, workspaces: &mut [Workspace<E>], units: &[Unit]) {
        for_each_unit(device, workspaces, units.len(), |workspace, index| {
            let unit = &units[index];
            let source = self.source(unit);
            let keys = 0..source.visible(unit.rows - 1);
            let splits = std::iter::once(keys);
            let mut total = workspace.attend_splits(&source, unit.rows, splits);
            for row in 0..unit.rows {
                let (token, head) = (source.first_query + row, unit.head);
                let (lse, values) = total.finish(row, 1.0);
                // SAFETY: each (token, head) belongs to one unit, units are handed out once, and
                // the elements of the outputs are distinct.
                unsafe {
                    self.out.write(token, head, values);
                    if let Some(places) = &self.lse {
                        places.write(places.at(head, token, 0), lse);
                    }
                }
            }
        });
    }
}

struct UnitSource<'c, 'a, T> {
    call: &'c Call<'a, T>,
    head: usize,
    first_query: usize,
    first_key: usize,
    keys: usize,
    seen: i64,
}

impl<T: Element> UnitSource<'_, '_, T> {
    fn visible(&self, row: usize) -> usize {
        if self.call.causal {
            (self.seen + row as i64).clamp(0, self.keys as i64) as usize
        } else {
            self.keys
        }
    }
}

impl<T: Element, S: Lane> Source<S> for UnitSource<'_, '_, T> {
    fn query(&self, row: usize, to: &mut [S]) {
        self.call
            .query
            .read_row(self.first_query + row, self.head, to);
    }

    fn scale(&self, row: usize) -> f32 {
        let token = self.first_query + row;
        let scales = self.call.query_scales;
        self.call.scale * scales.map_or(1.0, |scales| scales[token])
    }

    fn limit(&self, row: usize) -> usize {
        self.visible(row)
    }

    fn key(&self, position: usize, to: &mut [S]) {
        let token = self.first_key + position;
        self.call.keys.read_row(token, self.head, to);
    }

    fn key_in_place(&self, _: usize) -> Option<&[S]> {
        None
    }

    fn value(&self, position: usize, to: &mut [S]) {
        self.call
            .values
            .read_row(self.first_key + position, self.head, to);
    }
}
