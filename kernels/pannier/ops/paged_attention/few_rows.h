// The few queries of a decode row: reading the keys and values is what takes the time, so each is loaded once for all
// query heads that share it, and never written anywhere on the way.
#pragma once

#include <type_traits>

#include "queries.h"

namespace pannier {

constexpr int FEW_QUERIES = 16;    // that go over a tile while it is in the nearest cache
constexpr int HELD_QUERIES = 128;  // of all heads whose tiles are gone over in turn

// Queries worked on at once: their sums over four keys, or over as many vectors of values, should fit into registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GROUP = 4;
#else
constexpr int GROUP = 2;
#endif

// Call `work` with how many queries it takes as a constant, for all queries in groups of about the same size.
template <int LARGEST, class Work>
INLINE void in_groups(int count, const Work& work) {
    const int num_groups = (count + LARGEST - 1) / LARGEST;
    for (int g = 0, first = 0; g < num_groups; g++) {
        const int size = (count - first + num_groups - g - 1) / (num_groups - g);
        switch (size) {
            case 1: work(first, std::integral_constant<int, 1>()); break;
            case 2: work(first, std::integral_constant<int, 2>()); break;
            default:
                if constexpr (LARGEST > 2) {
                    if (size == 3) work(first, std::integral_constant<int, 3>());
                    if (size == 4) work(first, std::integral_constant<int, 4>());
                }
                if constexpr (LARGEST > 4) {
                    if (size == 5) work(first, std::integral_constant<int, 5>());
                    if (size == 6) work(first, std::integral_constant<int, 6>());
                }
        }
        first += size;
    }
}

// What all forms for few queries have.
struct FewQueries {
    static constexpr int QUERIES = HELD_QUERIES;
    static constexpr int WEIGHED = FEW_QUERIES;
    static constexpr int QUERY_PARTS = 1;  // numbers that an element takes
};

// Sums of products, for forms that keep them in floats.
template <class Form>
struct Products {
    // Products of `Q` queries with four keys, over the elements that `load` loads at `d`.
    template <int Q, class Query, class Stored, class Load>
    static INLINE void add_products(Floats (&sums)[Q][4], const Query* q, int q_stride, const Stored* const (&keys)[4],
                                    int d, const Load& load) {
        typename Form::Loaded loaded[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) loaded[k] = load(keys[k] + d);
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) {
            const auto query = Form::load_query(q + i * q_stride + d);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) sums[i][k] = Form::add(sums[i][k], query, loaded[k]);
        }
    }

    // Scores of `Q` queries from number `first` on with the keys of a run.
    template <int Q, class Stored>
    static void score_run(Queries<Form>& queries, int first, const Run<Stored>& run, int size, Ahead<Stored>& ahead) {
        const auto* q = queries.q + (queries.first + first) * queries.q_stride;
        for (int key = 0; key < run.count; key += 4) {
            // Behind the last key it is taken again, as what comes there may be anything.
            const Stored* keys[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) keys[k] = run.keys + ptrdiff_t(std::min(key + k, run.count - 1)) * size;
            Floats sums[Q][4] = {};
            int d = 0;
            for (; d + Form::WIDTH <= size; d += Form::WIDTH) {
                ahead.step(4 * Form::WIDTH * int(sizeof(Stored)));  // many at once would wait, or be dropped
                add_products<Q>(sums, q, queries.q_stride, keys, d, Form::load);
            }
            if (d < size)
                add_products<Q>(sums, q, queries.q_stride, keys, d,
                                [&](const Stored* from) { return Form::load_first(from, size - d); });
            const int count = std::min(4, run.count - key);
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++) {
                float four[4];
                write_sums(four, sums[i]);
                float* to = queries.scores[first + i] + run.first + key;
                if (count == 4)
                    std::memcpy(to, four, sizeof four);
                else
                    std::memcpy(to, four, count * sizeof(float));
            }
        }
    }

    // Add `Form::KEYS` rows of values to the sums of `Q` queries, `C` loads of each row.
    template <int Q, int C, class Stored, class Load>
    static INLINE void add_rows(Floats (&sums)[Q][C][Form::SUMS], const typename Form::Weights* weights, int key,
                                const Stored* from, int size, bool has_second, const Load& load) {
        typename Form::Weight loaded[Q];
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) loaded[i] = Form::load_weight(weights[i].of + key);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            typename Form::Loaded values[Form::KEYS];
            values[0] = load(from + c * Form::WIDTH);
            if constexpr (Form::KEYS == 2)
                values[1] = has_second ? load(from + size + c * Form::WIDTH) : typename Form::Loaded{};
            Form::interleave(values);
