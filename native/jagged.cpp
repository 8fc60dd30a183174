// Jagged algebra (tilerec/ops/jagged/definition.py specifies each function, with a numeric example).
//
//   segment   a run of neighbouring items; S of them, offsets[S + 1] ascend from 0
//   item      `item_bytes` bytes: most functions move items and do not interpret them
//
// Threads share the work by items, not by segments: one long bag does not stall the others. Every thread writes its own
// part of the output and sums run first to last within it, so results do not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "parallel.h"
#include "jagged.h"

namespace {

using tilerec::parallel;
using tilerec::Team;

// Below this many bytes of memory traffic, waking a second thread costs more than it saves.
constexpr int64_t kBytesWorthThreads = 1 << 16;

int32_t threads_for(int64_t bytes, int32_t threads) { return bytes < kBytesWorthThreads ? 1 : threads; }

// The lowest position at which any thread found an error.
class Fault {
 public:
  void raise(int64_t position) {
    int64_t seen = lowest_.load(std::memory_order_relaxed);
    while (position < seen && !lowest_.compare_exchange_weak(seen, position, std::memory_order_relaxed)) {
    }
  }
  bool raised() const { return lowest_.load(std::memory_order_relaxed) != INT64_MAX; }
  int64_t position() const { return lowest_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> lowest_{INT64_MAX};
};

void fill(tr_report* report, int64_t status, int64_t position = 0, int64_t value = 0) {
  *report = tr_report{status, -1, position, value};
}

// Checks that offsets ascend within [0, end]; with `exact` they begin at 0 and stop at `end`. Ends with a barrier.
void check_offsets(const Team& team, const int64_t* offsets, int64_t segments, int64_t end, bool exact, Fault* fault) {
  for (size_t s = team.begin(segments), stop = team.end(segments); s < stop; ++s)
    if (offsets[s] > offsets[s + 1] || offsets[s] < 0 || offsets[s + 1] > end) fault->raise(static_cast<int64_t>(s));
  if (team.thread == 0) {
    if (offsets[0] < 0 || (exact && offsets[0] != 0)) fault->raise(0);
    if (exact ? offsets[segments] != end : offsets[segments] > end) fault->raise(segments);
  }
  team.wait();
}

void report_offsets(const Fault& fault, const int64_t* offsets, int64_t segments, tr_report* report) {
  if (!fault.raised()) return fill(report, TR_OK);
  const int64_t at = std::min(fault.position(), segments);
  fill(report, TR_BAD_OFFSETS, at, offsets[std::min(at + 1, segments)]);
}

// First segment that begins at or after this thread's share of the items.
int64_t segment_begin(const Team& team, const int64_t* offsets, int64_t segments, int thread) {
  if (thread == 0) return 0;
  if (thread == team.threads) return segments;
  const int64_t first = offsets[0];
  const int64_t target = first + static_cast<int64_t>(team.share(static_cast<size_t>(offsets[segments] - first), thread));
  return std::lower_bound(offsets, offsets + segments, target) - offsets;
}

// The segment that holds item `item`: the last one that begins at or before it.
int64_t segment_of(const int64_t* offsets, int64_t segments, int64_t item) {
  return std::upper_bound(offsets, offsets + segments + 1, item) - offsets - 1;
}

template <class Length>
void sum_lengths(const Team& team, const Length* lengths, int64_t segments, int64_t* offsets, int64_t* sums) {
  const size_t begin = team.begin(segments), end = team.end(segments);
  if (team.threads > 1) {
    int64_t sum = 0;
    for (size_t s = begin; s < end; ++s) sum += lengths[s];
    sums[team.thread] = sum;
    team.wait();
  }
  int64_t running = 0;
  for (int t = 0; t < team.thread; ++t) running += sums[t];
  if (team.thread == 0) offsets[0] = 0;
  for (size_t s = begin; s < end; ++s) {
    running += lengths[s];
    offsets[s + 1] = running;
  }
  team.wait();
}

template <class Element>
void fill_elements(void* out, Element value, int64_t count) {
  std::fill_n(static_cast<Element*>(out), count, value);
}

void fill_padding(void* out, const void* padding, int64_t element_bytes, int64_t count) {
  uint64_t bits = 0;
  std::memcpy(&bits, padding, static_cast<size_t>(element_bytes));
  switch (element_bytes) {
    case 1: return fill_elements(out, static_cast<uint8_t>(bits), count);
    case 2: return fill_elements(out, static_cast<uint16_t>(bits), count);
    case 4: return fill_elements(out, static_cast<uint32_t>(bits), count);
    default: return fill_elements(out, bits, count);
  }
}

// One segment of `width` columns, first item to last. `Sum` is wide enough for the reference's rounding.
template <class Number, class Sum>
void sum_items(const Number* items, int64_t count, int64_t width, Number* out) {
  if (width == 1) {
    Sum sum = 0;
    for (int64_t i = 0; i < count; ++i) sum = static_cast<Sum>(sum + static_cast<Sum>(items[i]));
    *out = static_cast<Number>(sum);
    return;
  }
  // Unsigned sums wrap as torch's integers do, for every width, so each column can be kept in `out`.
  for (int64_t d = 0; d < width; ++d) out[d] = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < width; ++d)
      out[d] = static_cast<Number>(static_cast<Sum>(out[d]) + static_cast<Sum>(items[i * width + d]));
}

template <class Number, class Sum>
void segment_sum(const void* values, int64_t items, int64_t width, const int64_t* offsets, int64_t segments, void* out,
                 int32_t threads, tr_report* report) {
  Fault fault;
  const int64_t bytes = items * width * static_cast<int64_t>(sizeof(Number));
  parallel(threads_for(bytes, threads), [&](const Team& team) {
    check_offsets(team, offsets, segments, items, false, &fault);
    if (fault.raised()) return;
    const int64_t stop = segment_begin(team, offsets, segments, team.thread + 1);
    for (int64_t s = segment_begin(team, offsets, segments, team.thread); s < stop; ++s)
      sum_items<Number, Sum>(static_cast<const Number*>(values) + offsets[s] * width, offsets[s + 1] - offsets[s], width,
                             static_cast<Number*>(out) + s * width);
  });
  report_offsets(fault, offsets, segments, report);
}

// The bucket of an id: the number of inner cuts at or below it.
template <class Id>
int64_t bucket_of(Id id, const int64_t* cuts, int64_t buckets) {
  if (buckets <= 16) {
    int64_t bucket = 0;
    for (int64_t c = 1; c < buckets; ++c) bucket += cuts[c] <= static_cast<int64_t>(id);
    return bucket;
  }
  const int64_t* base = cuts + 1;
  int64_t left = buckets - 1;
  while (left > 0) {
    const int64_t half = left / 2;
    const bool right = base[half] <= static_cast<int64_t>(id);
    base += right ? half + 1 : 0;
    left = right ? left - half - 1 : half;
  }
  return base - (cuts + 1);
}

template <class Id, class Length>
void bucketize(const Id* ids, int64_t items, const Length* lengths, int64_t segments, const int64_t* cuts, int64_t buckets,
               Length* out_lengths, Id* local_ids, int64_t* positions, int32_t threads, tr_report* report) {
  threads = threads_for(items * 24 + segments * (buckets + 1) * static_cast<int64_t>(sizeof(Length)), threads);
  std::unique_ptr<int64_t[]> offsets(new (std::nothrow) int64_t[segments + 1]);
  std::unique_ptr<int64_t[]> sums(new (std::nothrow) int64_t[threads]);
  std::unique_ptr<int32_t[]> bucket(new (std::nothrow) int32_t[items + 1]);
  // counts[t * buckets + c]: ids of thread t in bucket c
  std::unique_ptr<int64_t[]> counts(new (std::nothrow) int64_t[threads * buckets]);
  std::unique_ptr<int64_t[]> cursors(new (std::nothrow) int64_t[threads * buckets]);
  if (!offsets || !sums || !bucket || !counts || !cursors) return fill(report, TR_NO_MEMORY);
  Fault fault;
  parallel(threads, [&](const Team& team) {
    sum_lengths(team, lengths, segments, offsets.get(), sums.get());
    check_offsets(team, offsets.get(), segments, items, true, &fault);
    if (fault.raised()) return;
    const int64_t first = segment_begin(team, offsets.get(), segments, team.thread);
    const int64_t stop = segment_begin(team, offsets.get(), segments, team.thread + 1);
    int64_t* count = counts.get() + team.thread * buckets;
    std::fill_n(count, buckets, int64_t{0});
    for (int64_t c = 0; c < buckets; ++c) std::fill(out_lengths + c * segments + first, out_lengths + c * segments + stop, Length{0});
    for (int64_t s = first; s < stop; ++s)
      for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
        const int64_t c = bucket_of(ids[i], cuts, buckets);
        bucket[i] = static_cast<int32_t>(c);
        ++count[c];
        ++out_lengths[c * segments + s];
      }
    team.wait();
    // Ordered by bucket, and in a bucket by thread: threads hold ascending segments.
    int64_t* cursor = cursors.get() + team.thread * buckets;
    int64_t base = 0;
    for (int64_t c = 0; c < buckets; ++c)
      for (int t = 0; t < team.threads; ++t) {
        if (t == team.thread) cursor[c] = base;
        base += counts[t * buckets + c];
      }
    for (int64_t i = offsets[first], end = offsets[stop]; i < end; ++i) {
      const int64_t c = bucket[i];
      const int64_t q = cursor[c]++;
      local_ids[q] = static_cast<Id>(static_cast<int64_t>(ids[i]) - cuts[c]);
      positions[q] = i;
    }
  });
  report_offsets(fault, offsets.get(), segments, report);
}

