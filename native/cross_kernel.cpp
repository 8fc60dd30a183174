// The loops of cross.h, for one instruction set.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cross.h"
#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int64_t kTile = 4096;     // features whose sums over samples stay in the L1 cache: 16 KB
constexpr int64_t kBlock = 64;      // samples summed before their sum is added to the others: smaller rounding errors
constexpr int64_t kCached = 1 << 20;  // floats: larger results leave the cache before they are read

// Stores past the cache: a plain store reads the line first, a third of the traffic of a forward pass.
TR_INLINE void stream(float* p, vf x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)x);
#else
  store(p, x);
#endif
}

TR_INLINE void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <bool streamed>
TR_INLINE void put(float* p, vf x) {
  if (streamed)
    stream(p, x);
  else
    store(p, x);
}

// True if every row of the result begins at a vector's boundary, and the result is too large for the cache.
TR_INLINE bool can_stream(const tr_crossing& call, const float* result) {
  const uint64_t vector = sizeof(vf);
  return call.samples * call.features > kCached && (uint64_t)(uintptr_t)result % vector == 0 &&
         (uint64_t)call.features * sizeof(float) % vector == 0;
}

template <bool streamed>
void cross_rows(const tr_crossing& call, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < call.samples; ++r) {
    const int64_t row = r * call.features;
    const float *x = call.x + row, *x0 = call.x0 + row, *factor = call.factor + row, *bias = call.bias;
    float* out = call.out + row;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const vf f = bias ? load(factor + i) + load(bias + i) : load(factor + i);
      put<streamed>(out + i, load(x + i) + load(x0 + i) * f);
    }
    if (const int n = (int)(end - i)) {
      const vf f = bias ? load(factor + i, n) + load(bias + i, n) : load(factor + i, n);
      store(out + i, load(x + i, n) + load(x0 + i, n) * f, n);
    }
  }
  if (streamed) finish_streams();
}

// Features begin ... end - 1, at most kTile.
template <bool streamed>
void cross_backward_tile(const tr_crossing& call, int64_t begin, int64_t end) {
  const bool adds = call.adds != 0, first = call.first != 0;
  float sums[kTile];
  memset(call.of_bias + begin, 0, (size_t)(end - begin) * sizeof(float));
  for (int64_t block = 0; block < call.samples; block += kBlock) {
    const int64_t last = block + kBlock < call.samples ? block + kBlock : call.samples;
    memset(sums, 0, (size_t)(end - begin) * sizeof(float));
    for (int64_t r = block; r < last; ++r) {
      const int64_t row = r * call.features;
      const float *grad = call.x + row, *x0 = call.x0 + row, *factor = call.factor + row, *bias = call.bias;
      float *of_x0 = call.of_x0 + row, *of_factor = call.of_factor + row;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        const vf g = load(grad + i), f = bias ? load(factor + i) + load(bias + i) : load(factor + i);
        const vf own = first ? g * f + g : g * f, flow = g * load(x0 + i);
        if (adds)
          store(of_x0 + i, load(of_x0 + i) + own);
        else
          put<streamed>(of_x0 + i, own);
        put<streamed>(of_factor + i, flow);
        store(sums + (i - begin), load(sums + (i - begin)) + flow);
      }
      if (const int n = (int)(end - i)) {
        const vf g = load(grad + i, n), f = bias ? load(factor + i, n) + load(bias + i, n) : load(factor + i, n);
        const vf own = first ? g * f + g : g * f, flow = g * load(x0 + i, n);
        store(of_x0 + i, adds ? load(of_x0 + i, n) + own : own, n);
        store(of_factor + i, flow, n);
        store(sums + (i - begin), load(sums + (i - begin), n) + flow, n);
      }
    }
    for (int64_t i = begin; i < end; ++i) call.of_bias[i] += sums[i - begin];
  }
  if (streamed) finish_streams();
}

}  // namespace

void cross(const tr_crossing& call, int64_t begin, int64_t end) {
  if (can_stream(call, call.out))
    cross_rows<true>(call, begin, end);
  else
    cross_rows<false>(call, begin, end);
}

void cross_backward(const tr_crossing& call, int64_t begin, int64_t end) {
  const bool streamed = can_stream(call, call.of_factor) && can_stream(call, call.of_x0);
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t last = tile + kTile < end ? tile + kTile : end;
    if (streamed)
      cross_backward_tile<true>(call, tile, last);
    else
      cross_backward_tile<false>(call, tile, last);
  }
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
