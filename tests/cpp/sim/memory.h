// The memory that simulated lanes see: no more than the handshake is promised (proto/exchange.h).
//
// - A put is private to its lane until it is drained and then published by a post of the lane, or by its leader's post
//   after a team sync. It may be seen earlier by those who do not look for it, and its source may be read as late as the
//   drain.
// - Every word of data and every signal keeps its history. Clocks say which versions a lane knows; a read returns the
//   newest that it knows or any later one. Only an acquire (a load of a signal) or a sync makes a lane know more.
// - A view is a copy, or the memory itself, until the lane's next sync.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "proto/window.h"
#include "scheduler.h"

namespace flexep::sim {

/// What a lane knows: of each clock, the last tick whose writes it must see. A lane has a clock for what it posts in
/// order and one for messages, which publish nothing but themselves.
using Knowledge = std::vector<std::uint32_t>;

/// What the reader of a post learns.
enum class Publish { all, message, nothing };

class Memory {
 public:
  Memory(const WindowLayout& layout, int lanes, Random& random)
      : layout_(layout),
        random_(random),
        clocks_(2 * lanes),
        newest_(ranks() * cells(), -1),
        words_(ranks()) {
    for (auto& words : words_) words.resize(layout_.faults.at / sizeof(Signal));
    lanes_.resize(lanes);
    for (Lane& lane : lanes_) {
      lane.knows.resize(clocks_);
      lane.seen.resize(words_[0].size(), -1);
    }
  }

  std::function<void(const std::string&)> wrong;
  std::int64_t stale = 0;      // loads of signals that did not return the newest
  std::int64_t ambiguous = 0;  // reads of data that may return more than one version: races

  void put(int lane, int to, std::size_t at, const void* from, std::size_t bytes) {
    check_data(at, bytes);
    Put put{to, at, static_cast<const char*>(from), bytes, {}, 0};
    if (random_.one_in(2)) put.copy();
    if (random_.one_in(4)) land(put, kNobody);
    lanes_[lane].flying.push_back(std::move(put));
  }

  /// Where the lane may write what it puts, until its drain: what lies there before is anything.
  void* target(int lane, int to, std::size_t at, std::size_t bytes) {
    check_data(at, bytes);
    Lane& me = lanes_[lane];
    me.targets.emplace_back(bytes / kCell, kAnything);
    me.flying.push_back({to, at, reinterpret_cast<const char*>(me.targets.back().data()), bytes, {}, 0});
    if (random_.one_in(4)) land(me.flying.back(), kNobody);
    return me.targets.back().data();
  }

  void drain(int lane) {
    Lane& me = lanes_[lane];
    const std::uint32_t tick = ++me.knows[lane];
    for (Put& put : me.flying) {
      put.copy();
      put.clock = lane, put.tick = tick;
      me.drained.push_back(std::move(put));
    }
    me.flying.clear();
    me.targets.clear();
  }

  /// The same for a lane's first `count` puts that are under way.
  void drain_first(int lane, int count) {
    Lane& me = lanes_[lane];
    const std::uint32_t tick = ++me.knows[lane];
    for (; count > 0; --count) {
      Put put = std::move(me.flying.front());
      me.flying.erase(me.flying.begin());
      put.copy();
      put.clock = lane, put.tick = tick;
      me.drained.push_back(std::move(put));
      me.targets.pop_front();
    }
  }

  /// Writes a signal. `all`: whoever reads it knows what this lane knows, its drained puts included.
  void post(int lane, int rank, int to, std::size_t at, Signal signal, Publish publish = Publish::all) {
    check_word(rank, to, at, signal);
    Lane& me = lanes_[lane];
    Posted posted{signal, lane, ++me.knows[lane], Knowledge(clocks_)};
    if (publish == Publish::all) {
      for (const Put& put : me.drained) land(put, put.clock, put.tick);
      me.drained.clear();
      posted.published = me.knows;
    }
    words_[to][at / sizeof(Signal)].push_back(std::move(posted));
  }

  /// Data and the signal that announces it, and nothing else that the lane has put or learnt.
  void message(int lane, int rank, int to, std::size_t at, const void* from, std::size_t bytes,
               std::size_t word_at, Signal signal) {
    check_data(at, bytes);
    Put put{to, at, static_cast<const char*>(from), bytes, {}, 0};
    put.copy();
    const int clock = clocks_ / 2 + lane;
    const std::uint32_t tick = ++lanes_[lane].knows[clock];
    land(put, clock, tick);
    post(lane, rank, to, word_at, signal, Publish::message);
    words_[to][word_at / sizeof(Signal)].back().published[clock] = tick;
  }

