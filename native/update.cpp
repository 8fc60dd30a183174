// Updates: plan the record's tables, sort their occurrences by row, hand units of runs to the kernels.
//
//   plan    per table of the record: its features, its occurrences, the packing of its keys
//   unit    up to kUnit neighbouring sorted occurrences; it owns the runs that begin in it
//
// Threads sort whole tables if there are enough of them, and share the sort of a table that is too large a part of the
// work. Then they take units of all tables from one counter. Runs longer than kPiece are summed in pieces afterwards. The
// terms of a run's sum and their order depend on the run alone, so bits do not depend on the threads.
#include "update.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "sort.h"
#include "update_task.h"

using tilerec::Gather;
using tilerec::Target;
using tilerec::UnitResult;

TILEREC_DECLARE(int32_t rule_number(const char* name))
TILEREC_DECLARE(void update_unit(const Target&, const Gather&, size_t begin, size_t end, float* scratch, UnitResult*))
TILEREC_DECLARE(void finish_run(const Target&, int64_t row, const float* g, float* scratch, UnitResult*))
TILEREC_DECLARE(void sum_piece(const Gather&, size_t begin, size_t end, float* scratch, float* out))
TILEREC_DECLARE(void add_row(float* to, const float* x, int64_t dim))
TILEREC_DECLARE(size_t count_runs(const Gather&, size_t begin, size_t end))
TILEREC_DECLARE(void sum_unit(const Gather&, size_t begin, size_t end, float* scratch, int64_t* rows, float* grads))
TILEREC_DECLARE(void partials_of(const Target&, const int64_t* rows, const float* grads, const float* scalars, int64_t stride,
                                 int phase, bool exact, bool finite, size_t begin, size_t end, float* scratch, float* out))
TILEREC_DECLARE(void apply_rows(const Target&, const int64_t* rows, const float* grads, const float* scalars, int64_t stride,
                                size_t begin, size_t end, float* scratch))

namespace tilerec {
namespace {

// Memory of one call, from one allocation. A thread keeps the last one up to a limit: fresh memory costs a page fault per 4 KB,
// about as much as the sort itself.
class Arena {
 public:
  ~Arena() {
    if (base_ && capacity_ <= kKept && capacity_ > kept_.capacity) kept_ = {std::move(base_), capacity_};
  }
  size_t reserve(size_t bytes) {
    size_t at = size_;
    size_ += (bytes + 63) & ~size_t(63);
    return at;
  }
  bool allocate() {
    if (kept_.capacity >= size_) {
      base_ = std::move(kept_.base);
      capacity_ = kept_.capacity;
      kept_.capacity = 0;
      return true;
    }
    capacity_ = size_ + size_ / 4;
    base_.reset(static_cast<char*>(std::malloc(capacity_ + 64)));
    return base_ != nullptr;
  }
  template <class E>
  E* at(size_t place) const {
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base_.get()) + 63) & ~uintptr_t(63));
    return reinterpret_cast<E*>(aligned + place);
  }

 private:
  static constexpr size_t kKept = size_t(64) << 20;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Kept {
    std::unique_ptr<char, Free> base;
    size_t capacity = 0;
  };
  static thread_local Kept kept_;
  std::unique_ptr<char, Free> base_;
  size_t size_ = 0, capacity_ = 0;
};
thread_local Arena::Kept Arena::kept_;

constexpr int64_t kUnknown = -1;  // number of rows of a sum's table, if the caller does not pass it

// A feature of a record, seen from its table.
struct FeaturePlan {
  int64_t feature, first_bag, bags, grad_start, grad_stride;
  int64_t ids_begin, ids_end;  // its occurrences in the record's ids
  int64_t bag_base, base;      // bags and occurrences of the table's features before it
  bool mean;
};

struct TablePlan {
  int64_t table, rows, dim;
  size_t features_begin, features_end, count, bags;
  int row_bits;
  bool by_occurrence;  // payload is the occurrence's number among the table's; else the bag's
  size_t keys_at, other_at, place_at, scale_at;
  void *keys, *other;
  int64_t* place;
  float* scale;
  Gather gather;
};

