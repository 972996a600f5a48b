// SPDX-License-Identifier: Apache-2.0
// What the proxy costs, through the shim under devproxy-run: an asynchronous launch, a synchronous call, 64 MB copies.
// Prints one line of JSON. Needs TEST_KERNELS (tests/subjects/driver/kernels.c).
//
// The empty synchronous call is the wire's NOP, sent by the client's own Attachment (csrc/client), beside
// cuEventElapsedTime through the shim, the lightest driver call that must ask the server.
#include <cuda.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>

#include "devproxy/csrc/client/attachment.h"
#include "devproxy/csrc/client/process.h"
#include "tests/bench/measure.h"

namespace {

using bench::Quantiles;
using bench::quantiles;
using bench::time_each_ns;
using bench::time_ns;

constexpr int kGroup = 20;

void check(CUresult r, const char* what) {
  if (r == CUDA_SUCCESS) return;
  const char* name = "?";
  cuGetErrorName(r, &name);
  fprintf(stderr, "bench_driver: %s: %s\n", what, name);
  exit(1);
}
#define CHECK(call) check((call), #call)

// The server's own account of a counter (AttachKind::kStats).
double server_counter(const char* key) {
  using namespace devproxy;
  sockaddr_un addr{};
  addr.sun_family = AF_UNIX;
  snprintf(addr.sun_path, sizeof addr.sun_path, "%s/gpu0.sock", getenv("DEVPROXY_JOB_DIR"));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  AttachRequest request{kAttachMagic, AttachKind::kStats, {}, 0, 0};
  memcpy(request.abi_id, wire::kAbiId, sizeof request.abi_id);
  uint32_t length = 0;
  std::string text;
  if (connect(fd, reinterpret_cast<sockaddr*>(&addr), sizeof addr) == 0 &&
      send(fd, &request, sizeof request, MSG_NOSIGNAL) == sizeof request &&
      recv(fd, &length, sizeof length, MSG_WAITALL) == sizeof length && length < 1u << 24) {
    text.resize(length);
    if (recv(fd, text.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length)) text.clear();
  }
  close(fd);
  const size_t at = text.find("\"" + std::string(key) + "\"");
  return at == std::string::npos ? -1 : atof(text.c_str() + text.find(':', at) + 1);
}

// Bursts of launches that the ring can hold, then a wait: the server is awake after the first of each.
void launches(bench::Json* json, CUfunction f, CUstream s) {
  uint64_t p[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  void* params[] = {&p[0], &p[1], &p[2], &p[3], &p[4], &p[5], &p[6], &p[7]};
  auto launch = [&] { CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, nullptr)); };
  auto run = [&](int bursts, int length) {
    std::vector<double> grouped, single;  // median over groups, p99 over single calls, as in bench_post
    for (int b = 0; b < bursts; ++b) {
      if (b % 2)
        for (int i = 0; i < length; ++i) single.push_back(time_ns(launch));
      else
        for (int i = 0; i < length; i += kGroup) grouped.push_back(time_each_ns(kGroup, launch));
      CHECK(cuStreamSynchronize(s));
      usleep(200);
    }
    return Quantiles{quantiles(std::move(grouped)).median, quantiles(std::move(single)).p99};
  };
  run(40, 500);
  const double wakes = server_counter("wakes");
  const Quantiles launch_ns = run(400, 500);
  const double woke = server_counter("wakes") - wakes;
  json->put("launch_ns", launch_ns);
  json->put("launch_wake_share", woke / (400 * 500));
  // One by one with a pause between, as a program that also computes: each wakes the server.
  std::vector<double> lonely;
  for (int i = 0; i < 1000; ++i) {
    usleep(1000);
    lonely.push_back(time_ns(launch));
  }
  CHECK(cuStreamSynchronize(s));
  json->put("launch_alone_ns", quantiles(std::move(lonely)));
  // Sustained: what the server executes per second.
  const uint64_t begin = bench::now_ns();
  for (int i = 0; i < 50'000; ++i) launch();
  CHECK(cuStreamSynchronize(s));
  json->put("launch_sustained_ns", static_cast<double>(bench::now_ns() - begin) / 50'000);
}

// A graph of small kernels against as many launches, each in bursts that the ring holds.
void graphs(bench::Json* json, CUfunction f, CUstream s) {
  constexpr int kKernels = 100, kBursts = 200, kLength = 5;
  uint64_t p[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  void* params[] = {&p[0], &p[1], &p[2], &p[3], &p[4], &p[5], &p[6], &p[7]};
  CUgraph graph;
  CUgraphExec exec;
  CHECK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
  for (int i = 0; i < kKernels; ++i) CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, nullptr));
  CHECK(cuStreamEndCapture(s, &graph));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  auto launch_graph = [&] { CHECK(cuGraphLaunch(exec, s)); };
  auto launch_each = [&] {
    for (int i = 0; i < kKernels; ++i) CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, nullptr));
  };
  auto measure = [&](const std::string& name, auto once) {
    std::vector<double> posts;
    for (int b = 0; b < kBursts; ++b) {
      for (int i = 0; i < kLength; ++i) posts.push_back(time_ns(once));
      CHECK(cuStreamSynchronize(s));
    }
    json->put(name + "_post_ns", quantiles(std::move(posts)));
    const uint64_t begin = bench::now_ns();
    for (int i = 0; i < 1000; ++i) once();
    CHECK(cuStreamSynchronize(s));
    json->put((name + "_sustained_ns").c_str(), static_cast<double>(bench::now_ns() - begin) / 1000);
  };
  measure("graph_of_100", launch_graph);
  measure("launches_100", launch_each);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
}

