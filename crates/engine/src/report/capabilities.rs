//! What each backend can do on this machine, as rows and as a table.

use attn_metadata::{Capabilities, Feature, Host, HostDevice, Registry, Role};
use serde::Serialize;

use super::table::Table;

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

/// A column for each backend, a line for each capability.
#[must_use]
pub fn capability_table(rows: &[BackendRow]) -> Table {
    let names: Vec<&str> = ["capability"].into_iter().chain(rows.iter().map(|row| row.name)).collect();
    let mut table = Table::new(&names);
    let mut line = |name: &str, cell: &dyn Fn(&BackendRow) -> String| {
        table.push([name.to_owned()].into_iter().chain(rows.iter().map(cell)).collect());
    };
    line("about", &|row| row.summary.to_owned());
    line("chosen by auto", &|row| yes_no(row.auto));
    line("usable here", &|row| row.unavailable.as_ref().map_or("yes".to_owned(), |why| format!("no: {why}")));
    let of = |row: &BackendRow, cell: &dyn Fn(&CapabilityRow) -> String| {
        row.capabilities.as_ref().map_or("-".to_owned(), cell)
    };
    line("q dtypes", &|row| of(row, &|c| c.q_dtypes.join(", ")));
    line("KV dtypes", &|row| of(row, &|c| c.kv_dtypes.join(", ")));
    line("head dims", &|row| of(row, &|c| c.head_dims.clone()));
    line("group sizes", &|row| of(row, &|c| c.group_sizes.clone()));
    line("page sizes", &|row| of(row, &|c| c.page_sizes.clone()));
    for (index, feature) in Feature::ALL.into_iter().enumerate() {
        line(feature.name(), &|row| of(row, &|c| yes_no(c.features[index].supported)));
    }
    table
}

fn yes_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}
