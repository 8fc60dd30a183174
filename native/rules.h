// Row rules: the update of one row of a table by its summed gradient, a vector of columns at a time.
//
//   rule     an optimizer's arithmetic for a row. It has `kWide` slots of [rows, dim] and, after them, narrow slots of [rows]
//   phase    a row sum that the rule needs before its next step; `terms` returns the terms to sum, `reduced` takes the sums
//   kKeeps   true: rows whose gradient is not finite are left unchanged (and counted); false (a rule that only stores): they
//            are written
//   Row      the rule's state of the current row: its narrow slots, the sums so far, factors made of them
//
// The order of calls for a row:
//     Row row = rule.begin(narrow slots)
//     for phase in 0..rule.phases():  sums = add(rule.terms(phase, row, g, w, wide));  rule.reduced(phase, row, sums, dim)
//     rule.apply(row, g, w, wide) for every vector of columns;  rule.finish(row, narrow slots)
// On the whole row this is the fused update. Split at the sums it is `rule_partials` and `rule_apply_` of a column part.
//
//   g = summed gradient / grad_scale     w = the row in fp32     t = the table's update count (the row's own with row_step)
//
// `hyper` is lr, grad_scale, weight_decay, stochastic_rounding and then the rule's own numbers. Factors that depend on the
// step are computed in double and rounded once. Formulas: Adagrad, Duchi et al. 2011; Adam, arXiv 1412.6980; AdamW, arXiv
// 1711.05101; LAMB, arXiv 1904.00962; LARS, arXiv 1708.03888.
//
// Example: row-wise Adagrad, lr 1, eps 0, s 0, g (3, 4): terms (9, 16), sum 25, s = 25 / 2 = 12.5, k = 1 / sqrt(12.5) =
// 0.2828, w -= (0.8485, 1.1314).
#pragma once

#include <stdint.h>

#include "rules_vector.h"

