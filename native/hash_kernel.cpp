// The loops of hash.h, for one instruction set.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "hash.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

// Entries between the prefetch of memory and its use: enough to hide a miss of every cache, few enough that processors keep
// all prefetches in flight.
constexpr int kAhead = 16;
constexpr int64_t kNone = -1;

// Slots are compared eight rows at a time, rows 8 k ... 8 k + 7 of the state: their ids lie in one cache line. A block may
// overlap neighbouring buckets, which another thread may be writing: those bits are read and not used.
constexpr int64_t kBlock = 8;

// A bit for each of a block's values that equals `wanted`.
inline uint32_t same_values(const int64_t* values, int64_t wanted) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(values), _mm512_set1_epi64(wanted));
#elif defined(__AVX2__)
  const __m256i all = _mm256_set1_epi64x(wanted);
  const __m256i low = _mm256_cmpeq_epi64(_mm256_loadu_si256((const __m256i*)values), all);
  const __m256i high = _mm256_cmpeq_epi64(_mm256_loadu_si256((const __m256i*)(values + 4)), all);
  return (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(low)) | (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(high)) << 4;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kBlock; i++) bits |= (uint32_t)(values[i] == wanted) << i;
  return bits;
#endif
}

// A bit for each row of a block that is empty.
inline uint32_t empty_rows(const uint8_t* used) {
#if defined(__SSE2__)
  return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadl_epi64((const __m128i*)used), _mm_setzero_si128())) & 0xff;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kBlock; i++) bits |= (uint32_t)(used[i] == 0) << i;
  return bits;
#endif
}

// The upper 64 bits of a product. Only AVX-512 multiplies 64-bit numbers in vectors: there it is made from products of 32-bit
// halves, which compilers vectorise, elsewhere by one scalar instruction.
inline uint64_t high_half(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__) && !defined(__AVX512DQ__)
  return (uint64_t)((unsigned __int128)a * b >> 64);
#else
  const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), low = a0 * b1 + (middle & 0xffffffffu);
  return a1 * b1 + (middle >> 32) + (low >> 32);
#endif
}

// The end of a search: at the id, at the first empty row, or after the window.
struct Search {
  int64_t row;  // of the state; kNone: the window is full of other ids
  int64_t probes;
  bool found;
};

// Searches rows begin ... end - 1. Returns true if the search ends here.
inline bool search_run(const int64_t* ids, const uint8_t* used, int64_t rows, int64_t id, int64_t begin, int64_t end,
                       Search& search) {
  uint32_t inside = 0xffu << (begin & (kBlock - 1));
  for (int64_t block = begin & ~(kBlock - 1); block < end; block += kBlock, inside = 0xff) {
    uint32_t same = 0, empty = 0;
    if (__builtin_expect(block + kBlock <= rows, 1)) {
      same = same_values(ids + block, id);
      empty = empty_rows(used + block);
    } else {
      for (int64_t i = 0; block + i < rows; i++) {
        same |= (uint32_t)(ids[block + i] == id) << i;
        empty |= (uint32_t)(used[block + i] == 0) << i;
      }
    }
    if (end - block < kBlock) inside &= (1u << (end - block)) - 1;
    const uint32_t stops = (same | empty) & inside;
    if (stops == 0) continue;
    const int at = __builtin_ctz(stops);
    search = {block + at, search.probes + block + at - begin + 1, (empty >> at & 1) == 0};
    return true;
  }
  search.probes += end - begin;
  return false;
}

struct Window {
  int64_t start, first_end, base, wrapped_end;  // rows [start, first_end), then [base, wrapped_end)
};

inline Window window_of(int64_t base, int64_t start, int64_t slots, int64_t window) {
  const int64_t left = slots - start;
  return {base + start, left < window ? base + slots : base + start + window, base, left < window ? base + window - left : base};
}

inline Search search_for(const tr_zch& call, int64_t rows, int64_t id, const Window& w) {
  Search search = {kNone, 0, false};
  if (!search_run(call.slot_ids, call.used, rows, id, w.start, w.first_end, search))
    search_run(call.slot_ids, call.used, rows, id, w.base, w.wrapped_end, search);
  return search;
}

// ---- the worst of a window

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct Worst {
  int64_t row;
  int64_t whole, second;  // its score; the policy decides which of these fields count
  double score;
};

// Each function takes rows [begin, end); `worst` changes if one of them scores strictly less. Passes over arrays: the least
// score of the rows that may be evicted, then its first position. kNever is more than every step, clock and count.
constexpr int64_t kNever = INT64_MAX;

// `value` or kNever, in a form that the compiler vectorizes.
inline int64_t only_if(bool holds, int64_t value) {
  const int64_t mask = -(int64_t)holds;
  return (value & mask) | (kNever & ~mask);
}

