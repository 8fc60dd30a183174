// Stand-ins for the OpenMP runtime. With them the library loads and works on one thread in a process without a runtime.
//
// The dynamic linker searches the process's global scope first. If PyTorch's runtime is loaded, its functions are used and
// these are never called. They cover the calls that the compiler emits for `parallel.h` (GCC's and Clang's names).
#include <cstdint>

#define STAND_IN extern "C" __attribute__((weak, visibility("default")))

STAND_IN int omp_get_thread_num(void) { return 0; }
STAND_IN int omp_get_num_threads(void) { return 1; }

#if defined(__clang__)

typedef void (*Microtask)(int32_t*, int32_t*, ...);

STAND_IN int32_t __kmpc_global_thread_num(void*) { return 0; }
STAND_IN void __kmpc_push_num_threads(void*, int32_t, int32_t) {}
STAND_IN void __kmpc_barrier(void*, int32_t) {}
STAND_IN void __kmpc_fork_call(void*, int32_t count, Microtask task, ...) {
  // Clang passes the captured variables one by one; parallel.h's region captures one, the body.
  __builtin_va_list list;
  __builtin_va_start(list, task);
  void* captured = count > 0 ? __builtin_va_arg(list, void*) : nullptr;
  __builtin_va_end(list);
  int32_t thread = 0, bound = 0;
  task(&thread, &bound, captured);
}

#else

STAND_IN void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) { body(data); }
STAND_IN void GOMP_barrier(void) {}

#endif
