//! The mixed batch: one request prefills, one computes what follows a cached prefix, one decodes; on every backend of
//! this machine, against dense attention in float64 that is written here from the formula and shares nothing with them.

use attn_metadata::{
    BackendEntry, Batch, CreateError, HeadShape, Host, HostDevice, Layer, LayerParams, PLAIN, PoolShape, RawBatch,
    Reason, Registry, SelectError,
};
use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, KvPageShape, PagePool, PageSize, Slot};
use page_table::{PageTable, SeqId, StepTables};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use crate::replay::{Activation, Elements, NewKv, Problem, ReplayError};

/// The largest difference to float64 that passes.
pub const MAX_ERROR: f64 = 1e-6;

const NUM_QO_HEADS: usize = 16;
const NUM_KV_HEADS: usize = 8;
const DIM: usize = 128;
const NUM_PAGES: u32 = 64;

/// A request of the demo: its name, tokens in the cache before the step, tokens computed in it.
const REQUESTS: [(&str, usize, usize); 3] = [("A", 0, 6), ("B", 4, 3), ("C", 8, 1)];

/// What the demo shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Demo {
    /// Offsets of the requests' query tokens.
    pub cu_seqlens_q: Vec<i32>,
    /// KV tokens of each request, the new ones included.
    pub cache_seqlens: Vec<u32>,
    /// Pages of each request; a page is one token.
    pub page_table: Vec<Vec<i32>>,
    /// Where each new token's KV goes.
    pub out_loc: Vec<i32>,
    /// Row of each request's last token.
    pub last_indices: Vec<u32>,
    /// Each backend.
    pub backends: Vec<BackendResult>,
}

/// One backend's result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BackendResult {
    /// Its name.
    pub name: &'static str,
    /// How it did.
    pub status: Status,
    /// Largest difference to dense attention in float64; absent where it gave no result.
    pub max_error: Option<f64>,
    /// Why it gave no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How a backend did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its error is at most [`MAX_ERROR`].
    Passed,
    /// Its error is larger, or it refused or broke a batch that it says it can run.
    Failed,
    /// This machine lacks it, or it is not for plain attention: no failure of the demo.
    NotRun,
}

/// A demo that could not be set up: a fault of this program.
pub type DemoError = Box<dyn std::error::Error + Send + Sync>;

impl Demo {
    /// Runs the batch on every backend.
    ///
    /// # Errors
    /// [`DemoError`] where pages, tables or the batch are refused.
    pub fn run(registry: &Registry<Host>) -> Result<Self, DemoError> {
        let (tables, batch) = mixed_batch()?;
        let tokens = Tokens::random();
        let problem = tokens.problem(batch)?;
        let truth = tokens.dense_attention();
        let is_here = |entry: &&BackendEntry<Host>| (entry.capabilities)(&HostDevice::default()).is_ok();
        let here = registry.entries().iter().filter(is_here);
        let backends = here.map(|entry| run_backend(registry, entry.name, &problem, &truth));
        let backends = backends.collect();
        let batch = &problem.batch;
        Ok(Self {
            cu_seqlens_q: tables.qo_indptr.clone(),
            cache_seqlens: batch.requests().iter().map(|r| r.kv_len).collect(),
            page_table: batch.requests().iter().map(|r| batch.pages(r).to_vec()).collect(),
            out_loc: tables.raw_slot_mapping().to_vec(),
            last_indices: batch.last_rows().flatten().collect(),
            backends,
        })
    }

    /// Whether every backend that ran is exact enough, and at least one ran.
    #[must_use]
    pub fn passed(&self) -> bool {
        let has = |status| self.backends.iter().any(|backend| backend.status == status);
        has(Status::Passed) && !has(Status::Failed)
    }

    /// The demo for people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "mixed batch: A prefills 6 tokens, B finds 4 in the prefix cache and computes 3, C holds 8 and decodes 1\n\
             {NUM_QO_HEADS} query heads, {NUM_KV_HEADS} KV heads, dim {DIM}, page size 1, f32\n\
             cu_seqlens_q {:?}\ncache_seqlens {:?}\npage table\n",
            self.cu_seqlens_q, self.cache_seqlens
        );
        for ((name, ..), pages) in REQUESTS.iter().zip(&self.page_table) {
            text.push_str(&format!("  {name} {pages:?}\n"));
        }
        text.push_str(&format!("out_loc {:?}\nlast indices {:?}\n", self.out_loc, self.last_indices));
        text.push_str(&format!("max error against dense causal attention in float64 (at most {MAX_ERROR:.0e})\n"));
        let width = self.backends.iter().map(|backend| backend.name.len()).max().unwrap_or(0);
        for backend in &self.backends {
            text.push_str(&format!("  {:width$} {}\n", backend.name, backend.to_text()));
        }
        text
    }
}

