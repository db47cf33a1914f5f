// The router's text for a warp that keeps a token in its registers: few experts, in groups of whole 32s. Lane e % 32
// has expert e, so that sums have the order of route_warp.h, whose bits these are. Loops run over all registers without
// looking at e, which lets a GPU work on several experts at a time; registers behind the last expert have key 0.
#pragma once
#include <cstdint>

#include "base/team.h"
#include "ops/route_math.h"
#include "ops/route_warp.h"

namespace flexep {

inline constexpr int kLaneExperts = 8;    // registers of a lane
inline constexpr int kAtOnceExperts = 4;  // those that are worked on together, or skipped together

FLEXEP_HD bool fits_registers(const RouteRule& rule, int experts) {
  const bool whole = rule.num_groups == 1 || experts / rule.num_groups % kWarpLanes == 0;
  return whole && experts <= kLaneExperts * kWarpLanes;
}

/// Calls body(j, e) for this lane's registers j and their experts e = 32 j + lane, ascending; some e may be no expert.
template <class Warp, class Body>
FLEXEP_HD void each_held(const Warp& warp, int experts, const Body& body) {
  FLEXEP_HD_UNROLL
  for (int first = 0; first < kLaneExperts; first += kAtOnceExperts) {
    if (first * kWarpLanes >= experts) continue;
    FLEXEP_HD_UNROLL
    for (int j = first; j < first + kAtOnceExperts; ++j) body(j, j * kWarpLanes + warp.rank());
  }
}

/// What a lane has of its token.
struct Held {
  float logit[kLaneExperts] = {}, score[kLaneExperts] = {};
  std::uint32_t key[kLaneExperts] = {};
};

template <class Warp>
FLEXEP_HD void score_sigmoid(const Warp& warp, Held& h, int experts) {
  bool tail = false;
  each_held(warp, experts, [&](int j, int) { tail |= h.logit[j] < kSigmoidTail; });
  if (tail)
    each_held(warp, experts, [&](int j, int) { h.score[j] = sigmoid_fixed(h.logit[j]); });
  else
    each_held(warp, experts, [&](int j, int) { h.score[j] = sigmoid_fixed<false>(h.logit[j]); });
}

/// Keys of scores or logits, and of the bias on top.
template <class Warp>
FLEXEP_HD void key_held(const Warp& warp, Held& h, int experts, bool by_score, const float* bias) {
  const float* const own = bias ? bias + warp.rank() : nullptr;
  each_held(warp, experts, [&](int j, int e) {
    float key = by_score ? h.score[j] : h.logit[j];
    if (own && e < experts) key = key + own[j * kWarpLanes];
    h.key[j] = e < experts ? order_of(key) : 0;
  });
}

/// exp(logit - high) into scores, given keys of logits; returns high. Where that is no finite number all scores are 0,
/// and so is their sum, by which they are divided: NaN.
template <class Warp>
FLEXEP_HD float score_exp(const Warp& warp, Held& h, int experts) {
  std::uint32_t most = 0;
  each_held(warp, experts, [&](int j, int) { most = h.key[j] > most ? h.key[j] : most; });
  const float high = of_order(warp.max(most));
  each_held(warp, experts, [&](int j, int) { h.score[j] = exp_falling_number(h.logit[j] - high); });
  return high;
}

/// Scores of all experts, as score_all; of softmax given keys of logits.
template <class Warp>
FLEXEP_HD Spread score_held(const Warp& warp, const RouteRule& rule, Held& h, int experts) {
  float high = 0.0f, total = 0.0f;
  if (rule.is_softmax())
    high = score_exp(warp, h, experts);
  else if (rule.score == Score::sigmoid)
    score_sigmoid(warp, h, experts);
  else
    each_held(warp, experts, [&](int j, int) { h.score[j] = sqrt_softplus_fixed(h.logit[j]); });
  each_held(warp, experts, [&](int j, int e) { total += e < experts ? h.score[j] : 0.0f; });
  return {high, warp.sum(total)};
}

/// Probabilities out, where they are asked for; those of softmax take the place of the scores.
template <class Warp>
FLEXEP_HD void divide_held(const Warp& warp, const RouteRule& rule, Held& h, int experts, float total,
                           float* probs) {
  const float sum = rule.is_softmax() ? total : total + kRouteEpsilon;
  float* const own = probs ? probs + warp.rank() : nullptr;
  each_held(warp, experts, [&](int j, int e) {
    const float prob = h.score[j] / sum;
    if (own && e < experts) own[j * kWarpLanes] = canonical(prob);
    h.score[j] = rule.is_softmax() ? prob : h.score[j];
  });
}

/// Whether more than one lane said yes.
FLEXEP_HD bool is_tie(std::uint32_t votes) { return (votes & (votes - 1)) != 0; }

/// Bit g: group g is among the best. Lane g holds the key of group g; of equal ones the lower group wins.
template <class Warp>
FLEXEP_HD std::uint32_t best_groups(const Warp& warp, const RouteRule& rule, std::uint32_t mine) {
  int better = 0;
  FLEXEP_HD_UNROLL
  for (int g = 0; g < kLaneExperts; ++g) {
    const std::uint32_t other = warp.from(mine, g);
    better += g < rule.num_groups && (other > mine || (other == mine && g < warp.rank()));
  }
  return warp.vote(warp.rank() < rule.num_groups && better < rule.topk_groups);
}

/// Sets the keys of all experts outside the best groups to that of -inf. A group is `each` registers of all lanes.
template <class Warp>
FLEXEP_HD void keep_best_held(const Warp& warp, const RouteRule& rule, Held& h, int experts) {
  const int each = experts / rule.num_groups / kWarpLanes;
  std::uint32_t best = 0, next = 0, first = 0, second = 0;  // of group `rank`, of this lane's part of a group
  int g = 0, left = each;
  each_held(warp, experts, [&](int j, int) {
    const std::uint32_t key = h.key[j], low = key < first ? key : first;
    first = key > first ? key : first;
    second = low > second ? low : second;
    if (--left > 0) return;
    const std::uint32_t top = warp.max(first);
    const bool tie = is_tie(warp.vote(first == top));
    const std::uint32_t behind = warp.max(first == top && !tie ? second : first);
    if (warp.rank() == g) best = top, next = behind;
    first = second = 0, left = each, ++g;
  });
  const std::uint32_t chosen =
      best_groups(warp, rule, rule.top2 ? order_of(of_order(best) + of_order(next)) : best);
  g = 0, left = each;
  each_held(warp, experts, [&](int j, int e) {
    if (e < experts && !(chosen >> g & 1)) h.key[j] = kOrderOut;
    if (--left == 0) left = each, ++g;
  });
}

/// Ids of the best keys into taken[top_k], as take_best: each by the lane that had it.
template <class Warp>
FLEXEP_HD void take_held(const Warp& warp, const Held& h, int experts, int top_k, std::uint32_t* taken) {
  Best mine;
  each_held(warp, experts, [&](int j, int e) { mine.see(h.key[j], static_cast<std::uint32_t>(e)); });
  for (int k = 0; k < top_k; ++k) {
    const std::uint32_t key = warp.max(mine.key);
    bool won = mine.key == key;
    if (is_tie(warp.vote(won))) won = mine.at == warp.min(won ? mine.at : 0xffffffffu);
    if (!won) continue;
    const std::uint32_t at = mine.at;
    taken[k] = at;
    mine.key = mine.next_key, mine.at = mine.next_at;
    if (--mine.left > 0) continue;
    mine =
        Best{};  // few lanes give more than two: they look again, among the keys behind the last that was taken
    each_held(warp, experts, [&](int j, int e) {
      const auto index = static_cast<std::uint32_t>(e);
      const bool behind = h.key[j] < key || (h.key[j] == key && index > at);
      mine.see(behind ? h.key[j] : 0, index);
    });
  }
  warp.sync();
}

/// route_token for what fits_registers. `taken` are words [top_k] of shared memory.
template <class Warp, class Logit>
FLEXEP_HD void route_held(const Warp& warp, const RouteArgs& a, std::int64_t token, std::uint32_t* taken) {
  const RouteRule& rule = a.rule;
  if (write_padding(warp, a, token)) return;
  const Logit *const row = static_cast<const Logit*>(a.logits) + token * a.experts, *const own =
                                                                                        row + warp.rank();
  float* const probs = a.probs ? a.probs + token * a.experts : nullptr;
  const bool by_score = rule.by_score(a.bias != nullptr);
  Held h;
  each_held(warp, a.experts, [&](int j, int e) {
    if (e < a.experts) h.logit[j] = widen(own[j * kWarpLanes]);
  });
  if (!by_score || rule.is_softmax()) key_held(warp, h, a.experts, false, nullptr);
  Spread spread = {0.0f, 0.0f};
  if (probs || by_score || rule.score == Score::softmax) spread = score_held(warp, rule, h, a.experts);
  if (probs || (by_score && rule.is_softmax())) divide_held(warp, rule, h, a.experts, spread.total, probs);
  if (by_score || a.bias) key_held(warp, h, a.experts, by_score, a.bias);
  if (rule.num_groups > 1) keep_best_held(warp, rule, h, a.experts);
  take_held(warp, h, a.experts, rule.top_k, taken);
  const int id = warp.rank() < rule.top_k ? static_cast<int>(taken[warp.rank()]) : 0;
  write_chosen(warp, a, token, id, widen(row[id]), spread);
}

}  // namespace flexep
