// Small worlds: what every rank sends in every operation, and what must come out. Chosen by a seed, the same for the
// simulator and for threads.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/args.h"
#include "kernels/chunks.h"
#include "proto/exchange.h"
#include "scheduler.h"

namespace flexep::sim {

enum class Kind : int { any, publish, records, deliver, collect };

/// What happens besides operations.
enum class Fate { none, all_leave, one_absent, one_killed, dies_telling, one_leaves, one_differs };

struct Scenario {
  const char* name;
  Kind kind;
  int domains;  // 0: one or two, by seed
  Fate fate;
};

constexpr Scenario kScenarios[] = {
    {"publish", Kind::publish, 1, Fate::none},
    {"records", Kind::records, 1, Fate::none},
    {"pull", Kind::deliver, 1, Fate::none},
    {"push", Kind::collect, 1, Fate::none},
    {"pull relay", Kind::deliver, 2, Fate::none},
    {"push relay", Kind::collect, 2, Fate::none},
    {"mixed", Kind::any, 0, Fate::none},
    {"all leave", Kind::any, 0, Fate::all_leave},
    {"one never comes", Kind::any, 0, Fate::one_absent},
    {"one is killed", Kind::any, 0, Fate::one_killed},
    {"one is killed in a pull", Kind::deliver, 2, Fate::one_killed},
    {"one is killed in a push", Kind::collect, 2, Fate::one_killed},
    {"one dies while it tells", Kind::any, 0, Fate::dies_telling},
    {"one leaves early", Kind::any, 0, Fate::one_leaves},
    {"one runs something else", Kind::any, 0, Fate::one_differs},
};

constexpr int kRowWords = 5, kRowBytes = 20, kRecordBytes = 8, kMostInts = 3, kMostTokens = 5;
constexpr double kForever = std::numeric_limits<double>::infinity();
using Row = std::array<std::uint32_t, kRowWords>;

/// What one rank needs for one operation.
struct Plan {
  std::vector<std::int32_t> tokens_of, arrival_token, arrival_base, relay_token, relay_base, members,
      home_rank;
  std::vector<std::int32_t> send_splits, recv_splits, ints, registered;
  std::vector<Row> x, y;  // y: partial sums of received rows, as a flat combine is given them
  std::vector<std::uint64_t> records;
};

class World {
 public:
  const Scenario scenario;
  const std::uint64_t seed;
  const WindowLayout layout;
  bool split;  // lanes that wait, move and post, or teams that do all three
  bool rings;  // such lanes move rows through rings
  int stages, stage_bytes;
  int lanes, epochs, odd_rank, impatient_rank;

  World(const Scenario& of, std::uint64_t number) : scenario(of), seed(number), layout(shape_of()) {
    const int R = topology().ranks;
    split = pick(2, 'x') == 1;
    rings = pick(2, 'y') == 1;
    constexpr int kStageBytes[] = {kRowBytes, 12, 8, 4};
    stages = 1 + pick(4, 'z'), stage_bytes = kStageBytes[pick(4, 'b')];
    lanes = split ? 3 + pick(2, 'l') : 1 + pick(4, 'l');
    if (R > 3 && lanes == 4) lanes = split ? 3 : 2;
    // What can fail is followed by two barriers, so that every rank comes to wait for the one that is missing.
    epochs = scenario.fate == Fate::none || scenario.fate == Fate::all_leave ? 3 : 4;
    odd_rank = pick(R, 'o');
    impatient_rank = (odd_rank + 1 + pick(R - 1, 'p')) % R;
    plans_.resize(epochs);
    for (int epoch = 1; epoch <= epochs; ++epoch)
      for (int rank = 0; rank < R; ++rank) plans_[epoch - 1].push_back(plan(epoch, rank));
  }

