//! The cases: each has a name, the required result, and the change that makes it.

use mla_runtime::batch::Request;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::LseLayout;

use crate::Expected::{self, Refused, Right};
use crate::aligned::LIST;
use crate::setup::{HEADS, PAGE, PAGES, Prepared, Rotation, Setup, TOKENS, View};

type Change = Box<dyn Fn(&mut Setup)>;
type Case = (String, Expected, Change);

pub(crate) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    shapes(&mut cases);
    strides(&mut cases);
    alignments(&mut cases);
    weights(&mut cases);
    log_sum_exps(&mut cases);
    caches(&mut cases);
    pages(&mut cases);
    slots(&mut cases);
    limits(&mut cases);
    orders(&mut cases);
    problems(&mut cases);
    workspaces(&mut cases);
    rotations(&mut cases);
    lists(&mut cases);
    cases
}

fn add(
    cases: &mut Vec<Case>,
    name: impl Into<String>,
    expected: Expected,
    change: impl Fn(&mut Setup) + 'static,
) {
    cases.push((name.into(), expected, Box::new(change)));
}

/// Adds cases, one per row.
macro_rules! add {
    ($cases:ident; $($expected:ident $name:expr, $change:expr;)*) => {
        $(add($cases, $name, $expected, $change);)*
    };
}

type Pick = fn(&mut Setup) -> &mut View;

/// The tensors of a call by name.
const TENSORS: [(&str, Pick); 4] = [
    ("query", |s| &mut s.query),
    ("latent", |s| &mut s.latent),
    ("rope", |s| &mut s.rope),
    ("out", |s| &mut s.out),
];

fn shapes(cases: &mut Vec<Case>) {
    for (name, pick) in TENSORS {
        for (wrong, axis, by) in [
            ("a token too few", 0, -1),
            ("a token too many", 0, 1),
            ("a head too many", 1, 1),
            ("a column too few", 2, -1),
            ("a column too many", 2, 1),
        ] {
            add! { cases;
                Refused format!("{name}: {wrong}"), move |s| {
                    let view = pick(s);
                    let mut shape = view.layout.shape;
                    shape[axis] = shape[axis].checked_add_signed(by).unwrap();
                    view.shape(shape);
                };
            }
        }
        add! { cases;
            Refused format!("{name}: no tokens"), move |s| {
                let [_, heads, width] = pick(s).layout.shape;
                pick(s).shape([0, heads, width]);
            };
            Refused format!("{name}: heads and tokens exchanged"), move |s| {
                let [tokens, heads, width] = pick(s).layout.shape;
                pick(s).shape([heads, tokens, width]);
            };
            Refused format!("{name}: of another dtype"),
                move |s| pick(s).layout.dtype = DType::BF16;
            Refused format!("{name}: less memory than it spans"), move |s| {
                let view = pick(s);
                view.bytes = Some(view.layout.span_bytes().unwrap() - 4);
            };
            Refused format!("{name}: a byte off"), move |s| pick(s).offset = 1;
            Right format!("{name}: behind others in its memory"), move |s| pick(s).offset = 64;
            Right format!("{name}: with more memory than it spans"), move |s| {
                let view = pick(s);
                view.bytes = Some(view.layout.span_bytes().unwrap() + 400);
            };
        }
    }
}

