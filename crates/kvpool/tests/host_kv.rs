//! Contracts of the host storage: an append changes the named bytes and no other, for every dtype and layout; refusals
//! write nothing; planes may lie anywhere but not on each other.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use half::{bf16, f16};
use kvpool::{
    AppendError, CopyPageError, HostKv, HostTensor, KvBuffer, KvDtype, KvFormat, KvLayout, KvPageShape, KvPart,
    KvPlane, KvPlaneLayout, KvScales, KvShape, KvSpec, KvStrides, PageId, PageSize, ShapeError, Slot, Values,
    f32_to_fp8_e4m3,
};
use proptest::prelude::*;

const HEADS: u32 = 2;
const POISON: u8 = 0xa5;

fn shape(num_pages: u32, page_size: u32) -> KvShape {
    let page_size = PageSize::new(page_size).unwrap();
    KvPageShape { page_size, num_kv_heads: HEADS, head_dim_k: 5, head_dim_v: 3 }.with_pages(num_pages).unwrap()
}

fn formats() -> [KvFormat; 4] {
    [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Fp8E4m3(KvScales::new(0.5, 2.0).unwrap())]
}

/// Gaps between vectors, tokens and pages, and V before K.
fn padded(shape: KvShape, format: KvFormat) -> HostKv {
    let strides = |dim: usize| {
        let (head, tokens) = (dim + 1, shape.page_size.get() as usize);
        let token = HEADS as usize * head + 2;
        KvStrides { page: tokens * token + 7, token, head }
    };
    let v = KvPlaneLayout::new(3, strides(3), 3);
    let k = KvPlaneLayout::new(v.extent(&shape).unwrap() + 4, strides(5), 5);
    let buffer = KvBuffer::zeroed(format.dtype(), k.extent(&shape).unwrap() + 6);
    HostKv::from_parts(shape, format, buffer, k, v).unwrap()
}

fn caches(shape: KvShape, format: KvFormat) -> Vec<HostKv> {
    let mut caches = vec![padded(shape, format)];
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        caches.push(HostKv::new(shape, layout, format).unwrap());
        caches.push(HostKv::interleaved(shape, layout, format).unwrap());
    }
    for cache in &mut caches {
        cache.buffer_mut().into_bytes().fill(POISON);
    }
    caches
}

/// The stored bytes of a value, in the machine's order.
fn encoded(x: f32, dtype: KvDtype, scale: f32) -> Vec<u8> {
    match dtype {
        KvDtype::F32 => x.to_ne_bytes().to_vec(),
        KvDtype::F16 => f16::from_f32(x).to_ne_bytes().to_vec(),
        KvDtype::Bf16 => bf16::from_f32(x).to_ne_bytes().to_vec(),
        KvDtype::Fp8E4m3 => vec![f32_to_fp8_e4m3(x / scale)],
        KvDtype::Fp8Latent => panic!("a value of a latent row has no bytes of its own"),
    }
}

fn put(
    bytes: &mut [u8],
    plane: KvPlane<'_>,
    slot: Slot,
    size: PageSize,
    scale: f32,
    value: impl Fn(u32, usize) -> f32,
) {
    let dtype = plane.data.dtype();
    for head in 0..HEADS {
        let start = plane.layout.element(slot.page(size).unwrap(), slot.offset(size).unwrap(), head);
        for d in 0..plane.layout.head_dim {
            let at = (start + d) * dtype.element_bytes();
            bytes[at..at + dtype.element_bytes()].copy_from_slice(&encoded(value(head, d), dtype, scale));
        }
    }
}

fn value(row: usize, head: u32, d: usize, is_v: bool) -> f32 {
    let cell = (row * 31 + head as usize * 7 + d * 3 + usize::from(is_v)) % 199;
    (f32::from(u16::try_from(cell).unwrap()) - 99.0) / 16.0 // exact in f32, f16 and bf16
}

fn rows<T>(n: usize, dim: usize, is_v: bool, from: impl Fn(f32) -> T) -> Vec<T> {
    let cells = (0..n).flat_map(|row| (0..HEADS).flat_map(move |head| (0..dim).map(move |d| (row, head, d))));
    cells.map(|(row, head, d)| from(value(row, head, d, is_v))).collect()
}

fn check_append(cache: &mut HostKv, slots: &[Slot], k: &HostTensor<'_>, v: &HostTensor<'_>) {
    let mut expected = cache.buffer().as_slice().as_bytes().to_vec();
    let (size, format) = (cache.shape().page_size, cache.format());
    for (row, slot) in slots.iter().enumerate().filter(|(_, slot)| !slot.is_padding()) {
        put(&mut expected, cache.k(), *slot, size, format.k_scale(), |head, d| value(row, head, d, false));
        put(&mut expected, cache.v(), *slot, size, format.v_scale(), |head, d| value(row, head, d, true));
    }
    cache.append(slots, k, Some(v)).unwrap();
    assert!(expected == cache.buffer().as_slice().as_bytes(), "{format:?} {:?} slots {slots:?}", cache.k().layout);
}

