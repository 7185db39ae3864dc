//! Owns dense attention over a sparse page table: [`PageTable`] and [`PageTableAttend`].
//!
//! A row's blocks are whole pages but for the last, so attending to them is ordinary paged attention of one query over
//! a shorter sequence: any dense backend can do it. It is right because a softmax does not know an order of keys, and
//! positions went into keys and queries before.
//!
//! What depends on the batch is written into tables that are kept and reused; a dense backend is made once.

use std::sync::Arc;

use attn_metadata::{
    BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, CreateError, HeadShape, Host, HostDevice, Io, Kv,
    Layer, LayerParams, ModelSpec, PoolShape, RawBatch, SubBatch,
};
use kvpool::{Dtype, KvDtype, PageSize};

use crate::selection::Selection;
use crate::stage::{Attend, AttendInput, AttendOutput, Offer, Refusal, StageError, Step};

/// The page tables of rows that attend to selected blocks: one short sequence for each row and set of ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// Offsets of the sequences' pages, `[rows · sets + 1]`.
    pub indptr: Vec<i32>,
    /// Page ids of the pool, `[indptr[rows · sets]]`.
    pub indices: Vec<i32>,
    /// Tokens of each sequence's last page; 0 where it is empty.
    pub last_page_len: Vec<i32>,
    /// Tokens of each sequence, `[rows · sets]`: row by row, for a row set by set.
    pub real_seq_lens: Vec<u32>,
    /// The request of each row; `None` for rows of no request of the batch.
    owners: Vec<Option<usize>>,
}

impl PageTable {
    /// Writes the tables of a batch's rows, padding rows included. Reuses memory.
    ///
    /// # Errors
    /// [`StageError::OtherRows`] where the selection is not of the batch's rows, [`StageError::Pages`],
    /// [`StageError::TableTooLarge`]. The tables are not to be used then.
    pub fn fill(&mut self, batch: &Batch, selection: &Selection) -> Result<(), StageError> {
        if !selection.fits(batch) {
            let (expected, got) = (batch.num_rows() as usize, selection.num_rows());
            return Err(StageError::OtherRows { expected, got });
        }
        let page_size = batch.page_size();
        let unit = selection.unit().num_tokens();
        if !unit.is_multiple_of(page_size.get()) {
            return Err(StageError::Pages { page_size: page_size.get(), unit });
        }
        let Self { indptr, indices, last_page_len, real_seq_lens, owners } = self;
        [&mut *indptr, indices, last_page_len].into_iter().for_each(Vec::clear);
        real_seq_lens.clear();
        indptr.push(0);
        let num_sets = selection.fanout().num_sets();
        owners.clear();
        owners.resize(selection.num_rows(), None);
        for (index, request) in batch.requests().iter().enumerate() {
            owners[request.q_start as usize..(request.q_start + request.q_len) as usize].fill(Some(index));
        }
        for (row, &request) in owners.iter().enumerate() {
            for set in 0..num_sets {
                let mut len = 0;
                if let Some(request) = request {
                    let pages = batch.pages(&batch.requests()[request]);
                    for &id in selection.ids(row, set) {
                        let tokens = selection.tokens(row, id);
                        len += tokens.len();
                        let first = tokens.start / page_size.get() as usize;
                        indices.extend(&pages[first..first + page_size.pages_for(tokens.len())]);
                    }
                }
                indptr.push(i32::try_from(indices.len()).map_err(|_| StageError::TableTooLarge { row })?);
                last_page_len.push(page_size.last_page_len(len).cast_signed());
                real_seq_lens.push(u32::try_from(len).expect("no more than the row sees"));
            }
        }
        Ok(())
    }

    /// The pages of a sequence as a cache of one head a page counts them: `page · num_kv_heads + kv_head`.
    ///
    /// # Panics
    /// Where there is no such sequence.
    pub fn head_coded(&self, row: usize, kv_head: usize, num_kv_heads: usize) -> impl Iterator<Item = i32> {
        let sequence = row * num_kv_heads + kv_head;
        let range = self.indptr[sequence].unsigned_abs() as usize..self.indptr[sequence + 1].unsigned_abs() as usize;
        let code = move |page: &i32| {
            let coded = page.unsigned_abs() as usize * num_kv_heads + kv_head;
            i32::try_from(coded).expect("a head's pages are fewer than the ids of an i32")
        };
        self.indices[range].iter().map(code)
    }
}

