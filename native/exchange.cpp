// Calls of exchange.h: checks, division of the work into pieces, distribution of pieces over threads.
#include "exchange.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(RouteFault count_chunk(const RouteWork& work, const Chunk& chunk))
TILEREC_DECLARE(RouteFault check_chunk(const RouteWork& work, const Chunk& chunk))
TILEREC_DECLARE(RouteFault write_chunk(const RouteWork& work, const Chunk& chunk))
TILEREC_DECLARE(SlotRange slot_range(const int32_t* slots, int64_t count))
TILEREC_DECLARE(void move_block(const SegmentBlock& block))

namespace tilerec {
namespace {

constexpr int64_t kBytesForThreads = 128 << 10;  // less work than this is finished before a second thread has woken up
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kBlockBytes = 1 << 20;
constexpr int64_t kStreamBytes = 8 << 20;  // from this size, non-temporal stores are faster, even if the result is read soon
constexpr int64_t kHugeBytes = 32 << 20;   // from this size, the C library requests new memory from the system every time

int threads_for(int64_t bytes, int64_t threads) {
  return bytes < kBytesForThreads ? 1 : static_cast<int>(std::max<int64_t>(1, threads));
}

// Calls f(i) for every i below `count`, each on the next free thread.
template <class Body>
void deal(int threads, int64_t count, const Body& f) {
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(std::min<int64_t>(threads, count)), [&](const Team&) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
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

template <class Call>
bool refuse(Call& call, int64_t number, int64_t position, int64_t value) {
  call.report = {TR_BAD_ARGUMENT, number, position, value};
  return false;
}

// ------------------------------------------------------------------------------------------------ routes

// State that tr_route_begin passes to tr_route_finish.
struct RouteState {
  std::vector<Route> routes;
  std::vector<Chunk> chunks;
  std::vector<Cursor> cursors;
  std::vector<int64_t> counts;
  std::unique_ptr<char[]> marks;
  int mark_bytes, threads;

  RouteWork work(const tr_route& call) {
    return {&call, routes.data(), cursors.data(), marks.get(), mark_bytes};
  }
};

// Resolves the routes of a call. Returns false and fills the report if the call contradicts itself.
bool resolve(tr_route& call, std::vector<Route>& routes) {
  const int64_t *keys = call.lists, *ranges = keys + call.routes, *batches = ranges + call.routes;
  const int64_t *cuts = batches + call.batch_count, *wire = cuts + call.cut_count;
  const int64_t *last_cut = cuts + call.cut_count, *last_wire = wire + call.wire_count;
  const int64_t bags_there = call.offset_count - 1;
  const bool uniform = call.batch_count == 1;
  std::vector<int64_t> starts(static_cast<size_t>(call.batch_count) + 1);
  for (int64_t k = 0; k < call.batch_count; ++k) {
    if (batches[k] < 0) return refuse(call, -1, k, TR_ROUTE_FEW_OFFSETS);
    // Keys beyond the end of the offsets all begin at the end, so none of their bags exists.
    starts[k + 1] = starts[k] + std::min(batches[k], std::max<int64_t>(bags_there - starts[k], 0));
  }
  std::vector<bool> taken(static_cast<size_t>(call.wire_count));
  call.parts = std::count_if(wire, last_wire, [](int64_t place) { return place >= 0; });
  for (int64_t r = 0; r < call.routes; ++r) {
    const int64_t key = keys[r], parts = ranges[r];
    if (key < 0 || (!uniform && key >= call.batch_count)) return refuse(call, r, key, TR_ROUTE_BAD_KEY);
    if (parts < 0 || parts > last_wire - wire || parts >= last_cut - cuts) return refuse(call, r, 0, TR_ROUTE_BAD_LISTS);
    const int64_t bags = batches[uniform ? 0 : key];
    // None of the bags before this key, or its own, may lie beyond the last offset. Division avoids an overflow.
    if (bags_there < bags || (uniform ? bags > 0 && key > bags_there / bags - 1 : starts[key] + bags > bags_there))
      return refuse(call, r, key, TR_ROUTE_FEW_OFFSETS);
    if (cuts[0] != 0 || !std::is_sorted(cuts, cuts + parts + 1)) return refuse(call, r, 0, TR_ROUTE_BAD_CUTS);
    Route& route = routes[static_cast<size_t>(r)];
    route.offsets = call.offsets + (uniform ? key * bags : starts[key]);
    route.begin = route.offsets[0];
    route.end = route.offsets[bags];
    if (route.begin < 0 || route.end < route.begin || route.end > call.id_count) {
      const bool first = route.begin < 0 || route.begin > call.id_count;
      const int64_t* bad = route.offsets + (first ? 0 : bags);
      call.report = {TR_BAD_OFFSETS, r, bad - call.offsets, *bad};
      return false;
    }
    route.bags = call.each_id ? route.end - route.begin : bags;
    route.cuts = cuts;
    route.wire = wire;
    route.parts = parts;
    for (int64_t p = 0; p < parts; ++p) {
      route.drops |= wire[p] < 0;
      if (wire[p] < 0) continue;
      if (wire[p] >= call.parts || taken[wire[p]]) return refuse(call, r, p, TR_ROUTE_BAD_WIRE);
      taken[wire[p]] = true;
    }
    route.copied = parts == 1 && !route.drops;
    cuts += parts + 1;
    wire += parts;
  }
  if (cuts != last_cut || wire != last_wire) return refuse(call, -1, 0, TR_ROUTE_BAD_LISTS);
  return true;
}

// Divides the routes into chunks, with cursors and memory for the parts of ids.
void cut_into_chunks(const tr_route& call, RouteState& state) {
  const auto cost = [](const Route& route) { return (route.end - route.begin) * 32 + route.bags * 16; };
  int64_t total = 0, marks = 0, cursors = 0, most_parts = 0;
  for (const Route& route : state.routes) total += cost(route);
  state.threads = threads_for(total, call.threads);
  const int64_t chunk_cost = state.threads == 1 ? total + 1 : std::max<int64_t>(16 << 10, total / (state.threads * kPiecesPerThread) + 1);
  for (size_t r = 0; r < state.routes.size(); ++r) {
    Route& route = state.routes[r];
    const int64_t pieces = std::max<int64_t>(1, std::min(route.bags, (cost(route) + chunk_cost - 1) / chunk_cost));
    route.first_chunk = static_cast<int64_t>(state.chunks.size());
    for (int64_t i = 0; i < pieces; ++i) {
      state.chunks.push_back({static_cast<int64_t>(r), route.bags * i / pieces, route.bags * (i + 1) / pieces, cursors});
      cursors += route.parts;
    }
    route.last_chunk = static_cast<int64_t>(state.chunks.size());
    route.marks = marks;
    if (!route.copied) marks += route.end - route.begin;
    most_parts = std::max(most_parts, route.parts);
  }
  state.cursors.resize(static_cast<size_t>(cursors), Cursor{0, 0, -1, 0});
  state.mark_bytes = most_parts < 0xffff ? 2 : 4;
  state.marks.reset(new char[static_cast<size_t>(marks * state.mark_bytes)]);
}

// Turns each cursor's counts into the positions of its ids and bags: parts in wire order, chunks of a part in their order.
void place_cursors(tr_route& call, RouteState& state) {
  struct Part {
    const Route* route;
    int64_t number;
  };
  std::vector<Part> parts(static_cast<size_t>(call.parts));
  for (const Route& route : state.routes)
    for (int64_t p = 0; p < route.parts; ++p)
      if (route.wire[p] >= 0) parts[route.wire[p]] = {&route, p};
  int64_t ids = 0, present = 0;
  for (const Part& part : parts) {
    const int64_t first_id = ids, first_bag = present;
    for (int64_t c = part.route->first_chunk; c < part.route->last_chunk; ++c) {
      Cursor& cursor = state.cursors[state.chunks[c].first_cursor + part.number];
      const Cursor counted = cursor;
      const int64_t lower = part.route->cuts[part.number];
      cursor = part.route->copied ? Cursor{ids, present, present + counted.present, lower} : Cursor{ids, present - 1, -1, lower};
      ids += counted.ids;
      present += counted.present;
    }
    state.counts.push_back(present - first_bag);
    state.counts.push_back(ids - first_id);
  }
  call.present = present;
  call.moved = ids;
}

using ChunkKernel = RouteFault (*)(const RouteWork&, const Chunk&);

// Runs a kernel on every chunk. Returns false and reports the first error in the order (route, position).
bool run(tr_route& call, RouteState& state, ChunkKernel kernel, bool ids_of_copied_seen) {
  const RouteWork work = state.work(call);
  std::vector<RouteFault> faults(state.chunks.size());
  deal(state.threads, static_cast<int64_t>(state.chunks.size()), [&](int64_t c) { faults[c] = kernel(work, state.chunks[c]); });
  if (std::all_of(faults.begin(), faults.end(), [](const RouteFault& fault) { return fault.status == TR_OK; })) return true;
  for (size_t c = 0; c < faults.size(); ++c) {
    const Chunk& chunk = state.chunks[c];
    const Route& route = state.routes[chunk.route];
    RouteFault fault = faults[c];
    if (fault.status == TR_OK && route.copied && !ids_of_copied_seen) fault = TILEREC_CALL(check_chunk)(work, chunk);
    if (fault.status == TR_OK) continue;
    if (fault.status == TR_BAD_OFFSETS) fault.position += route.offsets - call.offsets;
    call.report = {fault.status, chunk.route, fault.position, fault.value};
    break;
  }
  return false;
}

// ------------------------------------------------------------------------------------------------ segments

struct Reach {
  int64_t low = INT64_MAX, high = 0;  // elements of the flat side that are read or written
  int64_t elements = 0;               // moved
  bool ascending = true;
};

bool resolve(tr_segments& call, std::vector<Segment>& segments, Reach& reach, bool picks) {
  const int64_t n = call.segments, *counts = call.lists, *widths = counts + n, *starts = widths + n, *places = starts + n;
  const int64_t *strides = places + n, *adds = strides + n;
  int64_t at = 0;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t count = counts[s], width = widths[s], place = places[s], stride = strides[s];
    if (count < 0 || width < 0 || stride < 0 || (width > 0 && count > (call.rows_size - at) / width))
      return refuse(call, s, 0, TR_SEGMENT_BAD_SHAPE);
    if (count == 0) continue;
    Segment segment{static_cast<char*>(call.rows) + at * call.element_bytes, nullptr, count, width, place, stride, false, true};
    at += count * width;
    int64_t first = 0, last = count - 1;
    if (starts[s] >= 0) {
      if (starts[s] > call.slot_count || count > call.slot_count - starts[s]) return refuse(call, s, 0, TR_SEGMENT_BAD_SLOTS);
      segment.slots = call.slots + starts[s];
      const SlotRange range = TILEREC_CALL(slot_range)(segment.slots, count);
      if (range.lowest < 0) return refuse(call, s, range.lowest, TR_SEGMENT_BAD_SLOTS);
      first = range.lowest;
      last = range.highest;
      segment.ascending = range.ascending;
    }
    if (place < 0 || place > call.flat_size || width > call.flat_size - place ||
        (last > 0 && stride > (call.flat_size - place - width) / last))
      return refuse(call, s, last, TR_SEGMENT_OUTSIDE);
    segment.add = !picks && adds[s] != 0;
    if (segment.add && call.sum_bytes == 0) return refuse(call, s, 0, TR_SEGMENT_CANNOT_ADD);
    if (width == 0) continue;
    reach.low = std::min(reach.low, place + first * stride);
    reach.high = std::max(reach.high, place + last * stride + width);
    reach.elements += count * width;
    reach.ascending &= segment.ascending;
    segments.push_back(segment);
  }
  return true;
}

int64_t move_rows(tr_segments* call, bool picks) {
  return guarded(call, [&] {
    std::vector<Segment> segments;
    segments.reserve(static_cast<size_t>(call->segments));
    Reach reach;
    if (!resolve(*call, segments, reach, picks)) return;
    const bool fresh = !picks && call->fresh;
    if (fresh) reach.low = 0, reach.high = call->flat_size;
    if (reach.high <= reach.low) return;
    const int64_t size = call->element_bytes, bytes = (fresh ? call->flat_size : reach.elements) * size;
    const int64_t line = std::max<int64_t>(1, 64 / size);
    const int threads = threads_for(bytes, call->threads);
    if (picks && bytes >= kHugeBytes) tr_advise_huge_pages(call->rows, bytes);
    // Blocks begin with a cache line. If slots do not ascend, a block checks every row, so there are few blocks.
    const int64_t low = reach.low / line * line, reached = reach.high - low;
    int64_t blocks = reach.ascending ? std::max<int64_t>(threads, reached * size / kBlockBytes) : threads;
    const int64_t each = (reached / blocks / line + 1) * line;
    blocks = (reached + each - 1) / each;
    deal(threads, blocks, [&](int64_t b) {
      const int64_t begin = low + b * each, end = std::min(begin + each, reach.high);
      TILEREC_CALL(move_block)
      ({segments.data(), static_cast<int64_t>(segments.size()), static_cast<char*>(call->flat), size, call->sum_bytes, begin, end,
        picks, bytes >= kStreamBytes && !fresh, fresh});
    });
  });
}

}  // namespace
}  // namespace tilerec

