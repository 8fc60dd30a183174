// A gate between requests, which read tables, and one follower, which writes rows of them (tilerec/delta/request_lock.py).
//
//   request    enter [ reads ] leave   enter waits ...... [ reads ] leave
//   follower   fetches rows, close waits [ writes ] open, fetches the next rows
//
// Neither side sleeps for the other: to wake a thread takes 50 to 100 us, a hold of the gate about 10. Both wait in a loop. A request
// that waits longer gives the processor to other threads; a follower that waits longer than 1 ms opens the gate and sleeps 0.1 ms.
#pragma once

#include "tilerec.h"

// The gate's memory is four words of 64 bits, zeros at first: requests that run, requests that wait, 1 while the follower has or wants
// the gate, and the number of the core of the newest request, from 1; 0 where the
// system does not tell.

// Lets a request in, if the follower does not write; returns 1 if it is in. Never waits.
TR_API int32_t tr_gate_try(void* gate);
// Lets a request in. It waits for one write at most.
TR_API void tr_gate_enter(void* gate);
// A request ends.
TR_API void tr_gate_leave(void* gate);
// Waits until no request runs, and keeps others out until `tr_gate_open`.
TR_API void tr_gate_close(void* gate);
TR_API void tr_gate_open(void* gate);

// Copies `count` rows of `size` bytes: row i of `source` to row rows[i] of `place` (`rows` null: to row i). Strides are in bytes.
// At most `hold` rows are copied each time that the gate is closed. `gate` null: without a gate. `row_ns`: least nanoseconds for a
// row; the thread sleeps after each `hold` rows, with the gate open. 0: it does not sleep.
TR_API void tr_gate_write_rows(void* gate, void* place, int64_t place_stride, const int64_t* rows, const void* source,
                               int64_t source_stride, int64_t size, int64_t count, int64_t hold, int64_t row_ns);

// Loads the cache lines of rows for writing and writes a byte of each as it is, so that the next write finds them near, and pages that
// were mapped from a file copied. Rows as for tr_gate_write_rows.
TR_API void tr_own_rows(void* place, int64_t place_stride, const int64_t* rows, int64_t size, int64_t count);
