//! Makes the tensors of a workload: normal random values, pages in random order.

use attn_metadata::{Batch, BatchError, HeadShape, Layer, LayerError, LayerParams, PoolShape, RawBatch};
use kvpool::{Dtype, HostKv, KvDtype, KvFormat, KvLayout, KvScales, PageSize, ShapeError, Slot, Values};
use kvpool::{FormatError, f32_to_fp8_e4m3};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use thiserror::Error;

use super::workload::{Workload, WorkloadError, WorkloadKind};
use crate::replay::{Activation, Elements, NewKv, Problem};

/// FP8 scale of random KV: four standard deviations are 80 of E4M3's 448.
const FP8_SCALE: f32 = 0.05;

/// A workload that cannot be made into a problem.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// Its dtypes.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// Its heads.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Its page size or caches.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Its scales.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Its lengths.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// It needs more memory than there is.
    #[error("it needs {needed_mib} MiB, {available_mib} MiB are free")]
    Memory {
        /// What it needs.
        needed_mib: u64,
        /// What is free.
        available_mib: u64,
    },
}

/// Makes a workload's problem; the same seed makes the same problem.
///
/// # Errors
/// [`ProblemError`], before any large allocation.
pub fn problem_of(workload: &Workload, seed: u64, available_bytes: u64) -> Result<Problem, ProblemError> {
    let mut rng = StdRng::seed_from_u64(seed);
    let Parts { layer, dtype, format, pool } = parts_of(workload)?;
    let HeadShape { num_qo_heads, head_dim_qk, head_dim_vo, .. } = layer.heads();
    let spec = layer.kv();
    let num_slots = u64::from(pool.num_pages) * u64::from(pool.page_size.get());
    let cache_bytes = spec.bytes_per_token(format.dtype()).saturating_mul(num_slots);
    let rows: u64 = workload.q_lens.iter().map(|&n| u64::from(n)).sum();
    let row_bytes = 4 * u64::from(num_qo_heads) * u64::from(head_dim_qk + head_dim_vo);
    // The tables are held twice, by the workload and by the batch.
    let table_bytes = 8 * u64::from(pool.num_pages);
    let needed = cache_bytes.saturating_add(rows.saturating_mul(row_bytes)).saturating_add(table_bytes);
    if needed > available_bytes {
        return Err(ProblemError::Memory { needed_mib: needed >> 20, available_mib: available_bytes >> 20 });
    }
    let tables = Tables::new(workload, pool, &mut rng);
    let batch = tables.batch(workload.append)?;
    let mut normal = Normal::new(&mut rng);
    let mut cache = HostKv::for_spec(spec, pool.num_pages, pool.page_size, KvLayout::Nhd, format)?;
    normal.fill_cache(&mut cache);
    let rows = batch.num_rows() as usize;
    let mut tensor = |heads: u32, width: u32| normal.activation(dtype, [rows, heads as usize, width as usize]);
    let q = tensor(num_qo_heads, head_dim_qk);
    let new_kv = workload.append.then(|| NewKv {
        k: tensor(spec.num_kv_heads, spec.head_dim_k),
        v: match spec.values {
            Values::Own(width) => Some(tensor(spec.num_kv_heads, width)),
            Values::InKeys(_) | Values::None => None,
        },
    });
    Ok(Problem { layer, batch, q, cache, new_kv })
}

/// What a workload says of its call without any tensor.
pub(super) struct Parts {
    pub(super) layer: Layer,
    /// Dtype of q and out.
    pub(super) dtype: Dtype,
    pub(super) format: KvFormat,
    pub(super) pool: PoolShape,
}

/// The unabsorbed width of the `mla` workloads, which their scale comes from.
const MLA_SCALE_WIDTH: f32 = 192.0;

