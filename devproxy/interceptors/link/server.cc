// SPDX-License-Identifier: Apache-2.0
// Linking and tensor maps, the server's half: functions of their arguments.
#include <algorithm>
#include <cstring>
#include <string>

#include "devproxy/csrc/args/link.h"
#include "devproxy/csrc/server/handlers.h"
#include "devproxy/csrc/wire/link.h"

namespace devproxy::server::link {

namespace {

// Reads the parts of a LINK one after the other; nothing behind the end.
class Parts {
 public:
  Parts(const uint8_t* at, size_t bytes) : at_(at), left_(bytes) {}
  // nullptr where so much is not left.
  const uint8_t* take(uint64_t bytes) {
    if (bytes > left_) return nullptr;
    const uint8_t* const here = at_;
    const size_t padded = std::min<size_t>(left_, (static_cast<size_t>(bytes) + 7) & ~size_t{7});
    at_ += padded;
    left_ -= padded;
    return here;
  }
  template <class T>
  bool read(T* to) {
    const uint8_t* const from = take(sizeof(T));
    if (from) std::memcpy(to, from, sizeof(T));
    return from != nullptr;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

bool read_inputs(const Message& m, std::vector<LinkOption>* options, std::vector<hal::LinkInput>* inputs) {
  Parts parts(m.bulk, m.bulk_bytes);
  LinkHead head;
  if (!parts.read(&head) || head.n_options > kMaxLinkOptions || head.n_inputs > kMaxLinkInputs) return false;
  options->resize(head.n_options);
  for (LinkOption& option : *options)
    if (!parts.read(&option)) return false;
  for (uint32_t i = 0; i < head.n_inputs; i++) {
    LinkInputHead input;
    if (!parts.read(&input)) return false;
    const uint8_t* const name = parts.take(input.name_bytes);
    const uint8_t* const data = name ? parts.take(input.data_bytes) : nullptr;
    if (!data || input.data_bytes == 0) return false;
    inputs->push_back({input.type, std::string(reinterpret_cast<const char*>(name), input.name_bytes), data,
                       static_cast<size_t>(input.data_bytes)});
  }
  return true;
}

}  // namespace

void link(Connection& c, const Message& m) {
  std::vector<LinkOption> options;
  std::vector<hal::LinkInput> inputs;
  if (!read_inputs(m, &options, &inputs)) return c.reply(m, kInvalidValue);
  hal::LinkOutput out;
  const Status s = c.device().link(options, inputs, &out);
  if (s.code() == kNotSupported) return c.fail(m, s);
  // A failure is an answer: its text belongs into the caller's log buffer.
  c.state().link_image() = std::move(out.image);
  uint8_t reply[sizeof ReplySlot::data];
  wire::LINK_rep rep{};
  const size_t room = (sizeof reply - sizeof rep) / 2;
  out.info.resize(std::min(out.info.size(), room));
  out.error.resize(std::min(out.error.size(), room));
  rep.result = s.code();
  rep.image_bytes = c.state().link_image().size();
  rep.info_bytes = static_cast<uint32_t>(out.info.size());
  rep.error_bytes = static_cast<uint32_t>(out.error.size());
  std::memcpy(reply, &rep, sizeof rep);
  std::memcpy(reply + sizeof rep, out.info.data(), out.info.size());
  std::memcpy(reply + sizeof rep + out.info.size(), out.error.data(), out.error.size());
  c.reply(m, kOk, reply, sizeof rep + out.info.size() + out.error.size());
}

// A part of the image that was linked last, into a chunk of the client's. After a restore there is none: it links
// again.
void link_fetch(Connection& c, const Message& m) {
  const auto& r = m.as<wire::LINK_FETCH_req>();
  if (r.chunk >= kChunks || r.bytes == 0 || r.bytes > kChunkBytes) return c.reply(m, kInvalidValue);
  if (r.offset > c.state().link_image().size() || r.bytes > c.state().link_image().size() - r.offset)
    return c.reply(m, kNotFound);
  std::memcpy(c.endpoint().view().chunk(r.chunk), c.state().link_image().data() + r.offset, r.bytes);
  if (r.offset + r.bytes == c.state().link_image().size()) c.state().link_image() = {};
  c.reply(m, kOk);
}

void tensor_map(Connection& c, const Message& m) {
  TensorMapArgs args;
  if (m.bulk_bytes != sizeof args) return c.reply(m, kInvalidValue);
  std::memcpy(&args, m.bulk, sizeof args);
  if (args.kind > static_cast<uint32_t>(TensorMapKind::kReplaceAddress) || args.rank > kTensorRank)
    return c.reply(m, kInvalidValue);
  uint8_t map[kTensorMapBytes] = {};
  if (Status s = c.device().tensor_map(args, map); !s.ok()) return c.fail(m, s);
  c.reply(m, kOk, map, sizeof map);
}

}  // namespace devproxy::server::link
