// Calls of hash.h: checks, distribution of entries over threads by bucket, resizing.
#include "hash.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(void zch_assign_lane(const tr_zch& call, const ZchLane& lane))
TILEREC_DECLARE(void zch_find_run(const tr_zch& call, int64_t begin, int64_t end))
TILEREC_DECLARE(int64_t zch_first_stray(const tr_zch& call, int64_t begin, int64_t end))
TILEREC_DECLARE(void zch_bucket_run(const int64_t* ids, int64_t buckets, int64_t* out, int64_t begin, int64_t end))
TILEREC_DECLARE(void hash_row_run(const int64_t* ids, int64_t count, int64_t rows, int64_t first_row, int64_t* out))
TILEREC_DECLARE(int64_t take_items_run(const Take& call))

namespace tilerec {
namespace {

constexpr int64_t kEntriesForThreads = 2048;  // fewer entries are finished before a second thread has woken up
constexpr int64_t kMostBins = 1024;
constexpr int64_t kLanesPerThread = 8;

int threads_for(int64_t entries, int64_t threads) {
  return entries < kEntriesForThreads ? 1 : static_cast<int>(std::max<int64_t>(1, threads));
}

// Calls f(begin, end) with each thread's share.
template <class Body>
void share(int threads, int64_t count, const Body& f) {
  parallel(threads, [&](const Team& team) {
    f(static_cast<int64_t>(team.begin(static_cast<size_t>(count))), static_cast<int64_t>(team.end(static_cast<size_t>(count))));
  });
}

template <class Call, class Body>
int64_t guarded(Call* call, Body body) {
  call->report = {TR_OK, 0, 0, 0};
  try {
    body();
  } catch (const std::exception&) {  // bad_alloc, or length_error: more than any memory
    call->report = {TR_NO_MEMORY, 0, 0, 0};
  }
  return call->report.status;
}

void lower(std::atomic<int64_t>& lowest, int64_t value) {
  int64_t seen = lowest.load(std::memory_order_relaxed);
  while (value < seen && !lowest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// Returns false and fills the report if an id's bucket is not held.
bool all_held(tr_zch& call, int threads) {
  if (call.first == 0 && call.held == call.buckets) return true;
  std::atomic<int64_t> lowest{call.count};
  share(threads, call.count, [&](int64_t begin, int64_t end) {
    const int64_t stray = TILEREC_CALL(zch_first_stray)(call, begin, end);
    if (stray < end) lower(lowest, stray);
  });
  const int64_t at = lowest.load();
  if (at == call.count) return true;
  call.report = {TR_BAD_ID, 0, at, call.ids[at]};
  return false;
}

bool numbers_fit(tr_zch& call) {
  if (call.counts == nullptr && call.ttls == nullptr) return true;
  for (int64_t n = 0; n < call.count; ++n) {
    if (call.counts != nullptr && (call.counts[n] < 1 || call.counts[n] > INT32_MAX)) {
      call.report = {TR_BAD_ARGUMENT, TR_ZCH_BAD_COUNT, n, call.counts[n]};
      return false;
    }
    if (call.ttls != nullptr && (call.ttls[n] < 0 || call.ttls[n] > int64_t(1) << 61)) {
      call.report = {TR_BAD_ARGUMENT, TR_ZCH_BAD_TTL, n, call.ttls[n]};
      return false;
    }
  }
  return true;
}

// Sorts entries by bin (2^shift neighbouring buckets), then assigns them in lanes: neighbouring bins with about equal
// numbers of entries.
void assign_in_lanes(tr_zch& call, int threads) {
  int shift = 0;
  while ((call.held - 1) >> shift >= kMostBins) ++shift;
  const int64_t bins = ((call.held - 1) >> shift) + 1, count = call.count;
  const std::unique_ptr<uint16_t[]> bin_of(new uint16_t[static_cast<size_t>(count)]);
  const std::unique_ptr<uint32_t[]> positions(new uint32_t[static_cast<size_t>(count)]);
  std::vector<int64_t> places(static_cast<size_t>(threads * bins));  // per thread and bin: first counts, then positions
  std::vector<int64_t> cuts{0};
  cuts.reserve(static_cast<size_t>(threads * kLanesPerThread) + 2);
  std::atomic<size_t> next{0};
  parallel(threads, [&](const Team& team) {
    int64_t* own = places.data() + team.thread * bins;
    const size_t begin = team.begin(static_cast<size_t>(count)), end = team.end(static_cast<size_t>(count));
    for (size_t n = begin; n < end; ++n) {
      const int64_t bin = (zch_high(zch_mix(static_cast<uint64_t>(call.ids[n])), call.buckets) - call.first) >> shift;
      bin_of[n] = static_cast<uint16_t>(bin);
      ++own[bin];
    }
    team.wait();
    if (team.thread == 0) {
      const int64_t least = count / (team.threads * kLanesPerThread) + 1;
      int64_t at = 0;
      for (int64_t bin = 0; bin < bins; ++bin) {
        for (int t = 0; t < team.threads; ++t) {
          int64_t& place = places[static_cast<size_t>(t * bins + bin)];
          const int64_t here = place;
          place = at;
          at += here;
        }
        if (at - cuts.back() >= least) cuts.push_back(at);
      }
      if (cuts.back() < at) cuts.push_back(at);
    }
    team.wait();
    for (size_t n = begin; n < end; ++n) positions[own[bin_of[n]]++] = static_cast<uint32_t>(n);
    team.wait();
    for (size_t lane; (lane = next.fetch_add(1, std::memory_order_relaxed)) + 1 < cuts.size();)
      TILEREC_CALL(zch_assign_lane)(call, ZchLane{positions.get(), cuts[lane], cuts[lane + 1]});
  });
}

// Moves the evicted rows and ids to the front, in the order of the entries that evicted them.
void collect_evictions(tr_zch& call) {
  int64_t found = 0, n = 0;
  const auto take = [&](int64_t at) {
    if (call.outcomes[at] != TR_EVICTED) return;
    call.evicted_rows[found] = call.rows[at];
    call.evicted_ids[found++] = call.evicted_ids[at];
  };
  for (; n + 8 <= call.count; n += 8) {
    uint64_t outcomes;
    std::memcpy(&outcomes, call.outcomes + n, sizeof outcomes);
    if (outcomes == 0) continue;  // hits
    for (int64_t i = n; i < n + 8; ++i) take(i);
  }
  for (; n < call.count; ++n) take(n);
  call.evicted = found;
}

// ------------------------------------------------------------------------------------------------ resizing

struct Live {
  int64_t bucket;  // the new bucket, counted from the first
  int64_t first, second;
  double score;
  int64_t row, start, slot;
};

// Ids that the policy evicts last come first; of equals those of lower rows.
bool before(const Live& a, const Live& b) {
  if (a.bucket != b.bucket) return a.bucket < b.bucket;
  if (a.score != b.score) return a.score > b.score;
  if (a.first != b.first) return a.first > b.first;
  if (a.second != b.second) return a.second > b.second;
  return a.row < b.row;
}

// Old buckets and new buckets that share no id with other buckets: one old and several new ones, or the reverse.
class Group {
 public:
  int64_t old_begin = 0, old_end = 0;
  std::vector<Live> live;

  // The lowest row whose id is of another bucket; -1 if there is none.
  int64_t gather(const tr_zch_resizing& call, int64_t new_first) {
    live.clear();
    const int64_t exponent = zch_exponent(call.exponent);
    for (int64_t bucket = old_begin; bucket < old_end; ++bucket)
      for (int64_t row = bucket * call.slots; row < (bucket + 1) * call.slots; ++row) {
        call.moved[row] = -1;
        if (call.used[row] == 0) continue;
        const uint64_t mixed = zch_mix(static_cast<uint64_t>(call.slot_ids[row]));
        if (zch_high(mixed, call.buckets) != bucket + call.first) return row;
        call.moved[row] = -2;
        Live item{zch_high(mixed, call.new_buckets) - new_first, 0, 0, 0, row, zch_low(mixed, call.new_slots), -1};
        switch (call.policy) {
          case TR_LRU: item.first = call.last[row]; break;
          case TR_LFU: item.first = call.hits[row]; item.second = call.last[row]; break;
          case TR_DISTANCE_LFU:
            item.score = zch_ratio(call.hits[row], std::max<int64_t>(call.step - call.last[row], 1), exponent);
            break;
          default: item.first = call.expires[row];
        }
        live.push_back(item);
      }
    std::sort(live.begin(), live.end(), before);
    return -1;
  }

  void place(const tr_zch_resizing& call, int64_t new_first) {
    for (size_t begin = 0, end; begin < live.size(); begin = end) {
      for (end = begin + 1; end < live.size() && live[end].bucket == live[begin].bucket;) ++end;
      Live *first = live.data() + begin, *last = live.data() + end;
      const int64_t base = live[begin].bucket * call.new_slots;
      if (!find_slots(call, first, last) && last - first <= call.new_slots) {
        // The first placement stays if this order does not keep every id.
        in_turn.assign(first, last);
        const int64_t from = cut(call, first, last);
        std::stable_sort(in_turn.begin(), in_turn.end(), [&](const Live& a, const Live& b) {
          return turn(a.start - from, call.new_slots) < turn(b.start - from, call.new_slots);
        });
        if (find_slots(call, in_turn.data(), in_turn.data() + in_turn.size()))
          std::copy(in_turn.begin(), in_turn.end(), first);
      }
      for (const Live* item = first; item < last; ++item)
        if (item->slot >= 0) move(call, *item, base + item->slot, new_first);
    }
  }

 private:
  std::vector<Live> in_turn;
  std::vector<uint8_t> taken;
  std::vector<int64_t> per_slot;

  static int64_t turn(int64_t distance, int64_t slots) { return distance < 0 ? distance + slots : distance; }

  // Each id takes the first empty slot of its window, in order. Returns false if an id finds none.
  bool find_slots(const tr_zch_resizing& call, Live* first, Live* last) {
    const int64_t window = std::min(call.max_probe, call.new_slots);
    bool all = true;
    taken.assign(static_cast<size_t>(call.new_slots), 0);
    for (Live* item = first; item < last; ++item) {
      item->slot = -1;
      for (int64_t probe = 0, slot = item->start; probe < window; ++probe, slot = slot + 1 == call.new_slots ? 0 : slot + 1) {
        if (taken[slot] != 0) continue;
        taken[slot] = 1;
        item->slot = slot;
        break;
      }
      all &= item->slot >= 0;
    }
    return all;
  }

  // The slot after the position where (ids that start up to it) - (slots up to it) is least.
  int64_t cut(const tr_zch_resizing& call, const Live* first, const Live* last) {
    per_slot.assign(static_cast<size_t>(call.new_slots), 0);
    for (const Live* item = first; item < last; ++item) ++per_slot[item->start];
    int64_t balance = 0, least = 1, found = 0;
    for (int64_t slot = 0; slot < call.new_slots; ++slot) {
      balance += per_slot[slot] - 1;
      if (balance >= least) continue;
      least = balance;
      found = slot + 1 == call.new_slots ? 0 : slot + 1;
    }
    return found;
  }

  static void move(const tr_zch_resizing& call, const Live& item, int64_t at, int64_t new_first) {
    call.new_ids[at] = call.slot_ids[item.row];
    call.new_used[at] = 1;
    call.new_since[at] = call.since[item.row];
    call.new_last[at] = call.last[item.row];
    call.new_hits[at] = call.hits[item.row];
    if (call.expires != nullptr) call.new_expires[at] = call.expires[item.row];
    call.moved[item.row] = new_first * call.new_slots + at;
  }
};

void resize(tr_zch_resizing& call) {
  const int64_t merged = std::max<int64_t>(1, call.buckets / call.new_buckets), groups = call.held / merged;
  const int64_t new_first = call.new_buckets >= call.buckets ? call.first * (call.new_buckets / call.buckets) : call.first / merged;
  std::atomic<int64_t> lowest{INT64_MAX}, next{0};
  std::atomic<bool> no_memory{false};
  const int threads = threads_for(call.held * call.slots, call.threads);
  parallel(static_cast<int>(std::min<int64_t>(threads, groups)), [&](const Team&) {
    try {
      Group group;
      for (int64_t g; (g = next.fetch_add(1, std::memory_order_relaxed)) < groups;) {
        group.old_begin = g * merged;
        group.old_end = group.old_begin + merged;
        const int64_t lost = group.gather(call, new_first);
        if (lost >= 0)
          lower(lowest, lost);
        else
          group.place(call, new_first);
      }
    } catch (const std::exception&) {
      no_memory.store(true);
    }
  });
  const int64_t lost = lowest.load();
  if (no_memory.load())
    call.report = {TR_NO_MEMORY, 0, 0, 0};
  else if (lost != INT64_MAX)
    call.report = {TR_BAD_ID, 0, lost, call.slot_ids[lost]};
}

}  // namespace
}  // namespace tilerec

using namespace tilerec;

TR_API int64_t tr_zch_find(tr_zch* call) {
  return guarded(call, [&] {
    const int threads = threads_for(call->count, call->threads);
    if (!all_held(*call, threads)) return;
    share(threads, call->count, [&](int64_t begin, int64_t end) { TILEREC_CALL(zch_find_run)(*call, begin, end); });
  });
}

TR_API int64_t tr_zch_assign(tr_zch* call) {
  return guarded(call, [&] {
    const int threads = static_cast<int>(std::min<int64_t>(threads_for(call->count, call->threads), call->held));
    if (!all_held(*call, threads) || !numbers_fit(*call)) return;
    if (threads <= 1 || call->count > INT64_C(0xffffffff))
      TILEREC_CALL(zch_assign_lane)(*call, ZchLane{nullptr, 0, call->count});
    else
      assign_in_lanes(*call, threads);
    collect_evictions(*call);
  });
}

TR_API int64_t tr_zch_resize(tr_zch_resizing* call) {
  return guarded(call, [&] { resize(*call); });
}

TR_API void tr_zch_buckets(const int64_t* ids, int64_t count, int64_t buckets, int64_t* out, int64_t threads) {
  share(threads_for(count / 4, threads), count,
        [&](int64_t begin, int64_t end) { TILEREC_CALL(zch_bucket_run)(ids, buckets, out, begin, end); });
}

TR_API void tr_hash_rows(const int64_t* ids, int64_t count, int64_t rows, int64_t first_row, int64_t* out) {
  TILEREC_CALL(hash_row_run)(ids, count, rows, first_row, out);
}

TR_API int64_t tr_take_items(const void* items, int64_t count, int64_t item_bytes, const void* order, int64_t index_bytes,
                             void* const* outs, const int64_t* counts, int64_t parts, int64_t rows, int64_t first_row) {
  return TILEREC_CALL(take_items_run)({items, count, item_bytes, order, index_bytes, outs, counts, parts, rows, first_row});
}
