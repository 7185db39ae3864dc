//! Owns the one-line form of a [`Case`]: `key=value` words, in any order, those that are missing as in
//! `Case::default()`. A case reads back from its line as the same case.

use std::fmt;
use std::str::FromStr;

use attn_metadata::HeadShape;

use crate::case::{Case, CaseFamily, Data, Layout, RequestShape, Sinks, Table};

/// Most requests of one word, so that a mistyped line does not fill the memory.
const MAX_REQUESTS: usize = 1 << 20;

/// A line that is not a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseTextError {
    word: String,
    why: String,
}

impl fmt::Display for CaseTextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of the case: {}", self.word, self.why)
    }
}

impl std::error::Error for CaseTextError {}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.requests.chunk_by(|a, b| a == b);
        let requests: Vec<_> = runs.map(|run| (run[0], run.len())).map(request_run).collect();
        let HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo } = self.heads;
        write!(f, "q/kv={} pad={}", requests.join(","), self.padding_rows)?;
        write!(f, " heads={num_qo_heads}/{num_kv_heads} dim={head_dim_qk}/{head_dim_vo}")?;
        if let Some(family) = self.family {
            write!(f, " family={}", family.name)?;
        }
        write!(f, " inkeys={}", self.values_in_keys)?;
        write!(f, " dtype={}/{} scale={}/{}", self.q_dtype, self.kv_dtype, self.scales.0, self.scales.1)?;
        write!(f, " page={} layout={} table={}", self.page_size, self.layout.name(), self.table.name())?;
        write!(f, " shared={} causal={} window={}", self.shared, self.causal, option(self.window))?;
        write!(f, " custom={} softcap={} sinks={}", self.custom, option(self.softcap), self.sinks.name())?;
        write!(f, " alibi={} append={} data={} seed={}", self.alibi, self.append, self.data.name(), self.seed)
    }
}

/// Like requests in a row as one word.
fn request_run((request, count): (RequestShape, usize)) -> String {
    let RequestShape { q_len, kv_len } = request;
    if count == 1 { format!("{q_len}/{kv_len}") } else { format!("{q_len}/{kv_len}*{count}") }
}

fn option<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |x| x.to_string())
}

impl FromStr for Case {
    type Err = CaseTextError;

    fn from_str(line: &str) -> Result<Self, CaseTextError> {
        Self::parse_with(line, None)
    }
}

impl Case {
    /// The case of a line that may name the given family.
    ///
    /// # Errors
    /// [`CaseTextError`] with the word that is wrong.
    pub fn parse_with(line: &str, family: Option<CaseFamily>) -> Result<Self, CaseTextError> {
        let mut case = Self::default();
        for word in line.split_whitespace() {
            let error = |why: String| CaseTextError { word: word.to_owned(), why };
            let (key, value) = word.split_once('=').ok_or_else(|| error("there is no '='".to_owned()))?;
            if key == "family" {
                case.family = family.filter(|family| family.name == value);
                case.family.ok_or_else(|| error("the suite has no such family".to_owned()))?;
                continue;
            }
            set(&mut case, key, value).map_err(error)?;
        }
        case.validate().map_err(|why| CaseTextError { word: line.to_owned(), why })?;
        Ok(case)
    }
}

