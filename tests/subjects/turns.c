// SPDX-License-Identifier: Apache-2.0
/* A kernel that notes whether another one of its kind runs at the same time, in whatever process: a module of the
 * software GPU for turns.py. */
#include "devproxy_soft_module.h"

#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

struct alone {
  char path[120]; /* a file that its kernels lock while they run; a byte is appended for each that finds it locked */
  uint64_t us;    /* for so long */
};

static int alone(const devproxy_soft_launch* l) {
  struct alone p;
  if (l->params_bytes < sizeof p) return 719;
  memcpy(&p, l->params, sizeof p);
  const int fd = open(p.path, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) return 719;
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && write(fd, "!", 1) != 1) return 719;
  const struct timespec t = {0, (long)p.us * 1000};
  nanosleep(&t, NULL);
  close(fd);
  return 0;
}

static int get_function(const char* name, devproxy_soft_function* out) {
  if (strcmp(name, "alone")) return 500;
  memset(out, 0, sizeof *out);
  out->kernel = alone;
  out->n_params = 1;
  out->params[0].size = sizeof(struct alone);
  return 0;
}

DEVPROXY_SOFT_MODULE_EXPORT const devproxy_soft_module_table devproxy_soft_module = {DEVPROXY_SOFT_MODULE_ABI, 0, NULL,
                                                                                     get_function, NULL};
