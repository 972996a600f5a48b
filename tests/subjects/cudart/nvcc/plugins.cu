// SPDX-License-Identifier: Apache-2.0
// Opens a library with device code, runs it and closes it, several times; its modules come and go.
#include <dlfcn.h>

#include "../program.h"

__global__ void of_the_program(int* p) { *p = 5; }

int main(int argc, char** argv) {
  EXPECT(argc == 2);
  of_the_program<<<1, 3>>>(nullptr);
  CHECK(cudaGetLastError());
  for (int round = 0; round < 3; ++round) {
    void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) fprintf(stderr, "%s\n", dlerror());
    EXPECT(library != nullptr);
    reinterpret_cast<void (*)()>(dlsym(library, "run_plugin"))();
    EXPECT(dlclose(library) == 0);
  }
  of_the_program<<<1, 3>>>(nullptr);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  return pass("plugins");
}
