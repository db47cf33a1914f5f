// What the host's roles do with a row: the row functors of ops/, one row at a time, while rows move.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/args.h"
#include "kernels/collect.h"
#include "ops/rows_table.h"

namespace flexep {

/// Expands, weights, dots or copies each row that arrives, and clears the rows that nothing fills.
class HostPlace {
 public:
  HostPlace(const DeliverArgs& args, int ranks);

  /// Clears the rows of a share that nothing fills.
  void pad(Range mine) {
    for (int row = mine.begin; row < mine.end; ++row) {
      if (args_.flat ? row < received_ : args_.row_src[row] >= 0) continue;
      table_.zero(out(row), row_bytes_, stream_);
      if (args_.dot_with) args_.dots[row] = 0.0f;
    }
  }
  void expect(int) const {}
  void place(int j, const void* row, const void* next);
  void finish() {
    if (stream_) table_.fence();
  }

 private:
  char* out(std::int64_t row) const { return static_cast<char*>(args_.out) + row * row_bytes_; }

  const DeliverArgs& args_;
  const RowTable& table_;
  int received_;
  std::int64_t row_bytes_;
  bool stream_;
};

/// Adds rows: expert rows to a partial sum, partial sums to a domain's, either to a token's result.
class HostAdd {
 public:
  HostAdd(const CollectArgs& args, int tokens);

  void partial(int j, int next, void* to);
  const void* own_sum(int j) {
    own_.resize(args_.hidden * size_of(args_.wire));
    partial(j, -1, own_.data());
    return own_.data();
  }
  void domain_sum(const void* const* terms, int count, void* to);
  void home(int token, const void* const* terms, const int* ranks, int count);
  void finish() {
    if (stream_) table_.fence();
  }

 private:
  int gather_terms(int j, const void** rows, float* weights) const;
  const char* y(std::int64_t row) const {
    return static_cast<const char*>(args_.y) + row * args_.hidden * size_of(args_.dtype);
  }

  const CollectArgs& args_;
  const RowTable& table_;
  bool stream_;  // of z
  float ones_[kMaxTopK];
  std::vector<char> own_;
};

}  // namespace flexep
