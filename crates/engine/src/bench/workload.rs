//! The shape of one attention call, as a workload file gives it.

use std::fmt;

use kvpool::{Dtype, KvDtype};
use serde::Deserialize;
use thiserror::Error;

/// One attention call. Every mask is causal, aligned to the bottom right.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// What the call does.
    pub kind: WorkloadKind,
    /// New tokens of each request.
    pub q_lens: Vec<u32>,
    /// KV tokens of each request, the new ones included.
    pub kv_lens: Vec<u32>,
    /// Query heads and KV heads.
    pub heads: [u32; 2],
    /// Head width, or for `mla` the widths of scores and values.
    pub dim: KvWidth,
    /// Tokens in a page.
    pub page: u32,
    /// Tokens in the sliding window, the query's own included; 0: no window.
    #[serde(default)]
    pub window: u32,
    /// Dtype of the stored KV: `f32`, `f16`, `bf16` or `fp8` (E4M3 with one scale a tensor).
    pub kv_dtype: String,
    /// Dtype of q and out; bf16 where it is not given.
    #[serde(default)]
    pub q_dtype: Option<String>,
    /// Whether the call appends the new tokens' KV before it attends.
    #[serde(default)]
    pub append: bool,
    /// States of a row, for kind `merge`.
    #[serde(default = "two")]
    pub states: u32,
}

/// What the call of a workload does. The last two are measured on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkloadKind {
    /// Plain attention; every request computes a prompt or a part of one.
    Prefill,
    /// Plain attention; every request computes one token, or a few.
    Decode,
    /// Plain attention; requests of both kinds.
    Mixed,
    /// Attention over latent rows, whose first columns are the values.
    Mla,
    /// The new tokens' KV is stored, and nothing attends.
    Store,
    /// As many rows of partial states as there are queries are merged.
    Merge,
}

impl fmt::Display for WorkloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::Mla => "mla",
            Self::Store => "store",
            Self::Merge => "merge",
        })
    }
}

const fn two() -> u32 {
    2
}

/// A head width, or the widths of scores and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum KvWidth {
    /// One width for all.
    Same(u32),
    /// Width of queries and keys, width of values and outputs.
    Pair([u32; 2]),
}

impl KvWidth {
    /// Widths of queries and keys, and of values and outputs.
    #[must_use]
    pub const fn widths(self) -> [u32; 2] {
        match self {
            Self::Same(width) => [width, width],
            Self::Pair(widths) => widths,
        }
    }
}

/// A workload file that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The file is not a JSON list of workloads.
    #[error("not a JSON list of workloads")]
    Json(#[source] serde_json::Error),
    /// The file holds no workload.
    #[error("the list of workloads is empty")]
    Empty,
    /// A workload has not one KV length for each query length.
    #[error(
        "workload {name}: {q_lens} q_lens and {kv_lens} kv_lens, give as many of the one as of the other, at least 1"
    )]
    Lengths {
        /// The workload.
        name: String,
        /// Query lengths given.
        q_lens: usize,
        /// KV lengths given.
        kv_lens: usize,
    },
    /// A workload stores without appending, or merges no state.
    #[error("workload {name}: kind store needs \"append\": true, kind merge at least one of \"states\"")]
    Moves {
        /// The workload.
        name: String,
    },
    /// A workload has a dtype that does not exist.
    #[error("workload {name}: {field} {got:?} is unknown, expected one of {expected}")]
    Dtype {
        /// The workload.
        name: String,
        /// Which dtype.
        field: &'static str,
        /// What was given.
        got: String,
        /// What there is.
        expected: &'static str,
    },
}

impl Workload {
    /// Dtype of the stored KV.
    ///
    /// # Errors
    /// [`WorkloadError::Dtype`].
    pub fn stored_dtype(&self) -> Result<KvDtype, WorkloadError> {
        let name = if self.kv_dtype == "fp8" { KvDtype::Fp8E4m3.name() } else { &self.kv_dtype };
        name.parse().map_err(|_| WorkloadError::Dtype {
            name: self.name.clone(),
            field: "kv_dtype",
            got: self.kv_dtype.clone(),
            expected: "f32, f16, bf16, fp8",
        })
    }

