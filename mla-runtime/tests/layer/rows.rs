//! Tests rows in the engine's own order, with padding. The results must have the bits of packed
//! rows, which the oracle has checked, at the engine's places. Everything else must stay unchanged.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::{LayerCall, StepPlan, StepRequest, Workspace};
use mla_runtime::model::Rope;
use mla_runtime::tensor::{ArrayRef, CacheMut, RotaryTables, TensorMut, TensorRef};
use proptest::prelude::*;

use crate::rotation::turn;
use crate::world::{Case, Numbers, Outcome, UNTOUCHED, World, spread};
use crate::{CpuLayer, FORMATS, MIXED, cpu_layer, refused, run};

/// The row of each token.
fn places(world: &World, starts: &[usize]) -> Vec<usize> {
    let requests = world.requests.iter().zip(starts);
    requests
        .flat_map(|(request, start)| *start..start + request.q as usize)
        .collect()
}

/// Tensors in the engine's own order: the first row of each request, and the number of rows.
struct Own<'a> {
    world: &'a World,
    starts: &'a [usize],
    rows: usize,
}

impl<'a> Own<'a> {
    const fn new(world: &'a World, starts: &'a [usize], rows: usize) -> Self {
        Self {
            world,
            starts,
            rows,
        }
    }

    fn prepare(&self, layer: &CpuLayer) -> Result<Workspace<CpuPrefill, CpuDecode>> {
        let limits = self.world.case.limits().with_call_rows(self.rows);
        let mut workspace = layer.workspace(&limits)?;
        let plan = self.world.plan(&limits)?;
        workspace.prepare(layer, &plan.with_row_starts(self.starts, self.rows)?)?;
        Ok(workspace)
    }

    fn run(&self, layer: &CpuLayer, with_lse: bool, tables: Option<&RotaryTables<Cpu>>) -> Outcome {
        let mut workspace = self.prepare(layer).unwrap();
        let (places, weights) = (
            places(self.world, self.starts),
            self.world.weights().unwrap(),
        );
        let rows = (&places[..], self.rows);
        let run = self
            .world
            .call(layer, &mut workspace, rows, with_lse, weights, tables);
        run.unwrap()
    }

    /// The results of a packed run, moved to the places of this run.
    fn expected(&self, packed: &Outcome, with_lse: bool) -> Outcome {
        let case = &self.world.case;
        let (heads, v) = (case.heads as usize, case.dims.head.v as usize);
        let places = places(self.world, self.starts);
        let mut lse = vec![UNTOUCHED; 4 * heads * self.rows];
        if with_lse {
            let of_heads = packed.lse.chunks((4 * places.len()).max(1));
            for (to, from) in lse.chunks_mut((4 * self.rows).max(1)).zip(of_heads) {
                to.copy_from_slice(&spread(from, 4, &places, self.rows));
            }
        }
        let bytes = heads * v * case.dtype.bytes();
        Outcome {
            out: spread(&packed.out, bytes, &places, self.rows),
            lse,
            ..packed.clone()
        }
    }

    fn check(&self, layer: &CpuLayer, packed: &Outcome) {
        for with_lse in [true, false] {
            let outcome = self.run(layer, with_lse, None);
            assert!(
                outcome == self.expected(packed, with_lse),
                "rows {:?} of {} in {:?}",
                self.starts,
                self.rows,
                self.world.case
            );
        }
    }
}

/// The starts of the requests in an order drawn from `seed`, with at most `gap` rows between them.
fn shuffled(world: &World, seed: u64, gap: usize) -> (Vec<usize>, usize) {
    let mut numbers = Numbers::new(seed);
    let mut order: Vec<usize> = (0..world.requests.len()).collect();
    numbers.shuffle(&mut order);
    let (mut starts, mut end) = (vec![0; order.len()], 0);
    for request in order {
        end += numbers.next() as usize % (gap + 1);
        starts[request] = end;
        end += world.requests[request].q as usize;
    }
    (starts, end + gap)
}

#[test]
fn padded_equals_packed() {
    for (dtype, kv_format) in FORMATS {
        let case = Case {
            dtype,
            kv_format,
            heads: 3,
            ..Case::small(MIXED)
        };
        let (world, packed) = run(&case);
        let max_len = MIXED.iter().map(|(q, _)| *q as usize).max().unwrap();
        let count = world.requests.len();
        // The engine's order is the reverse of the step's order.
        let starts: Vec<usize> = (0..count).rev().map(|at| at * max_len).collect();
        let own = Own::new(&world, &starts, count * max_len);
        let layer = cpu_layer(&case);
        assert!(!own.prepare(&layer).unwrap().rows_in_order());
        own.check(&layer, &packed);
    }
}

