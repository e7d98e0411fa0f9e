// Attention over pages on a CPU: `hispec::paged_attention_cpu`, which `attention.py` describes.
//
// Every query is computed by itself and in one order: chunks of CHUNK slots from the text's start, each with a softmax of
// its own, merged from left to right. So a token's result has the same bits for every T, B and M and any number of
// threads. What a query may not see weighs 0 if a later one of its call sees it, and else is not read. Sums are in float32.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

constexpr int CHUNK = 64;  // slots
constexpr int TOKENS = 8;  // queries that a chunk of keys is brought for
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline float sum_of(Floats v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max_of(Floats v) {
  float top = v[0];
  for (int i = 1; i < LANES; i++) top = std::max(top, v[i]);
  return top;
}

inline Floats exp_of(Floats x) {  // x <= 0; Cephes' polynomial
  const Floats least = Floats{} - 87.0f, magic = Floats{} + 12582912.0f;
  x = x < least ? least : x;
  const Floats n = (x * 1.44269504088896341f + magic) - magic;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = Floats{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * as<Floats>((__builtin_convertvector(n, Ints) + 127) << 23);
}

// 16 x 16 in registers: four rounds, each of which swaps halves of that size between rows of that distance.
inline void transpose(Floats* rows) {
#define SWAP(D, LOW, HIGH)                                   \
  for (int i = 0; i < LANES; i++)                            \
    if (!(i & D)) {                                          \
      Floats a = rows[i], b = rows[i + D];                   \
      rows[i] = __builtin_shuffle(a, b, Ints LOW);           \
      rows[i + D] = __builtin_shuffle(a, b, Ints HIGH);      \
    }
#define LIST(...) {__VA_ARGS__}
  SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#undef SWAP
#undef LIST
}

struct Sizes {
  int64_t batch, length, num_heads, num_kv_heads, groups, head_dim, width, block_size, max_blocks;  // width: whole lanes
};

// What rows hold of one chunk, or of the chunks so far.
struct Partial {
  float* top;    // [rows]
  float* total;  // [rows]
  float* mixed;  // [rows, width]
};

template <typename T>
struct Scratch {
  std::unique_ptr<float[]> keys, weights;
  const T* values[CHUNK];
  Scratch(int rows, int width) : keys(new float[width * CHUNK]), weights(new float[rows * CHUNK]) {}
};

template <int R, typename T>
void mix(const Sizes& z, const T* const* values, int count, const float* weights, float* mixed) {
  constexpr int V = 4;  // vectors of a value at once
  for (int d = 0; d < z.width; d += V * LANES) {
    const int left = z.head_dim - d, vectors = std::min<int>(V, (z.width - d) / LANES);
    Floats sums[R][V] = {};
    auto over = [&](auto whole) {
      for (int i = 0; i < count; i++)
        for (int e = 0; e < (whole ? V : vectors); e++) {
          const Floats value = whole ? load(values[i] + d + e * LANES) : load(values[i] + d + e * LANES, left - e * LANES);
          for (int r = 0; r < R; r++) sums[r][e] += value * weights[r * CHUNK + i];
        }
    };
    if (left >= V * LANES) over(std::true_type{}); else over(std::false_type{});
    for (int r = 0; r < R; r++)
      for (int e = 0; e < vectors; e++) store(mixed + r * z.width + d + e * LANES, sums[r][e]);
  }
}

template <int R>
void score(const Sizes& z, const float* keys, const float* query, float* scores) {
  for (int i = 0; i < CHUNK; i += 2 * LANES) {
    Floats sums[R][2] = {};
    for (int d = 0; d < z.head_dim; d++) {
      const Floats a = load(keys + d * CHUNK + i), b = load(keys + d * CHUNK + i + LANES);
      for (int r = 0; r < R; r++) {
        sums[r][0] += a * query[r * z.width + d];
        sums[r][1] += b * query[r * z.width + d];
      }
    }
    for (int r = 0; r < R; r++) {
      store(scores + r * CHUNK + i, sums[r][0]);
      store(scores + r * CHUNK + i + LANES, sums[r][1]);
    }
  }
}

template <typename F>
void in_groups(int rows, F&& call) {
  int row = 0;
  for (; rows - row >= 6; row += 6) call(row, std::integral_constant<int, 6>{});
  for (; rows - row >= 3; row += 3) call(row, std::integral_constant<int, 3>{});
  for (; row < rows; row++) call(row, std::integral_constant<int, 1>{});
}

// Slots [start, start + count) of one row and KV head, for `rows` queries [rows, width] at `positions`.
template <typename T>
void attend(const Sizes& z, const T* k, const T* v, const int64_t* table, int64_t start, int count, const float* query,
            const int64_t* positions, int rows, Scratch<T>& scratch, Partial out) {
  const T* cached[CHUNK];
  const int64_t stride = z.num_kv_heads * z.head_dim;
  int64_t block = start / z.block_size, inside = start % z.block_size;
  for (int i = 0; i < count; i++) {
    const int64_t at = (table[block] * z.block_size + inside) * stride;
    if (++inside == z.block_size) block++, inside = 0;
    cached[i] = k + at;
    scratch.values[i] = v + at;
    for (int64_t line = 0; line < z.head_dim * int64_t(sizeof(T)); line += 64) {  // rows lie far apart: all at once
      __builtin_prefetch(reinterpret_cast<const char*>(cached[i]) + line);
      __builtin_prefetch(reinterpret_cast<const char*>(scratch.values[i]) + line);
    }
  }
  float* keys = scratch.keys.get();
  for (int i = 0; i < CHUNK; i += LANES)
    for (int d = 0; d < z.width; d += LANES) {
      Floats tile[LANES];
      for (int j = 0; j < LANES; j++) tile[j] = i + j < count ? load(cached[i + j] + d, z.head_dim - d) : Floats{};
      transpose(tile);
      for (int j = 0; j < LANES; j++) store(keys + (d + j) * CHUNK + i, tile[j]);
    }
  float* weights = scratch.weights.get();
  in_groups(rows, [&](int row, auto R) { score<R.value>(z, keys, query + row * z.width, weights + row * CHUNK); });
  for (int row = 0; row < rows; row++) {
    float* mine = weights + row * CHUNK;
    const int64_t seen = std::min<int64_t>(count, positions[row] + 1 - start);
    out.top[row] = NEVER;
    out.total[row] = 0;
    for (int64_t i = std::max<int64_t>(seen, 0); i < CHUNK; i++) mine[i] = seen > 0 ? NEVER : 0;
    if (seen <= 0) continue;
    Floats top = load(mine), total = {};
    for (int i = LANES; i < CHUNK; i += LANES) {
      const Floats other = load(mine + i);
      top = other > top ? other : top;
    }
    const float most = max_of(top);
    for (int i = 0; i < CHUNK; i += LANES) {
      const Floats x = load(mine + i), weight = x == NEVER ? Floats{} : exp_of(x - most);
      total += weight;
      store(mine + i, weight);
    }
    out.top[row] = most;
    out.total[row] = sum_of(total);
  }
  in_groups(rows, [&](int row, auto R) {
    mix<R.value>(z, scratch.values, count, weights + row * CHUNK, out.mixed + row * z.width);
  });
}

// The next chunk's result behind those so far. Not inlined: one order of sums wherever it is called.
__attribute__((noinline)) void merge(const Sizes& z, int rows, Partial so_far, Partial next) {
  for (int row = 0; row < rows; row++) {
    if (next.top[row] == NEVER) continue;
    float* mixed = so_far.mixed + row * z.width;
    const float* other = next.mixed + row * z.width;
    const float top = std::max(so_far.top[row], next.top[row]);
    const float old = std::exp(so_far.top[row] - top), fresh = std::exp(next.top[row] - top);
    so_far.total[row] = so_far.total[row] * old + next.total[row] * fresh;
    for (int d = 0; d < z.width; d += LANES) store(mixed + d, load(mixed + d) * old + load(other + d) * fresh);
    so_far.top[row] = top;
  }
}

template <typename T>
void run(const Sizes& z, const T* query, const T* k, const T* v, const int64_t* tables, const int64_t* positions,
         float scaling, T* out) {
  struct Block {  // tokens [first, first + count) of row b, all heads of one KV head
    int64_t b, head, first, count, last;
  };
  std::vector<Block> blocks;
  int64_t chunks = 0;
  for (int64_t b = 0; b < z.batch; b++)
    for (int64_t first = 0; first < z.length; first += TOKENS) {
      const int64_t count = std::min<int64_t>(TOKENS, z.length - first);
      int64_t last = 0;
      for (int64_t t = first; t < first + count; t++) last = std::max(last, positions[b * z.length + t]);
      for (int64_t head = 0; head < z.num_kv_heads; head++) blocks.push_back({b, head, first, count, last});
      chunks = std::max(chunks, last / CHUNK + 1);
    }
  const int rows = std::min<int64_t>(TOKENS, z.length) * z.groups;
  const int64_t size = rows * (z.width + 2);
  // few blocks: chunks side by side, merged afterwards, else threads would wait for the longest row
  const int64_t split = int64_t(blocks.size()) < 4 * omp_get_max_threads() ? chunks : 1;
  std::unique_ptr<float[]> partials(split > 1 ? new float[blocks.size() * split * size] : nullptr);
  auto partial = [&](float* at) { return Partial{at, at + rows, at + 2 * rows}; };
  auto empty = [&](float* at) {
    std::fill(at, at + rows, NEVER);
    std::fill(at + rows, at + size, 0.0f);
    return partial(at);
  };
  auto finish = [&](const Block& one, Partial whole) {
    for (int row = 0; row < one.count * z.groups; row++) {
      T* to = out + ((one.b * z.length + one.first + row / z.groups) * z.num_heads + one.head * z.groups + row % z.groups) * z.head_dim;
      for (int d = 0; d < z.head_dim; d++) to[d] = rounded<T>(whole.mixed[row * z.width + d] / whole.total[row]);
    }
  };
  const int64_t units = blocks.size() * split;
#pragma omp parallel num_threads(std::min<int64_t>(units, omp_get_max_threads()))
  {
    Scratch<T> scratch(rows, z.width);
    std::vector<float> folded(rows * z.width);
    std::vector<int64_t> places(rows);
    std::unique_ptr<float[]> so_far(new float[size]), next(new float[size]);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; unit++) {
      const Block& one = blocks[unit / split];
      const int64_t chunk = unit % split;
      if (chunk * CHUNK > one.last) continue;
      const int mine = one.count * z.groups;
      for (int row = 0; row < mine; row++) {
        const int64_t token = one.b * z.length + one.first + row / z.groups;
        const T* from = query + (token * z.num_heads + one.head * z.groups + row % z.groups) * z.head_dim;
        places[row] = std::max<int64_t>(positions[token], 0);
        for (int d = 0; d < z.head_dim; d++) folded[row * z.width + d] = to_float(from[d]) * scaling;
      }
      auto over = [&](int64_t chunk, Partial to) {
        const int64_t start = chunk * CHUNK, count = std::min<int64_t>(CHUNK, one.last + 1 - start);
        attend(z, k + one.head * z.head_dim, v + one.head * z.head_dim, tables + one.b * z.max_blocks, start, count,
               folded.data(), places.data(), mine, scratch, to);
      };
      if (split > 1) {
        over(chunk, partial(&partials[unit * size]));
        continue;
      }
      Partial to = empty(so_far.get());
      for (int64_t i = 0; i * CHUNK <= one.last; i++) {
        over(i, partial(next.get()));
        merge(z, mine, to, partial(next.get()));
      }
      finish(one, to);
    }
  }
  if (split == 1) return;
  std::unique_ptr<float[]> whole(new float[size]);
  for (size_t i = 0; i < blocks.size(); i++) {
    Partial to = empty(whole.get());
    for (int64_t chunk = 0; chunk * CHUNK <= blocks[i].last; chunk++)
      merge(z, blocks[i].count * z.groups, to, partial(&partials[(i * split + chunk) * size]));
    finish(blocks[i], to);
  }
}

}  // namespace

