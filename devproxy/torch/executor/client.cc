// SPDX-License-Identifier: Apache-2.0
#include "devproxy/torch/executor/client.h"

#include <ATen/ops/empty.h>

#include "devproxy/torch/executor/decode.h"

namespace devproxy::aten {
namespace {

constexpr uint32_t kStateMagic = 0x32535044;  // "DPS2"
constexpr size_t kMaxGenerators = 1 << 16, kMaxSettings = 1 << 16;

void check_reply(const devproxy_soft_services& services, uint64_t addr, uint64_t bytes) {
  if (bytes < sizeof(ReplyHeader) || services.check_range(services.cookie, addr, bytes) != 1)
    throw IllegalAddress("the reply buffer is not in live memory of this process");
}

// Answers with the numbers that f returns, or with the text of what torch throws.
template <class F>
void answer(const devproxy_soft_services& services, uint64_t addr, uint64_t bytes, F f) {
  check_reply(services, addr, bytes);
  Writer w;
  try {
    const std::vector<int64_t> numbers = f();
    w.put(ReplyHeader{0, ReplyStatus::kOk, ExceptionKind::kRuntime});
    for (const int64_t n : numbers) w.put(n);
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    w.put(ReplyHeader{0, ReplyStatus::kException, ExceptionKind::kRuntime});
    w.bytes(text.data(), text.size());
  }
  send_reply(addr, bytes, w);
}

// The state as torch gives it, and nothing of it is looked at here.
std::vector<uint8_t> bytes_of(const at::Generator& g) {
  const at::Tensor t = at::Tensor::wrap_tensor_impl(g.getIntrusivePtr()->get_state());
  const auto* p = static_cast<const uint8_t*>(t.const_data_ptr());
  return {p, p + t.nbytes()};
}

void restore(at::Generator& g, const uint8_t* p, size_t n) {
  at::Tensor t = at::empty({static_cast<int64_t>(n)}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(t.mutable_data_ptr(), p, n);
  std::lock_guard lock(g.mutex());
  g.set_state(t);
}

// Precondition: client.mu is held.
at::Generator& made(Client& client, uint64_t id) {
  at::Generator& g = client.generators[id];
  if (!g.defined()) {
    if (client.generators.size() > kMaxGenerators) throw Malformed("too many generators");
    g = device::new_generator(client);
  }
  return g;
}

}  // namespace

at::Generator generator_of(Client& client, uint64_t id) {
  std::lock_guard lock(client.mu);
  const auto it = client.generators.find(id);
  if (it == client.generators.end() && id != 0) throw Malformed("parameter block: no such generator");
  return it == client.generators.end() ? made(client, 0) : it->second;
}

Settings settings_of(Client& client, uint32_t number) {
  std::lock_guard lock(client.mu);
  const auto it = client.settings.find(number);
  if (it == client.settings.end()) throw Malformed("parameter block: no such settings");
  return it->second;
}

void set_settings(Client& client, Reader r) {
  const auto block = r.get<SettingsBlock>();
  Settings s;
  if (block.magic != kBlockMagic || block.number == 0 || block.bytes != sizeof s.bytes)
    throw Malformed("settings of another version");
  std::memcpy(s.bytes.data(), r.bytes(sizeof s.bytes), sizeof s.bytes);
  std::lock_guard lock(client.mu);
  if (client.settings.size() >= kMaxSettings) throw Malformed("too many settings");
  client.settings[block.number] = s;
}

void use_generator(Client& client, Reader r, const devproxy_soft_services& services) {
  const auto block = r.get<GeneratorBlock>();
  if (block.magic != kBlockMagic) throw Malformed("a generator's message of another version");
  std::lock_guard lock(client.mu);
  switch (block.what) {
    case GeneratorBlock::kSet: {
      at::Generator& g = made(client, block.id);
      std::lock_guard own(g.mutex());
      g.set_current_seed(block.seed);
      if (device::kKeepsGenerators) g.set_offset(block.offset);
      return;
    }
    case GeneratorBlock::kGet: {
      constexpr size_t kBytes = sizeof(ReplyHeader) + 16;
      check_reply(services, block.reply_addr, kBytes);
      at::Generator& g = made(client, block.id);
      std::lock_guard own(g.mutex());
      Writer w;
      w.put(ReplyHeader{kBytes, ReplyStatus::kOk, ExceptionKind::kRuntime});
      w.put(g.current_seed());
      w.put(device::kKeepsGenerators ? g.get_offset() : uint64_t{0});
      std::memcpy(reinterpret_cast<void*>(block.reply_addr), w.data(), w.size());
      return;
    }
    case GeneratorBlock::kCopy: {
      const std::vector<uint8_t> state = bytes_of(made(client, block.seed));
      restore(made(client, block.id), state.data(), state.size());
      return;
    }
    case GeneratorBlock::kForget:
      if (block.id != 0) client.generators.erase(block.id);
      return;
    default: throw Malformed("a generator's message of unknown kind");
  }
}

void send_reply(uint64_t addr, uint64_t bytes, Writer& w) {
  const uint64_t total = w.size();
  std::memcpy(w.at(offsetof(ReplyHeader, total_bytes)), &total, sizeof total);
  std::memcpy(reinterpret_cast<void*>(addr), w.data(), total <= bytes ? total : sizeof(ReplyHeader));
}

void tell_facts(Client& client, Reader r, const devproxy_soft_services& services) {
  const auto block = r.get<FactsBlock>();
  if (block.magic != kBlockMagic) throw Malformed("a question of another version");
  check_reply(services, block.reply_addr, block.reply_bytes);
  const std::string text = device::facts(client);
  Writer w;
  w.put(ReplyHeader{0, ReplyStatus::kOk, ExceptionKind::kRuntime});
  w.bytes(text.data(), text.size());
  send_reply(block.reply_addr, block.reply_bytes, w);
}

void tell_rnn_layout(Client& client, Reader r, const devproxy_soft_services& services) {
  const auto block = r.get<RnnBlock>();
  if (block.magic != kBlockMagic || block.weights == 0) throw Malformed("a question of another version");
  std::vector<std::vector<int64_t>> weights;
  for (uint32_t i = 0; i < block.weights; i++) {
    const auto dims = r.get<int64_t>();
    if (dims < 0 || dims > kMaxDims) throw Malformed("a weight has too many dimensions");
    auto& sizes = weights.emplace_back();
    for (int64_t d = 0; d < dims; d++) sizes.push_back(r.get<int64_t>());
  }
  answer(services, block.reply_addr, block.reply_bytes,
         [&] { return device::rnn_layout(client, block.form, weights); });
}

void use_plans(Client& client, Reader r, const devproxy_soft_services& services) {
  const auto block = r.get<PlansBlock>();
  if (block.magic != kBlockMagic || block.what > PlansBlock::kClear) throw Malformed("a question of another version");
  answer(services, block.reply_addr, block.reply_bytes, [&] {
    const int64_t value = device::plan_cache(client, static_cast<PlansBlock::What>(block.what), block.value);
    if (block.what == PlansBlock::kSetMaxSize) {
      std::lock_guard lock(client.mu);
      client.most_plans = block.value;
    }
    return std::vector{value};
  });
}

Writer& save_client(Client& client, Writer& w) {
  std::lock_guard lock(client.mu);
  w.clear();
  w.put(kStateMagic);
  w.put(static_cast<uint32_t>(device::kType));
  w.put(client.most_plans);
  w.put(static_cast<uint32_t>(client.settings.size()));
  for (const auto& [number, s] : client.settings) {
    w.put(number);
    w.bytes(s.bytes.data(), s.bytes.size());
  }
  w.put(static_cast<uint32_t>(client.generators.size()));
  for (const auto& [id, g] : client.generators) {
    const std::vector<uint8_t> state = bytes_of(g);
    w.put(id);
    w.put(g.current_seed());
    w.put(static_cast<uint32_t>(state.size()));
    w.bytes(state.data(), state.size());
  }
  return w;
}

void load_client(Client& client, Reader r) {
  std::unique_lock lock(client.mu);
  if (r.get<uint32_t>() != kStateMagic) throw Malformed("the executor's state is of another version");
  const bool same_kind = r.get<uint32_t>() == static_cast<uint32_t>(device::kType);
  const int64_t most_plans = client.most_plans = r.get<int64_t>();
  client.settings.clear();
  client.generators.clear();
  for (uint32_t n = r.count(4 + sizeof Settings::bytes); n > 0; n--) {
    const auto number = r.get<uint32_t>();
    Settings& s = client.settings[number];
    std::memcpy(s.bytes.data(), r.bytes(s.bytes.size()), s.bytes.size());
  }
  for (uint32_t n = r.count(20); n > 0; n--) {
    const auto id = r.get<uint64_t>();
    const auto seed = r.get<uint64_t>();
    const uint32_t bytes = r.count(1);
    const uint8_t* p = r.bytes(bytes);
    at::Generator& g = made(client, id);
    if (same_kind) {
      restore(g, p, bytes);
    } else {
      std::lock_guard own(g.mutex());
      g.set_current_seed(seed);  // another kind of GPU draws other numbers: from the seed's beginning
    }
  }
  if (r.left() != 0) throw Malformed("the executor's state has bytes left over");
  lock.unlock();
  if (most_plans >= 0) device::plan_cache(client, PlansBlock::kSetMaxSize, most_plans);
}

}  // namespace devproxy::aten
