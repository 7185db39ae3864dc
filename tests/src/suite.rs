//! Owns [`Suite`]: how much is run, from which seed, and what is the least that counts as green.

use attn_metadata::HostDevice;

use crate::case::CaseFamily;

/// How the suite is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Suite {
    /// Seed of the case list.
    pub seed: u64,
    /// Cases compared with the oracle, drawn pairwise.
    pub num_oracle_cases: usize,
    /// Cases for each other check.
    pub num_check_cases: usize,
    /// Multiplications of the oracle for one case.
    pub work: u64,
    /// Fewest passed cases that count as green.
    pub floor: usize,
    /// Whether cases run beside each other. Off for backends that share one device.
    pub parallel: bool,
    /// Whether to stop at the first failure.
    pub fail_fast: bool,
    /// The device that backends are made with.
    pub device: HostDevice,
    /// The family of the layers; `None`: plain ones. A family is put through the exact relations and the contract
    /// alone: what it computes is between its crate's oracle and its backends.
    pub family: Option<CaseFamily>,
}

impl Suite {
    /// What a backend runs in its tests: below a minute for a CPU backend on two cores in an optimised build.
    #[must_use]
    pub const fn standard() -> Self {
        Self {
            seed: 20,
            num_oracle_cases: 300,
            num_check_cases: 10,
            work: 6_000_000,
            floor: 400,
            parallel: true,
            fail_fast: false,
            device: HostDevice::with_threads(2),
            family: None,
        }
    }

    /// A few seconds: for examples and for looking at a new backend.
    #[must_use]
    pub const fn smoke() -> Self {
        Self { num_oracle_cases: 24, num_check_cases: 2, work: 500_000, floor: 40, ..Self::standard() }
    }

    /// Many more cases, for a nightly run with another seed each night.
    #[must_use]
    pub const fn wide(seed: u64) -> Self {
        Self { seed, num_oracle_cases: 2000, num_check_cases: 60, work: 30_000_000, floor: 2500, ..Self::standard() }
    }

    /// Exact relations over layers of a family.
    #[must_use]
    pub const fn family(family: CaseFamily) -> Self {
        Self { family: Some(family), floor: 150, ..Self::standard() }
    }

    /// Another floor: for backends of which much is refused.
    #[must_use]
    pub const fn with_floor(self, floor: usize) -> Self {
        Self { floor, ..self }
    }

    /// One case after the other.
    #[must_use]
    pub const fn sequential(self) -> Self {
        Self { parallel: false, ..self }
    }

    /// Stops at the first failure.
    #[must_use]
    pub const fn fail_fast(self) -> Self {
        Self { fail_fast: true, ..self }
    }
}
