//! Owns the conversion between the pages of a pool and the smaller pages of a kernel: [`PageGranularity`].
//! Invariants: page `p` of the pool is the kernel pages `p * ratio..(p + 1) * ratio`, slots are the same numbers in both,
//! the conversion of tables is a bijection, and every id fits `i32`.
//! Does not know where tables come from: it takes raw arrays and checks every entry.

use kvpool::{PageId, PageSize};

/// Page tables of `n` requests in CSR form, borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CsrRef<'a> {
    /// Offsets of the requests' pages, `[n + 1]`, from 0.
    pub kv_indptr: &'a [i32],
    /// Page ids, `[kv_indptr[n]]`.
    pub kv_indices: &'a [i32],
    /// Tokens in the last page, `[n]`, `1..=page_size`; 0 only where a request has no page.
    pub kv_last_page_len: &'a [i32],
}

/// Page tables of `n` requests in CSR form; the output of a conversion, to be kept and reused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrTables {
    /// Offsets of the requests' pages, `[n + 1]`, from 0.
    pub kv_indptr: Vec<i32>,
    /// Page ids, `[kv_indptr[n]]`.
    pub kv_indices: Vec<i32>,
    /// Tokens in the last page, `[n]`, `1..=page_size`; 0 only where a request has no page.
    pub kv_last_page_len: Vec<i32>,
}

impl CsrTables {
    /// The same tables, borrowed.
    #[must_use]
    pub fn as_ref(&self) -> CsrRef<'_> {
        let CsrTables { kv_indptr, kv_indices, kv_last_page_len } = self;
        CsrRef { kv_indptr, kv_indices, kv_last_page_len }
    }

    fn clear(&mut self) {
        let CsrTables { kv_indptr, kv_indices, kv_last_page_len } = self;
        [kv_indptr, kv_indices, kv_last_page_len].into_iter().for_each(Vec::clear);
    }
}

/// A conversion that was refused. After a refused conversion of tables the output is empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The kernel's pages do not tile the pool's.
    #[error("kernel pages of {kernel} tokens do not divide pool pages of {pool} tokens")]
    NotADivisor {
        /// Tokens of a kernel page.
        kernel: PageSize,
        /// Tokens of a page of the pool.
        pool: PageSize,
    },
    /// A pool page has fewer parts.
    #[error("part {part} of a page of {ratio} kernel pages")]
    PartOutOfRange {
        /// The part.
        part: u32,
        /// Kernel pages of a pool page.
        ratio: u32,
    },
    /// The kernel page's id does not fit an `i32`.
    #[error("page {page} x {ratio} kernel pages is beyond i32")]
    PageIdOverflow {
        /// The page of the pool.
        page: PageId,
        /// Kernel pages of a pool page.
        ratio: u32,
    },
    /// The arrays have not the lengths of one batch.
    #[error("kv_indptr has {indptr} entries and kv_last_page_len {rows}, expected one more in the first")]
    RowCount {
        /// Entries of `kv_indptr`.
        indptr: usize,
        /// Entries of `kv_last_page_len`.
        rows: usize,
    },
    /// `kv_indptr` does not start at 0.
    #[error("kv_indptr starts at {first}, expected 0")]
    IndptrStart {
        /// Its first entry.
        first: i32,
    },
    /// `kv_indptr` decreases, or leaves `kv_indices` on the way.
    #[error("kv_indptr goes from {start} to {end} in row {row}, expected ascending within {num_indices} entries")]
    IndptrOrder {
        /// The row.
        row: usize,
        /// Its start.
        start: i32,
        /// Its end.
        end: i32,
        /// Entries of `kv_indices`.
        num_indices: usize,
    },
    /// `kv_indptr` does not end at the number of page ids.
    #[error("kv_indptr ends at {last}, kv_indices has {num_indices} entries")]
    IndptrEnd {
        /// Its last entry.
        last: i32,
        /// Entries of `kv_indices`.
        num_indices: usize,
    },
    /// A page id is negative.
    #[error("page id {page} of row {row} is negative")]
    NegativePage {
        /// The row.
        row: usize,
        /// The id.
        page: i32,
    },
    /// The last page's length is impossible.
    #[error("kv_last_page_len is {got} in row {row} of {pages} pages of {page_size} tokens")]
    LastPageLen {
        /// The row.
        row: usize,
        /// Its entry.
        got: i32,
        /// Pages of the row.
        pages: usize,
        /// Tokens per page.
        page_size: PageSize,
    },
    /// The converted table has more entries than an `i32` counts.
    #[error("the converted tables leave i32 in row {row}")]
    TooManyEntries {
        /// The row.
        row: usize,
    },
    /// Kernel pages that are not the parts of one pool page, in order.
    #[error("kernel page {got} of row {row} is not a part of a pool page, expected {expected}")]
    NotAligned {
        /// The row.
        row: usize,
        /// The kernel page.
        got: PageId,
        /// The kernel page that would be right.
        expected: PageId,
    },
}

