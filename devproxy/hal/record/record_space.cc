// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/record/record_space.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "devproxy/csrc/base/json.h"

namespace devproxy::hal::record {

namespace {

// cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr uint32_t kMaxDynamicShared = 8, kAnyCluster = 14;
constexpr size_t kNamesShown = 4096;  // bytes of them in a line of load_module

// FNV-1a: tells images of one record apart, no more.
std::string digest(const uint8_t* bytes, size_t n) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 0x100000001b3;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

// By the numbers of cuda.h; with a cluster's size, which is what readers want to know.
OrderedJson attributes_json(const LaunchAttribute* list, size_t n) {
  OrderedJson all = OrderedJson::array();
  for (size_t i = 0; i < n; i++) {
    OrderedJson one{{"id", list[i].id}};
    if (list[i].id == kLaunchClusterDimension || list[i].id == kLaunchPreferredClusterDimension) {
      uint32_t size[3];
      std::memcpy(size, list[i].value, sizeof size);
      one["size"] = size;
    }
    all.push_back(std::move(one));
  }
  return all;
}

// As many names as a line shows.
OrderedJson kernels_json(const image::Facts& facts) {
  OrderedJson all = OrderedJson::array();
  size_t bytes = 0;
  for (const image::Kernel& k : facts.kernels) {
    if (bytes >= kNamesShown) break;
    bytes += k.name.size();
    all.push_back(k.name);
  }
  return all;
}

OrderedJson globals_json(const image::Facts& facts) {
  OrderedJson all = OrderedJson::array();
  size_t bytes = 0;
  for (const image::Global& g : facts.globals) {
    if (bytes >= kNamesShown) break;
    bytes += g.name.size();
    OrderedJson one{{"name", g.name}, {"bytes", g.bytes}};
    if (g.constant) one["constant"] = true;
    if (g.managed) one["managed"] = true;
    if (g.holds_addresses) one["holds_addresses"] = true;
    all.push_back(std::move(one));
  }
  return all;
}

const char* kind_of(const CopyArgs& args) {
  if (args.dst_device) return args.src_device ? "DtoD" : "HtoD";
  return args.src_device ? "DtoH" : "HtoH";
}

}  // namespace

uint32_t RecordSpace::index_of(const QueueRef& queue) const {
  const auto it = queues_.find(queue.get());
  return it == queues_.end() ? 0 : it->second;
}

uint64_t RecordSpace::id_of(const EventRef& event) const {
  const auto it = events_.find(event.get());
  return it == events_.end() ? 0 : it->second;
}

// -- memory ---------------------------------------------------------------------------------------------------------

Status RecordSpace::commit(uint64_t addr, uint64_t bytes, bool stable) {
  line("alloc", [&](Line& l) { l.add("addr", addr).add("bytes", bytes); });
  return inner_->commit(addr, bytes, stable);
}

void RecordSpace::release(uint64_t addr, uint64_t bytes) {
  line("free", [&](Line& l) { l.add("addr", addr).add("bytes", bytes); });
  inner_->release(addr, bytes);
}

void RecordSpace::reuse(uint64_t addr, uint64_t bytes) {
  line("free", [&](Line& l) { l.add("addr", addr).add("bytes", bytes); });
  inner_->reuse(addr, bytes);
}

void RecordSpace::tidy() {
  recorder_.flush();
  inner_->tidy();
}

void RecordSpace::host_allocated(uint64_t addr, uint64_t bytes) {
  line("host_alloc", [&](Line& l) { l.add("addr", addr).add("bytes", bytes); });
  inner_->host_allocated(addr, bytes);
}

// -- queues and commands --------------------------------------------------------------------------------------------

QueueRef RecordSpace::create_queue(QueueKind kind, int32_t priority, uint32_t index) {
  QueueRef queue = inner_->create_queue(kind, priority, index);
  queues_[queue.get()] = index;
  line("create_queue", [&](Line& l) {
    const char* const kKinds[] = {"legacy", "blocking", "non-blocking"};
    l.add("stream", index).add("kind", kKinds[static_cast<size_t>(kind)]).add("priority", priority);
  });
  return queue;
}

void RecordSpace::destroy_queue(const QueueRef& queue) {
  line("destroy_queue", [&](Line& l) { l.add("stream", index_of(queue)); });
  inner_->destroy_queue(queue);
  queues_.erase(queue.get());
}

Status RecordSpace::set_queue_attribute(const QueueRef& queue, Ticket ticket, const LaunchAttribute& a) {
  uint64_t value[4];
  std::memcpy(value, a.value, sizeof value);
  line("set_queue_attribute", [&](Line& l) {
    l.add("stream", index_of(queue)).add("attribute", a.id);
    if (a.id == kLaunchAccessPolicyWindow)
      l.add("addr", value[0]).add("bytes", value[1]);
    else
      l.add("value", value[0]);
  });
  return inner_->set_queue_attribute(queue, ticket, a);
}

Status RecordSpace::reset_persisting_l2() {
  line("reset_persisting_l2", [](Line&) {});
  return inner_->reset_persisting_l2();
}

void RecordSpace::copy(const QueueRef& queue, Ticket ticket, const CopyArgs& args) {
  line("copy", [&](Line& l) {
    l.add("stream", index_of(queue)).add("kind", kind_of(args)).add("bytes", args.width_bytes * args.height);
    if (args.height != 1) l.add("rows", args.height).add("dst_pitch", args.dst_pitch).add("src_pitch", args.src_pitch);
    if (args.dst_device) l.add("dst", args.dst);
    if (args.src_device) l.add("src", args.src);
  });
  inner_->copy(queue, ticket, args);
}

StatusOr<ArrayRef> RecordSpace::create_array(const ArrayShape& s) {
  line("create_array", [&](Line& l) {
    l.add("width", s.width).add("height", s.height).add("depth", s.depth).add("format", s.format);
    l.add("channels", s.channels).add("flags", s.flags);
  });
  return inner_->create_array(s);
}

void RecordSpace::copy_array(const QueueRef& queue, Ticket ticket, const ArrayCopy& a) {
  line("copy_array", [&](Line& l) {
    auto side = [](const ArrayCopy::Side& s) { return s.array ? "A" : s.device ? "D" : "H"; };
    l.add("stream", index_of(queue)).add("kind", std::string(side(a.src)) + "to" + side(a.dst));
    l.add("width", a.width_bytes).add("rows", a.rows).add("slices", a.slices);
  });
  inner_->copy_array(queue, ticket, a);
}

// Kernels are not executed, so nobody looks behind the number.
StatusOr<TextureRef> RecordSpace::create_texture(const TextureArgs& a, const ArrayRef& array) {
  struct RecordTexture final : Texture {
    ArrayRef array;
  };
  auto texture = std::make_shared<RecordTexture>();
  texture->value = next_texture_++;
  texture->array = array;
  line("create_texture", [&](Line& l) {
    const char* const kKinds[] = {"texture", "surface"};
    l.add("kind", kKinds[a.kind]).add("value", texture->value).add("resource", a.resource);
  });
  return TextureRef(texture);
}

void RecordSpace::memset(const QueueRef& queue, Ticket ticket, const MemsetArgs& args) {
  line("memset", [&](Line& l) {
    l.add("stream", index_of(queue)).add("dst", args.dst).add("value", args.value).add("width", args.width);
    l.add("count", args.count);
    if (args.rows != 1) l.add("rows", args.rows).add("pitch", args.pitch);
  });
  inner_->memset(queue, ticket, args);
}

void RecordSpace::host_function(const QueueRef& queue, Ticket ticket, uint64_t token) {
  line("host_function", [&](Line& l) { l.add("stream", index_of(queue)).add("token", token); });
  inner_->host_function(queue, ticket, token);
}

void RecordSpace::launch(const QueueRef& queue, Ticket ticket, const FunctionRef& ref, const LaunchArgs& args) {
  const auto& function = static_cast<const RecordFunction&>(*ref);
  const std::string wrong = why_not(function, args, properties_.attributes);
  line("launch", [&](Line& l) {
    l.add("stream", index_of(queue)).add("function", function.kernel.name).add("module", function.module_id);
    l.add("grid", args.grid).add("block", args.block).add("shared", args.shared_bytes);
    l.add("params", uint64_t{args.params_bytes});
    if (args.n_attributes) l.add("attributes", attributes_json(args.attributes, args.n_attributes));
    if (!wrong.empty()) l.add("refused", wrong);
  });
  if (wrong.empty() || faulted_) return inner_->nop(queue, ticket);
  fail(queue, ticket, kLaunchFailed,
       "the recording GPU refuses the launch of kernel '" + function.kernel.name + "': " + wrong);
}

void RecordSpace::fail(const QueueRef& queue, Ticket ticket, int32_t result, const std::string& text) {
  line("fault", [&](Line& l) { l.add("result", result).add("text", text); });
  recorder_.flush();
  restore_fault(result);
  owner_.on_fault(result, text.c_str());
  inner_->nop(queue, ticket);
}

void RecordSpace::restore_fault(int32_t result) {
  faulted_ = true;
  inner_->restore_fault(result);
}

// -- events ---------------------------------------------------------------------------------------------------------

EventRef RecordSpace::create_event(bool timed) {
  EventRef event = inner_->create_event(timed);
  events_[event.get()] = next_event_;
  line("create_event", [&](Line& l) { l.add("event", next_event_).add("timed", timed); });
  next_event_++;
  return event;
}

void RecordSpace::record(const QueueRef& queue, Ticket ticket, const EventRef& event) {
  line("record", [&](Line& l) { l.add("stream", index_of(queue)).add("event", id_of(event)); });
  inner_->record(queue, ticket, event);
}

void RecordSpace::wait(const QueueRef& queue, Ticket ticket, const EventRef& event) {
  line("wait", [&](Line& l) { l.add("stream", index_of(queue)).add("event", id_of(event)); });
  inner_->wait(queue, ticket, event);
}

// -- modules --------------------------------------------------------------------------------------------------------

StatusOr<ModuleRef> RecordSpace::load_module(const uint8_t* image, size_t image_bytes, const PlaceGlobal& place) {
  auto module = RecordModule::load(image, image_bytes, arch_, place, [this](uint64_t addr, const void* from, size_t n) {
    return inner_->write(addr, from, n);
  });
  if (module.ok()) (*module)->id = next_module_++;
  line("load_module", [&](Line& l) {
    l.add("bytes", uint64_t{image_bytes}).add("image", digest(image, image_bytes));
    if (!module.ok()) return void(l.add("refused", module.status().text()));
    const image::Facts& facts = (*module)->facts();
    l.add("module", (*module)->id).add("taken", facts.arch.text(facts.is_ptx ? "compute_" : "sm_"));
    l.add("n_kernels", uint64_t{facts.kernels.size()}).add("kernels", kernels_json(facts));
    l.add("globals", globals_json(facts));
  });
  if (!module.ok()) return std::move(module).status();
  return ModuleRef(*module);
}

StatusOr<std::vector<std::string>> RecordSpace::function_names(const ModuleRef& ref) {
  auto module = std::static_pointer_cast<RecordModule>(ref);
  std::vector<std::string> names;
  for (const image::Kernel& kernel : module->facts().kernels) names.push_back(kernel.name);
  line("function_names", [&](Line& l) { l.add("module", module->id).add("n_kernels", uint64_t{names.size()}); });
  return names;
}

StatusOr<FunctionRef> RecordSpace::get_function(const ModuleRef& ref, const std::string& name, FunctionInfo* info) {
  auto module = std::static_pointer_cast<RecordModule>(ref);
  const image::Kernel* kernel = module->kernel(name);
  line("get_function", [&](Line& l) {
    l.add("module", module->id).add("function", name);
    if (!kernel) return void(l.add("refused", "the image has no such kernel"));
    OrderedJson params = OrderedJson::array();
    for (const image::Param& p : kernel->params) params.push_back({p.offset_bytes, p.size_bytes});
    l.add("params", std::move(params)).add("params_bytes", kernel->params_bytes).add("regs", kernel->regs);
    l.add("static_shared", kernel->shared_bytes).add("local", kernel->local_bytes).add("const", kernel->const_bytes);
    if (kernel->max_threads) l.add("max_threads", kernel->max_threads);
    if (kernel->block[0]) l.add("required_block", kernel->block);
    if (kernel->needs_cluster) l.add("cluster", kernel->cluster);
    if (kernel->grid_sync) l.add("grid_sync", true);
    if (kernel->calls_printf) l.add("printf", true);
    if (kernel->calls_malloc) l.add("malloc", true);
  });
  if (!kernel) return Status(kNotFound, "the module has no kernel '" + name + "'");
  auto function = std::make_shared<RecordFunction>();
  function->module = module;
  function->module_id = module->id;
  function->kernel = *kernel;
  function->max_threads = threads_by_registers(kernel->regs);
  if (kernel->max_threads) function->max_threads = std::min(function->max_threads, kernel->max_threads);
  function->max_dynamic_shared = kSharedWithoutOptin - std::min(kSharedWithoutOptin, kernel->shared_bytes);
  info->max_threads = function->max_threads;
  info->shared_bytes = kernel->shared_bytes;
  info->attributes = function_attributes(*function, module->facts(), arch_);
  info->regs = static_cast<uint32_t>(info->attributes[cuda_number::CU_FUNC_ATTRIBUTE_NUM_REGS]);
  info->params.clear();
  for (const image::Param& p : kernel->params) info->params.push_back({p.offset_bytes, p.size_bytes});
  return FunctionRef(function);
}

StatusOr<Space::Global> RecordSpace::get_global(const ModuleRef& ref, const std::string& name) {
  const auto& module = static_cast<const RecordModule&>(*ref);
  const auto it = module.globals().find(name);
  const bool found = it != module.globals().end();
  line("get_global", [&](Line& l) {
    l.add("module", module.id).add("name", name);
    if (!found) return void(l.add("refused", "the image has no such variable"));
    l.add("bytes", it->second.place.bytes).add("addr", it->second.place.addr);
  });
  if (!found) return Status(kNotFound, "the module has no variable '" + name + "'");
  if (it->second.managed) return Status(kNotSupported, "variable '" + name + "' is __managed__, which is refused");
  return it->second.place;
}

std::vector<Space::Global> RecordSpace::globals(const ModuleRef& ref) {
  std::vector<Global> all;
  // In the order in which they were placed: a restore gives the addresses back in it.
  const auto& module = static_cast<const RecordModule&>(*ref);
  for (const image::Global& global : module.facts().globals)
    if (const auto it = module.globals().find(global.name); it != module.globals().end() && it->second.place.addr)
      all.push_back(it->second.place);
  return all;
}

Status RecordSpace::set_attribute(const FunctionRef& ref, uint32_t attribute, int32_t value) {
  auto& function = static_cast<RecordFunction&>(*ref);
  const int64_t most = int64_t{properties_.attributes[kSharedOptinAttribute]} - function.kernel.shared_bytes;
  const bool fits = attribute != kMaxDynamicShared || (value >= 0 && value <= most);
  line("set_attribute", [&](Line& l) {
    l.add("function", function.kernel.name).add("attribute", attribute).add("value", value);
    if (!fits) l.add("refused", "more shared memory than a block can have");
  });
  if (!fits)
    return {kInvalidValue, "function '" + function.kernel.name + "' cannot have " + std::to_string(value) +
                               " bytes of dynamic shared memory"};
  if (attribute == kMaxDynamicShared) function.max_dynamic_shared = static_cast<uint32_t>(value);
  if (attribute == kAnyCluster) function.any_cluster = value != 0;
  return {};
}

// As the chip's documents have it: 48 K of shared memory more or less is what programs size their grids by. Clusters
// are counted as if they could lie anywhere; a real chip has fewer places for large ones.
StatusOr<int64_t> RecordSpace::occupancy(const FunctionRef& ref, const OccupancyQuery& query) {
  const auto& function = static_cast<const RecordFunction&>(*ref);
  const auto& attributes = properties_.attributes;
  const uint64_t threads = uint64_t{query.block[0]} * query.block[1] * query.block[2];
  StatusOr<int64_t> answer = int64_t{0};
  uint32_t cluster[3];
  const auto cluster_blocks =
      static_cast<int64_t>(cluster_of(function, query.attributes, query.n_attributes, &cluster));
  switch (query.kind) {
    case OccupancyKind::kActiveBlocks: answer = active_blocks(function, threads, query.shared_bytes, attributes); break;
    case OccupancyKind::kAvailableShared: {
      if (query.grid[0] == 0 || active_blocks(function, threads, 0, attributes) < query.grid[0]) {
        answer = Status(kInvalidValue, "so many blocks do not fit a multiprocessor");
        break;
      }
      const int64_t each = attributes[kSharedPerMultiprocessor] / static_cast<int64_t>(query.grid[0]) / 128 * 128 -
                           attributes[kSystemSharedPerBlock];
      const int64_t most = std::min<int64_t>(each, attributes[kSharedOptinAttribute]);
      answer = std::max<int64_t>(0, most - function.kernel.shared_bytes);
      break;
    }
    case OccupancyKind::kActiveClusters:
      answer = int64_t{active_blocks(function, threads, query.shared_bytes, attributes)} *
               attributes[kMultiprocessors] / cluster_blocks;
      break;
    case OccupancyKind::kMaxClusterSize: answer = int64_t{function.any_cluster ? 16 : 8}; break;
  }
  line("occupancy", [&](Line& l) {
    l.add("function", function.kernel.name).add("kind", static_cast<uint32_t>(query.kind)).add("threads", threads);
    l.add("shared", query.shared_bytes);
    if (answer.ok()) l.add("answer", *answer);
  });
  return answer;
}

Status RecordSpace::set_limit(uint32_t limit, uint64_t value) {
  line("set_limit", [&](Line& l) { l.add("limit", limit).add("value", value); });
  return inner_->set_limit(limit, value);
}

void RecordSpace::stop() {
  inner_->stop();
  line("stop", [](Line&) {});
  recorder_.flush();
}

}  // namespace devproxy::hal::record
