// The three unavoidable parts of an update of pooled tables, each as its own loop: `update_bound.py` times them.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

constexpr int kAheadRows = 16;
constexpr int kDigit = 10;

inline void fetch(const float* row, int64_t dim, bool write) {
  for (int64_t c = 0; c < dim; c += 16) write ? __builtin_prefetch(row + c, 1) : __builtin_prefetch(row + c, 0);
}

// Four keys at a time: their loads need not wait for each other's stores (2.7 times as fast as one by one).
void scatter(const uint32_t* __restrict__ from, uint32_t* __restrict__ to, int64_t count, int shift,
             uint32_t* __restrict__ next) {
  const uint32_t mask = (1 << kDigit) - 1;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const uint32_t a = from[i], b = from[i + 1], c = from[i + 2], d = from[i + 3];
    const uint32_t at_a = a >> shift & mask, at_b = b >> shift & mask, at_c = c >> shift & mask, at_d = d >> shift & mask;
    to[next[at_a]++] = a;
    to[next[at_b]++] = b;
    to[next[at_c]++] = c;
    to[next[at_d]++] = d;
  }
  for (; i < count; i++) to[next[from[i] >> shift & mask]++] = from[i];
}

}  // namespace

extern "C" {

// A radix sort of 32-bit keys by their bits [low, 32), 10 bits a pass, equal digits in their order. The result is in `keys`.
void bound_sort(uint32_t* keys, uint32_t* other, int64_t count, int32_t low, int32_t passes) {
  static thread_local uint32_t next[1 << kDigit];
  uint32_t* const home = keys;
  for (int pass = 0; pass < passes; pass++) {
    const int shift = low + pass * kDigit;
    std::memset(next, 0, sizeof next);
    for (int64_t i = 0; i < count; i++) next[(keys[i] >> shift) & ((1 << kDigit) - 1)]++;
    uint32_t sum = 0;
    for (uint32_t& n : next) sum += std::exchange(n, sum);
    scatter(keys, other, count, shift, next);
    std::swap(keys, other);
  }
  if (keys != home) std::memcpy(home, keys, sizeof(uint32_t) * count);
}

// Reads and writes each of `count` rows once, and its number in `state` if it is not null.
void bound_rows(float* table, float* state, const uint32_t* rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; i++) {
    if (i + kAheadRows < count) {
      fetch(table + rows[i + kAheadRows] * dim, dim, true);
      if (state) __builtin_prefetch(state + rows[i + kAheadRows], 1);
    }
    float* row = table + rows[i] * dim;
    const float step = state ? (state[rows[i]] += 1.0f) : 1.0f;
    for (int64_t c = 0; c < dim; c++) row[c] += step;
  }
}

// Adds the gradient rows of `count` bags; `sum` [dim].
void bound_gradients(const float* grad, int64_t stride, const uint32_t* bags, int64_t count, int64_t dim, float* sum) {
  for (int64_t i = 0; i < count; i++) {
    if (i + kAheadRows < count) fetch(grad + bags[i + kAheadRows] * stride, dim, false);
    const float* row = grad + bags[i] * stride;
    for (int64_t c = 0; c < dim; c++) sum[c] += row[c];
  }
}
}
