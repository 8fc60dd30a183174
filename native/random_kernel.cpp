// Philox4x32-10, and uniform and normal numbers from its words. Plain loops over kGroups counters, which the compiler
// vectorizes.
//
// A group is four neighbouring columns of a row: one counter, four words.
#include "random.h"

#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int kGroups = 16;

struct Words {
  alignas(64) uint32_t w[4][kGroups];
};

inline void philox(Words& c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < kGroups; i++) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * c.w[0][i], p1 = (uint64_t)0xCD9E8D57u * c.w[2][i];
      const uint32_t c1 = c.w[1][i], c3 = c.w[3][i];
      c.w[0][i] = (uint32_t)(p1 >> 32) ^ c1 ^ key0;
      c.w[1][i] = (uint32_t)p1;
      c.w[2][i] = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
      c.w[3][i] = (uint32_t)p0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

inline void uniform(const Words& words, float low, float high, float* values) {
  const float span = high - low;
  for (int i = 0; i < kGroups; i++)
    for (int j = 0; j < 4; j++) values[4 * i + j] = low + span * ((float)(int32_t)(words.w[j][i] >> 8) * 0x1p-24f);
}

// ln((k + 1) / 2^24) for 0 <= k < 2^24. x = 2^e m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)).
// Own polynomials replace the C library's functions: the same bits on every machine. Within 2 units in the last place.
inline double log_of(uint32_t k) {
  const double x = (double)(int32_t)(k + 1) * 0x1p-24;
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int64_t shift = bits - 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  const int64_t e = (int64_t)(((uint64_t)shift >> 52) + 1024) % 2048 - 1024;
  bits -= (int64_t)((uint64_t)e << 52);
  double m;
  memcpy(&m, &bits, sizeof m);
  const double s = (m - 1.0) / (m + 1.0), q = s * s;
  double p = 1.0 / 23;
  p = p * q + 1.0 / 21;
  p = p * q + 1.0 / 19;
  p = p * q + 1.0 / 17;
  p = p * q + 1.0 / 15;
  p = p * q + 1.0 / 13;
  p = p * q + 1.0 / 11;
  p = p * q + 1.0 / 9;
  p = p * q + 1.0 / 7;
  p = p * q + 1.0 / 5;
  p = p * q + 1.0 / 3;
  return (double)(int32_t)e * 0.693147180559945309417 + (2.0 * s + 2.0 * s * (q * p));
}

// Columns (r cos, r sin) of a pair of words. The angle's quadrant is split off while the angle is still an integer.
inline void box_muller(const uint32_t* first, const uint32_t* second, float mean, float deviation, float* even, float* odd) {
  for (int i = 0; i < kGroups; i++) {
    const double radius = __builtin_sqrt(-2.0 * log_of(first[i] >> 8));
    const uint32_t turned = (second[i] >> 8) + (1u << 21);
    const uint32_t quadrant = (turned >> 22) & 3;
    const double a = (double)((int32_t)(turned & 0x3fffff) - (1 << 21)) * (6.283185307179586476925 * 0x1p-24);
    const double q = a * a;
    double s = 1.0 / 355687428096000;
    s = s * q - 1.0 / 1307674368000;
    s = s * q + 1.0 / 6227020800;
    s = s * q - 1.0 / 39916800;
    s = s * q + 1.0 / 362880;
    s = s * q - 1.0 / 5040;
    s = s * q + 1.0 / 120;
    s = s * q - 1.0 / 6;
    s = a + a * (s * q);
    double c = 1.0 / 20922789888000;
    c = c * q - 1.0 / 87178291200;
    c = c * q + 1.0 / 479001600;
    c = c * q - 1.0 / 3628800;
    c = c * q + 1.0 / 40320;
    c = c * q - 1.0 / 720;
    c = c * q + 1.0 / 24;
    c = 1.0 + q * (c * q - 0.5);
    const double x = quadrant & 1 ? s : c, y = quadrant & 1 ? c : s;
    const float cosine = (float)(radius * ((quadrant + 1) & 2 ? -x : x));
    const float sine = (float)(radius * (quadrant & 2 ? -y : y));
    even[i] = mean + deviation * cosine;
    odd[i] = mean + deviation * sine;
  }
}

inline void normal(const Words& words, float mean, float deviation, float* values) {
  alignas(64) float columns[4][kGroups];
  box_muller(words.w[0], words.w[1], mean, deviation, columns[0], columns[1]);
  box_muller(words.w[2], words.w[3], mean, deviation, columns[2], columns[3]);
  for (int i = 0; i < kGroups; i++)
    for (int j = 0; j < 4; j++) values[4 * i + j] = columns[j][i];
}

template <class E>
void put(E* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = (int)(count - i < kLanes ? count - i : kLanes);
    store(out + i, load(values + i, n), n);
  }
}

template <class E>
void fill_rows(const RandomFill& fill, E* out, int64_t begin, int64_t end) {
  const int64_t first = fill.column_offset / 4, groups = (fill.column_offset + fill.width + 3) / 4 - first;
  const int64_t skip = fill.column_offset - 4 * first;
  const bool whole = skip == 0 && fill.width % 4 == 0;
  int64_t row = begin, group = 0;  // the next counter
  while (row < end && groups > 0) {
    Words words;
    alignas(64) float values[4 * kGroups];
    int64_t start_row = row, start_group = group;
    int used = 0;
    for (int i = 0; i < kGroups; i++) {
      // Beyond the end any row will do: those words are not used.
      const uint64_t at = (uint64_t)(fill.places ? fill.places[row < end ? row : begin] : fill.row_offset + row);
      words.w[0][i] = (uint32_t)at;
      words.w[1][i] = (uint32_t)(at >> 32);
      words.w[2][i] = (uint32_t)(first + group);
      words.w[3][i] = 0;
      if (row < end) {
        used = i + 1;
        if (++group == groups) {
          group = 0;
          row++;
        }
      }
    }
    philox(words, fill.key0, fill.key1);
    if (fill.kind == TR_UNIFORM)
      uniform(words, fill.a, fill.b, values);
    else
      normal(words, fill.a, fill.b, values);
    if (whole) {
      put(out + start_row * fill.width + 4 * start_group, values, 4 * used);
      continue;
    }
    for (int i = 0; i < used; i++) {
      for (int j = 0; j < 4; j++) {
        const int64_t column = 4 * start_group + j - skip;
        if (column >= 0 && column < fill.width) store_one(out + start_row * fill.width + column, values[4 * i + j]);
      }
      if (++start_group == groups) {
        start_group = 0;
        start_row++;
      }
    }
  }
}

}  // namespace

void random_rows(const RandomFill& fill, int64_t begin, int64_t end) {
  if (fill.type == TR_F32) fill_rows(fill, (float*)fill.out, begin, end);
  if (fill.type == TR_BF16) fill_rows(fill, (bf16*)fill.out, begin, end);
  if (fill.type == TR_F16) fill_rows(fill, (fp16*)fill.out, begin, end);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
