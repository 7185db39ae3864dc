//! What replaying a file allocates is counted before it is allocated, and with less than that the file is refused.

#![allow(clippy::unwrap_used)]

use std::alloc::System;
use std::fs;
use std::path::PathBuf;

use attn_metadata::{Batch, HeadShape, HostDevice, Layer, LayerParams, PoolShape, PrepareError, RawBatch};
use engine::replay::{Activation, Call, Elements, Problem, ReplayError, ReplayOptions, record, replay};
use kvpool::{HostKv, KvFormat, KvLayout, KvShape, PageSize};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A problem whose requests all read the first page, some of them again and again.
struct Case {
    backend: &'static str,
    cache_out: bool,
    num_requests: i32,
    q_len: i32,
    num_qo_heads: u32,
    head_dim_vo: u32,
    page_size: u32,
    num_pool_pages: u32,
    /// Pages of a request.
    num_pages: i32,
    /// Most that may be allocated over what is counted.
    most: f64,
}

/// Without a split, without a large cache, on the CPU backend.
const PLAIN: Case = Case {
    backend: "cpu",
    cache_out: false,
    num_requests: 1,
    q_len: 1,
    num_qo_heads: 8,
    head_dim_vo: 256,
    page_size: 1024,
    num_pool_pages: 1,
    num_pages: 1,
    most: 1.1,
};

impl Case {
    fn problem(&self) -> Problem {
        let heads = HeadShape::new(self.num_qo_heads, 1, 8);
        let heads = HeadShape { head_dim_vo: self.head_dim_vo, ..heads };
        let page_size = PageSize::new(self.page_size).unwrap();
        let (num_pages, head_dim_v) = (self.num_pool_pages, self.head_dim_vo);
        let shape = KvShape { num_pages, page_size, num_kv_heads: 1, head_dim_k: 8, head_dim_v };
        let rows = usize::try_from(self.num_requests * self.q_len).unwrap();
        let offsets = |step: i32| (0..=self.num_requests).map(|i| i * step).collect::<Vec<_>>();
        let (qo_indptr, kv_indptr) = (offsets(self.q_len), offsets(self.num_pages));
        let raw = RawBatch {
            num_rows: rows,
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &vec![0; usize::try_from(self.num_requests * self.num_pages).unwrap()],
            kv_last_page_len: &vec![1; usize::try_from(self.num_requests).unwrap()],
            slot_mapping: None,
            custom_mask: None,
        };
        let num_qo_heads = self.num_qo_heads as usize;
        let q = Activation::new(Elements::F32(vec![0.5; rows * num_qo_heads * 8]), [rows, num_qo_heads, 8]);
        Problem {
            layer: Layer::new(LayerParams { causal: false, ..LayerParams::causal(heads) }).unwrap(),
            batch: Batch::from_raw(PoolShape { num_pages, page_size }, &raw).unwrap(),
            q: q.unwrap(),
            cache: HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap(),
            new_kv: None,
        }
    }

    fn options(&self, memory_bytes: u64) -> ReplayOptions {
        ReplayOptions {
            choice: self.backend.to_owned(),
            device: HostDevice::with_threads(1),
            memory_bytes: Some(memory_bytes),
            out_dir: std::env::temp_dir(),
            cache_out: self.cache_out,
        }
    }

    fn check(&self, name: &str) {
        let folder = std::env::temp_dir().join(format!("replay-memory-{}-{name}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let (file, result): (PathBuf, PathBuf) = (folder.join("problem"), folder.join("result"));
        fs::write(&file, record(&Call::from(&self.problem())).unwrap()).unwrap();
        let mut counted = 0;
        let allocated = loop {
            let region = Region::new(ALLOCATOR);
            match replay(&file, &result, &self.options(counted)) {
                Ok(_) => break region.change().bytes_allocated,
                Err(ReplayError::Memory { needed_mib, .. }) => {
                    counted = counted.max((needed_mib - 1) << 20) + (1 << 20);
                }
                Err(ReplayError::Prepare(PrepareError::OutOfMemory { bytes, .. })) => counted += bytes,
                Err(error) => panic!("{name}: {error}"),
            }
            assert!(!result.exists(), "{name}: refused and yet written");
        };
        assert!(counted > 4 << 20, "{name}: the problem is large enough for one that is refused");
        let less = replay(&file, &result, &self.options(counted - (2 << 20))).unwrap_err();
        assert!(less.is_bad_input(), "{name}: {less}");
        // The file; of the tensors that are made of it a large cache is not from the allocator, and the others are small.
        let read = fs::metadata(&file).unwrap().len();
        fs::remove_dir_all(&folder).unwrap();
        #[expect(clippy::cast_precision_loss, reason = "megabytes")]
        let (allocated, counted) = ((allocated as u64 - read) as f64, counted as f64);
        assert!(allocated <= self.most * counted, "{name}: {allocated} bytes allocated, {counted} counted");
        assert!(counted <= 1.5 * allocated, "{name}: {counted} bytes counted, {allocated} allocated");
    }
}

// One test, so that no other thread allocates meanwhile.
#[test]
fn what_is_allocated_was_counted() {
    Case { q_len: 2000, ..PLAIN }.check("result");
    Case { cache_out: true, num_pool_pages: 32, ..PLAIN }.check("cache");
    // Room for partial states is made half as large again where there are addresses for it; that half is not used.
    Case { num_requests: 4, num_qo_heads: 64, num_pages: 64, most: 1.6, ..PLAIN }.check("partial states");
    // Each vector is read as float32 first, which is given back at once.
    Case { backend: "oracle", num_qo_heads: 1, num_pages: 16, most: 1.5, ..PLAIN }.check("float64 copies");
}
