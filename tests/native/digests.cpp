// Prints a digest of the results of the native CPU library, a line per case: "pooled_lookup.bf16.mean 1f2e...".
//
//   digests LIBRARY LEVEL     LEVEL 0 base, 1 AVX2, 2 AVX-512
//
// Libraries of two processors are equal where all lines are. Inputs come from a fixed generator and have awkward sizes:
// widths that fill no vector, empty bags, repeated ids, weights, means, 16-bit rows with stochastic rounding.
// scripts/check_arm64.py compares an arm64 library under qemu with the x86-64 one, which the tests of the ops check.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../../native/hash.h"
#include "../../native/jagged.h"
#include "../../native/lookup.h"
#include "../../native/quantize.h"
#include "../../native/random.h"
#include "../../native/tilerec.h"
#include "../../native/update.h"

namespace {

void* library;

template <class F>
F* function(const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) fprintf(stderr, "%s\n", dlerror()), exit(2);
  return (F*)found;
}
#define CALL(name) function<decltype(name)>(#name)

// ---- inputs

uint64_t state = 1;

uint64_t word() { return tilerec::zch_mix(state += 0x9e3779b97f4a7c15u); }
int64_t below(int64_t n) { return (int64_t)(word() % (uint64_t)n); }

std::vector<int64_t> ids(int64_t count, int64_t rows) {
  std::vector<int64_t> out(count);
  for (int64_t& id : out) id = below(2) ? below(rows) : below(3) % rows;  // every other one is frequent
  return out;
}

std::vector<int64_t> offsets(int64_t bags, int64_t total) {
  std::vector<int64_t> out(bags + 1, 0);
  for (int64_t b = 1; b < bags; ++b) out[b] = std::min(total, out[b - 1] + below(3 * total / bags));
  out[bags] = total;
  return out;
}

float number() { return (float)((double)(int64_t)word() * 0x1p-63); }

std::vector<float> numbers(int64_t count) {
  std::vector<float> out(count);
  for (float& x : out) x = number();
  return out;
}

int64_t row_bytes(int64_t type, int64_t dim) {
  if (type == TR_F32) return 4 * dim;
  if (type < TR_CODES8) return 2 * dim;
  const int64_t per_byte = type == TR_CODES8 ? 1 : type == TR_CODES4 ? 2 : 4;
  return 4 + ((dim + per_byte - 1) / per_byte + 3) / 4 * 4;
}

// Rows of finite numbers of a type.
std::vector<char> table(int64_t type, int64_t rows, int64_t dim) {
  const int64_t bytes = row_bytes(type, dim);
  std::vector<char> out(rows * bytes);
  for (int64_t r = 0; r < rows; ++r) {
    char* row = out.data() + r * bytes;
    if (type >= TR_CODES8) {
      for (int64_t i = 0; i < bytes; ++i) row[i] = (char)word();
      const uint16_t scale = 0x2000 + below(0x800), bias = 0x2c00 + below(0x1000);
      memcpy(row, &scale, 2), memcpy(row + 2, &bias, 2);
      continue;
    }
    for (int64_t c = 0; c < dim; ++c) {
      const float x = number();
      const uint16_t half = type == TR_F16 ? (uint16_t)(below(2) * 0x8000 + below(0x4000)) : (uint16_t)0;
      uint32_t bits;
      memcpy(&bits, &x, 4);
      const uint16_t brain = bits >> 16;
      if (type == TR_F32) memcpy(row + 4 * c, &x, 4);
      if (type == TR_BF16) memcpy(row + 2 * c, &brain, 2);
      if (type == TR_F16) memcpy(row + 2 * c, &half, 2);
    }
  }
  return out;
}

// ---- digests (FNV-1a)

struct Digest {
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) value = (value ^ ((const unsigned char*)data)[i]) * 0x100000001b3u;
  }
  template <class T>
  void add(const std::vector<T>& items) {
    add(items.data(), items.size() * sizeof(T));
  }
};

