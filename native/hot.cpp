// Hot ids of a batch (tilerec/ops/hot/definition.py is the specification, with the terms).
//
// Maps are dealt to threads. Each map has a key of its own, so no two threads write the same ids.
#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "tilerec.h"

namespace {

// One map, as the caller writes it: seven numbers. `begin` and `end` are addresses of offsets; `bad` is the result.
struct Map {
  int64_t begin, end, hot, finder, slots, rows, bad;
};

// Replaces the ids of a map; returns the position of the first id outside of the table, or -1.
template <class Id>
int64_t replace(const Map& map, Id* ids, int64_t count) {
  if (map.slots == 0) return -1;
  const int64_t* hot = reinterpret_cast<const int64_t*>(map.hot);
  const int32_t* finder = reinterpret_cast<const int32_t*>(map.finder);
  const int64_t begin = std::max<int64_t>(0, *reinterpret_cast<const int64_t*>(map.begin));
  const int64_t end = std::min(count, *reinterpret_cast<const int64_t*>(map.end));
  const int shift = 64 - __builtin_ctzll(static_cast<uint64_t>(map.slots));
  const uint64_t mask = static_cast<uint64_t>(map.slots) - 1;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t id = static_cast<int64_t>(ids[n]);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(map.rows)) return n;
    uint64_t slot = (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> shift;
    for (;; slot = (slot + 1) & mask) {
      const int64_t place = finder[slot], k = std::max<int64_t>(place - 1, 0);
      const int64_t found = (place != 0) & (hot[k] == id);
      // No branch: whether an id is hot cannot be predicted. Most ids end at their first slot.
      ids[n] = static_cast<Id>(id + ((map.rows + k - id) & -found));
      if (__builtin_expect(found | (place == 0), 1)) break;
    }
  }
  return -1;
}

}  // namespace

// Returns m * count + n for the first bad id n of the first map m that has one, or -1.
TR_API int64_t tr_hot_ids(void* calls, int64_t maps, int64_t ids, int64_t type, int64_t count, int64_t threads) {
  Map* all = static_cast<Map*>(calls);
  // A second thread is worth its start from about 30 us of work on.
  tilerec::parallel(count < 16384 || maps < 2 ? 1 : static_cast<int>(threads), [&](const tilerec::Team& team) {
    for (size_t m = team.begin(static_cast<size_t>(maps)), end = team.end(static_cast<size_t>(maps)); m < end; ++m) {
      all[m].bad = type == 0 ? replace(all[m], reinterpret_cast<int32_t*>(ids), count)
                             : replace(all[m], reinterpret_cast<int64_t*>(ids), count);
    }
  });
  for (int64_t m = 0; m < maps; ++m)
    if (all[m].bad >= 0) return m * count + all[m].bad;
  return -1;
}
