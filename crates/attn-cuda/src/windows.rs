//! Windows as kernels take them: in 32 bits, in which a position less a window must not wrap.

use attn_metadata::{Batch, ModelSpec, PrepareError};

/// Positions and windows differ by at most this, so that their difference fits into 32 bits with its sign.
const MAX_DISTANCE: u64 = 1 << 31;

/// `window_left` of `kernels/params.h` for requests of at most `max_kv_len` tokens: -1 where no query is that far from the
/// first token.
pub(crate) fn kernel_window(window_left: Option<u32>, max_kv_len: u32) -> i32 {
    // A request's last query is at position kv_len - 1.
    let limit = |window: &u32| *window < max_kv_len;
    window_left.filter(limit).and_then(|window| i32::try_from(window).ok()).unwrap_or(-1)
}

/// Refuses a batch where a position less the window could wrap: a request with more query tokens than KV tokens has queries
/// before its first token, by as many tokens as it has queries at most. These and the longest window may be 2³¹ together.
///
/// # Errors
/// [`PrepareError::OverLimit`].
pub(crate) fn require_positions(model: &ModelSpec, batch: &Batch, max_kv_len: u32) -> Result<(), PrepareError> {
    let windows = model.groups().iter().map(|group| kernel_window(group.window_left, max_kv_len));
    require_distance(windows.max().unwrap_or(-1), batch.max_q_len())
}

fn require_distance(longest_window: i32, max_q_len: u32) -> Result<(), PrepareError> {
    let Ok(window) = u64::try_from(longest_window) else { return Ok(()) };
    // Windows are below 2³¹.
    let (got, limit) = (u64::from(max_q_len), MAX_DISTANCE - window);
    let what = "query tokens in one request, before a window that reaches back as far";
    if got > limit { Err(PrepareError::OverLimit { what, got, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_no_query_reaches_beyond_is_none() {
        assert_eq!(kernel_window(None, 4096), -1);
        assert_eq!(kernel_window(Some(0), 4096), 0);
        assert_eq!(kernel_window(Some(4095), 4096), 4095);
        for window in [4096, 1 << 30, i32::MAX.unsigned_abs(), u32::MAX] {
            assert_eq!(kernel_window(Some(window), 4096), -1, "{window}");
        }
        // Without a limit, requests are shorter than 2³¹ tokens.
        assert_eq!(kernel_window(Some(1 << 30), u32::MAX), 1 << 30);
        assert_eq!(kernel_window(Some(i32::MAX.unsigned_abs() + 1), u32::MAX), -1);
        assert_eq!(kernel_window(Some(u32::MAX), u32::MAX), -1);
    }

    #[test]
    fn no_position_less_a_window_that_is_let_through_wraps() {
        let most = i32::MAX.unsigned_abs();
        for window in [0, 1, 4095, 1 << 30, i32::MAX] {
            for q_len in [0, 1, 1 << 30, (1 << 30) + 1, most - 4095, most - 1, most] {
                // The first query of a request without KV.
                let first = -i64::from(q_len) - i64::from(window);
                let fits = require_distance(window, q_len).is_ok();
                assert_eq!(fits, first >= i64::from(i32::MIN), "window {window}, {q_len} query tokens");
            }
        }
        assert!(require_distance(-1, u32::MAX).is_ok());
        let error = require_distance(i32::MAX, 2).unwrap_err();
        assert!(matches!(error, PrepareError::OverLimit { got: 2, limit: 1, .. }), "{error}");
    }
}