void line(const std::string& name, const Digest& digest) { printf("%s %016llx\n", name.c_str(), (unsigned long long)digest.value); }

const char* const TYPES[] = {"fp32", "bf16", "fp16", "int8", "int4", "int2"};

// ---- cases

constexpr int64_t kBags = 61, kIds = 400, kRows = 97;

void lookups(int64_t type, bool weighted) {
  const int64_t tables[] = {0, 1, 0}, keys[] = {0, 0, 0}, means[] = {0, 1, 1}, dims[] = {20, 36}, rows[] = {kRows, kRows};
  const int64_t types[] = {type, type}, batches[] = {kBags};
  const std::vector<char> first = table(type, kRows, dims[0]), second = table(type, kRows, dims[1]);
  const void* data[] = {first.data(), second.data()};
  const std::vector<int64_t> id = ids(kIds, kRows), at = offsets(3 * kBags, kIds);
  const std::vector<float> weights = numbers(kIds);
  for (int64_t out_type : {(int64_t)TR_F32, (int64_t)TR_BF16, (int64_t)TR_F16}) {
    std::vector<char> out(kBags * 76 * (out_type == TR_F32 ? 4 : 2));
    tr_lookup call = {};
    call.features = 3, call.tables = tables, call.keys = keys, call.means = means;
    call.table_count = 2, call.rows = rows, call.dims = dims, call.types = types, call.data = data;
    call.batch_count = 1, call.batches = batches, call.ids = id.data(), call.index_type = TR_I64, call.id_count = kIds;
    call.offsets = at.data(), call.offset_count = (int64_t)at.size(), call.sample_weights = weighted ? weights.data() : nullptr;
    call.numbers = out.data(), call.number_type = out_type, call.threads = 1;
    Digest digest;
    const int64_t status = CALL(tr_pooled_lookup)(&call);
    digest.add(&status, sizeof status), digest.add(out);
    line(std::string("pooled_lookup.") + TYPES[type] + (weighted ? ".weighted." : ".") + TYPES[out_type], digest);
  }
}

void sequence_lookup(int64_t type) {
  const int64_t tables[] = {0}, dims[] = {20}, rows[] = {kRows}, types[] = {type}, runs[] = {0, kIds};
  const std::vector<char> all = table(type, kRows, dims[0]);
  const void* data[] = {all.data()};
  std::vector<int64_t> id = ids(kIds, kRows);
  std::vector<float> out(kIds * dims[0]);
  tr_lookup call = {};
  call.features = 1, call.tables = tables, call.table_count = 1, call.rows = rows, call.dims = dims, call.types = types;
  call.data = data, call.ids = id.data(), call.index_type = TR_I64, call.id_count = kIds, call.offsets = runs;
  call.offset_count = 2, call.numbers = out.data(), call.number_type = TR_F32, call.threads = 1;
  Digest digest;
  CALL(tr_sequence_lookup)(&call);
  digest.add(out);
  id[7] = kRows;  // an id that the table does not have
  CALL(tr_sequence_lookup)(&call);
  digest.add(&call.report, sizeof call.report);
  line(std::string("sequence_lookup.") + TYPES[type], digest);
}

