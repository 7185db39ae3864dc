//! Builds a batch from raw tables, sees a bad one refused, and looks at how a plan cuts a skewed batch.

#![allow(clippy::print_stdout)]

use attn_metadata::plan::{Chunking, CutBy, Plan, PlanConfig, PlanReport, Sharing};
use attn_metadata::{Batch, HeadShape, Layer, LayerParams, ModelSpec, PoolShape, RawBatch};
use kvpool::{Dtype, KvDtype, PageSize};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let page_size = PageSize::new(16)?;
    let pool = PoolShape { num_pages: 1024, page_size };
    let layer = Layer::new(LayerParams::causal(HeadShape::new(32, 8, 128)))?;
    let model = ModelSpec::new(vec![layer; 30], Dtype::F32, KvDtype::F32, page_size)?;

    // One long request that decodes, one short one, one that prefills 40 tokens.
    let kv_indices: Vec<i32> = (0..1000 + 2 + 3).collect();
    let mut raw = RawBatch {
        num_rows: 42,
        qo_indptr: &[0, 1, 2, 42],
        kv_indptr: &[0, 1000, 1002, 1005],
        kv_indices: &kv_indices,
        kv_last_page_len: &[7, 16, 8],
        slot_mapping: None,
        custom_mask: None,
    };
    let batch = Batch::from_raw(pool, &raw)?;

    raw.kv_last_page_len = &[7, 17, 0];
    match Batch::from_raw(pool, &raw) {
        Err(error) => println!("a bad batch is refused: {error}\n"),
        Ok(_) => unreachable!("page lengths of 17 and 0 are not in 1..=16"),
    }

    let config = PlanConfig {
        tile_len: 16,
        chunking: Chunking { by: CutBy::Request, chunk_len: 2048, shortest: 2048, max_q_len: 16 },
        num_workers: 4,
        sharing: Sharing::Even,
        unit_overhead: 64,
    };
    let mut plan = Plan::new(config, model.groups()[0]);
    plan.update(&batch);
    let report = PlanReport::new("example", &model, &batch, &[plan], None);
    print!("{report}");
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
