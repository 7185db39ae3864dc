//! Owns the suite's random numbers: a small generator, seeded by words, the same on every machine.
//! Not for anything but tests.

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator for these words: other words, other numbers.
    #[must_use]
    pub fn new(words: &[u64]) -> Self {
        let mut rng = Self(0x243f_6a88_85a3_08d3);
        for word in words {
            rng.0 = rng.next_u64() ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        rng.next_u64();
        rng
    }

    /// 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..n`; 0 where `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        let n = n as u64;
        usize::try_from(self.next_u64().checked_rem(n).unwrap_or(0)).expect("below a usize")
    }

    /// One of some values.
    ///
    /// # Panics
    /// If there is none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Nearly normal, mean 0, variance 1, within ±3.5: four uniforms added up.
    pub fn normal(&mut self) -> f32 {
        let bits = self.next_u64();
        let part = |shift: u32| u16::try_from(bits >> shift & 0xffff).map_or(0.0, f32::from);
        let sum = part(0) + part(16) + part(32) + part(48);
        (sum / 65_536.0 - 2.0) * 3.0f32.sqrt()
    }

    /// Shuffles in place.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
