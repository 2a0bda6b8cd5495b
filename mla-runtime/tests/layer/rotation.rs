//! Compares calls with unrotated queries and keys with calls whose tensors were rotated beforehand.

use mla_cpu::Cpu;
use mla_runtime::model::{HeadDims, MlaDims, Rope, RotaryStyle};
use mla_runtime::tensor::RotaryTables;

use crate::cpu_layer;
use crate::world::{Case, Outcome, World};

const YARN: Rope = Rope::plain(100.0)
    .with_yarn(4.0, Some(32))
    .with_mscale(1.0, 0.5);

/// The position of each token of a batch.
fn positions(world: &World) -> Vec<usize> {
    let requests = world.requests.iter();
    let of = |r: &mla_runtime::batch::Request| {
        let first = r.kv.saturating_sub(r.q) as usize;
        first..first + r.q as usize
    };
    requests.flat_map(of).collect()
}

/// Rotates the queries and keys of a batch by the formula.
pub(crate) fn turn(world: &mut World, rope: &Rope) {
    let head = world.case.dims.head;
    let [nope, width] = [head.nope, head.rope].map(|n| n as usize);
    let frequencies = rope.frequencies(head.rope).unwrap();
    for (token, position) in positions(world).into_iter().enumerate() {
        for (pair, frequency) in frequencies.iter().enumerate() {
            let angle = position as f64 * frequency;
            let factor = rope.attention_factor();
            let [cos, sin] = [angle.cos(), angle.sin()].map(|value| (factor * value) as f32);
            let [a, b] = match rope.style {
                RotaryStyle::Interleaved => [2 * pair, 2 * pair + 1],
                RotaryStyle::Halves => [pair, pair + width / 2],
            };
            let apply = |owned: &mut crate::world::Owned, head: usize, first: usize| {
                let [_, heads, width] = owned.view().shape();
                let at = |e: usize| (token * heads + head) * width + first + e;
                let [x, y] = [a, b].map(|e| owned.values[at(e)] as f32);
                owned.set([token, head, first + a], f64::from(x * cos - y * sin));
                owned.set([token, head, first + b], f64::from(y * cos + x * sin));
            };
            for head in 0..world.case.heads as usize {
                apply(&mut world.query, head, nope);
            }
            apply(&mut world.rope, 0, 0);
        }
    }
}

/// The results of a call that rotates.
fn run(world: &World, tables: &RotaryTables<Cpu>) -> Outcome {
    let layer = cpu_layer(&world.case);
    let places: Vec<usize> = (0..world.slots.len()).collect();
    let (rows, weights) = ((&places[..], places.len()), world.weights().unwrap());
    let mut workspace = world.prepared(&layer);
    let run = world.call(&layer, &mut workspace, rows, true, weights, Some(tables));
    run.unwrap()
}

#[test]
fn any_step_is_rotated_as_beforehand() {
    for requests in [
        &[(1, 5), (1, 1), (2, 9), (1, 0)][..],
        &[(9, 9), (1, 7), (7, 20), (2, 12), (1, 0)],
        &[(12, 12)],
    ] {
        for style in [RotaryStyle::Interleaved, RotaryStyle::Halves] {
            let rope = YARN.with_style(style);
            let world = World::new(&Case::small(requests));
            let mut turned = World::new(&Case::small(requests));
            turn(&mut turned, &rope);
            let tables = RotaryTables::new(&Cpu::new(), &rope, 8, 20).unwrap();
            let rotated = run(&world, &tables);
            assert!(
                rotated == turned.run(&cpu_layer(&turned.case)),
                "{requests:?}"
            );
            // The rotation changes the result.
            assert!(world.run(&cpu_layer(&world.case)).cache != rotated.cache);
        }
    }
}

#[test]
fn no_rotary_part() {
    let case = Case {
        dims: MlaDims::new(32, HeadDims::new(16, 0, 16)),
        ..Case::small(&[(9, 12), (1, 7)])
    };
    let world = World::new(&case);
    let tables = RotaryTables::new(&Cpu::new(), &YARN, 0, 1).unwrap();
    assert!(run(&world, &tables).out == world.run(&cpu_layer(&case)).out);
}