  Signal load(int lane, int rank, std::size_t at, bool acquire = true) {
    Lane& me = lanes_[lane];
    const auto& history = words_[rank][at / sizeof(Signal)];
    const int last = static_cast<int>(history.size()) - 1, floor = first_visible(me, rank, at);
    const int chosen = random_.one_in(2) ? last : floor + random_.below(last - floor + 1);
    stale += chosen != last;
    me.seen[at / sizeof(Signal)] = chosen;
    if (chosen < 0) return 0;
    if (acquire) learn(me, history[chosen].published);
    return history[chosen].signal;
  }
  /// Whether the lane has read the newest signal there is.
  bool is_fresh(int lane, int rank, std::size_t at) const {
    return lanes_[lane].seen[at / sizeof(Signal)] + 1 ==
           static_cast<int>(words_[rank][at / sizeof(Signal)].size());
  }
  Signal newest(int rank, std::size_t at) const {
    const auto& history = words_[rank][at / sizeof(Signal)];
    return history.empty() ? 0 : history.back().signal;
  }

  const void* view(int lane, int from, std::size_t at, std::size_t bytes) {
    check_data(at, bytes);
    Lane& me = lanes_[lane];
    me.views.push_back({from, at / kCell, std::vector<std::uint32_t>(bytes / kCell), random_.one_in(2)});
    View& view = me.views.back();
    for (std::size_t i = 0; i < view.words.size(); ++i) view.words[i] = read(me, from, view.cell + i);
    return view.words.data();
  }

  /// What a lane does on its way into a sync: its views end, and its leader takes over what it has drained.
  void come(int lane, int leader) {
    Lane &me = lanes_[lane], &lead = lanes_[leader];
    me.ended.clear();
    for (View& view : me.views) {
      std::fill(view.words.begin(), view.words.end(), kAnything);  // seen by whoever looks at it later
      me.ended.push_back(std::move(view));
    }
    me.views.clear();
    if (lane == leader) return;
    std::move(me.drained.begin(), me.drained.end(), std::back_inserter(lead.drained));
    me.drained.clear();
    lead.knows[lane] = std::max(lead.knows[lane], me.knows[lane]);
  }
  /// What a lane learns from a sync.
  void go(int lane, int leader) { learn(lanes_[lane], lanes_[leader].knows); }
  /// What a lane passes on with a count that it sets: what it knows, and what it has drained so far.
  struct Handover {
    Knowledge knows;
    std::vector<std::size_t> puts;  // in handed_
  };
  Handover hand_over(int lane) {
    Lane& me = lanes_[lane];
    ++me.knows[lane];
    Handover handover{me.knows, {}};
    for (Put& put : me.drained) {
      handover.puts.push_back(handed_.size());
      handed_.push_back(std::move(put));
    }
    me.drained.clear();
    return handover;
  }
  void take_over(int lane, const Handover& handover) {
    learn(lanes_[lane], handover.knows);
    for (const std::size_t put : handover.puts) lanes_[lane].drained.push_back(handed_[put]);
  }
  void end_views(int lane) { come(lane, lane); }
  /// The lane has read a view to this place: nothing more, if that is its end.
  void end_view(int lane, const void* end) {
    auto& views = lanes_[lane].views;
    std::erase_if(views, [end](const View& view) { return view.words.data() + view.words.size() == end; });
  }

  /// Everybody learns what everybody knows, as when threads are joined: what they have drained is in place.
  void meet(const std::vector<int>& lanes) {
    Knowledge all(clocks_);
    for (int lane : lanes) {
      for (const Put& put : lanes_[lane].drained) land(put, put.clock, put.tick);
      lanes_[lane].drained.clear();
    }
    for (int lane : lanes) learn(all, lanes_[lane].knows);
    for (int lane : lanes) learn(lanes_[lane].knows, all);
  }

 private:
  static constexpr std::size_t kCell = sizeof(std::uint32_t);
  static constexpr std::uint32_t kAnything = 0xeeeeeeeeu;
  static constexpr int kNobody = -1;  // the clock of what nobody need see

  struct Put {
    int to;
    std::size_t at;
    const char* from;  // null once copied
    std::size_t bytes;
    std::vector<std::uint32_t> words;
    int clock;
    std::uint32_t tick = 0;

    void copy() {
      if (!from) return;
      words.resize(bytes / kCell);
      std::memcpy(words.data(), from, bytes);
      from = nullptr;
    }
  };
  struct Version {
    std::uint32_t value;
    int clock;
    std::uint32_t tick;
    int older;  // in versions_
  };
  struct Posted {
    Signal signal;
    int clock;
    std::uint32_t tick;
    Knowledge published;
  };
  struct View {
    int rank;
    std::size_t cell;
    std::vector<std::uint32_t> words;
    bool live;  // the memory itself, not a copy
  };
  struct Lane {
    Knowledge knows;
    std::vector<Put> flying, drained;
    std::vector<int> seen;  // of each word of its own window, the last version read
    std::deque<View> views, ended;
    std::deque<std::vector<std::uint32_t>> targets;
  };

