// Copies of boxes of a strided tensor to shared memory, which the device makes by itself; PTX cp.async.bulk.tensor, sm_90.
//
// A box is written as a packed array, 128 bytes a row, swizzled by 128 bytes (see wgmma.cuh). Where its coordinates lie outside of
// the tensor it is zeros, for which nothing is read. Products see it without a fence.
#pragma once

#include "../params.h"
#include "memory.cuh"

__device__ __forceinline__ void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What this thread knows to be written to global memory is seen by the boxes that it copies from here on.
__device__ __forceinline__ void publish_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Starts copying a box; its bytes count towards the barrier's phase. `at`: the box's first coordinates, the innermost first.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap* map, int at0, int at1, int at2, int at3, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap* map, int at0, int at1, int at2, int at3, int at4, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4), "r"(shared_address(barrier))
      : "memory");
}

// Starts copying a box to the L2 cache.
__device__ __forceinline__ void fetch_box(const TensorMap* map, int at0, int at1, int at2, int at3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(at3) : "memory");
}

// Starts copying a box from shared memory, which other proxies' writes must have been published to (wgmma.cuh).
__device__ __forceinline__ void store_box(const TensorMap* map, int at0, int at1, int at2, int at3, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(at0), "r"(at1), "r"(at2),
               "r"(at3), "r"(shared)
               : "memory");
}

// Waits until this thread's stores have read shared memory, and until they are done.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}
