// SPDX-License-Identifier: Apache-2.0
/* The server is killed while the job polls an event, waits for a stream, posts launches, or asks synchronously: the
 * call that can notice fails as a CUDA error within 5 seconds, the error's text names the cause, and so does every
 * later call. lost poll|wait|post|ask */
#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <time.h>

#include "program.h"

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The server of this job: the process whose arguments name the job's folder. */
static pid_t server_pid(void) {
  const char* folder = getenv("DEVPROXY_JOB_DIR");
  EXPECT(folder);
  DIR* proc = opendir("/proc");
  EXPECT(proc);
  pid_t found = 0;
  for (struct dirent* e; !found && (e = readdir(proc));) {
    if (!isdigit((unsigned char)e->d_name[0])) continue;
    char path[300], line[4096];
    snprintf(path, sizeof path, "/proc/%s/cmdline", e->d_name);
    FILE* f = fopen(path, "r");
    if (!f) continue;
    const size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    for (size_t i = 0; i < n; ++i)
      if (!line[i]) line[i] = ' ';
    line[n] = 0;
    if (strstr(line, "devproxy-server") && strstr(line, "--lease-fd") && strstr(line, folder)) found = atoi(e->d_name);
  }
  closedir(proc);
  return found;
}

static double killed_at;

static void* killer(void* pid) {
  usleep(300 * 1000);
  killed_at = now_s();
  kill((pid_t)(intptr_t)pid, SIGKILL);
  return NULL;
}

int main(int argc, char** argv) {
  EXPECT(argc == 2);
  start();
  CUmodule mod = load_kernels();
  CUfunction slow = kernel(mod, "slow");
  CUstream s;
  CUevent e;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  const pid_t pid = server_pid();
  EXPECT(pid > 0);
  uint64_t us = 30 * 1000 * 1000; /* longer than the test: only the kill ends it */
  void* params[] = {&us};
  pthread_t thread;
  const int stuck = !strcmp(argv[1], "poll") || !strcmp(argv[1], "wait");
  if (stuck) CHECK(cuLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
  CHECK(cuEventRecord(e, s));
  EXPECT(pthread_create(&thread, NULL, killer, (void*)(intptr_t)pid) == 0);
  CUresult r = CUDA_SUCCESS;
  if (!strcmp(argv[1], "poll")) {
    while ((r = cuEventQuery(e)) == CUDA_ERROR_NOT_READY) usleep(1000);
  } else if (!strcmp(argv[1], "wait")) {
    r = cuStreamSynchronize(s);
  } else if (!strcmp(argv[1], "post")) {
    us = 1;
    while ((r = cuLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, s, params, NULL)) == CUDA_SUCCESS) {}
  } else {
    size_t free_bytes, total;
    while ((r = cuMemGetInfo(&free_bytes, &total)) == CUDA_SUCCESS) {}
  }
  const double noticed = now_s();
  pthread_join(thread, NULL);
  EXPECT_RESULT(r, CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT(noticed - killed_at < 5.0);
  const char* text = NULL;
  CHECK(cuGetErrorString(r, &text));
  EXPECT(strstr(text, "server is gone"));
  CUdeviceptr p;
  EXPECT_RESULT(cuMemAlloc(&p, 64), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_RESULT(cuEventQuery(e), CUDA_ERROR_DEVICE_UNAVAILABLE);
  char name[32];
  snprintf(name, sizeof name, "lost %s", argv[1]);
  return pass(name);
}