fn strides(cases: &mut Vec<Case>) {
    for (name, pick) in TENSORS {
        add! { cases;
            Right format!("{name}: rows with gaps"), move |s| pick(s).layout.strides[0] += 12;
            Right format!("{name}: columns with gaps"), move |s| {
                let layout = &mut pick(s).layout;
                layout.strides = layout.strides.map(|stride| 2 * stride);
            };
            Refused format!("{name}: a stride beyond all memory"), move |s| {
                let view = pick(s);
                view.bytes = Some(view.layout.span_bytes().unwrap());
                view.layout.strides[0] = usize::MAX / 2;
            };
        }
    }
    // Strides between heads do not matter here, because there is only one head.
    for (name, pick) in [TENSORS[1], TENSORS[2]] {
        for stride in [0, usize::MAX / 2, usize::MAX] {
            add! { cases;
                Right format!("{name}: a stride of {stride} for its one head"), move |s| {
                    s.aligned = true;
                    let view = pick(s);
                    view.bytes = view.layout.span_bytes();
                    view.layout.strides[1] = stride;
                };
            }
        }
    }
    for axis in [0, 1] {
        add! { cases;
            Refused format!("query: a stride of 0 along axis {axis}, for backends of 16 bytes"),
                move |s| {
                    s.aligned = true;
                    s.query.bytes = s.query.layout.span_bytes();
                    s.query.layout.strides[axis] = 0;
                };
        }
    }
    for (name, strides) in [
        ("out: tokens that overlap", [16, 16, 1]),
        ("out: heads that overlap", [32, 8, 1]),
        ("out: one column for all", [32, 16, 0]),
    ] {
        add! { cases;
            Refused name, move |s| {
                s.out.bytes = s.out.layout.span_bytes();
                s.out.layout.strides = strides;
            };
        }
    }
    add! { cases;
        Right "out: heads first in memory", |s| s.out.layout.strides = [16, TOKENS * 16, 1];
    }
}

// Adds tensors that a backend refuses if it reads 16 bytes at a time: 16 bytes are four f32.
fn alignments(cases: &mut Vec<Case>) {
    for (name, pick) in TENSORS {
        // Latents are used only by cache writes and products, which support any alignment.
        let expected = if name == "latent" { Right } else { Refused };
        add! { cases;
            expected format!("{name}: an element off, for backends of 16 bytes"),
                move |s| { s.aligned = true; pick(s).offset = 4; };
            expected format!("{name}: rows apart by 13 elements more, for backends of 16 bytes"),
                move |s| { s.aligned = true; pick(s).layout.strides[0] += 13; };
            Right format!(
                "{name}: 16 bytes off, rows apart by 12 elements more, for backends of 16 bytes"
            ),
                move |s| {
                    s.aligned = true;
                    pick(s).offset = 16;
                    pick(s).layout.strides[0] += 12;
                };
        }
    }
    add! { cases;
        Right "weights: an element off, for backends of 16 bytes",
            |s| { s.aligned = true; s.weights.offset = 4; };
        Refused "cache: an element off, for backends of 16 bytes",
            |s| { s.aligned = true; s.cache_offset = 4; };
        Refused "cache: rows apart by an element more, for backends of 16 bytes", |s| {
            s.aligned = true;
            s.cache.row_stride += 4;
            s.cache.page_stride = PAGE * s.cache.row_stride;
            s.cache_bytes = PAGES * s.cache.page_stride;
        };
    }
}

fn weights(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "weights: transposed without saying so", |s| s.weights.shape([1, HEADS * 32, 32]);
        Refused "weights: a latent row too few", |s| s.weights.shape([1, 31, HEADS * 32]);
        Refused "weights: a head too few", |s| s.weights.shape([1, 32, 32]);
        Refused "weights: a column too many", |s| s.weights.shape([1, 32, HEADS * 32 + 1]);
        Refused "weights: two matrices", |s| s.weights.shape([2, 32, HEADS * 32]);
        Refused "weights: of another dtype", |s| s.weights.layout.dtype = DType::F16;
        Right "weights: columns first in memory", |s| s.weights.layout.strides = [0, 1, 32];
    }
}

fn log_sum_exps(cases: &mut Vec<Case>) {
    let of = |heads, tokens| {
        move |s: &mut Setup| {
            s.lse = Some(LseLayout::heads_first(heads, tokens));
            s.lse_bytes = 4 * heads * tokens;
        }
    };
    add! { cases;
        Refused "lse: a token too few", of(HEADS, TOKENS - 1);
        Refused "lse: a head too many", of(HEADS + 1, TOKENS);
        Refused "lse: tokens first", of(TOKENS, HEADS);
        Refused "lse: less memory than it spans", |s| s.lse_bytes -= 4;
        Refused "lse: rows that overlap", |s| s.lse.as_mut().unwrap().row_stride = TOKENS - 1;
        Right "lse: rows with gaps", |s| {
            s.lse.as_mut().unwrap().row_stride = TOKENS + 3;
            s.lse_bytes = 4 * (2 * TOKENS + 3);
        };
        Right "lse: none", |s| s.lse = None;
    }
}

