// SPDX-License-Identifier: Apache-2.0
// Arrays and what shows them: descriptors, copies by rectangle, box and run, texture and surface objects, errors. No
// kernel: what a fetch sees is tests/cudart's.
#include "program.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // cudaMemcpyToArray and its kind

static std::vector<unsigned char> pattern(size_t n, unsigned seed) {
  std::vector<unsigned char> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<unsigned char>(i * 37 + seed + (i >> 8));
  return out;
}

static cudaChannelFormatDesc channels(int x, int y, int z, int w, cudaChannelFormatKind kind) {
  return cudaCreateChannelDesc(x, y, z, w, kind);
}

static cudaChannelFormatDesc bytes4() { return channels(8, 8, 8, 8, cudaChannelFormatKindUnsigned); }

static cudaArray_t make(const cudaChannelFormatDesc& desc, size_t width, size_t height, unsigned flags = 0) {
  cudaArray_t array = nullptr;
  CHECK(cudaMallocArray(&array, &desc, width, height, flags));
  return array;
}

static void descriptors() {
  const struct {
    int bits, count;
    cudaChannelFormatKind kind;
  } kFormats[] = {{8, 1, cudaChannelFormatKindUnsigned},  {8, 4, cudaChannelFormatKindSigned},
                  {16, 2, cudaChannelFormatKindUnsigned}, {16, 1, cudaChannelFormatKindSigned},
                  {16, 4, cudaChannelFormatKindFloat},    {32, 1, cudaChannelFormatKindFloat},
                  {32, 2, cudaChannelFormatKindSigned},   {32, 4, cudaChannelFormatKindUnsigned}};
  for (const auto& f : kFormats) {
    const int second = f.count > 1 ? f.bits : 0, third = f.count > 2 ? f.bits : 0;
    const cudaChannelFormatDesc desc = channels(f.bits, second, third, third, f.kind);
    const cudaArray_t array = make(desc, 12, 7);
    cudaChannelFormatDesc said{};
    CHECK(cudaGetChannelDesc(&said, array));
    EXPECT(said.x == f.bits && said.y == second && said.z == third && said.w == third && said.f == f.kind);
    cudaExtent extent{};
    unsigned flags = 9;
    CHECK(cudaArrayGetInfo(nullptr, &extent, &flags, array));
    EXPECT(extent.width == 12 && extent.height == 7 && extent.depth == 0 && flags == 0);
    CHECK(cudaArrayGetInfo(&said, nullptr, nullptr, array));
    CHECK(cudaFreeArray(array));
    EXPECT_RESULT(cudaFreeArray(array), cudaErrorInvalidResourceHandle);
    EXPECT_RESULT(cudaGetChannelDesc(&said, array), cudaErrorInvalidResourceHandle);
  }
  cudaArray_t none = nullptr;
  const cudaChannelFormatDesc kBad[] = {
      channels(8, 16, 0, 0, cudaChannelFormatKindUnsigned), channels(8, 0, 8, 0, cudaChannelFormatKindUnsigned),
      channels(8, 8, 8, 0, cudaChannelFormatKindUnsigned),  channels(24, 0, 0, 0, cudaChannelFormatKindSigned),
      channels(8, 0, 0, 0, cudaChannelFormatKindFloat),     channels(0, 0, 0, 0, cudaChannelFormatKindFloat),
      channels(32, 0, 0, 0, cudaChannelFormatKindNone)};
  for (const auto& desc : kBad)
    EXPECT_RESULT(cudaMallocArray(&none, &desc, 8, 8, 0), cudaErrorInvalidChannelDescriptor);
  const cudaChannelFormatDesc fine = bytes4(), planar = channels(8, 8, 8, 0, cudaChannelFormatKindNV12);
  EXPECT_RESULT(cudaMallocArray(&none, &planar, 8, 8, 0), cudaErrorNotSupported);
  EXPECT_RESULT(cudaMallocArray(&none, &fine, 0, 8, 0), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMallocArray(nullptr, &fine, 8, 8, 0), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMallocArray(&none, &fine, 8, 8, cudaArrayCubemap), cudaErrorInvalidValue);
  cudaMipmappedArray_t levels = nullptr;
  EXPECT_RESULT(cudaMallocMipmappedArray(&levels, &fine, {8, 8, 0}, 2, 0), cudaErrorNotSupported);
  EXPECT(none == nullptr);
  CHECK(cudaFreeArray(nullptr));
}

