// The router for one lane: the specification of route_warp.h, token by token.
#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "ops/route.h"
#include "ops/route_math.h"

namespace flexep {
namespace {

constexpr int kLanes = 32;

/// Element i is added to lane i % 32 of 32 that start at +0; then lane i takes lane i + 16, + 8, + 4, + 2, + 1.
float lane_sum(const float* values, int count) {
  float lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i % kLanes] += values[i];
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
}

/// Of NaN and numbers NaN is the largest.
float largest(const float* values, int count) {
  std::uint32_t most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, order_of(values[i]));
  return of_order(most);
}

/// softmax of count values in place: exp(value - largest) over their sum.
void softmax(float* values, int count) {
  const float high = largest(values, count);
  for (int i = 0; i < count; ++i) values[i] = exp_falling(values[i] - high);
  const float total = lane_sum(values, count);
  for (int i = 0; i < count; ++i) values[i] = values[i] / total;
}

/// Indices of the k largest keys, largest first, of equal ones the lower first.
void take_best(int* taken, const std::uint32_t* keys, int count, int k) {
  int held = 0;
  for (int i = 0; i < count; ++i) {
    if (held == k && keys[i] <= keys[taken[k - 1]]) continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && keys[taken[at - 1]] < keys[i]; --at) taken[at] = taken[at - 1];
    taken[at] = i;
  }
}

struct Token {
  std::vector<float> logit, score, term, chosen;
  std::vector<std::uint32_t> key, group;
  std::vector<int> id;

  Token(int experts, const RouteRule& rule)
      : logit(experts),
        score(experts),
        term(experts),
        chosen(3 * rule.top_k),
        key(experts),
        group(rule.num_groups),
        id(std::max(rule.top_k, rule.topk_groups)) {}

  void load(const void* logits, DType dtype, std::int64_t token) {
    const auto experts = static_cast<std::int64_t>(logit.size());
    for (std::int64_t e = 0; e < experts; ++e) logit[e] = load_logit(logits, dtype, token * experts + e);
  }

  /// softmax over all experts, or the score of each by itself.
  void score_all(const RouteRule& rule) {
    const int experts = static_cast<int>(logit.size());
    for (int e = 0; e < experts; ++e)
      score[e] = rule.is_softmax() ? logit[e] : score_of(rule.score, logit[e]);
    if (rule.is_softmax()) softmax(score.data(), experts);
  }

  /// The sum by which scores become probabilities; those of softmax are.
  float score_sum(const RouteRule& rule) const {
    return rule.is_softmax() ? 1.0f : lane_sum(score.data(), static_cast<int>(score.size())) + kRouteEpsilon;
  }

  void keep_best_groups(const RouteRule& rule) {
    const int size = static_cast<int>(key.size()) / rule.num_groups;
    for (int g = 0; g < rule.num_groups; ++g) {
      int best[2];
      const std::uint32_t* const keys = &key[g * size];
      take_best(best, keys, size, std::min(size, 2));
      group[g] =
          rule.top2 && size > 1 ? order_of(of_order(keys[best[0]]) + of_order(keys[best[1]])) : keys[best[0]];
    }
    take_best(id.data(), group.data(), rule.num_groups, rule.topk_groups);
    std::fill(group.begin(), group.end(), 0u);
    for (int i = 0; i < rule.topk_groups; ++i) group[id[i]] = 1;
    for (std::size_t e = 0; e < key.size(); ++e)
      if (!group[e / size]) key[e] = kOrderOut;
  }

  /// Scores of the chosen experts, before anything divides or scales them.
  void score_chosen(const RouteRule& rule) {
    for (int k = 0; k < rule.top_k; ++k) {
      const int e = id[k];
      chosen[k] = rule.score == Score::softmax         ? score[e]
                  : rule.score == Score::softmax_after ? logit[e]
                                                       : score_of(rule.score, logit[e]);
    }
    if (rule.score == Score::softmax_after) softmax(chosen.data(), rule.top_k);
  }
};

void route_token(const RouteArgs& a, std::int64_t token, Token& t) {
  const RouteRule& rule = a.rule;
  const int K = rule.top_k;
  float* const weights = a.weights + token * K;
  float* const probs = a.probs ? a.probs + token * a.experts : nullptr;
  if (a.padding && a.padding[token]) {
    std::fill_n(a.ids + token * K, K, -1);
    std::fill_n(weights, K, 0.0f);
    if (probs) std::fill_n(probs, a.experts, 0.0f);
    return;
  }
  t.load(a.logits, a.dtype, token);
  const bool by_score = rule.by_score(a.bias != nullptr);
  if (probs || by_score || rule.score == Score::softmax) t.score_all(rule);
  if (probs) {
    const float sum = t.score_sum(rule);
    for (int e = 0; e < a.experts; ++e) probs[e] = canonical(t.score[e] / sum);
  }
  for (int e = 0; e < a.experts; ++e) {
    const float key = by_score ? t.score[e] : t.logit[e];
    t.key[e] = order_of(a.bias ? key + a.bias[e] : key);
  }
  if (rule.num_groups > 1) t.keep_best_groups(rule);
  take_best(t.id.data(), t.key.data(), a.experts, K);
  t.score_chosen(rule);
  const float sum = rule.divides() ? lane_sum(t.chosen.data(), K) + kRouteEpsilon : 1.0f;
  for (int k = 0; k < K; ++k) weights[k] = canonical(t.chosen[k] / sum * rule.scaling);
  std::copy_n(t.id.data(), K, a.ids + token * K);
}

