// The many rows of a chunk over its past: products of matrices. A tile of keys and values is brought into the order in
// which products read it once, for all queries of a block.
#pragma once

#include "few_rows.h"

namespace pannier {

constexpr int MANY_QUERIES = 256;

// Queries, and vectors of keys or of columns, whose sums fit into registers with what is multiplied.
constexpr int STRIP = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif

// How numbers of a type are multiplied: so many at a time are added to a lane.
template <class Element>
struct Multiplied;

template <>
struct Multiplied<float> {
    typedef Floats Vector;
    static constexpr int AT_ONCE = 1;
    static INLINE Vector load(const float* from) { return read<Floats>(from); }
    static INLINE Vector spread(const float* from) { return broadcast(*from); }
    static INLINE Floats add(Floats sum, Vector a, Vector b) { return sum + a * b; }
    static INLINE void write_all(float* to, Floats x) { write(to, x); }
};

#if defined(__AVX512BF16__)
template <>
struct Multiplied<Bf16> {
    typedef __m512i Vector;
    static constexpr int AT_ONCE = 2;
    static INLINE Vector load(const Bf16* from) { return read<__m512i>(from); }
    static INLINE Vector spread(const Bf16* from) { return _mm512_set1_epi32(read<int32_t>(from)); }
    static INLINE Floats add(Floats sum, Vector a, Vector b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    static INLINE void write_all(Bf16* to, Floats x) { write(to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
};
#endif

// As many elements as a vector holds, from stored numbers.
template <class T>
INLINE Floats load_elements(const T* from, float) {
    return widen(from);
}

// The first n, fewer than that, and zeros behind them.
template <class T>
INLINE Floats load_first(const T* from, int n, float) {
    return n > 0 ? widen_first(from, n) : Floats{};
}

#if defined(__AVX512BF16__)
template <class T>
INLINE __m512i load_elements(const T* from, Bf16) {
    if constexpr (std::is_same_v<T, Bf16>) return read<__m512i>(from);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)widen(from + W), (__m512)widen(from));
}

template <class T>
INLINE __m512i load_first(const T* from, int n, Bf16) {
    T padded[2 * W] = {};
    if (n > 0) std::memcpy(padded, from, n * sizeof(T));
    return load_elements(padded, Bf16());
}
#endif

template <class Element, bool SCALED>
struct Blocked {
    static constexpr bool HAS_SCALES = SCALED;
    static constexpr float MOST_STEPS = 1.0f;
    typedef Element Query;
    struct Weights {
        Element of[TILE];
    };
    typedef Multiplied<Element> Products;
    typedef typename Products::Vector Vector;
    static constexpr int QUERIES = MANY_QUERIES;
    static constexpr int WEIGHED = STRIP;
    static constexpr int QUERY_PARTS = 1;
    static constexpr int AT_ONCE = Products::AT_ONCE;
    static constexpr int WIDTH = W * AT_ONCE;

    static void take_query(Queries<Blocked>& queries, int i, const char* from, const Plan& plan) {
        copy_query(queries.q + i * queries.q_stride, from, plan.q_type, plan.k_size);
    }
    static INLINE void write_weights(Weights& to, int key, Floats weights, float) {
        Products::write_all(to.of + key, weights);
    }
    static INLINE void in_order(Floats*) {}
};

// ---- Tiles in the order of the products

// Keys [q_stride / AT_ONCE, TILE, AT_ONCE] and values [TILE / AT_ONCE, o_stride, AT_ONCE], zeros behind the last key.
template <class Element, class T>
class Packed {
    typedef Multiplied<Element> Products;
    static constexpr int AT_ONCE = Products::AT_ONCE;
    static constexpr int WIDTH = W * AT_ONCE;

  public:
    Element *keys, *values;

    Packed(int k_size, int v_size) : k_size_(k_size), v_size_(v_size) {
        k_stride_ = padded(k_size, WIDTH), v_stride_ = padded(v_size, WIDTH);
        const size_t count = size_t(k_stride_ + v_stride_) * TILE;
        keys = static_cast<Element*>(std::aligned_alloc(64, count * sizeof(Element)));
        if (keys == nullptr) std::abort();
        values = keys + k_stride_ * TILE;
    }
    ~Packed() { std::free(keys); }
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;

    void take(const Tile<T>& tile) {
        const T *k[TILE], *v[TILE];
        for (int r = 0; r < tile.num_runs; r++)
            for (int key = 0; key < tile.runs[r].count; key++) {
                k[tile.runs[r].first + key] = tile.runs[r].keys + ptrdiff_t(key) * k_size_;
                v[tile.runs[r].first + key] = tile.runs[r].values + ptrdiff_t(key) * v_size_;
            }
        for (int key = 0; key < TILE; key += W) take_keys(k, key, tile.count);
        for (int key = 0; key < TILE; key += AT_ONCE) take_values(v, key, tile.count);
    }

  private:
    // Call `work` with what loads the elements of a row from `d` on; `rows` is whether all rows are there.
    template <class Work>
    static INLINE void with_load(const T* const* rows, bool are_there, int count, int d, int size, const Work& work) {
        if (are_there && d + WIDTH <= size)
            work([&](int key) { return load_elements(rows[key] + d, Element()); });
        else
            work([&](int key) {
                const int n = key < count ? std::min(size - d, WIDTH) : 0;
                return load_first(rows[std::min(key, count - 1)] + d, n, Element());
            });
    }

