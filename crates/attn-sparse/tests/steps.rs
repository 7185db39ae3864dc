//! What holds over steps: prefilled or decoded, shared selections, idle batches, plans, stores.

#![allow(clippy::unwrap_used)]

mod support;

use attn_metadata::{
    AttentionBackend as _, Batch, Bucket, CaptureLimits, CreateError, FamilyRef, HeadShape, Layer, LayerParams, Lse,
    PoolShape, RawBatch, RunError,
};
use attn_reference::cpu::Isa;
use attn_reference::cpu::tiles::Workers;
use attn_reference::verify::VerifyBackend;
use attn_sparse::cpu::SparseAttend;
use attn_sparse::plan::{DecodePlans, PlanError, PlanLimits};
use attn_sparse::stage::{Attend as _, AttendInput, AttendOutput, Step};
use attn_sparse::store::{NewRows, store};
use attn_sparse::table::PageTable;
use attn_sparse::{BlockParams, Fanout, Selection, SparseBackend, SparseFamily, SparseParams, Unit};
use kvpool::{AppendError, HostTensor, HostTensorMut, KvDtype, PageSize, Slot};
use support::{Problem, Shape};

const BLOCKS: BlockParams = BlockParams { block_size: 8, topk: 3, init_blocks: 1, local_blocks: 1 };

fn shape(requests: Vec<(usize, usize)>) -> Shape {
    Shape {
        heads: HeadShape::new(6, 2, 16),
        params: SparseParams { has_index_value: true, ..SparseParams::new(BLOCKS, 4, 12) },
        sm_scale: 0.25,
        page_size: 4,
        requests,
        padding_rows: 0,
        kv_dtype: KvDtype::F32,
    }
}

#[test]
fn a_row_has_the_same_bits_prefilled_and_decoded() {
    let whole = Problem::new(shape(vec![(40, 25)]), 3);
    let mut backend = whole.backend(&attn_sparse::entry());
    let (_, prefilled) = whole.run(&mut *backend);
    let last = Problem::new(shape(vec![(64, 1)]), 3);
    // The same tokens, of which all but the last are cached: the problem draws them in the same order.
    let mut last_row = last;
    let width = |data: &[f32]| data.len() / 25;
    let tail = |data: &[f32]| data[24 * width(data)..].to_vec();
    (last_row.q, last_row.index_q) = (tail(&whole.q), tail(&whole.index_q));
    let (_, decoded) = last_row.run(&mut *backend);
    assert_eq!(tail(&prefilled.out), decoded.out);
    assert_eq!(tail(&prefilled.lse), decoded.lse);
    assert_eq!(tail(&prefilled.index_out), decoded.index_out);
}

fn shared_layer(shape: &Shape, block_size: u32) -> Layer {
    let blocks = BlockParams { block_size, ..shape.params.blocks };
    let family = SparseFamily::shared(SparseParams { blocks, ..shape.params }, &shape.heads).unwrap();
    Layer::new(LayerParams {
        sm_scale: shape.sm_scale,
        family: Some(FamilyRef::new(family)),
        ..LayerParams::causal(shape.heads)
    })
    .unwrap()
}

#[test]
fn a_layer_can_use_the_selection_of_an_earlier_one() {
    for entry in [attn_sparse::entry(), attn_sparse::oracle_entry()] {
        let problem = Problem::new(shape(vec![(90, 3), (5, 1)]), 8);
        let layers = vec![problem.layer(), shared_layer(&problem.shape, 8), problem.layer()];
        let mut backend = problem.backend_of(&entry, layers);
        let step = backend.prepare_metadata(&problem.batch).unwrap();
        let early = problem.forward(&mut *backend, &step, 1, false).unwrap_err();
        let source = std::error::Error::source(&early).unwrap().to_string();
        assert_eq!(source, "layer 1 shares the selection of layer 0, which has not run in this step");
        let own = problem.forward(&mut *backend, &step, 0, true).unwrap();
        let shared = problem.forward(&mut *backend, &step, 1, false).unwrap();
        // The same queries and KV under the same selection.
        assert_eq!((&own.out, &own.lse), (&shared.out, &shared.lse), "{}", entry.name);
        let unwanted = problem.forward(&mut *backend, &step, 1, true).unwrap_err();
        assert!(matches!(unwanted, RunError::Unwanted { .. }), "{unwanted}");
        let next = backend.prepare_metadata(&problem.batch).unwrap();
        assert!(problem.forward(&mut *backend, &next, 1, false).is_err(), "a selection of the step before");
    }
}

