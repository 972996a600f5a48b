// SPDX-License-Identifier: Apache-2.0
// The driver's result numbers that devproxy itself returns (cuda.h, CUresult). csrc/ includes no vendor header; a
// static_assert in the generated client stubs holds each against the vendor's.
#pragma once

#include <cstdint>

namespace devproxy {

enum Result : int32_t {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kDeviceUnavailable = 46,  // also: the device-proxy server is gone; the text names the cause
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kUnsupportedLimit = 215,
  kInvalidSource = 300,
  kFileNotFound = 301,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kPrimaryContextActive = 708,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kLaunchFailed = 719,
  kCooperativeLaunchTooLarge = 720,
  kNotPermitted = 800,
  kNotSupported = 801,
  kInvalidClusterSize = 912,
  kUnknown = 999,
};

// Execution faults stick: every later call of the context returns them.
constexpr bool is_execution_fault(int32_t r) {
  return r >= 700 && r <= 719 && r != 701 && r != 708 && r != 709 && r != 712 && r != 713;
}

}  // namespace devproxy
