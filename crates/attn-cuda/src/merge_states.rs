//! Owns [`StateMerge`]: merging partial states of the same rows over disjoint KV, two or many, on the device.
//!
//! The backend merges what it split by itself; this is for callers who attend to parts of the KV in calls of their own: a
//! shared prefix once for many requests, KV on several devices, cascades.

use kvpool::Dtype;

use crate::device::{CudaLse, CudaLseMut, CudaTensor, CudaTensorMut, DeviceError, Kernel, LaunchShape};
use crate::entry::{Entry, merge_states_entry};
use crate::launches::launch_merge;
use crate::params::MergeStatesParams;
use crate::space::CudaDevice;

/// Elements that a thread takes: head widths are multiples of it.
const WIDTH_UNIT: usize = 8;
/// Widest head.
const MAX_WIDTH: usize = 2048;

/// Partial states to read: outputs `[rows, num_heads, head_dim]`, packed, and their LSEs f32 `[rows, num_heads]`.
#[derive(Clone, Copy, Debug)]
pub struct States<'a> {
    /// Outputs.
    pub out: CudaTensor<'a>,
    /// LSEs; −∞: the state is empty, and its output is not looked at.
    pub lse: CudaLse<'a>,
}

/// States to write, as [`States`].
#[derive(Debug)]
pub struct StatesMut<'a> {
    /// Outputs.
    pub out: CudaTensorMut<'a>,
    /// LSEs, where they are wanted.
    pub lse: Option<CudaLseMut<'a>>,
}

/// States that cannot be merged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// A tensor has another shape than the result needs.
    #[error("{what} has the shape {got:?}, expected {expected:?}")]
    Shape {
        /// The tensor.
        what: &'static str,
        /// Expected `[rows, heads, dim]`.
        expected: [usize; 3],
        /// Its shape.
        got: [usize; 3],
    },
    /// A tensor has another dtype than this merge was made for.
    #[error("{what} is {got}, this merge is for {expected}")]
    Dtype {
        /// The tensor.
        what: &'static str,
        /// Expected.
        expected: Dtype,
        /// Its dtype.
        got: Dtype,
    },
    /// A tensor has gaps.
    #[error("{what} has gaps between rows or heads, it must be packed")]
    Gaps {
        /// The tensor.
        what: &'static str,
    },
    /// LSEs have another length than rows × heads.
    #[error("{what} has {got} values, expected {expected}")]
    LseLen {
        /// Whose.
        what: &'static str,
        /// Rows × heads.
        expected: usize,
        /// Its length.
        got: usize,
    },
    /// The width is none that the kernel takes.
    #[error("head_dim {got} is not a multiple of {WIDTH_UNIT} from {WIDTH_UNIT} to {MAX_WIDTH}")]
    HeadDim {
        /// The width.
        got: usize,
    },
    /// No state at all, or more than the kernel counts.
    #[error("{got} states, expected 1 to 2^31 - 1")]
    NumStates {
        /// How many.
        got: usize,
    },
    /// More rows than the kernel counts.
    #[error("{got} rows or heads, at most 2^31 - 1")]
    TooMany {
        /// How many.
        got: usize,
    },
    /// The device, or a tensor's place in its memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Merges partial states of one dtype on one device, in the order of its stream.
#[derive(Debug)]
pub struct StateMerge {
    device: CudaDevice,
    dtype: Dtype,
    entry: &'static Entry,
    kernel: Kernel<MergeStatesParams>,
}

impl StateMerge {
    /// Loads the kernel of a dtype.
    ///
    /// # Errors
    /// [`DeviceError::NoImage`], [`DeviceError::Load`], [`DeviceError::Driver`].
    pub fn new(device: &CudaDevice, dtype: Dtype) -> Result<Self, DeviceError> {
        let entry = merge_states_entry(dtype);
        let kernel = Kernel::find(&device.device, entry.module, entry.name, entry.shared_bytes)?;
        Ok(Self { device: device.clone(), dtype, entry, kernel })
    }

    /// Merges two states. Where either is empty the other is the result, bit for bit; where both are, zeros and −∞.
    ///
    /// # Errors
    /// [`MergeError`]; nothing is written then.
    pub fn two(&self, first: States<'_>, second: States<'_>, into: &mut StatesMut<'_>) -> Result<(), MergeError> {
        let shape = into.out.shape();
        self.check("the first state", &first, shape)?;
        self.check("the second state", &second, shape)?;
        let params = self.params(into, 2)?;
        self.launch(&MergeStatesParams {
            out_states: first.out.address(),
            lse_states: first.lse.address(),
            out_second: second.out.address(),
            lse_second: second.lse.address(),
            ..params
        })
    }

