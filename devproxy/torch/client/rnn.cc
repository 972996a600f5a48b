// SPDX-License-Identifier: Apache-2.0
// Recurrent layers where ops run on CUDA.
//
// ATen asks cuDNN before it dispatches its op: how the weights of a layer lie in one buffer, whether the job's lie so,
// and for the state of its dropout. cuDNN is the server's, so the executor is asked instead, once for each form of a
// layer, and the rest is done here as ATen does it. A layer whose weights lie in the buffer is computed without a copy.
#include <ATen/autocast_mode.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/_cudnn_init_dropout_state.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <vector>

#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

using at::Tensor;
using at::TensorList;

enum CudnnMode : int64_t { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };  // cudnnRNNMode_t

const RnnLayout& layout_of(TensorList weights, const RnnForm& form) {
  static auto* const mu = new std::mutex;
  static auto* const known = new std::map<std::vector<int64_t>, RnnLayout>;
  const DeviceIndex device = weights[0].device().index();
  std::vector<int64_t> key{device,           form.dtype,     form.weight_stride0, form.input_size,   form.mode,
                           form.hidden_size, form.proj_size, form.num_layers,     form.bidirectional};
  for (const Tensor& w : weights) {
    key.push_back(w.dim());
    key.insert(key.end(), w.sizes().begin(), w.sizes().end());
  }
  std::lock_guard lock(*mu);
  const auto it = known->find(key);
  return it != known->end() ? it->second : known->emplace(key, rnn_layout(device, weights, form)).first->second;
}

RnnForm form_of(TensorList weights, int64_t stride0, int64_t input_size, int64_t mode, int64_t hidden_size,
                int64_t proj_size, int64_t num_layers, bool batch_first, bool bidirectional) {
  return {static_cast<int64_t>(weights[0].scalar_type()),
          stride0,
          input_size,
          mode,
          hidden_size,
          proj_size,
          num_layers,
          batch_first,
          bidirectional};
}

// nn.RNN.flatten_parameters().
Tensor flatten_weight(TensorList weights, int64_t stride0, int64_t input_size, int64_t mode, int64_t hidden_size,
                      int64_t proj_size, int64_t num_layers, bool batch_first, bool bidirectional) {
  TORCH_CHECK(!weights.empty(), "_cudnn_rnn_flatten_weight_: cannot flatten empty weight list");
  const c10::DeviceGuard guard(weights[0].device());
  const RnnLayout& layout = layout_of(weights, form_of(weights, stride0, input_size, mode, hidden_size, proj_size,
                                                       num_layers, batch_first, bidirectional));
  Tensor buffer = at::zeros({layout.elements}, weights[0].options());
  for (size_t i = 0; i < weights.size(); ++i) {
    Tensor view = at::empty({0}, weights[i].options());
    view.set_(buffer.storage(), layout.offsets[i], weights[i].sizes(), c10::contiguous_strides(weights[i].sizes()));
    view.copy_(weights[i]);
    const_cast<Tensor&>(weights[i]).set_(view);
  }
  return buffer;
}

// The buffer that the weights lie in as cuDNN wants them; undefined where they do not.
Tensor buffer_of(TensorList weights, const RnnForm& form) {
  const Tensor& first = weights[0];
  const c10::Storage storage = first.storage();
  const RnnLayout& layout = layout_of(weights, form);
  if (static_cast<int64_t>(storage.nbytes() / first.itemsize()) < layout.elements) return {};
  for (size_t i = 0; i < weights.size(); ++i)
    if (!weights[i].is_alias_of(first) || weights[i].storage_offset() != layout.offsets[i] ||
        !weights[i].is_contiguous())
      return {};
  Tensor buffer = at::empty({0}, first.options());
  return buffer.set_(storage, 0, {layout.elements}, {1});
}

// cuDNN's generators for the dropout between layers: one state for each device, made anew after the job has seeded, and
// used by one launch after the other.
struct DropoutState {
  std::mutex mu;
  Tensor buffer;
  CUevent used = nullptr;  // the last use, on whatever stream that was
  cuuint64_t used_in = 0;  // the capture that the last use was in; 0: none
};

DropoutState& dropout_state(DeviceIndex device) {
  static auto* const all = new std::array<DropoutState, kMaxDevices>;
  return (*all)[device];
}

