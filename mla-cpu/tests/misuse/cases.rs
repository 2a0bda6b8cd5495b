//! The cases: a name, the result that it has to have, and the change.

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

type Pick = fn(&mut Setup) -> &mut View;

/// The tensors of a call by name.
const TENSORS: [(&str, Pick); 4] = [
    ("query", |setup| &mut setup.query),
    ("latent", |setup| &mut setup.latent),
    ("rope", |setup| &mut setup.rope),
    ("out", |setup| &mut setup.out),
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
            add(cases, format!("{name}: {wrong}"), Refused, move |setup| {
                let view = pick(setup);
                let mut shape = view.layout.shape;
                shape[axis] = shape[axis].checked_add_signed(by).unwrap();
                view.shape(shape);
            });
        }
        add(cases, format!("{name}: no tokens"), Refused, move |setup| {
            let [_, heads, width] = pick(setup).layout.shape;
            pick(setup).shape([0, heads, width]);
        });
        add(
            cases,
            format!("{name}: heads and tokens exchanged"),
            Refused,
            move |setup| {
                let [tokens, heads, width] = pick(setup).layout.shape;
                pick(setup).shape([heads, tokens, width]);
            },
        );
        add(
            cases,
            format!("{name}: of another dtype"),
            Refused,
            move |setup| {
                pick(setup).layout.dtype = DType::BF16;
            },
        );
        add(
            cases,
            format!("{name}: less memory than it spans"),
            Refused,
            move |setup| {
                let view = pick(setup);
                view.bytes = Some(view.layout.span_bytes().unwrap() - 4);
            },
        );
        add(
            cases,
            format!("{name}: a byte off"),
            Refused,
            move |setup| {
                pick(setup).offset = 1;
            },
        );
        add(
            cases,
            format!("{name}: behind others in its memory"),
            Right,
            move |setup| {
                pick(setup).offset = 64;
            },
        );
        add(
            cases,
            format!("{name}: with more memory than it spans"),
            Right,
            move |setup| {
                let view = pick(setup);
                view.bytes = Some(view.layout.span_bytes().unwrap() + 400);
            },
        );
    }
}

fn strides(cases: &mut Vec<Case>) {
    for (name, pick) in TENSORS {
        add(
            cases,
            format!("{name}: rows with gaps"),
            Right,
            move |setup| {
                pick(setup).layout.strides[0] += 12;
            },
        );
        add(
            cases,
            format!("{name}: columns with gaps"),
            Right,
            move |setup| {
                let layout = &mut pick(setup).layout;
                layout.strides = layout.strides.map(|stride| 2 * stride);
            },
        );
        add(
            cases,
            format!("{name}: a stride beyond all memory"),
            Refused,
            move |setup| {
                let view = pick(setup);
                view.bytes = Some(view.layout.span_bytes().unwrap());
                view.layout.strides[0] = usize::MAX / 2;
            },
        );
    }
    // Strides between heads do not matter here: there is one head.
    for (name, pick) in [TENSORS[1], TENSORS[2]] {
        for stride in [0, usize::MAX / 2, usize::MAX] {
            add(
                cases,
                format!("{name}: a stride of {stride} for its one head"),
                Right,
                move |setup| {
                    setup.aligned = true;
                    let view = pick(setup);
                    view.bytes = view.layout.span_bytes();
                    view.layout.strides[1] = stride;
                },
            );
        }
    }
    for axis in [0, 1] {
        add(
            cases,
            format!("query: a stride of 0 along axis {axis}, for backends of 16 bytes"),
            Refused,
            move |setup| {
                setup.aligned = true;
                setup.query.bytes = setup.query.layout.span_bytes();
                setup.query.layout.strides[axis] = 0;
            },
        );
    }
    for (name, strides) in [
        ("out: tokens that overlap", [16, 16, 1]),
        ("out: heads that overlap", [32, 8, 1]),
        ("out: one column for all", [32, 16, 0]),
    ] {
        add(cases, name, Refused, move |setup| {
            setup.out.bytes = setup.out.layout.span_bytes();
            setup.out.layout.strides = strides;
        });
    }
    add(cases, "out: heads first in memory", Right, |setup| {
        setup.out.layout.strides = [16, TOKENS * 16, 1];
    });
}

