// Kernels of the updates: gather and sum a run's gradient rows, apply a row rule, round and write.
//
//   run    the occurrences of one row, neighbours after sorting
//
// Per run: sum the gradient rows in registers, test that the sum is finite (if the rule skips rows that are not), run the
// rule over the row (rules.h), write row and slots once. Gradient rows are prefetched some occurrences ahead, weights and
// slots some runs ahead.
#include "rules.h"
#include "sort_key.h"
#include "update.h"
#include "update_random.h"
#include "update_task.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int kRegisters = 8;      // vectors summed side by side
constexpr int kAheadLines = 48;    // cache lines of gradient rows prefetched ahead
constexpr int kAheadRuns = 8;      // runs whose weights and slots are prefetched ahead

// ---- summing the gradient rows of a run

template <class E, class G>
struct Source {
  const Gather& from;
  const E* keys;
  const G* grad;
  size_t ahead;

  explicit Source(const Gather& from)
      : from(from), keys(static_cast<const E*>(from.keys)), grad(static_cast<const G*>(from.grad)) {
    int64_t lines = (from.dim * (int64_t)sizeof(G) + 127) / 64;
    ahead = (size_t)(kAheadLines / lines);
    if (ahead < 2) ahead = 2;
    if (ahead > 24) ahead = 24;
  }
  uint64_t payload(size_t i) const { return payload_of(keys[i], from.payload_bits); }
  const G* row(uint64_t payload) const {
    return grad + (from.place ? from.place[payload] : from.start + (int64_t)payload * from.stride);
  }
  void ask(size_t i) const {
    if (i + ahead < from.count) prefetch_row(row(payload(i + ahead)), (size_t)from.dim * sizeof(G));
  }

  // Columns [column, column + N * kLanes) of occurrences [begin, end); kPart: the first `part` lanes of one vector.
  template <int N, bool kPart, bool kAsk>
  void add(size_t begin, size_t end, int64_t column, int part, float* out) const {
    vf sum[N];
    auto read = [&](uint64_t at, int k) {
      const G* p = row(at) + column;
      vf x = kPart ? load(p, part) : load(p + k * kLanes);
      return from.scale ? splat(from.scale[at]) * x : x;
    };
    if (kAsk) ask(begin);
    const uint64_t first = payload(begin);
    for (int k = 0; k < N; k++) sum[k] = read(first, k);
    for (size_t i = begin + 1; i < end; i++) {
      if (kAsk) ask(i);
      const uint64_t at = payload(i);
      for (int k = 0; k < N; k++) sum[k] = sum[k] + read(at, k);
    }
    for (int k = 0; k < N; k++) store(out + column + k * kLanes, sum[k]);
  }
  template <bool kAsk>
  void add_vectors(int vectors, size_t begin, size_t end, int64_t column, float* out) const {
    switch (vectors) {
      case 1: return add<1, false, kAsk>(begin, end, column, 0, out);
      case 2: return add<2, false, kAsk>(begin, end, column, 0, out);
      case 3: return add<3, false, kAsk>(begin, end, column, 0, out);
      case 4: return add<4, false, kAsk>(begin, end, column, 0, out);
      case 5: return add<5, false, kAsk>(begin, end, column, 0, out);
      case 6: return add<6, false, kAsk>(begin, end, column, 0, out);
      case 7: return add<7, false, kAsk>(begin, end, column, 0, out);
      default: return add<8, false, kAsk>(begin, end, column, 0, out);
    }
  }

  // The sum of occurrences [begin, end): in `out` (written up to whole vectors). A single unscaled fp32 row is returned in place.
  const float* sum(size_t begin, size_t end, float* out) const {
    if (sizeof(G) == sizeof(float) && end - begin == 1 && !from.scale) {
      ask(begin);
      return reinterpret_cast<const float*>(row(payload(begin)));
    }
    int64_t vectors = from.dim / kLanes, done = 0;
    int part = (int)(from.dim % kLanes);
    bool first = true;
    for (; done < vectors; first = false) {
      int now = vectors - done < kRegisters ? (int)(vectors - done) : kRegisters;
      if (first)
        add_vectors<true>(now, begin, end, 0, out);
      else
        add_vectors<false>(now, begin, end, done * kLanes, out);
      done += now;
    }
    if (part && first) add<1, true, true>(begin, end, 0, part, out);
    if (part && !first) add<1, true, false>(begin, end, done * kLanes, part, out);
    return out;
  }

