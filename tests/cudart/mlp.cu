// SPDX-License-Identifier: Apache-2.0
// A whole training program without a math library: three layers, squared error, SGD or Adam, in our own kernels. Every
// sum has one order, so two runs are equal bit for bit.
//
// A subject like those of tests/subjects (common.py says what that is): it prints a nonce, each step's loss and at the
// end a digest of losses and parameters. Options, each with a number: --steps, --seconds-per-step, --rows, --width,
// --adam,
// --ballast-mib.
// run: --steps 60
// run: --steps 60 --rows 1 --width 32 --adam 1
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "check.cuh"

constexpr int kInputs = 32, kOutputs = 8, kTile = 16;
enum class Then { kNothing, kBias, kBiasTanh, kSlopeOfTanh };

// c = op(a) op(b), where op transposes or not: c is m x n, the sum is over k. Then, of each element: with bias[column],
// its tanh, or its product with 1 - h^2 (the slope of tanh where its value is h).
template <bool kTransposeA, bool kTransposeB, Then kThen>
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k, const float* bias,
                       const float* h) {
  __shared__ float part_a[kTile][kTile + 1], part_b[kTile][kTile + 1];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  float sum = 0;
  for (int from = 0; from < k; from += kTile) {
    const int ka = from + x, kb = from + y;
    part_a[y][x] = row < m && ka < k ? a[kTransposeA ? ka * m + row : row * k + ka] : 0;
    part_b[y][x] = kb < k && column < n ? b[kTransposeB ? column * k + kb : kb * n + column] : 0;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum = fmaf(part_a[y][i], part_b[i][x], sum);
    __syncthreads();
  }
  if (row >= m || column >= n) return;
  const int at = row * n + column;
  if (kThen == Then::kBias || kThen == Then::kBiasTanh) sum += bias[column];
  if (kThen == Then::kBiasTanh) sum = tanhf(sum);
  if (kThen == Then::kSlopeOfTanh) sum *= 1 - h[at] * h[at];
  c[at] = sum;
}

__global__ void sum_rows(const float* values, float* sums, int rows, int columns) {
  const int column = int(here());
  if (column >= columns) return;
  float sum = 0;
  for (int row = 0; row < rows; ++row) sum += values[row * columns + column];
  sums[column] = sum;
}

// One block: slope[i] = 2 (out[i] - want[i]) / count, and the mean of the squares.
__global__ void squared_error(const float* out, const float* want, float* slope, float* loss, int count) {
  __shared__ float part[256];
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += 256) {
    const float error = out[i] - want[i];
    slope[i] = 2 * error / count;
    sum = fmaf(error, error, sum);
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 128; step; step /= 2) {
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss = part[0] / count;
}

__global__ void sgd(float* values, const float* slopes, size_t count, float rate) {
  for (size_t i = here(); i < count; i += threads()) values[i] -= rate * slopes[i];
}

struct Adam {
  float rate, beta1, beta2, left1, left2, epsilon;  // left: 1 - beta^step
};
__global__ void adam(float* values, const float* slopes, float* first, float* second, size_t count, Adam o) {
  for (size_t i = here(); i < count; i += threads()) {
    const float slope = slopes[i];
    first[i] = o.beta1 * first[i] + (1 - o.beta1) * slope;
    second[i] = o.beta2 * second[i] + (1 - o.beta2) * slope * slope;
    values[i] -= o.rate * (first[i] / o.left1) / (sqrtf(second[i] / o.left2) + o.epsilon);
  }
}

struct Options {
  int steps = 200, rows = 64, width = 128, adam = 0, ballast_mib = 0;
  double seconds_per_step = 0;

