//! Merging callers' states on the device: as merging in float64, and an empty state changes no bit.

use attn_conformance::Rng;
use attn_cuda::device::{CudaLse, CudaLseMut, CudaTensor, CudaTensorMut, DeviceBuffer};
use attn_cuda::{CudaDevice, MergeError, StateMerge, States, StatesMut};
use half::{bf16, f16};
use kvpool::Dtype;

use crate::scene::all_bytes;
use crate::support;

const ROWS: usize = 37;
const HEADS: usize = 5;

/// States `[n, ROWS, HEADS, dim]` with their LSEs, on both sides.
struct Stack {
    n: usize,
    dim: usize,
    dtype: Dtype,
    values: Vec<f32>,
    lses: Vec<f32>,
    out: DeviceBuffer,
    lse: DeviceBuffer,
}

impl Stack {
    /// Random states, every seventh of them empty and full of NaN; at least one of each row is not.
    fn new(device: &CudaDevice, dtype: Dtype, n: usize, dim: usize) -> Self {
        let mut rng = Rng::new(&[n as u64, dim as u64]);
        let count = n * ROWS * HEADS;
        let mut values: Vec<f32> = (0..count * dim).map(|_| round(dtype, rng.normal())).collect();
        let mut lses: Vec<f32> = (0..count).map(|_| 3.0 * rng.normal()).collect();
        for state in (0..count).filter(|state| state % 7 == 3 && n > 1) {
            lses[state] = f32::NEG_INFINITY;
            values[state * dim..][..dim].fill(f32::NAN);
        }
        let upload = |bytes: &[u8]| DeviceBuffer::from_bytes(&device.device, bytes, "states").unwrap();
        let (out, lse) = (upload(&encode(dtype, &values)), upload(&encode(Dtype::F32, &lses)));
        Self { n, dim, dtype, values, lses, out, lse }
    }

    fn states(&self, first: usize, n: usize) -> States<'_> {
        let (row_bytes, rows) = (ROWS * HEADS * self.dim * self.dtype.size_bytes(), n * ROWS);
        let shape = [rows, HEADS, self.dim];
        States {
            out: CudaTensor::packed(&self.out, first * row_bytes, self.dtype, shape).unwrap(),
            lse: CudaLse::new(&self.lse, first * ROWS * HEADS * size_of::<f32>(), rows * HEADS).unwrap(),
        }
    }

    /// Merged in float64: outputs and LSEs.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let count = ROWS * HEADS;
        let (mut out, mut lse) = (vec![0.0; count * self.dim], vec![f64::NEG_INFINITY; count]);
        for state in 0..count {
            let of = |i: usize| f64::from(self.lses[i * count + state]);
            let present: Vec<usize> = (0..self.n).filter(|&i| of(i) > f64::NEG_INFINITY).collect();
            let sum: f64 = present.iter().map(|&i| of(i).exp()).sum();
            if sum > 0.0 {
                lse[state] = sum.ln();
            }
            for column in 0..self.dim {
                let value = |i: usize| f64::from(self.values[(i * count + state) * self.dim + column]);
                out[state * self.dim + column] = present.iter().map(|&i| of(i).exp() / sum * value(i)).sum();
            }
        }
        (out, lse)
    }
}

/// Where a result goes.
struct Result {
    out: DeviceBuffer,
    lse: DeviceBuffer,
}

impl Result {
    fn new(device: &CudaDevice, dtype: Dtype, dim: usize) -> Self {
        let buffer = |len| {
            let mut buffer = DeviceBuffer::new(&device.device, len, "a result").unwrap();
            buffer.fill(0xab).unwrap();
            buffer
        };
        Self { out: buffer(ROWS * HEADS * dim * dtype.size_bytes()), lse: buffer(ROWS * HEADS * size_of::<f32>()) }
    }

    fn view(&mut self, dtype: Dtype, dim: usize) -> StatesMut<'_> {
        let out = CudaTensorMut::packed(&mut self.out, 0, dtype, [ROWS, HEADS, dim]).unwrap();
        StatesMut { out, lse: Some(CudaLseMut::new(&mut self.lse, 0, ROWS * HEADS).unwrap()) }
    }
}

fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let bytes = |x: &f32| match dtype {
        Dtype::F32 => x.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let value = |b: &[u8]| match dtype {
        Dtype::F32 => f32::from_le_bytes(b.try_into().unwrap()),
        Dtype::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
    };
    bytes.chunks_exact(dtype.size_bytes()).map(|b| f64::from(value(b))).collect()
}

/// One rounding of the dtype, and what an approximate exponential adds.
fn demand(what: &str, dtype: Dtype, result: &Result, expected: &(Vec<f64>, Vec<f64>)) {
    let unit = match dtype {
        Dtype::F32 => 2e-6,
        Dtype::F16 => 1.2e-3,
        Dtype::Bf16 => 9e-3,
    };
    let check = |name: &str, got: &[f64], expected: &[f64], unit: f64| {
        assert_eq!(got.len(), expected.len());
        for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
            let is_near = got == expected || (got - expected).abs() <= unit * (1.0 + expected.abs());
            assert!(is_near, "{what}, {dtype}: {name} {index} is {got}, expected {expected}");
        }
    };
    check("out", &decode(dtype, &all_bytes(&result.out)), &expected.0, unit);
    check("LSE", &decode(Dtype::F32, &all_bytes(&result.lse)), &expected.1, 4e-6);
}

