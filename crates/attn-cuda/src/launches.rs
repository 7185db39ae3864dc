//! Launches the kernels of one layer. The only unsafe code outside `device`: each launch promises what `params.h` asks.
//!
//! What makes the promises true: tables come from a validated batch, views were checked against the layer, the step and
//! for alignment, workspace and tables were sized by the functions that carve them, and all of them live until work
//! given later to the same stream.

use std::sync::Arc;

use attn_metadata::{Kv, Layer, ModelSpec};

use crate::backend::CLAIM_BYTES;
use crate::device::{
    CudaKv, CudaLseMut, CudaTensor, CudaTensorMut, Device, DeviceBuffer, DeviceError, Kernel, KernelParams,
    LaunchShape, SideStream,
};
use crate::entry::{Element, Entry};
use crate::kernel_set::{KernelSet, LayerConstants};
use crate::params::{AttnParams, MergeStatesParams, StoreKvParams, page_division};
use crate::space::Cuda;
use crate::step::{CudaStep, GroupTables, PartTables};
use crate::windows::kernel_window;

/// Thread blocks a multiprocessor for kernels that stream over rows.
const STREAM_BLOCKS_PER_SM: u32 = 4;

/// One layer's call.
pub(crate) struct LayerCall<'a> {
    pub(crate) device: &'a Device,
    pub(crate) kernels: &'a KernelSet,
    pub(crate) model: &'a ModelSpec,
    pub(crate) layer: &'a Layer,
    /// KV tokens of a request, at most.
    pub(crate) max_kv_len: u32,
    pub(crate) constants: &'a LayerConstants,
    pub(crate) step: &'a CudaStep,
    pub(crate) group: usize,
    pub(crate) cache: &'a CudaKv,
    /// Where blocks claim work, decoding first: zeros, as each kernel leaves it.
    pub(crate) claims: &'a DeviceBuffer,
    /// Where decoding runs beside prefill, where it does.
    pub(crate) side: Option<&'a SideStream>,
    /// Where checked kernels leave their record; 0: kernels do not check.
    pub(crate) check: u64,
}

/// New KV. Where values are columns of the keys there is no `v`: writing the keys writes them.
struct NewKv<'a> {
    k: CudaTensor<'a>,
    v: Option<CudaTensor<'a>>,
}

