//! Owns [`Noise`]: random elements for measurements, normal values in a stored dtype, on the device and known on the host.
//!
//! Element i is a function of the seed and of i, so every core fills a part, and what was drawn need not be kept. There
//! is one long run of elements a dtype, made and sent once; tensors are copies of it on the device, and repeat it where
//! they are longer. Its length shares no factor with the sizes of tensors beyond 8, so no two planes or pages are alike.

use attn_cuda::device::{CudaKv, Device, DeviceBuffer, DeviceError};
use half::{bf16, f16};
use kvpool::{KvDtype, KvFormat, f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use rayon::prelude::*;

use super::super::problem::box_muller;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Elements of the run: 8 times a prime.
pub(super) const RUN_ELEMENTS: usize = 8 * 16_777_213;
/// Elements that one task fills.
const PART_ELEMENTS: usize = 1 << 20;
/// Distinct values.
const TABLE_LEN: usize = 1 << 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Noise {
    dtype: KvDtype,
    table: Table,
    seed: u64,
    num_elements: usize,
    run: DeviceBuffer,
}

/// The distinct values: as stored, and what a stored one is worth without its scale.
#[derive(Clone, Debug)]
struct Table {
    codes: Codes,
    values: Vec<f32>,
}

#[derive(Clone, Debug)]
enum Codes {
    F32(Vec<f32>),
    Half(Vec<u16>),
    Byte(Vec<u8>),
}

impl Noise {
    /// Makes a run for a format and sends it.
    pub(super) fn new(gpu: &Device, format: KvFormat, seed: u64, num_elements: usize) -> Result<Self, DeviceError> {
        let dtype = format.dtype();
        let table = Table::new(dtype, format.k_scale(), seed);
        let bytes = table.draw(seed, num_elements);
        let run = DeviceBuffer::from_bytes(gpu, &bytes, "random elements")?;
        Ok(Self { dtype, table, seed, num_elements, run })
    }

    /// The dtype of its elements.
    pub(super) const fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// Writes elements `first..` to a whole buffer, by copies on the device.
    pub(super) fn fill(&self, target: &mut DeviceBuffer, first: usize) -> Result<(), DeviceError> {
        self.copy(target.len(), first, |at, from, len| target.copy_from(at, &self.run, from, len))
    }

    /// The same for all memory of pages, from the first element on.
    pub(super) fn fill_pages(&self, target: &mut CudaKv) -> Result<(), DeviceError> {
        let len = target.buffer().map_or(0, DeviceBuffer::len);
        self.copy(len, 0, |at, from, len| target.copy_from(at, &self.run, from, len))
    }

    /// Gives out copies of the run, from element `first` on, to fill `len` bytes: where to, where from, bytes.
    fn copy(
        &self,
        len: usize,
        first: usize,
        mut give: impl FnMut(usize, usize, usize) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let size = self.dtype.element_bytes();
        let (mut at, mut from) = (0, first % self.num_elements * size);
        while at < len {
            let bytes = (self.run.len() - from).min(len - at);
            give(at, from, bytes)?;
            (at, from) = (at + bytes, 0);
        }
        Ok(())
    }

    /// The element, as stored: without its scale.
    pub(super) fn value(&self, index: usize) -> f32 {
        self.table.values[usize::from(entry(self.seed, index % self.num_elements))]
    }
}

impl Table {
    fn new(dtype: KvDtype, scale: f32, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let normal: Vec<f32> = (0..TABLE_LEN / 2).flat_map(|_| box_muller(&mut rng)).collect();
        let codes = match dtype {
            KvDtype::F32 => Codes::F32(normal),
            KvDtype::F16 => Codes::Half(normal.iter().map(|&x| f16::from_f32(x).to_bits()).collect()),
            KvDtype::Bf16 => Codes::Half(normal.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()),
            KvDtype::Fp8E4m3 | KvDtype::Fp8Latent => {
                Codes::Byte(normal.iter().map(|&x| f32_to_fp8_e4m3(x / scale)).collect())
            }
        };
        let values = match &codes {
            Codes::F32(codes) => codes.clone(),
            Codes::Half(codes) if dtype == KvDtype::F16 => codes.iter().map(|&x| f16::from_bits(x).to_f32()).collect(),
            Codes::Half(codes) => codes.iter().map(|&x| bf16::from_bits(x).to_f32()).collect(),
            Codes::Byte(codes) => codes.iter().map(|&x| fp8_e4m3_to_f32(x)).collect(),
        };
        Self { codes, values }
    }

    /// The bytes of elements `0..num_elements`, on all cores.
    fn draw(&self, seed: u64, num_elements: usize) -> Vec<u8> {
        match &self.codes {
            Codes::F32(codes) => draw(codes, seed, num_elements),
            Codes::Half(codes) => draw(codes, seed, num_elements),
            Codes::Byte(codes) => draw(codes, seed, num_elements),
        }
    }
}

fn draw<T: bytemuck::Pod + Send + Sync>(codes: &[T], seed: u64, num_elements: usize) -> Vec<u8> {
    let size = size_of::<T>();
    let mut bytes = vec![0; num_elements * size];
    bytes.par_chunks_mut(PART_ELEMENTS * size).enumerate().for_each(|(part, bytes)| {
        let begin = part * PART_ELEMENTS;
        for (four, bytes) in bytes.chunks_mut(4 * size).enumerate() {
            let bits = mix(seed, begin / 4 + four).to_le_bytes();
            for (to, bits) in bytes.chunks_exact_mut(size).zip(bits.chunks_exact(2)) {
                let code = &codes[usize::from(u16::from_le_bytes([bits[0], bits[1]]))];
                to.copy_from_slice(bytemuck::bytes_of(code));
            }
        }
    });
    bytes
}

/// Which entry of the table an element is.
fn entry(seed: u64, index: usize) -> u16 {
    let bits = mix(seed, index / 4).to_le_bytes();
    let at = index % 4 * 2;
    u16::from_le_bytes([bits[at], bits[at + 1]])
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over a counter.
const fn mix(seed: u64, counter: usize) -> u64 {
    let x = seed.wrapping_add((counter as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use kvpool::KvScales;

    use super::*;

    #[test]
    fn what_is_drawn_is_what_a_single_element_says_in_every_dtype() {
        let scales = KvScales::new(0.05, 0.05).unwrap();
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Fp8E4m3(scales)] {
            let (dtype, num) = (format.dtype(), PART_ELEMENTS + 4093);
            let table = Table::new(dtype, format.k_scale(), 7);
            let bytes = table.draw(7, num);
            assert_eq!(bytes.len(), num * dtype.element_bytes());
            for index in [0, 1, 5, 4095, PART_ELEMENTS - 1, PART_ELEMENTS, PART_ELEMENTS + 4092] {
                let element = &bytes[index * dtype.element_bytes()..][..dtype.element_bytes()];
                let got = match dtype {
                    KvDtype::F32 => f32::from_le_bytes(element.try_into().unwrap()),
                    KvDtype::F16 => f16::from_le_bytes(element.try_into().unwrap()).to_f32(),
                    KvDtype::Bf16 => bf16::from_le_bytes(element.try_into().unwrap()).to_f32(),
                    _ => fp8_e4m3_to_f32(element[0]),
                };
                assert_eq!(got, table.values[usize::from(entry(7, index))], "{dtype} {index}");
            }
        }
    }

    #[test]
    fn elements_are_normal_and_all_entries_come_up() {
        let table = Table::new(KvDtype::F32, 1.0, 3);
        let values: Vec<f64> = (0..1 << 20).map(|i| f64::from(table.values[usize::from(entry(3, i))])).collect();
        let n = f64::from(1 << 20);
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / n;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
        let mut seen = vec![false; TABLE_LEN];
        (0..1 << 21).for_each(|i| seen[usize::from(entry(3, i))] = true);
        assert!(seen.iter().all(|&seen| seen));
    }
}
