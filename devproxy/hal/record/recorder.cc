// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/record/recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "devproxy/csrc/base/json.h"
#include "devproxy/csrc/base/log.h"

namespace devproxy::hal::record {

namespace {

constexpr size_t kGatheredBytes = 64 << 10;

}  // namespace

Line::Line() : members_(std::make_unique<OrderedJson>(OrderedJson::object())) {
  members_->get_ref<OrderedJson::object_t&>().reserve(16);  // as most lines have: one allocation
}
Line::~Line() = default;

Line& Line::add(std::string_view name, OrderedJson value) {
  members_->emplace(name, std::move(value));
  return *this;
}
Line& Line::add(std::string_view name, uint64_t value) { return add(name, OrderedJson(value)); }
Line& Line::add(std::string_view name, int64_t value) { return add(name, OrderedJson(value)); }
Line& Line::add(std::string_view name, bool value) { return add(name, OrderedJson(value)); }
Line& Line::add(std::string_view name, std::string_view value) { return add(name, OrderedJson(value)); }
Line& Line::add(std::string_view name, const uint32_t (&three)[3]) { return add(name, OrderedJson(three)); }

StatusOr<std::unique_ptr<Recorder>> Recorder::open(const std::string& path) {
  if (path.empty()) return std::make_unique<Recorder>(-1);
  // Appended to: a job's next server (migrate) goes on in the same file.
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (fd < 0) return Status::from_errno(kFileNotFound, "DEVPROXY_RECORD: opening " + path);
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return Status(kInvalidValue, "DEVPROXY_RECORD: " + path + " is no ordinary file");
  }
  return std::make_unique<Recorder>(fd);
}

Recorder::~Recorder() {
  flush();
  if (fd_ >= 0) close(fd_);
}

void Recorder::put(Line line) {
  // A kernel's name that is no UTF-8 loses what is none.
  const std::string text = line.members_->dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  std::lock_guard lock(mu_);
  lines_ += text;
  lines_ += '\n';
  if (lines_.size() >= kGatheredBytes) write_locked();
}

void Recorder::flush() {
  if (!on()) return;
  std::lock_guard lock(mu_);
  write_locked();
}

// A record that cannot be written is lost, and said so once; the job goes on.
void Recorder::write_locked() {
  for (size_t done = 0; done < lines_.size();) {
    const ssize_t n = ::write(fd_, lines_.data() + done, lines_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      DP_LOG(kError, kServer, 0, "DEVPROXY_RECORD: a part of the record is lost: %s", std::strerror(errno));
      break;
    }
    done += static_cast<size_t>(n);
  }
  lines_.clear();
}

}  // namespace devproxy::hal::record
