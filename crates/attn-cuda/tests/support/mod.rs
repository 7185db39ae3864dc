//! What every test binary begins with: is there a GPU, and where do reports go.
//!
//! `ATTN_REQUIRE_GPU=1` turns a missing GPU into a failure; `ATTN_REPORT_DIR` is where reports are written as JSON.
#![allow(dead_code, unreachable_pub, clippy::print_stderr, clippy::unwrap_used, reason = "each binary uses a part")]

use std::env;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use attn_conformance::Report;
use attn_cuda::device::probe;
use attn_metadata::{
    BackendConfig, BatchLimits, BoxedBackend, CreateError, HeadShape, Host, HostDevice, Layer, LayerParams, ModelSpec,
};
use kvpool::{Dtype, KvDtype, PageSize};

/// Whether there is a GPU; where there is none, backends must say so.
pub fn has_gpu() -> bool {
    match probe() {
        Ok(_) => true,
        Err(error) => {
            assert!(env::var_os("ATTN_REQUIRE_GPU").is_none(), "a GPU is required: {error}");
            let refused = (attn_cuda::host_entry().create)(&config()).err().expect("there is no GPU");
            let CreateError::Unsupported { reasons, .. } = refused else { panic!("{refused}") };
            assert_eq!(reasons.len(), 1);
            assert_eq!(reasons[0].to_string(), error.to_string());
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// A model that every GPU backend runs.
fn config() -> BackendConfig<Host> {
    let layer = Layer::new(LayerParams::causal(HeadShape::new(4, 2, 64))).unwrap();
    let page_size = PageSize::new(16).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, KvDtype::Bf16, page_size).unwrap());
    BackendConfig { model, limits: BatchLimits::NONE, device: HostDevice::default() }
}

/// Shows a report, keeps it as `NAME.json` where reports are wanted, and demands that it is green.
pub fn demand(name: &str, report: &Report) {
    eprintln!("{name}\n{report}");
    keep(name, report);
    report.assert_passed();
}

/// Writes figures as `NAME.json` where reports are wanted.
pub fn keep(name: &str, figures: &impl serde::Serialize) {
    if let Some(folder) = env::var_os("ATTN_REPORT_DIR") {
        let text = serde_json::to_string_pretty(figures).unwrap();
        fs::write(Path::new(&folder).join(format!("{name}.json")), text + "\n").unwrap();
    }
}

/// A backend with kernels that check their tables on the device.
pub fn create_checked(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    Ok(Box::new(attn_cuda::CudaOnHost::checked(config)?))
}
