//! Owns what a block-sparse layer is: [`SparseParams`], and every rule that it must keep ([`Constraint`]).
//!
//! All violated rules are named at once, where a layer is made: nothing is found out while it runs. Rules of the
//! method hold for everybody; rules of one implementation are data ([`Limits`]).

use std::fmt;
use std::str::FromStr;

use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, PageSize};
use thiserror::Error;

/// How the scores of a block's visible keys become the block's score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreType {
    /// The greatest score.
    Max,
    /// `ln Σ exp(score)`, not normalised by the number of keys.
    Lse,
}

impl ScoreType {
    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Max => "max",
            Self::Lse => "lse",
        }
    }
}

/// A score type that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("score type {name:?} is neither max nor lse")]
pub struct UnknownScoreType {
    /// The name given.
    pub name: String,
}

impl FromStr for ScoreType {
    type Err = UnknownScoreType;

    fn from_str(name: &str) -> Result<Self, UnknownScoreType> {
        match name {
            "max" => Ok(Self::Max),
            "lse" => Ok(Self::Lse),
            _ => Err(UnknownScoreType { name: name.to_owned() }),
        }
    }
}

/// Which blocks a row takes: block size, budget, forced blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockParams {
    /// Tokens in a block; a power of two.
    pub block_size: u32,
    /// Blocks that a row of one index head takes at most, forced ones included.
    pub topk: u32,
    /// Blocks at the start that are always taken.
    pub init_blocks: u32,
    /// Blocks at the end that are always taken; 1 is the block that holds the row itself.
    pub local_blocks: u32,
}

/// What a block-sparse layer has beyond its heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseParams {
    /// Which blocks a row takes.
    pub blocks: BlockParams,
    /// How scores of keys become scores of blocks.
    pub score: ScoreType,
    /// Index query heads; a multiple of the KV heads, each of which owns as many consecutive ones.
    pub num_index_heads: u32,
    /// Elements of an index query and of an index key.
    pub index_dim: u32,
    /// Multiplier of index query · index key; finite and above 0.
    pub index_scale: f32,
    /// Whether there are index values, and so an index output.
    pub has_index_value: bool,
}

impl SparseParams {
    /// Params with an index scale of `1/√index_dim`, scores pooled by their maximum and no index value.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
    pub fn new(blocks: BlockParams, num_index_heads: u32, index_dim: u32) -> Self {
        let index_scale = 1.0 / (index_dim as f32).sqrt();
        Self { blocks, score: ScoreType::Max, num_index_heads, index_dim, index_scale, has_index_value: false }
    }

    /// Index heads on one KV head.
    #[must_use]
    pub const fn index_group(&self, heads: &HeadShape) -> u32 {
        self.num_index_heads / heads.num_kv_heads
    }

    /// Ids that one KV head may select for a row: the union over its index heads.
    #[must_use]
    pub const fn width(&self, heads: &HeadShape) -> u32 {
        self.index_group(heads) * self.blocks.topk
    }

    /// Checks everything that can be known of a layer before there is a page size.
    ///
    /// # Errors
    /// [`Violations`]: every rule that is broken.
    pub fn check(&self, heads: &HeadShape, limits: &Limits) -> Result<(), Violations> {
        let mut found = Vec::new();
        self.check_method(heads, &mut found);
        limits.check(self, heads, &mut found);
        if found.is_empty() { Ok(()) } else { Err(Violations(found)) }
    }

    /// Checks the page size: pages must tile blocks, so that a block is whole pages.
    ///
    /// # Errors
    /// [`Constraint::PageSize`].
    pub const fn check_page_size(&self, page_size: PageSize) -> Result<(), Constraint> {
        let (block_size, got) = (self.blocks.block_size, page_size.get());
        if block_size.is_multiple_of(got) { Ok(()) } else { Err(Constraint::PageSize { block_size, got }) }
    }