/// Reads a workload. Kind `mla` keeps latent rows, whose first columns are the values.
pub(super) fn parts_of(workload: &Workload) -> Result<Parts, ProblemError> {
    let [head_dim_qk, head_dim_vo] = workload.dim.widths();
    let [num_qo_heads, num_kv_heads] = workload.heads;
    let heads = HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo };
    let mut params = LayerParams { window_left: workload.window_left(), ..LayerParams::causal(heads) };
    if workload.kind == WorkloadKind::Mla {
        params = LayerParams { values_in_keys: true, sm_scale: MLA_SCALE_WIDTH.sqrt().recip(), ..params };
    }
    let (dtype, kv_dtype) = (workload.activation_dtype()?, workload.stored_dtype()?);
    Ok(Parts { layer: Layer::new(params)?, dtype, format: format_of(kv_dtype)?, pool: pool_of(workload)? })
}

fn format_of(dtype: KvDtype) -> Result<KvFormat, FormatError> {
    Ok(match dtype {
        KvDtype::F32 => KvFormat::F32,
        KvDtype::Fp8Latent => KvFormat::Fp8Latent,
        KvDtype::F16 => KvFormat::F16,
        KvDtype::Bf16 => KvFormat::Bf16,
        KvDtype::Fp8E4m3 => KvFormat::Fp8E4m3(KvScales::new(FP8_SCALE, FP8_SCALE)?),
    })
}

/// The tables of a workload's batch.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) pool: PoolShape,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    slots: Vec<Slot>,
}

/// Just the pages that the requests need.
pub(super) fn pool_of(workload: &Workload) -> Result<PoolShape, ShapeError> {
    let page_size = PageSize::new(workload.page)?;
    let pages = |kv_len: &u32| u64::from(kv_len.div_ceil(page_size.get()));
    let num_pages: u64 = workload.kv_lens.iter().map(pages).sum();
    let max = u64::from(i32::MAX.unsigned_abs());
    let too_many = ShapeError::TooManySlots { num_pages, page_size: page_size.get(), max };
    let num_pages = u32::try_from(num_pages).ok().filter(|n| u64::from(*n) * u64::from(page_size.get()) <= max);
    num_pages.map(|num_pages| PoolShape { num_pages, page_size }).ok_or(too_many)
}

impl Tables {
    /// Each request has its pages in random order.
    pub(super) fn new(workload: &Workload, pool: PoolShape, rng: &mut StdRng) -> Self {
        let mut kv_indices: Vec<i32> = (0..pool.num_pages.cast_signed()).collect();
        kv_indices.shuffle(rng);
        let mut tables = Self {
            pool,
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices,
            kv_last_page_len: Vec::new(),
            slots: Vec::new(),
        };
        for (&q_len, &kv_len) in workload.q_lens.iter().zip(&workload.kv_lens) {
            tables.push(q_len, kv_len, kv_len.div_ceil(pool.page_size.get()));
        }
        tables
    }

    fn push(&mut self, q_len: u32, kv_len: u32, num_pages: u32) {
        let page_size = self.pool.page_size;
        let end = |indptr: &[i32], n: u32| indptr.last().map_or(0, |&last| last).saturating_add_unsigned(n);
        let first_page = self.kv_indptr.last().map_or(0, |&page| page.unsigned_abs());
        self.qo_indptr.push(end(&self.qo_indptr, q_len));
        self.kv_indptr.push(end(&self.kv_indptr, num_pages));
        let last = if kv_len == 0 { 0 } else { (kv_len - 1) % page_size.get() + 1 };
        self.kv_last_page_len.push(last.cast_signed());
        for position in kv_len.saturating_sub(q_len)..kv_len {
            let page = self.kv_indices[(first_page + position / page_size.get()) as usize];
            let slot = page * page_size.get().cast_signed() + (position % page_size.get()).cast_signed();
            self.slots.push(Slot::from_raw(slot));
        }
    }

    pub(super) fn raw(&self, append: bool) -> RawBatch<'_> {
        RawBatch {
            num_rows: self.qo_indptr.last().map_or(0, |&rows| rows.unsigned_abs() as usize),
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            slot_mapping: append.then_some(&self.slots),
            custom_mask: None,
        }
    }

    pub(super) fn batch(&self, append: bool) -> Result<Batch, BatchError> {
        Batch::from_raw(self.pool, &self.raw(append))
    }
}

