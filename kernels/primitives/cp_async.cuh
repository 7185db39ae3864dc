// Asynchronous copies from global to shared memory; PTX cp.async, cp.async.commit_group / wait_group.
// Copies complete group by group, in the order of a thread's commits.
#pragma once

#include <stdint.h>

__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Writes zeros, and reads nothing, where `valid` is false.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// 4 bytes, for tables.
__device__ __forceinline__ void cp_async4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
