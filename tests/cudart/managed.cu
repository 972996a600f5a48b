// SPDX-License-Identifier: Apache-2.0
// Managed memory: the host and kernels write the same pages in turn; advice and prefetches are remembered; copies and
// sets take it as device memory.
#include "check.cuh"

constexpr int kCount = 64 << 10;
constexpr size_t kBytes = kCount * sizeof(uint32_t);

__global__ void add(uint32_t* words, uint32_t by, int count) {
  for (size_t i = here(); i < count; i += threads()) words[i] += by;
}

namespace {

cudaMemLocation place(cudaMemLocationType type, int id) {
  cudaMemLocation l = {};
  l.type = type;
  l.id = id;
  return l;
}

int said(cudaMemRangeAttribute which, const void* p, size_t bytes) {
  int value = 77;
  CHECK(cudaMemRangeGetAttribute(&value, sizeof value, which, p, bytes));
  return value;
}

void turns() {
  uint32_t* words = nullptr;
  CHECK(cudaMallocManaged(&words, kBytes));
  for (int i = 0; i < kCount; ++i) words[i] = i;
  for (uint32_t round = 0; round < 3; ++round) {
    add<<<4, 256>>>(words, 5, kCount);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < kCount; ++i) EXPECT_EQ(words[i], made<uint32_t>(i + 5 + 6 * round, i + round));
    for (int i = 0; i < kCount; ++i) ++words[i];
  }
  CHECK(cudaFree(words));
}

void copies() {
  uint32_t *a = nullptr, *b = nullptr;
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaMallocManaged(&a, kBytes, cudaMemAttachGlobal));
  CHECK(cudaMallocManaged(&b, kBytes, cudaMemAttachHost));
  CHECK(cudaStreamAttachMemAsync(stream, b, 0, cudaMemAttachGlobal));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemsetAsync(a, 0x21, kBytes, stream));
  CHECK(cudaMemcpyAsync(b, a, kBytes, cudaMemcpyDefault, stream));
  CHECK(cudaStreamSynchronize(stream));
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(b[i], 0x21212121);
  std::vector<uint32_t> host(kCount, 9);
  CHECK(cudaMemcpy(a, host.data(), kBytes, cudaMemcpyHostToDevice));
  uint32_t* device_words = device<uint32_t>(kCount);
  CHECK(cudaMemcpy(device_words, a, kBytes, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemset(a, 0, kBytes));
  CHECK(cudaMemcpy(b, device_words, kBytes, cudaMemcpyDefault));
  CHECK(cudaMemcpy(host.data(), a, kBytes, cudaMemcpyDeviceToHost));
  CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < kCount; ++i) EXPECT(b[i] == 9 && host[i] == 0 && a[i] == 0);
  CHECK(cudaMemcpy2D(a, 64, b, 128, 32, 16, cudaMemcpyDefault));
  CHECK(cudaDeviceSynchronize());
  EXPECT(a[0] == 9 && a[7] == 9 && a[8] == 0 && a[16] == 9 && a[15 * 16 + 7] == 9 && a[16 * 16] == 0);
  CHECK(cudaFree(device_words));
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  CHECK(cudaStreamDestroy(stream));
}

void described() {
  uint32_t* words = nullptr;
  cudaPointerAttributes about;
  CHECK(cudaMallocManaged(&words, kBytes));
  CHECK(cudaPointerGetAttributes(&about, words + 3));
  EXPECT(about.type == cudaMemoryTypeManaged && about.device == 0);
  EXPECT(about.devicePointer == words + 3 && about.hostPointer == words + 3);
  CHECK(cudaFree(words));
  EXPECT_ERROR(cudaFree(words), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaMallocManaged(&words, 0), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaMallocManaged(&words, 64, 0), cudaErrorInvalidValue);
}

