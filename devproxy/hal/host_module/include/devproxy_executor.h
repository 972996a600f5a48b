// SPDX-License-Identifier: Apache-2.0
/* An executor: a module whose kernels are a framework's operators, run by the framework itself in the server.
 *
 * It is a shared object with the table of devproxy_soft_module.h and, besides, this one. It comes with devproxy and not
 * with the job: cuModuleLoad* is given a description that names it (descriptor.h), so an image of a job holds no code
 * of it, and a restore on another kind of device loads the executor of that kind.
 *
 * An executor for the host's memory computes inside of the call. One for CUDA submits to the launch's stream, in the
 * device's primary context, and may wait for that stream. C ABI; the server refuses another DEVPROXY_EXECUTOR_ABI. */
#ifndef DEVPROXY_EXECUTOR_H_
#define DEVPROXY_EXECUTOR_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DEVPROXY_EXECUTOR_ABI 2

enum { DEVPROXY_EXECUTOR_ON_HOST = 0, DEVPROXY_EXECUTOR_ON_CUDA = 1 };

/* What the device offers to the executor for one client process. */
typedef struct devproxy_executor_host {
  uint32_t ordinal;                   /* of the GPU, as the framework counts in this process */
  uint64_t device_base, device_bytes; /* where the client's device memory appears */
  uint64_t host_base, host_bytes;     /* its pinned window */
  /* Bytes of the GPU's memory that the executor takes for itself. take: 1 granted, 0 there is not so much. Any thread.
   */
  int (*take)(void* cookie, uint64_t bytes);
  void (*give)(void* cookie, uint64_t bytes);
  void* cookie;
} devproxy_executor_host;

/* A stretch of device memory that a launch names. */
enum {
  DEVPROXY_EXECUTOR_READS = 1,
  DEVPROXY_EXECUTOR_WRITES = 2, /* may write; with READS, what is there before counts */
  DEVPROXY_EXECUTOR_WHOLE = 4,  /* and if it does, then no byte of the stretch is left out */
  DEVPROXY_EXECUTOR_RESETS = 8, /* a hint: what is there before does not matter after all */
  DEVPROXY_EXECUTOR_NUMBER = 16 /* no memory: eight bytes of the block that mean something to this client alone */
};
typedef struct devproxy_executor_access {
  uint64_t addr, bytes;
  uint32_t place; /* of the address in the parameter block, eight bytes */
  uint32_t flags;
} devproxy_executor_access;

/* What footprint returns. */
enum {
  DEVPROXY_EXECUTOR_UNKNOWN = 0,   /* it may write anything */
  DEVPROXY_EXECUTOR_KNOWN = 1,     /* it reads and writes nothing but what is listed */
  DEVPROXY_EXECUTOR_REPEATABLE = 2 /* and its result follows from the block, the digest and the contents listed */
};

/* Texts of errors go to `error`, NUL-terminated, at most error_bytes. A state belongs to one client process; its calls
 * come from one thread at a time. */
typedef struct devproxy_executor_table {
  uint32_t abi;
  uint32_t where;    /* DEVPROXY_EXECUTOR_ON_* */
  const char* build; /* what the client's half was built with; compared with the description */
  /* 0, or a CUresult. The state is handed to each launch as devproxy_soft_launch.state. */
  int (*attach)(const devproxy_executor_host* host, void** state, char* error, uint64_t error_bytes);
  void (*detach)(void* state);
  /* What the client's operators depend on and device memory does not hold (generators, settings). save says how many
   * bytes there are, and writes them where `bytes` is enough. Precondition of both: nothing is running. */
  int (*save)(void* state, void* to, uint64_t bytes, uint64_t* needed, char* error, uint64_t error_bytes);
  int (*load)(void* state, const void* from, uint64_t bytes, char* error, uint64_t error_bytes);
  /* Gives back the GPU's memory that holds nothing which a later launch needs. Precondition: nothing is running. */
  void (*trim)(void* state);
  /* What a launch of the function `name` would do to device memory. Runs nothing. Lists the first `room` accesses, in the
   * order of their places, and says how many there are. Any thread. */
  int (*footprint)(void* state, const char* name, const uint8_t* params, uint64_t params_bytes,
                   devproxy_executor_access* to, uint32_t room, uint32_t* needed, uint64_t* digest);
} devproxy_executor_table;

/* The table's name in every executor. */
extern __attribute__((visibility("default"))) const devproxy_executor_table devproxy_executor;

#ifdef __cplusplus
}
#endif
#endif