template <class Number>
void select_segments_backward(const Number* grad, int64_t width, const int64_t* offsets, int64_t segments, const int64_t* order,
                              const int64_t* out_offsets, int64_t selected, int64_t copies, Number* out, int64_t items,
                              int32_t threads, tr_report* report) {
  Fault fault;
  Fault bad_order;
  parallel(threads_for((items + copies) * width * static_cast<int64_t>(sizeof(Number)), threads), [&](const Team& team) {
    check_offsets(team, out_offsets, selected, copies, true, &fault);
    if (fault.raised()) return;
    // A thread owns a range of the input's items and searches copies of them in output order.
    const int64_t begin = static_cast<int64_t>(team.begin(static_cast<size_t>(items)));
    const int64_t end = static_cast<int64_t>(team.end(static_cast<size_t>(items)));
    std::fill(out + begin * width, out + end * width, Number{0});
    for (int64_t p = 0; p < selected; ++p) {
      const int64_t segment = order[p], count = out_offsets[p + 1] - out_offsets[p];
      if (segment < 0 || segment >= segments || offsets[segment] < 0 || offsets[segment] > items - count) {
        bad_order.raise(p);
        continue;
      }
      const int64_t source = offsets[segment];
      const int64_t low = std::max(begin, source), high = std::min(end, source + count);
      const Number* from = grad + (out_offsets[p] + low - source) * width;
      for (int64_t i = low * width; i < high * width; ++i) out[i] += from[i - low * width];
    }
  });
  if (bad_order.raised()) return fill(report, TR_BAD_ID, bad_order.position(), order[bad_order.position()]);
  report_offsets(fault, out_offsets, selected, report);
}

