//! Owns how a group of layers is planned for its kernels: tiles, chunks, grids, and bounds over all batches of a bucket.

use attn_metadata::plan::{Chunking, CutBy, Plan, PlanConfig, Sharing, max_chunks, workspace_requirement};
use attn_metadata::{Batch, BatchLimits, Bucket, CaptureLimits, ModelSpec, PlanGroup, PoolShape};

use crate::at_once::{AtOnce, GroupRates};
use crate::device::DeviceProperties;
use crate::entry::{LayerKernels, Pair};
use crate::step::Grids;
use crate::tables::{
    Contents, GroupPlan, GroupSizes, MERGE_WARP_CHUNKS, Part, PartSizes, merge_unit_bound, num_starts,
};

/// Tokens of a chunk of requests that decode with Hopper's kernel, whose block has a multiprocessor to itself: requests that
/// see no more are not split. A chunk is the unit of numerics.
const HOPPER_DECODE_CHUNK_LEN: u32 = 1024;
/// Tokens of a chunk, for each query head of a group, of requests that decode elsewhere. Its partial state has as many rows
/// as the group has heads, so the workspace is the same part of what is read for all.
const DECODE_CHUNK_LEN_PER_HEAD: u32 = 128;
/// Shortest and longest of these.
const DECODE_CHUNK_LENS: [u32; 2] = [256, 1024];
/// Tokens of a chunk of short requests that decode, at least; where the batch decides, chunks are multiples of it.
const SHORTEST_DECODE_CHUNK_LEN: u32 = 128;
/// Tokens of a chunk of requests that extend.
const EXTEND_CHUNK_LEN: u32 = 1024;
/// Requests with more query tokens than this are not split: their tiles and heads fill the GPU.
const MAX_SPLIT_Q_LEN: u32 = 128;
/// Query rows of a tile where the kernel takes any number.
const ANY_ROWS: u32 = 16;
/// Tokens that a request sees, up to which Hopper's kernel computes its tiles one after the other
/// ([`Sharing::LongestFirst`]); measured, see `docs/kernels/extend-sm90.md`.
const SHORT_KV_LEN: u32 = 1024;
/// Cost of starting a unit, in KV tokens of one query token.
const UNIT_OVERHEAD: u32 = 64;

/// Tokens of a chunk where a row's bits depend on the row alone: of requests that decode and of prompts alike. Prompts
/// shorter than this are not split, and a request of 16 chunks and 8 KV heads fills a GPU.
const STRICT_CHUNK_LEN: u32 = 8192;
/// Chunks that are merged in one order whatever their number; beyond, the order depends on it.
const MAX_STRICT_CHUNKS: u32 = MERGE_WARP_CHUNKS;
/// KV tokens of a request, at most, where a row's bits depend on the row alone.
pub(crate) const MAX_STRICT_KV_LEN: u32 = STRICT_CHUNK_LEN * MAX_STRICT_CHUNKS;

/// What the bits of a result do not depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariance {
    /// Anything but the row and the KV that it sees: not on how its prompt was cut into steps, or decoded.
    Row,
    /// What else is in the batch.
    Batch,
    /// Neither.
    None,
}

impl Invariance {
    const fn cut_by(self) -> CutBy {
        match self {
            Self::Row | Self::Batch => CutBy::Request,
            Self::None => CutBy::Batch,
        }
    }
}