    fn check_method(&self, heads: &HeadShape, found: &mut Vec<Constraint>) {
        let BlockParams { block_size, topk, init_blocks, local_blocks } = self.blocks;
        let positive = [
            ("block_size", block_size),
            ("topk", topk),
            ("num_index_heads", self.num_index_heads),
            ("index_dim", self.index_dim),
            ("num_qo_heads", heads.num_qo_heads),
            ("num_kv_heads", heads.num_kv_heads),
        ];
        found.extend(positive.iter().filter(|(_, n)| *n == 0).map(|&(field, _)| Constraint::Zero { field }));
        if block_size != 0 && !block_size.is_power_of_two() {
            found.push(Constraint::BlockSize { got: block_size });
        }
        if topk != 0 && u64::from(init_blocks) + u64::from(local_blocks) > u64::from(topk) {
            found.push(Constraint::ForcedBlocks { init_blocks, local_blocks, topk });
        }
        let num_kv_heads = heads.num_kv_heads;
        if num_kv_heads != 0 && !self.num_index_heads.is_multiple_of(num_kv_heads) {
            found.push(Constraint::IndexHeads { num_index_heads: self.num_index_heads, num_kv_heads });
        }
        if num_kv_heads != 0 && !heads.num_qo_heads.is_multiple_of(num_kv_heads) {
            found.push(Constraint::QueryHeads { num_qo_heads: heads.num_qo_heads, num_kv_heads });
        }
        let num_tokens =
            u128::from(self.num_index_heads / num_kv_heads.max(1)) * u128::from(topk) * u128::from(block_size);
        if num_tokens > u128::from(i32::MAX.unsigned_abs()) {
            found.push(Constraint::Budget { topk, block_size, num_index_heads: self.num_index_heads, num_kv_heads });
        }
        if !(self.index_scale.is_finite() && self.index_scale > 0.0) {
            found.push(Constraint::IndexScale { got: self.index_scale });
        }
    }
}

/// A rule that a block-sparse layer breaks.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Constraint {
    /// A count or width is 0.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// Which one.
        field: &'static str,
    },
    /// Blocks must be powers of two.
    #[error("a block of {got} tokens is not a power of two")]
    BlockSize {
        /// Tokens in a block.
        got: u32,
    },
    /// Forced blocks come out of the budget, so they must fit it.
    #[error("{init_blocks} initial and {local_blocks} local blocks do not fit a budget of {topk} blocks")]
    ForcedBlocks {
        /// Blocks forced at the start.
        init_blocks: u32,
        /// Blocks forced at the end.
        local_blocks: u32,
        /// The budget.
        topk: u32,
    },
    /// What the index heads of a KV head may select together must be tokens that an `i32` counts.
    #[error(
        "{topk} blocks of {block_size} tokens for each of {num_index_heads} index heads on {num_kv_heads} KV heads are more \
         than 2147483647 tokens a KV head"
    )]
    Budget {
        /// The budget.
        topk: u32,
        /// Tokens in a block.
        block_size: u32,
        /// Index heads.
        num_index_heads: u32,
        /// KV heads.
        num_kv_heads: u32,
    },
    /// Index heads are shared out evenly over the KV heads.
    #[error("{num_index_heads} index heads are not divisible by {num_kv_heads} KV heads")]
    IndexHeads {
        /// Index heads.
        num_index_heads: u32,
        /// KV heads.
        num_kv_heads: u32,
    },
    /// Query heads are shared out evenly over the KV heads.
    #[error("{num_qo_heads} query heads are not divisible by {num_kv_heads} KV heads")]
    QueryHeads {
        /// Query heads.
        num_qo_heads: u32,
        /// KV heads.
        num_kv_heads: u32,
    },
    /// The scale of index scores.
    #[error("index_scale is {got}, a finite number above 0 is needed")]
    IndexScale {
        /// The scale given.
        got: f32,
    },
    /// Pages must tile blocks.
    #[error("pages of {got} tokens do not divide blocks of {block_size} tokens")]
    PageSize {
        /// Tokens in a block.
        block_size: u32,
        /// Tokens in a page.
        got: u32,
    },
    /// An implementation has other block sizes.
    #[error("{implementation} has no blocks of {got} tokens (there is: {supported:?})")]
    UnsupportedBlock {
        /// Whose rule this is.
        implementation: &'static str,
        /// Tokens in a block.
        got: u32,
        /// What there is.
        supported: &'static [u32],
    },
    /// An implementation has other budgets.
    #[error("{implementation} has no budget of {got} blocks (there is: {supported:?})")]
    UnsupportedTopk {
        /// Whose rule this is.
        implementation: &'static str,
        /// The budget.
        got: u32,
        /// What there is.
        supported: &'static [u32],
    },
    /// A head is wider than an implementation can take.
    #[error("{field} is {got}, {implementation} takes at most {max}")]
    HeadDim {
        /// Whose rule this is.
        implementation: &'static str,
        /// Which width.
        field: &'static str,
        /// The width.
        got: u32,
        /// The greatest width.
        max: u32,
    },
    /// More query heads on a KV head than an implementation can take.
    #[error("{got} query heads on a KV head are more than the {max} that {implementation} takes")]
    GroupSize {
        /// Whose rule this is.
        implementation: &'static str,
        /// Query heads on a KV head.
        got: u32,
        /// The greatest number.
        max: u32,
    },
    /// An implementation needs as many index heads as KV heads.
    #[error("{implementation} takes one index head for each KV head, there are {num_index_heads} for {num_kv_heads}")]
    IndexGroup {
        /// Whose rule this is.
        implementation: &'static str,
        /// Index heads.
        num_index_heads: u32,
        /// KV heads.
        num_kv_heads: u32,
    },
    /// An implementation needs a single KV head.
    #[error("{implementation} takes one KV head, there are {got}")]
    OneKvHead {
        /// Whose rule this is.
        implementation: &'static str,
        /// KV heads.
        got: u32,
    },
    /// An implementation needs pages as large as blocks.
    #[error("{implementation} takes pages as large as blocks ({block_size} tokens), pages have {got}")]
    PageIsBlock {
        /// Whose rule this is.
        implementation: &'static str,
        /// Tokens in a block.
        block_size: u32,
        /// Tokens in a page.
        got: u32,
    },
    /// The activations' dtype is not among an implementation's.
    #[error("{implementation} takes no queries of {got}")]
    QueryDtype {
        /// Whose rule this is.
        implementation: &'static str,
        /// The dtype.
        got: Dtype,
    },
    /// The stored dtype is neither that of the queries nor FP8.
    #[error("KV of {got} goes with neither queries of {q_dtype} nor {implementation}")]
    StoredDtype {
        /// Whose rule this is.
        implementation: &'static str,
        /// Dtype of the queries.
        q_dtype: Dtype,
        /// The stored dtype.
        got: KvDtype,
    },
    /// Index heads cannot be cut over this many devices.
    #[error("{count} {what} cannot be cut over {devices} devices: neither divides the other")]
    Shards {
        /// Which heads.
        what: &'static str,
        /// How many there are.
        count: u32,
        /// Devices.
        devices: u32,
    },
}

