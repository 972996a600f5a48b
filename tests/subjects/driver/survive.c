// SPDX-License-Identifier: Apache-2.0
/* State of the driver that a checkpoint must keep: made, then whatever is done to the job, then asked for again and
 * used.
 *
 *   survive PART...     the parts' first halves, "survive ready", a wait for the file TEST_GO, the parts' second halves
 *
 * Parts that need a feature say so by an error: the test names those that its device has. The kernels are those of
 * tests/subjects/driver/kernels.c, or of tests/subjects/variables.ptx and tests/subjects/driver/printing.ptx (TEST_PRINTING). */
#include <stdbool.h>
#include "program.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* they are asked for as well */

static CUdevice dev;
static CUmodule mod;
static size_t unit;

/* Both kinds of kernels: afterwards the word at p is `value`, or the next of the module's counter. Returns which. */
static uint32_t counted = 5, third_counted = 5;
static uint32_t put(CUmodule m, uint32_t* counter, CUdeviceptr p, CUstream s, uint32_t value) {
  CUfunction f;
  if (cuModuleGetFunction(&f, m, "fill") == CUDA_SUCCESS) {
    launch_fill(f, s, p, value, 1);
    return value;
  }
  void* params[] = {&p};
  CHECK(launch1(kernel(m, "bump"), s, NULL));
  CHECK(launch1(kernel(m, "peek"), s, params));
  return ++*counter;
}

/* -- virtual memory management: open, mapped, parked with contents, never mapped ---------------------------------- */

static CUdeviceptr vmm_range, vmm_other, vmm_plain;
static CUmemGenericAllocationHandle vmm_open, vmm_mapped, vmm_parked, vmm_fresh;
static CUmemAccessDesc vmm_access;
static CUmemAllocationProp vmm_prop;

