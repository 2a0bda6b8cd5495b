//! Tests of the engine on the CPU: the tokens of a request do not depend on others, and no page is
//! lost.

use std::collections::BTreeMap;

use engine::config::Config;
use engine::engine::{Engine, Event};
use engine::error::Result;
use engine::request::{Ending, RequestId};
use engine::runner::{Brought, Runner, Size};
use mla_cpu::Cpu;

/// A model of two layers, small enough for hundreds of steps in a test.
const TINY: &str = r#"{
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    "num_hidden_layers": 2, "num_attention_heads": 3, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
}"#;

const SIZE: Size = Size {
    pages: 96,
    page_size: 4,
    requests: 8,
    tokens: 24,
    max_len: 96,
    drafts: 3,
    batch_invariant: true,
};

fn tiny(size: Size) -> Engine<Cpu> {
    let config = Config::new(TINY).unwrap();
    Engine::new(&Cpu::new(), &config, &size, 7).unwrap()
}

/// The generated tokens of each request, and the way it ended.
#[derive(Default)]
struct Generated {
    tokens: BTreeMap<RequestId, Vec<u32>>,
    ended: BTreeMap<RequestId, Ending>,
}

impl Generated {
    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Tokens(id, tokens) => self.tokens.entry(id).or_default().extend(tokens),
                Event::Ended(id, ending) => {
                    assert_eq!(self.ended.insert(id, ending), None, "{id:?} ended twice");
                }
            }
        }
    }
}

/// Runs all requests to their ends, within a limited number of steps.
fn run(engine: &mut Engine<Cpu>, generated: &mut Generated, max: usize) -> Result<()> {
    for _ in 0..max {
        generated.take(engine.step()?);
        if engine.is_idle() {
            return Ok(());
        }
    }
    panic!("not at its end after {max} steps");
}

fn assert_nothing_lost(engine: &Engine<Cpu>) {
    let pages = engine.scheduler().pages();
    assert_eq!((pages.used(), pages.available()), (0, pages.count()));
}

/// Returns prompts of many lengths. Some have the same beginning, two are equal, and one fills its
/// pages.
fn prompts() -> Vec<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(3);
    let mut of = |length: usize| (0..length).map(|_| random.u32(0..64)).collect::<Vec<u32>>();
    let common = of(13);
    let mut prompts: Vec<Vec<u32>> = [1, 5, 40, 9, 30].map(&mut of).into();
    prompts.extend([3, 11, 20].map(|more| [common.clone(), of(more)].concat()));
    prompts.push(prompts[5].clone());
    let whole = common[..12].to_vec();
    prompts.extend([whole.clone(), whole]);
    prompts
}

/// Returns the output for each prompt alone in a fresh engine. It has no drafts, and a whole prompt
/// fits in one step.
fn alone(prompts: &[Vec<u32>], more: usize) -> Vec<Vec<u32>> {
    let size = Size {
        drafts: 0,
        tokens: SIZE.max_len,
        requests: 1,
        ..SIZE
    };
    let one = |prompt: &Vec<u32>| {
        let (mut engine, mut generated) = (tiny(size), Generated::default());
        let id = engine.submit(prompt, more).unwrap();
        run(&mut engine, &mut generated, more).unwrap();
        assert_nothing_lost(&engine);
        generated.tokens.remove(&id).unwrap()
    };
    prompts.iter().map(one).collect()
}

/// Returns the logits of requests in steps from `start` on. Each request brings its prompt at once,
/// and then one generated token per step.
fn logits(requests: &[(&[u32], usize)]) -> Vec<Vec<Vec<u8>>> {
    let config = Config::new(TINY).unwrap();
    let size = Size { tokens: 96, ..SIZE };
    let mut runner = Runner::new(&Cpu::new(), &config, &size, 7).unwrap();
    let mut logits = vec![Vec::new(); requests.len()];
    let mut tokens: Vec<Vec<u32>> = requests.iter().map(|(prompt, _)| prompt.to_vec()).collect();
    let pages: Vec<Vec<i32>> = (0..requests.len() as i32)
        .map(|request| (request * 15..(request + 1) * 15).rev().collect())
        .collect();
    for step in 0..20 {
        let ran: Vec<usize> = (0..requests.len())
            .filter(|at| step >= requests[*at].1)
            .collect();
        let brought = |at: &usize| Brought {
            tokens: match step == requests[*at].1 {
                true => &tokens[*at],
                false => &tokens[*at][tokens[*at].len() - 1..],
            },
            total: tokens[*at].len(),
            pages: &pages[*at],
        };
        let brought: Vec<_> = ran.iter().map(brought).collect();
        let said = runner.run(&brought).unwrap();
        for (place, at) in ran.into_iter().enumerate() {
            logits[at].push(runner.logits(place).unwrap());
            tokens[at].extend(said[place].last());
        }
    }
    logits
}

