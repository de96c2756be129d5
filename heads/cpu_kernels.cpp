// What a pass over few rows spends its time on, on CPUs, in float32 and bfloat16: products and norms.
//
// The product x W^T reads each weight from memory once, whatever the number of rows; weights in bfloat16 are widened in
// registers, or multiplied as they are where the CPU can (AVX-512 BF16). An output is one dot product whose order of additions depends on nothing but the length of a row, so a row
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

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define NATIVE_BFLOAT16
#endif

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
  static constexpr int64_t LINE = 64 / sizeof(Number);  // numbers that memory hands over at a time

  // ROWS rows from `r` on against a pair of the weight's rows from `o` on: y[r][o] = x[r] . w[o]. `next` is 1, or 0 for
  // a row without a second: it is its own, since another loop for it could round otherwise.
  template <int ROWS>
  inline void tile(int64_t r, int64_t o, int64_t next) const {
    Floats sums[ROWS][2] = {};
    const float* rows_from = x + r * inner;
    const Number* w = weight + o * inner;
    const auto add = [&](int64_t k, auto... count) {
      const Floats first = load(w + k, count...), second = load(w + next * inner + k, count...);
      if (k % LINE == 0) {  // of the next pair
        __builtin_prefetch(w + 2 * inner + k);
        __builtin_prefetch(w + 3 * inner + k);
      }
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

#ifdef NATIVE_BFLOAT16
// The same for bfloat16 with the CPU's own products of pairs, 32 numbers a step: twice as many as after widening.
struct NativeProduct {
  static constexpr int WIDTH = 32, OUTPUTS = 4;
  const at::BFloat16* x;  // [R, K]
  const at::BFloat16* weight;  // [O, K]
  const at::BFloat16* bias;  // [O] or null
  at::BFloat16* y;  // [R, O]
  int64_t rows, inner, outputs;

  // ROWS rows from `r` on against OUTPUTS rows of the weight; where there are fewer, the last one again
  template <int ROWS>
  inline void tile(int64_t r, int64_t o) const {
    __m512 sums[ROWS][OUTPUTS];
    const at::BFloat16* from[OUTPUTS];
    for (int output = 0; output < OUTPUTS; ++output) {
      from[output] = weight + std::min(o + output, outputs - 1) * inner;
      for (int row = 0; row < ROWS; ++row) sums[row][output] = _mm512_setzero_ps();
    }
    const at::BFloat16* rows_from = x + r * inner;
    const auto add = [&](int64_t k, auto... lanes) {
      __m512bh weights[OUTPUTS];
      for (int output = 0; output < OUTPUTS; ++output) {
        weights[output] = pairs(from[output] + k, lanes...);
        __builtin_prefetch(from[output] + OUTPUTS * inner + k);  // of the next outputs; beyond the end it does nothing
      }
      for (int row = 0; row < ROWS; ++row) {
        const __m512bh numbers = pairs(rows_from + row * inner + k, lanes...);
        for (int output = 0; output < OUTPUTS; ++output)
          sums[row][output] = _mm512_dpbf16_ps(sums[row][output], numbers, weights[output]);
      }
    };
    int64_t k = 0;
    for (; k + WIDTH <= inner; k += WIDTH) add(k);
    if (k < inner) add(k, (__mmask32(1) << (inner - k)) - 1);
    __m128 offsets = _mm_setzero_ps();
    if (bias)
      for (int output = 0; output < OUTPUTS; ++output)
        offsets[output] = static_cast<float>(bias[std::min(o + output, outputs - 1)]);
    for (int row = 0; row < ROWS; ++row) {
      const __m128bh found = _mm_cvtneps_pbh(_mm_add_ps(totals(sums[row]), offsets));
      at::BFloat16* to = y + (r + row) * outputs + o;
      if (o + OUTPUTS <= outputs)
        std::memcpy(to, &found, OUTPUTS * sizeof(at::BFloat16));
      else
        std::memcpy(to, &found, (outputs - o) * sizeof(at::BFloat16));
    }
  }

  static inline __m512bh pairs(const at::BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

  static inline __m512bh pairs(const at::BFloat16* from, __mmask32 lanes) {
    return (__m512bh)_mm512_maskz_loadu_epi16(lanes, from);
  }

  // the sums over the lanes of each of four
  static inline __m128 totals(const __m512 (&sums)[OUTPUTS]) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    const __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }

  inline void group(int64_t o) const {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) tile<6>(r, o);
    switch (rows - r) {
      case 1: return tile<1>(r, o);
      case 2: return tile<2>(r, o);
      case 3: return tile<3>(r, o);
      case 4: return tile<4>(r, o);
      case 5: return tile<5>(r, o);
    }
  }

  void run() const {
    const int64_t grain = std::max<int64_t>(1, 16384 / inner);
    at::parallel_for(0, (outputs + OUTPUTS - 1) / OUTPUTS, grain, [&](int64_t begin, int64_t end) {
      for (int64_t o = OUTPUTS * begin; o < std::min(OUTPUTS * end, outputs); o += OUTPUTS) group(o);
    });
  }
};
#endif

template <typename Number>
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  const Number *from = weight.const_data_ptr<Number>(), *offsets = bias ? bias->const_data_ptr<Number>() : nullptr;
  const Number* narrow = x.const_data_ptr<Number>();
  Number* to = y.mutable_data_ptr<Number>();
  const int64_t rows = x.size(0), inner = x.size(1), outputs = weight.size(0);
  if constexpr (std::is_same_v<Number, float>) {
    Product<Number>{narrow, from, offsets, to, rows, inner, outputs}.run();
  } else {
#ifdef NATIVE_BFLOAT16
    NativeProduct{narrow, from, offsets, to, rows, inner, outputs}.run();
#else
    const std::vector<float> wide(narrow, narrow + x.numel());
    Product<Number>{wide.data(), from, offsets, to, rows, inner, outputs}.run();
#endif
  }
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