// Adds tensors that a backend which reads 16 bytes at a time refuses: 16 bytes are four f32.
fn alignments(cases: &mut Vec<Case>) {
    for (name, pick) in TENSORS {
        // Latents go to the cache and to products alone, which take any.
        let expected = if name == "latent" { Right } else { Refused };
        add(
            cases,
            format!("{name}: an element off, for backends of 16 bytes"),
            expected,
            move |setup| {
                setup.aligned = true;
                pick(setup).offset = 4;
            },
        );
        add(
            cases,
            format!("{name}: rows apart by 13 elements more, for backends of 16 bytes"),
            expected,
            move |setup| {
                setup.aligned = true;
                pick(setup).layout.strides[0] += 13;
            },
        );
        add(
            cases,
            format!(
                "{name}: 16 bytes off, rows apart by 12 elements more, for backends of 16 bytes"
            ),
            Right,
            move |setup| {
                setup.aligned = true;
                pick(setup).offset = 16;
                pick(setup).layout.strides[0] += 12;
            },
        );
    }
    add(
        cases,
        "weights: an element off, for backends of 16 bytes",
        Right,
        |setup| {
            setup.aligned = true;
            setup.weights.offset = 4;
        },
    );
    add(
        cases,
        "cache: an element off, for backends of 16 bytes",
        Refused,
        |setup| {
            setup.aligned = true;
            setup.cache_offset = 4;
        },
    );
    add(
        cases,
        "cache: rows apart by an element more, for backends of 16 bytes",
        Refused,
        |setup| {
            setup.aligned = true;
            setup.cache.row_stride += 4;
            setup.cache.page_stride = PAGE * setup.cache.row_stride;
            setup.cache_bytes = PAGES * setup.cache.page_stride;
        },
    );
}

fn weights(cases: &mut Vec<Case>) {
    for (name, shape) in [
        ("weights: transposed without saying so", [1, HEADS * 32, 32]),
        ("weights: a latent row too few", [1, 31, HEADS * 32]),
        ("weights: a head too few", [1, 32, 32]),
        ("weights: a column too many", [1, 32, HEADS * 32 + 1]),
        ("weights: two matrices", [2, 32, HEADS * 32]),
    ] {
        add(cases, name, Refused, move |setup| {
            setup.weights.shape(shape)
        });
    }
    add(cases, "weights: of another dtype", Refused, |setup| {
        setup.weights.layout.dtype = DType::F16;
    });
    add(cases, "weights: columns first in memory", Right, |setup| {
        setup.weights.layout.strides = [0, 1, 32];
    });
}

fn log_sum_exps(cases: &mut Vec<Case>) {
    let of = |heads, tokens| {
        move |setup: &mut Setup| {
            setup.lse = Some(LseLayout::heads_first(heads, tokens));
            setup.lse_bytes = 4 * heads * tokens;
        }
    };
    add(
        cases,
        "lse: a token too few",
        Refused,
        of(HEADS, TOKENS - 1),
    );
    add(
        cases,
        "lse: a head too many",
        Refused,
        of(HEADS + 1, TOKENS),
    );
    add(cases, "lse: tokens first", Refused, of(TOKENS, HEADS));
    add(cases, "lse: less memory than it spans", Refused, |setup| {
        setup.lse_bytes -= 4
    });
    add(cases, "lse: rows that overlap", Refused, |setup| {
        setup.lse.as_mut().unwrap().row_stride = TOKENS - 1;
    });
    add(cases, "lse: rows with gaps", Right, |setup| {
        setup.lse.as_mut().unwrap().row_stride = TOKENS + 3;
        setup.lse_bytes = 4 * (2 * TOKENS + 3);
    });
    add(cases, "lse: none", Right, |setup| setup.lse = None);
}

