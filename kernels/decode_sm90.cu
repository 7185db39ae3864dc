// Decoding on Hopper: a block has a multiprocessor to itself. See decode.cuh.
constexpr int kComputingWarps = 8;

#include "decode.cuh"
#include "decode_sm90.inst"