fn slots(raw: &[i32]) -> Vec<Slot> {
    raw.iter().copied().map(Slot::from_raw).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 60 }))]

    #[test]
    fn append_writes_exactly_the_named_slots(
        page_size in prop::sample::select(vec![1u32, 2, 3, 16]),
        picks in prop::collection::vec(-1i32..48, 0..9),
    ) {
        let shape = shape(48 / page_size, page_size);
        let slots = slots(&picks);
        let n = slots.len();
        for format in formats() {
            for mut cache in caches(shape, format) {
                let (k, v) = (rows(n, 5, false, |x| x), rows(n, 3, true, |x| x));
                let tensors = (HostTensor::packed(&k, [n, 2, 5]).unwrap(), HostTensor::packed(&v, [n, 2, 3]).unwrap());
                check_append(&mut cache, &slots, &tensors.0, &tensors.1);
                let (k, v) = (rows(n, 5, false, f16::from_f32), rows(n, 3, true, f16::from_f32));
                let tensors = (HostTensor::packed(&k, [n, 2, 5]).unwrap(), HostTensor::packed(&v, [n, 2, 3]).unwrap());
                check_append(&mut cache, &slots, &tensors.0, &tensors.1);
                let (k, v) = (rows(n, 5, false, bf16::from_f32), rows(n, 3, true, bf16::from_f32));
                let tensors = (HostTensor::packed(&k, [n, 2, 5]).unwrap(), HostTensor::packed(&v, [n, 2, 3]).unwrap());
                check_append(&mut cache, &slots, &tensors.0, &tensors.1);
            }
        }
    }
}

#[test]
fn first_and_last_slot_and_padding_touch_nothing_else() {
    let shape = shape(4, 3);
    for raw in [vec![-1, -1], vec![0, -1], vec![-1, 11], vec![0, 11]] {
        for format in formats() {
            for mut cache in caches(shape, format) {
                let (k, v) = (rows(2, 5, false, |x| x), rows(2, 3, true, |x| x));
                let k = HostTensor::packed(&k, [2, 2, 5]).unwrap();
                check_append(&mut cache, &slots(&raw), &k, &HostTensor::packed(&v, [2, 2, 3]).unwrap());
            }
        }
    }
}

#[test]
fn a_refused_append_writes_nothing() {
    let (k, v) = (rows(2, 5, false, |x| x), rows(2, 3, true, |x| x));
    let (k, v) = (HostTensor::packed(&k, [2, 2, 5]).unwrap(), HostTensor::packed(&v, [2, 2, 3]).unwrap());
    let mut cache = caches(shape(4, 3), KvFormat::F16).remove(0);
    let before = cache.clone();
    let mut refused = |raw: &[i32], k: &HostTensor<'_>, v: &HostTensor<'_>| {
        let error = cache.append(&slots(raw), k, Some(v)).unwrap_err();
        assert!(cache.buffer().as_slice().as_bytes() == before.buffer().as_slice().as_bytes());
        error
    };
    for bad in [12, i32::MAX, -2, i32::MIN] {
        let error = refused(&[0, bad], &k, &v);
        assert_eq!(error, AppendError::SlotOutOfRange { row: 1, slot: bad, num_slots: 12 });
    }
    let error = refused(&[0], &k, &v);
    assert_eq!(error, AppendError::Shape { part: KvPart::K, got: [2, 2, 5], expected: [1, 2, 5] });
    let error = refused(&[0, 1], &k, &k);
    assert_eq!(error, AppendError::Shape { part: KvPart::V, got: [2, 2, 5], expected: [2, 2, 3] });
    assert_eq!(error.to_string(), "v is [2, 2, 5] rows x heads x dim, expected [2, 2, 3]");
    assert_eq!(cache.append(&slots(&[0, 1]), &k, None), Err(AppendError::MissingValues));
}

