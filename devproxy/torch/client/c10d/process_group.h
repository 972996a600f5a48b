// SPDX-License-Identifier: Apache-2.0
// torch.distributed's backend 'nccl' over NCCL's C API. Each operation is put on a stream and returns at once.
// Locks: ProcessGroupNCCL::mu_ guards the communicators, streams and sequence numbers. NCCL's making of a communicator
// waits for the other ranks under it, as nothing of the group can go on without. A group that splits off its parent's
// communicator takes the parent's mu_ under its own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ATen/ops/empty.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/torch/client/c10d/comm.h"
#include "devproxy/torch/client/c10d/watchdog.h"
#include "devproxy/torch/client/c10d/work.h"

namespace devproxy::aten {

using at::Tensor;
using c10::intrusive_ptr;

inline constexpr std::chrono::milliseconds kDefaultNcclTimeout{10 * 60 * 1000};

// One operation before it is on its stream.
struct Op {
  struct Target {
    nccl::ncclComm_t comm;
    CUstream stream;
    int peer;  // of a send or receive: its rank in the communicator
  };

  c10d::OpType type;
  const char* title;            // in a profile
  std::vector<Tensor> inputs;   // at least one in inputs and outputs together
  std::vector<Tensor> outputs;  // also what the work's result is
  std::function<void(const Target&)> call;
  std::function<void()> before, after;  // copies on the operation's stream; may be empty
  std::vector<Tensor> temporaries;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool async = true;     // on the group's own stream; otherwise on the caller's
  bool grouped = false;  // several NCCL calls
  int peer = -1;
  bool barrier = false;
};

class ProcessGroupNCCL final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(bool high_priority = false)
        : Backend::Options("nccl", kDefaultNcclTimeout), is_high_priority_stream(high_priority) {}

    bool is_high_priority_stream;
    nccl::ncclConfig_t config;
    std::string net_name, comm_name;  // what the config's pointers show
    intrusive_ptr<ProcessGroupNCCL> split_from;
    int split_color = nccl::kNoColor - 1;  // not given
  };

  ProcessGroupNCCL(intrusive_ptr<c10d::Store> store, int rank, int size, intrusive_ptr<Options> options);
  ~ProcessGroupNCCL() override;

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  intrusive_ptr<Backend::Options> getBackendOptions() { return options_; }
  const intrusive_ptr<Options>& options() const { return options_; }
  int64_t uid() const { return uid_; }

  intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<Tensor>& tensors,
                                                const c10d::AllreduceCoalescedOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                      const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                            const c10d::AllgatherOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                                           const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                 const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                                            const c10d::ReduceScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                                   const c10d::GatherOptions& opts) override;
  intrusive_ptr<c10d::Work> scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                                    const c10d::ScatterOptions& opts) override;
  intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                          std::vector<int64_t>& input_splits,
                                          const c10d::AllToAllOptions& opts) override;
  intrusive_ptr<c10d::Work> alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                     const c10d::AllToAllOptions& opts) override;
  intrusive_ptr<c10d::Work> send(std::vector<Tensor>& tensors, int dst, int tag) override;
  intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& tensors, int src, int tag) override;
  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  // Between the two, this thread's operations are kept; at the end they go to NCCL as one group.
  void startCoalescing() override;
  intrusive_ptr<c10d::Work> endCoalescing() override;

  void setSequenceNumberForGroup() override {}  // counts from 0 on every rank
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // For the next operation alone.
  void add_ephemeral_timeout(std::chrono::milliseconds timeout);
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { watchdog_->wait_until_idle(); }
  void enableCollectivesTiming() override { timed_ = true; }
  c10d::ErrorType getError() override;

  intrusive_ptr<Backend> split(const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                               const intrusive_ptr<Backend::Options>& opts) override;
  bool supportsShrinking() const override { return true; }
  // A group without these ranks, which do not call it. flags: nccl::kShrinkAbort gives up what is under way; then this
  // group takes no operation any more.
  intrusive_ptr<Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                const intrusive_ptr<Backend::Options>& opts) override;
  // The part in a split of the ranks that are not in the new group.
  void split_off_nothing(at::Device device);
  int64_t comm_split_count() const { return splits_; }
  void eagerConnectSingleDevice(at::Device device) override;
  bool is_initialized() const;

  // As of ncclMemAlloc, which is memory as any other here.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override { return at::empty({size}, options); }
  // The memory of all its communicators: ncclCommSuspend. Not marked `override`: torch has them since 2.12.
  void suspend();
  void resume();
  std::unordered_map<std::string, uint64_t> getMemoryStats();

  void abort() override;
  void shutdown() override;

 private:
  // A communicator and its stream: one for each device, and one for each peer of sends outside a batch.
  struct Lane {
    std::shared_ptr<Comm> comm;
    c10::Stream stream;
  };
  struct Batch {
    std::thread::id thread;
    std::vector<Op> ops;
    intrusive_ptr<NcclWork> work;
  };

  intrusive_ptr<c10d::Work> enqueue(Op op);
  intrusive_ptr<c10d::Work> launch(std::vector<Op> ops, intrusive_ptr<NcclWork> work, bool batch);
  void call_nccl(std::vector<Op>& ops, const Op::Target& target, Comm& comm);
  std::shared_ptr<Flight> make_flight(const std::vector<Op>& ops, const Lane& lane, c10::Stream stream, bool batch);
  void keep_memory(Flight& flight, const std::vector<Op>& ops);
  std::chrono::milliseconds timeout_of(const std::vector<Op>& ops);
  Lane& device_lane(c10::DeviceIndex device);
  // The device of an operation that names none.
  c10::DeviceIndex default_device() const;
  Lane& peer_lane(c10::DeviceIndex device, int peer);
  Lane& open_lane(const std::string& key, c10::DeviceIndex device, const std::function<std::shared_ptr<Comm>()>& make);
  std::shared_ptr<Comm> join(const std::string& key, int size, int rank);
  std::shared_ptr<Comm> split_from_parent(c10::DeviceIndex device);
  nccl::ncclConfig_t config() const;
  c10::DeviceIndex barrier_device(const c10d::BarrierOptions& opts);
  std::string name() const;
  // Destroys them, or aborts them where something failed or is still under way.
  void end_communicators();

  const intrusive_ptr<c10d::Store> store_;
  const intrusive_ptr<Options> options_;
  const int64_t uid_;
  const int pid_;
  const bool blocking_wait_;
  bool timed_;
  std::unique_ptr<Watchdog> watchdog_;

  mutable std::mutex mu_;
  std::map<std::string, Lane> lanes_;
  uint64_t collectives_ = 0, sends_ = 0;
  int64_t splits_ = 0, shrinks_ = 0;
  std::chrono::milliseconds ephemeral_timeout_{0};
  std::optional<Batch> batch_;
  std::atomic<bool> ended_{false};
};

}  // namespace devproxy::aten
