// The server halves of the interceptors: one function per message, called on the connection's dispatch thread.
//
// A handler never blocks. What it does not answer is answered with success where the client waits. A message whose
// values are wrong in a way that a correct client never sends is answered by poison().
#pragma once

#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/message.h"

namespace devproxy::server {

using Handler = void (*)(Connection&, const Message&);

// The handler of a message.
Handler handler_of(const wire::OpInfo& info);

namespace memory {
void mem_alloc(Connection&, const Message&);
void mem_free(Connection&, const Message&);
void mem_credit(Connection&, const Message&);
void mem_credit_return(Connection&, const Message&);
void mem_info(Connection&, const Message&);
void copy(Connection&, const Message&);
void copy_2d(Connection&, const Message&);
void memset(Connection&, const Message&);
}  // namespace memory

namespace hostmem {
void host_alloc(Connection&, const Message&);
void host_free(Connection&, const Message&);
void host_device_address(Connection&, const Message&);
void host_window(Connection&, const Message&);
}  // namespace hostmem

namespace sync {
void stream_create(Connection&, const Message&);
void stream_destroy(Connection&, const Message&);
void stream_set_attribute(Connection&, const Message&);
void stream_wait_event(Connection&, const Message&);
void host_func(Connection&, const Message&);
void host_func_done(Connection&, const Message&);
void event_create(Connection&, const Message&);
void event_destroy(Connection&, const Message&);
void event_record(Connection&, const Message&);
void event_elapsed(Connection&, const Message&);
}  // namespace sync

namespace context {
void set_limit(Connection&, const Message&);
void get_limit(Connection&, const Message&);
void output(Connection&, const Message&);
void reset_persisting_l2(Connection&, const Message&);
}  // namespace context

namespace module {
void image_put(Connection&, const Message&);
void module_load(Connection&, const Message&);
void module_unload(Connection&, const Message&);
void function_get(Connection&, const Message&);
void module_global(Connection&, const Message&);
void function_names(Connection&, const Message&);
void function_set_attr(Connection&, const Message&);
}  // namespace module

namespace link {
void link(Connection&, const Message&);
void link_fetch(Connection&, const Message&);
void tensor_map(Connection&, const Message&);
}  // namespace link

namespace launch {
void launch(Connection&, const Message&);
void launch_ex(Connection&, const Message&);
void occupancy(Connection&, const Message&);
}  // namespace launch

namespace texture {
void array_create(Connection&, const Message&);
void array_destroy(Connection&, const Message&);
void array_copy(Connection&, const Message&);
void texture_create(Connection&, const Message&);
void texture_destroy(Connection&, const Message&);
}  // namespace texture

namespace graph {
void graph_create(Connection&, const Message&);
void graph_update(Connection&, const Message&);
void graph_destroy(Connection&, const Message&);
void graph_launch(Connection&, const Message&);
}  // namespace graph

}  // namespace devproxy::server
