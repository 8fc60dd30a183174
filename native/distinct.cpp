// Distinct ids of a batch, and their rows at every item (distinct.h; tilerec/ops/distinct/definition.py is the specification).
//
// Keys are dealt to threads: each lists the distinct ids of its keys by a table of (id, position) in open addressing. Copied
// rows are dealt by features and their columns, so each number of the output belongs to one thread, which takes the segments
// in order. Sums are dealt by rows.
#include "distinct.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(void expand_repeated(const RepeatedRows& rows))
TILEREC_DECLARE(void sum_repeated(const RepeatedRows& rows))

namespace {

using namespace tilerec;

constexpr int64_t kLeft = -1, kBadId = -2;
constexpr int64_t kStreamBytes = 4 << 20;  // outputs from here on are written around the caches
constexpr int64_t kThreadBytes = 1 << 19;  // for fewer bytes of rows, one thread is enough

uint64_t place_of(uint64_t id, int shift) { return (id * 0x9E3779B97F4A7C15ull) >> shift; }

// One key of a batch.
template <class Id>
struct Key {
  const Id* ids;
  const int64_t* offsets;
  int64_t bags, rows, percent;
  bool each_id;
  int64_t count() const { return offsets[bags] - offsets[0]; }
  bool present(int64_t item) const { return each_id || offsets[item + 1] > offsets[item]; }
};

// Lists the distinct ids of a key in `out`, their items and the ends of their items; returns the number of distinct ids, or
// kLeft or kBadId if the key is left as it is.
template <class Id>
int64_t distinct(const Key<Id>& key, Id* out, int32_t* items, int32_t* ends, int32_t* inverse, uint64_t* table, int64_t room) {
  const int64_t count = key.count(), all = key.each_id ? count : key.bags;
  if (key.rows <= 0 || key.rows >= (int64_t{1} << 32) - 1 || all >= int64_t{1} << 31) return kLeft;
  if (!key.each_id)
    for (int64_t b = 0; b < key.bags; ++b)
      if (key.offsets[b + 1] - key.offsets[b] > 1) return kLeft;
  int64_t size = 64;
  while (size < 2 * count && size < room) size *= 2;
  const int shift = 64 - __builtin_ctzll(static_cast<uint64_t>(size));
  const int64_t most = all * key.percent / 100;
  std::memset(table, 0, static_cast<size_t>(size) * sizeof(uint64_t));
  for (int64_t i = 0; i < count; ++i)
    if (static_cast<int64_t>(key.ids[i]) < 0 || static_cast<int64_t>(key.ids[i]) >= key.rows) return kBadId;
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = static_cast<int64_t>(key.ids[i]);
    const uint64_t tag = static_cast<uint64_t>(id + 1) << 32;  // 0: an empty entry
    uint64_t at = place_of(static_cast<uint64_t>(id), shift);
    while (table[at] && (table[at] ^ tag) >> 32) at = (at + 1) & static_cast<uint64_t>(size - 1);
    if (!table[at]) {
      if (found == most) return kLeft;
      table[at] = tag | static_cast<uint64_t>(found);
      ends[found] = 0;
      out[found++] = static_cast<Id>(id);
    }
    inverse[i] = static_cast<int32_t>(table[at] & 0xFFFFFFFFu);
    ++ends[inverse[i]];
  }
  int32_t total = 0;
  for (int64_t u = 0; u < found; ++u) {
    const int32_t own = ends[u];
    ends[u] = total;  // its first item now; each item moves it on
    total += own;
  }
  for (int64_t item = 0, i = 0; item < all; ++item)
    if (key.present(item)) items[ends[inverse[i++]]++] = static_cast<int32_t>(item);
  return found;
}

