// SPDX-License-Identifier: Apache-2.0
// What calls of the runtime cost at the program, as one line of JSON: microseconds per call, medians. Run natively and
// through the proxy in turn by scripts/gpu_check.py.
#include <algorithm>
#include <chrono>

#include "check.cuh"

struct Block {
  uint8_t bytes[1716];
};
__global__ void nothing() {}
__global__ void eight(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {}
__global__ void large(const __grid_constant__ Block) {}

static double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void say(const char* name, std::vector<double> took) {
  static bool begun = false;
  std::sort(took.begin(), took.end());
  printf("%s\"cudart_%s_us\": %.3f", begun ? ", " : "{", name, took[took.size() / 2]);
  begun = true;
}

// Without waits within a batch; what waits for the device lies between them.
template <class Call>
static void asynchronous(const char* name, cudaStream_t s, Call call) {
  std::vector<double> took;
  for (int round = -2; round < 40; ++round) {
    const double begin = now_us();
    for (int i = 0; i < 200; ++i) CHECK(call());
    if (round >= 0) took.push_back((now_us() - begin) / 200);
    CHECK(cudaStreamSynchronize(s));
  }
  say(name, took);
}

template <class Calls>
static void each(const char* name, int times, Calls calls) {
  std::vector<double> took;
  for (int i = -3; i < times; ++i) {
    const double begin = now_us();
    calls();
    if (i >= 0) took.push_back(now_us() - begin);
  }
  say(name, took);
}

int main() {
  cudaStream_t s;
  cudaEvent_t e;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  uint32_t *memory = zeroes<uint32_t>(1 << 20), *host;
  CHECK(cudaMallocHost(&host, 4 << 20));
  static Block block;
  asynchronous("launch_async", s, [&] { return nothing<<<1, 1, 0, s>>>(), cudaGetLastError(); });
  asynchronous("launch_async_8_parameters", s,
               [&] { return eight<<<1, 1, 0, s>>>(1, 2, 3, 4, 5, 6, 7, 8), cudaGetLastError(); });
  asynchronous("launch_async_1716_bytes", s, [&] { return large<<<1, 1, 0, s>>>(block), cudaGetLastError(); });
  asynchronous("event_record", s, [&] { return cudaEventRecord(e, s); });
  asynchronous("memset_4KiB", s, [&] { return cudaMemsetAsync(memory, 0, 4096, s); });
  asynchronous("get_device", s, [&] {
    int number;
    return cudaGetDevice(&number);
  });
  asynchronous("stream_query_idle", s, [&] { return cudaStreamQuery(s); });
  each("launch_and_synchronize", 500, [&] {
    nothing<<<1, 1, 0, s>>>();
    CHECK(cudaStreamSynchronize(s));
  });
  each("copy_4_bytes_to_host", 500, [&] {
    CHECK(cudaMemcpyAsync(host, memory, 4, cudaMemcpyDeviceToHost, s));
    CHECK(cudaStreamSynchronize(s));
  });
  each("malloc_and_free_1MiB", 100, [&] {
    void* more;
    CHECK(cudaMalloc(&more, 1 << 20));
    CHECK(cudaFree(more));
  });
  each("step_40_launches", 300, [&] {
    for (int k = 0; k < 40; ++k) eight<<<1, 32, 0, s>>>(1, 2, 3, 4, 5, 6, 7, 8);
    CHECK(cudaMemcpyAsync(host, memory, 4, cudaMemcpyDeviceToHost, s));
    CHECK(cudaStreamSynchronize(s));
  });
  printf("}\n");
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(memory));
  CHECK(cudaEventDestroy(e));
  CHECK(cudaStreamDestroy(s));
  return ok("cost");
}
