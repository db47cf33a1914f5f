#include "kernels/host_rows.h"

namespace flexep {

HostPlace::HostPlace(const DeliverArgs& args, int ranks)
    : args_(args),
      table_(row_table()),
      received_(args.arrivals.base[ranks]),
      row_bytes_(args.hidden * size_of(args.dtype)),
      stream_(streams(args.out, args.num_rows, row_bytes_)) {}

void HostPlace::place(int j, const void* row, const void* next) {
  if (args_.flat) return table_.copy(out(j), row, next, row_bytes_, stream_);
  const int dtype = static_cast<int>(args_.dtype), top_k = args_.arrivals.top_k;
  const std::int32_t* const rows = args_.arrivals.rows + static_cast<std::int64_t>(j) * top_k;
  for (int k = 0; k < top_k; ++k) {
    if (rows[k] < 0) continue;
    if (args_.weights)
      table_.scale[dtype](out(rows[k]), row, args_.weights[rows[k]], args_.hidden, stream_);
    else
      table_.copy(out(rows[k]), row, next, row_bytes_, stream_);
    next = nullptr;  // fetched with the first copy
    if (args_.dot_with)
      args_.dots[rows[k]] = table_.dot[dtype](static_cast<const char*>(args_.dot_with) + rows[k] * row_bytes_,
                                              row, args_.hidden);
  }
}

HostAdd::HostAdd(const CollectArgs& args, int tokens)
    : args_(args),
      table_(row_table()),
      stream_(streams(args.z, tokens, args.hidden * size_of(args.out_dtype))) {
  for (float& one : ones_) one = 1.0f;
}

int HostAdd::gather_terms(int j, const void** rows, float* weights) const {
  const std::int64_t first = static_cast<std::int64_t>(j) * args_.arrivals.top_k;
  std::int32_t order[kMaxTopK];
  int count = 0;
  for (int k = 0; k < args_.arrivals.top_k; ++k) {  // (expert, slot) order is the order of the rows
    const std::int32_t row = args_.arrivals.rows[first + k];
    if (row < 0) continue;
    int at = count++;
    for (; at > 0 && order[at - 1] > row; --at) order[at] = order[at - 1], weights[at] = weights[at - 1];
    order[at] = row;
    weights[at] = args_.part_weights ? args_.part_weights[first + k] : 1.0f;
  }
  for (int i = 0; i < count; ++i) rows[i] = y(order[i]);
  return count;
}

void HostAdd::partial(int j, int next, void* to) {
  const void *rows[kMaxTopK], *next_rows[kMaxTopK];
  float weights[kMaxTopK], unused[kMaxTopK];
  int count = 1, next_count = 0;
  if (args_.flat) {
    if (args_.dtype == args_.wire)
      return table_.copy(to, y(j), nullptr, args_.hidden * size_of(args_.wire), false);
    rows[0] = y(j), weights[0] = 1.0f;
  } else {
    count = gather_terms(j, rows, weights);
    if (count == 0) return table_.zero(to, args_.hidden * size_of(args_.wire), false);
    if (next >= 0) next_count = gather_terms(next, next_rows, unused);
  }
  const Terms terms{rows, weights, nullptr, count, next_rows, next_count};
  table_.reduce[static_cast<int>(args_.dtype)][static_cast<int>(args_.wire)](to, terms, args_.wire,
                                                                             args_.hidden, false);
}

void HostAdd::domain_sum(const void* const* rows, int count, void* to) {
  if (count == 0) return table_.zero(to, args_.hidden * size_of(args_.wire), false);
  const Terms terms{rows, ones_, nullptr, count, nullptr, 0};
  const int wire = static_cast<int>(args_.wire);
  table_.reduce[wire][wire](to, terms, args_.wire, args_.hidden, false);
}

void HostAdd::home(int token, const void* const* rows, const int* ranks, int count) {
  char* const to = static_cast<char*>(args_.z) + token * args_.hidden * size_of(args_.out_dtype);
  if (count == 0) return table_.zero(to, args_.hidden * size_of(args_.out_dtype), stream_);
  std::uint8_t ends[kMaxTopK];
  for (int i = 0; args_.nest > 0 && i < count; ++i)
    ends[i] = i + 1 == count || ranks[i] / args_.nest != ranks[i + 1] / args_.nest;
  const Terms terms{rows, ones_, args_.nest > 0 ? ends : nullptr, count, nullptr, 0};
  table_.reduce[static_cast<int>(args_.wire)][static_cast<int>(args_.out_dtype)](to, terms, args_.wire,
                                                                                 args_.hidden, stream_);
}

}  // namespace flexep
