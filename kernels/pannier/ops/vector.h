// Vectors of the width that this build is for, and the few things that attention does with them.
//
// One source is compiled several times (scripts/build_kernels.py); what a build may use is said by the compiler's own
// macros. Plain vector types do most of the work, so that a processor named nowhere here has a right build as well.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

namespace pannier {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

constexpr int W = VECTOR_BYTES / 4;  // floats in a vector

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// As Python numbers them.
enum Dtype : int32_t { FLOAT32, BFLOAT16, FLOAT16 };

// Stored numbers by their bits: neither type is known to every compiler.
struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

// Whatever lies at `from`, aligned or not.
template <class Vector>
INLINE Vector read(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
INLINE void write(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

// By its bits: they may be two numbers of 16 bits.
INLINE Floats broadcast(float x) { return (Floats)(Ints{} + read<int32_t>(&x)); }

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

INLINE Ints count_up() {
    Ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    return lanes;
}

// ---- Widening: W stored numbers as floats

INLINE Floats widen(const float* from) { return read<Floats>(from); }

INLINE Floats widen(const Bf16* from) {
    return (Floats)(__builtin_convertvector(read<Shorts>(from), Bits) << 16);
}

INLINE Floats widen(const Half* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#else
    const Bits half = __builtin_convertvector(read<Shorts>(from), Bits);
    const Bits magnitude = (half & 0x7fff) << 13;
    // The exponents are 112 apart; a product moves subnormal numbers too. All ones stay all ones.
    const Bits moved = (Bits)((Floats)magnitude * 0x1p112f);
    const Bits special = (Bits)((half & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Floats)(moved | special | (half & 0x8000) << 16);
#endif
}

// The first n < W numbers, zeros behind them; nothing else is read.
template <class T>
INLINE Floats widen_first(const T* from, int n) {
    T padded[W] = {};
    std::memcpy(padded, from, n * sizeof(T));
    return widen(padded);
}

// ---- Sums over lanes

#if defined(__x86_64__)
// Lanes of both, added in pairs: after two rounds each 128 bits hold one sum of each of four vectors.
#if defined(__AVX512F__)
INLINE Floats pair_up(Floats a, Floats b) { return (Floats)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b)); }
INLINE Floats pair_pairs(Floats a, Floats b) {
    const __m512d x = (__m512d)a, y = (__m512d)b;
    return (Floats)_mm512_unpacklo_pd(x, y) + (Floats)_mm512_unpackhi_pd(x, y);
}
INLINE __m128 fold(Floats a) {
    const __m256 half = _mm512_castps512_ps256(a) + (__m256)_mm512_extractf64x4_pd((__m512d)a, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}
#elif defined(__AVX2__)
INLINE Floats pair_up(Floats a, Floats b) { return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b); }
INLINE Floats pair_pairs(Floats a, Floats b) {
    const __m256d x = (__m256d)a, y = (__m256d)b;
    return (Floats)_mm256_unpacklo_pd(x, y) + (Floats)_mm256_unpackhi_pd(x, y);
}
INLINE __m128 fold(Floats a) { return _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1); }
#else
INLINE Floats pair_up(Floats a, Floats b) { return _mm_unpacklo_ps(a, b) + _mm_unpackhi_ps(a, b); }
INLINE Floats pair_pairs(Floats a, Floats b) {
    const __m128d x = (__m128d)a, y = (__m128d)b;
    return (Floats)_mm_unpacklo_pd(x, y) + (Floats)_mm_unpackhi_pd(x, y);
}
INLINE __m128 fold(Floats a) { return a; }
#endif

// The sums of four vectors.
INLINE void write_sums(float* to, const Floats (&sums)[4]) {
    write(to, fold(pair_pairs(pair_up(sums[0], sums[1]), pair_up(sums[2], sums[3]))));
}
#else
INLINE void write_sums(float* to, const Floats (&sums)[4]) {
    for (int i = 0; i < 4; i++) {
        float sum = 0;
        for (int lane = 0; lane < W; lane++) sum += sums[i][lane];
        to[i] = sum;
    }
}
#endif

INLINE float largest_lane(Floats a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a);
#else
    float largest = a[0];
    for (int lane = 1; lane < W; lane++) largest = a[lane] > largest ? a[lane] : largest;
    return largest;
#endif
}

