// Barriers in shared memory by which threads hand something to others; PTX mbarrier.
//
// The giver writes and arrives, the taker waits and reads: shared memory written before the one is seen after the other.
// Phases count completed handovers; a taker waits for the end of a phase by its parity, so it may be one phase late, no more.
#pragma once

#include <stdint.h>

#include "memory.cuh"

// Before the block's first __syncthreads, by one thread: each phase ends when `count` arrivals have come.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count = 32) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// One arrival of each thread that calls it, without waiting.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival; the phase ends after `bytes` of boxes (tensor_map.cuh) have been written besides.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// As barrier_arrive, but when all copies (cp_async) that the thread has started are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase of this parity has ended: the first phase is 0, the second 1, the third 0. Before the first phase has ended,
// the parity 1 counts as over.
__device__ __forceinline__ bool barrier_has_ended(uint64_t* barrier, int parity) {
  uint32_t has_ended;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(has_ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return has_ended != 0;
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  while (!barrier_has_ended(barrier, parity)) {
  }
}

// As barrier_wait, by a warp that should take no issue slots from others: it sleeps between looks.
__device__ __forceinline__ void barrier_wait_idly(uint64_t* barrier, int parity) {
  while (!barrier_has_ended(barrier, parity)) __nanosleep(40);
}

// Threads of some warps of a block meet; barrier 0 is __syncthreads.
__device__ __forceinline__ void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
