//! Token-sparse attention against softmax in f64 over the listed rows, for every format; and its refusals.

#![allow(clippy::unwrap_used)]

use attn_metadata::{HostDevice, Layer, LayerParams, Lse};
use attn_mla::{IndexError, IndexList, MlaWidths, Scale, SparseAttention, SparseError, absorbed_params};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvScales, KvSpec, PageSize, Slot, Values};

const NUM_HEADS: u32 = 5;
const DEVICE: HostDevice = HostDevice::with_threads(2);

struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        #[allow(clippy::cast_precision_loss)]
        let unit = |bits: u64| (bits >> 40) as f32 / (1u64 << 22) as f32 - 2.0;
        (0..n).map(|_| unit(self.bits())).collect()
    }
}

fn widths() -> MlaWidths {
    MlaWidths::new(128, 16, 24, 24).unwrap()
}

fn layer() -> Layer {
    Layer::new(absorbed_params(widths(), NUM_HEADS, Scale::of(widths()))).unwrap()
}

fn cache(format: KvFormat, page_size: u32, layout: KvLayout, rng: &mut Rng) -> HostKv {
    let page_size = PageSize::new(page_size).unwrap();
    let num_pages = 360 / page_size.get();
    let mut cache = HostKv::for_spec(layer().kv(), num_pages, page_size, layout, format).unwrap();
    for slot in 0..i32::try_from(cache.shape().num_slots()).unwrap() {
        let row = rng.floats(144);
        cache.append(&[Slot::from_raw(slot)], &HostTensor::packed(&row, [1, 1, 144]).unwrap(), None).unwrap();
    }
    cache
}

/// Softmax of one query over the rows of some slots, in f64.
fn exact(q: &[f32], cache: &HostKv, slots: &[i32], scale: f32, sink: f64) -> (Vec<f64>, f64) {
    let rows: Vec<Vec<f32>> = slots
        .iter()
        .map(|slot| {
            let mut row = vec![0.0; 144];
            cache.read_k(Slot::from_raw(*slot), 0, &mut row);
            row
        })
        .collect();
    let dot = |row: &Vec<f32>| q.iter().zip(row).map(|(q, r)| f64::from(*q) * f64::from(*r)).sum::<f64>();
    let scores: Vec<f64> = rows.iter().map(|row| dot(row) * f64::from(scale)).collect();
    let max = scores.iter().copied().fold(sink, f64::max);
    if max == f64::NEG_INFINITY {
        return (vec![0.0; 128], max);
    }
    let sum = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (sink - max).exp();
    let out =
        |d: usize| scores.iter().zip(&rows).map(|(s, row)| (s - max).exp() * f64::from(row[d])).sum::<f64>() / sum;
    ((0..128).map(out).collect(), max + sum.ln())
}

/// Lists of `topk` entries: some slots in any order, -1 anywhere, a short one, an empty one, all slots.
fn lists(num_slots: i32, topk: usize, rng: &mut Rng) -> Vec<i32> {
    let mut all = Vec::new();
    for count in [topk, topk / 2, 3, 0, topk] {
        let mut slots: Vec<i32> = (0..num_slots).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, usize::try_from(rng.bits() % (i as u64 + 1)).unwrap());
        }
        let mut list: Vec<i32> = slots.into_iter().take(count.min(topk)).collect();
        list.resize(topk, -1);
        for i in (1..list.len()).rev() {
            list.swap(i, usize::try_from(rng.bits() % (i as u64 + 1)).unwrap());
        }
        all.extend(list);
    }
    all
}

#[test]
fn each_token_attends_to_the_slots_of_its_list() {
    let mut rng = Rng(0x1234_5678_9ABC);
    let scaled = KvFormat::Fp8E4m3(KvScales::new(0.01, 0.01).unwrap());
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, scaled, KvFormat::Fp8Latent];
    for (format, page_size) in formats.into_iter().zip([1, 16, 64, 3, 20]) {
        for (layout, sinks) in [(KvLayout::Nhd, None), (KvLayout::Hnd, Some(vec![0.5; NUM_HEADS as usize]))] {
            let cache = cache(format, page_size, layout, &mut rng);
            let layer = Layer::new(LayerParams { sinks: sinks.clone(), ..layer().params().clone() }).unwrap();
            let mut attention = SparseAttention::new(&layer, format, Dtype::F32, DEVICE).unwrap();
            for topk in [7, 150, 300] {
                let num_slots = cache.shape().num_slots();
                let indices = lists(i32::try_from(num_slots).unwrap(), topk, &mut rng);
                let mut list = IndexList::new();
                list.set(&indices, topk, None, num_slots).unwrap();
                let (tokens, heads) = (list.num_tokens(), NUM_HEADS as usize);
                let q = rng.floats(tokens * heads * 144);
                let (mut out, mut lse) =
                    (vec![f32::NAN; tokens * heads * 128], vec![Lse::from_ln(9.0); tokens * heads]);
                let view = HostTensor::packed(&q, [tokens, heads, 144]).unwrap();
                let mut written = HostTensorMut::packed(&mut out, [tokens, heads, 128]).unwrap();
                attention.attend(&view, &cache, &list, &mut written, Some(&mut lse)).unwrap();
                for state in 0..tokens * heads {
                    let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |_| 0.5);
                    let q = &q[state * 144..][..144];
                    let (want, want_lse) = exact(q, &cache, list.slots(state / heads), layer.sm_scale(), sink);
                    for (got, want) in out[state * 128..][..128].iter().zip(want) {
                        assert!((f64::from(*got) - want).abs() <= 2e-5, "{format:?} topk {topk}: {got} for {want}");
                    }
                    let got = f64::from(lse[state].ln());
                    assert!(got == want_lse || (got - want_lse).abs() <= 2e-5, "{format:?}: LSE {got} for {want_lse}");
                }
            }
        }
    }
}

