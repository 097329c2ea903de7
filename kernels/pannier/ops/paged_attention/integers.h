// Few queries over keys in int8: everything is multiplied in whole numbers.
//
// A query is rounded to 15 bits and a sign, a weight to 16 bits, each in two bytes whose products are added separately:
// what this adds to the error of int8 can't be measured. The instruction multiplies bytes without a sign by bytes with
// one, four products at a time, so keys are moved up by 128, which the query's own sum takes back.
#pragma once

#include "few_rows.h"

#if defined(__AVX512VNNI__)
namespace pannier {

struct Integers : FewQueries {
    typedef Integers Loops;
    typedef int8_t Stored;
    static constexpr bool HAS_SCALES = true;
    typedef int8_t Query;  // 64 high bytes, then as many low ones, of 64 elements
    struct Weights {
        uint8_t high[TILE + 4], low[TILE + 4];  // four may reach over the end
    };
    static constexpr int QUERY_PARTS = 2;
    static constexpr int WIDTH = 64;
    static constexpr float MOST_STEPS = 65535.0f;  // of a weight

    // Written out, as GCC 12 copies every sum before and after the intrinsic.
    static INLINE void add_bytes(__m512i& sum, __m512i without_sign, __m512i with_sign) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(without_sign), "v"(with_sign));
    }

    static INLINE __m512i total(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

    // ---- Queries

    static void take_query(Queries<Integers>& queries, int i, const char* from, const Plan& plan) {
        const float largest = largest_element(from, plan);
        // Sums of products with keys must fit into 32 bits.
        const float limit = std::min(32512.0f, 0x1p31f / (128.0f * plan.k_size) - 1.0f);
        const float factor = largest > 0x1p-100f && largest < INFINITY ? limit / largest : 0.0f;
        int8_t* q = queries.q + i * queries.q_stride;
        __m512i sum = {};
        each_vector(from, plan, [&](int d, Floats elements) {
            const __m512i whole = factor == 0.0f ? __m512i{} : _mm512_cvtps_epi32((__m512)(elements * factor));
            sum = _mm512_add_epi32(sum, whole);
            int8_t* to = q + 2 * (d - d % WIDTH) + d % WIDTH;
            write(to, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8)));
            write(to + WIDTH, _mm512_cvtepi32_epi8(whole));
        });
        queries.offset[i] = 128 * _mm512_reduce_add_epi32(sum);
        queries.unit[i] = largest / limit;
    }

    // ---- Scores

    // Add the products of `Q` queries with up to 64 elements of 16 keys, each of which becomes a column.
    template <int Q, class Load>
    static INLINE void add_products(__m512i (&high)[Q], __m512i (&low)[Q], const int8_t* q, int q_stride,
                                    const Load& load) {
        Floats rows[16];  // four bytes in each lane
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) rows[k] = (Floats)(load(k) ^ _mm512_set1_epi8(-128));
        transpose(rows);
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++)
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++) {
                const int8_t* four = q + i * q_stride + 4 * t;
                add_bytes(high[i], (__m512i)rows[t], _mm512_set1_epi32(read<int32_t>(four)));
                add_bytes(low[i], (__m512i)rows[t], _mm512_set1_epi32(read<int32_t>(four + WIDTH)));
            }
    }

    // Scores of `Q` queries with 16 keys; behind the last key it is taken again, as what comes there may be anything.
    template <int Q, class Row>
    static INLINE void score_keys(const Queries<Integers>& queries, int first, int size, __m512i (&totals)[Q],
                                  Ahead<int8_t>& ahead, const Row& row) {
        __m512i high[Q] = {}, low[Q] = {};
        const int8_t* q = queries.q + (queries.first + first) * queries.q_stride;
        int d = 0;
        for (; d + WIDTH <= size; d += WIDTH) {
            ahead.step(16 * WIDTH);
            add_products<Q>(high, low, q + 2 * d, queries.q_stride, [&](int k) { return read<__m512i>(row(k) + d); });
        }
        if (d < size) {
            ahead.step(16 * WIDTH);
            const __mmask64 there = (__mmask64(1) << (size - d)) - 1;
            add_products<Q>(high, low, q + 2 * d, queries.q_stride,
                            [&](int k) { return _mm512_maskz_loadu_epi8(there, row(k) + d); });
        }
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++)
            totals[i] = _mm512_sub_epi32(total(high[i], low[i]), _mm512_set1_epi32(queries.offset[queries.first + first + i]));
    }

    template <int Q>
    static void score_run(Queries<Integers>& queries, int first, const Run<int8_t>& run, int size,
                          Ahead<int8_t>& ahead) {
        __m512i totals[Q];
        int key = 0;
        for (; key + 16 <= run.count; key += 16) {
            const int8_t* keys = run.keys + ptrdiff_t(key) * size;
            score_keys<Q>(queries, first, size, totals, ahead, [&](int k) { return keys + ptrdiff_t(k) * size; });
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++)
                write(queries.scores[first + i] + run.first + key, _mm512_cvtepi32_ps(totals[i]));
        }
        if (key < run.count) {
            score_keys<Q>(queries, first, size, totals, ahead, [&](int k) {
                return run.keys + ptrdiff_t(std::min(key + k, run.count - 1)) * size;
            });
            const __mmask16 there = (1 << (run.count - key)) - 1;
            for (int i = 0; i < Q; i++)
                _mm512_mask_storeu_ps(queries.scores[first + i] + run.first + key, there,
                                      _mm512_cvtepi32_ps(totals[i]));
        }
    }

    // ---- Weights

    static INLINE void write_weights(Weights& to, int key, Floats weights, float per_step) {
        const __m512i whole = _mm512_cvtps_epi32((__m512)(weights * per_step));
        write(to.high + key, _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        write(to.low + key, _mm512_cvtepi32_epi8(whole));
    }

    // ---- Outputs

    // The lower or the upper half of every 16 bytes of four rows: four bytes of each column side by side.
    template <bool UPPER>
    static INLINE void interleave(const __m512i (&rows)[4], __m512i (&fours)[2]) {
        const __m512i ab = UPPER ? _mm512_unpackhi_epi8(rows[0], rows[1]) : _mm512_unpacklo_epi8(rows[0], rows[1]);
        const __m512i cd = UPPER ? _mm512_unpackhi_epi8(rows[2], rows[3]) : _mm512_unpacklo_epi8(rows[2], rows[3]);
        fours[0] = _mm512_unpacklo_epi16(ab, cd);
        fours[1] = _mm512_unpackhi_epi16(ab, cd);
    }

    // Add the products of weights with four rows of values, in the lower or the upper half of up to 64 columns.
    template <int Q, bool UPPER>
    static INLINE void add_four(__m512i (&high)[Q][2], __m512i (&low)[Q][2], const Weights* weights, int key,
                                const __m512i (&rows)[4]) {
        __m512i fours[2];
        interleave<UPPER>(rows, fours);
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) {
            const __m512i high_four = _mm512_set1_epi32(read<int32_t>(weights[i].high + key));
            const __m512i low_four = _mm512_set1_epi32(read<int32_t>(weights[i].low + key));
#pragma GCC unroll 2
            for (int s = 0; s < 2; s++) {
                add_bytes(high[i][s], high_four, fours[s]);
                add_bytes(low[i][s], low_four, fours[s]);
            }
        }
    }

    // Add that half of a run's values to the outputs of `Q` queries.
    template <int Q, bool UPPER, class Load>
    static INLINE void add_half(Queries<Integers>& queries, int first, const Run<int8_t>& run, int size, int d,
                                Ahead<int8_t>& ahead, const Load& load) {
        __m512i high[Q][2] = {}, low[Q][2] = {}, rows[4];
        const Weights* weights = queries.weights + first;
        const int8_t* values = run.values + d;
        int key = 0;
        for (; key + 4 <= run.count; key += 4, values += 4 * size) {
            ahead.step(4 * WIDTH / 2);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) rows[k] = load(values + k * size);
            add_four<Q, UPPER>(high, low, weights, run.first + key, rows);
        }
        if (key < run.count) {
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) rows[k] = key + k < run.count ? load(values + k * size) : __m512i{};
            add_four<Q, UPPER>(high, low, weights, run.first + key, rows);
        }
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 2
            for (int s = 0; s < 2; s++) {
                float* o = queries.o + (queries.first + first + i) * queries.o_stride + d + (2 * UPPER + s) * W;
                const Floats sum = (Floats)_mm512_cvtepi32_ps(total(high[i][s], low[i][s]));
                write(o, read<Floats>(o) + sum * queries.step[first + i]);
            }
    }

    template <int Q>
    static void add_run(Queries<Integers>& queries, int first, const Run<int8_t>& run, int size,
                        Ahead<int8_t>& ahead) {
        const auto add = [&](int d, const auto& load) __attribute__((always_inline)) {
            add_half<Q, false>(queries, first, run, size, d, ahead, load);
            add_half<Q, true>(queries, first, run, size, d, ahead, load);
        };
        int d = 0;
        for (; d + WIDTH <= size; d += WIDTH) add(d, [](const int8_t* from) { return read<__m512i>(from); });
        if (d < size) {
            const __mmask64 there = (__mmask64(1) << (size - d)) - 1;
            add(d, [&](const int8_t* from) { return _mm512_maskz_loadu_epi8(there, from); });
        }
    }

    // Of every 16 columns, each vector has four.
    static INLINE void in_order(Floats* sums) {
        transpose_sixteens(sums[0], sums[1], sums[2], sums[3]);
    }

  private:
    // Call `work` with the number of an element and W of them, zeros behind the last one.
    template <class Work>
    static INLINE void each_vector(const char* from, const Plan& plan, const Work& work) {
        const int bytes = plan.q_type == FLOAT32 ? 4 : 2;
        for (int d = 0; d < plan.k_size; d += W) {
            Floats elements = {};
            copy_query(reinterpret_cast<float*>(&elements), from + d * bytes, plan.q_type, std::min(W, plan.k_size - d));
            work(d, elements);
        }
    }

    // Its magnitude; if an element isn't a number, this isn't either.
    static float largest_element(const char* from, const Plan& plan) {
        Floats largest = {}, no_number = {};
        each_vector(from, plan, [&](int, Floats elements) {
            largest = larger((Floats)((Ints)elements & 0x7fffffff), largest);
            no_number += elements * 0.0f;
        });
        return largest_lane(largest) + sum_of_lanes(no_number);
    }
};

}  // namespace pannier
#endif