    // W keys from number `first` on become columns.
    void take_keys(const T* const* rows, int first, int count) {
        for (int d = 0; d < k_stride_; d += WIDTH)
            with_load(rows, first + W <= count, count, d, k_size_, [&](const auto& load) {
                Element* to = keys + size_t(d) * TILE + first * AT_ONCE;
                Floats columns[W];
#pragma GCC unroll 16
                for (int key = 0; key < W; key++) columns[key] = (Floats)load(first + key);
                transpose(columns);
#pragma GCC unroll 16
                for (int t = 0; t < W; t++) write(to + t * TILE * AT_ONCE, columns[t]);
            });
    }

    // As many rows as are multiplied at once, element by element side by side.
    void take_values(const T* const* rows, int first, int count) {
        for (int d = 0; d < v_stride_; d += WIDTH)
            with_load(rows, first + AT_ONCE <= count, count, d, v_size_, [&](const auto& load) {
                Element* to = values + size_t(first) * v_stride_ + d * AT_ONCE;
                if constexpr (AT_ONCE == 1) {
                    write(to, load(first));
                } else {
#if defined(__AVX512BF16__)
                    const __m512i one = load(first), other = load(first + 1);
                    const __m512i low = _mm512_unpacklo_epi16(one, other), high = _mm512_unpackhi_epi16(one, other);
                    const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
                    const __m512i right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
                    write(to, _mm512_permutex2var_epi64(low, left, high));
                    write(to + WIDTH, _mm512_permutex2var_epi64(low, right, high));
#endif
                }
            });
    }

    int k_size_, v_size_, k_stride_, v_stride_;
};

// ---- Products

// For `Q` rows of `a` [., a_stride], add to `sums` their products with `V` vectors of each row of `b` [., b_stride].
template <class Element, int Q, int V>
INLINE void multiply(Floats (&sums)[Q][V], const Element* a, int a_stride, const Element* b, int b_stride, int length) {
    typedef Multiplied<Element> Products;
    for (int n = 0; n < length; n += Products::AT_ONCE, b += b_stride) {
        typename Products::Vector row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = Products::load(b + v * W * Products::AT_ONCE);
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const auto factor = Products::spread(a + i * a_stride + n);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[i][v] = Products::add(sums[i][v], factor, row[v]);
        }
    }
}

// Scores of `Q` queries with a tile's keys.
template <int Q, class Element, bool SCALED>
void score_strip(Queries<Blocked<Element, SCALED>>& queries, int first, const Element* keys) {
    constexpr int AT_ONCE = Multiplied<Element>::AT_ONCE;
    for (int key = 0; key < TILE; key += VECTORS * W) {
        Floats sums[Q][VECTORS] = {};
        multiply<Element, Q, VECTORS>(sums, queries.q + first * queries.q_stride, queries.q_stride,
                                      keys + key * AT_ONCE, TILE * AT_ONCE, queries.q_stride);
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) write(queries.scores[i] + key + v * W, sums[i][v]);
    }
}

// Add a tile's values to the outputs of `Q` queries, in `V` vectors of columns from `d` on.
template <int Q, int V, class Element, bool SCALED>
INLINE void add_columns(Queries<Blocked<Element, SCALED>>& queries, int first, const Element* values, int d, int count) {
    constexpr int AT_ONCE = Multiplied<Element>::AT_ONCE;
    float* o = queries.o + first * queries.o_stride + d;
    Floats sums[Q][V];
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[i][v] = read<Floats>(o + i * queries.o_stride + v * W);
    multiply<Element, Q, V>(sums, queries.weights[0].of, TILE, values + d * AT_ONCE, queries.o_stride * AT_ONCE, count);
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) write(o + i * queries.o_stride + v * W, sums[i][v]);
}

template <int Q, class Element, bool SCALED>
void add_strip(Queries<Blocked<Element, SCALED>>& queries, int first, const Element* values, int count) {
    int d = 0;
    for (; d + VECTORS * W <= queries.o_stride; d += VECTORS * W)
        add_columns<Q, VECTORS>(queries, first, values, d, count);
    for (; d < queries.o_stride; d += W) add_columns<Q, 1>(queries, first, values, d, count);
}

// A block of queries, and the tile that it goes over.
template <class Element, class T>
class ManyRows {
  public:
    typedef Blocked<Element, IS_SCALED<T>> Form;
    Queries<Form> queries;

    explicit ManyRows(const Plan& plan) : queries(plan), packed_(plan.k_size, plan.v_size) {}

    // Take the queries over one tile, while the following one is on its way.
    void attend(const Tile<T>& tile, const Tile<T>& following, const Plan& plan) {
        packed_.take(tile);
        if constexpr (IS_SCALED<T>) queries.scales.take(tile);
        Ahead<T, SECOND> keys_ahead(following, &Run<T>::keys, &Run<T>::key_scales, plan.k_size);
        Ahead<T, SECOND> values_ahead(following, &Run<T>::values, &Run<T>::value_scales, plan.v_size);
        const int fetched = TILE * STRIP * int(sizeof(T)) / queries.count + 64;  // for every element of a row
        in_groups<STRIP>(queries.count, [&](int first, auto size) {
            score_strip<size>(queries, first, packed_.keys);
            keys_ahead.step(fetched * plan.k_size);
            for (int i = 0; i < size; i++) weigh(queries, first + i, i, tile.first_key, tile.count, plan);
            add_strip<size>(queries, first, packed_.values, tile.count);
            values_ahead.step(fetched * plan.v_size);
        });
    }

  private:
    Packed<Element, T> packed_;
};

}  // namespace pannier
