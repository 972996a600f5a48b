// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/image/image.h"

#include <algorithm>
#include <tuple>

namespace devproxy::hal::image {

std::string Arch::text(const char* prefix) const {
  std::string s = prefix + std::to_string(major * 10 + minor);
  if (variant) s += variant;
  return s;
}

bool runs_elf(const Arch& code, const Arch& device) {
  if (code.variant == 'a') return code.major == device.major && code.minor == device.minor;
  return code.major == device.major && code.minor <= device.minor;
}

bool runs_ptx(const Arch& code, const Arch& device) {
  if (code.variant) return runs_elf(code, device);
  return std::tuple(code.major, code.minor) <= std::tuple(device.major, device.minor);
}

const Kernel* Facts::kernel(std::string_view name) const {
  const auto it = std::find_if(kernels.begin(), kernels.end(), [&](const Kernel& k) { return k.name == name; });
  return it == kernels.end() ? nullptr : &*it;
}

StatusOr<Facts> parse_for(const uint8_t* image, size_t bytes, const Arch& device) {
  auto form = check_whole(image, bytes);
  if (!form.ok()) return std::move(form).status();
  auto cannot = [&](const std::string& what) {
    return Status(kNoBinaryForGpu, what + "; this device is " + device.text("sm_"));
  };
  if (*form == Form::kCubin) {
    auto facts = parse_cubin(image, bytes);
    if (facts.ok() && !runs_elf(facts->arch, device)) return cannot("the cubin is for " + facts->arch.text("sm_"));
    return facts;
  }
  if (*form == Form::kText) {
    auto facts = parse_ptx({reinterpret_cast<const char*>(image), bytes}, device);
    if (facts.ok() && !runs_ptx(facts->arch, device)) return cannot("the PTX is for " + facts->arch.text("sm_"));
    return facts;
  }
  auto entries = fatbin_entries(image, bytes);
  if (!entries.ok()) return std::move(entries).status();
  const Entry* best = nullptr;
  std::string have;
  auto rank = [](const Entry& e) {
    return std::tuple(e.kind == EntryKind::kElf, e.arch.major, e.arch.minor, e.arch.variant != 0);
  };
  for (const Entry& e : *entries) {
    const bool elf = e.kind == EntryKind::kElf;
    if (have.size() < 500) have += (have.empty() ? "" : " ") + e.arch.text(elf ? "sm_" : "compute_");
    if (!(elf ? runs_elf(e.arch, device) : runs_ptx(e.arch, device))) continue;
    if (!best || rank(e) > rank(*best)) best = &e;
  }
  if (!best) return cannot(have.empty() ? "the fat binary holds no code" : "the fat binary holds " + have);
  auto body = unpack(image, bytes, *best);
  if (!body.ok()) return std::move(body).status();
  auto facts = best->kind == EntryKind::kElf
                   ? parse_cubin(body->data(), body->size())
                   : parse_ptx({reinterpret_cast<const char*>(body->data()), body->size()}, device);
  if (facts.ok()) facts->arch.variant = best->arch.variant;  // a cubin itself does not tell 'f' from none
  return facts;
}

}  // namespace devproxy::hal::image