static void vmm_before(void) {
  memset(&vmm_prop, 0, sizeof vmm_prop);
  vmm_prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  vmm_prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  vmm_prop.location.id = dev;
  vmm_access.location = vmm_prop.location;
  vmm_access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(cuMemGetAllocationGranularity(&unit, &vmm_prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CHECK(cuMemAddressReserve(&vmm_range, 16 * unit, 0, 0, 0));
  CHECK(cuMemAddressReserve(&vmm_other, 4 * unit, 0, 0, 0));
  CHECK(cuMemAlloc(&vmm_plain, 4 * unit));
  CHECK(cuMemCreate(&vmm_open, 2 * unit, &vmm_prop, 0));
  CHECK(cuMemCreate(&vmm_mapped, unit, &vmm_prop, 0));
  CHECK(cuMemCreate(&vmm_parked, unit, &vmm_prop, 0));
  CHECK(cuMemCreate(&vmm_fresh, unit, &vmm_prop, 0));
  CHECK(cuMemMap(vmm_range, 2 * unit, 0, vmm_open, 0));
  CHECK(cuMemMap(vmm_other, unit, 0, vmm_parked, 0));
  CHECK(cuMemSetAccess(vmm_range, 2 * unit, &vmm_access, 1));
  CHECK(cuMemSetAccess(vmm_other, unit, &vmm_access, 1));
  CHECK(cuMemsetD32(vmm_range, 0x1111, 2 * unit / 4));
  CHECK(cuMemsetD32(vmm_other, 0x2222, unit / 4));
  CHECK(cuMemUnmap(vmm_other, unit));                            /* its contents stay with the handle */
  CHECK(cuMemMap(vmm_range + 2 * unit, unit, 0, vmm_mapped, 0)); /* mapped, and nobody may touch it yet */
}

static void vmm_after(void) {
  unsigned long long flags = 0;
  CUmemGenericAllocationHandle again;
  CUmemAllocationProp got;
  CUdeviceptr base = 0, fresh = 0;
  size_t bytes = 0, free0 = 0, free1 = 0, total = 0;
  CHECK(cuMemGetAccess(&flags, &vmm_access.location, vmm_range));
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CHECK(cuMemGetAccess(&flags, &vmm_access.location, vmm_range + 2 * unit));
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
  CHECK(cuMemRetainAllocationHandle(&again, (void*)(uintptr_t)(vmm_range + 5)));
  EXPECT(again == vmm_open);
  CHECK(cuMemRelease(again));
  CHECK(cuMemGetAllocationPropertiesFromHandle(&got, vmm_parked));
  EXPECT(!memcmp(&got, &vmm_prop, sizeof got));
  CHECK(cuMemGetAddressRange(&base, &bytes, vmm_range + unit));
  EXPECT(base == vmm_range && bytes == 2 * unit);
  CHECK(cuMemcpyDtoD(vmm_plain, vmm_range, 2 * unit));
  expect_device_words(vmm_plain, 0x1111, 2 * unit / 4);
  const uint32_t put_there = put(mod, &counted, vmm_range, NULL, 0x1234); /* and kernels write there */
  CHECK(cuMemcpyDtoD(vmm_plain, vmm_range, 4));
  expect_device_words(vmm_plain, put_there, 1);
  EXPECT_RESULT(cuMemsetD32(vmm_range + 2 * unit, 1, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemsetD32(vmm_other, 1, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemSetAccess(vmm_range + 2 * unit, unit, &vmm_access, 1));
  CHECK(cuMemsetD32(vmm_range + unit, 0x3333, 2 * unit / 4)); /* over the border of two handles */
  /* the parked one elsewhere, its old addresses used by a new one: contents follow the handle */
  CHECK(cuMemMap(vmm_range + 3 * unit, unit, 0, vmm_parked, 0));
  CHECK(cuMemSetAccess(vmm_range + 3 * unit, unit, &vmm_access, 1));
  CHECK(cuMemMap(vmm_other, unit, 0, vmm_fresh, 0));
  CHECK(cuMemSetAccess(vmm_other, unit, &vmm_access, 1));
  CHECK(cuMemsetD32(vmm_other, 0x4444, unit / 4));
  CHECK(cuMemcpyDtoD(vmm_plain, vmm_range + unit, 3 * unit));
  expect_device_words(vmm_plain, 0x3333, 2 * unit / 4);
  expect_device_words(vmm_plain + 2 * unit, 0x2222, unit / 4);
  /* a new range is none of the old ones */
  CHECK(cuMemAddressReserve(&fresh, 4 * unit, 0, 0, 0));
  EXPECT(fresh + 4 * unit <= vmm_range || fresh >= vmm_range + 16 * unit);
  EXPECT(fresh + 4 * unit <= vmm_other || fresh >= vmm_other + 4 * unit);
  CHECK(cuMemAddressFree(fresh, 4 * unit));
  CHECK(cuMemGetInfo(&free0, &total));
  EXPECT_RESULT(cuMemAddressFree(vmm_range, 16 * unit), CUDA_ERROR_INVALID_VALUE); /* something is mapped */
  CHECK(cuMemUnmap(vmm_range, 4 * unit));
  CHECK(cuMemUnmap(vmm_other, unit));
  CHECK(cuMemRelease(vmm_open));
  CHECK(cuMemRelease(vmm_mapped));
  CHECK(cuMemRelease(vmm_parked));
  CHECK(cuMemRelease(vmm_fresh));
  EXPECT_RESULT(cuMemRelease(vmm_fresh), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAddressFree(vmm_range, 16 * unit));
  CHECK(cuMemAddressFree(vmm_other, 4 * unit));
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT_EQ(free1 - free0, 5 * unit);
  CHECK(cuMemFree(vmm_plain));
}

/* -- limits, cache preferences, flags of the context -----------------------------------------------------------------
 */

static const CUlimit kLimits[] = {CU_LIMIT_STACK_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE};
static const size_t kWanted[] = {2001, 4 << 20, 24 << 20};
static size_t limits_got[3];
static CUcontext own_context;
static unsigned long long own_id;

static void limits_before(void) {
  unsigned flags = 0;
  int active = 0;
  CUcontext primary;
  for (int i = 0; i < 3; ++i) {
    CHECK(cuCtxSetLimit(kLimits[i], kWanted[i]));
    CHECK(cuCtxGetLimit(&limits_got[i], kLimits[i]));
    EXPECT(limits_got[i] >= kWanted[i]);
  }
  CHECK(cuCtxSetCacheConfig(CU_FUNC_CACHE_PREFER_L1));
  CHECK(cuDevicePrimaryCtxSetFlags(dev, CU_CTX_SCHED_BLOCKING_SYNC));
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT(flags == CU_CTX_SCHED_BLOCKING_SYNC && active);
  CHECK(cuCtxGetCurrent(&primary));
  CHECK(cuCtxCreate(&own_context, NULL, CU_CTX_SCHED_YIELD, dev));
  CHECK(cuCtxGetId(own_context, &own_id));
  CHECK(cuCtxSetCurrent(primary));
}

static void limits_after(void) {
  size_t value = 0;
  CUfunc_cache config;
  CUcontext primary, again;
  unsigned flags = 0;
  unsigned long long id = 0;
  int active = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK(cuCtxGetLimit(&value, kLimits[i]));
    EXPECT_EQ(value, limits_got[i]);
  }
  CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
  CHECK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  EXPECT_EQ(value, 4096);
  CHECK(cuCtxGetCacheConfig(&config));
  EXPECT_EQ(config, CU_FUNC_CACHE_PREFER_L1);
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT(flags == CU_CTX_SCHED_BLOCKING_SYNC && active);
  CHECK(cuCtxGetCurrent(&primary));
  CHECK(cuDevicePrimaryCtxRetain(&again, dev));
  EXPECT(again == primary);
  CHECK(cuDevicePrimaryCtxRelease(dev));
  CHECK(cuCtxPushCurrent(own_context));
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_SCHED_YIELD);
  CHECK(cuCtxGetId(own_context, &id));
  EXPECT_EQ(id, own_id);
  CHECK(cuCtxPopCurrent(&again));
  CHECK(cuCtxDestroy(own_context));
}

/* -- functions: attributes, and images that are there more than once --------------------------------------------------
 */

static int most_shared; /* that a block can have when its function asks for it, less 1 KiB */
static CUmodule twin, third;
static CUfunction big;
static CUlibrary library;
static CUkernel library_kernel;
static CUdeviceptr function_word;
static const char* first_name(void) {
  CUfunction f;
  return cuModuleGetFunction(&f, mod, "fill") == CUDA_SUCCESS ? "fill" : "bump";
}

static void functions_before(void) {
  CHECK(cuMemAlloc(&function_word, 4096));
  CHECK(cuDeviceGetAttribute(&most_shared, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, dev));
  most_shared -= 1024;
  twin = load_kernels();
  third = load_kernels();
  EXPECT(twin != mod && third != twin);
  big = kernel(twin, first_name());
  CHECK(cuFuncSetAttribute(big, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 50 << 10));
  CHECK(
      cuFuncSetAttribute(big, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most_shared)); /* the later one counts */
  CHECK(cuFuncSetCacheConfig(big, CU_FUNC_CACHE_PREFER_SHARED));
  CHECK(cuLibraryLoadFromFile(&library, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryGetKernel(&library_kernel, library, first_name()));
  put(third, &third_counted, function_word, NULL, 1); /* only the third's variables change */
}

static CUresult launch_big(CUfunction f, int shared) {
  uint32_t value = 0x77;
  uint64_t count = 1;
  void* params[] = {&function_word, &value, &count};
  const int fills = !strcmp(first_name(), "fill");
  return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, (unsigned)shared, NULL, fills ? params : NULL, NULL);
}

static void functions_after(void) {
  int value = 0;
  const char* name = NULL;
  CUfunction f;
  CUkernel k;
  EXPECT(kernel(twin, first_name()) == big);
  CHECK(cuFuncGetName(&name, big));
  EXPECT(!strcmp(name, first_name()));
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, big));
  EXPECT_EQ(value, most_shared);
  CHECK(launch_big(big, most_shared));
  CHECK(cuCtxSynchronize());
  EXPECT_RESULT(launch_big(kernel(mod, first_name()), most_shared), CUDA_ERROR_INVALID_VALUE); /* another module's */
  CHECK(cuFuncSetAttribute(big, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most_shared + 512));
  CHECK(launch_big(big, most_shared + 512));
  CHECK(cuCtxSynchronize());
  CHECK(cuLibraryGetKernel(&k, library, first_name()));
  EXPECT(k == library_kernel);
  CHECK(cuKernelGetFunction(&f, k));
  CHECK(launch_big(f, 0));
  /* one of the copies goes, the others work on; it comes again */
  CHECK(cuModuleUnload(twin));
  EXPECT_RESULT(cuModuleGetFunction(&f, twin, first_name()), CUDA_ERROR_INVALID_HANDLE);
  const uint32_t wanted = put(third, &third_counted, function_word, NULL, 2);
  expect_device_words(function_word, wanted, 1);
  CHECK(cuLibraryUnload(library));
  twin = load_kernels();
  CHECK(launch_big(kernel(twin, first_name()), 0));
  CHECK(cuCtxSynchronize());
  CHECK(cuModuleUnload(twin));
  CHECK(cuModuleUnload(third));
  CHECK(cuMemFree(function_word));
}

/* -- streams and events -----------------------------------------------------------------------------------------------
 */

static CUstream low, high;
static CUevent early, late, untimed, never;
static float between;
static unsigned long long low_id;

