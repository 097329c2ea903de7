// Few queries in bf16 over keys in bf16, or in fp8 as bf16: two products at a time are added to an fp32 sum. Keys come
// in pairs for that: their values are interleaved.
#pragma once

#include "few_rows.h"

#if defined(__AVX512BF16__)
namespace pannier {

struct Pairs : FewQueries {
    typedef Bf16 Query;
    struct Weights {
        Bf16 of[TILE + W];  // a pair may reach over the end
    };
    typedef __m512i Weight;
    typedef __m512i Loaded;
    static constexpr int WIDTH = 2 * W;
    static constexpr int KEYS = 2;
    static constexpr int SUMS = 2;

    static INLINE Loaded load_query(const Bf16* from) { return read<__m512i>(from); }
    static INLINE Floats add(Floats sum, Loaded a, Loaded b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    static INLINE Weight load_weight(const Bf16* from) { return _mm512_set1_epi32(read<int32_t>(from)); }
    static INLINE void write_bf16(Bf16* to, Floats x) { write(to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
    static INLINE void add_values(Floats* sums, Weight weights, const Loaded* values) {
        sums[0] = add(sums[0], weights, values[0]);
        sums[1] = add(sums[1], weights, values[1]);
    }
    static INLINE void interleave(Loaded* rows) {
        const Loaded low = _mm512_unpacklo_epi16(rows[0], rows[1]);
        rows[1] = _mm512_unpackhi_epi16(rows[0], rows[1]);
        rows[0] = low;
    }
    // Interleaving takes the lower and the upper half of every 128 bits; this puts the sums back in order.
    static INLINE void in_order(Floats* sums) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = first + _mm512_set1_epi64(0x0000000800000008);
        const Floats low = sums[0], high = sums[1];
        sums[0] = (Floats)_mm512_permutex2var_ps((__m512)low, first, (__m512)high);
        sums[1] = (Floats)_mm512_permutex2var_ps((__m512)low, second, (__m512)high);
    }
};

template <class T>
struct Paired;

template <>
struct Paired<Bf16> : Pairs {
    typedef Products<Paired> Loops;
    typedef Bf16 Stored;
    static constexpr bool HAS_SCALES = false;
    static constexpr float MOST_STEPS = 1.0f;

    static void take_query(Queries<Paired>& queries, int i, const char* from, const Plan& plan) {
        copy_query(queries.q + i * queries.q_stride, from, plan.q_type, plan.k_size);
    }
    static INLINE Loaded load(const Bf16* from) { return read<__m512i>(from); }
    static INLINE Loaded load_first(const Bf16* from, int n) {
        return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, from);
    }
    static INLINE void write_weights(Weights& to, int key, Floats weights, float) { write_bf16(to.of + key, weights); }
    static INLINE Floats begin_sum(const float* o) { return read<Floats>(o); }
    static INLINE void end_sum(float* o, Floats sum, float) { write(o, sum); }
};

// The bits of an fp8 are put where a bf16 has them, which makes numbers 2^120 times as small; so queries and weights are
// made larger. The product of bf16 takes subnormal numbers for 0: those of fp8, below 2^-14 of the largest.
template <>
struct Paired<Fp8> : Pairs {
    typedef Products<Paired> Loops;
    typedef Fp8 Stored;
    static constexpr bool HAS_SCALES = true;
    static constexpr float MOST_STEPS = 0x1p27f;  // of a weight; none that counts becomes too small for a bf16 then

    static void take_query(Queries<Paired>& queries, int i, const char* from, const Plan& plan) {
        Bf16* q = queries.q + i * queries.q_stride;
        copy_query(q, from, plan.q_type, plan.k_size);
        Ints exponent = {};  // of the largest element, 127 for 1
        for (int d = 0; d < queries.q_stride; d += W) {
            const Ints found = ((Ints)widen(q + d) & 0x7fffffff) >> 23;
            exponent = found > exponent ? found : exponent;
        }
        const int moved = std::min(126, 247 - _mm512_reduce_max_epi32((__m512i)exponent));  // to about 2^120
        const float factor = std::ldexp(1.0f, moved);
        for (int d = 0; d < queries.q_stride; d += W) write_bf16(q + d, widen(q + d) * factor);
        queries.unit[i] = std::ldexp(1.0f, 120 - moved);
    }
    static INLINE Loaded put(__m256i bytes) {
        return _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4) & _mm512_set1_epi16(short(0x87f0));
    }
    static INLINE Loaded load(const Fp8* from) { return put(read<__m256i>(from)); }
    static INLINE Loaded load_first(const Fp8* from, int n) {
        return put(_mm256_maskz_loadu_epi8((__mmask32(1) << n) - 1, from));
    }
    static INLINE void write_weights(Weights& to, int key, Floats weights, float per_step) {
        write_bf16(to.of + key, weights * per_step);
    }
    static INLINE Floats begin_sum(const float*) { return Floats{}; }
    static INLINE void end_sum(float* o, Floats sum, float step) { write(o, read<Floats>(o) + sum * 0x1p120f * step); }
};

}  // namespace pannier
#endif