struct Plan {
  const tr_gradient* record;
  std::vector<FeaturePlan> features;  // by table, in the record's order within
  std::vector<TablePlan> tables;
  size_t total = 0;
  int64_t widest = 0;
  Arena arena;
  // Tables that all threads sort together, and tables that one thread sorts alone, the largest first.
  std::vector<size_t> shared, whole;
  size_t counts_at = 0, scratch_at = 0;
  std::atomic<size_t> next_table{0}, next_unit{0}, next_piece{0}, next_long{0};
  std::vector<size_t> unit_base;  // per table, units before it
  int threads = 1;

  float* scratch(int thread) const { return arena.at<float>(scratch_at) + scratch_floats(widest) * thread; }
};

void complain(tr_report* report, int64_t status, int64_t feature, int64_t position, int64_t value) {
  *report = {status, feature, position, value};
}

int64_t id_at(const tr_gradient& record, int64_t p) {
  return record.index_type == TR_I64 ? static_cast<const int64_t*>(record.ids)[p] : static_cast<const int32_t*>(record.ids)[p];
}

// Reads the record's layout; false (and a report) if it reaches outside its arrays.
bool read_layout(Plan& plan, const int64_t* rows, const int64_t* dims, int64_t tables, tr_report* report) {
  const tr_gradient& r = *plan.record;
  std::vector<int32_t> order(r.features);
  {
    std::vector<int32_t> next(tables + 1, 0);
    for (int64_t f = 0; f < r.features; f++) {
      if (r.tables[f] < 0 || r.tables[f] >= tables) return complain(report, TR_BAD_ARGUMENT, f, TR_UPDATE_BAD_TABLE, r.tables[f]), false;
      next[r.tables[f] + 1]++;
    }
    for (int64_t t = 0; t < tables; t++) next[t + 1] += next[t];
    for (int64_t f = 0; f < r.features; f++) order[next[r.tables[f]]++] = static_cast<int32_t>(f);
  }
  plan.features.reserve(r.features);
  for (int32_t f : order) {
    const int64_t t = r.tables[f];
    FeaturePlan feature{};
    feature.feature = f;
    feature.first_bag = r.starts[f];
    feature.bags = r.bags[f];
    feature.grad_start = r.grad_starts[f];
    feature.grad_stride = r.grad_strides[f];
    feature.mean = r.means[f] != 0;
    if (feature.first_bag < 0 || feature.bags < 0) return complain(report, TR_BAD_ARGUMENT, f, TR_UPDATE_NEGATIVE, feature.bags), false;
    if (feature.bags == 0) continue;
    // 128 bits: the record may hold any number.
    using Wide = __int128;
    const Wide first = feature.grad_start, last = first + static_cast<Wide>(feature.bags - 1) * feature.grad_stride;
    if (std::min(first, last) < 0 || std::max(first, last) + dims[t] > r.grad_count)
      return complain(report, TR_BAD_ARGUMENT, f, TR_UPDATE_SHORT_GRAD, r.grad_count), false;
    const Wide end_bag = static_cast<Wide>(feature.first_bag) + feature.bags;
    if (r.offsets) {
      if (end_bag >= r.offsets_count) return complain(report, TR_BAD_ARGUMENT, f, TR_UPDATE_FEW_OFFSETS, r.offsets_count), false;
      const int64_t* at = r.offsets + feature.first_bag;
      // Check the sign bits of all offsets and of all differences. Without a sign bit in an offset, no difference can wrap.
      int64_t falls = at[0];
      for (int64_t b = 0; b < feature.bags; b++)
        falls |= at[b + 1] | static_cast<int64_t>(static_cast<uint64_t>(at[b + 1]) - static_cast<uint64_t>(at[b]));
      feature.ids_begin = at[0];
      feature.ids_end = at[feature.bags];
      if (falls < 0 || feature.ids_end > r.ids_count) {
        int64_t b = 0;  // the first offset that is wrong
        while (b < feature.bags && at[b] >= 0 && at[b] <= r.ids_count && (b == 0 || at[b] >= at[b - 1])) b++;
        return complain(report, TR_BAD_OFFSETS, f, feature.first_bag + b, at[b]), false;
      }
    } else {
      if (end_bag > r.ids_count) return complain(report, TR_BAD_ARGUMENT, f, TR_UPDATE_FEW_IDS, r.ids_count), false;
      feature.ids_begin = feature.first_bag;
      feature.ids_end = feature.first_bag + feature.bags;
    }
    if (feature.ids_begin == feature.ids_end) continue;
    if (plan.tables.empty() || plan.tables.back().table != t) {
      TablePlan table{};
      table.table = t;
      table.rows = rows[t];
      table.dim = dims[t];
      table.features_begin = plan.features.size();
      plan.tables.push_back(table);
    }
    TablePlan& table = plan.tables.back();
    feature.base = static_cast<int64_t>(table.count);
    feature.bag_base = static_cast<int64_t>(table.bags);
    table.count += static_cast<size_t>(feature.ids_end - feature.ids_begin);
    table.bags += static_cast<size_t>(feature.bags);
    table.features_end = plan.features.size() + 1;
    plan.features.push_back(feature);
  }
  return true;
}