// The first row with both values. Such a row must exist.
inline int64_t first_of(const int64_t* a, int64_t value_a, const int64_t* b, int64_t value_b, int64_t begin, int64_t end) {
  for (; begin + kBlock <= end; begin += kBlock) {
    const uint32_t both = same_values(a + begin, value_a) & same_values(b + begin, value_b);
    if (both != 0) return begin + __builtin_ctz(both);
  }
  while (a[begin] != value_a || b[begin] != value_b) begin++;
  return begin;
}

void worst_lru(const int64_t* last, int64_t step, int64_t begin, int64_t end, Worst& worst) {
  int64_t low = kNever;
  for (int64_t s = begin; s < end; s++) low = least(low, last[s]);
  if (low >= step || low >= worst.whole) return;
  worst = {first_of(last, low, last, low, begin, end), low, 0, 0};
}

void worst_lfu(const int64_t* hits, const int64_t* last, int64_t step, int64_t begin, int64_t end, Worst& worst) {
  int64_t low = kNever;
  for (int64_t s = begin; s < end; s++) {
    const int64_t uses = hits[s], at = last[s];
    low = least(low, only_if(at < step, uses));
  }
  if (low > worst.whole) return;
  int64_t oldest = kNever;
  for (int64_t s = begin; s < end; s++) {
    const int64_t uses = hits[s], at = last[s];
    oldest = least(oldest, only_if(uses == low, at));
  }
  if (oldest >= step || (low == worst.whole && oldest >= worst.second)) return;
  worst = {first_of(hits, low, last, oldest, begin, end), low, oldest, 0};
}

void worst_distance_lfu(const int64_t* hits, const int64_t* last, int64_t step, int64_t exponent, int64_t begin, int64_t end,
                        Worst& worst) {
  for (int64_t s = begin; s < end; s++) {
    if (last[s] >= step) continue;
    const double score = zch_ratio(hits[s], step - last[s], exponent);
    if (worst.row == kNone || score < worst.score) worst = {s, 0, 0, score};
  }
}

void worst_ttl(const int64_t* expires, const int64_t* last, int64_t step, int64_t now, int64_t begin, int64_t end,
               Worst& worst) {
  int64_t low = kNever;
  for (int64_t s = begin; s < end; s++) {
    const int64_t until = expires[s], at = last[s];
    low = least(low, only_if(at < step, until));
  }
  if (low > now || low >= worst.whole) return;
  int64_t s = begin;
  while (expires[s] != low || last[s] >= step) s++;
  worst = {s, low, 0, 0};
}

// Prefetches the whole window at once, because its lines are rarely in the cache.
inline void prefetch_window(const int64_t* values, const Window& w) {
  for (int64_t r = w.start; r < w.first_end; r += kBlock) __builtin_prefetch(values + r);
  for (int64_t r = w.base; r < w.wrapped_end; r += kBlock) __builtin_prefetch(values + r);
}

__attribute__((noinline)) int64_t worst_row(const tr_zch& call, int64_t exponent, const Window& w) {
  prefetch_window(call.last, w);
  if (call.policy == TR_LFU || call.policy == TR_DISTANCE_LFU) prefetch_window(call.hits, w);
  if (call.policy == TR_TTL) prefetch_window(call.expires, w);
  Worst worst = {kNone, kNever, kNever, 0};
  for (int part = 0; part < 2; part++) {
    const int64_t begin = part == 0 ? w.start : w.base, end = part == 0 ? w.first_end : w.wrapped_end;
    if (begin == end) continue;
    switch (call.policy) {
      case TR_LRU: worst_lru(call.last, call.step, begin, end, worst); break;
      case TR_LFU: worst_lfu(call.hits, call.last, call.step, begin, end, worst); break;
      case TR_DISTANCE_LFU: worst_distance_lfu(call.hits, call.last, call.step, exponent, begin, end, worst); break;
      default: worst_ttl(call.expires, call.last, call.step, call.now, begin, end, worst);
    }
  }
  return worst.row;
}

// ---- admission

inline bool admits(const tr_zch& call, int64_t bucket, uint64_t mixed, int64_t count) {
  if (call.threshold <= 1) return true;
  const uint64_t second = zch_mix(mixed ^ 0x9e3779b97f4a7c15u);
  int32_t* counters = call.counters + bucket * call.counter_count;
  int32_t *one = counters + zch_high(second, call.counter_count), *other = counters + zch_low(second, call.counter_count);
  int64_t seen = (*one < *other ? *one : *other) + count;
  if (seen > INT32_MAX) seen = INT32_MAX;
  if (*one < seen) *one = (int32_t)seen;
  if (*other < seen) *other = (int32_t)seen;
  return seen >= call.threshold;
}

