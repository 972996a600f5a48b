// SPDX-License-Identifier: Apache-2.0
// Libraries that a program loads itself, and the driver's entry points.
#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/registration.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::library {

// Options and their values have the driver's numbers.
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption* jitOptions,
                                void** jitOptionsValues, unsigned int numJitOptions, cudaLibraryOption* libraryOptions,
                                void** libraryOptionValues, unsigned int numLibraryOptions) {
  return result(cuLibraryLoadData(library, code, reinterpret_cast<CUjit_option*>(jitOptions), jitOptionsValues,
                                  numJitOptions, reinterpret_cast<CUlibraryOption*>(libraryOptions),
                                  libraryOptionValues, numLibraryOptions));
}

cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t* library, const char* fileName, cudaJitOption* jitOptions,
                                    void** jitOptionsValues, unsigned int numJitOptions,
                                    cudaLibraryOption* libraryOptions, void** libraryOptionValues,
                                    unsigned int numLibraryOptions) {
  return result(cuLibraryLoadFromFile(library, fileName, reinterpret_cast<CUjit_option*>(jitOptions), jitOptionsValues,
                                      numJitOptions, reinterpret_cast<CUlibraryOption*>(libraryOptions),
                                      libraryOptionValues, numLibraryOptions));
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return result(cuLibraryUnload(library)); }

cudaError_t cudaLibraryGetKernel(cudaKernel_t* pKernel, cudaLibrary_t library, const char* name) {
  return result(cuLibraryGetKernel(pKernel, library, name));
}

cudaError_t cudaLibraryGetKernelCount(unsigned int* count, cudaLibrary_t lib) {
  return result(cuLibraryGetKernelCount(count, lib));
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t* kernels, unsigned int numKernels, cudaLibrary_t lib) {
  return result(cuLibraryEnumerateKernels(kernels, numKernels, lib));
}

cudaError_t cudaLibraryGetUnifiedFunction(void** fptr, cudaLibrary_t library, const char* symbol) {
  const CUresult rc = cuLibraryGetUnifiedFunction(fptr, library, symbol);
  return rc == CUDA_ERROR_NOT_FOUND ? cudaErrorSymbolNotFound : result(rc);
}

cudaError_t cudaLibraryGetGlobal(void** dptr, size_t* bytes, cudaLibrary_t library, const char* name) {
  CUdeviceptr at = 0;
  const CUresult rc = cuLibraryGetGlobal(&at, bytes, library, name);
  if (rc == CUDA_SUCCESS && dptr != nullptr) *dptr = reinterpret_cast<void*>(at);
  return rc == CUDA_ERROR_NOT_FOUND ? cudaErrorSymbolNotFound : result(rc);
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute attr, int value, int device) {
  return result(cuKernelSetAttribute(static_cast<CUfunction_attribute>(attr), value, kernel, device));
}

// -- the driver's entry points ----------------------------------------------------------------------------------------

namespace {
cudaError_t entry_point(const char* symbol, void** funcPtr, unsigned version, unsigned long long flags,
                        cudaDriverEntryPointQueryResult* driverStatus) {
  if (flags > cudaEnablePerThreadDefaultStream) return cudaErrorInvalidValue;
  // cuda_runtime_api.h: cudaEnableDefault means the thread's own stream in a program that was compiled for it.
  if (flags == cudaEnableDefault && t_thread.per_thread) flags = cudaEnablePerThreadDefaultStream;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  *funcPtr = nullptr;
  const CUresult rc = cuGetProcAddress(symbol, funcPtr, static_cast<int>(version), flags, &status);
  if (driverStatus != nullptr) *driverStatus = static_cast<cudaDriverEntryPointQueryResult>(status);
  // cuda_runtime_api.h: a name that the driver does not have is success, and a null pointer.
  return rc == CUDA_ERROR_NOT_FOUND ? cudaSuccess : result(rc);
}
}  // namespace

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** funcPtr, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* driverStatus) {
  return entry_point(symbol, funcPtr, CUDART_VERSION, flags, driverStatus);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** funcPtr, unsigned int cudaVersion,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* driverStatus) {
  return entry_point(symbol, funcPtr, cudaVersion, flags, driverStatus);
}

}  // namespace devproxy::sa::cudart::library
