// Attention of a block of queries over tiles of keys, for so many queries that products of matrices take the time.
//
// Queries are lanes. What belongs to them lies [element, query], so that both products, of keys with queries and of
// values with weights, multiply one broadcast element with vectors of queries, and the softmax looks at no other lane.
// Keys and values of a tile are first brought into the order in which they are broadcast. The largest score and the sum
// of the weights so far go along from tile to tile.
//
// A *query* is one query head of one row. The letters in comments are those of pannier/ops/__init__.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>

#include "vector.h"

namespace pannier {
namespace {

// Vectors of queries in a block, and elements that are multiplied with them at a time: that many sums should fit into
// registers, and be enough for one to be ready when its turn comes again.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif
constexpr int AT_ONCE = 4;

constexpr int BLOCK_QUERIES = VECTORS * W;
constexpr int TILE_KEYS = 64;
constexpr float HIDDEN = -1e30f;  // the score of a key that a query doesn't see

constexpr int round_up(int size, int unit) { return (size + unit - 1) / unit * unit; }

// Where a query lies, where its partial goes, and which keys it sees.
struct Query {
    const void* q;
    float *o, *lse;
    int32_t first_seen, stop_seen;
};

// ---- Forms: an element has 32 bits, for one number or two

// One number in fp32, widened from T.
template <class T>
struct Singles {
    typedef T Stored;
    static constexpr int NUMBERS = 1;

    static INLINE Floats load(const T* from) { return widen(from); }
    static INLINE Floats load_first(const T* from, int n) { return widen_first(from, n); }
    static INLINE Floats add_product(Floats sum, Floats a, Floats b) { return sum + a * b; }
    static INLINE void stack(Floats (&)[1]) {}
    static INLINE Floats join(const Floats (&weights)[1]) { return weights[0]; }
};

#if defined(__AVX512BF16__)
// Two numbers in bf16: neighbours in a query or a key, or of one column in two rows of values.
struct Pairs {
    typedef Bf16 Stored;
    static constexpr int NUMBERS = 2;

    static INLINE Floats load(const Bf16* from) { return read<Floats>(from); }
    static INLINE Floats load_first(const Bf16* from, int n) {
        return (Floats)_mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, from);
    }
    static INLINE Floats add_product(Floats sum, Floats a, Floats b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // Two rows of numbers become one of pairs, in two vectors.
    static INLINE void stack(Floats (&rows)[2]) {
        const __m512i top = (__m512i)rows[0], bottom = (__m512i)rows[1];
        rows[0] = (Floats)_mm512_permutex2var_epi16(top, in_turn(0, 32), bottom);
        rows[1] = (Floats)_mm512_permutex2var_epi16(top, in_turn(16, 48), bottom);
    }
    // The weights of two keys, rounded, as pairs.
    static INLINE Floats join(const Floats (&weights)[2]) {
        const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
        return (Floats)_mm512_permutexvar_epi16(in_turn(0, 16), both);
    }

  private:
    // a, b, a + 1, b + 1, ...
    static INLINE __m512i in_turn(int a, int b) { return (__m512i)((count_up() + a) | (count_up() + b) << 16); }
};
#endif

// ---- Products

// Adds to `M` rows of sums, each `R` vectors wide: over steps s, element a[m * row + s * step] times row s of b.
template <class Form, int M, int R>
INLINE void add_products(Floats (&sums)[M][R], const float* a, int row, int step, const Floats* b, int num_steps) {
    for (int s = 0; s < num_steps; s++, a += step, b += R) {
        Floats columns[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) columns[r] = b[r];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const Floats element = broadcast(a[m * row]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[m][r] = Form::add_product(sums[m][r], element, columns[r]);
        }
    }
}

// ---- A block

// What a thread keeps for the queries that it works on.
template <class Form>
class QueryBlock {
    typedef typename Form::Stored Stored;
    static constexpr int NUMBERS = Form::NUMBERS, WIDTH = W * NUMBERS;

