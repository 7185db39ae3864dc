//! Owns the caches of problems: made in each layout, poisoned, filled with the tokens of before the step; and
//! [`expected_after`], the cache as it must be after the step, by conversions of its own.

use attn_metadata::PoolShape;
use half::{bf16, f16};
use kvpool::{
    FP8_E4M3_TO_F32, HostKv, HostTensor, KvBuffer, KvDtype, KvLayout, KvPageShape, KvPlaneLayout, KvShape, KvSliceMut,
    KvStrides, PageId, ShapeError, Slot,
};

use super::content::{FOREIGN, Part, Place, fill as fill_vector};
use super::problem::{Poison, Problem};
use crate::case::{Case, Layout};

/// A cache for a case whose every element, gaps included, is poison.
pub(super) fn poisoned(case: &Case, pool: PoolShape, poison: Poison) -> HostKv {
    let heads = case.heads;
    let page = KvPageShape {
        page_size: pool.page_size,
        num_kv_heads: heads.num_kv_heads,
        head_dim_k: heads.head_dim_qk,
        head_dim_v: heads.head_dim_vo,
    };
    let shape = page.with_pages(pool.num_pages).expect("pools of a case are small");
    let made = match case.layout {
        Layout::Nhd => HostKv::new(shape, KvLayout::Nhd, case.format()),
        Layout::Hnd => HostKv::new(shape, KvLayout::Hnd, case.format()),
        Layout::InterleavedNhd => HostKv::interleaved(shape, KvLayout::Nhd, case.format()),
        Layout::InterleavedHnd => HostKv::interleaved(shape, KvLayout::Hnd, case.format()),
        Layout::Padded => padded(case, shape),
    };
    let mut cache = made.expect("the layouts are sound");
    poison_buffer(case, &mut cache, poison);
    cache
}

fn padded_plane(shape: &KvShape, head_dim: u32, offset: usize) -> KvPlaneLayout {
    let head = head_dim as usize + 3;
    let token = head * shape.num_kv_heads as usize + 5;
    let page = token * shape.page_size.get() as usize + 7;
    KvPlaneLayout { offset, strides: KvStrides { page, token, head }, head_dim: head_dim as usize }
}

fn padded(case: &Case, shape: KvShape) -> Result<HostKv, ShapeError> {
    let k = padded_plane(&shape, shape.head_dim_k, 13);
    let end = |plane: &KvPlaneLayout| plane.extent(&shape).ok_or(ShapeError::Overflow { what: "padded plane" });
    let v = padded_plane(&shape, shape.head_dim_v, end(&k)? + 11);
    let len = end(&v)? + 11;
    HostKv::from_parts(shape, case.format(), KvBuffer::zeroed(case.kv_dtype, len), k, v)
}

fn poison_buffer(case: &Case, cache: &mut HostKv, poison: Poison) {
    let mut noise = vec![0.0; cache.buffer().len()];
    match poison {
        Poison::Nan => noise.fill(f32::NAN),
        Poison::Big => noise.fill(if case.kv_dtype == KvDtype::F16 { 6.0e4 } else { 1.0e30 }),
        Poison::Foreign => {
            for (position, run) in (0u64..).zip(noise.chunks_mut(512)) {
                fill_vector(case, Part::K, Place { owner: FOREIGN, position, head: 0 }, run);
            }
        }
    }
    let mut all = Elements(cache.buffer_mut());
    noise.iter().enumerate().for_each(|(index, &x)| all.set(index, x));
}

/// Writes the tokens that are cached before the step.
pub(super) fn fill(problem: &mut Problem) {
    let page_size = problem.pool.page_size;
    for (place, member) in problem.build.members.clone().into_iter().enumerate() {
        let first_page = usize::try_from(problem.tables.kv_indptr[place]).expect("not negative");
        let cached = problem.case.cached_len(&problem.case.requests[member]);
        for position in 0..cached {
            let page = problem.tables.kv_indices[first_page + (position / page_size.get()) as usize];
            let page = PageId::from_i32(page).expect("not negative");
            let slot = Slot::new(page, position % page_size.get(), page_size).expect("pools of a case are small");
            write_token(problem, member, position, slot);
        }
    }
}

fn write_token(problem: &mut Problem, member: usize, position: u32, slot: Slot) {
    let heads = problem.case.heads;
    let num_heads = heads.num_kv_heads as usize;
    let token = |part, dim: u32| {
        let mut values = vec![0.0; num_heads * dim as usize];
        for (head, vector) in (0u32..).zip(values.chunks_mut(dim as usize)) {
            problem.kv_value(part, member, position, head, vector);
        }
        values
    };
    let (k, v) = (token(Part::K, heads.head_dim_qk), token(Part::V, heads.head_dim_vo));
    let view = |data, dim: u32| HostTensor::packed(data, [1, num_heads, dim as usize]).expect("one token");
    let (k, v) = (view(&k, heads.head_dim_qk), view(&v, heads.head_dim_vo));
    problem.cache.append(&[slot], &k, &v).expect("slots of a case are of its pool");
}

/// The cache after the step: the new tokens at their slots, every other byte as it was. Shares no conversion with the
/// append of `kvpool`.
#[must_use]
pub fn expected_after(problem: &Problem) -> HostKv {
    let mut cache = problem.cache.clone();
    let page_size = problem.pool.page_size;
    let format = cache.format();
    for (row, slot) in problem.tables.slots.iter().flatten().enumerate() {
        let Some((page, token)) = slot.page(page_size).zip(slot.offset(page_size)) else { continue };
        for head in 0..problem.case.heads.num_kv_heads {
            let parts =
                [(&problem.k, cache.k().layout, format.k_scale()), (&problem.v, cache.v().layout, format.v_scale())];
            for (tensor, layout, scale) in parts {
                let mut values = vec![0.0; layout.head_dim];
                tensor.view().read(row, head as usize, &mut values);
                let start = layout.element(page, token, head);
                let mut elements = Elements(cache.buffer_mut());
                values.iter().enumerate().for_each(|(d, x)| elements.set(start + d, x / scale));
            }
        }
    }
    cache
}

/// The elements of a cache, to set one by one from real values (already divided by the scale).
struct Elements<'a>(KvSliceMut<'a>);

impl Elements<'_> {
    fn set(&mut self, index: usize, x: f32) {
        match &mut self.0 {
            KvSliceMut::F32(data) => data[index] = x,
            KvSliceMut::F16(data) => data[index] = f16::from_f32(x),
            KvSliceMut::Bf16(data) => data[index] = bf16::from_f32(x),
            KvSliceMut::Fp8E4m3(data) => data[index] = nearest_fp8(x),
        }
    }
}

/// The nearest E4M3 code by bisection over the non-negative ones, which ascend; to the even one on a tie.
fn nearest_fp8(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    let positive = &FP8_E4M3_TO_F32[..0x7f];
    let magnitude = f64::from(x.abs());
    let above = positive.partition_point(|&v| f64::from(v) < magnitude);
    let code = match above {
        0 => 0,
        0x7f => 0x7e,
        _ => {
            let (low, high) = (f64::from(positive[above - 1]), f64::from(positive[above]));
            let (down, up) = (magnitude - low, high - magnitude);
            let to_low = down < up || (down == up && (above - 1) % 2 == 0);
            if to_low { above - 1 } else { above }
        }
    };
    sign | u8::try_from(code).expect("there are 127 codes")
}
