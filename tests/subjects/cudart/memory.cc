// SPDX-License-Identifier: Apache-2.0
// Memory: allocation in every form, copies in every direction and dimension, memset, attributes of addresses, pools.
#include "program.h"

static std::vector<unsigned char> pattern(size_t n, unsigned seed) {
  std::vector<unsigned char> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<unsigned char>(i * 31 + seed + (i >> 8));
  return out;
}

static std::vector<unsigned char> read(const void* device, size_t n) {
  std::vector<unsigned char> out(n);
  CHECK(cudaMemcpy(out.data(), device, n, cudaMemcpyDeviceToHost));
  return out;
}

static void linear() {
  constexpr size_t kBytes = 3 << 20;
  void *a = nullptr, *b = nullptr, *zero = &a;
  CHECK(cudaMalloc(&zero, 0));
  EXPECT(zero == nullptr);
  CHECK(cudaMalloc(&a, kBytes));
  CHECK(cudaMalloc(&b, kBytes));
  const auto want = pattern(kBytes, 1);
  CHECK(cudaMemcpy(a, want.data(), kBytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(b, a, kBytes, cudaMemcpyDeviceToDevice));
  EXPECT(read(b, kBytes) == want);
  // Default: the addresses say it. Host to host too.
  const auto other = pattern(kBytes, 2);
  std::vector<unsigned char> out(kBytes), host(kBytes);
  CHECK(cudaMemcpy(a, other.data(), kBytes, cudaMemcpyDefault));
  CHECK(cudaMemcpy(b, a, kBytes, cudaMemcpyDefault));
  CHECK(cudaMemcpy(out.data(), b, kBytes, cudaMemcpyDefault));
  EXPECT(out == other);
  CHECK(cudaMemcpy(host.data(), out.data(), kBytes, cudaMemcpyHostToHost));
  EXPECT(host == other);
  CHECK(cudaMemcpy(a, nullptr, 0, cudaMemcpyHostToDevice));
  EXPECT_RESULT(cudaMemcpy(host.data(), want.data(), 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMemcpy(a, want.data(), kBytes + (8 << 20), cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  // Peer copies of one device are copies.
  CHECK(cudaMemcpy(a, want.data(), kBytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpyPeer(b, 0, a, 0, kBytes));
  EXPECT(read(b, kBytes) == want);
  EXPECT_RESULT(cudaMemcpyPeer(b, 0, a, 77, 16), cudaErrorInvalidDevice);
  CHECK(cudaMemset(a, 0x5c, 1000));
  const auto set = read(a, 1001);
  for (int i = 0; i < 1000; ++i) EXPECT(set[i] == 0x5c);
  EXPECT(set[1000] == want[1000]);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  EXPECT_RESULT(cudaFree(a), cudaErrorInvalidValue);
}

static void async() {
  constexpr size_t kBytes = 1 << 20;
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  void *a = nullptr, *b = nullptr;
  unsigned char *in = nullptr, *out = nullptr;
  CHECK(cudaMalloc(&a, kBytes));
  CHECK(cudaMalloc(&b, kBytes));
  CHECK(cudaMallocHost(reinterpret_cast<void**>(&in), kBytes));
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&out), kBytes, cudaHostAllocPortable | cudaHostAllocMapped));
  const auto want = pattern(kBytes, 3);
  memcpy(in, want.data(), kBytes);
  Gate gate;
  gate.close(s);
  CHECK(cudaMemcpyAsync(a, in, kBytes, cudaMemcpyHostToDevice, s));
  CHECK(cudaMemcpyAsync(b, a, kBytes, cudaMemcpyDeviceToDevice, s));
  CHECK(cudaMemcpyAsync(out, b, kBytes, cudaMemcpyDefault, s));
  EXPECT_RESULT(cudaStreamQuery(s), cudaErrorNotReady);
  gate.open();
  CHECK(cudaStreamSynchronize(s));
  EXPECT(memcmp(out, want.data(), kBytes) == 0);
  CHECK(cudaMemsetAsync(a, 7, kBytes, s));
  CHECK(cudaMemcpyAsync(out, a, kBytes, cudaMemcpyDeviceToHost, s));
  CHECK(cudaMemcpyPeerAsync(b, 0, a, 0, kBytes, s));
  CHECK(cudaStreamSynchronize(s));
  EXPECT(out[0] == 7 && out[kBytes - 1] == 7);
  CHECK(cudaFreeHost(in));
  CHECK(cudaFreeHost(out));
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  CHECK(cudaStreamDestroy(s));
}

static void rows() {
  constexpr size_t kWidth = 300, kHeight = 40, kHostPitch = 317;
  void* a = nullptr;
  size_t pitch = 0;
  CHECK(cudaMallocPitch(&a, &pitch, kWidth, kHeight));
  EXPECT(pitch >= kWidth && pitch % 256 == 0);
  const auto in = pattern(kHostPitch * kHeight, 4);
  std::vector<unsigned char> out(kHostPitch * kHeight, 0xee);
  CHECK(cudaMemset2D(a, pitch, 0x11, kWidth, kHeight));
  CHECK(cudaMemcpy2D(a, pitch, in.data(), kHostPitch, kWidth, kHeight - 1, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy2D(out.data(), kHostPitch, a, pitch, kWidth, kHeight, cudaMemcpyDefault));
  for (size_t y = 0; y < kHeight; ++y)
    for (size_t x = 0; x < kHostPitch; ++x) {
      const unsigned char want = x >= kWidth ? 0xee : y == kHeight - 1 ? 0x11 : in[y * kHostPitch + x];
      EXPECT(out[y * kHostPitch + x] == want);
    }
  CHECK(cudaMemset2DAsync(a, pitch, 0x22, kWidth, 2, nullptr));
  CHECK(cudaMemcpy2DAsync(out.data(), kHostPitch, a, pitch, kWidth, 3, cudaMemcpyDeviceToHost, nullptr));
  CHECK(cudaDeviceSynchronize());
  EXPECT(out[0] == 0x22 && out[kHostPitch] == 0x22 && out[2 * kHostPitch] == in[2 * kHostPitch]);
  CHECK(cudaFree(a));
}

static void slices() {
  constexpr size_t kX = 60, kY = 7, kZ = 5;
  cudaPitchedPtr p{};
  CHECK(cudaMalloc3D(&p, cudaExtent{kX, kY, kZ}));
  EXPECT(p.ptr != nullptr && p.pitch >= kX && p.xsize == kX && p.ysize == kY);
  CHECK(cudaMemset3D(p, 9, cudaExtent{kX, kY, kZ}));
  auto in = pattern(kX * kY * kZ, 5);
  std::vector<unsigned char> out(kX * kY * kZ);
  cudaMemcpy3DParms c{};
  c.srcPtr = cudaPitchedPtr{in.data(), kX, kX, kY};
  c.dstPtr = p;
  c.dstPos = cudaPos{10, 1, 2};
  c.extent = cudaExtent{40, 4, 2};
  c.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&c));
  cudaMemcpy3DParms back{};
  back.srcPtr = p;
  back.dstPtr = cudaPitchedPtr{out.data(), kX, kX, kY};
  back.extent = cudaExtent{kX, kY, kZ};
  back.kind = cudaMemcpyDefault;
  CHECK(cudaMemcpy3DAsync(&back, nullptr));
  CHECK(cudaStreamSynchronize(nullptr));
  for (size_t z = 0; z < kZ; ++z)
    for (size_t y = 0; y < kY; ++y)
      for (size_t x = 0; x < kX; ++x) {
        const bool within = x >= 10 && x < 50 && y >= 1 && y < 5 && z >= 2 && z < 4;
        const unsigned char want = within ? in[(z - 2) * kX * kY + (y - 1) * kX + x - 10] : 9;
        EXPECT(out[z * kX * kY + y * kX + x] == want);
      }
  cudaMemcpy3DPeerParms peer{};
  peer.srcPtr = p;
  peer.dstPtr = p;
  peer.extent = cudaExtent{kX, kY, 1};
  peer.dstPos = cudaPos{0, 0, 4};
  CHECK(cudaMemcpy3DPeer(&peer));
  c.srcPtr.ptr = nullptr;
  EXPECT_RESULT(cudaMemcpy3D(&c), cudaErrorInvalidValue);
  CHECK(cudaFree(p.ptr));
}

static void addresses() {
  cudaPointerAttributes a;
  void *device = nullptr, *pinned = nullptr, *mapped = nullptr;
  int on_stack = 0;
  CHECK(cudaMalloc(&device, 4096));
  CHECK(cudaHostAlloc(&pinned, 4096, cudaHostAllocMapped));
  CHECK(cudaPointerGetAttributes(&a, static_cast<char*>(device) + 100));
  EXPECT(a.type == cudaMemoryTypeDevice && a.device == 0 && a.devicePointer == static_cast<char*>(device) + 100);
  EXPECT(a.hostPointer == nullptr);
  CHECK(cudaPointerGetAttributes(&a, pinned));
  EXPECT(a.type == cudaMemoryTypeHost && a.device == 0 && a.hostPointer == pinned);
  CHECK(cudaHostGetDevicePointer(&mapped, pinned, 0));
  EXPECT(a.devicePointer == mapped);
  CHECK(cudaPointerGetAttributes(&a, &on_stack));
  EXPECT(a.type == cudaMemoryTypeUnregistered && a.device == cudaInvalidDeviceId && a.devicePointer == nullptr);
  EXPECT(a.hostPointer == &on_stack);
  unsigned flags = 0;
  CHECK(cudaHostGetFlags(&flags, pinned));
  EXPECT_RESULT(cudaHostAlloc(&pinned, 16, 0x80), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaPointerGetAttributes(nullptr, device), cudaErrorInvalidValue);
  // Registered memory.
  auto* pages = static_cast<char*>(aligned_alloc(4096, 1 << 16));
  CHECK(cudaHostRegister(pages, 1 << 16, cudaHostRegisterDefault));
  EXPECT_RESULT(cudaHostRegister(pages, 1 << 16, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
  CHECK(cudaPointerGetAttributes(&a, pages + 8));
  EXPECT(a.type == cudaMemoryTypeHost && a.hostPointer == pages + 8);
  CHECK(cudaMemcpyAsync(device, pages, 4096, cudaMemcpyHostToDevice, nullptr));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaHostUnregister(pages));
  EXPECT_RESULT(cudaHostUnregister(pages), cudaErrorHostMemoryNotRegistered);
  free(pages);
  CHECK(cudaFree(device));
}

static void pools() {
  cudaMemPool_t pool = nullptr, current = nullptr;
  CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
  CHECK(cudaDeviceGetMemPool(&current, 0));
  EXPECT(pool != nullptr && pool == current);
  uint64_t threshold = 1 << 20, got = 0;
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &got));
  EXPECT(got == threshold);
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  for (int round = 0; round < 50; ++round) {
    void *a = nullptr, *b = nullptr;
    unsigned char out[64] = {};
    CHECK(cudaMallocAsync(&a, 1 << 16, s));
    CHECK(cudaMallocFromPoolAsync(&b, 1 << 16, pool, s));
    CHECK(cudaMemsetAsync(a, round, 1 << 16, s));
    CHECK(cudaMemcpyAsync(b, a, 1 << 16, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaMemcpyAsync(out, b, sizeof out, cudaMemcpyDeviceToHost, s));
    CHECK(cudaFreeAsync(a, s));
    CHECK(cudaFreeAsync(b, s));
    CHECK(cudaStreamSynchronize(s));
    EXPECT(out[0] == round && out[63] == round);
  }
  CHECK(cudaMemPoolTrimTo(pool, 0));
  // One of our own: its account, its being current, its end.
  cudaMemPool_t mine = nullptr;
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  CHECK(cudaMemPoolCreate(&mine, &props));
  EXPECT(mine != pool);
  void *a = nullptr, *b = nullptr;
  CHECK(cudaMallocFromPoolAsync(&a, 1000, mine, s));
  CHECK(cudaDeviceSetMemPool(0, mine));
  CHECK(cudaMallocAsync(&b, 500, s));
  CHECK(cudaMemPoolGetAttribute(mine, cudaMemPoolAttrUsedMemCurrent, &got));
  EXPECT(got == 1500);
  CHECK(cudaFreeAsync(a, s));
  CHECK(cudaFree(b));  // either call frees it
  CHECK(cudaMemPoolGetAttribute(mine, cudaMemPoolAttrUsedMemCurrent, &got));
  EXPECT(got == 0);
  CHECK(cudaMemPoolGetAttribute(mine, cudaMemPoolAttrUsedMemHigh, &got));
  EXPECT(got == 1500);
  got = 0;
  CHECK(cudaMemPoolSetAttribute(mine, cudaMemPoolAttrUsedMemHigh, &got));
  CHECK(cudaMemPoolGetAttribute(mine, cudaMemPoolAttrUsedMemHigh, &got));
  EXPECT(got == 0);
  cudaMemAccessFlags access = cudaMemAccessFlagsProtNone;
  CHECK(cudaMemPoolGetAccess(&access, mine, &props.location));
  EXPECT(access == cudaMemAccessFlagsProtReadWrite);
  CHECK(cudaMemPoolDestroy(mine));
  CHECK(cudaDeviceGetMemPool(&current, 0));
  EXPECT(current == pool);
  EXPECT_RESULT(cudaMemPoolDestroy(pool), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMallocFromPoolAsync(&a, 64, mine, s), cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaStreamDestroy(s));
}

int main() {
  size_t free = 0, total = 0;
  CHECK(cudaMemGetInfo(&free, &total));
  EXPECT(free > 0 && free <= total);
  linear();
  async();
  rows();
  slices();
  addresses();
  pools();
  EXPECT_RESULT(cudaDeviceSynchronize(), cudaSuccess);
  return pass("memory");
}
