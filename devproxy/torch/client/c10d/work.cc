// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/c10d/work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

#include "devproxy/torch/client/device.h"

namespace devproxy::aten {

Flight::Flight(c10::Stream stream, std::shared_ptr<Comm> comm, bool timed)
    : stream(stream),
      comm(std::move(comm)),
      begin(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT),
      end(c10::kCUDA, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

std::string Flight::text() const {
  return c10::str("seq ", seq, " ", c10d::opTypeToString(type), ", ", elements_in, " elements in, ", elements_out,
                  " out, of group '", group, "' (rank ", rank, " of ", size, "), timeout ", timeout.count(), " ms");
}

bool Flight::done() {
  if (done_.load(std::memory_order_acquire)) return true;
  if (!end.query()) return false;
  done_.store(true, std::memory_order_release);
  return true;
}

std::exception_ptr Flight::error() {
  std::lock_guard lock(mu_);
  return error_;
}

void Flight::fail(std::exception_ptr error) {
  {
    std::lock_guard lock(mu_);
    if (error_ == nullptr) error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  end_as(c10d::WorkResult::COMM_ERROR);
}

void Flight::end_as(c10d::WorkResult result) {
  c10::intrusive_ptr<c10::ivalue::Future> told;
  {
    std::lock_guard lock(mu_);
    if (ended_as_) return;
    ended_as_ = result;
    told = result_;
  }
  if (told) told->markCompleted(c10::IValue(static_cast<int64_t>(result)));  // runs others' code: outside the lock
}

c10::intrusive_ptr<c10::ivalue::Future> Flight::result() {
  std::lock_guard lock(mu_);
  if (result_ == nullptr) {
    result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());           // as torch's own
    if (ended_as_) result_->markCompleted(c10::IValue(static_cast<int64_t>(*ended_as_)));  // nobody is told yet
  }
  return result_;
}

void Flight::release_memory() {
  std::vector<c10::Storage> memory;  // freed outside the lock
  std::lock_guard lock(mu_);
  memory.swap(memory_);
}

void Flight::keep(std::vector<c10::Storage> storages) {
  std::lock_guard lock(mu_);
  memory_ = std::move(storages);
}

NcclWork::NcclWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs)
    : Work(rank, type, title, inputs) {}

void NcclWork::start(std::shared_ptr<Flight> flight, std::vector<at::Tensor> outputs, bool barrier, bool blocking) {
  flight_ = std::move(flight);
  outputs_ = std::move(outputs);
  barrier_ = barrier;
  blocking_ = blocking;
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

Flight& NcclWork::flight() const {
  TORCH_CHECK(
      flight_ != nullptr,
      "This operation is part of a batch that was not sent yet: wait for it after the coalescing manager's end");
  return *flight_;
}

bool NcclWork::isCompleted() { return flight().done(); }

bool NcclWork::isSuccess() const { return flight().error() == nullptr && flight().done(); }

std::exception_ptr NcclWork::exception() const { return flight().error(); }

std::vector<at::Tensor> NcclWork::result() { return outputs_; }

void NcclWork::synchronize() {
  Flight& f = flight();
  const auto current = torch_stream(f.stream.device_index(), current_stream_id(f.stream.device_index()));
  if (current != f.stream) f.end.block(current);
  // Whoever frees the memory from here on does so behind the operation.
  f.release_memory();
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  Flight& f = flight();
  if (auto error = f.error()) std::rethrow_exception(error);
  synchronize();
  if (f.captured) return true;
  if (timeout != kNoTimeout || blocking_)
    wait_on_host(timeout != kNoTimeout ? timeout : f.timeout);
  else if (barrier_)
    f.end.synchronize();  // the watchdog aborts one that takes too long, which ends this wait
  if (auto error = f.error()) std::rethrow_exception(error);
  return true;
}

void NcclWork::wait_on_host(std::chrono::milliseconds timeout) {
  Flight& f = flight();
  Waited waited;
  for (auto pause = std::chrono::microseconds(50); !f.done();
       pause = std::min(pause * 2, std::chrono::microseconds(2000))) {
    if (waited.so_far(f.comm->held()) > timeout) {
      const std::string text =
          c10::str("Waited ", timeout.count(), " ms for ", f.text(), "; its communicator is aborted");
      f.end_as(c10d::WorkResult::TIMEOUT);
      f.comm->abort(text);
      f.fail(std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text)));
      return;
    }
    std::this_thread::sleep_for(pause);
  }
}

void NcclWork::blockCurrentStream() { synchronize(); }

void NcclWork::abort() { flight().comm->abort("its work was aborted: " + flight().text()); }

c10::intrusive_ptr<c10::ivalue::Future> NcclWork::getFuture() {
  std::lock_guard lock(future_mu_);
  if (future_ != nullptr) return future_;
  const Flight& f = flight();
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{f.stream.device()});
  // The future is complete from the start: it records an event on the stream that is current here, and those who take
  // its value make their own streams wait for that event.
  const c10::StreamGuard guard(f.stream);
  future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> NcclWork::getFutureResult() { return flight().result(); }

float NcclWork::getDuration() const {
  Flight& f = flight();
  TORCH_CHECK(f.end.flag() == c10::EventFlag::BACKEND_DEFAULT,
              "getDuration only works if timing was enabled: set TORCH_NCCL_ENABLE_TIMING=1");
  TORCH_CHECK(f.done(), "getDuration can only be called after the work has completed");
  return static_cast<float>(f.begin.elapsedTime(f.end));
}

uint64_t NcclWork::getSequencenumber() const { return flight().seq; }

}  // namespace devproxy::aten
