// SPDX-License-Identifier: Apache-2.0
// torch.distributed's backend 'gloo' for tensors of a GPU: gloo's own group does the work on copies in host memory.
//
// torch's CUDA build copies on streams of its own, and has that compiled into libtorch_cuda; the CPU wheel dereferences a
// null pointer instead. Here a call waits until the inputs have been copied to the host, and gloo's thread copies the
// results back before the work is done.
// Locks: StagedWork::mu_ guards done_, and is held over the copy back of a receive.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <utility>
#include <vector>

#include "devproxy/torch/client/process_group_names.h"

namespace devproxy::aten {
namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10::ivalue::Future;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;

// Tensors of one call, and what stands for them on the host.
class Staging {
 public:
  Tensors inputs(const Tensors& given) { return each(given, true, false); }
  Tensors outputs(const Tensors& given) { return each(given, false, true); }
  Tensors in_place(const Tensors& given) { return each(given, true, true); }
  Lists inputs(const Lists& given) { return each(given, true, false); }
  Lists outputs(const Lists& given) { return each(given, false, true); }

  void copy_back() const {
    const c10::AutoGradMode no_grad(false);
    const at::AutoDispatchBelowADInplaceOrView guard;  // as gloo, which writes into the memory
    for (const auto& [device, host] : results_) device.copy_(host);
  }

 private:
  Tensor one(const Tensor& given, bool read, bool written) {
    if (!given.defined() || given.is_cpu()) return given;
    const c10::AutoGradMode no_grad(false);
    Tensor host = read ? given.detach().cpu() : at::empty_like(given.detach(), given.options().device(at::kCPU));
    if (written) results_.emplace_back(given.detach(), host);
    return host;
  }
  Tensors each(const Tensors& given, bool read, bool written) {
    Tensors made;
    for (const Tensor& t : given) made.push_back(one(t, read, written));
    return made;
  }
  Lists each(const Lists& given, bool read, bool written) {
    Lists made;
    for (const Tensors& list : given) made.push_back(each(list, read, written));
    return made;
  }

