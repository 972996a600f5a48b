// SPDX-License-Identifier: Apache-2.0
// Texture objects: linear memory, an array with exact (point) filtering and every address mode, and what they say of
// themselves.
#include "check.cuh"

constexpr int kWidth = 96, kHeight = 40;

__global__ void from_linear(cudaTextureObject_t texture, float* out, int count) {
  for (int i = here(); i < count; i += threads()) out[i] = tex1Dfetch<float>(texture, count - 1 - i);
}

// out[y][x] is the texel at (x - 8, y - 8): the frame of eight lies outside.
__global__ void from_array(cudaTextureObject_t texture, float* out) {
  for (int i = here(); i < (kWidth + 16) * (kHeight + 16); i += threads())
    out[i] = tex2D<float>(texture, i % (kWidth + 16) - 8 + 0.5f, i / (kWidth + 16) - 8 + 0.5f);
}

static float texel(int x, int y) { return float(x * 1000 + y) + 0.25f; }

static void linear() {
  std::vector<float> values(5000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i) * 0.5f;
  float *memory = device_of(values), *out = zeroes<float>(values.size());
  cudaResourceDesc resource{};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear.devPtr = memory;
  resource.res.linear.desc = cudaCreateChannelDesc<float>();
  resource.res.linear.sizeInBytes = values.size() * sizeof(float);
  cudaTextureDesc how{};
  how.readMode = cudaReadModeElementType;
  cudaTextureObject_t texture = 0;
  CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
  from_linear<<<8, 128>>>(texture, out, int(values.size()));
  LAUNCHED();
  const std::vector<float> got = back(out, values.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT(got[i] == made(values[values.size() - 1 - i], 0.0f));
  cudaResourceDesc said{};
  CHECK(cudaGetTextureObjectResourceDesc(&said, texture));
  EXPECT_EQ(said.resType, cudaResourceTypeLinear);
  EXPECT(said.res.linear.devPtr == memory);
  CHECK(cudaDestroyTextureObject(texture));
  CHECK(cudaFree(memory));
  CHECK(cudaFree(out));
}

static void array(cudaTextureAddressMode mode) {
  std::vector<float> texels(kWidth * kHeight);
  for (int i = 0; i < kWidth * kHeight; ++i) texels[i] = texel(i % kWidth, i / kWidth);
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
  cudaArray_t memory = nullptr;
  CHECK(cudaMallocArray(&memory, &format, kWidth, kHeight));
  CHECK(cudaMemcpy2DToArray(memory, 0, 0, texels.data(), kWidth * 4, kWidth * 4, kHeight, cudaMemcpyHostToDevice));
  cudaResourceDesc resource{};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = memory;
  cudaTextureDesc how{};
  how.addressMode[0] = how.addressMode[1] = mode;
  how.filterMode = cudaFilterModePoint;
  how.readMode = cudaReadModeElementType;
  cudaTextureObject_t texture = 0;
  CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
  const size_t count = size_t(kWidth + 16) * (kHeight + 16);
  float* out = zeroes<float>(count);
  from_array<<<16, 128>>>(texture, out);
  LAUNCHED();
  const std::vector<float> got = back(out, count);
  for (int i = 0; i < int(count); ++i) {
    int x = i % (kWidth + 16) - 8, y = i / (kWidth + 16) - 8;
    float want = 0;  // border
    if (mode == cudaAddressModeClamp)
      want = texel(min(max(x, 0), kWidth - 1), min(max(y, 0), kHeight - 1));
    else if (x >= 0 && x < kWidth && y >= 0 && y < kHeight)
      want = texel(x, y);
    EXPECT(got[i] == made(want, 0.0f));
  }
  cudaTextureDesc said{};
  CHECK(cudaGetTextureObjectTextureDesc(&said, texture));
  EXPECT_EQ(said.addressMode[0], mode);
  CHECK(cudaDestroyTextureObject(texture));
  CHECK(cudaFreeArray(memory));
  CHECK(cudaFree(out));
}

int main() {
  linear();
  array(cudaAddressModeClamp);
  array(cudaAddressModeBorder);
  return ok("textures");
}
