// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/client/infer.h"

#include <cstring>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {

[[noreturn]] void throw_from_device(ExceptionKind kind, const std::string& text) {
  switch (kind) {
    case ExceptionKind::kIndex: TORCH_CHECK_INDEX(false, text);
    case ExceptionKind::kValue: TORCH_CHECK_VALUE(false, text);
    case ExceptionKind::kType: TORCH_CHECK_TYPE(false, text);
    case ExceptionKind::kNotImplemented: TORCH_CHECK_NOT_IMPLEMENTED(false, text);
    case ExceptionKind::kLinAlg: TORCH_CHECK_LINALG(false, text);
    case ExceptionKind::kOutOfMemory: TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    default: TORCH_CHECK(false, text);
  }
}

std::shared_ptr<const Meta> infer(OpPlan& plan, CUfunction function, Encoder& e, bool captured) {
  plan.infers.fetch_add(1, std::memory_order_relaxed);
  const BlockHeader run = e.header();
  const CUstream stream = captured ? side_stream(e.device) : current_stream(e.device);
  const RelaxedScope relaxed;
  size_t bytes = ReplyBuffer::kBytes;
  for (;;) {
    ReplyBuffer reply(e.device, bytes);
    BlockHeader h = run;
    h.mode = Mode::kInfer;
    if (captured) h.flags |= kFlagBlank;
    h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
    h.reply_bytes = reply.size();
    e.set_header(h);
    std::memset(reply.data(), 0, sizeof(ReplyHeader));
    launch(function, stream, e.block);
    e.set_header(run);
    wait_submitted(e.device, stream);
    ReplyHeader head;
    std::memcpy(&head, reply.data(), sizeof head);
    TORCH_INTERNAL_ASSERT(head.total_bytes >= sizeof head, plan.name, ": the device did not answer");
    if (head.total_bytes > bytes) {
      bytes = head.total_bytes;
      continue;
    }
    Reader r(reply.data() + sizeof head, head.total_bytes - sizeof head);
    if (head.status == ReplyStatus::kException) {
      const size_t length = r.left();
      std::string text(reinterpret_cast<const char*>(r.bytes(length)), length);
      if (captured)
        text += " (" + plan.name +
                " was tried during CUDA graph capture, with made-up contents since nothing captured has "
                "run; where its arguments are right, run it once with these shapes before the capture)";
      throw_from_device(head.kind, text);
    }
    return read_meta(r);
  }
}

}  // namespace devproxy::aten
