// Distinct ids of a batch, and their rows at every occurrence (tilerec/ops/distinct/definition.py is the specification).
//
// Keys are dealt to threads: each lists the distinct ids of its keys by a table of (id, position) in open addressing. Rows
// are copied item by item. Sums are dealt to threads by columns, so each number is added up by one thread in item order.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "tilerec.h"

namespace {

using tilerec::Team;
using tilerec::parallel;

constexpr int64_t kThreadBytes = 1 << 19;  // the same of rows

struct Ids {
  int64_t ids, type, offsets, keys, batches, rows, percent, each_id, out, out_offsets, inverse, counts, table, room;
};

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

uint64_t place_of(uint64_t id, int shift) { return (id * 0x9E3779B97F4A7C15ull) >> shift; }

constexpr int64_t kLeft = -1, kBadId = -2;

// Lists the distinct ids of one key in `out`, and returns their number; kLeft or kBadId if the key is left as it is.
template <class Id>
int64_t distinct(const Id* ids, const int64_t* offsets, int64_t bags, bool each_id, int64_t rows, int64_t percent, Id* out,
                 int32_t* inverse, uint64_t* table, int64_t room) {
  const int64_t count = offsets[bags] - offsets[0], items = each_id ? count : bags;
  if (rows <= 0 || rows >= (int64_t{1} << 32) - 1 || items >= int64_t{1} << 31) return kLeft;
  if (!each_id)
    for (int64_t b = 0; b < bags; ++b)
      if (offsets[b + 1] - offsets[b] > 1) return kLeft;
  int64_t size = 64;
  while (size < 2 * count && size < room) size *= 2;
  const int shift = 64 - __builtin_ctzll(static_cast<uint64_t>(size));
  const int64_t most = items * percent / 100;
  std::memset(table, 0, static_cast<size_t>(size) * sizeof(uint64_t));
  const Id* own = ids + offsets[0];
  for (int64_t i = 0; i < count; ++i)
    if (static_cast<int64_t>(own[i]) < 0 || static_cast<int64_t>(own[i]) >= rows) return kBadId;
  int64_t found = 0, n = 0;
  for (int64_t i = 0; i < items; ++i) {
    if (!each_id && offsets[i + 1] == offsets[i]) {
      inverse[i] = -1;
      continue;
    }
    const int64_t id = static_cast<int64_t>(own[n++]);
    const uint64_t tag = static_cast<uint64_t>(id + 1) << 32;  // 0: an empty entry
    uint64_t at = place_of(static_cast<uint64_t>(id), shift);
    while (table[at] && (table[at] ^ tag) >> 32) at = (at + 1) & static_cast<uint64_t>(size - 1);
    if (!table[at]) {
      if (found == most) return kLeft;
      table[at] = tag | static_cast<uint64_t>(found);
      out[found++] = static_cast<Id>(id);
    }
    inverse[i] = static_cast<int32_t>(table[at] & 0xFFFFFFFFu);
  }
  return found;
}

template <class Id>
void distinct_of_keys(const Ids& call, int64_t threads) {
  const Id* ids = pointer<const Id>(call.ids);
  const int64_t *offsets = pointer<const int64_t>(call.offsets), *batches = pointer<const int64_t>(call.batches);
  const int64_t *rows = pointer<const int64_t>(call.rows), *percent = pointer<const int64_t>(call.percent);
  Id* out = pointer<Id>(call.out);
  int64_t *out_offsets = pointer<int64_t>(call.out_offsets), *counts = pointer<int64_t>(call.counts);
  int32_t* inverse = pointer<int32_t>(call.inverse);
  const bool each_id = call.each_id != 0;
  parallel(static_cast<int>(threads), [&](const Team& team) {
    uint64_t* table = pointer<uint64_t>(call.table) + team.thread * call.room;
    int64_t bag = 0;
    for (int64_t k = 0; k < call.keys; ++k) {
      const int64_t* own = offsets + bag;
      if (k % team.threads == team.thread)
        counts[k] = distinct(ids, own, batches[k], each_id, rows[k], percent[k], out + own[0],
                             inverse + (each_id ? own[0] : bag), table, call.room);
      bag += batches[k];
    }
  });
  // Keys move together, to the front; those that are left as they are come from the batch.
  int64_t at = 0, bag = 0, edge = 0;
  out_offsets[edge++] = 0;
  for (int64_t k = 0; k < call.keys; ++k) {
    const int64_t first = offsets[bag], count = offsets[bag + batches[k]] - first;
    const int64_t kept = counts[k] < 0 ? count : counts[k];
    if (counts[k] < 0)
      std::copy(ids + first, ids + first + count, out + at);
    else if (at != first)
      std::memmove(out + at, out + first, static_cast<size_t>(kept) * sizeof(Id));
    if (each_id)
      out_offsets[edge++] = at + kept;
    else if (counts[k] < 0)
      for (int64_t b = 1; b <= batches[k]; ++b) out_offsets[edge++] = at + offsets[bag + b] - first;
    else
      for (int64_t u = 1; u <= kept; ++u) out_offsets[edge++] = at + u;
    at += kept;
    bag += batches[k];
  }
}

struct Slot {
  int64_t count, items, width, start, place, stride;
};

template <class T>
void expand(T* out, const T* rows, const int32_t* inverse, const Slot* slots, int64_t count, const Team& team) {
  for (int64_t s = 0; s < count; ++s) {
    const Slot& slot = slots[s];
    const size_t bytes = static_cast<size_t>(slot.width) * sizeof(T), items = static_cast<size_t>(slot.items);
    for (size_t i = team.begin(items), end = team.end(items); i < end; ++i) {
      T* to = out + slot.place + static_cast<int64_t>(i) * slot.stride;
      const int64_t from = slot.start < 0 ? static_cast<int64_t>(i) : inverse[slot.start + static_cast<int64_t>(i)];
      if (from < 0)
        std::memset(to, 0, bytes);
      else
        std::memcpy(to, rows + from * slot.width, bytes);
    }
    rows += slot.count * slot.width;
  }
}

template <class T>
void sum(T* out, const T* grads, const int32_t* inverse, const Slot* slots, int64_t count, const Team& team) {
  for (int64_t s = 0; s < count; ++s) {
    const Slot& slot = slots[s];
    const int64_t first = static_cast<int64_t>(team.begin(static_cast<size_t>(slot.width)));
    const int64_t width = static_cast<int64_t>(team.end(static_cast<size_t>(slot.width))) - first;
    if (slot.start >= 0)
      for (int64_t u = 0; u < slot.count; ++u)
        std::memset(out + u * slot.width + first, 0, static_cast<size_t>(width) * sizeof(T));
    for (int64_t i = 0; i < slot.items; ++i) {
      const T* from = grads + slot.place + i * slot.stride + first;
      if (slot.start < 0) {
        std::memcpy(out + i * slot.width + first, from, static_cast<size_t>(width) * sizeof(T));
        continue;
      }
      const int64_t u = inverse[slot.start + i];
      if (u < 0) continue;
      T* to = out + u * slot.width + first;
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    }
    out += slot.count * slot.width;
  }
}

int threads_for(const Slot* slots, int64_t count, int64_t size, int64_t threads) {
  int64_t bytes = 0;
  for (int64_t s = 0; s < count; ++s) bytes += slots[s].items * slots[s].width * size;
  return bytes < kThreadBytes ? 1 : static_cast<int>(threads);
}

}  // namespace

