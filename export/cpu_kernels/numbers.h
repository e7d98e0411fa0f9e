// Vectors of float32, and bfloat16 as its bits. The compiler lowers vectors to what the processor has.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
  uint16_t bits;
};

// The same bits as another type of the same size.
template <typename To, typename From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float to_float(float number) { return number; }
inline float to_float(BFloat16 number) { return as<float>(uint32_t(number.bits) << 16); }

template <typename T>
inline T rounded(float number) {
  if constexpr (std::is_same_v<T, float>) {
    return number;
  } else {
    const uint32_t bits = as<uint32_t>(number);
    if (number != number) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to the nearest, ties to even
  }
}

inline Floats load(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return as<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// `count` numbers, zeros behind them.
template <typename T>
inline Floats load(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
  T some[LANES] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

inline void store(float* to, Floats floats) { std::memcpy(to, &floats, sizeof floats); }

}  // namespace
