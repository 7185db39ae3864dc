//! Owns [`KvSpec`]: what one layer keeps of one token, whatever the pages, the layout and the dtype.

use std::fmt;

use crate::format::KvDtype;
use crate::ids::PageSize;
use crate::layout::KvShape;

/// Where the values of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Values {
    /// Beside the keys, this many elements a head (≥ 1).
    Own(u32),
    /// The first columns of the keys, this many (≥ 1, at most a key's width): a latent cache.
    InKeys(u32),
    /// Nowhere: only keys are kept, to score blocks of tokens with, say.
    None,
}

impl Values {
    /// Width of a value; 0 where there is none.
    #[must_use]
    pub const fn head_dim(self) -> u32 {
        match self {
            Values::Own(dim) | Values::InKeys(dim) => dim,
            Values::None => 0,
        }
    }

    /// Elements that are stored for the values alone.
    #[must_use]
    pub const fn own_dim(self) -> u32 {
        match self {
            Values::Own(dim) => dim,
            Values::InKeys(_) | Values::None => 0,
        }
    }
}

/// What one layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// KV heads, ≥ 1.
    pub num_kv_heads: u32,
    /// Width of a key, ≥ 1.
    pub head_dim_k: u32,
    /// The values.
    pub values: Values,
}

impl KvSpec {
    /// Keys and values of one width.
    #[must_use]
    pub const fn new(num_kv_heads: u32, head_dim: u32) -> KvSpec {
        KvSpec { num_kv_heads, head_dim_k: head_dim, values: Values::Own(head_dim) }
    }

    /// Values stored for a token.
    #[must_use]
    pub const fn elements_per_token(&self) -> u64 {
        // Two 32-bit numbers and their product fit 64 bits but for one carry, which no cache gets to.
        (self.num_kv_heads as u64).saturating_mul(self.head_dim_k as u64 + self.values.own_dim() as u64)
    }

    /// Bytes stored for a token.
    #[must_use]
    pub const fn bytes_per_token(&self, dtype: KvDtype) -> u64 {
        let beside = match dtype {
            KvDtype::Fp8Latent => self.values.head_dim(),
            _ => self.values.own_dim(),
        };
        (self.num_kv_heads as u64).saturating_mul(dtype.token_bytes(self.head_dim_k, beside))
    }

    /// The shape of a cache for it. Widths of values in keys count as the V width.
    #[must_use]
    pub const fn shape(&self, num_pages: u32, page_size: PageSize) -> KvShape {
        let KvSpec { num_kv_heads, head_dim_k, values } = *self;
        KvShape { num_pages, page_size, num_kv_heads, head_dim_k, head_dim_v: values.head_dim() }
    }
}

impl fmt::Display for KvSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvSpec { num_kv_heads, head_dim_k, values } = self;
        write!(f, "{num_kv_heads} KV heads, keys of {head_dim_k}, ")?;
        match values {
            Values::Own(dim) => write!(f, "values of {dim}"),
            Values::InKeys(dim) => write!(f, "values in the first {dim} columns of the keys"),
            Values::None => f.write_str("no values"),
        }
    }
}
