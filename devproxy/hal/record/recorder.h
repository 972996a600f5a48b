// SPDX-License-Identifier: Apache-2.0
// The record: one JSON line per call, appended to a file that outlives the job. Lines are gathered and written when
// there are many, when a space has nothing to do, when it ends, and at once after a fault.
//
// Locks: mu_ is the only one here, a leaf.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "devproxy/csrc/base/json_fwd.h"
#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::record {

using OrderedJson = nlohmann::ordered_json;  // people read members in the order in which they were added

// One line in the making.
class Line {
 public:
  Line();
  ~Line();
  Line(Line&&) = default;
  Line& add(std::string_view name, uint64_t value);
  Line& add(std::string_view name, int64_t value);
  Line& add(std::string_view name, uint32_t value) { return add(name, uint64_t{value}); }
  Line& add(std::string_view name, int32_t value) { return add(name, int64_t{value}); }
  Line& add(std::string_view name, bool value);
  Line& add(std::string_view name, std::string_view value);
  Line& add(std::string_view name, const std::string& value) { return add(name, std::string_view(value)); }
  Line& add(std::string_view name, const char* value) { return add(name, std::string_view(value)); }
  Line& add(std::string_view name, const uint32_t (&three)[3]);
  Line& add(std::string_view name, OrderedJson value);

 private:
  friend class Recorder;
  std::unique_ptr<OrderedJson> members_;
};

class Recorder {
 public:
  // path: empty for none. Refused where the file cannot be made or belongs to somebody else.
  static StatusOr<std::unique_ptr<Recorder>> open(const std::string& path);
  explicit Recorder(int fd) : fd_(fd) {}
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool on() const { return fd_ >= 0; }
  // fill(line) is only called where somebody wants it.
  template <class F>
  void line(std::string_view op, const F& fill) {
    if (!on()) return;
    Line line;
    line.add("op", op);
    fill(line);
    put(std::move(line));
  }
  void flush();

 private:
  void put(Line line);
  void write_locked();

  const int fd_;
  std::mutex mu_;
  std::string lines_;
};

}  // namespace devproxy::hal::record