impl LayerCall<'_> {
    /// Writes what a call appends, if it does.
    pub(crate) fn store_new(&self, kv: &Kv<'_, Cuda>) -> Result<(), DeviceError> {
        match kv {
            Kv::Append { k, v, .. } => self.store(&NewKv { k: *k, v: *v }),
            Kv::Attend { .. } => Ok(()),
        }
    }

    /// Writes new KV to the step's slots.
    fn store(&self, new: &NewKv<'_>) -> Result<(), DeviceError> {
        let entry = self.constants.kernels.store;
        let params = self.store_params(new);
        let num_rows = self.step.num_rows;
        let grid = num_rows.min(self.streaming_blocks());
        let kernel = self.kernels.store(self.device, entry, self.check != 0)?;
        let shape = self.shape(&kernel, entry, grid);
        // SAFETY: see the module: slots are in the pool or negative, k has a row for each slot, and so has v where one is
        // written: its width is 0 otherwise.
        unsafe { kernel.launch(&shape, &params) }
    }

    /// Attends, all parts of the plan, then merges what was split.
    pub(crate) fn attend(
        &self,
        q: CudaTensor<'_>,
        out: &CudaTensorMut<'_>,
        lse: Option<&CudaLseMut<'_>>,
    ) -> Result<(), DeviceError> {
        let tables = &self.step.groups[self.group];
        let counters = self.counters(tables);
        let params = self.attn_params(q, out, lse);
        let params = AttnParams { counters: counters.map_or(0, DeviceBuffer::address), ..params };
        let attended = self.attend_and_merge(tables, &params);
        if let (Err(_), Some(counters)) = (&attended, counters) {
            // Merging leaves zeros, decoding alone does not, and with what it left later steps would merge states that are
            // not there yet. Where this fails too, the context is lost, or a recording, of which nothing will run.
            let _ = counters.clear();
        }
        attended
    }

    /// All launches of a call.
    fn attend_and_merge(&self, tables: &GroupTables, params: &AttnParams) -> Result<(), DeviceError> {
        let [decode, extend] = &tables.parts;
        if let Some(side) = self.side.filter(|_| tables.is_at_once) {
            // Prefill first: its blocks need a multiprocessor each, while decoding takes whatever is free.
            side.beside(|side| {
                self.attend_part(extend, params, None)?;
                self.attend_part(decode, params, Some(side))
            })?;
        } else {
            self.attend_part(decode, params, None)?;
            self.attend_part(extend, params, None)?;
        }
        // What comes next may start early, which waits for one kernel before it: where two end together merging is that one,
        // also where nothing is merged.
        let merge_grid = tables.merge_grid.max(u32::from(tables.is_at_once));
        if merge_grid == 0 {
            return Ok(());
        }
        let entry = self.constants.kernels.merge;
        let params = AttnParams { step: tables.merge_step, tiles: tables.tiles, ..*params };
        let kernel = self.kernels.attention(self.device, entry, self.check != 0)?;
        // Blocks that find room at once: they rehearse while they wait, later ones would do it for nothing.
        let resident = entry.blocks_per_sm * self.device.properties().num_sms;
        let mut shape = self.shape(&kernel, entry, merge_grid.min(resident));
        // A kernel that starts early waits for one before it.
        shape.is_programmatic &= !tables.is_at_once;
        // SAFETY: see the module.
        unsafe { kernel.launch(&shape, &params) }
    }

    /// Attends one part of the plan, if there is anything of it.
    fn attend_part(
        &self,
        part: &PartTables,
        params: &AttnParams,
        side: Option<&SideStream>,
    ) -> Result<(), DeviceError> {
        if part.grid == 0 {
            return Ok(());
        }
        let pair = if part.is_decode { self.constants.kernels.decode } else { Some(self.constants.kernels.extend) };
        let entry = pair.expect("a part for decoding has its kernel").of(self.step.has_mask);
        let own_claim = self.claims.address() + if part.is_decode { 0 } else { CLAIM_BYTES as u64 };
        let claim = if self.step.is_claimed(self.group, part) { own_claim } else { 0 };
        let (step, tiles, ranges, starts) = (part.step, part.tiles, part.ranges, part.starts);
        let params = AttnParams { step, tiles, ranges, starts, claim, ..*params };
        if entry.takes_maps() {
            let kernel = self.kernels.mapped(self.device, entry, self.check != 0)?;
            let params = self.kernels.maps.add(self.device, &params, entry.kv == Element::Fp8);
            self.launch_part(&kernel, &self.shape(&kernel, entry, part.grid), &params, side)
        } else {
            let kernel = self.kernels.attention(self.device, entry, self.check != 0)?;
            self.launch_part(&kernel, &self.shape(&kernel, entry, part.grid), &params, side)
        }
    }

    fn launch_part<P: KernelParams>(
        &self,
        kernel: &Kernel<P>,
        shape: &LaunchShape,
        params: &P,
        side: Option<&SideStream>,
    ) -> Result<(), DeviceError> {
        let Some(side) = side else {
            // SAFETY: see the module; maps describe the memory that the parameters name.
            return unsafe { kernel.launch(shape, params) };
        };
        let shape = LaunchShape { is_programmatic: false, ..*shape };
        // SAFETY: as above. Parts of a plan have rows of out, partial states and claims of their own.
        unsafe { kernel.launch_beside(side, &shape, params) }
    }

    /// Where partial states are counted, so that merging need not wait for the end of the kernel that decodes; `None`: it
    /// waits for the end of all that is before it, which may be another kernel.
    fn counters(&self, tables: &GroupTables) -> Option<&DeviceBuffer> {
        let [decode, extend] = &tables.parts;
        let is_followed = tables.merge_grid > 0 && decode.grid > 0 && extend.grid == 0;
        self.step.counters.as_deref().filter(|_| is_followed)
    }

    fn streaming_blocks(&self) -> u32 {
        STREAM_BLOCKS_PER_SM * self.device.properties().num_sms
    }

    /// Kernels of images for 9.0 and newer wait inside for the one before.
    fn shape<P: KernelParams>(&self, kernel: &Kernel<P>, entry: &Entry, grid: u32) -> LaunchShape {
        LaunchShape {
            grid,
            block: entry.threads,
            cluster: 1,
            shared_bytes: entry.shared_bytes,
            is_programmatic: kernel.image_arch() >= 90,
        }
    }

    fn attn_params(&self, q: CudaTensor<'_>, out: &CudaTensorMut<'_>, lse: Option<&CudaLseMut<'_>>) -> AttnParams {
        let (heads, layer, step) = (self.layer.heads(), self.layer, self.step);
        let (k, v) = (self.cache.k(), self.cache.v());
        let tables = &step.groups[self.group];
        let (page_magic, page_shift) = page_division(self.model.page_size().get());
        let address = |buffer: &Option<Arc<DeviceBuffer>>| buffer.as_ref().map_or(0, |b| b.address());
        AttnParams {
            q: q.address(),
            out: out.address(),
            lse: lse.map_or(0, CudaLseMut::address),
            k: self.cache.plane_address(&k),
            v: self.cache.plane_address(&v),
            kv_indices: step.kv_indices,
            merge_units: tables.merge_units,
            partial_out: tables.workspace.partial_out,
            partial_lse: tables.workspace.partial_lse,
            sinks: address(&self.constants.sinks),
            alibi_slopes: address(&self.constants.alibi_slopes),
            custom_mask: step.mask,
            check: self.check,
            q_stride_row: wide(q.row_stride()),
            q_stride_head: wide(q.head_stride()),
            out_stride_row: wide(out.row_stride()),
            out_stride_head: wide(out.head_stride()),
            k_stride_page: wide(k.strides.page),
            k_stride_token: wide(k.strides.token),
            k_stride_head: wide(k.strides.head),
            v_stride_page: wide(v.strides.page),
            v_stride_token: wide(v.strides.token),
            v_stride_head: wide(v.strides.head),
            num_rows: count(step.num_rows),
            num_qo_heads: count(heads.num_qo_heads),
            num_kv_heads: count(heads.num_kv_heads),
            group_size: count(heads.group_size()),
            page_size: count(self.model.page_size().get()),
            page_magic,
            page_shift,
            causal: i32::from(layer.is_causal()),
            window_left: kernel_window(layer.window_left(), self.max_kv_len),
            sm_scale: layer.sm_scale(),
            softcap: layer.softcap().unwrap_or(0.0),
            k_scale: self.cache.format().k_scale(),
            v_scale: self.cache.format().v_scale(),
            head_dim_qk: count(heads.head_dim_qk),
            head_dim_vo: count(heads.head_dim_vo),
            num_pages: count(self.cache.shape().num_pages),
            num_kv_indices: step.num_kv_indices,
            num_partial_rows: tables.workspace.num_rows,
            ..AttnParams::default()
        }
    }

    fn store_params(&self, new: &NewKv<'_>) -> StoreKvParams {
        let heads = self.layer.heads();
        let (k, v) = (self.cache.k(), self.cache.v());
        let (page_magic, page_shift) = page_division(self.model.page_size().get());
        StoreKvParams {
            k: new.k.address(),
            v: new.v.map_or(0, |v| v.address()),
            k_cache: self.cache.plane_address(&k),
            v_cache: self.cache.plane_address(&v),
            slots: self.step.slots,
            check: self.check,
            k_stride_row: wide(new.k.row_stride()),
            k_stride_head: wide(new.k.head_stride()),
            v_stride_row: new.v.map_or(0, |v| wide(v.row_stride())),
            v_stride_head: new.v.map_or(0, |v| wide(v.head_stride())),
            k_cache_stride_page: wide(k.strides.page),
            k_cache_stride_token: wide(k.strides.token),
            k_cache_stride_head: wide(k.strides.head),
            v_cache_stride_page: wide(v.strides.page),
            v_cache_stride_token: wide(v.strides.token),
            v_cache_stride_head: wide(v.strides.head),
            num_rows: count(self.step.num_rows),
            num_kv_heads: count(heads.num_kv_heads),
            head_dim_qk: count(heads.head_dim_qk),
            head_dim_vo: new.v.map_or(0, |_| count(heads.head_dim_vo)),
            page_size: count(self.model.page_size().get()),
            page_magic,
            page_shift,
            k_scale: self.cache.format().k_scale(),
            v_scale: self.cache.format().v_scale(),
            num_pages: count(self.cache.shape().num_pages),
            ..StoreKvParams::default()
        }
    }
}

/// Merges partial states. Shapes, dtypes, packing and alignment were checked by the caller, whose borrows keep the
/// memory until the launch was given to the stream, in whose order it is freed.
pub(crate) fn launch_merge(
    kernel: &Kernel<MergeStatesParams>,
    shape: &LaunchShape,
    params: &MergeStatesParams,
) -> Result<(), DeviceError> {
    // SAFETY: see above: every address is that of a checked view of as many elements as the kernel reads or writes.
    unsafe { kernel.launch(shape, params) }
}

/// A stride: views lie in memory, so it fits.
fn wide(stride: usize) -> i64 {
    i64::try_from(stride).unwrap_or(i64::MAX)
}

/// A count: the waist's are below 2³¹.
fn count(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
