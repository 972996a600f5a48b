// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/state_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

namespace devproxy::server {

Status copy_pieces(const std::vector<Piece>& pieces, const std::function<Status(const Piece&)>& copy) {
  std::vector<Piece> small;
  for (const Piece& p : pieces)
    for (uint64_t done = 0; done < p.bytes; done += kPieceBytes)
      small.push_back({p.addr + done, p.offset + done, std::min(kPieceBytes, p.bytes - done)});
  std::atomic<size_t> next{0};
  std::mutex mu;
  Status first;
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < small.size();) {
      Status s = copy(small[i]);
      if (s.ok()) continue;
      std::lock_guard lock(mu);
      if (first.ok()) first = std::move(s);
      next = small.size();
    }
  };
  std::vector<std::jthread> helpers;  // joined also where a further one cannot be made
  const size_t copiers = std::clamp(std::thread::hardware_concurrency(), 2u, kCopiers);
  while (helpers.size() + 1 < std::min(copiers, small.size())) helpers.emplace_back(work);
  work();
  for (std::jthread& helper : helpers) helper.join();
  return first;
}

Status write_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  {
    const File file(part, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.fd < 0) return Status::from_errno(kFileNotFound, "making " + part);
    if (Status s = write_all(file.fd, text.data(), text.size(), 0); !s.ok()) return std::move(s).with(part);
  }
  if (rename(part.c_str(), path.c_str()) != 0) return Status::from_errno(kUnknown, "renaming " + part);
  return {};
}

StatusOr<std::string> read_file(const std::string& path) {
  const File file(path, O_RDONLY);
  struct stat info;
  if (file.fd < 0 || fstat(file.fd, &info) != 0) return Status::from_errno(kFileNotFound, "opening " + path);
  std::string text(static_cast<size_t>(info.st_size), 0);
  if (Status s = read_all(file.fd, text.data(), text.size(), 0); !s.ok()) return std::move(s).with(path);
  return text;
}

}  // namespace devproxy::server
