//! Owns the SIMD layer: the [`Simd`] trait (a dozen operations on one vector of `f32`), its three implementations and
//! the run-time choice between them ([`Isa`]).
//!
//! A kernel is written once, generically ([`Kernel::run`]), and compiled once for each instruction set: [`Isa::run`]
//! enters a `#[target_feature]` function, everything below is `#[inline(always)]`. The tokens `Avx512` and `Avx2` are
//! made by detection alone, so holding one proves that its instructions exist here.
//!
//! Unsafe code lives in `avx512.rs`, `avx2.rs` (intrinsics) and in the two dispatch calls below, nowhere else.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Operations on one vector of `LANES` floats. `Self` is a token: it exists only where the instructions do.
///
/// Every operation is one correctly rounded IEEE operation per lane, so results depend on nothing but the operands.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Floats in a vector.
    const LANES: usize;
    /// Rows of the register block of the matrix kernels (its columns are two vectors).
    const MAX_ROWS: usize;
    /// Keys of the register block of dot products, which has four rows: 6, 4, 2 or 1.
    const DOT_KEYS: usize;
    /// A vector in a register.
    type Vector: Copy;
    /// A vector in memory, `[f32; LANES]`.
    type Row: Pod + AsRef<[f32]>;

    fn splat(self, x: f32) -> Self::Vector;
    fn load(self, row: &Self::Row) -> Self::Vector;
    fn store(self, v: Self::Vector, row: &mut Self::Row);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once where the instructions can.
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `a * 2^n` for integers `n` in -126..=127.
    fn scale_by_pow2(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// `if a < b { 0 } else { y }` in each lane; `y` where a NaN is compared.
    fn zero_if_lt(self, a: Self::Vector, b: Self::Vector, y: Self::Vector) -> Self::Vector;
    /// `if a < b { x } else { y }` in each lane; `y` where a NaN is compared.
    fn select_lt(self, a: Self::Vector, b: Self::Vector, x: Self::Vector, y: Self::Vector) -> Self::Vector;
    fn abs(self, a: Self::Vector) -> Self::Vector;
    /// The magnitude of `a` with the sign of `b`.
    fn copysign(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The greatest lane.
    fn reduce_max(self, a: Self::Vector) -> f32;
    /// The sum of the lanes, in one fixed order.
    fn reduce_add(self, a: Self::Vector) -> f32;
    /// The sums of the lanes of `LANES` vectors, each in the same fixed order.
    fn sums(self, rows: &[Self::Row]) -> Self::Vector;
    /// Transposes a block of `LANES` x `LANES`: row `i` is read at `from[i * from_stride]` and becomes column `i` of the
    /// rows written at `to[j * to_stride]`.
    fn transpose(self, from: &[Self::Row], from_stride: usize, to: &mut [Self::Row], to_stride: usize);
    /// Copies `from` to the first elements of `to`.
    fn copy(self, from: &[f32], to: &mut [f32]);
    /// Widens `from` to the first elements of `to`.
    fn widen_f16(self, from: &[f16], to: &mut [f32]);
    /// Widens `from` to the first elements of `to`.
    fn widen_bf16(self, from: &[bf16], to: &mut [f32]);
    /// Widens FP8 E4M3 codes to the first elements of `to`.
    fn widen_fp8(self, from: &[u8], to: &mut [f32]);
    /// Asks the first-level cache for the line that is `ahead` elements after `x`; it need not be valid memory.
    fn prefetch<T>(self, x: &T, ahead: usize);
    /// Asks the second-level cache for the line of `x`.
    fn prefetch_far<T>(self, x: &T);
}

/// A piece of work compiled for every instruction set.
pub(crate) trait Kernel {
    /// What the work returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`: they must end up inside [`Isa::run`]'s functions.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy)]
pub struct Isa(Token);

#[derive(Clone, Copy)]
enum Token {
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable(Portable),
}

impl Isa {
    /// The widest instruction set of this machine.
    #[must_use]
    pub fn detect() -> Isa {
        Isa::available().next().unwrap_or(Isa(Token::Portable(Portable)))
    }

    /// All instruction sets of this machine, the widest first. The portable one is always there.
    pub fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let wide = [Avx512::detect().map(Token::Avx512), Avx2::detect().map(Token::Avx2)];
        #[cfg(not(target_arch = "x86_64"))]
        let wide: [Option<Token>; 0] = [];
        wide.into_iter().flatten().chain([Token::Portable(Portable)]).map(Isa)
    }

    /// Its name: `avx512`, `avx2` or `portable`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            Token::Portable(_) => "portable",
        }
    }

    /// Rows of the register block of the matrix kernels.
    pub(crate) const fn max_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => Avx512::MAX_ROWS,
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => Avx2::MAX_ROWS,
            Token::Portable(_) => Portable::MAX_ROWS,
        }
    }

    /// Columns of the register block: two vectors.
    pub(crate) const fn panel(self) -> usize {
        2 * match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => Avx2::LANES,
            Token::Portable(_) => Portable::LANES,
        }
    }

    /// Runs a kernel with these instructions.
    #[cfg_attr(target_arch = "x86_64", allow(unsafe_code))]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: the token was made by `Avx512::detect`, so the features that the function enables exist.
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(token) => unsafe { avx512::enter(token, kernel) },
            // SAFETY: the token was made by `Avx2::detect`, so the features that the function enables exist.
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(token) => unsafe { avx2::enter(token, kernel) },
            Token::Portable(token) => kernel.run(token),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
