//! Owns the values of a case's tensors: a function of seed, owner, position and head, so of nothing that a relation
//! changes (pages, layout, neighbours, order).

use kvpool::KvDtype;

use attn_reference::oracle::naive::round;

use crate::case::{Case, Data};
use crate::rng::Rng;

/// Which tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Q,
    K,
    V,
    SideQ,
    SideK,
    SideV,
}

/// One head vector's place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The request, or [`SHARED`].
    pub(crate) owner: u64,
    /// Token position in the request; wraps below 0.
    pub(crate) position: u64,
    /// Head.
    pub(crate) head: u32,
}

/// Owner of the pages that all requests share.
pub(crate) const SHARED: u64 = u64::MAX;
/// Owner of data that must not reach any result.
pub(crate) const FOREIGN: u64 = u64::MAX - 1;

/// Fills one head vector; every value is one of the activation dtype.
pub(crate) fn fill(case: &Case, part: Part, place: Place, out: &mut [f32]) {
    let Place { owner, position, head } = place;
    let mut rng = Rng::new(&[case.seed, part as u64, owner, position, u64::from(head)]);
    out.iter_mut().for_each(|x| *x = rng.normal());
    match part {
        Part::Q | Part::SideQ => shape_q(case.data, out),
        Part::K | Part::SideK => shape_k(case, place, out),
        Part::V | Part::SideV => shape_v(case, place, out),
    }
    out.iter_mut().for_each(|x| *x = round(case.q_dtype, *x));
}

fn shape_q(data: Data, out: &mut [f32]) {
    match data {
        Data::Large => out.iter_mut().for_each(|x| *x *= 5.0),
        Data::Huge => out.iter_mut().for_each(|x| *x *= 300.0),
        Data::Dominant => out.iter_mut().for_each(|x| *x = 1.0 + 0.3 * *x),
        Data::Probe => out.fill(0.0),
        Data::Normal | Data::Equal | Data::Ramp | Data::OneHot | Data::Subnormal => {}
    }
}

fn shape_k(case: &Case, place: Place, out: &mut [f32]) {
    match case.data {
        Data::Large => out.iter_mut().for_each(|x| *x *= 5.0),
        Data::Huge => out.iter_mut().for_each(|x| *x *= 300.0),
        Data::Dominant if place.position % 37 == 11 => out.fill(4.0),
        Data::Dominant => out.iter_mut().for_each(|x| *x *= 0.3),
        Data::Equal => out.fill(0.5),
        Data::Ramp => {
            let height = small(place.position) / 64.0;
            out.iter_mut().enumerate().for_each(|(d, x)| *x = if d % 2 == 0 { height } else { -0.5 * height });
        }
        Data::Subnormal if place.head % 2 == 1 => out.iter_mut().for_each(|x| *x *= tiny(case, case.scales.0)),
        Data::Normal | Data::OneHot | Data::Probe | Data::Subnormal => {}
    }
}

fn shape_v(case: &Case, place: Place, out: &mut [f32]) {
    let width = out.len() as u64;
    match case.data {
        Data::Equal => out.fill(0.75),
        Data::Ramp => {
            out.iter_mut().zip(0u16..).for_each(|(x, d)| *x = small(place.position) / 256.0 + f32::from(d) / 512.0);
        }
        Data::OneHot | Data::Probe => {
            let hot = place.position % width;
            out.iter_mut().zip(0u64..).for_each(|(x, d)| *x = if d == hot { 1.0 } else { 0.0 });
        }
        Data::Subnormal => out.iter_mut().for_each(|x| *x *= tiny(case, case.scales.1)),
        Data::Normal | Data::Large | Data::Huge | Data::Dominant => {}
    }
}

/// A position as a number that FP8 data can still tell from its neighbours.
fn small(position: u64) -> f32 {
    u16::try_from(position % 512).map_or(0.0, f32::from)
}

/// A factor that makes normal values subnormal in the cache.
fn tiny(case: &Case, scale: f32) -> f32 {
    match case.kv_dtype {
        KvDtype::F32 | KvDtype::Bf16 => 1e-39,
        KvDtype::F16 => 2.0f32.powi(-18),
        KvDtype::Fp8E4m3 | KvDtype::Fp8Latent => 2.0f32.powi(-8) * scale,
    }
}
