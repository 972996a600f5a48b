// SPDX-License-Identifier: Apache-2.0
// Which buffers of ranks correspond. A rank with more buffers than the others, such as an average of the parameters that
// rank 0 alone keeps on the GPU, has what it allocates behind them at other offsets. Each block has a home, which is its own
// offset at first, and launches are compared by homes. Where launches of the same operator and sizes have left the same at two
// ranks, the blocks of the one get the homes of the other's.
#include <set>

#include "devproxy/hal/splice/parts.h"

namespace devproxy::hal::splice {

// Under mu_, as all of this file.

bool Splicer::Member::move_homes(const std::map<uint64_t, uint64_t>& homes) {
  std::vector<Block*> displaced;
  for (const auto& [begin, home] : homes) {
    const auto own = blocks.find(base + begin);
    if (own == blocks.end()) return false;
    const Block& block = own->second;
    if (home_of(block, own->first) == home) continue;
    if (block.placed) return false;
    for (auto& [addr, other] : blocks) {
      const uint64_t its = home_of(other, addr);
      if (homes.contains(addr - base) || its >= home + block.bytes || home >= its + other.bytes) continue;
      if (other.placed) return false;
      displaced.push_back(&other);
    }
  }
  for (Block* const block : displaced) block->shift = (uint64_t{number} + 1) << kPrivateHomes;
  for (const auto& [begin, home] : homes) blocks.find(base + begin)->second.shift = home - begin;
  return true;
}

// What the launch changes and what stays, wherever that lies.
Splicer::Settled Splicer::settled_of(const Member& member, const SpliceLaunch& launch) {
  Settled all{purpose_of(launch), {}, {}};
  for (size_t i = 0; i < launch.accesses.size(); i++) {
    const Access& access = launch.accesses[i];
    if (!is_memory(access) || !writes(access) || access.flags & kYoung) continue;
    const auto it = member.around(access.addr, access.bytes);
    if (it == member.blocks.end()) continue;
    all.alike = XXH3_64bits_withSeed(&i, sizeof i, all.alike);
    all.homes.push_back(member.home_of(it->second, access.addr));
    all.parts.push_back({it->first - member.base, access.addr - it->first, access.bytes});
  }
  return all;
}

// Those by which the member has said it, in the order of its launches.
std::vector<const Splicer::Told*> Splicer::told_by(const std::deque<Told>& told, uint64_t member,
                                                   const Contents& contents) {
  std::vector<const Told*> all;
  for (const Told& one : told)
    if (one.member == member && one.contents == contents &&
        std::none_of(all.begin(), all.end(), [&](const Told* other) { return other->key == one.key; }))
      all.push_back(&one);
  return all;
}

// The member's launch has left what another's has. Its blocks get that one's homes, and its key is that one's from now on.
bool Splicer::go_to(Member& member, uint64_t key, const std::vector<Settled::Part>& parts, const Told& other) {
  if (key == other.key) return false;  // said_ and told_ do not forget at the same time
  for (const uint64_t one : {key, other.key}) {
    const auto known = member.learned.find(one);
    if (known != member.learned.end() && known->second.group && !known->second.group->retired) return false;
  }
  std::map<uint64_t, uint64_t> homes;  // by the offsets of blocks
  uint64_t bytes = 0, shared_bytes = 0;
  for (size_t i = 0; i < parts.size(); i++) {
    const auto& [begin, inside, size] = parts[i];
    const uint64_t home = other.homes[i] - inside;
    if (!homes.try_emplace(begin, home).second && homes[begin] != home) return false;
    bytes += size;
    const uint64_t first = ceil_page(begin + inside), last = floor_page(begin + inside + size);
    if (first < last && in_phase(other.homes[i], begin + inside, page_)) shared_bytes += last - first;
  }
  // What can't be one page would be copied, which costs as much as the launch.
  if (bytes == 0 || shared_bytes * 2 < bytes || !member.move_homes(homes)) return false;
  if (auto learned = member.learned.extract(key)) {
    member.learned.erase(other.key);
    learned.key() = other.key;
    learned.mapped().group = nullptr;
    member.learned.insert(std::move(learned));
  }
  std::deque<Said>&from = said_[key], &to = said_[other.key];
  for (const Said& one : from)
    if (one.member == member.bit) to.push_back(one);
  std::erase_if(from, [&](const Said& one) { return one.member == member.bit; });
  return true;
}

// The member is about to say the contents by this key. Ranks that have said the same of buffers of these sizes, but by other
// keys, correspond: of several the ones that come at the same place in their orders. It goes to one of them if nobody has said
// the same by its key; and they come to it. The key that it has then.
uint64_t Splicer::correspond(Member& member, const SpliceLaunch& launch, uint64_t key, const Contents& contents) {
  Settled settled = settled_of(member, launch);
  if (told_.size() >= kMaxKeys) told_.clear();
  std::deque<Told>& told = told_[settled.alike];
  const auto rename = [&](uint64_t who, uint64_t old_key, uint64_t new_key, const std::vector<uint64_t>& homes) {
    for (Told& one : told)
      if (one.member == who && one.key == old_key) one.key = new_key, one.homes = homes;
  };
  std::vector<uint64_t> others;
  for (const Told& one : told)
    if (one.contents == contents && one.member != member.bit &&
        std::find(others.begin(), others.end(), one.member) == others.end())
      others.push_back(one.member);
  const std::vector<const Told*> mine = told_by(told, member.bit, contents);
  const auto place = static_cast<size_t>(
      std::find_if(mine.begin(), mine.end(), [&](const Told* one) { return one->key == key; }) - mine.begin());
  const std::deque<Said>& by_key = said_[key];
  const bool alone = std::none_of(by_key.begin(), by_key.end(), [&](const Said& one) {
    return one.contents == contents && one.member != member.bit;
  });
  for (const uint64_t who : others) {
    if (!alone) break;
    const std::vector<const Told*> theirs = told_by(told, who, contents);
    if (place >= theirs.size()) continue;
    const Told other = *theirs[place];
    if (!go_to(member, key, settled.parts, other)) continue;
    rename(member.bit, key, other.key, other.homes);
    key = other.key, settled.homes = other.homes;
    break;
  }
  const Told own{member.bit, key, contents, settled.homes, settled.parts};
  for (const uint64_t who : others) {
    const std::vector<const Told*> theirs = told_by(told, who, contents);
    if (place >= theirs.size() || theirs[place]->key == key) continue;
    const Told other = *theirs[place];
    for (const auto& one : members_)
      if (one && one->bit == who && go_to(*one, other.key, other.parts, own)) rename(who, other.key, key, own.homes);
  }
  if (told.size() >= kMaxSaid) told.pop_front();
  told.push_back(own);
  return key;
}

// Where `other` may have what the member has in its stable block at `offset`, its own offset first.
std::vector<uint64_t> Splicer::alike(const Member& member, uint64_t offset, const Member& other, bool anywhere) const {
  std::vector<uint64_t> found;
  const auto own = member.blocks.find(member.base + offset);
  if (own == member.blocks.end() || !own->second.stable) return found;
  const Member::Block& mine = own->second;
  const uint64_t home = member.home_of(mine, own->first);
  const auto fits = [&](const Member::Block& block) { return block.stable && block.bytes == mine.bytes; };
  if (const auto it = other.blocks.find(other.base + offset);
      it != other.blocks.end() && fits(it->second) && other.home_of(it->second, it->first) == home)
    found.push_back(offset);
  if (mine.placed ? !found.empty() : !anywhere) return found;
  std::set<uint64_t> taken;
  for (const auto& [addr, block] : member.blocks)
    if (block.placed && !mine.placed) taken.insert(member.home_of(block, addr));
  for (const auto& [addr, block] : other.blocks) {
    const uint64_t its = other.home_of(block, addr);
    if (!fits(block) || (!found.empty() && found[0] == addr - other.base)) continue;
    if (!in_phase(addr - other.base, offset, page_)) continue;
    if (mine.placed ? its != home : taken.contains(its)) continue;
    found.push_back(addr - other.base);
    if (found.size() >= kMaxAlike) break;
  }
  return found;
}

// The stretch of the member's block at `offset` is that of the other's at `there`.
void Splicer::place(Member& member, uint64_t offset, const Member& other, uint64_t there) {
  const auto own = member.blocks.find(member.base + offset);
  const auto its = other.blocks.find(other.base + there);
  if (own == member.blocks.end() || its == other.blocks.end()) return;
  if (member.move_homes({{offset, other.home_of(its->second, its->first)}})) own->second.placed = true;
}

}  // namespace devproxy::hal::splice
