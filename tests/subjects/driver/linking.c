// SPDX-License-Identifier: Apache-2.0
/* The linker and tensor maps: forwarded where the device has them, refused by name elsewhere.
 *
 *   linking refused    the device has neither
 *   linking fake       over the fake driver, whose linker puts texts together and whose maps hold the arguments */
#include "program.h"

static const char kNonsense[] = "nonsense";

/* Several threads link at once: each gets its own image. */
static void* link_own(void* ctx) {
  static _Atomic int serial = 0;
  char text[64];
  CHECK(cuCtxSetCurrent(ctx));
  snprintf(text, sizeof text, "// the text of thread %d\n", atomic_fetch_add(&serial, 1));
  for (int i = 0; i < 100; ++i) {
    CUlinkState state;
    void* image = NULL;
    size_t bytes = 0;
    CHECK(cuLinkCreate(0, NULL, NULL, &state));
    CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, text, strlen(text) + 1, NULL, 0, NULL, NULL));
    CHECK(cuLinkComplete(state, &image, &bytes));
    EXPECT(bytes == strlen(text) + 1 && !strcmp(image, text));
    CHECK(cuLinkDestroy(state));
  }
  return NULL;
}

int main(int argc, char** argv) {
  start();
  const char* how = argc > 1 ? argv[1] : "";
  CUlinkState state;
  CUtensorMap map;
  cuuint64_t dim[2] = {256, 64}, strides[1] = {512};
  cuuint32_t box[2] = {64, 8}, elements[2] = {1, 1};
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, 1 << 20));
  if (!strcmp(how, "refused")) {
    EXPECT_RESULT(cuLinkCreate(0, NULL, NULL, &state), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_RESULT(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void*)(uintptr_t)p, dim, strides,
                                         box, elements, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                  CUDA_ERROR_NOT_SUPPORTED);
    return pass("linking");
  }
  /* a file and a text become one image, which can be loaded */
  char info[256] = "", error[256] = "";
  CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                            CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_MAX_REGISTERS};
  void* values[] = {info, (void*)sizeof info, error, (void*)sizeof error, (void*)32};
  char second[] = "// a second input, of comments only\n";
  void* image = NULL;
  size_t bytes = 0;
  CHECK(cuLinkCreate(5, options, values, &state));
  EXPECT_RESULT(cuLinkComplete(state, &image, &bytes), CUDA_ERROR_INVALID_VALUE); /* nothing to link */
  EXPECT_RESULT(cuLinkAddFile(state, CU_JIT_INPUT_PTX, "/nonexistent", 0, NULL, NULL), CUDA_ERROR_FILE_NOT_FOUND);
  CHECK(cuLinkAddFile(state, CU_JIT_INPUT_PTX, kernels_path(), 0, NULL, NULL));
  if (!strcmp(how, "fake"))
    CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, second, sizeof second, "second", 0, NULL, NULL));
  CHECK(cuLinkComplete(state, &image, &bytes));
  EXPECT(bytes > 16);
  CUmodule mod;
  CUfunction f;
  CHECK(cuModuleLoadData(&mod, image));
  CHECK(cuModuleGetFunction(&f, mod, "peek"));
  if (!strcmp(how, "fake")) {
    pthread_t threads[3];
    CUcontext ctx;
    CHECK(cuCtxGetCurrent(&ctx));
    for (int i = 0; i < 3; ++i) EXPECT(pthread_create(&threads[i], NULL, link_own, ctx) == 0);
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    EXPECT(strstr(image, "registers 32") && strstr(image, "a second input"));
    EXPECT(!strcmp(info, "linked") && (size_t)values[1] == 7);
  }
  CHECK(cuLinkDestroy(state));
  EXPECT_RESULT(cuLinkDestroy(state), CUDA_ERROR_INVALID_HANDLE);
  /* what the driver's compiler says about a bad input reaches the caller's buffer */
  values[1] = (void*)sizeof info, values[3] = (void*)sizeof error; /* they had become the lengths of the logs */
  CHECK(cuLinkCreate(4, options, values, &state));
  CHECK(cuLinkAddData(state, CU_JIT_INPUT_PTX, (void*)kNonsense, sizeof kNonsense, "bad", 0, NULL, NULL));
  EXPECT(cuLinkComplete(state, &image, &bytes) != CUDA_SUCCESS);
  EXPECT(error[0] != 0);
  CHECK(cuLinkDestroy(state));
  CUjit_option names = CU_JIT_GLOBAL_SYMBOL_NAMES;
  EXPECT_RESULT(cuLinkCreate(1, &names, values, &state), CUDA_ERROR_NOT_SUPPORTED);

  memset(&map, 0, sizeof map);
  CHECK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void*)(uintptr_t)p, dim, strides, box,
                               elements, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  if (!strcmp(how, "fake")) {
    const cuuint64_t want[12] = {p,
                                 256,
                                 64,
                                 512,
                                 8,
                                 1,
                                 CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                 2,
                                 0,
                                 CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 0};
    EXPECT(!memcmp(&map, want, sizeof want));
    cuuint64_t dim4[4] = {16, 32, 32, 5}, strides4[3] = {64, 2048, 65536}, got[9];
    cuuint32_t elements4[4] = {1, 1, 1, 1};
    int lower[2] = {-1, -2}, upper[2] = {-3, -4};
    CHECK(cuTensorMapEncodeIm2col(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (void*)(uintptr_t)p, dim4, strides4, lower,
                                  upper, 16, 128, elements4, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    memcpy(got, &map, sizeof got);
    EXPECT(got[0] == p && got[1] == 5 && got[2] == 65536 && (int)got[3] == -1 && (int)got[4] == -4 && got[5] == 16 &&
           got[6] == 128);
    CHECK(cuTensorMapReplaceAddress(&map, (void*)(uintptr_t)(p + 4096)));
    memcpy(got, &map, sizeof got);
    EXPECT(got[0] == p + 4096 && got[1] == 5);
  }
  elements[0] = 0; /* the driver's own answer */
  EXPECT_RESULT(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void*)(uintptr_t)p, dim, strides, box,
                                       elements, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                       CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                CUDA_ERROR_INVALID_VALUE);
  return pass("linking");
}