fn caches(cases: &mut Vec<Case>) {
    add(
        cases,
        "cache: less memory than it spans",
        Refused,
        |setup| setup.cache_bytes -= 4,
    );
    add(
        cases,
        "cache: fewer pages than the step names",
        Refused,
        |setup| setup.cache.pages = 4,
    );
    add(cases, "cache: no pages", Refused, |setup| {
        setup.cache.pages = 0
    });
    add(cases, "cache: pages that overlap", Refused, |setup| {
        setup.cache.page_stride -= 160
    });
    add(cases, "cache: rows that overlap", Refused, |setup| {
        setup.cache.row_stride -= 4
    });
    add(
        cases,
        "cache: rows too far apart for kernels",
        Refused,
        |setup| {
            setup.cache.row_stride = 1 << 27;
            setup.cache.page_stride = PAGE << 27;
        },
    );
    add(cases, "cache: pages of no tokens", Refused, |setup| {
        setup.cache.page_size = 0
    });
    add(cases, "cache: pages of another size", Refused, |setup| {
        setup.cache.page_size = 2;
        setup.cache.page_stride = 320;
    });
    add(cases, "cache: another format", Refused, |setup| {
        setup.cache.format = KvFormat::BF16;
    });
    add(cases, "cache: another latent", Refused, |setup| {
        setup.cache.dims.latent = 24
    });
    add(cases, "cache: another rotary width", Refused, |setup| {
        setup.cache.dims.head.rope = 4
    });
    for (name, scale) in [
        ("cache: a scale of 0", 0.0),
        ("cache: a negative scale", -1.0),
        ("cache: a scale that is no number", f32::NAN),
        ("cache: an infinite scale", f32::INFINITY),
    ] {
        add(cases, name, Refused, move |setup| setup.cache.scale = scale);
    }
    add(
        cases,
        "cache: a scale that its format does not have",
        Refused,
        |setup| setup.cache.scale = 2.0,
    );
    add(
        cases,
        "cache: a page stride that overflows",
        Refused,
        |setup| {
            setup.cache.page_stride = usize::MAX / 2;
        },
    );
    add(
        cases,
        "cache: more pages than the step names",
        Right,
        |setup| {
            setup.cache.pages += 3;
            setup.cache_bytes += 3 * setup.cache.page_stride;
        },
    );
}

fn pages(cases: &mut Vec<Case>) {
    for (name, at, entry) in [
        ("pages: a negative page", 1, -1),
        ("pages: the smallest number", 3, i32::MIN),
        ("pages: one past the cache", 0, PAGES as i32),
        ("pages: the largest number", 5, i32::MAX),
    ] {
        add(cases, name, Refused, move |setup| setup.tables[at] = entry);
    }
    for (name, entry) in [
        (
            "pages: the smallest number behind a request's last",
            i32::MIN,
        ),
        (
            "pages: the largest number behind a request's last",
            i32::MAX,
        ),
        ("pages: another's page behind a request's last", 0),
    ] {
        add(cases, name, Right, move |setup| setup.tables[2] = entry);
    }
    add(
        cases,
        "pages: one request's new tokens in another's",
        Refused,
        |setup| {
            setup.tables[5] = 1;
            setup.requests[0].kv = 5;
            setup.requests[1].kv = 9;
        },
    );
    add(cases, "pages: rows of no entries", Refused, |setup| {
        setup.max_pages = 0
    });
    add(cases, "pages: no whole number of rows", Refused, |setup| {
        setup.max_pages = 4
    });
    add(cases, "pages: a row too few", Refused, |setup| {
        setup.tables.truncate(3)
    });
    add(cases, "pages: of no tokens", Refused, |setup| {
        setup.table_page = 0
    });
    add(cases, "pages: tables for another size", Refused, |setup| {
        setup.table_page = 8
    });
    add(
        cases,
        "pages: rows of twice as many entries, read as twice as many rows",
        Refused,
        |setup| setup.tables = vec![3, 1, -7, -7, -7, -7, 0, 4, 2, -7, -7, -7],
    );
}

fn slots(cases: &mut Vec<Case>) {
    // The slot of the decode's token, then those of the five tokens that follow four cached ones.
    const SLOTS: [i64; TOKENS] = [5, 16, 17, 18, 19, 8];
    add(
        cases,
        "slots: where the pages have the tokens",
        Right,
        |setup| {
            setup.slots = Some(SLOTS.to_vec());
        },
    );
    for (name, at, slot) in [
        ("slots: the next slot", 0, 6),
        ("slots: another token's", 1, 17),
        ("slots: of a page that is not the request's", 0, 0),
        ("slots: one past the cache", 2, (PAGES * PAGE) as i64),
        ("slots: below −1", 3, -2),
        ("slots: the smallest number", 3, i64::MIN),
        ("slots: the largest number", 4, i64::MAX),
    ] {
        add(cases, name, Refused, move |setup| {
            let mut slots = SLOTS.to_vec();
            slots[at] = slot;
            setup.slots = Some(slots);
        });
    }
    add(cases, "slots: one too few", Refused, |setup| {
        setup.slots = Some(SLOTS[1..].to_vec())
    });
    add(cases, "slots: one too many", Refused, |setup| {
        setup.slots = Some([&SLOTS[..], &[-1]].concat());
    });
    add(cases, "slots: none", Refused, |setup| {
        setup.slots = Some(Vec::new())
    });
    // The expanded path reads its new tokens as they were given.
    add(
        cases,
        "slots: tokens of a prompt that are not written",
        Right,
        |setup| {
            let mut slots = SLOTS.to_vec();
            slots[3] = -1;
            setup.slots = Some(slots);
        },
    );
}

