// SPDX-License-Identifier: Apache-2.0
// What a client had submitted and not begun (hal/pending.h) in a dump: objects by their virtual handles, memory by where
// the job sees it.
#pragma once

#include "devproxy/csrc/base/status.h"

namespace devproxy::server {

class Connection;
struct ClientRecord;

// The client is parked. Nothing where all that was submitted is done. kNotSupported where a command names an object that
// the job has destroyed since.
Status save_pending(Connection& connection, ClientRecord* client);
// The client's objects and memory are there, its device withholds and has no commands.
Status restore_pending(Connection& connection, const ClientRecord& client);

}  // namespace devproxy::server
