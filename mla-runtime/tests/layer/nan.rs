//! Puts a NaN among a step's inputs. It must be in the outputs of exactly the tokens that see it.

use mla_runtime::model::DType;

use crate::world::{Case, Outcome, Owned, World, floats};
use crate::{FORMATS, MIXED, cpu_layer};

/// Sets an element to NaN in one of a case's tensors, in the row of `token`.
fn put_nan(world: &mut World, tensor: &str, token: usize) {
    let of = |tensor: &mut Owned| tensor.set([token, 0, 0], f64::NAN);
    match tensor {
        "query" => of(&mut world.query),
        "latent" => of(&mut world.latent),
        "rope" => of(&mut world.rope),
        other => panic!("no tensor {other}"),
    }
}

/// The new tokens that see a NaN of `token`: the token itself and, if the NaN is in the cache,
/// those after it.
fn seeing(world: &World, tensor: &str, token: usize) -> std::ops::Range<usize> {
    let mut end = 0;
    for request in &world.requests {
        end += request.q as usize;
        if token < end {
            break;
        }
    }
    match tensor {
        "query" => token..token + 1,
        _ => token..end,
    }
}

// A NaN in a query affects one head. A NaN in a row affects every head.
fn check(world: &World, clean: &Outcome, with_nan: &Outcome, tensor: &str, token: usize) {
    let case = &world.case;
    let (heads, v) = (case.heads as usize, case.dims.head.v as usize);
    let tokens = world.slots.len();
    let sees = seeing(world, tensor, token);
    let [out, out_clean] = [with_nan, clean].map(|outcome| floats(case.dtype, &outcome.out));
    let [lse, lse_clean] = [with_nan, clean].map(|outcome| floats(DType::F32, &outcome.lse));
    for t in 0..tokens {
        for h in 0..heads {
            let what = || format!("token {t}, head {h}; NaN in {tensor} of token {token}");
            let row = (t * heads + h) * v..(t * heads + h + 1) * v;
            let at = h * tokens + t;
            if sees.contains(&t) && (tensor != "query" || h == 0) {
                assert!(out[row].iter().all(|x| x.is_nan()), "{}", what());
                assert!(lse[at].is_nan(), "{}", what());
            } else {
                assert_eq!(out[row.clone()], out_clean[row], "{}", what());
                assert_eq!(lse[at], lse_clean[at], "{}", what());
            }
        }
    }
}

fn check_case(case: &Case) {
    let layer = cpu_layer(case);
    let clean = World::new(case).run(&layer);
    let tokens = World::new(case).slots.len();
    for tensor in ["query", "latent", "rope"] {
        for token in [0, 2, tokens / 2, tokens - 1] {
            let mut world = World::new(case);
            put_nan(&mut world, tensor, token);
            check(&world, &clean, &world.run(&layer), tensor, token);
        }
    }
}

#[test]
fn nan_stays_among_who_see_it() {
    // All six tokens take the absorbed path, and then the expanded path.
    for threshold in [100, 0] {
        check_case(&Case {
            threshold,
            ..Case::small(&[(6, 6)])
        });
    }
    for (dtype, kv_format) in FORMATS {
        for threshold in [0, 4, 100] {
            check_case(&Case {
                dtype,
                kv_format,
                threshold,
                ..Case::small(MIXED)
            });
        }
    }
}
