// SPDX-License-Identifier: Apache-2.0
/* Launch attributes, cooperative launches, attributes of functions and occupancy. */
#include "program.h"

static CUlaunchConfig config_of(CUstream s, CUlaunchAttribute* list, unsigned n) {
  CUlaunchConfig c;
  memset(&c, 0, sizeof c);
  c.gridDimX = 4, c.gridDimY = c.gridDimZ = 1;
  c.blockDimX = 32, c.blockDimY = c.blockDimZ = 1;
  c.hStream = s, c.attrs = list, c.numAttrs = n;
  return c;
}

static CUlaunchAttribute attribute(CUlaunchAttributeID id) {
  CUlaunchAttribute a;
  memset(&a, 0, sizeof a);
  a.id = id;
  return a;
}

static int device_attribute(CUdevice dev, CUdevice_attribute which) {
  int value = 0;
  CHECK(cuDeviceGetAttribute(&value, which, dev));
  return value;
}

static size_t shared_of(int block) { return (size_t)block * 64; }

int main(void) {
  const CUdevice dev = start();
  CUmodule mod = load_kernels();
  CUfunction shape = kernel(mod, "shape"), fill = kernel(mod, "fill");
  CUstream s;
  CUdeviceptr p;
  uint32_t got[7];
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, 1 << 20));
  void* params[] = {&p};

  /* hints travel with the launch, several at once, with both kinds of parameters */
  {
    CUlaunchAttribute list[5] = {attribute(CU_LAUNCH_ATTRIBUTE_IGNORE), attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY),
                                 attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
                                 attribute(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN),
                                 attribute(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW)};
    list[1].value.priority = -1;
    list[2].value.programmaticStreamSerializationAllowed = 1;
    list[4].value.accessPolicyWindow.base_ptr = (void*)(uintptr_t)p;
    list[4].value.accessPolicyWindow.num_bytes = 4096;
    CUlaunchConfig c = config_of(s, list, 5);
    CHECK(cuLaunchKernelEx(&c, shape, params, NULL));
    CHECK(cuStreamSynchronize(s));
    CHECK(cuMemcpyDtoH(got, p, sizeof got));
    EXPECT_EQ(got[0], 4);
    EXPECT_EQ(got[3], 32);
    struct {
      CUdeviceptr dst;
      uint32_t value;
      uint64_t count;
    } block = {p, 77, 100};
    size_t bytes = sizeof block;
    void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
    CHECK(cuLaunchKernelEx(&c, fill, NULL, extra));
    CHECK(cuStreamSynchronize(s));
    expect_device_words(p, 77, 100);
    EXPECT_RESULT(cuLaunchKernelEx(&c, fill, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    bytes = 8;
    EXPECT_RESULT(cuLaunchKernelEx(&c, fill, NULL, extra), CUDA_ERROR_INVALID_VALUE);
    /* a window outside of every allocation */
    list[4].value.accessPolicyWindow.base_ptr = (void*)&list;
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_INVALID_VALUE);
    c.attrs = NULL;
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_INVALID_VALUE);
  }
  /* what names another object, or what nobody knows, is refused and not dropped */
  {
    CUlaunchAttribute list[1] = {attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)};
    CUlaunchConfig c = config_of(s, list, 1);
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_NOT_SUPPORTED);
    list[0].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_NOT_SUPPORTED);
    list[0].id = (CUlaunchAttributeID)4711;
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_NOT_SUPPORTED);
  }
  /* clusters, where the device says that it has them */
  {
    CUlaunchAttribute list[1] = {attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)};
    CUlaunchConfig c = config_of(s, list, 1);
    list[0].value.clusterDim.x = 2, list[0].value.clusterDim.y = list[0].value.clusterDim.z = 1;
    int n = -1;
    if (device_attribute(dev, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)) {
      CHECK(cuLaunchKernelEx(&c, shape, params, NULL));
      CHECK(cuStreamSynchronize(s));
      CHECK(cuOccupancyMaxActiveClusters(&n, shape, &c));
      EXPECT(n > 0);
      CHECK(cuOccupancyMaxPotentialClusterSize(&n, shape, &c));
      EXPECT(n >= 8);
      list[0].value.clusterDim.x = 3;
      EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_INVALID_CLUSTER_SIZE);
    } else {
      EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_NOT_SUPPORTED);
      EXPECT_RESULT(cuOccupancyMaxActiveClusters(&n, shape, &c), CUDA_ERROR_NOT_SUPPORTED);
      EXPECT_RESULT(cuOccupancyMaxPotentialClusterSize(&n, shape, &c), CUDA_ERROR_NOT_SUPPORTED);
    }
  }
  /* cooperative: as large as the device holds at once, and not a block more */
  EXPECT(device_attribute(dev, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH));
  {
    int per = 0;
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&per, shape, 64, 512));
    EXPECT(per > 0);
    const unsigned most = (unsigned)per * (unsigned)device_attribute(dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    CHECK(cuMemsetD8(p, 0, 64));
    CHECK(cuStreamSynchronize(NULL)); /* the stream of the launch does not wait for the legacy one */
    CHECK(cuLaunchCooperativeKernel(shape, most, 1, 1, 64, 1, 1, 512, s, params));
    CHECK(cuStreamSynchronize(s));
    CHECK(cuMemcpyDtoH(got, p, sizeof got));
    EXPECT_EQ(got[0], most);
    EXPECT_EQ(got[6], 512);
    EXPECT_RESULT(cuLaunchCooperativeKernel(shape, most + 1, 1, 1, 64, 1, 1, 512, s, params),
                  CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    CHECK(cuStreamSynchronize(s)); /* which is no fault */
    CUlaunchAttribute list[1] = {attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE)};
    CUlaunchConfig c = config_of(s, list, 1);
    c.gridDimX = 1 << 20;
    CHECK(cuLaunchKernelEx(&c, shape, params, NULL)); /* 0: not cooperative */
    list[0].value.cooperative = 1;
    EXPECT_RESULT(cuLaunchKernelEx(&c, shape, params, NULL), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    CHECK(cuStreamSynchronize(s));
  }
  /* attributes of a function come from the device, and are what was set */
  {
    int value = -1, unset = -1;
    for (int a = 0; a <= CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT; ++a)
      CHECK(cuFuncGetAttribute(&value, (CUfunction_attribute)a, shape));
    EXPECT_RESULT(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX, shape), CUDA_ERROR_INVALID_VALUE);
    CHECK(cuFuncGetAttribute(&unset, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shape));
    CHECK(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, unset + 4096));
    CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shape));
    EXPECT_EQ(value, unset + 4096);
    CHECK(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, (unsigned)unset + 4096, s, params, NULL));
    CHECK(cuStreamSynchronize(s));
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, (unsigned)unset + 4097, s, params, NULL),
                  CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 64 << 20),
                  CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_NUM_REGS, 1), CUDA_ERROR_INVALID_VALUE);
    CHECK(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
    CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, shape));
    EXPECT_EQ(value, 50);
  }
  /* occupancy */
  {
    int blocks = 0, fewer = 0, grid = 0, block = 0;
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 256, 0));
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&fewer, fill, 256, 40000, 0));
    EXPECT(fewer > 0 && fewer < blocks);
    CHECK(cuOccupancyMaxPotentialBlockSize(&grid, &block, fill, NULL, 0, 0));
    EXPECT(block > 0 && block <= 1024 && grid > 0);
    CHECK(cuOccupancyMaxPotentialBlockSize(&grid, &block, fill, NULL, 0, 96));
    EXPECT(block <= 96);
    CHECK(cuOccupancyMaxPotentialBlockSizeWithFlags(&grid, &block, fill, shared_of, 0, 0, 0));
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, block, shared_of(block)));
    EXPECT_EQ(grid, blocks * device_attribute(dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
    size_t bytes = 0;
    CHECK(cuOccupancyAvailableDynamicSMemPerBlock(&bytes, fill, 2, 128));
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 128, bytes));
    EXPECT(blocks >= 2);
    EXPECT_RESULT(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 0, 0), CUDA_ERROR_INVALID_VALUE);
  }
  return pass("attributes");
}