using namespace tilerec;

TR_API int64_t tr_route_begin(tr_route* call) {
  call->state = nullptr;
  return guarded(call, [&] {
    std::unique_ptr<RouteState> state(new RouteState());
    state->routes.resize(static_cast<size_t>(call->routes), Route{});
    if (!resolve(*call, state->routes)) return;
    cut_into_chunks(*call, *state);
    if (!run(*call, *state, TILEREC_CALL(count_chunk), false)) return;
    place_cursors(*call, *state);
    call->state = state.release();
  });
}

TR_API int64_t tr_route_finish(tr_route* call) {
  return guarded(call, [&] {
    RouteState& state = *static_cast<RouteState*>(call->state);
    if (!run(*call, state, TILEREC_CALL(write_chunk), true)) return;
    std::copy(state.counts.begin(), state.counts.end(), call->counts);
    // Every id must lie in a bag of some key. Checked last, because an error of a route's own offsets names its feature.
    const int64_t last = call->offset_count - 1;
    if (call->routes > 0 && (call->offsets[0] != 0 || call->offsets[last] != call->id_count)) {
      const int64_t at = call->offsets[0] != 0 ? 0 : last;
      call->report = {TR_BAD_OFFSETS, -1, at, call->offsets[at]};
    }
  });
}

TR_API void tr_route_free(void* state) { delete static_cast<RouteState*>(state); }

TR_API int64_t tr_place_rows(tr_segments* call) { return move_rows(call, false); }
TR_API int64_t tr_pick_rows(tr_segments* call) { return move_rows(call, true); }
