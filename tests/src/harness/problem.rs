//! Owns [`Problem`]: a case with its tables, cache and tensors built, and [`Build`]: everything about the building
//! that no result may depend on.

use attn_metadata::{Batch, Layer, PoolShape, RawBatch, SideSpec, mask_bytes};
use kvpool::{HostKv, KvSpec, PageSize, Slot, Values};

use super::cache;
use super::content::{FOREIGN, Part, Place, SHARED, fill};
use super::tensor::{Activation, Strides};
use crate::case::{Case, RequestShape, Table};
use crate::rng::Rng;

/// What is in everything that must not matter: other pages, the tail of the last page, slots still to be written,
/// padding rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// NaN.
    Nan,
    /// The largest value of the dtype, or 1e30.
    Big,
    /// Values as another request might have.
    Foreign,
}

/// How a case is put into memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Build {
    /// Which of the case's requests, in which order.
    pub members: Vec<usize>,
    /// What is in everything else.
    pub poison: Poison,
    /// How q, k and v lie in memory.
    pub inputs: Strides,
    /// How out lies in memory.
    pub outputs: Strides,
    /// Chooses among page permutations.
    pub map_seed: u64,
    /// Pages of the pool at least.
    pub min_pages: u32,
    /// A request whose own q, K and V are all NaN.
    pub nan_member: Option<usize>,
    /// A request and a position: its keys and values after that position are others.
    pub edit_after: Option<(usize, u32)>,
    /// Where each of the case's requests begins to have KV, in positions of its values; empty: at 0.
    pub first_positions: Vec<u32>,
}

impl Build {
    /// The usual way: all requests, NaN everywhere else.
    #[must_use]
    pub fn of(case: &Case) -> Self {
        Self {
            members: (0..case.requests.len()).collect(),
            poison: Poison::Nan,
            inputs: Strides::Packed,
            outputs: Strides::Packed,
            map_seed: 0,
            min_pages: 0,
            nan_member: None,
            edit_after: None,
            first_positions: Vec::new(),
        }
    }
}

/// The raw tables of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Token offsets.
    pub qo_indptr: Vec<i32>,
    /// Page offsets.
    pub kv_indptr: Vec<i32>,
    /// Page ids.
    pub kv_indices: Vec<i32>,
    /// Tokens in the last pages.
    pub kv_last_page_len: Vec<i32>,
    /// Slots, where the step appends.
    pub slots: Option<Vec<Slot>>,
    /// Custom mask, if any.
    pub mask: Option<Vec<u8>>,
    /// Rows, padding included.
    pub num_rows: usize,
}

/// A case in memory.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The case.
    pub case: Case,
    /// How it was built.
    pub build: Build,
    /// The pool.
    pub pool: PoolShape,
    /// The tables.
    pub tables: Tables,
    /// The cache before the step.
    pub cache: HostKv,
    /// Queries.
    pub q: Activation,
    /// New keys, read only where the step appends.
    pub k: Activation,
    /// New values, likewise; `None` where the layer keeps no values of their own.
    pub v: Option<Activation>,
    /// The side branch, where the layer has one.
    pub side: Option<SideProblem>,
}

/// The tensors of a side branch, as those of the [`Problem`].
#[derive(Clone, Debug)]
pub struct SideProblem {
    /// What it is.
    pub spec: SideSpec,
    /// The cache before the step.
    pub cache: HostKv,
    /// Queries.
    pub q: Activation,
    /// New keys.
    pub k: Activation,
    /// New values, where it keeps some of their own.
    pub v: Option<Activation>,
}

impl Problem {
    /// Builds a case the usual way.
    #[must_use]
    pub fn new(case: &Case) -> Self {
        Self::build(case, Build::of(case))
    }

    /// Builds a case.
    ///
    /// # Panics
    /// If the case is not valid.
    #[must_use]
    pub fn build(case: &Case, build: Build) -> Self {
        let page_size = PageSize::new(case.page_size).expect("the case was validated");
        let (tables, num_pages) = tables(case, &build, page_size);
        let pool = PoolShape { num_pages, page_size };
        let (heads, layer) = (case.heads, case.layer());
        let input = |num_heads: u32, dim: u32| {
            let shape = [tables.num_rows, num_heads as usize, dim as usize];
            Activation::poisoned(case.q_dtype, shape, build.inputs)
        };
        let new = |spec: KvSpec| {
            let v = matches!(spec.values, Values::Own(_)).then(|| input(spec.num_kv_heads, spec.values.head_dim()));
            (input(spec.num_kv_heads, spec.head_dim_k), v)
        };
        let (k, v) = new(layer.kv());
        let side = layer.side().map(|spec| {
            let (k, v) = new(spec.kv);
            let cache = cache::poisoned(case, spec.kv, case.side_format(), pool, build.poison);
            SideProblem { spec, cache, q: input(spec.num_heads, spec.head_dim), k, v }
        });
        let mut problem = Self {
            pool,
            cache: cache::poisoned(case, layer.kv(), case.format(), pool, build.poison),
            q: input(heads.num_qo_heads, heads.head_dim_qk),
            k,
            v,
            side,
            tables,
            case: case.clone(),
            build,
        };
        problem.fill_rows();
        cache::fill(&mut problem);
        problem
    }