  // Writes the starts of the runs that begin in [begin, end), then the end of the last run; returns the number of runs.
  int runs(size_t begin, size_t end, uint32_t* starts, int64_t* rows) const {
    int bits = from.payload_bits, n = 0;
    uint64_t before = begin ? row_of(keys[begin - 1], bits) : ~uint64_t(0);
    for (size_t i = begin; i < end; i++) {
      uint64_t row = row_of(keys[i], bits);
      starts[n] = (uint32_t)i;
      rows[n] = (int64_t)row;
      n += row != before;
      before = row;
    }
    if (n == 0) return 0;
    // The last run may continue beyond `end`: search its end in growing steps.
    size_t known = end, step = 1;
    while (known < from.count && row_of(keys[known], bits) == before) {
      size_t next = known + step;
      if (next < from.count && row_of(keys[next], bits) == before) {
        known = next;
        step *= 2;
      } else if (step == 1) {
        known++;
      } else {
        step = 1;
      }
    }
    starts[n] = (uint32_t)known;
    return n;
  }
};

// One function per kind of key and gradient.
struct SourceFunctions {
  const float* (*sum)(const Gather&, size_t, size_t, float*);
  int (*runs)(const Gather&, size_t, size_t, uint32_t*, int64_t*);
};

template <class E, class G>
const float* sum_of(const Gather& from, size_t begin, size_t end, float* out) {
  return Source<E, G>(from).sum(begin, end, out);
}
template <class E, class G>
int runs_of(const Gather& from, size_t begin, size_t end, uint32_t* starts, int64_t* rows) {
  return Source<E, G>(from).runs(begin, end, starts, rows);
}
template <class E>
SourceFunctions functions_of_key(int32_t grad_type) {
  if (grad_type == TR_BF16) return {sum_of<E, bf16>, runs_of<E, bf16>};
  if (grad_type == TR_F16) return {sum_of<E, fp16>, runs_of<E, fp16>};
  return {sum_of<E, float>, runs_of<E, float>};
}
SourceFunctions functions_of(const Gather& from) {
  if (from.key_kind == kKey32) return functions_of_key<uint32_t>(from.grad_type);
  if (from.key_kind == kKey64) return functions_of_key<uint64_t>(from.grad_type);
  return functions_of_key<WideKey>(from.grad_type);
}

// ---- one row under a rule

TR_INLINE bool is_finite(const float* g, int64_t dim) {
  vi bad = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) bad |= not_finite(load(g + c));
  if (c < dim) bad |= not_finite(load(g + c, (int)(dim - c)));
  return !any(bad);
}

TR_INLINE void ask_to_write(const void* p, int64_t bytes) {
  const char* at = (const char*)p;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1, 3);
}

template <class W>
struct IsFloat {
  static constexpr bool value = false;
};
template <>
struct IsFloat<float> {
  static constexpr bool value = true;
};

constexpr int kGroup = 4;  // rows whose sums are made side by side, to hide the latency of one row's additions and roots

// Layout of a thread's scratch: per row of a group its summed gradient and the row in fp32; then terms, block sums, random
// words.
struct Scratch {
  float *gradient, *row, *terms[2], *blocks;
  uint32_t* words;
  int64_t stride;
  Scratch(float* at, int64_t dim) {
    stride = dim + 128;
    gradient = at;
    row = at + kGroup * stride;
    terms[0] = at + 2 * kGroup * stride;
    terms[1] = terms[0] + stride;
    blocks = terms[1] + stride;
    words = (uint32_t*)(blocks + stride);
  }
};
static_assert(scratch_floats(0) >= (2 * kGroup + 4) * 128 && scratch_floats(1) - scratch_floats(0) >= 2 * kGroup + 4, "scratch");

#define TR_MEMBER __attribute__((always_inline)) inline

// A rule over rows of one table. kDim: the number of columns if it is a compile-time constant (then the first column also
// begins an aligned block), else 0. All variables of the inner loops are members held by value: a local object of this type
// stays in registers, even though the loops store to memory.
template <class Rule, class W, int kDim>
struct Updater {
  Rule rule;
  Target to;
  Scratch scratch;
  W* weights;
  float* wide[kMaxSlots];
  float* narrow[kMaxSlots];
  float grad_scale;
  bool scaled, stochastic;
  int shift_;  // distance of the first column from the start of its aligned block

