// SPDX-License-Identifier: Apache-2.0
// Dumps of several servers into one folder, with an index of blocks.
//
//   server_blocks                              writers and readers in threads, over an index of its own
//   server_blocks write DIR GPU SEED RANGES    one server's dump, from two threads, and an exit in its middle with SEED 0
//   server_blocks read DIR GPU SEED RANGES     does a successor see what that server had?
//   server_blocks plain DIR GPU SEED RANGES    what it had, into DIR/plain-GPU
//
// What a server has is a matter of GPU, SEED and RANGES: blocks that all have, at places of their own; blocks that only it
// has; zeros; and lengths that are no whole number of blocks.
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/server/block_index.h"
#include "devproxy/csrc/server/staged_dump.h"
#include "devproxy/csrc/server/state_files.h"
#include "tests/native/expect.h"

using namespace devproxy;
using namespace devproxy::server;

namespace {

constexpr uint64_t kBlock = BlockIndex::kBlockBytes;

struct State {
  std::vector<uint8_t> bytes;
  std::vector<Piece> pieces;
  uint64_t own_bytes = 0;  // of blocks that nobody else has
};

State state_of(uint32_t gpu, uint32_t seed, uint32_t ranges) {
  State state;
  std::mt19937 random(gpu * 7919 + seed);
  for (uint32_t r = 0; r < ranges; r++) {
    // Equal ones have equal lengths, at another place in each server.
    const uint32_t kind = random() % 8, what = random() % 5;
    const uint64_t bytes = kind < 5    ? 1 + (what + 1) * (kBlock / 2 + 4096 * what + what)
                           : kind == 5 ? 1 + random() % 5000
                                       : 1 + random() % (2 * kBlock);
    std::mt19937_64 fill(kind < 5 ? what : (uint64_t{gpu} << 32 | seed << 16 | (r + 1)));
    const uint64_t at = state.bytes.size();
    state.bytes.resize(at + bytes);
    for (uint64_t i = 0; kind != 6 && i < bytes; i += 8) {
      const uint64_t word = fill();
      std::memcpy(state.bytes.data() + at + i, &word, std::min<uint64_t>(8, bytes - i));
    }
    if (kind == 5 || kind == 7) state.own_bytes += bytes;
    state.pieces.push_back({at, at, bytes});
  }
  return state;
}

uint64_t dump(const std::string& dir, BlockIndex* index, uint32_t gpu, const State& state, bool die = false) {
  auto file = StagedWriter::make(dir, gpu, 1, index);
  EXPECT(file.ok());
  std::atomic<size_t> done{0};
  Status s = copy_pieces(state.pieces, [&](const Piece& p) {
    if (die && ++done > state.pieces.size() / 2) std::_Exit(7);
    return (*file)->write(state.bytes.data() + p.addr, p.bytes, p.offset);
  });
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.text().c_str());
  EXPECT(s.ok() && (*file)->finish(state.bytes.size()).ok());
  return (*file)->written_bytes();
}

void check(const std::string& dir, uint32_t gpu, const State& state) {
  auto file = StagedReader::open(dir, gpu, 1, true);
  if (!file.ok()) std::fprintf(stderr, "%s\n", file.status().text().c_str());
  EXPECT(file.ok());
  std::mt19937 random(gpu);
  std::vector<uint8_t> seen(state.bytes.size());
  EXPECT((*file)->read(seen.data(), seen.size(), 0).ok() && seen == state.bytes);
  for (int i = 0; i < 20; i++) {
    const uint64_t at = random() % seen.size(), bytes = random() % std::min<uint64_t>(3 * kBlock, seen.size() - at);
    std::vector<uint8_t> part(bytes);
    EXPECT((*file)->read(part.data(), bytes, at).ok());
    EXPECT(std::equal(part.begin(), part.end(), state.bytes.begin() + static_cast<long>(at)));
    (*file)->used(bytes, at);  // frees nothing: others may need it
  }
  EXPECT(!(*file)->read(seen.data(), 1, seen.size()).ok());
}

// As checkpoint/staged.py makes it.
void make_index(const std::string& dir, uint64_t slots) {
  std::string text(BlockIndex::kSlotsAt + slots * 32, 0);
  std::memcpy(text.data(), BlockIndex::kMagic, 8);
  std::memcpy(text.data() + 8, &slots, 8);
  for (uint32_t i = 0; i < BlockIndex::kSecretBytes; i++) text[16 + i] = static_cast<char>(std::random_device()());
  EXPECT(write_file(dir + "/blocks.index", text).ok());
}

