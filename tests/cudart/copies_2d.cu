// SPDX-License-Identifier: Apache-2.0
// Pitched and three-dimensional copies and fills between host and device memory.
#include "check.cuh"

constexpr size_t kWidth = 301, kHeight = 37, kDepth = 5;

static uint8_t at(size_t x, size_t y, size_t z) { return uint8_t(x * 7 + y * 13 + z * 31 + 1); }

__global__ void invert(uint8_t* bytes, size_t pitch, size_t width, size_t height) {
  for (size_t i = here(); i < width * height; i += threads()) bytes[i / width * pitch + i % width] ^= 0xFF;
}

static void two_dimensions() {
  uint8_t *first, *second;
  size_t pitch = 0, second_pitch = 0;
  CHECK(cudaMallocPitch(&first, &pitch, kWidth, kHeight));
  CHECK(cudaMallocPitch(&second, &second_pitch, kWidth + 400, kHeight));
  EXPECT(pitch >= kWidth && pitch % 32 == 0 && second_pitch > pitch);
  std::vector<uint8_t> sent(400 * kHeight), got(350 * kHeight, 0xEE);
  for (size_t y = 0; y < kHeight; ++y)
    for (size_t x = 0; x < 400; ++x) sent[y * 400 + x] = at(x, y, 0);
  CHECK(cudaMemset2D(first, pitch, 0x11, kWidth, kHeight));
  CHECK(cudaMemcpy2D(first, pitch, sent.data() + 5, 400, kWidth - 1, kHeight, cudaMemcpyHostToDevice));
  invert<<<16, 128>>>(first, pitch, kWidth, kHeight);
  LAUNCHED();
  CHECK(cudaMemset2DAsync(second, second_pitch, 0x22, kWidth + 400, kHeight, 0));
  CHECK(cudaMemcpy2DAsync(second + 9, second_pitch, first, pitch, kWidth, kHeight, cudaMemcpyDeviceToDevice, 0));
  CHECK(cudaMemcpy2D(got.data(), 350, second + 9, second_pitch, kWidth, kHeight, cudaMemcpyDeviceToHost));
  const uint8_t mask = made<uint8_t>(0xFF, 0);
  for (size_t y = 0; y < kHeight; ++y)
    for (size_t x = 0; x < 350; ++x) {
      const uint8_t want = x < kWidth - 1 ? at(x + 5, y, 0) ^ mask : x == kWidth - 1 ? 0x11 ^ mask : 0xEE;
      EXPECT_EQ(got[y * 350 + x], want);
    }
  CHECK(cudaMemcpy2D(got.data(), 350, second, second_pitch, 9, kHeight, cudaMemcpyDefault));
  for (size_t y = 0; y < kHeight; ++y) EXPECT_EQ(got[y * 350 + 8], 0x22);
  EXPECT_ERROR(cudaMemcpy2D(first, 100, sent.data(), 400, 200, 2, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
  CHECK(cudaFree(first));
  CHECK(cudaFree(second));
}

static void three_dimensions() {
  cudaPitchedPtr memory{};
  const cudaExtent extent = make_cudaExtent(kWidth, kHeight, kDepth);
  CHECK(cudaMalloc3D(&memory, extent));
  EXPECT(memory.ptr && memory.pitch >= kWidth);
  CHECK(cudaMemset3D(memory, 0x33, extent));
  std::vector<uint8_t> sent(kWidth * kHeight * kDepth), got(sent.size(), 0xEE);
  for (size_t z = 0; z < kDepth; ++z)
    for (size_t y = 0; y < kHeight; ++y)
      for (size_t x = 0; x < kWidth; ++x) sent[(z * kHeight + y) * kWidth + x] = at(x, y, z);
  // A box in the middle goes to the device.
  cudaMemcpy3DParms in{};
  in.srcPtr = make_cudaPitchedPtr(sent.data(), kWidth, kWidth, kHeight);
  in.srcPos = make_cudaPos(10, 2, 1);
  in.dstPtr = memory;
  in.dstPos = make_cudaPos(20, 3, 2);
  in.extent = make_cudaExtent(100, 20, 3);
  in.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&in));
  cudaMemcpy3DParms out{};
  out.srcPtr = memory;
  out.dstPtr = make_cudaPitchedPtr(got.data(), kWidth, kWidth, kHeight);
  out.extent = extent;
  out.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaMemcpy3DAsync(&out, 0));
  CHECK(cudaStreamSynchronize(0));
  for (size_t z = 0; z < kDepth; ++z)
    for (size_t y = 0; y < kHeight; ++y)
      for (size_t x = 0; x < kWidth; ++x) {
        const bool inside = x >= 20 && x < 120 && y >= 3 && y < 23 && z >= 2;
        EXPECT_EQ(got[(z * kHeight + y) * kWidth + x], inside ? at(x - 10, y - 1, z - 1) : 0x33);
      }
  CHECK(cudaFree(memory.ptr));
}

int main() {
  two_dimensions();
  three_dimensions();
  return ok("copies_2d");
}
