// Sorts occurrences by row, equal rows in the order (feature, occurrence). sort_key.h describes the packed keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "parallel.h"
#include "sort_key.h"

namespace tilerec {

// Number of bits that hold every number below `count`. Example: 5 -> 3, 1 -> 0.
inline int bits_below(uint64_t count) { return count < 2 ? 0 : 64 - __builtin_clzll(count - 1); }

// The digits of a radix sort over the row bits: `passes` digits of `bits` bits each.
struct Digits {
  int passes, bits;
};

constexpr int kMaxDigit = 11;
constexpr int kMaxPasses = 8;
constexpr size_t kInsertionSort = 24;    // keys up to which insertion sort is used
constexpr size_t kComparisonSort = 128;  // keys up to which std::sort is used

inline Digits choose_digits(int row_bits, size_t count) {
  // A digit of b bits costs 2^b counters per pass: keep this well below the number of keys.
  int widest = count >= 65536 ? 11 : count >= 4096 ? 10 : 8;
  int passes = std::max(1, (row_bits + widest - 1) / widest);
  return {passes, std::max(1, (row_bits + passes - 1) / passes)};
}

template <class E>
inline void insertion_sort(E* keys, size_t count) {
  for (size_t i = 1; i < count; i++) {
    E key = keys[i];
    size_t j = i;
    for (; j > 0 && key < keys[j - 1]; j--) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

// Writes keys [begin, end) to the positions in `next`, which holds the next free position per digit. Four at a time: their
// loads need not wait for each other's stores (2.7 times as fast as one by one). `__restrict__` holds: the arrays do not overlap.
template <class E>
inline void scatter(const E* __restrict__ from, E* __restrict__ to, size_t begin, size_t end, int payload_bits, int shift,
                    uint32_t mask, uint32_t* __restrict__ next) {
  auto digit = [&](const E& key) { return static_cast<uint32_t>(row_of(key, payload_bits) >> shift) & mask; };
  size_t i = begin;
  for (; i + 4 <= end; i += 4) {
    const E a = from[i], b = from[i + 1], c = from[i + 2], d = from[i + 3];
    const uint32_t at_a = digit(a), at_b = digit(b), at_c = digit(c), at_d = digit(d);
    to[next[at_a]++] = a;
    to[next[at_b]++] = b;
    to[next[at_c]++] = c;
    to[next[at_d]++] = d;
  }
  for (; i < end; i++) to[next[digit(from[i])]++] = from[i];
}

// Sorts keys by row, equal rows in their given order. `other` is as long as `keys`. Returns the one of the two arrays that
// holds the result. Fewer than 2^32 keys.
template <class E>
E* sort_keys(E* keys, E* other, size_t count, int row_bits, int payload_bits) {
  if (count < 2 || row_bits == 0) return keys;
  if (count <= kComparisonSort) {
    if (count <= kInsertionSort)
      insertion_sort(keys, count);
    else
      std::sort(keys, keys + count);
    return keys;
  }
  const Digits digits = choose_digits(row_bits, count);
  const uint32_t size = 1u << digits.bits, mask = size - 1;
  uint32_t counts[kMaxPasses << kMaxDigit];
  std::memset(counts, 0, sizeof(uint32_t) * size * digits.passes);
  for (size_t i = 0; i < count; i++) {
    uint64_t row = row_of(keys[i], payload_bits);
    for (int pass = 0; pass < digits.passes; pass++) counts[pass * size + ((row >> (pass * digits.bits)) & mask)]++;
  }
  for (int pass = 0; pass < digits.passes; pass++) {
    uint32_t* next = counts + pass * size;
    const int shift = pass * digits.bits;
    if (next[(row_of(keys[0], payload_bits) >> shift) & mask] == count) continue;  // one digit only: no key moves
    uint32_t sum = 0;
    for (uint32_t d = 0; d < size; d++) {
      uint32_t here = next[d];
      next[d] = sum;
      sum += here;
    }
    scatter(keys, other, 0, count, payload_bits, shift, mask, next);
    std::swap(keys, other);
  }
  return keys;
}

// The same by a team: every thread calls it, with `counts` of `threads << kMaxDigit` counters shared by all. Each thread
// scatters its own share of the keys, shares in order, so the result does not depend on the number of threads.
template <class E>
E* sort_keys_together(const Team& team, E* keys, E* other, size_t count, int row_bits, int payload_bits, uint32_t* counts) {
  const Digits digits = choose_digits(row_bits, count);
  const uint32_t size = 1u << digits.bits, mask = size - 1;
  const size_t begin = team.begin(count), end = team.end(count);
  uint32_t next[1 << kMaxDigit];
  for (int pass = 0; pass < digits.passes; pass++) {
    const int shift = pass * digits.bits;
    uint32_t* mine = counts + static_cast<size_t>(team.thread) * size;
    std::memset(next, 0, sizeof(uint32_t) * size);
    for (size_t i = begin; i < end; i++) next[(row_of(keys[i], payload_bits) >> shift) & mask]++;
    std::memcpy(mine, next, sizeof(uint32_t) * size);
    team.wait();
    uint32_t sum = 0;
    for (uint32_t d = 0; d < size; d++) {
      uint32_t before = 0, all = 0;
      for (int t = 0; t < team.threads; t++) {
        uint32_t here = counts[static_cast<size_t>(t) * size + d];
        before += t < team.thread ? here : 0;
        all += here;
      }
      next[d] = sum + before;
      sum += all;
    }
    scatter(keys, other, begin, end, payload_bits, shift, mask, next);
    team.wait();
    std::swap(keys, other);
  }
  return keys;
}

}  // namespace tilerec
