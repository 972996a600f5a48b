// SPDX-License-Identifier: Apache-2.0
// Physical objects of a device. A virtual handle never reaches a device and a reference never leaves the server, so
// they cannot be mixed. References are shared because a submitted command keeps alive what it uses after the handle was
// destroyed.
#pragma once

#include <cstdint>
#include <memory>

namespace devproxy::hal {

class Queue {
 public:
  virtual ~Queue() = default;
};
class Event {
 public:
  virtual ~Event() = default;
};
class Module {
 public:
  virtual ~Module() = default;
};
class Function {
 public:
  virtual ~Function() = default;
};
class Array {
 public:
  virtual ~Array() = default;
};
// A texture or surface object: kernels get `value` in their parameters.
class Texture {
 public:
  virtual ~Texture() = default;
  uint64_t value = 0;
};
class Comm {
 public:
  virtual ~Comm() = default;
};
using QueueRef = std::shared_ptr<Queue>;
using EventRef = std::shared_ptr<Event>;
using ModuleRef = std::shared_ptr<Module>;
using FunctionRef = std::shared_ptr<Function>;
using ArrayRef = std::shared_ptr<Array>;
using TextureRef = std::shared_ptr<Texture>;
using CommRef = std::shared_ptr<Comm>;

// Names one command. position grows from submission to submission over all queues of a space.
struct Ticket {
  uint64_t position = 0;
  uint32_t tag = 0;     // handed back in on_complete
  uint32_t caller = 0;  // handed back in on_refused
};

}  // namespace devproxy::hal