void advised() {
  constexpr size_t kPage = 64 << 10;  // of any host
  char* p = nullptr;
  const cudaMemLocation cpu = place(cudaMemLocationTypeHost, 0), gpu = place(cudaMemLocationTypeDevice, 0);
  CHECK(cudaMallocManaged(&p, 4 * kPage));
  CHECK(cudaMemAdvise(p, 2 * kPage, cudaMemAdviseSetReadMostly, gpu));
  EXPECT_EQ(said(cudaMemRangeAttributeReadMostly, p, 2 * kPage), 1);
  EXPECT_EQ(said(cudaMemRangeAttributeReadMostly, p, 3 * kPage), 0);
  CHECK(cudaMemAdvise(p, kPage, cudaMemAdviseUnsetReadMostly, gpu));
  EXPECT_EQ(said(cudaMemRangeAttributeReadMostly, p, 2 * kPage), 0);
  CHECK(cudaMemAdvise(p, kPage, cudaMemAdviseSetPreferredLocation, cpu));
  CHECK(cudaMemAdvise(p + kPage, kPage, cudaMemAdviseSetPreferredLocation, gpu));
  EXPECT_EQ(said(cudaMemRangeAttributePreferredLocation, p, kPage), cudaCpuDeviceId);
  EXPECT_EQ(said(cudaMemRangeAttributePreferredLocation, p + kPage, kPage), 0);
  EXPECT_EQ(said(cudaMemRangeAttributePreferredLocation, p, 2 * kPage), cudaInvalidDeviceId);
  CHECK(cudaMemAdvise(p, 4 * kPage, cudaMemAdviseSetAccessedBy, gpu));
  int list[2] = {7, 7};
  CHECK(cudaMemRangeGetAttribute(list, sizeof list, cudaMemRangeAttributeAccessedBy, p, 4 * kPage));
  EXPECT(list[0] == 0 && list[1] == cudaInvalidDeviceId);
  CHECK(cudaMemPrefetchAsync(p, 2 * kPage, gpu, 0, nullptr));
  CHECK(cudaMemPrefetchAsync(p, kPage, cpu, 0, nullptr));
  CHECK(cudaDeviceSynchronize());
  int last = 7, mostly = 7;
  void* data[] = {&last, &mostly};
  size_t sizes[] = {sizeof last, sizeof mostly};
  cudaMemRangeAttribute attributes[] = {cudaMemRangeAttributeLastPrefetchLocation, cudaMemRangeAttributeReadMostly};
  CHECK(cudaMemRangeGetAttributes(data, sizes, attributes, 2, p + kPage, kPage));
  EXPECT(last == 0 && mostly == 1);
  EXPECT_EQ(said(cudaMemRangeAttributeLastPrefetchLocation, p, kPage), cudaCpuDeviceId);
  EXPECT_EQ(said(cudaMemRangeAttributeLastPrefetchLocation, p, 2 * kPage), cudaInvalidDeviceId);

  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  void* starts[] = {p, p + 2 * kPage, p + 3 * kPage};
  size_t lengths[] = {kPage, kPage, kPage}, firsts[] = {0, 2};
  cudaMemLocation places[] = {gpu, cpu};
  memset(p, 3, 2 * kPage);
  CHECK(cudaMemPrefetchBatchAsync(starts, lengths, 3, places, firsts, 2, 0, stream));
  CHECK(cudaMemDiscardBatchAsync(starts + 1, lengths, 1, 0, stream));
  CHECK(cudaMemDiscardAndPrefetchBatchAsync(starts + 1, lengths, 1, places + 1, firsts, 1, 0, stream));
  CHECK(cudaStreamSynchronize(stream));
  EXPECT_EQ(said(cudaMemRangeAttributeLastPrefetchLocation, p, kPage), 0);
  EXPECT_EQ(said(cudaMemRangeAttributeLastPrefetchLocation, p + 2 * kPage, 2 * kPage), cudaCpuDeviceId);
  EXPECT(p[0] == 3 && p[2 * kPage - 1] == 3);
  CHECK(cudaStreamDestroy(stream));

  EXPECT_ERROR(cudaMemPrefetchAsync(p, kPage, place(cudaMemLocationTypeDevice, 99), 0, nullptr),
               cudaErrorInvalidDevice);
  CHECK(cudaFree(p));
}

}  // namespace

int main() {
  if (!attribute(cudaDevAttrConcurrentManagedAccess)) not_here("managed memory that the host may touch meanwhile");
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  EXPECT(properties.managedMemory == 1 && properties.concurrentManagedAccess == 1);
  turns();
  copies();
  described();
  advised();
  return ok("managed");
}
