// The router's text for a warp: 32 lanes a token, experts dealt to lanes e % 32, one chosen expert in each lane. Warp
// is rank(), sync(), max(unsigned), min(unsigned), vote(bool) and sum(float) over its lanes, swap(x, step) with lane
// rank() ^ step, from(x, lane), and load and store of 16 bytes; a GPU's warp in route.cu, 32 fibers in
// tests/ops/route_lanes.cpp. route_cpu.cpp says the same for one lane, in other words. Tokens of few experts stay in
// registers: route_registers.h.
#pragma once
#include <cstdint>

#include "base/team.h"
#include "ops/route_math.h"

namespace flexep {

inline constexpr int kWarpLanes = 32;

/// What a warp keeps of its token, in shared memory.
struct RouteScratch {
  float* logit;          // [experts]
  std::uint32_t* word;   // [experts] bits of scores, then keys; in the backward bits of gradients
  std::uint32_t* group;  // [num_groups] keys of groups

  /// 4-byte words of a warp, in whole units of 16 bytes; the backward keeps no groups.
  FLEXEP_HD static std::int64_t words(int experts, int groups) {
    return (2ll * experts + groups + 3) / 4 * 4;
  }
  FLEXEP_HD static RouteScratch at(std::uint32_t* words, int experts) {
    return {reinterpret_cast<float*>(words), words + experts, words + 2ll * experts};
  }
};

struct alignas(16) Packet {
  std::uint32_t word[4];
};

#if defined(__CUDACC__)
#define FLEXEP_UNROLL _Pragma("unroll 4")
#else
#define FLEXEP_UNROLL
#endif

/// Calls body(i) for this lane's share of count, ascending.
template <class Warp, class Body>
FLEXEP_HD void each_own(const Warp& warp, int count, const Body& body) {
  FLEXEP_UNROLL
  for (int i = warp.rank(); i < count; i += kWarpLanes) body(i);
}

FLEXEP_HD float widen(float x) { return x; }
FLEXEP_HD float widen(std::uint16_t x) { return bf16_to_f32(x); }
FLEXEP_HD void narrow_to(float& out, float x) { out = canonical(x); }
FLEXEP_HD void narrow_to(std::uint16_t& out, float x) { out = f32_to_bf16(x); }

/// 16 bytes of logits to fp32.
template <class Warp>
FLEXEP_HD void unpack(const Warp& warp, float* to, const Packet& p, float) {
  warp.store(to, p);
}
template <class Warp>
FLEXEP_HD void unpack(const Warp& warp, float* to, const Packet& p, std::uint16_t) {
  constexpr std::uint32_t kHigh = 0xffff0000u;
  warp.store(to, {p.word[0] << 16, p.word[0] & kHigh, p.word[1] << 16, p.word[1] & kHigh});
  warp.store(to + 4, {p.word[2] << 16, p.word[2] & kHigh, p.word[3] << 16, p.word[3] & kHigh});
}

/// Logits of one token to fp32, 16 bytes a lane where every row begins on 16 bytes.
template <class Warp, class Logit>
FLEXEP_HD void load_row(const Warp& warp, float* to, const Logit* row, int experts) {
  constexpr int kEach = 16 / sizeof(Logit);
  const bool aligned = experts % kEach == 0 && reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  if (aligned) {
    each_own(warp, experts / kEach, [&](int i) {
      unpack(warp, to + i * kEach, warp.load(reinterpret_cast<const Packet*>(row) + i), Logit{});
    });
  } else {
    each_own(warp, experts, [&](int e) { to[e] = widen(row[e]); });
  }
  warp.sync();
}

/// Scores of all experts into words, and their sum: lane e % 32 adds e, ascending; then lane i takes lane i + 16, + 8,
/// + 4, + 2, + 1.
template <class Warp, class ScoreOf>
FLEXEP_HD float sum_scores(const Warp& warp, const RouteScratch& s, int experts, const ScoreOf& score_of) {
  float total = 0.0f;
  each_own(warp, experts, [&](int e) {
    const float score = score_of(s.logit[e]);
    s.word[e] = bits_of(score);
    total += score;
  });
  return warp.sum(total);
}

/// The largest logit (0 where no softmax is taken) and the sum of the scores before they are divided by it.
struct Spread {
  float high, total;
};

/// Scores of all experts into words: exp(logit - high), or the score by itself.
template <class Warp>
FLEXEP_HD Spread score_all(const Warp& warp, const RouteRule& rule, const RouteScratch& s, int experts) {
  if (rule.score == Score::sigmoid)
    return {0.0f, sum_scores(warp, s, experts, [](float logit) { return sigmoid_fixed(logit); })};
  if (rule.score == Score::sqrt_softplus)
    return {0.0f, sum_scores(warp, s, experts, [](float logit) { return sqrt_softplus_fixed(logit); })};
  float high = float_of(0xff800000u);  // -inf. NaN is not greater, but reaches the sum
  each_own(warp, experts, [&](int e) { high = at_least(s.logit[e], high); });
  high = of_order(warp.max(order_of(high)));
  return {high, sum_scores(warp, s, experts, [high](float logit) { return exp_falling(logit - high); })};
}

/// The two largest of a lane's keys that are not taken yet, of equal ones the lower first; key 0: there is none.
struct Best {
  std::uint32_t key = 0, at = 0xffffffffu, next_key = 0, next_at = 0xffffffffu;
  int left = 2;

