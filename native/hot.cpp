// Hot ids of a batch, and copies of hot rows after an update (tilerec/ops/hot/definition.py and copies.py are the
// specification, with the terms).
//
// Maps are dealt to threads. Each map has a key of its own, so no two threads write the same ids. Pairs of tensors are, too:
// the targets of two pairs share no row.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "tilerec.h"

namespace {

// Rows between a prefetch and the copy: a row of 512 bytes takes 20 to 40 ns, memory about 100.
constexpr int64_t kAhead = 4;

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
  const int64_t rows = map.rows;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t id = static_cast<int64_t>(ids[n]);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows)) return n;
    uint64_t slot = (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> shift;
    int64_t place = finder[slot];
    // Most ids end at their first slot.
    while (__builtin_expect((place != 0) & (hot[std::max<int64_t>(place - 1, 0)] != id), 0)) {
      slot = (slot + 1) & mask;
      place = finder[slot];
    }
    // No branch: whether an id is hot cannot be predicted.
    ids[n] = static_cast<Id>(id + ((rows + place - 1 - id) & -static_cast<int64_t>(place != 0)));
  }
  return -1;
}

// One pair of tensors, as the caller writes it: ten numbers. Widths are in elements, `column` is the first of the source.
struct Pair {
  int64_t target, source, target_rows, source_rows, target_width, source_width, element, begin, end, column;
};

// Copies the rows of a pair; returns the position of the first row outside of its tensor, or -1.
int64_t copy(const Pair& pair, const int64_t* targets, const int64_t* sources) {
  const size_t bytes = static_cast<size_t>(pair.target_width * pair.element);
  const int64_t from = pair.source_width * pair.element;
  char* target = reinterpret_cast<char*>(pair.target);
  const char* source = reinterpret_cast<const char*>(pair.source) + pair.column * pair.element;
  for (int64_t u = pair.begin; u < pair.end; ++u) {
    const int64_t to = targets[u], own = sources[u];
    if (static_cast<uint64_t>(to) >= static_cast<uint64_t>(pair.target_rows) ||
        static_cast<uint64_t>(own) >= static_cast<uint64_t>(pair.source_rows))
      return u;
    // Rows of a table are far apart, and each would wait for its cache lines.
    if (u + kAhead < pair.end && static_cast<uint64_t>(targets[u + kAhead]) < static_cast<uint64_t>(pair.target_rows)) {
      const char* next = target + targets[u + kAhead] * static_cast<int64_t>(bytes);
      for (size_t at = 0; at < bytes && at < 1024; at += 64) __builtin_prefetch(next + at, 1);
    }
    std::memcpy(target + to * static_cast<int64_t>(bytes), source + own * from, bytes);
  }
  return -1;
}

template <class Id>
void mark(uint8_t* changed, const Id* ids, int64_t begin, int64_t end, int64_t rows) {
  for (int64_t n = begin; n < end; ++n)
    if (static_cast<uint64_t>(static_cast<int64_t>(ids[n])) < static_cast<uint64_t>(rows)) changed[ids[n]] = 1;
}

}  // namespace

// Writes the updated rows of heads that lie in tiles, and their number for each tile; returns their number in all.
// lists: heads, begins, ends of each range; names, sizes of each head; head, first and end row of each tile. changed: zeros,
// one for each row of all heads.
TR_API int64_t tr_updated_hot_rows(const int64_t* lists, int64_t ranges, int64_t heads, int64_t tiles, int64_t ids,
                                   int64_t type, uint8_t* changed, int64_t* sources, int64_t* targets, int64_t* counts) {
  const int64_t *of = lists, *begins = of + ranges, *ends = begins + ranges, *names = ends + ranges, *sizes = names + heads;
  const int64_t *tile_of = sizes + heads, *firsts = tile_of + tiles, *lasts = firsts + tiles;
  std::vector<uint8_t*> own(static_cast<size_t>(heads));
  for (int64_t h = 0; h < heads; ++h) {
    own[static_cast<size_t>(h)] = changed;
    changed += sizes[h];
  }
  for (int64_t r = 0; r < ranges; ++r) {
    const int64_t h = of[r];
    if (type == TR_I32)
      mark(own[static_cast<size_t>(h)], reinterpret_cast<const int32_t*>(ids), begins[r], ends[r], sizes[h]);
    else
      mark(own[static_cast<size_t>(h)], reinterpret_cast<const int64_t*>(ids), begins[r], ends[r], sizes[h]);
  }
  int64_t found = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t h = tile_of[t], before = found;
    const int64_t* rows = reinterpret_cast<const int64_t*>(names[h]);
    const int64_t begin = std::lower_bound(rows, rows + sizes[h], firsts[t]) - rows;
    const int64_t end = std::lower_bound(rows + begin, rows + sizes[h], std::max(firsts[t], lasts[t])) - rows;
    for (int64_t k = begin; k < end; ++k) {
      if (!own[static_cast<size_t>(h)][k]) continue;
      sources[found] = k;
      targets[found++] = rows[k] - firsts[t];
    }
    counts[t] = found - before;
  }
  return found;
}

// Copies rows of pairs of tensors; returns the position of a row outside of its tensor, or -1. Rows before it are copied.
TR_API int64_t tr_copy_rows(const void* calls, int64_t pairs, const int64_t* targets, const int64_t* sources, int64_t threads) {
  const Pair* all = static_cast<const Pair*>(calls);
  int64_t rows = 0;
  for (int64_t k = 0; k < pairs; ++k) rows += all[k].end - all[k].begin;
  std::atomic<int64_t> bad{-1};
  // A second thread is worth its start from about 30 us of work on.
  tilerec::parallel(rows < 512 || pairs < 2 ? 1 : static_cast<int>(threads), [&](const tilerec::Team& team) {
    for (size_t k = team.begin(static_cast<size_t>(pairs)), end = team.end(static_cast<size_t>(pairs)); k < end; ++k) {
      const int64_t at = copy(all[k], targets, sources);
      if (at >= 0) bad = at;
    }
  });
  return bad;
}

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