impl BackendResult {
    fn to_text(&self) -> String {
        let why = self.why.as_deref().unwrap_or("unknown");
        match (self.status, self.max_error) {
            (Status::Passed, Some(error)) => format!("{error:.1e} ok"),
            (_, Some(error)) => format!("{error:.1e} TOO LARGE"),
            (Status::NotRun, None) => format!("not run: {why}"),
            (_, None) => format!("FAILED: {why}"),
        }
    }
}

/// The batch through a pool and a page table. Other requests hold pages, so that A gets 0..=5, B 20..=22 and C 58.
fn mixed_batch() -> Result<(StepTables, Batch), DemoError> {
    let page_size = PageSize::new(1)?;
    let pool = PagePool::new(NUM_PAGES, page_size)?;
    // Pages 0 to 57, cut where they have different owners.
    let mut first = pool.lease(58)?;
    let held_by_c = first.split_off(50)?;
    let _others = first.split_off(23)?;
    let freed = first.split_off(20)?;
    let _more_others = first.split_off(10)?;
    let prefix = first.split_off(6)?;
    drop((first, freed));
    let mut table = PageTable::new(pool);
    let a = table.create()?;
    let b = table.adopt(prefix.share_all(), prefix.len())?;
    let c = table.adopt(held_by_c, 8)?;
    let step: Vec<(SeqId, usize)> = [a, b, c].into_iter().zip(REQUESTS.map(|(_, _, new)| new)).collect();
    let outcome = table.append_batch(&step)?;
    assert!(outcome.copies.is_empty(), "pages of one token are never partly filled");
    let mut tables = StepTables::new();
    table.step_tables(&step, &mut tables)?;
    let pool = PoolShape { num_pages: NUM_PAGES, page_size };
    let batch = Batch::from_raw(pool, &RawBatch::from_tables(&tables))?;
    Ok((tables, batch))
}

/// Q, K and V of each request's tokens, contiguous: `[tokens, heads, DIM]`.
struct Tokens {
    requests: Vec<[Vec<f32>; 3]>,
}

impl Tokens {
    fn random() -> Self {
        let mut rng = StdRng::seed_from_u64(0);
        let mut values = |len: usize| (0..len).map(|_| rng.random_range(-1.0f32..1.0)).collect::<Vec<f32>>();
        let requests = REQUESTS.map(|(_, cached, new)| {
            let kv_len = (cached + new) * NUM_KV_HEADS * DIM;
            [values(new * NUM_QO_HEADS * DIM), values(kv_len), values(kv_len)]
        });
        Self { requests: requests.to_vec() }
    }

    /// The batch with its tensors: cached tokens are in their pages, new ones are given beside.
    fn problem(&self, batch: Batch) -> Result<Problem, DemoError> {
        let heads = HeadShape::new(16, 8, 128);
        let page_size = batch.page_size();
        let page = KvPageShape { page_size, num_kv_heads: 8, head_dim_k: 128, head_dim_v: 128 };
        let mut cache = HostKv::new(page.with_pages(NUM_PAGES)?, KvLayout::Nhd, KvFormat::F32)?;
        let width = NUM_KV_HEADS * DIM;
        let [mut q, mut new_k, mut new_v] = [const { Vec::new() }; 3];
        for ((request, (_, cached, _)), [q_of, k_of, v_of]) in batch.requests().iter().zip(REQUESTS).zip(&self.requests)
        {
            let pages = &batch.pages(request)[..cached];
            let slots: Vec<Slot> = pages.iter().map(|&page| Slot::from_raw(page)).collect();
            let part = |data| HostTensor::packed(data, [cached, NUM_KV_HEADS, DIM]);
            cache.append(&slots, &part(&k_of[..cached * width])?, Some(&part(&v_of[..cached * width])?))?;
            q.extend_from_slice(q_of);
            new_k.extend_from_slice(&k_of[cached * width..]);
            new_v.extend_from_slice(&v_of[cached * width..]);
        }
        let rows = batch.num_rows() as usize;
        let tensor = |values, heads| {
            Activation::new(Elements::F32(values), [rows, heads, DIM]).ok_or("the tokens do not fill the batch")
        };
        let new_kv = Some(NewKv { k: tensor(new_k, NUM_KV_HEADS)?, v: Some(tensor(new_v, NUM_KV_HEADS)?) });
        let layer = Layer::new(LayerParams::causal(heads))?;
        Ok(Problem { layer, batch, q: tensor(q, NUM_QO_HEADS)?, cache, new_kv })
    }

    /// Causal attention over each request's contiguous tokens: `[rows, NUM_QO_HEADS, DIM]`.
    fn dense_attention(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for ((_, cached, new), [q, k, v]) in REQUESTS.into_iter().zip(&self.requests) {
            for row in 0..new {
                for head in 0..NUM_QO_HEADS {
                    let q = vector(q, row, head, NUM_QO_HEADS);
                    let kv_head = head / (NUM_QO_HEADS / NUM_KV_HEADS);
                    out.extend(attend(q, k, v, cached + row + 1, kv_head));
                }
            }
        }
        out
    }
}

