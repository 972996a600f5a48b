// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/crash.h"
#include "devproxy/hal/hal.h"

namespace devproxy::server {

namespace {

// Whether ranks take turns for memory.
bool takes_turns() {
  const char* const word = std::getenv("DEVPROXY_MEMORY_TURNS");
  return !word || std::string_view(word) != "off";
}

}  // namespace

Status Process::prepare(const std::string& ahead) {
  const ServerConfig& common = config_.server;
  if (config_.gpus.size() > 1) sharing_ = std::make_shared<hal::Sharing>(static_cast<uint32_t>(config_.gpus.size()));
  for (const uint32_t gpu : config_.gpus) {
    auto device = open_device_(gpu, sharing_);
    if (!device.ok()) return std::move(device).status();
    if (config_.gpus.size() > 1 && !(*device)->caps().shares)
      return {kNotSupported, "a GPU of the device '" + common.device + "' cannot be shared by several of the job's"};
    if (!ledger_) {
      const uint64_t total = common.memory_bytes ? common.memory_bytes : (*device)->properties().total_bytes;
      auto ledger = Ledger::open(config_.ledger_path, common.job, total);
      if (!ledger.ok()) return std::move(ledger).status().with("memory ledger");
      ledger_ = std::move(*ledger);
    }
    ServerConfig own = common;
    own.gpu = gpu;
    servers_.push_back(std::make_unique<Server>(own, std::move(*device), *ledger_, sharing_.get(),
                                                sharing_ && takes_turns() ? &turns_ : nullptr));
  }
  if (sharing_ && sharing_->splicing)
    ledger_->set_saved([splicing = sharing_->splicing] { return splicing->saved_bytes(); });
  for (const auto& server : servers_)
    if (!ahead.empty()) server->load_ahead(ahead);
  install_crash_handler(&servers_.front()->device());
  return {};
}

Status Process::open() {
  for (const auto& server : servers_)
    if (Status s = server->open(); !s.ok()) return s;
  for (const auto& server : servers_) {
    Status s = server->announce();
    if (s.ok()) continue;
    for (const auto& one : servers_) one->leave_files();
    return s;
  }
  return {};
}

void Process::run() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  const int ended = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::vector<std::thread> threads;
  threads.reserve(servers_.size());
  for (const auto& server : servers_)
    threads.emplace_back([&server, ended] {
      server->run();
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t ignored = write(ended, &one, sizeof one);
    });
  for (uint64_t left = servers_.size(); left != 0;) {
    pollfd fds[] = {{signals, POLLIN, 0}, {ended, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0 && errno != EINTR) break;
    if (fds[0].revents) {
      signalfd_siginfo info;
      while (read(signals, &info, sizeof info) > 0) {}
      DP_LOG(kInfo, kServer, 0, "SIGTERM: leaving");
      for (const auto& server : servers_) server->end();
    }
    uint64_t count = 0;
    if (fds[1].revents && read(ended, &count, sizeof count) == sizeof count) left -= count;
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace devproxy::server
