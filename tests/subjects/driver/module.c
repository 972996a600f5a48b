// SPDX-License-Identifier: Apache-2.0
/* Modules: from file and from memory, functions, globals, bad images, unloading; the library API over the same. */
#include <elf.h>
#include <sys/mman.h>

#include "program.h"

static void* read_file(const char* path, size_t* size) {
  FILE* f = fopen(path, "rb");
  EXPECT(f != NULL);
  fseek(f, 0, SEEK_END);
  *size = (size_t)ftell(f);
  rewind(f);
  void* p = malloc(*size);
  EXPECT_EQ(fread(p, 1, *size, f), *size);
  fclose(f);
  return p;
}

/* Images that say a length which leads out of what can be read: on the last page before one that nobody may read. */
static void damaged_images(void) {
  const size_t page = 4096;
  unsigned char* room = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(room != MAP_FAILED);
  EXPECT_EQ(mprotect(room + page, page, PROT_NONE), 0);
  for (int kind = 0; kind < 9; kind++) {
    memset(room, 0, page);
    Elf64_Ehdr* head = (Elf64_Ehdr*)room;
    Elf64_Shdr* section = (Elf64_Shdr*)(room + 512);
    Elf64_Phdr* segment = (Elf64_Phdr*)(room + 1024);
    memcpy(head->e_ident, ELFMAG, SELFMAG);
    head->e_ident[EI_CLASS] = ELFCLASS64;
    head->e_shoff = 512, head->e_shnum = 1, head->e_shentsize = sizeof *section;
    head->e_phoff = 1024, head->e_phnum = 1, head->e_phentsize = sizeof *segment;
    section->sh_type = SHT_PROGBITS;
    void* image = room;
    switch (kind) {
      case 0: head->e_shoff = page + 8; break;
      case 1: head->e_shoff = ~0ull - 100; break;
      case 2: head->e_shnum = 0xffff; break;
      case 3: head->e_shentsize = 1; break;
      case 4: section->sh_offset = 0, section->sh_size = 64 * page; break;
      case 5: section->sh_offset = ~0ull, section->sh_size = 2; break;
      case 6: segment->p_offset = 1ull << 45, segment->p_filesz = 1; break;
      case 7:
        image = room + page - 16;
        memcpy(image, ELFMAG, SELFMAG);
        break;
      case 8:
        memcpy(room, "\x50\xed\x55\xba\1\0\x10\0", 8);
        memset(room + 8, 0x7f, 8);
        break;
    }
    CUmodule module;
    CUlibrary library;
    EXPECT_RESULT(cuModuleLoadData(&module, image), CUDA_ERROR_INVALID_IMAGE);
    EXPECT_RESULT(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0), CUDA_ERROR_INVALID_IMAGE);
  }
  munmap(room, 2 * page);
}