  public:
    QueryBlock(int k_size, int v_size, float scale, float softcap)
        : k_size_(k_size), v_size_(v_size), k_stride_(round_up(k_size, WIDTH) / NUMBERS),
          v_stride_(round_up(v_size, WIDTH)), scale_(scale), softcap_(softcap) {
        const int sizes[] = {k_stride_ * BLOCK_QUERIES, v_stride_ * BLOCK_QUERIES, TILE_KEYS * BLOCK_QUERIES,
                             TILE_KEYS / NUMBERS * BLOCK_QUERIES, TILE_KEYS * k_stride_,
                             TILE_KEYS / NUMBERS * v_stride_};
        size_t total = 0;
        for (int size : sizes) total += size;
        memory_ = static_cast<float*>(std::aligned_alloc(64, total * sizeof(float)));  // each size is whole vectors
        if (memory_ == nullptr) std::abort();
        q_ = reinterpret_cast<Floats*>(memory_);
        o_ = q_ + sizes[0] / W;
        scores_ = o_ + sizes[1] / W;
        weights_ = scores_ + sizes[2] / W;
        keys_ = reinterpret_cast<float*>(weights_ + sizes[3] / W);
        values_ = keys_ + sizes[4];
    }
    ~QueryBlock() { std::free(memory_); }
    QueryBlock(const QueryBlock&) = delete;
    QueryBlock& operator=(const QueryBlock&) = delete;

    // Take up 1 to BLOCK_QUERIES queries, which have seen nothing yet.
    void begin(const Query* queries, int count) {
        queries_ = queries;
        count_ = count;
        vectors_ = (count + W - 1) / W;
        std::fill_n(o_, v_stride_ * vectors_, Floats{});
        for (int r = 0; r < vectors_; r++) {
            for (int lane = 0; lane < W; lane++) {
                first_seen_[r][lane] = query(r, lane).first_seen;
                stop_seen_[r][lane] = query(r, lane).stop_seen;
            }
            largest_[r] = broadcast(HIDDEN);
            sum_[r] = Floats{};
            load_queries(r);
        }
    }

    // Go over `count` keys, TILE_KEYS at most, of which the first one has the number `first_key`; strides in elements.
    void attend(const Stored* keys, int64_t key_stride, const Stored* values, int64_t value_stride, int first_key,
                int count) {
        put_keys(keys, key_stride, count);
        put_values(values, value_stride, count);
        bool hides = count % AT_ONCE != 0;
        for (int i = 0; i < count_; i++)
            hides |= first_key < queries_[i].first_seen || queries_[i].stop_seen < first_key + count;
        switch (vectors_) {
            case 1: return attend_tile<1>(first_key, count, hides);
            case 2: return attend_tile<2>(first_key, count, hides);
#if defined(__AVX512F__) || defined(__aarch64__)
            case 3: return attend_tile<3>(first_key, count, hides);
            case 4: return attend_tile<4>(first_key, count, hides);
#endif
        }
    }

    // Write the partials.
    void finish() {
        for (int r = 0; r < vectors_; r++) {
            const int lanes = std::min(W, count_ - r * W);
            const Floats factor = sum_[r] > 0.0f ? 1.0f / sum_[r] : Floats{};
            for (int d = 0; d < v_size_; d += W) {
                Floats rows[W];
                for (int i = 0; i < W; i++) rows[i] = o_[(d + i) * vectors_ + r] * factor;
                transpose(rows);
                for (int lane = 0; lane < lanes; lane++) store(query(r, lane).o + d, rows[lane], v_size_ - d);
            }
            for (int lane = 0; lane < lanes; lane++) {
                const float sum = sum_[r][lane];
                *query(r, lane).lse = sum > 0.0f ? largest_[r][lane] / LOG2_E + std::log(sum) : MINUS_INFINITY;
            }
        }
    }

  private:
    // That of a lane; where there is none, the last one, whose work is done again.
    const Query& query(int r, int lane) const { return queries_[std::min(r * W + lane, count_ - 1)]; }

    static INLINE Floats load(const Stored* from, int size) {
        return size >= WIDTH ? Form::load(from) : Form::load_first(from, size);
    }

    static INLINE void store(float* to, Floats numbers, int size) {
        if (size >= W)
            write(to, numbers);
        else
            std::memcpy(to, &numbers, size * sizeof(float));
    }

    void load_queries(int r) {
        for (int step = 0; step < k_stride_; step += W) {
            Floats rows[W];
            for (int lane = 0; lane < W; lane++) {
                const int d = step * NUMBERS;
                rows[lane] = load(static_cast<const Stored*>(query(r, lane).q) + d, k_size_ - d);
            }
            transpose(rows);
            for (int i = 0; i < W; i++) q_[(step + i) * vectors_ + r] = rows[i];
        }
    }

