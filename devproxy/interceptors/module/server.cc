// SPDX-License-Identifier: Apache-2.0
// Modules and functions, the server's half.
#include <algorithm>
#include <cstring>

#include "cuda_number.gen.h"
#include "devproxy/csrc/base/log.h"
#include "devproxy/csrc/server/handlers.h"

namespace devproxy::server::module {

namespace {

constexpr size_t kMaxNameBytes = 4096;
constexpr uint64_t kGlobalAlign = 256;
using namespace cuda_number;

void drop_global(Connection& c, uint64_t addr, uint64_t position) {
  const bool idle = c.device().idle();
  Range freed;
  if (c.memory().drop_global(addr, position, !idle, &freed) != MemoryMirror::Answer::kOk) return;
  if (idle) c.device().release(freed.addr, freed.bytes);
}

// Device memory for one global, from the server's piece at the top of the range; 0 where there is none.
uint64_t place_global(Connection& c, uint64_t bytes) {
  if (bytes == 0 || bytes > kGlobalsBytes) return 0;
  uint64_t addr;
  if (c.state().replaying().globals.empty()) {
    addr = c.memory().gap_for_global(bytes, kGlobalAlign);
  } else {
    addr = c.state().replaying().globals.front();
    c.state().replaying().globals.erase(c.state().replaying().globals.begin());
  }
  if (!addr || !c.memory().add_global(addr, bytes)) return 0;
  if (!c.device().commit(addr, bytes, false).ok()) {
    drop_global(c, addr, 0);
    return 0;
  }
  return addr;
}

// The variables that the device placed. One that is listed is dumped, whether anybody ever asks for it or not, since
// kernels write to it.
void note_variables(Connection& c, VHandle module, const hal::ModuleRef& loaded) {
  auto found = c.device().variables(loaded);
  if (!found.ok()) {
    c.state().obstacles().set(
        module, "the variables of one of its modules cannot be listed, so their contents would be lost: " +
                    found.status().text());
    return;
  }
  for (const auto& v : *found) c.memory().variables()[v.addr] = {v.bytes, module, v.name, false};
}

void count_modules(Connection& c) {
  uint64_t machine_code = 0;
  c.state().modules().for_each(
      [&](VHandle, const hal::ModuleRef& module) { machine_code += !c.device().portable(module); });
  c.counting().machine_code.store(machine_code, std::memory_order_relaxed);
  c.counting().modules.store(c.state().modules().size(), std::memory_order_relaxed);
}

// The name in the bulk data; false where it is no name.
bool name_of(const Message& m, std::string* name) {
  if (m.bulk_bytes == 0 || m.bulk_bytes > kMaxNameBytes) return false;
  name->assign(reinterpret_cast<const char*>(m.bulk), m.bulk_bytes);
  if (name->back() == 0) name->pop_back();
  return !name->empty() && name->find('\0') == std::string::npos;
}

}  // namespace

void image_put(Connection& c, const Message& m) {
  const auto& r = m.as<wire::IMAGE_PUT_req>();
  if (r.bytes == 0 || r.bytes > kMaxImageBytes || m.bulk_bytes == 0 || r.offset > r.bytes ||
      m.bulk_bytes > r.bytes - r.offset)
    return c.fail(m, kInvalidValue);
  ImageStore& store = c.parts().images;
  store.received_bytes.fetch_add(m.bulk_bytes, std::memory_order_relaxed);
  // Held until it is loaded, or the next one comes.
  if (auto image = c.state().upload().piece(store, {r.hash_low, r.hash_high}, r.bytes, r.offset, m.bulk, m.bulk_bytes))
    c.state().uploaded() = std::move(image);
}

bool module_load(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MODULE_LOAD_req>();
  if (r.module.kind() != HandleKind::kModule || c.state().modules().find(r.module))
    return c.reply(m, kInvalidHandle), false;
  ImageStore& store = c.parts().images;
  const ImageStore::Ref image = store.find({r.hash_low, r.hash_high});
  wire::MODULE_LOAD_rep rep{};
  if (!image) return c.reply(m, kOk, &rep, sizeof rep), false;
  if (image->bytes.size() != r.bytes) {
    DP_LOG(kWarn, kModule, c.number(), "module of %lu bytes refused: the image of that hash has %zu",
           static_cast<unsigned long>(r.bytes), image->bytes.size());
    return c.reply(m, kInvalidValue), false;
  }
  store.loads.fetch_add(1, std::memory_order_relaxed);
  if (c.state().uploaded() != image) store.loads_known.fetch_add(1, std::memory_order_relaxed);
  c.state().uploaded().reset();
  std::vector<uint64_t> placed;
  auto loaded = c.device().load_module(image->bytes.data(), image->bytes.size(), [&](uint64_t bytes) {
    const uint64_t addr = place_global(c, bytes);
    if (addr) placed.push_back(addr);
    return addr;
  });
  if (!loaded.ok()) {
    for (uint64_t addr : placed) drop_global(c, addr, m.end);
    return c.fail(m, loaded.status()), false;
  }
  if (!c.state().modules().insert(r.module, *loaded)) return c.reply(m, kInvalidHandle), false;
  c.state().replay().keep(image);
  note_variables(c, r.module, *loaded);
  count_modules(c);
  const bool prints = c.device().prints(*loaded);
  if (prints) c.state().output().expected = true;
  rep.known = 1;
  rep.prints = prints;
  c.reply(m, kOk, &rep, sizeof rep);
  return true;
}

bool module_unload(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MODULE_UNLOAD_req>();
  const hal::ModuleRef* module = c.state().modules().find(r.module);
  if (!module) return c.fail(m, kInvalidHandle), false;
  for (const auto& global : c.device().globals(*module)) drop_global(c, global.addr, m.end);
  std::erase_if(c.memory().variables(), [&](const auto& item) {
    if (item.second.module != r.module) return false;
    c.state().texture_memory_gone(item.first, item.second.bytes);
    return true;
  });
  c.state().obstacles().set(r.module, {});
  c.state().functions().erase_if([&](VHandle function, const FunctionObject& f) {
    if (f.module != r.module) return false;
    c.state().obstacles().set(function, {});
    return true;
  });
  if (!c.state().modules().erase(r.module)) return c.fail(m, kInvalidHandle), false;
  count_modules(c);
  return true;
}

bool function_get(Connection& c, const Message& m) {
  const auto& r = m.as<wire::FUNCTION_GET_req>();
  const hal::ModuleRef* module = c.state().modules().find(r.module);
  if (!module || r.function.kind() != HandleKind::kFunction || c.state().functions().find(r.function))
    return c.reply(m, kInvalidHandle), false;
  std::string name;
  if (!name_of(m, &name)) return c.reply(m, kInvalidValue), false;
  hal::FunctionInfo info;
  auto function = c.device().get_function(*module, name, &info);
  if (!function.ok()) return c.reply(m, function.status().code()), false;

  if (info.attributes.empty()) {
    info.attributes.assign(CU_FUNC_ATTRIBUTE_MAX, hal::kNoAttribute);
    info.attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = static_cast<int32_t>(info.max_threads);
    info.attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES] = static_cast<int32_t>(info.shared_bytes);
    info.attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = static_cast<int32_t>(info.regs);
  }
  const wire::FUNCTION_GET_rep fixed{static_cast<uint32_t>(info.params.size()),
                                     info.max_threads,
                                     info.shared_bytes,
                                     info.regs,
                                     static_cast<uint32_t>(info.attributes.size()),
                                     0};
  std::vector<uint8_t> rep(sizeof fixed + info.attributes.size() * sizeof(int32_t) +
                           info.params.size() * sizeof(hal::ParamPlace));
  if (rep.size() > sizeof ReplySlot::data) return c.reply(m, kInvalidImage), false;
  uint8_t* to = rep.data();
  auto put = [&](const void* from, size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
    to += bytes;
  };
  put(&fixed, sizeof fixed);
  put(info.attributes.data(), info.attributes.size() * sizeof(int32_t));
  put(info.params.data(), info.params.size() * sizeof(hal::ParamPlace));
  uint32_t params_bytes = 0;
  for (const hal::ParamPlace& p : info.params) {
    uint32_t end;
    if (__builtin_add_overflow(p.offset_bytes, p.size_bytes, &end)) return c.reply(m, kInvalidImage), false;
    params_bytes = std::max(params_bytes, end);
  }
  if (!c.state().functions().insert(r.function, {*function, r.module, info.max_threads, params_bytes}))
    return c.reply(m, kInvalidHandle), false;
  if (info.uses_heap)
    c.state().obstacles().set(
        r.function,
        "its kernel '" + name + "' allocates with malloc() on the device, and a checkpoint does not hold that heap");
  c.reply(m, kOk, rep.data(), rep.size());
  return true;
}

