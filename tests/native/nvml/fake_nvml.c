// SPDX-License-Identifier: Apache-2.0
/* A machine with three GPUs, as nvml.h says that it would be told: 0 is well, 1 has every fault, 2 does not answer.
 * Only what devproxy/hal/nvml.py asks; what is missing here is a function that an old driver does not have. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };
typedef struct {
  int index;
} gpu;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char name[32];
} pci;
static gpu gpus[3] = {{0}, {1}, {2}};
static int users;

int fake_users(void) { return users; }
int nvmlInitWithFlags(unsigned flags) {
  users++;
  return flags ? INVALID : OK;
}
int nvmlShutdown(void) {
  users--;
  return OK;
}
const char* nvmlErrorString(int result) { return result == LOST ? "GPU is lost" : "some error"; }
static int text(const char* from, char* to) {
  strcpy(to, from);
  return OK;
}
int nvmlSystemGetDriverVersion(char* to, unsigned n) { return n < 80 ? 7 : text("580.65.06", to); }
int nvmlSystemGetCudaDriverVersion(int* to) {
  *to = 13020;
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned* to) {
  *to = 3;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu** to) {
  *to = &gpus[i];
  return i < 3 ? OK : INVALID;
}
int nvmlDeviceGetName(gpu* g, char* to, unsigned n) {
  (void)n;
  return g->index == 2 ? LOST : text("NVIDIA H100 80GB HBM3", to);
}
int nvmlDeviceGetUUID(gpu* g, char* to, unsigned n) {
  (void)n;
  return text(g->index ? "GPU-1" : "GPU-0", to);
}
static int bus(int index, pci* to) {
  memset(to, 0, sizeof *to);
  to->bus = 0x10u + (unsigned)index;
  static const char* const names[] = {"00000000:10:00.0", "00000000:11:00.0"};
  return text(index < 2 ? names[index] : "00000000:20:00.0", to->name); /* 2: a switch */
}
int nvmlDeviceGetPciInfo_v3(gpu* g, pci* to) { return bus(g->index, to); }
int nvmlDeviceGetMemoryInfo(gpu* g, unsigned long long* to) {
  (void)g;
  to[0] = 80ull << 30, to[1] = 79ull << 30, to[2] = 1ull << 30;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu* g, unsigned* n, void* to) {
  (void)g, (void)to;
  *n = 0;
  return OK;
}
int nvmlDeviceGetTemperature(gpu* g, int sensor, unsigned* to) {
  *to = g->index ? 95 : 40;
  return sensor ? INVALID : OK;
}
int nvmlDeviceGetTemperatureThreshold(gpu* g, int which, unsigned* to) {
  (void)g;
  *to = 89;
  return which == 1 ? OK : INVALID;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu* g, unsigned long long* to) {
  *to = g->index ? 0x48 : 1;
  return OK;
}
int nvmlDeviceGetTotalEccErrors(gpu* g, int kind, int counter, unsigned long long* to) {
  *to = g->index ? 7 : 0;
  return kind == 1 && counter == 0 ? OK : INVALID;
}
int nvmlDeviceGetRemappedRows(gpu* g, unsigned* a, unsigned* b, unsigned* pending, unsigned* failed) {
  *a = 0, *b = 0, *pending = (unsigned)g->index, *failed = (unsigned)g->index;
  return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(gpu* g, unsigned* to) {
  (void)g, (void)to;
  return NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(gpu* g, unsigned* now, unsigned* next) {
  *now = *next = (unsigned)g->index;
  return OK;
}
int nvmlDeviceGetComputeMode(gpu* g, unsigned* to) {
  const char* all = getenv("FAKE_NVML_MODE"); /* of every GPU */
  *to = all ? (unsigned)atoi(all) : g->index ? 3 : 0;
  return OK;
}
int nvmlDeviceGetGpuFabricInfo(gpu* g, void* to) {
  struct {
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
  } info = {{0}, g->index ? 1 : 0, 0, 3};
  memcpy(to, &info, 25);
  return OK;
}
int nvmlDeviceGetNvLinkState(gpu* g, unsigned link, unsigned* up) {
  if (link >= 4) return INVALID;
  *up = g->index == 0 || link < 3;
  return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu* g, unsigned link, pci* to) {
  return link < 2 ? bus(1 - g->index, to) : bus(2, to);
}
int nvmlDeviceGetTopologyCommonAncestor(gpu* a, gpu* b, unsigned* to) {
  (void)a, (void)b;
  *to = 40;
  return OK;
}