#pragma GCC unroll 4
            for (int i = 0; i < Q; i++) Form::add_values(sums[i][c], loaded[i], values);
        }
    }

    // Add the values of a run to the outputs of `Q` queries, in `C` loads' worth of columns from `d` on.
    template <int Q, int C, class Stored, class Load>
    static INLINE void add_columns(Queries<Form>& queries, int first, const Run<Stored>& run, int size, int d,
                                   Ahead<Stored>& ahead, const Load& load) {
        Floats sums[Q][C][Form::SUMS];
        float* o = queries.o + (queries.first + first) * queries.o_stride + d;
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
#pragma GCC unroll 2
                for (int s = 0; s < Form::SUMS; s++)
                    sums[i][c][s] = Form::begin_sum(o + i * queries.o_stride + c * Form::WIDTH + s * W);
        const auto* weights = queries.weights + first;
        const Stored* from = run.values + d;
        int key = 0;
        for (; key + Form::KEYS <= run.count; key += Form::KEYS, from += Form::KEYS * size) {
            ahead.step(Form::KEYS * C * Form::WIDTH * int(sizeof(Stored)));
            add_rows<Q, C>(sums, weights, run.first + key, from, size, true, load);
        }
        if (key < run.count) add_rows<Q, C>(sums, weights, run.first + key, from, size, false, load);
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
#pragma GCC unroll 2
                for (int s = 0; s < Form::SUMS; s++)
                    Form::end_sum(o + i * queries.o_stride + c * Form::WIDTH + s * W, sums[i][c][s],
                                  queries.step[first + i]);
    }

    // Add the values of a run to the outputs of `Q` queries from number `first` on.
    template <int Q, class Stored>
    static void add_run(Queries<Form>& queries, int first, const Run<Stored>& run, int size, Ahead<Stored>& ahead) {
        constexpr int WIDTH = Form::WIDTH, C = 4 / Form::SUMS;
        int d = 0;
        for (; d + C * WIDTH <= size; d += C * WIDTH)
            add_columns<Q, C>(queries, first, run, size, d, ahead, Form::load);
        for (; d + WIDTH <= size; d += WIDTH) add_columns<Q, 1>(queries, first, run, size, d, ahead, Form::load);
        if (d < size)
            add_columns<Q, 1>(queries, first, run, size, d, ahead,
                              [&](const Stored* from) { return Form::load_first(from, size - d); });
    }
};

// Everything as fp32.
template <class T>
struct Widened : FewQueries {
    typedef Products<Widened> Loops;
    typedef T Stored;
    static constexpr bool HAS_SCALES = IS_SCALED<T>;
    static constexpr float MOST_STEPS = 1.0f;
    typedef float Query;
    struct Weights {
        float of[TILE + W];
    };
    typedef Floats Weight;
    typedef Floats Loaded;
    static constexpr int WIDTH = W;  // elements of a row that are loaded at once
    static constexpr int KEYS = 1;   // rows of values that are added at once
    static constexpr int SUMS = 1;   // vectors of sums that they are added to

    static void take_query(Queries<Widened>& queries, int i, const char* from, const Plan& plan) {
        copy_query(queries.q + i * queries.q_stride, from, plan.q_type, plan.k_size);
    }
    static INLINE Loaded load(const T* from) { return widen(from); }
    static INLINE Loaded load_first(const T* from, int n) { return widen_first(from, n); }
    static INLINE Floats load_query(const float* from) { return read<Floats>(from); }
    static INLINE Floats add(Floats sum, Floats query, Floats keys) { return sum + query * keys; }

    static INLINE void write_weights(Weights& to, int key, Floats weights, float) { write(to.of + key, weights); }
    static INLINE Weight load_weight(const float* from) { return broadcast(*from); }
    static INLINE Floats begin_sum(const float* o) { return read<Floats>(o); }
    static INLINE void add_values(Floats* sums, Weight weight, const Loaded* values) { sums[0] += weight * values[0]; }
    static INLINE void end_sum(float* o, Floats sum, float) { write(o, sum); }
    static INLINE void interleave(Loaded*) {}
    static INLINE void in_order(Floats*) {}
};

}  // namespace pannier
