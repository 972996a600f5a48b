// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/meta_barrier.h"

namespace devproxy::server {

bool MetaBarrier::may_pass() const {
  if (!asked_) return true;
  const auto lane = lanes_.find(asked_->comm);
  if (lane == lanes_.end()) return true;  // it can be acquired no more, and whoever asked will lift
  if (asked_->acquired) return false;
  return !asked_->synchronous || lane->second.unread == 0;
}

MetaBarrier::Meta MetaBarrier::submit(const CommKey& comm, bool read) {
  Lane& lane = lanes_[comm];
  lane.last = ++number_;
  lane.unread += read;
  if (!asked_ || asked_->comm != comm) return {lane.last, {}};
  return {lane.last, {1, asked_->synchronous && read ? asked_->attempt : 0}};
}

void MetaBarrier::result(const CommKey& comm, uint64_t number, const std::optional<MetaSums>& sums) {
  const auto found = lanes_.find(comm);
  if (found == lanes_.end() || number <= found->second.made) return;
  Lane& lane = found->second;
  lane.unread--;
  if (!sums || !asked_ || asked_->comm != comm || sums->need <= 0) return;
  // Only the last one says where everybody stands: behind it this rank has submitted nothing.
  if (asked_->synchronous && number == lane.last && sums->ack == static_cast<int32_t>(lane.ranks) * asked_->attempt)
    asked_->acquired = true;
  asked_->synchronous = true;
}

void MetaBarrier::ask(const CommKey& comm, int32_t attempt) {
  if (asked_ && asked_->comm == comm && asked_->attempt == attempt) return;
  asked_ = {comm, attempt, false, false};
}

}  // namespace devproxy::server
