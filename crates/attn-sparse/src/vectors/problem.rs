//! Owns a case as a problem of the waist: caches, batch and tensors in `f32`.

use attn_metadata::{Batch, BatchError, HeadShape, PoolShape, RawBatch};
use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, KvSpec, PageSize, Slot, Values};

use super::file::{Case, CaseParams, Cube};

/// A case, ready for an implementation of the waist.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) page_size: PageSize,
    pub(crate) batch: Batch,
    pub(crate) slots: Vec<Slot>,
    pub(crate) cache: HostKv,
    pub(crate) index_cache: HostKv,
    pub(crate) q: Floats,
    pub(crate) k: Floats,
    pub(crate) v: Floats,
    pub(crate) index_q: Floats,
    pub(crate) index_k: Floats,
    pub(crate) index_v: Option<Floats>,
}

/// A packed tensor `[rows, heads, dim]`.
#[derive(Debug)]
pub(crate) struct Floats {
    data: Vec<f32>,
    shape: [usize; 3],
}

impl Floats {
    #[expect(clippy::cast_possible_truncation, reason = "the numbers of a case are exact in f32")]
    fn of(cube: &Cube<f64>, heads: u32, dim: u32) -> Self {
        let data: Vec<f32> = cube.iter().flatten().flatten().map(|&x| x as f32).collect();
        Self { data, shape: [cube.len(), heads as usize, dim as usize] }
    }

    pub(crate) fn tensor(&self) -> HostTensor<'_> {
        HostTensor::packed(self.data.as_slice(), self.shape).expect("a packed tensor")
    }
}

impl Problem {
    pub(crate) fn new(case: &Case, heads: HeadShape) -> Self {
        let (p, inputs) = (&case.params, &case.inputs);
        let pool = pool(case);
        let page_size = pool.page_size;
        let index_spec = KvSpec {
            num_kv_heads: 1,
            head_dim_k: p.idx_head_dim,
            values: if inputs.idx_v.is_some() { Values::Own(p.idx_head_dim) } else { Values::None },
        };
        let before = &inputs.caches_before;
        let spec = KvSpec::new(heads.num_kv_heads, heads.head_dim_qk);
        Self {
            page_size,
            batch: batch_of(case).expect("the file was checked"),
            slots: slots(case),
            cache: cache(spec, pool, &before.k_cache, Some(&before.v_cache)),
            index_cache: cache(index_spec, pool, &before.idx_k_cache, before.idx_v_cache.as_ref()),
            q: Floats::of(&inputs.q, p.num_q_heads, p.head_dim),
            k: Floats::of(&inputs.k, p.num_kv_heads, p.head_dim),
            v: Floats::of(&inputs.v, p.num_kv_heads, p.head_dim),
            index_q: Floats::of(&inputs.idx_q, p.num_idx_heads, p.idx_head_dim),
            index_k: Floats::of(&inputs.idx_k, 1, p.idx_head_dim),
            index_v: inputs.idx_v.as_ref().map(|v| Floats::of(v, 1, p.idx_head_dim)),
        }
    }
}

/// Where new KV goes. Rows behind the last token have a dummy slot in the file and write nothing here.
fn slots(case: &Case) -> Vec<Slot> {
    let used = case.inputs.cu_seqlens_q.last().copied().unwrap_or(0);
    let slot = |(row, &loc): (usize, &usize)| match i32::try_from(loc) {
        Ok(raw) if row < used => Slot::from_raw(raw),
        _ => Slot::PADDING,
    };
    case.inputs.out_cache_loc.iter().enumerate().map(slot).collect()
}

/// The pool of a case whose page size and slots are known to be sound.
fn pool(case: &Case) -> PoolShape {
    let CaseParams { num_slots, page_size, .. } = case.params;
    let num_pages = u32::try_from(num_slots.div_ceil(page_size as usize)).expect("slots of a file");
    PoolShape { num_pages, page_size: PageSize::new(page_size).expect("a page size of at most the slots") }
}

/// The batch of a case whose tables are known to be in range.
pub(super) fn batch_of(case: &Case) -> Result<Batch, BatchError> {
    let (inputs, pool, slots) = (&case.inputs, pool(case), slots(case));
    let narrow = |x: usize| i32::try_from(x).expect("numbers of a test");
    let (mut kv_indptr, mut kv_indices, mut kv_last_page_len) = (vec![0], Vec::new(), Vec::new());
    for (request, &len) in inputs.seq_lens.iter().enumerate() {
        let locations = &inputs.req_to_token[inputs.req_pool_indices[request]][..len];
        let page_size = pool.page_size.get() as usize;
        kv_indices.extend(locations.iter().step_by(page_size).map(|&loc| narrow(loc / page_size)));
        kv_indptr.push(narrow(kv_indices.len()));
        kv_last_page_len.push(pool.page_size.last_page_len(len).cast_signed());
    }
    let qo_indptr: Vec<i32> = inputs.cu_seqlens_q.iter().map(|&x| narrow(x)).collect();
    let raw = RawBatch {
        num_rows: inputs.q.len(),
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &kv_indices,
        kv_last_page_len: &kv_last_page_len,
        slot_mapping: Some(&slots),
        custom_mask: None,
    };
    Batch::from_raw(pool, &raw)
}

fn cache(spec: KvSpec, pool: PoolShape, k: &Cube<f64>, v: Option<&Cube<f64>>) -> HostKv {
    let mut kv = HostKv::for_spec(spec, pool.num_pages, pool.page_size, KvLayout::Nhd, KvFormat::F32)
        .expect("a cache of a test");
    let slots: Vec<Slot> = (0i32..).map(Slot::from_raw).take(k.len()).collect();
    let k = Floats::of(k, spec.num_kv_heads, spec.head_dim_k);
    let v = v.map(|v| Floats::of(v, spec.num_kv_heads, spec.values.head_dim()));
    kv.append(&slots, &k.tensor(), v.as_ref().map(Floats::tensor).as_ref()).expect("slots of the pool");
    kv
}
