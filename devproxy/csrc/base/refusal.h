// SPDX-License-Identifier: Apache-2.0
/* How a client library says that it refuses a call: all of them say it in one way. C, and nothing but libc, because
 * some of them are plain C and are loaded into every process of a job. */
#ifndef DEVPROXY_CSRC_BASE_REFUSAL_H_
#define DEVPROXY_CSRC_BASE_REFUSAL_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct dp_refusal_environment {
  int strict; /* DEVPROXY_STRICT=1 (tests): a refusal aborts, so that none goes unseen */
  int quiet;  /* DEVPROXY_LOG=error */
};
static struct dp_refusal_environment dp_refusal_environment;

/* Read when the library is loaded: getenv is not safe beside a setenv of the job. */
__attribute__((constructor)) static void dp_read_refusal_environment(void) {
  const char* text = getenv("DEVPROXY_STRICT");
  dp_refusal_environment.strict = text != NULL && strcmp(text, "1") == 0;
  text = getenv("DEVPROXY_LOG");
  dp_refusal_environment.quiet = text != NULL && strncmp(text, "error", 5) == 0;
}

/* Says it once for each `said`, whichever thread comes first. status: what the caller of the function gets. */
static inline void dp_refuse(const char* soname, const char* name, const char* reason, const char* status,
                             unsigned char* said) {
  if (!__atomic_exchange_n(said, 1, __ATOMIC_RELAXED) && !dp_refusal_environment.quiet) {
    char line[1024];
    int length = snprintf(line, sizeof line, "devproxy: %s: %s is refused: %s (%s; see docs/support.md)\n", soname,
                          name, reason, status);
    if (length > (int)sizeof line - 1) length = (int)sizeof line - 1;
    if (write(STDERR_FILENO, line, (size_t)length) < 0) { /* nobody to tell */
    }
  }
  if (dp_refusal_environment.strict) abort();
}

#endif /* DEVPROXY_CSRC_BASE_REFUSAL_H_ */
