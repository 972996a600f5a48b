// SPDX-License-Identifier: Apache-2.0
// One of the job's GPUs in its server process: listens, makes connections, keeps the totals, leaves when the job does.
// A process has one for each of the job's GPUs that share its physical GPU (process.h).
//
// Threads: one server thread (run()), which owns everything here, and one dispatch thread per connection.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "devproxy/csrc/base/json_fwd.h"
#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/control.h"
#include "devproxy/csrc/server/cut.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::hal {
struct Sharing;
}

namespace devproxy::server {

class BlockIndex;
struct DeviceBytes;

struct ServerConfig {
  std::string job;
  std::string job_dir;
  uint32_t gpu = 0;             // the job's ordinal: names of files, what kernels are told
  uint32_t physical_gpu = 0;    // of the machine: the device
  std::string restore_dir;      // begin with the state in it, parked
  bool other_gpu = false;       // the state may be of another kind or model of GPU
  bool restore_shared = false;  // make and fill the shared files too; else they are there (handover)
  std::string device;           // soft, record or cuda
  uint64_t memory_bytes = 0;    // what the device says that it has; 0: what it has
  int lease_fd = -1;            // hangs up when devproxy-run is gone; -1: live until SIGTERM
  bool metas = false;           // ServerParts.metas
  bool collectives = false;     // the tree has several GPUs
  bool together = false;        // all of the tree's GPUs are in this process
  bool chaos = false;
  uint32_t tree = 0;                              // of the job's process trees, this server's
  std::string data_address;                       // where servers of other trees reach this one; empty: there are none
  bool encrypt_data = false;                      // what they send each other
  uint32_t first_slot = 0, end_slot = kMaxSlots;  // which it may give away
};

// Where a server lists what its successor is to load.
std::string ahead_path(const std::string& dir, uint32_t gpu);
IdentityRecord record_of(const hal::Properties& properties);
Status assume(const IdentityRecord& record, hal::Properties* properties);

class Server {
 public:
  Server(const ServerConfig& config, std::unique_ptr<hal::Device> device, Ledger& ledger, const hal::Sharing* sharing,
         MemoryTurns* turns)
      : config_(config),
        total_bytes_(ledger.limit_bytes()),
        device_(std::move(device)),
        ledger_(&ledger),
        share_(ledger, sharing != nullptr),
        sharing_(sharing) {
    parts_.turns = turns;
  }
  // Everything that can be refused is refused in these two, before anybody is told "ready".
  Status open();
  Status announce();   // from now on others find it
  void leave_files();  // ends this server alone: what the clients have stays as it is
  // Until the job is gone, it has left to a successor, or end(). Returns with every file unlinked; the process leaves by
  // _exit, because a kernel that does not end may still hold a thread.
  void run();
  // Any thread.
  void end();
  const hal::Device& device() const { return *device_; }
  // Loads what that server of this GPU had loaded, as far as it can be loaded before there is a client. Before open().
  void load_ahead(const std::string& dir);

  const std::string& socket_path() const { return socket_path_; }

 private:
  // A socket whose hello has not arrived completely.
  struct Hello {
    int socket = -1;
    uint64_t until_us = 0;
    size_t got = 0;
    AttachRequest request{};
    bool whole() const { return got == sizeof request; }
  };
  struct Client {
    int socket = -1;   // until the client has linked
    bool here = true;  // false: hung up; the connection is still giving things back
    std::unique_ptr<Connection> connection;
    std::vector<int> peers;   // sockets of servers that were given its memory
    uint64_t name_at_us = 0;  // where it is not here: when its work is named that has not ended; 0: not any more
  };