static void events_before(void) {
  CHECK(cuStreamCreateWithPriority(&low, CU_STREAM_NON_BLOCKING, 0));
  CHECK(cuStreamCreateWithPriority(&high, CU_STREAM_DEFAULT, -3));
  CHECK(cuStreamGetId(low, &low_id));
  CHECK(cuEventCreate(&early, 0));
  CHECK(cuEventCreate(&late, CU_EVENT_BLOCKING_SYNC));
  CHECK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&never, 0));
  CHECK(cuEventRecord(early, low));
  CHECK(cuStreamSynchronize(low));
  usleep(50000);
  CHECK(cuEventRecord(late, high));
  CHECK(cuEventRecord(untimed, high));
  CHECK(cuStreamSynchronize(high));
  CHECK(cuEventElapsedTime(&between, early, late));
  EXPECT(between >= 40);
}

static void events_after(void) {
  int priority = 1;
  unsigned flags = 9;
  unsigned long long id = 0;
  float now = 0;
  CUevent fresh;
  CUdeviceptr p;
  CHECK(cuStreamGetPriority(high, &priority));
  EXPECT_EQ(priority, -3);
  CHECK(cuStreamGetPriority(low, &priority));
  EXPECT_EQ(priority, 0);
  CHECK(cuStreamGetFlags(low, &flags));
  EXPECT_EQ(flags, CU_STREAM_NON_BLOCKING);
  CHECK(cuStreamGetId(low, &id));
  EXPECT_EQ(id, low_id);
  CHECK(cuEventQuery(early));
  CHECK(cuEventSynchronize(late));
  CHECK(cuEventElapsedTime(&now, early, late));
  EXPECT(now > between - 1 && now < between + 1);
  EXPECT_RESULT(cuEventElapsedTime(&now, early, untimed), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuEventElapsedTime(&now, early, never), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventCreate(&fresh, 0));
  CHECK(cuStreamWaitEvent(low, late, 0));
  CHECK(cuStreamWaitEvent(low, never, 0));
  CHECK(cuEventRecord(fresh, low));
  CHECK(cuEventSynchronize(fresh));
  CHECK(cuEventElapsedTime(&now, late, fresh)); /* one from before, one from now */
  EXPECT(now > 0);
  CHECK(cuEventElapsedTime(&now, fresh, early));
  EXPECT(now < 0);
  CHECK(cuEventRecord(late, high));
  CHECK(cuStreamSynchronize(high));
  CHECK(cuEventElapsedTime(&now, fresh, late));
  EXPECT(now >= 0);
  CHECK(cuMemAlloc(&p, 64));
  const uint32_t wanted = put(mod, &counted, p, high, 3);
  CHECK(cuStreamSynchronize(high));
  expect_device_words(p, wanted, 1);
  CHECK(cuStreamDestroy(low));
  CHECK(cuStreamDestroy(high));
  CHECK(cuEventDestroy(early));
  CHECK(cuEventDestroy(late));
  CHECK(cuMemFree(p));
}

/* -- memory pools
 * ------------------------------------------------------------------------------------------------------ */

static CUmemoryPool pool, default_pool;
static CUdeviceptr pooled, freed_late;
static CUstream pool_stream;

static void pools_before(void) {
  CUmemPoolProps props;
  cuuint64_t threshold = 12345678;
  int no = 0;
  memset(&props, 0, sizeof props);
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = dev;
  CHECK(cuStreamCreate(&pool_stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuDeviceGetDefaultMemPool(&default_pool, dev));
  CHECK(cuMemPoolCreate(&pool, &props));
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &no));
  CHECK(cuDeviceSetMemPool(dev, pool));
  CHECK(cuMemAllocAsync(&pooled, 1 << 20, pool_stream));
  CHECK(cuMemAllocFromPoolAsync(&freed_late, 1 << 20, default_pool, pool_stream));
  CHECK(cuMemsetD32Async(pooled, 0x5555, 1 << 18, pool_stream));
  CHECK(cuMemsetD32Async(freed_late, 0x6666, 1 << 18, pool_stream));
  CHECK(cuMemFreeAsync(freed_late, pool_stream));
}

static cuuint64_t pool_number(CUmemoryPool p, CUmemPool_attribute which) {
  cuuint64_t value = 0;
  CHECK(cuMemPoolGetAttribute(p, which, &value));
  return value;
}

static void pools_after(void) {
  CUmemoryPool got = NULL;
  CUdeviceptr more = 0;
  int reuse = 1;
  CHECK(cuDeviceGetMemPool(&got, dev));
  EXPECT(got == pool);
  EXPECT_EQ(pool_number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD), 12345678);
  EXPECT_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 1 << 20);
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
  EXPECT_EQ(reuse, 0);
  EXPECT_EQ(pool_number(default_pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
  expect_device_words(pooled, 0x5555, 1 << 18);
  CHECK(cuMemAllocAsync(&more, 1 << 20, pool_stream)); /* what was freed before may be this one */
  EXPECT(more + (1 << 20) <= pooled || more >= pooled + (1 << 20));
  CHECK(cuMemsetD32Async(more, 0x8888, 1 << 18, pool_stream));
  CHECK(cuStreamSynchronize(pool_stream));
  expect_device_words(pooled, 0x5555, 1 << 18);
  EXPECT_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 2 << 20);
  CHECK(cuMemFreeAsync(more, pool_stream));
  CHECK(cuMemFreeAsync(pooled, pool_stream));
  CHECK(cuStreamSynchronize(pool_stream));
  EXPECT_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
  CHECK(cuMemPoolTrimTo(pool, 0));
  CHECK(cuMemPoolDestroy(pool));
  CHECK(cuDeviceGetMemPool(&got, dev));
  EXPECT(got == default_pool);
}

/* -- host memory: pinned, registered by the job, mapped
 * ---------------------------------------------------------------- */

static uint32_t *pinned, *registered;
static CUdeviceptr host_copy, mapped;
static int maps;

static void host_before(void) {
  CHECK(cuDeviceGetAttribute(&maps, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, dev));
  CHECK(cuMemHostAlloc((void**)&pinned, 3 << 20, maps ? CU_MEMHOSTALLOC_DEVICEMAP : 0));
  memset(pinned, 0x21, 3 << 20);
  if (maps) CHECK(cuMemHostGetDevicePointer(&mapped, pinned + 1024, 0));
  EXPECT(posix_memalign((void**)&registered, 4096, 1 << 20) == 0);
  memset(registered, 0x43, 1 << 20);
  CHECK(cuMemHostRegister(registered, 1 << 20, CU_MEMHOSTREGISTER_PORTABLE));
  CHECK(cuMemAlloc(&host_copy, 1 << 20));
}

