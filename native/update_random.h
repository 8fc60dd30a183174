// Stochastic rounding of a row: random words by position (ops/random/definition.py), eight counters of Philox4x32-10 side by side.
#pragma once

#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {

// The words of columns 4 * first .. 4 * (first + count) - 1 of a row, into `words` (4 * count of them; written up to a
// multiple of 32). Counter (row low, row high, column / 4, stream), key (key0, key1).
static void row_words(uint32_t key0, uint32_t key1, uint64_t row, uint32_t first, int64_t count, uint32_t stream, uint32_t* words) {
  constexpr uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
  for (int64_t q = 0; q < count; q += 8) {
    uint32_t k0 = key0, k1 = key1;
#if defined(__AVX2__)
    auto multiply = [](__m256i a, uint32_t constant, __m256i* high) {
      __m256i m = _mm256_set1_epi32((int)constant);
      __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
      *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
      return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    };
    __m256i c0 = _mm256_set1_epi32((int)(uint32_t)row), c1 = _mm256_set1_epi32((int)(uint32_t)(row >> 32));
    __m256i c2 = _mm256_add_epi32(_mm256_set1_epi32((int)(first + (uint32_t)q)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i c3 = _mm256_set1_epi32((int)stream);
    for (int round = 0; round < 10; round++) {
      __m256i high0, high1, low0 = multiply(c0, m0, &high0), low1 = multiply(c2, m1, &high1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32((int)k0));
      c1 = low1;
      c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32((int)k1));
      c3 = low0;
      k0 += w0;
      k1 += w1;
    }
    // Word j of counter i is element 4 i + j: a transpose of 4 x 8.
    __m256i t0 = _mm256_unpacklo_epi32(c0, c1), t1 = _mm256_unpackhi_epi32(c0, c1);
    __m256i t2 = _mm256_unpacklo_epi32(c2, c3), t3 = _mm256_unpackhi_epi32(c2, c3);
    __m256i u0 = _mm256_unpacklo_epi64(t0, t2), u1 = _mm256_unpackhi_epi64(t0, t2);
    __m256i u2 = _mm256_unpacklo_epi64(t1, t3), u3 = _mm256_unpackhi_epi64(t1, t3);
    __m256i* out = (__m256i*)(words + 4 * q);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(u0, u1, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(u2, u3, 0x20));
    _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(u0, u1, 0x31));
    _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(u2, u3, 0x31));
#else
    uint32_t c[4][8];
    for (int i = 0; i < 8; i++) {
      c[0][i] = (uint32_t)row;
      c[1][i] = (uint32_t)(row >> 32);
      c[2][i] = first + (uint32_t)q + (uint32_t)i;
      c[3][i] = stream;
    }
    for (int round = 0; round < 10; round++) {
      for (int i = 0; i < 8; i++) {
        uint64_t p0 = (uint64_t)c[0][i] * m0, p1 = (uint64_t)c[2][i] * m1;
        c[0][i] = (uint32_t)(p1 >> 32) ^ c[1][i] ^ k0;
        c[1][i] = (uint32_t)p1;
        c[2][i] = (uint32_t)(p0 >> 32) ^ c[3][i] ^ k1;
        c[3][i] = (uint32_t)p0;
      }
      k0 += w0;
      k1 += w1;
    }
    for (int i = 0; i < 8; i++)
      for (int j = 0; j < 4; j++) words[4 * (q + i) + j] = c[j][i];
#endif
  }
}

TR_INLINE vf size_of(vf x) { return as_float(as_bits(x) & 0x7fffffffu); }

// A neighbour of x in the narrow type, as fp32 (exact in the narrow type, or too large for it). The word's low bits select the
// one below or above. Infinities and NaNs are unchanged.
TR_INLINE vf round_by(vf x, vu word, bf16) {
  vf kept = as_float((as_bits(x) + (word & 0xffffu)) & 0xffff0000u);
  return select((vi)(as_bits(x) & 0x7fffffffu) >= 0x7f800000, x, kept);
}
TR_INLINE vf round_by(vf x, vu word, fp16) {
  vu noise = word & 0x1fffu;
  vf normal = as_float((as_bits(x) + noise) & 0xffffe000u);
  vf steps = size_of(x) * splat(0x1p24f) + __builtin_convertvector((vi)noise, vf) * splat(0x1p-13f);
  // Below 2^-14 there are at most 1024 steps, so cutting to an integer is the floor.
  vi is_small = (vi)(as_bits(x) & 0x7fffffffu) < 0x38800000;
  vf whole = __builtin_convertvector(__builtin_convertvector(select(is_small, steps, vf{}), vi), vf) * splat(0x1p-24f);
  vf small = as_float(as_bits(whole) | (as_bits(x) & 0x80000000u));
  vf rounded = select(is_small, small, normal);
  return select((vi)(as_bits(x) & 0x7fffffffu) >= 0x7f800000, x, rounded);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
