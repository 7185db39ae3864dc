//! Owns one call of a backend on a [`Problem`] and the checks of what it wrote.

use std::ops::Range;

use attn_metadata::{AttentionBackend, Batch, Feature, Host, Io, Kv, Lse, PrepareError, Prepared, Side};
use kvpool::{Dtype, HostKv};

use super::problem::{Problem, SideProblem};
use super::tensor::{Activation, canary, value};

/// Why a case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The backend says that it cannot, with reasons.
    Refused(String),
    /// The check does not apply to the case or the backend.
    Skipped(String),
    /// It is wrong.
    Failed(String),
}

impl Stop {
    /// A failure.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::Failed(why.into())
    }

    /// A call that failed, with all that its error says of the causes.
    pub(crate) fn error(call: &str, error: &dyn std::error::Error) -> Self {
        let mut text = format!("{call}: {error}");
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        Self::Failed(text)
    }
}

/// What a call wrote, as bits.
#[derive(Clone, Debug)]
pub struct Run {
    /// Dtype of out.
    pub dtype: Dtype,
    /// `[rows, heads, dim]`.
    pub shape: [usize; 3],
    /// Bits of out, packed.
    pub out: Vec<u32>,
    /// Bits of the LSE `[rows, heads]`, where the backend writes one.
    pub lse: Option<Vec<u32>>,
    /// The cache after the call, where it appended.
    pub cache: Option<HostKv>,
    /// Shape and bits of the side branch's output, where it has one.
    pub side_out: Option<([usize; 3], Vec<u32>)>,
    /// The side branch's cache after the call, where it appended.
    pub side_cache: Option<HostKv>,
}

impl Run {
    /// Bits of the outputs of some rows.
    #[must_use]
    pub fn out_rows(&self, rows: Range<usize>) -> &[u32] {
        let width = self.shape[1] * self.shape[2];
        &self.out[rows.start * width..rows.end * width]
    }

    /// Bits of the LSEs of some rows.
    #[must_use]
    pub fn lse_rows(&self, rows: Range<usize>) -> Option<&[u32]> {
        let heads = self.shape[1];
        self.lse.as_ref().map(|lse| &lse[rows.start * heads..rows.end * heads])
    }

    /// Values of out.
    #[must_use]
    pub fn out_values(&self) -> Vec<f32> {
        self.out.iter().map(|&bits| value(self.dtype, bits)).collect()
    }
}

/// Prepares the problem's batch and runs layer 0.
///
/// # Errors
/// [`Stop`].
pub fn run(problem: &Problem, backend: &mut dyn AttentionBackend<Host>) -> Result<Run, Stop> {
    let step = prepare(backend, &problem.batch())?;
    forward(problem, backend, &step, 0)
}

/// Prepares a batch; a feature that the capabilities lack is a refusal, everything else a failure.
///
/// # Errors
/// [`Stop`].
pub(crate) fn prepare(backend: &mut dyn AttentionBackend<Host>, batch: &Batch) -> Result<Prepared, Stop> {
    backend.prepare_metadata(batch).map_err(|error| match error {
        PrepareError::Unsupported { feature, .. } if !backend.capabilities().features.contains(feature) => {
            Stop::Refused(error.to_string())
        }
        _ => Stop::error("prepare_metadata", &error),
    })
}

/// Runs a layer of a step on the problem's tensors and checks what was written where.
///
/// # Errors
/// [`Stop`].
pub fn forward(
    problem: &Problem,
    backend: &mut dyn AttentionBackend<Host>,
    step: &Prepared,
    layer: usize,
) -> Result<Run, Stop> {
    let [rows, heads, _] = problem.q.shape();
    let dim = problem.case.heads.head_dim_vo as usize;
    let mut out = Activation::poisoned(problem.case.q_dtype, [rows, heads, dim], problem.build.outputs);
    let wants_lse = backend.capabilities().features.contains(Feature::Lse);
    let mut lse = vec![Lse::from_ln(f32::from_bits(canary(Dtype::F32))); rows * heads];
    let mut cache = problem.cache.clone();
    let mut side_cache = problem.side.as_ref().map(|side| side.cache.clone());
    let mut side_out = problem.side.as_ref().and_then(|side| side_output(problem, side));
    let side = problem.side.as_ref().zip(side_cache.as_mut()).map(|(side, cache)| Side {
        q: side.q.view(),
        kv: kv_of(problem, cache, &side.k, side.v.as_ref()),
        out: side_out.as_mut().map(Activation::view_mut),
    });
    let kv = kv_of(problem, &mut cache, &problem.k, problem.v.as_ref());
    let (q, lse_io) = (problem.q.view(), wants_lse.then_some(&mut lse[..]));
    let io = Io { q, kv, side, out: out.view_mut(), lse: lse_io };
    backend.forward(step, layer, io).map_err(|error| Stop::error("forward", &error))?;
    let run = Run {
        dtype: problem.case.q_dtype,
        shape: [rows, heads, dim],
        out: out.bits(),
        lse: wants_lse.then(|| lse.iter().map(|lse| lse.ln().to_bits()).collect()),
        cache: problem.case.append.then_some(cache),
        side_out: side_out.as_ref().map(|out| (out.shape(), out.bits())),
        side_cache: side_cache.filter(|_| problem.case.append),
    };
    match out.broken_guard().or(side_out.as_ref().and_then(Activation::broken_guard)) {
        Some(element) => Err(Stop::failed(format!("element {element} outside the output was written"))),
        None => check_written(problem, &run).map(|()| run),
    }
}