/// The vector of a token and head.
fn vector(values: &[f32], token: usize, head: usize, num_heads: usize) -> &[f32] {
    &values[(token * num_heads + head) * DIM..][..DIM]
}

/// `Σ softmax(q·k / √DIM)·v` over the first `num_keys` tokens.
fn attend(q: &[f32], k: &[f32], v: &[f32], num_keys: usize, kv_head: usize) -> Vec<f64> {
    let scale = 1.0 / (f64::from(u32::try_from(DIM).unwrap_or(1))).sqrt();
    let score = |key| {
        let key = vector(k, key, kv_head, NUM_KV_HEADS);
        q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * scale
    };
    let weights: Vec<f64> = (0..num_keys).map(|key| f64::exp(score(key))).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; DIM];
    for (key, weight) in weights.iter().enumerate() {
        let value = vector(v, key, kv_head, NUM_KV_HEADS);
        out.iter_mut().zip(value).for_each(|(out, &value)| *out += weight / sum * f64::from(value));
    }
    out
}

fn run_backend(registry: &Registry<Host>, name: &'static str, problem: &Problem, truth: &[f64]) -> BackendResult {
    match max_error(registry, name, problem.clone(), truth) {
        Ok(error) => {
            let status = if error <= MAX_ERROR { Status::Passed } else { Status::Failed };
            BackendResult { name, status, max_error: Some(error), why: None }
        }
        Err(error) => {
            let status = if is_excused(registry, name, &error) { Status::NotRun } else { Status::Failed };
            BackendResult { name, status, max_error: None, why: Some(crate::report::error_chain(&error)) }
        }
    }
}

/// Whether an error is no fault of the backend: the machine lacks what it needs, or it does not say that it runs plain
/// attention. Any other refusal of a plain batch is one.
fn is_excused(registry: &Registry<Host>, name: &str, error: &ReplayError) -> bool {
    if let ReplayError::Select(SelectError::Create(CreateError::Unsupported { reasons, .. })) = error
        && reasons.iter().all(|reason| matches!(reason, Reason::Unavailable { .. }))
    {
        return true;
    }
    let entry = registry.entries().iter().find(|entry| entry.name == name);
    let capabilities = entry.and_then(|entry| (entry.capabilities)(&HostDevice::default()).ok());
    capabilities.is_none_or(|capabilities| !capabilities.families.contains(&PLAIN))
}

fn max_error(registry: &Registry<Host>, name: &str, mut problem: Problem, truth: &[f64]) -> Result<f64, ReplayError> {
    let (mut backend, _) = registry.create(name, &problem.config(HostDevice::default()))?;
    let mut outcome = problem.outcome();
    let step = backend.prepare_metadata(&problem.batch)?;
    problem.forward(backend.as_mut(), &step, &mut outcome)?;
    let Elements::F32(got) = outcome.out.elements() else { return Ok(f64::INFINITY) };
    assert_eq!(got.len(), truth.len(), "rows of the result and of the truth");
    let errors = got.iter().zip(truth).map(|(&got, truth)| (f64::from(got) - truth).abs());
    // A NaN must not pass for a small error.
    Ok(errors.map(|e| if e.is_nan() { f64::INFINITY } else { e }).fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use attn_metadata::Capabilities;
    use kvpool::Dtype;

    use super::*;
    use crate::backends::host_registry;

    fn cpu() -> BackendEntry<Host> {
        host_registry().entries()[0]
    }

    fn status_of(entry: BackendEntry<Host>) -> Status {
        let demo = Demo::run(&Registry::new(vec![entry, cpu()])).unwrap();
        assert_eq!(demo.passed(), demo.backends[0].status != Status::Failed, "{}", demo.to_text());
        demo.backends[0].status
    }

    fn refused(reason: Reason) -> CreateError {
        CreateError::Unsupported { backend: "other", reasons: vec![reason] }
    }

    fn without_f32(device: &HostDevice) -> Result<Capabilities, Reason> {
        let mut capabilities = (cpu().capabilities)(device)?;
        capabilities.q_dtypes.retain(|dtype| *dtype != Dtype::F32);
        Ok(capabilities)
    }

    #[test]
    fn only_what_the_machine_lacks_and_other_families_are_excused() {
        let other = BackendEntry { name: "other", ..cpu() };
        assert_eq!(status_of(other), Status::Passed);
        let lacking =
            BackendEntry { create: |_| Err(refused(Reason::Unavailable { why: "no GPU".to_owned() })), ..other };
        assert_eq!(status_of(lacking), Status::NotRun);
        let refusing =
            BackendEntry { create: |_| Err(refused(Reason::Family { got: PLAIN, supported: vec![PLAIN] })), ..other };
        assert_eq!(status_of(refusing), Status::Failed);
        assert_eq!(status_of(BackendEntry { capabilities: without_f32, ..other }), Status::Failed);
        let sparse = *host_registry().entries().iter().find(|entry| entry.name == "sparse").unwrap();
        assert_eq!(status_of(sparse), Status::NotRun);
    }
}