static void host_after(void) {
  CUdeviceptr again = 0;
  uint32_t* more = NULL;
  expect_words(pinned, 0x21212121, 3 << 18);
  if (maps) { /* a kernel writes where the host was told that it may; first, for a copy would register the pages */
    const uint32_t wanted = put(mod, &counted, mapped, NULL, 9);
    CHECK(cuCtxSynchronize());
    EXPECT_EQ(pinned[1024], wanted);
    EXPECT_EQ(pinned[1023], 0x21212121);
    CHECK(cuMemHostGetDevicePointer(&again, pinned + 1024, 0));
    EXPECT(again == mapped);
  }
  expect_words(registered, 0x43434343, 1 << 18);
  EXPECT_RESULT(cuMemHostRegister(registered + 1024, 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK(cuMemcpyHtoDAsync(host_copy, registered, 1 << 20, NULL));
  CHECK(cuMemcpyDtoHAsync(pinned, host_copy, 1 << 20, NULL));
  CHECK(cuCtxSynchronize());
  expect_words(pinned, 0x43434343, 1 << 18);
  CHECK(cuMemHostUnregister(registered));
  EXPECT_RESULT(cuMemHostUnregister(registered), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK(cuMemHostRegister(registered, 1 << 20, 0));
  CHECK(cuMemFreeHost(pinned));
  for (int i = 0; i < 3; ++i) { /* pages that were freed and are used again */
    CHECK(cuMemHostAlloc((void**)&more, 3 << 20, maps ? CU_MEMHOSTALLOC_DEVICEMAP : 0));
    memset(more, i, 3 << 20);
    CHECK(cuMemcpyHtoD(host_copy, more, 1 << 20));
    expect_device_words(host_copy, (uint32_t)i * 0x01010101u, 1 << 18);
    if (maps) {
      CHECK(cuMemHostGetDevicePointer(&again, more, 0));
      const uint32_t wanted = put(mod, &counted, again, NULL, 10);
      CHECK(cuCtxSynchronize());
      EXPECT_EQ(more[0], wanted);
    }
    CHECK(cuMemFreeHost(more));
  }
  CHECK(cuMemFree(host_copy));
}

/* -- attributes of streams: of a stream, of the legacy one, of one that shows memory which is gone
 * -------------------- */

static CUstream attributed, stale;
static CUdeviceptr shown;

static CUresult set_word(CUstream s, CUstreamAttrID attr, int word) {
  CUstreamAttrValue v;
  memset(&v, 0, sizeof v);
  memcpy(&v, &word, sizeof word);
  return cuStreamSetAttribute(s, attr, &v);
}

static int get_word(CUstream s, CUstreamAttrID attr) {
  CUstreamAttrValue v;
  int word;
  memset(&v, 0, sizeof v);
  CHECK(cuStreamGetAttribute(s, attr, &v));
  memcpy(&word, &v, sizeof word);
  return word;
}

static void show(CUstream s, CUdeviceptr p, size_t bytes) {
  CUstreamAttrValue v;
  memset(&v, 0, sizeof v);
  v.accessPolicyWindow.base_ptr = (void*)(uintptr_t)p, v.accessPolicyWindow.num_bytes = bytes;
  v.accessPolicyWindow.hitRatio = 0.75f, v.accessPolicyWindow.hitProp = CU_ACCESS_PROPERTY_PERSISTING;
  CHECK(cuStreamSetAttribute(s, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &v));
}

static void streams_before(void) {
  CUdeviceptr freed;
  CHECK(cuMemAlloc(&shown, 1 << 20));
  CHECK(cuMemAlloc(&freed, 1 << 20));
  CHECK(cuStreamCreateWithPriority(&attributed, CU_STREAM_NON_BLOCKING, -1));
  CHECK(cuStreamCreate(&stale, CU_STREAM_NON_BLOCKING));
  show(attributed, shown + 4096, 8192);
  show(stale, freed, 4096);
  CHECK(set_word(attributed, CU_STREAM_ATTRIBUTE_PRIORITY, -4));
  CHECK(set_word(attributed, CU_STREAM_ATTRIBUTE_PRIORITY, -2)); /* the last one counts */
  CHECK(set_word(attributed, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, CU_SYNC_POLICY_YIELD));
  CHECK(set_word(NULL, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE));
  CHECK(cuMemFree(freed));
}

static void streams_after(void) {
  CUstreamAttrValue v;
  CUstream copy;
  int priority = 0;
  CHECK(cuStreamCreate(&copy, CU_STREAM_NON_BLOCKING));
  EXPECT_EQ(get_word(copy, CU_STREAM_ATTRIBUTE_PRIORITY), 0);
  CHECK(cuStreamCopyAttributes(copy, attributed)); /* the server knows the old ones and takes new ones */
  for (int i = 0; i < 2; ++i) {
    CUstream s = i ? copy : attributed;
    CHECK(cuStreamGetAttribute(s, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &v));
    EXPECT((CUdeviceptr)(uintptr_t)v.accessPolicyWindow.base_ptr == shown + 4096);
    EXPECT(v.accessPolicyWindow.num_bytes == 8192 && v.accessPolicyWindow.hitRatio == 0.75f);
    EXPECT_EQ(get_word(s, CU_STREAM_ATTRIBUTE_PRIORITY), -2);
    CHECK(cuStreamGetPriority(s, &priority));
    EXPECT_EQ(priority, -2);
    EXPECT_EQ(get_word(s, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY), CU_SYNC_POLICY_YIELD);
    EXPECT_EQ(get_word(s, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN), CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT);
  }
  EXPECT_EQ(get_word(NULL, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN), CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
  CHECK(cuStreamGetAttribute(stale, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &v));
  EXPECT_EQ(v.accessPolicyWindow.num_bytes, 4096);
  CHECK(set_word(attributed, CU_STREAM_ATTRIBUTE_PRIORITY, -3));
  CHECK(set_word(NULL, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT));
  CHECK(cuMemsetD32Async(shown, 7, 1024, attributed));
  CHECK(cuStreamSynchronize(attributed));
  expect_device_words(shown, 7, 1024);
  CHECK(cuStreamDestroy(attributed));
  CHECK(cuStreamDestroy(stale));
  CHECK(cuStreamDestroy(copy));
  CHECK(cuMemFree(shown));
}

/* -- the kernels of a module and of a library: listed before, listed after, the same ones ------------------------- */

static CUfunction listed[64];
static CUkernel listed_kernels[64];
static CUlibrary listing, unlisted;
static unsigned n_listed;

static void listed_before(void) {
  CHECK(cuModuleGetFunctionCount(&n_listed, mod));
  EXPECT(n_listed >= 2 && n_listed < 64);
  CHECK(cuModuleEnumerateFunctions(listed, 64, mod));
  CHECK(cuLibraryLoadFromFile(&listing, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryLoadFromFile(&unlisted, kernels_path(), NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryEnumerateKernels(listed_kernels, 64, listing));
}

static void listed_after(void) {
  CUfunction again[64], f;
  CUkernel kernels[64];
  CUlibrary of;
  const char *name, *other;
  unsigned n = 0;
  CHECK(cuModuleEnumerateFunctions(again, 64, mod));
  CHECK(cuLibraryEnumerateKernels(kernels, 64, listing));
  CHECK(cuLibraryGetKernelCount(&n, unlisted)); /* nobody has asked before */
  EXPECT_EQ(n, n_listed);
  for (unsigned i = 0; i < n; ++i) EXPECT(again[i] == listed[i] && kernels[i] == listed_kernels[i]);
  CHECK(cuLibraryEnumerateKernels(kernels, 64, unlisted));
  for (unsigned i = 0; i < n; ++i) {
    CHECK(cuFuncGetName(&name, listed[i]));
    CHECK(cuKernelGetName(&other, kernels[i]));
    EXPECT(!strcmp(name, other));
    CHECK(cuKernelGetLibrary(&of, listed_kernels[i]));
    EXPECT(of == listing);
    CHECK(cuKernelGetFunction(&f, listed_kernels[i])); /* never used before */
  }
  CHECK(cuLibraryUnload(listing));
  CHECK(cuLibraryUnload(unlisted));
}

/* -- of contexts and pointers: what the client alone knows -------------------------------------------------------- */

static CUcontext attached_context;
static CUdeviceptr waited_for;

static void contexts_before(void) {
  CUcontext first;
  unsigned on = 1;
  CHECK(cuCtxGetCurrent(&first));
  CHECK(cuCtxCreate(&attached_context, NULL, 0, dev));
  CHECK(cuCtxSetFlags(CU_CTX_SCHED_YIELD));
  CHECK(cuCtxAttach(&attached_context, 0));
  CHECK(cuCtxPopCurrent(&attached_context));
  CHECK(cuMemAlloc(&waited_for, 4096));
  CHECK(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, waited_for));
  CHECK(cuCtxResetPersistingL2Cache());
}

static void contexts_after(void) {
  unsigned flags = 0;
  bool on = false;
  CHECK(cuCtxPushCurrent(attached_context));
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_SCHED_YIELD);
  CHECK(cuCtxDetach(attached_context));
  CHECK(cuCtxDetach(attached_context));
  EXPECT_RESULT(cuCtxPushCurrent(attached_context), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuPointerGetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, waited_for));
  EXPECT(on);
  CHECK(cuMemFree(waited_for));
  CHECK(cuCtxResetPersistingL2Cache());
}

/* -- managed memory: contents, addresses, what was said of it
 * ---------------------------------------------------------- */

static uint32_t *managed, *managed_freed;
enum { kManagedPages = 900 };

static int said(CUmem_range_attribute which, uint64_t page, uint64_t pages) {
  int value = 77;
  CHECK(
      cuMemRangeGetAttribute(&value, sizeof value, which, (CUdeviceptr)(uintptr_t)managed + page * 4096, pages * 4096));
  return value;
}

static void managed_before(void) {
  const CUmemLocation gpu = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev}, cpu = {.type = CU_MEM_LOCATION_TYPE_HOST};
  CUdeviceptr p = 0, q = 0;
  CHECK(cuMemAllocManaged(&q, 1 << 20, CU_MEM_ATTACH_GLOBAL));
  CHECK(cuMemAllocManaged(&p, kManagedPages * 4096, CU_MEM_ATTACH_GLOBAL));
  managed = (uint32_t*)(uintptr_t)p, managed_freed = (uint32_t*)(uintptr_t)q;
  memset(managed, 0x37, kManagedPages * 4096);
  CHECK(cuMemFree(q));
  CHECK(cuMemsetD32Async(p + 400 * 4096, 0x77777777, 1024, NULL)); /* nobody waits for it */
  CHECK(cuMemAdvise(p, 10 * 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, gpu));
  CHECK(cuMemAdvise(p, 20 * 4096, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, cpu));
  CHECK(cuMemAdvise(p, 30 * 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, gpu));
  CHECK(cuMemPrefetchAsync(p, 40 * 4096, gpu, 0, NULL));
}

static void managed_after(void) {
  const CUdeviceptr p = (CUdeviceptr)(uintptr_t)managed, word = p + 4096;
  const CUmemLocation gpu = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
  bool is = false;
  unsigned type = 0;
  CUdeviceptr more = 0;
  size_t size = 0;
  const uint32_t wanted = put(mod, &counted, word, NULL, 12); /* a kernel first: nothing else has touched it since */
  CHECK(cuCtxSynchronize());
  EXPECT_EQ(managed[1024], wanted);
  EXPECT_EQ(managed[1023], 0x37373737);
  EXPECT_EQ(managed[1025], 0x37373737);
  expect_words(managed + 400 * 1024, 0x77777777, 1024);
  expect_words(managed + 401 * 1024, 0x37373737, (kManagedPages - 401) * 1024);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 0, 10), 1);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 0, 11), 0);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 0, 20), CU_DEVICE_CPU);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 20, 1), CU_DEVICE_INVALID);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 0, 30), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 0, 31), CU_DEVICE_INVALID);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, 0, 40), dev);
  EXPECT_EQ(said(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, 40, 1), CU_DEVICE_INVALID);
  CHECK(cuPointerGetAttribute(&is, CU_POINTER_ATTRIBUTE_IS_MANAGED, p));
  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
  CHECK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p));
  EXPECT(is && type == CU_MEMORYTYPE_DEVICE && size == kManagedPages * 4096);
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)managed_freed),
                CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD32(p, 3, kManagedPages * 1024));
  CHECK(cuMemPrefetchAsync(p, kManagedPages * 4096, gpu, 0, NULL));
  CHECK(cuCtxSynchronize());
  expect_words(managed, 3, kManagedPages * 1024);
  CHECK(cuMemAllocManaged(&more, 1 << 20, CU_MEM_ATTACH_GLOBAL));
  CHECK(cuMemcpyDtoD(more, p, 1 << 20));
  expect_words((uint32_t*)(uintptr_t)more, 3, 1 << 18);
  CHECK(cuMemFree(more));
  CHECK(cuMemFree(p));
}