  Options(int count, char** words) {
    for (int i = 1; i + 1 < count; i += 2) {
      const auto is = [&](const char* name) { return !strcmp(words[i], name); };
      if (is("--seconds-per-step")) {
        seconds_per_step = atof(words[i + 1]);
        continue;
      }
      int* where = is("--steps")         ? &steps
                   : is("--rows")        ? &rows
                   : is("--width")       ? &width
                   : is("--adam")        ? &adam
                   : is("--ballast-mib") ? &ballast_mib
                                         : nullptr;
      if (!where) {
        fprintf(stderr, "unknown option %s\n", words[i]);
        exit(2);
      }
      *where = atoi(words[i + 1]);
    }
  }
};

// 128 bits over the bytes of everything that was added.
struct Digest {
  uint64_t a = 0xcbf29ce484222325, b = 0x9e3779b97f4a7c15;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      const uint8_t byte = static_cast<const uint8_t*>(data)[i];
      a = (a ^ byte) * 0x100000001b3;
      b = ((b << 7 | b >> 57) + byte) * 0xff51afd7ed558ccd;
    }
  }
};

static uint32_t random_state = 12345;
static std::vector<float> random_values(size_t count, float span) {
  std::vector<float> values(count);
  for (float& value : values) {
    random_state = random_state * 1664525 + 1013904223;
    value = (float(random_state >> 8) / float(1 << 23) - 1) * span;
  }
  return values;
}