// sizes: B, T, H, K, head_dim, S, M
extern "C" void hispec_paged_attention(bool is_float32, const int64_t* sizes, const void* query, const void* k,
                                       const void* v, const int64_t* block_table, const int64_t* positions,
                                       double scaling, void* out) {
  Sizes z{};
  z.batch = sizes[0], z.length = sizes[1], z.num_heads = sizes[2], z.num_kv_heads = sizes[3], z.head_dim = sizes[4];
  z.block_size = sizes[5], z.max_blocks = sizes[6];
  z.groups = z.num_heads / z.num_kv_heads;
  z.width = (z.head_dim + LANES - 1) / LANES * LANES;
  auto go = [&](auto example) {
    using T = decltype(example);
    run(z, static_cast<const T*>(query), static_cast<const T*>(k), static_cast<const T*>(v), block_table, positions,
        float(scaling), static_cast<T*>(out));
  };
  is_float32 ? go(float{}) : go(BFloat16{});
}

// What a package of AOTInductor calls in the operator's place; all tensors are contiguous.
extern "C" AOTITorchError aoti_torch_cpu_paged_attention_cpu(AtenTensorHandle query, AtenTensorHandle k_cache,
                                                             AtenTensorHandle v_cache, AtenTensorHandle block_table,
                                                             AtenTensorHandle positions, double scaling,
                                                             AtenTensorHandle* out) {
  try {
    int64_t *shape, *strides, *pages, *table;
    int32_t dtype;
    void* data[6];
    const AtenTensorHandle inputs[] = {query, k_cache, v_cache, block_table, positions};
    if (aoti_torch_get_sizes(query, &shape) || aoti_torch_get_strides(query, &strides) ||
        aoti_torch_get_sizes(k_cache, &pages) || aoti_torch_get_sizes(block_table, &table) ||
        aoti_torch_get_dtype(query, &dtype) ||
        aoti_torch_empty_strided(4, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, out))
      return AOTI_TORCH_FAILURE;
    for (int i = 0; i < 5; i++)
      if (aoti_torch_get_data_ptr(inputs[i], &data[i])) return AOTI_TORCH_FAILURE;
    if (aoti_torch_get_data_ptr(*out, &data[5])) return AOTI_TORCH_FAILURE;
    const int64_t sizes[] = {shape[0], shape[1], shape[2], pages[2], shape[3], pages[1], table[1]};
    hispec_paged_attention(dtype == aoti_torch_dtype_float32(), sizes, data[0], data[1], data[2],
                           static_cast<const int64_t*>(data[3]), static_cast<const int64_t*>(data[4]), scaling, data[5]);
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception&) {
    return AOTI_TORCH_FAILURE;
  }
}
