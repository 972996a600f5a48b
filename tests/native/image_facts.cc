// SPDX-License-Identifier: Apache-2.0
// hal/image as a program, for tests/native/test_image.py.
//
//   image_facts facts FILE ARCH        facts for a device of that architecture (90), as JSON
//   image_facts entries FILE           the entries of a fat binary, as JSON
//   image_facts fuzz FILE SEED COUNT   COUNT damaged copies: cut, flipped bits, changed numbers; prints how they ended
//   image_facts scan FILE ARCH         every fat binary in the file (a library's .nv_fatbin); prints counts and
//   refusals
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include "devproxy/csrc/base/json.h"
#include "devproxy/hal/image/image.h"

using namespace devproxy;
using namespace devproxy::hal::image;

namespace {

std::string number(const std::string& name, uint64_t value) { return json_string(name) + ':' + std::to_string(value); }
std::string three(const char* name, const uint32_t* n) {
  return std::string("\"") + name + "\":[" + std::to_string(n[0]) + ',' + std::to_string(n[1]) + ',' +
         std::to_string(n[2]) + ']';
}

std::string json(const Kernel& k) {
  std::string params;
  for (const Param& p : k.params)
    params += (params.empty() ? "[" : ",[") + std::to_string(p.offset_bytes) + "," + std::to_string(p.size_bytes) + "]";
  return "{\"name\":" + json_string(k.name) + ",\"params\":[" + params + "]," + number("params_bytes", k.params_bytes) +
         ',' + number("regs", k.regs) + ',' + number("shared", k.shared_bytes) + ',' + number("local", k.local_bytes) +
         ',' + number("const", k.const_bytes) + ',' + number("max_threads", k.max_threads) + ',' +
         three("block", k.block) + ',' + three("cluster", k.cluster) + ',' + number("needs_cluster", k.needs_cluster) +
         ',' + number("grid_sync", k.grid_sync) + ',' + number("printf", k.calls_printf) + ',' +
         number("malloc", k.calls_malloc) + '}';
}

std::string json(const Global& g) {
  return "{\"name\":" + json_string(g.name) + ',' + number("bytes", g.bytes) + ',' + number("constant", g.constant) +
         ',' + number("managed", g.managed) + ',' + number("addresses", g.holds_addresses) + ",\"initial\":\"" +
         base64(g.initial.data(), g.initial.size()) + "\"}";
}

int facts(const std::vector<uint8_t>& image, const Arch& device) {
  auto found = parse_for(image.data(), image.size(), device);
  if (!found.ok()) {
    std::printf("{\"refused\":%d,\"text\":%s}\n", found.status().code(), json_string(found.status().text()).c_str());
    return 0;
  }
  std::string kernels, globals;
  for (const Kernel& k : found->kernels) kernels += (kernels.empty() ? "" : ",") + json(k);
  for (const Global& g : found->globals) globals += (globals.empty() ? "" : ",") + json(g);
  std::printf("{\"arch\":%s,\"kernels\":[%s],\"globals\":[%s]}\n",
              json_string(found->arch.text(found->is_ptx ? "compute_" : "sm_")).c_str(), kernels.c_str(),
              globals.c_str());
  return 0;
}

int entries(const std::vector<uint8_t>& image) {
  auto found = fatbin_entries(image.data(), image.size());
  if (!found.ok()) return std::fprintf(stderr, "%s\n", found.status().text().c_str()), 1;
  std::string text;
  for (const Entry& e : *found) {
    auto body = unpack(image.data(), image.size(), e);
    if (!body.ok()) return std::fprintf(stderr, "%s\n", body.status().text().c_str()), 1;
    text += (text.empty() ? "[\"" : ",[\"") + e.arch.text(e.kind == EntryKind::kElf ? "sm_" : "compute_") + "\"," +
            std::to_string(static_cast<int>(e.packing)) + ',' + std::to_string(body->size()) + ']';
  }
  std::printf("[%s]\n", text.c_str());
  return 0;
}

// A damaged image may still be a right one (a byte of code, of a name); it must never do more than be refused.
int fuzz(const std::vector<uint8_t>& image, uint64_t seed, uint64_t count) {
  std::mt19937_64 random(seed);
  std::map<std::string, uint64_t> ends;
  for (uint64_t i = 0; i < count; i++) {
    std::vector<uint8_t> bad = image;
    const uint64_t what = random() % 4;
    if (what == 0) {
      bad.resize(random() % (bad.size() + 1));
      bad.shrink_to_fit();  // so that a read behind the end is seen
    }
    // Heads and tables are where the numbers are: half of the changes go into the first 4 KiB or the last 8 KiB.
    const uint64_t changes = what == 0 ? 0 : 1 + random() % 8;
    for (uint64_t c = 0; c < changes && !bad.empty(); c++) {
      uint64_t at = random() % bad.size();
      if (random() % 2) at = random() % 2 ? at % 4096 : bad.size() - 1 - at % 8192 % bad.size();
      at %= bad.size();
      static const uint64_t kNumbers[] = {0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, ~0ull};
      if (what == 1) bad[at] ^= static_cast<uint8_t>(1u << random() % 8);
      if (what == 2) bad[at] = static_cast<uint8_t>(random());
      if (what == 3) {
        const uint64_t n = kNumbers[random() % std::size(kNumbers)];
        std::memcpy(bad.data() + at, &n, std::min<size_t>(1ull << random() % 4, bad.size() - at));
      }
    }
    auto end = [&](const Status& s) {
      if (!s.ok() && (s.text().empty() || (s.code() != kInvalidImage && s.code() != kNoBinaryForGpu))) {
        std::fprintf(stderr, "seed %lu, copy %lu: result %d '%s'\n", seed, i, s.code(), s.text().c_str());
        std::exit(1);
      }
      ends[s.ok() ? "taken" : s.code() == kNoBinaryForGpu ? "other architecture" : "damaged"]++;
    };
    auto found = parse_for(bad.data(), bad.size(), {9, 0, 0});
    end(found.status());
    if (found.ok())
      for (const Kernel& k : found->kernels)
        for (const Param& p : k.params)
          if (uint64_t{p.offset_bytes} + p.size_bytes > k.params_bytes || k.params_bytes > 32764)
            return std::fprintf(stderr, "seed %lu, copy %lu: a parameter outside of its block\n", seed, i), 1;
  }
  std::string text;
  for (const auto& [how, n] : ends) text += (text.empty() ? "" : ",") + number(how, n);
  std::printf("{%s}\n", text.c_str());
  return 0;
}

int scan(const char* path, const Arch& device) {
  const int fd = open(path, O_RDONLY);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0) return std::perror(path), 1;
  const auto size = static_cast<size_t>(info.st_size);
  const auto* at = static_cast<const uint8_t*>(mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0));
  uint64_t images = 0, kernels = 0, params = 0, globals = 0;
  std::map<std::string, uint64_t> taken, refused, packings;
  for (size_t i = 0; i + 16 <= size;) {
    uint32_t magic;
    uint64_t behind;
    std::memcpy(&magic, at + i, 4), std::memcpy(&behind, at + i + 8, 8);
    if (magic != 0xBA55ED50 || at[i + 4] != 1 || at[i + 6] != 16 || behind > size - i - 16) {
      i += 8;
      continue;
    }
    images++;
    auto list = fatbin_entries(at + i, 16 + behind);
    if (list.ok())
      for (const Entry& e : *list) packings[std::to_string(static_cast<int>(e.packing))]++;
    auto found = parse_for(at + i, 16 + behind, device);
    if (!found.ok()) {
      refused[found.status().text()]++;
    } else {
      taken[found->arch.text(found->is_ptx ? "compute_" : "sm_")]++;
      kernels += found->kernels.size(), globals += found->globals.size();
      for (const Kernel& k : found->kernels) params += k.params.size();
    }
    i += 16 + behind;
  }
  std::printf("images %lu, kernels %lu, parameters %lu, variables %lu\n", images, kernels, params, globals);
  for (const auto& [what, n] : packings) std::printf("  entries of packing %s: %lu\n", what.c_str(), n);
  for (const auto& [what, n] : taken) std::printf("  taken %s: %lu\n", what.c_str(), n);
  for (const auto& [what, n] : refused) std::printf("  refused %lu times: %s\n", n, what.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string what = argv[1];
  const auto arch = argc > 3 ? static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)) : 90;
  const Arch device{arch / 10, arch % 10, 0};
  if (what == "scan") return scan(argv[2], device);
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<uint8_t> image((std::istreambuf_iterator<char>(file)), {});
  if (what == "facts") return facts(image, device);
  if (what == "entries") return entries(image);
  if (what == "fuzz" && argc == 5) return fuzz(image, arch, std::strtoull(argv[4], nullptr, 10));
  return 2;
}
