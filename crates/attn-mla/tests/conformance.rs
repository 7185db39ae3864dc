//! The backends pass the conformance suite: latent layers, and plain ones beside them.

#![allow(clippy::unwrap_used)]

use attn_conformance::{Case, CaseFamily, Suite, host};
use attn_metadata::FamilyRef;
use attn_mla::{MlaFamily, MlaWeights, MlaWidths};

/// Brings the widths of a drawn case into a form that latent attention has.
fn adapt(case: &mut Case) {
    case.heads.num_qo_heads = case.heads.num_qo_heads.min(24);
    case.heads = widths(case).heads(case.heads.num_qo_heads);
    case.values_in_keys = false;
}

/// Widths of a case, from its query heads alone.
fn widths(case: &Case) -> MlaWidths {
    let [latent, rope, nope, value] = match case.heads.num_qo_heads % 3 {
        0 => [32, 8, 16, 24],
        1 => [40, 4, 12, 10],
        _ => [24, 0, 20, 8],
    };
    MlaWidths::new(latent, rope, nope, value).unwrap()
}

/// The family of a case: weights that depend on its head count alone.
fn make(case: &Case) -> FamilyRef {
    let (widths, num_heads) = (widths(case), case.heads.num_qo_heads);
    let mut state = 0x2545_F491u32 ^ num_heads;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        #[allow(clippy::cast_precision_loss)]
        let unit = (state >> 8) as f32 / (1u32 << 24) as f32;
        unit - 0.5
    };
    let weights: Vec<f32> = (0..num_heads * widths.up() * widths.latent()).map(|_| next()).collect();
    FamilyRef::new(MlaFamily::new(MlaWeights::new(widths, num_heads, &weights).unwrap()))
}

const FAMILY: CaseFamily = CaseFamily { name: "mla", adapt, make };

#[test]
fn latent_layers_pass() {
    host::run(&Suite::family(FAMILY), attn_mla::entry().create).assert_passed();
}

#[test]
fn latent_layers_pass_on_the_oracle() {
    let suite = Suite { num_check_cases: 4, floor: 40, work: 500_000, ..Suite::family(FAMILY) };
    host::run(&suite, attn_mla::oracle::entry().create).assert_passed();
}

#[test]
fn plain_layers_pass() {
    let suite = Suite { num_oracle_cases: 60, num_check_cases: 4, floor: 120, ..Suite::standard() };
    host::run(&suite, attn_mla::entry().create).assert_passed();
}
