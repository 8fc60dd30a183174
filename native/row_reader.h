// Reads the numbers of one row of a table, as vectors of fp32. For kernels compiled per instruction set (isa.h).
//
//   RowReader<E> row(address, column)
//   row.get(v)      columns [column + v * kLanes, column + (v + 1) * kLanes)
//   row.first(n)    the first n columns; lanes from n on are unspecified. Reads nothing beyond the last column
//
// E is float, bf16 or fp16, or codes<8>, codes<4>, codes<2> for quantized rows (tilerec/ops/quantized/definition.py):
//
//   bytes 0-1 scale, 2-3 bias (fp16), then the codes, 8 / bits to a byte, the first in the lowest bits
//   number = scale * code + bias, in fp32: one rounding of the product, one of the sum
//
// `column` is a multiple of 4, so that it begins a byte.
//
// Example, codes<4>: bytes {00 3c} {00 40} {31 02} (scale 1, bias 2): columns 3, 5, 4, 2.
#pragma once

#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {

template <int kBits>
struct codes {};

template <class E>
struct RowReader {
  static constexpr int kBits = 8 * (int)sizeof(E), kHeadBytes = 0;
  const E* at;
  TR_INLINE_MEMBER RowReader(const char* row, int64_t column) : at((const E*)row + column) {}
  TR_INLINE_MEMBER vf get(int v) const { return load(at + v * kLanes); }
  TR_INLINE_MEMBER vf first(int n) const { return load(at, n); }
};

// The fp16 scale and bias at the head of a row.
struct RowScale {
  float scale, bias;
  TR_INLINE_MEMBER explicit RowScale(const char* row) {
#if defined(__AVX2__)
    int32_t head;
    memcpy(&head, row, sizeof head);
    __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(head));
    scale = _mm_cvtss_f32(both);
    bias = _mm_cvtss_f32(_mm_movehdup_ps(both));
#else
    fp16 head[kLanes] = {};
    memcpy(head, row, 4);
    vf both = load(head);
    scale = both[0];
    bias = both[1];
#endif
  }
};

// Up to four bytes as a number, the first byte in the lowest bits.
template <int kBytes>
TR_INLINE uint32_t word(const uint8_t* p) {
  uint32_t x = 0;
  for (int i = 0; i < kBytes; i++) x |= (uint32_t)p[i] << (8 * i);
  return x;
}

TR_INLINE vu lanes() {
  vu x = {};
  for (int i = 0; i < kLanes; i++) x[i] = (uint32_t)i;
  return x;
}

#if defined(__AVX512F__)

template <>
struct RowReader<codes<8>> {
  static constexpr int kBits = 8, kHeadBytes = 4;
  const uint8_t* at;
  vf scale, bias;
  TR_INLINE_MEMBER RowReader(const char* row, int64_t column) : at((const uint8_t*)row + 4 + column) {
    RowScale head(row);
    scale = splat(head.scale);
    bias = splat(head.bias);
  }
  TR_INLINE_MEMBER vf widened(__m128i bytes) const {
    return scale * (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) + bias;
  }
  TR_INLINE_MEMBER vf get(int v) const { return widened(_mm_loadu_si128((const __m128i*)(at + 16 * v))); }
  TR_INLINE_MEMBER vf first(int n) const { return widened(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), at)); }
};

// A row of 4-bit or 2-bit codes has at most 16 different numbers. They are computed once, in one vector, and each code picks
// its number: fewer instructions than the conversion of every code, and the same bits.
template <int kBits_>
struct RowReader<codes<kBits_>> {
  static constexpr int kBits = kBits_, kHeadBytes = 4;
  const uint8_t* at;
  __m512 numbers;
  TR_INLINE_MEMBER RowReader(const char* row, int64_t column) : at((const uint8_t*)row + 4 + column * kBits / 8) {
    RowScale head(row);
    // A choice reads the lowest 4 bits of its lane; of 2-bit codes these hold the next code, too.
    vf code = (vf)_mm512_cvtepi32_ps((__m512i)(lanes() & (uint32_t)((1 << kBits) - 1)));
    numbers = (__m512)(splat(head.scale) * code + splat(head.bias));
  }
  TR_INLINE_MEMBER vf chosen(__m512i words) const {
    const vu shifts = (lanes() * (uint32_t)kBits) & 31u;
    return (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, (__m512i)shifts), numbers);
  }
  TR_INLINE_MEMBER vf widened(__m128i bytes) const {
    if (kBits == 2) return chosen(_mm512_broadcastd_epi32(bytes));
    return chosen(_mm512_permutexvar_epi32((__m512i)(lanes() >> 3), _mm512_castsi128_si512(bytes)));
  }
  TR_INLINE_MEMBER vf get(int v) const {
    if (kBits == 2) return widened(_mm_cvtsi32_si128((int32_t)word<4>(at + 4 * v)));
    return widened(_mm_loadl_epi64((const __m128i*)(at + 8 * v)));
  }
  TR_INLINE_MEMBER vf first(int n) const {
    const int bytes = (n * kBits + 7) / 8;
    return widened(_mm_maskz_loadu_epi8((__mmask16)((1u << bytes) - 1), at));
  }
};

#else

template <int kBits_>
struct RowReader<codes<kBits_>> {
  static constexpr int kBits = kBits_, kHeadBytes = 4, kStep = kLanes * kBits / 8;  // bytes of a vector
  const uint8_t* at;
  vf scale, bias;
  TR_INLINE_MEMBER RowReader(const char* row, int64_t column) : at((const uint8_t*)row + 4 + column * kBits / 8) {
    RowScale head(row);
    scale = splat(head.scale);
    bias = splat(head.bias);
  }
  TR_INLINE_MEMBER vf widened(const uint8_t* p) const {
#if defined(__AVX2__)
    vi code;
    if (kBits == 8)
      code = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    else
      code = (vi)((vu{} + word<kStep < 4 ? kStep : 4>(p)) >> (lanes() * (uint32_t)kBits)) & ((1 << kBits) - 1);
    return scale * (vf)_mm256_cvtepi32_ps((__m256i)code) + bias;
#else
    const uint32_t x = word<kStep>(p), mask = (1u << kBits) - 1;
    vi code;
    for (int i = 0; i < kLanes; i++) code[i] = (int32_t)((x >> (kBits * i)) & mask);
    return scale * __builtin_convertvector(code, vf) + bias;
#endif
  }
  TR_INLINE_MEMBER vf get(int v) const { return widened(at + v * kStep); }
  TR_INLINE_MEMBER vf first(int n) const {
    uint8_t buffer[8] = {};
    for (int i = 0; i < (n * kBits + 7) / 8; i++) buffer[i] = at[i];
    return widened(buffer);
  }
};

#endif

}  // namespace TILEREC_ISA
}  // namespace tilerec
