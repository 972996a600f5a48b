// SPDX-License-Identifier: Apache-2.0
// Surface objects: a kernel writes an array through one and reads it through another; a texture shows the same.
#include "check.cuh"

constexpr int kWidth = 64, kHeight = 48;

__global__ void write(cudaSurfaceObject_t surface) {
  for (int i = here(); i < kWidth * kHeight; i += threads())
    surf2Dwrite(uint32_t(i * 5 + 3), surface, i % kWidth * 4, i / kWidth);
}

__global__ void transpose(cudaSurfaceObject_t surface, uint32_t* out) {
  for (int i = here(); i < kWidth * kHeight; i += threads())
    out[i % kWidth * kHeight + i / kWidth] = surf2Dread<uint32_t>(surface, i % kWidth * 4, i / kWidth);
}

__global__ void fetch(cudaTextureObject_t texture, uint32_t* out) {
  for (int i = here(); i < kWidth * kHeight; i += threads()) out[i] = tex2D<uint32_t>(texture, i % kWidth, i / kWidth);
}

int main() {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<uint32_t>();
  cudaArray_t memory = nullptr;
  CHECK(cudaMallocArray(&memory, &format, kWidth, kHeight, cudaArraySurfaceLoadStore));
  const std::vector<uint32_t> before(kWidth * kHeight, 7);
  CHECK(cudaMemcpy2DToArray(memory, 0, 0, before.data(), kWidth * 4, kWidth * 4, kHeight, cudaMemcpyHostToDevice));
  cudaResourceDesc resource{};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = memory;
  cudaSurfaceObject_t surface = 0;
  cudaTextureObject_t texture = 0;
  cudaTextureDesc how{};
  CHECK(cudaCreateSurfaceObject(&surface, &resource));
  CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
  uint32_t *transposed = zeroes<uint32_t>(kWidth * kHeight), *fetched = zeroes<uint32_t>(kWidth * kHeight);
  write<<<8, 128>>>(surface);
  transpose<<<8, 128>>>(surface, transposed);
  fetch<<<8, 128>>>(texture, fetched);
  LAUNCHED();
  std::vector<uint32_t> copied(kWidth * kHeight);
  CHECK(cudaMemcpy2DFromArray(copied.data(), kWidth * 4, memory, 0, 0, kWidth * 4, kHeight, cudaMemcpyDeviceToHost));
  const std::vector<uint32_t> rows = back(fetched, kWidth * kHeight), columns = back(transposed, kWidth * kHeight);
  for (int i = 0; i < kWidth * kHeight; ++i) {
    const uint32_t want = uint32_t(i * 5 + 3);
    EXPECT_EQ(copied[i], made(want, 7u));
    EXPECT_EQ(rows[i], made(want, 0u));
    EXPECT_EQ(columns[i % kWidth * kHeight + i / kWidth], made(want, 0u));
  }
  CHECK(cudaDestroyTextureObject(texture));
  CHECK(cudaDestroySurfaceObject(surface));
  CHECK(cudaFreeArray(memory));
  CHECK(cudaFree(transposed));
  CHECK(cudaFree(fetched));
  return ok("surfaces");
}
