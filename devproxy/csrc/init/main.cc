// SPDX-License-Identifier: Apache-2.0
// devproxy-init: pid 1 of a job. Gives the job a PID and a mount namespace that CRIU can take and put back elsewhere,
// opens its streams inside, passes signals on, reaps, and says how the job ended.
//
//   devproxy-init --job-dir HOSTDIR --mount-at PATH --report-fd N [--stdin MODE] [--stdout MODE] [--stderr MODE]
//                 [--tty] [--cwd DIR] [--sigmask HEX] [--netns-fd N] -- PROGRAM ARG0 ARG1...
//
//   MODE of stdin:          null | tty | fd (the inherited one stays) | path:OFFSET:FLAGS:FILE
//   MODE of stdout, stderr: null | tty | fifo:NAME (PATH/NAME; the same NAME twice is one open file)
//
// Three processes: the caller's child (outer) makes the namespaces and forks pid 1 into them; pid 1 forks the command.
// Outer writes one line to the report descriptor: "pid N" (pid 1 as the caller sees it) once the command has been
// executed, or "error: ..." ("error: exec ENOENT: ..." when the command cannot be), and ends with 0 or 2. The caller is
// a subreaper and inherits pid 1.
//
// Files in PATH: init.status, written when the job has ended ("exit CODE stragglers N"); init.events, a FIFO
// ("stopped SIG" for each stop of the command); tty.in, tty.out, tty.winsize (relay.h).
//
// CRIU may take and restore this process at any instruction after the report: every descriptor is opened inside the
// mount namespace, and there is no parent-death signal, which would end a restored job at once.
#include <dirent.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "devproxy/csrc/init/relay.h"