#[test]
fn ordered_rows_are_not_copied() {
    for (requests, before, behind) in [
        (MIXED, 0, 0),
        (MIXED, 5, 3),
        (&[(1, 9), (1, 4), (1, 30)][..], 0, 2),
        (&[(1, 9)], 7, 0),
        // A prompt with padding after it.
        (&[(21, 40)], 0, 11),
    ] {
        let case = Case::small(requests);
        let (world, packed) = run(&case);
        let mut end = before;
        let starts = world.requests.iter().map(|request| {
            end += request.q as usize;
            end - request.q as usize
        });
        let starts: Vec<usize> = starts.collect();
        let own = Own::new(&world, &starts, end + behind);
        let layer = cpu_layer(&case);
        let workspace = own.prepare(&layer).unwrap();
        assert!(workspace.rows_in_order());
        assert_eq!(workspace.call_rows(), end + behind);
        own.check(&layer, &packed);
        // Without rows out of order, no memory is reserved for an index.
        let mut plain = layer.workspace(&case.limits()).unwrap();
        assert_eq!(plain.plan().packed_bytes, 0);
        let plan = world.plan(&case.limits()).unwrap();
        let plan = plan.with_row_starts(&starts, own.rows).unwrap();
        plain.prepare(&layer, &plan).unwrap();
    }
}

#[test]
fn unrotated_rows() {
    let rope = Rope::plain(100.0);
    for requests in [
        &[(1, 5), (1, 1), (2, 9)][..],
        &[(9, 9), (1, 7), (7, 20), (2, 12)],
        &[(12, 12)],
    ] {
        let case = Case::small(requests);
        let layer = cpu_layer(&case);
        let (mut world, mut turned) = (World::new(&case), World::new(&case));
        turn(&mut turned, &rope);
        world.set_gate(1);
        turned.set_gate(1);
        let tables = RotaryTables::new(&Cpu::new(), &rope, 8, 20).unwrap();
        let packed = turned.run(&layer);
        turned.check(&packed).unwrap();
        for (starts, rows) in [shuffled(&world, 5, 3), shuffled(&world, 6, 0)] {
            let own = Own::new(&world, &starts, rows);
            let outcome = own.run(&layer, true, Some(&tables));
            assert!(
                outcome == own.expected(&packed, true),
                "{requests:?} {starts:?}"
            );
        }
    }
}

/// Tokens of a sparse layer use the same lists. The inputs for making lists are packed by the
/// step's index.
#[test]
fn sparse_rows() {
    for dense_within in [0, 40] {
        let case = Case {
            sparse: true,
            dense_within,
            threshold: if dense_within == 0 { 100 } else { 4 },
            ..Case::small(MIXED)
        };
        let mut world = World::new(&case);
        world.sinks = Some(vec![-0.5, 2.5, f32::INFINITY, 0.0]);
        world.set_gate(16);
        let layer = cpu_layer(&case);
        let packed = world.run(&layer);
        world.check(&packed).unwrap();
        for (starts, rows) in [shuffled(&world, 5, 3), shuffled(&world, 6, 0)] {
            Own::new(&world, &starts, rows).check(&layer, &packed);
        }
    }
}

#[test]
fn rows_are_packed() {
    let case = Case::small(&[(1, 9), (3, 5), (6, 6)]);
    let (world, layer) = (World::new(&case), cpu_layer(&case));
    // One order needs an index. In the other one the rows are contiguous, after two rows of
    // padding.
    for (starts, rows) in [([9, 0, 3], 12), ([2, 3, 6], 13)] {
        let own = Own::new(&world, &starts, rows);
        let workspace = own.prepare(&layer).unwrap();
        let places = places(&world, &starts);
        let from: Vec<f32> = (0..rows * 6).map(|value| value as f32).collect();
        let mut to = vec![0.0f32; 10 * 6];
        let pack = |from: [usize; 3], to: &mut [f32]| {
            let values: Vec<f32> = (0..from.iter().product()).map(|at| at as f32).collect();
            let to = TensorMut::from_slice(to, [10, 2, 3]).unwrap();
            layer.pack_rows(
                &workspace,
                TensorRef::from_slice(&values, from).unwrap(),
                to,
            )
        };
        pack([rows, 2, 3], &mut to).unwrap();
        for (row, place) in to.chunks(6).zip(&places) {
            assert_eq!(row, &from[place * 6..][..6]);
        }
        let said = refused(pack([rows + 1, 2, 3], &mut to));
        assert!(said.starts_with("from: given f32 ["), "{said}");
    }
}

/// A call on packed tensors of four heads.
fn packed_call<'a>(
    world: &'a World,
    cache: &'a mut [u8],
    out: &'a mut [f32],
) -> LayerCall<'a, Cpu> {
    let shape = [world.slots.len(), 4, 16];
    LayerCall::new(
        world.weights().unwrap(),
        world.query.view(),
        [world.latent.view(), world.rope.view()],
        CacheMut::new(cache, world.cache_layout).unwrap(),
        TensorMut::from_slice(out, shape).unwrap(),
    )
}

