//! Owns the shape pool and how cases are drawn from it: pairwise, so that every two values of any two properties meet
//! in some case, within what a backend says it supports and within a bound of work. The same seed gives the same list.

use std::collections::HashSet;

use attn_metadata::{Capabilities, Feature, HeadShape};
use kvpool::{Dtype, KvDtype};

use crate::case::{Case, CaseFamily, Data, Layout, RequestShape, Sinks, Table};
use crate::rng::Rng;

const NUM_REQUESTS: &[usize] = &[1, 2, 5, 17, 0];
const Q_LENS: &[u32] = &[1, 2, 7, 33, 64, 65, 0, 257];
/// Cached tokens: small, around a tile of 64 and 128, long; `PAGE ± 1` are put in for the case's page.
const CACHED: &[u32] = &[0, 1, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 129, 1025];
const PAGE: u32 = u32::MAX / 2;
const PAGE_SIZES: &[u32] = &[16, 1, 2, 3, 61, 64, 256];
const GROUPS: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 16];
const KV_HEADS: &[u32] = &[1, 2, 3, 8];
const DIMS: &[(u32, u32)] = &[(64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (16, 16), (512, 512)];
const WINDOWS: &[Option<u32>] = &[None, Some(0), Some(1), Some(63), Some(64), Some(65), Some(100_000)];
const PADDING: &[u32] = &[0, 1, 6];
const SCALES: &[(f32, f32)] = &[(0.5, 2.0), (0.037, 1.7)];
/// The number of levels of each property, in the order in which `Levels` are read.
const SIZES: [usize; 20] = [5, 8, 10, 7, 10, 4, 7, 3, 4, 7, 4, 2, 5, 2, 5, 3, 4, 3, 8, 5];
/// `Data` without the probe, which is a check of its own.
const DATA: &[Data] =
    &[Data::Normal, Data::Large, Data::Huge, Data::Dominant, Data::Equal, Data::Ramp, Data::OneHot, Data::Subnormal];

type Levels = [usize; SIZES.len()];

/// Bounds of what is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Multiplications of the oracle for one case.
    pub(crate) work: u64,
    /// Candidates looked at for each case.
    pub(crate) candidates: usize,
}

/// Draws cases.
#[derive(Debug)]
pub(crate) struct Sampler<'a> {
    capabilities: &'a Capabilities,
    bounds: Bounds,
    family: Option<CaseFamily>,
    rng: Rng,
    covered: HashSet<(usize, usize, usize, usize)>,
}

impl<'a> Sampler<'a> {
    pub(crate) fn new(capabilities: &'a Capabilities, bounds: Bounds, rng: Rng) -> Self {
        Self { capabilities, bounds, family: None, rng, covered: HashSet::new() }
    }

    /// The same for layers of a family.
    pub(crate) fn with_family(self, family: Option<CaseFamily>) -> Self {
        Self { family, ..self }
    }

    /// The next case: of some candidates the one that brings the most new pairs.
    pub(crate) fn draw(&mut self) -> Case {
        let mut best: Option<(usize, Levels, Case)> = None;
        let mut tried = 0;
        while tried < self.bounds.candidates || (best.is_none() && tried < 2000) {
            tried += 1;
            let levels = SIZES.map(|size| self.rng.below(size));
            let case = self.case(&levels);
            let is_valid = case.validate().is_ok();
            if !is_valid || self.capabilities.supports(&case.requirements()).is_err() || !self.fits_batch(&case) {
                continue;
            }
            let new = pairs(&levels).filter(|pair| !self.covered.contains(pair)).count();
            if best.as_ref().is_none_or(|(most, ..)| new > *most) {
                best = Some((new, levels, case));
            }
        }
        let (_, levels, case) = best.unwrap_or_else(|| (0, [0; SIZES.len()], self.plain()));
        self.covered.extend(pairs(&levels));
        case
    }

    /// A case as the backend certainly supports it.
    fn plain(&mut self) -> Case {
        let mut case = supported(self.capabilities, self.family).next().unwrap_or_default();
        case.seed = self.rng.next_u64() >> 40;
        case
    }

    fn fits_batch(&self, case: &Case) -> bool {
        let features = self.capabilities.features;
        let extends = case.requests.iter().any(|r| r.q_len > 1);
        (features.contains(Feature::CustomMask) || !case.custom) && (features.contains(Feature::Extend) || !extends)
    }

