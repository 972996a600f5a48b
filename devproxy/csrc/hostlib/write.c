// SPDX-License-Identifier: Apache-2.0
// A write() that a freeze cut short goes on, as it would have without the freeze.
//
// Stopping a task interrupts a write that waits for room in a pipe; if part of it is in already, write returns how much
// (pipe_write in the kernel's fs/pipe.c). That is allowed, but on a pipe it otherwise takes a signal handler, and who
// has none does not expect it: Python's unbuffered streams drop the rest. The supervisor writes a new number into <job
// folder>/freeze before each freeze, so a short write is told from one that a handler interrupted: that one stays.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "devproxy/csrc/hostlib/note.h"

typedef ssize_t (*write_fn)(int, const void*, size_t);
static write_fn next_write;
static __thread uint64_t seen __attribute__((tls_model("initial-exec")));

static write_fn real_write(void) {
  write_fn f = __atomic_load_n(&next_write, __ATOMIC_RELAXED);
  if (__builtin_expect(f != NULL, 1)) return f;
  f = (write_fn)(uintptr_t)dlsym(RTLD_NEXT, "write");
  __atomic_store_n(&next_write, f, __ATOMIC_RELAXED);
  return f;
}

// Has there been a freeze since this thread asked last?
static bool was_frozen(void) {
  const char* folder = getenv("DEVPROXY_JOB_DIR");
  if (!folder) return false;
  char path[PATH_MAX];
  size_t n = 0;
  while (folder[n] && n < sizeof(path) - 8) {
    path[n] = folder[n];
    ++n;
  }
  for (const char* p = "/freeze"; *p; ++p) path[n++] = *p;
  path[n] = 0;
  const long fd = devproxy_raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0);
  if (fd < 0) return false;
  uint64_t number = 0;
  const long got = devproxy_raw(SYS_read, fd, (long)&number, sizeof(number), 0, 0, 0);
  devproxy_raw(SYS_close, fd, 0, 0, 0, 0, 0);
  if (got != sizeof(number) || number == seen) return false;
  seen = number;
  return true;
}

__attribute__((visibility("default"))) ssize_t write(int fd, const void* data, size_t size) {
  ssize_t done = real_write()(fd, data, size);
  // No more than PIPE_BUF is written as a whole or not at all (pipe(7)).
  while (__builtin_expect(done > 0 && (size_t)done < size && size > PIPE_BUF, 0)) {
    const int saved = errno;
    const ssize_t more = was_frozen() ? real_write()(fd, (const char*)data + done, size - (size_t)done) : 0;
    errno = saved;
    if (more <= 0) break;
    done += more;
  }
  return done;
}
