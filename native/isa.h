// One source, several instruction sets.
//
// A file `native/*_kernel.cpp` is compiled once per level, with TILEREC_ISA naming the level's namespace: base, avx2 or
// avx512 (x86-64; elsewhere base alone). All its code, and the code of headers made for it, is in
// `namespace tilerec { namespace TILEREC_ISA { ... } }`. Two levels must never define the same symbol: the linker would keep
// one of them and might run AVX-512 code on a machine without it. For the same reason such files use no standard containers
// or algorithms that the compiler could emit as shared functions. All other `native/*.cpp` are compiled once, for the base
// level.
//
// sum.cpp calls a kernel `void sum(const Args&)` of sum_kernel.cpp by
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
