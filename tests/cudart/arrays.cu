// SPDX-License-Identifier: Apache-2.0
// Arrays: what they say of themselves, copies in, out and between them, of one, two and three dimensions.
#include "check.cuh"

constexpr size_t kWidth = 50, kHeight = 20, kDepth = 4;

static void two_dimensions() {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<uint2>();
  cudaArray_t first = nullptr, second = nullptr;
  CHECK(cudaMallocArray(&first, &format, kWidth, kHeight));
  CHECK(cudaMallocArray(&second, &format, kWidth, kHeight, cudaArraySurfaceLoadStore));
  cudaChannelFormatDesc said{};
  cudaExtent extent{};
  unsigned flags = 99;
  CHECK(cudaArrayGetInfo(&said, &extent, &flags, second));
  EXPECT_EQ(said.x, 32);
  EXPECT_EQ(said.y, 32);
  EXPECT_EQ(said.z, 0);
  EXPECT_EQ(said.f, cudaChannelFormatKindUnsigned);
  EXPECT_EQ(extent.width, kWidth);
  EXPECT_EQ(extent.height, kHeight);
  EXPECT_EQ(extent.depth, 0);
  EXPECT_EQ(flags, cudaArraySurfaceLoadStore);
  std::vector<uint2> sent(kWidth * kHeight), got(sent.size());
  for (uint32_t i = 0; i < sent.size(); ++i) sent[i] = make_uint2(i, ~i);
  constexpr size_t kRow = kWidth * sizeof(uint2);
  CHECK(cudaMemcpy2DToArray(first, 0, 0, sent.data(), kRow, kRow, kHeight, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy2DArrayToArray(second, 0, 0, first, 0, 0, kRow, kHeight, cudaMemcpyDeviceToDevice));
  // Four texels in row 3 go elsewhere on the way.
  CHECK(cudaMemcpy2DToArrayAsync(second, 8 * sizeof(uint2), 3, sent.data(), kRow, 4 * sizeof(uint2), 1,
                                 cudaMemcpyHostToDevice, 0));
  CHECK(cudaMemcpy2DFromArray(got.data(), kRow, second, 0, 0, kRow, kHeight, cudaMemcpyDeviceToHost));
  for (uint32_t i = 0; i < got.size(); ++i) {
    const bool replaced = i / kWidth == 3 && i % kWidth >= 8 && i % kWidth < 12;
    const uint32_t want = replaced ? uint32_t(i % kWidth - 8) : i;
    EXPECT_EQ(got[i].x, want);
    EXPECT_EQ(got[i].y, ~want);
  }
  uint2* linear = device<uint2>(sent.size());
  CHECK(cudaMemcpy2DFromArray(linear, kRow, first, 0, 0, kRow, kHeight, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemcpy(got.data(), linear, kRow * kHeight, cudaMemcpyDeviceToHost));
  EXPECT(!memcmp(got.data(), sent.data(), kRow * kHeight));
  CHECK(cudaFree(linear));
  CHECK(cudaFreeArray(first));
  CHECK(cudaFreeArray(second));
}

static void three_dimensions() {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<uint16_t>();
  const cudaExtent extent = make_cudaExtent(kWidth, kHeight, kDepth);
  cudaArray_t memory = nullptr;
  CHECK(cudaMalloc3DArray(&memory, &format, extent));
  std::vector<uint16_t> sent(kWidth * kHeight * kDepth), got(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = uint16_t(i * 3 + 1);
  cudaMemcpy3DParms copy{};
  copy.srcPtr = make_cudaPitchedPtr(sent.data(), kWidth * 2, kWidth, kHeight);
  copy.dstArray = memory;
  copy.extent = extent;  // of an array: in texels
  copy.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&copy));
  copy = {};
  copy.srcArray = memory;
  copy.dstPtr = make_cudaPitchedPtr(got.data(), kWidth * 2, kWidth, kHeight);
  copy.extent = extent;
  copy.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaMemcpy3D(&copy));
  EXPECT(sent == got);
  CHECK(cudaFreeArray(memory));
  CHECK(cudaFreeArray(nullptr));
}

int main() {
  two_dimensions();
  three_dimensions();
  return ok("arrays");
}