  Updater(const Target& to, float* at)
      : rule(to.hyper, to.step), to(to), scratch(at, to.dim), weights(static_cast<W*>(to.weights)),
        grad_scale(to.hypers > 1 ? (float)to.hyper[1] : 1.0f), scaled(grad_scale != 1.0f),
        stochastic(!IsFloat<W>::value && to.hypers > 3 && to.hyper[3] != 0), shift_((int)(to.block_offset & 7)) {
    for (int k = 0; k < kMaxSlots; k++) {
      wide[k] = to.slots[k];
      narrow[k] = k + Rule::kWide < kMaxSlots ? to.slots[k + Rule::kWide] : nullptr;
    }
    if (!kDim)
      for (int k = 0; k < Rule::kSums; k++)
        for (int64_t i = 0; i < to.dim + 128; i++) scratch.terms[k][i] = 0;
  }
  TR_MEMBER int64_t dim() const { return kDim ? kDim : to.dim; }
  TR_MEMBER int shift() const { return kDim ? 0 : shift_; }
  TR_MEMBER int64_t blocks() const { return (shift() + dim() + 7) / 8; }

  TR_MEMBER void ask(int64_t row) const {
    ask_to_write(weights + row * dim(), dim() * (int64_t)sizeof(W));
    for (int k = 0; k < Rule::kWide; k++) ask_to_write(wide[k] + row * dim(), dim() * 4);
    for (int k = Rule::kWide; k < kMaxSlots; k++)
      if (to.slots[k]) __builtin_prefetch(to.slots[k] + row, 1, 3);
  }

  // Calls visit(column, lanes, g, w, slots) for the vectors of a row; lanes is kLanes but for the last.
  template <class Visit>
  TR_MEMBER void each(int64_t r, const float* g, const float* w, const Visit& visit) const {
    const int64_t at = r * dim();
    int64_t c = 0;
    vf slot[Rule::kWide + 1];
    for (; c + kLanes <= dim(); c += kLanes) {
      for (int k = 0; k < Rule::kWide; k++) slot[k] = load(wide[k] + at + c);
      vf x = load(g + c);
      visit(c, kLanes, scaled ? x / grad_scale : x, load(w + c), slot);
    }
    if (c < dim()) {
      int n = (int)(dim() - c);
      for (int k = 0; k < Rule::kWide; k++) slot[k] = load(wide[k] + at + c, n);
      vf x = load(g + c, n);
      visit(c, n, scaled ? x / grad_scale : x, load(w + c, n), slot);
    }
  }

  // The block sums of a phase's terms: sums[k][block].
  TR_MEMBER void sum_blocks(const typename Rule::Row& row, int phase, int64_t r, const float* g, const float* w,
                            float* const* sums) const {
    alignas(64) float local[2][kDim ? kDim + 24 : 1];
    float* terms[2];
    for (int k = 0; k < 2; k++) terms[k] = kDim ? local[k] : scratch.terms[k] + shift();
    each(r, g, w, [&](int64_t c, int lanes, vf gv, vf wv, const vf* slot) __attribute__((always_inline)) {
      vf x[2] = {};
      rule.terms(phase, row, gv, wv, slot, x);
      for (int k = 0; k < Rule::kSums; k++) {
        if (lanes == kLanes)
          store(terms[k] + c, x[k]);
        else
          store(terms[k] + c, x[k], lanes);
      }
    });
    for (int k = 0; k < Rule::kSums; k++) block_sums(kDim ? local[k] : scratch.terms[k], blocks(), sums[k]);
  }

  TR_MEMBER void write_row(const typename Rule::Row& row, int64_t r, const float* g, float* w) const {
    const int64_t at = r * dim();
    each(r, g, w, [&](int64_t c, int lanes, vf gv, vf wv, vf* slot) __attribute__((always_inline)) {
      rule.apply(row, gv, wv, slot);
      if (lanes == kLanes) {
        store(w + c, wv);
        for (int k = 0; k < Rule::kWide; k++) store(wide[k] + at + c, slot[k]);
      } else {
        store(w + c, wv, lanes);
        for (int k = 0; k < Rule::kWide; k++) store(wide[k] + at + c, slot[k], lanes);
      }
    });
    rule.finish(row, narrow, r);
    round_to(weights + r * dim(), r, w);
  }

