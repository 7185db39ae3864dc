//! Products of rows with packed matrices: values, bits that depend on a row alone, and nothing written beside them.

use half::bf16;
use kvpool::HostTensor;

use super::problem::Rng;
use crate::cpu::{Isa, PackedRows, PackedWeights};

fn floats(n: usize, seed: u32) -> Vec<f32> {
    let mut rng = Rng(0x9E37_79B9 ^ u64::from(seed));
    (0..n).map(|_| rng.float()).collect()
}

#[test]
fn products_are_sums_in_order_whatever_the_other_rows() {
    for isa in Isa::available() {
        for (num_out, num_in) in [(1, 1), (31, 7), (33, 16), (128, 40), (200, 129)] {
            let weights = floats(num_out * num_in, 1);
            let packed = PackedWeights::new(isa, num_out, num_in, |out, input| weights[out * num_in + input]);
            assert_eq!((packed.num_out(), packed.num_in()), (num_out, num_in));
            for rows in [0, 1, 2, 5, 12, 29] {
                // The second of two heads, of rows with a gap.
                let x = floats(rows * (2 * num_in + 3), 2);
                let view = HostTensor::strided(&x, [rows, 2, num_in], 2 * num_in + 3, num_in).unwrap();
                let mut packed_rows = PackedRows::new(isa);
                packed_rows.pack(view, 1);
                let stride = num_out + 5;
                let mut out = vec![7.0; rows * stride];
                packed.multiply(&packed_rows, &mut out, stride);
                for row in 0..rows {
                    let got = &out[row * stride..][..stride];
                    let x = &x[view.offset(row, 1)..][..num_in];
                    for (weights, got) in weights.chunks_exact(num_in).zip(got) {
                        let want: f64 = x.iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        assert!((f64::from(*got) - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} for {want}");
                    }
                    assert_eq!(got[num_out..], [7.0; 5], "beside the product");
                    packed_rows.pack(HostTensor::packed(x, [1, 1, num_in]).unwrap(), 0);
                    let mut alone = vec![0.0; num_out];
                    packed.multiply(&packed_rows, &mut alone, num_out);
                    assert_eq!(alone, got[..num_out], "{isa:?}: row {row} of {rows} differs from itself alone");
                }
            }
        }
    }
}

#[test]
fn rows_of_other_dtypes_are_widened() {
    let isa = Isa::detect();
    let x: Vec<bf16> = floats(3 * 8, 3).into_iter().map(bf16::from_f32).collect();
    let identity = PackedWeights::new(isa, 8, 8, |out, input| if out == input { 1.0 } else { 0.0 });
    let mut rows = PackedRows::new(isa);
    rows.pack(HostTensor::packed(&x, [3, 1, 8]).unwrap(), 0);
    let mut out = vec![0.0; 24];
    identity.multiply(&rows, &mut out, 8);
    assert_eq!(out, x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
}

#[test]
#[should_panic(expected = "elements of a row and columns of the matrix")]
fn rows_of_another_width_panic() {
    let isa = Isa::detect();
    let weights = PackedWeights::new(isa, 2, 3, |_, _| 1.0);
    let mut rows = PackedRows::new(isa);
    rows.pack(HostTensor::packed(&[0.0; 4][..], [1, 1, 4]).unwrap(), 0);
    weights.multiply(&rows, &mut [0.0; 2], 2);
}
