// SPDX-License-Identifier: Apache-2.0
/* A kernel module of the software GPU: a shared object (ELF) that is handed to cuModuleLoad* like any other image.
 *
 * The server loads it with dlopen and asks its one exported table, devproxy_soft_module, for entry points. A kernel
 * runs in the server on the memory of the software GPU: device addresses are plain addresses there. (An executor has
 * such a table too; see devproxy_executor.h.)
 * C ABI, no dependency. Version rule: the server refuses a module whose `abi` differs from its own. */
#ifndef DEVPROXY_SOFT_MODULE_H_
#define DEVPROXY_SOFT_MODULE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DEVPROXY_SOFT_MODULE_ABI 1
#define DEVPROXY_SOFT_MODULE_EXPORT __attribute__((visibility("default")))

/* What a kernel may ask of the device while it runs. */
typedef struct devproxy_soft_services {
  /* 1 when [addr, addr+bytes) lies inside one live allocation or the live pinned memory of the launching process,
   * else 0. A kernel that takes addresses from its parameters checks them with this. */
  int (*check_range)(void* cookie, uint64_t addr, uint64_t bytes);
  void* cookie;
} devproxy_soft_services;

typedef struct devproxy_soft_launch {
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  uint32_t device;       /* ordinal inside the job */
  uint64_t stream;       /* identifies the stream, no more; for an executor on CUDA its CUstream */
  const uint8_t* params; /* the packed parameter block, verbatim; 16-byte aligned; valid during the call */
  uint64_t params_bytes;
  const devproxy_soft_services* services;
  void* function_cookie; /* from devproxy_soft_function */
  char* error;           /* error_bytes long: a NUL-terminated reason where the kernel returns non-zero */
  uint64_t error_bytes;
  void* state; /* of an executor, for the launching process; NULL for others. Modules built before it was added have a
                  shorter struct, and never look here */
} devproxy_soft_launch;

/* Returns 0, or a CUresult that becomes the context's sticky error (710 assert, 700 illegal address, 719 failure). */
typedef int (*devproxy_soft_kernel)(const devproxy_soft_launch* launch);

typedef struct devproxy_soft_function {
  devproxy_soft_kernel kernel;
  void* cookie;
  uint32_t max_threads;  /* per block; 0 means 1024 */
  uint32_t shared_bytes; /* static shared memory */
  uint32_t n_params;     /* 0 with kernels that take only an `extra` block */
  struct {
    uint32_t offset, size;
  } params[64];
} devproxy_soft_function;

typedef struct devproxy_soft_global {
  const char* name;
  const void* initial; /* may be NULL: zeroes */
  uint64_t bytes;
} devproxy_soft_global;

typedef struct devproxy_soft_module_table {
  uint32_t abi;
  uint32_t n_globals;
  const devproxy_soft_global* globals;
  /* Finds an entry point. 0 = found, 500 (CUDA_ERROR_NOT_FOUND) = no such name. Must be thread-safe. */
  int (*get_function)(const char* name, devproxy_soft_function* out);
  /* Called once after loading with the ordinal; non-zero refuses the module, reason in error. May be NULL. */
  int (*load)(uint32_t device, char* error, uint64_t error_bytes);
} devproxy_soft_module_table;

/* The names that get_function finds, closed by NULL: of a module that lists its kernels. Optional, and no part of the
 * table, so that a module without it is as good as ever. */
extern DEVPROXY_SOFT_MODULE_EXPORT const char* const devproxy_soft_function_names[];

/* What a kernel reads and writes of device memory: stretches that its parameters name. */
typedef struct devproxy_soft_stretch {
  uint32_t place;  /* in the parameter block: an address, eight bytes, and behind it the stretch's bytes, eight more */
  uint32_t writes; /* 0: it is only read */
} devproxy_soft_stretch;
typedef struct devproxy_soft_footprint {
  const char* name; /* of the kernel */
  uint32_t n_stretches;
  /* 1: what it leaves in them follows from the parameter block and from what they held before, wherever they lie. It may
   * then run once for several ranks of a GPU. Ranks whose blocks differ in anything but `place`s are never taken for
   * equal, so no address should stand elsewhere in it. Padding, and so 0, in modules of earlier plugins. */
  uint32_t repeatable;
  const devproxy_soft_stretch* stretches; /* nothing else is touched */
} devproxy_soft_footprint;

/* Closed by a name of NULL. Optional. A kernel that is not listed may touch anything, so the ranks of one GPU keep nothing
 * once that have launched it. */
extern DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_footprint devproxy_soft_footprints[];

/* The table's name in every module. */
extern DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module;

#ifdef __cplusplus
}
#endif
#endif