class Network {
 public:
  Network(const Options& o) : o_(o) {
    const int in[] = {kInputs, o.width, o.width}, out[] = {o.width, o.width, kOutputs};
    std::vector<float> begin;
    for (int layer = 0; layer < 3; ++layer) {
      weights_[layer] = begin.size();
      const std::vector<float> some = random_values(size_t(in[layer]) * out[layer], 1 / std::sqrt(float(in[layer])));
      begin.insert(begin.end(), some.begin(), some.end());
      biases_[layer] = begin.size();
      begin.resize(begin.size() + out[layer], 0);
    }
    count_ = begin.size();
    values_ = device_of(begin);
    slopes_ = zeroes<float>(count_);
    first_ = zeroes<float>(count_);
    second_ = zeroes<float>(count_);
    x_ = device_of(random_values(size_t(o.rows) * kInputs, 1));
    want_ = device_of(random_values(size_t(o.rows) * kOutputs, 0.5f));
    for (float** one : {&h1_, &h2_, &d1_, &d2_}) *one = zeroes<float>(size_t(o.rows) * o.width);
    out_ = zeroes<float>(size_t(o.rows) * kOutputs);
    d3_ = zeroes<float>(size_t(o.rows) * kOutputs);
    loss_ = zeroes<float>(1);
    CHECK(cudaMallocHost(&host_loss_, sizeof(float)));
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  float step(int number) {
    const int rows = o_.rows, width = o_.width;
    multiply<false, false, Then::kBiasTanh>(x_, weight(0), h1_, rows, width, kInputs, bias(0), nullptr);
    multiply<false, false, Then::kBiasTanh>(h1_, weight(1), h2_, rows, width, width, bias(1), nullptr);
    multiply<false, false, Then::kBias>(h2_, weight(2), out_, rows, kOutputs, width, bias(2), nullptr);
    squared_error<<<1, 256, 0, stream_>>>(out_, want_, d3_, loss_, rows * kOutputs);
    LAUNCHED();
    slopes_of(2, h2_, d3_, width, kOutputs);
    multiply<false, true, Then::kSlopeOfTanh>(d3_, weight(2), d2_, rows, width, kOutputs, nullptr, h2_);
    slopes_of(1, h1_, d2_, width, width);
    multiply<false, true, Then::kSlopeOfTanh>(d2_, weight(1), d1_, rows, width, width, nullptr, h1_);
    slopes_of(0, x_, d1_, kInputs, width);
    const int blocks = int(std::min<size_t>((count_ + 255) / 256, 1024));
    if (o_.adam) {
      const Adam how{0.002f, 0.9f, 0.999f, float(1 - std::pow(0.9, number)), float(1 - std::pow(0.999, number)), 1e-8f};
      adam<<<blocks, 256, 0, stream_>>>(values_, slopes_, first_, second_, count_, how);
    } else {
      sgd<<<blocks, 256, 0, stream_>>>(values_, slopes_, count_, 0.05f);
    }
    LAUNCHED();
    CHECK(cudaMemcpyAsync(host_loss_, loss_, sizeof(float), cudaMemcpyDeviceToHost, stream_));
    CHECK(cudaStreamSynchronize(stream_));
    return *host_loss_;
  }

  void add_to(Digest* digest) const {
    for (const float* one : {values_, first_, second_}) {
      const std::vector<float> all = back(one, count_);
      digest->add(all.data(), all.size() * sizeof(float));
    }
  }

 private:
  float* weight(int layer) const { return values_ + weights_[layer]; }
  float* bias(int layer) const { return values_ + biases_[layer]; }

  template <bool kTransposeA, bool kTransposeB, Then kThen>
  void multiply(const float* a, const float* b, float* c, int m, int n, int k, const float* bias, const float* h) {
    const dim3 grid((n + kTile - 1) / kTile, (m + kTile - 1) / kTile);
    matmul<kTransposeA, kTransposeB, kThen><<<grid, dim3(kTile, kTile), 0, stream_>>>(a, b, c, m, n, k, bias, h);
    LAUNCHED();
  }

  // Of a layer's weights and biases, from its input and the slopes of its output.
  void slopes_of(int layer, const float* in, const float* slope, int inputs, int outputs) {
    multiply<true, false, Then::kNothing>(in, slope, slopes_ + weights_[layer], inputs, outputs, o_.rows, nullptr,
                                          nullptr);
    sum_rows<<<(outputs + 63) / 64, 64, 0, stream_>>>(slope, slopes_ + biases_[layer], o_.rows, outputs);
    LAUNCHED();
  }

  Options o_;
  size_t weights_[3], biases_[3], count_ = 0;
  float *values_, *slopes_, *first_, *second_, *x_, *want_, *h1_, *h2_, *d1_, *d2_, *d3_, *out_, *loss_;
  float* host_loss_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

int main(int count, char** words) {
  using Clock = std::chrono::steady_clock;
  const Options o(count, words);
  uint64_t number = 0;
  EXPECT_EQ(getrandom(&number, sizeof number, 0), (ssize_t)sizeof number);
  char nonce[17];
  snprintf(nonce, sizeof nonce, "%016llx", (unsigned long long)number);
  printf("start %s pid %d\n", nonce, int(getpid()));
  fflush(stdout);
  Network network(o);
  uint8_t* ballast = nullptr;  // device memory that an image has to carry
  if (o.ballast_mib) {
    ballast = device<uint8_t>(size_t(o.ballast_mib) << 20);
    CHECK(cudaMemset(ballast, 0x5A, size_t(o.ballast_mib) << 20));
  }
  Digest digest;
  std::vector<double> took_us;
  float first = 0, last = 0;
  for (int step = 1; step <= o.steps; ++step) {
    const auto begin = Clock::now();
    last = network.step(step);
    took_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    if (step == 1) first = last;
    digest.add(&last, sizeof last);
    printf("%s step %d loss %a\n", nonce, step, last);
    fflush(stdout);
    const double rest = o.seconds_per_step - std::chrono::duration<double>(Clock::now() - begin).count();
    if (rest > 0 && step < o.steps) usleep(useconds_t(rest * 1e6));
  }
  network.add_to(&digest);
  if (ballast) {
    const std::vector<uint8_t> some = back(ballast + (size_t(o.ballast_mib) << 20) - 4096, 4096);
    digest.add(some.data(), some.size());
  }
  std::sort(took_us.begin(), took_us.end());
  if (!took_us.empty()) printf("median step %.1f us\n", took_us[took_us.size() / 2]);
  EXPECT_MADE(o.steps < 50 || last < 0.9f * first);
  printf("%s digest %016llx%016llx\n%s done\n", nonce, (unsigned long long)digest.a, (unsigned long long)digest.b,
         nonce);
  return ok("mlp");
}
