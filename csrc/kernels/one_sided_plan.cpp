#include "kernels/one_sided_plan.h"

#include <algorithm>
#include <utility>

#include "kernels/plan.h"

namespace flexep {

std::int64_t scratch_ints(const OneSidedSetup& setup, int tokens, int left, int received, bool has_weights) {
  ResolveAndAssign assign{};
  assign.table = setup.table;
  assign.order.rows = tokens, assign.order.top_k = setup.top_k;
  const PlanShape shape = setup.on_device ? plan_shape(assign) : PlanShape{1, kWarp};
  return OneSidedScratch(nullptr, setup, tokens, left, received, has_weights).ints +
         launch_ints(assign, shape);
}

std::vector<std::vector<Report>> plan_on_host(HostWindows& windows, const std::vector<OneSidedPlan>& ranks,
                                              const PlanMessages& messages) {
  std::vector<OneSidedSteps> steps;
  std::vector<PublishArgs> counts;
  std::vector<RecordArgs> records;
  for (const OneSidedPlan& one : ranks) {
    steps.emplace_back(one.setup, one.in);
    counts.push_back(steps.back().counts), records.push_back(steps.back().records);
  }
  std::vector<std::vector<Report>> reports;
  const auto all_arrived = [&] {
    return std::all_of(reports.back().begin(), reports.back().end(),
                       [](const Report& report) { return report.status == Status::arrived; });
  };
  for (const OneSidedSteps& one : steps) run_plan(one.assign);
  // All ranks have seen the same counts, and know alike whether they need to be told.
  const ResolveRows& layout = steps.front().assign.resolve;
  const bool drops =
      layout.capacity >= 0 && std::any_of(layout.dropped, layout.dropped + layout.table.experts,
                                          [](std::int32_t rows) { return rows != 0; });
  reports.emplace_back();
  if (drops) {
    reports.back() = windows.publish(counts, messages.counts, messages.seconds);
    if (!all_arrived()) return reports;
  }
  for (OneSidedSteps& one : steps) {
    if (drops) one.expect.peers.sent = one.kept;
    run_plan(one.expect);
  }
  reports.push_back(windows.exchange_records(records, messages.records, messages.seconds));
  if (!all_arrived()) return reports;
  for (const OneSidedSteps& one : steps) run_plan(one.receive);
  return reports;
}

}  // namespace flexep
