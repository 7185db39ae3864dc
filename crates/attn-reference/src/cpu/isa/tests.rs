//! Every operation of every instruction set of this machine against plain scalar arithmetic.

use super::*;
use crate::cpu::math;

/// Applies a kernel-shaped function to each vector of `x`.
struct Map<'a, F> {
    x: &'a mut [f32],
    f: F,
}

trait Unary {
    fn apply<S: Simd>(&self, simd: S, x: S::Vector) -> S::Vector;
}

impl<F: Unary> Kernel for Map<'_, F> {
    type Output = ();

    fn run<S: Simd>(self, simd: S) {
        for row in bytemuck::cast_slice_mut::<f32, S::Row>(self.x) {
            let y = self.f.apply(simd, simd.load(row));
            simd.store(y, row);
        }
    }
}

struct Exp;
impl Unary for Exp {
    fn apply<S: Simd>(&self, simd: S, x: S::Vector) -> S::Vector {
        math::exp(simd, x)
    }
}

struct Tanh;
impl Unary for Tanh {
    fn apply<S: Simd>(&self, simd: S, x: S::Vector) -> S::Vector {
        math::tanh(simd, x)
    }
}

fn map(isa: Isa, f: impl Unary, x: &[f32]) -> Vec<f32> {
    let mut padded = x.to_vec();
    padded.resize(x.len().next_multiple_of(16), 0.0);
    isa.run(Map { x: &mut padded, f });
    padded.truncate(x.len());
    padded
}

/// Distance to the true value in units of the last place of the result.
#[allow(clippy::cast_possible_truncation)]
fn ulps(got: f32, expected: f64) -> f64 {
    let rounded = expected as f32;
    let ulp = f64::from(f32::from_bits(rounded.abs().to_bits() + 1)) - f64::from(rounded.abs());
    (f64::from(got) - expected).abs() / ulp
}

#[allow(clippy::cast_precision_loss)]
fn grid(from: f32, to: f32, n: usize) -> Vec<f32> {
    (0..=n).map(|i| from + (to - from) * (i as f32 / n as f32)).collect()
}

#[test]
fn exp_is_accurate_and_exact_at_its_ends() {
    for isa in Isa::available() {
        for x in [grid(-87.3, 0.0, 300_000), grid(-1.0, 0.0, 100_000), grid(0.0, 87.0, 50_000)] {
            let worst = x.iter().zip(map(isa, Exp, &x)).map(|(&x, y)| ulps(y, f64::from(x).exp())).fold(0.0, f64::max);
            assert!(worst < 1.5, "{isa:?}: exp is off by {worst} ulp");
        }
        let special = map(isa, Exp, &[0.0, -0.0, f32::NEG_INFINITY, -88.0, -1e30, f32::MIN, f32::NAN]);
        assert_eq!(special[..6], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{isa:?}");
        assert!(special[6].is_nan(), "{isa:?}");
    }
}

#[test]
fn tanh_is_accurate_odd_and_saturates() {
    for isa in Isa::available() {
        for x in [grid(-10.0, 10.0, 200_000), grid(-0.7, 0.7, 100_001), grid(-1e-3, 1e-3, 1001)] {
            let worst =
                x.iter().zip(map(isa, Tanh, &x)).map(|(&x, y)| ulps(y, f64::from(x).tanh())).fold(0.0, f64::max);
            assert!(worst < 2.5, "{isa:?}: tanh is off by {worst} ulp");
        }
        let special = map(isa, Tanh, &[0.0, 1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        assert_eq!(special[..5], [0.0, 1.0, -1.0, 1.0, -1.0], "{isa:?}");
        assert!(special[5].is_nan(), "{isa:?}");
    }
}

struct Transpose<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for Transpose<'_> {
    type Output = usize;

    fn run<S: Simd>(self, simd: S) -> usize {
        simd.transpose(bytemuck::cast_slice(self.from), 3, bytemuck::cast_slice_mut(self.to), 2);
        S::LANES
    }
}

#[test]
fn a_block_is_transposed_with_strides() {
    for isa in Isa::available() {
        let from = grid(0.0, 16.0 * 48.0 - 1.0, 16 * 48 - 1);
        let mut to = vec![f32::NAN; 16 * 32];
        let lanes = isa.run(Transpose { from: &from, to: &mut to });
        for i in 0..lanes {
            for j in 0..lanes {
                assert_eq!(to[j * 2 * lanes + i], from[i * 3 * lanes + j], "{isa:?}: row {i}, column {j}");
            }
            assert!(to[i * 2 * lanes + lanes..].iter().take(lanes).all(|x| x.is_nan()), "{isa:?}: a gap was written");
        }
    }
}

struct Widen<'a> {
    f16: (&'a [f16], &'a mut [f32]),
    bf16: (&'a [bf16], &'a mut [f32]),
    fp8: (&'a [u8], &'a mut [f32]),
}

impl Kernel for Widen<'_> {
    type Output = ();

    fn run<S: Simd>(self, simd: S) {
        simd.widen_f16(self.f16.0, self.f16.1);
        simd.widen_bf16(self.bf16.0, self.bf16.1);
        simd.widen_fp8(self.fp8.0, self.fp8.1);
    }
}

