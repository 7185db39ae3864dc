//! Conventions that hold everywhere in the workspace; each is stated here and nowhere else.
//!
//! **Shapes.** The tokens of a batch are packed: q is `[num_rows, num_qo_heads, head_dim_qk]`, out is
//! `[num_rows, num_qo_heads, head_dim_vo]`. `qo_indptr` counts tokens. Rows from `qo_indptr[last]` on are padding
//! rows: their output is written as zeros and their LSE as −inf.
//!
//! **KV.** `kv_indptr` counts *pages*, `kv_indices` are page ids, `kv_last_page_len` is in `1..=page_size` (0 only
//! where `kv_len` is 0). `kv_len` counts the tokens appended in this step too. `slot = page × page_size + offset`;
//! the padding slot is a sentinel and never an index. Stored value × scale = real value.
//!
//! **Geometry.** Query `r` of a request with `n` queries and `kv_len` keys sits at position
//! `p = kv_len − n + r` (negative where `n > kv_len`). Causal lets it see the keys `0..=p`. `window_left = w` lets
//! it see the keys `p − w ..`: itself and `w` tokens before. A custom mask is a bit for each (query, key).
//! Causal, window and custom mask all apply where given.
//!
//! **Score.** `s = q·k × sm_scale`; then `c·tanh(s/c)` with a softcap `c`; then ALiBi `+ slope × (key position − p)`;
//! then the masks. `sm_scale` is explicit, never derived from a width.
//!
//! **Output.** `O = Σ exp(s)·v / Σ exp(s)`, `LSE = ln Σ exp(s)`: natural logarithm, f32, a type of its own
//! ([`Lse`](crate::Lse)). A sink adds `exp(sink)` to the denominator (so to the LSE) once, whatever the splits.
//! A row with no visible key gives `O = 0` and `LSE = −inf`, or `LSE = sink` where there is one.
//! Merging with an empty state returns the other bit for bit.
//!
//! **Determinism.** A request's result does not depend on its neighbours in the batch, on padding rows, on graph
//! replay or on the number of workers, bit for bit: chunk boundaries are a function of the request alone and
//! partial states merge in ascending order.
