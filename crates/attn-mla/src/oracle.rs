//! Owns the float64 oracle of latent attention: the expanded form, straight from `kv_b_proj` and the cache.
//! It shares no code with the fast backend: keys and values of every head are made row by row and go through the plain
//! oracle's formulas.

use attn_metadata::{BackendEntry, Batch, Capabilities, Host, Layer, PLAIN, Request, Role};
use attn_reference::oracle::{self, OracleBackend, OracleOutput};
use kvpool::{HostKv, HostTensor};

use crate::{FAMILY, MlaFamily, MlaWeights};

/// Its name in the registry.
pub(crate) const NAME: &str = "mla-oracle";

/// The registry row of the oracle: chosen by name alone.
#[must_use]
pub fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "latent attention in float64, expanded; slow, for checking",
        role: Role::Oracle,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(OracleBackend::with_attend(config, NAME, capabilities(), attend))),
    }
}

fn capabilities() -> Capabilities {
    Capabilities { families: vec![PLAIN, FAMILY], ..oracle::capabilities() }
}

/// Attention of one layer for every request of the batch, over the cache as it is (so append first). Layers of other
/// families than latent attention are plain ones.
///
/// # Panics
/// Where the tensors do not fit the batch and the layer.
#[must_use]
pub fn attend(batch: &Batch, layer: &Layer, q: &HostTensor<'_>, kv: &HostKv) -> OracleOutput {
    let Some(family) = layer.family_as::<MlaFamily>() else { return oracle::attend(batch, layer, q, kv) };
    oracle::attend_over(batch, layer, q, 1, |request, head| expand(family.weights(), head, &rows(batch, request, kv)))
}

/// The latent rows of a request, `[kv_len][latent + rope]`, as real values.
fn rows(batch: &Batch, request: &Request, kv: &HostKv) -> Vec<Vec<f64>> {
    let (page_size, scale) = (batch.page_size().get(), f64::from(kv.format().k_scale()));
    let read = |position: u32| {
        let mut row = vec![0.0f32; kv.shape().head_dim_k as usize];
        kv.k().read(batch.page_of(request, position), position % page_size, 0, &mut row);
        row.iter().map(|&x| f64::from(x) * scale).collect()
    };
    (0..request.kv_len).map(read).collect()
}

/// Keys `[nope + rope]` and values `[value]` of a head, made from rows.
fn expand(weights: &MlaWeights, head: u32, rows: &[Vec<f64>]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let latent = weights.widths().latent() as usize;
    let project = |matrix: &[f32], c: &[f64]| -> Vec<f64> {
        let dot = |weights: &[f32]| weights.iter().zip(c).map(|(w, c)| f64::from(*w) * c).sum();
        matrix.chunks_exact(latent).map(dot).collect()
    };
    let key = |row: &Vec<f64>| {
        let (c, rope) = row.split_at(latent);
        let mut key = project(weights.key_rows(head), c);
        key.extend_from_slice(rope);
        key
    };
    let value = |row: &Vec<f64>| project(weights.value_rows(head), &row[..latent]);
    (rows.iter().map(key).collect(), rows.iter().map(value).collect())
}