#[test]
fn each_request_has_the_bits_that_it_has_alone() {
    let prompts = prompts();
    let starts = [0, 2, 2, 5, 9, 1];
    let together = prompts.iter().zip(starts);
    let together: Vec<_> = together
        .map(|(prompt, start)| (&prompt[..], start))
        .collect();
    for (request, logits_of) in together.iter().zip(logits(&together)) {
        let alone = logits(&[*request]).remove(0);
        assert!(alone == logits_of, "a prompt of {} tokens", request.0.len());
        assert_eq!(alone.len(), 20 - request.1);
    }
}

#[test]
fn a_batch_says_what_each_request_says_alone() {
    let prompts = prompts();
    let expected = alone(&prompts, 20);
    // There is room for everything, or a step has few tokens, or there are so few pages that
    // requests release theirs.
    for size in [
        SIZE,
        Size { tokens: 8, ..SIZE },
        Size { pages: 20, ..SIZE },
        Size { drafts: 0, ..SIZE },
        Size {
            page_size: 1,
            pages: 500,
            ..SIZE
        },
    ] {
        let (mut engine, mut generated) = (tiny(size), Generated::default());
        let mut ids = Vec::new();
        // These requests arrive while others run.
        for prompt in &prompts {
            ids.push(engine.submit(prompt, 20).unwrap());
            generated.take(engine.step().unwrap());
        }
        run(&mut engine, &mut generated, 2000).unwrap();
        for (id, expected) in ids.iter().zip(&expected) {
            assert_eq!(generated.tokens[id], *expected, "{id:?} of {size:?}");
            assert_eq!(generated.ended[id], Ending::Length);
        }
        assert_nothing_lost(&engine);
        let metrics = engine.metrics();
        assert_eq!((metrics.finished, metrics.generated_tokens), (11, 220));
        assert!(metrics.shared_tokens > 0, "{metrics}");
        assert_eq!(metrics.preemptions > 0, size.pages == 20, "{metrics}");
        assert_eq!(metrics.accepted_drafts > 0, size.drafts > 0, "{metrics}");
    }
}

#[test]
fn a_prompt_of_whole_shared_pages_writes_to_a_copy() {
    let prompt = &prompts()[9];
    let expected = alone(std::slice::from_ref(prompt), 20);
    let (mut engine, mut generated) = (tiny(SIZE), Generated::default());
    for round in 0..3 {
        let id = engine.submit(prompt, 20).unwrap();
        run(&mut engine, &mut generated, 30).unwrap();
        assert_eq!(generated.tokens[&id], expected[0]);
        // The model computes its last token again, in order to get the next one.
        let metrics = engine.metrics();
        assert_eq!(
            (metrics.shared_tokens, metrics.copied_pages),
            (11 * round, round)
        );
        assert_nothing_lost(&engine);
    }
}

#[test]
fn a_cancelled_request_gives_its_pages_back_and_leaves_the_others_alone() {
    let prompts = prompts();
    let expected = alone(&prompts[2..5], 20);
    let size = Size {
        requests: 3,
        ..SIZE
    };
    let (mut engine, mut generated) = (tiny(size), Generated::default());
    let submit = |engine: &mut Engine<Cpu>, at: usize| engine.submit(&prompts[at], 20).unwrap();
    let ids = [2, 3, 4].map(|at| submit(&mut engine, at));
    let waits = submit(&mut engine, 0);
    for _ in 0..4 {
        generated.take(engine.step().unwrap());
    }
    // One request is running, and another has not begun.
    assert!(engine.scheduler().get(ids[1]).is_some() && engine.scheduler().get(waits).is_none());
    let used = engine.scheduler().pages().used();
    generated.take(engine.cancel(ids[1]).into_iter().collect());
    assert!(engine.scheduler().pages().used() < used);
    generated.take(engine.cancel(waits).into_iter().collect());
    assert_eq!((engine.cancel(waits), engine.cancel(ids[1])), (None, None));
    run(&mut engine, &mut generated, 200).unwrap();
    assert_eq!(generated.ended[&ids[1]], Ending::Cancelled);
    assert_eq!(generated.ended[&waits], Ending::Cancelled);
    for at in [0, 2] {
        assert_eq!(generated.tokens[&ids[at]], expected[at]);
    }
    assert!(
        generated
            .tokens
            .get(&ids[1])
            .is_none_or(|tokens| tokens.len() < 20)
    );
    assert_nothing_lost(&engine);
}