/// Attends through a dense backend, a row at a time, for layers of one KV head.
pub struct PageTableAttend {
    dense: BoxedBackend<Host>,
    table: PageTable,
    qo_indptr: Vec<i32>,
    /// One request for each row.
    all: Batch,
    /// Those of them that are rows of the batch's requests.
    used: Batch,
}

impl std::fmt::Debug for PageTableAttend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageTableAttend").field("dense", &self.dense.name()).finish_non_exhaustive()
    }
}

/// The layer that [`PageTableAttend`] is made for.
#[derive(Clone, Copy, Debug)]
pub struct TableLayer {
    /// Its heads; one KV head.
    pub heads: HeadShape,
    /// Multiplier of q·k.
    pub sm_scale: f32,
    /// Whether values are columns of the keys.
    pub values_in_keys: bool,
    /// Dtype of queries and outputs.
    pub q_dtype: Dtype,
    /// Dtype of the stored KV.
    pub kv_dtype: KvDtype,
    /// Tokens in a page.
    pub page_size: PageSize,
}

impl PageTableAttend {
    /// Makes a dense backend for the layer.
    ///
    /// # Errors
    /// [`CreateError`] of the dense backend.
    pub fn new(entry: &BackendEntry<Host>, layer: &TableLayer, device: &HostDevice) -> Result<Self, CreateError> {
        let (sm_scale, values_in_keys) = (layer.sm_scale, layer.values_in_keys);
        let params = LayerParams { sm_scale, values_in_keys, ..LayerParams::causal(layer.heads) };
        let dense = Layer::new(params).expect("the heads and scale of a checked layer");
        let model = ModelSpec::new(vec![dense], layer.q_dtype, layer.kv_dtype, layer.page_size);
        let model = Arc::new(model.expect("one layer"));
        let config = BackendConfig { model, limits: BatchLimits::NONE, device: *device };
        let pool = PoolShape { num_pages: 0, page_size: layer.page_size };
        Ok(Self {
            dense: (entry.create)(&config)?,
            table: PageTable::default(),
            qo_indptr: Vec::new(),
            all: Batch::empty(pool),
            used: Batch::empty(pool),
        })
    }
}

impl Attend for PageTableAttend {
    fn accepts(&self, offer: &Offer) -> Result<(), Vec<Refusal>> {
        let attend = "the page-table path";
        let mut refusals = Vec::new();
        if offer.num_kv_heads != 1 {
            refusals.push(Refusal { attend, needed: "one KV head", got: offer.num_kv_heads });
        }
        if !offer.unit.num_tokens().is_multiple_of(offer.page_size.get()) {
            refusals.push(Refusal { attend, needed: "pages that tile blocks", got: offer.unit.num_tokens() });
        }
        if refusals.is_empty() { Ok(()) } else { Err(refusals) }
    }

    fn attend(
        &mut self,
        step: &mut Step<'_>,
        input: &AttendInput<'_>,
        selection: &Selection,
        output: AttendOutput<'_>,
    ) -> Result<(), StageError> {
        let pool = step.batch.pool();
        self.table.fill(step.batch, selection)?;
        self.qo_indptr.clear();
        self.qo_indptr.extend((0i32..).take(selection.num_rows() + 1));
        if self.all.pool() != pool {
            self.all = Batch::empty(pool);
        }
        let raw = RawBatch {
            num_rows: step.num_rows,
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.table.indptr,
            kv_indices: &self.table.indices,
            kv_last_page_len: &self.table.last_page_len,
            slot_mapping: None,
            custom_mask: None,
        };
        self.all.set(&raw).map_err(StageError::Batch)?;
        let owners = &self.table.owners;
        self.all.select_into(&mut self.used, SubBatch::Later, |request| owners[request.q_start as usize].is_some());
        let ticket = self.dense.prepare_metadata(&self.used).map_err(StageError::Prepare)?;
        let AttendOutput { out, lse } = output;
        let io = Io { q: input.q, kv: Kv::Attend { cache: input.cache }, side: None, out, lse };
        self.dense.forward(&ticket, 0, io).map_err(StageError::Run)
    }
}
