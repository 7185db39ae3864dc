//! Owns the caches of problems: made in each layout, poisoned, filled with the tokens of before the step; and
//! [`expected_after`], the cache as it must be after the step, by conversions of its own.

use attn_metadata::PoolShape;
use half::{bf16, f16};
use kvpool::{
    FP8_E4M3_TO_F32, HostKv, HostTensor, KvBuffer, KvDtype, KvFormat, KvLayout, KvPlaneLayout, KvShape, KvSliceMut,
    KvSpec, KvStrides, PageId, ShapeError, Slot, Values,
};

use super::content::{FOREIGN, Part, Place, fill as fill_vector};
use super::problem::{Poison, Problem};
use super::tensor::Activation;
use crate::case::{Case, Layout};

/// A cache of a case's layout whose every element, gaps included, is poison.
pub(super) fn poisoned(case: &Case, spec: KvSpec, format: KvFormat, pool: PoolShape, poison: Poison) -> HostKv {
    let PoolShape { num_pages, page_size } = pool;
    let packed = |layout| HostKv::for_spec(spec, num_pages, page_size, layout, format);
    let shape = spec.shape(num_pages, page_size);
    let has_values = matches!(spec.values, Values::Own(_));
    let made = match case.layout {
        Layout::InterleavedNhd if has_values => HostKv::interleaved(shape, KvLayout::Nhd, format),
        Layout::InterleavedHnd if has_values => HostKv::interleaved(shape, KvLayout::Hnd, format),
        Layout::Nhd | Layout::InterleavedNhd => packed(KvLayout::Nhd),
        Layout::Hnd | Layout::InterleavedHnd => packed(KvLayout::Hnd),
        Layout::Padded => padded(spec, format, shape),
    };
    let mut cache = made.expect("the layouts are sound");
    poison_buffer(case, &mut cache, poison);
    cache
}

fn padded_plane(shape: &KvShape, head_dim: u32, offset: usize) -> KvPlaneLayout {
    let head = head_dim as usize + 3;
    let token = head * shape.num_kv_heads as usize + 5;
    let page = token * shape.page_size.get() as usize + 7;
    KvPlaneLayout::new(offset, KvStrides { page, token, head }, head_dim as usize)
}

fn padded(spec: KvSpec, format: KvFormat, shape: KvShape) -> Result<HostKv, ShapeError> {
    let k = padded_plane(&shape, shape.head_dim_k, 13);
    let end = |plane: &KvPlaneLayout| plane.extent(&shape).ok_or(ShapeError::Overflow { what: "padded plane" });
    let buffer = |len| KvBuffer::zeroed(format.dtype(), len);
    match spec.values {
        Values::InKeys(_) => HostKv::with_shared_planes(shape, format, buffer(end(&k)? + 11), k, 0),
        Values::Own(_) | Values::None => {
            let v = padded_plane(&shape, shape.head_dim_v, end(&k)? + 11);
            HostKv::from_parts(shape, format, buffer(end(&v)? + 11), k, v)
        }
    }
}

fn poison_buffer(case: &Case, cache: &mut HostKv, poison: Poison) {
    let mut noise = vec![0.0; cache.buffer().len()];
    match poison {
        Poison::Nan => noise.fill(f32::NAN),
        Poison::Big => noise.fill(if cache.format().dtype() == KvDtype::F16 { 6.0e4 } else { 1.0e30 }),
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

/// Writes a cached token of both branches.
fn write_token(problem: &mut Problem, member: usize, position: u32, slot: Slot) {
    let token = |problem: &Problem, parts: [Part; 2], spec: KvSpec| {
        let num_heads = spec.num_kv_heads as usize;
        let values = |part, dim: u32| {
            let mut values = vec![0.0; num_heads * dim as usize];
            for (head, vector) in (0u32..).zip(values.chunks_mut(dim as usize)) {
                problem.kv_value(part, member, position, head, vector);
            }
            (values, [1, num_heads, dim as usize])
        };
        let v = matches!(spec.values, Values::Own(_)).then(|| values(parts[1], spec.values.head_dim()));
        (values(parts[0], spec.head_dim_k), v)
    };
    let write = |cache: &mut HostKv, (k, v): (Row, Option<Row>)| {
        let v = v.as_ref().map(view);
        cache.append(&[slot], &view(&k), v.as_ref()).expect("slots of a case are of its pool");
    };
    let main = token(problem, [Part::K, Part::V], problem.cache.spec());
    write(&mut problem.cache, main);
    let Some(spec) = problem.side.as_ref().map(|side| side.spec.kv) else { return };
    let rows = token(problem, [Part::SideK, Part::SideV], spec);
    problem.side.iter_mut().for_each(|side| write(&mut side.cache, rows.clone()));
}

/// Values `[1, heads, dim]` of one token.
type Row = (Vec<f32>, [usize; 3]);

fn view((values, shape): &Row) -> HostTensor<'_> {
    HostTensor::packed(&values[..], *shape).expect("one token")
}

/// The cache after the step: the new tokens at their slots, every other byte as it was. Shares no conversion with the
/// append of `kvpool`.
#[must_use]
pub fn expected_after(problem: &Problem) -> HostKv {
    after(problem, &problem.cache, &problem.k, problem.v.as_ref())
}

/// The same of the side branch's cache.
#[must_use]
pub fn expected_side_after(problem: &Problem) -> Option<HostKv> {
    problem.side.as_ref().map(|side| after(problem, &side.cache, &side.k, side.v.as_ref()))
}

fn after(problem: &Problem, before: &HostKv, k: &Activation, v: Option<&Activation>) -> HostKv {
    let mut cache = before.clone();
    let page_size = problem.pool.page_size;
    let format = cache.format();
    let own_v = v.map(|v| (v, cache.v().layout, format.v_scale()));
    let parts = [Some((k, cache.k().layout, format.k_scale())), own_v];
    for (row, slot) in problem.tables.slots.iter().flatten().enumerate() {
        let Some((page, token)) = slot.page(page_size).zip(slot.offset(page_size)) else { continue };
        for head in 0..before.spec().num_kv_heads {
            for (tensor, layout, scale) in parts.into_iter().flatten() {
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
            KvSliceMut::Fp8E4m3(data) | KvSliceMut::Fp8Latent(data) => data[index] = nearest_fp8(x),
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