  const Topology& topology() const { return layout.shape.topology; }
  /// Of rows that a rank sends ahead: whether that is done before the operation, which then only takes note of it.
  bool sent_before(int epoch, int rank) const { return mix(seed, epoch, rank, 5) % 2 == 0; }
  /// Whether the rows that are collected are partial sums.
  bool is_flat(int epoch) const { return mix(seed, epoch, 8) % 2 == 0; }
  /// Whether sources know which ranks read a row.
  bool knows_readers(int epoch) const { return mix(seed, epoch, 6) % 2 == 0; }
  int roles() const { return topology().domains() > 1 ? 3 : 2; }
  /// Of a rank: a team for each role of each slice.
  int teams() const { return roles() * layout.shape.slices; }

  Kind kind(int epoch) const {
    if (barrier_at(epoch)) return Kind::publish;
    if (scenario.kind != Kind::any) return scenario.kind;
    return static_cast<Kind>(1 + mix(seed, epoch, 7) % 4);
  }
  /// The number by which ranks recognise an operation.
  int op(int epoch, int rank) const {
    const bool differs = scenario.fate == Fate::one_differs && rank == odd_rank && epoch == 3;
    return differs ? 99 : static_cast<int>(kind(epoch));
  }
  /// Operations that the rank runs.
  int last_epoch(int rank) const {
    const bool less = scenario.fate == Fate::one_absent || scenario.fate == Fate::dies_telling ||
                      scenario.fate == Fate::one_leaves || scenario.fate == Fate::one_killed;
    return less && rank == odd_rank ? 2 : epochs;
  }
  bool leaves(int rank) const {
    return scenario.fate == Fate::all_leave || (scenario.fate == Fate::one_leaves && rank == odd_rank);
  }
  /// Where one rank gives up, only it has a deadline: the others must hear of it.
  double seconds(int rank) const {
    const bool gives_up = scenario.fate == Fate::one_absent || scenario.fate == Fate::dies_telling;
    if (scenario.fate == Fate::one_killed) return 1.0 + rank;
    return gives_up && rank == impatient_rank ? 1.0 : kForever;
  }
  const Plan& plan_of(int epoch, int rank) const { return plans_[epoch - 1][rank]; }

  /// Row of a token on its way from `from`: x of its source, or the partial sum of an expert's rank.
  Row row(int epoch, int home, int token, int from) const {
    Row row;
    for (int i = 0; i < kRowWords; ++i)
      row[i] = static_cast<std::uint32_t>(mix(seed, epoch, home * 64 + token, from * 8 + i));
    return row;
  }
  /// Adds a term where order and repetition show.
  static void fold(Row& sum, const Row& term) {
    for (int i = 0; i < kRowWords; ++i) sum[i] = sum[i] * 1000003u + term[i] + 1;
  }
  std::uint64_t record(int epoch, int from, int to, int number) const {
    return mix(seed, epoch, from * 64 + to, 100 + number);
  }
  std::int32_t integer(int epoch, int rank, int i) const {
    return static_cast<std::int32_t>(mix(seed, epoch, rank, 200 + i));
  }
  bool goes(int epoch, int source, int token, int rank) const {
    return mix(seed, epoch, source * 64 + token, 300 + rank) % 3 != 0;
  }
  bool goes_into(int epoch, int source, int token, int domain) const {
    for (int i = 0; i < topology().domain_size; ++i)
      if (goes(epoch, source, token, topology().rank_of(domain, i))) return true;
    return false;
  }

 private:
  int pick(int n, char what) const { return static_cast<int>(mix(seed, what) % n); }
  bool barrier_at(int epoch) const {
    return scenario.fate != Fate::none && scenario.fate != Fate::all_leave && epoch >= 3;
  }

