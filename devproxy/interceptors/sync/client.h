// SPDX-License-Identifier: Apache-2.0
// Events and host functions as graphs need them.
#pragma once

#include <functional>
#include <memory>

#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::sync {

// A function of the job that a stream has run on the client's host-function thread.
struct HostCall {
  CUhostFn fn = nullptr;
  CUstreamCallback callback = nullptr;
  void* data = nullptr;
  CUstream stream = nullptr;
  std::shared_ptr<const void> keep;  // let go when it has run
};

// post(token) posts the message that has the n calls run, in order, as token, token + 1, ...
[[nodiscard]] int32_t post_host_calls(client::DeviceState* d, const HostCall* calls, size_t n,
                                      const std::function<int32_t(uint64_t token)>& post);

// The attributes of the legacy stream, which outlives its context, are again those of a new one.
void reset_attributes(client::DeviceState* d);

// The event was recorded by the command that ends at `end` on `s`.
void set_record(client::EventObj* e, const client::StreamObj* s, uint64_t end);

}  // namespace devproxy::sa::sync