int main(void) {
  start();
  damaged_images();
  CUmodule file, image, bad;
  CUfunction f, g;
  CUdeviceptr global, other, p;
  size_t bytes = 0, size;
  int value = 0;
  CHECK(cuMemAlloc(&p, 4096));

  EXPECT_RESULT(cuModuleLoad(&bad, "/nonexistent/kernels.so"), CUDA_ERROR_FILE_NOT_FOUND);
  EXPECT_RESULT(cuModuleLoad(&bad, "/dev/null"), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_RESULT(cuModuleLoadData(&bad, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuModuleLoadData(&bad, "this is not an image of any kind, and it ends soon"), CUDA_ERROR_INVALID_IMAGE);

  size_t free_before = 0, free_after = 0, total = 0;
  CHECK(cuMemGetInfo(&free_before, &total));
  CHECK(cuModuleLoad(&file, kernels_path()));
  void* bytes_of_image = read_file(kernels_path(), &size);
  CHECK(cuModuleLoadData(&image, bytes_of_image));
  memset(bytes_of_image, 0, size); /* the image was taken when the call returned */
  EXPECT(file != image);

  EXPECT_RESULT(cuModuleGetFunction(&f, file, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
  EXPECT_RESULT(cuModuleGetFunction(&f, file, NULL), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuModuleGetFunction(&f, file, "fill"));
  CHECK(cuModuleGetFunction(&g, image, "fill"));
  EXPECT(f != g);
  for (int i = 0; i < 70000; i++) { /* programs ask at every launch; each answer is the same function */
    CUfunction again;
    CHECK(cuModuleGetFunction(&again, file, "fill"));
    EXPECT(again == f);
  }
  launch_fill(f, NULL, p, 1, 512);
  launch_fill(g, NULL, p + 2048, 2, 512);
  expect_device_words(p, 1, 512);
  expect_device_words(p + 2048, 2, 512);

  CUmodule owner;
  CHECK(cuFuncGetModule(&owner, f));
  EXPECT(owner == file);
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel(file, "shape")));
  EXPECT_EQ(value, 256);
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel(file, "shape")));
  EXPECT_EQ(value, 1024);
  size_t offset = 0;
  CHECK(cuFuncGetParamInfo(f, 2, &offset, &bytes));
  EXPECT_EQ(offset, 16);
  EXPECT_EQ(bytes, 8);
  EXPECT_RESULT(cuFuncGetParamInfo(f, 3, &offset, &bytes), CUDA_ERROR_INVALID_VALUE);

  /* globals: each module has its own copy, with its initial value */
  uint32_t table[4];
  CHECK(cuModuleGetGlobal(&global, &bytes, file, "table"));
  EXPECT_EQ(bytes, 16);
  CHECK(cuModuleGetGlobal(&other, NULL, image, "table"));
  EXPECT(global != other);
  CHECK(cuMemcpyDtoH(table, global, 16));
  EXPECT_EQ(table[3], 44);
  launch_fill(f, NULL, global, 9, 4);
  CHECK(cuMemcpyDtoH(table, global, 16));
  expect_words(table, 9, 4);
  CHECK(cuMemcpyDtoH(table, other, 16));
  EXPECT_EQ(table[0], 11);
  CHECK(cuModuleGetGlobal(&global, &bytes, file, "zeroes"));
  EXPECT_EQ(bytes, 4096);
  expect_device_words(global, 0, 1024);
  EXPECT_RESULT(cuModuleGetGlobal(&global, &bytes, file, "no_such_global"), CUDA_ERROR_NOT_FOUND);

  /* a global is device memory as any other, but nobody's to free, and no longer than it is */
  CUdeviceptr base = 0;
  unsigned type = 0;
  CHECK(cuMemGetAddressRange(&base, &size, global + 100));
  EXPECT(base == global);
  EXPECT_EQ(size, 4096);
  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, global + 4095));
  EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
  CHECK(cuMemsetD32(global, 7, 1024));
  CHECK(cuMemcpyDtoD(p, global, 4096));
  expect_device_words(p, 7, 1024);
  EXPECT_RESULT(cuMemsetD32(global, 7, 1025), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(global), CUDA_ERROR_INVALID_VALUE);

  CHECK(cuModuleUnload(image));
  EXPECT_RESULT(cuModuleUnload(image), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuMemGetAddressRange(&base, &size, other), CUDA_ERROR_NOT_FOUND); /* its global has gone with it */
  EXPECT_RESULT(cuModuleGetFunction(&g, image, "fill"), CUDA_ERROR_INVALID_HANDLE);
  launch_fill(f, NULL, p, 3, 512); /* the other module lives */
  expect_device_words(p, 3, 512);

  /* the library API */
  CUlibrary library;
  CUkernel k;
  CHECK(cuLibraryLoadFromFile(&library, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryGetKernel(&k, library, "fill"));
  EXPECT_RESULT(cuLibraryGetKernel(&k, library, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
  for (int i = 0; i < 70000; i++) {
    CUkernel again;
    CHECK(cuLibraryGetKernel(&again, library, "fill"));
    EXPECT(again == k);
  }
  CHECK(cuKernelGetFunction(&g, k));
  launch_fill(g, NULL, p, 4, 512);
  expect_device_words(p, 4, 512);
  launch_fill((CUfunction)k, NULL, p, 5, 512); /* a CUkernel may be launched as it is */
  expect_device_words(p, 5, 512);
  CUmodule of_library;
  CHECK(cuLibraryGetModule(&of_library, library));
  CHECK(cuModuleGetFunction(&f, of_library, "affine"));
  CHECK(cuLibraryUnload(library));
  void* params[] = {&p, &p, &p, &p};
  EXPECT_RESULT(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuLaunchKernel((CUfunction)k, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuModuleUnload(file));
  CHECK(cuMemGetInfo(&free_after, &total)); /* and so has the memory of all their globals */
  EXPECT_EQ(free_after, free_before);
  return pass("module");
}
