// Marks of rows, one bit per row (tilerec/ops/marks/definition.py is the specification).
//
// Tables are dealt to threads, so no two threads write the same word.
#include <cstdint>

#include "parallel.h"
#include "tilerec.h"

namespace {

// Rows of one table, as the caller writes them: five numbers.
struct Call {
  int64_t words, rows, entries, type, count;
};

template <class Row>
void mark(uint32_t* words, const Row* rows, int64_t entries, int64_t count) {
  for (int64_t n = 0; n < entries; ++n) {
    const int64_t row = static_cast<int64_t>(rows[n]);
    if (static_cast<uint64_t>(row) < static_cast<uint64_t>(count)) words[row >> 5] |= uint32_t{1} << (row & 31);
  }
}

}  // namespace

TR_API void tr_mark_rows(const void* calls, int64_t tables, int64_t threads) {
  const Call* all = static_cast<const Call*>(calls);
  int64_t entries = 0;
  for (int64_t t = 0; t < tables; ++t) entries += all[t].entries;
  // A second thread is worth its start from about 30 us of work on.
  tilerec::parallel(entries < 32768 || tables < 2 ? 1 : static_cast<int>(threads), [&](const tilerec::Team& team) {
    for (size_t t = team.begin(static_cast<size_t>(tables)), end = team.end(static_cast<size_t>(tables)); t < end; ++t) {
      const Call& call = all[t];
      uint32_t* words = reinterpret_cast<uint32_t*>(call.words);
      if (call.type == 0)  // int32
        mark(words, reinterpret_cast<const int32_t*>(call.rows), call.entries, call.count);
      else
        mark(words, reinterpret_cast<const int64_t*>(call.rows), call.entries, call.count);
    }
  });
}
