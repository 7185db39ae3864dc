//! A step of decoding requests does not allocate once warm, but for the logits, which are the model's.

#![allow(clippy::unwrap_used)]

use std::alloc::System;

use attn_metadata::{HeadShape, HostDevice, Layer, LayerParams};
use engine::lm::{ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};
use engine::sample::SamplingParams;
use engine::serve::{RequestSpec, SchedulerConfig, Session, SessionConfig};
use kvpool::{ExtraKey, KvFormat, PageSize, PrefixConfig};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const VOCAB: usize = 8;
const PAGE: u32 = 64;

/// Allocations and reallocations of a region.
fn num_allocations(region: &Region<'_, System>) -> usize {
    let change = region.change();
    change.allocations + change.reallocations
}

/// A model that computes nothing, and counts what its logits allocate.
struct Blank {
    layers: Vec<Layer>,
    num_allocations: usize,
}

impl LanguageModel for Blank {
    fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_len(&self) -> usize {
        4096
    }

    fn forward(&mut self, input: ModelInput<'_>, _: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        let region = Region::new(ALLOCATOR);
        let logits = Logits::new(vec![0.0; input.logit_rows.len() * VOCAB], VOCAB);
        self.num_allocations += num_allocations(&region);
        Ok(logits)
    }
}

/// Steps until everything that is kept from step to step has its size: tables are kept in two places in turn.
const STEPS_TO_WARM: usize = 2;

/// Allocations of a hundred decoding steps, but for those that take pages or are the first ones with longer tables.
fn allocations_of_a_hundred_steps() -> usize {
    let layer = Layer::new(LayerParams::causal(HeadShape::new(4, 2, 16))).unwrap();
    let mut model = Blank { layers: vec![layer], num_allocations: 0 };
    let config = SessionConfig {
        page_size: PageSize::new(PAGE).unwrap(),
        num_pages: 1024,
        kv_format: KvFormat::F32,
        scheduler: SchedulerConfig { max_step_tokens: 1 << 16, ..SchedulerConfig::default() },
        backend: "cpu".to_owned(),
        device: HostDevice::with_threads(1),
        prefix_cache: Some(PrefixConfig::default()),
        verify_every: 0,
    };
    let mut session = Session::new(&model, &config).unwrap();
    for i in 0..100 {
        session
            .submit(RequestSpec {
                prompt: (0..PAGE + 1).map(|at| (at + i * at / 7) % 8).collect(),
                max_new_tokens: 2 * PAGE as usize,
                stop_tokens: vec![],
                sampling: SamplingParams::GREEDY,
                extra: ExtraKey::default(),
            })
            .unwrap();
    }
    let (mut num_taking, mut num_ours) = (0, 0);
    let mut num_since_taking = 0;
    while session.metrics().num_running < 100 {
        session.step(&mut model, &mut |_| {}).unwrap();
    }
    for _ in 0..100 {
        let pages = session.table().pool().counts().leased;
        model.num_allocations = 0;
        let region = Region::new(ALLOCATOR);
        session.step(&mut model, &mut |_| {}).unwrap();
        let ours = num_allocations(&region) - model.num_allocations;
        let has_taken = session.table().pool().counts().leased > pages;
        num_taking += usize::from(has_taken);
        num_since_taking = if has_taken { 0 } else { num_since_taking + 1 };
        if num_since_taking > STEPS_TO_WARM {
            num_ours += ours;
        }
    }
    assert!(num_taking > 0 && num_taking < 10, "{num_taking} steps took pages");
    assert_eq!(session.metrics().num_running, 100);
    num_ours
}

#[test]
fn a_decoding_step_that_takes_no_page_does_not_allocate_once_warm() {
    // What the test harness's own thread allocates meanwhile is counted too, so one of some attempts must do. The
    // backend's thread has run before the first step; this model gives it nothing to do.
    assert!((0..10).any(|_| allocations_of_a_hundred_steps() == 0), "warm steps allocate");
}
