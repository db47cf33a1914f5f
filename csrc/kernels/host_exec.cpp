#include "kernels/host_exec.h"

#include <functional>
#include <system_error>
#include <thread>

#include "base/fp_scope.h"
#include "kernels/collect.h"
#include "kernels/deliver.h"
#include "kernels/host_rows.h"
#include "kernels/records.h"
#include "mem/host_team.h"

namespace flexep {

struct HostWindows::Rank {
  int rank;
  WindowState state;
  std::vector<Epoch> last_used;
};

/// One operation: begins it on every hosted rank, runs its roles, reports.
class HostWindows::Run {
 public:
  Run(HostWindows& owner, int op, double seconds) : owner_(owner) {
    std::size_t entered = 0;
    while (entered < owner.ranks_.size() && enter(owner.ranks_[entered]->state)) ++entered;
    const bool busy = entered < owner.ranks_.size();
    bool broken = false;
    for (const auto& rank : owner.ranks_) broken = broken || (!busy && has_stopped(rank->state));
    if (busy || broken) {
      while (entered > 0) flexep::leave(owner.ranks_[--entered]->state);
      if (busy) throw WindowBusy("an operation is running on this window");
      throw WindowBroken("an earlier operation on this window failed, or the window was left");
    }
    for (const auto& rank : owner.ranks_) {
      ++rank->state.epoch;
      operations_.push_back({rank->rank, rank->state.epoch, op, rank->last_used.data(), seconds});
    }
    reports_.resize(owner.ranks_.size());
  }
  ~Run() {
    for (const auto& rank : owner_.ranks_) flexep::leave(rank->state);
  }

  /// Adds a role of the i-th hosted rank in each slice, run by `lanes` threads: role(exchange) over a ThreadTeam, or
  /// over one lane.
  template <class Role>
  void add(std::size_t i, int lanes, const Role& role) {
    add_to(owner_.layout_.shape.slices, i, lanes, role);
  }
  /// The same in the first slices alone.
  template <class Role>
  void add_to(int slices, std::size_t i, int lanes, const Role& role) {
    for (int slice = 0; slice < slices; ++slice) add(i, slice, lanes, role);
  }
  template <class Role>
  void add(std::size_t i, int slice, int lanes, const Role& role) {
    if (lanes <= 1) {
      lanes_.push_back([this, i, slice, role] {
        SoloTeam team;
        run_lane(i, slice, team, role);
      });
      return;
    }
    meetings_.push_back(std::make_unique<Meeting>(lanes));
    Meeting& meeting = *meetings_.back();
    for (int lane = 0; lane < lanes; ++lane)
      lanes_.push_back([this, i, slice, role, lane, lanes, &meeting] {
        ThreadTeam team(lane, lanes, meeting);
        run_lane(i, slice, team, role);
      });
  }

  std::vector<Report> finish() {
    moved_.resize(lanes_.size());
    rank_of_lane_.resize(lanes_.size());
    std::vector<std::thread> threads;
    try {
      for (std::size_t lane = 1; lane < lanes_.size(); ++lane)
        threads.emplace_back([this, lane] { start_lane(lane); });
    } catch (const std::system_error& error) {
      stop_all();  // the lanes that run would wait for those that cannot
      for (std::thread& thread : threads) thread.join();
      throw Error(std::string("cannot start ") + std::to_string(lanes_.size()) + " threads: " + error.what());
    }
    if (!lanes_.empty()) start_lane(0);
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < reports_.size(); ++i) settle(i);
    return std::move(reports_);
  }

 private:
  template <class Team, class Role>
  void run_lane(std::size_t i, int slice, Team& team, const Role& role) {
    Rank& rank = *owner_.ranks_[i];
    const WindowLayout layout = owner_.layout_.of_slice(slice);
    HostMem mem(owner_.windows_.data(), layout.shape.topology, rank.rank, rank.state);
    Operation operation = operations_[i];
    operation.last_used += slice * kChannels * layout.shape.topology.ranks;
    Exchange<HostMem, Team> exchange(mem, team, layout, operation);
    role(exchange);
    moved_[current_lane()] = mem.moved();
    rank_of_lane_[current_lane()] = i;
  }
  static std::size_t& current_lane() {
    thread_local std::size_t lane = 0;
    return lane;
  }
  void start_lane(std::size_t lane) {
    const FpScope defaults;
    current_lane() = lane;
    lanes_[lane]();
  }
  void stop_all() {
    for (std::size_t i = 0; i < owner_.ranks_.size(); ++i) {
      Rank& rank = *owner_.ranks_[i];
      HostMem mem(owner_.windows_.data(), owner_.layout_.shape.topology, rank.rank, rank.state);
      SoloTeam team;
      Exchange<HostMem, SoloTeam>(mem, team, owner_.layout_, operations_[i]).refuse(Status::failed);
    }
  }
  /// Sums what the lanes of the i-th rank moved, and reads its fault record if it has given up.
  void settle(std::size_t i) {
    const Rank& rank = *owner_.ranks_[i];
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
      if (rank_of_lane_[lane] == i) reports_[i].moved.add(moved_[lane]);
    if (!has_stopped(rank.state)) return;
    std::memcpy(&reports_[i].fault,
                owner_.windows_[rank.rank] + owner_.layout_.faults.of(static_cast<std::size_t>(rank.rank)),
                sizeof(FaultRecord));
    reports_[i].status = static_cast<Status>(reports_[i].fault.status);
    if (reports_[i].status == Status::arrived)
      reports_[i].status = Status::stopped;  // stopped without a wait
  }

