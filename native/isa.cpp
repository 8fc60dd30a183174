// Choice of the instruction set, limits on threads after a fork, and huge pages.
#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "parallel.h"

#if defined(__linux__)
#include <dirent.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tilerec {
namespace {

Isa widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
  return Isa::base;
}

Isa first_choice() {
  const char* wish = std::getenv("TILEREC_ISA");
  Isa most = widest();
  if (!wish) return most;
  Isa level = !std::strcmp(wish, "base") ? Isa::base : !std::strcmp(wish, "avx2") ? Isa::avx2 : Isa::avx512;
  return level < most ? level : most;
}

std::atomic<Isa> chosen{first_choice()};

// After fork only the calling thread exists. GNU's OpenMP runtime would wait for its lost threads for ever, so a child of a
// process that had other threads uses one thread.
std::atomic<bool> alone{false};

#if defined(__linux__)
std::atomic<bool> had_others{false};

void before_fork() {
  int threads = 0;
  if (DIR* tasks = opendir("/proc/self/task")) {
    while (dirent* entry = readdir(tasks)) threads += entry->d_name[0] != '.';
    closedir(tasks);
  }
  had_others = threads != 1;  // 0: the number is unknown
}

void in_child() {
  if (had_others) alone = true;
}

[[maybe_unused]] const int watching = pthread_atfork(before_fork, nullptr, in_child);
#endif

}  // namespace

Isa isa() { return chosen.load(std::memory_order_relaxed); }

bool may_use_threads() { return !alone.load(std::memory_order_relaxed); }

}  // namespace tilerec

using namespace tilerec;

TR_API int32_t tr_abi_version(void) { return TR_ABI_VERSION; }
TR_API int32_t tr_isa_widest(void) { return static_cast<int32_t>(widest()); }
TR_API int32_t tr_isa(void) { return static_cast<int32_t>(isa()); }

TR_API int32_t tr_isa_choose(int32_t level) {
  int32_t most = tr_isa_widest();
  chosen = static_cast<Isa>(level < 0 ? 0 : level > most ? most : level);
  return tr_isa();
}

namespace {

// Gives advice on the whole pages of `page` bytes in [data, data + bytes): pages shared with neighbours stay as they are.
[[maybe_unused]] int32_t advise_whole_pages(void* data, int64_t bytes, uintptr_t page, [[maybe_unused]] int advice) {
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(page - 1);
  if (last <= first) return -1;
#if defined(__linux__)
  return madvise(reinterpret_cast<void*>(first), last - first, advice);
#else
  return -1;
#endif
}

}  // namespace

TR_API int32_t tr_advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  return advise_whole_pages(data, bytes, uintptr_t(2) << 20, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
  return -1;
#endif
}

TR_API int32_t tr_release_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  return advise_whole_pages(data, bytes, static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), MADV_DONTNEED);
#else
  (void)data, (void)bytes;
  return -1;
#endif
}

TR_API int32_t tr_threads(int32_t n) {
  int32_t seen = 1;
  parallel(n, [&](const Team& team) {
    if (team.thread == 0) seen = team.threads;
  });
  return seen;
}
