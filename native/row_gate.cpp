#include "row_gate.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

namespace {

constexpr int kRequestSpins = 1 << 11;  // about 0.1 ms: more than a hold of the gate takes
constexpr int kFollowerSpins = 1 << 14;  // about 1 ms
constexpr int64_t kLine = 64;

struct Gate {
  std::atomic<int64_t> requests, waiting, closed, core;
};
static_assert(sizeof(Gate) == 32 && std::atomic<int64_t>::is_always_lock_free);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns true once `ready` does, false after `spins` rounds.
template <class Ready>
bool spin(const Ready& ready, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (ready()) return true;
    pause();
  }
  return false;
}

// Number of the core that runs this thread, from 1; 0 where the system does not tell.
int64_t own_core() {
#ifdef __linux__
  return sched_getcpu() + 1;
#else
  return 0;
#endif
}

// Keeps this thread off the core of the newest request. The system does not: in a virtual machine an idle core looks like one that was
// taken away, so a thread that wakes up often shares the core of a running one.
class OtherCore {
 public:
  explicit OtherCore(const Gate& gate) : gate_(gate) {}
  OtherCore(const OtherCore&) = delete;
  OtherCore& operator=(const OtherCore&) = delete;
#ifdef __linux__
  ~OtherCore() {
    if (moved_) sched_setaffinity(0, sizeof all_, &all_);
  }
  // Moves the thread if a request has come to its core.
  void move() {
    const int64_t core = own_core();
    if (!core || gate_.core.load(std::memory_order_relaxed) != core) return;
    if (!moved_ && sched_getaffinity(0, sizeof all_, &all_)) return;
    cpu_set_t others = all_;
    CPU_CLR(static_cast<size_t>(core - 1), &others);
    if (CPU_COUNT(&others)) moved_ |= !sched_setaffinity(0, sizeof others, &others);
  }
#else
  void move() {}
#endif

 private:
  const Gate& gate_;
#ifdef __linux__
  cpu_set_t all_;
  bool moved_ = false;
#endif
};

bool enter(Gate& gate) {
  gate.requests.fetch_add(1);
  if (!gate.closed.load()) {
    gate.core.store(own_core(), std::memory_order_relaxed);
    return true;
  }
  gate.requests.fetch_sub(1);
  return false;
}

void open(Gate& gate) {
  gate.closed.store(0);
  // Requests that waited are in before the gate closes again.
  while (!spin([&] { return !gate.waiting.load(); }, kRequestSpins)) sched_yield();
}

void close(Gate& gate) {
  for (;;) {
    gate.closed.store(1);
    if (spin([&] { return !gate.requests.load(); }, kFollowerSpins)) return;
    open(gate);  // a long request: others run beside it
    const timespec rest{0, 100000};
    nanosleep(&rest, nullptr);
  }
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void sleep_until(int64_t ns) {
  const timespec until{ns / 1000000000LL, ns % 1000000000LL};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

// Loads the lines of a row for writing, and writes one byte of each as it is: a page that is mapped from a file is then copied, in
// 1 to 2 us. Only this thread writes, so readers see no change.
void own_lines(char* row, int64_t size) {
  for (int64_t at = 0; at < size; at += kLine) {
    volatile char* byte = row + at;
    *byte = *byte;
  }
  volatile char* last = row + size - 1;
  *last = *last;
}

}  // namespace

TR_API int32_t tr_gate_try(void* gate) { return enter(*static_cast<Gate*>(gate)); }

TR_API void tr_gate_enter(void* gate) {
  Gate& own = *static_cast<Gate*>(gate);
  own.waiting.fetch_add(1);
  while (!spin([&] { return !own.closed.load() && enter(own); }, kRequestSpins)) sched_yield();
  own.waiting.fetch_sub(1);
}

TR_API void tr_gate_leave(void* gate) { static_cast<Gate*>(gate)->requests.fetch_sub(1); }
TR_API void tr_gate_close(void* gate) { close(*static_cast<Gate*>(gate)); }
TR_API void tr_gate_open(void* gate) { open(*static_cast<Gate*>(gate)); }

TR_API void tr_own_rows(void* place, int64_t place_stride, const int64_t* rows, int64_t size, int64_t count) {
  for (int64_t i = 0; i < count; ++i) own_lines(static_cast<char*>(place) + (rows ? rows[i] : i) * place_stride, size);
}

TR_API void tr_gate_write_rows(void* gate, void* place, int64_t place_stride, const int64_t* rows, const void* source,
                               int64_t source_stride, int64_t size, int64_t count, int64_t hold, int64_t row_ns) {
  const auto target = [&](int64_t i) { return static_cast<char*>(place) + (rows ? rows[i] : i) * place_stride; };
  const auto values = [&](int64_t i) { return static_cast<const char*>(source) + i * source_stride; };
  const int64_t began = row_ns ? now_ns() : 0;
  std::optional<OtherCore> place_of_thread;
  if (gate) place_of_thread.emplace(*static_cast<Gate*>(gate));
  for (int64_t first = 0; first < count; first += hold) {
    const int64_t end = std::min(count, first + hold);
    if (gate) {
      place_of_thread->move();
      for (int64_t i = first; i < end; ++i) {
        own_lines(target(i), size);
        for (int64_t at = 0; at < size; at += kLine) __builtin_prefetch(values(i) + at);
      }
      close(*static_cast<Gate*>(gate));
    }
    for (int64_t i = first; i < end; ++i) memcpy(target(i), values(i), static_cast<size_t>(size));
    if (gate) open(*static_cast<Gate*>(gate));
    if (row_ns) sleep_until(began + end * row_ns);  // absolute: late wake-ups do not add up
  }
}