#[test]
fn own_positions() {
    let case = Case::small(&[(1, 9), (3, 5)]);
    let world = World::new(&case);
    let layer = cpu_layer(&case);
    let own = Own::new(&world, &[3, 0], 4);
    let mut workspace = own.prepare(&layer).unwrap();
    let tables = RotaryTables::new(&Cpu::new(), &Rope::plain(1e4), 8, 20).unwrap();
    // There is one position per token, but nothing says in which order.
    let positions = [2i64, 3, 4, 8];
    let rotation = tables.rotation().unwrap();
    let rotation = rotation.with_positions(ArrayRef::from_slice(&positions));
    let mut cache = world.cache.clone();
    let mut out = vec![0.0f32; 4 * 4 * 16];
    let call = packed_call(&world, &mut cache, &mut out);
    assert_eq!(
        refused(layer.forward(&mut workspace, call.with_rotary(rotation))),
        "rotary.positions: given of the caller's own, for rows in an order of the engine's own, \
         accepted none: each token then has its position in its request"
    );
    assert!(cache == world.cache && out.iter().all(|value| *value == 0.0));
}

/// An engine has its own integer type of pages, padded tensors, and its own order.
#[test]
fn planned_rows() {
    let limits = StepLimits::new(6, 64, 3)
        .with_decode_query_len(4)
        .with_context_rows(16)
        .with_call_rows(64);
    let problem = Case::small(&[]).config().problem.with_page_size(16);
    let tables: [&[usize]; 4] = [&[5, 6], &[1, 2, 3], &[7, 8], &[4]];
    let requests = [(20, 20), (1, 33), (10, 30), (3, 9)];
    let requests: Vec<StepRequest<'_, usize>> = requests
        .iter()
        .zip(tables)
        .map(|((new, total), pages)| StepRequest::new(*new, *total, pages))
        .collect();
    let plan =
        |requests: &[StepRequest<'_, usize>]| StepPlan::within(&problem, &limits, 4, requests);
    let step = plan(&requests).unwrap();
    assert_eq!((step.tensor_rows(), step.rows_in_order()), (34, true));

    let padded = step.clone().with_padded_rows(20).unwrap();
    let rows: Vec<_> = (0..4).map(|request| padded.rows(request)).collect();
    assert_eq!(rows, [0..20, 20..21, 40..50, 60..63]);
    assert_eq!((padded.tensor_rows(), padded.rows_in_order()), (80, false));
    let last: Vec<_> = padded.last_rows().collect();
    assert_eq!(last, [Some(19), Some(20), Some(49), Some(62)]);
    assert_eq!(padded.order(), [1, 3, 2, 0]);

    let given = step.clone().with_rows_as_given().unwrap();
    let rows: Vec<_> = (0..4).map(|request| given.rows(request)).collect();
    assert_eq!(rows, [0..20, 20..21, 21..31, 31..34]);
    assert_eq!((given.tensor_rows(), given.rows_in_order()), (34, false));

    // The padding of a graph comes after the engine's own requests, and decodes are in order.
    let decodes = [
        StepRequest::new(1, 5, tables[0]),
        StepRequest::new(1, 33, tables[1]),
    ];
    let graph = plan(&decodes).unwrap().padded_to(4).unwrap();
    let graph = graph.with_padded_rows(1).unwrap();
    assert_eq!((graph.rows(0), graph.rows(1)), (0..1, 1..2));
    assert_eq!((graph.tensor_rows(), graph.rows_in_order()), (4, true));

    assert_eq!(
        refused(step.clone().with_padded_rows(9)),
        "max_len: given 9, accepted at least the 10 new tokens of request 2"
    );
    assert_eq!(
        refused(padded.padded_to(6)),
        "rows: given those of a step, accepted none yet: padded_to comes before rows of the \
         engine's own"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// With any order, any gaps and any step, the rows have the same bits.
    #[test]
    fn any_rows_have_the_packed_bits(
        requests in proptest::collection::vec((1u32..12, 0u32..40), 1..7),
        threshold in 0u32..6,
        seed in 0u64..1000,
        gap in 0usize..4,
    ) {
        let requests: Vec<(u32, u32)> = requests
            .into_iter()
            .map(|(q, context)| (q, q + context))
            .collect();
        let case = Case { threshold, seed, ..Case::small(&requests) };
        let (world, packed) = run(&case);
        let (starts, rows) = shuffled(&world, seed, gap);
        Own::new(&world, &starts, rows).check(&cpu_layer(&case), &packed);
    }
}

#[test]
fn contradicting_rows_are_refused() {
    let case = Case::small(&[(1, 9), (3, 5), (6, 6)]);
    let world = World::new(&case);
    let layer = cpu_layer(&case);
    for (starts, room, message) in [
        (
            &[0, 1][..],
            0,
            "rows.starts: given 2 entries, accepted one for each of 3 requests, padding included",
        ),
        (
            &[0, 1, 5],
            0,
            "rows.starts: given 5 of request 2, which brings 6 tokens, accepted a start with 6 \
             rows from it on, of 10 in all",
        ),
        (
            &[0, usize::MAX, 4],
            0,
            "rows.starts: given 18446744073709551615 of request 1, which brings 3 tokens, accepted \
             a start with 3 rows from it on, of 10 in all",
        ),
        (
            &[9, 0, 3],
            9,
            "limits.call_rows: given 9, accepted at least the 10 rows of the step's tensors, whose \
             order is not that of the requests",
        ),
        (
            &[3, 1, 4],
            10,
            "rows.starts: given row 3 of two tokens, accepted rows that differ",
        ),
    ] {
        let limits = case.limits().with_call_rows(room);
        let mut workspace = layer.workspace(&limits).unwrap();
        let plan = world.plan(&limits).unwrap().with_row_starts(starts, 10);
        assert_eq!(
            refused(plan.and_then(|plan| workspace.prepare(&layer, &plan))),
            message
        );
    }
}

#[test]
fn wrong_row_count_is_refused() {
    let case = Case::small(&[(1, 9), (3, 5), (6, 6)]);
    let (world, _) = run(&case);
    let layer = cpu_layer(&case);
    let starts = [9, 0, 3];
    let own = Own::new(&world, &starts, 10);
    let mut workspace = own.prepare(&layer).unwrap();
    // The packed tensors have this number of rows, but a step of 12 rows has more.
    let wider = Own { rows: 12, ..own };
    let mut wider = wider.prepare(&layer).unwrap();
    assert_eq!(
        refused(world.forward(&layer, &mut wider, true)),
        "query: given f32 [10, 4, 24] strides [96, 24, 1], accepted f32 [12, 4, 24]"
    );
    // The parts of a layer support only packed rows.
    let mut cache = world.cache.clone();
    let mut out = vec![0.0f32; 10 * 4 * 16];
    let mut call = packed_call(&world, &mut cache, &mut out);
    for result in [
        layer.write_cache(&mut workspace, &mut call),
        layer.attend_absorbed(&mut workspace, &mut call),
        layer.attend_expanded(&mut workspace, &mut call),
    ] {
        assert_eq!(
            refused(result),
            "rows: given a step with padding or an order of the engine's own, accepted rows in the \
             order of the requests, without padding: `forward` takes others"
        );
    }
    assert!(cache == world.cache && out.iter().all(|value| *value == 0.0));
}

/// Tests block tables and slots in the integer types that engines use.
#[test]
fn pages_of_any_integer() {
    let case = Case::small(MIXED);
    let (world, expected) = run(&case);
    let layer = cpu_layer(&case);
    // Entries that no token needs may have any value of the type.
    let wide: Vec<i64> = world.tables.iter().map(|page| i64::from(*page)).collect();
    let words: Vec<u32> = world.tables.iter().map(|page| *page as u32).collect();
    let sizes: Vec<usize> = world.tables.iter().map(|page| *page as usize).collect();
    let slots: Vec<usize> = world.slots.iter().map(|slot| *slot as usize).collect();
    let slot_words: Vec<u32> = world.slots.iter().map(|slot| *slot as u32).collect();
    let limits = case.limits();
    let mut workspace = layer.workspace(&limits).unwrap();
    let sizes = world.plan_pages(&limits, &sizes);
    let words = world.plan_pages(&limits, &words);
    for plan in [
        sizes.and_then(|plan| plan.with_slots(&slots)),
        words.and_then(|plan| plan.with_slots(&slot_words)),
        world.plan_pages(&limits, &wide),
    ] {
        workspace.prepare(&layer, &plan.unwrap()).unwrap();
        assert!(world.forward(&layer, &mut workspace, true).unwrap() == expected);
    }

    let problem = case.config().problem;
    let plan = |pages: &[u64]| {
        StepPlan::in_order(&problem, &limits, 1, 0, &[StepRequest::new(1, 5, pages)])
    };
    for page in [1 << 31, u64::MAX] {
        let message =
            format!("requests.pages: given {page} at [0][1], accepted a page, at most 2147483647");
        assert_eq!(refused(plan(&[0, page])), message);
    }
    // The slot of token 4 is the first of page 1.
    assert_eq!(
        refused(plan(&[0, 1]).unwrap().with_slots(&[u64::MAX])),
        "slots: given 18446744073709551615 of token 0, accepted 4, where the block table has it, \
         or −1"
    );
}
