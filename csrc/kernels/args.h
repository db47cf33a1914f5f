// What the roles of an operation are given: the plan as each side sees it, and where rows come from and go to.
#pragma once
#include <cstdint>

#include "base/dtype.h"

namespace flexep {

/// The received rows of a rank: (source rank, source token) order.
struct Arrivals {
  const std::int32_t* token;  // [received] token at its source; ascending inside a source
  const std::int32_t* base;   // [ranks + 1] first received row of each source; base[ranks] rows in all
  const std::int32_t* rows;   // [received, top_k] expert-major row of each slot, -1 elsewhere
  int top_k;
};

/// What a relay hands on: tokens of the sources on its rail that have a slot in its domain.
struct Relayed {
  const std::int32_t* token;    // [relayed] token at its source; ascending inside a source
  const std::int32_t* base;     // [domains + 1] first of each source's domain; null with one domain
  const std::int32_t* members;  // [relayed, top_k] indices in the domain that hold a slot, ascending, then -1
};

/// What delivery and collection read of a route: the same in every call through it.
struct RouteLists {
  const std::int32_t* tokens_of;  // [ranks]
  Arrivals arrivals;
  Relayed relayed;
  const std::int32_t *row_src, *home_rank;  // see DeliverArgs and CollectArgs
};

/// Dispatch and the backward of combine: tokens to the ranks of their experts.
struct DeliverArgs {
  const std::int32_t* tokens_of;   // [ranks] T of every rank
  const void* x;                   // [T, hidden] of this rank
  const std::int32_t* registered;  // [ranks] 1: that rank's x is its window's own, and is read where it lies
  const std::int32_t* read_by;  // [T, top_k] ranks that read the token's row, ascending, then -1: a row that
                                // no peer reads need not be offered. Null: any may; always so over relays
  Arrivals arrivals;
  Relayed relayed;
  void* out;                    // [num_rows, hidden]
  std::int64_t num_rows;        // expert-major rows, or flat rows
  bool flat;                    // out holds received rows as they are
  const std::int32_t* row_src;  // [num_rows] -1 where an expert-major row stays empty; not read if flat
  const float* weights;         // [num_rows] or null: out = weights * row
  const void* dot_with;         // [num_rows, hidden] or null
  float* dots;                  // [num_rows] sum over hidden of dot_with * row
  DType dtype;
  std::int64_t hidden;
};

/// Combine and the backward of dispatch: partial sums home, where they are added.
struct CollectArgs {
  const std::int32_t* tokens_of;  // [ranks]
  const void* y;                  // [rows, hidden] in a layout
  bool flat;                      // y holds partial sums already
  const float* part_weights;      // [received, top_k] or null
  Arrivals arrivals;
  Relayed relayed;
  const std::int32_t*
      home_rank;                 // [T, top_k] ranks that send a partial sum of the token, ascending, then -1;
                                 // over domains any rank of each that does
  int nest;                      // ranks that are added first and rounded, by domain; 0: none
  void* z;                       // [T, hidden]
  DType dtype, wire, out_dtype;  // of y, of partial sums as they travel, of z
  std::int64_t hidden;
};

/// Records of fixed size between all ranks.
struct RecordArgs {
  const void* send;                 // in destination order
  const std::int32_t* send_splits;  // [ranks] records for each destination
  void* recv;                       // in source order
  const std::int32_t* recv_splits;  // [ranks]
  std::int64_t record_bytes;
};

struct PublishArgs {
  const std::int32_t* ints;  // [count]
  int count;
  std::int32_t* all;  // [ranks, count]
};

}  // namespace flexep
