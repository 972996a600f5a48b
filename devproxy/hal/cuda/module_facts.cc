// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/cuda/module_facts.h"

#include <string_view>
#include <utility>

#include "devproxy/hal/image/image.h"

namespace devproxy::hal::cuda {

StatusOr<ModuleFacts> facts_of(const uint8_t* image, size_t bytes, uint32_t major, uint32_t minor) {
  auto parsed = image::parse_for(image, bytes, {major, minor, 0});
  if (!parsed.ok()) return std::move(parsed).status();
  ModuleFacts facts;
  // A function that was not inlined may be the one that prints: its name in plain sight is enough.
  facts.prints =
      std::string_view(reinterpret_cast<const char*>(image), bytes).find("vprintf") != std::string_view::npos;
  for (const image::Global& global : parsed->globals) {
    if (global.managed) facts.managed = global.name;
    facts.variables.push_back(global.name);
  }
  for (const image::Kernel& kernel : parsed->kernels) {
    facts.prints = facts.prints || kernel.calls_printf;
    if (kernel.calls_malloc) facts.heap_kernels.insert(kernel.name);
  }
  return facts;
}

}  // namespace devproxy::hal::cuda