template <class Id>
void distinct_of_keys(tr_distinct& call) {
  const Id* ids = static_cast<const Id*>(call.ids);
  const int64_t *offsets = call.offsets, *batches = call.lists, *rows = batches + call.keys, *percent = rows + call.keys;
  Id* out = static_cast<Id*>(call.out);
  int64_t *out_offsets = call.out_offsets, *counts = call.counts;
  const bool each_id = call.each_id != 0;
  parallel(static_cast<int>(call.threads), [&](const Team& team) {
    uint64_t* table = call.table + team.thread * call.room;
    int64_t bag = 0;
    for (int64_t k = 0; k < call.keys; ++k) {
      const int64_t first = offsets[bag];
      if (k % team.threads == team.thread)
        counts[k] = distinct<Id>({ids + first, offsets + bag, batches[k], rows[k], percent[k], each_id}, out + first,
                                 call.items + first, call.starts + first + 1, call.inverse + first, table, call.room);
      bag += batches[k];
    }
  });
  // Keys move together, to the front; ids of keys that are left as they are come from the batch.
  int64_t at = 0, bag = 0, edge = 0, item = 0, start = 1;
  out_offsets[edge++] = 0;
  call.starts[0] = 0;
  for (int64_t k = 0; k < call.keys; ++k) {
    const int64_t first = offsets[bag], count = offsets[bag + batches[k]] - first;
    const int64_t kept = counts[k] < 0 ? count : counts[k];
    if (counts[k] < 0) {
      std::copy(ids + first, ids + first + count, out + at);
    } else {
      std::memmove(out + at, out + first, static_cast<size_t>(kept) * sizeof(Id));
      std::memmove(call.items + item, call.items + first, static_cast<size_t>(count) * sizeof(int32_t));
      for (int64_t u = 0; u < kept; ++u) call.starts[start + u] = static_cast<int32_t>(item) + call.starts[first + 1 + u];
      item += count;
      start += kept;
    }
    if (each_id)
      out_offsets[edge++] = at + kept;
    else if (counts[k] < 0)
      for (int64_t b = 1; b <= batches[k]; ++b) out_offsets[edge++] = at + offsets[bag + b] - first;
    else
      for (int64_t u = 1; u <= kept; ++u) out_offsets[edge++] = at + u;
    at += kept;
    bag += batches[k];
  }
  call.item_count = item;
}

// Returns true if a row's part of the output is whole cache lines.
bool whole_lines(const RepeatedRows& s) {
  return (static_cast<uint64_t>(s.width_bytes | s.stride_bytes) | reinterpret_cast<uintptr_t>(s.flat)) % 64 == 0;
}

// The segments of a call, checked.
class Segments {
 public:
  explicit Segments(const tr_repeats& call) : call_(call), n_(call.segments) {}

  // Returns 1 + the first segment that leaves its tensors, or 0.
  int64_t resolve(bool sums) {
    int64_t at = 0;
    for (int64_t s = 0; s < n_; ++s) {
      const int64_t count = list(0, s), width = list(1, s), start = list(2, s), place = list(3, s), stride = list(4, s);
      const int64_t first = list(6, s);
      if (count == 0) {
        rows_.push_back({});
        continue;
      }
      if (count < 0 || width < 0 || stride < 0 || place < 0 || place > call_.flat_size || width > call_.flat_size - place ||
          (width > 0 && count > (call_.rows_size - at) / width) ||
          (start >= 0 && (start > call_.slot_count || count > call_.slot_count - start)))
        return s + 1;
      RepeatedRows own{call_.rows + at * call_.element_bytes, width * call_.element_bytes,
                       call_.flat + place * call_.element_bytes, stride * call_.element_bytes,
                       width * call_.element_bytes, 0, count, start < 0 ? nullptr : call_.slots + start, nullptr, nullptr,
                       call_.element_bytes, !sums && first < 0 && list(5, s) != 0, false};
      own.past_caches = call_.flat_size * call_.element_bytes >= kStreamBytes && !call_.fresh && whole_lines(own);
      at += count * width;
      const int64_t last_item = stride ? (call_.flat_size - place - width) / stride : INT32_MAX;
      if (first >= 0) own.items = call_.items, own.starts = call_.starts + first;
      for (int64_t row = 0; row < count; ++row) {
        const int64_t slot = own.slots ? own.slots[row] : row;
        if (slot < 0 || (first < 0 ? slot > last_item : first + slot + 1 >= call_.start_count)) return s + 1;
        if (first < 0) continue;
        const int64_t begin = own.starts[slot], end = own.starts[slot + 1];
        if (begin < 0 || begin >= end || end > call_.item_count) return s + 1;
        for (int64_t i = begin; i < end; ++i)
          if (own.items[i] < 0 || own.items[i] > last_item) return s + 1;
      }
      bytes_ += count * width * call_.element_bytes;
      rows_.push_back(own);
    }
    return 0;
  }