    void put_keys(const Stored* keys, int64_t stride, int count) {
        for (int key = 0; key < count; key++)
            for (int d = 0; d < k_size_; d += WIDTH)
                write(keys_ + key * k_stride_ + d / NUMBERS, load(keys + key * stride + d, k_size_ - d));
    }

    // Zeros behind the last one, since its weight, zero as well, times whatever is there may be no number.
    void put_values(const Stored* values, int64_t stride, int count) {
        for (int key = 0; key < round_up(count, AT_ONCE); key += NUMBERS)
            for (int d = 0; d < v_size_; d += WIDTH) {
                Floats rows[NUMBERS];
                for (int n = 0; n < NUMBERS; n++)
                    rows[n] = key + n < count ? load(values + (key + n) * stride + d, v_size_ - d) : Floats{};
                Form::stack(rows);
                for (int n = 0; n < NUMBERS; n++) write(values_ + key / NUMBERS * v_stride_ + d + n * W, rows[n]);
            }
    }

    template <int R>
    void attend_tile(int first_key, int count, bool hides) {
        Floats kept[R];
        for (int r = 0; r < R; r++) kept[r] = largest_[r];
        if (hides)
            score<R, true>(first_key, count);
        else
            score<R, false>(first_key, count);
        for (int r = 0; r < R; r++) {
            kept[r] = power_of_two(kept[r] - largest_[r]);
            sum_[r] *= kept[r];
        }
        if (hides)
            weigh<R, true>(count);
        else
            weigh<R, false>(count);
        add_values<R>(kept, count);
    }

    // Scores, times log2(e), and the largest of them.
    template <int R, bool HIDES>
    void score(int first_key, int count) {
        const float factor = softcap_ == 0.0f ? scale_ * LOG2_E : scale_ / softcap_;
        const int num_steps = (k_size_ + NUMBERS - 1) / NUMBERS;
        for (int key = 0; key < count; key += AT_ONCE) {
            Floats sums[AT_ONCE][R] = {};
            add_products<Form>(sums, keys_ + key * k_stride_, k_stride_, 1, q_, num_steps);
#pragma GCC unroll 4
            for (int m = 0; m < AT_ONCE; m++)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    Floats x = sums[m][r] * factor;
                    if (softcap_ != 0.0f) x = hyperbolic_tangent(x) * (softcap_ * LOG2_E);
                    if (HIDES) {
                        const int number = first_key + key + m;
                        x = (number >= first_seen_[r]) & (number < stop_seen_[r]) ? x : broadcast(HIDDEN);
                    }
                    largest_[r] = larger(x, largest_[r]);
                    scores_[(key + m) * R + r] = x;
                }
        }
    }

    template <int R, bool HIDES>
    void weigh(int count) {
        for (int key = 0; key < count; key += NUMBERS)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                Floats weights[NUMBERS];
#pragma GCC unroll 2
                for (int n = 0; n < NUMBERS; n++) {
                    const Floats x = scores_[(key + n) * R + r];
                    weights[n] = power_of_two(x - largest_[r]);
                    if (HIDES) weights[n] = x > HIDDEN ? weights[n] : Floats{};
                    sum_[r] += weights[n];
                }
                weights_[key / NUMBERS * R + r] = Form::join(weights);
            }
    }

    template <int R>
    void add_values(const Floats (&kept)[R], int count) {
        const int num_steps = (count + NUMBERS - 1) / NUMBERS;
        for (int d = 0; d < v_size_; d += AT_ONCE) {
            Floats sums[AT_ONCE][R];
#pragma GCC unroll 4
            for (int m = 0; m < AT_ONCE; m++)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[m][r] = o_[(d + m) * R + r] * kept[r];
            add_products<Form>(sums, values_ + d, 1, v_stride_, weights_, num_steps);
#pragma GCC unroll 4
            for (int m = 0; m < AT_ONCE; m++)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) o_[(d + m) * R + r] = sums[m][r];
        }
    }

    const int k_size_, v_size_, k_stride_, v_stride_;
    const float scale_, softcap_;
    const Query* queries_;
    int count_, vectors_;
    float* memory_;
    Floats *q_, *o_, *scores_, *weights_;  // each row has the block's vectors; o not yet divided by the sum
    float *keys_, *values_;                // a tile: [keys, k_stride], [keys / NUMBERS, v_stride]
    Floats largest_[VECTORS], sum_[VECTORS];
    Ints first_seen_[VECTORS], stop_seen_[VECTORS];
};

}  // namespace
}  // namespace pannier