/// The pages of a pool seen as smaller pages of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageGranularity {
    pool: PageSize,
    kernel: PageSize,
}

impl PageGranularity {
    /// Pool pages of `pool` tokens seen as kernel pages of `kernel` tokens.
    ///
    /// # Errors
    /// [`ConvertError::NotADivisor`].
    pub fn new(pool: PageSize, kernel: PageSize) -> Result<PageGranularity, ConvertError> {
        if !pool.get().is_multiple_of(kernel.get()) {
            return Err(ConvertError::NotADivisor { kernel, pool });
        }
        Ok(PageGranularity { pool, kernel })
    }

    /// Tokens of a pool page.
    #[must_use]
    pub const fn pool_page_size(&self) -> PageSize {
        self.pool
    }

    /// Tokens of a kernel page.
    #[must_use]
    pub const fn kernel_page_size(&self) -> PageSize {
        self.kernel
    }

    /// Kernel pages of one pool page, at least 1.
    #[must_use]
    pub const fn ratio(&self) -> u32 {
        self.pool.get() / self.kernel.get()
    }

    /// The kernel page that is part `part` of a pool page, `0..ratio`.
    ///
    /// # Errors
    /// [`ConvertError::PartOutOfRange`], [`ConvertError::PageIdOverflow`].
    pub fn kernel_page(&self, page: PageId, part: u32) -> Result<PageId, ConvertError> {
        let ratio = self.ratio();
        if part >= ratio {
            return Err(ConvertError::PartOutOfRange { part, ratio });
        }
        let id = u64::from(page.raw()) * u64::from(ratio) + u64::from(part);
        let id = u32::try_from(id).ok().and_then(PageId::new);
        id.ok_or(ConvertError::PageIdOverflow { page, ratio })
    }

    /// The pool page of a kernel page, and which part of it that is.
    #[must_use]
    pub fn pool_page(&self, kernel_page: PageId) -> (PageId, u32) {
        let ratio = self.ratio();
        let page = PageId::new(kernel_page.raw() / ratio).expect("a quotient of an id is not above it");
        (page, kernel_page.raw() % ratio)
    }

    /// Converts tables of pool pages to tables of kernel pages. Kernel pages behind the last token are left out.
    ///
    /// # Errors
    /// [`ConvertError`], one variant for each rule that the arrays or ids break; `out` is empty then.
    pub fn to_kernel(&self, tables: CsrRef<'_>, out: &mut CsrTables) -> Result<(), ConvertError> {
        convert(tables, self.pool, self.kernel, out, |row, pages, len, out| {
            let mut left = self.kernel.pages_for(len);
            for page in pages {
                let page = page_id(row, *page)?;
                let parts = left.min(self.ratio() as usize);
                left -= parts;
                for part in (0..self.ratio()).take(parts) {
                    out.push(self.kernel_page(page, part)?.as_i32());
                }
            }
            Ok(())
        })
    }