#[test]
fn a_selection_that_cannot_be_shared_is_refused_at_creation() {
    let problem = Problem::new(shape(vec![(9, 1)]), 8);
    let refusal = |layers: Vec<Layer>| match SparseBackend::new(&problem.config(layers)) {
        Err(CreateError::Unsupported { reasons, .. }) => reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let first = refusal(vec![shared_layer(&problem.shape, 8), problem.layer()]);
    assert_eq!(first, ["layer 0: there is no layer before it whose selection it could share"]);
    let other_blocks = refusal(vec![problem.layer(), shared_layer(&problem.shape, 4)]);
    assert_eq!(other_blocks, ["layer 1: it cannot share the selection of layer 0: blocks or heads differ"]);
}

/// Captured steps and the last other one are live at once; each is compared with the oracle's results for its own batch.
#[test]
fn a_step_is_compared_with_its_own_batch_whatever_was_prepared_since() {
    // As many rows, so that the oracle takes either for the other's.
    let (one, other) = (Problem::new(shape(vec![(40, 3)]), 3), Problem::new(shape(vec![(30, 2), (9, 1)]), 4));
    let inner = one.backend(&attn_sparse::entry());
    let mut backend = VerifyBackend::new(inner, 1).with_families(one.backend(&attn_sparse::oracle_entry()));
    let bucket = Bucket { num_requests: 2, num_rows: 3 };
    let limits = CaptureLimits {
        buckets: vec![bucket],
        max_kv_len: 64,
        num_pool_pages: other.batch.pool().num_pages,
        appends: other.batch.slot_mapping().is_some(),
    };
    backend.init_capture_graph(&limits).unwrap();
    let mut captured = backend.prepare_for_capture(bucket).unwrap();
    let step = backend.prepare_metadata(&one.batch).unwrap();
    backend.prepare_for_replay(&mut captured, &other.batch).unwrap();
    one.forward(&mut backend, &step, 0, true).unwrap();
    other.forward(&mut backend, &captured, 0, true).unwrap();
    one.forward(&mut backend, &step, 0, true).unwrap();
    let errors = backend.handle().report().layers[0];
    assert_eq!((errors.num_vectors, errors.num_anomalies), (3 * 3 * 6, 0), "{errors:?}");
    assert!(errors.max_rel < 1e-5 && errors.max_lse_abs < 1e-5, "{errors:?}");
}

/// The third stage alone, with a selection and outputs of other shapes than its heads'.
#[test]
fn the_third_stage_names_what_does_not_fit() {
    let problem = Problem::new(shape(vec![(20, 2)]), 5);
    let mut workers = Workers::new(Isa::detect(), Some(1), "test").unwrap();
    let mut attend = |fanout, rows: usize, num_lse: usize| {
        let mut selection = Selection::new(Unit::block(8), fanout);
        selection.reset_for(&problem.batch, 3);
        let (mut out, mut lse) = (vec![0.0; rows * 6 * 16], vec![Lse::EMPTY; num_lse]);
        let input = AttendInput {
            q: HostTensor::packed(&problem.q[..], [2, 6, 16]).unwrap(),
            cache: &problem.cache,
            sm_scale: 0.25,
        };
        let output =
            AttendOutput { out: HostTensorMut::packed(&mut out[..], [rows, 6, 16]).unwrap(), lse: Some(&mut lse[..]) };
        let mut step = Step { batch: &problem.batch, num_rows: 2, workers: &mut workers };
        let mut stage = SparseAttend::new(problem.shape.heads);
        stage.attend(&mut step, &input, &selection, output).map_err(|error| error.to_string())
    };
    assert_eq!(attend(Fanout::per_kv_head(2), 2, 12), Ok(()));
    assert_eq!(attend(Fanout::Shared, 2, 12), Ok(()));
    for sets in [1, 3] {
        let error = attend(Fanout::per_kv_head(sets), 2, 12).unwrap_err();
        assert!(error.ends_with(&format!("or one for all, the selection has {sets}")), "{error}");
    }
    assert_eq!(attend(Fanout::Shared, 1, 12).unwrap_err(), "out is [1, 6, 16], [2, 6, 16] is needed");
    assert_eq!(attend(Fanout::Shared, 2, 6).unwrap_err(), "lse is [1, 6, 1], [2, 6, 1] is needed");
}

#[test]
fn an_idle_batch_writes_zeros() {
    let idle = Problem::new(Shape { padding_rows: 3, ..shape(Vec::new()) }, 1);
    for entry in [attn_sparse::entry(), attn_sparse::oracle_entry()] {
        let (_, results) = idle.run(&mut *idle.backend(&entry));
        assert!(results.out.iter().chain(&results.index_out).all(|&x| x == 0.0), "{}", entry.name);
        assert!(results.lse.iter().all(|&x| x == f32::NEG_INFINITY), "{}", entry.name);
        assert_eq!(results.out.len(), 3 * 6 * 16);
    }
    let nothing = Problem::new(shape(Vec::new()), 1);
    let (_, results) = nothing.run(&mut *nothing.backend(&attn_sparse::entry()));
    assert!(results.out.is_empty());
}

#[test]
fn layers_that_are_not_sparse_are_refused() {
    let problem = Problem::new(shape(vec![(9, 1)]), 8);
    let dense = Layer::new(LayerParams::causal(problem.shape.heads)).unwrap();
    let error = SparseBackend::new(&problem.config(vec![problem.layer(), dense])).unwrap_err();
    assert!(error.to_string().contains("plain attention is not among sparse"), "{error}");
    let sinks = LayerParams { sinks: Some(vec![0.0; 6]), ..problem.layer().params().clone() };
    let error = SparseBackend::new(&problem.config(vec![Layer::new(sinks).unwrap()])).unwrap_err();
    assert!(error.to_string().contains("no support for sinks"), "{error}");
    let full = LayerParams { causal: false, ..problem.layer().params().clone() };
    assert!(Layer::new(full).unwrap_err().to_string().contains("the layer must be causal"));
    let window = LayerParams { window_left: Some(4), ..problem.layer().params().clone() };
    assert!(Layer::new(window).unwrap_err().to_string().contains("there can be no window"));
}

fn decode(lens: &[i32]) -> Batch {
    let pool = PoolShape { num_pages: 64, page_size: PageSize::new(4).unwrap() };
    let (mut kv_indptr, mut kv_indices, mut last) = (vec![0], Vec::new(), Vec::new());
    for &len in lens {
        kv_indices.extend((0..(len + 3) / 4).map(|page| 63 - page));
        kv_indptr.push(i32::try_from(kv_indices.len()).unwrap());
        last.push(pool.page_size.last_page_len(usize::try_from(len).unwrap()).cast_signed());
    }
    let qo_indptr: Vec<i32> = (0i32..).take(lens.len() + 1).collect();
    let raw = RawBatch {
        num_rows: lens.len(),
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &kv_indices,
        kv_last_page_len: &last,
        slot_mapping: None,
        custom_mask: None,
    };
    Batch::from_raw(pool, &raw).unwrap()
}

#[test]
fn plans_of_a_batch_size_keep_their_buffers() {
    let page_size = PageSize::new(4).unwrap();
    let limits = PlanLimits { blocks: BLOCKS, index_group: 2, max_kv_len: 40, page_size };
    let mut plans = DecodePlans::new(limits);
    assert_eq!(plans.get(2).unwrap_err(), PlanError::NotPrepared { got: 2 });
    assert_eq!(plans.prepare(&decode(&[])), Ok(None), "an idle batch has no plan");
    let addresses = |plans: &DecodePlans| {
        let plan = plans.get(2).unwrap();
        [&plan.segment_lens, &plan.segment_offsets, &plan.page_indptr, &plan.qo_offset, &plan.indices]
            .map(|v| v.as_ptr())
    };
    plans.prepare(&decode(&[3, 9])).unwrap();
    let before = addresses(&plans);
    plans.prepare(&decode(&[7])).unwrap();
    let plan = plans.prepare(&decode(&[40, 5])).unwrap().unwrap();
    assert_eq!((&plan.segment_lens[..], &plan.segment_offsets[..]), (&[40, 5][..], &[0, 40, 45][..]));
    assert_eq!((&plan.page_indptr[..], &plan.qo_offset[..]), (&[0, 10, 12][..], &[39, 4][..]));
    assert_eq!(plan.indices()[9..], [54, 63, 62]);
    assert_eq!(plan.reference_kv_len, 2 * 3 * 8);
    let kept = plan.clone();
    assert_eq!(plans.prepare(&decode(&[41, 5])), Err(PlanError::TooLong { request: 0, got: 41, max: 40 }));
    let prefill = Problem::new(shape(vec![(3, 1), (3, 2)]), 1).batch;
    assert_eq!(plans.prepare(&prefill), Err(PlanError::NotDecode { request: 1, got: 2 }));
    let mut other = DecodePlans::new(PlanLimits { page_size: PageSize::new(8).unwrap(), ..limits });
    assert!(matches!(other.prepare(&decode(&[3])), Err(PlanError::PageSize { .. })));
    assert_eq!((plans.get(2).unwrap(), addresses(&plans)), (&kept, before));
}

#[test]
fn a_store_writes_both_caches_or_neither() {
    let problem = Problem::new(shape(vec![(3, 2)]), 4);
    let slots = problem.batch.slot_mapping().unwrap().to_vec();
    let tensor = |data, heads, dim| HostTensor::packed(data, [2, heads, dim]).unwrap();
    let (k, v) = (tensor(&problem.k[..], 2, 16), tensor(&problem.v[..], 2, 16));
    let (index_k, index_v) = (tensor(&problem.index_k[..], 1, 12), tensor(&problem.index_v[..], 1, 12));
    let attempt = |slots: &[Slot], v: Option<HostTensor<'_>>, index_v: Option<HostTensor<'_>>| {
        let (mut main, mut side) = (problem.cache.clone(), problem.index_cache.clone());
        let result = store(
            slots,
            &mut NewRows { cache: &mut main, k, v },
            Some(&mut NewRows { cache: &mut side, k: index_k, v: index_v }),
        );
        let bytes = |kv: &kvpool::HostKv| kv.buffer().as_slice().as_bytes().to_vec();
        let is_untouched = (bytes(&main), bytes(&side)) == (bytes(&problem.cache), bytes(&problem.index_cache));
        assert_eq!(result.is_err(), is_untouched);
        result.map(|()| (main, side))
    };
    assert_eq!(attempt(&slots, Some(v), None).unwrap_err(), AppendError::MissingValues);
    assert_eq!(attempt(&slots, None, Some(index_v)).unwrap_err(), AppendError::MissingValues);
    let outside = [slots[0], Slot::from_raw(9999)];
    assert!(matches!(attempt(&outside, Some(v), Some(index_v)), Err(AppendError::SlotOutOfRange { row: 1, .. })));
    assert!(matches!(attempt(&slots[..1], Some(v), Some(index_v)), Err(AppendError::Shape { .. })));
    let (main, side) = attempt(&slots, Some(v), Some(index_v)).unwrap();
    let (mut main_row, mut side_row) = ([0.0; 16], [0.0; 12]);
    main.read_v(slots[1], 1, &mut main_row);
    side.read_k(slots[1], 0, &mut side_row);
    assert_eq!((&main_row[..], &side_row[..]), (&problem.v[48..64], &problem.index_k[12..24]));
}

#[test]
fn a_page_table_refuses_what_it_cannot_hold() {
    let problem = Problem::new(shape(vec![(30, 1)]), 4);
    let of = |unit, visible: u32| {
        let (ids, visible) = (vec![0], vec![visible]);
        Selection::from_table(unit, Fanout::Shared, 1, &visible, &ids).unwrap()
    };
    let mut table = PageTable::default();
    let refusal = |table: &mut PageTable, selection| table.fill(&problem.batch, &selection).unwrap_err().to_string();
    let tokens = refusal(&mut table, of(Unit::Token, 31));
    assert_eq!(tokens, "pages of 4 tokens do not tile units of 1 tokens");
    let stale = refusal(&mut table, of(Unit::block(8), 30));
    assert_eq!(stale, "the selection was made for 1 rows of another step, the batch has 1");
    table.fill(&problem.batch, &of(Unit::block(8), 31)).unwrap();
    assert_eq!(table.real_seq_lens, [8]);
    assert_eq!(table.indices, problem.batch.kv_indices()[..2]);
}