  // The row in fp32: itself, or a copy in the scratch of the group's row i.
  TR_MEMBER float* in_fp32(int64_t r, int i) const { return in_fp32(weights + r * dim(), i); }
  TR_MEMBER float* in_fp32(float* row, int) const { return row; }
  template <class H>
  float* in_fp32(const H* from, int i) const {
    float* to = scratch.row + i * scratch.stride;
    int64_t c = 0;
    for (; c + kLanes <= dim(); c += kLanes) store(to + c, load(from + c));
    if (c < dim()) store(to + c, load(from + c, (int)(dim() - c)));
    return to;
  }

  TR_MEMBER void round_to(float*, int64_t, const float*) const {}
  template <class H>
  void round_to(H* out, int64_t r, const float* w) const {
    const uint32_t* words = scratch.words;
    if (stochastic) {
      int64_t first = to.column_offset / 4, last = (to.column_offset + dim() + 3) / 4;
      row_words(to.seeds[0], to.seeds[1], (uint64_t)(to.name(r) + to.row_offset), (uint32_t)first, last - first,
                (uint32_t)to.step, scratch.words);
      words += to.column_offset - 4 * first;
    }
    for (int64_t c = 0; c < dim(); c += kLanes) {
      int64_t left = dim() - c;
      vf x = left >= kLanes ? load(w + c) : load(w + c, (int)left);
      if (stochastic) {
        vu word;
        __builtin_memcpy(&word, words + c, sizeof word);
        x = round_by(x, word, H{});
      }
      if (left >= kLanes)
        store(out + c, x);
      else
        store(out + c, x, (int)left);
    }
  }

  // Updates whole rows, all phases at once; at most kGroup of them. g need not be padded.
  TR_MEMBER void update(int n, const int64_t* r, const float* const* g) const {
    typename Rule::Row row[kGroup];
    float* w[kGroup];
    for (int i = 0; i < n; i++) {
      w[i] = in_fp32(r[i], i);
      row[i] = rule.begin(narrow, r[i]);
    }
    if (Rule::kSums > 0) {
      float local[kGroup][2][kDim ? kDim / 8 + 4 : 1];
      for (int phase = 0; phase < rule.phases(); phase++) {
        if (kDim) {
          for (int i = 0; i < n; i++) {
            float* sums[2] = {local[i][0], local[i][1]};
            sum_blocks(row[i], phase, r[i], g[i], w[i], sums);
          }
          for (int i = 0; i < n; i++) {
            float sums[2];
            for (int k = 0; k < Rule::kSums; k++) sums[k] = add_blocks(local[i][k], blocks());
            rule.reduced(phase, row[i], sums, (float)to.full_dim);
          }
        } else {
          for (int i = 0; i < n; i++) {
            float* places[2] = {scratch.blocks, scratch.blocks + scratch.stride / 2};
            float sums[2];
            sum_blocks(row[i], phase, r[i], g[i], w[i], places);
            for (int k = 0; k < Rule::kSums; k++) sums[k] = add_blocks(places[k], blocks());
            rule.reduced(phase, row[i], sums, (float)to.full_dim);
          }
        }
      }
    }
    for (int i = 0; i < n; i++) write_row(row[i], r[i], g[i], w[i]);
  }

  // A part's row, given the reduced sums of the first `phases` phases: scalars[p * stride].
  typename Rule::Row resume(int64_t r, const float* scalars, int64_t stride, int phases) const {
    typename Rule::Row row = rule.begin(narrow, r);
    for (int phase = 0; phase < phases; phase++) {
      float sums[2] = {};
      for (int k = 0; k < rule.sums(phase); k++, scalars += stride) sums[k] = *scalars;
      rule.reduced(phase, row, sums, (float)to.full_dim);
    }
    return row;
  }
};

template <int kDim>
struct Columns {
  static constexpr int value = kDim;
};