    fn case(&mut self, levels: &Levels) -> Case {
        let [
            requests,
            q,
            cached,
            page,
            group,
            kv_heads,
            dim,
            q_dtype,
            kv_dtype,
            window,
            mask,
            cap,
            sinks,
            alibi,
            rest @ ..,
        ] = *levels;
        let [layout, table, mode, padding, data, in_keys] = rest;
        let (head_dim_qk, head_dim_vo) = DIMS[dim];
        let num_kv_heads = KV_HEADS[kv_heads];
        let num_qo_heads = num_kv_heads * GROUPS[group];
        let (causal, custom) = [(true, false), (false, false), (true, true), (false, true)][mask];
        // Modes: append, append with a shared prefix, attend, attend to fewer keys than queries.
        let mut case = Case {
            requests: Vec::new(),
            padding_rows: PADDING[padding],
            heads: HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo },
            q_dtype: Dtype::ALL[q_dtype],
            kv_dtype: KvDtype::ELEMENTWISE[kv_dtype],
            scales: self.rng.pick(SCALES),
            // One case in five, where the widths allow it.
            values_in_keys: in_keys == 0 && head_dim_vo <= head_dim_qk,
            family: self.family,
            page_size: PAGE_SIZES[page],
            layout: Layout::ALL[layout],
            table: Table::ALL[table],
            shared: mode == 1 || mode == 3,
            causal,
            window: WINDOWS[window],
            custom,
            softcap: [None, Some(30.0)][cap],
            sinks: Sinks::ALL[sinks],
            alibi: alibi == 1,
            append: mode < 2,
            data: DATA[data],
            seed: self.rng.next_u64() >> 40,
        };
        if let Some(family) = self.family {
            case.values_in_keys = false;
            (family.adapt)(&mut case);
        }
        case.requests = self.requests(&case, NUM_REQUESTS[requests], Q_LENS[q], CACHED[cached], mode == 3);
        shrink(&mut case, self.bounds.work);
        case
    }

    /// One request of the given lengths and others of random ones; a request without keys or queries among them.
    fn requests(&mut self, case: &Case, count: usize, q_len: u32, cached: u32, partial: bool) -> Vec<RequestShape> {
        let mut requests = Vec::new();
        for index in 0..count {
            let (q_len, cached) = match index {
                0 => (q_len, cached),
                _ if count > 8 => (self.rng.pick(&[1, 1, 1, 2, 0]), self.rng.pick(&[0, 3, PAGE, 40])),
                _ => (self.rng.pick(&Q_LENS[..6]), self.rng.pick(CACHED)),
            };
            let cached = if cached > PAGE / 2 { cached + case.page_size - PAGE } else { cached };
            let kv_len = if partial { cached } else { cached + q_len };
            requests.push(RequestShape { q_len, kv_len });
        }
        let place = self.rng.below(count);
        if count > 0 {
            requests.swap(0, place);
        }
        requests
    }
}

/// Makes a case small enough: fewer heads first, then fewer queries, then fewer keys.
fn shrink(case: &mut Case, work: u64) {
    while case.work() > work {
        let heads = &mut case.heads;
        if heads.num_kv_heads > 1 {
            heads.num_qo_heads /= heads.num_kv_heads;
            heads.num_kv_heads = 1;
        } else if let Some(longest) = case.requests.iter_mut().max_by_key(|r| u64::from(r.q_len) * u64::from(r.kv_len))
        {
            let cached = longest.kv_len.saturating_sub(longest.q_len);
            if longest.q_len > 1 {
                longest.kv_len -= if case.append { longest.q_len - longest.q_len / 2 } else { 0 };
                longest.q_len /= 2;
            } else {
                longest.kv_len -= cached.div_ceil(2).max(1).min(longest.kv_len - longest.q_len.min(longest.kv_len));
                if cached == 0 {
                    return;
                }
            }
        } else {
            return;
        }
    }
}

fn pairs(levels: &Levels) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let at = |i: usize| (i, levels[i]);
    let two = (0..levels.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    two.map(move |(i, j)| (at(i).0, at(j).0, at(i).1, at(j).1))
}

/// Plain cases of every dtype and width of the pool that the capabilities allow.
pub(crate) fn supported(capabilities: &Capabilities, family: Option<CaseFamily>) -> impl Iterator<Item = Case> {
    plain_cases(family).filter(|case| capabilities.supports(&case.requirements()).is_ok())
}

/// Plain decode cases of every dtype, width and page size of the pool.
pub(crate) fn plain_cases(family: Option<CaseFamily>) -> impl Iterator<Item = Case> {
    let dims = DIMS.iter().copied().chain([(576, 512), (96, 96)]);
    dims.flat_map(move |(qk, vo)| {
        Dtype::ALL.into_iter().flat_map(move |q_dtype| {
            KvDtype::ELEMENTWISE.into_iter().flat_map(move |kv_dtype| {
                PAGE_SIZES.iter().map(move |&page_size| {
                    let heads = HeadShape { num_qo_heads: 1, num_kv_heads: 1, head_dim_qk: qk, head_dim_vo: vo };
                    let mut case = Case { heads, q_dtype, kv_dtype, page_size, family, ..Case::default() };
                    family.iter().for_each(|family| (family.adapt)(&mut case));
                    case
                })
            })
        })
    })
}
