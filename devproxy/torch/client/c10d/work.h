// SPDX-License-Identifier: Apache-2.0
// One operation that was given to NCCL: what the caller holds of it (NcclWork) and what the watchdog holds (Flight).
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "devproxy/torch/client/c10d/comm.h"
#include "devproxy/torch/client/c10d/waited.h"

namespace devproxy::aten {

// Shared by the work and the watchdog. It holds storages and no tensors: the watchdog may be the last to let go, and a
// tensor's end can need the GIL.
struct Flight {
  Flight(c10::Stream stream, std::shared_ptr<Comm> comm, bool timed);

  // "seq 3 ALLREDUCE, 8 elements in, 8 out, of group 'dp' (rank 1 of 4), timeout 600000 ms"
  std::string text() const;

  // True once the GPU has passed it or it has failed.
  bool done();
  std::exception_ptr error();
  // Keeps the first one.
  void fail(std::exception_ptr error);
  // Lets go of the memory that it kept alive. The caller knows that the memory's next use comes behind it.
  void release_memory();
  void keep(std::vector<c10::Storage> storages);
  // How it has ended, once: a later word of it changes nothing. Whoever asked for the result is told in this thread.
  void end_as(c10d::WorkResult result);
  // Complete when the watchdog has seen its end.
  c10::intrusive_ptr<c10::ivalue::Future> result();

  const c10::Stream stream;
  const std::shared_ptr<Comm> comm;
  c10::Event begin, end;
  bool captured = false;  // into a CUDA graph: it never runs itself
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint64_t seq = 0;
  int rank = 0, size = 0;
  int64_t elements_in = 0, elements_out = 0;
  std::string group;
  std::chrono::milliseconds timeout{0};
  Waited age;  // the watchdog's alone

 private:
  std::mutex mu_;
  std::vector<c10::Storage> memory_;
  std::exception_ptr error_;
  std::optional<c10d::WorkResult> ended_as_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;  // where somebody has asked for it
  std::atomic<bool> done_{false};
};

class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

  // Called once by the process group, when the operation is on its stream.
  void start(std::shared_ptr<Flight> flight, std::vector<at::Tensor> outputs, bool barrier, bool blocking);

 private:
  // Throws where the operation is part of a batch that was not sent yet.
  Flight& flight() const;
  // The host waits until the GPU has passed it. Throws what it failed with, or on timeout.
  void wait_on_host(std::chrono::milliseconds timeout);

  std::shared_ptr<Flight> flight_;
  std::vector<at::Tensor> outputs_;
  bool barrier_ = false;
  bool blocking_ = false;
  std::mutex future_mu_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace devproxy::aten