// Chooses the packing of keys and the sort of each table, and allocates the memory.
bool prepare(Plan& plan, int threads, tr_report* report) {
  const tr_gradient& r = *plan.record;
  for (TablePlan& table : plan.tables) {
    if (table.count >= UINT32_MAX) return complain(report, TR_BAD_ARGUMENT, -1, TR_UPDATE_TOO_MANY, static_cast<int64_t>(table.count)), false;
    const FeaturePlan* features = plan.features.data() + table.features_begin;
    const size_t feature_count = table.features_end - table.features_begin;
    const bool pooled = r.offsets != nullptr;
    table.by_occurrence = pooled && r.sample_weights;
    bool mean = false;
    for (size_t f = 0; f < feature_count; f++) mean |= pooled && features[f].mean;
    int64_t rows = table.rows;
    if (rows == kUnknown) {  // the largest id + 1; a negative id is found when the keys are made
      rows = 0;
      for (size_t f = 0; f < feature_count; f++)
        for (int64_t p = features[f].ids_begin; p < features[f].ids_end; p++)
          rows = std::max(rows, std::min(id_at(r, p), INT64_MAX - 1) + 1);  // the largest id of all is no row
      table.rows = rows;
    }
    table.row_bits = bits_below(static_cast<uint64_t>(rows));
    const size_t payloads = table.by_occurrence ? table.count : table.bags;
    const int payload_bits = bits_below(payloads);
    Gather& from = table.gather;
    from.grad = r.grad;
    from.grad_type = r.grad_type;
    from.dim = table.dim;
    from.count = table.count;
    from.payload_bits = payload_bits;
    from.key_kind = table.row_bits + payload_bits <= 32 && payload_bits < 32 ? kKey32
                    : table.row_bits + payload_bits <= 64                     ? kKey64
                                                                              : kKeyWide;
    const size_t key_bytes = from.key_kind == kKey32 ? 4 : from.key_kind == kKey64 ? 8 : 16;
    table.keys_at = plan.arena.reserve(table.count * key_bytes);
    table.other_at = plan.arena.reserve(table.count * key_bytes);
    const bool placed = table.by_occurrence || feature_count > 1;
    table.place_at = placed ? plan.arena.reserve(payloads * sizeof(int64_t)) : SIZE_MAX;
    const bool own_scale = table.by_occurrence || mean || (r.sample_weights && feature_count > 1);
    table.scale_at = own_scale ? plan.arena.reserve(payloads * sizeof(float)) : SIZE_MAX;
    from.start = features[0].grad_start;
    from.stride = features[0].grad_stride;
    if (r.sample_weights && !own_scale) from.scale = r.sample_weights + features[0].ids_begin;
    plan.total += table.count;
    plan.widest = std::max(plan.widest, table.dim);
  }
  if (plan.total < 4096) threads = std::min<int>(threads, static_cast<int>(1 + plan.total / 1024));
  plan.threads = threads;
  for (size_t t = 0; t < plan.tables.size(); t++) {
    const size_t count = plan.tables[t].count;
    bool share = threads > 1 && count >= 16384 && count * 2 * static_cast<size_t>(threads) > plan.total;
    if (share && threads == 2) {
      // Two halves of equal work need no sharing.
      share = count * 8 > plan.total * 3 || plan.tables.size() < 4;
    }
    (share ? plan.shared : plan.whole).push_back(t);
  }
  std::stable_sort(plan.whole.begin(), plan.whole.end(),
                   [&](size_t a, size_t b) { return plan.tables[a].count > plan.tables[b].count; });
  if (!plan.shared.empty()) plan.counts_at = plan.arena.reserve(sizeof(uint32_t) * (static_cast<size_t>(threads) << kMaxDigit));
  plan.scratch_at = plan.arena.reserve(sizeof(float) * static_cast<size_t>(scratch_floats(plan.widest)) * threads);
  if (!plan.arena.allocate()) return complain(report, TR_NO_MEMORY, -1, 0, static_cast<int64_t>(plan.total)), false;
  size_t units = 0;
  for (TablePlan& table : plan.tables) {
    table.keys = plan.arena.at<void>(table.keys_at);
    table.other = plan.arena.at<void>(table.other_at);
    table.place = table.place_at == SIZE_MAX ? nullptr : plan.arena.at<int64_t>(table.place_at);
    table.scale = table.scale_at == SIZE_MAX ? nullptr : plan.arena.at<float>(table.scale_at);
    if (table.place) table.gather.place = table.place;
    if (table.scale) table.gather.scale = table.scale;
    plan.unit_base.push_back(units);
    units += (table.count + kUnit - 1) / kUnit;
  }
  plan.unit_base.push_back(units);
  return true;
}

