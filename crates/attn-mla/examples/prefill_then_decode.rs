//! One layer of latent attention: a prompt is prefilled, then a token is decoded, each in the form that is cheaper.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HostDevice, Io, Kv, Layer, ModelSpec, PoolShape, RawBatch,
};
use attn_mla::{MlaBackend, MlaFamily, MlaWeights, MlaWidths, Scale};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, PageSize, Slot};

const NUM_HEADS: u32 = 8;
const PROMPT_LEN: usize = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // 128 + 16 stored a token; queries and outputs of 32 + 16 and 32 a head.
    let widths = MlaWidths::new(128, 16, 32, 32)?;
    let kv_b_proj: Vec<f32> = numbers((NUM_HEADS * widths.up() * widths.latent()) as usize, 0.1);
    let family = MlaFamily::new(MlaWeights::new(widths, NUM_HEADS, &kv_b_proj)?);
    let layer = Layer::new(family.layer_params(Scale::of(widths)))?;

    // A cache of quantised rows: 128 FP8 codes, one scale, 16 bf16 values.
    let page_size = PageSize::new(64)?;
    let mut cache = HostKv::for_spec(layer.kv(), 8, page_size, KvLayout::Nhd, KvFormat::Fp8Latent)?;
    let model = ModelSpec::new(vec![layer], Dtype::F32, cache.format().dtype(), page_size)?;
    let config =
        BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device: HostDevice::with_threads(2) };
    let mut backend = MlaBackend::new(&config)?;

    for (cached, new) in [(0, PROMPT_LEN), (PROMPT_LEN, 1)] {
        let kv_len = cached + new;
        let pages: Vec<i32> = (0..).take(page_size.pages_for(kv_len)).collect();
        let slots: Vec<Slot> = (i32::try_from(cached)?..).take(new).map(Slot::from_raw).collect();
        let raw = RawBatch {
            num_rows: new,
            qo_indptr: &[0, i32::try_from(new)?],
            kv_indptr: &[0, i32::try_from(pages.len())?],
            kv_indices: &pages,
            kv_last_page_len: &[i32::try_from(page_size.last_page_len(kv_len))?],
            slot_mapping: Some(&slots),
            custom_mask: None,
        };
        let batch = Batch::from_raw(PoolShape { num_pages: 8, page_size }, &raw)?;
        let step = backend.prepare_metadata(&batch)?;
        println!("{}", backend.explain(&step)?);

        let heads = NUM_HEADS as usize;
        let (q, rows) = (numbers(new * heads * 48, 1.0), numbers(new * 144, 1.0));
        let mut out = vec![0.0f32; new * heads * 32];
        let io = Io {
            q: HostTensor::packed(&q, [new, heads, 48])?,
            kv: Kv::Append { cache: &mut cache, k: HostTensor::packed(&rows, [new, 1, 144])?, v: None },
            side: None,
            out: HostTensorMut::packed(&mut out, [new, heads, 32])?,
            lse: None,
        };
        backend.forward(&step, 0, io)?;
        println!("first outputs of the last token: {:?}\n", &out[(new - 1) * heads * 32..][..4]);
    }
    Ok(())
}

/// Numbers in -scale..scale that look random.
fn numbers(n: usize, scale: f32) -> Vec<f32> {
    let mut state = 0x9E37_79B9u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits are left")) / 32_768.0 - 1.0
    };
    (0..n).map(|_| scale * next()).collect()
}