fn caches(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "cache: less memory than it spans", |s| s.cache_bytes -= 4;
        Refused "cache: fewer pages than the step names", |s| s.cache.pages = 4;
        Refused "cache: no pages", |s| s.cache.pages = 0;
        Refused "cache: pages that overlap", |s| s.cache.page_stride -= 160;
        Refused "cache: rows that overlap", |s| s.cache.row_stride -= 4;
        Refused "cache: rows too far apart for kernels",
            |s| { s.cache.row_stride = 1 << 27; s.cache.page_stride = PAGE << 27; };
        Refused "cache: pages of no tokens", |s| s.cache.page_size = 0;
        Refused "cache: pages of another size",
            |s| { s.cache.page_size = 2; s.cache.page_stride = 320; };
        Refused "cache: another format", |s| s.cache.format = KvFormat::BF16;
        Refused "cache: another latent", |s| s.cache.dims.latent = 24;
        Refused "cache: another rotary width", |s| s.cache.dims.head.rope = 4;
        Refused "cache: a scale of 0", |s| s.cache.scale = 0.0;
        Refused "cache: a negative scale", |s| s.cache.scale = -1.0;
        Refused "cache: a scale that is no number", |s| s.cache.scale = f32::NAN;
        Refused "cache: an infinite scale", |s| s.cache.scale = f32::INFINITY;
        Refused "cache: a scale that its format does not have", |s| s.cache.scale = 2.0;
        Refused "cache: a page stride that overflows", |s| s.cache.page_stride = usize::MAX / 2;
        Right "cache: more pages than the step names",
            |s| { s.cache.pages += 3; s.cache_bytes += 3 * s.cache.page_stride; };
    }
}

fn pages(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "pages: a negative page", |s| s.tables[1] = -1;
        Refused "pages: the smallest number", |s| s.tables[3] = i32::MIN;
        Refused "pages: one past the cache", |s| s.tables[0] = PAGES as i32;
        Refused "pages: the largest number", |s| s.tables[5] = i32::MAX;
        Right "pages: the smallest number behind a request's last", |s| s.tables[2] = i32::MIN;
        Right "pages: the largest number behind a request's last", |s| s.tables[2] = i32::MAX;
        Right "pages: another's page behind a request's last", |s| s.tables[2] = 0;
        Refused "pages: one request's new tokens in another's",
            |s| { s.tables[5] = 1; s.requests[0].kv = 5; s.requests[1].kv = 9; };
        Refused "pages: rows of no entries", |s| s.max_pages = 0;
        Refused "pages: no whole number of rows", |s| s.max_pages = 4;
        Refused "pages: a row too few", |s| s.tables.truncate(3);
        Refused "pages: of no tokens", |s| s.table_page = 0;
        Refused "pages: tables for another size", |s| s.table_page = 8;
        Refused "pages: rows of twice as many entries, read as twice as many rows",
            |s| s.tables = vec![3, 1, -7, -7, -7, -7, 0, 4, 2, -7, -7, -7];
    }
}