// Most bags are shorter than a block: one copy of fixed size costs less than a branch on the length. The bytes behind the bag
// are written again by the next one.
constexpr int64_t kBlockBytes = 64;
constexpr int64_t kPrefetchAhead = 16;

// Segments of consecutive sources; `ends` are the numbers of segments up to the end of each.
struct Sources {
  const void* const* __restrict__ values;
  const void* const* __restrict__ offsets;
  const int64_t* __restrict__ items;
  const int64_t* __restrict__ ends;
  int64_t count, item_bytes;
};

template <class Offset>
struct Segment {
  const Offset* offsets;  // of its first item, and of the next segment's; null: there is no such segment
  int64_t source;
};

template <class Offset>
Segment<Offset> find(const Sources& sources, int64_t segment) {
  if (segment < 0 || segment >= sources.ends[sources.count - 1]) return {nullptr, 0};
  int64_t source = 0;
  for (int64_t s = 0; s + 1 < sources.count; ++s) source += segment >= sources.ends[s];
  return {static_cast<const Offset*>(sources.offsets[source]) + segment - (source ? sources.ends[source - 1] : 0), source};
}

template <class Offset>
void take_segments(const Sources& sources, const int64_t* __restrict__ order, int64_t selected, char* __restrict__ out, int64_t room,
                   int32_t* __restrict__ lengths, tr_report* report) {
  const int64_t item_bytes = sources.item_bytes, end = room * item_bytes;
  // Segments in random order miss the cache twice: their offsets are prefetched first, then the items that they lead to.
  Segment<Offset> found[2 * kPrefetchAhead];
  const auto soon = [&](int64_t p) -> Segment<Offset>& { return found[static_cast<size_t>(p) % (2 * kPrefetchAhead)]; };
  for (int64_t p = 0; p < std::min(selected, 2 * kPrefetchAhead); ++p) soon(p) = find<Offset>(sources, order[p]);
  int64_t at = 0;
  for (int64_t p = 0; p < selected; ++p) {
    const Segment<Offset> segment = soon(p);
    if (p + 2 * kPrefetchAhead < selected) {
      soon(p) = find<Offset>(sources, order[p + 2 * kPrefetchAhead]);
      __builtin_prefetch(soon(p).offsets);
      const Segment<Offset>& next = soon(p + kPrefetchAhead);
      if (next.offsets && *next.offsets >= 0 && *next.offsets < sources.items[next.source]) {
        const char* items = static_cast<const char*>(sources.values[next.source]) + *next.offsets * item_bytes;
        __builtin_prefetch(items);
        __builtin_prefetch(items + kBlockBytes - 1);
      }
    }
    if (!segment.offsets) return fill(report, TR_BAD_ID, p, order[p]);
    const int64_t first = segment.offsets[0], last = segment.offsets[1], items = sources.items[segment.source];
    if (first < 0 || last < first || last > items || last - first > INT32_MAX) return fill(report, TR_BAD_OFFSETS, order[p], last);
    lengths[p] = static_cast<int32_t>(last - first);
    const int64_t bytes = (last - first) * item_bytes;
    const char* from = static_cast<const char*>(sources.values[segment.source]) + first * item_bytes;
    if (last * item_bytes + kBlockBytes <= items * item_bytes && at + bytes + kBlockBytes <= end) {
      for (int64_t done = 0; done < bytes; done += kBlockBytes) std::memcpy(out + at + done, from + done, kBlockBytes);
    } else if (at < end) {
      std::memcpy(out + at, from, static_cast<size_t>(std::min(bytes, end - at)));
    }
    at += bytes;
  }
  fill(report, TR_OK);
}

}  // namespace

