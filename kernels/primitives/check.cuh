// The checked flavour: a broken promise of the host is recorded, then the kernel traps. Nothing without ATTN_CHECKED.
#pragma once

#include "../params.h"
#include "memory.cuh"

#ifdef ATTN_CHECKED
// A kernel whose warps have different numbers of registers cannot call functions: it defines this as __forceinline__.
#ifndef ATTN_CHECK_INLINE
#define ATTN_CHECK_INLINE __noinline__
#endif
// 0: nothing found; 1: a thread, the first that found anything, writes the record; 2: it is written.
__device__ int32_t check_state;

static __device__ ATTN_CHECK_INLINE void check_fail(DevicePtr record, int32_t kernel, int32_t rule, int32_t request, int64_t value) {
  CheckRecord* r = ptr<CheckRecord>(record);
  if (r != nullptr && atomicCAS(&check_state, 0, 1) == 0) {
    r->rule = rule;
    r->block = static_cast<int32_t>(blockIdx.x);
    r->request = request;
    r->value = value;
    __threadfence_system();
    *const_cast<volatile int32_t*>(&r->kernel) = kernel;
    __threadfence_system();
    atomicExch(&check_state, 2);
  }
  // A trap stops the whole device, so nobody traps while the record is being written (at most for a while).
  for (int i = 0; r != nullptr && i < (1 << 20) && atomicAdd(&check_state, 0) != 2; ++i) {
  }
  asm volatile("trap;");
}
#define ATTN_CHECK(ok, record, kernel, rule, request, value)                   \
  do {                                                                          \
    if (!(ok)) check_fail((record), (kernel), (rule), (request), (value));      \
  } while (0)
#else
#define ATTN_CHECK(ok, record, kernel, rule, request, value) \
  do {                                                        \
  } while (0)
#endif
