// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/worker.h"

#include <mutex>

#include "devproxy/torch/client/infer.h"

namespace devproxy::aten {
namespace {

constexpr size_t kMaxCachedSignatures = 4096;  // per op

}  // namespace

thread_local constinit Worker* t_worker = nullptr;

Worker* WorkerLease::make() {
  struct AtThreadEnd {
    ~AtThreadEnd() { delete std::exchange(t_worker, nullptr); }
  };
  static thread_local AtThreadEnd t_at_end;
  (void)&t_at_end;  // makes it
  return new Worker;
}

std::shared_ptr<const Meta> cached_meta(Worker& worker, OpPlan& plan, bool captured) {
  Encoder& e = worker.encoder;
  Worker::Recent& recent = worker.recent_of(plan, e.key);
  if (recent.is(plan, e.key)) [[likely]]
    return recent.meta;
  std::shared_ptr<const Meta> meta;
  {
    std::lock_guard lock(plan.mu);
    if (const auto it = plan.cache.find(e.key); it != plan.cache.end()) meta = it->second;
  }
  if (meta == nullptr) {
    meta = infer(plan, function_of(plan, e.device), e, captured);
    // In a capture it was not tried with real contents: the first call outside still is.
    if (captured || meta->sparse) return meta;
    std::lock_guard lock(plan.mu);
    if (plan.cache.size() >= kMaxCachedSignatures) plan.cache.clear();
    plan.cache.emplace(e.key, meta);
  }
  recent.set(plan, e.key, meta);
  return meta;
}

}  // namespace devproxy::aten
