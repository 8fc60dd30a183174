// The loops of distinct.h over rows, for one instruction set.
//
// Items of a row are scattered over the flat side, so the processor cannot foresee them: those of later rows are prefetched.
#include "distinct.h"
#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int64_t kAhead = 4;  // rows and items

struct Items {
  const int32_t *begin, *end;
};

TR_INLINE Items items_of(const RepeatedRows& s, int64_t row, int32_t& own) {
  own = s.slots ? s.slots[row] : static_cast<int32_t>(row);
  if (!s.starts) return {&own, &own + 1};
  return {s.items + s.starts[own], s.items + s.starts[own + 1]};
}

template <class Number>
TR_INLINE void add(char* to, const char* from, int64_t bytes) {
  Number* __restrict sum = reinterpret_cast<Number*>(to);
  const Number* __restrict term = reinterpret_cast<const Number*>(from);
  for (int64_t i = 0, n = bytes / static_cast<int64_t>(sizeof(Number)); i < n; ++i) sum[i] += term[i];
}

TR_INLINE void copy(char* to, const char* from, int64_t bytes) { memcpy(to, from, static_cast<size_t>(bytes)); }

// Writes whole cache lines around the caches (non-temporal stores).
TR_INLINE void copy_lines(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
  copy(to, from, bytes);
#endif
}

template <class Number>
void expand(const RepeatedRows& s) {
  int32_t own;
  for (int64_t row = s.begin; row < s.end; ++row) {
    const char* from = s.rows + row * s.row_bytes;
    const Items items = items_of(s, row, own);
    for (const int32_t* item = items.begin; item < items.end; ++item) {
      char* to = s.flat + *item * s.stride_bytes;
      if (s.adds)
        add<Number>(to, from, s.width_bytes);
      else if (s.past_caches)
        copy_lines(to, from, s.width_bytes);
      else
        copy(to, from, s.width_bytes);
    }
  }
#if defined(__AVX2__)
  if (s.past_caches) _mm_sfence();
#endif
}

TR_INLINE void prefetch_item(const RepeatedRows& s, int32_t item) {
  prefetch_row(s.flat + item * s.stride_bytes, static_cast<size_t>(s.width_bytes));
}

template <class Number>
void sum(const RepeatedRows& s) {
  int32_t own, later;
  for (int64_t row = s.begin; row < s.end; ++row) {
    char* to = s.rows + row * s.row_bytes;
    if (row + kAhead < s.end) prefetch_item(s, *items_of(s, row + kAhead, later).begin);
    const Items items = items_of(s, row, own);
    for (const int32_t* item = items.begin + 1; item < items.end && item < items.begin + kAhead; ++item) prefetch_item(s, *item);
    copy(to, s.flat + *items.begin * s.stride_bytes, s.width_bytes);
    for (const int32_t* item = items.begin + 1; item < items.end; ++item) {
      if (item + kAhead < items.end) prefetch_item(s, item[kAhead]);
      add<Number>(to, s.flat + *item * s.stride_bytes, s.width_bytes);
    }
  }
}

}  // namespace

void expand_repeated(const RepeatedRows& s) { s.element_bytes == 4 ? expand<float>(s) : expand<double>(s); }

void sum_repeated(const RepeatedRows& s) {
  if (s.begin < s.end) s.element_bytes == 4 ? sum<float>(s) : sum<double>(s);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
