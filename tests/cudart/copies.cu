// SPDX-License-Identifier: Apache-2.0
// Copies of linear memory: every kind, pageable and pinned, with and without a stream, odd sizes and offsets, fills.
#include "gate.cuh"

constexpr size_t kBytes = (3 << 20) + 4096;

static std::vector<uint8_t> pattern(size_t count, uint32_t seed) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = uint8_t((i * 2654435761u + seed * 40503u) >> 11);
  return bytes;
}

__global__ void invert(uint8_t* bytes, size_t count) {
  for (size_t i = here(); i < count; i += threads()) bytes[i] = ~bytes[i];
}

// To the device, from there to another place, and back.
static void round_trip(size_t count, size_t offset, cudaMemcpyKind to, cudaMemcpyKind across, cudaMemcpyKind from) {
  static uint8_t *first = device<uint8_t>(kBytes), *second = device<uint8_t>(kBytes);
  const std::vector<uint8_t> sent = pattern(count, uint32_t(count + offset));
  std::vector<uint8_t> got(count + 2, 0xEE);
  CHECK(cudaMemcpy(first + offset, sent.data(), count, to));
  CHECK(cudaMemcpy(second + 3, first + offset, count, across));
  CHECK(cudaMemcpy(got.data() + 1, second + 3, count, from));
  EXPECT(!memcmp(got.data() + 1, sent.data(), count));
  EXPECT_EQ(got.front(), 0xEE);
  EXPECT_EQ(got.back(), 0xEE);
}

static void sizes_and_kinds() {
  for (size_t count :
       {size_t{0}, size_t{1}, size_t{3}, size_t{64}, size_t{4096}, size_t{65535}, size_t{65536}, size_t{1048593}})
    for (size_t offset : {size_t{0}, size_t{1}, size_t{250}}) {
      round_trip(count, offset, cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice, cudaMemcpyDeviceToHost);
      round_trip(count, offset, cudaMemcpyDefault, cudaMemcpyDefault, cudaMemcpyDefault);
    }
  const std::vector<uint8_t> sent = pattern(1000, 9);
  std::vector<uint8_t> got(1000);
  CHECK(cudaMemcpy(got.data(), sent.data(), 1000, cudaMemcpyHostToHost));
  EXPECT(got == sent);
  EXPECT_ERROR(cudaMemcpy(got.data(), sent.data(), 1000, static_cast<cudaMemcpyKind>(99)),
               cudaErrorInvalidMemcpyDirection);
}

// A pageable source may be changed as soon as the call returns; a pinned one is read when the stream gets there.
static void asynchronous() {
  constexpr size_t kPart = 1 << 20;
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  uint8_t *memory = device<uint8_t>(2 * kPart), *pinned;
  CHECK(cudaMallocHost(&pinned, kPart));
  std::vector<uint8_t> pageable = pattern(kPart, 1);
  const std::vector<uint8_t> sent = pageable, late = pattern(kPart, 2);
  CHECK(cudaMemcpyAsync(memory, pageable.data(), kPart, cudaMemcpyHostToDevice, s));
  std::fill(pageable.begin(), pageable.end(), 0);
  memset(pinned, 0, kPart);
  Gate gate;
  gate.close(s);
  CHECK(cudaMemcpyAsync(memory + kPart, pinned, kPart, cudaMemcpyHostToDevice, s));
  memcpy(pinned, late.data(), kPart);
  gate.open();
  CHECK(cudaStreamSynchronize(s));
  EXPECT(back(memory, kPart) == sent);
  EXPECT(back(memory + kPart, kPart) == late);
  // Out to pinned memory and in again from the same, with nobody waiting between: the second sees what the first wrote.
  for (int k = 0; k < 10; ++k) {
    invert<<<64, 128, 0, s>>>(memory, kPart);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(pinned, memory, kPart, cudaMemcpyDeviceToHost, s));
    CHECK(cudaMemcpyAsync(memory + kPart, pinned, kPart, cudaMemcpyHostToDevice, s));
    CHECK(cudaMemcpyAsync(memory, memory + kPart, kPart, cudaMemcpyDeviceToDevice, s));
  }
  invert<<<64, 128, 0, s>>>(memory + kPart, kPart);
  LAUNCHED();
  CHECK(cudaMemcpyAsync(pinned, memory + kPart, kPart, cudaMemcpyDefault, s));
  CHECK(cudaStreamSynchronize(s));
  if (kernels_run())
    for (size_t i = 0; i < kPart; ++i) EXPECT_EQ(pinned[i], uint8_t(~sent[i]));
  else
    EXPECT(!memcmp(pinned, sent.data(), kPart));
  EXPECT(back(memory, kPart) == sent);
  CHECK(cudaFreeHost(pinned));
  CHECK(cudaFree(memory));
  CHECK(cudaStreamDestroy(s));
}

