// SPDX-License-Identifier: Apache-2.0
// Fault points that a file arms, with threads at several points at once: an armed error fails one passage of its own point,
// and neither kills the process nor fires again.
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/base/fault.h"
#include "tests/native/expect.h"

using namespace devproxy;

namespace {

constexpr int kRounds = 400;
constexpr int kOthers = 3;

}  // namespace

int main() {
  char folder[] = "/tmp/server_fault.XXXXXX";
  EXPECT(mkdtemp(folder));
  const std::string file = std::string(folder) + "/fault";
  EXPECT(fault::init(("@" + file).c_str()).ok());

  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (int i = 0; i < kOthers; i++)
    others.emplace_back([&] {
      while (!done.load()) EXPECT(DP_FAULT(server_dump_mid).ok());
    });
  for (int round = 0; round < kRounds; round++) {
    const std::string other = file + ".new";
    std::ofstream(other) << "server_cut_parked:error";
    EXPECT(rename(other.c_str(), file.c_str()) == 0);
    EXPECT(!DP_FAULT(server_cut_parked).ok());
    EXPECT(access(file.c_str(), F_OK) != 0);
    EXPECT(DP_FAULT(server_cut_parked).ok());
  }
  done = true;
  for (std::thread& other : others) other.join();
  EXPECT(rmdir(folder) == 0);
  std::puts("ok");
}
