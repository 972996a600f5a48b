// SPDX-License-Identifier: Apache-2.0
// What a thread keeps from op to op, and how it takes it.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "devproxy/torch/client/encoder.h"
#include "devproxy/torch/client/op_plan.h"

namespace devproxy::aten {

// What a thread keeps from op to op, and shares with none. Found by one load: `t_worker` is a plain pointer (see
// below).
struct Worker {
  Encoder encoder;

  // Plans are never destroyed.
  struct Planned {
    const void* schema = nullptr;
    OpPlan* plan = nullptr;
  };
  std::array<Planned, 1024> planned;

  // Signatures seen of late. What an op makes of a signature never changes (OpPlan::cache forgets, but only for room),
  // so an entry needs no check but its own key; it owns its Meta, whatever becomes of OpPlan::cache.
  struct Recent {
    const OpPlan* plan = nullptr;
    c10::SmallVector<uint64_t, 24> key;
    std::shared_ptr<const Meta> meta;

    bool is(const OpPlan& p, const Key& k) const {
      return plan == &p && key.size() == k.size() && std::memcmp(key.data(), k.data(), k.size() * sizeof k[0]) == 0;
    }
    void set(const OpPlan& p, const Key& k, std::shared_ptr<const Meta> m) {
      plan = nullptr;  // half of an entry if the next line throws
      key.assign(k.begin(), k.end());
      meta = std::move(m);
      plan = &p;
    }
  };
  std::array<Recent, 256> recent;

  Recent& recent_of(const OpPlan& plan, const Key& key) {
    uint64_t h = reinterpret_cast<uintptr_t>(&plan) >> 6;
    for (const uint64_t w : key) h = (h << 5 | h >> 59) ^ w;
    return recent[(h ^ h >> 7 ^ h >> 14 ^ h >> 32) % recent.size()];
  }
};

// The thread's worker while no op has it. An op takes it and puts it back. An op that is sent while another is being
// encoded (a warning's handler may be Python) finds none, and makes a worker for itself alone. Only the thread itself
// reads this, so it needs no ordering. initial-exec: reading it takes no call; it costs one word of the space that every
// process keeps free for such variables.
extern thread_local constinit Worker* t_worker [[gnu::tls_model("initial-exec")]];

// Has the thread's worker for the length of an op.
class WorkerLease {
 public:
  WorkerLease() : worker_(std::exchange(t_worker, nullptr)) {
    if (worker_ == nullptr) [[unlikely]]
      worker_ = make();
  }
  ~WorkerLease() {
    if (t_worker == nullptr) [[likely]]
      t_worker = worker_;
    else
      delete worker_;
  }
  WorkerLease(const WorkerLease&) = delete;
  WorkerLease& operator=(const WorkerLease&) = delete;
  Worker& operator*() { return *worker_; }

 private:
  static Worker* make();
  Worker* worker_;
};

// plan_of(op), of late or anew.
inline OpPlan& plan_for(Worker& worker, const c10::OperatorHandle& op) {
  const void* schema = &op.schema();
  Worker::Planned& p = worker.planned[(reinterpret_cast<uintptr_t>(schema) >> 6) % worker.planned.size()];
  if (p.schema != schema) [[unlikely]]
    p = {schema, &plan_of(op)};
  return *p.plan;
}

// The metadata of the results of the op that worker.encoder has encoded, key included: of late, of a call before, or from the
// device (infer()).
std::shared_ptr<const Meta> cached_meta(Worker& worker, OpPlan& plan, bool captured);

}  // namespace devproxy::aten
