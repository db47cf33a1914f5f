// The router's text for a warp: 32 lanes a token, experts dealt to lanes e % 32, one chosen expert in each lane. Warp is
// rank(), sync(), max(unsigned), min(unsigned), count(bool) and sum(float) over its lanes; a GPU's warp in route.cu, 32
// threads in tests/ops/route_lanes.cpp. route_cpu.cpp says the same for one lane, in other words.
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

FLEXEP_HD float widen(float x) { return x; }
FLEXEP_HD float widen(std::uint16_t x) { return bf16_to_f32(x); }
FLEXEP_HD void narrow_to(float& out, float x) { out = canonical(x); }
FLEXEP_HD void narrow_to(std::uint16_t& out, float x) { out = f32_to_bf16(x); }

FLEXEP_HD void unpack(float* to, const Packet& p, float) {
  for (int i = 0; i < 4; ++i) to[i] = float_of(p.word[i]);
}
FLEXEP_HD void unpack(float* to, const Packet& p, std::uint16_t) {
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = float_of(p.word[i] << 16);
    to[2 * i + 1] = float_of(p.word[i] & 0xffff0000u);
  }
}

/// Logits of one token to fp32, 16 bytes a lane where every row begins on 16 bytes.
template <class Warp, class Logit>
FLEXEP_HD void load_row(const Warp& warp, float* to, const Logit* row, int experts) {
  constexpr int kEach = 16 / sizeof(Logit);
  const bool aligned = experts % kEach == 0 && reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  if (aligned) {
    for (int i = warp.rank(); i < experts / kEach; i += kWarpLanes)
      unpack(to + i * kEach, reinterpret_cast<const Packet*>(row)[i], Logit{});
  } else {
    for (int e = warp.rank(); e < experts; e += kWarpLanes) to[e] = widen(row[e]);
  }
  warp.sync();
}

/// The largest logit (0 where no softmax is taken) and the sum of the scores before they are divided by it.
struct Spread {
  float high, total;
};

/// Scores of all experts into words: exp(logit - high), or the score by itself. Lane e % 32 adds e, ascending; then
/// lane i takes lane i + 16, + 8, + 4, + 2, + 1.
template <class Warp>
FLEXEP_HD Spread score_all(const Warp& warp, const RouteRule& rule, const RouteScratch& s, int experts) {
  float high = 0.0f, total = 0.0f;
  if (rule.is_softmax()) {
    std::uint32_t most = 0;
    for (int e = warp.rank(); e < experts; e += kWarpLanes) {
      const std::uint32_t order = order_of(s.logit[e]);
      most = order > most ? order : most;
    }
    high = of_order(warp.max(most));
  }
  for (int e = warp.rank(); e < experts; e += kWarpLanes) {
    const float score = rule.is_softmax() ? exp_fixed(s.logit[e] - high) : score_of(rule.score, s.logit[e]);
    s.word[e] = bits_of(score);
    total += score;
  }
  return {high, warp.sum(total)};
}

struct Best {
  std::uint32_t key, at;
};

/// The largest of this lane's keys, of equal ones the lower; key 0 if all are taken.
template <class Warp>
FLEXEP_HD Best best_of(const Warp& warp, const std::uint32_t* keys, int count) {
  Best best = {0, 0xffffffffu};
  for (int i = warp.rank(); i < count; i += kWarpLanes)
    if (keys[i] > best.key) best = {keys[i], static_cast<std::uint32_t>(i)};
  return best;
}

/// Takes `wanted` <= count keys, largest first, of equal ones the lower, and sets them to 0. Returns the one that
/// lane number `rank` of them is, in lane `rank`.
template <class Warp>
FLEXEP_HD int take_best(const Warp& warp, std::uint32_t* keys, int count, int wanted) {
  Best mine = best_of(warp, keys, count);
  int taken = -1;
  for (int k = 0; k < wanted; ++k) {
    const std::uint32_t key = warp.max(mine.key);
    const std::uint32_t at = warp.min(mine.key == key ? mine.at : 0xffffffffu);
    if (warp.rank() == k) taken = static_cast<int>(at);
    if (mine.at == at) {
      keys[at] = 0;
      mine = best_of(warp, keys, count);
    }
  }
  return taken;
}

/// The key of a group of keys: its best, or the sum of its two best.
template <class Warp>
FLEXEP_HD std::uint32_t group_key(const Warp& warp, const std::uint32_t* keys, int size, bool top2) {
  std::uint32_t first = 0, second = 0;
  for (int i = warp.rank(); i < size; i += kWarpLanes) {
    const std::uint32_t key = keys[i];
    second = key > first ? first : key > second ? key : second;
    first = key > first ? key : first;
  }
  const std::uint32_t best = warp.max(first);
  if (!top2 || size == 1) return best;
  const bool twice = warp.count(first == best) > 1;
  const std::uint32_t next = warp.max(first == best && !twice ? second : first);
  return order_of(of_order(best) + of_order(next));
}

/// Sets the keys of all experts outside the best groups to that of -inf.
template <class Warp>
FLEXEP_HD void keep_best_groups(const Warp& warp, const RouteRule& rule, const RouteScratch& s, int experts) {
  const int size = experts / rule.num_groups;
  for (int g = 0; g < rule.num_groups; ++g) {
    const std::uint32_t key = group_key(warp, s.word + g * size, size, rule.top2);
    if (warp.rank() == g % kWarpLanes) s.group[g] = key;
  }
  warp.sync();
  take_best(warp, s.group, rule.num_groups, rule.topk_groups);
  warp.sync();
  for (int e = warp.rank(); e < experts; e += kWarpLanes)
    if (s.group[e / size] != 0) s.word[e] = kOrderOut;
}

