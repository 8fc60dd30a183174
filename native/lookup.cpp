// Calls of lookup.h: resolution of positions, division of the work into parts, distribution of parts over threads.
#include "lookup.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(LookupFault pooled_part(const LookupPart& part))
TILEREC_DECLARE(LookupFault sequence_part(const LookupPart& part))
TILEREC_DECLARE(LookupFault sample_weight_part(const LookupPart& part))

namespace tilerec {
namespace {

// Work from which several threads share a call: 50 to 90 us on one thread (26 tables of 64 columns, fp32 and 8 bits, 1 to 20 ids
// a bag). On an idle machine a second thread saves at most a third of less work. On a busy one its wake-up takes a time slice
// of the scheduler: with 128 KiB here, the median of 40-us calls was 5 to 12 ms.
constexpr int64_t kBytesForThreads = 1 << 20;
constexpr int64_t kPartsPerThread = 8;
constexpr int64_t kStreamBytes = 16 << 20;     // outputs from this size would evict the tables' rows from the caches
constexpr int64_t kHugeBytes = 32 << 20;       // from this size, the C library requests new memory from the system every time

using Kernel = LookupFault (*)(const LookupPart&);

struct Piece {
  int64_t feature, begin, end;
};

int64_t bytes_of(int64_t type) { return type == TR_F32 ? 4 : 2; }

// Bytes from one row to the next; a quantized row is a multiple of 4 bytes.
int64_t row_bytes(int64_t type, int64_t dim) {
  if (type <= TR_F16) return dim * bytes_of(type);
  const int64_t per_byte = type == TR_CODES8 ? 1 : type == TR_CODES4 ? 2 : 4;
  return 4 + ((dim + per_byte - 1) / per_byte + 3) / 4 * 4;
}

int64_t clamp(int64_t x, int64_t most) { return std::max<int64_t>(0, std::min(x, most)); }

// Returns true if feature f's table exists and has memory.
bool table_serves(tr_lookup& call, int64_t f) {
  const int64_t table = call.tables[f];
  if (table < 0 || table >= call.table_count) return call.report = {TR_BAD_ARGUMENT, f, table, TR_LOOKUP_BAD_TABLE}, false;
  if (!call.data[table] && call.rows[table] > 0 && call.dims[table] > 0)
    return call.report = {TR_BAD_ARGUMENT, f, table, TR_LOOKUP_NO_ROWS}, false;
  // Only a call for gradients has `sample_grads`; quantized rows have none.
  if (call.types[table] < TR_F32 || call.types[table] > (call.sample_grads ? (int64_t)TR_F16 : (int64_t)TR_CODES2))
    return call.report = {TR_BAD_ARGUMENT, f, table, TR_LOOKUP_BAD_TYPE}, false;
  return true;
}

// Resolves the features of a pooled call. Returns false and fills the report if the call contradicts itself.
bool resolve(tr_lookup& call, std::vector<LookupFeature>& features) {
  const bool uniform = call.batch_count == 1;
  const int64_t bags_there = call.offset_count - 1;
  std::vector<int64_t> key_starts;
  if (!uniform) {
    key_starts.resize(static_cast<size_t>(call.batch_count) + 1);
    // Keys beyond the end of the offsets all begin at the end, so none of their bags exists.
    for (int64_t k = 0; k < call.batch_count; k++) {
      const int64_t left = bags_there - key_starts[k];
      if (call.batches[k] < 0) return call.report = {TR_BAD_ARGUMENT, 0, k, TR_LOOKUP_FEW_OFFSETS}, false;
      key_starts[k + 1] = key_starts[k] + std::min(call.batches[k], std::max<int64_t>(left, 0));
    }
  }
  int64_t width = 0, place = 0;
  for (int64_t f = 0; f < call.features; f++) {
    if (!table_serves(call, f)) return false;
    width += call.dims[call.tables[f]];
  }
  for (int64_t f = 0; f < call.features; f++) {
    const int64_t table = call.tables[f], key = call.keys[f], dim = call.dims[table];
    if (key < 0 || (!uniform && key >= call.batch_count))
      return call.report = {TR_BAD_ARGUMENT, f, key, TR_LOOKUP_BAD_KEY}, false;
    const int64_t bags = uniform ? call.batches[0] : call.batches[key];
    // None of the bags before this key, or its own, may lie beyond the last offset. Division avoids an overflow.
    if (bags < 0 || bags > bags_there || (uniform && bags > 0 && key > bags_there / bags - 1) ||
        (!uniform && key_starts[key] + bags > bags_there))
      return call.report = {TR_BAD_ARGUMENT, f, key, TR_LOOKUP_FEW_OFFSETS}, false;
    const int64_t first = uniform ? key * bags : key_starts[key];
    features[f] = {call.data[table], static_cast<uint64_t>(call.rows[table]), dim, row_bytes(call.types[table], dim),
                   static_cast<int32_t>(call.types[table]), call.means && call.means[f] != 0, bags, call.offsets + first,
                   place, uniform ? width : dim};
    place += uniform ? dim : bags * dim;
  }
  return true;
}

// Cost in bytes moved; a bag costs about as much as a short row.
int64_t cost_of(const tr_lookup& call, const LookupFeature& f, int64_t ids, int64_t bags) {
  return ids * (f.row_bytes + 16) + bags * (f.dim * bytes_of(call.number_type) + 32);
}

// Runs the parts on threads. Every thread begins with its own run of neighbouring parts, so that two threads rarely keep the
// same table in their caches. Then it takes remaining parts of other threads. The thread of a part does not change any bit.
void run(tr_lookup& call, const std::vector<LookupFeature>& features, const std::vector<Piece>& pieces, int threads,
         int64_t scratch, bool stream, Kernel kernel) {
  std::vector<LookupFault> faults(pieces.size(), LookupFault{TR_OK, 0, 0});
  std::unique_ptr<std::atomic<size_t>[]> next(new std::atomic<size_t>[static_cast<size_t>(threads)]);
  std::vector<float> scratches(static_cast<size_t>(scratch * threads));
  for (int t = 0; t < threads; t++) next[t] = pieces.size() * static_cast<size_t>(t) / static_cast<size_t>(threads);
  parallel(threads, [&](const Team& team) {
    float* mine = scratches.data() + scratch * team.thread;
    for (int i = 0; i < threads; i++) {
      const int owner = (team.thread + i) % threads;
      const size_t end = pieces.size() * static_cast<size_t>(owner + 1) / static_cast<size_t>(threads);
      for (size_t at; (at = next[owner].fetch_add(1, std::memory_order_relaxed)) < end;) {
        const Piece& piece = pieces[at];
        faults[at] = kernel({&call, &features[piece.feature], piece.begin, piece.end, mine, stream});
      }
    }
  });
  for (size_t at = 0; at < pieces.size(); at++)
    if (faults[at].status != TR_OK) {
      call.report = {faults[at].status, pieces[at].feature, faults[at].position, faults[at].value};
      return;  // pieces are in the order (feature, position): this is the first
    }
}

void cut(std::vector<Piece>& pieces, int64_t feature, int64_t begin, int64_t end, int64_t cost, int64_t part_cost) {
  const int64_t count = end - begin, parts = std::max<int64_t>(1, std::min(count, (cost + part_cost - 1) / part_cost));
  for (int64_t i = 0; i < parts; i++) pieces.push_back({feature, begin + count * i / parts, begin + count * (i + 1) / parts});
}

// For a new output of many small pages, the system needs more time to provide the pages than the lookup to fill them.
void expect_large(void* out, int64_t bytes) {
  if (bytes >= kHugeBytes) tr_advise_huge_pages(out, bytes);
}

// Checks that every id lies in a bag of some key: the offsets begin at 0 and end at the number of ids. Checked last, because
// an error of a feature's own offsets names the feature.
void check_covered(tr_lookup& call) {
  const int64_t last = call.offset_count - 1;
  if (call.report.status != TR_OK || call.features == 0) return;
  if (call.offsets[0] != 0)
    call.report = {TR_BAD_OFFSETS, -1, 0, call.offsets[0]};
  else if (call.offsets[last] != call.id_count)
    call.report = {TR_BAD_OFFSETS, -1, last, call.offsets[last]};
}

int64_t pooled_call(tr_lookup& call, Kernel kernel, bool one_key_at_a_time) {
  call.report = {TR_OK, 0, 0, 0};
  std::vector<LookupFeature> features(static_cast<size_t>(call.features));
  if (!resolve(call, features)) return call.report.status;
  std::vector<int64_t> costs(features.size());
  int64_t total = 0, widest = 0;
  for (size_t f = 0; f < features.size(); f++) {
    const LookupFeature& feature = features[f];
    const int64_t ids = clamp(feature.offsets[feature.bags], call.id_count) - clamp(feature.offsets[0], call.id_count);
    total += costs[f] = cost_of(call, feature, std::max<int64_t>(ids, 0), feature.bags);
    widest = std::max(widest, feature.dim);
  }
  const int threads = total < kBytesForThreads ? 1 : static_cast<int>(std::max<int64_t>(1, call.threads));
  const int64_t part_cost = threads == 1 ? total + 1 : std::max<int64_t>(16 << 10, total / (threads * kPartsPerThread) + 1);
  std::vector<Piece> pieces;
  std::vector<bool> seen;
  for (size_t f = 0; f < features.size(); f++) {
    if (one_key_at_a_time && features[f].bags > 0) {
      // Features of one key add to the same numbers: a second feature of a key waits until earlier ones have finished.
      const size_t key = static_cast<size_t>(call.keys[f]);
      if (seen.size() <= key) seen.resize(key + 1, false);
      if (seen[key]) {
        run(call, features, pieces, threads, widest, false, kernel);
        if (call.report.status != TR_OK) return call.report.status;
        pieces.clear();
        std::fill(seen.begin(), seen.end(), false);
      }
      seen[key] = true;
    }
    cut(pieces, static_cast<int64_t>(f), 0, features[f].bags, costs[f], part_cost);
  }
  if (!one_key_at_a_time) {
    int64_t bytes = 0;
    for (const LookupFeature& feature : features) bytes += feature.bags * feature.dim * bytes_of(call.number_type);
    expect_large(call.numbers, bytes);
  }
  run(call, features, pieces, threads, one_key_at_a_time ? widest : 0, false, kernel);
  if (call.report.status == TR_BAD_OFFSETS)
    call.report.position += features[static_cast<size_t>(call.report.feature)].offsets - call.offsets;
  if (!one_key_at_a_time) check_covered(call);
  return call.report.status;
}

int64_t sequence_call(tr_lookup& call) {
  call.report = {TR_OK, 0, 0, 0};
  std::vector<LookupFeature> features(static_cast<size_t>(call.features));
  std::vector<Piece> pieces;
  int64_t total = 0;
  if (call.features > 0 && call.offset_count != call.features + 1) {
    call.report = {TR_BAD_ARGUMENT, 0, call.offset_count, TR_LOOKUP_FEW_OFFSETS};
    return TR_BAD_ARGUMENT;
  }
  for (int64_t f = 0; f < call.features; f++) {
    if (!table_serves(call, f)) return call.report.status;
    const int64_t table = call.tables[f], begin = call.offsets[f], end = call.offsets[f + 1];
    if (call.dims[table] != call.dims[call.tables[0]]) {
      call.report = {TR_BAD_ARGUMENT, f, call.dims[table], TR_LOOKUP_BAD_DIM};
      return TR_BAD_ARGUMENT;
    }
    const bool bad_begin = begin < 0 || begin > call.id_count || (f == 0 && begin != 0);
    if (bad_begin || end < begin || end > call.id_count || (f == call.features - 1 && end != call.id_count)) {
      call.report = {TR_BAD_OFFSETS, f, bad_begin ? f : f + 1, bad_begin ? begin : end};
      return TR_BAD_OFFSETS;
    }
    const int64_t dim = call.dims[table], type = call.types[table];
    features[f] = {call.data[table], static_cast<uint64_t>(call.rows[table]), dim, row_bytes(type, dim),
                   static_cast<int32_t>(type), false, end - begin, nullptr, 0, 0};
    total += cost_of(call, features[f], end - begin, end - begin);
  }
  const int threads = total < kBytesForThreads ? 1 : static_cast<int>(std::max<int64_t>(1, call.threads));
  const int64_t part_cost = threads == 1 ? total + 1 : std::max<int64_t>(16 << 10, total / (threads * kPartsPerThread) + 1);
  for (int64_t f = 0; f < call.features; f++)
    cut(pieces, f, call.offsets[f], call.offsets[f + 1], cost_of(call, features[f], features[f].bags, features[f].bags),
        part_cost);
  const int64_t bytes = call.features > 0 ? call.id_count * call.dims[call.tables[0]] * bytes_of(call.number_type) : 0;
  expect_large(call.numbers, bytes);
  run(call, features, pieces, threads, 0, bytes >= kStreamBytes, TILEREC_CALL(sequence_part));
  return call.report.status;
}

template <class Body>
int64_t guarded(tr_lookup* call, Body body) {
  try {
    return body();
  } catch (const std::exception&) {  // bad_alloc, or length_error: more than any memory
    call->report = {TR_NO_MEMORY, 0, 0, 0};
    return TR_NO_MEMORY;
  }
}

}  // namespace
}  // namespace tilerec

using namespace tilerec;

TR_API int64_t tr_pooled_lookup(tr_lookup* call) {
  return guarded(call, [&] { return pooled_call(*call, TILEREC_CALL(pooled_part), false); });
}

TR_API int64_t tr_sequence_lookup(tr_lookup* call) {
  return guarded(call, [&] { return sequence_call(*call); });
}

TR_API int64_t tr_sample_weight_grad(tr_lookup* call) {
  return guarded(call, [&] { return pooled_call(*call, TILEREC_CALL(sample_weight_part), true); });
}
