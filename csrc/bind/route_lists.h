// What delivery and collection read of a route: the same for every call through it, so it is made once.
#pragma once
#include "kernels/args.h"

namespace flexep {

struct RouteLists {
  const std::int32_t* tokens_of;
  Arrivals arrivals;
  Relayed relayed;
  const std::int32_t *row_src, *home_rank;
};

}  // namespace flexep
