// x W^T for few rows x on CPUs: each weight is read from memory once, whatever the number of rows.
//
// An output is one dot product whose order of additions depends on nothing but the length of a row, so a row gives the
// same bits alone, beside others, and with any number of threads. Weights in bfloat16 are widened in registers.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>

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

// ROWS rows of x against a pair of the weight's rows: y[r][o] = x[r] . w[o]. `next` is 1, or 0 for a row without a
// second: it is its own, since another loop for it could round otherwise.
template <int ROWS, typename Weight>
inline void tile(const float* x, const Weight* w, float* y, int64_t inner, int64_t y_stride, int64_t next) {
  Floats sums[ROWS][2] = {};
  const auto add = [&](int64_t k, auto... count) {
    const Floats first = load(w + k, count...), second = load(w + next * inner + k, count...);
    for (int r = 0; r < ROWS; ++r) {
      const Floats row = load(x + r * inner + k, count...);
      sums[r][0] += row * first;
      sums[r][1] += row * second;
    }
  };
  int64_t k = 0;
  for (; k + LANES <= inner; k += LANES) add(k);
  if (k < inner) add(k, inner - k);
  for (int r = 0; r < ROWS; ++r)
    for (int o = 0; o < 2; ++o) {
      float sum = 0;
      for (int lane = 0; lane < LANES; ++lane) sum += sums[r][o][lane];
      y[r * y_stride + o * next] = sum;
    }
}

template <typename Weight>
inline void all_rows(const float* x, const Weight* w, float* y, int64_t rows, int64_t inner, int64_t y_stride,
                     int64_t next) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) tile<6>(x + r * inner, w, y + r * y_stride, inner, y_stride, next);
  x += r * inner;
  y += r * y_stride;
  switch (rows - r) {
    case 1: return tile<1>(x, w, y, inner, y_stride, next);
    case 2: return tile<2>(x, w, y, inner, y_stride, next);
    case 3: return tile<3>(x, w, y, inner, y_stride, next);
    case 4: return tile<4>(x, w, y, inner, y_stride, next);
    case 5: return tile<5>(x, w, y, inner, y_stride, next);
  }
}

template <typename Weight>
void product(const float* x, const Weight* w, float* y, int64_t rows, int64_t inner, int64_t outputs) {
  const int64_t grain = std::max<int64_t>(1, 32768 / inner);
  at::parallel_for(0, (outputs + 1) / 2, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = 2 * begin; o < std::min(2 * end, outputs); o += 2)
      all_rows(x, w + o * inner, y + o, rows, inner, outputs, static_cast<int64_t>(o + 1 < outputs));
  });
}

// x float32 [R, K], weight float32 or bfloat16 [O, K], both contiguous -> float32 [R, O]
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "few_rows: shapes do not fit");
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && weight.is_contiguous(), "few_rows: layout");
  const int64_t rows = x.size(0), inner = x.size(1), outputs = weight.size(0);
  at::Tensor y = at::empty({rows, outputs}, x.options());
  if (weight.scalar_type() == at::kFloat)
    product(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), y.mutable_data_ptr<float>(), rows, inner, outputs);
  else if (weight.scalar_type() == at::kBFloat16)
    product(x.const_data_ptr<float>(), weight.const_data_ptr<at::BFloat16>(), y.mutable_data_ptr<float>(), rows, inner,
            outputs);
  else
    TORCH_CHECK(false, "few_rows: weights of type ", weight.scalar_type());
  return y;
}

}  // namespace

TORCH_LIBRARY(headway, library) {
  library.def("few_rows(Tensor x, Tensor weight) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(headway, CPU, library) { library.impl("few_rows", few_rows); }