// lengths [2, 0, 1] -> offsets [0, 2, 2, 3]
TR_API void tr_offsets_from_lengths(const void* lengths, int32_t index_type, int64_t segments, int64_t* offsets, int32_t threads,
                                    tr_report* report) {
  threads = threads_for(segments * 16, threads);
  std::unique_ptr<int64_t[]> sums(new (std::nothrow) int64_t[threads]);
  if (!sums) return fill(report, TR_NO_MEMORY);
  parallel(threads, [&](const Team& team) {
    if (index_type == TR_I32)
      sum_lengths(team, static_cast<const int32_t*>(lengths), segments, offsets, sums.get());
    else
      sum_lengths(team, static_cast<const int64_t*>(lengths), segments, offsets, sums.get());
  });
  fill(report, TR_OK);
}

// offsets [0, 2, 2, 3] -> [0, 0, 2]
TR_API void tr_segment_ids(const int64_t* offsets, int64_t segments, int64_t total, int64_t* out, int32_t threads,
                           tr_report* report) {
  Fault fault;
  parallel(threads_for(total * 8, threads), [&](const Team& team) {
    check_offsets(team, offsets, segments, total, true, &fault);
    if (fault.raised()) return;
    const int64_t stop = segment_begin(team, offsets, segments, team.thread + 1);
    for (int64_t s = segment_begin(team, offsets, segments, team.thread); s < stop; ++s)
      std::fill(out + offsets[s], out + offsets[s + 1], s);
  });
  report_offsets(fault, offsets, segments, report);
}