void update(const char* rule, std::vector<double> own, int64_t slots, int64_t type) {
  const int64_t dims[] = {20, 36}, rows[] = {kRows, kRows}, steps[] = {3, 3}, seeds[] = {1, 2, 3, 4}, zeros[] = {0, 0};
  const int32_t types[] = {(int32_t)type, (int32_t)type};
  std::vector<char> first = table(type, kRows, dims[0]), second = table(type, kRows, dims[1]);
  void* weights[] = {first.data(), second.data()};
  std::vector<std::vector<float>> state;
  std::vector<void*> at;
  for (int64_t dim : dims)
    for (int64_t s = 0; s < slots; ++s) {
      state.push_back(numbers(kRows * dim));  // of a narrow slot, the first kRows
      for (float& x : state.back()) x = x * x;
    }
  for (std::vector<float>& one : state) at.push_back(one.data());
  std::vector<double> hyper = {0.05, 2.0, 0.01, 1.0};  // lr, grad_scale, weight_decay, stochastic rounding
  hyper.insert(hyper.end(), own.begin(), own.end());
  tr_rows tables = {};
  tables.weights = weights, tables.slots = at.data(), tables.rows = rows, tables.dims = dims, tables.types = types;
  tables.steps = steps, tables.seeds = seeds, tables.row_offsets = zeros, tables.column_offsets = zeros;
  tables.hyper = hyper.data(), tables.tables = 2, tables.slots_per_table = slots, tables.hypers = (int64_t)hyper.size();
  tables.rule = CALL(tr_rule_number)(rule);

  const int64_t of_table[] = {0, 1, 0}, starts[] = {0, kBags, 2 * kBags}, bags[] = {kBags, kBags, kBags}, means[] = {0, 1, 1};
  const int64_t grad_starts[] = {0, 20, 56}, grad_strides[] = {76, 76, 76};
  const std::vector<int64_t> id = ids(kIds, kRows), offset = offsets(3 * kBags, kIds);
  const std::vector<float> grad = numbers(kBags * 76), sample_weights = numbers(kIds);
  tr_gradient record = {};
  record.grad = grad.data(), record.ids = id.data(), record.offsets = offset.data(), record.sample_weights = sample_weights.data();
  record.grad_count = (int64_t)grad.size(), record.ids_count = kIds, record.offsets_count = (int64_t)offset.size();
  record.features = 3, record.tables = of_table, record.starts = starts, record.bags = bags, record.grad_starts = grad_starts;
  record.grad_strides = grad_strides, record.means = means, record.grad_type = TR_F32, record.index_type = TR_I64;
  int64_t skipped[3];
  tr_report report = {};
  CALL(tr_update_rows)(&tables, &record, 1, skipped, &report);
  Digest digest;
  digest.add(&report.status, sizeof report.status), digest.add(skipped, sizeof skipped), digest.add(first), digest.add(second);
  for (const std::vector<float>& one : state) digest.add(one);
  line(std::string("update.") + rule + "." + TYPES[type], digest);
}

void hash(int64_t policy) {
  constexpr int64_t kBuckets = 5, kSlots = 40, kHeld = kBuckets * kSlots, kCount = 700, kCounters = 16;
  std::vector<int64_t> slot_ids(kHeld), since(kHeld), last(kHeld), hits(kHeld), expires(kHeld), rows(kCount), evicted_rows(kCount),
      evicted_ids(kCount);
  std::vector<uint8_t> used(kHeld), outcomes(kCount);
  std::vector<int32_t> counters(kBuckets * kCounters), probes(kCount);
  tr_zch call = {};
  call.count = kCount, call.slot_ids = slot_ids.data(), call.used = used.data(), call.since = since.data(), call.last = last.data();
  call.hits = hits.data(), call.expires = expires.data(), call.counters = counters.data(), call.counter_count = kCounters;
  call.held = call.buckets = kBuckets, call.slots = kSlots, call.max_probe = 8, call.ttl = 3, call.policy = policy, call.evict = 1;
  call.threshold = 1, call.exponent = 1.5, call.rows = rows.data(), call.outcomes = outcomes.data(), call.probes = probes.data();
  call.evicted_rows = evicted_rows.data(), call.evicted_ids = evicted_ids.data(), call.threads = 1;
  Digest digest;
  for (int64_t step = 1; step <= 6; ++step) {
    const std::vector<int64_t> id = ids(kCount, 600);
    call.ids = id.data(), call.step = call.now = step;
    const int64_t status = CALL(tr_zch_assign)(&call);
    digest.add(&status, sizeof status), digest.add(rows), digest.add(outcomes), digest.add(slot_ids), digest.add(hits);
    digest.add(evicted_ids.data(), call.evicted * sizeof(int64_t));
  }
  const char* const names[] = {"lru", "lfu", "distance_lfu", "ttl"};
  line(std::string("hash.") + names[policy], digest);
}

