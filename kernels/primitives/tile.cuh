// How rows of a tile lie in shared memory, so that 16-byte copies in and ldmatrix out are free of bank conflicts.
//
// Swizzled, for rows of a multiple of 128 bytes: chunk c (16 bytes) of row r is at chunk c ^ (r & 7) of its 128 bytes. Copies
// then fill whole 128-byte lines, which padded rows would straddle (measured: 5 % of decode time). Else padded by 16 bytes to an
// odd number of chunks, which takes fewer registers. Tiles start at multiples of 128 bytes.
#pragma once

#include <stdint.h>

template <int kRowBytes, bool kMaySwizzle = true>
struct RowLayout {
  static constexpr bool kIsSwizzled = kMaySwizzle && kRowBytes % 128 == 0;
  static constexpr int kPitch = kIsSwizzled ? kRowBytes : kRowBytes + 16;

  // Bytes from the tile's start to a chunk of a row.
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * kPitch + (kIsSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }

  // The address `bytes` (a multiple of 32, known to the compiler) further on in the row than at(row, 0) or at(row, 1).
  static __device__ __forceinline__ uint32_t further(uint32_t address, int bytes) {
    return kIsSwizzled ? (address ^ (bytes & 96)) + (bytes & ~127) : address + bytes;
  }
};
