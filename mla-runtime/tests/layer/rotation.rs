//! Calls with queries and keys that are not rotated yet, against those whose tensors were rotated
//! beforehand.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::layer::{MlaLayer, UnrotatedCall};
use mla_runtime::model::{HeadDims, MlaDims, Rope, RopeScaling, RotaryStyle, Yarn};
use mla_runtime::tensor::{CacheMut, LseLayout, LseMut, Memory, RotaryTables, TensorMut};

use crate::world::{Case, World};

const YARN: Rope = Rope::plain(100.0).with_scaling(RopeScaling::Yarn(
    Yarn::new(4.0, Some(32)).with_mscale(1.0, 0.5),
));

/// The position of each token of a batch.
fn positions(world: &World) -> Vec<usize> {
    let requests = world.requests.iter();
    let of = |r: &mla_runtime::batch::Request| {
        let first = r.kv.saturating_sub(r.q) as usize;
        first..first + r.q as usize
    };
    requests.flat_map(of).collect()
}

/// Turns the queries and keys of a batch, by the formula.
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

type Layer = MlaLayer<CpuPrefill, CpuDecode>;

/// The output, the log-sum-exp and the cache of a call that rotates.
fn run(world: &World, tables: &RotaryTables<Cpu>) -> Result<(Vec<f32>, Vec<f32>, Vec<u8>)> {
    let layer = Layer::of(&world.device, &world.case.config())?;
    let mut workspace = layer.workspace(&world.case.limits())?;
    world.prepare(&layer, &mut workspace)?;
    let (tokens, heads) = (world.slots.len(), world.case.heads as usize);
    let head = world.case.dims.head;
    let [qk, rope, v] = [head.qk(), head.rope, head.v].map(|n| n as usize);
    let floats =
        |owned: &crate::world::Owned| owned.values.iter().map(|v| *v as f32).collect::<Vec<_>>();
    let (mut query, mut keys) = (floats(&world.query), floats(&world.rope));
    let (mut out, mut lse) = (
        vec![f32::NAN; tokens * heads * v],
        vec![f32::NAN; heads * tokens],
    );
    let mut cache = world.device.allocate(world.cache.len())?;
    world
        .device
        .upload(&world.cache, Cpu::bytes_mut(&mut cache))?;
    layer.forward_unrotated(
        &mut workspace,
        UnrotatedCall::new(
            world.weights()?,
            TensorMut::from_slice(&mut query, [tokens, heads, qk])?,
            world.latent.view(),
            TensorMut::from_slice(&mut keys, [tokens, 1, rope])?,
            tables.rotation()?,
            CacheMut::new(Cpu::bytes_mut(&mut cache), world.cache_layout)?,
            TensorMut::from_slice(&mut out, [tokens, heads, v])?,
        )
        .with_lse(LseMut::new(
            bytemuck::cast_slice_mut(&mut lse),
            LseLayout::heads_first(heads, tokens),
        )?),
    )?;
    Ok((out, lse, Cpu::bytes(&cache).to_vec()))
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
            let tables = RotaryTables::new(&world.device, &rope, 8, 20).unwrap();
            let (out, lse, cache) = run(&world, &tables).unwrap();
            let layer = Layer::of(&turned.device, &turned.case.config()).unwrap();
            let expected = turned.run(&layer);
            assert!(
                bytemuck::cast_slice::<f32, u8>(&out) == expected.out,
                "{requests:?}"
            );
            assert!(bytemuck::cast_slice::<f32, u8>(&lse) == expected.lse);
            assert!(cache == expected.cache);
            // The rotation is not nothing.
            let untouched = world.run(&Layer::of(&world.device, &world.case.config()).unwrap());
            assert!(untouched.cache != cache);
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
    let tables = RotaryTables::new(&world.device, &YARN, 0, 1).unwrap();
    let (out, _, _) = run(&world, &tables).unwrap();
    let layer = Layer::of(&world.device, &case.config()).unwrap();
    assert!(bytemuck::cast_slice::<f32, u8>(&out) == world.run(&layer).out);
}
