// The routing maps of maps.h on the GPU, bit for bit the same: enqueued on a stream, no wait, no allocation. Expert ids
// are int32 or int64; nobody has checked them, and one outside [0, experts) is an empty slot. In a build without nvcc
// every entry throws NotBuilt (maps_stub.cpp).
#pragma once
#include <cstdint>

#include "ops/maps.h"
#include "plan/integers.h"

namespace flexep {

/// As indices_to_multihot; either of mask and probs may be null, weights come with probs.
void indices_to_multihot_cuda(std::uint8_t* mask, float* probs, const Integers& idx, const float* weights,
                              MapShape shape, std::uintptr_t stream);

/// As multihot_to_indices without weights; of a row with more than top_k experts the first top_k are written.
void multihot_to_indices_cuda(std::int32_t* idx, const std::uint8_t* mask, MapShape shape,
                              std::uintptr_t stream);

/// out[t, k] = values[t, idx[t, k]], +0 in empty slots.
void take_columns_cuda(float* out, const float* values, const Integers& idx, MapShape shape,
                       std::uintptr_t stream);

/// Bands of rows whose column counts pad_routing_map_cuda keeps: `counts` is [kMapBands, experts].
constexpr std::int64_t kMapBands = 64;

void pad_routing_map_cuda(std::uint8_t* out, const std::uint8_t* mask, std::int32_t* counts, MapShape shape,
                          std::int64_t multiple, std::uintptr_t stream);

}  // namespace flexep
