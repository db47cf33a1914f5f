// The router in one pass over the logits: the experts of each token, their weights, and the probabilities that the
// balancing losses sum. docs/router.md has the formulae. Every product, sum, exponential and tie is fixed
// (route_math.h), so host and device write the same bits; a NaN comes out as the canonical one.
#pragma once
#include <cstdint>

#include "base/dtype.h"

namespace flexep {

/// What a logit becomes; python/flexep/_native/route.py holds the same table. `softmax_after`: the logits themselves
/// choose, and the softmax is over the chosen ones.
enum class Score : int { softmax = 0, softmax_after = 1, sigmoid = 2, sqrt_softplus = 3 };

/// Chosen experts of a token: a warp holds one in each lane.
inline constexpr int kRouteMaxTopK = 32;
/// Experts whose logits and keys one warp keeps in the shared memory of an SM.
inline constexpr int kRouteMaxExperts = 16384;

struct RouteRule {
  Score score;
  int top_k;  // 1 .. kRouteMaxTopK
  int num_groups, topk_groups;
  bool top2;         // a group is as good as the sum of its two best keys, not as its best
  bool renormalize;  // weights over their sum; not where top_k == 1, nor for softmax_after
  float scaling;     // of the weights, last

  /// Whether the choice is by score; otherwise it is by logit, which has the same order but does not saturate.
  FLEXEP_HD bool by_score(bool biased) const {
    return score != Score::softmax_after && (biased || num_groups > 1);
  }
  FLEXEP_HD bool is_softmax() const { return score == Score::softmax || score == Score::softmax_after; }
  FLEXEP_HD bool divides() const { return score != Score::softmax_after && renormalize && top_k > 1; }
};

struct RouteArgs {
  RouteRule rule;
  const void* logits;  // [tokens, experts] f32 or bf16
  DType dtype;
  const float* bias;            // [experts], added for choosing only, or null
  const std::uint8_t* padding;  // [tokens] 1: no token; its ids are -1, the rest +0; or null
  std::int64_t tokens;
  int experts;
  std::int32_t* ids;  // [tokens, top_k] best first, of equal keys the lower id; NaN is the largest key
  float* weights;     // [tokens, top_k]
  float* probs;       // [tokens, experts] rows that add up to 1, or null
};

struct RouteGradArgs {
  RouteRule rule;
  const void* logits;
  DType dtype;
  const std::int32_t* ids;         // what route wrote
  const float* grad_weights;       // [tokens, top_k] or null
  const float* grad_probs;         // [tokens, experts] or null
  std::int64_t grad_probs_stride;  // floats between rows of grad_probs; 0: one row for all tokens
  std::int64_t tokens;
  int experts;
  void* grad_logits;  // [tokens, experts] in dtype; +0 for padding
};

void route(const RouteArgs& args, int threads);
void route_grad(const RouteGradArgs& args, int threads);

/// The same on a CUDA stream: enqueued, nothing waits. Throws NotBuilt in a build without CUDA, Error when the launch
/// is refused.
void launch_route(const RouteArgs& args, std::uintptr_t stream);
void launch_route_grad(const RouteGradArgs& args, std::uintptr_t stream);

}  // namespace flexep
