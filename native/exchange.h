// Data exchanged between ranks: ids sorted by destination, rows written to and read from their places
// (tilerec/ops/exchange/definition.py is the specification, with a numeric example for each function).
//
//   route     one feature's ids against the row cuts of its table; a part is one row range of a route
//   copied    a route with a single part, which travels: its ids are copied, nothing is sorted
//   chunk     neighbouring bags of one route: the piece of work of one thread
//   cursor    of a part in a chunk: first counts, then positions; the cut of a batch into chunks does not change the results
//   segment   `count` rows of `width` elements, contiguous on one side; on the other side ("flat") row i lies at element
//             place + slot(i) * stride
//   block     a range of elements of the flat side: the piece of work of one thread. A row that lies in two blocks is cut, so
//             every element of the flat side belongs to one thread, which takes the segments in order
#pragma once

#include "tilerec.h"

// Arguments of tr_route_begin, and of tr_route_finish, which gets the same record again: with memory for its results.
typedef struct {
  const int64_t* lists;  // keys, ranges (`routes` of each), batches, cuts, wire; one after another
  int64_t routes, batch_count, cut_count, wire_count;
  const void* ids;
  int64_t index_type, id_count;
  const int64_t* offsets;
  int64_t offset_count;
  int64_t each_id;
  int64_t local_type;  // TR_I32, TR_I64: of local ids
  int64_t threads;
  // Filled in by tr_route_begin.
  void* state;  // null if it failed; otherwise to be freed once
  int64_t parts, present, moved;  // numbers of parts, present bags and ids that travel
  // Memory for tr_route_finish.
  int64_t* counts;           // [parts, 2], wire order
  int32_t *lengths, *slots;  // [present]
  void* local;               // [moved]
  int64_t* positions;        // [moved], or null
  tr_report report;
} tr_route;

// Each returns report.status. TR_BAD_ID and TR_BAD_OFFSETS as in tilerec.h, where `feature` is the route, and the position of
// an offset is its index in `offsets`. tr_route_finish finds a bad id of a copied route. TR_BAD_ARGUMENT: feature = route,
// value is one of
enum {
  TR_ROUTE_BAD_LISTS = 1,    // lists whose lengths do not match `routes` and `ranges`
  TR_ROUTE_BAD_KEY = 2,      // a key outside [0, batch_count), position = the key
  TR_ROUTE_FEW_OFFSETS = 3,  // fewer bags than the batch sizes require, or a negative batch size; position = the key
  TR_ROUTE_BAD_CUTS = 4,     // cuts that decrease or do not begin at 0
  TR_ROUTE_BAD_WIRE = 5      // a position that does not occur exactly once; position = the part
};
TR_API int64_t tr_route_begin(tr_route* call);
TR_API int64_t tr_route_finish(tr_route* call);
TR_API void tr_route_free(void* state);

// Arguments of tr_place_rows (flat is written) and tr_pick_rows (rows are written; adds are not read).
typedef struct {
  const int64_t* lists;  // counts, widths, slot_starts, places, strides, adds (`segments` of each)
  int64_t segments;
  void* flat;
  int64_t flat_size;  // elements
  void* rows;
  int64_t rows_size;
  const int32_t* slots;
  int64_t slot_count;
  int64_t element_bytes;
  int64_t sum_bytes;  // 4: adds are of floats, 8: of doubles, 0: nothing can be added
  int64_t fresh;      // tr_place_rows: `flat` is overwritten; elements outside of all segments become 0
  int64_t threads;
  tr_report report;
} tr_segments;

// Each returns report.status, TR_OK or TR_NO_MEMORY or TR_BAD_ARGUMENT: feature = segment, value is one of
enum {
  TR_SEGMENT_BAD_SHAPE = 1,  // negative counts, widths or strides, or more rows than exist
  TR_SEGMENT_BAD_SLOTS = 2,  // its slots do not lie in `slots`, or one is negative
  TR_SEGMENT_OUTSIDE = 3,    // it leaves `flat`
  TR_SEGMENT_CANNOT_ADD = 4
};
// After an error nothing has been written.
TR_API int64_t tr_place_rows(tr_segments* call);
TR_API int64_t tr_pick_rows(tr_segments* call);

#if defined(__cplusplus)
namespace tilerec {

// ---- routes

struct Cursor {
  int64_t ids, present;  // first counts of this chunk and part; then positions of its next id and its last bag (first bag of a
                         // copied route)
  int64_t mark;          // bag of the last id, -1 for none; in the write of a copied route: the end of its bags
  int64_t lower;         // first row of the part
};

struct Route {
  const int64_t* offsets;  // of its bags
  int64_t bags;            // each_id: as many as ids
  int64_t begin, end;      // its ids
  const int64_t *cuts, *wire;
  int64_t parts;
  int64_t marks;                  // offset of its ids' parts in RouteWork::marks, in ids
  int64_t first_chunk, last_chunk;
  bool copied, drops;  // drops: some parts do not travel
};

struct Chunk {
  int64_t route;
  int64_t begin, end;    // bags, counted from the route's first
  int64_t first_cursor;  // one cursor per part
};

// The first error in the order of the chunk; status TR_OK if there is none. The position of an offset is counted from the
// route's first.
struct RouteFault {
  int64_t status, position, value;
};

struct RouteWork {
  const tr_route* call;
  const Route* routes;
  Cursor* cursors;
  void* marks;     // part of each id of the routes that are not copied; the highest number marks an id that does not travel
  int mark_bytes;  // 2 or 4
};

// ---- segments

struct Segment {
  char* rows;
  const int32_t* slots;  // or null: 0, 1, 2 ...
  int64_t count, width, place, stride;
  bool add, ascending;
};

struct SegmentBlock {
  const Segment* segments;
  int64_t count;
  char* flat;
  int64_t element_bytes, sum_bytes;
  int64_t begin, end;  // elements of `flat`
  bool picks, past_caches, fresh;
};

struct SlotRange {
  int32_t lowest, highest;
  bool ascending;
};

}  // namespace tilerec
#endif
