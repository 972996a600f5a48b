// SPDX-License-Identifier: Apache-2.0
// A server's state on disk: what `dump` and `dump_shared` write and `--restore` reads.
//
//   gpuK.state.json    the server and each client: handles, addresses, replay log, counters (format version
//                      kStateVersion)
//   gpuK.images        the module images that replay logs name, back to back; the table is in the state
//   gpuK-N.dev         the live device ranges of client N, back to back in address order; the table is in the state.
//                      Then the contents of its arrays, packed, in the order in which they were made
//   gpuK-N.refs        which of these bytes lie in another server's file (staged_dump.h)
//   gpuK.shared.json   for each client the extents of the two files below: [offset in the job's file, bytes]
//   gpuK-N.seg         the used parts of its segment, gpuK-N.pin: those of its pinned window, back to back
//
// Precondition of everything that reads a connection here: parked(). No hashing and no compression: the job stands
// still meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "devproxy/csrc/base/status.h"
#include "devproxy/csrc/server/connection.h"

namespace devproxy::server {

class BlockIndex;
struct ServerRecord;
struct SharedClientRecord;

struct DeviceBytes {
  uint64_t all = 0, written = 0;  // the others lie in the folder already, or are zero
};
// index: of blocks that lie in the folder, or null.
Status dump_device(Connection& connection, const std::string& dir, BlockIndex* index, DeviceBytes* bytes);
// Precondition: the client's process is frozen.
Status dump_shared(Connection& connection, const std::string& dir, SharedClientRecord* shared);
// Every image of the store into the file, their table into the state.
Status dump_images(ImageStore& store, const std::string& path, ServerRecord* state);
// And back. They live as long as somebody holds them.
StatusOr<std::vector<ImageStore::Ref>> restore_images(ImageStore& store, const ServerRecord& state,
                                                      const std::string& path);

}  // namespace devproxy::server
