// SPDX-License-Identifier: Apache-2.0
// Threads, signals and forks that all open files at the same time: no lock, no lost record, errno as it was.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kThreads = 4, kFiles = 200 };
static volatile int g_signals;

static void on_signal(int number) {
  (void)number;
  const int saved = errno;
  char name[32];
  snprintf(name, sizeof(name), "signal-%d", ++g_signals % 16);
  close(open(name, O_WRONLY | O_CREAT, 0600));
  errno = saved;
}

static void* work(void* argument) {
  const long t = (long)argument;
  for (int i = 0; i < kFiles; ++i) {
    char name[48];
    snprintf(name, sizeof(name), "thread-%ld-%d", t, i);
    errno = 77;
    const int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || errno != 77 || write(fd, name, 8) != 8 || close(fd) != 0) abort();
    if (i % 50 == 0) {
      const pid_t child = fork();
      if (child == 0) {
        snprintf(name, sizeof(name), "child-%ld-%d", t, i);
        close(open(name, O_WRONLY | O_CREAT, 0644));
        _exit(0);
      }
      while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    }
  }
  return NULL;
}

__attribute__((destructor)) static void after_exit(void) { close(open("in-destructor", O_WRONLY | O_CREAT, 0644)); }

int main(void) {
  // The handler runs on a small stack of its own.
  static char stack[16384];
  sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof(stack)}, NULL);
  sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_ONSTACK}, NULL);
  setitimer(ITIMER_REAL, &(struct itimerval){{0, 500}, {0, 500}}, NULL);
  pthread_t threads[kThreads];
  for (long t = 0; t < kThreads; ++t) pthread_create(&threads[t], NULL, work, (void*)t);
  for (int t = 0; t < kThreads; ++t) pthread_join(threads[t], NULL);
  setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
  printf("PASS many\n");
  return 0;
}
