// Element-wise passes of cross networks (tilerec/ops/cross/definition.py is the specification). All arrays are [samples, features]
// and contiguous, `bias` and `of_bias` [features]; `bias` may be null.
#pragma once

#include "tilerec.h"

// Forward: x, x0 and factor are read, out is written. Backward: x is the gradient of `out`; of_x0, of_factor and of_bias are
// written. `adds`: of_x0 holds a sum to which the layer's part is added. `first`: x of the layer is x0.
typedef struct {
  const float *x, *x0, *factor, *bias;
  float *out, *of_x0, *of_factor, *of_bias;
  int64_t samples, features, adds, first, threads;
} tr_crossing;
TR_API void tr_cross(const tr_crossing* call);
TR_API void tr_cross_backward(const tr_crossing* call);