    /// The validated batch.
    ///
    /// # Panics
    /// If the waist refuses the tables, which are valid.
    #[must_use]
    pub fn batch(&self) -> Batch {
        Batch::from_raw(self.pool, &self.raw()).expect("the tables of a case are valid")
    }

    /// The raw tables.
    #[must_use]
    pub fn raw(&self) -> RawBatch<'_> {
        RawBatch {
            num_rows: self.tables.num_rows,
            qo_indptr: &self.tables.qo_indptr,
            kv_indptr: &self.tables.kv_indptr,
            kv_indices: &self.tables.kv_indices,
            kv_last_page_len: &self.tables.kv_last_page_len,
            slot_mapping: self.tables.slots.as_deref(),
            custom_mask: self.tables.mask.as_deref(),
        }
    }

    /// The case's layer.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.case.layer()
    }

    /// Rows of the requests.
    #[must_use]
    pub fn num_used_rows(&self) -> usize {
        self.tables.qo_indptr.last().map_or(0, |&end| end.unsigned_abs() as usize)
    }

    /// Rows of a member, by its place in the build.
    #[must_use]
    pub fn rows_of(&self, place: usize) -> std::ops::Range<usize> {
        let row = |at: usize| usize::try_from(self.tables.qo_indptr[at]).expect("row offsets are not negative");
        row(place)..row(place + 1)
    }

    /// The value of a K or V vector of a member, with the build's edits.
    pub(crate) fn kv_value(&self, part: Part, member: usize, position: u32, head: u32, out: &mut [f32]) {
        let position = position + self.build.first_positions.get(member).copied().unwrap_or(0);
        let shared = position < shared_tokens(&self.case);
        let owner = if shared { SHARED } else { member as u64 };
        fill(&self.case, part, Place { owner, position: position.into(), head }, out);
        if self.build.edit_after.is_some_and(|(m, last)| m == member && position > last && !shared) {
            out.iter_mut().for_each(|x| *x = 3.0 - 2.0 * *x);
        }
        if self.build.nan_member == Some(member) && !shared {
            out.fill(f32::NAN);
        }
    }

    fn fill_rows(&mut self) {
        let mut row = 0;
        for member in self.build.members.clone() {
            let RequestShape { q_len, kv_len } = self.case.requests[member];
            for in_request in 0..q_len {
                self.fill_row(row, member, i64::from(kv_len) - i64::from(q_len) + i64::from(in_request));
                row += 1;
            }
        }
        for row in row..self.tables.num_rows {
            self.poison_row(row);
        }
    }

    fn fill_row(&mut self, row: usize, member: usize, position: i64) {
        let place = |head: usize| {
            let head = u32::try_from(head).expect("head counts have 32 bits");
            Place { owner: member as u64, position: position.cast_unsigned(), head }
        };
        let is_nan = self.build.nan_member == Some(member);
        let queries = [Some((Part::Q, &mut self.q)), self.side.as_mut().map(|side| (Part::SideQ, &mut side.q))];
        for (part, tensor) in queries.into_iter().flatten() {
            let [_, heads, dim] = tensor.shape();
            let mut values = vec![0.0; dim];
            for head in 0..heads {
                fill(&self.case, part, place(head), &mut values);
                if is_nan {
                    values.fill(f32::NAN);
                }
                tensor.view_mut().write(row, head, &values);
            }
        }
        let Some(position) = u32::try_from(position).ok().filter(|_| self.case.append) else { return };
        for part in [Part::K, Part::V, Part::SideK, Part::SideV] {
            let Some([_, heads, dim]) = self.new_rows(part).map(|tensor| tensor.shape()) else { continue };
            let mut values = vec![0.0; dim];
            for (index, head) in (0..heads).zip(0u32..) {
                self.kv_value(part, member, position, head, &mut values);
                self.new_rows(part).expect("it was there before").view_mut().write(row, index, &values);
            }
        }
    }

    /// The new rows of a part, where the layer has it.
    fn new_rows(&mut self, part: Part) -> Option<&mut Activation> {
        match part {
            Part::Q => Some(&mut self.q),
            Part::K => Some(&mut self.k),
            Part::V => self.v.as_mut(),
            Part::SideQ => self.side.as_mut().map(|side| &mut side.q),
            Part::SideK => self.side.as_mut().map(|side| &mut side.k),
            Part::SideV => self.side.as_mut().and_then(|side| side.v.as_mut()),
        }
    }

    fn poison_row(&mut self, row: usize) {
        let (case, poison) = (self.case.clone(), self.build.poison);
        for part in [Part::Q, Part::K, Part::V, Part::SideQ, Part::SideK, Part::SideV] {
            let Some(tensor) = self.new_rows(part) else { continue };
            let [_, heads, dim] = tensor.shape();
            let mut values = vec![0.0; dim];
            for head in 0..heads {
                match poison {
                    Poison::Nan => values.fill(f32::NAN),
                    Poison::Big => values.fill(6.0e4),
                    Poison::Foreign => {
                        let head = u32::try_from(head).expect("head counts have 32 bits");
                        fill(&case, part, Place { owner: FOREIGN, position: row as u64, head }, &mut values);
                    }
                }
                tensor.view_mut().write(row, head, &values);
            }
        }
    }
}