/// Gradients of the chosen logits by the weights into chosen[K ..]; for softmax of their scores.
void grade_chosen(const RouteRule& rule, const float* grad_weights, Token& t) {
  const int K = rule.top_k;
  float *const share = t.chosen.data(), *const grad = share + K, *const term = grad + K;
  t.score_chosen(rule);
  for (int k = 0; k < K; ++k) grad[k] = grad_weights[k] * rule.scaling;
  const bool after = rule.score == Score::softmax_after;
  if (after || rule.divides()) {
    const float sum = after ? 1.0f : lane_sum(share, K) + kRouteEpsilon;
    for (int k = 0; k < K; ++k) term[k] = grad[k] * (share[k] / sum);
    const float inner = lane_sum(term, K);
    for (int k = 0; k < K; ++k) grad[k] = after ? share[k] * (grad[k] - inner) : (grad[k] - inner) / sum;
  }
  if (rule.is_softmax()) return;
  for (int k = 0; k < K; ++k) grad[k] = grad[k] * slope_of(rule.score, t.logit[t.id[k]], share[k]);
}

/// Gradients of the logits by the probabilities into term; for softmax still of the probabilities.
void grade_probs(const RouteRule& rule, const float* grad, int experts, Token& t) {
  if (rule.score == Score::softmax) {
    std::copy_n(grad, experts, t.term.data());
    return;
  }
  const float sum = t.score_sum(rule);
  for (int e = 0; e < experts; ++e) t.term[e] = grad[e] * (t.score[e] / sum);
  const float inner = lane_sum(t.term.data(), experts);
  for (int e = 0; e < experts; ++e)
    t.term[e] = rule.is_softmax() ? t.score[e] * (grad[e] - inner)
                                  : (grad[e] - inner) / sum * slope_of(rule.score, t.logit[e], t.score[e]);
}

void route_grad_token(const RouteGradArgs& a, std::int64_t token, Token& t) {
  const RouteRule& rule = a.rule;
  const int K = rule.top_k, experts = a.experts;
  const std::int64_t first = token * experts;
  std::copy_n(a.ids + token * K, K, t.id.data());
  if (t.id[0] < 0) {
    for (int e = 0; e < experts; ++e) store_logit(a.grad_logits, a.dtype, first + e, 0.0f);
    return;
  }
  t.load(a.logits, a.dtype, token);
  if (a.grad_probs || rule.score == Score::softmax) t.score_all(rule);
  std::fill(t.term.begin(), t.term.end(), 0.0f);
  if (a.grad_probs) grade_probs(rule, a.grad_probs + token * a.grad_probs_stride, experts, t);
  if (a.grad_weights) {
    grade_chosen(rule, a.grad_weights + token * K, t);
    for (int k = 0; k < K; ++k) t.term[t.id[k]] += t.chosen[K + k];
  }
  if (rule.score == Score::softmax) {
    for (int e = 0; e < experts; ++e) t.logit[e] = t.term[e] * t.score[e];
    const float inner = lane_sum(t.logit.data(), experts);
    for (int e = 0; e < experts; ++e) t.term[e] = t.score[e] * (t.term[e] - inner);
  }
  for (int e = 0; e < experts; ++e) store_logit(a.grad_logits, a.dtype, first + e, t.term[e]);
}

/// Bytes of traffic that stand for the arithmetic of a logit when threads are counted out.
constexpr std::int64_t kBytesPerLogit = 64;

template <class Args, class PerToken>
void for_tokens(const Args& a, int threads, const PerToken& per_token) {
  parallel_for(a.tokens, a.tokens * a.experts * kBytesPerLogit, threads, [&](auto begin, auto end) {
    Token scratch(a.experts, a.rule);
    for (std::int64_t token = begin; token < end; ++token) per_token(a, token, scratch);
  });
}

}  // namespace

void route(const RouteArgs& args, int threads) { for_tokens(args, threads, route_token); }
void route_grad(const RouteGradArgs& args, int threads) { for_tokens(args, threads, route_grad_token); }

}  // namespace flexep