struct Ahead {
  uint64_t mixed;
  int64_t bucket, start;
};

inline Ahead look_ahead(const tr_zch& call, int64_t id) {
  const uint64_t mixed = zch_mix((uint64_t)id);
  return {mixed, zch_high(mixed, call.buckets) - call.first, zch_low(mixed, call.slots)};
}

template <bool kPositions>
void assign_entries(const tr_zch& call, const ZchLane& lane) {
  const int64_t rows = call.held * call.slots, window = least(call.max_probe, call.slots), exponent = zch_exponent(call.exponent);
  const bool counts = call.counts != nullptr, ttls = call.ttls != nullptr;
  Ahead ring[kAhead];
  const auto entry = [&](int64_t i) { return kPositions ? (int64_t)lane.positions[i] : i; };
  const auto prefetch = [&](int64_t i) {
    const Ahead a = look_ahead(call, call.ids[entry(i)]);
    const int64_t row = a.bucket * call.slots + a.start;
    __builtin_prefetch(call.slot_ids + row);
    __builtin_prefetch(call.used + row);
    __builtin_prefetch(call.last + row, 1);
    __builtin_prefetch(call.hits + row, 1);
    ring[i % kAhead] = a;
  };
  for (int64_t i = lane.begin; i < lane.end && i < lane.begin + kAhead; i++) prefetch(i);
  for (int64_t i = lane.begin; i < lane.end; i++) {
    const Ahead a = ring[i % kAhead];
    if (i + kAhead < lane.end) prefetch(i + kAhead);
    const int64_t n = entry(i), id = call.ids[n];
    const int64_t count = counts ? call.counts[n] : 1;
    const Window w = window_of(a.bucket * call.slots, a.start, call.slots, window);
    const Search search = search_for(call, rows, id, w);
    call.probes[n] = (int32_t)search.probes;
    int64_t at = search.row;
    if (search.found) {
      call.last[at] = call.step;
      call.hits[at] += count;
      if (call.expires != nullptr) {
        const int64_t until = call.now + (ttls ? call.ttls[n] : call.ttl);
        if (call.expires[at] < until) call.expires[at] = until;
      }
      call.rows[n] = call.first * call.slots + at;
      call.outcomes[n] = TR_HIT;
      continue;
    }
    uint8_t outcome = TR_INSERTED;
    if (call.may_insert != nullptr && call.may_insert[n] == 0) {
      outcome = TR_MISSING;
    } else if (!admits(call, a.bucket, a.mixed, count)) {
      outcome = TR_NOT_ADMITTED;
    } else if (at == kNone) {
      if (call.evict) at = worst_row(call, exponent, w);
      outcome = at == kNone ? TR_REJECTED : TR_EVICTED;
      if (at != kNone) call.evicted_ids[n] = call.slot_ids[at];
    }
    call.outcomes[n] = outcome;
    if (outcome > TR_EVICTED) {
      call.rows[n] = kNone;
      continue;
    }
    call.slot_ids[at] = id;
    call.used[at] = 1;
    call.since[at] = call.last[at] = call.step;
    call.hits[at] = count;
    if (call.expires != nullptr) call.expires[at] = call.now + (ttls ? call.ttls[n] : call.ttl);
    call.rows[n] = call.first * call.slots + at;
  }
}

}  // namespace

void zch_assign_lane(const tr_zch& call, const ZchLane& lane) {
  if (lane.positions == nullptr)
    assign_entries<false>(call, lane);
  else
    assign_entries<true>(call, lane);
}

void zch_find_run(const tr_zch& call, int64_t begin, int64_t end) {
  const int64_t rows = call.held * call.slots, window = least(call.max_probe, call.slots);
  Ahead ring[kAhead];
  const auto prefetch = [&](int64_t i) {
    const Ahead a = look_ahead(call, call.ids[i]);
    const int64_t row = a.bucket * call.slots + a.start;
    __builtin_prefetch(call.slot_ids + row);
    __builtin_prefetch(call.used + row);
    ring[i % kAhead] = a;
  };
  for (int64_t i = begin; i < end && i < begin + kAhead; i++) prefetch(i);
  for (int64_t i = begin; i < end; i++) {
    const Ahead a = ring[i % kAhead];
    if (i + kAhead < end) prefetch(i + kAhead);
    const Search search = search_for(call, rows, call.ids[i], window_of(a.bucket * call.slots, a.start, call.slots, window));
    call.rows[i] = search.found ? call.first * call.slots + search.row : kNone;
    call.probes[i] = (int32_t)search.probes;
  }
}

