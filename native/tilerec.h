// The C interface of the native CPU library: what every family of functions shares.
//
//   table     rows x dim numbers, contiguous, of one data type
//   report    where a function tells what it found wrong; all fields are filled in when `status` is not 0
//
// Rules of the interface, for all functions `tr_*`:
//   - plain C: integers, floats and pointers in structs; arrays belong to the caller; nothing is kept after the call
//   - `threads` is how many threads may work; with 1 no OpenMP function is called
//   - the same arguments give the same bits for every `threads` and every instruction set
//   - ids are read as `index_type` says; no memory outside the named arrays is read or written, whatever ids and offsets hold
//
// tilerec/ops/runtime/cpu/library.py refuses a library whose TR_ABI_VERSION or whose structs (tr_layout) are not those it was written
// for. Whoever changes the arguments or the meaning of a function raises TR_ABI_VERSION, here and there: a library that is left
// over from older sources would otherwise give wrong numbers and no error. A new struct or field is named in layout.cpp too.
#pragma once

#include <stdint.h>

#define TR_ABI_VERSION 4
#define TR_API extern "C" __attribute__((visibility("default")))

// Data types of numbers, and of ids.
enum { TR_F32 = 0, TR_BF16 = 1, TR_F16 = 2 };
enum { TR_I32 = 0, TR_I64 = 1 };

// Status of a call.
enum {
  TR_OK = 0,
  TR_BAD_ID = 1,       // an id outside [0, rows): feature, position, value = id
  TR_BAD_OFFSETS = 2,  // offsets fall, or leave [0, ids]: feature, position = bag number, value = the offset;
                       // feature -1: the batch's do not begin at 0 (position 0) or do not end at the number of ids
  TR_BAD_ARGUMENT = 3, // the caller's mistake: value says which
  TR_NO_MEMORY = 4
};

typedef struct {
  int64_t status, feature, position, value;
} tr_report;

// Version of this interface; widest instruction set of this machine and the one in use (0 base, 1 AVX2, 2 AVX-512);
// choose another one (tests; returns what is in use afterwards, never more than the machine has).
TR_API int32_t tr_abi_version(void);
// Size and fields of every struct of the interface, a line for each: "tr_report 32: status 0+8 feature 8+8 position 16+8 ...".
TR_API const char* tr_layout(void);
TR_API int32_t tr_isa_widest(void);
TR_API int32_t tr_isa(void);
TR_API int32_t tr_isa_choose(int32_t level);
// Asks the system for huge pages under [data, data + bytes), best before they are first written: a table's rows lie all over
// its memory, and with small pages every lookup also misses the processor's table of addresses. Only advice: where the
// system has no such pages nothing happens. Returns 0 if the system took it.
TR_API int32_t tr_advise_huge_pages(void* data, int64_t bytes);
// Threads that a call with threads = n would really use here and now (1 without an OpenMP runtime, or in a forked child).
TR_API int32_t tr_threads(int32_t n);
