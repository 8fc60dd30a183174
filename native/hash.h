// Rows of ids: find, assign, resize (tilerec/ops/hash/definition.py is the specification, with terms and numeric examples).
//
//   range    the buckets of a state: [first, first + held) of `buckets`, `slots` rows each
//   lane     entries that one thread processes in order: all of them, or those of neighbouring buckets
//   worst    the slot of a full window that is evicted first
//
// Entries of one bucket are in one lane and in their order, so lanes give the same bits in any order and on any thread.
#pragma once

#include "tilerec.h"

enum { TR_LRU = 0, TR_LFU = 1, TR_DISTANCE_LFU = 2, TR_TTL = 3 };
enum { TR_HIT = 0, TR_INSERTED = 1, TR_EVICTED = 2, TR_REJECTED = 3, TR_NOT_ADMITTED = 4, TR_MISSING = 5 };

// Arguments of tr_zch_find and tr_zch_assign; find reads ids, slot_ids, used and the range, and writes rows and probes.
typedef struct {
  const int64_t* ids;
  int64_t count;
  const int64_t* counts;       // or null: 1
  const uint8_t* may_insert;   // or null: all may
  const int64_t* ttls;         // or null: `ttl`
  int64_t* slot_ids;           // state, [held * slots]
  uint8_t* used;
  int64_t *since, *last, *hits;
  int64_t* expires;            // or null: nothing expires
  int32_t* counters;           // [held, counter_count]
  int64_t counter_count;
  int64_t first, held, buckets, slots, max_probe;
  int64_t step, now, ttl, policy, evict, threshold;
  double exponent;
  int64_t* rows;      // [count]
  uint8_t* outcomes;  // [count]
  int32_t* probes;    // [count]
  int64_t *evicted_rows, *evicted_ids;  // [count], of which `evicted` are filled in
  int64_t evicted;
  int64_t threads;
  tr_report report;
} tr_zch;

// Arguments of tr_zch_resize. The new state's memory is zeroed by the caller.
typedef struct {
  const int64_t* slot_ids;
  const uint8_t* used;
  const int64_t *since, *last, *hits, *expires;  // expires: or null
  int64_t* new_ids;
  uint8_t* new_used;
  int64_t *new_since, *new_last, *new_hits, *new_expires;
  int64_t* moved;  // [held * slots]
  int64_t first, held, buckets, slots, new_buckets, new_slots, max_probe;
  int64_t step, policy;
  double exponent;
  int64_t threads;
  tr_report report;
} tr_zch_resizing;

// Each returns report.status: TR_OK, TR_NO_MEMORY, TR_BAD_ID (an id of another bucket: position, value = id; of
// tr_zch_resize the position is its row), or TR_BAD_ARGUMENT (position, value; feature is one of these). After an error
// nothing has changed.
enum { TR_ZCH_BAD_COUNT = 1, TR_ZCH_BAD_TTL = 2 };
TR_API int64_t tr_zch_find(tr_zch* call);
TR_API int64_t tr_zch_assign(tr_zch* call);
TR_API int64_t tr_zch_resize(tr_zch_resizing* call);
TR_API void tr_zch_buckets(const int64_t* ids, int64_t count, int64_t buckets, int64_t* out, int64_t threads);

// out[n] = first_row + mixed id mod (rows - first_row), 0 <= first_row < rows. One thread: readers call it beside a step that
// uses the others.
TR_API void tr_hash_rows(const int64_t* ids, int64_t count, int64_t rows, int64_t first_row, int64_t* out);

// Writes items[order[0]], items[order[1]], ... into `parts` pieces of memory: counts[p] items each, one behind the other in
// outs[p]. If rows > 0, the items are int64 ids, and their rows of tr_hash_rows are written instead. item_bytes and index_bytes
// (of the numbers in `order`) are 4 or 8. Returns the number of items written: less than their sum if the next block of `order`
// has a number outside of [0, count). One thread, as above.
TR_API int64_t tr_take_items(const void* items, int64_t count, int64_t item_bytes, const void* order, int64_t index_bytes,
                             void* const* outs, const int64_t* counts, int64_t parts, int64_t rows, int64_t first_row);

#if defined(__cplusplus)
namespace tilerec {

// The finaliser of splitmix64.
static inline uint64_t zch_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
static inline int64_t zch_high(uint64_t mixed, int64_t count) { return (int64_t)(((mixed >> 32) * (uint64_t)count) >> 32); }
static inline int64_t zch_low(uint64_t mixed, int64_t count) {
  return (int64_t)(((mixed & 0xffffffffu) * (uint64_t)count) >> 32);
}

// age ** (n / 256) by products and square roots, which all machines round alike.
static inline double zch_power(int64_t age, int64_t n) {
  double result = 1.0, base = (double)age, root = base;
  for (int64_t whole = n >> 8; whole > 0;) {
    if (whole & 1) result *= base;
    whole >>= 1;
    if (whole > 0) base *= base;
  }
  for (int64_t part = n & 255; part > 0; part = (part << 1) & 255) {
    root = __builtin_sqrt(root);
    if (part & 128) result *= root;
  }
  return result;
}
static inline int64_t zch_exponent(double exponent) { return (int64_t)(exponent * 256 + 0.5); }

// The score of DISTANCE_LFU.
static inline double zch_ratio(int64_t hits, int64_t age, int64_t exponent) {
  return (double)hits / (exponent == 256 ? (double)age : zch_power(age, exponent));
}

// Arguments of tr_take_items.
struct Take {
  const void* items;
  int64_t count, item_bytes;
  const void* order;
  int64_t index_bytes;
  void* const* outs;
  const int64_t* counts;
  int64_t parts, rows, first_row;
};

// Entries begin ... end - 1 of the call. If `positions` is given: entries positions[begin ... end - 1].
struct ZchLane {
  const uint32_t* positions;
  int64_t begin, end;
};

}  // namespace tilerec
#endif
