//! Computes the right results of a setup in f64, by the formulas.

use mla_conformance::reference::{Array, Attended, Turn, layer};
use mla_runtime::batch::Request;
use mla_runtime::model::RotaryStyle;
use mla_runtime::spec::Problem;

use crate::setup::{Setup, View, number};

/// The outputs and cache rows of a setup's step.
pub(crate) struct Expected {
    /// The heads' rows of V, token by token.
    pub(crate) out: Vec<Vec<f64>>,
    /// `[tokens][heads]`.
    pub(crate) lse: Vec<Vec<f64>>,
    /// The slots that are written, each with its row.
    pub(crate) written: Vec<(usize, Vec<f64>)>,
}

/// A token: its row in the step's tensors, its request, and its position there.
struct Token {
    row: usize,
    request: usize,
    position: usize,
    /// True for padding, which has no position.
    is_padding: bool,
}

/// The elements of a tensor.
struct Elements<'a>(&'a View, Vec<f32>);

impl<'a> Elements<'a> {
    fn of(view: &'a View, tensor: u32) -> Self {
        Self(view, view.memory(tensor))
    }

    fn get(&self, i: usize, j: usize, k: usize) -> f64 {
        self.1[self.0.place(i, j, k)].into()
    }
}

pub(crate) fn expected(setup: &Setup, absorbed_tokens: usize) -> Expected {
    let tokens = tokens(&setup.requests);
    let [query, latent, rope, weights] = [&setup.query, &setup.latent, &setup.rope, &setup.weights];
    let new = [Elements::of(latent, 1), Elements::of(rope, 2)];
    let (query, weights) = (Elements::of(query, 0), Elements::of(weights, 3));
    let Problem { dims, heads, .. } = setup.config.problem;
    let heads = heads as usize;
    let [latent, nope, rope, v] =
        [dims.latent, dims.head.nope, dims.head.rope, dims.head.v].map(|n| n as usize);
    let columns = 0..heads * (nope + v);
    let weights: Vec<f64> = (0..latent)
        .flat_map(|row| columns.clone().map(move |column| (row, column)))
        .map(|(row, column)| weights.get(0, row, column))
        .collect();
    let rows: Vec<Vec<f64>> = tokens
        .iter()
        .map(|token| new_row(setup, &new, token))
        .collect();
    let slot = |token: &Token| match &setup.slots {
        Some(slots) => usize::try_from(slots[token.row]).ok(),
        None => slot_of(setup, token.request, token.position),
    };
    let written: Vec<(usize, Vec<f64>)> = tokens
        .iter()
        .filter(|token| !token.is_padding)
        .filter_map(|token| Some((slot(token)?, rows[token.row].clone())))
        .collect();
    let cached = |slot: usize| {
        let written = written.iter().find(|(at, _)| *at == slot);
        written.map_or_else(|| cache_row(setup, slot), |(_, row)| row.clone())
    };
    let mut expected = Expected {
        out: Vec::new(),
        lse: Vec::new(),
        written: Vec::new(),
    };
    for token in &tokens {
        let is_expanded = token.row >= absorbed_tokens;
        let is_dense =
            setup.dense_within > 0 && setup.requests[token.request].kv <= setup.dense_within;
        let seen: Vec<Vec<f64>> = match setup.slot_lists {
            Some((width, _)) if !is_expanded && !is_dense => listed(setup, token.row, width)
                .into_iter()
                .map(cached)
                .collect(),
            _ if token.is_padding => Vec::new(),
            _ => (0..=token.position)
                .map(|position| {
                    // The expanded path reads its new tokens from the tensors of the call.
                    let own = tokens.iter().find(|other| {
                        other.request == token.request && other.position == position && is_expanded
                    });
                    own.map_or_else(
                        || cached(slot_of(setup, token.request, position).expect("a page")),
                        |own| rows[own.row].clone(),
                    )
                })
                .collect(),
        };
        let mut queries = Array::from_fn([1, heads, nope + rope], |_, head, k| {
            query.get(token.row, head, k)
        });
        (0..heads).for_each(|head| turn(setup, token, &mut queries.row_mut(0, head)[nope..]));
        let scale = setup.config.softmax_scale.into();
        let Attended { out, lse } = layer(&queries, &seen, &weights, [nope, rope, v], scale);
        expected.out.push(out.data);
        expected.lse.extend(lse);
    }
    expected.written = written;
    expected
}

fn tokens(requests: &[Request]) -> Vec<Token> {
    let mut tokens = Vec::new();
    for (request, lens) in requests.iter().enumerate() {
        for new in 0..lens.q {
            tokens.push(Token {
                row: tokens.len(),
                request,
                position: (lens.kv.saturating_sub(lens.q) + new) as usize,
                is_padding: lens.kv == 0,
            });
        }
    }
    tokens
}

fn slot_of(setup: &Setup, request: usize, position: usize) -> Option<usize> {
    let page_size = setup.table_page as usize;
    let page = setup.tables[request * setup.max_pages + position / page_size];
    Some(usize::try_from(page).ok()? * page_size + position % page_size)
}

/// Returns the index of the first number of a slot's row in the cache's memory.
pub(crate) fn place(setup: &Setup, slot: usize) -> usize {
    let layout = &setup.cache;
    let (page, offset) = (slot / layout.page_size, slot % layout.page_size);
    (setup.cache_offset + page * layout.page_stride + offset * layout.row_stride) / 4
}

fn cache_row(setup: &Setup, slot: usize) -> Vec<f64> {
    let first = place(setup, slot);
    let width = setup.config.problem.dims.row() as usize;
    (first..first + width)
        .map(|at| number(9, at, 0, 0).into())
        .collect()
}

/// Returns the slots that a token attends to.
fn listed(setup: &Setup, token: usize, width: usize) -> Vec<usize> {
    let slots = setup.cache.pages * setup.cache.page_size;
    // Every given count is 1.
    let count = setup.slot_counts.map_or(width, |_| width.min(1));
    (0..count)
        .map(|at| setup.list_entries[(token * width + at) % setup.list_entries.len()])
        .filter_map(|slot| usize::try_from(slot).ok().filter(|slot| *slot < slots))
        .collect()
}

fn turn(setup: &Setup, token: &Token, row: &mut [f64]) {
    let Some(rotation) = setup.rotation else {
        return;
    };
    let given = setup.given_positions.as_ref();
    let position = given.map_or(token.position as f64, |given| given[token.row] as f64);
    let pairs = (0..rotation.width / 2)
        .map(|pair| {
            let frequency = 1e4f64.powf(-2.0 * f64::from(pair) / f64::from(rotation.width));
            let (sin, cos) = (position * frequency).sin_cos();
            (cos, sin)
        })
        .collect();
    let style = RotaryStyle::Interleaved;
    Turn { style, pairs }.apply(row);
}

/// Returns a new token's row: its latent, and its rotary key.
fn new_row(setup: &Setup, [latent, rope]: &[Elements<'_>; 2], token: &Token) -> Vec<f64> {
    let dims = setup.config.problem.dims;
    let mut key: Vec<f64> = (0..dims.head.rope as usize)
        .map(|k| rope.get(token.row, 0, k))
        .collect();
    turn(setup, token, &mut key);
    let latent = (0..dims.latent as usize).map(|k| latent.get(token.row, 0, k));
    latent.chain(key).collect()
}