/// Every rule that a layer breaks; never empty.
#[derive(Clone, Debug, PartialEq, Error)]
pub struct Violations(pub Vec<Constraint>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(Constraint::to_string).collect();
        f.write_str(&texts.join("; "))
    }
}

/// What one implementation of block-sparse attention can take, beyond the rules of the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Its name in messages.
    pub name: &'static str,
    /// Block sizes; `None`: all.
    pub block_sizes: Option<&'static [u32]>,
    /// Budgets; `None`: all.
    pub topks: Option<&'static [u32]>,
    /// Widest head.
    pub max_dim: u32,
    /// Most query heads on a KV head.
    pub max_group: u32,
    /// Whether there must be one index head for each KV head.
    pub one_index_head: bool,
    /// Whether there must be one KV head.
    pub one_kv_head: bool,
    /// Whether pages must be as large as blocks.
    pub page_is_block: bool,
    /// Dtypes of queries; `None`: all.
    pub q_dtypes: Option<&'static [Dtype]>,
    /// Whether KV may be stored as FP8.
    pub fp8: bool,
    /// Whether stored KV must have the dtype of the queries, but for FP8.
    pub stored_as_queries: bool,
}

impl Limits {
    /// The float64 oracle: no limit.
    pub const ORACLE: Self = Self {
        name: "the oracle",
        block_sizes: None,
        topks: None,
        max_dim: u32::MAX,
        max_group: u32::MAX,
        one_index_head: false,
        one_kv_head: false,
        page_is_block: false,
        q_dtypes: None,
        fp8: true,
        stored_as_queries: false,
    };

    /// The CPU backend of this crate.
    pub const CPU: Self = Self { name: "the CPU backend", max_dim: 640, ..Self::ORACLE };

    /// Dense attention over a sparse page table.
    pub const PAGE_TABLE: Self = Self { name: "the page-table path", one_kv_head: true, ..Self::CPU };