TR_API void tr_distinct_ids(const void* call, int64_t threads) {
  const Ids& own = *static_cast<const Ids*>(call);
  if (own.type == 0)  // int32
    distinct_of_keys<int32_t>(own, threads);
  else
    distinct_of_keys<int64_t>(own, threads);
}

TR_API void tr_expand_rows(void* out, const void* rows, const void* inverse, const void* slots, int64_t count, int64_t size,
                           int64_t threads) {
  const Slot* own = static_cast<const Slot*>(slots);
  const int32_t* items = static_cast<const int32_t*>(inverse);
  parallel(threads_for(own, count, size, threads), [&](const Team& team) {
    if (size == 4)
      expand(static_cast<float*>(out), static_cast<const float*>(rows), items, own, count, team);
    else
      expand(static_cast<double*>(out), static_cast<const double*>(rows), items, own, count, team);
  });
}

TR_API void tr_sum_rows(void* out, const void* grads, const void* inverse, const void* slots, int64_t count, int64_t size,
                        int64_t threads) {
  const Slot* own = static_cast<const Slot*>(slots);
  const int32_t* items = static_cast<const int32_t*>(inverse);
  parallel(threads_for(own, count, size, threads), [&](const Team& team) {
    if (size == 4)
      sum(static_cast<float*>(out), static_cast<const float*>(grads), items, own, count, team);
    else
      sum(static_cast<double*>(out), static_cast<const double*>(grads), items, own, count, team);
  });
}
