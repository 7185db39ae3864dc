// Barriers in shared memory by which a warp hands something to another one; PTX mbarrier.
//
// The giver writes and arrives, the taker waits and reads: shared memory written before the one is seen after the other.
// Phases count completed handovers; a taker waits for the end of a phase by its parity, so it may be one phase late, no more.
#pragma once

#include <stdint.h>

#include "memory.cuh"

// Before the block's first __syncthreads, by one thread: each phase ends when a whole warp has arrived.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(shared_address(barrier)) : "memory");
}

// By all lanes of a warp, without waiting.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(barrier)) : "memory");
}

// Waits for the end of the phase of this parity: the first phase is 0, the second 1, the third 0.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  uint32_t has_ended;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(has_ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (has_ended == 0);
}