INLINE float sum_of_lanes(Floats a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(a);
#else
    float sum = a[0];
    for (int lane = 1; lane < W; lane++) sum += a[lane];
    return sum;
#endif
}

// ---- Moves across lanes

// Lanes of both in turn: of their lower halves, or of their upper ones.
INLINE Floats zip(Floats a, Floats b, bool upper) {
#if defined(__clang__)
    Floats zipped;
    for (int i = 0; i < W; i++) zipped[i] = (i % 2 ? b : a)[(upper ? W / 2 : 0) + i / 2];
    return zipped;
#else
    const Ints lanes = count_up();
    return __builtin_shuffle(a, b, lanes / 2 + lanes % 2 * W + (upper ? W / 2 : 0));
#endif
}

// Rows become columns. Each round moves the highest bit of a row's number to the lowest place in the lanes' numbers.
INLINE void transpose(Floats (&rows)[W]) {
#pragma GCC unroll 4
    for (int round = 1; round < W; round *= 2) {
        Floats zipped[W];
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            zipped[2 * i] = zip(rows[i], rows[i + W / 2], false);
            zipped[2 * i + 1] = zip(rows[i], rows[i + W / 2], true);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) rows[i] = zipped[i];
    }
}

// ---- Functions

constexpr float LOG2_E = 1.44269504088896340736f;

// 2^x for x < 128, to 2e-7 of it; below -126, next to nothing.
INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, NEAREST);
    const Floats rest = (Floats)_mm512_reduce_ps((__m512)x, NEAREST);  // x less that; 0 for infinity
#else
    const float round = 0x1.8p23f;
    x = larger(x, broadcast(-126.0f));
    const Floats whole = (x + round) - round;
    const Floats rest = x - whole;
#endif
    Floats power = broadcast(1.5403530e-4f);
    for (float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = power * rest + factor;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
    return (Floats)((Ints)power + (__builtin_convertvector(whole, Ints) << 23));
#endif
}

// e^x for x < 88, to 2e-7 of it; below -87, next to nothing.
INLINE Floats exponential(Floats x) { return power_of_two(x * LOG2_E); }

// tanh(x), to 2e-7.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats limited = larger(broadcast(-15.0f), x > 15.0f ? broadcast(15.0f) : x);
    const Floats power = exponential(limited * 2.0f);
    const Floats square = x * x;
    // Where both exponentials are about 1 their difference has few digits.
    const Floats near_zero = x * (1.0f + square * (-1 / 3.0f + square * (2 / 15.0f - square * (17 / 315.0f))));
    return square < 0.04f ? near_zero : (power - 1.0f) / (power + 1.0f);
}

// ---- Narrowing: one float as a stored number, rounded to the nearest, ties to even

INLINE uint32_t bits_of(float x) { return read<uint32_t>(&x); }

INLINE float narrow(float x, float) { return x; }

INLINE Bf16 narrow(float x, Bf16) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

INLINE Half narrow(float x, Half) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t rounded;
    if (magnitude > 0x7f800000)  // not a number
        rounded = 0x7e00;
    else if (magnitude >= 0x477ff000)  // rounds to 65536 or more
        rounded = 0x7c00;
    else if (magnitude >= 0x38800000)
        rounded = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    else  // subnormal: the addition of 0.5 leaves as many digits as there is room for
        rounded = bits_of(read<float>(&magnitude) + 0.5f) - bits_of(0.5f);
    return {uint16_t(sign | rounded)};
}

INLINE float widen_one(float x) { return x; }

INLINE float widen_one(Bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return read<float>(&bits);
}

INLINE float widen_one(Half x) {
    Half padded[W] = {x};
    return widen(padded)[0];
}

}  // namespace pannier