namespace tilerec {
namespace TILEREC_ISA {

struct Hyper {
  float lr, grad_scale, weight_decay;
  bool stochastic_rounding;
  explicit Hyper(const double* h)
      : lr(static_cast<float>(h[0])), grad_scale(static_cast<float>(h[1])), weight_decay(static_cast<float>(h[2])),
        stochastic_rounding(h[3] != 0) {}
};

// Rules without row sums and without narrow slots.
struct ElementRule {
  struct Row {};
  static constexpr int kSums = 0;
  static constexpr bool kKeeps = true;
  static int phases() { return 0; }
  static int sums(int) { return 0; }
  Row begin(float* const*, int64_t) const { return {}; }
  void terms(int, const Row&, vf, vf, const vf*, vf*) const {}
  void reduced(int, Row&, const float*, float) const {}
  void finish(const Row&, float* const*, int64_t) const {}
};

// w = G: writes a dense gradient. Infinities and NaNs are stored, so that the user sees them.
struct Store : ElementRule {
  static constexpr int kWide = 0;
  static constexpr bool kKeeps = false;
  Store(const double*, int64_t) {}
  void apply(const Row&, vf g, vf& w, vf*) const { w = g; }
};

// g += wd w;  w -= lr g
struct Sgd : ElementRule {
  static constexpr int kWide = 0;
  Hyper h;
  Sgd(const double* hyper, int64_t) : h(hyper) {}
  void apply(const Row&, vf g, vf& w, vf*) const {
    if (h.weight_decay != 0) g = g + h.weight_decay * w;
    w = w - h.lr * g;
  }
};

// g += wd w;  m = mu m + g;  w -= lr (g + mu m if nesterov else m)
struct SgdMomentum : ElementRule {
  static constexpr int kWide = 1;
  Hyper h;
  float momentum;
  bool nesterov;
  SgdMomentum(const double* hyper, int64_t) : h(hyper), momentum(static_cast<float>(hyper[4])), nesterov(hyper[5] != 0) {}
  void apply(const Row&, vf g, vf& w, vf* slot) const {
    if (h.weight_decay != 0) g = g + h.weight_decay * w;
    vf m = momentum * slot[0] + g;
    slot[0] = m;
    w = w - h.lr * (nesterov ? g + momentum * m : m);
  }
};

// g += wd w;  s += g^2;  w -= lr / (1 + (t-1) lr_decay) g / (sqrt(s) + eps)
struct Adagrad : ElementRule {
  static constexpr int kWide = 1;
  Hyper h;
  float eps, lr;
  Adagrad(const double* hyper, int64_t t)
      : h(hyper), eps(static_cast<float>(hyper[4])), lr(static_cast<float>(hyper[0] / (1 + (t - 1) * hyper[5]))) {}
  void apply(const Row&, vf g, vf& w, vf* slot) const {
    if (h.weight_decay != 0) g = g + h.weight_decay * w;
    vf s = slot[0] + g * g;
    slot[0] = s;
    w = w - lr * (g / (root(s) + eps));
  }
};

// s += mean(g'^2);  k = lr / (sqrt(s) + eps);  w = c w - k g; then the row is scaled down to max_norm.
// L2 decay: g' = g + wd w, c = 1 - k wd; decoupled: g' = g, c = 1 - lr wd; none: g' = g, c = 1.
struct RowWiseAdagrad {
  static constexpr int kWide = 0, kSums = 1;
  static constexpr bool kKeeps = true;
  struct Row {
    float s, k, c, shrink;
  };
  Hyper h;
  float eps, max_norm, kept;
  int decay_mode;
  RowWiseAdagrad(const double* hyper, int64_t)
      : h(hyper), eps(static_cast<float>(hyper[4])), max_norm(static_cast<float>(hyper[6])),
        kept(static_cast<float>(1 - hyper[0] * hyper[2])), decay_mode(static_cast<int>(hyper[5])) {}
  int phases() const { return max_norm > 0 ? 2 : 1; }
  static int sums(int) { return 1; }
  Row begin(float* const* narrow, int64_t row) const { return {narrow[0][row], 0, 1, 1}; }
  vf moved(const Row& row, vf g, vf w) const {
    if (decay_mode != 0) w = row.c * w;
    return w - row.k * g;
  }
  void terms(int phase, const Row& row, vf g, vf w, const vf*, vf* out) const {
    vf x = phase == 0 ? (decay_mode == 1 ? g + h.weight_decay * w : g) : moved(row, g, w);
    out[0] = x * x;
  }
  void reduced(int phase, Row& row, const float* sums, float dim) const {
    if (phase == 0) {
      row.s = row.s + sums[0] / dim;
      row.k = h.lr / (root(row.s) + eps);
      row.c = decay_mode == 1 ? 1.0f - row.k * h.weight_decay : decay_mode == 2 ? kept : 1.0f;
    } else {
      float norm = root(sums[0]);
      if (norm > max_norm) row.shrink = max_norm / norm;
    }
  }
  void apply(const Row& row, vf g, vf& w, vf*) const {
    w = moved(row, g, w);
    if (row.shrink != 1.0f) w = w * row.shrink;
  }
  void finish(const Row& row, float* const* narrow, int64_t r) const { narrow[0][r] = row.s; }
};

// First and second moments with bias correction, the second per element or (RowWise) one per row.
//   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  c1 = 1 - b1^t;  c2 = 1 - b2^t
template <bool RowWise>
struct Moments {
  static constexpr int kWide = RowWise ? 1 : 2;
  static constexpr bool kKeeps = true;
  struct Row {
    float v, steps, c1, c2, lr, root_c2, ratio;  // v: row-wise second moment
  };
  Hyper h;
  double exact_lr, exact_beta1, exact_beta2;
  float eps, beta1, beta2, rest1, rest2;
  bool row_step;
  Row fixed;  // the bias corrections of the table's update count
  Moments(const double* hyper, int64_t t, bool row_step)
      : h(hyper), exact_lr(hyper[0]), exact_beta1(hyper[5]), exact_beta2(hyper[6]), eps(static_cast<float>(hyper[4])),
        beta1(static_cast<float>(hyper[5])), beta2(static_cast<float>(hyper[6])), rest1(static_cast<float>(1 - hyper[5])),
        rest2(static_cast<float>(1 - hyper[6])), row_step(row_step), fixed{0, 0, 1, 1, 0, 1, 1} {
    if (row_step) return;
    double c1 = 1 - __builtin_pow(exact_beta1, static_cast<double>(t)), c2 = 1 - __builtin_pow(exact_beta2, static_cast<double>(t));
    fixed.c1 = static_cast<float>(c1);
    fixed.c2 = static_cast<float>(c2);
    fixed.lr = static_cast<float>(exact_lr / c1);
    fixed.root_c2 = static_cast<float>(__builtin_sqrt(c2));
  }
  Row begin(float* const* narrow, int64_t r) const {
    Row row = fixed;
    if (RowWise) row.v = narrow[0][r];
    if (row_step) {
      row.steps = narrow[RowWise ? 1 : 0][r] + 1.0f;
      row.c1 = static_cast<float>(1 - __builtin_pow(exact_beta1, static_cast<double>(row.steps)));
      row.c2 = static_cast<float>(1 - __builtin_pow(exact_beta2, static_cast<double>(row.steps)));
      row.lr = h.lr / row.c1;
      row.root_c2 = root(row.c2);
    }
    return row;
  }
  void second_moment(Row& row, float sum, float dim) const { row.v = beta2 * row.v + rest2 * (sum / dim); }
  void moments(const Row& row, vf g, const vf* slot, vf& m, vf& v) const {
    m = beta1 * slot[0] + rest1 * g;
    v = RowWise ? splat(row.v) : beta2 * slot[kWide - 1] + rest2 * (g * g);
  }
  // u = m^ / (sqrt(v^) + eps) + wd w
  vf step(const Row& row, vf g, vf w, const vf* slot, vf& m, vf& v) const {
    moments(row, g, slot, m, v);
    return (m / row.c1) / (root(v / row.c2) + eps) + h.weight_decay * w;
  }
  void keep(vf m, vf v, vf* slot) const {
    slot[0] = m;
    if (!RowWise) slot[kWide - 1] = v;
  }
  void finish(const Row& row, float* const* narrow, int64_t r) const {
    if (RowWise) narrow[0][r] = row.v;
    if (row_step) narrow[RowWise ? 1 : 0][r] = row.steps;
  }
};

// w -= lr / c1 m / (sqrt(v) / sqrt(c2) + eps). L2 decay adds wd w to g; decoupled (AdamW) multiplies w by 1 - lr wd first.
struct Adam : Moments<false> {
  static constexpr int kSums = 0;
  float kept;
  bool decoupled;
  Adam(const double* hyper, int64_t t)
      : Moments(hyper, t, hyper[8] != 0), kept(static_cast<float>(1 - hyper[0] * hyper[2])), decoupled(hyper[7] != 0) {}
  static int phases() { return 0; }
  static int sums(int) { return 0; }
  void terms(int, const Row&, vf, vf, const vf*, vf*) const {}
  void reduced(int, Row&, const float*, float) const {}
  void apply(const Row& row, vf g, vf& w, vf* slot) const {
    vf m, v;
    if (h.weight_decay != 0) {
      if (decoupled)
        w = w * kept;  // without an effect on g
      else
        g = g + h.weight_decay * w;
    }
    moments(row, g, slot, m, v);
    w = w - row.lr * (m / (root(v) / row.root_c2 + eps));
    keep(m, v, slot);
  }
};

// w -= lr u, with one second moment per row: v = b2 v + (1-b2) mean(g^2).
struct PartialRowWiseAdam : Moments<true> {
  static constexpr int kSums = 1;
  PartialRowWiseAdam(const double* hyper, int64_t t) : Moments(hyper, t, hyper[7] != 0) {}
  static int phases() { return 1; }
  static int sums(int) { return 1; }
  void terms(int, const Row&, vf g, vf, const vf*, vf* out) const { out[0] = g * g; }
  void reduced(int, Row& row, const float* sums, float dim) const { second_moment(row, sums[0], dim); }
  void apply(const Row& row, vf g, vf& w, vf* slot) const {
    vf m, v;
    w = w - h.lr * step(row, g, w, slot, m, v);
    keep(m, v, slot);
  }
};

// w -= lr |w| / |u| u, with ratio 1 if either norm is 0. RowWise: one second moment per row, whose sum is phase 0.
template <bool RowWise>
struct LambRule : Moments<RowWise> {
  using Base = Moments<RowWise>;
  using Row = typename Base::Row;
  static constexpr int kSums = 2;
  LambRule(const double* hyper, int64_t t) : Base(hyper, t, hyper[7] != 0) {}
  static int phases() { return RowWise ? 2 : 1; }
  static int sums(int phase) { return RowWise && phase == 0 ? 1 : 2; }
  void terms(int phase, const Row& row, vf g, vf w, const vf* slot, vf* out) const {
    if (RowWise && phase == 0) {
      out[0] = g * g;
      return;
    }
    vf m, v, u = this->step(row, g, w, slot, m, v);
    out[0] = w * w;
    out[1] = u * u;
  }
  void reduced(int phase, Row& row, const float* sums, float dim) const {
    if (RowWise && phase == 0) {
      this->second_moment(row, sums[0], dim);
      return;
    }
    float w_norm = root(sums[0]), u_norm = root(sums[1]);
    row.ratio = w_norm > 0 && u_norm > 0 ? w_norm / u_norm : 1.0f;
  }
  void apply(const Row& row, vf g, vf& w, vf* slot) const {
    vf m, v, u = this->step(row, g, w, slot, m, v);
    w = w - (this->h.lr * row.ratio) * u;
    this->keep(m, v, slot);
  }
};
using Lamb = LambRule<false>;
using PartialRowWiseLamb = LambRule<true>;

// a = lr trust |w| / (|g| + wd |w|), or lr where a norm is 0;  m = mu m + a (g + wd w);  w -= m
struct LarsSgd {
  static constexpr int kWide = 1, kSums = 2;
  static constexpr bool kKeeps = true;
  struct Row {
    float a;
  };
  Hyper h;
  float momentum, local;
  LarsSgd(const double* hyper, int64_t)
      : h(hyper), momentum(static_cast<float>(hyper[4])), local(static_cast<float>(hyper[0] * hyper[5])) {}
  static int phases() { return 1; }
  static int sums(int) { return 2; }
  Row begin(float* const*, int64_t) const { return {h.lr}; }
  void terms(int, const Row&, vf g, vf w, const vf*, vf* out) const {
    out[0] = w * w;
    out[1] = g * g;
  }
  void reduced(int, Row& row, const float* sums, float) const {
    float w_norm = root(sums[0]), g_norm = root(sums[1]);
    if (w_norm > 0 && g_norm > 0) row.a = local * w_norm / (g_norm + h.weight_decay * w_norm);
  }
  void apply(const Row& row, vf g, vf& w, vf* slot) const {
    vf m = momentum * slot[0] + row.a * (g + h.weight_decay * w);
    slot[0] = m;
    w = w - m;
  }
  void finish(const Row&, float* const*, int64_t) const {}
};

}  // namespace TILEREC_ISA
}  // namespace tilerec

// Every rule, by the name that tilerec/ops/update/rules.py gives it. Its place is its number in `tr_rows`.
#define TILEREC_RULES(RULE)                         \
  RULE(store, Store)                                \
  RULE(sgd, Sgd) /* SgdMomentum, with a momentum */ \
  RULE(adagrad, Adagrad)                            \
  RULE(rowwise_adagrad, RowWiseAdagrad)             \
  RULE(adam, Adam)                                  \
  RULE(partial_rowwise_adam, PartialRowWiseAdam)    \
  RULE(lamb, Lamb)                                  \
  RULE(partial_rowwise_lamb, PartialRowWiseLamb)    \
  RULE(lars_sgd, LarsSgd)
