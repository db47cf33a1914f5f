// Routing maps: top-k indices <-> multihot masks, and the padding of a mask's columns.
// Masks are bytes 0 or 1, [tokens, experts]; indices int32, -1 is an empty slot, checked by the caller;
// weights fp32.
#pragma once
#include <cstdint>

namespace flexep {

struct MapShape {
  std::int64_t tokens, top_k, experts;
};

/// mask[t, idx[t, k]] = 1. With weights, probs[t, e] = the sum of the weights of the slots that name e, by
/// ascending k.
void indices_to_multihot(std::uint8_t* mask, float* probs, const std::int32_t* idx, const float* weights,
                         MapShape shape);

/// The experts of each mask row, ascending, then -1; with probs also their entries, then 0. Returns the first
/// token whose row holds more than top_k experts (the first top_k are written), or -1.
std::int64_t multihot_to_indices(std::int32_t* idx, float* weights, const std::uint8_t* mask,
                                 const float* probs, MapShape shape);

/// The largest number of experts in a mask row.
std::int64_t widest_row(const std::uint8_t* mask, MapShape shape);

/// out [align_up(tokens, multiple), experts]: mask, and in each column as many further ones as lift its sum
/// to a multiple of `multiple`, in the first rows that hold none.
void pad_routing_map(std::uint8_t* out, const std::uint8_t* mask, MapShape shape, std::int64_t multiple);

}  // namespace flexep
