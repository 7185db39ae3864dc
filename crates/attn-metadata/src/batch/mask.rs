//! Packed custom masks: one bit for each (query, key), least significant bit first, no gaps between requests.

use super::Request;

/// A view of a packed mask whose length was checked against its batch.
#[derive(Clone, Copy, Debug)]
pub struct PackedMask<'a> {
    bits: &'a [u8],
}

impl<'a> PackedMask<'a> {
    pub(super) const fn new(bits: &'a [u8]) -> Self {
        Self { bits }
    }

    /// The packed bytes.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bits
    }

    /// Whether query `row` of a request may see `key`.
    ///
    /// # Panics
    /// If the request is not of the mask's batch, or the row or key is not of the request.
    #[must_use]
    pub fn is_visible(&self, request: &Request, row: u32, key: u32) -> bool {
        let bit = request.mask_start + u64::from(row) * u64::from(request.kv_len) + u64::from(key);
        let byte = usize::try_from(bit / 8).expect("the mask is in memory");
        self.bits[byte] >> (bit % 8) & 1 == 1
    }
}

/// Bytes of a packed mask over requests of these (`q_len`, `kv_len`); `None` beyond 2⁶⁴ bits or the address space.
pub fn mask_bytes(requests: impl IntoIterator<Item = (u32, u32)>) -> Option<usize> {
    let bits = requests
        .into_iter()
        .try_fold(0u64, |bits, (q, kv)| bits.checked_add(u64::from(q).checked_mul(u64::from(kv))?))?;
    usize::try_from(bits.div_ceil(8)).ok()
}
