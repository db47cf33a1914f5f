#include "kernels/one_sided_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/plan.h"

namespace flexep {
namespace {

/// Cuts a memory into lists of ints, each from a multiple of 16 bytes behind its begin. Without memory it only adds up.
class Cutter {
 public:
  explicit Cutter(std::int32_t* memory) : memory_(memory) {}
  std::int32_t* take(std::int64_t ints) {
    std::int32_t* const list = memory_ ? memory_ + taken_ : nullptr;
    taken_ += (ints + 3) / 4 * 4;
    return list;
  }
  std::int64_t taken() const { return taken_; }

 private:
  std::int32_t* memory_;
  std::int64_t taken_ = 0;
};

struct Scratch {
  std::int32_t* start;
  std::int32_t *slot_row, *slot_rank, *order, *workspace;
  std::int32_t *send_counts, *all_counts;
  std::int32_t *sent, *came;  // records
  std::int64_t ints;

  Scratch(std::int32_t* memory, const OneSidedSetup& setup, int tokens, int left, int received,
          bool has_weights) {
    const std::int64_t slots = static_cast<std::int64_t>(tokens) * setup.top_k, R = setup.table.ranks;
    const int width = RecordShape{setup.top_k, false, has_weights}.width();
    Cutter cutter(memory);
    start = cutter.take(setup.table.experts);
    slot_row = cutter.take(slots), slot_rank = cutter.take(slots), order = cutter.take(slots);
    ResolveAndAssign assign{};
    assign.table = setup.table;
    assign.order.rows = tokens, assign.order.top_k = setup.top_k;
    workspace = cutter.take(launch_ints(assign, setup.on_device ? plan_shape(assign) : PlanShape{1, kWarp}));
    send_counts = cutter.take(R), all_counts = cutter.take(R * R);
    sent = cutter.take(static_cast<std::int64_t>(left) * width);
    came = cutter.take(static_cast<std::int64_t>(received) * width);
    ints = cutter.taken();
  }
};

/// Beginnings of the lists of a memory.
std::array<std::int32_t*, std::tuple_size_v<KeptInts>> begins(std::int32_t* memory, const KeptInts& ints) {
  std::array<std::int32_t*, std::tuple_size_v<KeptInts>> out;
  for (std::size_t i = 0; i < ints.size(); ++i) out[i] = memory, memory += ints[i];
  return out;
}

/// Runs plans where `runner` does: run(step), and publish and exchange of all ranks, which say whether to go on.
template <class Runner>
void run_plans(Runner& runner, const std::vector<OneSidedPlan>& ranks) {
  for (const OneSidedPlan& one : ranks) runner.run(one.assign);
  std::vector<PublishArgs> counts;
  std::vector<RecordArgs> records;
  for (const OneSidedPlan& one : ranks) counts.push_back(one.counts), records.push_back(one.records);
  if (ranks.front().assign.resolve.capacity >= 0 && !runner.publish(counts)) return;
  for (const OneSidedPlan& one : ranks) runner.run(one.expect);
  if (!runner.exchange(records)) return;
  for (const OneSidedPlan& one : ranks) runner.run(one.receive);
}

struct HostRunner {
  HostWindows& windows;
  const PlanMessages& messages;
  std::vector<std::vector<Report>> reports;

  template <class Step>
  void run(const Step& step) {
    run_plan(step);
  }
  bool publish(const std::vector<PublishArgs>& args) {
    return keep(windows.publish(args, messages.counts, messages.seconds));
  }
  bool exchange(const std::vector<RecordArgs>& args) {
    return keep(windows.exchange_records(args, messages.records, messages.seconds));
  }
  bool keep(std::vector<Report> one) {
    reports.push_back(std::move(one));
    return std::all_of(reports.back().begin(), reports.back().end(),
                       [](const Report& report) { return report.status == Status::arrived; });
  }
};

struct DeviceRunner {
  const DeviceWorld& world;
  const PlanMessages& messages;
  std::uintptr_t stream;