  std::vector<std::pair<Tensor, Tensor>> results_;
};

class StagedWork final : public c10d::Work {
 public:
  // results: what the work's future gives. Without a future (sends, receives, reduce_scatter: gloo has none) the one who
  // waits copies back.
  StagedWork(intrusive_ptr<Work> inner, Staging staging, Tensors results)
      : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), results_(std::move(results)) {
    auto shared = std::make_shared<Staging>(std::move(staging));
    const auto of_inner = future_of(*inner_);
    if (!of_inner) {
      staging_ = std::move(shared);
      return;
    }
    future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors());
    of_inner->addCallback([shared, future = future_, results = results_](Future& of) {
      if (of.hasError()) return future->setError(of.exception_ptr());
      try {
        shared->copy_back();
      } catch (...) {
        return future->setError(std::current_exception());
      }
      future->markCompleted(c10::IValue(results));
    });
  }

  bool isCompleted() override { return future_ ? future_->completed() : inner_->isCompleted(); }
  bool isSuccess() const override {
    return future_ ? future_->completed() && !future_->hasError() : inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return future_ && future_->hasError() ? future_->exception_ptr() : inner_->exception();
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool completed = inner_->wait(timeout);
    if (future_) {
      future_->waitAndThrow();
    } else if (completed) {
      std::lock_guard lock(mu_);
      if (!std::exchange(done_, true)) staging_->copy_back();
    }
    return completed;
  }
  void synchronize() override {}
  void abort() override { inner_->abort(); }
  intrusive_ptr<Future> getFuture() override {
    TORCH_CHECK(future_, "gloo has no future for this operation");
    return future_;
  }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  static intrusive_ptr<Future> future_of(Work& work) {
    try {
      return work.getFuture();
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  const intrusive_ptr<Work> inner_;
  const Tensors results_;
  intrusive_ptr<Future> future_;
  std::shared_ptr<Staging> staging_;
  std::mutex mu_;
  bool done_ = false;
};

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

class StagedGloo final : public c10d::Backend {
 public:
  explicit StagedGloo(intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return in_place(tensors, [&](Tensors& host) { return inner_->broadcast(host, o); });
  }
  intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return in_place(tensors, [&](Tensors& host) { return inner_->allreduce(host, o); });
  }
  intrusive_ptr<c10d::Work> allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return in_place(tensors, [&](Tensors& host) { return inner_->allreduce_sparse(host, o); });
  }
  intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return in_place(tensors, [&](Tensors& host) { return inner_->allreduce_coalesced(host, o); });
  }
  intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return in_place(tensors, [&](Tensors& host) { return inner_->reduce(host, o); });
  }
  intrusive_ptr<c10d::Work> allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return moved(out, in, [&](Lists& to, Tensors& from) { return inner_->allgather(to, from, o); });
  }
  intrusive_ptr<c10d::Work> allgather_coalesced(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return moved(out, in, [&](Lists& to, Tensors& from) { return inner_->allgather_coalesced(to, from, o); });
  }
  intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return moved(one(out), one(in),
                 [&](Tensors& to, Tensors& from) { return inner_->_allgather_base(to[0], from[0], o); });
  }
  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                            const c10d::AllgatherOptions& o) override {
    return moved(out, in,
                 [&](Tensors& to, Tensors& from) { return inner_->allgather_into_tensor_coalesced(to, from, o); });
  }
  intrusive_ptr<c10d::Work> gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return moved(out, in, [&](Lists& to, Tensors& from) { return inner_->gather(to, from, o); });
  }
  intrusive_ptr<c10d::Work> scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return moved(out, in, [&](Tensors& to, Lists& from) { return inner_->scatter(to, from, o); });
  }
  intrusive_ptr<c10d::Work> reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override {
    return moved(out, in, [&](Tensors& to, Lists& from) { return inner_->reduce_scatter(to, from, o); });
  }
  intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                 const c10d::ReduceScatterOptions& o) override {
    return moved(one(out), one(in),
                 [&](Tensors& to, Tensors& from) { return inner_->_reduce_scatter_base(to[0], from[0], o); });
  }
  intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                            const c10d::ReduceScatterOptions& o) override {
    return moved(out, in,
                 [&](Tensors& to, Tensors& from) { return inner_->reduce_scatter_tensor_coalesced(to, from, o); });
  }
  intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                                          std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    return moved(one(out), one(in), [&](Tensors& to, Tensors& from) {
      return inner_->alltoall_base(to[0], from[0], out_sizes, in_sizes, o);
    });
  }
  intrusive_ptr<c10d::Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return moved(out, in, [&](Tensors& to, Tensors& from) { return inner_->alltoall(to, from, o); });
  }
  intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    Staging staging;
    Tensors host = staging.inputs(tensors);
    auto work = inner_->send(host, to, tag);
    return c10::make_intrusive<StagedWork>(std::move(work), std::move(staging), Tensors{});
  }
  intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return received(tensors, [&](Tensors& host) { return inner_->recv(host, from, tag); });
  }
  intrusive_ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override {
    return received(tensors, [&](Tensors& host) { return inner_->recvAnysource(host, tag); });
  }
  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    inner_->monitoredBarrier(o, wait_all);
  }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }

 private:
  static Tensors one(const Tensor& t) { return {t}; }

  template <class Call>
  intrusive_ptr<c10d::Work> in_place(const Tensors& tensors, const Call& call) {
    Staging staging;
    Tensors host = staging.in_place(tensors);
    auto work = call(host);
    return c10::make_intrusive<StagedWork>(std::move(work), std::move(staging), tensors);
  }
  template <class Outputs, class Inputs, class Call>
  intrusive_ptr<c10d::Work> moved(const Outputs& outputs, const Inputs& inputs, const Call& call) {
    Staging staging;
    Inputs from = staging.inputs(inputs);
    Outputs to = staging.outputs(outputs);
    auto work = call(to, from);
    Tensors results;
    if constexpr (std::is_same_v<Outputs, Lists>) {
      results = flat(outputs);
    } else {
      results = outputs;
    }
    return c10::make_intrusive<StagedWork>(std::move(work), std::move(staging), std::move(results));
  }
  template <class Call>
  intrusive_ptr<c10d::Work> received(const Tensors& tensors, const Call& call) {
    Staging staging;
    Tensors host = staging.outputs(tensors);
    auto work = call(host);
    return c10::make_intrusive<StagedWork>(std::move(work), std::move(staging), tensors);
  }

  const intrusive_ptr<Backend> inner_;
};

}  // namespace

void add_staged_gloo(py::module_ c10d) {
  py::class_<StagedGloo, c10d::Backend, intrusive_ptr<StagedGloo>>(c10d, "_StagedGloo")
      .def(py::init<intrusive_ptr<c10d::Backend>>(), py::arg("gloo"))
      .def("_set_default_timeout", &StagedGloo::setTimeout, py::call_guard<py::gil_scoped_release>());
}

}  // namespace devproxy::aten
