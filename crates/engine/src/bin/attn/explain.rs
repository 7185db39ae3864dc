//! `attn explain`: how a backend plans a batch.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use attn_metadata::plan::Roofline;
use attn_metadata::{HeadShape, HostDevice};
use engine::bench::{Workload, WorkloadKind, host_roofline, parse_workloads};
use engine::report::{ExplainRequest, Explained, explain};
use kvpool::{Dtype, KvDtype};
use serde_json::json;

use super::{Failure, Outcome, output};

/// Options that say what a workload of a file says itself.
const SHAPE: [&str; 8] = ["q_lens", "kv_lens", "heads", "dim", "page_size", "window", "dtype", "kv_dtype"];

/// Options of `explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Query tokens of each request, as 1,1,512
    #[arg(long, value_name = "N,...", value_delimiter = ',', required_unless_present = "workload")]
    q_lens: Vec<u32>,
    /// KV tokens of each request, the new ones included
    #[arg(long, value_name = "N,...", value_delimiter = ',', required_unless_present = "workload")]
    kv_lens: Vec<u32>,
    /// Query heads and KV heads
    #[arg(long, value_name = "Q,KV", value_delimiter = ',', num_args = 1, default_value = "32,8")]
    heads: Vec<u32>,
    /// Head width
    #[arg(long, value_name = "N", default_value_t = 128)]
    dim: u32,
    /// Tokens in a page
    #[arg(long, value_name = "N", default_value_t = 16)]
    page_size: u32,
    /// Tokens in the sliding window, the query's own included; 0: no window
    #[arg(long, value_name = "N", default_value_t = 0)]
    window: u32,
    /// Dtype of q: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    dtype: Dtype,
    /// Dtype of the stored KV: f32, f16, bf16 or fp8_e4m3
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    kv_dtype: KvDtype,
    /// A workload of this file instead
    #[arg(long, value_name = "FILE", requires = "name", conflicts_with_all = SHAPE)]
    workload: Option<PathBuf>,
    /// Which workload of the file
    #[arg(long, requires = "workload")]
    name: Option<String>,
    /// Attention backend: a name, names "a+b" of which each layer takes the first that can run it, a pair
    /// "prefill,decode" of these, or "auto"
    #[arg(long, value_name = "NAME", default_value = "auto")]
    attention_backend: String,
    /// Worker threads; default: all
    #[arg(long, value_name = "N", value_parser = super::bench::threads)]
    threads: Option<usize>,
    /// What the host reads, in GB/s, for the predicted time; default: measured in a moment
    #[arg(long, value_name = "X", requires = "gflops", value_parser = rate)]
    read_gbs: Option<f64>,
    /// What the host computes, in GFLOP/s
    #[arg(long, value_name = "X", requires = "read_gbs", value_parser = rate)]
    gflops: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    let request = match (&args.workload, &args.name) {
        (Some(file), Some(name)) => workload_request(args, &find(file, name)?)?,
        _ => lengths_request(args)?,
    };
    let Explained { selection, mut plan } = explain(&request).map_err(Failure::input)?;
    // What a GPU does is not predicted from what the host can do: its backend knows, or nobody.
    let is_on_host = |backend: &str| !backend.starts_with("cuda");
    let needs_host = plan.groups.iter().any(|group| group.predicted_s.is_none() && is_on_host(group.backend));
    let roofline = needs_host.then(|| roofline(args)).transpose()?;
    roofline.iter().for_each(|roofline| plan.predict(roofline, is_on_host));
    if args.json {
        let rejected: Vec<_> =
            selection.rejected.iter().map(|r| json!({"name": r.name, "reasons": r.reasons})).collect();
        let chosen = json!({
            "extend": selection.extend.of_layers(),
            "decode": selection.decode.of_layers(),
            "notes": selection.notes,
            "rejected": rejected,
        });
        output::write_json(&json!({"selection": chosen, "roofline": roofline, "plan": plan}))?;
    } else {
        let source = match &roofline {
            Some(roofline) => describe(args, roofline),
            None if plan.predicted_s().is_some() => "predicted from what these kernels reach on this GPU".to_owned(),
            None => "not predicted: these kernels were not measured on this GPU".to_owned(),
        };
        output::write(&format!("backend {selection}\n\n{plan}{source}\n"))?;
    }
    Ok(Outcome::Success)
}

