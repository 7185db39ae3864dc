//! What each backend can do on this machine, as rows and as text.

use attn_metadata::{Capabilities, Feature, Host, HostDevice, Registry, Role};
use serde::Serialize;

/// One backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BackendRow {
    /// Its name.
    pub name: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// Whether `auto` may choose it.
    pub auto: bool,
    /// Why it cannot run here; absent where it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
    /// What it can do; absent where it cannot run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<CapabilityRow>,
}

/// What a backend can do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CapabilityRow {
    /// Dtypes of q and out.
    pub q_dtypes: Vec<&'static str>,
    /// Dtypes of the stored KV.
    pub kv_dtypes: Vec<&'static str>,
    /// Head widths.
    pub head_dims: String,
    /// Query heads on a KV head.
    pub group_sizes: String,
    /// Tokens in a page.
    pub page_sizes: String,
    /// Features by name.
    pub features: Vec<FeatureRow>,
}

/// A feature and whether it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FeatureRow {
    /// Its name.
    pub name: &'static str,
    /// Whether it is there.
    pub supported: bool,
}

impl CapabilityRow {
    fn of(capabilities: &Capabilities) -> Self {
        Self {
            q_dtypes: capabilities.q_dtypes.iter().map(|dtype| dtype.name()).collect(),
            kv_dtypes: capabilities.kv_dtypes.iter().map(|dtype| dtype.name()).collect(),
            head_dims: capabilities.head_dims.to_string(),
            group_sizes: capabilities.group_sizes.to_string(),
            page_sizes: capabilities.page_sizes.to_string(),
            features: Feature::ALL
                .map(|feature| FeatureRow { name: feature.name(), supported: capabilities.features.contains(feature) })
                .to_vec(),
        }
    }
}

/// A row for each backend, in order of preference.
#[must_use]
pub fn capability_rows(registry: &Registry<Host>, device: &HostDevice) -> Vec<BackendRow> {
    let row = |entry: &attn_metadata::BackendEntry<Host>| {
        let found = (entry.capabilities)(device);
        BackendRow {
            name: entry.name,
            summary: entry.summary,
            auto: entry.role == Role::Auto,
            unavailable: found.as_ref().err().map(ToString::to_string),
            capabilities: found.as_ref().ok().map(CapabilityRow::of),
        }
    };
    registry.entries().iter().map(row).collect()
}

/// The rows for people: a block for each backend that can be used, then what keeps the others from it, each cause once.
#[must_use]
pub fn capability_text(rows: &[BackendRow]) -> String {
    let usable = rows.iter().filter_map(|row| Some(block(row, row.capabilities.as_ref()?)));
    let mut blocks: Vec<String> = usable.collect();
    let mut causes: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows {
        let Some(why) = &row.unavailable else { continue };
        match causes.iter_mut().find(|(known, _)| known == why) {
            Some((_, names)) => names.push(row.name),
            None => causes.push((why, vec![row.name])),
        }
    }
    blocks.extend(causes.iter().map(|(why, names)| format!("not usable here: {}\n  {why}\n", names.join(", "))));
    blocks.join("\n")
}

/// A backend's name and summary, and a line for each capability.
fn block(row: &BackendRow, of: &CapabilityRow) -> String {
    let features = |is_there: bool| {
        let names: Vec<&str> = of.features.iter().filter(|f| f.supported == is_there).map(|f| f.name).collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
    };
    let lines = [
        ("chosen by auto", if row.auto { "yes" } else { "no" }.to_owned()),
        ("q dtypes", of.q_dtypes.join(", ")),
        ("KV dtypes", of.kv_dtypes.join(", ")),
        ("head dims", of.head_dims.clone()),
        ("group sizes", of.group_sizes.clone()),
        ("page sizes", of.page_sizes.clone()),
        ("has", features(true)),
        ("lacks", features(false)),
    ];
    let lines = lines.map(|(name, what)| format!("  {name:14}  {what}\n")).concat();
    format!("{}: {}\n{lines}", row.name, row.summary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host_registry;

    #[test]
    fn a_cause_is_said_once_and_each_usable_backend_has_a_block() {
        let mut rows = capability_rows(&host_registry(), &HostDevice::default());
        rows.retain(|row| row.capabilities.is_some());
        let lacking = |name, why: &str| BackendRow {
            name,
            summary: "elsewhere",
            auto: false,
            unavailable: Some(why.to_owned()),
            capabilities: None,
        };
        let usable: Vec<&str> = rows.iter().map(|row| row.name).collect();
        rows.extend([lacking("x", "no GPU"), lacking("y", "no disk"), lacking("z", "no GPU")]);
        let text = capability_text(&rows);
        let heads: Vec<&str> =
            text.lines().filter(|l| !l.starts_with(' ')).filter_map(|l| Some(l.split_once(": ")?.0)).collect();
        assert_eq!(heads[..usable.len()], usable, "{text}");
        assert!(text.ends_with("\nnot usable here: x, z\n  no GPU\n\nnot usable here: y\n  no disk\n"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 160), "{text}");
    }
}