#[test]
fn merging_states_is_merging_in_float64() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    for dtype in Dtype::ALL {
        let merge = StateMerge::new(&device, dtype).unwrap();
        for (n, dim) in [(1, 64), (2, 128), (3, 8), (4, 96), (9, 256), (5, 2048)] {
            let stack = Stack::new(&device, dtype, n, dim);
            let expected = stack.expected();
            let mut result = Result::new(&device, dtype, dim);
            merge.stacked(stack.states(0, n), n, &mut result.view(dtype, dim)).unwrap();
            demand(&format!("{n} states of width {dim}"), dtype, &result, &expected);
            if n == 2 {
                let mut apart = Result::new(&device, dtype, dim);
                merge.two(stack.states(0, 1), stack.states(1, 1), &mut apart.view(dtype, dim)).unwrap();
                let count = ROWS * HEADS * dim * dtype.size_bytes();
                let mut in_place = Result::new(&device, dtype, dim);
                in_place.out.copy_from(0, &stack.out, 0, count).unwrap();
                in_place.lse.copy_from(0, &stack.lse, 0, ROWS * HEADS * size_of::<f32>()).unwrap();
                merge.accumulate(&mut in_place.view(dtype, dim), stack.states(1, 1)).unwrap();
                for other in [&apart, &in_place] {
                    assert!(all_bytes(&other.out) == all_bytes(&result.out), "{dtype}: another way to merge two");
                    assert!(all_bytes(&other.lse) == all_bytes(&result.lse), "{dtype}: another way to merge two");
                }
            }
        }
    }
}

#[test]
fn merging_with_an_empty_state_gives_the_other_bit_for_bit() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    for dtype in Dtype::ALL {
        let merge = StateMerge::new(&device, dtype).unwrap();
        let full = Stack::new(&device, dtype, 1, 128);
        let nan = vec![f32::NAN; ROWS * HEADS * 128];
        let empty = vec![f32::NEG_INFINITY; ROWS * HEADS];
        let upload = |bytes: &[u8]| DeviceBuffer::from_bytes(&device.device, bytes, "states").unwrap();
        let (nan, empty) = (upload(&encode(dtype, &nan)), upload(&encode(Dtype::F32, &empty)));
        let nothing = States {
            out: CudaTensor::packed(&nan, 0, dtype, [ROWS, HEADS, 128]).unwrap(),
            lse: CudaLse::new(&empty, 0, ROWS * HEADS).unwrap(),
        };
        for pair in [[full.states(0, 1), nothing], [nothing, full.states(0, 1)]] {
            let mut result = Result::new(&device, dtype, 128);
            merge.two(pair[0], pair[1], &mut result.view(dtype, 128)).unwrap();
            assert!(all_bytes(&result.out) == all_bytes(&full.out), "{dtype}");
            assert!(all_bytes(&result.lse) == all_bytes(&full.lse), "{dtype}");
        }
        let mut result = Result::new(&device, dtype, 128);
        merge.two(nothing, nothing, &mut result.view(dtype, 128)).unwrap();
        assert!(all_bytes(&result.out).iter().all(|&byte| byte == 0), "{dtype}");
        assert!(decode(Dtype::F32, &all_bytes(&result.lse)).iter().all(|&lse| lse == f64::NEG_INFINITY), "{dtype}");
    }
}

#[test]
fn states_that_do_not_fit_are_refused_before_anything_is_written() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let (merge, stack) = (StateMerge::new(&device, Dtype::Bf16).unwrap(), Stack::new(&device, Dtype::Bf16, 2, 128));
    let mut result = Result::new(&device, Dtype::Bf16, 128);
    let mut error = |states, n| merge.stacked(states, n, &mut result.view(Dtype::Bf16, 128)).unwrap_err();
    assert!(matches!(error(stack.states(0, 1), 2), MergeError::Shape { .. }));
    assert!(matches!(error(stack.states(0, 2), 0), MergeError::Shape { .. } | MergeError::NumStates { .. }));
    let other = Stack::new(&device, Dtype::F16, 2, 128);
    assert!(matches!(error(other.states(0, 2), 2), MergeError::Dtype { .. }));
    let narrow = Stack::new(&device, Dtype::Bf16, 2, 20);
    let mut short = Result::new(&device, Dtype::Bf16, 20);
    let refused = merge.two(narrow.states(0, 1), narrow.states(0, 1), &mut short.view(Dtype::Bf16, 20)).unwrap_err();
    assert!(matches!(refused, MergeError::HeadDim { got: 20 } | MergeError::Device(_)), "{refused}");
    assert!(all_bytes(&result.out).iter().all(|&byte| byte == 0xab));
}
