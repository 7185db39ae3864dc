//! The tables that `attn bench` prints.

use engine::bench::{Ceilings, Results};
use engine::report::Table;

use super::output;

/// A machine with more load than this, before we begin, is not idle.
const MAX_LOAD: f64 = 1.0;

/// The results for people.
pub fn shown(results: &Results) -> String {
    let on_terminal = output::is_terminal();
    let tables = [rows(results), ratios(results), planner(results), step_times(results)];
    let tables = tables.into_iter().flatten().map(|table| table.to_text(on_terminal));
    [heading(results)].into_iter().chain(tables).collect::<Vec<_>>().join("\n")
}

/// What is known of the machine's rates.
fn rates(ceilings: &Ceilings) -> String {
    let Ceilings { read_gbs, copy_gbs, matmul_tflops } = ceilings;
    let memory = |what: &str, rate: &Option<f64>| rate.map(|gbs| format!("memory {what} {gbs:.1} GB/s"));
    let matmul = matmul_tflops.map_or("matrix products not measured".to_owned(), |tflops| {
        let (rate, unit) = if tflops < 10.0 { (tflops * 1e3, "GFLOP/s") } else { (tflops, "TFLOP/s") };
        format!("matrix products {rate:.1} {unit}")
    });
    [memory("read", read_gbs), memory("copy", copy_gbs), Some(matmul)]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(feature = "cuda")]
fn gpu(results: &Results) -> Option<String> {
    let gpu = results.gpu.as_ref()?;
    let commit = gpu.commit.as_ref().map_or(String::new(), |commit| format!(", commit {commit}"));
    let small = gpu.copy_64mb_gbs.map_or(String::new(), |gbs| format!(", a copy of 64 MB {gbs:.0} GB/s"));
    Some(format!("{}, driver {}, {} build{commit}{small}\n", gpu.name, gpu.driver, gpu.build))
}

#[cfg(not(feature = "cuda"))]
const fn gpu(_: &Results) -> Option<String> {
    None
}

fn heading(results: &Results) -> String {
    let mut text = gpu(results).unwrap_or_default();
    if let Some(e) = &results.environment {
        let facts = [e.cpu.clone(), e.isa.clone(), format!("{} threads", e.threads), format!("{} rounds", e.rounds)];
        text.push_str(&format!("{}, {} build\n", facts.join(", "), e.build));
        if let Some(load) = e.load_before.filter(|&load| load > MAX_LOAD) {
            text.push_str(&format!("the machine was busy before (load {load:.1}): times say little, run it again\n"));
        }
    }
    if let Some(ceilings) = &results.ceilings {
        text.push_str(&format!("ceilings: {}\n", rates(ceilings)));
    }
    if let Some(mean) = results.geometric_mean {
        let at_least = results.ratios.iter().filter(|ratio| ratio.ratio >= 1.0).count();
        let worst = results.ratios.iter().map(|ratio| ratio.ratio).fold(f64::INFINITY, f64::min);
        let num = results.ratios.len();
        text.push_str(&format!("{num} compared with the best peer: geometric mean {mean:.3}, worst {worst:.3}, "));
        text.push_str(&format!("{at_least} at or above 1\n"));
    }
    text
}

fn ratios(results: &Results) -> Option<Table> {
    let mut table = Table::new(&["workload", "peer", "peer's time / ours", "rounds"]);
    for ratio in &results.ratios {
        let rounds: Vec<String> = ratio.rounds.iter().map(|x| format!("{x:.2}")).collect();
        let cells = [ratio.workload.clone(), ratio.peer.clone(), format!("{:.3}", ratio.ratio), rounds.join(" ")];
        table.push(cells.to_vec());
    }
    (!results.ratios.is_empty()).then_some(table)
}

fn planner(results: &Results) -> Option<Table> {
    let mut table = Table::new(&["planner: requests", "kv_len", "fill and check us", "plan us", "both us"]);
    for row in &results.planner {
        let times = [row.set_us, row.prepare_us, row.total_us].map(|us| format!("{us:.1}"));
        table.push([row.num_requests.to_string(), row.kv_len.to_string()].into_iter().chain(times).collect());
    }
    (!results.planner.is_empty()).then_some(table)
}

fn step_times(results: &Results) -> Option<Table> {
    let header = ["steps: requests", "come and go", "kv_len", "tokens", "evicted pages", "p50 us", "p99 us"];
    let mut table = Table::new(&header);
    for row in &results.steps {
        let figures = [row.step_tokens, row.evicted_pages, row.p50_us, row.p99_us].map(|x| format!("{x:.1}"));
        let turnover = if row.has_turnover { "yes" } else { "no" };
        let cells = [row.num_requests.to_string(), turnover.to_owned(), row.kv_len.to_string()];
        table.push(cells.into_iter().chain(figures).collect());
    }
    (!results.steps.is_empty()).then_some(table)
}

fn rows(results: &Results) -> Option<Table> {
    let header = [
        "workload",
        "system",
        "ms",
        "predicted",
        "ratio",
        "GFLOP/s",
        "of gemm",
        "GB/s",
        "of read",
        "of copy",
        "plan us",
        "rel err",
        "skipped",
    ];
    let mut table = Table::new(&header);
    let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
    let percent = |value: Option<f64>| value.map_or("-".to_owned(), |x| format!("{:.0}%", x * 100.0));
    for row in &results.results {
        table.push(vec![
            row.workload.clone(),
            row.system.clone(),
            number(row.ms, 4),
            number(row.predicted_ms, 4),
            number(row.ratio, 3),
            number(row.tflops.map(|t| t * 1e3), 1),
            percent(row.of_matmul),
            number(row.gbs, 1),
            percent(row.of_read),
            percent(row.of_copy),
            number(row.plan_us, 1),
            row.rel_err.map_or("-".to_owned(), |x| format!("{x:.1e}")),
            row.skipped.clone().unwrap_or_default(),
        ]);
    }
    (!results.results.is_empty()).then_some(table)
}
