// Executor modules: shared objects that carry a table devproxy_soft_module (see include/devproxy_soft_module.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "devproxy/hal/hal.h"
#include "devproxy/hal/soft/include/devproxy_soft_module.h"

namespace devproxy::hal::soft {

class SoftModule final : public Module {
 public:
  static StatusOr<std::shared_ptr<SoftModule>> load(const uint8_t* image, size_t image_bytes, uint32_t ordinal,
                                                    const PlaceGlobal& place);
  ~SoftModule() override;

  struct PlacedGlobal {
    std::string name;
    Space::Global place;
  };
  const devproxy_soft_module_table* table() const { return table_; }
  const std::vector<PlacedGlobal>& globals() const { return globals_; }
  // Closed by nullptr; nullptr where the module does not list them.
  const char* const* function_names() const { return function_names_; }

 private:
  int fd_ = -1;
  void* library_ = nullptr;
  std::string path_;
  const devproxy_soft_module_table* table_ = nullptr;
  const char* const* function_names_ = nullptr;
  std::vector<PlacedGlobal> globals_;
};

struct SoftFunction final : Function {
  std::shared_ptr<SoftModule> module;  // keeps the code mapped while a command may still run it
  std::string name;
  devproxy_soft_function entry{};
};

}  // namespace devproxy::hal::soft