/// How one group of layers is planned.
#[derive(Clone, Debug)]
pub(crate) struct GroupPolicy {
    group: PlanGroup,
    decode: Option<PlanConfig>,
    extend: PlanConfig,
    /// Query tokens of a request that decodes, at most; 0: none does.
    max_decode_q_len: u32,
    labels: [&'static str; 2],
    /// What its kernels reach, where both parts may run at the same time.
    rates: Option<GroupRates>,
}

impl GroupPolicy {
    /// The policies of a model's groups; `kernels` are those of its layers, `keeps` is what their bits do not depend on.
    pub(crate) fn of_model(
        model: &ModelSpec,
        kernels: &[LayerKernels],
        gpu: &DeviceProperties,
        keeps: Invariance,
    ) -> Vec<Self> {
        let of_group = |(index, group): (usize, &PlanGroup)| {
            let of_layers = || kernels.iter().enumerate().filter(move |(l, _)| model.group_of(*l) == Some(index));
            let first = of_layers().next().map(|(_, kernels)| *kernels).expect("a group has a layer");
            // Layers of one group may have softcap or not, and so different kernels: the plan fits them all.
            let decode = of_layers().map(|(_, k)| k.decode).collect::<Option<Vec<Pair>>>();
            let extend: Vec<Pair> = of_layers().map(|(_, k)| k.extend).collect();
            let decode_config = decode.as_ref().map(|pairs| {
                config(
                    group,
                    pairs,
                    decode_chunking(pairs, group.heads.group_size(), keeps.cut_by()),
                    Sharing::InOrder,
                    gpu,
                )
            });
            let claims_units = extend.iter().all(|pair| pair.family() != "plain");
            // A warpgroup of Hopper's kernel has 64 rows.
            let has_warpgroups = extend.iter().all(|pair| pair.family() == "extend_sm90");
            let rest_len = if has_warpgroups { (64 / group.heads.group_size()).max(1) } else { u32::MAX };
            let short_kv_len = if has_warpgroups { SHORT_KV_LEN } else { 0 };
            let sharing = if claims_units { Sharing::LongestFirst { rest_len, short_kv_len } } else { Sharing::Even };
            let labels = [label(first.decode.map_or("plain", |pair| pair.family())), label(first.extend.family())];
            let rates = GroupRates::new(gpu, labels, group, model.kv_dtype());
            Self {
                group: *group,
                max_decode_q_len: decode_config.map_or(0, |config| config.tile_len),
                decode: decode_config,
                extend: config(group, &extend, extend_chunking(keeps), sharing, gpu),
                labels,
                rates,
            }
        };
        model.groups().iter().enumerate().map(of_group).collect()
    }

    /// Whether there is a kernel for decoding in every layer of the group.
    pub(crate) const fn decodes(&self) -> bool {
        self.decode.is_some()
    }

    /// Whether there are batches whose parts run at the same time.
    pub(crate) const fn may_be_at_once(&self) -> bool {
        self.rates.is_some()
    }

    /// Name of a part's kernel, for reports.
    pub(crate) const fn label(&self, is_decode: bool) -> &'static str {
        if is_decode { self.labels[0] } else { self.labels[1] }
    }

    /// An empty plan.
    pub(crate) fn plan(&self, pool: PoolShape) -> GroupPlan {
        let part = |config: PlanConfig| Part { plan: Plan::new(config, self.group), batch: Batch::empty(pool) };
        GroupPlan {
            decode: self.decode.map(part),
            extend: part(self.extend),
            max_decode_q_len: self.max_decode_q_len,
            may_be_at_once: self.may_be_at_once(),
        }
    }

    /// Query tokens of one request that a captured bucket takes: a bucket of one row a request is for decoding alone,
    /// and nothing else is recorded for it.
    pub(crate) const fn max_q_len(&self, bucket: Bucket) -> u32 {
        if self.is_decode_bucket(bucket) { self.max_decode_q_len } else { u32::MAX }
    }

    const fn is_decode_bucket(&self, bucket: Bucket) -> bool {
        self.decodes() && bucket.num_rows <= bucket.num_requests
    }

