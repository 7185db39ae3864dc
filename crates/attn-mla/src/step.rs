//! Owns [`Step`]: a batch as latent attention sees it: which requests are absorbed, which expanded, and the absorbed
//! ones as a batch of their own.
//! Invariant: the form of a request depends on its own lengths and on the layers, so its bits do not depend on the rest.

use std::ops::Range;

use attn_metadata::{Batch, KeptBatch, Layer, PoolShape, Request, SubBatch};
use kvpool::KvDtype;

use crate::{CostModel, Form, MlaFamily};

/// Decides the form of requests for all latent layers of a model together.
pub(crate) struct Chooser {
    /// Work of each layer, and whether its queries see only what is before them.
    layers: Vec<(CostModel, bool)>,
    /// Why no request can be expanded, whatever it costs.
    only_absorbed: Option<&'static str>,
    /// The form of every request that can have it, whatever it costs.
    forced: Option<Form>,
}

impl Chooser {
    /// A chooser for the layers of the family among `layers`.
    pub(crate) fn new<'a>(layers: impl Iterator<Item = &'a Layer>, dtype: KvDtype, forced: Option<Form>) -> Chooser {
        let mut chooser = Chooser { layers: Vec::new(), only_absorbed: None, forced };
        for layer in layers {
            let Some(family) = layer.family_as::<MlaFamily>() else { continue };
            let (widths, num_heads) = (family.weights().widths(), family.weights().num_heads());
            let cost = CostModel { widths, num_heads, row_bytes: layer.kv().bytes_per_token(dtype) };
            chooser.layers.push((cost, layer.is_causal()));
            let rules = [
                ("a window", layer.window_left().is_some()),
                ("a softcap", layer.softcap().is_some()),
                ("sinks", layer.sinks().is_some()),
                ("ALiBi", layer.alibi_slopes().is_some()),
            ];
            chooser.only_absorbed =
                chooser.only_absorbed.or(rules.into_iter().find(|(_, has)| *has).map(|(what, _)| what));
        }
        chooser
    }

    fn total(&self, form: Form, request: &Request) -> (u64, u64) {
        let costs = self.layers.iter().map(|(model, causal)| model.cost(form, request.q_len, request.kv_len, *causal));
        costs.fold((0, 0), |(flops, bytes), c| (c.flops.saturating_add(flops), c.bytes.saturating_add(bytes)))
    }

    /// What keeps the requests of a batch from being expanded.
    fn obstacle(&self, batch: &Batch) -> Option<&'static str> {
        self.only_absorbed.or(batch.custom_mask().map(|_| "a custom mask"))
    }

    /// The cheaper form over all layers; absorbed where they are equal.
    fn choose(&self, request: &Request) -> Form {
        if let Some(form) = self.forced {
            return form;
        }
        let total = |form| {
            let (flops, bytes) = self.total(form, request);
            crate::Cost { flops, bytes }.total()
        };
        if total(Form::Expanded) < total(Form::Absorbed) { Form::Expanded } else { Form::Absorbed }
    }
}

/// A batch, cut by form.
pub(crate) struct Step {
    /// All of it.
    pub(crate) kept: KeptBatch,
    /// The absorbed requests, in the same rows; nothing is appended in it and no padding is written.
    pub(crate) absorbed: Batch,
    /// Rows of absorbed requests, in runs.
    pub(crate) runs: Vec<Range<usize>>,
    /// Which requests are expanded, by their place in the batch.
    pub(crate) expanded: Vec<usize>,
    forms: Vec<Form>,
}

impl Step {
    pub(crate) fn new(pool: PoolShape) -> Step {
        Step {
            kept: KeptBatch::empty(pool, 0),
            absorbed: Batch::empty(pool),
            runs: Vec::new(),
            expanded: Vec::new(),
            forms: Vec::new(),
        }
    }

    /// Cuts a batch. Reuses memory.
    pub(crate) fn set(&mut self, batch: &Batch, num_rows: u32, chooser: &Chooser) {
        self.kept.keep(batch, num_rows);
        self.forms.clear();
        self.expanded.clear();
        self.runs.clear();
        let obstacle = chooser.obstacle(batch);
        let form = |request: &Request| if obstacle.is_some() { Form::Absorbed } else { chooser.choose(request) };
        for (place, request) in batch.requests().iter().enumerate() {
            let rows = request.q_start as usize..(request.q_start + request.q_len) as usize;
            self.forms.push(form(request));
            match (form(request), self.runs.last_mut()) {
                (Form::Expanded, _) => self.expanded.push(place),
                (Form::Absorbed, Some(run)) if run.end == rows.start => run.end = rows.end,
                (Form::Absorbed, _) => self.runs.push(rows),
            }
        }
        batch.select_into(&mut self.absorbed, SubBatch::Later, |request| form(request) == Form::Absorbed);
    }

    /// What was chosen and why, a line a request.
    pub(crate) fn notes(&self, chooser: &Chooser) -> Vec<String> {
        let obstacle = chooser.obstacle(self.kept.batch());
        let requests = self.kept.batch().requests().iter().zip(&self.forms).enumerate();
        requests.take(MAX_NOTES).map(|(i, (request, form))| note(i, request, *form, chooser, obstacle)).collect()
    }
}

/// Requests that are explained one by one.
const MAX_NOTES: usize = 16;

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn note(place: usize, request: &Request, form: Form, chooser: &Chooser, obstacle: Option<&'static str>) -> String {
    let other = match form {
        Form::Absorbed => Form::Expanded,
        Form::Expanded => Form::Absorbed,
    };
    let figures = |form| {
        let (flops, bytes) = chooser.total(form, request);
        format!("{:.3} GFLOP, {:.2} MiB", flops as f64 / 1e9, bytes as f64 / f64::from(1 << 20))
    };
    let Request { q_len, kv_len, .. } = request;
    let mut text = format!("request {place}: q {q_len}, kv {kv_len}: {form}, {}", figures(form));
    match obstacle {
        Some(what) => text.push_str(&format!("; {what} rules out {other}")),
        None => text.push_str(&format!("; {other} would be {}", figures(other))),
    }
    text
}
