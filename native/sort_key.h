// A sort key: an occurrence's row with its payload, packed into the fewest bits.
//
//   occurrence   one id of a batch
//   payload      the number of a bag or an occurrence, which leads from a sorted occurrence back to its gradient row
//   packed key   row << payload_bits | payload, in 32 or 64 bits, or a pair of 64-bit words if 64 bits are too few
//
// Occurrences are built in the order (feature, occurrence), and payloads never decrease along it. So the stable order by row
// and the order by the whole packed key are the same, and small inputs may be sorted by comparison.
//
// Example: rows {5, 2, 5}, payloads {0, 1, 2}, 2 payload bits -> packed {20, 9, 22} -> sorted {9, 20, 22}: row 2 with
// payload 1, then row 5 with payloads 0 and 2.
#pragma once

#include <stdint.h>

// Always inlined, because files of several instruction sets share these.
#define TR_KEY static inline __attribute__((always_inline))

namespace tilerec {

struct WideKey {
  uint64_t row, payload;
};
TR_KEY bool operator<(const WideKey& a, const WideKey& b) { return a.row < b.row || (a.row == b.row && a.payload < b.payload); }

template <class E>
TR_KEY E pack_key(uint64_t row, uint64_t payload, int payload_bits, E*) {
  return static_cast<E>(row << payload_bits | payload);
}
TR_KEY WideKey pack_key(uint64_t row, uint64_t payload, int, WideKey*) { return {row, payload}; }

TR_KEY uint64_t row_of(uint32_t key, int payload_bits) { return key >> payload_bits; }
TR_KEY uint64_t row_of(uint64_t key, int payload_bits) { return key >> payload_bits; }
TR_KEY uint64_t row_of(const WideKey& key, int) { return key.row; }

TR_KEY uint64_t payload_of(uint32_t key, int payload_bits) { return key & ((uint64_t(1) << payload_bits) - 1); }
TR_KEY uint64_t payload_of(uint64_t key, int payload_bits) { return key & ((uint64_t(1) << payload_bits) - 1); }
TR_KEY uint64_t payload_of(const WideKey& key, int) { return key.payload; }

}  // namespace tilerec