void others() {
  const std::vector<int64_t> id = ids(kIds, (int64_t)1 << 62), at = offsets(kBags, kIds);
  std::vector<int64_t> rows(kIds);
  Digest hashed, summed, padded, drawn;
  CALL(tr_hash_rows)(id.data(), kIds, 1000, 1, rows.data());
  hashed.add(rows);
  line("hash_rows", hashed);

  tr_report report = {};
  const std::vector<float> values = numbers(kIds * 3);
  std::vector<float> sums(kBags * 3), dense(kBags * 9 * 3);
  CALL(tr_segment_sum)(values.data(), 0, kIds, 3, at.data(), kBags, sums.data(), 1, &report);
  summed.add(sums), summed.add(&report.status, sizeof report.status);
  line("segment_sum", summed);
  const float padding = -1;
  CALL(tr_jagged_to_padded)(values.data(), 12, kIds, at.data(), kBags, 9, &padding, 4, dense.data(), 1, &report);
  padded.add(dense), padded.add(&report.status, sizeof report.status);
  line("jagged_to_padded", padded);

  for (int64_t type : {(int64_t)TR_F32, (int64_t)TR_BF16, (int64_t)TR_F16})
    for (int64_t kind : {0, 1}) {
      std::vector<char> out(50 * 20 * (type == TR_F32 ? 4 : 2));
      CALL(tr_random_fill)(out.data(), type, 50, 20, 11, 12, 5, 8, kind, 0.0f, 1.0f, 1);
      drawn.add(out);
    }
  line("random_fill", drawn);

  for (int64_t fp8 : {0, 1}) {
    const int64_t lists[] = {40, 7, 36, 20};  // rows, then widths, of two segments
    std::vector<float> source = numbers(40 * 36 + 7 * 20), back(source.size());
    std::vector<char> packed(40 * 40 + 7 * 24);
    tr_packing call = {lists, 2, (char*)source.data(), packed.data(), fp8, 0, 1};
    CALL(tr_pack_rows)(&call);
    call.rows = (char*)back.data();
    CALL(tr_unpack_rows)(&call);
    Digest digest;
    digest.add(packed), digest.add(back);
    line(fp8 ? "pack_rows.fp8" : "pack_rows.int8", digest);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: digests LIBRARY LEVEL\n"), 2;
  library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "%s\n", dlerror()), 2;
  const int level = atoi(argv[2]);
  if (CALL(tr_isa_choose)(level) != level) return fprintf(stderr, "this machine has no level %d\n", level), 3;
  if (CALL(tr_abi_version)() != TR_ABI_VERSION) return fprintf(stderr, "the library has another interface\n"), 2;

  for (int64_t type = TR_F32; type <= TR_CODES2; ++type) {
    lookups(type, false), lookups(type, true);
    sequence_lookup(type);
  }
  for (int64_t type = TR_F32; type <= TR_F16; ++type) {
    update("store", {}, 0, type);
    update("sgd", {0, 0}, 0, type);
    update("sgd", {0.9, 1}, 1, type);
    update("adagrad", {1e-10, 0.1}, 1, type);
    update("rowwise_adagrad", {1e-10, 1, 0.5}, 1, type);
    update("adam", {1e-8, 0.9, 0.999, 0, 0}, 2, type);
    update("adam", {1e-8, 0.9, 0.999, 1, 1}, 3, type);
    update("partial_rowwise_adam", {1e-8, 0.9, 0.999, 0}, 2, type);
    update("lamb", {1e-8, 0.9, 0.999, 0}, 2, type);
    update("partial_rowwise_lamb", {1e-8, 0.9, 0.999, 1}, 3, type);
    update("lars_sgd", {0.9, 0.001}, 1, type);
  }
  for (int64_t policy = TR_LRU; policy <= TR_TTL; ++policy) hash(policy);
  others();
  return 0;
}