  FLEXEP_HD void see(std::uint32_t k, std::uint32_t i) {
    if (k > key) {
      next_key = key, next_at = at;
      key = k, at = i;
    } else if (k > next_key) {
      next_key = k, next_at = i;
    }
  }
};

/// Takes `wanted` <= count keys, largest first, of equal ones the lower, and tells take(k, index), in every lane. Lanes
/// read their own keys, i % 32.
template <class Warp, class Take>
FLEXEP_HD void take_best(const Warp& warp, const std::uint32_t* keys, int count, int wanted,
                         const Take& take) {
  Best mine;
  each_own(warp, count, [&](int i) { mine.see(keys[i], static_cast<std::uint32_t>(i)); });
  for (int k = 0; k < wanted; ++k) {
    const std::uint32_t key = warp.max(mine.key);
    const std::uint32_t at = warp.min(mine.key == key ? mine.at : 0xffffffffu);
    take(k, static_cast<int>(at));
    const bool won = mine.at == at;
    mine.key = won ? mine.next_key : mine.key;
    mine.at = won ? mine.next_at : mine.at;
    mine.left -= won;
    if (mine.left > 0) continue;
    mine =
        Best{};  // few lanes give more than two: they look again, among the keys behind the last that was taken
    each_own(warp, count, [&](int i) {
      const auto index = static_cast<std::uint32_t>(i);
      if (keys[i] < key || (keys[i] == key && index > at)) mine.see(keys[i], index);
    });
  }
}

/// How lanes share groups: `each` lanes a group, a power of two, or a lane for every 32nd group.
struct GroupLanes {
  int each, groups, size;

