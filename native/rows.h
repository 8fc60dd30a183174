// Rows of fp32, bf16 or fp16 numbers as vectors of fp32, and back. For kernels compiled per instruction set (isa.h).
//
//   vf              kLanes floats: 16 with AVX-512, 8 with AVX2, 4 otherwise; + - * / and comparisons work lane by lane
//   load(p)         kLanes numbers from p; exact
//   load(p, n)      the first n (0 <= n <= kLanes), zeros after them; reads nothing beyond p[n - 1]
//   store(p, v)     rounds to nearest, ties to even; NaNs stay NaNs, too large numbers become infinite
//   store(p, v, n)  writes p[0 .. n - 1] only
//
// Pointers need no alignment beyond their element's. All levels give the same bits, portable code included.
//
// Example: bf16 words {0x3f80, 0x4000} (1.0, 2.0): load(p, 2) = {1, 2, 0, 0, ...}.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef TILEREC_ISA
#error "rows.h is for native/*_kernel.cpp, which are compiled per instruction set"
#endif

namespace tilerec {
namespace TILEREC_ISA {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#define TR_INLINE static inline __attribute__((always_inline))
#define TR_INLINE_MEMBER inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));

// Eight columns are the unit of every row sum (ops/update/rules.py): the same on all levels.
typedef float vf8 __attribute__((vector_size(32)));

TR_INLINE vf splat(float x) { return vf{} + x; }
TR_INLINE vu as_bits(vf x) { return (vu)x; }
TR_INLINE vf as_float(vu x) { return (vf)x; }
TR_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
TR_INLINE vu select(vi mask, vu a, vu b) { return ((vu)mask & a) | (~(vu)mask & b); }

// ---- widening and narrowing of one vector

// 16-bit words to 32-bit ones and back (the word must fit). GCC's __builtin_convertvector is correct but slow here.
TR_INLINE vu spread(vh words) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)words);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)words);
#else
  return __builtin_convertvector(words, vu);
#endif
}

TR_INLINE vh squeeze(vu words) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)words);
#elif defined(__AVX2__)
  __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(words, vh);
#endif
}

TR_INLINE vf widen(vh words, bf16) { return as_float(spread(words) << 16); }

TR_INLINE vf widen(vh words, fp16) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)words);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)words);
#else
  vu wide = spread(words);
  vu sign = (wide & 0x8000u) << 16, size = wide & 0x7fffu;
  vu normal = (size << 13) + (112u << 23);
  vu small = as_bits(__builtin_convertvector((vi)size, vf) * splat(0x1p-24f));  // subnormal: an integer times 2^-24
  vu special = (size << 13) | 0x7f800000u;
  special |= (vu)((vi)size > 0x7c00) & 0x400000u;  // a NaN becomes quiet
  vu magnitude = select((vi)size < 0x400, small, select((vi)size >= 0x7c00, special, normal));
  return as_float(sign | magnitude);
#endif
}

TR_INLINE vh narrow(vf x, bf16) {
  vu bits = as_bits(x);
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vi is_nan = (vi)(bits & 0x7fffffffu) > 0x7f800000;
  return squeeze(select(is_nan, vu{} + 0x7fc0u, rounded));
}

TR_INLINE vh narrow(vf x, fp16) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vu bits = as_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  vu normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  vu small = as_bits(as_float(size) + splat(0.5f)) - 0x3f000000u;  // the sum's last place is 2^-24
  vu nan = 0x7e00u | ((size >> 13) & 0x3ffu);
  vi s = (vi)size;
  vu word = select(s < 0x38800000, small, normal);
  word = select(s >= 0x477ff000, vu{} + 0x7c00u, word);
  word = select(s > 0x7f800000, nan, word);
  return squeeze(sign | word);
#endif
}

// ---- whole vectors

TR_INLINE vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class H>
TR_INLINE vf load(const H* p) {
  vh words;
  memcpy(&words, p, sizeof words);
  return widen(words, H{});
}

TR_INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
template <class H>
TR_INLINE void store(H* p, vf x) {
  vh words = narrow(x, H{});
  memcpy(p, &words, sizeof words);
}

// ---- the first n lanes

#if defined(__AVX512F__)

TR_INLINE vf load(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
TR_INLINE void store(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x); }
template <class H>
TR_INLINE vf load(const H* p, int n) {
  return widen((vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p), H{});
}
template <class H>
TR_INLINE void store(H* p, vf x, int n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)narrow(x, H{}));
}

#else

#if defined(__AVX2__)
TR_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TR_INLINE vf load(const float* p, int n) { return (vf)_mm256_maskload_ps(p, first(n)); }
TR_INLINE void store(float* p, vf x, int n) { _mm256_maskstore_ps(p, first(n), (__m256)x); }
#else
TR_INLINE vf load(const float* p, int n) {
  float buffer[kLanes] = {};
  for (int i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
TR_INLINE void store(float* p, vf x, int n) {
  float buffer[kLanes];
  store(buffer, x);
  for (int i = 0; i < n; i++) p[i] = buffer[i];
}
#endif

template <class H>
TR_INLINE vf load(const H* p, int n) {
  H buffer[kLanes] = {};
  for (int i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
template <class H>
TR_INLINE void store(H* p, vf x, int n) {
  H buffer[kLanes];
  store(buffer, x);
  for (int i = 0; i < n; i++) p[i] = buffer[i];
}

#endif

// ---- single numbers, by the same rules

template <class E>
TR_INLINE float load_one(const E* p) {
  return load(p, 1)[0];
}
template <class E>
TR_INLINE void store_one(E* p, float x) {
  store(p, splat(x), 1);
}

// ---- prefetch

// Prefetches the cache lines of `bytes` bytes from p on. p may be any address.
TR_INLINE void prefetch_row(const void* p, size_t bytes) {
  const char* at = (const char*)p;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