/* -- managed memory that two GPUs reach: each server has the other's window open
 * ---------------------------------------- */

enum { kSharedWords = 300000 };
static CUcontext both[2];
static CUmodule modules[2];
static uint32_t* common[2];

static void gpus_before(void) {
  CHECK(cuCtxGetCurrent(&both[0]));
  modules[0] = mod;
  CHECK(cuDevicePrimaryCtxRetain(&both[1], 1));
  for (int g = 1; g >= 0; --g) {
    CUdeviceptr p = 0;
    CHECK(cuCtxSetCurrent(both[g]));
    if (g == 1) modules[1] = load_kernels();
    CHECK(cuMemAllocManaged(&p, kSharedWords * 4, CU_MEM_ATTACH_GLOBAL));
    common[g] = (uint32_t*)(uintptr_t)p;
    memset(common[g], 0x40 + g, kSharedWords * 4);
  }
}

static void gpus_after(void) {
  uint32_t counter[2] = {counted, 5};
  for (int g = 0; g < 2; ++g) {
    uint32_t* p = common[1 - g]; /* of the other */
    CHECK(cuCtxSetCurrent(both[g]));
    const uint32_t wanted = put(modules[g], &counter[g], (CUdeviceptr)(uintptr_t)(p + 2000), NULL, 90 + (uint32_t)g);
    CHECK(cuCtxSynchronize());
    EXPECT_EQ(p[2000], wanted);
    EXPECT_EQ(p[2001], 0x40404040u + 0x01010101u * (uint32_t)(1 - g));
    CHECK(cuMemsetD32((CUdeviceptr)(uintptr_t)p, 7, kSharedWords));
    CHECK(cuCtxSynchronize());
    expect_words(p, 7, kSharedWords);
  }
  counted = counter[0];
  for (int g = 0; g < 2; ++g) {
    CUdeviceptr more = 0;
    CHECK(cuCtxSetCurrent(both[g]));
    CHECK(cuMemAllocManaged(&more, 4096, CU_MEM_ATTACH_GLOBAL));
    CHECK(cuCtxSetCurrent(both[1 - g]));
    CHECK(cuMemsetD32(more, 8, 1024));
    CHECK(cuCtxSynchronize());
    expect_words((uint32_t*)(uintptr_t)more, 8, 1024);
    CHECK(cuMemFree(more));
    CHECK(cuMemFree((CUdeviceptr)(uintptr_t)common[g]));
  }
  CHECK(cuCtxSetCurrent(both[0]));
}

