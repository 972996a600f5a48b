/* What a generated <soname>.gen.c is made of: a library that has the vendor's names and does nothing. C, and nothing
 * but libc: each is loaded into every process of a job that uses PyTorch's CUDA wheel. */
#ifndef DEVPROXY_INTERCEPTORS_MATHLIBS_REFUSE_H_
#define DEVPROXY_INTERCEPTORS_MATHLIBS_REFUSE_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DP_EXPORT __attribute__((visibility("default")))

struct dp_shim {
  const char* soname;
  const char* reason;
  const char* status; /* the name of the library's result for a refusal */
  int refused;        /* its number */
  int version[3];
};

/* Says it once per function; DEVPROXY_STRICT=1 (tests) aborts, so that no refusal goes unseen. */
static inline void dp_refuse(const struct dp_shim* shim, unsigned char* said, const char* name) {
  if (!__atomic_exchange_n(said, 1, __ATOMIC_RELAXED)) {
    const char* level = getenv("DEVPROXY_LOG");
    if (level == NULL || strcmp(level, "error") != 0) {
      char line[512];
      int length = snprintf(line, sizeof line, "devproxy: %s: %s refused: %s (%s)\n", shim->soname, name, shim->reason,
                            shim->status);
      if (length > (int)sizeof line - 1) length = sizeof line - 1;
      if (write(STDERR_FILENO, line, (size_t)length) < 0) { /* nobody to tell */
      }
    }
  }
  const char* strict = getenv("DEVPROXY_STRICT");
  if (strict != NULL && strcmp(strict, "1") == 0) abort();
}

static inline const char* dp_text(const struct dp_shim* shim, int status) {
  if (status == 0) return "success";
  return status == shim->refused ? shim->reason : "an error that devproxy does not know";
}

static inline int dp_property(const struct dp_shim* shim, int which, int* value) {
  if (value == NULL || which < 0 || which > 2) return shim->refused;
  *value = shim->version[which];
  return 0;
}

#endif /* DEVPROXY_INTERCEPTORS_MATHLIBS_REFUSE_H_ */
