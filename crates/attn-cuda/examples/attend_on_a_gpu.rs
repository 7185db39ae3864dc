//! Prefills a prompt and decodes a token with tensors in a GPU's memory. Where there is none, says what is missing.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;

use attn_cuda::device::{CudaKv, CudaTensor, CudaTensorMut, DeviceBuffer, probe};
use attn_cuda::{CudaBackend, CudaDevice};
use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HeadShape, Io, Kv, Layer, LayerParams, ModelSpec,
    PoolShape, RawBatch,
};
use half::bf16;
use kvpool::{Dtype, KvDtype, KvFormat, KvLayout, KvShape, PageSize, Slot};

const HEADS: HeadShape = HeadShape::new(8, 2, 64);
const PAGE_SIZE: usize = 16;
const NUM_PAGES: u32 = 16;
/// Pages of the request, in its order: anywhere in the pool.
const PAGES: [i32; 7] = [9, 2, 14, 0, 7, 11, 5];
const PROMPT_LEN: usize = 100;

fn page_size() -> Result<PageSize, Box<dyn Error>> {
    Ok(PageSize::new(u32::try_from(PAGE_SIZE)?)?)
}

/// A tensor of one value: bf16 `[rows, heads, head_dim]`.
fn constant(gpu: &CudaDevice, shape: [usize; 3], value: f32) -> Result<DeviceBuffer, Box<dyn Error>> {
    let bytes = bf16::from_f32(value).to_le_bytes().repeat(shape.iter().product());
    Ok(DeviceBuffer::from_bytes(&gpu.device, &bytes, "a tensor")?)
}

/// Attends with the next `num_rows` tokens of the request, whose KV is appended to that of `cached` tokens; returns their
/// outputs, `[num_rows, 8, 64]`.
fn attend(
    backend: &mut CudaBackend,
    cache: &mut CudaKv,
    gpu: &CudaDevice,
    cached: usize,
    num_rows: usize,
) -> Result<Vec<f32>, Box<dyn Error>> {
    // Once a step: the tables, validated; what will run where.
    let kv_len = cached + num_rows;
    let num_pages = kv_len.div_ceil(PAGE_SIZE);
    let slot_of = |token: usize| -> Result<Slot, Box<dyn Error>> {
        let offset = i32::try_from(token % PAGE_SIZE)?;
        Ok(Slot::from_raw(PAGES[token / PAGE_SIZE] * i32::try_from(PAGE_SIZE)? + offset))
    };
    let slots = (cached..kv_len).map(slot_of).collect::<Result<Vec<_>, _>>()?;
    let raw = RawBatch {
        num_rows,
        qo_indptr: &[0, i32::try_from(num_rows)?],
        kv_indptr: &[0, i32::try_from(num_pages)?],
        kv_indices: &PAGES[..num_pages],
        kv_last_page_len: &[i32::try_from(kv_len - (num_pages - 1) * PAGE_SIZE)?],
        slot_mapping: Some(&slots),
        custom_mask: None,
    };
    let pool = PoolShape { num_pages: NUM_PAGES, page_size: page_size()? };
    let step = backend.prepare_metadata(&Batch::from_raw(pool, &raw)?)?;
    print!("{}", backend.explain(&step)?);

    // Once a layer: the call is given to the stream of `gpu`; reading the result waits for it.
    let (of_q, of_kv) = ([num_rows, 8, 64], [num_rows, 2, 64]);
    let (q, k, v) = (constant(gpu, of_q, 0.1)?, constant(gpu, of_kv, 0.2)?, constant(gpu, of_kv, 0.25)?);
    let mut out = constant(gpu, of_q, f32::NAN)?;
    let io = Io {
        q: CudaTensor::packed(&q, 0, Dtype::Bf16, of_q)?,
        kv: Kv::Append {
            cache,
            k: CudaTensor::packed(&k, 0, Dtype::Bf16, of_kv)?,
            v: Some(CudaTensor::packed(&v, 0, Dtype::Bf16, of_kv)?),
        },
        side: None,
        out: CudaTensorMut::packed(&mut out, 0, Dtype::Bf16, of_q)?,
        lse: None,
    };
    backend.forward(&step, 0, io)?;
    let mut bytes = vec![0; out.len()];
    out.download(0, &mut bytes)?;
    Ok(bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let driver = match probe() {
        Ok(driver) => driver,
        Err(missing) => {
            println!("{missing}");
            return Ok(());
        }
    };
    println!("GPUs that {} shows: {}", driver.library, driver.num_devices);

    let gpu = CudaDevice::open(0)?;
    let page_size = page_size()?;
    let layer = Layer::new(LayerParams::causal(HEADS))?;
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, KvDtype::Bf16, page_size)?);
    let limits = BatchLimits { max_rows: 128, max_requests: 1, max_kv_len: 112 };
    let mut backend = CudaBackend::new(&BackendConfig { model, limits, device: gpu.clone() })?;
    let shape = KvShape { num_pages: NUM_PAGES, page_size, num_kv_heads: 2, head_dim_k: 64, head_dim_v: 64 };
    let mut cache = CudaKv::new(&gpu.device, shape, KvLayout::Nhd, KvFormat::Bf16)?;

    let prefilled = attend(&mut backend, &mut cache, &gpu, 0, PROMPT_LEN)?;
    let decoded = attend(&mut backend, &mut cache, &gpu, PROMPT_LEN, 1)?;
    // All values are 0.25, so every mean of them is.
    assert!(prefilled.iter().chain(&decoded).all(|x| *x == 0.25), "a mean of 0.25");
    println!("{PROMPT_LEN} tokens prefilled and one decoded, all means as they should be");
    Ok(())
}
