// The loops of search.h.
//
// Numbers of int8 are multiplied as floats where the machine has no instruction for them: sums of kExact products are
// integers below 2^24, so they are exact in any order. With AVX-512 VNNI four products of int8 take one instruction.
#include "search.h"

#include "rules_vector.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int kVectors = 4;                  // vectors of rows that are summed at a time
constexpr int kRows = kVectors * kLanes;     // rows of a pass
constexpr int64_t kExact = 1024;             // 127 * 127 * 1024 < 2^24
static_assert(kSearchBlock % kRows == 0, "a block is a whole number of passes");

TR_INLINE void keep(const SearchBlock& b, Candidates& found, int64_t row, float score) {
  const int64_t place = b.first + row, word = b.words[place];
  if ((word & found.required) == found.required && !(word & found.forbidden)) {
    found.at[found.count].score = score;
    found.at[found.count].place = place;
    found.count++;
  }
}

#if defined(__AVX512F__)
#define TR_VNNI __attribute__((target("avx512vnni")))

// Transposes 16 x 16 words of 32 bits: word w of x[r] becomes word r of to[w * kSearchBlock].
TR_INLINE void transpose(__m512i* x, int32_t* to) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
  }
  for (int w = 0; w < 16; w++) _mm512_store_si512(to + w * kSearchBlock, x[w]);
}

// Transposes a block of rows of `bytes` bytes; bytes beyond, and rows beyond the block's, are zeros. `flip`: see sum_int8.
TR_INLINE void transpose_block(const SearchBlock& b, int64_t bytes, int8_t flip) {
  int32_t* out = (int32_t*)b.scratch;
  const char* rows = (const char*)b.rows + b.first * bytes;
  const __m512i sign = _mm512_set1_epi8(flip);
  for (int64_t row = 0; row < b.count; row += 16)
    for (int64_t at = 0; at < bytes; at += 64) {
      const __mmask64 mask = bytes - at >= 64 ? ~__mmask64(0) : (__mmask64(1) << (bytes - at)) - 1;
      __m512i x[16];
      for (int i = 0; i < 16; i++)
        x[i] = row + i < b.count
                   ? _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, rows + (row + i) * bytes + at), sign)
                   : _mm512_setzero_si512();
      transpose(x, out + (at / 4) * kSearchBlock + row);
    }
}

// Sums of int8 products: the instruction takes one unsigned factor, so rows have 128 added (their sign bits flipped), and
// 128 times the sum of the query is subtracted.
template <int kQueries>
TR_VNNI inline void sum_int8(const SearchBlock& b, int64_t query) {
  const int64_t groups = (b.dim + 3) / 4;
  const __m512i* x = (const __m512i*)b.scratch;
  __m512i sums[kQueries][4];
  const int32_t* q[kQueries];
  for (int i = 0; i < kQueries; i++) {
    q[i] = (const int32_t*)(b.queries + (query + i) * b.query_bytes);
    for (int v = 0; v < 4; v++) sums[i][v] = _mm512_setzero_si512();
  }
  for (int64_t g = 0; g < groups; g++, x += 4)
    for (int i = 0; i < kQueries; i++) {
      const __m512i own = _mm512_set1_epi32(q[i][g]);
      for (int v = 0; v < 4; v++) sums[i][v] = _mm512_dpbusd_epi32(sums[i][v], x[v], own);
    }
  for (int i = 0; i < kQueries; i++) {
    Candidates& found = b.found[query + i];
    const __m512i offset = _mm512_set1_epi32(128 * b.query_sum[query + i]);
    const __m512 scale = _mm512_set1_ps(b.query_scale[query + i]), least = _mm512_set1_ps(found.threshold);
    for (int64_t row = 0; row < b.count; row += 16) {
      const int64_t left = b.count - row;
      const __mmask16 mask = left >= 16 ? __mmask16(~0) : __mmask16((1 << left) - 1);
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][row / 16], offset));
      const __m512 score =
          _mm512_mul_ps(_mm512_mul_ps(dot, _mm512_maskz_loadu_ps(mask, b.scale + b.first + row)), scale);
      uint32_t above = _mm512_mask_cmp_ps_mask(mask, score, least, _CMP_GT_OQ);
      if (!above) continue;
      float each[16];
      _mm512_storeu_ps(each, score);
      for (; above; above &= above - 1) {
        const int lane = __builtin_ctz(above);
        keep(b, found, row + lane, each[lane]);
      }
    }
  }
}