#[test]
fn many_tokens_are_copied_a_part_at_a_time() {
    let mut rng = Rng(99);
    let cache = cache(KvFormat::F32, 4, KvLayout::Nhd, &mut rng);
    let mut attention = SparseAttention::new(&layer(), KvFormat::F32, Dtype::F32, DEVICE).unwrap();
    // 300 tokens x 320 rows of 576 bytes are more than one copy holds.
    let (tokens, topk) = (300usize, 320usize);
    let indices: Vec<i32> =
        (0..tokens * topk).map(|i| i32::try_from((i / topk * 7 + i % topk) % 360).unwrap()).collect();
    let mut list = IndexList::new();
    list.set(&indices, topk, None, 360).unwrap();
    let q = rng.floats(tokens * 5 * 144);
    let run = |attention: &mut SparseAttention, range: std::ops::Range<usize>| {
        let mut part = IndexList::new();
        part.set(&indices[range.start * topk..range.end * topk], topk, None, 360).unwrap();
        let mut out = vec![f32::NAN; range.len() * 5 * 128];
        let view = HostTensor::packed(&q[range.start * 720..range.end * 720], [range.len(), 5, 144]).unwrap();
        let mut written = HostTensorMut::packed(&mut out, [range.len(), 5, 128]).unwrap();
        attention.attend(&view, &cache, &part, &mut written, None).unwrap();
        out
    };
    let whole = run(&mut attention, 0..tokens);
    for token in [0, 1, 150, 298, 299] {
        assert_eq!(whole[token * 640..(token + 1) * 640], run(&mut attention, token..token + 1), "token {token}");
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_written() {
    let mut rng = Rng(5);
    let cache = cache(KvFormat::F32, 4, KvLayout::Nhd, &mut rng);
    let mut attention = SparseAttention::new(&layer(), KvFormat::F32, Dtype::F32, DEVICE).unwrap();
    let mut list = IndexList::new();
    assert_eq!(list.set(&[1, 1], 2, None, 360), Err(IndexError::Duplicate { token: 0, entry: 1, slot: 1 }));
    let out_of_range = IndexError::OutOfRange { token: 0, entry: 1, got: 360, num_slots: 360 };
    assert_eq!(list.set(&[1, 360], 2, None, 360), Err(out_of_range));
    list.set(&[1, 2, 3, -1], 2, None, 361).unwrap();
    let q = vec![0.5; 2 * 5 * 144];
    let q = HostTensor::packed(&q, [2, 5, 144]).unwrap();
    let mut refused = |q: &HostTensor<'_>, list: &IndexList, lse: usize| {
        let (mut out, mut lse) = (vec![7.0f32; 2 * 5 * 128], vec![Lse::EMPTY; lse]);
        let mut written = HostTensorMut::packed(&mut out, [2, 5, 128]).unwrap();
        let error = attention.attend(q, &cache, list, &mut written, Some(&mut lse)).unwrap_err();
        assert!(out.iter().all(|x| *x == 7.0));
        error
    };
    let error = refused(&q, &list, 10);
    assert!(matches!(error, SparseError::Pool { list_slots: 361, cache_slots: 360 }), "{error}");
    list.set(&[1, 2, 3, -1], 2, None, 360).unwrap();
    assert!(matches!(refused(&q, &list, 9), SparseError::LseLen { expected: 10, got: 9 }));
    let narrow = HostTensor::strided(q.data(), [2, 5, 143], 720, 144).unwrap();
    assert!(matches!(refused(&narrow, &list, 10), SparseError::Shape { tensor: "q", got: [2, 5, 143], .. }));
    let error = SparseAttention::new(&layer(), KvFormat::Bf16, Dtype::F32, DEVICE).unwrap().attend(
        &q,
        &cache,
        &list,
        &mut HostTensorMut::packed(&mut [0.0f32; 1280][..], [2, 5, 128]).unwrap(),
        None,
    );
    assert!(matches!(error, Err(SparseError::Cache { got_format: KvFormat::F32, .. })));
}

#[test]
fn layers_that_need_positions_are_refused() {
    let refused = |params: LayerParams| {
        let layer = Layer::new(params).unwrap();
        SparseAttention::new(&layer, KvFormat::F32, Dtype::F32, DEVICE).unwrap_err().to_string()
    };
    let params = || layer().params().clone();
    assert!(refused(LayerParams { window_left: Some(3), ..params() }).ends_with("it has a window"));
    assert!(refused(LayerParams { alibi_slopes: Some(vec![0.5; 5]), ..params() }).ends_with("it has ALiBi"));
    assert!(refused(LayerParams { values_in_keys: false, ..params() }).ends_with("its values are beside its keys"));
    let narrow = MlaWidths::new(40, 8, 8, 8).unwrap();
    let layer = Layer::new(absorbed_params(narrow, 2, Scale::of(narrow))).unwrap();
    let error = SparseAttention::new(&layer, KvFormat::Fp8Latent, Dtype::F32, DEVICE).unwrap_err();
    assert!(error.to_string().ends_with("its rows cannot be stored in this format"), "{error}");
    assert_eq!(layer.kv(), KvSpec { num_kv_heads: 1, head_dim_k: 48, values: Values::InKeys(40) });
}