#[test]
fn doubling_the_scale_and_the_data_stores_the_same_codes() {
    let (k, v) = (rows(1, 5, false, |x| x), rows(1, 3, true, |x| x));
    let doubled = |data: &[f32]| data.iter().map(|x| 2.0 * x).collect::<Vec<_>>();
    let stored = |k_scale, v_scale, k: &[f32], v: &[f32]| {
        let format = KvFormat::Fp8E4m3(KvScales::new(k_scale, v_scale).unwrap());
        let mut cache = HostKv::new(shape(1, 1), KvLayout::Nhd, format).unwrap();
        let k = HostTensor::packed(k, [1, 2, 5]).unwrap();
        cache.append(&[Slot::from_raw(0)], &k, Some(&HostTensor::packed(v, [1, 2, 3]).unwrap())).unwrap();
        cache
    };
    let (once, twice) = (stored(0.5, 4.0, &k, &v), stored(1.0, 8.0, &doubled(&k), &doubled(&v)));
    assert_eq!(once.buffer(), twice.buffer());
    let (mut a, mut b) = ([0.0; 3], [0.0; 3]);
    once.read_v(Slot::from_raw(0), 1, &mut a);
    twice.read_v(Slot::from_raw(0), 1, &mut b);
    assert_eq!(a.map(|x| 2.0 * x), b);
}

#[test]
fn out_of_range_values_end_as_each_dtype_says() {
    let k = [1e30, -1e30, f32::NAN, f32::INFINITY, 2e-10];
    let k: Vec<f32> = [k, k].concat();
    let stored = |format| {
        let mut cache = HostKv::new(shape(1, 1), KvLayout::Nhd, format).unwrap();
        let k = HostTensor::packed(&k, [1, 2, 5]).unwrap();
        cache.append(&[Slot::from_raw(0)], &k, Some(&HostTensor::packed(&[0.0; 6][..], [1, 2, 3]).unwrap())).unwrap();
        let mut out = [0.0; 5];
        cache.read_k(Slot::from_raw(0), 1, &mut out);
        assert!(out[2].is_nan());
        [out[0], out[1], out[3], out[4]]
    };
    assert_eq!(stored(KvFormat::F16), [f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY, 0.0]);
    assert_eq!(stored(formats()[3]), [224.0, -224.0, 224.0, 0.0]); // ±448 x 0.5
}

#[test]
fn copying_a_page_copies_that_page_and_nothing_else() {
    let shape = shape(4, 3);
    for format in formats() {
        for mut cache in caches(shape, format) {
            let n = 12;
            let (k, v) = (rows(n, 5, false, |x| x), rows(n, 3, true, |x| x));
            let all: Vec<Slot> = (0..12).map(Slot::from_raw).collect();
            let k = HostTensor::packed(&k, [n, 2, 5]).unwrap();
            cache.append(&all, &k, Some(&HostTensor::packed(&v, [n, 2, 3]).unwrap())).unwrap();
            let mut expected = cache.buffer().as_slice().as_bytes().to_vec();
            for offset in 0..3usize {
                let slot = Slot::new(PageId::new(1).unwrap(), u32::try_from(offset).unwrap(), shape.page_size).unwrap();
                let row = 9 + offset;
                put(&mut expected, cache.k(), slot, shape.page_size, format.k_scale(), |h, d| value(row, h, d, false));
                put(&mut expected, cache.v(), slot, shape.page_size, format.v_scale(), |h, d| value(row, h, d, true));
            }
            cache.copy_page(PageId::new(3).unwrap(), PageId::new(1).unwrap()).unwrap();
            assert!(expected == cache.buffer().as_slice().as_bytes());
            let beyond = cache.copy_page(PageId::new(0).unwrap(), PageId::new(4).unwrap());
            assert_eq!(beyond, Err(CopyPageError::PageOutOfRange { page: PageId::new(4).unwrap(), num_pages: 4 }));
        }
    }
}

#[test]
fn planes_that_leave_the_buffer_or_meet_are_refused() {
    let shape = shape(2, 3);
    let [k, v] = shape.packed_planes(KvLayout::Nhd).unwrap();
    let len = v.extent(&shape).unwrap();
    let parts = |len, k, v| HostKv::from_parts(shape, KvFormat::Bf16, KvBuffer::zeroed(KvDtype::Bf16, len), k, v);
    assert!(parts(len, k, v).is_ok());
    assert_eq!(parts(len - 1, k, v).unwrap_err(), ShapeError::OutOfBounds { what: "v", len: len - 1, needed: len });
    let moved = KvPlaneLayout { offset: v.offset - 1, ..v };
    assert!(matches!(parts(len, k, moved).unwrap_err(), ShapeError::Overlap { what: "v", .. }));
    let folded = KvPlaneLayout { strides: KvStrides { page: 0, ..k.strides }, ..k };
    assert!(matches!(parts(len, folded, v).unwrap_err(), ShapeError::Overlap { what: "k", .. }));
    let huge = KvPlaneLayout { strides: KvStrides { page: usize::MAX, ..k.strides }, ..k };
    assert_eq!(parts(len, huge, v).unwrap_err(), ShapeError::Overflow { what: "k" });
    assert!(matches!(parts(len, v, k).unwrap_err(), ShapeError::HeadDim { part: KvPart::K, got: 3, expected: 5 }));
    let wrong = HostKv::from_parts(shape, KvFormat::F16, KvBuffer::zeroed(KvDtype::Bf16, len), k, v).unwrap_err();
    assert_eq!(wrong, ShapeError::BufferDtype { got: KvDtype::Bf16, expected: KvDtype::F16 });
}

