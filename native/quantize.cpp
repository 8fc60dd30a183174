// Rows packed for exchange (quantize.h). Rows of each segment are dealt to threads.
#include "quantize.h"

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(void pack_rows(const PackedRows& call))
TILEREC_DECLARE(void unpack_rows(const PackedRows& call))

namespace {

using namespace tilerec;

constexpr int64_t kThreadNumbers = 1 << 17;  // for fewer numbers, one thread is enough

template <class Body>
void each_part(const tr_packing& call, const Body& body) {
  const int64_t *counts = call.lists, *widths = counts + call.segments, size = call.wide ? 8 : 4;
  int64_t numbers = 0;
  for (int64_t s = 0; s < call.segments; ++s) numbers += counts[s] * widths[s];
  parallel(numbers < kThreadNumbers ? 1 : static_cast<int>(call.threads), [&](const Team& team) {
    char *rows = call.rows, *packed = call.packed;
    for (int64_t s = 0; s < call.segments; ++s) {
      const size_t count = static_cast<size_t>(counts[s]);
      const int64_t begin = static_cast<int64_t>(team.begin(count)), end = static_cast<int64_t>(team.end(count));
      body({rows + begin * widths[s] * size, packed + begin * (widths[s] + 4), end - begin, widths[s], call.fp8 != 0,
            call.wide != 0});
      rows += counts[s] * widths[s] * size;
      packed += counts[s] * (widths[s] + 4);
    }
  });
}

}  // namespace

TR_API void tr_pack_rows(const tr_packing* call) {
  each_part(*call, [](const PackedRows& rows) { TILEREC_CALL(pack_rows)(rows); });
}

TR_API void tr_unpack_rows(const tr_packing* call) {
  each_part(*call, [](const PackedRows& rows) { TILEREC_CALL(unpack_rows)(rows); });
}