template <class Rule, class W>
struct Loops {
  // Calls run with the number of columns if it has a compile-time Updater, else with 0.
  template <class Run>
  static void with_dim(const Target& to, const Run& run) {
    if constexpr (IsFloat<W>::value) {
      if (!(to.block_offset & 7)) {
        if (to.dim == 16) return run(Columns<16>{});
        if (to.dim == 32) return run(Columns<32>{});
        if (to.dim == 64) return run(Columns<64>{});
        if (to.dim == 128) return run(Columns<128>{});
      }
    }
    run(Columns<0>{});
  }
  template <int kDim>
  static void unit_of(const Target& to, const Gather& from, size_t begin, size_t end, float* at, UnitResult* result) {
    uint32_t starts[kUnit + 1];
    int64_t rows[kUnit + 1];
    const SourceFunctions source = functions_of(from);
    const int n = source.runs(from, begin, end, starts, rows);
    if (n == 0) return;
    const Updater<Rule, W, kDim> updater(to, at);
    // With 16 lanes, one row of 128 columns is enough work to hide a row's sums: groups of four take 9 to 12 % longer
    // (AVX-512 EPYC).
    constexpr int kTogether = Rule::kSums && !(kDim >= 128 && kLanes == 16) ? kGroup : 1;
    int64_t group[kGroup];
    const float* g[kGroup];
    int waiting = 0;
    for (int i = 0; i < n && i < kAheadRuns; i++) updater.ask(rows[i]);
    for (int i = 0; i < n; i++) {
      if (i + kAheadRuns < n) updater.ask(rows[i + kAheadRuns]);
      if (starts[i + 1] - starts[i] > kPiece) {
        result->long_begin = starts[i];
        result->long_end = starts[i + 1];
        continue;
      }
      group[waiting] = rows[i];
      g[waiting] = source.sum(from, starts[i], starts[i + 1], updater.scratch.gradient + waiting * updater.scratch.stride);
      if (!Rule::kKeeps || is_finite(g[waiting], updater.dim()))
        waiting++;
      else
        skip(to.name(rows[i]), result);
      if (waiting == kTogether) {
        updater.update(kTogether, group, g);
        waiting = 0;
      }
    }
    for (int i = 0; i < waiting; i++) updater.update(1, group + i, g + i);
  }
  static void skip(int64_t row, UnitResult* result) {
    if (!result->skipped || row < result->first_row) result->first_row = row;
    result->skipped++;
  }
  static void unit(const Target& to, const Gather& from, size_t begin, size_t end, float* at, UnitResult* result) {
    with_dim(to, [&](auto dim) { unit_of<decltype(dim)::value>(to, from, begin, end, at, result); });
  }
  static void finish(const Target& to, int64_t row, const float* g, float* at, UnitResult* result) {
    const Updater<Rule, W, 0> updater(to, at);
    if (!Rule::kKeeps || is_finite(g, to.dim))
      updater.update(1, &row, &g);
    else
      skip(to.name(row), result);
  }
  // No compile-time columns: some rules read the weights only with weight decay, and unrolled loops would always read them.
  static void partials(const Target& to, const int64_t* rows, const float* grads, const float* scalars, int64_t stride,
                       int phase, bool exact, bool finite, size_t begin, size_t end, float* at, float* out) {
    const Updater<Rule, W, 0> updater(to, at);
    const int sums = updater.rule.sums(phase), kinds = sums + finite;
    const int64_t blocks = updater.blocks(), each = exact ? blocks : 1;
    float* places[2] = {updater.scratch.blocks, updater.scratch.blocks + updater.scratch.stride / 2};
    for (size_t u = begin; u < end; u++) {
      const float* g = grads + (int64_t)u * to.dim;
      typename Rule::Row row = updater.resume(rows[u], scalars + u, stride, phase);
      updater.sum_blocks(row, phase, rows[u], g, updater.in_fp32(rows[u], 0), places);
      float* to_row = out + (int64_t)u * kinds * each;
      for (int k = 0; k < sums; k++, to_row += each) {
        if (exact)
          for (int64_t b = 0; b < blocks; b++) to_row[b] = places[k][b];
        else
          *to_row = add_blocks(places[k], blocks);
      }
      if (!finite) continue;
      const float whole = is_finite(g, to.dim) ? 1.0f : 0.0f;
      for (int64_t b = 0; b < each; b++) to_row[b] = whole;
    }
  }
  template <int kDim>
  static void apply_of(const Target& to, const int64_t* rows, const float* grads, const float* scalars, int64_t stride,
                       size_t begin, size_t end, float* at) {
    const Updater<Rule, W, kDim> updater(to, at);
    for (size_t u = begin; u < end; u++) {
      if (u + kAheadRuns < end) updater.ask(rows[u + kAheadRuns]);
      typename Rule::Row row = updater.resume(rows[u], scalars + u, stride, updater.rule.phases());
      updater.write_row(row, rows[u], grads + (int64_t)u * updater.dim(), updater.in_fp32(rows[u], 0));
    }
  }
  static void apply(const Target& to, const int64_t* rows, const float* grads, const float* scalars, int64_t stride,
                    size_t begin, size_t end, float* at) {
    with_dim(to, [&](auto dim) { apply_of<decltype(dim)::value>(to, rows, grads, scalars, stride, begin, end, at); });
  }
};