namespace devproxy::init {
namespace {

constexpr int kOwnGraceMs = 1000;   // for what the command left running to end by itself
constexpr int kTermGraceMs = 3000;  // and after SIGTERM
constexpr int kDrainMs = 5000;      // for the reader of the terminal to take something
constexpr int kPassedOn[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP};
// sigqueue(3) with this value instead of kill(2): the signal is for the command's whole process group.
constexpr int kWholeGroup = 1;

struct Options {
  std::string job_dir, mount_at, cwd;
  std::string streams[3] = {"null", "null", "null"};
  int report_fd = -1;
  int netns_fd = -1;   // a network namespace for the job; -1: the caller's
  int inside_fd = -1;  // the error pipe of one that is inside already
  bool tty = false;
  uint64_t sigmask = 0;  // bit N-1: signal N
  std::string program;
  std::vector<char*> argv;
};

// -- How a failure reaches the caller --------------------------------------------------------------------------------
int error_pipe = -1;  // close-on-exec: the command's exec is the end of file that says "it runs"

[[noreturn]] void fail(const std::string& text) {
  if (write(error_pipe, text.data(), text.size()) < 0) _exit(3);
  _exit(2);
}

[[noreturn]] void fail_errno(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

// -- Signals: blocked but in ppoll, so the handler races with nothing -------------------------------------------------
bool was_ignored[NSIG];
volatile sig_atomic_t arrived[NSIG];  // 0, or kForCommand, or kForGroup
constexpr sig_atomic_t kForCommand = 1, kForGroup = 2;

void note_signal(int number, siginfo_t* info, void*) {
  const bool group = info->si_code == SI_QUEUE && info->si_value.sival_int == kWholeGroup;
  arrived[number] = group ? kForGroup : kForCommand;
}

// Pid 1 gets no signal without a handler.
void install_handlers() {
  struct sigaction action{};
  action.sa_sigaction = note_signal;
  action.sa_flags = SA_SIGINFO;
  sigfillset(&action.sa_mask);
  for (const int number : kPassedOn) {
    struct sigaction before{};
    sigaction(number, &action, &before);
    was_ignored[number] = before.sa_handler == SIG_IGN;
  }
  sigaction(SIGCHLD, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

// -- Inside: pid 1
// -----------------------------------------------------------------------------------------------------
void must_mount(const char* source, const std::string& at, const char* type, unsigned long flags, const char* data) {
  if (mount(source, at.c_str(), type, flags, data) != 0) {
    fail_errno("mount " + std::string(type ? type : source) + " at " + at);
  }
}

void make_mounts(const Options& options) {
  must_mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr);
  must_mount(options.job_dir.c_str(), options.mount_at, nullptr, MS_BIND, nullptr);
  // A devpts of our own, for the job's terminal and for those that it makes: its numbers start at 0 and are free again
  // wherever the job is restored.
  must_mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620");
  must_mount("/dev/pts/ptmx", "/dev/ptmx", nullptr, MS_BIND, nullptr);
}

int must_open(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC);
  if (fd < 0) fail_errno("open " + path);
  return fd;
}

int open_fifo_for_writing(const std::string& path) {
  // For an instant read and write as well: opening only for writing waits for a reader.
  const int both = must_open(path, O_RDWR);
  const int fd = must_open(path, O_WRONLY);
  close(both);
  return fd;
}

// path:OFFSET:FLAGS:FILE
int open_input_file(const std::string& mode) {
  char* end = nullptr;
  const long long offset = std::strtoll(mode.c_str() + std::strlen("path:"), &end, 10);
  const long flags = *end == ':' ? std::strtol(end + 1, &end, 10) : 0;
  if (*end != ':') fail("bad mode of stdin: " + mode);
  const int fd = must_open(end + 1, static_cast<int>(flags));
  if (lseek(fd, offset, SEEK_SET) < 0) fail_errno("seek in " + std::string(end + 1));
  return fd;
}

// The command's three streams. Precondition: `inherited` is the caller's stdin, or -1.
void open_streams(const Options& options, int inherited, int slave, int (&fds)[3]) {
  for (int i = 0; i < 3; ++i) {
    const std::string& mode = options.streams[i];
    if (mode == "null") {
      fds[i] = must_open("/dev/null", O_RDWR);
    } else if (mode == "tty" && slave >= 0) {
      fds[i] = slave;
    } else if (i == 0 && mode == "fd" && inherited >= 0) {
      fds[i] = inherited;
    } else if (i == 0 && mode.starts_with("path:")) {
      fds[i] = open_input_file(mode);
    } else if (i == 2 && mode.starts_with("fifo:") && mode == options.streams[1]) {
      fds[i] = fds[1];
    } else if (i > 0 && mode.starts_with("fifo:")) {
      fds[i] = open_fifo_for_writing(options.mount_at + "/" + mode.substr(std::strlen("fifo:")));
    } else {
      fail("bad mode of stream " + std::to_string(i) + ": " + mode);
    }
  }
}

// Moves the descriptors that we keep above 2, puts null on 0 to 2, and closes all others: a descriptor from outside
// belongs to a mount that the namespace does not have, and CRIU would refuse it.
int close_inherited(const Options& options) {
  const int keep_input = options.streams[0] == "fd" ? fcntl(0, F_DUPFD, 10) : -1;
  error_pipe = fcntl(error_pipe, F_DUPFD, 10);
  // Now they are above all that is to be closed but one another: bring them down to 3 and 4.
  int next = 3;
  if (dup2(error_pipe, next) < 0) _exit(3);
  error_pipe = next++;
  int input = -1;
  if (keep_input >= 0) input = dup2(keep_input, next++);
  if (syscall(SYS_close_range, next, ~0U, 0) != 0) fail_errno("close_range");
  fcntl(error_pipe, F_SETFD, FD_CLOEXEC);
  if (input >= 0) fcntl(input, F_SETFD, FD_CLOEXEC);
  for (int fd = 0; fd < 3; ++fd) close(fd);
  for (int fd = 0; fd < 3; ++fd) {
    if (open("/dev/null", O_RDWR) != fd) fail_errno("open /dev/null");
  }
  return input;
}

const char* name_of_errno(int number) {
  const char* name = strerrorname_np(number);
  return name ? name : "EUNKNOWN";
}

[[noreturn]] void run_command(const Options& options, const int (&fds)[3], int slave) {
  if (slave >= 0) {
    // The terminal is the command's, not ours: CRIU gives a restored terminal back to its session's leader alone.
    setsid();
    ioctl(slave, TIOCSCTTY, 0);
  } else {
    setpgid(0, 0);  // a group of its own in our session: so it can be stopped as a shell's job can
  }
  for (int i = 0; i < 3; ++i) {
    if (dup2(fds[i], i) < 0) fail_errno("dup2");
  }
  // What the caller was told to ignore (nohup) the command ignores as well.
  for (const int number : kPassedOn) std::signal(number, was_ignored[number] ? SIG_IGN : SIG_DFL);
  std::signal(SIGPIPE, SIG_DFL);
  sigset_t mask;
  sigemptyset(&mask);
  for (int number = 1; number <= 64; ++number) {
    if (options.sigmask >> (number - 1) & 1) sigaddset(&mask, number);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execv(options.program.c_str(), options.argv.data());
  if (errno == ENOEXEC) {  // a script without #!: a shell runs it itself
    std::vector<char*> argv = options.argv;
    argv[0] = const_cast<char*>(options.program.c_str());
    argv.insert(argv.begin(), const_cast<char*>("sh"));
    execv("/bin/sh", argv.data());
  }
  const int number = errno;
  fail(std::string("exec ") + name_of_errno(number) + ": " + options.program + ": " + std::strerror(number));
}

int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

// All processes of the namespace but us that are not zombies.
int count_others() {
  DIR* folder = opendir("/proc");
  if (!folder) return 0;
  int count = 0;
  while (const dirent* entry = readdir(folder)) {
    const int pid = std::atoi(entry->d_name);
    if (pid <= 1) continue;
    const std::string path = std::string("/proc/") + entry->d_name + "/stat";
    FILE* file = std::fopen(path.c_str(), "re");
    if (!file) continue;
    char text[512] = {};
    const size_t n = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    const char* state = n ? std::strrchr(text, ')') : nullptr;
    if (state && std::strncmp(state, ") Z", 3) != 0) ++count;
  }
  closedir(folder);
  return count;
}

class Init {
 public:
  Init(const Options& options, pid_t command, TtyRelay* relay)
      : folder_(options.mount_at), command_(command), relay_(relay) {
    const std::string events = folder_ + "/init.events";
    // Read and write, so that writing needs no reader; what nobody reads fills the FIFO and is then dropped.
    events_ = open(events.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  }

  [[noreturn]] void run() {
    while (!code_) {
      wait(-1);
      pass_signals_on();
      reap();
    }
    const int stragglers = end_stragglers();
    if (relay_) relay_->drain(kDrainMs);
    write_status(*code_, stragglers);
    _exit(*code_);
  }

 private:
  // For a signal or for the terminal, at most this long (-1: any time).
  void wait(int timeout_ms) {
    std::vector<pollfd> fds;
    if (relay_) relay_->wanted(&fds);
    const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    sigset_t none;
    sigemptyset(&none);
    ppoll(fds.data(), fds.size(), timeout_ms < 0 ? nullptr : &timeout, &none);
    if (!relay_) return;
    relay_->move();
    if (const pid_t group = relay_->take_suspended(); group == command_) stop_if_default(group);
  }

  void pass_signals_on() {
    for (const int number : kPassedOn) {
      const sig_atomic_t whom = arrived[number];
      if (!whom) continue;
      arrived[number] = 0;
      if (number == SIGWINCH && relay_) {
        relay_->read_window_size();
      } else if (number == SIGTSTP) {
        kill(-command_, SIGTSTP);
        stop_if_default(command_);
      } else if (whom == kForGroup || number == SIGCONT) {
        kill(-command_, number);
      } else {
        kill(command_, number);
      }
    }
  }

  // Ctrl-Z has no effect by itself on a group whose parents are all in other sessions ("orphaned", as that of a
  // session's leader is), unless it is caught. Where the command leaves the signal to the system we stop its group.
  void stop_if_default(pid_t group) {
    if (relay_ && !handles(SIGTSTP)) kill(-group, SIGSTOP);
  }

  // Does the command catch, ignore or block it?
  bool handles(int number) const {
    const std::string path = "/proc/" + std::to_string(command_) + "/status";
    FILE* file = std::fopen(path.c_str(), "re");
    if (!file) return false;
    char line[256];
    unsigned long long all = 0, mask = 0;
    while (std::fgets(line, sizeof line, file)) {
      if (std::sscanf(line, "SigBlk: %llx", &mask) == 1 || std::sscanf(line, "SigIgn: %llx", &mask) == 1 ||
          std::sscanf(line, "SigCgt: %llx", &mask) == 1) {
        all |= mask;
      }
    }
    std::fclose(file);
    return all >> (number - 1) & 1;
  }

  // True: no process is left but us. Everything in the namespace is our descendant and becomes our child at last.
  bool reap() {
    arrived[SIGCHLD] = 0;
    for (;;) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED);
      if (pid == 0) return false;
      if (pid < 0) return errno == ECHILD;
      if (pid != command_) continue;
      if (WIFSTOPPED(status)) {
        tell("stopped " + std::to_string(WSTOPSIG(status)) + "\n");
      } else {
        code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      }
    }
  }

  // Returns how many had to be told.
  int end_stragglers() {
    if (gone_within(kOwnGraceMs)) return 0;
    const int count = count_others();
    kill(-1, SIGTERM);
    kill(-1, SIGCONT);  // a stopped one would not notice
    if (gone_within(kTermGraceMs)) return count;
    do {
      kill(-1, SIGKILL);
    } while (!gone_within(kTermGraceMs));
    return count;
  }

  bool gone_within(int limit_ms) {
    const int64_t end = now_ms() + limit_ms;
    for (;;) {
      if (reap()) return true;
      const int64_t left = end - now_ms();
      if (left <= 0) return false;
      wait(static_cast<int>(left));
    }
  }

  void tell(const std::string& line) {
    if (events_ >= 0 && write(events_, line.data(), line.size()) < 0) return;  // nobody reads: dropped
  }

  void write_status(int code, int stragglers) {
    const std::string path = folder_ + "/init.status", fresh = path + ".new";
    FILE* file = std::fopen(fresh.c_str(), "we");
    if (!file) return;
    std::fprintf(file, "exit %d stragglers %d\n", code, stragglers);
    if (std::fclose(file) == 0) std::rename(fresh.c_str(), path.c_str());
  }

  const std::string folder_;
  const pid_t command_;
  TtyRelay* const relay_;
  int events_ = -1;
  std::optional<int> code_;
};

[[noreturn]] void be_pid_one(const Options& options) {
  setsid();  // else the session's leader is outside, which CRIU refuses
  make_mounts(options);
  const int inherited = close_inherited(options);
  if (chdir(options.cwd.c_str()) != 0) fail_errno("chdir " + options.cwd);
  install_handlers();
  TtyRelay relay;
  if (options.tty) {
    const std::string failure = relay.open(options.mount_at);
    if (!failure.empty()) fail(failure);
  }
  int fds[3];
  open_streams(options, inherited, relay.slave(), fds);
  const pid_t command = fork();
  if (command < 0) fail_errno("fork");
  if (command == 0) run_command(options, fds, relay.slave());
  if (!options.tty) setpgid(command, command);  // whichever of us two is first
  for (int i = 0; i < 3; ++i) {
    if (fds[i] != relay.slave() && !(i == 2 && fds[2] == fds[1])) close(fds[i]);
  }
  close(error_pipe);
  Init(options, command, options.tty ? &relay : nullptr).run();
}

// -- Outside
// -----------------------------------------------------------------------------------------------------------
void say(int fd, const std::string& line) {
  if (write(fd, line.data(), line.size()) < 0) std::fprintf(stderr, "devproxy-init: %s", line.c_str());
}

// Executes this program again, by its path: what pid 1 maps must come from a mount of its own namespace, for CRIU.
[[noreturn]] void enter(int argc, char** argv) {
  char self[4096];
  const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n < 0) fail_errno("readlink /proc/self/exe");
  self[n] = 0;
  char fd[16];
  std::snprintf(fd, sizeof fd, "%d", error_pipe);
  char option[] = "--inside";
  std::vector<char*> words{argv[0], option, fd};
  for (int i = 1; i <= argc; ++i) words.push_back(argv[i]);
  fcntl(error_pipe, F_SETFD, 0);
  execv(self, words.data());
  fail_errno(std::string("execute ") + self);
}

int run_outer(const Options& options, int argc, char** argv) {
  const auto error = [&](const std::string& text) {
    say(options.report_fd, "error: " + text + "\n");
    return 2;
  };
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return error(std::string("pipe: ") + std::strerror(errno));
  if (options.netns_fd >= 0) {
    if (setns(options.netns_fd, CLONE_NEWNET) != 0) {
      return error(std::string("enter the job's network namespace: ") + std::strerror(errno));
    }
    close(options.netns_fd);
  }
  if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) {
    return error(std::string("unshare the PID and mount namespaces: ") + std::strerror(errno));
  }
  // Its monotonic clocks go on after a restore where they were at the dump: no timer of the job sees a suspend. A kernel
  // without time namespaces runs the job all the same.
  if (unshare(CLONE_NEWTIME) != 0 && errno != EINVAL) {
    return error(std::string("unshare the time namespace: ") + std::strerror(errno));
  }
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return error(std::string("make the mounts private: ") + std::strerror(errno));
  }
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);  // pid 1 takes them in ppoll alone
  const pid_t pid = fork();
  if (pid < 0) return error(std::string("fork: ") + std::strerror(errno));
  if (pid == 0) {
    error_pipe = ends[1];
    enter(argc, argv);
  }
  close(ends[1]);
  std::string text;
  char piece[512];
  ssize_t n;
  while ((n = read(ends[0], piece, sizeof piece)) > 0 || (n < 0 && errno == EINTR)) {
    if (n > 0) text.append(piece, static_cast<size_t>(n));
  }
  if (text.empty()) {
    say(options.report_fd, "pid " + std::to_string(pid) + "\n");
    return 0;
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return error(text);
}