/// A rate, for clap.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && f64::is_finite(rate) => Ok(rate),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// What was given, or else measured.
fn roofline(args: &Args) -> Result<Roofline> {
    match (args.read_gbs, args.gflops) {
        (Some(read_gbs), Some(gflops)) => {
            Ok(Roofline { read_bytes_per_s: read_gbs * 1e9, flops_per_s: gflops * 1e9, overhead_s: 0.0 })
        }
        _ => {
            Ok(host_roofline(HostDevice { num_threads: args.threads, ..HostDevice::default() })
                .map_err(Failure::input)?)
        }
    }
}

/// The line under the plan: what predicted times are made of.
fn describe(args: &Args, roofline: &Roofline) -> String {
    let Roofline { read_bytes_per_s, flops_per_s, overhead_s } = roofline;
    let source = if args.read_gbs.is_some() { "given" } else { "measured now" };
    format!(
        "roofline of the host, {source}: {:.1} GB/s read, {:.0} GFLOP/s, {:.1} us a call",
        read_bytes_per_s / 1e9,
        flops_per_s / 1e9,
        overhead_s * 1e6
    )
}

fn find(file: &Path, name: &str) -> Result<Workload> {
    let path = || file.display().to_string();
    let text = fs::read_to_string(file).map_err(Failure::input).with_context(path)?;
    let workloads = parse_workloads(&text).map_err(Failure::input).with_context(path)?;
    let names: Vec<String> = workloads.iter().map(|workload| workload.name.clone()).collect();
    let found = workloads.into_iter().find(|workload| workload.name == name);
    Ok(found.ok_or_else(|| {
        Failure::usage(format!("{}: there is no workload {name:?}; there are: {}", path(), names.join(", ")))
    })?)
}

fn lengths_request(args: &Args) -> Result<ExplainRequest> {
    let &[num_qo_heads, num_kv_heads] = &args.heads[..] else {
        return Err(Failure::usage("--heads needs two numbers, query heads and KV heads, as 32,8").into());
    };
    Ok(ExplainRequest {
        q_lens: args.q_lens.clone(),
        kv_lens: args.kv_lens.clone(),
        heads: HeadShape::new(num_qo_heads, num_kv_heads, args.dim),
        values_in_keys: false,
        page_size: args.page_size,
        window_left: args.window.checked_sub(1),
        q_dtype: args.dtype,
        kv_dtype: args.kv_dtype,
        choice: args.attention_backend.clone(),
        device: HostDevice { num_threads: args.threads, ..HostDevice::default() },
    })
}

fn workload_request(args: &Args, workload: &Workload) -> Result<ExplainRequest> {
    if !workload.is_attention() {
        let Workload { name, kind, .. } = workload;
        return Err(Failure::usage(format!("workload {name} is of kind {kind}, which has no plan to explain")).into());
    }
    let ([num_qo_heads, num_kv_heads], [head_dim_qk, head_dim_vo]) = (workload.heads, workload.dim.widths());
    Ok(ExplainRequest {
        q_lens: workload.q_lens.clone(),
        kv_lens: workload.kv_lens.clone(),
        heads: HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo },
        values_in_keys: workload.kind == WorkloadKind::Mla,
        page_size: workload.page,
        window_left: workload.window_left(),
        q_dtype: workload.activation_dtype().map_err(Failure::input)?,
        kv_dtype: workload.stored_dtype().map_err(Failure::input)?,
        choice: args.attention_backend.clone(),
        device: HostDevice { num_threads: args.threads, ..HostDevice::default() },
    })
}