void module_global(Connection& c, const Message& m) {
  const auto& r = m.as<wire::MODULE_GLOBAL_req>();
  const hal::ModuleRef* module = c.state().modules().find(r.module);
  if (!module) return c.reply(m, kInvalidHandle);
  std::string name;
  if (!name_of(m, &name)) return c.reply(m, kInvalidValue);
  auto global = c.device().get_global(*module, name);
  if (!global.ok()) return c.fail(m, global.status());
  const bool placed = c.memory().device().contains(global->addr, global->bytes, m.end);
  if (!placed && global->bytes) {
    VariableObject& v = c.memory().variables()[global->addr];
    v = {global->bytes, r.module, name, true};
  }
  const wire::MODULE_GLOBAL_rep rep{global->addr, global->bytes};
  c.reply(m, kOk, &rep, sizeof rep);
}

void function_names(Connection& c, const Message& m) {
  const auto& r = m.as<wire::FUNCTION_NAMES_req>();
  const hal::ModuleRef* module = c.state().modules().find(r.module);
  if (!module) return c.reply(m, kInvalidHandle);
  auto names = c.device().function_names(*module);
  if (!names.ok()) return c.fail(m, names.status());
  uint8_t reply[sizeof ReplySlot::data];
  wire::FUNCTION_NAMES_rep rep{static_cast<uint32_t>(names->size()), 0};
  size_t at = sizeof rep;
  for (size_t i = r.first; i < names->size() && at + (*names)[i].size() + 1 <= sizeof reply; i++, rep.n++) {
    std::memcpy(reply + at, (*names)[i].c_str(), (*names)[i].size() + 1);
    at += (*names)[i].size() + 1;
  }
  if (rep.n == 0 && r.first < rep.all)
    return c.fail(m, {kNotSupported, "kernel " + std::to_string(r.first) + " of the module has a name of " +
                                         std::to_string((*names)[r.first].size()) +
                                         " bytes, more than an answer holds: ask for kernels by name"});
  std::memcpy(reply, &rep, sizeof rep);
  c.reply(m, kOk, reply, at);
}

bool function_set_attr(Connection& c, const Message& m) {
  const auto& r = m.as<wire::FUNCTION_SET_ATTR_req>();
  auto* object = c.state().functions().find(r.function);
  if (!object) return c.fail(m, kInvalidHandle), false;
  if (Status s = c.device().set_attribute(object->function, r.attr, r.value); !s.ok()) return c.fail(m, s), false;
  return true;
}

}  // namespace devproxy::server::module
