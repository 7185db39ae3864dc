// Copying rows of K and V into a stage: K's tile, then V's at C::kVAt; `C` has layouts and copies, see the kernels' Config.
#pragma once

#include "cp_async.cuh"
#include "tile.cuh"

// The share of a row that lane `lane` of its C::kLanesPerRow has; zeros where the row is not valid.
template <class C>
__device__ __forceinline__ void copy_row(uint32_t stage, int row, const char* k, const char* v, int lane, bool valid) {
  k += lane * 16, v += lane * 16;
#pragma unroll
  for (int i = 0; i < C::kKCopies; ++i) {
    cp_async16_or_zero(stage + C::KLayout::at(row, lane + i * C::kLanesPerRow), k + i * C::kLanesPerRow * 16, valid);
  }
#pragma unroll
  for (int i = 0; i < C::kVCopies; ++i) {
    cp_async16_or_zero(stage + C::kVAt + C::VLayout::at(row, lane + i * C::kLanesPerRow), v + i * C::kLanesPerRow * 16, valid);
  }
}
