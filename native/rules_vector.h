// Vector functions of the row rules beyond rows.h: square roots, tests, and row sums by aligned blocks of eight columns.
#pragma once

#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {

TR_INLINE float root(float x) { return __builtin_sqrtf(x); }

TR_INLINE vf root(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  vf y = x;
  for (int i = 0; i < kLanes; i++) y[i] = __builtin_sqrtf(x[i]);
  return y;
#endif
}

// Returns true if any lane is set.
TR_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t all = 0;
  for (int i = 0; i < kLanes; i++) all |= mask[i];
  return all != 0;
#endif
}

// Lanes that hold an infinity or a NaN.
TR_INLINE vi not_finite(vf x) { return (vi)(as_bits(x) & 0x7fffffffu) >= 0x7f800000; }

// The sum of one block: ((x0+x1)+(x2+x3))+((x4+x5)+(x6+x7)).
TR_INLINE float block_sum(const float* x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

// The sums of `blocks` consecutive blocks from x on, into `out`. `out` may be written, and x read, up to a multiple of 4
// blocks. Example: eight ones -> 8.
TR_INLINE void block_sums(const float* x, int64_t blocks, float* out) {
#if defined(__AVX2__)
  // Horizontal adds of four blocks at once give each block's two halves; their sum is the block's.
  for (int64_t b = 0; b < blocks; b += 4) {
    const float* at = x + 8 * b;
    __m256 ab = _mm256_hadd_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8));
    __m256 cd = _mm256_hadd_ps(_mm256_loadu_ps(at + 16), _mm256_loadu_ps(at + 24));
    __m256 halves = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out + b, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
#else
  for (int64_t b = 0; b < blocks; b++) out[b] = block_sum(x + 8 * b);
#endif
}

// Blocks added in ascending order.
TR_INLINE float add_blocks(const float* sums, int64_t blocks) {
  float total = 0;
  for (int64_t b = 0; b < blocks; b++) total += sums[b];
  return total;
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
