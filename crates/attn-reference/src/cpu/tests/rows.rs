//! Latent rows in the tiles: every column of keys and values as the cache reads it, on every instruction set.

use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, KvSpec, PageSize, Slot, Values};

use super::problem::Rng;
use crate::cpu::isa::Isa;
use crate::cpu::pack::{KV_TILE, PackKeys, PackRows, PackValues, PagedRows, Run};

const LEN: usize = 37;
const PAGE_SIZE: u32 = 4;

fn cache(latent: u32, rope: u32) -> HostKv {
    let page_size = PageSize::new(PAGE_SIZE).unwrap();
    let spec = KvSpec { num_kv_heads: 1, head_dim_k: latent + rope, values: Values::InKeys(latent) };
    let mut cache = HostKv::for_spec(spec, 10, page_size, KvLayout::Nhd, KvFormat::Fp8Latent).unwrap();
    let mut rng = Rng(7);
    let k: Vec<f32> =
        (0..40 * (latent + rope)).map(|i| rng.float() * if i % 1000 < 300 { 1e-3 } else { 9.0 }).collect();
    let slots: Vec<Slot> = (0..40).map(Slot::from_raw).collect();
    cache.append(&slots, &HostTensor::packed(&k, [40, 1, (latent + rope) as usize]).unwrap(), None).unwrap();
    cache
}

/// The rows of a plane by KV position, as real values.
fn real(cache: &HostKv, pages: &[i32], is_key: bool) -> Vec<Vec<f32>> {
    let shape = cache.shape();
    let width = if is_key { shape.head_dim_k } else { shape.head_dim_v };
    let read = |position: usize| {
        let (page, token) = (pages[position / 4], i32::try_from(position % 4).unwrap());
        let mut values = vec![0.0; width as usize];
        let slot = Slot::from_raw(page * 4 + token);
        if is_key {
            cache.read_k(slot, 0, &mut values);
        } else {
            cache.read_v(slot, 0, &mut values);
        }
        values
    };
    (0..LEN).map(read).collect()
}

#[test]
fn packed_rows_are_what_the_cache_reads() {
    for (latent, rope) in [(128, 2), (256, 0), (512, 64), (384, 34)] {
        let cache = cache(latent, rope);
        let pages = [3, 9, 0, 1, 8, 2, 7, 4, 6, 5];
        for isa in Isa::available() {
            let (panel, lanes) = (isa.panel(), isa.panel() / 2);
            let rows = |plane| PagedRows { plane, pages: &pages, page_size: PAGE_SIZE, head: 0 };
            let run = |plane| Run { rows: rows(plane), start: 0, len: LEN };
            let width = (latent + rope) as usize;
            let padded = width.next_multiple_of(lanes);
            let (mut stage, mut tile) = (vec![0.0; lanes * padded], vec![f32::NAN; KV_TILE * padded]);
            let keys = run(cache.k());
            isa.run(PackKeys { run: keys, ahead: keys.part(0..0), stage: &mut stage, tile: &mut tile });
            for (key, want) in real(&cache, &pages, true).iter().enumerate() {
                let got: Vec<f32> =
                    (0..width).map(|d| tile[(key / panel * padded + d) * panel + key % panel]).collect();
                assert_eq!(&got, want, "{isa:?}: key {key} of {latent} + {rope}");
            }
            let stride = (width.div_ceil(panel) | 1) * panel;
            let mut rows = vec![f32::NAN; LEN * stride];
            isa.run(PackRows { run: keys, stride, rows: &mut rows });
            for (key, want) in real(&cache, &pages, true).iter().enumerate() {
                let (got, rest) = rows[key * stride..(key + 1) * stride].split_at(width);
                assert_eq!(got, want, "{isa:?}: row {key} of {latent} + {rope}");
                assert!(rest.iter().all(|x| *x == 0.0), "{isa:?}: row {key} ends in zeros");
            }
            let room = 40;
            let mut tile = vec![f32::NAN; room * (latent as usize).next_multiple_of(panel)];
            let values = run(cache.v());
            isa.run(PackValues { run: values, ahead: values.part(0..0), room, tile: &mut tile });
            for (key, want) in real(&cache, &pages, false).iter().enumerate() {
                let at = |d: usize| tile[(d / panel * room + key) * panel + d % panel];
                let got: Vec<f32> = (0..latent as usize).map(at).collect();
                assert_eq!(&got, want, "{isa:?}: value {key} of {latent} + {rope}");
            }
        }
    }
}
