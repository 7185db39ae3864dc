//! The planted faults.

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// One thing that is wrong with a backend.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Fault { $($(#[$doc])* $name),+ }

        impl Fault {
            /// Every fault.
            pub(crate) const ALL: &[Self] = &[$(Self::$name),+];
        }
    };
}

faults! {
    // Which keys are seen.
    CausalSeesOneMore,
    DropsLastKey,
    CausalAlignedTopLeft,
    WindowOneWider,
    WindowOneNarrower,
    WindowIgnoredInDecode,
    MaskReplacesCausality,
    MaskBitsReversed,
    KeysBeyond512Dropped,
    // Scores.
    ScaleFromWidth,
    ScalesSwapped,
    KScaleLost,
    CapAfterAlibi,
    AlibiWithoutQueryPosition,
    GroupsInterleaved,
    GroupOfFiveWrong,
    HeadsBeyond512Wrap,
    RequestsBeyond65535Skipped,
    // Softmax and its denominator.
    SinkCountedTwice,
    SinkLostInEmptyRow,
    LseInBase2,
    LseOfEmptyRowPlusInf,
    FiniteStandInForMinusInf,
    EmptyRowsUnwritten,
    ProbabilitiesRoundedToBf16,
    // Memory.
    ReadsTailOfLastPage,
    PagesTakenAsContiguous,
    PageIndexIn12Bits,
    StridesIgnored,
    WritesBehindTheOutput,
    PaddingRowsUnwritten,
    PaddingSlotTakenAsLast,
    AppendSkipsLastToken,
    AppendRoundsThroughBf16,
    // Determinism.
    BitsDependOnBatch,
    BitsDependOnRun,
    BitsDependOnThreads,
    NanOfNeighbourLeaks,
    // Contract.
    StalePlanAccepted,
    StaleCaptureAccepted,
    RefusalSpoilsPlan,
    LimitOffByOne,
    WritesBeforeChecks,
    AlwaysLayerZero,
    ReplayKeepsFirstBatch,
    ReplayTakesOtherPageSize,
    CapturedPaddingUnwritten,
    WritesRowsOfOthers,
    PanicsOnOddWidths,
    RefusedWithoutReason,
}

/// For each fault, the checks that notice it, each on its own.
pub(crate) const NOTICED_BY: &[(Fault, &[&str])] = &[
    (Fault::CausalSeesOneMore, &["oracle", "window probe", "future", "chunks"]),
    (Fault::DropsLastKey, &["oracle", "window probe", "chunks", "merge"]),
    (Fault::CausalAlignedTopLeft, &["oracle", "window probe", "chunks"]),
    (Fault::WindowOneWider, &["oracle", "window probe"]),
    (Fault::WindowOneNarrower, &["oracle", "window probe"]),
    (Fault::WindowIgnoredInDecode, &["oracle", "window probe", "chunks"]),
    (Fault::MaskReplacesCausality, &["oracle", "mask probe"]),
    (Fault::MaskBitsReversed, &["oracle", "mask probe"]),
    (Fault::KeysBeyond512Dropped, &["oracle", "long KV"]),
    (Fault::ScaleFromWidth, &["oracle", "heads and widths"]),
    (Fault::ScalesSwapped, &["oracle", "scales"]),
    (Fault::KScaleLost, &["oracle", "scales"]),
    (Fault::CapAfterAlibi, &["oracle"]),
    (Fault::AlibiWithoutQueryPosition, &["oracle", "chunks"]),
    (Fault::GroupsInterleaved, &["oracle", "heads and widths"]),
    (Fault::GroupOfFiveWrong, &["oracle", "heads and widths"]),
    (Fault::HeadsBeyond512Wrap, &["wide groups"]),
    (Fault::RequestsBeyond65535Skipped, &["many requests"]),
    (Fault::SinkCountedTwice, &["oracle", "page sizes"]),
    (Fault::SinkLostInEmptyRow, &["empty rows"]),
    (Fault::LseInBase2, &["oracle", "merge"]),
    (Fault::LseOfEmptyRowPlusInf, &["empty rows", "merge"]),
    (Fault::FiniteStandInForMinusInf, &["empty rows", "huge logits"]),
    (Fault::EmptyRowsUnwritten, &["empty rows", "merge"]),
    (Fault::ProbabilitiesRoundedToBf16, &["oracle"]),
    (Fault::ReadsTailOfLastPage, &["oracle", "poison"]),
    (Fault::PagesTakenAsContiguous, &["oracle", "pages", "page sizes"]),
    (Fault::PageIndexIn12Bits, &["many pages"]),
    (Fault::StridesIgnored, &["oracle", "strides"]),
    (Fault::WritesBehindTheOutput, &["oracle"]),
    (Fault::PaddingRowsUnwritten, &["oracle", "replay"]),
    (Fault::PaddingSlotTakenAsLast, &["append bytes"]),
    (Fault::AppendSkipsLastToken, &["oracle", "append bytes"]),
    (Fault::AppendRoundsThroughBf16, &["oracle", "append bytes"]),
    (Fault::BitsDependOnBatch, &["alone"]),
    (Fault::BitsDependOnRun, &["rerun"]),
    (Fault::BitsDependOnThreads, &["threads"]),
    (Fault::NanOfNeighbourLeaks, &["alone"]),
    (Fault::StalePlanAccepted, &["stale plans"]),
    (Fault::StaleCaptureAccepted, &["capture limits"]),
    (Fault::RefusalSpoilsPlan, &["refused batches"]),
    (Fault::LimitOffByOne, &["refused batches"]),
    (Fault::WritesBeforeChecks, &["refused calls", "stale plans", "hybrid"]),
    (Fault::AlwaysLayerZero, &["layers"]),
    (Fault::ReplayKeepsFirstBatch, &["replay"]),
    (Fault::ReplayTakesOtherPageSize, &["capture limits"]),
    (Fault::CapturedPaddingUnwritten, &["replay"]),
    (Fault::WritesRowsOfOthers, &["hybrid"]),
    (Fault::PanicsOnOddWidths, &["heads and widths"]),
    (Fault::RefusedWithoutReason, &["oracle", "heads and widths"]),
];
