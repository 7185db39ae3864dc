//! A session's state and counters for dashboards: as a struct, as JSON, and in the Prometheus text format.

use std::fmt::Write as _;
use std::time::Duration;

use kvpool::PrefixCache;
use serde::Serialize;

use super::stats::Stats;

/// Upper bounds of the step-time histogram, in seconds; one more bucket holds the rest.
const STEP_BOUNDS_S: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// How long steps took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    /// Upper bounds.
    bounds_s: [f64; STEP_BOUNDS_S.len()],
    /// Steps up to each bound and above the one before; the last entry is above all bounds.
    counts: [u64; STEP_BOUNDS_S.len() + 1],
    sum_s: f64,
}

impl Default for StepTimes {
    fn default() -> Self {
        Self { bounds_s: STEP_BOUNDS_S, counts: [0; STEP_BOUNDS_S.len() + 1], sum_s: 0.0 }
    }
}

impl StepTimes {
    /// Counts a step.
    pub(super) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = self.bounds_s.iter().position(|bound| seconds <= *bound).unwrap_or(self.bounds_s.len());
        self.counts[bucket] += 1;
        self.sum_s += seconds;
    }

    /// Steps counted.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// What the prefix cache holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixMetrics {
    /// Pages that the cache has.
    pub cached_pages: usize,
    /// Pages that only the cache holds.
    pub evictable_pages: usize,
    /// Requests that were looked up.
    pub lookups: u64,
    /// Lookups that found at least one page.
    pub hits: u64,
    /// Tokens that were looked up.
    pub lookup_tokens: u64,
    /// Tokens that need not be computed.
    pub hit_tokens: u64,
    /// Pages that were given up for others.
    pub evicted_pages: u64,
}

impl PrefixMetrics {
    pub(super) fn new(cache: &PrefixCache) -> Self {
        let (size, counters) = (cache.size_info(), cache.counters());
        Self {
            cached_pages: size.cached,
            evictable_pages: size.evictable,
            lookups: counters.lookups,
            hits: counters.hits,
            lookup_tokens: counters.lookup_tokens,
            hit_tokens: counters.hit_tokens,
            evicted_pages: counters.evicted_pages,
        }
    }
}

/// What a session looks like now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// Requests that wait.
    pub num_waiting: usize,
    /// Requests that hold pages.
    pub num_running: usize,
    /// Pages that are free.
    pub free_pages: usize,
    /// Pages that can be taken: free ones, and those that only the prefix cache holds.
    pub available_pages: usize,
    /// Pages of the pool.
    pub total_pages: usize,
    /// Counters since the start.
    pub stats: Stats,
    /// Step times since the start.
    pub step_times: StepTimes,
    /// The prefix cache, where there is one.
    pub prefix: Option<PrefixMetrics>,
}

