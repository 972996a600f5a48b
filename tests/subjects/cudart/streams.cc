// SPDX-License-Identifier: Apache-2.0
// Streams and events: order, queries, callbacks, host functions, times, priorities, captures that are none.
#include "program.h"

struct Called {
  std::atomic<int> count{0};
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaErrorUnknown;
};

static void callback(cudaStream_t stream, cudaError_t status, void* data) {
  auto* c = static_cast<Called*>(data);
  c->stream = stream;
  c->status = status;
  ++c->count;
}
static void function(void* data) { ++static_cast<Called*>(data)->count; }

int main() {
  cudaStream_t a, b, high;
  int least = 0, greatest = 0, value = -1;
  unsigned flags = 99;
  unsigned long long id = 0, other = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(cudaStreamCreate(&a));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, greatest));
  CHECK(cudaStreamGetPriority(high, &value));
  EXPECT(value == greatest);
  CHECK(cudaStreamGetFlags(b, &flags));
  EXPECT(flags == cudaStreamNonBlocking);
  CHECK(cudaStreamGetFlags(a, &flags));
  EXPECT(flags == cudaStreamDefault);
  CHECK(cudaStreamGetId(a, &id));
  CHECK(cudaStreamGetId(b, &other));
  EXPECT(id != other);
  CHECK(cudaStreamGetDevice(a, &value));
  EXPECT(value == 0);
  EXPECT_RESULT(cudaStreamCreateWithFlags(&b, 0x40), cudaErrorInvalidValue);
  cudaGetLastError();

  // A waits for an event of B.
  cudaEvent_t start, end, plain;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming | cudaEventBlockingSync));
  EXPECT_RESULT(cudaEventCreateWithFlags(&plain, 0x80), cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaEventQuery(start));  // never recorded: complete
  Gate gate;
  Called order, done;
  CHECK(cudaEventRecord(start, b));
  gate.close(b);
  CHECK(cudaLaunchHostFunc(b, function, &done));
  CHECK(cudaEventRecord(plain, b));
  CHECK(cudaStreamWaitEvent(a, plain, 0));
  CHECK(cudaStreamAddCallback(a, callback, &order, 0));
  CHECK(cudaEventRecordWithFlags(end, a, cudaEventRecordDefault));
  EXPECT_RESULT(cudaEventQuery(plain), cudaErrorNotReady);
  EXPECT_RESULT(cudaStreamQuery(a), cudaErrorNotReady);
  EXPECT(order.count == 0);
  float ms = -1;
  EXPECT_RESULT(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
  gate.open();
  CHECK(cudaEventSynchronize(end));
  EXPECT(order.count == 1 && order.stream == a && order.status == cudaSuccess && done.count == 1);
  CHECK(cudaStreamQuery(b));
  CHECK(cudaEventElapsedTime(&ms, start, end));
  EXPECT(ms >= 0 && ms < 60000);
  EXPECT_RESULT(cudaEventElapsedTime(&ms, start, plain), cudaErrorInvalidResourceHandle);
  cudaGetLastError();

  // The legacy stream waits for the blocking one and not for the other.
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 64));
  gate.close(b);
  CHECK(cudaMemset(memory, 1, 64));
  CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  gate.open();
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemsetAsync(memory, 2, 64, cudaStreamPerThread));
  CHECK(cudaStreamSynchronize(cudaStreamPerThread));

  // Nothing is being captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == cudaStreamCaptureModeGlobal);
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == cudaStreamCaptureModeRelaxed);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  CHECK(cudaStreamIsCapturing(a, &status));
  EXPECT(status == cudaStreamCaptureStatusNone);
  status = cudaStreamCaptureStatusActive;
#if CUDART_VERSION >= 13000
  CHECK(cudaStreamGetCaptureInfo(a, &status, &id, nullptr, nullptr, nullptr, nullptr));
#else
  CHECK(cudaStreamGetCaptureInfo_v2(a, &status, &id, nullptr, nullptr, nullptr));
#endif
  EXPECT(status == cudaStreamCaptureStatusNone);

  for (cudaEvent_t e : {start, end, plain}) CHECK(cudaEventDestroy(e));
  for (cudaStream_t s : {a, b, high}) CHECK(cudaStreamDestroy(s));
  EXPECT_RESULT(cudaStreamSynchronize(a), cudaErrorInvalidResourceHandle);
  return pass("streams");
}
