// SPDX-License-Identifier: Apache-2.0
// How a function of devproxy says that it failed: a CUresult number and a text for the user.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "devproxy/csrc/base/result.h"

namespace devproxy {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(int32_t code, std::string text) : code_(code), text_(std::move(text)) {}

  static Status from_errno(int32_t code, std::string_view doing) {
    const int saved = errno;
    return {code, std::string(doing) + ": " + std::strerror(saved)};
  }

  bool ok() const { return code_ == kOk; }
  int32_t code() const { return code_; }
  const std::string& text() const { return text_; }

  // Keeps the first cause and adds what was being done.
  Status with(std::string_view doing) && {
    if (!ok()) text_ = std::string(doing) + ": " + text_;
    return std::move(*this);
  }

 private:
  int32_t code_ = kOk;
  std::string text_;
};

// A value, or why there is none.
template <class T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose, reads like a return
  StatusOr(Status status) : status_(std::move(status)) {}  // NOLINT
  bool ok() const { return status_.ok(); }
  const Status& status() const& { return status_; }
  Status status() && { return std::move(status_); }
  T& operator*() { return *value_; }
  T* operator->() { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace devproxy
