// Matrix products of a warpgroup (four warps, 64 rows) on Hopper; PTX wgmma.mma_async m64nNk16, sm_90a only.
//
// Operands in shared memory are made of blocks of 8 rows of 64 elements (1024 bytes at multiples of 1024), a chunk of 16 bytes of
// row r at chunk c ^ (r & 7). Blocks below and beside one another are at any fixed distance: q has panels of 64 elements,
// [panel][row][64], K and V groups of 8 rows, [group][panel][8][64]. The same image serves as rows of K (contraction along the row)
// and as V (contraction along the tokens, transposed by the hardware).
//
// Accumulators: lane l of warp w has rows 16 w + l / 4 (registers 4 i, 4 i + 1) and that + 8 (4 i + 2, 4 i + 3), columns
// 8 i + 2 (l % 4) and the next. Packed pairs of them are the first operand of the next product, in order.
//
// Products are asynchronous. Between fence and wait nothing else touches their registers: `hold` keeps the compiler from it.
#pragma once

#include "memory.cuh"
#include "num.cuh"

static constexpr int kPanelRow = 128, kBlock = 1024;  // bytes

// Bytes from an image's start to chunk `chunk` of `row`, in an image of groups of `panels` blocks.
__device__ __forceinline__ int group_at(int panels, int row, int chunk) {
  return (row / 8 * panels + chunk / 8) * kBlock + row % 8 * kPanelRow + ((chunk ^ row) % 8) * 16;
}

// Where an operand is, as products take it: the address in units of 16 bytes, the distance to the block beside the first one (which
// only a transposed operand uses), the distance to the one below it, and the swizzle of 128 bytes.
struct Operand {
  uint32_t low, high;

  __device__ __forceinline__ Operand(uint32_t address, int below, int beside) : low(address >> 4 | beside >> 4 << 16), high(below >> 4 | 1 << 30) {}

  // The operand `bytes` further on. One addition: the parts do not overflow into one another.
  __device__ __forceinline__ uint64_t at(int bytes) const { return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4)); }
};

template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// What this thread knows to be written to shared memory (by copies too) is seen by the products that it starts from here on.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Writes four 8 x 8 matrices of 16-bit elements as accumulators have them, packed; each lane says where a row of 16 bytes begins:
// lanes 0 to 7 those of the first matrix, and so on.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Registers a thread, for a whole warpgroup; what one gives up another may take.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Names of 8 registers in the text of an instruction, and the registers.
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define REGISTERS(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS32(d, i) REGISTERS(d, i), REGISTERS(d, i + 8), REGISTERS(d, i + 16), REGISTERS(d, i + 24)
#define NAMES32_0 NAMES_0 ", " NAMES_8 ", " NAMES_16 ", " NAMES_24
#define NAMES32_32 NAMES_32 ", " NAMES_40 ", " NAMES_48 ", " NAMES_56
#define NAMES128 NAMES32_0 ", " NAMES32_32 ", " NAMES_64 ", " NAMES_72 ", " NAMES_80 ", " NAMES_88 ", " NAMES_96 ", " NAMES_104 ", " NAMES_112 ", " NAMES_120
// Variadic, since the lists of names and registers have commas: ... is the list of accumulators.
#define SCORES_TEXT(n, ty, names, a, b, add) \
  "{.reg .pred p; setp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." ty "." ty " {" names "}, " a ", " b ", p, 1, 1, 0, 0;}"
#define VALUES_TEXT(n, ty, names, a, b) \
  "{wgmma.mma_async.sync.aligned.m64n" n "k16.f32." ty "." ty " {" names "}, {" a "}, " b ", 1, 1, 1, 1;}"

// d (+)= a b^T: rows of q by rows of K, 16 dims; starts from zero where `add` is 0.
#define SCORES(n, count, names, a_name, b_name, add_name, ...)                                                                     \
  template <class T>                                                                                                               \
  __device__ __forceinline__ void scores_product(float(&d)[count], uint64_t a, uint64_t b, int add) {                              \
    if constexpr (Same<T, Bf16>::value) {                                                                                          \
      asm volatile(SCORES_TEXT(n, "bf16", names, a_name, b_name, add_name) : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));             \
    } else {                                                                                                                       \
      asm volatile(SCORES_TEXT(n, "f16", names, a_name, b_name, add_name) : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));              \
    }                                                                                                                              \
  }
SCORES("64", 32, NAMES32_0, "%32", "%33", "%34", REGISTERS32(d, 0))
SCORES("80", 40, NAMES32_0 ", " NAMES_32, "%40", "%41", "%42", REGISTERS32(d, 0), REGISTERS(d, 32))
SCORES("112", 56, NAMES32_0 ", " NAMES_32 ", " NAMES_40 ", " NAMES_48, "%56", "%57", "%58", REGISTERS32(d, 0), REGISTERS(d, 32), REGISTERS(d, 40), REGISTERS(d, 48))
SCORES("128", 64, NAMES32_0 ", " NAMES32_32, "%64", "%65", "%66", REGISTERS32(d, 0), REGISTERS32(d, 32))

// d += a b: weights in registers by rows of V, 16 tokens.
#define VALUES(n, count, names, a_names, b_name, ...)                                                                              \
  template <class T>                                                                                                               \
  __device__ __forceinline__ void values_product(float(&d)[count], const uint32_t(&a)[4], uint64_t b) {                            \
    if constexpr (Same<T, Bf16>::value) {                                                                                          \
      asm volatile(VALUES_TEXT(n, "bf16", names, a_names, b_name) : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } else {                                                                                                                       \
      asm volatile(VALUES_TEXT(n, "f16", names, a_names, b_name) : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));  \
    }                                                                                                                              \
  }
VALUES("64", 32, NAMES32_0, "%32, %33, %34, %35", "%36", REGISTERS32(d, 0))
VALUES("128", 64, NAMES32_0 ", " NAMES32_32, "%64, %65, %66, %67", "%68", REGISTERS32(d, 0), REGISTERS32(d, 32))
VALUES("256", 128, NAMES128, "%128, %129, %130, %131", "%132", REGISTERS32(d, 0), REGISTERS32(d, 32), REGISTERS32(d, 64), REGISTERS32(d, 96))
#undef SCORES
#undef VALUES
#undef REGISTERS
#undef REGISTERS32
