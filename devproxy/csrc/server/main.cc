// SPDX-License-Identifier: Apache-2.0
// devproxy-server: the device-proxy server of one job and one physical GPU.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/control.h"
#include "devproxy/csrc/server/process.h"
#include "devproxy/hal/devices.h"
#include "wire.gen.h"

namespace devproxy::server {

namespace {

constexpr const char* kUsage =
    "usage: devproxy-server --job NAME --job-dir DIR --gpu K [--gpu K ...] --device soft|record|cuda --gpu-memory "
    "BYTES --ledger "
    "FILE "
    "[--physical-gpu P] [--restore DIR [--restore-shared] [--other-gpu]] [--lease-fd FD] [--ready-fd FD] "
    "[--begin-fd FD [--ahead DIR]] [--metas] [--collectives] [--together] [--chaos SEED] [--tree T] "
    "[--data-address ADDR [--encrypt-data]] [--slots A-B] | "
    "--print-abi | --describe DEVICE P";

std::optional<uint64_t> number(const char* text) {
  if (*text < '0' || *text > '9') return std::nullopt;
  char* end = nullptr;
  errno = 0;
  const uint64_t value = std::strtoull(text, &end, 10);
  return errno || *end ? std::nullopt : std::optional(value);
}

// One line, without line feeds, to whoever waits for readiness and to stderr.
int refuse(int ready_fd, std::string text) {
  for (char& c : text)
    if (c == '\n') c = ' ';
  const std::string line = "error: " + text + "\n";
  if (ready_fd >= 0) [[maybe_unused]]
    const ssize_t ignored = write(ready_fd, line.data(), line.size());
  std::fprintf(stderr, "devproxy-server: %s", line.c_str());
  return 2;
}

struct Start {
  uint64_t chaos_seed = 0;
  int begin_fd = -1;  // wait here for a byte before anything is taken from a predecessor
  std::string ahead;  // what to load meanwhile
};

// left_bytes: of the GPU, by other jobs. False: whoever would say so has gone, or needs this server no more.
bool told_to_begin(int begin_fd, int ready_fd, uint64_t left_bytes) {
  const std::string line = "waiting " + std::to_string(left_bytes) + "\n";
  [[maybe_unused]] const ssize_t ignored = write(ready_fd, line.data(), line.size());
  char byte = 0;
  ssize_t n;
  while ((n = read(begin_fd, &byte, 1)) < 0 && errno == EINTR) {}
  close(begin_fd);
  return n == 1;
}

// "A-B": from A to below B.
Status slots_of(const std::string& text, ServerConfig* config) {
  const Status wrong(kInvalidValue, "--slots '" + text + "' is not a range A-B up to " + std::to_string(kMaxSlots));
  const size_t dash = text.find('-');
  if (dash == std::string::npos) return wrong;
  const auto first = number(text.substr(0, dash).c_str()), end = number(text.substr(dash + 1).c_str());
  if (!first || !end || *first >= *end || *end > kMaxSlots) return wrong;
  config->first_slot = static_cast<uint32_t>(*first);
  config->end_slot = static_cast<uint32_t>(*end);
  return {};
}

Status parse(int argc, char** argv, ProcessConfig* process, Start* start) {
  ServerConfig* const config = &process->server;
  bool have_memory = false, have_physical = false;
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    const std::pair<const char*, bool*> switches[] = {{"--restore-shared", &config->restore_shared},
                                                      {"--other-gpu", &config->other_gpu},
                                                      {"--metas", &config->metas},
                                                      {"--collectives", &config->collectives},
                                                      {"--together", &config->together},
                                                      {"--encrypt-data", &config->encrypt_data}};
    const auto found =
        std::find_if(std::begin(switches), std::end(switches), [&](const auto& s) { return name == s.first; });
    if (found != std::end(switches)) {
      *found->second = true;
      continue;
    }
    if (i + 1 >= argc) return {kInvalidValue, name + " needs a value; " + kUsage};
    const char* value = argv[++i];
    auto take = [&](auto* to, uint64_t limit) -> Status {
      const auto n = number(value);
      if (!n || *n > limit)
        return {kInvalidValue, name + " '" + value + "' is not a number up to " + std::to_string(limit)};
      *to = static_cast<std::remove_pointer_t<decltype(to)>>(*n);
      return {};
    };
    Status status;
    if (name == "--job")
      config->job = value;
    else if (name == "--job-dir")
      config->job_dir = value;
    else if (name == "--device")
      config->device = value;
    else if (name == "--ledger")
      process->ledger_path = value;
    else if (name == "--gpu")
      status = take(&process->gpus.emplace_back(), 255);
    else if (name == "--physical-gpu")
      status = take(&config->physical_gpu, 255), have_physical = true;
    else if (name == "--restore")
      config->restore_dir = value;
    else if (name == "--gpu-memory")
      status = take(&config->memory_bytes, kDeviceBytes - kGlobalsBytes), have_memory = true;
    else if (name == "--lease-fd")
      status = take(&config->lease_fd, 1 << 20);
    else if (name == "--ready-fd")
      status = take(&process->ready_fd, 1 << 20);
    else if (name == "--chaos")
      status = take(&start->chaos_seed, UINT64_MAX), config->chaos = true;
    else if (name == "--begin-fd")
      status = take(&start->begin_fd, 1 << 20);
    else if (name == "--ahead")
      start->ahead = value;
    else if (name == "--tree")
      status = take(&config->tree, 63);
    else if (name == "--data-address")
      config->data_address = value;
    else if (name == "--slots")
      status = slots_of(value, config);
    else
      return {kInvalidValue, "unknown option " + name + "; " + kUsage};
    if (!status.ok()) return status;
  }
  const struct {
    const char* name;
    bool missing;
  } kNeeded[] = {{"--job", config->job.empty()},   {"--job-dir", config->job_dir.empty()},
                 {"--gpu", process->gpus.empty()}, {"--device", config->device.empty()},
                 {"--gpu-memory", !have_memory},   {"--ledger", process->ledger_path.empty()}};
  for (const auto& needed : kNeeded)
    if (needed.missing) return {kInvalidValue, std::string(needed.name) + " is missing; " + kUsage};
  if (!have_physical) config->physical_gpu = process->gpus.front();
  if (config->restore_shared && config->restore_dir.empty())
    return {kInvalidValue, "--restore-shared needs --restore DIR"};
  for (const int fd : {config->lease_fd, process->ready_fd, start->begin_fd}) {
    if (fd < 0) continue;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
      return {kInvalidValue,
              "descriptor " + std::to_string(fd) + " of --lease-fd, --ready-fd or --begin-fd is not open"};
  }
  return {};
}

int serve(int argc, char** argv) {
  ProcessConfig config;
  Start start;
  if (Status s = parse(argc, argv, &config, &start); !s.ok()) return refuse(config.ready_fd, s.text());
  std::string gpus;
  for (const uint32_t gpu : config.gpus) gpus += (gpus.empty() ? "" : ",") + std::to_string(gpu);
  log::init(std::getenv("DEVPROXY_LOG"), ("gpu=" + gpus).c_str());

  if (Status s = fault::init(std::getenv("DEVPROXY_FAULT")); !s.ok()) return refuse(config.ready_fd, s.text());

  // Before any thread: all of them inherit the mask. SIGTERM comes as a descriptor (Process). SIGINT and SIGHUP are the
  // job's to handle (Ctrl-C reaches the whole terminal group); the lease tells this server when the job is gone.
  umask(077);
  signal(SIGINT, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);

  const ServerConfig& common = config.server;
  Process process(config, [&, seed = start.chaos_seed](uint32_t gpu, std::shared_ptr<hal::Sharing> sharing) {
    return hal::open_device({common.device, common.physical_gpu, common.memory_bytes, common.chaos, seed, gpu,
                             std::move(sharing), common.collectives || !common.data_address.empty(),
                             common.together && common.data_address.empty()});
  });
  if (Status s = process.prepare(start.ahead); !s.ok()) return refuse(config.ready_fd, s.text());
  if (start.begin_fd >= 0 && !told_to_begin(start.begin_fd, config.ready_fd, process.left_bytes())) return 0;
  if (Status s = process.open(); !s.ok()) return refuse(config.ready_fd, s.text());
  if (config.ready_fd >= 0) {
    [[maybe_unused]] const ssize_t ignored = write(config.ready_fd, "ready\n", 6);
    close(config.ready_fd);
  }
  process.run();
  std::fflush(nullptr);
  _exit(0);  // no static destructors of loaded modules beside threads that may still run
}

// What Server::can_dump says of its GPU, of one that nobody serves yet.
int describe_one(const std::string& device, const char* gpu) {
  const int out = dup(STDOUT_FILENO);  // a device may take stdout for what kernels print
  const auto number_of = number(gpu);
  if (!number_of || *number_of > UINT32_MAX) return refuse(out, "--describe: '" + std::string(gpu) + "' is no GPU");
  // Nothing is allocated in the memory that a simulated GPU is given here.
  auto found =
      hal::open_device({device, static_cast<uint32_t>(*number_of), device == "cuda" ? 0 : kGlobalsBytes, false, 0});
  if (!found.ok()) return refuse(out, found.status().text());
  const std::string text = json_text(describe((*found)->properties())) + '\n';
  const bool written = write(out, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  _exit(written ? 0 : 1);  // no destructors of a driver
}

}  // namespace

}  // namespace devproxy::server

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--print-abi") == 0) {
    for (const uint8_t byte : devproxy::wire::kAbiId) std::printf("%02x", byte);
    std::printf("\n");
    return 0;
  }
  try {
    if (argc == 4 && std::strcmp(argv[1], "--describe") == 0) return devproxy::server::describe_one(argv[2], argv[3]);
    return devproxy::server::serve(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "devproxy-server: error: %s\n", e.what());
    return 2;
  }
}
