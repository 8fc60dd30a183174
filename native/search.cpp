// The rows with the largest inner products (tilerec/ops/search/definition.py is the specification).
//
// Queries that read the same range of rows form groups: a block of rows is read once for all queries of a group. Rows of
// all groups, one after the other, are dealt to threads in equal shares. A thread keeps the candidates of each query that
// are above its k-th best so far; then the candidates of all threads are sorted. The order (score, place) is total, so the
// result does not depend on the number of threads.
#include "search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "parallel.h"
#include "tilerec.h"

namespace {

using namespace tilerec;

constexpr int64_t kGroupQueries = 64;
constexpr int64_t kSpare = 64;           // candidates beyond k, at least, before they are reduced to k again
constexpr int64_t kThreadRows = 131072;  // rows times queries, about 1 ms: threads of a busy machine start late

using Call = SearchCall;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

struct Range {
  int64_t first, last;
};

struct Group {
  int64_t begin, end;  // queries
  std::vector<Range> ranges;
  int64_t rows;
};

bool better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.place < b.place);
}

std::vector<Group> groups_of(const Call& call) {
  const int64_t* first = pointer<const int64_t>(call.first);
  const int64_t* last = pointer<const int64_t>(call.last);
  std::vector<Group> groups;
  for (int64_t q = 0; q < call.batch; ++q) {
    const bool same = q && call.ranges == 1 && first[q] == first[q - 1] && last[q] == last[q - 1] &&
                      groups.back().end - groups.back().begin < kGroupQueries;
    if (same) {
      groups.back().end++;
      continue;
    }
    Group group{q, q + 1, {}, 0};
    for (int64_t p = 0; p < call.ranges; ++p) {
      const Range range{std::max<int64_t>(first[q * call.ranges + p], 0), std::min(last[q * call.ranges + p], call.count)};
      if (range.last > range.first) {
        group.ranges.push_back(range);
        group.rows += range.last - range.first;
      }
    }
    // Ascending places: of equal scores the first one wins, so a later one need not be kept.
    std::sort(group.ranges.begin(), group.ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
    groups.push_back(std::move(group));
  }
  return groups;
}

// Candidates of the queries of one group, on one thread.
class Room {
 public:
  explicit Room(const Call& call) : call_(call), size_(std::max(2 * call.k, call.k + kSpare) + kSearchBlock) {
    memory_.resize(static_cast<size_t>(std::min(kGroupQueries, call.batch) * size_));
    scratch_.resize(static_cast<size_t>(search_scratch(call.dim) + 64));
  }

  void* scratch() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch_.data()) + 63) & ~uintptr_t(63));
  }

  Candidates* begin(const Group& group) {
    for (int64_t q = group.begin; q < group.end; ++q)
      found_[q - group.begin] = Candidates{memory_.data() + (q - group.begin) * size_, 0, -std::numeric_limits<float>::infinity(),
                                           pointer<const int64_t>(call_.required)[q], pointer<const int64_t>(call_.forbidden)[q]};
    return found_;
  }

  void reduce(const Group& group, bool last) {
    for (int64_t q = 0; q < group.end - group.begin; ++q) {
      Candidates& found = found_[q];
      if (found.count <= call_.k || (!last && found.count + kSearchBlock <= size_)) continue;
      Candidate* end = found.at + call_.k;
      std::nth_element(found.at, end - 1, found.at + found.count, better);
      found.count = call_.k;
      found.threshold = end[-1].score;
    }
  }

 private:
  const Call& call_;
  const int64_t size_;
  std::vector<Candidate> memory_;
  std::vector<char> scratch_;
  Candidates found_[kGroupQueries];
};

// Scans rows [begin, end) of a group's ranges, counted through all of them.
void scan(const Call& call, const Group& group, int64_t begin, int64_t end, Room& room, Candidates* found) {
  SearchBlock block{};
  block.rows = pointer<const void>(call.rows);
  block.scale = pointer<const float>(call.scale);
  block.words = pointer<const int64_t>(call.words);
  block.dim = call.dim;
  block.int8 = call.int8 != 0;
  block.queries = pointer<const char>(call.queries) + group.begin * call.query_bytes;
  block.query_bytes = call.query_bytes;
  block.query_scale = pointer<const float>(call.query_scale) + group.begin;
  block.query_sum = pointer<const int32_t>(call.query_sum) + group.begin;
  block.query_count = group.end - group.begin;
  block.found = found;
  block.scratch = room.scratch();
  int64_t passed = 0;
  for (const Range& range : group.ranges) {
    const int64_t length = range.last - range.first;
    const int64_t low = std::max<int64_t>(begin - passed, 0), high = std::min(end - passed, length);
    for (int64_t row = low; row < high; row += kSearchBlock) {
      block.first = range.first + row;
      block.count = std::min(kSearchBlock, high - row);
      TILEREC_CALL(search_block)(block);
      room.reduce(group, false);
    }
    passed += length;
  }
}

}  // namespace

TR_API int32_t tr_best_rows(const void* numbers, int64_t threads) {
  const Call& call = *static_cast<const Call*>(numbers);
  if (!call.k || !call.batch) return TR_OK;
  try {
    const std::vector<Group> groups = groups_of(call);
    int64_t total = 0;
    for (const Group& group : groups) total += group.rows;
    std::vector<std::vector<Candidate>> all(static_cast<size_t>(call.batch));
    std::mutex lock;
    bool failed = false;
    parallel(total * std::min(call.batch, kGroupQueries) < kThreadRows ? 1 : static_cast<int>(threads), [&](const Team& team) {
      try {
        Room room(call);
        const int64_t begin = static_cast<int64_t>(team.begin(static_cast<size_t>(total)));
        const int64_t end = static_cast<int64_t>(team.end(static_cast<size_t>(total)));
        int64_t passed = 0;
        for (const Group& group : groups) {
          const int64_t low = std::max<int64_t>(begin - passed, 0), high = std::min(end - passed, group.rows);
          passed += group.rows;
          if (low >= high) continue;
          Candidates* found = room.begin(group);
          scan(call, group, low, high, room, found);
          room.reduce(group, true);
          const std::lock_guard<std::mutex> hold(lock);
          for (int64_t q = group.begin; q < group.end; ++q) {
            const Candidates& own = found[q - group.begin];
            std::vector<Candidate>& to = all[static_cast<size_t>(q)];
            to.insert(to.end(), own.at, own.at + own.count);
          }
        }
      } catch (const std::bad_alloc&) {
        const std::lock_guard<std::mutex> hold(lock);
        failed = true;
      }
    });
    if (failed) return TR_NO_MEMORY;
    float* scores = pointer<float>(call.scores);
    int64_t* places = pointer<int64_t>(call.places);
    for (int64_t q = 0; q < call.batch; ++q) {
      std::vector<Candidate>& own = all[static_cast<size_t>(q)];
      const size_t count = std::min(own.size(), static_cast<size_t>(call.k));
      std::partial_sort(own.begin(), own.begin() + static_cast<int64_t>(count), own.end(), better);
      for (size_t i = 0; i < static_cast<size_t>(call.k); ++i) {
        const size_t at = static_cast<size_t>(q * call.k) + i;
        scores[at] = i < count ? own[i].score : -std::numeric_limits<float>::infinity();
        places[at] = i < count ? own[i].place : -1;
      }
    }
  } catch (const std::bad_alloc&) {
    return TR_NO_MEMORY;
  }
  return TR_OK;
}