// Makes the keys of occurrences [begin, end) of a table (numbered within the table). Returns the first bad one, or -1.
template <class E, class I>
int64_t make_keys(const Plan& plan, const TablePlan& table, int64_t begin, int64_t end) {
  const tr_gradient& r = *plan.record;
  const I* ids = static_cast<const I*>(r.ids);
  E* keys = static_cast<E*>(table.keys);
  const int bits = table.gather.payload_bits;
  const uint64_t rows = static_cast<uint64_t>(table.rows);
  bool bad = false;
  for (size_t f = table.features_begin; f < table.features_end; f++) {
    const FeaturePlan& feature = plan.features[f];
    const int64_t to_own = feature.base - feature.ids_begin;  // from a position in ids to the number within the table
    const int64_t low = std::max(begin - to_own, feature.ids_begin), high = std::min(end - to_own, feature.ids_end);
    if (low >= high) continue;
    if (!r.offsets) {
      for (int64_t p = low; p < high; p++) {
        const uint64_t row = static_cast<uint64_t>(static_cast<int64_t>(ids[p]));
        bad |= row >= rows;
        keys[p + to_own] = pack_key(row, static_cast<uint64_t>(p + to_own), bits, static_cast<E*>(nullptr));
      }
      if (table.place)
        for (int64_t p = low; p < high; p++) table.place[p + to_own] = feature.grad_start + (p - feature.ids_begin) * feature.grad_stride;
      if (table.scale)
        for (int64_t p = low; p < high; p++) table.scale[p + to_own] = r.sample_weights[p];
      continue;
    }
    const int64_t* offsets = r.offsets + feature.first_bag;
    int64_t b = low == feature.ids_begin ? 0 : std::upper_bound(offsets, offsets + feature.bags + 1, low) - offsets - 1;
    for (int64_t p = low; p < high; b++) {
      const int64_t bag_begin = offsets[b], bag_end = offsets[b + 1], stop = std::min(bag_end, high);
      const float share = feature.mean ? 1.0f / static_cast<float>(bag_end - bag_begin) : 1.0f;
      const int64_t place = feature.grad_start + b * feature.grad_stride;
      if (table.by_occurrence) {
        for (; p < stop; p++) {
          const uint64_t row = static_cast<uint64_t>(static_cast<int64_t>(ids[p]));
          bad |= row >= rows;
          keys[p + to_own] = pack_key(row, static_cast<uint64_t>(p + to_own), bits, static_cast<E*>(nullptr));
          table.place[p + to_own] = place;
          table.scale[p + to_own] = share * r.sample_weights[p];
        }
      } else {
        const uint64_t bag = static_cast<uint64_t>(feature.bag_base + b);
        if (p == bag_begin && p < stop) {  // the thread that has the bag's first occurrence writes for the bag
          if (table.place) table.place[bag] = place;
          if (table.scale) table.scale[bag] = share;
        }
        for (; p < stop; p++) {
          const uint64_t row = static_cast<uint64_t>(static_cast<int64_t>(ids[p]));
          bad |= row >= rows;
          keys[p + to_own] = pack_key(row, bag, bits, static_cast<E*>(nullptr));
        }
      }
    }
  }
  if (!bad) return -1;
  for (size_t f = table.features_begin; f < table.features_end; f++) {
    const FeaturePlan& feature = plan.features[f];
    const int64_t to_own = feature.base - feature.ids_begin;
    for (int64_t p = std::max(begin - to_own, feature.ids_begin); p < std::min(end - to_own, feature.ids_end); p++)
      if (static_cast<uint64_t>(static_cast<int64_t>(ids[p])) >= rows) return p + to_own;
  }
  return -1;
}

