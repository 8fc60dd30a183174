// The loops of exchange.h, for one instruction set.
#include "exchange.h"
#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

// ------------------------------------------------------------------------------------------------ routes

constexpr int kGuessBits = 12;

// The part of a row: the last one whose first row is at or below it.
//
// Rows with equal high bits form a bucket. If no bucket holds the beginning of more than one part (always so for even cuts),
// a row's part is its bucket's first part, or the next one. Otherwise a search over the cuts finds it, without branches.
//
// Example: cuts {0, 3, 8}, 8 rows, buckets of 2 rows: first parts {0, 0, 1, 1}. Row 3: bucket 1, 0 + (3 >= 3) = 1.
class Finder {
 public:
  explicit Finder(const Route& route) : cuts_(route.cuts), parts_(route.parts) {
    const int64_t rows = cuts_[parts_];
    int bits = 2, row_bits = 0;
    while (bits < kGuessBits && (int64_t(1) << (bits - 2)) < parts_) ++bits;
    while (row_bits < 63 && (rows - 1) >> row_bits > 0) ++row_bits;
    shift_ = row_bits > bits ? row_bits - bits : 0;
    guesses_ = rows > 0;
    for (int64_t bucket = 0, part = 0; guesses_ && bucket <= (rows - 1) >> shift_; ++bucket) {
      const int64_t first = bucket << shift_, end = first + (int64_t(1) << shift_), last = (end < rows ? end : rows) - 1;
      while (part + 1 < parts_ && cuts_[part + 1] <= first) ++part;
      first_[bucket] = static_cast<int32_t>(part);
      guesses_ = part + 2 >= parts_ || cuts_[part + 2] > last;
    }
  }
  bool guesses() const { return guesses_; }
  int64_t guess(int64_t row) const {
    const int64_t part = first_[row >> shift_];
    return part + (row >= cuts_[part + 1]);
  }
  int64_t search(int64_t row) const {
    int64_t low = 0, left = parts_;
    while (left > 1) {
      const int64_t half = left >> 1;
      low += cuts_[low + half] <= row ? half : 0;
      left -= half;
    }
    return low;
  }

 private:
  const int64_t* cuts_;
  int64_t parts_;
  int shift_;
  bool guesses_;
  int32_t first_[1 << kGuessBits];
};

template <class Id>
RouteFault first_bad_id(const Id* ids, int64_t begin, int64_t end, uint64_t rows) {
  for (int64_t i = begin; i < end; ++i)
    if (static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= rows) return {TR_BAD_ID, i, static_cast<int64_t>(ids[i])};
  return {TR_OK, 0, 0};
}

template <class Id>
bool all_inside(const Id* ids, int64_t begin, int64_t end, uint64_t rows) {
  uint64_t outside = 0;
  for (int64_t i = begin; i < end; ++i) outside |= static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= rows;
  return !outside;
}

// Stores the part of every id of the chunk.
template <class Id, class Mark>
void mark(const Route& route, const Id* ids, int64_t begin, int64_t end, Mark* marks) {
  const Finder finder(route);
  if (finder.guesses())
    for (int64_t i = begin; i < end; ++i) marks[i - begin] = static_cast<Mark>(finder.guess(static_cast<int64_t>(ids[i])));
  else
    for (int64_t i = begin; i < end; ++i) marks[i - begin] = static_cast<Mark>(finder.search(static_cast<int64_t>(ids[i])));
  if (route.drops)
    for (int64_t i = 0; i < end - begin; ++i)
      if (route.wire[marks[i]] < 0) marks[i] = static_cast<Mark>(-1);
}

// Position of a bag's first id in the batch.
int64_t first_id(const tr_route& call, const Route& route, int64_t bag) {
  return call.each_id ? route.begin + bag : route.offsets[bag];
}

template <class Id, class Mark>
RouteFault count_marked(const RouteWork& work, const Chunk& chunk) {
  const tr_route& call = *work.call;
  const Route& route = work.routes[chunk.route];
  const Id* ids = static_cast<const Id*>(call.ids);
  const int64_t begin = first_id(call, route, chunk.begin), end = first_id(call, route, chunk.end);
  const uint64_t rows = static_cast<uint64_t>(route.cuts[route.parts]);
  if (!all_inside(ids, begin, end, rows)) return first_bad_id(ids, begin, end, rows);
  if (begin == end) return {TR_OK, 0, 0};
  Mark* own = static_cast<Mark*>(work.marks) + route.marks + (begin - route.begin);
  mark(route, ids, begin, end, own);
  constexpr Mark kNone = static_cast<Mark>(-1);
  Cursor* cursors = work.cursors + chunk.first_cursor;
  for (int64_t b = chunk.begin, i = 0; b < chunk.end; ++b)
    for (const int64_t stop = first_id(call, route, b + 1) - begin; i < stop; ++i) {
      if (own[i] == kNone) continue;
      Cursor& cursor = cursors[own[i]];
      ++cursor.ids;
      cursor.present += cursor.mark != b;
      cursor.mark = b;
    }
  return {TR_OK, 0, 0};
}

