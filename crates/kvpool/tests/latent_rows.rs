//! Contracts of quantised latent rows: bytes as a slow reference makes them, real values back within half a step,
//! pages copied bit for bit, and no cache that could not hold them.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use half::{bf16, f16};
use kvpool::{
    AppendError, CopyPageError, FP8_E4M3_TO_F32, HostKv, HostSlice, HostTensor, KvBuffer, KvDtype, KvFormat, KvLayout,
    KvPageShape, KvPart, KvPlaneLayout, KvShape, KvSpec, KvStrides, LatentRow, PageId, PageSize, ShapeError, Slot,
    Values,
};

const POISON: u8 = 0xa5;
/// (latent, rope): the usual row, no RoPE, one block, an odd number of blocks.
const WIDTHS: [(u32, u32); 4] = [(512, 64), (256, 0), (128, 2), (384, 34)];

fn shape(num_pages: u32, page_size: u32, heads: u32, (latent, rope): (u32, u32)) -> KvShape {
    let page_size = PageSize::new(page_size).unwrap();
    let page = KvPageShape { page_size, num_kv_heads: heads, head_dim_k: latent + rope, head_dim_v: latent };
    page.with_pages(num_pages).unwrap()
}

fn made(shape: KvShape, layout: KvLayout, format: KvFormat) -> Result<HostKv, ShapeError> {
    let KvShape { num_pages, page_size, num_kv_heads, head_dim_k, head_dim_v } = shape;
    let spec = KvSpec { num_kv_heads, head_dim_k, values: Values::InKeys(head_dim_v) };
    HostKv::for_spec(spec, num_pages, page_size, layout, format)
}

fn poisoned(mut cache: HostKv) -> HostKv {
    cache.buffer_mut().into_bytes().fill(POISON);
    cache
}

/// Gaps between rows, tokens and pages, and before the first.
fn padded(shape: KvShape) -> HostKv {
    let row = LatentRow::of_widths(shape.head_dim_k, shape.head_dim_v).unwrap();
    let head = row.bytes() + 3;
    let token = head * shape.num_kv_heads as usize + 5;
    let strides = KvStrides { page: token * shape.page_size.get() as usize + 7, token, head };
    let k = KvPlaneLayout { row: Some(row), ..KvPlaneLayout::new(11, strides, row.width()) };
    let buffer = KvBuffer::zeroed(KvDtype::Fp8Latent, k.extent(&shape).unwrap() + 2);
    HostKv::with_shared_planes(shape, KvFormat::Fp8Latent, buffer, k, 0).unwrap()
}

fn caches(shape: KvShape) -> [HostKv; 3] {
    let packed = |layout| made(shape, layout, KvFormat::Fp8Latent).unwrap();
    [packed(KvLayout::Nhd), packed(KvLayout::Hnd), padded(shape)].map(poisoned)
}

/// Values over many magnitudes, exact in bf16 (and most in f16); whole blocks of zeros now and then.
fn value(row: usize, head: usize, d: usize) -> f32 {
    let cell = (row * 37 + head * 11 + d * 7) % 251;
    let block = (row + head + d / 128) % 5;
    let magnitude = [0.0, 1.0, 0.001_953_125, 64.0, 0.25][block];
    (f32::from(u8::try_from(cell).unwrap()) - 125.0) * magnitude
}

fn rows(n: usize, heads: usize, width: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for row in 0..n {
        for head in 0..heads {
            all.extend((0..width).map(|d| value(row, head, d)));
        }
    }
    all
}

/// A row from the definition: for each value all 256 codes are looked at, in f64.
fn reference_row(values: &[f32], latent: usize) -> Vec<u8> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in values[..latent].chunks(128) {
        let largest = block.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let scale = if largest == 0.0 { 1.0 } else { largest / 448.0 };
        codes.extend(block.iter().map(|x| nearest(x / scale)));
        scales.extend(scale.to_ne_bytes());
    }
    let rope = values[latent..].iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes());
    codes.into_iter().chain(scales).chain(rope).collect()
}

fn nearest(x: f32) -> u8 {
    let distance = |code: u8| (f64::from(FP8_E4M3_TO_F32[usize::from(code)]) - f64::from(x)).abs();
    let legal = |code: &u8| code & 0x7f != 0x7f && (*code >= 0x80) == x.is_sign_negative();
    let closer = |a: &u8, b: &u8| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)));
    (0..=u8::MAX).filter(legal).min_by(closer).unwrap()
}