    /// Grids for the batch of a plan.
    pub(crate) fn eager_grids(&self, plan: &GroupPlan, contents: Contents<'_>) -> Grids {
        let zeroes = contents.batch.writes_padding() && contents.batch.num_used_rows() < contents.num_rows;
        let grid = |part: &Part, is_first: bool| match part.plan.num_units() {
            0 if !(is_first && zeroes) => 0,
            _ => part.plan.config().num_workers,
        };
        let decode = plan.decode.as_ref().map_or(0, |part| grid(part, true));
        let extend = grid(&plan.extend, plan.decode.is_none());
        let at_once = self.at_once(plan);
        Grids {
            decode,
            extend: at_once.map_or(extend, |at_once| at_once.extend_sms.min(extend)),
            merge: u32::try_from(plan.sizes().num_merge_units).unwrap_or(u32::MAX),
            is_at_once: at_once.is_some(),
        }
    }

    /// How both parts of a plan run at the same time, where they do.
    pub(crate) fn at_once(&self, plan: &GroupPlan) -> Option<AtOnce> {
        self.rates.as_ref()?.plan(plan)
    }

    /// Grids for every batch of a bucket.
    pub(crate) fn captured_grids(&self, group: &PlanGroup, limits: &CaptureLimits, bucket: Bucket) -> Grids {
        let sizes = self.size_bound(group, limits, bucket);
        Grids {
            decode: self.decode.map_or(0, |config| config.num_workers),
            extend: if self.is_decode_bucket(bucket) { 0 } else { self.extend.num_workers },
            merge: u32::try_from(sizes.num_merge_units).unwrap_or(u32::MAX),
            // How the multiprocessors are shared depends on the batch.
            is_at_once: false,
        }
    }

    /// Rows of partial states of any batch of a bucket.
    pub(crate) fn partial_row_bound(&self, group: &PlanGroup, limits: &CaptureLimits, bucket: Bucket) -> u64 {
        self.parts(bucket).map(|config| partial_rows(config, group, limits, bucket)).sum()
    }

    /// Room for the tables of any batch of a bucket.
    pub(crate) fn size_bound(&self, group: &PlanGroup, limits: &CaptureLimits, bucket: Bucket) -> GroupSizes {
        let part = |config: &PlanConfig| {
            // A request's last tile may be short, and so may those of a last round.
            let cut = max_rest_tiles(config, group);
            let num_tiles = (bucket.num_requests as usize + (bucket.num_rows / config.tile_len) as usize + cut)
                .min(bucket.num_rows as usize);
            PartSizes {
                num_tiles,
                num_ranges: range_room(config, num_tiles, max_chunks(config, group, limits.max_kv_len)),
                num_starts: 0,
            }
        };
        let decode = |config: &PlanConfig| PartSizes { num_starts: num_starts(config, group), ..part(config) };
        let merge_units = |config: &PlanConfig| {
            let chunks = max_chunks(config, group, limits.max_kv_len);
            merge_unit_bound(bucket.num_rows, &group.heads, chunks)
        };
        // A row is of one part or the other.
        let num_merge_units = self.parts(bucket).map(merge_units).max().unwrap_or(0);
        // What is not recorded needs no room.
        let extend = if self.is_decode_bucket(bucket) { PartSizes::default() } else { part(&self.extend) };
        GroupSizes { decode: self.decode.as_ref().map(decode), extend, num_merge_units }
    }

    /// Configurations of the parts that a bucket records.
    fn parts(&self, bucket: Bucket) -> impl Iterator<Item = &PlanConfig> {
        let extend = (!self.is_decode_bucket(bucket)).then_some(&self.extend);
        self.decode.iter().chain(extend)
    }
}

/// What the steps of a bucket are bounded by on a backend with limits of its own, which refuses longer requests.
pub(crate) fn capture_limits(limits: &CaptureLimits, own: &BatchLimits) -> CaptureLimits {
    CaptureLimits { max_kv_len: limits.max_kv_len.min(own.max_kv_len), ..limits.clone() }
}