fn set(case: &mut Case, key: &str, value: &str) -> Result<(), String> {
    match key {
        "q/kv" => case.requests = requests(value)?,
        "pad" => case.padding_rows = parse(value)?,
        "heads" => (case.heads.num_qo_heads, case.heads.num_kv_heads) = pair(value)?,
        "dim" => (case.heads.head_dim_qk, case.heads.head_dim_vo) = pair(value)?,
        "dtype" => {
            let (q, kv) = value.split_once('/').ok_or("a pair q/kv is needed")?;
            (case.q_dtype, case.kv_dtype) = (parse(q)?, parse(kv)?);
        }
        "scale" => case.scales = pair(value)?,
        "inkeys" => case.values_in_keys = parse(value)?,
        "page" => case.page_size = parse(value)?,
        "layout" => case.layout = Layout::of_name(value).ok_or("no such layout")?,
        "table" => case.table = Table::of_name(value).ok_or("no such table")?,
        "shared" => case.shared = parse(value)?,
        "causal" => case.causal = parse(value)?,
        "window" => case.window = optional(value)?,
        "custom" => case.custom = parse(value)?,
        "softcap" => case.softcap = optional(value)?,
        "sinks" => case.sinks = Sinks::of_name(value).ok_or("no such sinks")?,
        "alibi" => case.alibi = parse(value)?,
        "append" => case.append = parse(value)?,
        "data" => case.data = Data::of_name(value).ok_or("no such data")?,
        "seed" => case.seed = parse(value)?,
        _ => return Err("no such key".to_owned()),
    }
    Ok(())
}

fn requests(value: &str) -> Result<Vec<RequestShape>, String> {
    let mut requests = Vec::new();
    for word in value.split(',').filter(|word| !word.is_empty()) {
        let (lengths, count) = word.split_once('*').unwrap_or((word, "1"));
        let (q_len, kv_len) = pair(lengths)?;
        let count: usize = parse(count)?;
        if count > MAX_REQUESTS {
            return Err(format!("{count} requests are more than {MAX_REQUESTS}"));
        }
        requests.resize(requests.len() + count, RequestShape { q_len, kv_len });
    }
    Ok(requests)
}

fn parse<T: FromStr<Err: fmt::Display>>(value: &str) -> Result<T, String> {
    value.parse().map_err(|error: T::Err| error.to_string())
}

fn optional<T: FromStr<Err: fmt::Display>>(value: &str) -> Result<Option<T>, String> {
    if value == "none" { Ok(None) } else { parse(value).map(Some) }
}

fn pair<T: FromStr<Err: fmt::Display>>(value: &str) -> Result<(T, T), String> {
    let (a, b) = value.split_once('/').ok_or("a pair a/b is needed")?;
    Ok((parse(a)?, parse(b)?))
}

impl From<Case> for String {
    fn from(case: Case) -> Self {
        case.to_string()
    }
}

impl TryFrom<String> for Case {
    type Error = CaseTextError;

    fn try_from(line: String) -> Result<Self, CaseTextError> {
        line.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_reads_back_from_its_line() {
        let mut case: Case =
            "q/kv=3/7,1/20*3,0/0 pad=2 heads=6/2 dim=192/128 dtype=bf16/fp8_e4m3 scale=0.25/1.5 page=61 \
            inkeys=true layout=ihnd table=top shared=true causal=false window=127 custom=true softcap=30 sinks=mixed alibi=true \
            append=false data=onehot seed=99"
                .parse()
                .unwrap();
        assert_eq!(case.to_string().parse(), Ok(case.clone()));
        assert_eq!((case.requests.len(), case.window, case.scales), (5, Some(127), (0.25, 1.5)));
        case.requests.clear();
        assert_eq!(case.to_string().parse(), Ok(case.clone()));
        let json = serde_json::to_string(&case).unwrap();
        assert_eq!(serde_json::from_str::<Case>(&json).unwrap(), case);
    }

    #[test]
    fn a_wrong_word_is_named() {
        let message = |line: &str| line.parse::<Case>().unwrap_err().to_string();
        assert_eq!(message("q/kv=1/5 pages=3"), "\"pages=3\" of the case: no such key");
        assert_eq!(message("family=mla"), "\"family=mla\" of the case: the suite has no such family");
        assert_eq!(message("page"), "\"page\" of the case: there is no '='");
        assert_eq!(message("q/kv=6/5"), "\"q/kv=6/5\" of the case: request 0 appends more tokens than its kv_len");
        assert!(message("heads=3/2").contains("not divisible"));
    }
}