/* -- executable graphs: updated in place with the function of a module that came later
 * ------------------------------------ */

static CUgraphExec exec;
static CUgraph graph;
static CUgraphNode node;
static CUmodule later;
static CUdeviceptr graph_word;
static uint32_t graph_value = 21;
static uint64_t graph_count = 1;

static void graphs_before(void) {
  CUDA_KERNEL_NODE_PARAMS p;
  CUDA_MEMSET_NODE_PARAMS zero;
  CUgraphNode first;
  CUcontext ctx;
  void* fill_params[] = {&graph_word, &graph_value, &graph_count};
  void* peek_params[] = {&graph_word};
  const int fills = !strcmp(first_name(), "fill");
  const char* name = fills ? "fill" : "peek";
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuMemAlloc(&graph_word, 4096));
  memset(&p, 0, sizeof p);
  p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1;
  p.kernelParams = fills ? fill_params : peek_params;
  p.func = kernel(mod, name);
  memset(&zero, 0, sizeof zero);
  zero.dst = graph_word, zero.elementSize = 4, zero.width = 16, zero.height = 1;
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddMemsetNode(&first, graph, NULL, 0, &zero, ctx));
  CHECK(cuGraphAddKernelNode(&node, graph, &first, 1, &p));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  later = load_kernels();
  p.func = kernel(later, name);
  graph_value = 22;
  CHECK(cuGraphExecKernelNodeSetParams(exec, node, &p));
  if (!fills) CHECK(launch1(kernel(later, "bump"), NULL, NULL)); /* 6 in the later module */
  CHECK(cuGraphLaunch(exec, NULL));
  CHECK(cuCtxSynchronize());
  expect_device_words(graph_word, fills ? 22 : 6, 1);
}

static void graphs_after(void) {
  const int fills = !strcmp(first_name(), "fill");
  CUgraphExec again;
  CUstream s;
  CHECK(cuMemsetD32(graph_word, 99, 16));
  CHECK(cuGraphLaunch(exec, NULL));
  CHECK(cuCtxSynchronize());
  expect_device_words(graph_word, fills ? 22 : 6, 1);
  expect_device_words(graph_word + 4, 0, 15);
  if (!fills) CHECK(launch1(kernel(later, "bump"), NULL, NULL));
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuCtxSynchronize());
  CHECK(cuGraphLaunch(exec, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(graph_word, fills ? 22 : 7, 1);
  CHECK(cuGraphInstantiate(&again, graph, 0)); /* the graph itself was not updated */
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphLaunch(again, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(graph_word, fills ? 21 : counted, 1);
  CHECK(cuGraphExecDestroy(again));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuModuleUnload(later));
  CHECK(cuMemFree(graph_word));
}

/* -- memory that graphs allocate: left by a launch, with its graph and without; of a graph that frees it itself */

enum { kShared = 1024 }; /* words */
static CUgraph kept_graph, inner_graph, taker_graph;
static CUgraphExec kept_exec, inner_exec, taker_exec;
static CUgraphNode kept_node;
static CUdeviceptr kept, orphan, inner, shared_out;
static uint64_t shared_used;

static CUgraphNode alloc_node(CUgraph g, CUdeviceptr* p) {
  CUDA_MEM_ALLOC_NODE_PARAMS a;
  CUgraphNode n;
  memset(&a, 0, sizeof a);
  a.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  a.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  a.poolProps.location.id = dev;
  a.bytesize = kShared * 4;
  CHECK(cuGraphAddMemAllocNode(&n, g, NULL, 0, &a));
  *p = a.dptr;
  return n;
}

static CUgraphNode set_node(CUgraph g, CUgraphNode behind, CUdeviceptr p, uint32_t value) {
  CUDA_MEMSET_NODE_PARAMS m = {.dst = p, .value = value, .elementSize = 4, .width = kShared, .height = 1};
  CUcontext ctx;
  CUgraphNode n;
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuGraphAddMemsetNode(&n, g, &behind, 1, &m, ctx));
  return n;
}

static CUgraphNode copy_node(CUgraph g, const CUgraphNode* behind, CUdeviceptr to, CUdeviceptr from) {
  CUDA_MEMCPY3D c;
  CUcontext ctx;
  CUgraphNode n;
  memset(&c, 0, sizeof c);
  c.dstMemoryType = c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstDevice = to, c.srcDevice = from, c.WidthInBytes = kShared * 4, c.Height = c.Depth = 1;
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuGraphAddMemcpyNode(&n, g, behind, behind ? 1 : 0, &c, ctx));
  return n;
}

static uint64_t graph_bytes(void) {
  cuuint64_t value = 0;
  CHECK(cuDeviceGetGraphMemAttribute(dev, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &value));
  return value;
}