#[test]
fn what_cannot_be_served_is_refused_by_its_name() {
    let mut engine = tiny(Size { pages: 10, ..SIZE });
    for (prompt, more, message) in [
        // This request is longer than the cache, but within the limit of a request.
        (
            &[1; 39][..],
            2,
            "prompt: given 39 and 2 more, accepted at most 40 tokens in all",
        ),
        (&[], 2, "prompt: given no tokens, accepted 1 and up"),
        (
            &[3, 64],
            2,
            "prompt: given token 64, accepted below the vocabulary's 64",
        ),
        (&[3], 0, "max_tokens: given 0, accepted 1 and up"),
        (
            &[3],
            usize::MAX,
            "prompt: given 1 and 18446744073709551615 more, accepted at most 40 tokens in all",
        ),
    ] {
        let error = engine.submit(prompt, more).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    // The longest request that fits uses every page.
    let mut generated = Generated::default();
    let id = engine.submit(&[1; 38], 2).unwrap();
    run(&mut engine, &mut generated, 10).unwrap();
    assert_eq!(generated.tokens[&id].len(), 2);
    assert_eq!(engine.metrics().pages, [10, 10]);
    assert_nothing_lost(&engine);
    // A request that has not begun is cancelled once.
    let id = engine.submit(&[3, 4], 2).unwrap();
    assert!(engine.cancel(id).is_some() && engine.cancel(id).is_none());
    assert!(engine.is_idle() && engine.step().unwrap().is_empty());
}

#[test]
fn sizes_that_make_no_sense_are_refused_by_their_name() {
    type Change = fn(&mut Size);
    let refusals: [(Change, &str); 6] = [
        (
            |size| size.tokens = 7,
            "tokens: given 7, accepted 8 to 2147483646: a token for each request",
        ),
        (
            |size| size.drafts = 24,
            "drafts: given 24, accepted 0 to 23: what a step has room for beside a token",
        ),
        (
            |size| size.pages = usize::MAX,
            "pages: given 18446744073709551615, accepted 1 to 2147483646",
        ),
        (
            |size| size.pages = 0,
            "pages: given 0, accepted 1 to 2147483646",
        ),
        (
            |size| size.page_size = (1 << 32) + 4,
            "page_size: given 4294967300, accepted 1 to 2147483646",
        ),
        (
            |size| size.max_len = 1 << 31,
            "max_len: given 2147483648, accepted 1 to 2147483646",
        ),
    ];
    let refused = |change: Change| {
        let mut size = SIZE;
        change(&mut size);
        let config = Config::new(TINY).unwrap();
        let engine = Engine::new(&Cpu::new(), &config, &size, 7);
        engine.err().unwrap().to_string()
    };
    for (change, message) in refusals {
        assert_eq!(refused(change), message);
    }
    // This page count is the largest that is accepted, but no machine has memory for it.
    let error = refused(|size| size.pages = Size::MAX);
    assert!(error.starts_with("memory: given a need of "), "{error}");
}

#[test]
fn the_model_that_is_shipped_runs() {
    let config = Config::new(engine::config::SMALL).unwrap();
    let size = Size {
        pages: 4,
        page_size: 64,
        requests: 2,
        tokens: 80,
        max_len: 128,
        drafts: 2,
        batch_invariant: false,
    };
    let mut engine = Engine::new(&Cpu::new(), &config, &size, 1).unwrap();
    let mut generated = Generated::default();
    let ids = [100, 3].map(|length| engine.submit(&vec![5; length], 4).unwrap());
    run(&mut engine, &mut generated, 20).unwrap();
    assert!(ids.iter().all(|id| generated.tokens[id].len() == 4));
    assert_nothing_lost(&engine);
}
