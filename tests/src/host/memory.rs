//! Which bytes are read and written: pages, poison, strides, appended bytes, scales. All exact.

use super::context::{Context, as_drawn, with_queries};
use super::{Check, check};
use crate::case::{Case, Data, Layout, RequestShape, Table};
use crate::harness::{Build, Poison, Problem, Stop, Strides, expected_after, expected_side_after};
use crate::rng::Rng;
use kvpool::{FP8_E4M3_TO_F32, HostKv, KvDtype, KvSliceMut, f32_to_fp8_e4m3};

pub(super) const PAGES: Check = check(
    "pages",
    "any permutation of pages, the top of a larger pool: the same bits as contiguous pages",
    with_queries,
    pages,
);

pub(super) const POISON: Check = check(
    "poison",
    "NaN, huge values or another request's data outside the valid KV and in padding rows: the same bits",
    with_queries,
    poison,
);

pub(super) const STRIDES: Check = check(
    "strides",
    "NHD, HND, interleaved, padded; q, k, v and out with gaps or head by head: the same bits",
    with_queries,
    strides,
);

pub(super) const APPEND_BYTES: Check = check(
    "append bytes",
    "the new tokens are written to their slots, rounded as the format says, and no other byte is",
    with_append,
    append_bytes,
);

pub(super) const SCALES: Check =
    check("scales", "halving FP8 data and doubling its scale changes no bit, for K and for V", with_fp8, scales);

fn pages(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    let of = |table, map_seed| {
        let case = Case { table, ..case.clone() };
        Problem::build(&case, Build { map_seed, ..Build::of(&case) })
    };
    let contiguous = crate::harness::run(&of(Table::Identity, 0), &mut *backend)?;
    for (table, map_seed) in [(Table::Permuted, 1), (Table::Permuted, 2), (Table::Top, 0)] {
        let run = crate::harness::run(&of(table, map_seed), &mut *backend)?;
        contiguous.same(&format!("pages {} {map_seed}", table.name()), &run)?;
    }
    Ok(0.0)
}

fn poison(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    let mut run =
        |poison| crate::harness::run(&Problem::build(case, Build { poison, ..Build::of(case) }), &mut *backend);
    let foreign = run(Poison::Foreign)?;
    foreign.same("NaN outside the valid KV", &run(Poison::Nan)?)?;
    foreign.same("huge values outside the valid KV", &run(Poison::Big)?)?;
    Ok(0.0)
}

fn strides(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    let packed = crate::harness::run(&Problem::new(&Case { layout: Layout::Nhd, ..case.clone() }), &mut *backend)?;
    for &layout in Layout::ALL {
        let run = crate::harness::run(&Problem::new(&Case { layout, ..case.clone() }), &mut *backend)?;
        packed.same(&format!("layout {}", layout.name()), &run)?;
    }
    for (inputs, outputs) in [(Strides::Gapped, Strides::HeadMajor), (Strides::HeadMajor, Strides::Gapped)] {
        let build = Build { inputs, outputs, ..Build::of(case) };
        let run = crate::harness::run(&Problem::build(case, build), &mut *backend)?;
        packed.same(&format!("inputs {inputs:?}, output {outputs:?}"), &run)?;
    }
    Ok(0.0)
}

fn with_append(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.append = true;
    case.requests.iter_mut().for_each(|r| r.kv_len = r.kv_len.max(r.q_len));
    if case.padding_rows == 0 {
        case.padding_rows = 3; // the slots of padding rows are not to be taken for indices
    }
}

fn append_bytes(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let problem = Problem::new(case);
    let run = context.run(&problem)?;
    same_bytes(&problem.cache, run.cache.as_ref(), &expected_after(&problem))?;
    if let (Some(side), Some(expected)) = (&problem.side, expected_side_after(&problem)) {
        same_bytes(&side.cache, run.side_cache.as_ref(), &expected)?;
    }
    Ok(0.0)
}