impl Metrics {
    /// The Prometheus text exposition format, names prefixed `attn_`.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        let gauges = [
            ("requests_waiting", "Requests that wait for pages or a turn", self.num_waiting),
            ("requests_running", "Requests that hold pages", self.num_running),
            ("pages_free", "Pages that are free", self.free_pages),
            ("pages_available", "Pages that can be taken, free or evictable", self.available_pages),
            ("pages_total", "Pages of the pool", self.total_pages),
        ];
        for (name, help, value) in gauges {
            push(&mut text, name, "gauge", help, &value.to_string());
        }
        let stats = &self.stats;
        let counters = [
            ("steps_total", "Steps run", stats.num_steps),
            ("prefill_tokens_total", "Prompt tokens computed", stats.prefill_tokens),
            ("decode_tokens_total", "Tokens computed while decoding", stats.decode_tokens),
            ("generated_tokens_total", "Tokens generated", stats.generated_tokens),
            ("preemptions_total", "Requests that gave their pages back", stats.num_preemptions),
            ("cancellations_total", "Requests that were cancelled", stats.num_cancelled),
        ];
        for (name, help, value) in counters {
            push(&mut text, name, "counter", help, &value.to_string());
        }
        self.push_prefix(&mut text);
        self.push_histogram(&mut text);
        text
    }

    fn push_prefix(&self, text: &mut String) {
        let Some(prefix) = &self.prefix else { return };
        let gauges = [
            ("prefix_pages_cached", "Pages of the prefix cache", prefix.cached_pages),
            ("prefix_pages_evictable", "Pages that only the prefix cache holds", prefix.evictable_pages),
        ];
        for (name, help, value) in gauges {
            push(text, name, "gauge", help, &value.to_string());
        }
        let counters = [
            ("prefix_lookups_total", "Requests looked up in the prefix cache", prefix.lookups),
            ("prefix_hits_total", "Lookups that found at least one page", prefix.hits),
            ("prefix_lookup_tokens_total", "Tokens looked up in the prefix cache", prefix.lookup_tokens),
            ("prefix_hit_tokens_total", "Tokens that need not be computed", prefix.hit_tokens),
            ("prefix_evicted_pages_total", "Pages given up by the prefix cache", prefix.evicted_pages),
        ];
        for (name, help, value) in counters {
            push(text, name, "counter", help, &value.to_string());
        }
    }

    fn push_histogram(&self, text: &mut String) {
        let name = "attn_step_seconds";
        let _ = writeln!(text, "# HELP {name} Time of a step\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, count) in self.step_times.bounds_s.iter().zip(&self.step_times.counts) {
            sum += count;
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let num_steps = self.step_times.num_steps();
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {num_steps}");
        let _ = writeln!(text, "{name}_sum {}\n{name}_count {num_steps}", self.step_times.sum_s);
    }
}

fn push(text: &mut String, name: &str, kind: &str, help: &str, value: &str) {
    let _ = writeln!(text, "# HELP attn_{name} {help}\n# TYPE attn_{name} {kind}\nattn_{name} {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format_has_a_cumulative_histogram() {
        let mut step_times = StepTimes::default();
        for micros in [500, 1_000, 1_500, 60_000, 5_000_000] {
            step_times.add(Duration::from_micros(micros));
        }
        let stats = Stats { num_steps: 5, ..Stats::default() };
        let metrics = Metrics {
            num_waiting: 2,
            num_running: 3,
            free_pages: 7,
            available_pages: 8,
            total_pages: 9,
            stats,
            step_times,
            prefix: Some(PrefixMetrics { hits: 4, ..PrefixMetrics::default() }),
        };
        let text = metrics.prometheus();
        for line in [
            "attn_requests_waiting 2",
            "attn_pages_free 7",
            "attn_pages_available 8",
            "# TYPE attn_steps_total counter",
            "attn_steps_total 5",
            "attn_prefix_hits_total 4",
            "attn_step_seconds_bucket{le=\"0.001\"} 2",
            "attn_step_seconds_bucket{le=\"0.002\"} 3",
            "attn_step_seconds_bucket{le=\"0.1\"} 4",
            "attn_step_seconds_bucket{le=\"1\"} 4",
            "attn_step_seconds_bucket{le=\"+Inf\"} 5",
            "attn_step_seconds_count 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in\n{text}");
        }
        assert!(text.lines().all(|l| l.starts_with('#') || l.split(' ').count() == 2));
    }

    #[test]
    fn json_has_seconds_and_the_bounds_of_its_counts() {
        let mut step_times = StepTimes::default();
        step_times.add(Duration::from_millis(1500));
        let json = serde_json::to_value(&step_times).unwrap();
        let len = |name: &str| json[name].as_array().unwrap().len();
        assert_eq!((len("bounds_s"), len("counts")), (10, 11));
        assert_eq!((json["counts"][10].as_u64(), json["sum_s"].as_f64()), (Some(1), Some(1.5)));
        let stats = Stats { attention_time: Duration::from_millis(250), ..Stats::default() };
        let json = serde_json::to_value(stats).unwrap();
        assert_eq!((&json["attention_time_s"], &json["host_time_s"]), (&0.25.into(), &0.0.into()), "{json}");
        assert!(json.get("attention_time").is_none());
    }
}