/// Tiles that cutting for a last round adds, at most.
fn max_rest_tiles(config: &PlanConfig, group: &PlanGroup) -> usize {
    let Sharing::LongestFirst { rest_len, .. } = config.sharing else { return 0 };
    let cut = config.num_workers / group.heads.num_kv_heads + 1;
    let pieces = config.tile_len.div_ceil(rest_len.min(config.tile_len));
    cut as usize * (pieces as usize - 1)
}

fn partial_rows(config: &PlanConfig, group: &PlanGroup, limits: &CaptureLimits, bucket: Bucket) -> u64 {
    let max =
        BatchLimits { max_rows: bucket.num_rows, max_requests: bucket.num_requests, max_kv_len: limits.max_kv_len };
    let layout = workspace_requirement(config, group, &max);
    (layout.partial_lse.bytes.end - layout.partial_lse.bytes.start) / size_of::<f32>() as u64
}

/// How requests that extend are cut.
const fn extend_chunking(keeps: Invariance) -> Chunking {
    let (by, chunk_len) = (keeps.cut_by(), EXTEND_CHUNK_LEN);
    match keeps {
        Invariance::Row => {
            Chunking { by, chunk_len: STRICT_CHUNK_LEN, shortest: STRICT_CHUNK_LEN, max_q_len: u32::MAX }
        }
        Invariance::Batch => Chunking { by, chunk_len, shortest: chunk_len, max_q_len: MAX_SPLIT_Q_LEN },
        Invariance::None => Chunking { by, chunk_len, shortest: SHORTEST_DECODE_CHUNK_LEN, max_q_len: MAX_SPLIT_Q_LEN },
    }
}

/// How requests that decode are cut.
fn decode_chunking(pairs: &[Pair], group_size: u32, by: CutBy) -> Chunking {
    let is_hopper = pairs.iter().all(|pair| pair.family() == "decode_sm90");
    if is_hopper {
        let shortest = if by == CutBy::Batch { SHORTEST_DECODE_CHUNK_LEN } else { HOPPER_DECODE_CHUNK_LEN };
        return Chunking { by, chunk_len: HOPPER_DECODE_CHUNK_LEN, shortest, max_q_len: u32::MAX };
    }
    let [shortest, longest] = DECODE_CHUNK_LENS;
    let len = group_size.next_power_of_two().saturating_mul(DECODE_CHUNK_LEN_PER_HEAD).clamp(shortest, longest);
    Chunking { by, chunk_len: len, shortest: SHORTEST_DECODE_CHUNK_LEN, max_q_len: u32::MAX }
}

/// Room for the ranges of a plan of at most so many tiles and chunks of each: each block of the grid reads the range of its
/// number, whether there is one or not.
fn range_room(config: &PlanConfig, num_tiles: usize, max_chunks: u64) -> usize {
    let max_chunks = usize::try_from(max_chunks).unwrap_or(usize::MAX);
    config.max_ranges(num_tiles, max_chunks).max(config.num_workers as usize)
}

fn config(
    group: &PlanGroup,
    pairs: &[Pair],
    chunking: Chunking,
    sharing: Sharing,
    gpu: &DeviceProperties,
) -> PlanConfig {
    let rows = pairs.iter().map(Pair::rows).min().unwrap_or(u32::MAX);
    let rows = if rows == u32::MAX { ANY_ROWS } else { rows };
    let blocks = pairs.iter().map(|pair| pair.blocks_per_sm(gpu.max_shared_bytes)).min().unwrap_or(1);
    PlanConfig {
        tile_len: (rows / group.heads.group_size()).max(1),
        chunking,
        num_workers: (gpu.num_sms * blocks).max(1),
        sharing,
        unit_overhead: UNIT_OVERHEAD,
    }
}

fn label(family: &str) -> &'static str {
    match family {
        "decode" => "cuda/decode",
        "decode_sm90" => "cuda/decode_sm90",
        "extend" => "cuda/extend",
        "extend_sm90" => "cuda/extend_sm90",
        _ => "cuda/plain",
    }
}