// The first entry whose bucket is not held; `end` if there is none.
int64_t zch_first_stray(const tr_zch& call, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t bucket = zch_high(zch_mix((uint64_t)call.ids[i]), call.buckets) - call.first;
    if (bucket < 0 || bucket >= call.held) return i;
  }
  return end;
}

void zch_bucket_run(const int64_t* ids, int64_t buckets, int64_t* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) out[i] = zch_high(zch_mix((uint64_t)ids[i]), buckets);
}

#if defined(__AVX512DQ__)
// Divisors for which a quotient by doubles is off by one at most: its error is below 4 * 2^-53 * 2^64 / d, and 3 d fits 64 bits.
constexpr uint64_t kLeastDivisor = 1 << 14, kMostDivisor = (uint64_t)1 << 62;

// As below, for a multiple of eight ids. On a busy Xeon 1.27 ns per id, where products of 32-bit halves by `vpmuludq` take 1.65.
void hash_eights(const int64_t* ids, int64_t count, uint64_t d, int64_t first_row, int64_t* out) {
  const auto all = [](uint64_t value) { return _mm512_set1_epi64((int64_t)value); };
  const __m512i divisor = all(d), first = all((uint64_t)first_row);
  const __m512d inverse = _mm512_set1_pd(1.0 / (double)d);
  for (int64_t i = 0; i < count; i += 8) {
    __m512i x = _mm512_loadu_si512(ids + i);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), all(0xbf58476d1ce4e5b9u));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), all(0x94d049bb133111ebu));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
    const __m512i quotient = _mm512_cvttpd_epu64(_mm512_mul_pd(_mm512_cvtepu64_pd(x), inverse));
    // In [-d, 2 d). The unsigned minimum of it and of a neighbour d away is the one that has not wrapped.
    __m512i rest = _mm512_sub_epi64(x, _mm512_mullo_epi64(quotient, divisor));
    rest = _mm512_min_epu64(rest, _mm512_add_epi64(rest, divisor));
    rest = _mm512_min_epu64(rest, _mm512_sub_epi64(rest, divisor));
    _mm512_storeu_si512(out + i, _mm512_add_epi64(rest, first));
  }
}
#endif

// hash mod d without a division: with m = floor((2^64 - 1) / d), the high half of hash * m is floor(hash / d) or one less.
// So hash - q d is in [0, 2 d), which fits 64 bits for d < 2^63.
void hash_row_run(const int64_t* ids, int64_t count, int64_t rows, int64_t first_row, int64_t* out) {
  const uint64_t d = (uint64_t)(rows - first_row), m = UINT64_MAX / d, first = (uint64_t)first_row;
  int64_t i = 0;
#if defined(__AVX512DQ__)
  if (d >= kLeastDivisor && d <= kMostDivisor) hash_eights(ids, i = count & ~(int64_t)7, d, first_row, out);
#endif
  for (; i < count; i++) {
    const uint64_t hash = zch_mix((uint64_t)ids[i]);
    const uint64_t rest = hash - high_half(hash, m) * d, less = rest - d;
    out[i] = (int64_t)((rest < d ? rest : less) + first);
  }
}

// Ids are hashed a block at a time, while they are in the first cache.
constexpr int64_t kTakeBlock = 512;

template <class Item, class Index>
int64_t take_items(const Take& call) {
  using Place = std::make_unsigned_t<Index>;  // as such, negative numbers are above all others
  const Item* items = (const Item*)call.items;
  const Index* order = (const Index*)call.order;
  Item block[kTakeBlock];
  for (int64_t part = 0; part < call.parts; part++) {
    Item* out = (Item*)call.outs[part];
    for (int64_t left = call.counts[part]; left > 0;) {
      const int64_t count = least(left, kTakeBlock);
      Place most = 0;
      for (int64_t i = 0; i < count; i++) most = most < (Place)order[i] ? (Place)order[i] : most;
      if ((uint64_t)most >= (uint64_t)call.count) return order - (const Index*)call.order;
      Item* to = call.rows > 0 ? block : out;
      for (int64_t i = 0; i < count; i++) to[i] = items[order[i]];
      if (call.rows > 0) hash_row_run((const int64_t*)block, count, call.rows, call.first_row, (int64_t*)out);
      order += count, out += count, left -= count;
    }
  }
  return order - (const Index*)call.order;
}

int64_t take_items_run(const Take& call) {
  if (call.item_bytes == 8) return call.index_bytes == 4 ? take_items<int64_t, int32_t>(call) : take_items<int64_t, int64_t>(call);
  return call.index_bytes == 4 ? take_items<int32_t, int32_t>(call) : take_items<int32_t, int64_t>(call);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
