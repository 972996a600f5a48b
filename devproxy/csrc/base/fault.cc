// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

namespace devproxy::fault {

bool g_armed = false;  // written before there are threads

namespace {

constexpr const char* kNames[] = {
#define DP_FAULT_POINT(name) #name,
#include "devproxy/csrc/base/fault.def"
#undef DP_FAULT_POINT
};

// One armed point. Written before there are threads, or under g_mu where a file says it.
struct Armed {
  std::string spec;
  Point point = Point::kCount;
  long left = 1;
  bool dies = true;
};

std::mutex g_mu;
Armed g_now;
std::string g_file;  // "": the variable itself says it

Status parse(const std::string& text, Armed& to) {
  to = {};
  to.spec = text;
  const std::string name = text.substr(0, text.find(':'));
  for (int i = 0; i < static_cast<int>(Point::kCount); i++)
    if (name == kNames[i]) to.point = static_cast<Point>(i);
  if (to.point == Point::kCount) return {};  // another program's point: they share the variable
  for (size_t at = name.size(); at < text.size();) {
    const size_t end = std::min(text.find(':', at + 1), text.size());
    const std::string word = text.substr(at + 1, end - at - 1);
    at = end;
    if (word == "abort" || word == "kill" || word == "error")
      to.dies = word != "error";
    else if (const long n = std::strtol(word.c_str(), nullptr, 10); n > 0)
      to.left = n;
    else
      return {kInvalidValue, "DEVPROXY_FAULT=" + text + ": '" + word + "' is neither a number nor abort nor error"};
  }
  return {};
}

void look_into_file() {
  std::string text;
  if (std::ifstream in(g_file); in) std::getline(in, text);
  if (text == g_now.spec) return;  // a countdown goes on
  if (Status s = parse(text, g_now); !s.ok()) g_now = {};
}

}  // namespace

Status init(const char* spec) {
  if (!spec || !*spec) return {};
  if (*spec == '@') {
    g_file = spec + 1;
    g_armed = true;
    return {};
  }
  if (Status s = parse(spec, g_now); !s.ok()) return s;
  g_armed = g_now.point != Point::kCount;
  return {};
}

Status passed(Point point) {
  bool dies = true;
  {
    const std::lock_guard lock(g_mu);
    if (!g_file.empty()) look_into_file();
    if (point != g_now.point || --g_now.left != 0) return {};
    dies = g_now.dies;  // here: from the unlock on, a thread at any other point changes g_now
    if (!g_file.empty()) {
      unlink(g_file.c_str());
      g_now = {};  // the same words in the file again are another fault
    }
  }
  if (dies) kill(getpid(), SIGKILL);  // no handler, no flush: like the kernel's own
  return {kUnknown, std::string("fault point ") + kNames[static_cast<int>(point)] + " (DEVPROXY_FAULT)"};
}

}  // namespace devproxy::fault
