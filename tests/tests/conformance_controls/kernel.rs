//! A plain f32 attention over paged KV, with a switch at each place where a fault is planted.

use attn_metadata::{Batch, Layer, Request};
use kvpool::{HostKv, HostTensor, HostTensorMut, KvPlane};

use crate::fault::Fault;

/// One query of one head.
pub(crate) struct Query<'a> {
    pub(crate) batch: &'a Batch,
    pub(crate) layer: &'a Layer,
    pub(crate) request: &'a Request,
    pub(crate) row: u32,
    pub(crate) head: u32,
    pub(crate) cache: &'a HostKv,
    pub(crate) fault: Option<Fault>,
}

impl Query<'_> {
    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Writes the output row; the result is the LSE, or nothing where nothing is to be written.
    pub(crate) fn attend(&self, q: &HostTensor<'_>, out: &mut HostTensorMut<'_>) -> Option<f32> {
        let row = (self.request.q_start + self.row) as usize;
        let mut query = vec![0.0; q.dim()];
        let head = if self.has(Fault::HeadsBeyond512Wrap) { self.head % 512 } else { self.head };
        q.read(row, head as usize, &mut query);
        let keys: Vec<u32> = (0..self.request.kv_len).filter(|&key| self.sees(key)).collect();
        let scores: Vec<f32> = keys.iter().map(|&key| self.score(&query, key)).collect();
        let sink = self.layer.sinks().map_or(f32::NEG_INFINITY, |sinks| sinks[self.head as usize]);
        let floor = if self.has(Fault::FiniteStandInForMinusInf) { -5.0e4 } else { f32::NEG_INFINITY };
        let max = scores.iter().copied().fold(sink.max(floor), f32::max);
        let mut acc = vec![0.0; out.dim()];
        if max == f32::NEG_INFINITY {
            out.write(row, self.head as usize, &acc);
            let empty = if self.has(Fault::LseOfEmptyRowPlusInf) { f32::INFINITY } else { max };
            return (!self.has(Fault::EmptyRowsUnwritten)).then_some(empty);
        }
        let mut sum = f64::from((sink - max).exp()); // thousands of terms: f32 would lose digits
        if self.has(Fault::SinkCountedTwice) {
            sum *= 2.0;
        }
        for (&key, score) in keys.iter().zip(&scores) {
            let mut weight = (score - max).exp();
            sum += f64::from(weight);
            if self.has(Fault::ProbabilitiesRoundedToBf16) {
                weight = half::bf16::from_f32(weight).to_f32();
            }
            self.add_value(key, weight, &mut acc);
        }
        if self.has(Fault::ReadsTailOfLastPage) && !self.request.kv_len.is_multiple_of(self.batch.page_size().get()) {
            self.add_value(self.request.kv_len, 0.0, &mut acc);
        }
        let sum = narrow(sum);
        acc.iter_mut().for_each(|x| *x /= sum);
        out.write(row, self.head as usize, &acc);
        let lse =
            if keys.is_empty() && self.has(Fault::SinkLostInEmptyRow) { f32::NEG_INFINITY } else { max + sum.ln() };
        Some(if self.has(Fault::LseInBase2) { lse * std::f32::consts::LOG2_E } else { lse })
    }

    fn sees(&self, key: u32) -> bool {
        let Request { q_len, kv_len, .. } = *self.request;
        let mut position = self.request.position(self.row);
        if self.has(Fault::CausalAlignedTopLeft) {
            position = self.row.into();
        }
        let key_position = i64::from(key);
        let limit = position + i64::from(self.has(Fault::CausalSeesOneMore));
        let mask = self.batch.custom_mask();
        let causal = self.layer.is_causal() && !(self.has(Fault::MaskReplacesCausality) && mask.is_some());
        if causal && key_position > limit || self.has(Fault::KeysBeyond512Dropped) && key >= 512 {
            return false;
        }
        if self.has(Fault::DropsLastKey) && key + 1 == kv_len && kv_len > 1 {
            return false;
        }
        let in_window = |window: u32| {
            let window = i64::from(window) + i64::from(self.has(Fault::WindowOneWider))
                - i64::from(self.has(Fault::WindowOneNarrower) && window > 0);
            key_position >= position - window || self.has(Fault::WindowIgnoredInDecode) && q_len == 1
        };
        if !self.layer.window_left().is_none_or(in_window) {
            return false;
        }
        let reversed = |mask: attn_metadata::PackedMask<'_>| {
            let bit = self.request.mask_start + u64::from(self.row) * u64::from(kv_len) + u64::from(key);
            mask.bytes()[usize::try_from(bit / 8).expect("sizes of the suite fit")] >> (7 - bit % 8) & 1 == 1
        };
        mask.is_none_or(|mask| match self.fault {
            Some(Fault::MaskBitsReversed) => reversed(mask),
            _ => mask.is_visible(self.request, self.row, key),
        })
    }

    fn score(&self, query: &[f32], key: u32) -> f32 {
        let mut vector = vec![0.0; query.len()];
        let scale = match self.fault {
            Some(Fault::ScalesSwapped) => self.cache.format().v_scale(),
            Some(Fault::KScaleLost) => 1.0,
            _ => self.cache.format().k_scale(),
        };
        self.read(self.cache.k(), key, &mut vector);
        let dot: f32 = query.iter().zip(&vector).map(|(q, k)| q * (k * scale)).sum();
        let width = 1.0 / f32::from(u16::try_from(query.len()).expect("sizes of the suite fit")).sqrt();
        let score = dot * if self.has(Fault::ScaleFromWidth) { width } else { self.layer.sm_scale() };
        let cap = |score: f32| self.layer.softcap().map_or(score, |c| c * (score / c).tanh());
        if self.has(Fault::CapAfterAlibi) { cap(score + self.bias(key)) } else { cap(score) + self.bias(key) }
    }

    #[expect(clippy::cast_precision_loss, reason = "positions of the suite are small")]
    fn bias(&self, key: u32) -> f32 {
        let Some(slopes) = self.layer.alibi_slopes() else { return 0.0 };
        let position = if self.has(Fault::AlibiWithoutQueryPosition) { 0 } else { self.request.position(self.row) };
        slopes[self.head as usize] * (i64::from(key) - position) as f32
    }

    fn add_value(&self, key: u32, weight: f32, acc: &mut [f32]) {
        let mut vector = vec![0.0; acc.len()];
        let format = self.cache.format();
        let scale = if self.has(Fault::ScalesSwapped) { format.k_scale() } else { format.v_scale() };
        self.read(self.cache.v(), key, &mut vector);
        acc.iter_mut().zip(&vector).for_each(|(acc, v)| *acc += weight * (v * scale));
    }

    fn kv_head(&self) -> u32 {
        let heads = self.layer.heads();
        let wrong = self.has(Fault::GroupsInterleaved) || self.has(Fault::GroupOfFiveWrong) && heads.group_size() == 5;
        if wrong { self.head % heads.num_kv_heads } else { self.head / heads.group_size() }
    }

    fn read(&self, plane: KvPlane<'_>, key: u32, vector: &mut [f32]) {
        let page_size = self.batch.page_size().get();
        let (index, token) = ((key / page_size) as usize, key % page_size);
        let index = if self.has(Fault::PageIndexIn12Bits) { index % 4096 } else { index };
        let pages = self.batch.pages(self.request);
        let page = if self.has(Fault::PagesTakenAsContiguous) {
            let last = self.batch.pool().num_pages - 1;
            (pages[0].unsigned_abs() + u32::try_from(index).expect("sizes of the suite fit")).min(last)
        } else {
            pages[index].unsigned_abs()
        };
        let page = kvpool::PageId::new(page).expect("sizes of the suite fit");
        if self.has(Fault::StridesIgnored) {
            let heads = self.layer.heads().num_kv_heads as usize;
            let at = (page.index() * page_size as usize + token as usize) * heads + self.kv_head() as usize;
            let start = plane.layout.offset + at * vector.len();
            return plane.data.widen(start.min(plane.data.len() - vector.len()), vector);
        }
        plane.read(page, token, self.kv_head(), vector);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
fn narrow(x: f64) -> f32 {
    x as f32
}