  template <class Step>
  void run(const Step& step) {
    // What was published last was published by a kernel of ours.
    launch_plan(step, plan_shape(step), stream, true);
  }
  bool publish(const std::vector<PublishArgs>& args) {
    launch_publish(world, args, messages.counts, messages.seconds, stream);
    return true;
  }
  bool exchange(const std::vector<RecordArgs>& args) {
    launch_records(world, args, messages.records, messages.seconds, stream);
    return true;
  }
};

}  // namespace

KeptInts kept_ints(const OneSidedSetup& setup, int tokens, int left, int received, int rows) {
  const std::int64_t K = setup.top_k, E = setup.table.experts, R = setup.table.ranks;
  const std::int64_t slots = tokens * K, arrived = received * K;
  return {slots,
          slots,
          slots,
          left,
          E,
          E,
          E,
          R,
          R,
          R,
          R + 1,
          received,
          arrived,
          rows,
          setup.flat ? rows : 0,
          setup.flat ? arrived : 0};
}

std::int64_t scratch_ints(const OneSidedSetup& setup, int tokens, int left, int received, bool has_weights) {
  return Scratch(nullptr, setup, tokens, left, received, has_weights).ints;
}

OneSidedPlan make_plan(const OneSidedSetup& setup, const OneSidedInput& in, std::int32_t* kept,
                       std::int32_t* scratch, std::int32_t* weights) {
  const TableView& table = setup.table;
  const int E = table.experts, R = table.ranks, K = setup.top_k;
  const Scratch memory(scratch, setup, in.tokens, in.left, in.received, in.has_weights);
  const auto lists = begins(kept, kept_ints(setup, in.tokens, in.left, in.received, in.rows));
  const auto list = [&](Kept which) { return lists[static_cast<std::size_t>(which)]; };
  const auto flat_list = [&](Kept which) { return setup.flat ? list(which) : nullptr; };
  const std::int32_t* const places = in.said + CountSlots::kHeader;
  const RecordShape record{K, false, in.has_weights};
  // With a capacity, of the distinct tokens those that are kept.
  const bool drops = setup.capacity >= 0;
  const SentCounts sent{drops ? memory.all_counts : places + E, drops ? R : in.said_ints, R, 0};
  OneSidedPlan plan{};
  AssignRows& assign = plan.assign;
  assign = {in.topk_idx,
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
  plan.assign.resolve = {places,
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
  plan.counts = {memory.send_counts, R, memory.all_counts};
  PeerCounts& peers = plan.expect.peers;
  peers = {};
  peers.sent = sent, peers.tokens = in.said + setup.tokens_at, peers.tokens_stride = in.said_ints;
  peers.rank = in.rank, peers.tokens_of = list(Kept::tokens_of), peers.send = list(Kept::send);
  peers.recv = list(Kept::recv), peers.recv_base = list(Kept::recv_base);
  std::int32_t* const row_weights = setup.flat ? nullptr : weights;
  plan.expect.rows = {in.rows, list(Kept::row_src), row_weights, flat_list(Kept::row_map)};
  plan.records = {memory.sent, peers.send, memory.came, peers.recv,
                  static_cast<std::int64_t>(sizeof(std::int32_t)) * record.width()};
  plan.receive = {memory.came,
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
                  setup.flat ? weights : nullptr,
                  flat_list(Kept::expert),
                  list(Kept::row_src),
                  row_weights,
                  flat_list(Kept::row_map),
                  nullptr};
  return plan;
}

std::vector<std::vector<Report>> plan_on_host(HostWindows& windows, const std::vector<OneSidedPlan>& ranks,
                                              const PlanMessages& messages) {
  HostRunner runner{windows, messages, {}};
  run_plans(runner, ranks);
  return std::move(runner.reports);
}

void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks,
                    const PlanMessages& messages, std::uintptr_t stream) {
  DeviceRunner runner{world, messages, stream};
  run_plans(runner, ranks);
}

}  // namespace flexep