template <bool kPositions, class Id, class Mark, class Local>
void write_marked(const RouteWork& work, const Chunk& chunk) {
  const tr_route& call = *work.call;
  const Route& route = work.routes[chunk.route];
  const Id* ids = static_cast<const Id*>(call.ids);
  Local* local = static_cast<Local*>(call.local);
  int64_t* positions = call.positions;
  int32_t *lengths = call.lengths, *slots = call.slots;
  const int64_t begin = first_id(call, route, chunk.begin);
  const Mark* own = static_cast<const Mark*>(work.marks) + route.marks + (begin - route.begin);
  constexpr Mark kNone = static_cast<Mark>(-1);
  Cursor* cursors = work.cursors + chunk.first_cursor;
  for (int64_t b = chunk.begin, i = begin; b < chunk.end; ++b)
    for (const int64_t stop = first_id(call, route, b + 1); i < stop; ++i) {
      if (own[i - begin] == kNone) continue;
      Cursor& cursor = cursors[own[i - begin]];
      const int64_t n = cursor.ids++;
      local[n] = static_cast<Local>(static_cast<int64_t>(ids[i]) - cursor.lower);
      if constexpr (kPositions) positions[n] = i;
      // A bag's first id in the part begins a present bag. No branch here, because a processor cannot predict it.
      const int32_t more = -static_cast<int32_t>(cursor.mark == b);
      cursor.mark = b;
      const int64_t p = cursor.present += 1 + more;
      lengths[p] = (lengths[p] & more) + 1;
      slots[p] = static_cast<int32_t>(b);
    }
}

RouteFault count_copied(const RouteWork& work, const Chunk& chunk) {
  const tr_route& call = *work.call;
  const Route& route = work.routes[chunk.route];
  Cursor& cursor = work.cursors[chunk.first_cursor];
  cursor.ids = first_id(call, route, chunk.end) - first_id(call, route, chunk.begin);
  if (call.each_id) {
    cursor.present = cursor.ids;
    return {TR_OK, 0, 0};
  }
  int64_t present = 0;
  for (int64_t b = chunk.begin; b < chunk.end; ++b) present += route.offsets[b] != route.offsets[b + 1];
  cursor.present = present;
  return {TR_OK, 0, 0};
}

template <class Id, class Local>
RouteFault write_copied(const RouteWork& work, const Chunk& chunk) {
  const tr_route& call = *work.call;
  const Route& route = work.routes[chunk.route];
  const Id* ids = static_cast<const Id*>(call.ids);
  const int64_t begin = first_id(call, route, chunk.begin), end = first_id(call, route, chunk.end);
  const uint64_t rows = static_cast<uint64_t>(route.cuts[1]);
  const Cursor cursor = work.cursors[chunk.first_cursor];
  Local* local = static_cast<Local*>(call.local) + cursor.ids - begin;
  uint64_t outside = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    outside |= static_cast<uint64_t>(id) >= rows;
    local[i] = static_cast<Local>(id);
  }
  if (outside) return first_bad_id(ids, begin, end, rows);
  if (call.positions) {
    int64_t* positions = call.positions + cursor.ids - begin;
    for (int64_t i = begin; i < end; ++i) positions[i] = i;
  }
  const int64_t bags = chunk.end - chunk.begin, present = cursor.mark - cursor.present;
  int32_t *lengths = call.lengths + cursor.present, *slots = call.slots + cursor.present;
  if (call.each_id) {
    for (int64_t b = 0; b < bags; ++b) lengths[b] = 1;
    for (int64_t b = 0; b < bags; ++b) slots[b] = static_cast<int32_t>(chunk.begin + b);
  } else if (present == bags) {
    const int64_t* offsets = route.offsets + chunk.begin;
    for (int64_t b = 0; b < bags; ++b) lengths[b] = static_cast<int32_t>(offsets[b + 1] - offsets[b]);
    for (int64_t b = 0; b < bags; ++b) slots[b] = static_cast<int32_t>(chunk.begin + b);
  } else {
    for (int64_t b = chunk.begin, p = 0; p < present; ++b) {
      const int64_t length = route.offsets[b + 1] - route.offsets[b];
      lengths[p] = static_cast<int32_t>(length);
      slots[p] = static_cast<int32_t>(b);
      p += length != 0;
    }
  }
  return {TR_OK, 0, 0};
}