fn check_append(cache: &mut HostKv, slots: &[Slot], k: HostSlice<'_>) {
    let (shape, row) = (cache.shape(), cache.k().layout.row.unwrap());
    let (heads, width) = (shape.num_kv_heads as usize, row.width());
    let k = HostTensor::packed(k, [slots.len(), heads, width]).unwrap();
    let mut expected = cache.buffer().as_slice().as_bytes().to_vec();
    for (i, slot) in slots.iter().enumerate().filter(|(_, slot)| !slot.is_padding()) {
        for head in 0..heads {
            let values: Vec<f32> = (0..width).map(|d| k.get(i, head, d)).collect();
            let (page, token) = (slot.page(shape.page_size).unwrap(), slot.offset(shape.page_size).unwrap());
            let start = cache.k().layout.element(page, token, u32::try_from(head).unwrap());
            expected[start..start + row.bytes()].copy_from_slice(&reference_row(&values, row.latent()));
        }
    }
    cache.append(slots, &k, None).unwrap();
    assert!(expected == cache.buffer().as_slice().as_bytes(), "{row:?} {slots:?}");
}

#[test]
fn append_writes_the_reference_rows_at_the_named_slots_and_nothing_else() {
    for widths in WIDTHS {
        for (page_size, heads) in [(1, 1), (3, 1), (4, 2)] {
            let shape = shape(12 / page_size, page_size, heads, widths);
            let slots = [7, -1, 0, 11, 2].map(Slot::from_raw);
            for mut cache in caches(shape) {
                let k = rows(5, heads as usize, shape.head_dim_k as usize);
                check_append(&mut cache, &slots, HostSlice::F32(&k));
                let half: Vec<f16> = k.iter().map(|x| f16::from_f32(*x)).collect();
                check_append(&mut cache, &slots, HostSlice::F16(&half));
                let brain: Vec<bf16> = k.iter().map(|x| bf16::from_f32(*x)).collect();
                check_append(&mut cache, &slots, HostSlice::Bf16(&brain));
            }
        }
    }
}

#[test]
fn rows_read_back_as_real_values_and_values_are_columns_of_keys() {
    for widths in WIDTHS {
        let shape = shape(2, 3, 1, widths);
        let (width, latent) = (shape.head_dim_k as usize, shape.head_dim_v as usize);
        let k = rows(6, 1, width);
        let slots: Vec<Slot> = (0..6).map(Slot::from_raw).collect();
        for mut cache in caches(shape) {
            cache.append(&slots, &HostTensor::packed(&k, [6, 1, width]).unwrap(), None).unwrap();
            for (i, slot) in slots.iter().enumerate() {
                let (mut key, mut values) = (vec![9.0; width], vec![9.0; latent]);
                cache.read_k(*slot, 0, &mut key);
                cache.read_v(*slot, 0, &mut values);
                assert_eq!(key[..latent], values[..]);
                let given = &k[i * width..(i + 1) * width];
                assert_eq!(key[latent..], given[latent..], "bf16 is exact here");
                for (block, (got, given)) in key[..latent].chunks(128).zip(given.chunks(128)).enumerate() {
                    let largest = given.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                    for (got, given) in got.iter().zip(given) {
                        // Half a step: 2^-4 of the value, or of the smallest normal one, 2^-6 / 448 of the largest.
                        let bound = (given.abs() / 16.0).max(largest / 448.0 / 1024.0);
                        assert!((got - given).abs() <= bound * 1.0001, "block {block}: {given} became {got}");
                    }
                }
            }
        }
    }
}

#[test]
fn copying_a_page_copies_its_rows_and_nothing_else() {
    let shape = shape(3, 2, 2, (128, 6));
    let k = rows(2, 2, 134);
    for mut cache in caches(shape) {
        let slots = [4, 5].map(Slot::from_raw);
        let k = HostTensor::packed(&k, [2, 2, 134]).unwrap();
        cache.append(&slots, &k, None).unwrap();
        let mut wanted = cache.clone();
        wanted.append(&[0, 1].map(Slot::from_raw), &k, None).unwrap();
        let page = |id| PageId::new(id).unwrap();
        cache.copy_page(page(2), page(0)).unwrap();
        assert_eq!(cache.buffer(), wanted.buffer());
        let mut other = made(shape, KvLayout::Hnd, KvFormat::Fp8Latent).unwrap();
        other.copy_page_from(&cache, page(2), page(1)).unwrap();
        let (mut a, mut b) = ([0.0; 134], [0.0; 134]);
        cache.read_k(Slot::from_raw(5), 1, &mut a);
        other.read_k(Slot::from_raw(3), 1, &mut b);
        assert_eq!(a, b);
        other.copy_token_from(&cache, Slot::from_raw(4), Slot::from_raw(0)).unwrap();
        cache.read_k(Slot::from_raw(4), 0, &mut a);
        other.read_k(Slot::from_raw(0), 0, &mut b);
        assert_eq!(a, b);
        for bad in [6, -1, i32::MIN] {
            let refused = Err(CopyPageError::SlotOutOfRange { slot: bad, num_slots: 6 });
            assert_eq!(other.copy_token_from(&cache, Slot::from_raw(bad), Slot::from_raw(0)), refused);
            assert_eq!(other.copy_token_from(&cache, Slot::from_raw(0), Slot::from_raw(bad)), refused);
        }
        let f32_cache = made(shape, KvLayout::Hnd, KvFormat::F32).unwrap();
        assert_eq!(other.copy_page_from(&f32_cache, page(0), page(0)), Err(CopyPageError::OtherPages));
    }
}