fn limits(cases: &mut Vec<Case>) {
    add(
        cases,
        "limits: fewer requests than the step's",
        Refused,
        |setup| setup.limits.requests = 1,
    );
    add(
        cases,
        "limits: fewer tokens than the step's",
        Refused,
        |setup| setup.limits.tokens = 5,
    );
    add(
        cases,
        "limits: fewer pages than a request's",
        Refused,
        |setup| {
            setup.limits.pages_per_request = 2;
        },
    );
    add(cases, "limits: no rows for context", Refused, |setup| {
        setup.limits.context_rows = 0
    });
    add(cases, "limits: fewer rows than a page", Refused, |setup| {
        setup.limits.context_rows = 3
    });
    for (name, change) in [
        (
            "requests",
            (|setup| setup.limits.requests = 1 << 40) as fn(&mut Setup),
        ),
        ("tokens", |setup| setup.limits.tokens = 1 << 40),
        ("pages", |setup| setup.limits.pages_per_request = 1 << 40),
        ("rows", |setup| setup.limits.context_rows = 1 << 40),
    ] {
        add(
            cases,
            format!("limits: more {name} than integers count"),
            Refused,
            change,
        );
    }
    add(cases, "limits: exactly the step's", Right, |setup| {
        setup.limits.requests = 2;
        setup.limits.tokens = 6;
        setup.limits.context_rows = 4;
    });
    add(cases, "limits: no decodes, all expanded", Right, |setup| {
        setup.limits.decode_query_len = 0;
    });
    add(cases, "limits: a threshold beyond them", Right, |setup| {
        setup.threshold = Some(u32::MAX)
    });
}

fn orders(cases: &mut Vec<Case>) {
    add(
        cases,
        "requests: a decode behind a prompt",
        Refused,
        |setup| {
            setup.requests.reverse();
            setup.tables.rotate_left(3);
        },
    );
    add(
        cases,
        "requests: fewer tokens in all than new ones",
        Refused,
        |setup| {
            setup.requests[1].kv = 4;
        },
    );
    add(
        cases,
        "requests: more tokens than pages",
        Refused,
        |setup| setup.requests[0].kv = 13,
    );
    add(
        cases,
        "requests: more tokens than integers count",
        Refused,
        |setup| {
            setup.requests[0].kv = u32::MAX;
        },
    );
    add(
        cases,
        "requests: more new tokens than integers count",
        Refused,
        |setup| {
            setup.requests[1] = Request::new(u32::MAX, u32::MAX);
        },
    );
    add(cases, "requests: long padding", Refused, |setup| {
        setup.requests[1].kv = 0
    });
    add(
        cases,
        "requests: none, with tensors of some",
        Refused,
        |setup| setup.requests.clear(),
    );
    add(cases, "requests: one without new tokens", Right, |setup| {
        setup.requests.push(Request::new(0, 3));
        setup.tables.extend([5, -1, -1]);
    });
    add(cases, "requests: one without any tokens", Right, |setup| {
        setup.requests.push(Request::new(0, 0));
        setup.tables.extend([-1, -1, -1]);
    });
}

fn problems(cases: &mut Vec<Case>) {
    for (name, change) in [
        (
            "no heads",
            (|setup| setup.config.problem.heads = 0) as fn(&mut Setup),
        ),
        ("pages of no tokens", |setup| {
            setup.config.problem.page_size = 0
        }),
        ("no latent", |setup| setup.config.problem.dims.latent = 0),
        ("no values", |setup| setup.config.problem.dims.head.v = 0),
        ("keys of a rotary part alone", |setup| {
            setup.config.problem.dims.head.nope = 0
        }),
        ("a quantised output", |setup| {
            setup.config.problem.quant_output = true
        }),
        ("a cache over several devices", |setup| {
            setup.config.problem.context_parallel = true
        }),
        ("a format that cannot hold the rows", |setup| {
            setup.config.problem.kv_format = KvFormat::Fp8DsMla;
        }),
        ("a scale of 0", |setup| setup.config.softmax_scale = 0.0),
        ("a negative scale", |setup| {
            setup.config.softmax_scale = -0.2
        }),
        ("a scale that is no number", |setup| {
            setup.config.softmax_scale = f32::NAN
        }),
        ("an infinite scale", |setup| {
            setup.config.softmax_scale = f32::INFINITY
        }),
        ("another dtype than the tensors", |setup| {
            setup.config.problem.dtype = DType::BF16;
            setup.config.problem.kv_format = KvFormat::BF16;
        }),
        ("more heads than the tensors have", |setup| {
            setup.config.problem.heads = 3
        }),
    ] {
        add(cases, format!("problem: {name}"), Refused, change);
    }
    add(cases, "problem: decodes of one token", Right, |setup| {
        setup.config.problem.query_len = QueryLen::Single;
    });
}