template <bool kPositions, class Id, class Local>
void write_marked(const RouteWork& work, const Chunk& chunk) {
  if (work.mark_bytes == 2)
    write_marked<kPositions, Id, uint16_t, Local>(work, chunk);
  else
    write_marked<kPositions, Id, uint32_t, Local>(work, chunk);
}

template <class Id, class Local>
RouteFault write(const RouteWork& work, const Chunk& chunk) {
  if (work.routes[chunk.route].copied) return write_copied<Id, Local>(work, chunk);
  if (work.call->positions)
    write_marked<true, Id, Local>(work, chunk);
  else
    write_marked<false, Id, Local>(work, chunk);
  return {TR_OK, 0, 0};
}

template <class Id>
RouteFault count(const RouteWork& work, const Chunk& chunk) {
  return work.mark_bytes == 2 ? count_marked<Id, uint16_t>(work, chunk) : count_marked<Id, uint32_t>(work, chunk);
}

// Checks that the chunk's offsets ascend within its route's ids.
RouteFault check_offsets(const Route& route, const Chunk& chunk) {
  const int64_t* offsets = route.offsets;
  uint64_t falls = 0;
  for (int64_t b = chunk.begin; b < chunk.end; ++b) falls |= offsets[b] > offsets[b + 1];
  if (!falls && offsets[chunk.begin] >= route.begin && offsets[chunk.end] <= route.end) return {TR_OK, 0, 0};
  for (int64_t b = chunk.begin; b < chunk.end; ++b)
    if (offsets[b + 1] < offsets[b] || offsets[b + 1] > route.end) return {TR_BAD_OFFSETS, b + 1, offsets[b + 1]};
  return {TR_BAD_OFFSETS, chunk.begin, offsets[chunk.begin]};
}

// ------------------------------------------------------------------------------------------------ segments

typedef uint8_t vb __attribute__((vector_size(4 * kLanes)));
constexpr int64_t kVector = 4 * kLanes;

TR_INLINE vb load_bytes(const char* p) {
  vb v;
  memcpy(&v, p, sizeof(v));
  return v;
}

TR_INLINE void store_bytes(char* p, vb v) { memcpy(p, &v, sizeof(v)); }

// Writes a vector to an aligned address, around the caches (non-temporal store).
TR_INLINE void stream_bytes(char* p, vb v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#else
  store_bytes(p, v);
#endif
}

TR_INLINE void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (bytes < kVector) {
    memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  int64_t i = 0;
  for (; i + 4 * kVector <= bytes; i += 4 * kVector) {
    const vb a = load_bytes(from + i), b = load_bytes(from + i + kVector);
    const vb c = load_bytes(from + i + 2 * kVector), d = load_bytes(from + i + 3 * kVector);
    store_bytes(to + i, a);
    store_bytes(to + i + kVector, b);
    store_bytes(to + i + 2 * kVector, c);
    store_bytes(to + i + 3 * kVector, d);
  }
  for (; i + kVector <= bytes; i += kVector) store_bytes(to + i, load_bytes(from + i));
  if (i < bytes) store_bytes(to + bytes - kVector, load_bytes(from + bytes - kVector));
}

// As copy_bytes, for whole cache lines only.
TR_INLINE void copy_lines(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kVector) stream_bytes(to + i, load_bytes(from + i));
}

template <class Number>
TR_INLINE void add_numbers(char* to, const char* from, int64_t bytes) {
  Number* __restrict sum = reinterpret_cast<Number*>(to);
  const Number* __restrict term = reinterpret_cast<const Number*>(from);
  for (int64_t i = 0, n = bytes / static_cast<int64_t>(sizeof(Number)); i < n; ++i) sum[i] += term[i];
}

// Number of the ascending numbers that are below `limit`.
TR_INLINE int64_t count_below(const int32_t* numbers, int64_t count, int64_t limit) {
  int64_t first = 0;
  while (count > 0) {
    const int64_t half = count >> 1;
    const bool right = numbers[first + half] < limit;
    first += right ? half + 1 : 0;
    count = right ? count - half - 1 : half;
  }
  return first;
}