    /// The block-sparse GPU kernels that models of this family are served with.
    pub const BLOCK_KERNELS: Self = Self {
        name: "the block-sparse kernels",
        block_sizes: Some(&[16, 32, 64, 128]),
        max_dim: 256,
        max_group: 128,
        q_dtypes: Some(&[Dtype::F16, Dtype::Bf16]),
        stored_as_queries: true,
        ..Self::ORACLE
    };

    /// Kernels for pages of 128 tokens on tensor memory.
    pub const PAGED_128: Self = Self {
        name: "the kernels for pages of 128",
        block_sizes: Some(&[128]),
        topks: Some(&[4, 8, 16, 32]),
        max_dim: 128,
        page_is_block: true,
        fp8: false,
        ..Self::BLOCK_KERNELS
    };

    fn check(&self, params: &SparseParams, heads: &HeadShape, found: &mut Vec<Constraint>) {
        let implementation = self.name;
        let BlockParams { block_size, topk, .. } = params.blocks;
        if let Some(supported) = self.block_sizes.filter(|sizes| !sizes.contains(&block_size)) {
            found.push(Constraint::UnsupportedBlock { implementation, got: block_size, supported });
        }
        if let Some(supported) = self.topks.filter(|topks| !topks.contains(&topk)) {
            found.push(Constraint::UnsupportedTopk { implementation, got: topk, supported });
        }
        let dims =
            [("index_dim", params.index_dim), ("head_dim_qk", heads.head_dim_qk), ("head_dim_vo", heads.head_dim_vo)];
        let max = self.max_dim;
        let wide = dims.into_iter().filter(|(_, got)| *got > max);
        found.extend(wide.map(|(field, got)| Constraint::HeadDim { implementation, field, got, max }));
        let num_kv_heads = heads.num_kv_heads;
        if let Some(got) = heads.num_qo_heads.checked_div(num_kv_heads).filter(|got| *got > self.max_group) {
            found.push(Constraint::GroupSize { implementation, got, max: self.max_group });
        }
        let num_index_heads = params.num_index_heads;
        if self.one_index_head && num_index_heads != num_kv_heads {
            found.push(Constraint::IndexGroup { implementation, num_index_heads, num_kv_heads });
        }
        if self.one_kv_head && num_kv_heads != 1 {
            found.push(Constraint::OneKvHead { implementation, got: num_kv_heads });
        }
    }

    /// Checks how activations and KV are held.
    ///
    /// # Errors
    /// [`Violations`]: every rule that is broken.
    pub fn check_storage(
        &self,
        params: &SparseParams,
        q_dtype: Dtype,
        kv_dtype: KvDtype,
        page_size: PageSize,
    ) -> Result<(), Violations> {
        let implementation = self.name;
        let mut found = Vec::new();
        found.extend(params.check_page_size(page_size).err());
        let (block_size, got) = (params.blocks.block_size, page_size.get());
        if self.page_is_block && got != block_size {
            found.push(Constraint::PageIsBlock { implementation, block_size, got });
        }
        if self.q_dtypes.is_some_and(|dtypes| !dtypes.contains(&q_dtype)) {
            found.push(Constraint::QueryDtype { implementation, got: q_dtype });
        }
        let is_fp8 = kv_dtype == KvDtype::Fp8E4m3;
        let is_same = kv_dtype.name() == q_dtype.name();
        let accepted = if is_fp8 { self.fp8 } else { is_same || !self.stored_as_queries };
        if !accepted {
            found.push(Constraint::StoredDtype { implementation, q_dtype, got: kv_dtype });
        }
        if found.is_empty() { Ok(()) } else { Err(Violations(found)) }
    }
}

/// KV and index heads of one device, where a layer's heads are cut over `devices`: heads are replicated where there
/// are fewer than devices.
///
/// # Errors
/// [`Constraint::Shards`] where neither of a number of heads and the number of devices divides the other,
/// [`Constraint::Zero`].
pub fn heads_on_device(num_kv_heads: u32, num_index_heads: u32, devices: u32) -> Result<(u32, u32), Constraint> {
    let cut = |what, count: u32| match (count, devices) {
        (_, 0) => Err(Constraint::Zero { field: "devices" }),
        (0, _) => Err(Constraint::Zero { field: what }),
        _ if count.is_multiple_of(devices) || devices.is_multiple_of(count) => Ok((count / devices).max(1)),
        _ => Err(Constraint::Shards { what, count, devices }),
    };
    Ok((cut("KV heads", num_kv_heads)?, cut("index heads", num_index_heads)?))
}