static void graph_memory_before(void) {
  CUgraph g;
  CUgraphExec x;
  CUgraphNode n;
  CHECK(cuMemAlloc(&shared_out, kShared * 4));
  CHECK(cuGraphCreate(&kept_graph, 0)); /* its launch has left it allocated */
  kept_node = alloc_node(kept_graph, &kept);
  set_node(kept_graph, kept_node, kept, 0x51);
  CHECK(cuGraphInstantiate(&kept_exec, kept_graph, 0));
  CHECK(cuGraphCreate(&taker_graph, 0)); /* it will be freed by this */
  n = copy_node(taker_graph, NULL, shared_out, kept);
  CHECK(cuGraphAddMemFreeNode(&n, taker_graph, &n, 1, kept));
  CHECK(cuGraphInstantiate(&taker_exec, taker_graph, 0));
  CHECK(cuGraphCreate(&inner_graph, 0)); /* its memory lives within a launch */
  n = alloc_node(inner_graph, &inner);
  n = set_node(inner_graph, n, inner, 0x53);
  n = copy_node(inner_graph, &n, shared_out, inner);
  CHECK(cuGraphAddMemFreeNode(&n, inner_graph, &n, 1, inner));
  CHECK(cuGraphInstantiate(&inner_exec, inner_graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
  CHECK(cuGraphCreate(&g, 0)); /* and what a graph that is gone has left */
  n = alloc_node(g, &orphan);
  set_node(g, n, orphan, 0x52);
  CHECK(cuGraphInstantiate(&x, g, 0));
  CHECK(cuGraphLaunch(x, NULL));
  CHECK(cuGraphLaunch(kept_exec, NULL));
  CHECK(cuGraphLaunch(inner_exec, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemsetD32(kept, 0x61, 1)); /* no launch would make this again */
  CHECK(cuCtxSynchronize());
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  shared_used = graph_bytes();
  EXPECT_EQ(shared_used, 3 * 4 * kShared);
}

static void graph_memory_after(void) {
  CUDA_MEM_ALLOC_NODE_PARAMS got;
  CUdeviceptr fresh[8];
  EXPECT_EQ(graph_bytes(), shared_used);
  CHECK(cuGraphMemAllocNodeGetParams(kept_node, &got));
  EXPECT(got.dptr == kept && got.bytesize == kShared * 4);
  for (int i = 0; i < 8; ++i) { /* nobody else gets these addresses */
    CHECK(cuMemAlloc(&fresh[i], kShared * 4));
    CHECK(cuMemsetD32(fresh[i], 0x99, kShared));
  }
  expect_device_words(kept, 0x61, 1);
  expect_device_words(kept + 4, 0x51, kShared - 1);
  expect_device_words(orphan, 0x52, kShared);
  EXPECT_RESULT(cuGraphLaunch(kept_exec, NULL), CUDA_ERROR_INVALID_VALUE); /* it is allocated */
  EXPECT_RESULT(cuMemFree(inner), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphLaunch(taker_exec, NULL));
  EXPECT_RESULT(cuGraphLaunch(taker_exec, NULL), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuCtxSynchronize());
  expect_device_words(shared_out, 0x61, 1);
  expect_device_words(shared_out + 4, 0x51, kShared - 1);
  CHECK(cuGraphLaunch(kept_exec, NULL)); /* again, at the same address */
  CHECK(cuCtxSynchronize());
  expect_device_words(kept, 0x51, kShared);
  CHECK(cuMemFree(kept));
  for (int i = 0; i < 2; ++i) CHECK(cuGraphLaunch(inner_exec, NULL));
  CHECK(cuCtxSynchronize());
  expect_device_words(shared_out, 0x53, kShared);
  CHECK(cuMemFreeAsync(orphan, NULL));
  EXPECT_RESULT(cuMemFreeAsync(orphan, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(graph_bytes(), 2 * 4 * kShared);
  for (int i = 0; i < 8; ++i) {
    expect_device_words(fresh[i], 0x99, kShared);
    CHECK(cuMemFree(fresh[i]));
  }
  CHECK(cuGraphExecDestroy(kept_exec));
  CHECK(cuGraphExecDestroy(taker_exec));
  CHECK(cuGraphExecDestroy(inner_exec));
  CHECK(cuGraphDestroy(kept_graph));
  CHECK(cuGraphDestroy(taker_graph));
  CHECK(cuGraphDestroy(inner_graph));
  EXPECT_EQ(graph_bytes(), 0);
  CHECK(cuMemFree(shared_out));
}

/* -- the same in the middle of a capture; a part for itself, since others wait for the device */

static CUstream capture_stream;
static CUdeviceptr captured_word;

static void capture_before(void) {
  CHECK(cuMemAlloc(&shared_out, kShared * 4));
  CHECK(cuStreamCreate(&capture_stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamBeginCapture(capture_stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(cuMemAllocAsync(&captured_word, kShared * 4, capture_stream));
  CHECK(cuMemsetD32Async(captured_word, 0x71, kShared, capture_stream));
}

static void capture_after(void) {
  CUgraph g;
  CUgraphExec x;
  EXPECT_EQ(graph_bytes(), kShared * 4);
  CHECK(cuMemcpyDtoDAsync(shared_out, captured_word, kShared * 4, capture_stream));
  CHECK(cuMemFreeAsync(captured_word, capture_stream));
  CHECK(cuStreamEndCapture(capture_stream, &g));
  CHECK(cuGraphInstantiate(&x, g, 0));
  for (int i = 0; i < 2; ++i) CHECK(cuGraphLaunch(x, capture_stream));
  CHECK(cuStreamSynchronize(capture_stream));
  expect_device_words(shared_out, 0x71, kShared);
  CHECK(cuGraphExecDestroy(x));
  CHECK(cuGraphDestroy(g));
  EXPECT_EQ(graph_bytes(), 0);
  CHECK(cuStreamDestroy(capture_stream));
  CHECK(cuMemFree(shared_out));
}

/* -- what only a driver has: the linker, tensor maps, text of kernels
 * ------------------------------------------------------ */

static CUlinkState half_linked;
static CUmodule linked;
static CUdeviceptr linked_word;
static CUtensorMap map;

static void tensor(CUtensorMap* to, CUdeviceptr p) {
  cuuint64_t dim[2] = {256, 64}, strides[1] = {512};
  cuuint32_t box[2] = {64, 8}, elements[2] = {1, 1};
  memset(to, 0, sizeof *to);
  CHECK(cuTensorMapEncodeTiled(to, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void*)(uintptr_t)p, dim, strides, box, elements,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

static void link_before(void) {
  CUlinkState state;
  void* image = NULL;
  size_t bytes = 0;
  CHECK(cuMemAlloc(&linked_word, 1 << 20));
  CHECK(cuLinkCreate(0, NULL, NULL, &state));
  CHECK(cuLinkAddFile(state, CU_JIT_INPUT_PTX, kernels_path(), 0, NULL, NULL));
  CHECK(cuLinkComplete(state, &image, &bytes));
  CHECK(cuModuleLoadData(&linked, image));
  CHECK(cuLinkDestroy(state));
  CHECK(launch1(kernel(linked, "bump"), NULL, NULL)); /* 6 */
  CHECK(cuLinkCreate(0, NULL, NULL, &half_linked));
  CHECK(cuLinkAddFile(half_linked, CU_JIT_INPUT_PTX, kernels_path(), 0, NULL, NULL));
  tensor(&map, linked_word);
}

static void link_after(void) {
  void* image = NULL;
  size_t bytes = 0;
  CUmodule second;
  CUtensorMap again;
  void* params[] = {&linked_word};
  CHECK(launch1(kernel(linked, "bump"), NULL, NULL));
  CHECK(launch1(kernel(linked, "peek"), NULL, params));
  expect_device_words(linked_word, 7, 1);
  CHECK(cuLinkComplete(half_linked, &image, &bytes));
  CHECK(cuModuleLoadData(&second, image));
  CHECK(launch1(kernel(second, "peek"), NULL, params));
  expect_device_words(linked_word, 5, 1);
  CHECK(cuLinkDestroy(half_linked));
  tensor(&again, linked_word);
  EXPECT(!memcmp(&again, &map, sizeof map));
  CHECK(cuTensorMapReplaceAddress(&map, (void*)(uintptr_t)(linked_word + 4096)));
  tensor(&again, linked_word + 4096);
  EXPECT(!memcmp(&again, &map, sizeof map));
  CHECK(cuModuleUnload(linked));
  CHECK(cuModuleUnload(second));
  CHECK(cuMemFree(linked_word));
}

static CUmodule printing;

static void say(uint32_t number) {
  void* params[] = {&number};
  CHECK(launch1(kernel(printing, "say"), NULL, params));
}

static void prints_before(void) {
  const char* path = getenv("TEST_PRINTING");
  EXPECT(path != NULL);
  CHECK(cuModuleLoad(&printing, path));
  for (uint32_t i = 1; i <= 500; ++i) say(i); /* more than one answer holds, and nobody waits for it */
}

static void prints_after(void) {
  CHECK(cuCtxSynchronize());
  printf("host 501\n");
  say(502);
  CHECK(cuCtxSynchronize());
  printf("host 503\n");
  CHECK(cuModuleUnload(printing));
}

/* -- a context that has failed: the error stays, and the memory cannot be read any more --------------------------- */

static CUdeviceptr failed_word;

static void failed_before(void) {
  CUevent e;
  CHECK(cuMemAlloc(&failed_word, 4096));
  CHECK(cuModuleLoad(&printing, getenv("TEST_PRINTING")));
  CHECK(cuEventCreate(&e, 0));
  CHECK(cuEventRecord(e, NULL));
  CHECK(launch1(kernel(printing, "claim"), NULL, NULL));
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
}

static void failed_after(void) {
  EXPECT_RESULT(cuMemsetD32(failed_word, 1, 1), CUDA_ERROR_ASSERT);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
}

/* -- errors that have happened and that nobody has been told yet, or that stay ------------------------------------ */

static void* wait_elsewhere(void* context) {
  CHECK(cuCtxSetCurrent((CUcontext)context));
  CHECK(cuCtxSynchronize());
  return NULL;
}

/* The driver refuses the launch after the call has returned: the error is this thread's, and it is told once. */
static void late_before(void) {
  CUcontext context;
  CUlaunchAttribute cluster;
  CUlaunchConfig config;
  pthread_t waiter;
  memset(&cluster, 0, sizeof cluster);
  memset(&config, 0, sizeof config);
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = 8;
  cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
  config.gridDimX = 8;
  config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  CHECK(cuCtxGetCurrent(&context));
  CHECK(cuLaunchKernelEx(&config, kernel(mod, first_name()), NULL, NULL));
  EXPECT(pthread_create(&waiter, NULL, wait_elsewhere, context) == 0); /* not this thread, which would be told */
  EXPECT(pthread_join(waiter, NULL) == 0);
}

static void late_after(void) {
  CUdeviceptr word;
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_INVALID_CLUSTER_SIZE);
  CHECK(cuCtxSynchronize());
  CHECK(cuMemAlloc(&word, 64));
  CHECK(cuMemFree(word));
}

static void sticky_before(void) {
  int code = CUDA_ERROR_ASSERT;
  void* params[] = {&code};
  const CUresult r = launch1(kernel(mod, "fail"), NULL, params);
  EXPECT(r == CUDA_SUCCESS || r == CUDA_ERROR_ASSERT);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
}

static void sticky_after(void) {
  CUdeviceptr word;
  int code = 0;
  void* params[] = {&code};
  EXPECT_RESULT(cuMemAlloc(&word, 64), CUDA_ERROR_ASSERT);
  EXPECT_RESULT(launch1(kernel(mod, "fail"), NULL, params), CUDA_ERROR_ASSERT);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
}

/* ----------------------------------------------------------------------------------------------------------------------------
 */

static const struct {
  const char* name;
  void (*before)(void);
  void (*after)(void);
} kParts[] = {
    {"vmm", vmm_before, vmm_after},
    {"limits", limits_before, limits_after},
    {"functions", functions_before, functions_after},
    {"events", events_before, events_after},
    {"streams", streams_before, streams_after},
    {"listed", listed_before, listed_after},
    {"contexts", contexts_before, contexts_after},
    {"pools", pools_before, pools_after},
    {"host", host_before, host_after},
    {"managed", managed_before, managed_after},
    {"gpus", gpus_before, gpus_after},
    {"graphs", graphs_before, graphs_after},
    {"graph_memory", graph_memory_before, graph_memory_after},
    {"capture", capture_before, capture_after},
    {"link", link_before, link_after},
    {"prints", prints_before, prints_after},
    {"failed", failed_before, failed_after},
    {"late", late_before, late_after},
    {"sticky", sticky_before, sticky_after},
};

int main(int argc, char** argv) {
  const char* go = getenv("TEST_GO");
  EXPECT(go != NULL && argc > 1);
  dev = start();
  mod = load_kernels();
  for (int after = 0; after < 2; ++after) {
    for (int i = 1; i < argc; ++i) {
      size_t part = 0;
      while (part < sizeof kParts / sizeof *kParts && strcmp(argv[i], kParts[part].name)) ++part;
      EXPECT(part < sizeof kParts / sizeof *kParts);
      (after ? kParts[part].after : kParts[part].before)();
    }
    if (after) break;
    printf("survive ready\n");
    fflush(stdout);
    while (access(go, F_OK) != 0) usleep(20000);
  }
  return pass("survive");
}
