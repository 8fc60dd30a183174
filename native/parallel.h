// Threads of one call.
//
//   parallel(threads, [&](const Team& team) { ... });
//
// runs the body on every thread of a team. It shares the OpenMP pool of the process (PyTorch's). The library is compiled with
// OpenMP and linked without it, so it uses the runtime that is already loaded. If none is loaded, the functions of
// openmp_absent.cpp run the body on one thread. Never throw out of a body.
//
// Kernels (native/*_kernel.cpp) get a `const Team&` from their caller, or none at all. They must not call `parallel`
// themselves: it is only for files that are compiled once.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdint>

namespace tilerec {

// `wait` is the team's barrier; a team of one never enters OpenMP.
struct Team {
  int thread, threads;
  void wait() const {
    if (threads > 1) {
#pragma omp barrier
    }
  }
  // This thread's share of `count` items.
  size_t begin(size_t count) const { return share(count, thread); }
  size_t end(size_t count) const { return share(count, thread + 1); }
  size_t share(size_t count, int t) const {
    return static_cast<size_t>(static_cast<unsigned __int128>(count) * static_cast<unsigned>(t) / static_cast<unsigned>(threads));
  }
};

bool may_use_threads();  // false in a child forked from a process with threads

template <class Body>
void parallel(int threads, const Body& body) {
  if (threads <= 1 || !may_use_threads()) {
    body(Team{0, 1});
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    // The runtime may start fewer threads than requested (a nested region, a limit of the environment).
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
  }
}

}  // namespace tilerec