  void accept_all();
  void name_stragglers();
  void take_hellos();
  bool read_hello(Hello& hello);   // false: done with it, one way or the other
  bool serve_hello(Hello& hello);  // the same, of a whole one
  // A client that comes now would not be in the state that the server of this GPU goes on with: a successor's before it has
  // taken over, or a predecessor's behind its dump. It is not answered until the server goes on, and hung up on where
  // that takes long or never comes. Then it asks again, and finds whoever listens by then.
  bool closed() const { return moves_ || borrowed_; }
  void admit_waiting();
  void attach(int socket, const AttachRequest& request, uint32_t pid);
  void send_stats(int socket);
  void send_trace(int socket);
  void warm(int socket);
  bool admit_peer(int socket, uint32_t slot);  // true: the socket is kept
  static void close_peers(Client& c);
  Json stats() const;
  void reap();
  void stop_all(bool tell);
  bool anybody() const;
  int timeout_ms() const;  // until somebody has to be looked at again; -1: no time
  void look_at_clients(const std::vector<pollfd>& fds);
  Status listen_here();  // the name of the socket is ours, if it was not
  void unlink_socket() const;
  Status open_data();
  Status write_data_file();  // that others find this server at its port
  void unlink_data_file() const;
  Status restore();
  static std::string abi_hex();

  // control.cc
  void serve_control(ControlPeer& peer);
  Json refused(const std::string& why) const;
  Json can_dump();
  void begin_cut(ControlPeer& peer, const Json& request);
  void look_at_cut();
  void fail_cut(const std::string& why);
  Status all_parked();
  Status dump_client(const Client& c, const std::string& dir, BlockIndex* index, DeviceBytes* bytes);
  Status write_state(const std::string& dir);
  Json dump(const std::string& dir, bool moves);
  Json dump_shared(const std::string& dir);
  Json list_executors(const std::string& dir);
  // Agreement of all ranks (agreement.h). The channel that asked for the hold owns it.
  Json aim(ControlPeer& peer, const Json& request);
  Json hold(ControlPeer& peer);
  void held_by(ControlPeer& peer);
  Json withhold(ControlPeer& peer);
  Json mark(const Json& request);
  // The other way there, in band (meta_barrier.h). The same owner.
  Json barrier(ControlPeer& peer, const Json& request);
  Json agree(const Json& request);
  Json lift();
  Json comm_reports();
  Json resume();
  Json leave();

  const ServerConfig config_;
  const uint64_t total_bytes_;
  std::string socket_path_;
  int listen_fd_ = -1, wake_fd_ = -1;
  std::atomic<bool> end_{false};
  std::unique_ptr<hal::Device> device_;
  Ledger* const ledger_;
  LedgerShare share_;
  const hal::Sharing* const sharing_;  // nullptr: no other GPU of the job is on this one
  std::unique_ptr<SlotTable> slots_;
  ServerParts parts_;
  std::vector<Hello> hellos_;
  uint64_t accept_from_us_ = 0;  // no descriptor was left: nobody is taken before that
  std::vector<Client> clients_;
  GoneRecord gone_;         // of clients that have left; but for the peak, which parts_.live has
  std::string last_fault_;  // of any client, for the stats
  uint64_t next_number_ = 1;
  uint64_t started_us_ = 0;
  uint16_t data_port_ = 0;  // 0: no other tree
  ino_t data_inode_ = 0;    // of the file that says it; a successor renames its own over it
  ino_t socket_inode_ = 0;  // of what we bound: a successor renames its own socket over it

  // From a cut, or a restore, to the resume. Whoever attaches meanwhile parks at once. How far a client is, its own
  // gate says.
  bool held_ = false;
  std::optional<Cut> cut_;  // under way: not all are parked yet
  bool parked() const { return held_ && !cut_; }
  // Restored and not resumed yet: clients, files and slots are still the predecessor's. Such a server ends in silence.
  bool borrowed_ = false;
  bool leaving_ = false;
  std::vector<std::unique_ptr<ControlPeer>> controls_;
  std::vector<std::unique_ptr<Outbox>> farewells_;  // they are told something, and then hung up on
  ControlPeer* hold_peer_ = nullptr;  // while clients hold before their next communication, or withhold it
  bool withholds_ = false;
  ControlPeer* cut_peer_ = nullptr;  // who asked for the cut; when it hangs up the server goes on by itself
  void forget_dump() { dumped_.clear(), has_dump_ = false; }
  bool moves_ = false;         // what is dumped is for a successor
  bool has_dump_ = false;      // there is a dump since the cut, which may be of nobody
  std::set<uint64_t> dumped_;  // numbers of the clients whose device memory is in it
};

}  // namespace devproxy::server