// values [a, b, c], offsets [0, 2, 2, 3], order [2, 0, 2], out offsets [0, 1, 3, 4] -> [c, a, b, c]
TR_API void tr_select_segments(const void* values, int64_t item_bytes, int64_t items, const int64_t* offsets, int64_t segments,
                               const int64_t* order, const int64_t* out_offsets, int64_t selected, int64_t total, void* out,
                               int32_t threads, tr_report* report) {
  Fault fault;
  Fault bad_order;
  parallel(threads_for(total * item_bytes, threads), [&](const Team& team) {
    check_offsets(team, out_offsets, selected, total, true, &fault);
    if (fault.raised()) return;
    // A thread owns a range of the output's items, which may begin and end inside of a segment.
    const int64_t begin = static_cast<int64_t>(team.begin(static_cast<size_t>(total)));
    const int64_t end = static_cast<int64_t>(team.end(static_cast<size_t>(total)));
    if (begin == end) return;
    for (int64_t p = segment_of(out_offsets, selected, begin); p < selected && out_offsets[p] < end; ++p) {
      const int64_t count = out_offsets[p + 1] - out_offsets[p], segment = order[p];
      if (count == 0) continue;
      if (segment < 0 || segment >= segments || offsets[segment] < 0 || offsets[segment] > items - count) {
        bad_order.raise(p);
        continue;
      }
      const int64_t low = std::max(begin, out_offsets[p]), high = std::min(end, out_offsets[p + 1]);
      std::memcpy(static_cast<char*>(out) + low * item_bytes,
                  static_cast<const char*>(values) + (offsets[segment] + low - out_offsets[p]) * item_bytes,
                  static_cast<size_t>((high - low) * item_bytes));
    }
  });
  if (bad_order.raised()) return fill(report, TR_BAD_ID, bad_order.position(), order[bad_order.position()]);
  report_offsets(fault, out_offsets, selected, report);
}

// values [a, b, c], offsets [0, 2, 2, 3], order [2, 0], room for 4 items -> out [c, a, b, ?], lengths [1, 2]. One thread.
// `ends` are the numbers of segments in the first, in the first two, ... sources.
TR_API void tr_take_segments(const void* const* values, const void* const* offsets, const int64_t* items, const int64_t* ends,
                             int64_t sources, int64_t item_bytes, int32_t offset_type, const int64_t* order, int64_t selected,
                             void* out, int64_t room, int32_t* lengths, tr_report* report) {
  const Sources all{values, offsets, items, ends, sources, item_bytes};
  if (offset_type == TR_I32)
    take_segments<int32_t>(all, order, selected, static_cast<char*>(out), room, lengths, report);
  else
    take_segments<int64_t>(all, order, selected, static_cast<char*>(out), room, lengths, report);
}

// The transpose: sums over copies, in output order. `type`: 0 fp32, 1 fp64.
TR_API void tr_select_segments_backward(const void* grad, int32_t type, int64_t width, const int64_t* offsets, int64_t segments,
                                        const int64_t* order, const int64_t* out_offsets, int64_t selected, int64_t copies,
                                        void* out, int64_t items, int32_t threads, tr_report* report) {
  if (type == 0)
    select_segments_backward(static_cast<const float*>(grad), width, offsets, segments, order, out_offsets, selected, copies,
                             static_cast<float*>(out), items, threads, report);
  else
    select_segments_backward(static_cast<const double*>(grad), width, offsets, segments, order, out_offsets, selected, copies,
                             static_cast<double*>(out), items, threads, report);
}

// ids [7, 1, 4], lengths [2, 1], cuts [0, 4, 10] -> lengths [1, 0, 1, 1], local ids [1, 3, 0], positions [1, 0, 2]
TR_API void tr_bucketize_by_cuts(const void* ids, int32_t id_type, int64_t items, const void* lengths, int32_t length_type,
                                 int64_t segments, const int64_t* cuts, int64_t buckets, void* out_lengths, void* local_ids,
                                 int64_t* positions, int32_t threads, tr_report* report) {
  if (buckets < 1 || buckets > INT32_MAX) return fill(report, TR_BAD_ARGUMENT, 0, buckets);
  if (threads < 1) threads = 1;
  const auto run = [&](auto id, auto length) {
    using Id = decltype(id);
    using Length = decltype(length);
    bucketize(static_cast<const Id*>(ids), items, static_cast<const Length*>(lengths), segments, cuts, buckets,
              static_cast<Length*>(out_lengths), static_cast<Id*>(local_ids), positions, threads, report);
  };
  if (id_type == TR_I32)
    length_type == TR_I32 ? run(int32_t{}, int32_t{}) : run(int32_t{}, int64_t{});
  else
    length_type == TR_I32 ? run(int64_t{}, int32_t{}) : run(int64_t{}, int64_t{});
}

