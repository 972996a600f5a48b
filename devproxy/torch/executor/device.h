// SPDX-License-Identifier: Apache-2.0
// What differs between an executor on the host's memory (cpu.cc) and one on a CUDA device's (cuda.cc). The rest of the
// executor is the same source for both; each is a library of its own.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

#include <memory>
#include <string>
#include <vector>

#include "devproxy/hal/host_module/include/devproxy_executor.h"
#include "devproxy/hal/host_module/include/devproxy_soft_module.h"
#include "devproxy/torch/block.h"

namespace devproxy::aten {

// One client process.
struct Client;

namespace device {

extern const c10::DeviceType kType;
extern const c10::DispatchKey kKey;
extern const uint32_t kWhere;  // DEVPROXY_EXECUTOR_ON_*
// Do random ops draw from generators that live here (client.h)? Else the client sends each op its seed.
extern const bool kKeepsGenerators;
// May an op be told that nondeterministic algorithms are an error, as the client was? Else it only warns.
extern const bool kRaisesNondeterminism;
// Does the device lack kernels for types that a GPU has (half.h, other_types.h)?
extern const bool kLacksTypes;

c10::Device of(const Client& client);
// Behind the tensors of a launch; results that are larger than was foreseen come from it.
c10::Allocator* allocator();

// Once per process, before its first op: puts the placing allocator (placement.h) in front of torch's.
void prepare();

// Once per client. Throws where the framework cannot use the GPU.
void attach(Client& client);
void detach(Client& client);
void trim(Client& client);

at::Generator new_generator(const Client& client);
// torch's own default generator of the device draws what `g` would have drawn, and moves it on: for ops that take no
// generator argument. Between the two calls nobody else uses it.
void lend_to_default(const Client& client, const at::Generator& g);
void take_from_default(const Client& client, const at::Generator& g);
// Copies from device memory that the stream of this thread has written, and waits for it.
void read_memory(void* to, uint64_t addr, size_t bytes);

// Makes the launch's device and stream the current ones of this thread.
class LaunchScope {
 public:
  LaunchScope(const Client& client, const devproxy_soft_launch& launch, uint32_t threads);
};

// The CUresult of an exception that ends the context (a device-side assertion, an illegal address); 0 for others.
int fault_of(const std::exception& e);

// On the launch's stream.
void sleep(const Client& client, const devproxy_soft_launch& launch, const SleepBlock& how_long);

// torch's cache of cuFFT plans: what was asked for, 0 where nothing was. Throws what torch throws.
int64_t plan_cache(Client& client, PlansBlock::What what, int64_t value);

// Where cuDNN wants the weights of a recurrent layer in one buffer: how many elements that has, and where each begins.
std::vector<int64_t> rnn_layout(const Client& client, const RnnForm& form,
                                const std::vector<std::vector<int64_t>>& weights);

// Lines "name value" for the client's hooks: see client/executor.h, Facts.
std::string facts(const Client& client);

}  // namespace device
}  // namespace devproxy::aten