// Calls run(Loops<the rule, the type>{}).
template <class Rule, class Run>
TR_INLINE void with_type(int32_t type, const Run& run) {
  if (type == TR_BF16)
    run(Loops<Rule, bf16>{});
  else if (type == TR_F16)
    run(Loops<Rule, fp16>{});
  else
    run(Loops<Rule, float>{});
}
#define TILEREC_NUMBER(name, Rule) k##Rule,
enum : int32_t { TILEREC_RULES(TILEREC_NUMBER) };

template <class Run>
TR_INLINE void with_rule(const Target& to, const Run& run) {
  if (to.rule == kSgd && to.hyper[4] != 0) return with_type<SgdMomentum>(to.type, run);
  switch (to.rule) {
#define TILEREC_CASE(name, Rule) \
  case k##Rule: return with_type<Rule>(to.type, run);
    TILEREC_RULES(TILEREC_CASE)
  }
}

}  // namespace

int32_t rule_number(const char* name) {
#define TILEREC_FIND(own, Rule) \
  if (__builtin_strcmp(name, #own) == 0) return k##Rule;
  TILEREC_RULES(TILEREC_FIND)
  return -1;
}

void update_unit(const Target& to, const Gather& from, size_t begin, size_t end, float* scratch, UnitResult* result) {
  with_rule(to, [&](auto loops) { loops.unit(to, from, begin, end, scratch, result); });
}

void finish_run(const Target& to, int64_t row, const float* g, float* scratch, UnitResult* result) {
  with_rule(to, [&](auto loops) { loops.finish(to, row, g, scratch, result); });
}

// The sum of occurrences [begin, end), at most kPiece of them, into out (dim of them, not padded).
void sum_piece(const Gather& from, size_t begin, size_t end, float* scratch, float* out) {
  const float* g = functions_of(from).sum(from, begin, end, Scratch(scratch, from.dim).gradient);
  __builtin_memcpy(out, g, sizeof(float) * (size_t)from.dim);
}

void add_row(float* to, const float* x, int64_t dim) {
  for (int64_t c = 0; c < dim; c++) to[c] += x[c];
}

// Number of runs that begin in [begin, end).
size_t count_runs(const Gather& from, size_t begin, size_t end) {
  uint32_t starts[kUnit + 1];
  int64_t rows[kUnit + 1];
  return (size_t)functions_of(from).runs(from, begin, end, starts, rows);
}

// Rows and summed gradients of the runs that begin in [begin, end).
void sum_unit(const Gather& from, size_t begin, size_t end, float* at, int64_t* rows_out, float* grads_out) {
  uint32_t starts[kUnit + 1];
  int64_t rows[kUnit + 1];
  const SourceFunctions source = functions_of(from);
  const int n = source.runs(from, begin, end, starts, rows);
  Scratch scratch(at, from.dim);
  for (int i = 0; i < n; i++) {
    rows_out[i] = rows[i];
    float* out = grads_out + i * from.dim;
    const size_t last = starts[i + 1];
    for (size_t p = starts[i]; p < last; p += kPiece) {
      const float* g = source.sum(from, p, p + kPiece < last ? p + kPiece : last, scratch.gradient);
      if (p == starts[i])
        __builtin_memcpy(out, g, sizeof(float) * (size_t)from.dim);
      else
        add_row(out, g, from.dim);
    }
  }
}

void partials_of(const Target& to, const int64_t* rows, const float* grads, const float* scalars, int64_t stride, int phase,
                 bool exact, bool finite, size_t begin, size_t end, float* scratch, float* out) {
  with_rule(to, [&](auto loops) { loops.partials(to, rows, grads, scalars, stride, phase, exact, finite, begin, end, scratch, out); });
}

void apply_rows(const Target& to, const int64_t* rows, const float* grads, const float* scalars, int64_t stride, size_t begin,
                size_t end, float* scratch) {
  with_rule(to, [&](auto loops) { loops.apply(to, rows, grads, scalars, stride, begin, end, scratch); });
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