/// Normal random values, drawn from a table of them: fast enough for gigabytes.
struct Normal<'a> {
    table: Vec<f32>,
    rng: &'a mut StdRng,
}

impl<'a> Normal<'a> {
    fn new(rng: &'a mut StdRng) -> Self {
        let table = (0..1 << 15).flat_map(|_| box_muller(rng)).collect();
        Self { table, rng }
    }

    fn fill(&mut self, values: &mut [f32]) {
        for four in values.chunks_mut(4) {
            let bits = self.rng.random::<u64>().to_le_bytes();
            for (value, index) in four.iter_mut().zip(bits.chunks_exact(2)) {
                *value = self.table[usize::from(u16::from_le_bytes([index[0], index[1]]))];
            }
        }
    }

    fn activation(&mut self, dtype: Dtype, shape: [usize; 3]) -> Activation {
        let mut values = vec![0.0; shape.iter().product()];
        self.fill(&mut values);
        Activation::new(Elements::from_f32(dtype, values), shape).expect("as many values as the shape has")
    }

    /// Fills a cache part by part, so that no second copy of it is needed.
    fn fill_cache(&mut self, cache: &mut HostKv) {
        const PART: usize = 1 << 16;
        let (dtype, scale) = (cache.format().dtype(), cache.format().k_scale());
        let mut values = vec![0.0; PART];
        for part in cache.buffer_mut().into_bytes().chunks_mut(PART * dtype.element_bytes()) {
            let values = &mut values[..part.len() / dtype.element_bytes()];
            self.fill(values);
            let activation = match dtype {
                KvDtype::F32 => Dtype::F32,
                KvDtype::F16 => Dtype::F16,
                KvDtype::Bf16 => Dtype::Bf16,
                KvDtype::Fp8E4m3 | KvDtype::Fp8Latent => {
                    part.iter_mut().zip(&*values).for_each(|(code, value)| *code = f32_to_fp8_e4m3(value / scale));
                    continue;
                }
            };
            part.copy_from_slice(Elements::from_f32(activation, values.to_vec()).as_bytes());
        }
    }
}

/// Two normal values.
pub(super) fn box_muller(rng: &mut StdRng) -> [f32; 2] {
    let (u, v): (f32, f32) = (rng.random(), rng.random());
    let radius = (-2.0 * (1.0 - u).ln()).sqrt();
    let (sin, cos) = (std::f32::consts::TAU * v).sin_cos();
    [radius * sin, radius * cos]
}

#[cfg(test)]
mod tests {
    use super::super::parse_workloads;
    use super::*;

    fn workload(page: u32, kv_dtype: &str) -> Workload {
        let text = format!(
            r#"[{{"name": "a", "kind": "mixed", "q_lens": [3, 1, 0], "kv_lens": [7, 8, 0], "heads": [4, 2],
            "dim": 16, "page": {page}, "kv_dtype": "{kv_dtype}", "append": true}}]"#
        );
        parse_workloads(&text).unwrap().remove(0)
    }

    #[test]
    fn every_page_size_and_dtype_makes_a_valid_problem() {
        for page in [1, 3, 8, 16] {
            for dtype in ["f32", "f16", "bf16", "fp8"] {
                let problem = problem_of(&workload(page, dtype), 1, u64::MAX).unwrap();
                assert_eq!(problem.batch.requests()[1].kv_len, 8);
                assert!(problem.new_kv.is_some() && problem.batch.slot_mapping().is_some());
            }
        }
    }

    #[test]
    fn a_problem_that_does_not_fit_is_refused_before_it_is_made() {
        let error = problem_of(&workload(16, "f32"), 1, 1000).unwrap_err();
        assert!(matches!(error, ProblemError::Memory { .. }), "{error}");
        let large = Workload { kv_lens: vec![u32::MAX; 3], ..workload(16, "f32") };
        assert!(matches!(problem_of(&large, 1, u64::MAX), Err(ProblemError::Shape(_))));
    }

    #[test]
    fn random_values_are_normal() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut values = vec![0.0; 1 << 18];
        Normal::new(&mut rng).fill(&mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }
}
