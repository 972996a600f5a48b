// SPDX-License-Identifier: Apache-2.0
// The executor's state of one client process: its generators and settings. Both are numbers to the client, so that they
// mean the same after a restore.
//
// Locks: Client::mu guards both tables; nothing is called under it but a generator's own methods.
#pragma once

#include <ATen/core/Generator.h>

#include <map>
#include <mutex>
#include <vector>

#include "devproxy/torch/executor/device.h"
#include "devproxy/torch/settings.h"

namespace devproxy::aten {

struct Client {
  devproxy_executor_host host{};
  std::mutex mu;
  std::map<uint64_t, at::Generator> generators;  // 0: the default one
  std::map<uint32_t, Settings> settings;         // 0 is none: the framework's own at attach
  int64_t most_plans = -1;                       // that the client wants kept for cuFFT; -1: it has not said
  void* device_state = nullptr;                  // of executor/cuda.cc
};

// Throws Malformed for one that the client never made.
at::Generator generator_of(Client& client, uint64_t id);
Settings settings_of(Client& client, uint32_t number);

// The functions of block.h that are no operators. They check what they read, and throw Malformed.
void set_settings(Client& client, Reader block);
void use_generator(Client& client, Reader block, const devproxy_soft_services& services);
// Writes an answer, which begins with a ReplyHeader, and into that its length: the header alone where it does not fit.
void send_reply(uint64_t addr, uint64_t bytes, Writer& w);
void tell_facts(Client& client, Reader block, const devproxy_soft_services& services);
void tell_rnn_layout(Client& client, Reader block, const devproxy_soft_services& services);
void use_plans(Client& client, Reader block, const devproxy_soft_services& services);

// All of it as bytes, and back.
Writer& save_client(Client& client, Writer& to);
void load_client(Client& client, Reader from);

}  // namespace devproxy::aten