fn slots(cases: &mut Vec<Case>) {
    // The slot of the decode's token comes first. The others belong to the five tokens that follow
    // four cached ones.
    const SLOTS: [i64; TOKENS] = [5, 16, 17, 18, 19, 8];
    add! { cases;
        Right "slots: where the pages have the tokens", |s| s.slots = Some(SLOTS.to_vec());
    }
    for (name, at, slot) in [
        ("slots: the next slot", 0, 6),
        ("slots: another token's", 1, 17),
        ("slots: of a page that is not the request's", 0, 0),
        ("slots: one past the cache", 2, (PAGES * PAGE) as i64),
        ("slots: below −1", 3, -2),
        ("slots: the smallest number", 3, i64::MIN),
        ("slots: the largest number", 4, i64::MAX),
    ] {
        add! { cases;
            Refused name, move |s| {
                let mut slots = SLOTS.to_vec();
                slots[at] = slot;
                s.slots = Some(slots);
            };
        }
    }
    add! { cases;
        Refused "slots: one too few", |s| s.slots = Some(SLOTS[1..].to_vec());
        Refused "slots: one too many", |s| s.slots = Some([&SLOTS[..], &[-1]].concat());
        Refused "slots: none", |s| s.slots = Some(Vec::new());
        // The expanded path reads its new tokens from the tensors of the call.
        Right "slots: tokens of a prompt that are not written",
            |s| { let mut slots = SLOTS.to_vec(); slots[3] = -1; s.slots = Some(slots); };
    }
}

fn limits(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "limits: fewer requests than the step's", |s| s.limits.requests = 1;
        Refused "limits: fewer tokens than the step's", |s| s.limits.tokens = 5;
        Refused "limits: fewer pages than a request's", |s| s.limits.pages_per_request = 2;
        Refused "limits: no rows for context", |s| s.limits.context_rows = 0;
        Refused "limits: fewer rows than a page", |s| s.limits.context_rows = 3;
        Refused "limits: more requests than integers count", |s| s.limits.requests = 1 << 40;
        Refused "limits: more tokens than integers count", |s| s.limits.tokens = 1 << 40;
        Refused "limits: more pages than integers count", |s| s.limits.pages_per_request = 1 << 40;
        Refused "limits: more rows than integers count", |s| s.limits.context_rows = 1 << 40;
        Right "limits: exactly the step's",
            |s| { s.limits.requests = 2; s.limits.tokens = 6; s.limits.context_rows = 4; };
        Right "limits: no decodes, all expanded", |s| s.limits.decode_query_len = 0;
        Right "limits: a threshold beyond them", |s| s.threshold = Some(u32::MAX);
    }
}

fn orders(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "requests: a decode behind a prompt",
            |s| { s.requests.reverse(); s.tables.rotate_left(3); };
        Refused "requests: fewer tokens in all than new ones", |s| s.requests[1].kv = 4;
        Refused "requests: more tokens than pages", |s| s.requests[0].kv = 13;
        Refused "requests: more tokens than integers count", |s| s.requests[0].kv = u32::MAX;
        Refused "requests: more new tokens than integers count",
            |s| s.requests[1] = Request::new(u32::MAX, u32::MAX);
        Refused "requests: long padding", |s| s.requests[1].kv = 0;
        Refused "requests: none, with tensors of some", |s| s.requests.clear();
        Right "requests: one without new tokens",
            |s| { s.requests.push(Request::new(0, 3)); s.tables.extend([5, -1, -1]); };
        Right "requests: one without any tokens",
            |s| { s.requests.push(Request::new(0, 0)); s.tables.extend([-1, -1, -1]); };
    }
}

fn problems(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "problem: no heads", |s| s.config.problem.heads = 0;
        Refused "problem: pages of no tokens", |s| s.config.problem.page_size = 0;
        Refused "problem: no latent", |s| s.config.problem.dims.latent = 0;
        Refused "problem: no values", |s| s.config.problem.dims.head.v = 0;
        Refused "problem: keys of a rotary part alone", |s| s.config.problem.dims.head.nope = 0;
        Refused "problem: a quantised output", |s| s.config.problem.quant_output = true;
        Refused "problem: a cache over several devices",
            |s| s.config.problem.context_parallel = true;
        Refused "problem: a format that cannot hold the rows",
            |s| s.config.problem.kv_format = KvFormat::Fp8DsMla;
        Refused "problem: a scale of 0", |s| s.config.softmax_scale = 0.0;
        Refused "problem: a negative scale", |s| s.config.softmax_scale = -0.2;
        Refused "problem: a scale that is no number", |s| s.config.softmax_scale = f32::NAN;
        Refused "problem: an infinite scale", |s| s.config.softmax_scale = f32::INFINITY;
        Refused "problem: another dtype than the tensors", |s| {
            s.config.problem.dtype = DType::BF16;
            s.config.problem.kv_format = KvFormat::BF16;
        };
        Refused "problem: more heads than the tensors have", |s| s.config.problem.heads = 3;
        Right "problem: decodes of one token", |s| s.config.problem.query_len = QueryLen::Single;
    }
}