std::string parse(int argc, char** argv, Options* options) {
  int i = 1;
  for (; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
    const std::string name = argv[i];
    if (name == "--tty") {
      options->tty = true;
      continue;
    }
    if (++i >= argc) return name + " needs a value";
    const char* value = argv[i];
    if (name == "--job-dir") {
      options->job_dir = value;
    } else if (name == "--mount-at") {
      options->mount_at = value;
    } else if (name == "--report-fd") {
      options->report_fd = std::atoi(value);
    } else if (name == "--netns-fd") {
      options->netns_fd = std::atoi(value);
    } else if (name == "--inside") {
      options->inside_fd = std::atoi(value);
    } else if (name == "--stdin") {
      options->streams[0] = value;
    } else if (name == "--stdout") {
      options->streams[1] = value;
    } else if (name == "--stderr") {
      options->streams[2] = value;
    } else if (name == "--cwd") {
      options->cwd = value;
    } else if (name == "--sigmask") {
      options->sigmask = std::strtoull(value, nullptr, 16);
    } else {
      return "unknown option " + name;
    }
  }
  if (options->job_dir.empty() || options->mount_at.empty() || options->report_fd < 3) {
    return "--job-dir, --mount-at and --report-fd are needed";
  }
  if (i + 2 >= argc) return "no command: -- PROGRAM ARG0 ARG1...";
  options->program = argv[i + 1];
  for (int k = i + 2; k <= argc; ++k) options->argv.push_back(argv[k]);  // with the null at the end
  if (options->cwd.empty()) {
    char here[4096];
    options->cwd = getcwd(here, sizeof here) ? here : "/";
  }
  return {};
}

}  // namespace
}  // namespace devproxy::init

int main(int argc, char** argv) {
  devproxy::init::Options options;
  const std::string wrong = devproxy::init::parse(argc, argv, &options);
  if (!wrong.empty()) {
    std::fprintf(stderr, "devproxy-init: %s\n", wrong.c_str());
    if (options.report_fd >= 3) devproxy::init::say(options.report_fd, "error: " + wrong + "\n");
    return 2;
  }
  if (options.inside_fd >= 0) {
    devproxy::init::error_pipe = options.inside_fd;
    devproxy::init::be_pid_one(options);
  }
  return devproxy::init::run_outer(options, argc, argv);
}
