// Which way of moving expert-major rows is the fastest: the kernels of csrc/ops as they are compiled here (rows_variants.sh
// builds them with several constants), beside bulk copies (TMA), a copy and a fill of the same bytes.
//
// T = 4096 tokens of H = 7168 bf16 to K = 8 of E = 256 experts, alignment 16 and 128. One line a measurement.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/cuda_check.h"
#include "mem/cuda.cuh"
#include "ops/rows_cuda.h"

using namespace flexep;

namespace {

constexpr int kTokens = 4096, kTopK = 8, kExperts = 256, kHidden = 7168, kRowBytes = 2 * kHidden, kSets = 3;

/// A ring of `stages` rows for each warp: one bulk load a row, one bulk store a copy, each by the lane whose slot it is.
struct BulkTask {
  char* out;
  const char* src;
  const std::int32_t *row_map, *row_src, *idx;  // idx: gather instead of expand
  std::int64_t tokens, rows;
  int top_k, stages;
};

__global__ void bulk_kernel(const BulkTask task) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps_here = blockDim.x / 32, s = task.stages;
  char* const rows = shared + static_cast<std::size_t>(warp) * s * kRowBytes;
  char* const zeros = shared + static_cast<std::size_t>(warps_here) * s * kRowBytes;
  auto* const full = reinterpret_cast<std::uint64_t*>(zeros + kRowBytes) + warp * s;
  const std::int64_t me = blockIdx.x + static_cast<std::int64_t>(gridDim.x) * warp,
                     all = gridDim.x * warps_here;
  for (int i = threadIdx.x * 16; i < kRowBytes; i += blockDim.x * 16)
    *reinterpret_cast<uint4*>(zeros + i) = make_uint4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (lane == 0)
    for (int i = 0; i < s; ++i) ptx::mbarrier_init(full + i, 1);
  ptx::fence_mbarrier_init_release_cluster();
  __syncthreads();
  const std::int64_t work = task.idx ? task.rows : task.tokens;
  const int count = static_cast<int>(me < work ? (work - me + all - 1) / all : 0);
  const auto load = [&](int i) {
    const std::int64_t item = me + i * all, from = task.idx ? max(0, task.idx[item]) : item;
    ptx::mbarrier_arrive_expect_tx_release_cta(full + i % s, kRowBytes);
    ptx::bulk_load(rows + i % s * kRowBytes, task.src + from * kRowBytes, kRowBytes, full + i % s);
  };
  if (lane == 0)
    for (int i = 0; i < min(s, count); ++i) load(i);
  for (int i = 0; i < count; ++i) {
    const std::int64_t item = me + i * all;
    std::int64_t to = -1;
    if (task.idx)
      to = lane == 0 ? item : -1;
    else if (lane < task.top_k)
      to = __ldg(task.row_map + item * task.top_k + lane);
    const bool empty = task.idx && task.idx[item] < 0;
    while (!ptx::mbarrier_try_wait_parity_acquire_cta(full + i % s, i / s & 1)) {
    }
    if (to >= 0)
      ptx::bulk_store(task.out + to * kRowBytes, empty ? zeros : rows + i % s * kRowBytes, kRowBytes);
    ptx::bulk_commit_group();
    if (i >= 1 && i - 1 + s < count) {
      ptx::bulk_wait_group_read(1);
      __syncwarp();
      if (lane == 0) load(i - 1 + s);
    }
  }
  if (!task.idx)
    for (std::int64_t dealt = 0; dealt < task.rows; dealt += 32 * all) {
      const std::int64_t row = dealt + lane * all + me;
      if (row < task.rows && task.row_src[row] < 0)
        ptx::bulk_store(task.out + row * kRowBytes, zeros, kRowBytes);
      ptx::bulk_commit_group();
    }
  ptx::bulk_wait_group(0);
}

template <class T>
T* device_copy(const std::vector<T>& values) {
  T* to = nullptr;
  cuda_check(cudaMalloc(&to, values.size() * sizeof(T)), "malloc");
  cuda_check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return to;
}

