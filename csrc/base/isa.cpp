#include "base/isa.h"

#include <atomic>

#include "base/error.h"

namespace flexep {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

Isa fastest() {
#if defined(__x86_64__)
  // The CPU's feature words already account for what the operating system saves on a context switch.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  // Every AVX2 processor has F16C; builtin names for it differ between compilers.
  if (__builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
  return Isa::portable;
}

std::atomic<int>& chosen() {
  static std::atomic<int> value{static_cast<int>(fastest())};
  return value;
}

}  // namespace

std::vector<std::string> isa_names() { return {kNames, kNames + static_cast<int>(fastest()) + 1}; }

Isa current_isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }

std::string set_isa(const std::string& name) {
  const std::vector<std::string> names = isa_names();
  for (int i = 0; i < static_cast<int>(names.size()); ++i)
    if (names[i] == name) return kNames[chosen().exchange(i)];
  throw Error("isa = '" + name + "' is not one that this machine runs");
}

}  // namespace flexep
