#include "random.h"

#include "isa.h"
#include "parallel.h"

TILEREC_DECLARE(void random_rows(const RandomFill& fill, int64_t begin, int64_t end))

namespace tilerec {
namespace {

void fill_all(const RandomFill& fill, int64_t rows, int64_t threads) {
  parallel(rows * fill.width < 16384 ? 1 : static_cast<int>(threads), [&](const Team& team) {
    const size_t count = static_cast<size_t>(rows);
    TILEREC_CALL(random_rows)(fill, static_cast<int64_t>(team.begin(count)), static_cast<int64_t>(team.end(count)));
  });
}

}  // namespace
}  // namespace tilerec

TR_API void tr_random_fill(void* out, int64_t type, int64_t rows, int64_t width, uint32_t key0, uint32_t key1,
                           int64_t row_offset, int64_t column_offset, int64_t kind, float a, float b, int64_t threads) {
  using namespace tilerec;
  fill_all({out, type, width, key0, key1, row_offset, column_offset, kind, a, b, nullptr}, rows, threads);
}

TR_API void tr_random_rows(void* out, int64_t type, const int64_t* places, int64_t rows, int64_t width, uint32_t key0,
                           uint32_t key1, int64_t column_offset, int64_t kind, float a, float b, int64_t threads) {
  using namespace tilerec;
  fill_all({out, type, width, key0, key1, 0, column_offset, kind, a, b, places}, rows, threads);
}