// values [a, b, c, d], offsets [0, 1, 4], length 2, padding p -> [[a, p], [b, c]]. `padding` is one element of 1, 2, 4 or 8 bytes.
TR_API void tr_jagged_to_padded(const void* values, int64_t item_bytes, int64_t items, const int64_t* offsets, int64_t bags,
                                int64_t length, const void* padding, int64_t element_bytes, void* out, int32_t threads,
                                tr_report* report) {
  Fault fault;
  parallel(threads_for(bags * length * item_bytes, threads), [&](const Team& team) {
    check_offsets(team, offsets, bags, items, false, &fault);
    if (fault.raised()) return;
    for (size_t b = team.begin(bags), stop = team.end(bags); b < stop; ++b) {
      char* row = static_cast<char*>(out) + static_cast<int64_t>(b) * length * item_bytes;
      const int64_t present = std::min(offsets[b + 1] - offsets[b], length) * item_bytes;
      std::memcpy(row, static_cast<const char*>(values) + offsets[b] * item_bytes, static_cast<size_t>(present));
      fill_padding(row + present, padding, element_bytes, (length * item_bytes - present) / element_bytes);
    }
  });
  report_offsets(fault, offsets, bags, report);
}

// padded [[a, x], [b, c]], offsets [0, 1, 4] -> [a, b, c, 0]
TR_API void tr_padded_to_jagged(const void* padded, int64_t item_bytes, int64_t bags, int64_t length, const int64_t* offsets,
                                int64_t total, void* out, int32_t threads, tr_report* report) {
  Fault fault;
  parallel(threads_for(total * item_bytes, threads), [&](const Team& team) {
    check_offsets(team, offsets, bags, total, true, &fault);
    if (fault.raised()) return;
    const int64_t stop = segment_begin(team, offsets, bags, team.thread + 1);
    for (int64_t b = segment_begin(team, offsets, bags, team.thread); b < stop; ++b) {
      char* bag = static_cast<char*>(out) + offsets[b] * item_bytes;
      const int64_t count = offsets[b + 1] - offsets[b], present = std::min(count, length) * item_bytes;
      std::memcpy(bag, static_cast<const char*>(padded) + b * length * item_bytes, static_cast<size_t>(present));
      std::memset(bag + present, 0, static_cast<size_t>(count * item_bytes - present));
    }
  });
  report_offsets(fault, offsets, bags, report);
}

// values [1, 2, 4], offsets [0, 2, 2, 3] -> [3, 0, 4]. `type`: 0 fp32, 1 fp64, 2 int32, 3 int64 (integers wrap).
TR_API void tr_segment_sum(const void* values, int32_t type, int64_t items, int64_t width, const int64_t* offsets,
                           int64_t segments, void* out, int32_t threads, tr_report* report) {
  switch (type) {
    case 0: return segment_sum<float, float>(values, items, width, offsets, segments, out, threads, report);
    case 1: return segment_sum<double, double>(values, items, width, offsets, segments, out, threads, report);
    case 2: return segment_sum<int32_t, uint64_t>(values, items, width, offsets, segments, out, threads, report);
    case 3: return segment_sum<int64_t, uint64_t>(values, items, width, offsets, segments, out, threads, report);
    default: return fill(report, TR_BAD_ARGUMENT, 0, type);
  }
}

// rows [a, b, c], offsets [0, 2, 2, 3] -> [a, a, c]
TR_API void tr_repeat_segments(const void* rows, int64_t row_bytes, const int64_t* offsets, int64_t segments, int64_t total,
                               void* out, int32_t threads, tr_report* report) {
  Fault fault;
  parallel(threads_for(total * row_bytes, threads), [&](const Team& team) {
    check_offsets(team, offsets, segments, total, true, &fault);
    if (fault.raised()) return;
    const int64_t stop = segment_begin(team, offsets, segments, team.thread + 1);
    for (int64_t s = segment_begin(team, offsets, segments, team.thread); s < stop; ++s) {
      const char* row = static_cast<const char*>(rows) + s * row_bytes;
      if (row_bytes == 8) {
        uint64_t bits;
        std::memcpy(&bits, row, 8);
        std::fill(static_cast<uint64_t*>(out) + offsets[s], static_cast<uint64_t*>(out) + offsets[s + 1], bits);
      } else if (row_bytes == 4) {
        uint32_t bits;
        std::memcpy(&bits, row, 4);
        std::fill(static_cast<uint32_t*>(out) + offsets[s], static_cast<uint32_t*>(out) + offsets[s + 1], bits);
      } else {
        for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i)
          std::memcpy(static_cast<char*>(out) + i * row_bytes, row, static_cast<size_t>(row_bytes));
      }
    }
  });
  report_offsets(fault, offsets, segments, report);
}
