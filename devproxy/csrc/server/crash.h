// SPDX-License-Identifier: Apache-2.0
// When a kernel takes the server down: every client is told which kernel it was, nobody waits for ever, no file stays.
#pragma once

#include <cstdint>

#include "devproxy/csrc/server/lifeline.h"
#include "devproxy/hal/hal.h"

namespace devproxy::server {

// Catches SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT. Before the first thread that runs kernels.
void install_crash_handler(const hal::Device* device);
// This socket is unlinked too. Precondition: 256 at most are named.
void unlink_in_crash(const char* socket_path);
// Every thread that may run kernels: a signal stack of its own, so that an overflown stack is reported as well.
void prepare_thread_for_crash();

// Precondition: slot < kMaxSlots; the paths are copied.
void register_for_crash(uint32_t slot, Lifeline* lifeline, const char* segment_path, const char* pinned_path,
                        const char* link_path);
void forget_for_crash(uint32_t slot);

}  // namespace devproxy::server