/// Tokens that all requests of the case share: whole pages that none of them appends to.
fn shared_tokens(case: &Case) -> u32 {
    if !case.shared || case.requests.len() < 2 {
        return 0;
    }
    let cached = case.requests.iter().map(|r| case.cached_len(r)).min().unwrap_or(0);
    cached / case.page_size * case.page_size
}

fn tables(case: &Case, build: &Build, page_size: PageSize) -> (Tables, u32) {
    let shared_pages = (shared_tokens(case) / case.page_size) as usize;
    let (mut qo_indptr, mut kv_indptr, mut last) = (vec![0], vec![0], Vec::new());
    let mut logical: Vec<usize> = Vec::new();
    let mut next = shared_pages;
    for &member in &build.members {
        let RequestShape { q_len, kv_len } = case.requests[member];
        let pages = page_size.pages_for(kv_len as usize);
        let own = pages.saturating_sub(shared_pages);
        logical.extend((0..pages.min(shared_pages)).chain(next..next + own));
        next += own;
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + i32::try_from(q_len).expect("rows of a case fit"));
        kv_indptr.push(i32::try_from(logical.len()).expect("pages of a case fit"));
        last.push(page_size.last_page_len(kv_len as usize).cast_signed());
    }
    let spare = if case.table == Table::Top { 37 } else { 5 };
    let num_pages = (next + spare).max(build.min_pages as usize);
    let physical = place_pages(case, build, next, num_pages);
    let kv_indices: Vec<i32> = logical.iter().map(|&page| physical[page]).collect();
    let used = usize::try_from(qo_indptr[qo_indptr.len() - 1]).expect("not negative");
    let num_rows = used + case.padding_rows as usize;
    let mut tables =
        Tables { qo_indptr, kv_indptr, kv_indices, kv_last_page_len: last, slots: None, mask: None, num_rows };
    tables.slots = case.append.then(|| slots(case, build, &tables, page_size));
    tables.mask = case.custom.then(|| mask(case, build));
    (tables, u32::try_from(num_pages).expect("pools of a case are small"))
}

fn place_pages(case: &Case, build: &Build, num_logical: usize, num_pages: usize) -> Vec<i32> {
    let mut physical: Vec<usize> = match case.table {
        Table::Identity => (0..num_logical).collect(),
        Table::Permuted => (0..num_pages).collect(),
        Table::Top => (num_pages - num_logical..num_pages).rev().collect(),
    };
    if case.table == Table::Permuted {
        Rng::new(&[case.seed, 0xa11c, build.map_seed]).shuffle(&mut physical);
    }
    physical.iter().map(|&page| i32::try_from(page).expect("pools of a case are small")).collect()
}

fn slots(case: &Case, build: &Build, tables: &Tables, page_size: PageSize) -> Vec<Slot> {
    let mut slots = Vec::new();
    for (place, &member) in build.members.iter().enumerate() {
        let first_page = usize::try_from(tables.kv_indptr[place]).expect("not negative");
        let request = case.requests[member];
        for position in case.cached_len(&request)..request.kv_len {
            let page = tables.kv_indices[first_page + (position / page_size.get()) as usize];
            let slot = i64::from(page) * i64::from(page_size.get()) + i64::from(position % page_size.get());
            slots.push(Slot::from_raw(i32::try_from(slot).expect("pools of a case are small")));
        }
    }
    slots.resize(tables.num_rows, Slot::PADDING);
    slots
}

/// Whether the custom mask of a case shows a key: a function of the request, the query's position and the key.
pub(crate) fn mask_shows(case: &Case, member: usize, row: u32, key: u32) -> bool {
    let request = &case.requests[member];
    let position = (i64::from(request.kv_len) - i64::from(request.q_len) + i64::from(row)).cast_unsigned();
    let mut rng = Rng::new(&[case.seed, 0x3a5c, member as u64, position]);
    if rng.below(5) == 0 {
        return false;
    }
    Rng::new(&[rng.next_u64(), u64::from(key)]).below(10) >= 3
}

fn mask(case: &Case, build: &Build) -> Vec<u8> {
    let shapes = build.members.iter().map(|&m| case.requests[m]);
    let bytes = mask_bytes(shapes.map(|r| (r.q_len, r.kv_len))).expect("masks of a case are small");
    let mut mask = vec![0u8; bytes];
    let mut bit = 0usize;
    for &member in &build.members {
        let RequestShape { q_len, kv_len } = case.requests[member];
        for row in 0..q_len {
            for key in 0..kv_len {
                mask[bit / 8] |= u8::from(mask_shows(case, member, row, key)) << (bit % 8);
                bit += 1;
            }
        }
    }
    mask
}
