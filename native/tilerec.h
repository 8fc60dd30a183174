// The C interface of the native CPU library: types and rules shared by every family of functions.
//
//   table     rows x dim numbers, contiguous, of one data type
//   report    describes the first error of a call; all fields are filled in when `status` is not 0
//
// Rules of the interface, for all functions `tr_*`:
//   - plain C: integers, floats and pointers in structs; arrays belong to the caller; nothing is kept after the call
//   - `threads` is the largest number of threads that may work; with 1 no OpenMP function is called
//   - the same arguments give the same bits for every `threads` and every instruction set
//   - `index_type` is the type of ids; for any values of ids and offsets, no memory outside the named arrays is read or written
//
// tilerec/ops/runtime/cpu/library.py rejects a library with another TR_ABI_VERSION or other structs (tr_layout). If you change the
// arguments or the meaning of a function, raise TR_ABI_VERSION here and there: a library built from older sources would
// otherwise return wrong numbers and no error. List a new struct or field in layout.cpp too.
#pragma once

#include <stdint.h>

#define TR_ABI_VERSION 14
#define TR_API extern "C" __attribute__((visibility("default")))

// Data types of numbers, of quantized rows (row_reader.h: 8, 4 or 2 bits per number, read only), and of ids.
enum { TR_F32 = 0, TR_BF16 = 1, TR_F16 = 2 };
enum { TR_CODES8 = 3, TR_CODES4 = 4, TR_CODES2 = 5 };
enum { TR_I32 = 0, TR_I64 = 1 };

// Status of a call.
enum {
  TR_OK = 0,
  TR_BAD_ID = 1,       // an id outside [0, rows): feature, position, value = id
  TR_BAD_OFFSETS = 2,  // offsets decrease, or leave [0, ids]: feature, position = bag number, value = the offset;
                       // feature -1: the batch's do not begin at 0 (position 0) or do not end at the number of ids
  TR_BAD_ARGUMENT = 3, // the caller's mistake: value identifies it
  TR_NO_MEMORY = 4
};

typedef struct {
  int64_t status, feature, position, value;
} tr_report;

// Version of this interface; widest instruction set of this machine and the one in use (0 base, 1 AVX2, 2 AVX-512);
// choose another one (for tests; returns the level in use afterwards, never a wider one than the machine has).
TR_API int32_t tr_abi_version(void);
// Size and fields of every struct of the interface, one line each: "tr_report 32: status 0+8 feature 8+8 position 16+8 ...".
TR_API const char* tr_layout(void);
TR_API int32_t tr_isa_widest(void);
TR_API int32_t tr_isa(void);
TR_API int32_t tr_isa_choose(int32_t level);
// Requests huge pages from the system for [data, data + bytes), best before the first write. A lookup reads rows from all of
// a table's memory, and with small pages every lookup also misses the processor's TLB. This is only a hint: on a system
// without such pages nothing happens. Returns 0 if the system accepted it.
TR_API int32_t tr_advise_huge_pages(void* data, int64_t bytes);
// Returns the memory of whole pages in [data, data + bytes) to the system. The addresses stay valid; their contents are lost.
// Returns 0 if the system accepted it.
TR_API int32_t tr_release_pages(void* data, int64_t bytes);
// Number of threads that a call with threads = n would use now (1 without an OpenMP runtime, or in a forked child).
TR_API int32_t tr_threads(int32_t n);