class DropoutLease {
 public:
  DropoutLease(double p, bool train, const at::TensorOptions& options)
      : device_(options.device().index()), state_(dropout_state(device_)), lock_(state_.mu) {
    if (train && p > 0) {
      const at::Generator& g = default_generator(device_);
      if (take_seeded(g) || !state_.buffer.defined()) {
        const auto seed = at::empty({}, options.dtype(at::kLong)).random_(g).item<int64_t>();
        state_.buffer = at::_cudnn_init_dropout_state(p, train, seed, options.dtype(at::kByte));
        if (state_.used == nullptr)
          check(driver().cuEventCreate(&state_.used, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      }
    }
    // Only inside one capture, or outside of all: to wait for another's event is an error that ends a capture.
    if (state_.used != nullptr && state_.used_in == capture())
      check(driver().cuStreamWaitEvent(current_stream(device_), state_.used, 0), "cuStreamWaitEvent");
  }
  ~DropoutLease() {
    if (state_.used == nullptr) return;
    try {
      state_.used_in = capture();
      (void)driver().cuEventRecord(state_.used, current_stream(device_));
    } catch (...) {}  // a broken context: the next op says so
  }
  DropoutLease(const DropoutLease&) = delete;
  DropoutLease& operator=(const DropoutLease&) = delete;
  const Tensor& buffer() const { return state_.buffer; }

 private:
  cuuint64_t capture() const { return capture_id(device_, current_stream_id(device_)); }
  const DeviceIndex device_;
  DropoutState& state_;
  const std::lock_guard<std::mutex> lock_;
};

struct Results {
  Tensor output, hy, cy;
};

Results run(int64_t mode, const Tensor& input, const Tensor& hx, const Tensor& cx, TensorList weights, bool has_biases,
            int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first,
            at::IntArrayRef batch_sizes) {
  int64_t hidden_size = hx.size(2), proj_size = 0;
  if (cx.defined() && cx.size(2) != hx.size(2)) hidden_size = cx.size(2), proj_size = hx.size(2);
  const int64_t stride0 = (has_biases ? 4 : 2) + (proj_size != 0);
  const c10::DeviceGuard guard(input.device());
  const Tensor buffer = buffer_of(weights, form_of(weights, stride0, input.size(-1), mode, hidden_size, proj_size,
                                                   num_layers, batch_first, bidirectional));
  const DropoutLease lease(dropout, train, input.options());
  auto [output, hy, cy, reserve, weight] =
      at::_cudnn_rnn(input, weights, stride0, buffer, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first,
                     dropout, train, bidirectional, batch_sizes, lease.buffer());
  return {output, hy, cy};
}

at::IntArrayRef numbers(const Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.dim() == 1, "batch_sizes tensor should be 1D");
  TORCH_CHECK(batch_sizes.device().is_cpu(), "batch_sizes tensor should be on CPU, but got ", batch_sizes.device());
  return {batch_sizes.const_data_ptr<int64_t>(), static_cast<size_t>(batch_sizes.size(0))};
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hx, TensorList weights,
          bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Results r =
      run(kLstm, input, hx[0], hx[1], weights, has_biases, num_layers, dropout, train, bidirectional, batch_first, {});
  output = r.output, hy = r.hy, cy = r.cy;
}

void lstm_packed(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, const Tensor& batch_sizes, TensorList hx,
                 TensorList weights, bool has_biases, int64_t num_layers, double dropout, bool train,
                 bool bidirectional) {
  Results r = run(kLstm, input, hx[0], hx[1], weights, has_biases, num_layers, dropout, train, bidirectional, false,
                  numbers(batch_sizes));
  output = r.output, hy = r.hy, cy = r.cy;
}

template <int64_t mode>
void rnn(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool has_biases,
         int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Results r = run(mode, input, hx, {}, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first, {});
  output = r.output, hy = r.hy;
}

template <int64_t mode>
void rnn_packed(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& batch_sizes, const Tensor& hx,
                TensorList weights, bool has_biases, int64_t num_layers, double dropout, bool train,
                bool bidirectional) {
  Results r = run(mode, input, hx, {}, weights, has_biases, num_layers, dropout, train, bidirectional, false,
                  numbers(batch_sizes));
  output = r.output, hy = r.hy;
}

// ATen's own casts the weights into a buffer that it lays out by cuDNN. Here they are cast one by one, and cuDNN lays
// them out where it computes: as often as natively, once in each forward.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> with_autocast(
    const Tensor& input, TensorList weight, int64_t weight_stride0, const std::optional<Tensor>& weight_buf,
    const Tensor& hx, const std::optional<Tensor>& cx, int64_t mode, int64_t hidden_size, int64_t proj_size,
    int64_t num_layers, bool batch_first, double dropout, bool train, bool bidirectional, at::IntArrayRef batch_sizes,
    const std::optional<Tensor>& dropout_state) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::Autocast);
  const auto half = [](const auto& t) { return at::autocast::cached_cast(at::kHalf, t, c10::kCUDA); };
  const bool cast = weight[0].scalar_type() != at::kHalf && at::autocast::is_eligible(weight[0], c10::kCUDA);
  const std::vector<Tensor> weights = cast ? half(weight) : weight.vec();
  return at::_cudnn_rnn(half(input), weights, weight_stride0, cast ? std::nullopt : weight_buf, half(hx), half(cx),
                        mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional,
                        batch_sizes, dropout_state);
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  if (ops_run_on_cuda()) m.impl("_cudnn_rnn", with_autocast);
}

// Over the CUDA wheel's own, which were registered when its library was loaded.
const bool g_registered = [] {
  if (!ops_run_on_cuda()) return false;
  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  at::native::gru_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kGru>);
  at::native::rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kTanh>);
  at::native::rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kRelu>);
  at::native::lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  at::native::gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kGru>);
  at::native::rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kTanh>);
  at::native::rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kRelu>);
  return true;
}();

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  if (ops_run_on_cuda()) m.impl("_cudnn_rnn_flatten_weight", flatten_weight);
}

}  // namespace
}  // namespace devproxy::aten
