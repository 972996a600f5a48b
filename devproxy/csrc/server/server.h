// The device-proxy server of one (job, GPU): listens, makes connections, keeps the totals, leaves when the job does.
//
// Threads: one server thread (run()), which owns everything here, and one dispatch thread per connection.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/connection.h"

namespace devproxy::server {

struct ServerConfig {
  std::string job;
  std::string job_dir;
  uint32_t gpu = 0;
  std::string device;         // soft or cuda
  uint64_t memory_bytes = 0;  // what the ledger may give away on this GPU; 0: what the device has
  std::string ledger_path;
  int lease_fd = -1;  // hangs up when devproxy-run is gone; -1: live until SIGTERM
  int ready_fd = -1;
  bool chaos = false;
  uint64_t chaos_seed = 0;
};

class Server {
 public:
  Server(const ServerConfig& config, std::unique_ptr<hal::Device> device)
      : config_(config),
        total_bytes_(config.memory_bytes ? config.memory_bytes : device->properties().total_bytes),
        device_(std::move(device)) {}
  // Everything that can be refused is refused here, before anybody is told "ready".
  Status open();
  // Until the job is gone or SIGTERM. Returns with every file unlinked; the caller leaves by _exit, because a kernel
  // that does not end may still hold a thread.
  void run();

  const std::string& socket_path() const { return socket_path_; }

 private:
  // A socket whose hello has not arrived completely.
  struct Hello {
    int socket = -1;
    uint64_t until_us = 0;
    size_t got = 0;
    AttachRequest request{};
  };
  struct Client {
    int socket = -1;  // -1: hung up; the connection is still giving things back
    std::unique_ptr<Connection> connection;
  };
  struct Totals {
    uint64_t calls = 0, launches = 0, h2d_bytes = 0, d2h_bytes = 0, d2d_bytes = 0, memset_bytes = 0, allocs = 0,
             frees = 0, wakes = 0, busy_us = 0;
    void add(const Connection& connection);
  };

  void accept_all();
  bool read_hello(Hello& hello);  // false: done with it, one way or the other
  void attach(int socket, const AttachRequest& request, uint32_t pid);
  void send_stats(int socket);
  std::string stats_json() const;
  void reap();
  void stop_all(bool tell);
  bool anybody() const;

  const ServerConfig config_;
  const uint64_t total_bytes_;
  std::string socket_path_;
  int listen_fd_ = -1, signal_fd_ = -1, wake_fd_ = -1;
  std::unique_ptr<hal::Device> device_;
  std::unique_ptr<Ledger> ledger_;
  std::unique_ptr<SlotTable> slots_;
  ServerParts parts_;
  std::vector<Hello> hellos_;
  std::vector<Client> clients_;
  Totals gone_;             // of clients that have left
  std::string last_fault_;  // of any client, for the stats
  uint64_t next_number_ = 1;
  uint64_t started_us_ = 0;
};

}  // namespace devproxy::server