fn same_bytes(before: &HostKv, got: Option<&HostKv>, expected: &HostKv) -> Result<(), Stop> {
    let got = got.ok_or_else(|| Stop::failed("nothing was appended"))?;
    let (got, wanted) = (got.buffer().as_slice().as_bytes(), expected.buffer().as_slice().as_bytes());
    let before = before.buffer().as_slice().as_bytes();
    // NaNs of the values may differ in payload; none are appended here.
    match got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
        Some(byte) => {
            let touched = if before[byte] == wanted[byte] { "nobody was to write it" } else { "it was to be written" };
            let text = format!("byte {byte} of the cache is {}, not {}; {touched}", got[byte], wanted[byte]);
            Err(Stop::failed(text))
        }
        None => Ok(()),
    }
}

fn with_fp8(case: &mut Case, rng: &mut Rng) {
    as_drawn(case, rng);
    with_queries(case, rng);
    case.kv_dtype = KvDtype::Fp8E4m3;
    case.append = false;
    case.scales = (0.375, 1.75);
    case.values_in_keys = false;
    if !matches!(case.data, Data::Normal | Data::Large | Data::Dominant) {
        case.data = Data::Normal;
    }
    case.requests.retain(|r| r.kv_len > 0);
    with_queries(case, rng);
    if case.requests.is_empty() {
        case.requests.push(RequestShape { q_len: 1, kv_len: 33 });
    }
}

/// Doubles one scale and halves the plane's codes, in a cache whose codes all have an exact half.
fn scales(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend_of(case, vec![case.layer()])?;
    let mut problem = Problem::new(case);
    each_code(&mut problem, |code| if half_of(code).is_some() || code & 0x7f == 0x7f { code } else { code & 0x80 });
    let plain = crate::harness::run(&problem, &mut *backend)?;
    let (k, v) = case.scales;
    for (name, scales) in [("k", (2.0 * k, v)), ("v", (k, 2.0 * v)), ("both", (2.0 * k, 2.0 * v))] {
        let doubled = Case { scales, ..case.clone() };
        let mut other = Problem { case: doubled.clone(), ..problem.clone() };
        other.cache = rescaled(&problem, &doubled)?;
        let run = crate::harness::run(&other, &mut *backend)?;
        plain.same(&format!("{name}: data halved, scale doubled"), &run)?;
    }
    Ok(0.0)
}

/// The cache of a problem with other scales and, in each plane, the codes that make up for them.
fn rescaled(problem: &Problem, case: &Case) -> Result<kvpool::HostKv, Stop> {
    let cache = &problem.cache;
    let (k, v) = (cache.k().layout, cache.v().layout);
    let mut buffer = cache.buffer().clone();
    let shape = cache.shape();
    let halves = [(k, case.scales.0 > problem.case.scales.0), (v, case.scales.1 > problem.case.scales.1)];
    for (plane, _) in halves.into_iter().filter(|(_, halve)| *halve) {
        for page in (0..shape.num_pages).filter_map(kvpool::PageId::new) {
            for (token, head) in (0..shape.page_size.get()).flat_map(|t| (0..shape.num_kv_heads).map(move |h| (t, h))) {
                let start = plane.element(page, token, head);
                let KvSliceMut::Fp8E4m3(codes) = buffer.as_slice_mut() else { continue };
                for code in &mut codes[start..start + plane.head_dim] {
                    *code = half_of(*code).unwrap_or(*code);
                }
            }
        }
    }
    let made = kvpool::HostKv::from_parts(shape, case.format(), buffer, k, v);
    made.map_err(|error| Stop::failed(error.to_string()))
}

fn each_code(problem: &mut Problem, edit: impl Fn(u8) -> u8) {
    if let KvSliceMut::Fp8E4m3(codes) = problem.cache.buffer_mut() {
        codes.iter_mut().for_each(|code| *code = edit(*code));
    }
}

/// The code of half the value, where there is one.
fn half_of(code: u8) -> Option<u8> {
    let half = FP8_E4M3_TO_F32[usize::from(code)] / 2.0;
    let found = f32_to_fp8_e4m3(half);
    (FP8_E4M3_TO_F32[usize::from(found)].to_bits() == half.to_bits()).then_some(found)
}
