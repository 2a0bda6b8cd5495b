//! Random selections, either correct or with one fault. A faulty one gives an error, leaves the
//! cache untouched, and makes no lists. A correct one makes the same lists as the call with
//! contiguous tensors.

use fastrand::Rng;
use mla_cpu::Cpu;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, Indexer};
use mla_runtime::model::{DType, IndexerConfig};
use mla_runtime::tensor::{Layout, TensorRef};

use crate::layer::{Lab, PAGE, PAGES, RANK, indexer_config, limits, problem};

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
    let (mut refused, mut right) = (0, 0);
    for case in 0..CASES {
        let topk = rng.u32(1..40);
        let mut lab = Lab::new(indexer_config(topk));
        let mut world = lab.world(rng.u64(..));
        let step = world.step([rng.u32(..30), rng.u32(..4), rng.u32(1..9)]);
        // Every key that the step reads is written in the step, because there is no context.
        lab.run(&mut world, &step);
        let expected = lab.lists();

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
        lab.own = match fault {
            // The workspace belongs to another indexer (6), or is for fewer tokens (7).
            Some(6) => {
                let config = indexer_config(topk + 1);
                let other = Indexer::new(&Cpu::new(), &config, &problem()).unwrap();
                other.workspace(&limits()).unwrap()
            }
            Some(7) => {
                let few = mla_runtime::backend::StepLimits::new(1, 1, 1).with_decode_query_len(1);
                lab.indexer.workspace(&few).unwrap()
            }
            _ => lab.indexer.workspace(&limits()).unwrap(),
        };
        if fault == Some(8) {
            // Another step is prepared.
            let next = world.step([1, 0, 0]);
            lab.prepare(&world, &next);
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
        match lab.indexer.select(&lab.space, &mut lab.own, call) {
            Err(error) => {
                refused += 1;
                let said = error.to_string();
                assert!(fault.is_some(), "case {case}: {said}");
                assert!(
                    said.contains(": given ") && said.contains(", accepted "),
                    "{said}"
                );
                assert_eq!(cache, before, "case {case}: written although {said}");
                assert!(lab.own.lists(&lab.space).is_err(), "case {case}: {said}");
            }
            Ok(()) => {
                right += 1;
                assert_eq!(lab.lists(), expected, "case {case}, {fault:?}");
            }
        }
    }
    println!("{right} right, {refused} refused");
    assert!(
        right > CASES / 3 && refused > CASES / 4,
        "{right} right, {refused} refused"
    );
}