  HostWindows& owner_;
  std::vector<Operation> operations_;
  std::vector<std::function<void()>> lanes_;
  std::vector<std::unique_ptr<Meeting>> meetings_;
  std::vector<Moved> moved_;
  std::vector<std::size_t> rank_of_lane_;
  std::vector<Report> reports_;
};

HostWindows::HostWindows(const WindowShape& shape, const std::vector<std::uintptr_t>& windows,
                         const std::vector<int>& hosted)
    : layout_(shape) {
  for (const std::uintptr_t window : windows) windows_.push_back(reinterpret_cast<char*>(window));
  for (const int rank : hosted) {
    auto made = std::make_unique<Rank>();
    made->rank = rank;
    made->last_used.assign(static_cast<std::size_t>(shape.slices) * kChannels * shape.topology.ranks, 0);
    ranks_.push_back(std::move(made));
  }
}

HostWindows::~HostWindows() = default;

std::vector<Report> HostWindows::publish(const std::vector<PublishArgs>& args, int op, double seconds) {
  Run run(*this, op, seconds);
  for (std::size_t i = 0; i < args.size(); ++i) {
    const int page = static_cast<int>(ranks_[i]->state.boards++ % 2);
    run.add(i, 0, 1,
            [page, &ints = args[i]](auto& exchange) { publish_ints(exchange, page, ints, std::memcpy); });
  }
  return run.finish();
}

std::vector<Report> HostWindows::exchange_records(const std::vector<RecordArgs>& args, int op,
                                                  double seconds) {
  Run run(*this, op, seconds);
  const int slices = layout_.shape.mail_slices();
  for (std::size_t i = 0; i < args.size(); ++i) {
    const auto take = [&records = args[i]](auto& exchange) { take_records(exchange, records, std::memcpy); };
    const auto send = [&records = args[i]](auto& exchange) { send_records(exchange, records); };
    if (records_fit(layout_, ranks_[i]->rank, args[i])) {
      run.add_to(slices, i, 1, [send, take](auto& exchange) { send(exchange), take(exchange); });
    } else {
      run.add_to(slices, i, 1, take);
      run.add_to(slices, i, 1, send);
    }
  }
  return run.finish();
}

std::vector<Report> HostWindows::deliver(const std::vector<DeliverArgs>& args, int op, double seconds,
                                         int lanes) {
  Run run(*this, op, seconds);
  const Topology& topology = layout_.shape.topology;
  for (std::size_t i = 0; i < args.size(); ++i) {
    run.add(i, lanes, [&rows = args[i], &topology](auto& exchange) {
      HostPlace place(rows, topology.ranks);
      const WindowLayout& layout = exchange.layout();
      place.pad(share(exchange.team(),
                      share(Lane{layout.slice, layout.shape.slices}, {0, static_cast<int>(rows.num_rows)})));
      TeamCrew crew(exchange);
      place_rows(crew, rows, place);
      place.finish();
    });
    if (topology.ranks > 1)
      run.add(i, 1, [&rows = args[i]](auto& exchange) {
        TeamCrew crew(exchange);
        sends_ahead(exchange.layout()) ? send_ahead(crew, rows) : offer_rows(crew, rows);
      });
    if (topology.domains() > 1)
      run.add(i, 1, [&rows = args[i]](auto& exchange) {
        TeamCrew crew(exchange);
        relay_rows(crew, rows);
      });
  }
  return run.finish();
}

std::vector<Report> HostWindows::collect(const std::vector<CollectArgs>& args, int op, double seconds,
                                         int lanes) {
  Run run(*this, op, seconds);
  const Topology& topology = layout_.shape.topology;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const auto with_rows = [&rows = args[i], tokens = args[i].tokens_of[ranks_[i]->rank]](const auto& role) {
      return [&rows, tokens, role](auto& exchange) {
        HostAdd add(rows, tokens);
        TeamCrew crew(exchange);
        role(crew, rows, add);
        add.finish();
      };
    };
    run.add(i, lanes, with_rows([](auto& crew, auto& rows, auto& add) { push_partials(crew, rows, add); }));
    run.add(i, 1, with_rows([](auto& crew, auto& rows, auto& add) { add_home(crew, rows, add); }));
    if (topology.domains() > 1)
      run.add(i, 1, with_rows([](auto& crew, auto& rows, auto& add) { relay_partials(crew, rows, add); }));
  }
  return run.finish();
}

void HostWindows::leave() {
  for (const auto& rank : ranks_) {
    HostMem mem(windows_.data(), layout_.shape.topology, rank->rank, rank->state);
    if (!mem.stop_once()) continue;
    for (int to = 0; to < layout_.shape.topology.ranks; ++to)
      mem.post(to, layout_.word(Word::stopped, rank->rank), kLeft);
  }
}

Epoch HostWindows::epoch() const { return ranks_.empty() ? 0 : ranks_.front()->state.epoch; }

}  // namespace flexep