  FLEXEP_HD GroupLanes(int experts, int num_groups)
      : each(1), groups(num_groups), size(experts / num_groups) {
    while (2 * each * groups <= kWarpLanes) each *= 2;
  }
  /// Calls body(g) with the groups of this lane; all lanes call it equally often, some with g >= groups.
  template <class Warp, class Body>
  FLEXEP_HD void each_group(const Warp& warp, const Body& body) const {
    const int first = warp.rank() / each;
    for (int g = first; g - first < groups; g += kWarpLanes / each) body(g);
  }
  /// Calls body(e) with this lane's experts of group g. Groups begin at different ones, so that lanes use different
  /// banks of shared memory.
  template <class Warp, class Body>
  FLEXEP_HD void each_expert(const Warp& warp, int g, const Body& body) const {
    const int steps = (size + each - 1) / each, part = warp.rank() % each;
    int step = g % steps;
    FLEXEP_UNROLL
    for (int i = 0; i < steps; ++i) {
      const int member = step * each + part;
      if (g < groups && member < size) body(g * size + member);
      step = step + 1 == steps ? 0 : step + 1;
    }
  }
};

/// Keys of groups into s.group: that of the best expert, or of the sum of the two best.
template <class Warp>
FLEXEP_HD void score_groups(const Warp& warp, const GroupLanes& lanes, bool top2, const RouteScratch& s) {
  lanes.each_group(warp, [&](int g) {
    std::uint32_t first = 0, second = 0;
    lanes.each_expert(warp, g, [&](int e) {
      const std::uint32_t key = s.word[e], low = key < first ? key : first;
      first = key > first ? key : first;
      second = low > second ? low : second;
    });
    for (int step = 1; step < lanes.each; step *= 2) {
      const std::uint32_t other = warp.swap(first, step), next = warp.swap(second, step);
      const std::uint32_t low = other < first ? other : first, high = next > second ? next : second;
      first = other > first ? other : first;
      second = low > high ? low : high;
    }
    if (g >= lanes.groups || warp.rank() % lanes.each != 0) return;
    s.group[g] = top2 && lanes.size > 1 ? order_of(of_order(first) + of_order(second)) : first;
  });
  warp.sync();
}

/// Sets the keys of all experts outside the best groups to that of -inf.
template <class Warp>
FLEXEP_HD void keep_best_groups(const Warp& warp, const RouteRule& rule, const RouteScratch& s, int experts) {
  const GroupLanes lanes(experts, rule.num_groups);
  score_groups(warp, lanes, rule.top2, s);
  take_best(warp, s.group, rule.num_groups, rule.topk_groups, [&](int, int g) {
    if (warp.rank() == g % kWarpLanes) s.group[g] = 0;  // by the lane that reads it
  });
  warp.sync();
  lanes.each_group(warp, [&](int g) {
    if (g >= lanes.groups || s.group[g] == 0) return;
    lanes.each_expert(warp, g, [&](int e) { s.word[e] = kOrderOut; });
  });
  warp.sync();
}

/// Keys of the choice into words, where score_all may have left scores; and probabilities on the way.
template <class Warp>
FLEXEP_HD void make_keys(const Warp& warp, const RouteArgs& a, const RouteScratch& s, float total,
                         float* probs) {
  const RouteRule& rule = a.rule;
  const bool by_score = rule.by_score(a.bias != nullptr);
  const auto set = [&](int e, float key) { s.word[e] = order_of(a.bias ? key + a.bias[e] : key); };
  if (probs || (by_score && rule.is_softmax())) {
    const float sum = rule.is_softmax() ? total : total + kRouteEpsilon;
    each_own(warp, a.experts, [&](int e) {
      const float score = float_of(s.word[e]), prob = score / sum;
      if (probs) probs[e] = canonical(prob);
      set(e, !by_score ? s.logit[e] : rule.is_softmax() ? prob : score);
    });
  } else if (!by_score) {
    each_own(warp, a.experts, [&](int e) { set(e, s.logit[e]); });
  } else if (rule.score == Score::sigmoid) {
    each_own(warp, a.experts, [&](int e) { set(e, sigmoid_fixed(s.logit[e])); });
  } else {
    each_own(warp, a.experts, [&](int e) { set(e, sqrt_softplus_fixed(s.logit[e])); });
  }
  warp.sync();
}

/// This lane's share of the softmax over the chosen logits; 0 in lanes without one.
template <class Warp>
FLEXEP_HD float share_of_chosen(const Warp& warp, float logit, bool has) {
  const float high = of_order(warp.max(has ? order_of(logit) : 0));
  const float part = has ? exp_falling(logit - high) : 0.0f;
  return part / warp.sum(part);
}

/// Whether the token is padding; its outputs are then written.
template <class Warp>
FLEXEP_HD bool write_padding(const Warp& warp, const RouteArgs& a, std::int64_t token) {
  if (!a.padding || !a.padding[token]) return false;
  const std::int64_t at = token * a.rule.top_k + warp.rank();
  if (a.probs) each_own(warp, a.experts, [&](int e) { a.probs[token * a.experts + e] = 0.0f; });
  if (warp.rank() < a.rule.top_k) a.ids[at] = -1, a.weights[at] = 0.0f;
  return true;
}

/// Writes ids and weights of the chosen experts, one a lane; `logit` is that of this lane's.
template <class Warp>
FLEXEP_HD void write_chosen(const Warp& warp, const RouteArgs& a, std::int64_t token, int id, float logit,
                            const Spread& spread) {
  const RouteRule& rule = a.rule;
  const bool has = warp.rank() < rule.top_k;
  float weight = 0.0f;
  if (rule.score == Score::softmax_after)
    weight = share_of_chosen(warp, logit, has);
  else if (has)
    weight = rule.score == Score::softmax ? exp_falling(logit - spread.high) / spread.total
                                          : score_of(rule.score, logit);
  if (rule.divides()) weight = weight / (warp.sum(weight) + kRouteEpsilon);
  const std::int64_t at = token * rule.top_k + warp.rank();
  if (has) a.ids[at] = id, a.weights[at] = canonical(weight * rule.scaling);
}

template <class Warp, class Logit>
FLEXEP_HD void route_token(const Warp& warp, const RouteArgs& a, std::int64_t token, const RouteScratch& s) {
  const RouteRule& rule = a.rule;
  if (write_padding(warp, a, token)) return;
  float* const probs = a.probs ? a.probs + token * a.experts : nullptr;
  load_row(warp, s.logit, static_cast<const Logit*>(a.logits) + token * a.experts, a.experts);
  Spread spread = {0.0f, 0.0f};
  if (probs || rule.score == Score::softmax) spread = score_all(warp, rule, s, a.experts);
  make_keys(warp, a, s, spread.total, probs);
  if (rule.num_groups > 1) keep_best_groups(warp, rule, s, a.experts);
  int id = 0;
  take_best(warp, s.word, a.experts, rule.top_k, [&](int k, int e) { id = warp.rank() == k ? e : id; });
  write_chosen(warp, a, token, id, warp.rank() < rule.top_k ? s.logit[id] : 0.0f, spread);
}

/// Gradient of a chosen expert's logit by the weights; for softmax of its score, since the others depend on it too.
template <class Warp>
FLEXEP_HD float chosen_grad(const Warp& warp, const RouteRule& rule, float logit, float score, float grad,
                            bool has) {
  if (rule.score == Score::softmax_after) {
    const float share = share_of_chosen(warp, logit, has);
    return share * (grad - warp.sum(0.0f + grad * share));
  }
  float by_score = grad;
  if (rule.divides()) {
    const float sum = warp.sum(score) + kRouteEpsilon;
    by_score = (grad - warp.sum(0.0f + grad * (score / sum))) / sum;
  }
  return rule.score == Score::softmax ? by_score : by_score * slope_of(rule.score, logit, score);
}

/// Gradients by the probabilities into words: of logits, or for softmax still of probabilities. Scores are in words;
/// those of softmax take the place of the logits.
template <class Warp>
FLEXEP_HD void spread_grad(const Warp& warp, const RouteRule& rule, const RouteScratch& s, int experts,
                           float sum, const float* grad) {
  float inner = 0.0f;
  each_own(warp, experts, [&](int e) {
    const float score = float_of(s.word[e]), prob = score / sum;
    const float g = grad ? grad[e] : 0.0f;
    inner += g * prob;
    if (rule.is_softmax()) s.logit[e] = prob, s.word[e] = bits_of(g);
  });
  if (rule.score == Score::softmax) return;
  inner = warp.sum(inner);
  each_own(warp, experts, [&](int e) {
    float by_logit;
    if (rule.is_softmax()) {
      by_logit = s.logit[e] * (float_of(s.word[e]) - inner);
    } else {
      const float score = float_of(s.word[e]);
      by_logit = (grad[e] - inner) / sum * slope_of(rule.score, s.logit[e], score);
    }
    s.word[e] = bits_of(by_logit);
  });
}

template <class Warp, class Logit>
FLEXEP_HD void route_grad_token(const Warp& warp, const RouteGradArgs& a, std::int64_t token,
                                const RouteScratch& s) {
  const RouteRule& rule = a.rule;
  const int lane = warp.rank(), K = rule.top_k;
  Logit* const out = static_cast<Logit*>(a.grad_logits) + token * a.experts;
  const int id = lane < K ? a.ids[token * K + lane] : -1;
  if (warp.vote(id >= 0) == 0) {
    each_own(warp, a.experts, [&](int e) { out[e] = Logit{}; });
    return;
  }
  const bool weighs = a.grad_weights != nullptr, has = weighs && id >= 0;
  const float* const grad_probs = a.grad_probs ? a.grad_probs + token * a.grad_probs_stride : nullptr;
  load_row(warp, s.logit, static_cast<const Logit*>(a.logits) + token * a.experts, a.experts);
  const float logit = has ? s.logit[id] : 0.0f;
  warp.sync();  // spread_grad writes over logits that other lanes have chosen
  Spread spread = {0.0f, 0.0f};
  const bool dense = grad_probs || rule.score == Score::softmax;
  if (dense) {
    spread = score_all(warp, rule, s, a.experts);
    const float sum = rule.is_softmax() ? spread.total : spread.total + kRouteEpsilon;
    spread_grad(warp, rule, s, a.experts, sum, grad_probs);
  } else {
    each_own(warp, a.experts, [&](int e) { s.word[e] = 0; });
  }
  if (weighs) {
    float score = 0.0f;
    if (has && rule.score == Score::softmax) score = exp_falling(logit - spread.high) / spread.total;
    if (has && !rule.is_softmax()) score = score_of(rule.score, logit);
    const float grad = has ? a.grad_weights[token * K + lane] * rule.scaling : 0.0f;
    const float by = chosen_grad(warp, rule, logit, score, grad, has);
    warp.sync();  // lanes have written the words of their experts
    if (has) s.word[id] = bits_of(float_of(s.word[id]) + by);
    warp.sync();
  }
  float inner = 0.0f;
  if (rule.score == Score::softmax) {
    each_own(warp, a.experts, [&](int e) { inner += float_of(s.word[e]) * s.logit[e]; });
    inner = warp.sum(inner);
  }
  each_own(warp, a.experts, [&](int e) {
    const float word = float_of(s.word[e]);
    narrow_to(out[e], rule.score == Score::softmax ? s.logit[e] * (word - inner) : word);
  });
}

}  // namespace flexep
