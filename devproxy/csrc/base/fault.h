// SPDX-License-Identifier: Apache-2.0
// Fault points: named places where a test makes this process fail. Compiled in always, because a build that cannot fail
// on purpose is not the build that users have; an unarmed point is one load and one branch.
#pragma once

#include "devproxy/csrc/base/status.h"

namespace devproxy::fault {

enum class Point {
#define DP_FAULT_POINT(name) name,
#include "devproxy/csrc/base/fault.def"
#undef DP_FAULT_POINT
  kCount
};

extern bool g_armed;

// Reads DEVPROXY_FAULT=name[:nth][:abort|error]: the nth (1) passage of the point fails. abort: the process ends as by
// kill -9 (kill means the same); error: the point's operation fails. kInvalidValue names a word that does not exist.
// DEVPROXY_FAULT=@FILE: the file says it, at each passage anew; who fails removes it (devproxy/fault.py).
Status init(const char* spec);
// Not ok: this passage fails. Does not return where the process is to die.
Status passed(Point point);

}  // namespace devproxy::fault

#define DP_FAULT(name) \
  (::devproxy::fault::g_armed ? ::devproxy::fault::passed(::devproxy::fault::Point::name) : ::devproxy::Status())
