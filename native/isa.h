// One source, several instruction sets.
//
// A file `native/*_kernel.cpp` is compiled once per level, with TILEREC_ISA naming the level's namespace: base, avx2 or
// avx512 (x86-64; elsewhere base alone). Everything in it, and in headers made for it, lives in
// `namespace tilerec { namespace TILEREC_ISA { ... } }`: two levels must never define the same symbol, or the linker keeps one
// of them and may hand AVX-512 code to a machine without it. For the same reason such files use no standard containers
// or algorithms that the compiler could leave as shared functions. All other `native/*.cpp` are compiled once, for the base level.
//
// A kernel `void sum(const Args&)` in sum_kernel.cpp is reached from sum.cpp by
//
//   TILEREC_DECLARE(void sum(const Args&))
//   ... TILEREC_CALL(sum)(args);
#pragma once

#include "tilerec.h"

namespace tilerec {

enum class Isa : int { base = 0, avx2 = 1, avx512 = 2 };

Isa isa();  // the level in use

}  // namespace tilerec

#if defined(__x86_64__)
#define TILEREC_DECLARE(...)          \
  namespace tilerec {                 \
  namespace base { __VA_ARGS__; }     \
  namespace avx2 { __VA_ARGS__; }     \
  namespace avx512 { __VA_ARGS__; }   \
  }
#define TILEREC_CALL(name)                                                                      \
  (::tilerec::isa() == ::tilerec::Isa::avx512 ? ::tilerec::avx512::name                         \
                                              : ::tilerec::isa() == ::tilerec::Isa::avx2 ? ::tilerec::avx2::name \
                                                                                         : ::tilerec::base::name)
#else
#define TILEREC_DECLARE(...)      \
  namespace tilerec {             \
  namespace base { __VA_ARGS__; } \
  }
#define TILEREC_CALL(name) (::tilerec::base::name)
#endif