#[test]
fn all_codes_widen_exactly_and_nothing_beyond_them_is_written() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).chain([f16::ONE; 5]).collect();
    let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).chain([bf16::ONE; 5]).collect();
    let fp8s: Vec<u8> = (0..=255).chain([0x38; 5]).collect();
    for isa in Isa::available() {
        let (mut a, mut b, mut c) = (vec![7.0; f16s.len() + 1], vec![7.0; bf16s.len() + 1], vec![7.0; fp8s.len() + 1]);
        isa.run(Widen { f16: (&f16s, &mut a), bf16: (&bf16s, &mut b), fp8: (&fp8s, &mut c) });
        assert!(f16s.iter().zip(&a).all(|(x, &y)| same(x.to_f32(), y)), "{isa:?}: f16");
        assert!(bf16s.iter().zip(&b).all(|(x, &y)| same(x.to_f32(), y)), "{isa:?}: bf16");
        assert!(fp8s.iter().zip(&c).all(|(&x, &y)| same(kvpool::fp8_e4m3_to_f32(x), y)), "{isa:?}: fp8");
        assert_eq!([a.last(), b.last(), c.last()], [Some(&7.0); 3], "{isa:?}");
    }
}

struct Sums<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for Sums<'_> {
    type Output = usize;

    fn run<S: Simd>(self, simd: S) -> usize {
        let sums = simd.sums(&bytemuck::cast_slice(self.from)[..S::LANES]);
        simd.store(sums, &mut bytemuck::cast_slice_mut(self.to)[0]);
        S::LANES
    }
}

#[test]
fn sums_of_lanes_are_those_of_each_vector_in_one_order() {
    for isa in Isa::available() {
        let lanes = isa.panel() / 2;
        // Whole numbers add up exactly, whatever the order.
        let mut from: Vec<f32> = (0..16u16 * 16).map(|i| f32::from(i * i % 251)).collect();
        from[3 * lanes + 1] = f32::NAN;
        let mut to = [7.0; 16];
        isa.run(Sums { from: &from, to: &mut to });
        for (i, vector) in from.chunks_exact(lanes).take(lanes).enumerate() {
            let want: f32 = vector.iter().sum();
            assert!(to[i] == want || (i == 3 && to[i].is_nan()), "{isa:?}: vector {i}: {} for {want}", to[i]);
        }
        // The same vector at every place: the same bits.
        let vector: Vec<f32> = grid(0.1, 0.9, lanes - 1).iter().map(|x| x * x).collect();
        isa.run(Sums { from: &vector.repeat(16), to: &mut to });
        assert!(to[..lanes].iter().all(|sum| sum.to_bits() == to[0].to_bits()), "{isa:?}: {to:?}");
    }
}

struct Reduce<'a>(&'a [f32]);

impl Kernel for Reduce<'_> {
    type Output = (f32, f32, usize);

    fn run<S: Simd>(self, simd: S) -> (f32, f32, usize) {
        let v = simd.load(&bytemuck::cast_slice(self.0)[0]);
        (simd.reduce_max(v), simd.reduce_add(v), S::LANES)
    }
}

#[test]
fn lanes_reduce_to_their_maximum_and_sum() {
    for isa in Isa::available() {
        for at in 0..8 {
            let mut x: Vec<f32> = grid(1.0, 16.0, 15);
            x[at] = 100.0;
            let (max, sum, lanes) = isa.run(Reduce(&x));
            assert_eq!((max, sum), (100.0, x[..lanes].iter().sum()), "{isa:?}");
        }
        assert_eq!(isa.run(Reduce(&[f32::NEG_INFINITY; 16])).0, f32::NEG_INFINITY, "{isa:?}");
    }
}
