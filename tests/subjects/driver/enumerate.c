// SPDX-License-Identifier: Apache-2.0
/* The kernels of a module and of a library, without knowing their names. argv: the names, in the image's order; or
 * "refused" for a module that does not list them; or "many" and how many. */
#include "program.h"

static CUmodule mod;
static CUlibrary library;

static void wrong(void) {
  CUfunction f[4];
  CUkernel k[4];
  CUlibrary l;
  unsigned n = 0;
  void* address;
  EXPECT_RESULT(cuModuleGetFunctionCount(NULL, mod), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuModuleGetFunctionCount(&n, (CUmodule)library), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuModuleGetFunctionCount(&n, NULL), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuModuleEnumerateFunctions(NULL, 4, mod), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuModuleEnumerateFunctions(f, 4, NULL), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuLibraryGetKernelCount(NULL, library), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuLibraryGetKernelCount(&n, (CUlibrary)mod), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuLibraryEnumerateKernels(NULL, 4, library), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuLibraryEnumerateKernels(k, 4, NULL), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuKernelGetLibrary(NULL, (CUkernel)mod), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuKernelGetLibrary(&l, (CUkernel)mod), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuKernelGetLibrary(&l, NULL), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuLibraryGetUnifiedFunction(NULL, library, "fill"), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuLibraryGetUnifiedFunction(&address, library, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuLibraryGetUnifiedFunction(&address, NULL, "fill"), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuLibraryGetUnifiedFunction(&address, library, "fill"), CUDA_ERROR_NOT_FOUND);
}

static void refused(void) {
  CUfunction f[4];
  CUkernel k[4];
  unsigned n = 77;
  EXPECT_RESULT(cuModuleGetFunctionCount(&n, mod), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuModuleEnumerateFunctions(f, 4, mod), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuLibraryGetKernelCount(&n, library), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuLibraryEnumerateKernels(k, 4, library), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(n, 77);
  CHECK(cuLibraryGetKernel(&k[0], library, "fill")); /* by name they are there */
}

static void many(unsigned wanted) {
  CUfunction* f = calloc(wanted, sizeof *f);
  const char* name;
  char expected[128];
  unsigned n = 0;
  CHECK(cuModuleGetFunctionCount(&n, mod));
  EXPECT_EQ(n, wanted);
  CHECK(cuModuleEnumerateFunctions(f, n, mod));
  for (unsigned i = 0; i < n; ++i) {
    CHECK(cuFuncGetName(&name, f[i]));
    snprintf(expected, sizeof expected, "many_kernels_whose_names_do_not_fit_into_one_answer_%03u", i);
    EXPECT(!strcmp(name, expected));
  }
  free(f);
}

int main(int argc, char** argv) {
  const unsigned wanted = (unsigned)argc - 1;
  CUcontext ctx;
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  mod = load_kernels();
  CHECK(cuLibraryLoadFromFile(&library, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  EXPECT(argc > 1);
  wrong();
  if (!strcmp(argv[1], "refused")) {
    refused();
    return pass("enumerate");
  }
  if (!strcmp(argv[1], "many")) {
    many((unsigned)atoi(argv[2]));
    return pass("enumerate");
  }

  CUfunction f[64], again, last = kernel(mod, argv[wanted]);
  CUkernel k[64], same, asked_before;
  CUlibrary of;
  const char* name;
  unsigned n = 0;
  EXPECT(wanted < 64);
  CHECK(cuLibraryGetKernel(&asked_before, library, argv[wanted]));
  CHECK(cuModuleGetFunctionCount(&n, mod));
  EXPECT_EQ(n, wanted);
  memset(f, 0, sizeof f);
  CHECK(cuModuleEnumerateFunctions(f, 0, mod));
  EXPECT(f[0] == NULL);
  CHECK(cuModuleEnumerateFunctions(f, 1, mod)); /* as many as there is room for */
  EXPECT(f[0] != NULL && f[1] == NULL);
  CHECK(cuModuleEnumerateFunctions(f, 64, mod)); /* and no more than there are */
  EXPECT(f[wanted] == NULL);
  for (unsigned i = 0; i < n; ++i) {
    CHECK(cuFuncGetName(&name, f[i]));
    EXPECT(!strcmp(name, argv[i + 1]));
    CHECK(cuModuleGetFunction(&again, mod, name));
    EXPECT(again == f[i]);
  }
  EXPECT(f[n - 1] == last);

  CHECK(cuLibraryGetKernelCount(&n, library));
  EXPECT_EQ(n, wanted);
  memset(k, 0, sizeof k);
  CHECK(cuLibraryEnumerateKernels(k, 1, library));
  EXPECT(k[0] != NULL && k[1] == NULL);
  CHECK(cuCtxSetCurrent(NULL)); /* a library is of no context */
  CHECK(cuLibraryGetKernelCount(&n, library));
  CHECK(cuLibraryEnumerateKernels(k, 64, library));
  CHECK(cuCtxSetCurrent(ctx));
  EXPECT(k[wanted] == NULL);
  for (unsigned i = 0; i < n; ++i) {
    CHECK(cuKernelGetName(&name, k[i]));
    EXPECT(!strcmp(name, argv[i + 1]));
    CHECK(cuLibraryGetKernel(&same, library, name));
    EXPECT(same == k[i]);
    CHECK(cuKernelGetLibrary(&of, k[i]));
    EXPECT(of == library);
    CHECK(cuKernelGetFunction(&again, k[i])); /* it is made now */
    CHECK(cuFuncGetName(&name, again));
    EXPECT(!strcmp(name, argv[i + 1]));
  }
  EXPECT(k[n - 1] == asked_before);
  CHECK(cuLibraryUnload(library));
  EXPECT_RESULT(cuLibraryGetKernelCount(&n, library), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuKernelGetLibrary(&of, k[0]), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuModuleUnload(mod));
  EXPECT_RESULT(cuModuleGetFunctionCount(&n, mod), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuModuleEnumerateFunctions(f, 64, mod), CUDA_ERROR_INVALID_HANDLE);
  return pass("enumerate");
}