/// A poisoned buffer for the output of a side branch, where it has one.
pub(crate) fn side_output(problem: &Problem, side: &SideProblem) -> Option<Activation> {
    let dim = side.spec.out_dim?;
    let shape = [problem.q.shape()[0], side.spec.num_heads as usize, dim as usize];
    Some(Activation::poisoned(problem.case.q_dtype, shape, problem.build.outputs))
}

/// The KV of a branch, as the case says.
pub(crate) fn kv_of<'a>(
    problem: &Problem,
    cache: &'a mut HostKv,
    k: &'a Activation,
    v: Option<&'a Activation>,
) -> Kv<'a, Host> {
    match problem.case.append {
        true => Kv::Append { cache, k: k.view(), v: v.map(Activation::view) },
        false => Kv::Attend { cache },
    }
}

/// Every row was written; padding rows are zeros and −inf.
fn check_written(problem: &Problem, run: &Run) -> Result<(), Stop> {
    let [rows, heads, dim] = run.shape;
    let used = problem.num_used_rows();
    let at = |index: usize| (index / (heads * dim), index / dim % heads);
    if let Some(index) = run.out.iter().position(|&bits| bits == canary(run.dtype)) {
        let (row, head) = at(index);
        return Err(Stop::failed(format!("out of row {row}, head {head} was not written (used rows: {used})")));
    }
    if let Some(index) = run.out_rows(used..rows).iter().position(|&bits| bits != 0) {
        let (row, head) = at(index + used * heads * dim);
        return Err(Stop::failed(format!("out of padding row {row}, head {head} is not zero")));
    }
    if let Some((shape, bits)) = &run.side_out {
        let width = shape[1] * shape[2];
        if let Some(index) = bits.iter().position(|&bits| bits == canary(run.dtype)) {
            return Err(Stop::failed(format!("side out of row {} was not written", index / width)));
        }
        if let Some(index) = bits[used * width..].iter().position(|&bits| bits != 0) {
            return Err(Stop::failed(format!("side out of padding row {} is not zero", used + index / width)));
        }
    }
    let unwritten = canary(Dtype::F32);
    let Some(lse) = &run.lse else { return Ok(()) };
    if let Some(state) = lse.iter().position(|&bits| bits == unwritten) {
        return Err(Stop::failed(format!("LSE of row {}, head {} was not written", state / heads, state % heads)));
    }
    let empty = f32::NEG_INFINITY.to_bits();
    match lse[used * heads..].iter().position(|&bits| bits != empty) {
        Some(state) => Err(Stop::failed(format!("LSE of padding row {} is not −inf", used + state / heads))),
        None => Ok(()),
    }
}

/// Whether `n` rows of two runs are the same bits.
///
/// # Errors
/// [`Stop::Failed`] with the first difference.
pub fn same_rows(what: &str, a: (&Run, usize), b: (&Run, usize), n: usize) -> Result<(), Stop> {
    let ((a, a_row), (b, b_row)) = (a, b);
    let [_, heads, dim] = a.shape;
    let pairs = a.out_rows(a_row..a_row + n).iter().zip(b.out_rows(b_row..b_row + n));
    if let Some(index) = pairs.clone().position(|(a, b)| a != b) {
        let (row, head) = (a_row + index / (heads * dim), index / dim % heads);
        let (x, y) = (a.out_rows(a_row..a_row + n)[index], b.out_rows(b_row..b_row + n)[index]);
        let (x, y) = (value(a.dtype, x), value(b.dtype, y));
        return Err(Stop::failed(format!(
            "{what}: out of row {row}, head {head}, column {} is {y:e}, was {x:e}",
            index % dim
        )));
    }
    if let (Some((shape, x)), Some((_, y))) = (&a.side_out, &b.side_out) {
        let width = shape[1] * shape[2];
        let rows = |bits: &[u32], row: usize| bits[row * width..(row + n) * width].to_vec();
        let (x, y) = (rows(x, a_row), rows(y, b_row));
        if let Some(index) = x.iter().zip(&y).position(|(x, y)| x != y) {
            let (row, x, y) = (a_row + index / width, value(a.dtype, x[index]), value(b.dtype, y[index]));
            return Err(Stop::failed(format!("{what}: side out of row {row} is {y:e}, was {x:e}")));
        }
    }
    let (Some(x), Some(y)) = (a.lse_rows(a_row..a_row + n), b.lse_rows(b_row..b_row + n)) else { return Ok(()) };
    match x.iter().zip(y).position(|(x, y)| x != y) {
        Some(state) => {
            let (row, head) = (a_row + state / heads, state % heads);
            let (x, y) = (f32::from_bits(x[state]), f32::from_bits(y[state]));
            Err(Stop::failed(format!("{what}: LSE of row {row}, head {head} is {y:e}, was {x:e}")))
        }
        None => Ok(()),
    }
}

impl Run {
    /// Whether another run of the same rows is the same bits.
    ///
    /// # Errors
    /// [`Stop::Failed`] with the first difference.
    pub fn same(&self, what: &str, other: &Self) -> Result<(), Stop> {
        if self.shape != other.shape {
            return Err(Stop::failed(format!("{what}: shape {:?}, was {:?}", other.shape, self.shape)));
        }
        same_rows(what, (self, 0), (other, 0), self.shape[0])
    }
}