#[test]
fn a_refused_append_writes_nothing() {
    let mut cache = padded(shape(2, 2, 1, (128, 2)));
    let before = cache.clone();
    let k = rows(1, 1, 130);
    let good = HostTensor::packed(&k, [1, 1, 130]).unwrap();
    let wide = HostTensor::packed(&k, [1, 2, 65]).unwrap();
    let error = cache.append(&[Slot::from_raw(0)], &wide, None).unwrap_err();
    assert_eq!(error, AppendError::Shape { part: KvPart::K, got: [1, 2, 65], expected: [1, 1, 130] });
    let error = cache.append(&[Slot::from_raw(4)], &good, None).unwrap_err();
    assert_eq!(error, AppendError::SlotOutOfRange { row: 0, slot: 4, num_slots: 4 });
    assert_eq!(cache.buffer(), before.buffer());
}

#[test]
fn caches_that_cannot_hold_rows_are_refused() {
    let format = KvFormat::Fp8Latent;
    let good = shape(2, 2, 1, (128, 2));
    let refused = ShapeError::RowsHoldValues { dtype: KvDtype::Fp8Latent };
    assert_eq!(HostKv::new(good, KvLayout::Nhd, format).unwrap_err(), refused);
    assert_eq!(HostKv::interleaved(good, KvLayout::Nhd, format).unwrap_err(), refused);
    let k = good.key_plane(KvLayout::Nhd, KvDtype::Fp8Latent).unwrap();
    let buffer = || KvBuffer::zeroed(KvDtype::Fp8Latent, 4 * 136);
    assert_eq!(HostKv::from_parts(good, format, buffer(), k, k).unwrap_err(), refused);
    let narrow = KvShape { head_dim_v: 127, ..good };
    assert_eq!(HostKv::with_shared_planes(narrow, format, buffer(), k, 1).unwrap_err(), refused);
    let odd = KvShape { head_dim_k: 131, ..good };
    let error = made(odd, KvLayout::Nhd, format).unwrap_err();
    assert_eq!(error, ShapeError::LatentRow { latent: 128, rope: 3 });
    assert_eq!(
        error.to_string(),
        "a latent row of 128 + 3 values: the first must be a multiple of 128 above 0, the second even"
    );
    let plain = KvPlaneLayout { row: None, ..k };
    let error = HostKv::with_shared_planes(good, format, buffer(), plain, 0).unwrap_err();
    assert_eq!(error, ShapeError::RowFormat { part: KvPart::K, dtype: KvDtype::Fp8Latent, has_row: false });
    let error = HostKv::with_shared_planes(good, KvFormat::F32, KvBuffer::zeroed(KvDtype::F32, 4 * 136), k, 0);
    assert!(matches!(error, Err(ShapeError::RowFormat { has_row: true, .. })));
    let short = KvBuffer::zeroed(KvDtype::Fp8Latent, 4 * 136 - 1);
    let error = HostKv::with_shared_planes(good, format, short, k, 0).unwrap_err();
    assert_eq!(error, ShapeError::OutOfBounds { what: "k", len: 543, needed: 544 });
}

#[test]
fn a_page_costs_the_bytes_of_its_rows() {
    let shape = shape(5, 16, 1, (512, 64));
    assert_eq!(shape.bytes_per_page(KvDtype::Fp8Latent), 16 * 656);
    let spec = KvSpec { num_kv_heads: 1, head_dim_k: 576, values: Values::InKeys(512) };
    assert_eq!([KvDtype::Fp8Latent, KvDtype::Bf16].map(|dtype| spec.bytes_per_token(dtype)), [656, 1152]);
    let cache = made(shape, KvLayout::Nhd, KvFormat::Fp8Latent).unwrap();
    assert_eq!(cache.buffer().len(), 5 * 16 * 656);
}