// Rectangles in every direction, plain and in a stream, then runs that go over the ends of rows.
static void rectangles() {
  constexpr size_t kWidth = 50, kHeight = 21, kRow = kWidth * 4, kAll = kRow * kHeight;
  const cudaArray_t a = make(bytes4(), kWidth, kHeight), b = make(bytes4(), kWidth, kHeight);
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  void *memory = nullptr, *window = nullptr;
  CHECK(cudaMalloc(&memory, 2 * kAll));
  CHECK(cudaMallocHost(&window, 2 * kAll));
  auto *const device = static_cast<unsigned char*>(memory), *const pinned = static_cast<unsigned char*>(window);
  const auto first = pattern(kAll, 1), second = pattern(kAll, 99);
  std::vector<unsigned char> out(kAll + 64, 0);
  CHECK(cudaMemcpy2DToArray(a, 0, 0, first.data(), kRow, kRow, kHeight, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy2DArrayToArray(b, 0, 0, a, 0, 0, kRow, kHeight, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemcpy(device, second.data(), kAll, cudaMemcpyHostToDevice));
  // Ten bytes-of-four by five rows of the second pattern at (8, 3).
  CHECK(cudaMemcpy2DToArrayAsync(b, 8, 3, device + 100, kRow, 40, 5, cudaMemcpyDeviceToDevice, s));
  CHECK(cudaMemcpy2DFromArrayAsync(pinned, kRow + 8, b, 0, 0, kRow, kHeight, cudaMemcpyDefault, s));
  CHECK(cudaStreamSynchronize(s));
  for (size_t y = 0; y < kHeight; ++y)
    for (size_t x = 0; x < kRow; ++x) {
      const bool replaced = x >= 8 && x < 48 && y >= 3 && y < 8;
      EXPECT(pinned[y * (kRow + 8) + x] == (replaced ? second[100 + (y - 3) * kRow + x - 8] : first[y * kRow + x]));
    }
  // A run of bytes from (20, 2): the rest of that row, five whole rows, the beginning of one.
  const size_t run = kRow - 20 + 5 * kRow + 12, at = 2 * kRow + 20;
  CHECK(cudaMemcpyToArray(a, 20, 2, second.data(), run, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpyFromArray(out.data(), a, 0, 0, kAll, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < kAll; ++i) EXPECT(out[i] == (i >= at && i < at + run ? second[i - at] : first[i]));
  CHECK(cudaMemcpyToArrayAsync(a, 0, 0, first.data(), kAll, cudaMemcpyDefault, s));
  CHECK(cudaMemcpyFromArrayAsync(device, a, 4, 1, 1000, cudaMemcpyDeviceToDevice, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemcpy(out.data(), device, 1000, cudaMemcpyDeviceToHost));
  EXPECT(!memcmp(out.data(), first.data() + kRow + 4, 1000));
  EXPECT_RESULT(cudaMemcpyToArray(a, 20, 2, second.data(), kAll, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMemcpyFromArray(out.data(), a, 0, 0, 8, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
  EXPECT_RESULT(cudaMemcpyArrayToArray(a, 0, 0, b, 0, 0, 4, cudaMemcpyDeviceToDevice), cudaErrorNotSupported);

  EXPECT_RESULT(cudaMemcpy2DToArray(a, 0, 0, first.data(), kRow, kRow, kHeight, cudaMemcpyDeviceToHost),
                cudaErrorInvalidMemcpyDirection);
  EXPECT_RESULT(cudaMemcpy2DToArray(a, 4, 0, first.data(), kRow, kRow, kHeight, cudaMemcpyHostToDevice),
                cudaErrorInvalidValue);
  EXPECT_RESULT(cudaMemcpy2DToArray(a, 0, 0, first.data(), kRow - 1, kRow, 2, cudaMemcpyHostToDevice),
                cudaErrorInvalidPitchValue);
  EXPECT_RESULT(cudaMemcpy2DToArray(a, 0, 0, first.data(), kRow, 8, 2, cudaMemcpyDeviceToDevice),
                cudaErrorInvalidValue);
  CHECK(cudaMemcpy2DToArray(a, 0, 0, first.data(), kRow, 0, 4, cudaMemcpyHostToDevice));
  CHECK(cudaFreeArray(a));
  CHECK(cudaFreeArray(b));
  CHECK(cudaFree(device));
  CHECK(cudaFreeHost(pinned));
  CHECK(cudaStreamDestroy(s));
}

// Where an array takes part, the extent and the position in it count elements, and the position in memory counts bytes.
static void boxes() {
  constexpr size_t kWidth = 20, kHeight = 9, kDepth = 4, kElement = 4;
  const cudaChannelFormatDesc desc = channels(16, 16, 0, 0, cudaChannelFormatKindSigned);
  cudaArray_t a = nullptr, b = nullptr;
  CHECK(cudaMalloc3DArray(&a, &desc, {kWidth, kHeight, kDepth}, 0));
  CHECK(cudaMalloc3DArray(&b, &desc, {kWidth, kHeight, kDepth}, cudaArrayLayered | cudaArraySurfaceLoadStore));
  const auto in = pattern(kWidth * kHeight * kDepth * kElement, 5);
  std::vector<unsigned char> out(in.size(), 0xee);
  cudaMemcpy3DParms p{};
  p.srcPtr = {const_cast<unsigned char*>(in.data()), kWidth * kElement, kWidth * kElement, kHeight};
  p.dstArray = a;
  p.extent = {kWidth, kHeight, kDepth};
  p.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&p));
  p = {};
  p.srcArray = a;
  p.dstArray = b;
  p.extent = {kWidth, kHeight, kDepth};
  p.kind = cudaMemcpyHostToHost;  // which an array's side does not believe
  CHECK(cudaMemcpy3DAsync(&p, nullptr));
  p = {};
  p.srcArray = b;
  p.srcPos = {3, 2, 1};
  p.dstPtr = {out.data(), kWidth * kElement, kWidth * kElement, kHeight};
  p.dstPos = {8, 1, 2};  // bytes, rows, slices
  p.extent = {10, 5, 2};
  p.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaMemcpy3D(&p));
  for (size_t z = 0; z < kDepth; ++z)
    for (size_t y = 0; y < kHeight; ++y)
      for (size_t x = 0; x < kWidth * kElement; ++x) {
        const bool inside = x >= 8 && x < 8 + 10 * kElement && y >= 1 && y < 6 && z >= 2;
        const size_t from = ((z - 2 + 1) * kHeight + y - 1 + 2) * kWidth * kElement + x - 8 + 3 * kElement;
        EXPECT(out[(z * kHeight + y) * kWidth * kElement + x] == (inside ? in[from] : 0xee));
      }
  p.extent = {18, 5, 2};
  EXPECT_RESULT(cudaMemcpy3D(&p), cudaErrorInvalidValue);  // beyond the array
  p.extent = {0, 5, 2};
  CHECK(cudaMemcpy3D(&p));
  p.extent = {1, 1, 1};
  p.dstArray = a;  // two destinations
  EXPECT_RESULT(cudaMemcpy3D(&p), cudaErrorInvalidValue);
  cudaMemcpy3DPeerParms peer{};
  peer.srcArray = a, peer.dstArray = b, peer.extent = {1, 1, 1};
  EXPECT_RESULT(cudaMemcpy3DPeer(&peer), cudaErrorNotSupported);
  CHECK(cudaFreeArray(a));
  CHECK(cudaFreeArray(b));
}

static void objects() {
  const cudaArray_t a = make(channels(8, 8, 8, 8, cudaChannelFormatKindUnsigned), 32, 16, cudaArraySurfaceLoadStore);
  cudaResourceDesc resource{}, said{};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = a;
  cudaTextureDesc how{}, how_said{};
  how.addressMode[0] = cudaAddressModeMirror, how.addressMode[1] = cudaAddressModeWrap;
  how.addressMode[2] = cudaAddressModeBorder;
  how.filterMode = cudaFilterModeLinear, how.readMode = cudaReadModeNormalizedFloat;
  how.sRGB = 1, how.normalizedCoords = 1, how.maxAnisotropy = 8, how.mipmapFilterMode = cudaFilterModeLinear;
  how.mipmapLevelBias = 0.5f, how.minMipmapLevelClamp = 1, how.maxMipmapLevelClamp = 3;
  how.borderColor[0] = 1, how.borderColor[3] = 0.25f, how.disableTrilinearOptimization = 1;
  cudaResourceViewDesc view{}, view_said{};
  view.format = cudaResViewFormatUnsignedChar4, view.width = 32, view.height = 16;
  cudaTextureObject_t t = 0, linear = 0, pitched = 0;
  cudaSurfaceObject_t s = 0;
  CHECK(cudaCreateTextureObject(&t, &resource, &how, &view));
  CHECK(cudaGetTextureObjectTextureDesc(&how_said, t));
  EXPECT(!memcmp(&how, &how_said, sizeof how));
  CHECK(cudaGetTextureObjectResourceViewDesc(&view_said, t));
  EXPECT(!memcmp(&view, &view_said, sizeof view));
  CHECK(cudaGetTextureObjectResourceDesc(&said, t));
  EXPECT(said.resType == cudaResourceTypeArray && said.res.array.array == a);
  CHECK(cudaCreateSurfaceObject(&s, &resource));
  CHECK(cudaGetSurfaceObjectResourceDesc(&said, s));
  EXPECT(said.res.array.array == a);

  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 1 << 16));
  cudaResourceDesc r{};
  r.resType = cudaResourceTypeLinear;
  r.res.linear = {memory, channels(16, 16, 0, 0, cudaChannelFormatKindFloat), 1 << 16};
  how.readMode = cudaReadModeElementType;
  CHECK(cudaCreateTextureObject(&linear, &r, &how, nullptr));
  CHECK(cudaGetTextureObjectTextureDesc(&how_said, linear));
  EXPECT(how_said.readMode == cudaReadModeElementType);
  CHECK(cudaGetTextureObjectResourceDesc(&said, linear));
  EXPECT(said.resType == cudaResourceTypeLinear && said.res.linear.devPtr == memory);
  EXPECT(said.res.linear.desc.x == 16 && said.res.linear.desc.y == 16 && said.res.linear.desc.z == 0);
  EXPECT(said.res.linear.desc.f == cudaChannelFormatKindFloat && said.res.linear.sizeInBytes == 1 << 16);
  EXPECT_RESULT(cudaGetTextureObjectResourceViewDesc(&view_said, linear), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaCreateTextureObject(&pitched, &r, &how, &view), cudaErrorInvalidValue);
  r.resType = cudaResourceTypePitch2D;
  r.res.pitch2D = {memory, channels(32, 0, 0, 0, cudaChannelFormatKindSigned), 100, 30, 512};
  CHECK(cudaCreateTextureObject(&pitched, &r, &how, nullptr));
  CHECK(cudaGetTextureObjectResourceDesc(&said, pitched));
  EXPECT(said.resType == cudaResourceTypePitch2D && said.res.pitch2D.width == 100 && said.res.pitch2D.height == 30);
  EXPECT(said.res.pitch2D.pitchInBytes == 512 && said.res.pitch2D.desc.x == 32);
  r.res.pitch2D.desc = channels(32, 32, 32, 0, cudaChannelFormatKindSigned);
  cudaTextureObject_t none = 0;
  EXPECT_RESULT(cudaCreateTextureObject(&none, &r, &how, nullptr), cudaErrorInvalidChannelDescriptor);
  r.resType = cudaResourceTypeMipmappedArray;
  EXPECT_RESULT(cudaCreateTextureObject(&none, &r, &how, nullptr), cudaErrorNotSupported);
  EXPECT_RESULT(cudaCreateSurfaceObject(&none, &r), cudaErrorNotSupported);
  EXPECT_RESULT(cudaCreateTextureObject(&none, nullptr, &how, nullptr), cudaErrorInvalidValue);
  CHECK(cudaDestroyTextureObject(t));
  EXPECT_RESULT(cudaDestroyTextureObject(t), cudaErrorInvalidValue);
  CHECK(cudaDestroyTextureObject(linear));
  CHECK(cudaDestroyTextureObject(pitched));
  CHECK(cudaDestroySurfaceObject(s));
  EXPECT_RESULT(cudaDestroySurfaceObject(s), cudaErrorInvalidValue);
  CHECK(cudaFree(memory));
  CHECK(cudaFreeArray(a));
}

int main() {
  descriptors();
  rectangles();
  boxes();
  objects();
  return pass("arrays");
}