// Calls f(address in rows, address in flat, bytes) for the part of every row that lies in the block.
template <class Body>
TR_INLINE void each_row(const SegmentBlock& block, const Segment& s, Body f) {
  const int64_t size = block.element_bytes;
  int64_t first = 0, stop = s.count;
  if (s.ascending && s.stride > 0) {
    // Slots: the first one that overlaps the block, and the first that begins after it.
    const int64_t before = block.begin - s.place - s.width, behind = block.end - s.place;
    const int64_t low = before < 0 ? 0 : before / s.stride + 1, high = behind <= 0 ? 0 : (behind - 1) / s.stride + 1;
    first = s.slots ? count_below(s.slots, s.count, low) : low;
    stop = s.slots ? count_below(s.slots, s.count, high) : high < s.count ? high : s.count;
  }
  const int64_t width = s.width * size, begin = block.begin * size, end = block.end * size;
  for (int64_t i = first; i < stop; ++i) {
    const int64_t at = (s.place + (s.slots ? s.slots[i] : i) * s.stride) * size;
    if (at >= begin && at + width <= end) {
      f(s.rows + i * width, block.flat + at, width);
      continue;
    }
    const int64_t low = at < begin ? begin - at : 0, high = at + width > end ? end - at : width;
    if (low < high) f(s.rows + i * width + low, block.flat + at + low, high - low);
  }
}

bool in_lines(const char* p) { return (reinterpret_cast<uintptr_t>(p) & 63) == 0; }

// Returns true if the writes of a segment in the block are whole cache lines.
bool whole_lines(const SegmentBlock& block, const Segment& s) {
  const int64_t all = s.width | s.place | s.stride | block.begin | block.end;
  return all * block.element_bytes % 64 == 0 && in_lines(block.picks ? s.rows : block.flat);
}

}  // namespace

RouteFault count_chunk(const RouteWork& work, const Chunk& chunk) {
  const Route& route = work.routes[chunk.route];
  if (!work.call->each_id) {
    const RouteFault fault = check_offsets(route, chunk);
    if (fault.status != TR_OK) return fault;
  }
  if (route.copied) return count_copied(work, chunk);
  return work.call->index_type == TR_I32 ? count<int32_t>(work, chunk) : count<int64_t>(work, chunk);
}

RouteFault write_chunk(const RouteWork& work, const Chunk& chunk) {
  const bool narrow = work.call->local_type == TR_I32;
  if (work.call->index_type == TR_I32)
    return narrow ? write<int32_t, int32_t>(work, chunk) : write<int32_t, int64_t>(work, chunk);
  return narrow ? write<int64_t, int32_t>(work, chunk) : write<int64_t, int64_t>(work, chunk);
}

// The first bad id of a chunk whose offsets are right.
RouteFault check_chunk(const RouteWork& work, const Chunk& chunk) {
  const tr_route& call = *work.call;
  const Route& route = work.routes[chunk.route];
  const int64_t begin = first_id(call, route, chunk.begin), end = first_id(call, route, chunk.end);
  const uint64_t rows = static_cast<uint64_t>(route.cuts[route.parts]);
  if (call.index_type == TR_I32) return first_bad_id(static_cast<const int32_t*>(call.ids), begin, end, rows);
  return first_bad_id(static_cast<const int64_t*>(call.ids), begin, end, rows);
}

SlotRange slot_range(const int32_t* slots, int64_t count) {
  uint32_t falls = 0;
  for (int64_t i = 1; i < count; ++i) falls |= slots[i - 1] > slots[i];
  if (!falls) return {slots[0], slots[count - 1], true};
  SlotRange range = {slots[0], slots[0], false};
  for (int64_t i = 1; i < count; ++i) {
    range.lowest = slots[i] < range.lowest ? slots[i] : range.lowest;
    range.highest = slots[i] > range.highest ? slots[i] : range.highest;
  }
  return range;
}

void move_block(const SegmentBlock& block) {
  // Clear the block just before its rows are written, while it is in the cache.
  if (block.fresh) memset(block.flat + block.begin * block.element_bytes, 0, static_cast<size_t>((block.end - block.begin) * block.element_bytes));
  for (int64_t i = 0; i < block.count; ++i) {
    const Segment& s = block.segments[i];
    const bool lines = block.past_caches && whole_lines(block, s);
    if (block.picks && lines)
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { copy_lines(row, flat, bytes); });
    else if (block.picks)
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { copy_bytes(row, flat, bytes); });
    else if (s.add && block.sum_bytes == 4)
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { add_numbers<float>(flat, row, bytes); });
    else if (s.add)
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { add_numbers<double>(flat, row, bytes); });
    else if (lines)
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { copy_lines(flat, row, bytes); });
    else
      each_row(block, s, [](char* row, char* flat, int64_t bytes) { copy_bytes(flat, row, bytes); });
  }
#if defined(__AVX2__)
  if (block.past_caches) _mm_sfence();
#endif
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