char* device_bytes(std::size_t bytes) {
  char* to = nullptr;
  cuda_check(cudaMalloc(&to, bytes), "malloc");
  return to;
}

struct Set {
  std::int64_t rows;
  char *x, *y;  // [T, H], [rows, H]
  std::int32_t *row_map, *row_src, *token_of_row;
  float *weights, *dots;

  Set(int alignment, int seed) {
    std::mt19937 random(seed);
    std::vector<int> experts(kExperts);
    std::iota(experts.begin(), experts.end(), 0);
    std::vector<std::vector<int>> slots(kExperts);
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kTopK; ++k) {
        std::swap(experts[k], experts[k + random() % (kExperts - k)]);
        slots[experts[k]].push_back(t * kTopK + k);
      }
    std::vector<std::int32_t> map(kTokens * kTopK), from, token;
    for (const auto& of_expert : slots) {
      for (const int slot : of_expert) {
        map[slot] = static_cast<int>(from.size());
        from.push_back(slot);
      }
      while (from.size() % alignment != 0) from.push_back(-1);
    }
    for (const int slot : from) token.push_back(slot < 0 ? -1 : slot / kTopK);
    rows = static_cast<std::int64_t>(from.size());
    row_map = device_copy(map), row_src = device_copy(from), token_of_row = device_copy(token);
    std::vector<std::uint16_t> values(kTokens * static_cast<std::size_t>(kHidden));
    for (auto& v : values) v = static_cast<std::uint16_t>(0x3f00 + random() % 256);
    x = reinterpret_cast<char*>(device_copy(values));
    y = device_bytes(rows * kRowBytes);
    std::vector<float> w(kTokens * kTopK);
    for (auto& v : w) v = static_cast<float>(random() % 1000) / 1000;
    weights = device_copy(w);
    dots = device_copy(w);
  }
};

/// Median microseconds of one call; calls go around the sets.
double time_us(const std::function<void(int)>& call) {
  constexpr int kRepeats = 41;
  std::vector<cudaEvent_t> marks(kRepeats + 1);
  for (auto& mark : marks) cudaEventCreate(&mark);
  for (int i = 0; i < 6; ++i) call(i % kSets);
  cudaEventRecord(marks[0]);
  for (int i = 0; i < kRepeats; ++i) {
    call(i % kSets);
    cudaEventRecord(marks[i + 1]);
  }
  cuda_check(cudaDeviceSynchronize(), "timed calls");
  std::vector<float> took(kRepeats);
  for (int i = 0; i < kRepeats; ++i) cudaEventElapsedTime(&took[i], marks[i], marks[i + 1]);
  std::nth_element(took.begin(), took.begin() + kRepeats / 2, took.end());
  return 1e3 * took[kRepeats / 2];
}