fn workspaces(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "workspace: nothing prepared", |s| s.prepared = Prepared::Nothing;
        Refused "workspace: a step that was refused", |s| s.prepared = Prepared::Refused;
        Refused "workspace: the step before", |s| s.prepared = Prepared::Another;
        Refused "workspace: of another problem", |s| s.prepared = Prepared::OtherProblem;
    }
}

fn rotations(cases: &mut Vec<Case>) {
    let rotation = |width, positions, fused| {
        move |s: &mut Setup| {
            s.rotation = Some(Rotation {
                width,
                positions,
                fused,
            });
        }
    };
    add! { cases;
        Refused "rotation: by the cache write, with a prompt", rotation(8, 16, true);
        Refused "rotation: tables too short", rotation(8, 8, false);
        Refused "rotation: tables too short for the cache write", rotation(8, 8, true);
        Refused "rotation: tables too narrow", rotation(6, 16, false);
        Refused "rotation: tables too wide", rotation(10, 16, false);
        Refused "rotation: tables of an odd width", rotation(7, 16, false);
        Refused "rotation: tables of no positions", rotation(8, 0, false);
    }
    let given = |positions: &'static [i64]| {
        move |s: &mut Setup| {
            rotation(8, 16, false)(s);
            s.given_positions = Some(positions.to_vec());
        }
    };
    add! { cases;
        Refused "rotation: fewer positions than tokens", given(&[0; 5]);
        Refused "rotation: more positions than tokens", given(&[0; 7]);
        Refused "rotation: a negative position", given(&[0, 0, 0, -1, 0, 0]);
        Refused "rotation: a position past the tables", given(&[0, 16, 0, 0, 0, 0]);
        Refused "rotation: the largest position", given(&[0, 0, 0, 0, 0, i64::MAX]);
    }
}

fn lists(cases: &mut Vec<Case>) {
    add! { cases;
        Refused "slot lists: of a problem that is not sparse",
            |s| s.slot_lists = Some((4, 4 * TOKENS));
    }
    let sparse = |s: &mut Setup| {
        s.config.problem.sparse = true;
        s.limits.decode_query_len = 8;
    };
    add! { cases;
        Refused "slot lists: none of a sparse problem", sparse;
        Refused "slot lists: too few entries",
            move |s| { sparse(s); s.slot_lists = Some((4, 4 * TOKENS - 1)); };
        Refused "slot lists: twice as wide as they say",
            move |s| { sparse(s); s.slot_lists = Some((4, 8 * TOKENS)); };
        Refused "slot lists: too many counts", move |s| {
            sparse(s);
            s.slot_lists = Some((4, 4 * TOKENS));
            s.slot_counts = Some(TOKENS + 1);
        };
        Refused "slot lists: dense requests of a problem that is not sparse",
            |s| s.dense_within = 4;
        Refused "slot lists: too few counts", move |s| {
            sparse(s);
            s.slot_lists = Some((4, 4 * TOKENS));
            s.slot_counts = Some(TOKENS - 1);
        };
        Refused "slot lists: a width that overflows",
            move |s| { sparse(s); s.slot_lists = Some((usize::MAX, 16)); };
        Refused "slot lists: wider than the backend takes", move |s| {
            sparse(s);
            s.aligned = true;
            s.slot_lists = Some((LIST as usize + 1, (LIST as usize + 1) * TOKENS));
        };
        Refused "slot lists: more new tokens than a decode has", move |s| {
            sparse(s);
            s.limits.decode_query_len = 2;
            s.slot_lists = Some((4, 4 * TOKENS));
        };
    }
}
