// SPDX-License-Identifier: Apache-2.0
// The server halves of the interceptors: one function per message, called on the connection's dispatch thread. Which
// ones there are says the table (codegen/ops.py, server_sa); handlers.gen.h declares them and has their rows.
//
// A handler never blocks. What it does not answer is answered with success where the client waits. A message whose
// values are wrong in a way that a correct client never sends is answered by poison().
#pragma once

#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/message.h"

namespace devproxy::server {

using Handler = void (*)(Connection&, const Message&);
// Of a message that the replay log keeps (log): true where it is done, so that a replay must do it again.
using LoggedHandler = bool (*)(Connection&, const Message&);

// Has the replay log follow a message, as its row says. False where the log does not know what it names.
[[nodiscard]] bool log_message(Connection& c, const Message& m);

inline void answer(Connection&, const Message&) {}  // with success

template <LoggedHandler kHandler>
void logged(Connection& c, const Message& m) {
  if (kHandler(c, m) && !log_message(c, m)) c.poison("the replay log and the objects of a client differ");
}

}  // namespace devproxy::server

#include "handlers.gen.h"

namespace devproxy::server {

// The handler of a message. info: one of wire::kOps.
inline Handler handler_of(const wire::OpInfo& info) { return kHandlers[&info - wire::kOps]; }

}  // namespace devproxy::server