static void to_itself_as_a_peer() {
  const std::vector<uint8_t> sent = pattern(100'003, 4);
  uint8_t *from = device_of(sent), *to = device<uint8_t>(sent.size());
  CHECK(cudaMemset(to, 0, sent.size()));
  CHECK(cudaMemcpyPeer(to, 0, from, 0, sent.size()));
  EXPECT(back(to, sent.size()) == sent);
  CHECK(cudaMemset(to, 0, sent.size()));
  CHECK(cudaMemcpyPeerAsync(to, 0, from, 0, sent.size(), 0));
  CHECK(cudaDeviceSynchronize());
  EXPECT(back(to, sent.size()) == sent);
  int can = 1;
  CHECK(cudaDeviceCanAccessPeer(&can, 0, 0));
  EXPECT_EQ(can, 0);  // a device is no peer of its own
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
}

static void fills() {
  uint8_t* bytes = device<uint8_t>(100'000);
  CHECK(cudaMemset(bytes, 0x5A, 100'000));
  CHECK(cudaMemset(bytes + 7, 0xA5, 333));
  CHECK(cudaMemsetAsync(bytes + 50'001, 1, 2, 0));
  CHECK(cudaMemset(bytes, 9, 0));
  const std::vector<uint8_t> got = back(bytes, 100'000);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i], i >= 7 && i < 340 ? 0xA5 : i == 50'001 || i == 50'002 ? 1 : 0x5A);
  CHECK(cudaFree(bytes));
}

static void pointers() {
  uint8_t *memory = device<uint8_t>(4096), *pinned, on_the_stack = 0;
  CHECK(cudaMallocHost(&pinned, 4096));
  cudaPointerAttributes a{};
  CHECK(cudaPointerGetAttributes(&a, memory + 100));
  EXPECT_EQ(a.type, cudaMemoryTypeDevice);
  EXPECT_EQ(a.device, 0);
  EXPECT(a.devicePointer == memory + 100);
  CHECK(cudaPointerGetAttributes(&a, pinned + 5));
  EXPECT_EQ(a.type, cudaMemoryTypeHost);
  EXPECT(a.hostPointer == pinned + 5);
  CHECK(cudaPointerGetAttributes(&a, &on_the_stack));
  EXPECT_EQ(a.type, cudaMemoryTypeUnregistered);
  size_t free_before = 0, free_after = 0, total = 0;
  CHECK(cudaMemGetInfo(&free_before, &total));
  EXPECT(free_before <= total && total > size_t{64} << 20);
  uint8_t* large = device<uint8_t>(size_t{32} << 20);
  CHECK(cudaMemGetInfo(&free_after, &total));
  EXPECT(free_after <= free_before);
  CHECK(cudaFree(large));
  CHECK(cudaFree(nullptr));
  CHECK(cudaFreeHost(nullptr));
  CHECK(cudaFree(memory));
  CHECK(cudaFreeHost(pinned));
}

int main() {
  sizes_and_kinds();
  asynchronous();
  to_itself_as_a_peer();
  fills();
  pointers();
  return ok("copies");
}
