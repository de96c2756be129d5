// What a pass over few rows spends its time on, on CPUs, in float32 and bfloat16: products and norms.
//
// The product x W^T reads each weight from memory once, whatever the number of rows; weights in bfloat16 are widened in
// registers. An output is one dot product whose order of additions depends on nothing but the length of a row, so a row
// gives the same bits alone, beside others, and with any number of threads.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

namespace {

constexpr int LANES = 8;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// `count` numbers, and zeros in the lanes behind them
inline Floats load(const float* from, int64_t count = LANES) {
  Floats found = {};
  std::memcpy(&found, from, count * sizeof(float));
  return found;
}

inline Floats load(const at::BFloat16* from, int64_t count = LANES) {
  Halves halves = {};
  std::memcpy(&halves, from, count * sizeof(uint16_t));
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline float total(const Floats& lanes) {
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  return sum;
}

template <typename Number>
struct Product {
  const float* x;  // [R, K]
  const Number* weight;  // [O, K]
  const Number* bias;  // [O] or null
  Number* y;  // [R, O]
  int64_t rows, inner, outputs;

  // ROWS rows from `r` on against a pair of the weight's rows from `o` on: y[r][o] = x[r] . w[o]. `next` is 1, or 0 for
  // a row without a second: it is its own, since another loop for it could round otherwise.
  template <int ROWS>
  inline void tile(int64_t r, int64_t o, int64_t next) const {
    Floats sums[ROWS][2] = {};
    const float* rows_from = x + r * inner;
    const Number* w = weight + o * inner;
    const auto add = [&](int64_t k, auto... count) {
      const Floats first = load(w + k, count...), second = load(w + next * inner + k, count...);
      for (int row = 0; row < ROWS; ++row) {
        const Floats numbers = load(rows_from + row * inner + k, count...);
        sums[row][0] += numbers * first;
        sums[row][1] += numbers * second;
      }
    };
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) add(k);
    if (k < inner) add(k, inner - k);
    for (int row = 0; row < ROWS; ++row)
      for (int second = 0; second < 2; ++second) {
        const int64_t output = o + second * next;
        const float offset = bias ? static_cast<float>(bias[output]) : 0.0f;
        y[(r + row) * outputs + output] = static_cast<Number>(total(sums[row][second]) + offset);
      }
  }

  inline void pair(int64_t o) const {
    const int64_t next = o + 1 < outputs;
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) tile<6>(r, o, next);
    switch (rows - r) {
      case 1: return tile<1>(r, o, next);
      case 2: return tile<2>(r, o, next);
      case 3: return tile<3>(r, o, next);
      case 4: return tile<4>(r, o, next);
      case 5: return tile<5>(r, o, next);
    }
  }

  void run() const {
    const int64_t grain = std::max<int64_t>(1, 32768 / inner);
    at::parallel_for(0, (outputs + 1) / 2, grain, [&](int64_t begin, int64_t end) {
      for (int64_t o = 2 * begin; o < std::min(2 * end, outputs); o += 2) pair(o);
    });
  }
};

template <typename Number>
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  std::vector<float> wide;
  const float* numbers;
  if constexpr (std::is_same_v<Number, float>) {
    numbers = x.const_data_ptr<float>();
  } else {
    const Number* narrow = x.const_data_ptr<Number>();
    wide.assign(narrow, narrow + x.numel());
    numbers = wide.data();
  }
  Product<Number>{numbers, weight.const_data_ptr<Number>(), bias ? bias->const_data_ptr<Number>() : nullptr,
                  y.mutable_data_ptr<Number>(), x.size(0), x.size(1), weight.size(0)}
      .run();
  return y;
}

template <typename Number>
at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  at::Tensor y = at::empty_like(x);
  const int64_t size = x.size(-1);
  const Number *from = x.const_data_ptr<Number>(), *scale = weight.const_data_ptr<Number>();
  Number* to = y.mutable_data_ptr<Number>();
  for (int64_t row = 0; row < x.numel() / size; ++row, from += size, to += size) {
    Floats squares = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) squares += load(from + k) * load(from + k);
    if (k < size) squares += load(from + k, size - k) * load(from + k, size - k);
    const float factor = 1.0f / std::sqrt(total(squares) / size + static_cast<float>(eps));
    for (k = 0; k < size; ++k)
      to[k] = static_cast<Number>(static_cast<float>(from[k]) * factor * static_cast<float>(scale[k]));
  }
  return y;
}

void check(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "headway: tensors must be contiguous");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "headway: ", x.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "headway: ", x.scalar_type());
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == weight.size(-1), "headway: shapes do not fit");
  TORCH_CHECK(x.size(-1) > 0, "headway: rows of no numbers");
}

// x [R, K], weight [O, K], bias [O] -> [R, O], all of one type; sums in float32
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check(x, weight);
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "headway: few_rows takes matrices");
  if (bias)
    TORCH_CHECK(bias->is_contiguous() && bias->numel() == weight.size(0) && bias->scalar_type() == x.scalar_type(),
                "headway: the bias does not fit");
  return x.scalar_type() == at::kFloat ? product<float>(x, weight, bias) : product<at::BFloat16>(x, weight, bias);
}

// x [..., H] / sqrt(mean of its squares + eps) * weight [H]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check(x, weight);
  return x.scalar_type() == at::kFloat ? norm<float>(x, weight, eps) : norm<at::BFloat16>(x, weight, eps);
}

}  // namespace

TORCH_LIBRARY(headway, library) {
  library.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor", {at::Tag::pt2_compliant_tag});
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(headway, CPU, library) {
  library.impl("few_rows", few_rows);
  library.impl("rms_norm", rms_norm);
}