#[test]
fn memory_that_the_machine_does_not_have_is_an_error() {
    let page_size = PageSize::new(1 << 15).unwrap();
    let page = KvPageShape { page_size, num_kv_heads: 1 << 16, head_dim_k: 1 << 11, head_dim_v: 1 << 11 };
    let shape = page.with_pages((1 << 16) - 1).unwrap();
    let error = HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap_err();
    assert_eq!(error, ShapeError::OutOfMemory { what: "kv cache", bytes: shape.bytes(KvDtype::F32) });
}

#[test]
fn a_shared_v_is_columns_of_k_and_is_written_once() {
    let shape = shape(2, 3);
    let [k, _] = shape.packed_planes(KvLayout::Nhd).unwrap();
    let len = k.extent(&shape).unwrap();
    let shared = |format: KvFormat, column| {
        HostKv::with_shared_planes(shape, format, KvBuffer::zeroed(format.dtype(), len), k, column)
    };
    let mut cache = shared(KvFormat::F32, 1).unwrap();
    let rows = rows(1, 5, false, |x| x);
    let tensor = HostTensor::packed(&rows, [1, 2, 5]).unwrap();
    assert_eq!(cache.append(&slots(&[4]), &tensor, Some(&tensor)), Err(AppendError::UnwantedValues));
    cache.append(&slots(&[4]), &tensor, None).unwrap();
    let mut out = [0.0; 3];
    cache.read_v(Slot::from_raw(4), 1, &mut out);
    assert_eq!(out, rows[6..9]);
    cache.copy_page(PageId::new(1).unwrap(), PageId::new(0).unwrap()).unwrap();
    cache.read_v(Slot::from_raw(1), 1, &mut out);
    assert_eq!(out, rows[6..9]);
    assert_eq!(shared(KvFormat::F32, 3).unwrap_err(), ShapeError::SharedColumns { v_column: 3, end: 6, head_dim_k: 5 });
    assert!(matches!(shared(formats()[3], 1).unwrap_err(), ShapeError::SharedScales { .. }));
}

#[test]
fn a_cache_is_made_for_what_a_layer_keeps() {
    let page_size = PageSize::new(3).unwrap();
    for values in [Values::Own(3), Values::InKeys(3), Values::None] {
        let spec = KvSpec { num_kv_heads: 2, head_dim_k: 5, values };
        let mut cache = HostKv::for_spec(spec, 2, page_size, KvLayout::Hnd, KvFormat::F32).unwrap();
        assert_eq!(cache.spec(), spec);
        assert_eq!(cache.buffer().len() as u64, 6 * spec.elements_per_token());
        let (k, v) = (rows(1, 5, false, |x| x), rows(1, 3, true, |x| x));
        let (k_rows, v_rows) = (HostTensor::packed(&k, [1, 2, 5]).unwrap(), HostTensor::packed(&v, [1, 2, 3]).unwrap());
        let has_own = matches!(values, Values::Own(_));
        cache.append(&slots(&[4]), &k_rows, has_own.then_some(&v_rows)).unwrap();
        let wrong = cache.append(&slots(&[4]), &k_rows, (!has_own).then_some(&v_rows)).unwrap_err();
        assert_eq!(wrong, if has_own { AppendError::MissingValues } else { AppendError::UnwantedValues });
        let mut key = [0.0; 5];
        cache.read_k(Slot::from_raw(4), 1, &mut key);
        assert_eq!(key, k[5..10]);
        cache.copy_page(PageId::new(1).unwrap(), PageId::new(0).unwrap()).unwrap();
        let mut value = vec![0.0; values.head_dim() as usize];
        cache.read_v(Slot::from_raw(1), 1, &mut value);
        let expected = if has_own { &v[3..6] } else { &k[5..5 + value.len()] };
        assert_eq!(value, expected);
    }
    let wide = KvSpec { num_kv_heads: 1, head_dim_k: 4, values: Values::InKeys(5) };
    let error = HostKv::for_spec(wide, 2, page_size, KvLayout::Nhd, KvFormat::F32).unwrap_err();
    assert_eq!(error, ShapeError::SharedColumns { v_column: 0, end: 5, head_dim_k: 4 });
}

#[test]
#[should_panic(expected = "slot padding, head 0 of a cache of 6 slots")]
fn reading_the_padding_slot_panics_instead_of_reading_the_last() {
    HostKv::new(shape(2, 3), KvLayout::Nhd, KvFormat::F32).unwrap().read_k(Slot::PADDING, 0, &mut [0.0; 5]);
}
