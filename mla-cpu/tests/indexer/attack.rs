//! Random selections, either correct or with one fault. A faulty one gives an error, leaves the
//! cache untouched, and makes no lists. A correct one makes the same lists as the call with
//! contiguous tensors.

use fastrand::Rng;
use mla_cpu::Cpu;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, Indexer};
use mla_runtime::model::{DType, IndexerConfig};
use mla_runtime::tensor::{Layout, TensorRef};

use crate::layer::{PAGE, PAGES, RANK, World, indexer_config, layer, limits, lists_of};

const CASES: usize = 400;

/// A tensor with gaps of NaN between its rows, or with another shape or dtype than the call needs.
struct Tensor {
    memory: Vec<f32>,
    layout: Layout,
    offset: usize,
}

impl Tensor {
    fn new(rng: &mut Rng, values: &[f32], [a, b, c]: [usize; 3], fault: bool) -> Self {
        let gap = rng.usize(..3);
        let offset = rng.usize(..3);
        let stride = c + gap;
        let mut memory = vec![f32::NAN; offset + a * b * stride + 64];
        for (row, values) in values.chunks(c).enumerate() {
            memory[offset + row * stride..][..c].copy_from_slice(values);
        }
        let mut layout = Layout::contiguous(DType::F32, [a, b, c]);
        layout.strides = [b * stride, stride, 1];
        if fault {
            match rng.u8(..4) {
                0 => layout.shape[rng.usize(..3)] += 1,
                1 => layout.shape[rng.usize(..3)] -= 1,
                // Keys, their norm and head weights may have any dtype.
                2 if c == RANK || c == 128 => layout.dtype = DType::F16,
                _ => layout.shape.swap(0, 2),
            }
        }
        Self {
            memory,
            layout,
            offset: 4 * offset,
        }
    }

    fn view(&self) -> Option<TensorRef<'_, Cpu>> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.memory);
        TensorRef::new(&bytes[self.offset..], self.layout).ok()
    }
}

/// A layout of the index cache. Without a fault only the stride of its pages varies. With a fault
/// its number of pages, their size or its width is wrong.
fn cache_layout(rng: &mut Rng, fault: bool) -> IndexCacheLayout {
    let layout = IndexCacheLayout::contiguous(&indexer_config(1), PAGES, PAGE);
    let layout = layout.with_page_stride(layout.page_stride + 4 * rng.usize(..3));
    match (fault, rng.u8(..4)) {
        (false, _) => layout,
        (true, 0) => IndexCacheLayout::contiguous(&indexer_config(1), 1, PAGE),
        (true, 1) => IndexCacheLayout::contiguous(&indexer_config(1), 2 * PAGES, PAGE / 2),
        (true, 2) => IndexCacheLayout::contiguous(&IndexerConfig::new(4, 16, 8, 1), PAGES, PAGE),
        (true, _) => layout.with_width(24),
    }
}

#[test]
fn random_selections() {
    let mut rng = Rng::with_seed(9);
    let sparse = layer(true);
    let problem = &sparse.config().problem;
    let (mut refused, mut right) = (0, 0);
    for case in 0..CASES {
        let topk = rng.u32(1..40);
        let indexer = Indexer::new(&Cpu::new(), &indexer_config(topk), problem).unwrap();
        let mut world = World::new(rng.u64(..));
        let mut space = sparse.workspace(&limits()).unwrap();
        let mut own = indexer.workspace(&limits()).unwrap();
        let step = world.step([rng.u32(..30), rng.u32(..4), rng.u32(1..9)]);
        world.prepare(&sparse, &mut space, &step);
        // Every key that the step reads is written in the step, because there is no context.
        let mut expected_cache = world.index_cache.clone();
        let call = world.index_call(&step, &mut expected_cache);
        indexer.select(&space, &mut own, call).unwrap();
        let expected = lists_of(&own, &space);

        let fault = (rng.u8(..2) == 0).then(|| rng.u8(..9));
        let tokens = step.tokens();
        let parts: [(&[f32], [usize; 3]); 5] = [
            (&step.query_latent, [tokens, 1, RANK]),
            (&world.query_weights, [1, RANK, 128]),
            (&step.keys, [tokens, 1, 32]),
            (&step.head_weights, [tokens, 1, 4]),
            (&world.norm[0], [1, 1, 32]),
        ];
        let tensors: Vec<Tensor> = parts
            .iter()
            .enumerate()
            .map(|(at, (values, shape))| {
                Tensor::new(&mut rng, values, *shape, fault == Some(at as u8))
            })
            .collect();
        let layout = cache_layout(&mut rng, fault == Some(5));
        let mut cache = vec![u32::MAX; 2 * PAGES * PAGE * 40 / 4];
        let before = cache.clone();
        let mut other = match fault {
            // The workspace belongs to another indexer (6), or is for fewer tokens (7).
            Some(6) => {
                let config = indexer_config(topk + 1);
                let other = Indexer::new(&Cpu::new(), &config, problem).unwrap();
                other.workspace(&limits()).unwrap()
            }
            Some(7) => {
                let few = mla_runtime::backend::StepLimits::new(1, 1, 1).with_decode_query_len(1);
                indexer.workspace(&few).unwrap()
            }
            _ => indexer.workspace(&limits()).unwrap(),
        };
        if fault == Some(8) {
            // Another step is prepared.
            let next = world.step([1, 0, 0]);
            world.prepare(&sparse, &mut space, &next);
        }
        let views: Option<Vec<_>> = tensors.iter().map(Tensor::view).collect();
        let made = IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout);
        let (Some(views), Ok(made)) = (views, made) else {
            // The view was already refused.
            assert!(fault.is_some(), "case {case}");
            refused += 1;
            continue;
        };
        let mut unused = before.clone();
        let mut call = world.index_call(&step, &mut unused);
        call.query_latent = views[0];
        call.query_weights = views[1];
        call.keys = views[2];
        call.head_weights = views[3];
        call.norm[0] = views[4];
        call.cache = made;
        match indexer.select(&space, &mut other, call) {
            Err(error) => {
                refused += 1;
                let said = error.to_string();
                assert!(fault.is_some(), "case {case}: {said}");
                assert!(
                    said.contains(": given ") && said.contains(", accepted "),
                    "{said}"
                );
                assert_eq!(cache, before, "case {case}: written although {said}");
                assert!(other.lists(&space).is_err(), "case {case}: {said}");
            }
            Ok(()) => {
                right += 1;
                assert_eq!(lists_of(&other, &space), expected, "case {case}, {fault:?}");
            }
        }
    }
    println!("{right} right, {refused} refused");
    assert!(
        right > CASES / 3 && refused > CASES / 4,
        "{right} right, {refused} refused"
    );
}