fn workspaces(cases: &mut Vec<Case>) {
    for (name, prepared) in [
        ("workspace: nothing prepared", Prepared::Nothing),
        ("workspace: a step that was refused", Prepared::Refused),
        ("workspace: the step before", Prepared::Another),
        ("workspace: of another problem", Prepared::OtherProblem),
    ] {
        add(cases, name, Refused, move |setup| setup.prepared = prepared);
    }
}

fn rotations(cases: &mut Vec<Case>) {
    let rotation = |width, positions, fused| {
        move |setup: &mut Setup| {
            setup.rotation = Some(Rotation {
                width,
                positions,
                fused,
            });
        }
    };
    add(
        cases,
        "rotation: by the cache write, with a prompt",
        Refused,
        rotation(8, 16, true),
    );
    add(
        cases,
        "rotation: tables too short",
        Refused,
        rotation(8, 8, false),
    );
    add(
        cases,
        "rotation: tables too short for the cache write",
        Refused,
        rotation(8, 8, true),
    );
    add(
        cases,
        "rotation: tables too narrow",
        Refused,
        rotation(6, 16, false),
    );
    add(
        cases,
        "rotation: tables too wide",
        Refused,
        rotation(10, 16, false),
    );
    add(
        cases,
        "rotation: tables of an odd width",
        Refused,
        rotation(7, 16, false),
    );
    add(
        cases,
        "rotation: tables of no positions",
        Refused,
        rotation(8, 0, false),
    );
}

fn lists(cases: &mut Vec<Case>) {
    add(
        cases,
        "slot lists: of a problem that is not sparse",
        Refused,
        |setup| {
            setup.slot_lists = Some((4, 4 * TOKENS));
        },
    );
    let sparse = |setup: &mut Setup| {
        setup.config.problem.sparse = true;
        setup.limits.decode_query_len = 8;
    };
    add(
        cases,
        "slot lists: none of a sparse problem",
        Refused,
        sparse,
    );
    add(
        cases,
        "slot lists: too few entries",
        Refused,
        move |setup| {
            sparse(setup);
            setup.slot_lists = Some((4, 4 * TOKENS - 1));
        },
    );
    add(
        cases,
        "slot lists: twice as wide as they say",
        Refused,
        move |setup| {
            sparse(setup);
            setup.slot_lists = Some((4, 8 * TOKENS));
        },
    );
    add(
        cases,
        "slot lists: too many counts",
        Refused,
        move |setup| {
            sparse(setup);
            setup.slot_lists = Some((4, 4 * TOKENS));
            setup.slot_counts = Some(TOKENS + 1);
        },
    );
    add(
        cases,
        "slot lists: dense requests of a problem that is not sparse",
        Refused,
        |setup| setup.dense_within = 4,
    );
    add(cases, "slot lists: too few counts", Refused, move |setup| {
        sparse(setup);
        setup.slot_lists = Some((4, 4 * TOKENS));
        setup.slot_counts = Some(TOKENS - 1);
    });
    add(
        cases,
        "slot lists: a width that overflows",
        Refused,
        move |setup| {
            sparse(setup);
            setup.slot_lists = Some((usize::MAX, 16));
        },
    );
    add(
        cases,
        "slot lists: wider than the backend takes",
        Refused,
        move |setup| {
            sparse(setup);
            setup.aligned = true;
            setup.slot_lists = Some((LIST as usize + 1, (LIST as usize + 1) * TOKENS));
        },
    );
    add(
        cases,
        "slot lists: more new tokens than a decode has",
        Refused,
        move |setup| {
            sparse(setup);
            setup.limits.decode_query_len = 2;
            setup.slot_lists = Some((4, 4 * TOKENS));
        },
    );
}