template <class F>
void round_trips(bench::Json* json, const std::string& name, F call) {
  std::vector<double> awake, asleep;
  for (int i = 0; i < 40'000; i += kGroup) {
    const double ns = time_each_ns(kGroup, call);
    if (i >= 4000) awake.push_back(ns);
  }
  for (int i = 0; i < 2000; ++i) {
    usleep(1000);
    asleep.push_back(time_ns(call));
  }
  json->put(name + "_awake_ns", quantiles(std::move(awake)));
  json->put(name + "_asleep_ns", quantiles(std::move(asleep)));
}

void copies(bench::Json* json) {
  const size_t bytes = 64u << 20;
  CUdeviceptr device;
  void* pinned;
  auto* pageable = static_cast<uint8_t*>(aligned_alloc(4096, bytes));
  CHECK(cuMemAlloc(&device, bytes));
  CHECK(cuMemAllocHost(&pinned, bytes));
  memset(pageable, 1, bytes);
  memset(pinned, 2, bytes);
  CHECK(cuMemsetD8(device, 0, bytes));
  CHECK(cuCtxSynchronize());
  auto measure = [&](const char* key, auto copy) {
    std::vector<double> samples;
    for (int i = 0; i < 18; ++i) {
      const double ns = time_ns([&] {
        copy();
        CHECK(cuStreamSynchronize(nullptr));
      });
      if (i >= 3) samples.push_back(ns);
    }
    json->put(key, static_cast<double>(bytes) / quantiles(std::move(samples)).median);
  };
  measure("h2d_pageable_gb_per_s", [&] { CHECK(cuMemcpyHtoD(device, pageable, bytes)); });
  measure("d2h_pageable_gb_per_s", [&] { CHECK(cuMemcpyDtoH(pageable, device, bytes)); });
  measure("h2d_pinned_gb_per_s", [&] { CHECK(cuMemcpyHtoD(device, pinned, bytes)); });
  measure("d2h_pinned_gb_per_s", [&] { CHECK(cuMemcpyDtoH(pinned, device, bytes)); });
  free(pageable);
}

}  // namespace

int main() {
  bench::Json json;
  CUdevice dev;
  CUcontext ctx;
  CUmodule module;
  CUfunction noop;
  CUstream s;
  CUevent a, b;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&dev, 0));
  CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
  CHECK(cuCtxSetCurrent(ctx));
  CHECK(cuModuleLoad(&module, getenv("TEST_KERNELS")));
  CHECK(cuModuleGetFunction(&noop, module, "noop64"));
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  launches(&json, noop, s);
  graphs(&json, noop, s);

  // A second connection of this process, made by the client's own code; the shim's is idle meanwhile.
  int32_t error = 0;
  if (devproxy::client::init() != 0) return fprintf(stderr, "bench_driver: no job\n"), 1;
  devproxy::client::Attachment* c = devproxy::client::device(0, &error);
  if (!c) return fprintf(stderr, "bench_driver: cannot attach: %d\n", error), 1;
  const devproxy::wire::NOP_req nop{};
  round_trips(&json, "empty_call", [&] {
    if (c->call(devproxy::wire::Opcode::NOP, nop) != 0) exit(1);
  });

  CHECK(cuEventCreate(&a, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&b, CU_EVENT_DEFAULT));
  CHECK(cuEventRecord(a, s));
  CHECK(cuEventRecord(b, s));
  CHECK(cuStreamSynchronize(s));
  round_trips(&json, "elapsed_time", [&] {
    float ms;
    CHECK(cuEventElapsedTime(&ms, a, b));
  });
  copies(&json);
  json.print();
  return 0;
}
