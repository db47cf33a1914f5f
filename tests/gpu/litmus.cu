// Litmus tests of csrc/mem on one GPU: each right use of its functions, many times, and beside it the same with a bug
// planted by a wrapper. Prints a line a variant: test, variant, rounds, rounds that failed, waits that came too late.
// tests/gpu/test_litmus.py compiles and judges it:
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc tests/gpu/litmus.cu -o litmus && ./litmus
//
// Which planted bugs a GPU shows is its own affair: a missing fence is wrong even where nothing goes wrong. The list of
// those that must show is in test_litmus.py; the others are run and printed. Those that need not show, and why:
//   message, warp-message: relaxed-post    stores of one SM mostly become visible in order
//   ring: relaxed-post, no-proxy-fence     the drain has waited; the two proxies meet in L2, without a copy between
//   ring: no-acquire-before-load           the stage has mostly been read when the next row comes
//   ring: no-wait-before-store             the copy engine takes a stage's load and store in turn, when they are near
//   ring: no-drain-before-post             the post takes longer to the reader than the store to L2
//   shared-store: no-proxy-fence           what threads have written is mostly there when the copy engine reads it
//   cta-count: set-before-the-words        the words follow before anybody looks
//   end-role: no-fences                    the counter and the state meet in L2
// Every wait has a deadline, or is for what was issued before, so that no plant hangs.
#include "litmus_cta.cuh"
#include "litmus_fed.cuh"
#include "litmus_messages.cuh"
#include "litmus_ring.cuh"

int main() {
  int device = 0, sms = 0;
  LITMUS_CHECK(cudaGetDevice(&device));
  LITMUS_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const int pairs = sms / 2 < 48 ? sms / 2 : 48;
  litmus::run_messages(pairs, 20000);
  litmus::run_cta(2 * pairs, 3000);
  litmus::run_roles(32, 500);
  litmus::run_ring(pairs, 3000);
  litmus::run_fed(pairs, 1000);
  return 0;
}
