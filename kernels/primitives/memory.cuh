// Loads and stores with a cache policy or a width that the language does not state.
#pragma once

#include <stdint.h>

template <class T>
__device__ __forceinline__ T* ptr(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Read-only for the launch: tables, page ids; PTX ld.global.nc
__device__ __forceinline__ int load_table(const int32_t* p) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

__device__ __forceinline__ int4 load_table4(const void* p) {
  int4 x;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}

// Data that is used once, perhaps written in place by this kernel or just before it: not through the read-only path,
// does not displace other lines of L1; PTX ld.global.L1::no_allocate
__device__ __forceinline__ uint4 load_streamed(const void* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}

// Data that an earlier kernel of a programmatic chain wrote, perhaps while this one ran: from L2; PTX ld.global.cg
__device__ __forceinline__ float4 load_fresh4(const float* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p));
  return x;
}

// What another kernel counts while this one runs; what was written before it was counted is seen after this.
__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared4(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Stores of what is read again soon, while much else goes through the L2 cache: they ask to be evicted last; PTX createpolicy.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_kept(float4* to, float4 x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
               : "memory");
}