template <class E>
int64_t make_keys_of(const Plan& plan, const TablePlan& table, int64_t begin, int64_t end) {
  return plan.record->index_type == TR_I64 ? make_keys<E, int64_t>(plan, table, begin, end)
                                           : make_keys<E, int32_t>(plan, table, begin, end);
}

template <class E>
int64_t sort_table(const Team& team, Plan& plan, TablePlan& table) {
  E *keys = static_cast<E*>(table.keys), *other = static_cast<E*>(table.other);
  const int bits = table.gather.payload_bits;
  const bool alone = team.threads == 1;
  int64_t bad = make_keys_of<E>(plan, table, static_cast<int64_t>(team.begin(table.count)), static_cast<int64_t>(team.end(table.count)));
  E* sorted = alone ? (bad < 0 ? sort_keys(keys, other, table.count, table.row_bits, bits) : keys)
                    : sort_keys_together(team, keys, other, table.count, table.row_bits, bits, plan.arena.at<uint32_t>(plan.counts_at));
  if (team.thread == 0) table.gather.keys = sorted;
  return bad;
}

int64_t sort_table(const Team& team, Plan& plan, TablePlan& table) {
  if (table.gather.key_kind == kKey32) return sort_table<uint32_t>(team, plan, table);
  if (table.gather.key_kind == kKey64) return sort_table<uint64_t>(team, plan, table);
  return sort_table<WideKey>(team, plan, table);
}

// The lowest bad occurrence that any thread found.
class FirstBad {
 public:
  void meet(size_t table, int64_t occurrence) {
    if (occurrence < 0) return;
    uint64_t mine = static_cast<uint64_t>(table) << 32 | static_cast<uint64_t>(occurrence), seen = first_.load();
    while (mine < seen && !first_.compare_exchange_weak(seen, mine)) {
    }
  }
  bool any() const { return first_.load() != UINT64_MAX; }
  void tell(const Plan& plan, tr_report* report) const {
    const TablePlan& table = plan.tables[first_.load() >> 32];
    const int64_t own = static_cast<int64_t>(first_.load() & UINT32_MAX);
    for (size_t f = table.features_begin; f < table.features_end; f++) {
      const FeaturePlan& feature = plan.features[f];
      const int64_t p = own - feature.base + feature.ids_begin;
      if (p >= feature.ids_begin && p < feature.ids_end) complain(report, TR_BAD_ID, feature.feature, p, id_at(*plan.record, p));
    }
  }

 private:
  std::atomic<uint64_t> first_{UINT64_MAX};
};

// Sorts all tables. Every thread of a team must call it. Afterwards all threads see all sorted keys.
void sort_all(const Team& team, Plan& plan, FirstBad& bad) {
  for (size_t t : plan.shared) bad.meet(t, sort_table(team, plan, plan.tables[t]));
  const Team alone{0, 1};
  for (size_t i; (i = plan.next_table.fetch_add(1)) < plan.whole.size();) {
    const size_t t = plan.whole[i];
    bad.meet(t, sort_table(alone, plan, plan.tables[t]));
  }
  team.wait();
}

// Calls work(table, unit, begin, end) for units that no thread has taken yet.
template <class Work>
void take_units(Plan& plan, const Work& work) {
  size_t t = 0;
  for (size_t unit; (unit = plan.next_unit.fetch_add(1)) < plan.unit_base.back();) {
    while (unit >= plan.unit_base[t + 1]) t++;
    const size_t begin = (unit - plan.unit_base[t]) * kUnit;
    work(t, unit, begin, std::min(begin + kUnit, plan.tables[t].count));
  }
}

// A run to be summed in pieces.
struct LongRun {
  size_t table, begin, end, pieces_before;
};

int64_t row_at(const Gather& from, size_t i) {
  if (from.key_kind == kKey32) return static_cast<int64_t>(row_of(static_cast<const uint32_t*>(from.keys)[i], from.payload_bits));
  if (from.key_kind == kKey64) return static_cast<int64_t>(row_of(static_cast<const uint64_t*>(from.keys)[i], from.payload_bits));
  return static_cast<int64_t>(row_of(static_cast<const WideKey*>(from.keys)[i], from.payload_bits));
}