  WindowShape shape_of() const {
    const int domains = scenario.domains ? scenario.domains : 1 + pick(2, 'd');
    const int alive = scenario.fate == Fate::dies_telling ? 4 : 2 + pick(3, 'r');
    const int R = domains > 1 ? 4 : alive;
    WindowShape shape{};
    shape.topology = {R, R / domains};
    shape.slices = 1 + pick(2, 'c');
    shape.slots = 1 + pick(2, 's');
    shape.pull_tokens = 1 + pick(2, 't');
    shape.push_tokens = 1 + pick(2, 'u');
    shape.pull_row_bytes = shape.push_row_bytes = kRowBytes;
    shape.mail_bytes = (2 + 4 * pick(2, 'm')) * kRecordBytes;  // a piece that lanes share, or three
    shape.board_ints = kMostInts;
    shape.registered_rows = kMostTokens;
    shape.landed_rows = domains == 1 && pick(2, 'a') == 1 ? kMostTokens : 0;
    return shape;
  }

  int tokens(int epoch, int rank) const {
    return static_cast<int>(mix(seed, epoch, rank, 1) % (kMostTokens + 1));
  }
  int num_records(int epoch, int from, int to) const {
    return static_cast<int>(mix(seed, epoch, from * 64 + to, 2) % 7);
  }

  Plan plan(int epoch, int me) const {
    Plan plan;
    const int R = topology().ranks;
    for (int r = 0; r < R; ++r) {
      plan.tokens_of.push_back(tokens(epoch, r));
      plan.registered.push_back(mix(seed, epoch, r, 4) % 3 == 0);
      plan.send_splits.push_back(num_records(epoch, me, r));
      plan.recv_splits.push_back(num_records(epoch, r, me));
      for (int i = 0; i < plan.send_splits[r]; ++i) plan.records.push_back(record(epoch, me, r, i));
    }
    for (int i = static_cast<int>(mix(seed, epoch, 3) % (kMostInts + 1)); i > 0; --i)
      plan.ints.push_back(integer(epoch, me, static_cast<int>(plan.ints.size())));
    for (int token = 0; token < plan.tokens_of[me]; ++token) {
      plan.x.push_back(row(epoch, me, token, me));
      list_if(plan.home_rank, R, [&](int rank) { return goes(epoch, me, token, rank); });
    }
    list_arrivals(plan, epoch, me);
    list_relayed(plan, epoch, me);
    return plan;
  }
  /// Appends the numbers below n that qualify, then -1 up to n of them.
  template <class Qualifies>
  static void list_if(std::vector<std::int32_t>& list, int n, const Qualifies& qualifies) {
    const std::size_t end = list.size() + n;
    for (int i = 0; i < n; ++i)
      if (qualifies(i)) list.push_back(i);
    list.resize(end, -1);
  }
  void list_arrivals(Plan& plan, int epoch, int me) const {
    for (int source = 0; source < topology().ranks; ++source) {
      plan.arrival_base.push_back(static_cast<int>(plan.arrival_token.size()));
      for (int token = 0; token < plan.tokens_of[source]; ++token)
        if (goes(epoch, source, token, me)) {
          plan.arrival_token.push_back(token);
          plan.y.push_back(row(epoch, source, token, me));
        }
    }
    plan.arrival_base.push_back(static_cast<int>(plan.arrival_token.size()));
  }
  void list_relayed(Plan& plan, int epoch, int me) const {
    const int here = topology().domain(me);
    for (int domain = 0; domain < topology().domains(); ++domain) {
      const int source = topology().rank_of(domain, topology().index(me));
      plan.relay_base.push_back(static_cast<int>(plan.relay_token.size()));
      for (int token = 0; token < plan.tokens_of[source]; ++token) {
        if (!goes_into(epoch, source, token, here)) continue;
        plan.relay_token.push_back(token);
        list_if(plan.members, topology().ranks, [&](int index) {
          return index < topology().domain_size &&
                 goes(epoch, source, token, topology().rank_of(here, index));
        });
      }
    }
    plan.relay_base.push_back(static_cast<int>(plan.relay_token.size()));
  }

  std::vector<std::vector<Plan>> plans_;
};

}  // namespace flexep::sim