void threads(uint64_t slots, uint32_t seed) {
  char dir[] = "/dev/shm/devproxy-test-blocks-XXXXXX";
  EXPECT(mkdtemp(dir));
  EXPECT(BlockIndex::open(dir).ok() && !*BlockIndex::open(dir));  // none
  make_index(dir, slots);
  auto index = BlockIndex::open(dir);
  EXPECT(index.ok() && *index);
  constexpr uint32_t kServers = 4, kRanges = 9;
  std::vector<State> states;
  std::vector<std::thread> writers;
  std::atomic<uint64_t> written{0};
  uint64_t all = 0, own = 0;
  for (uint32_t gpu = 0; gpu < kServers; gpu++) {
    states.push_back(state_of(gpu, seed, kRanges));
    all += states.back().bytes.size();
    own += states.back().own_bytes;
  }
  for (uint32_t gpu = 0; gpu < kServers; gpu++)
    writers.emplace_back([&, gpu] { written += dump(dir, index->get(), gpu, states[gpu]); });
  for (std::thread& writer : writers) writer.join();
  for (uint32_t gpu = 0; gpu < kServers; gpu++) check(dir, gpu, states[gpu]);
  EXPECT(written >= own && written <= all);
  // Five contents of up to 3 MiB are all that they have alike. An index that is too small finds less.
  if (slots >= 1024) EXPECT(written <= own + 5 * 3 * kBlock + (6 * kBlock));
  // A second dump into the folder would take bytes away from under the references to it.
  EXPECT(!StagedWriter::make(dir, 0, 1, index->get()).ok());
  // One that has not ended cannot be referred to.
  bool needed = false;
  EXPECT(remove((std::string(dir) + "/gpu0-1.refs").c_str()) == 0);
  for (uint32_t gpu = 1; gpu < kServers; gpu++) needed |= !StagedReader::open(dir, gpu, 1, false).ok();
  EXPECT(needed || slots < 1024);
  EXPECT(std::system(("rm -r " + std::string(dir)).c_str()) == 0);
}

void damaged_indexes() {
  char dir[] = "/dev/shm/devproxy-test-blocks-XXXXXX";
  EXPECT(mkdtemp(dir));
  const std::string path = std::string(dir) + "/blocks.index";
  make_index(dir, 8);
  EXPECT(truncate(path.c_str(), BlockIndex::kSlotsAt + 7 * 32) == 0 && !BlockIndex::open(dir).ok());
  EXPECT(truncate(path.c_str(), 100) == 0 && !BlockIndex::open(dir).ok());
  EXPECT(truncate(path.c_str(), BlockIndex::kSlotsAt) == 0 && !BlockIndex::open(dir).ok());
  EXPECT(write_file(path, std::string(BlockIndex::kSlotsAt + 8 * 32, 0)).ok() && !BlockIndex::open(dir).ok());
  EXPECT(std::system(("rm -r " + std::string(dir)).c_str()) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    damaged_indexes();
    for (uint32_t seed = 1; seed <= 2; seed++) threads(1024, seed);
    for (const uint64_t slots : {1, 8}) threads(slots, 7);
    std::printf("ok\n");
    return 0;
  }
  EXPECT(argc == 6);
  const std::string verb = argv[1], dir = argv[2];
  const auto gpu = static_cast<uint32_t>(atoi(argv[3])), seed = static_cast<uint32_t>(atoi(argv[4]));
  const State state = state_of(gpu, seed, static_cast<uint32_t>(atoi(argv[5])));
  if (verb == "write") {
    auto index = BlockIndex::open(dir);
    EXPECT(index.ok());
    std::printf("%llu %llu\n", static_cast<unsigned long long>(dump(dir, index->get(), gpu, state, seed == 0)),
                static_cast<unsigned long long>(state.own_bytes));
  } else if (verb == "read") {
    check(dir, gpu, state);
  } else if (verb == "plain") {
    EXPECT(write_file(dir + "/plain-" + argv[3], {state.bytes.begin(), state.bytes.end()}).ok());
  }
  return 0;
}
