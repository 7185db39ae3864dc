// Decoding on any GPU from compute capability 8.0 on: blocks that fit into 99 KB of shared memory. See decode.cuh.
constexpr int kComputingWarps = 4;

#include "decode.cuh"
#include "decode.inst"
