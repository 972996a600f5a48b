// SPDX-License-Identifier: Apache-2.0
// Pages that ranks share, on a real GPU: handles of the driver, mapped into the range of each rank.
//
// A page is the driver's granule, 2 MiB on all GPUs so far (else nothing is spliced), since a handle is mapped as a whole only (cuda.h, cuMemMap). Stable memory has a
// handle for each. The pool's places are names only: who shows a page is asked by another rank that shows it.
//
// Kernels run later than they are submitted. So the books are kept in the order of submission, which is the order that the
// ranks' events and streams give to all that depends on it; copies for a meeting go to the stream of the launch that runs
// for all, behind the streams of the others, and those go on behind it. Only two things wait for the GPU: what the host must
// know (a comparison or a hash of contents without a number), and the mapping of a page, since cuMemUnmap does not wait for
// work that touches it (seen on an H200).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "devproxy/hal/cuda/cuda_context.h"
#include "devproxy/hal/memory.h"
#include "devproxy/hal/splice/splicer.h"

namespace devproxy::hal::cuda {

class CudaPages final : public splice::PhysicalMemory {
 public:
  CudaPages();
  ~CudaPages() override;

  // What it needs of each space. Any thread calls them.
  struct Space {
    uint64_t bytes = 0;
    // Contents of device memory, whose work has ended. Several threads at once.
    std::function<Status(uint64_t addr, size_t bytes, const SpaceMemory::PieceSink& sink)> read;
    std::function<bool()> idle;  // its streams have nothing to do; must not wait for anything
  };
  // Spaces of one context.
  void join(uint64_t base, Space space, const std::shared_ptr<Context>& context);
  void leave(uint64_t base);
  // For copies while pages are moved. Under the splicer's page lock.
  StatusOr<CUstream> stream();

  // A launch, in the stream that it is for.
  class Stream : public splice::Runner {
   public:
    Stream(std::shared_ptr<Context> context, CUstream stream) : context_(std::move(context)), stream_(stream) {}
    Status follow(splice::Runner& other) override;
    Status wait() const;  // for all that it has
    const Driver& driver() const { return context_->enter(); }
    CUstream stream() const { return stream_; }

   protected:
    ~Stream() = default;

   private:
    const std::shared_ptr<Context> context_;
    const CUstream stream_;
  };

  Status grow_pool(uint64_t) override { return {}; }
  void empty_pool(uint64_t, uint64_t) override {}
  StatusOr<bool> same(const std::vector<Pair>& pairs) override;
  bool is_known_same(const Pair&) override { return false; }
  Status copy(uint64_t to, uint64_t from, uint64_t bytes) override;
  void begin_work(splice::Runner* runner) override { work_ = static_cast<Stream*>(runner); }
  void end_work() override { work_ = nullptr; }
  StatusOr<splice::Contents> hash(splice::Runner& runner, const std::vector<Range>& ranges) override;
  uint64_t kernel_ns(uint64_t bytes, uint64_t) const override;
  bool idle() override;

 private:
  Status read(uint64_t addr, size_t bytes, const SpaceMemory::PieceSink& sink);

  std::mutex mu_;                     // spaces_; read() holds it, so a space leaves when nobody reads
  std::map<uint64_t, Space> spaces_;  // by base
  // Under the splicer's page lock.
  std::shared_ptr<Context> context_;
  CUstream stream_ = nullptr;
  Stream* work_ = nullptr;
};

}  // namespace devproxy::hal::cuda
