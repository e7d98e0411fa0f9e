// x times a matrix of weights on a CPU: `hispec::linear_cpu`, which `linear.py` describes.
//
// Weights lie in panels of PANEL outputs, in the order in which they are read, once for up to TOKENS tokens. Each number
// of the result is one sum over the inputs from first to last, in float32: so a token's result has the same bits for any
// number of tokens and of threads.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <exception>
#include <memory>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "numbers.h"

namespace {

constexpr int VECTORS = 2;  // of a panel
constexpr int PANEL = LANES * VECTORS;
constexpr int TOKENS = 8;  // that share one reading of a panel
constexpr int MAX_DIMS = 4;

// One step over the inputs: float32 takes one, bfloat16 a pair, whose weights stand side by side.
struct OneInput {
  typedef float Weight;
  typedef float Input;
  static constexpr int INPUTS = 1;
  static void add(Floats& sum, const Floats& weights, const float* input) { sum += weights * *input; }
};

#ifdef __AVX512BF16__
struct TwoInputs {
  typedef BFloat16 Weight;
  typedef BFloat16 Input;
  static constexpr int INPUTS = 2;
  static void add(Floats& sum, const Floats& weights, const BFloat16* input) {
    int32_t pair;
    std::memcpy(&pair, input, sizeof pair);
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
  }
};
#else
struct TwoInputs {
  typedef BFloat16 Weight;
  typedef float Input;
  static constexpr int INPUTS = 2;
  static void add(Floats& sum, const Floats& weights, const float* input) {
    const Words both = as<Words>(weights);
    sum += as<Floats>(both << 16) * input[0];
    sum += as<Floats>(both & 0xffff0000u) * input[1];
  }
};
#endif

// One panel times M tokens, whose inputs stand `stride` apart.
template <typename Step, int M>
void multiply(const typename Step::Weight* panel, const typename Step::Input* x, int64_t stride, int64_t steps,
              Floats (*sums)[VECTORS]) {
  Floats mine[M][VECTORS] = {};
  for (int64_t step = 0; step < steps; step++) {
    Floats weights[VECTORS];
    std::memcpy(weights, panel + step * PANEL * Step::INPUTS, sizeof weights);
    for (int m = 0; m < M; m++)
      for (int v = 0; v < VECTORS; v++) Step::add(mine[m][v], weights[v], x + m * stride + step * Step::INPUTS);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = mine[m][v];
}

template <typename Step>
void multiply(int tokens, const typename Step::Weight* panel, const typename Step::Input* x, int64_t stride,
              int64_t steps, Floats (*sums)[VECTORS]) {
  switch (tokens) {
    case 1: return multiply<Step, 1>(panel, x, stride, steps, sums);
    case 2: return multiply<Step, 2>(panel, x, stride, steps, sums);
    case 3: return multiply<Step, 3>(panel, x, stride, steps, sums);
    case 4: return multiply<Step, 4>(panel, x, stride, steps, sums);
    case 5: return multiply<Step, 5>(panel, x, stride, steps, sums);
    case 6: return multiply<Step, 6>(panel, x, stride, steps, sums);
    case 7: return multiply<Step, 7>(panel, x, stride, steps, sums);
    default: return multiply<Step, TOKENS>(panel, x, stride, steps, sums);
  }
}

template <typename Step, typename T>
void run(int64_t tokens, int64_t num_outputs, int64_t num_inputs, const T* x, const typename Step::Weight* weight,
         const T* bias, T* out) {
  typedef typename Step::Input Input;
  const int64_t steps = (num_inputs + Step::INPUTS - 1) / Step::INPUTS, width = steps * Step::INPUTS;
  const int64_t panels = (num_outputs + PANEL - 1) / PANEL;
  const Input* inputs;
  std::unique_ptr<Input[]> widened;
  if (std::is_same_v<T, Input> && width == num_inputs) {
    inputs = reinterpret_cast<const Input*>(x);
  } else {
    widened.reset(new Input[tokens * width]);
    for (int64_t m = 0; m < tokens; m++)
      for (int64_t i = 0; i < width; i++)
        widened[m * width + i] = rounded<Input>(i < num_inputs ? to_float(x[m * num_inputs + i]) : 0.0f);
    inputs = widened.get();
  }
#pragma omp parallel for schedule(static) num_threads(std::min<int64_t>(panels, omp_get_max_threads()))
  for (int64_t p = 0; p < panels; p++) {
    const auto* panel = weight + p * steps * PANEL * Step::INPUTS;
    const int64_t first = p * PANEL, count = std::min<int64_t>(PANEL, num_outputs - first);
    float added[PANEL] = {};
    for (int64_t n = 0; bias && n < count; n++) added[n] = to_float(bias[first + n]);
    for (int64_t m = 0; m < tokens; m += TOKENS) {
      const int some = std::min<int64_t>(TOKENS, tokens - m);
      Floats sums[TOKENS][VECTORS];
      multiply<Step>(some, panel, inputs + m * width, width, steps, sums);
      for (int i = 0; i < some; i++) {
        float row[PANEL];
        std::memcpy(row, sums[i], sizeof row);
        T* to = out + (m + i) * num_outputs + first;
        for (int64_t n = 0; n < count; n++) to[n] = rounded<T>(row[n] + added[n]);
      }
    }
  }
}

}  // namespace

// sizes: tokens, outputs, inputs. bias: null, or one for each output.
extern "C" void hispec_linear(bool is_float32, const int64_t* sizes, const void* x, const void* weight,
                              const void* bias, void* out) {
  if (is_float32)
    run<OneInput>(sizes[0], sizes[1], sizes[2], static_cast<const float*>(x), static_cast<const float*>(weight),
                  static_cast<const float*>(bias), static_cast<float*>(out));
  else
    run<TwoInputs>(sizes[0], sizes[1], sizes[2], static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(weight),
                   static_cast<const BFloat16*>(bias), static_cast<BFloat16*>(out));
}

// What a package of AOTInductor calls in the operator's place.
extern "C" AOTITorchError aoti_torch_cpu_linear_cpu(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                                    int64_t num_outputs, AtenTensorHandle* out) {
  try {
    int64_t *shape, *strides, dims;
    int32_t dtype;
    void *from, *weights, *added = nullptr, *to;
    if (aoti_torch_get_dim(x, &dims) || aoti_torch_get_sizes(x, &shape) || aoti_torch_get_strides(x, &strides) ||
        aoti_torch_get_dtype(x, &dtype))
      return AOTI_TORCH_FAILURE;
    int64_t tokens = 1, result[MAX_DIMS], spans[MAX_DIMS], inner = 1;
    if (dims < 1 || dims > MAX_DIMS) return AOTI_TORCH_FAILURE;
    for (int64_t i = dims - 1, span = 1, outer = 1; i >= 0; i--) {
      if (shape[i] != 1 && strides[i] != span) return AOTI_TORCH_FAILURE;  // x is not contiguous
      span *= shape[i];
      result[i] = i == dims - 1 ? num_outputs : shape[i];
      spans[i] = outer;
      outer *= result[i];
      if (i < dims - 1) tokens *= shape[i];
      else inner = shape[i];
    }
    if (aoti_torch_empty_strided(dims, result, spans, dtype, aoti_torch_device_type_cpu(), 0, out) ||
        aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(weight, &weights) ||
        aoti_torch_get_data_ptr(*out, &to) || (bias && aoti_torch_get_data_ptr(*bias, &added)))
      return AOTI_TORCH_FAILURE;
    const int64_t sizes[] = {tokens, num_outputs, inner};
    hispec_linear(dtype == aoti_torch_dtype_float32(), sizes, from, weights, added, to);
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception&) {
    return AOTI_TORCH_FAILURE;
  }
}