    /// Merges a state into another one, in place.
    ///
    /// # Errors
    /// [`MergeError`]; nothing is written then.
    pub fn accumulate(&self, into: &mut StatesMut<'_>, second: States<'_>) -> Result<(), MergeError> {
        let shape = into.out.shape();
        self.check("the second state", &second, shape)?;
        let params = self.params(into, 2)?;
        if params.lse == 0 {
            return Err(MergeError::LseLen { what: "the LSE of the state", expected: shape[0] * shape[1], got: 0 });
        }
        self.launch(&MergeStatesParams {
            out_states: params.out,
            lse_states: params.lse,
            out_second: second.out.address(),
            lse_second: second.lse.address(),
            ..params
        })
    }

    /// Merges `num_states` states that lie one after the other: `states` has `num_states` × the rows of the result.
    ///
    /// # Errors
    /// [`MergeError`]; nothing is written then.
    pub fn stacked(&self, states: States<'_>, num_states: usize, into: &mut StatesMut<'_>) -> Result<(), MergeError> {
        let [rows, heads, dim] = into.out.shape();
        let all_rows = rows.checked_mul(num_states).ok_or(MergeError::NumStates { got: num_states })?;
        self.check("the states", &states, [all_rows, heads, dim])?;
        let params = self.params(into, num_states)?;
        self.launch(&MergeStatesParams { out_states: states.out.address(), lse_states: states.lse.address(), ..params })
    }

    fn check(&self, what: &'static str, states: &States<'_>, expected: [usize; 3]) -> Result<(), MergeError> {
        let out = &states.out;
        self.check_tensor(what, out.shape(), expected, out.dtype(), [out.row_stride(), out.head_stride()])?;
        out.require_usable(what, &self.device.device)?;
        states.lse.require_usable("the LSEs of a state", &self.device.device)?;
        check_lse("the LSEs of a state", states.lse.len(), expected)
    }

    fn check_tensor(
        &self,
        what: &'static str,
        got: [usize; 3],
        expected: [usize; 3],
        dtype: Dtype,
        [row_stride, head_stride]: [usize; 2],
    ) -> Result<(), MergeError> {
        if dtype != self.dtype {
            return Err(MergeError::Dtype { what, expected: self.dtype, got: dtype });
        }
        if got != expected {
            return Err(MergeError::Shape { what, expected, got });
        }
        let [rows, heads, dim] = got;
        let is_packed = (rows <= 1 || row_stride == heads * dim) && (heads <= 1 || head_stride == dim);
        if is_packed { Ok(()) } else { Err(MergeError::Gaps { what }) }
    }

    /// Checks the result, and fills in what it says.
    fn params(&self, into: &StatesMut<'_>, num_states: usize) -> Result<MergeStatesParams, MergeError> {
        let (out, shape) = (&into.out, into.out.shape());
        let [rows, heads, dim] = shape;
        self.check_tensor("the result", shape, shape, out.dtype(), [out.row_stride(), out.head_stride()])?;
        out.require_usable("the result", &self.device.device)?;
        if let Some(lse) = &into.lse {
            lse.require_usable("the LSE of the result", &self.device.device)?;
            check_lse("the LSE of the result", lse.len(), shape)?;
        }
        if dim == 0 || dim > MAX_WIDTH || dim % WIDTH_UNIT != 0 {
            return Err(MergeError::HeadDim { got: dim });
        }
        let count = |got: usize| i32::try_from(got).map_err(|_| MergeError::TooMany { got });
        let states = i32::try_from(num_states).ok().filter(|&n| n > 0);
        Ok(MergeStatesParams {
            out: out.address(),
            lse: into.lse.as_ref().map_or(0, CudaLseMut::address),
            stride_state: i64::try_from(rows * heads * dim).map_err(|_| MergeError::TooMany { got: rows })?,
            num_states: states.ok_or(MergeError::NumStates { got: num_states })?,
            num_rows: count(rows)?,
            num_heads: count(heads)?,
            head_dim: count(dim)?,
            ..MergeStatesParams::default()
        })
    }

    fn launch(&self, params: &MergeStatesParams) -> Result<(), MergeError> {
        let rows_of_block = i64::from(self.entry.threads / (params.head_dim.unsigned_abs() / 8).max(1)).max(1);
        let needed = (i64::from(params.num_rows) * i64::from(params.num_heads) + rows_of_block - 1) / rows_of_block;
        let most = self.entry.blocks_per_sm * self.device.device.properties().num_sms;
        let shape = LaunchShape {
            grid: u32::try_from(needed).unwrap_or(u32::MAX).min(most),
            block: self.entry.threads,
            cluster: 1,
            shared_bytes: self.entry.shared_bytes,
            is_programmatic: self.kernel.image_arch() >= 90,
        };
        Ok(launch_merge(&self.kernel, &shape, params)?)
    }
}

fn check_lse(what: &'static str, got: usize, [rows, heads, _]: [usize; 3]) -> Result<(), MergeError> {
    let expected = rows * heads;
    if got == expected { Ok(()) } else { Err(MergeError::LseLen { what, expected, got }) }
}