    /// Dtype of q and out.
    ///
    /// # Errors
    /// [`WorkloadError::Dtype`].
    pub fn activation_dtype(&self) -> Result<Dtype, WorkloadError> {
        let name = self.q_dtype.as_deref().unwrap_or(Dtype::Bf16.name());
        name.parse().map_err(|_| WorkloadError::Dtype {
            name: self.name.clone(),
            field: "q_dtype",
            got: name.to_owned(),
            expected: "f32, f16, bf16",
        })
    }

    /// Whether the call attends: neither `store` nor `merge`.
    #[must_use]
    pub const fn is_attention(&self) -> bool {
        !matches!(self.kind, WorkloadKind::Store | WorkloadKind::Merge)
    }

    /// Earlier tokens that a query sees besides itself; `None`: all.
    #[must_use]
    pub const fn window_left(&self) -> Option<u32> {
        self.window.checked_sub(1)
    }

    fn check(&self) -> Result<(), WorkloadError> {
        let (q_lens, kv_lens) = (self.q_lens.len(), self.kv_lens.len());
        if q_lens == 0 || q_lens != kv_lens {
            return Err(WorkloadError::Lengths { name: self.name.clone(), q_lens, kv_lens });
        }
        if (self.kind == WorkloadKind::Store && !self.append) || (self.kind == WorkloadKind::Merge && self.states == 0)
        {
            return Err(WorkloadError::Moves { name: self.name.clone() });
        }
        self.stored_dtype()?;
        self.activation_dtype()?;
        Ok(())
    }
}

/// Reads a workload file: a JSON list.
///
/// # Errors
/// [`WorkloadError`].
pub fn parse_workloads(text: &str) -> Result<Vec<Workload>, WorkloadError> {
    let workloads: Vec<Workload> = serde_json::from_str(text).map_err(WorkloadError::Json)?;
    if workloads.is_empty() {
        return Err(WorkloadError::Empty);
    }
    workloads.iter().try_for_each(Workload::check)?;
    Ok(workloads)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"[{"name": "a", "kind": "mla", "q_lens": [1], "kv_lens": [9], "heads": [4, 1],
        "dim": [576, 512], "page": 64, "window": 8, "kv_dtype": "fp8"}]"#;

    #[test]
    fn a_window_counts_the_query_itself() {
        let workload = parse_workloads(ONE).unwrap().remove(0);
        assert_eq!(workload.window_left(), Some(7));
        assert_eq!(workload.dim.widths(), [576, 512]);
        assert_eq!(workload.stored_dtype().unwrap(), KvDtype::Fp8E4m3);
        assert_eq!(workload.activation_dtype().unwrap(), Dtype::Bf16);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_by_name() {
        let error = |from: &str, to: &str| parse_workloads(&ONE.replace(from, to)).unwrap_err().to_string();
        assert_eq!(parse_workloads("[]").unwrap_err().to_string(), "the list of workloads is empty");
        assert!(error("[9]", "[9, 9]").starts_with("workload a: 1 q_lens and 2 kv_lens"));
        assert!(error("\"fp8\"", "\"fp4\"").starts_with("workload a: kv_dtype \"fp4\" is unknown"));
        assert!(error("mla", "store").contains("kind store needs"));
        assert!(error("\"mla\"", "\"merge\", \"states\": 0").contains("kind merge at least one"));
        assert_eq!(error("[{", "{"), "not a JSON list of workloads");
        let typo = crate::report::error_chain(&parse_workloads(&ONE.replace("mla", "prefil")).unwrap_err());
        assert!(
            typo.contains("unknown variant `prefil`, expected one of `prefill`, `decode`, `mixed`, `mla`"),
            "{typo}"
        );
    }

    #[test]
    fn the_workloads_of_this_repository_can_be_read() {
        assert!(parse_workloads(include_str!("../../../../bench/workloads.json")).unwrap().len() > 20);
        assert_eq!(parse_workloads(include_str!("../../../../bench/cpu-workloads.json")).unwrap().len(), 4);
        let moves = parse_workloads(include_str!("../../../../bench/gpu-moves.json")).unwrap();
        assert!(moves.iter().all(|workload| !workload.is_attention()) && moves.len() > 2);
    }
}