Target target_of(const tr_rows& tables, int64_t t) {
  Target to{};
  to.weights = tables.weights[t];
  for (int64_t k = 0; k < tables.slots_per_table && k < kMaxSlots; k++)
    to.slots[k] = static_cast<float*>(tables.slots[t * tables.slots_per_table + k]);
  to.hyper = tables.hyper;
  to.names = tables.names ? tables.names[t] : nullptr;
  to.hypers = static_cast<int32_t>(tables.hypers);
  to.dim = to.full_dim = tables.dims[t];
  to.step = tables.steps[t];
  to.row_offset = tables.row_offsets[t];
  to.column_offset = tables.column_offsets[t];
  to.seeds[0] = static_cast<uint32_t>(tables.seeds[2 * t]);
  to.seeds[1] = static_cast<uint32_t>(tables.seeds[2 * t + 1]);
  to.type = tables.types[t];
  to.rule = tables.rule;
  return to;
}

// Returns true if every table has memory, and a column offset within the range of the random words.
bool tables_serve(const tr_rows& tables, tr_report* report) {
  for (int64_t t = 0; t < tables.tables; t++) {
    if (tables.column_offsets[t] < 0 || tables.column_offsets[t] >= int64_t(1) << 34)
      return complain(report, TR_BAD_ARGUMENT, t, TR_UPDATE_BAD_COLUMN, tables.column_offsets[t]), false;
    bool memory = tables.weights[t];
    for (int64_t k = 0; k < tables.slots_per_table; k++) memory &= tables.slots[t * tables.slots_per_table + k] != nullptr;
    if (!memory && tables.rows[t] > 0 && tables.dims[t] > 0) return complain(report, TR_BAD_ARGUMENT, t, TR_UPDATE_NO_ROWS, t), false;
  }
  return true;
}

struct Skipped {
  int64_t count = 0, table = -1, row = -1;
  void add(int64_t t, const UnitResult& unit) {
    if (!unit.skipped) return;
    if (!count || t < table || (t == table && unit.first_row < row)) table = t, row = unit.first_row;
    count += unit.skipped;
  }
};

void update_rows(const tr_rows& tables, const tr_gradient& record, int threads, int64_t* skipped_out, tr_report* report) {
  Plan plan;
  plan.record = &record;
  if (!tables_serve(tables, report) || !read_layout(plan, tables.rows, tables.dims, tables.tables, report)) return;
  if (plan.total == 0 && plan.tables.empty()) return;
  if (!prepare(plan, threads, report)) return;
  FirstBad bad;
  std::vector<Skipped> skipped(plan.threads);
  std::vector<std::vector<LongRun>> long_runs(plan.threads);
  std::vector<LongRun> all_long;
  std::unique_ptr<float[]> pieces;
  bool no_memory = false;
  parallel(plan.threads, [&](const Team& team) {
    sort_all(team, plan, bad);
    if (bad.any()) return;
    Skipped& mine = skipped[team.thread];
    float* scratch = plan.scratch(team.thread);
    take_units(plan, [&](size_t t, size_t, size_t begin, size_t end) {
      const TablePlan& table = plan.tables[t];
      UnitResult result{};
      TILEREC_CALL(update_unit)(target_of(tables, table.table), table.gather, begin, end, scratch, &result);
      mine.add(table.table, result);
      if (result.long_begin < result.long_end) long_runs[team.thread].push_back({t, result.long_begin, result.long_end, 0});
    });
    team.wait();
    if (team.thread == 0) {
      size_t count = 0;
      for (auto& some : long_runs)
        for (LongRun run : some) {
          run.pieces_before = count;
          count += (run.end - run.begin + kPiece - 1) / kPiece;
          all_long.push_back(run);
        }
      if (count) {
        pieces.reset(new (std::nothrow) float[count * static_cast<size_t>(plan.widest)]);
        no_memory = !pieces;
      }
    }
    team.wait();
    if (all_long.empty() || no_memory) return;
    for (size_t i; (i = plan.next_piece.fetch_add(1)), true;) {
      size_t run = all_long.size();
      while (run > 0 && all_long[run - 1].pieces_before > i) run--;
      const LongRun& of = all_long[run - 1];
      const size_t begin = of.begin + (i - of.pieces_before) * kPiece;
      if (begin >= of.end) break;  // beyond the last piece of the last run
      TILEREC_CALL(sum_piece)(plan.tables[of.table].gather, begin, std::min(begin + kPiece, of.end), scratch,
                              pieces.get() + i * static_cast<size_t>(plan.widest));
    }
    team.wait();
    for (size_t i; (i = plan.next_long.fetch_add(1)) < all_long.size();) {
      const LongRun& run = all_long[i];
      const TablePlan& table = plan.tables[run.table];
      float* sum = pieces.get() + run.pieces_before * static_cast<size_t>(plan.widest);
      const size_t count = (run.end - run.begin + kPiece - 1) / kPiece;
      for (size_t p = 1; p < count; p++) TILEREC_CALL(add_row)(sum, sum + p * static_cast<size_t>(plan.widest), table.dim);
      UnitResult result{};
      TILEREC_CALL(finish_run)(target_of(tables, table.table), row_at(table.gather, run.begin), sum, scratch, &result);
      mine.add(table.table, result);
    }
  });
  if (bad.any()) return bad.tell(plan, report);
  if (no_memory) return complain(report, TR_NO_MEMORY, -1, 0, plan.widest);
  Skipped all;
  for (const Skipped& some : skipped)
    if (some.count) {
      UnitResult as_unit{};
      as_unit.skipped = some.count;
      as_unit.first_row = some.row;
      all.add(some.table, as_unit);
    }
  skipped_out[0] = all.count;
  skipped_out[1] = all.table;
  skipped_out[2] = all.row;
}

