// The checked flavour: a broken promise of the host is recorded, then the kernel traps. Nothing without ATTN_CHECKED.
#pragma once

#include "../params.h"
#include "memory.cuh"

#ifdef ATTN_CHECKED
// Which thread may write the record: the first that finds anything.
__device__ int32_t check_taken;

static __device__ __noinline__ void check_fail(DevicePtr record, int32_t kernel, int32_t rule, int32_t request, int64_t value) {
  CheckRecord* r = ptr<CheckRecord>(record);
  if (r != nullptr && atomicExch(&check_taken, 1) == 0) {
    r->rule = rule;
    r->block = static_cast<int32_t>(blockIdx.x);
    r->request = request;
    r->value = value;
    __threadfence_system();
    *const_cast<volatile int32_t*>(&r->kernel) = kernel;
    __threadfence_system();
  }
  __trap();
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