  std::size_t ranks() const { return layout_.shape.topology.ranks; }
  std::size_t cells() const { return layout_.bytes / kCell; }

  static void learn(Knowledge& knows, const Knowledge& more) {
    for (std::size_t i = 0; i < knows.size(); ++i) knows[i] = std::max(knows[i], more[i]);
  }
  static void learn(Lane& lane, const Knowledge& more) { learn(lane.knows, more); }

  int first_visible(const Lane& me, int rank, std::size_t at) const {
    const auto& history = words_[rank][at / sizeof(Signal)];
    int floor = static_cast<int>(history.size()) - 1;
    const int seen = me.seen[at / sizeof(Signal)];
    while (floor > seen && history[floor].tick > me.knows[history[floor].clock]) --floor;
    return floor;
  }

  std::uint32_t read(const Lane& me, int rank, std::size_t cell) {
    int versions = 1, floor = newest_[rank * cells() + cell];
    for (; floor >= 0 && !knows(me, versions_[floor]); floor = versions_[floor].older) ++versions;
    ambiguous += versions > 1;
    int chosen = newest_[rank * cells() + cell];
    for (int skip = random_.below(versions); skip > 0; --skip) chosen = versions_[chosen].older;
    return chosen < 0 ? 0 : versions_[chosen].value;
  }
  static bool knows(const Lane& me, const Version& version) {
    return version.clock != kNobody && version.tick <= me.knows[version.clock];
  }

  void land(const Put& put, int clock, std::uint32_t tick = 0) {
    std::vector<std::uint32_t> early(put.from ? put.bytes / kCell : 0);
    if (put.from) std::memcpy(early.data(), put.from, put.bytes);
    const std::vector<std::uint32_t>& words = put.from ? early : put.words;
    for (std::size_t i = 0; i < words.size(); ++i) {
      int& newest = newest_[put.to * cells() + put.at / kCell + i];
      versions_.push_back({words[i], clock, tick, newest});
      newest = static_cast<int>(versions_.size()) - 1;
    }
    for (Lane& lane : lanes_)
      for (View& view : lane.views)
        if (view.rank == put.to) show(view, put.at / kCell, words);
  }
  /// What lands under an open view is a race; a view of the memory itself may show it.
  void show(View& view, std::size_t cell, const std::vector<std::uint32_t>& words) {
    const std::size_t begin = std::max(cell, view.cell);
    const std::size_t end = std::min(cell + words.size(), view.cell + view.words.size());
    for (std::size_t i = begin; i < end; ++i) {
      ++ambiguous;
      if (view.live) view.words[i - view.cell] = words[i - cell];
    }
  }

  void check_data(std::size_t at, std::size_t bytes) const {
    if (at % kCell || bytes % kCell || at < layout_.faults.at || at + bytes > layout_.bytes)
      wrong("data outside the window's arrays");
  }
  void check_word(int rank, int to, std::size_t at, Signal signal) const {
    int kind = 0;
    while (kind < kWordKinds && at >= layout_.words[kind].at + layout_.words[kind].bytes()) ++kind;
    if (kind == kWordKinds || at < layout_.words[kind].at) wrong("signal outside the words");
    const int index = static_cast<int>((at - layout_.words[kind].at) / sizeof(Signal) % ranks());
    if (writer_of(static_cast<Word>(kind), index, to) != rank) wrong("a word has another writer");
    const Signal now = newest(to, at);
    if (static_cast<Word>(kind) != Word::stopped && now != 0 && has_reached(now, signal))
      wrong("a word does not grow");
  }
  /// The table of proto/words.h, read a second time.
  int writer_of(Word word, int index, int reader) const {
    const Topology& topology = layout_.shape.topology;
    switch (word) {
      case Word::relay_delivered:
      case Word::relay_consumed:
      case Word::relay_credit:
      case Word::relay_offered:
        return topology.domain(reader) * topology.domain_size + index % topology.domain_size;
      default:
        return index;
    }
  }

  const WindowLayout& layout_;
  Random& random_;
  int clocks_;
  std::vector<Version> versions_;
  std::vector<int> newest_;                              // [rank][cell] into versions_
  std::vector<std::vector<std::vector<Posted>>> words_;  // [rank][word] history
  std::vector<Lane> lanes_;
  std::deque<Put> handed_;
};

}  // namespace flexep::sim