struct Sums {
  tr_gradient record;
  Plan plan;
  std::vector<size_t> runs_before;   // per unit
  std::vector<size_t> grads_before;  // per table of the plan, elements of the tables before it
};

}  // namespace
}  // namespace tilerec

using namespace tilerec;

TR_API void tr_update_rows(const tr_rows* tables, const tr_gradient* record, int32_t threads, int64_t* skipped, tr_report* report) {
  *report = {TR_OK, -1, -1, 0};
  skipped[0] = 0;
  skipped[1] = skipped[2] = -1;
  try {
    update_rows(*tables, *record, threads, skipped, report);
  } catch (const std::exception&) {
    complain(report, TR_NO_MEMORY, -1, 0, 0);
  }
}

TR_API void* tr_sum_begin(const tr_gradient* record, const int64_t* rows, const int64_t* dims, int64_t tables, int32_t threads,
                          int64_t* counts, tr_report* report) {
  *report = {TR_OK, -1, -1, 0};
  std::fill(counts, counts + tables, 0);
  try {
    auto sums = std::make_unique<Sums>();
    sums->record = *record;
    Plan& plan = sums->plan;
    plan.record = &sums->record;
    std::vector<int64_t> known(rows, rows + tables);
    std::replace(known.begin(), known.end(), int64_t(0), kUnknown);
    if (!read_layout(plan, known.data(), dims, tables, report)) return nullptr;
    if (plan.tables.empty()) return sums.release();
    if (!prepare(plan, threads, report)) return nullptr;
    FirstBad bad;
    sums->runs_before.assign(plan.unit_base.back() + 1, 0);
    parallel(plan.threads, [&](const Team& team) {
      sort_all(team, plan, bad);
      if (bad.any()) return;
      take_units(plan, [&](size_t t, size_t unit, size_t begin, size_t end) {
        sums->runs_before[unit + 1] = TILEREC_CALL(count_runs)(plan.tables[t].gather, begin, end);
      });
    });
    if (bad.any()) return bad.tell(plan, report), nullptr;
    for (size_t u = 1; u < sums->runs_before.size(); u++) sums->runs_before[u] += sums->runs_before[u - 1];
    size_t grads = 0;
    for (size_t t = 0; t < plan.tables.size(); t++) {
      const TablePlan& table = plan.tables[t];
      const size_t count = sums->runs_before[plan.unit_base[t + 1]] - sums->runs_before[plan.unit_base[t]];
      counts[table.table] = static_cast<int64_t>(count);
      sums->grads_before.push_back(grads);
      grads += count * static_cast<size_t>(table.dim);
    }
    return sums.release();
  } catch (const std::exception&) {
    complain(report, TR_NO_MEMORY, -1, 0, 0);
    return nullptr;
  }
}