  int64_t list(int64_t which, int64_t s) const { return call_.lists[which * n_ + s]; }
  const std::vector<RepeatedRows>& rows() const { return rows_; }
  int threads() const { return bytes_ < kThreadBytes ? 1 : static_cast<int>(call_.threads); }

 private:
  const tr_repeats& call_;
  int64_t n_, bytes_ = 0;
  std::vector<RepeatedRows> rows_;
};

// A range of columns of one feature.
struct Columns {
  int64_t feature, begin, end;  // elements of `flat`, counted from item 0
};

std::vector<Columns> columns_of(const Segments& segments, int64_t n, int64_t threads) {
  std::vector<Columns> found;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t feature = segments.list(7, s), begin = segments.list(3, s), end = begin + segments.list(1, s);
    auto own = std::find_if(found.begin(), found.end(), [&](const Columns& c) { return c.feature == feature; });
    if (own == found.end())
      found.push_back({feature, begin, end});
    else
      own->begin = std::min(own->begin, begin), own->end = std::max(own->end, end);
  }
  if (threads <= 1 || found.empty()) return found;
  const int64_t pieces = (threads + static_cast<int64_t>(found.size()) - 1) / static_cast<int64_t>(found.size());
  std::vector<Columns> cut;
  for (const Columns& c : found) {
    const int64_t step = std::max<int64_t>(16, ((c.end - c.begin + pieces - 1) / pieces + 15) / 16 * 16);
    for (int64_t begin = c.begin; begin < c.end; begin += step) cut.push_back({c.feature, begin, std::min(c.end, begin + step)});
  }
  return cut;
}

}  // namespace

TR_API void tr_distinct_ids(tr_distinct* call) {
  if (call->index_type == TR_I32)
    distinct_of_keys<int32_t>(*call);
  else
    distinct_of_keys<int64_t>(*call);
}

TR_API int64_t tr_expand_rows(tr_repeats* call) {
  Segments segments(*call);
  if (const int64_t bad = segments.resolve(false)) return bad;
  const int64_t n = call->segments, size = call->element_bytes;
  const int threads = segments.threads();
  if (call->fresh)
    parallel(threads, [&](const Team& team) {
      const size_t all = static_cast<size_t>(call->flat_size * size), begin = team.begin(all), end = team.end(all);
      std::memset(call->flat + begin, 0, end - begin);
    });
  if (threads == 1) {  // one pass
    for (const RepeatedRows& own : segments.rows()) TILEREC_CALL(expand_repeated)(own);
    return 0;
  }
  const std::vector<Columns> columns = columns_of(segments, n, threads);
  parallel(threads, [&](const Team& team) {
    for (size_t c = static_cast<size_t>(team.thread); c < columns.size(); c += static_cast<size_t>(team.threads))
      for (int64_t s = 0; s < n; ++s) {
        const int64_t place = segments.list(3, s);
        const int64_t begin = std::max(columns[c].begin, place);
        const int64_t end = std::min(columns[c].end, place + segments.list(1, s));
        if (segments.list(7, s) != columns[c].feature || begin >= end) continue;
        RepeatedRows own = segments.rows()[static_cast<size_t>(s)];
        own.rows += (begin - place) * size;
        own.flat += (begin - place) * size;
        own.width_bytes = (end - begin) * size;
        own.past_caches = own.past_caches && whole_lines(own);
        TILEREC_CALL(expand_repeated)(own);
      }
  });
  return 0;
}

TR_API int64_t tr_sum_rows(tr_repeats* call) {
  Segments segments(*call);
  if (const int64_t bad = segments.resolve(true)) return bad;
  parallel(segments.threads(), [&](const Team& team) {
    for (RepeatedRows own : segments.rows()) {
      const size_t count = static_cast<size_t>(own.end);
      own.begin = static_cast<int64_t>(team.begin(count));
      own.end = static_cast<int64_t>(team.end(count));
      TILEREC_CALL(sum_repeated)(own);
    }
  });
  return 0;
}