    /// Converts tables of kernel pages to tables of pool pages: the inverse of [`PageGranularity::to_kernel`].
    ///
    /// # Errors
    /// As [`PageGranularity::to_kernel`], and [`ConvertError::NotAligned`] for kernel pages that are not the parts of
    /// a pool page in order; `out` is empty then.
    pub fn to_pool(&self, tables: CsrRef<'_>, out: &mut CsrTables) -> Result<(), ConvertError> {
        convert(tables, self.kernel, self.pool, out, |row, pages, _, out| {
            for parts in pages.chunks(self.ratio() as usize) {
                let (page, _) = self.pool_page(page_id(row, parts[0])?);
                for (part, got) in (0..).zip(parts) {
                    let (got, expected) = (page_id(row, *got)?, self.kernel_page(page, part)?);
                    if got != expected {
                        return Err(ConvertError::NotAligned { row, got, expected });
                    }
                }
                out.push(page.as_i32());
            }
            Ok(())
        })
    }
}

/// Checks the arrays row by row and fills `out`; `push_pages` gets a row's index, page ids and tokens.
fn convert(
    tables: CsrRef<'_>,
    from: PageSize,
    to: PageSize,
    out: &mut CsrTables,
    push_pages: impl Fn(usize, &[i32], usize, &mut Vec<i32>) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    out.clear();
    let result = check_ends(tables).and_then(|()| {
        out.kv_indptr.push(0);
        for (row, ends) in tables.kv_indptr.windows(2).enumerate() {
            let pages = row_pages(tables, row, ends[0], ends[1])?;
            let len = row_len(row, pages.len(), tables.kv_last_page_len[row], from)?;
            push_pages(row, pages, len, &mut out.kv_indices)?;
            let end = i32::try_from(out.kv_indices.len()).map_err(|_| ConvertError::TooManyEntries { row })?;
            out.kv_indptr.push(end);
            out.kv_last_page_len.push(to.last_page_len(len).cast_signed());
        }
        Ok(())
    });
    if result.is_err() {
        out.clear();
    }
    result
}

fn check_ends(tables: CsrRef<'_>) -> Result<(), ConvertError> {
    let CsrRef { kv_indptr, kv_indices, kv_last_page_len } = tables;
    let (indptr, rows) = (kv_indptr.len(), kv_last_page_len.len());
    let (Some(first), Some(last), true) = (kv_indptr.first(), kv_indptr.last(), indptr == rows + 1) else {
        return Err(ConvertError::RowCount { indptr, rows });
    };
    if *first != 0 {
        return Err(ConvertError::IndptrStart { first: *first });
    }
    if usize::try_from(*last) != Ok(kv_indices.len()) {
        return Err(ConvertError::IndptrEnd { last: *last, num_indices: kv_indices.len() });
    }
    Ok(())
}

fn row_pages(tables: CsrRef<'_>, row: usize, start: i32, end: i32) -> Result<&[i32], ConvertError> {
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let pages = range.and_then(|(start, end)| tables.kv_indices.get(start..end));
    pages.ok_or(ConvertError::IndptrOrder { row, start, end, num_indices: tables.kv_indices.len() })
}

/// Tokens of a row of `pages` pages.
fn row_len(row: usize, pages: usize, got: i32, page_size: PageSize) -> Result<usize, ConvertError> {
    let error = ConvertError::LastPageLen { row, got, pages, page_size };
    let last = u32::try_from(got).ok().filter(|last| *last <= page_size.get());
    match (pages.checked_sub(1), last) {
        (None, Some(0)) => Ok(0),
        (Some(full), Some(last @ 1..)) => Ok(full * page_size.get() as usize + last as usize),
        _ => Err(error),
    }
}

fn page_id(row: usize, page: i32) -> Result<PageId, ConvertError> {
    PageId::from_i32(page).ok_or(ConvertError::NegativePage { row, page })
}