/// Scores in words become keys of the choice, and probabilities on the way.
template <class Warp>
FLEXEP_HD void make_keys(const Warp& warp, const RouteArgs& a, const RouteScratch& s, float total,
                         float* probs) {
  const bool by_score = a.rule.by_score(a.bias != nullptr);
  const float sum = a.rule.is_softmax() ? total : total + kRouteEpsilon;
  for (int e = warp.rank(); e < a.experts; e += kWarpLanes) {
    float key = s.logit[e];
    if (probs || by_score) {
      const float score = float_of(s.word[e]), prob = score / sum;
      if (probs) probs[e] = canonical(prob);
      if (by_score) key = a.rule.is_softmax() ? prob : score;
    }
    s.word[e] = order_of(a.bias ? key + a.bias[e] : key);
  }
  warp.sync();
}

/// This lane's share of the softmax over the chosen logits; 0 in lanes without one.
template <class Warp>
FLEXEP_HD float share_of_chosen(const Warp& warp, float logit, bool has) {
  const float high = of_order(warp.max(has ? order_of(logit) : 0));
  const float part = has ? exp_fixed(logit - high) : 0.0f;
  return part / warp.sum(part);
}

template <class Warp, class Logit>
FLEXEP_HD void route_token(const Warp& warp, const RouteArgs& a, std::int64_t token, const RouteScratch& s) {
  const RouteRule& rule = a.rule;
  const int lane = warp.rank(), K = rule.top_k;
  float* const probs = a.probs ? a.probs + token * a.experts : nullptr;
  const bool has = lane < K;
  if (a.padding && a.padding[token]) {
    for (int e = lane; probs && e < a.experts; e += kWarpLanes) probs[e] = 0.0f;
    if (has) a.ids[token * K + lane] = -1, a.weights[token * K + lane] = 0.0f;
    return;
  }
  load_row(warp, s.logit, static_cast<const Logit*>(a.logits) + token * a.experts, a.experts);
  Spread spread = {0.0f, 0.0f};
  if (probs || rule.by_score(a.bias != nullptr) || rule.score == Score::softmax)
    spread = score_all(warp, rule, s, a.experts);
  make_keys(warp, a, s, spread.total, probs);
  if (rule.num_groups > 1) keep_best_groups(warp, rule, s, a.experts);
  const int id = take_best(warp, s.word, a.experts, K);
  const float logit = has ? s.logit[id] : 0.0f;
  float weight = 0.0f;
  if (rule.score == Score::softmax_after)
    weight = share_of_chosen(warp, logit, has);
  else if (has)
    weight = rule.score == Score::softmax ? exp_fixed(logit - spread.high) / spread.total
                                          : score_of(rule.score, logit);
  if (rule.divides()) weight = weight / (warp.sum(weight) + kRouteEpsilon);
  if (has) a.ids[token * K + lane] = id, a.weights[token * K + lane] = canonical(weight * rule.scaling);
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
  for (int e = warp.rank(); e < experts; e += kWarpLanes) {
    const float score = float_of(s.word[e]), prob = score / sum;
    const float g = grad ? grad[e] : 0.0f;
    inner += g * prob;
    if (rule.is_softmax()) s.logit[e] = prob, s.word[e] = bits_of(g);
  }
  if (rule.score == Score::softmax) return;
  inner = warp.sum(inner);
  for (int e = warp.rank(); e < experts; e += kWarpLanes) {
    float by_logit;
    if (rule.is_softmax()) {
      by_logit = s.logit[e] * (float_of(s.word[e]) - inner);
    } else {
      const float score = float_of(s.word[e]);
      by_logit = (grad[e] - inner) / sum * slope_of(rule.score, s.logit[e], score);
    }
    s.word[e] = bits_of(by_logit);
  }
}

template <class Warp, class Logit>
FLEXEP_HD void route_grad_token(const Warp& warp, const RouteGradArgs& a, std::int64_t token,
                                const RouteScratch& s) {
  const RouteRule& rule = a.rule;
  const int lane = warp.rank(), K = rule.top_k;
  Logit* const out = static_cast<Logit*>(a.grad_logits) + token * a.experts;
  const int id = lane < K ? a.ids[token * K + lane] : -1;
  if (warp.count(id >= 0) == 0) {
    for (int e = lane; e < a.experts; e += kWarpLanes) out[e] = Logit{};
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
    for (int e = lane; e < a.experts; e += kWarpLanes) s.word[e] = 0;
  }
  if (weighs) {
    float score = 0.0f;
    if (has && rule.score == Score::softmax) score = exp_fixed(logit - spread.high) / spread.total;
    if (has && !rule.is_softmax()) score = score_of(rule.score, logit);
    const float grad = has ? a.grad_weights[token * K + lane] * rule.scaling : 0.0f;
    const float by = chosen_grad(warp, rule, logit, score, grad, has);
    warp.sync();  // lanes have written the words of their experts
    if (has) s.word[id] = bits_of(float_of(s.word[id]) + by);
    warp.sync();
  }
  float inner = 0.0f;
  if (rule.score == Score::softmax) {
    for (int e = lane; e < a.experts; e += kWarpLanes) inner += float_of(s.word[e]) * s.logit[e];
    inner = warp.sum(inner);
  }
  for (int e = lane; e < a.experts; e += kWarpLanes) {
    const float word = float_of(s.word[e]);
    narrow_to(out[e], rule.score == Score::softmax ? s.logit[e] * (word - inner) : word);
  }
}

}  // namespace flexep
