// SPDX-License-Identifier: Apache-2.0
// A gate in a stream: what comes behind close() waits until open(). So no test depends on how long a kernel takes.
#pragma once

#include <unistd.h>

#include <atomic>

#include "check.cuh"

class Gate {
 public:
  void close(cudaStream_t stream) {
    open_ = false;
    CHECK(cudaLaunchHostFunc(stream, wait, this));
  }
  void open() { open_ = true; }

 private:
  static void CUDART_CB wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open_) usleep(200);
  }
  std::atomic<bool> open_{true};
};