TR_API void tr_sum_finish(void* handle, int64_t* rows_out, float* grads_out) {
  Sums& sums = *static_cast<Sums*>(handle);
  Plan& plan = sums.plan;
  if (plan.tables.empty()) return;
  plan.next_unit = 0;
  parallel(plan.threads, [&](const Team& team) {
    take_units(plan, [&](size_t t, size_t unit, size_t begin, size_t end) {
      const size_t first = sums.runs_before[unit], in_table = first - sums.runs_before[plan.unit_base[t]];
      TILEREC_CALL(sum_unit)(plan.tables[t].gather, begin, end, plan.scratch(team.thread), rows_out + first,
                             grads_out + sums.grads_before[t] + in_table * static_cast<size_t>(plan.tables[t].dim));
    });
  });
}

TR_API void tr_sum_free(void* handle) { delete static_cast<Sums*>(handle); }

namespace {

// Returns true if all rows lie in their tables. Clears `ascend` if the rows of a table do not ascend: then two threads could
// update one row.
bool rows_are_good(const tr_rows& tables, const tr_parts& parts, bool* ascend, tr_report* report) {
  *report = {TR_OK, -1, -1, 0};
  if (!tables_serve(tables, report)) return false;
  for (int64_t t = 0; t < tables.tables; t++) {
    const int64_t* rows = parts.rows[t];
    for (int64_t u = 0; u < parts.counts[t]; u++) {
      if (rows[u] < 0 || rows[u] >= tables.rows[t]) return complain(report, TR_BAD_ID, t, u, rows[u]), false;
      if (u && rows[u] <= rows[u - 1]) *ascend = false;
    }
  }
  return true;
}

// Shares the rows of all parts among threads; body(target, t, begin, end, scratch) gets rows [begin, end) of table t.
template <class Body>
void over_rows(const tr_rows& tables, const tr_parts& parts, int threads, tr_report* report, const Body& body) {
  size_t total = 0;
  int64_t widest = 0, elements = 0;
  for (int64_t t = 0; t < tables.tables; t++) {
    total += static_cast<size_t>(parts.counts[t]);
    widest = std::max(widest, tables.dims[t]);
    elements += parts.counts[t] * tables.dims[t];
  }
  if (total == 0) return;
  if (elements < 16384) threads = 1;
  const size_t each = static_cast<size_t>(scratch_floats(widest));
  std::unique_ptr<float[]> scratch(new (std::nothrow) float[each * static_cast<size_t>(threads)]);
  if (!scratch) return complain(report, TR_NO_MEMORY, -1, 0, widest);
  parallel(threads, [&](const Team& team) {
    const size_t begin = team.begin(total), end = team.end(total);
    size_t before = 0;  // rows of the tables before
    for (int64_t t = 0; t < tables.tables; t++) {
      const size_t count = static_cast<size_t>(parts.counts[t]);
      const size_t low = std::max(begin, before), high = std::min(end, before + count);
      if (low < high) {
        Target to = target_of(tables, t);
        to.full_dim = parts.full_dims[t];
        to.block_offset = to.column_offset;
        body(to, t, low - before, high - before, scratch.get() + each * static_cast<size_t>(team.thread));
      }
      before += count;
    }
  });
}

}  // namespace

TR_API int32_t tr_rule_number(const char* name) { return TILEREC_CALL(rule_number)(name); }

TR_API void tr_rule_partials(const tr_rows* tables, const tr_parts* parts, int32_t phase, int32_t exact, int32_t finite,
                             int32_t threads, float* const* outs, tr_report* report) {
  bool ascend = true;
  if (!rows_are_good(*tables, *parts, &ascend, report)) return;
  over_rows(*tables, *parts, threads, report, [&](const Target& to, int64_t t, size_t begin, size_t end, float* scratch) {
    TILEREC_CALL(partials_of)(to, parts->rows[t], parts->grads[t], parts->scalars[t], parts->strides[t], phase, exact != 0,
                              finite != 0, begin, end, scratch, outs[t]);
  });
}

TR_API void tr_rule_apply(const tr_rows* tables, const tr_parts* parts, int32_t threads, tr_report* report) {
  bool ascend = true;
  if (!rows_are_good(*tables, *parts, &ascend, report)) return;
  over_rows(*tables, *parts, ascend ? threads : 1, report, [&](const Target& to, int64_t t, size_t begin, size_t end, float* scratch) {
    TILEREC_CALL(apply_rows)(to, parts->rows[t], parts->grads[t], parts->scalars[t], parts->strides[t], begin, end, scratch);
  });
}
