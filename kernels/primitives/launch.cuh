// Programmatic dependent launches; PTX griddepcontrol, sm_90 and newer. Without the host's attribute both are no-ops.
#pragma once

// Whether a kernel may start before the one that it waits for has ended.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// The next kernel of the stream may start: all that it needs before its own wait is done.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the previous kernel of the stream and its writes.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
