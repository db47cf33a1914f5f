// The plan of a dispatch over windows that reach every rank, from what everybody has published to the maps of received
// rows, in one call. On a GPU: five kernels a rank and two messages, nothing but launches between them.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/args.h"
#include "kernels/device_exec.h"
#include "kernels/host_exec.h"
#include "plan/assign.h"
#include "plan/receive.h"

namespace flexep {

/// What all plans of a dispatcher share.
struct OneSidedSetup {
  TableView table;
  int top_k, alignment;
  std::int64_t capacity;  // < 0: none, and nothing is dropped
  bool flat;              // weights lie beside received rows, and these know their experts
  int tokens_at;          // where in what a rank has said its number of tokens is
  bool on_device;
};

/// What one rank's plan is made from. Sizes: records that leave, received rows, expert-major rows.
struct OneSidedInput {
  int rank, first_place, places, tokens;
  Integers topk_idx;                 // [tokens, top_k]
  bool has_weights;                  // whether they travel, the same on all ranks
  const std::int32_t* weights;       // [tokens, top_k] fp32 bits; null without tokens or weights
  const std::int32_t* number;        // of CountSlots
  const std::int32_t* place_counts;  // its workspace
  const std::int32_t* said;          // [ranks, said_ints] what CountSlots said everywhere
  int said_ints;
  int left, received, rows;
};

/// The lists that a plan leaves, one behind the other in one memory.
enum class Kept {
  slot_send,
  send_row,
  send_rank,   // [tokens, top_k]
  send_token,  // [left]
  kept,
  padded,
  dropped,  // [experts]
  tokens_of,
  send,
  recv,       // [ranks]
  recv_base,  // [ranks + 1]
  token,      // [received]
  part_rows,  // [received, top_k]
  row_src,    // [rows]
  row_map,    // [rows], flat alone
  expert,     // [received, top_k], flat alone
  count
};
using KeptInts = std::array<std::int64_t, static_cast<std::size_t>(Kept::count)>;
KeptInts kept_ints(const OneSidedSetup& setup, int tokens, int left, int received, int rows);

/// Ints that a plan needs until it is made.
std::int64_t scratch_ints(const OneSidedSetup& setup, int tokens, int left, int received, bool has_weights);

/// One rank's steps and messages, in the order in which they run.
struct OneSidedPlan {
  ResolveAndAssign assign;
  PublishArgs counts;  // tokens kept for each rank; only with a capacity
  ExpectRows expect;
  RecordArgs records;
  ReceiveRows receive;
};

/// `kept` and `scratch`: as many ints as the functions above say. `weights`: those that arrive, fp32 bits, if any.
OneSidedPlan make_plan(const OneSidedSetup& setup, const OneSidedInput& in, std::int32_t* kept,
                       std::int32_t* scratch, std::int32_t* weights);

/// Numbers of the two messages, and the seconds of every wait in them.
struct PlanMessages {
  int counts, records;
  double seconds;
};

/// One plan for each hosted rank. Reports of each message; none follows one that failed.
std::vector<std::vector<Report>> plan_on_host(HostWindows& windows, const std::vector<OneSidedPlan>& ranks,
                                              const PlanMessages& messages);
void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks,
                    const PlanMessages& messages, std::uintptr_t stream);

}  // namespace flexep
