// The steps of a dispatch's plan over windows that reach every rank, and the memory that they share: one text for the
// host, which makes them once, and for a GPU, where every thread makes those that it runs from what a launch carries.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/args.h"
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

/// What one rank's plan is made from, and where it goes. Sizes: records that leave, received rows, expert-major rows.
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
  std::int32_t* kept;             // lists, kept_ints in all
  std::int32_t* scratch;          // scratch_ints
  std::int32_t* arrived_weights;  // fp32 bits; null: none travel
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
struct KeptInts {
  std::int64_t of[static_cast<std::size_t>(Kept::count)];
  /// Ints before a list.
  FLEXEP_HD std::int64_t before(Kept which) const {
    std::int64_t ints = 0;
    FLEXEP_HD_UNROLL
    for (int i = 0; i < static_cast<int>(Kept::count); ++i) ints += i < static_cast<int>(which) ? of[i] : 0;
    return ints;
  }
};
FLEXEP_HD KeptInts kept_ints(const OneSidedSetup& setup, int tokens, int left, int received, int rows) {
  const std::int64_t K = setup.top_k, E = setup.table.experts, R = setup.table.ranks;
  const std::int64_t slots = tokens * K, arrived = received * K, flat = setup.flat;
  return {slots, slots, slots, left,     E,       E,    E,           R,
          R,     R,     R + 1, received, arrived, rows, flat * rows, flat * arrived};
}

/// What calls through a plan read of it.
inline RouteLists route_lists(const OneSidedSetup& setup, const OneSidedInput& in) {
  const KeptInts ints = kept_ints(setup, in.tokens, in.left, in.received, in.rows);
  const auto list = [&](Kept which) { return in.kept + ints.before(which); };
  return {list(Kept::tokens_of),
          {list(Kept::token), list(Kept::recv_base), list(Kept::part_rows), setup.top_k},
          {},
          list(Kept::row_src),
          list(Kept::send_rank)};
}

/// Cuts a memory into lists of ints, each from a multiple of 16 bytes behind its begin.
class Cutter {
 public:
  FLEXEP_HD explicit Cutter(std::int32_t* memory) : memory_(memory) {}
  FLEXEP_HD std::int32_t* take(std::int64_t ints) {
    std::int32_t* const list = memory_ ? memory_ + taken_ : nullptr;
    taken_ += (ints + 3) / 4 * 4;
    return list;
  }
  FLEXEP_HD std::int64_t taken() const { return taken_; }

 private:
  std::int32_t* memory_;
  std::int64_t taken_ = 0;
};

/// What a plan needs until it is made. Without memory it only adds up.
struct OneSidedScratch {
  std::int32_t* start;
  std::int32_t *slot_row, *slot_rank, *order;
  std::int32_t *send_counts, *all_counts;
  std::int32_t *sent, *came;  // records
  std::int32_t* workspace;    // the last, so that its length need not be known
  std::int64_t ints;          // before the workspace

  FLEXEP_HD OneSidedScratch(std::int32_t* memory, const OneSidedSetup& setup, int tokens, int left,
                            int received, bool has_weights) {
    const std::int64_t slots = static_cast<std::int64_t>(tokens) * setup.top_k, R = setup.table.ranks;
    const int width = RecordShape{setup.top_k, false, has_weights}.width();
    Cutter cutter(memory);
    start = cutter.take(setup.table.experts);
    slot_row = cutter.take(slots), slot_rank = cutter.take(slots), order = cutter.take(slots);
    send_counts = cutter.take(R), all_counts = cutter.take(R * R);
    sent = cutter.take(static_cast<std::int64_t>(left) * width);
    came = cutter.take(static_cast<std::int64_t>(received) * width);
    workspace = cutter.take(0);
    ints = cutter.taken();
  }
};

/// One rank's steps and messages, in the order in which they run.
struct OneSidedSteps {
  ResolveAndAssign assign;
  PublishArgs counts;  // distinct tokens kept for each rank; told only if rows were dropped
  ExpectRows expect;   // if no rows were dropped; else it is by `kept`
  SentCounts kept;
  RecordArgs records;
  ReceiveRows receive;

  FLEXEP_HD OneSidedSteps(const OneSidedSetup& setup, const OneSidedInput& in) : assign{}, expect{} {
    const TableView& table = setup.table;
    const int E = table.experts, R = table.ranks, K = setup.top_k;
    const OneSidedScratch memory(in.scratch, setup, in.tokens, in.left, in.received, in.has_weights);
    const KeptInts ints = kept_ints(setup, in.tokens, in.left, in.received, in.rows);
    const auto list = [&](Kept which) { return in.kept + ints.before(which); };
    const auto flat_list = [&](Kept which) { return setup.flat ? list(which) : nullptr; };
    const std::int32_t* const places = in.said + CountSlots::kHeader;
    const RecordShape record{K, false, in.has_weights};
    AssignRows& rows = assign;
    rows = {in.topk_idx,
            table,
            in.number,
            in.place_counts,
            CountSlots::keys(E, R, 0),
            nullptr,
            nullptr,
            nullptr,
            0,
            in.weights,
            memory.slot_row,
            memory.slot_rank,
            {in.tokens, K, R, 1, -1, in.left, memory.order, list(Kept::slot_send), list(Kept::send_row),
             list(Kept::send_rank), list(Kept::send_token), memory.send_counts},
            nullptr,
            {record, memory.sent},
            memory.workspace};
    assign.resolve = {places,
                      in.said_ints,
                      table,
                      setup.alignment,
                      setup.capacity,
                      in.rank,
                      nullptr,
                      memory.start,
                      list(Kept::kept),
                      list(Kept::padded),
                      list(Kept::dropped),
                      nullptr,
                      nullptr};
    counts = {memory.send_counts, R, memory.all_counts};
    PeerCounts& peers = expect.peers;
    peers.sent = {places + E, in.said_ints, R, 0};
    kept = {memory.all_counts, R, R, 0};
    peers.tokens = in.said + setup.tokens_at, peers.tokens_stride = in.said_ints;
    peers.rank = in.rank, peers.tokens_of = list(Kept::tokens_of), peers.send = list(Kept::send);
    peers.recv = list(Kept::recv), peers.recv_base = list(Kept::recv_base);
    std::int32_t* const row_weights = setup.flat ? nullptr : in.arrived_weights;
    expect.rows = {in.rows, list(Kept::row_src), row_weights, flat_list(Kept::row_map)};
    records = {memory.sent, peers.send, memory.came, peers.recv,
               static_cast<std::int64_t>(sizeof(std::int32_t)) * record.width()};
    receive = {memory.came,
               record,
               in.received,
               in.rows,
               R,
               peers.recv_base,
               nullptr,
               in.places,
               memory.start + in.first_place,
               list(Kept::token),
               list(Kept::part_rows),
               setup.flat ? in.arrived_weights : nullptr,
               flat_list(Kept::expert),
               list(Kept::row_src),
               row_weights,
               flat_list(Kept::row_map),
               nullptr};
  }
};

}  // namespace flexep
