// SPDX-License-Identifier: Apache-2.0
// syscall() as libuv uses it: io_uring is not there, everything else is as without the interposer.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x)                                              \
  do {                                                        \
    if (!(x)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); \
      return 1;                                               \
    }                                                         \
  } while (0)

int main(void) {
  char params[256] = {0};
  for (long n = 425; n <= 427; ++n) {
    errno = 0;
    CHECK(syscall(n, 8, params) == -1 && errno == ENOSYS);
  }
  errno = 7;
  CHECK(syscall(SYS_getpid) == getpid() && errno == 7);
  CHECK(syscall(SYS_close, -1) == -1 && errno == EBADF);
  // Six arguments, each of which matters.
  const int fd = memfd_create("six", 0);
  CHECK(fd >= 0 && ftruncate(fd, 8192) == 0 && pwrite(fd, "six", 3, 4096) == 3);
  char* at = (char*)syscall(SYS_mmap, NULL, 4096L, (long)PROT_READ, (long)MAP_SHARED, (long)fd, 4096L);
  CHECK(at != MAP_FAILED && memcmp(at, "six", 3) == 0);
  long x = 0;
  CHECK(syscall(SYS_pselect6, 0, NULL, NULL, NULL, &(struct { long s, n; }){0, 1}, NULL) == 0 && x == 0);
  // A death signal passes: inside the tree CRIU restores the parent too.
  int signal = -1;
  CHECK(prctl(PR_SET_PDEATHSIG, 15) == 0 && prctl(PR_GET_PDEATHSIG, &signal) == 0 && signal == 15);
  const pid_t child = vfork();
  if (child == 0) {
    const int made = open("made-in-vfork", O_WRONLY | O_CREAT, 0644);
    _exit(made >= 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  printf("PASS io_uring\n");
  return 0;
}