double sum_of(const char* device, std::int64_t bytes) {
  std::vector<std::uint64_t> host(bytes / 8);
  cuda_check(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost), "copy back");
  std::uint64_t hash = 0;
  for (const auto word : host) hash = hash * 0x9e3779b97f4a7c15ull + word;
  return static_cast<double>(hash >> 12);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string variant = argc > 1 ? argv[1] : "as is";
  const bool all = argc > 2;  // the bulk copies and the references too
  for (const int alignment : {16, 128}) {
    std::vector<Set> sets;
    for (int i = 0; i < kSets; ++i) sets.emplace_back(alignment, i);
    const double forward = (sets[0].rows + kTokens) * double(kRowBytes);
    const double backward = (kTokens * kTopK + kTokens) * double(kRowBytes);
    char* const out = device_bytes(kTokens * std::size_t{kRowBytes});
    char* const half = device_bytes(static_cast<std::size_t>(forward) / 2);
    char* const other = device_bytes(static_cast<std::size_t>(forward) / 2);
    const double copy = forward / time_us([&](int i) {
                          cudaMemcpyAsync(i % 2 ? half : other, i % 2 ? other : half,
                                          std::size_t(forward) / 2, cudaMemcpyDeviceToDevice);
                        });
    const auto report = [&](const char* what, double bytes, double us) {
      std::printf("%-28s %-34s align %3d %8.1f us %6.0f GB/s ratio %.3f\n", variant.c_str(), what, alignment,
                  us, bytes / us / 1e3, bytes / us / copy);
    };
    const auto rows_in = [&](const char* data) { return RowsIn{data, kRowBytes, DType::bf16}; };
    const auto expand = [&](int i, bool scaled) {
      const Set& s = sets[i];
      expand_rows_cuda({s.y, rows_in(s.x), s.row_map, s.row_src, scaled ? s.weights : nullptr, nullptr,
                        nullptr, nullptr, nullptr, 0, kTokens, kTopK, s.rows, kHidden},
                       0);
    };
    report("expand", forward, time_us([&](int i) { expand(i, false); }));
    const double want = sum_of(sets[0].y, sets[0].rows * kRowBytes);
    report("gather", forward, time_us([&](int i) {
             const Set& s = sets[i];
             gather_rows_cuda(s.y, rows_in(s.x), kTokens, s.token_of_row, nullptr, s.rows, kHidden, 0);
           }));
    if (sum_of(sets[0].y, sets[0].rows * kRowBytes) != want) std::printf("gather: WRONG\n");
    report("expand, scaled", forward, time_us([&](int i) { expand(i, true); }));
    const auto reduce = [&](int i, bool weighted) {
      const Set& s = sets[i];
      reduce_rows_cuda(out, DType::bf16,
                       {rows_in(s.y), s.row_map, weighted ? s.weights : nullptr, nullptr, DType::f32, true,
                        kTokens, kTopK, kHidden},
                       s.rows, 0);
    };
    report("reduce", backward, time_us([&](int i) { reduce(i, false); }));
    report("reduce, weighted", backward, time_us([&](int i) { reduce(i, true); }));
    report("dot", backward, time_us([&](int i) {
             const Set& s = sets[i];
             dot_rows_cuda(
                 {s.dots, rows_in(s.x), rows_in(s.y), s.rows, s.row_map, kTokens * kTopK, kTopK, kHidden}, 0);
           }));
    if (all) {
      report("copy", forward, forward / copy);
      report("fill", forward, forward / (sets[0].rows * kRowBytes / time_us([&](int i) {
                                           cudaMemsetAsync(sets[i].y, 1, sets[i].rows * kRowBytes);
                                         })));
      cuda_check(cudaFuncSetAttribute(bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 * 1024),
                 "shared");
      for (const bool gathers : {false, true})
        for (const auto& [warps, stages] : {std::pair{2, 7}, {3, 4}, {4, 3}, {7, 2}}) {
          const std::size_t bytes = std::size_t{kRowBytes} * (warps * stages + 1) + 8 * warps * stages;
          const auto call = [&, w = warps, n = stages](int i) {
            const Set& s = sets[i];
            bulk_kernel<<<132, 32 * w, bytes>>>({s.y, s.x, s.row_map, s.row_src,
                                                 gathers ? s.token_of_row : nullptr, kTokens, s.rows, kTopK,
                                                 n});
          };
          for (const Set& s : sets) cudaMemset(s.y, 0xa5, s.rows * kRowBytes);
          const std::string name = std::string(gathers ? "gather" : "expand") + " by bulk copies, " +
                                   std::to_string(warps) + "x" + std::to_string(stages);
          report(name.c_str(), forward, time_us(call));
          cuda_check(cudaGetLastError(), "bulk launch");
          if (sum_of(sets[0].y, sets[0].rows * kRowBytes) != want) std::printf("%s: WRONG\n", name.c_str());
        }
    }
    for (const Set& s : sets)
      for (void* p : {(void*)s.x, (void*)s.y, (void*)s.row_map, (void*)s.row_src, (void*)s.token_of_row,
                      (void*)s.weights, (void*)s.dots})
        cudaFree(p);
    cudaFree(out), cudaFree(half), cudaFree(other);
  }
  return 0;
}
