// Element-wise passes of cross networks (cross.h). Threads share the features of all samples, so sums over samples have the
// same bits for any number of threads.
#include "cross.h"

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(void cross(const tr_crossing& call, int64_t begin, int64_t end))
TILEREC_DECLARE(void cross_backward(const tr_crossing& call, int64_t begin, int64_t end))

namespace {

using namespace tilerec;

constexpr int64_t kThreadNumbers = 1 << 17;  // for fewer numbers, one thread is enough
constexpr size_t kLine = 16;                 // floats of a cache line: threads share none

template <class Body>
void each_share(const tr_crossing& call, const Body& body) {
  const size_t features = static_cast<size_t>(call.features), lines = (features + kLine - 1) / kLine;
  parallel(call.samples * call.features < kThreadNumbers ? 1 : static_cast<int>(call.threads), [&](const Team& team) {
    const size_t begin = team.begin(lines) * kLine, end = team.end(lines) * kLine;
    if (begin < end) body(static_cast<int64_t>(begin), static_cast<int64_t>(end < features ? end : features));
  });
}

}  // namespace

TR_API void tr_cross(const tr_crossing* call) {
  each_share(*call, [&](int64_t begin, int64_t end) { TILEREC_CALL(cross)(*call, begin, end); });
}

TR_API void tr_cross_backward(const tr_crossing* call) {
  each_share(*call, [&](int64_t begin, int64_t end) { TILEREC_CALL(cross_backward)(*call, begin, end); });
}
