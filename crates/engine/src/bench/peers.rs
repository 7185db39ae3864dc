//! Puts the results of peers beside ours: rows, the ratio to the best peer of each workload, the geometric mean.

use super::results::{Ratio, ResultRow, Results};

/// A peer whose error is larger computed something else.
const MAX_REL_ERR: f64 = 0.06;

/// Adds a peer's rows for the workloads that we measured, ratios, and their geometric mean. Rates that we lack are taken
/// over, where the peers measured some.
///
/// Figures of two runs compare where the machine and the minutes are the same: that is the caller's to see to.
pub fn add_peers(results: &mut Results, peers: &Results) {
    if let (Some(ours), Some(theirs)) = (results.ceilings.as_mut(), peers.ceilings) {
        ours.read_gbs = ours.read_gbs.or(theirs.read_gbs);
        ours.matmul_tflops = ours.matmul_tflops.or(theirs.matmul_tflops);
        let ours = *ours;
        results.results.iter_mut().for_each(|row| row.set_shares(&ours));
    }
    let mut rows = Vec::new();
    for ours in &mut results.results {
        // What has a ratio already was measured beside ours.
        let Some(our_ms) = ours.ms.filter(|_| ours.ratio.is_none()) else { continue };
        let of_workload = peers.results.iter().filter(|row| row.workload == ours.workload && is_right(row));
        let mut theirs: Vec<ResultRow> = of_workload.cloned().collect();
        theirs.iter_mut().for_each(|row| row.ratio = row.ms.map(|ms| ms / our_ms));
        let ratio = |row: &ResultRow| row.ratio.unwrap_or(f64::INFINITY);
        if let Some(best) = theirs.iter().min_by(|a, b| ratio(a).total_cmp(&ratio(b))) {
            ours.ratio = best.ratio;
            let (workload, peer) = (ours.workload.clone(), best.system.clone());
            results.ratios.push(Ratio { workload, peer, ratio: ratio(best), rounds: Vec::new() });
        }
        rows.append(&mut theirs);
    }
    results.results.append(&mut rows);
    results.geometric_mean = geometric_mean(&results.ratios);
}

/// Whether a row was measured, of a result that is right.
fn is_right(row: &ResultRow) -> bool {
    row.ms.is_some_and(|ms| ms > 0.0) && row.rel_err.is_none_or(|error| error < MAX_REL_ERR)
}

#[expect(clippy::cast_precision_loss, reason = "a mean for people")]
fn geometric_mean(ratios: &[Ratio]) -> Option<f64> {
    let sum: f64 = ratios.iter().map(|ratio| ratio.ratio.ln()).sum();
    (!ratios.is_empty()).then(|| (sum / ratios.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::super::ceilings::Ceilings;
    use super::*;

    fn row(workload: &str, system: &str, ms: f64, rel_err: f64) -> ResultRow {
        let (workload, system) = (workload.to_owned(), system.to_owned());
        let (gbs, tflops) = (Some(500.0), Some(50.0));
        ResultRow { workload, system, ms: Some(ms), rel_err: Some(rel_err), gbs, tflops, ..ResultRow::default() }
    }

    #[test]
    fn the_best_right_peer_of_each_workload_counts() {
        let mut ours = Results {
            results: vec![row("a", "cuda", 2.0, 0.0), row("b", "cuda", 4.0, 0.0), row("c", "cuda", 1.0, 0.0)],
            ceilings: Some(Ceilings::default()),
            ..Results::default()
        };
        let peers = Results {
            ceilings: Some(Ceilings { read_gbs: Some(1000.0), copy_gbs: None, matmul_tflops: Some(100.0) }),
            results: vec![
                row("a", "slow", 9.0, 0.002),
                row("a", "fast", 4.0, 0.002),
                row("a", "wrong", 0.1, 0.5),
                row("a", "not a number", 0.1, f64::NAN),
                row("b", "fast", 2.0, 0.002),
                row("elsewhere", "fast", 2.0, 0.002),
                ResultRow::skipped("b", "slow", "cannot".to_owned()),
            ],
            ..Results::default()
        };
        add_peers(&mut ours, &peers);
        let ratios: Vec<_> = ours.ratios.iter().map(|r| (r.workload.as_str(), r.peer.as_str(), r.ratio)).collect();
        assert_eq!(ratios, [("a", "fast", 2.0), ("b", "fast", 0.5)]);
        assert!((ours.geometric_mean.unwrap() - 1.0).abs() < 1e-12);
        let peers: Vec<_> = ours.results[3..].iter().map(|row| (row.system.as_str(), row.ratio)).collect();
        assert_eq!(peers, [("slow", Some(4.5)), ("fast", Some(2.0)), ("fast", Some(0.5))]);
        assert_eq!(ours.results[0].ratio, Some(2.0));
        assert_eq!(
            (ours.results[2].ratio, ours.results[2].of_read, ours.results[2].of_matmul),
            (None, Some(0.5), Some(0.5))
        );
    }
}