TR_VNNI void search_int8(const SearchBlock& b) {
  transpose_block(b, b.dim, -128);
  int64_t query = 0;
  for (; query + 4 <= b.query_count; query += 4) sum_int8<4>(b, query);
  for (; query < b.query_count; query++) sum_int8<1>(b, query);
}
#endif

// Transposes a block to floats; rows beyond the block's are zeros.
void spread_block(const SearchBlock& b) {
  float* x = (float*)b.scratch;
  for (int64_t row = 0; row < kSearchBlock; row++) {
    const int64_t from = (b.first + row) * b.dim;
    if (row >= b.count)
      for (int64_t d = 0; d < b.dim; d++) x[d * kSearchBlock + row] = 0;
    else if (b.int8)
      for (int64_t d = 0; d < b.dim; d++) x[d * kSearchBlock + row] = ((const int8_t*)b.rows)[from + d];
    else
      for (int64_t d = 0; d < b.dim; d++) x[d * kSearchBlock + row] = ((const float*)b.rows)[from + d];
  }
}

constexpr int kTile = kLanes == 16 ? 4 : 2;  // queries that share the loads of a pass: their sums stay in registers

// Adds the products of columns [begin, end) of kRows rows, from row `row` on, with consecutive queries.
template <int kQueries, class Number>
TR_INLINE void add_products(const float* x, const Number* const* query, int64_t begin, int64_t end, vf (*sums)[kVectors]) {
  for (int64_t d = begin; d < end; d++) {
    vf own[kVectors];
    for (int v = 0; v < kVectors; v++) own[v] = load(x + d * kSearchBlock + v * kLanes);
    for (int q = 0; q < kQueries; q++) {
      const vf number = splat((float)query[q][d]);
      for (int v = 0; v < kVectors; v++) sums[q][v] += number * own[v];
    }
  }
}

TR_INLINE void offer(const SearchBlock& b, int64_t query, int64_t row, const vf* sums) {
  Candidates& found = b.found[query];
  for (int v = 0; v < kVectors; v++, row += kLanes) {
    vf score = sums[v];
    if (b.int8 && row < b.count)
      score = score * load(b.scale + b.first + row, (int)(b.count - row < kLanes ? b.count - row : kLanes)) *
              splat(b.query_scale[query]);
    if (!any((vi)(score > splat(found.threshold)))) continue;
    for (int lane = 0; lane < kLanes && row + lane < b.count; lane++)
      if (score[lane] > found.threshold) keep(b, found, row + lane, score[lane]);
  }
}

template <int kQueries>
void search_floats(const SearchBlock& b, int64_t query) {
  const float* x = (const float*)b.scratch;
  const char* own[kQueries];
  for (int q = 0; q < kQueries; q++) own[q] = b.queries + (query + q) * b.query_bytes;
  for (int64_t row = 0; row < b.count; row += kRows) {
    vf sums[kQueries][kVectors] = {};
    if (!b.int8) {
      add_products<kQueries>(x + row, (const float* const*)own, 0, b.dim, sums);
    } else {
      vi whole[kQueries][kVectors] = {};
      for (int64_t d = 0; d < b.dim; d += kExact) {
        vf part[kQueries][kVectors] = {};
        add_products<kQueries>(x + row, (const int8_t* const*)own, d, d + kExact < b.dim ? d + kExact : b.dim, part);
        for (int q = 0; q < kQueries; q++)
          for (int v = 0; v < kVectors; v++) whole[q][v] += __builtin_convertvector(part[q][v], vi);
      }
      for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) sums[q][v] = __builtin_convertvector(whole[q][v], vf);
    }
    for (int q = 0; q < kQueries; q++) offer(b, query + q, row, sums[q]);
  }
}

void search_floats(const SearchBlock& b) {
  int64_t query = 0;
  for (; query + kTile <= b.query_count; query += kTile) search_floats<kTile>(b, query);
  for (; query < b.query_count; query++) search_floats<1>(b, query);
}

}  // namespace

void search_block(const SearchBlock& b) {
#if defined(__AVX512F__)
  if (b.int8 && __builtin_cpu_supports("avx512vnni")) return search_int8(b);
  if (!b.int8) {
    transpose_block(b, b.dim * 4, 0);
    return search_floats(b);
  }
#endif
  spread_block(b);
  search_floats(b);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
