// Vectors of the width that this build is for, and the few things that attention does with them.
//
// One source is compiled several times (scripts/build_kernels.py); what a build may use is said by the compiler's own
// macros. Plain vector types do most of the work, so that a processor named nowhere here has a right build as well.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>

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
typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Of what Python says to this library; native.py has the same number.
constexpr int ABI = 3;

// As Python numbers them.
enum Dtype : int32_t { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 };

// Stored numbers by their bits: none of these types is known to every compiler.
struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};
struct Fp8 {  // e4m3: sign, four bits of exponent, three of mantissa
    uint8_t bits;
};

// Whether numbers are stored as multiples of a scale that each row has.
template <class T>
constexpr bool IS_SCALED = std::is_same_v<T, int8_t> || std::is_same_v<T, Fp8>;

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

// W bytes with a sign; the compiler's own conversions of so many are slow.
INLINE Ints widen_whole(const void* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(from)));
#else
    return __builtin_convertvector(read<Bytes>(from), Ints);
#endif
}

INLINE Floats widen(const int8_t* from) { return __builtin_convertvector(widen_whole(from), Floats); }

// The bits are put where a float has them. The exponents are 120 apart; a product moves subnormal numbers too. What
// isn't a number is not asked about: it is never stored.
INLINE Floats widen(const Fp8* from) { return (Floats)(widen_whole(from) << 20 & int32_t(0x87f00000)) * 0x1p120f; }

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

#if defined(__AVX512F__)
// 4 by 4: of four bytes within each sixteen of a row, then of the sixteens.
INLINE void transpose_fours(Floats& a, Floats& b, Floats& c, Floats& d) {
    const __m512d ab_low = (__m512d)_mm512_unpacklo_ps(a, b), ab_high = (__m512d)_mm512_unpackhi_ps(a, b);
    const __m512d cd_low = (__m512d)_mm512_unpacklo_ps(c, d), cd_high = (__m512d)_mm512_unpackhi_ps(c, d);
    a = (Floats)_mm512_unpacklo_pd(ab_low, cd_low);
    b = (Floats)_mm512_unpackhi_pd(ab_low, cd_low);
    c = (Floats)_mm512_unpacklo_pd(ab_high, cd_high);
    d = (Floats)_mm512_unpackhi_pd(ab_high, cd_high);
}

INLINE void transpose_sixteens(Floats& a, Floats& b, Floats& c, Floats& d) {
    const __m512 ab_low = _mm512_shuffle_f32x4(a, b, 0x44), ab_high = _mm512_shuffle_f32x4(a, b, 0xee);
    const __m512 cd_low = _mm512_shuffle_f32x4(c, d, 0x44), cd_high = _mm512_shuffle_f32x4(c, d, 0xee);
    a = (Floats)_mm512_shuffle_f32x4(ab_low, cd_low, 0x88);
    b = (Floats)_mm512_shuffle_f32x4(ab_low, cd_low, 0xdd);
    c = (Floats)_mm512_shuffle_f32x4(ab_high, cd_high, 0x88);
    d = (Floats)_mm512_shuffle_f32x4(ab_high, cd_high, 0xdd);
}

// Rows become columns.
INLINE void transpose(Floats (&rows)[16]) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) transpose_fours(rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) transpose_sixteens(rows[i], rows[i + 4], rows[i + 8], rows[i + 12]);
}
#else
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
#endif

// ---- Functions

constexpr float LOG2_E = 1.44269504088896340736f;

// 2^x for x < 128, to 2e-7 of it; below -126, next to nothing. What isn't a number stays none.
INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, NEAREST);
    const Floats rest = (Floats)_mm512_reduce_ps((__m512)x, NEAREST);  // x less that; 0 for infinity
#else
    const float round = 0x1.8p23f;
    x = larger(broadcast(-126.0f), x);
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

INLINE Bytes lowest_bytes(Bits x) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    const __m256i fours = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi64x(0x0c080400));  // low in either half
    const int32_t both[] = {_mm256_extract_epi32(fours, 0), _mm256_extract_epi32(fours, 4)};
    return read<Bytes>(both);
#else
    return __builtin_convertvector((Ints)x, Bytes);
#endif
}

// W floats of at most 127 as whole numbers: the sum has them as its last digits.
INLINE Bytes narrow_all(Floats x, int8_t) { return lowest_bytes((Bits)(x + 0x1.8p23f)); }

// W floats of at most 448.
INLINE Bytes narrow_all(Floats x, Fp8) {
    const Bits sign = (Bits)x >> 24 & 0x80, magnitude = (Bits)x & 0x7fffffff;
    const Bits normal = (magnitude - (120 << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    // The addition of 2^14 leaves as many digits as there is room for.
    const Bits subnormal = (Bits)((Floats)magnitude + 0x1p14f) - 0x46800000;
    return lowest_bytes(sign | (magnitude < 0x3c800000 ? subnormal : normal));
}

INLINE float widen_one(float x) { return x; }

INLINE float widen_one(Bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return read<float>(&bits);
}

template <class T>
INLINE float widen_one(T x) {
    return widen_first(&x, 1)[0];
}

}  // namespace pannier
