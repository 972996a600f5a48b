// SPDX-License-Identifier: Apache-2.0
/* What a generated <soname>.gen.c is made of: a library that has the vendor's names and does nothing. C, and nothing
 * but libc: each is loaded into every process of a job that uses PyTorch's CUDA wheel. */
#ifndef DEVPROXY_INTERCEPTORS_MATHLIBS_REFUSE_H_
#define DEVPROXY_INTERCEPTORS_MATHLIBS_REFUSE_H_

#include "devproxy/csrc/base/refusal.h"

#define DP_EXPORT __attribute__((visibility("default")))

struct dp_shim {
  const char* soname;
  const char* reason;
  const char* status; /* the name of the library's result for a refusal */
  int refused;        /* its number */
  int version[3];
};

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
