// SPDX-License-Identifier: Apache-2.0
// Stream capture: nothing happens while a graph is recorded; forks and joins by events; launched again and again; what
// must not be captured breaks the capture and says so.
#include "check.cuh"

constexpr int kCount = 4096;

__global__ void affine(uint32_t* words, uint32_t factor, uint32_t add) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] = words[i] * factor + add;
}
__global__ void sum_of(uint32_t* out, const uint32_t* a, const uint32_t* b) {
  for (size_t i = here(); i < kCount; i += threads()) out[i] = a[i] + b[i];
}

static void CUDART_CB count_up(void* data) { ++*static_cast<int*>(data); }

static cudaStreamCaptureStatus capturing(cudaStream_t s) {
  cudaStreamCaptureStatus status{};
  CHECK(cudaStreamIsCapturing(s, &status));
  return status;
}

int main() {
  cudaStream_t s, side;
  cudaEvent_t forked, joined;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
  uint32_t *a = zeroes<uint32_t>(kCount), *b = zeroes<uint32_t>(kCount), *out = zeroes<uint32_t>(kCount), *host;
  CHECK(cudaMallocHost(&host, kCount * 4));
  memset(host, 0xFF, kCount * 4);
  int called = 0;

  // Loaded before: what loading does within a capture is not what this is about.
  affine<<<1, 32, 0, s>>>(a, 0, 0);
  sum_of<<<1, 32, 0, s>>>(out, a, b);
  LAUNCHED();
  CHECK(cudaStreamSynchronize(s));
  EXPECT_EQ(capturing(s), cudaStreamCaptureStatusNone);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(capturing(s), cudaStreamCaptureStatusActive);
  affine<<<8, 128, 0, s>>>(a, 3, 1);
  LAUNCHED();
  CHECK(cudaEventRecord(forked, s));
  CHECK(cudaStreamWaitEvent(side, forked, 0));
  EXPECT_EQ(capturing(side), cudaStreamCaptureStatusActive);
  affine<<<8, 128, 0, side>>>(b, 5, 2);
  LAUNCHED();
  CHECK(cudaEventRecord(joined, side));
  affine<<<8, 128, 0, s>>>(a, 1, 10);
  LAUNCHED();
  CHECK(cudaStreamWaitEvent(s, joined, 0));
  sum_of<<<8, 128, 0, s>>>(out, a, b);
  LAUNCHED();
  CHECK(cudaMemcpyAsync(host, out, kCount * 4, cudaMemcpyDeviceToHost, s));
  CHECK(cudaLaunchHostFunc(s, count_up, &called));
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(s, &graph));
  EXPECT(graph);
  EXPECT_EQ(capturing(s), cudaStreamCaptureStatusNone);
  EXPECT_EQ(capturing(side), cudaStreamCaptureStatusNone);
  EXPECT_ALL(back(a, kCount), 0u);  // nothing has been done yet
  EXPECT_EQ(called, 0);
  EXPECT_EQ(host[0], 0xFFFFFFFF);

  cudaGraphExec_t executable;
  CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
  uint32_t wa = 0, wb = 0;
  for (int k = 1; k <= 4; ++k) {
    CHECK(cudaGraphLaunch(executable, s));
    wa = wa * 3 + 11, wb = wb * 5 + 2;
    CHECK(cudaStreamSynchronize(s));
    EXPECT_EQ(called, k);
    EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made(wa + wb, 0u));
  }

  // The same shape with other numbers takes the executable graph's place.
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  affine<<<8, 128, 0, s>>>(a, 0, 100);
  CHECK(cudaMemcpyAsync(host, a, kCount * 4, cudaMemcpyDeviceToHost, s));
  LAUNCHED();
  cudaGraph_t other = nullptr, again = nullptr;
  CHECK(cudaStreamEndCapture(s, &other));
  cudaGraphExec_t small;
  CHECK(cudaGraphInstantiate(&small, other, 0));
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  affine<<<8, 128, 0, s>>>(a, 0, 200);
  CHECK(cudaMemcpyAsync(host, a, kCount * 4, cudaMemcpyDeviceToHost, s));
  LAUNCHED();
  CHECK(cudaStreamEndCapture(s, &again));
  cudaGraphExecUpdateResultInfo how{};
  CHECK(cudaGraphExecUpdate(small, again, &how));
  EXPECT_EQ(how.result, cudaGraphExecUpdateSuccess);
  CHECK(cudaGraphLaunch(small, s));
  CHECK(cudaStreamSynchronize(s));
  EXPECT_ALL(std::vector<uint32_t>(host, host + kCount), made(200u, 0u));

  // Waiting for a stream that is captured breaks the capture.
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  EXPECT_ERROR(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(capturing(s), cudaStreamCaptureStatusInvalidated);
  cudaGraph_t broken = graph;
  EXPECT_ERROR(cudaStreamEndCapture(s, &broken), cudaErrorStreamCaptureInvalidated);
  EXPECT(!broken);
  EXPECT_EQ(capturing(s), cudaStreamCaptureStatusNone);
  affine<<<8, 128, 0, s>>>(a, 0, 7);  // and the stream is as before
  LAUNCHED();
  CHECK(cudaStreamSynchronize(s));
  EXPECT_MADE_EQ(back(a, 1)[0], 7);
  // A fork that was not joined.
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaEventRecord(forked, s));
  CHECK(cudaStreamWaitEvent(side, forked, 0));
  affine<<<8, 128, 0, side>>>(b, 1, 1);
  LAUNCHED();
  EXPECT_ERROR(cudaStreamEndCapture(s, &broken), cudaErrorStreamCaptureUnjoined);

  for (cudaGraph_t one : {graph, other, again}) CHECK(cudaGraphDestroy(one));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphExecDestroy(small));
  for (cudaEvent_t e : {forked, joined}) CHECK(cudaEventDestroy(e));
  for (cudaStream_t one : {s, side}) CHECK(cudaStreamDestroy(one));
  for (uint32_t* one : {a, b, out}) CHECK(cudaFree(one));
  CHECK(cudaFreeHost(host));
  return ok("capture");
}
