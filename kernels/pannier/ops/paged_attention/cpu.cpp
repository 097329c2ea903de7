// Attention of query rows over keys and values that lie in blocks.
//
// Reading the keys and values is what takes the time, so everything serves one long read: each key is loaded once for
// all the query heads that share it, tile by tile, and while one tile is worked on the next is fetched into the cache.
// The softmax goes along with it, with the largest score and the sum so far; a long sequence may be split into parts
// that are merged at the end.
//
// A *query* here is one query head of one row. The letters in comments are those of pannier/ops/__init__.py.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "../parallel.h"
#include "../vector.h"

namespace pannier {
namespace {

constexpr int TILE = 64;         // keys between two looks at the largest score
constexpr int MAX_QUERIES = 16;  // that go over a tile while it is in the nearest cache

// Queries worked on at once: their sums over four keys, or over as many vectors of values, should fit into registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GROUP = 4;
#else
constexpr int GROUP = 2;
#endif

// ---- What Python says: cpu_plan.py has the same, field by field

// Rows of one segment over a range of its keys.
struct Part {
    int32_t table;                 // where in `tables` its blocks begin
    int32_t first_key, stop_key;   // counted from the first token of the first block
    int32_t ahead;                 // row r sees keys up to ahead + r, and no more than `window` of them
    int32_t first_row, num_rows;   // of q
    int32_t out_row;               // of o, or of the partials
    int32_t is_partial;            // others have the rest of the keys
};

// Rows whose keys were split: partial n of row r is row partial_row + n * num_rows + r.
struct Merge {
    int32_t row, num_rows, partial_row, num_parts;
};

struct Plan {
    const Part* parts;
    const Merge* merges;
    const int32_t* tables;
    float* partial_o;    // [rows, H, Dv]
    float* partial_lse;  // [rows, H]
    Parallel parallel;
    int64_t row_stride, head_stride;  // of q, in elements
    int32_t num_parts, num_merges, num_threads;
    int32_t kv_heads, heads_per_kv, k_size, v_size, block_size, window;
    int32_t q_type, kv_type;
    float scale, softcap;
};

struct Call {
    const Plan& plan;
    const char* q;
    const char *keys, *values;
    float *o, *lse;
};

// ---- Forms: how stored keys and values meet queries and weights

// Everything as fp32.
template <class T>
struct Widened {
    typedef T Stored;
    typedef float Query;
    typedef float Weight;
    typedef Floats Keys;
    typedef Floats Weights;
    static constexpr int WIDTH = W;  // elements of a row that are loaded at once
    static constexpr int KEYS = 1;   // rows of values that are added at once
    static constexpr int SUMS = 1;   // vectors of sums that they are added to

    static INLINE Keys load(const T* from) { return widen(from); }
    static INLINE Keys load_first(const T* from, int n) { return widen_first(from, n); }
    static INLINE Keys load_query(const Query* from) { return read<Floats>(from); }
    static INLINE Floats add(Floats sum, Keys query, Keys keys) { return sum + query * keys; }

    static INLINE Weights load_weights(const Weight* from) { return broadcast(*from); }
    static INLINE void add_values(Floats* sums, Weights weight, const Keys* values) { sums[0] += weight * values[0]; }
    static INLINE void interleave(Keys*) {}
    static INLINE void write_weights(Weight* to, Floats weights) { write(to, weights); }
    static INLINE void in_order(Floats*) {}
};

#if defined(__AVX512BF16__)
// bf16 by bf16, two products at a time added to an fp32 sum. Keys come in pairs for that: their values are interleaved.
struct Paired {
    typedef Bf16 Stored;
    typedef Bf16 Query;
    typedef Bf16 Weight;
    typedef __m512i Keys;
    typedef __m512i Weights;
    static constexpr int WIDTH = 2 * W;
    static constexpr int KEYS = 2;
    static constexpr int SUMS = 2;

    static INLINE Keys load(const Bf16* from) { return read<__m512i>(from); }
    static INLINE Keys load_first(const Bf16* from, int n) {
        return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, from);
    }
    static INLINE Keys load_query(const Query* from) { return read<__m512i>(from); }
    static INLINE Floats add(Floats sum, Keys a, Keys b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    static INLINE Weights load_weights(const Weight* from) { return _mm512_set1_epi32(read<int32_t>(from)); }
    static INLINE void add_values(Floats* sums, Weights weights, const Keys* values) {
        sums[0] = add(sums[0], weights, values[0]);
        sums[1] = add(sums[1], weights, values[1]);
    }
    static INLINE void interleave(Keys* rows) {
        const Keys low = _mm512_unpacklo_epi16(rows[0], rows[1]);
        rows[1] = _mm512_unpackhi_epi16(rows[0], rows[1]);
        rows[0] = low;
    }
    static INLINE void write_weights(Weight* to, Floats weights) {
        write(to, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
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
#endif

// ---- Tiles

// Keys that lie one behind the other, and their values.
template <class T>
struct Run {
    const T *keys, *values;
    int first, count;  // within the tile
};

template <class T>
struct Tile {
    int first_key = 0, count = 0;
    int num_runs = 0;
    Run<T> runs[TILE];
};

// One part for one KV head; a part's tasks are neighbours in number.
struct Task {
    const Part* part;
    int head;
};

Task task_at(const Plan& plan, int number) { return {plan.parts + number / plan.kv_heads, number % plan.kv_heads}; }

// The keys of a task from `first_key` to the end of the part or of the tile. Tiles end where whole blocks do.
template <class T>
void lay_out(Tile<T>& tile, const Call& call, const Task& task, int first_key) {
    const Plan& plan = call.plan;
    const int stop = std::min(task.part->stop_key, first_key - first_key % TILE + TILE);
    tile.first_key = first_key;
    tile.count = stop - first_key;
    tile.num_runs = 0;
    for (int key = first_key; key < stop;) {
        const int offset = key % plan.block_size;
        const int count = std::min(plan.block_size - offset, stop - key);
        const int64_t block = plan.tables[task.part->table + key / plan.block_size];
        const int64_t row = (block * plan.kv_heads + task.head) * plan.block_size + offset;
        tile.runs[tile.num_runs++] = {
            reinterpret_cast<const T*>(call.keys) + row * plan.k_size,
            reinterpret_cast<const T*>(call.values) + row * plan.v_size, key - first_key, count};
        key += count;
    }
}

// Fetches the keys, or the values, of a tile into the second cache, some bytes at a time.
template <class T>
class Ahead {
  public:
    Ahead(const Tile<T>& tile, const T* Run<T>::*rows, int size)
        : run_(tile.runs), stop_(tile.runs + tile.num_runs), rows_(rows), row_bytes_(size * int(sizeof(T))) {
        begin_run();
    }

    INLINE void step(int bytes) {
        for (; bytes > 0 && at_ < end_; bytes -= 64, at_ += 64) __builtin_prefetch(at_, 0, 2);
        if (at_ >= end_ && run_ < stop_) {
            run_++;
            begin_run();
        }
    }

  private:
    void begin_run() {
        if (run_ == stop_) return;
        at_ = reinterpret_cast<const char*>(run_->*rows_);
        end_ = at_ + run_->count * row_bytes_;
    }

    const Run<T>*run_, *stop_;
    const T* Run<T>::*rows_;
    int row_bytes_;
    const char *at_ = nullptr, *end_ = nullptr;
};

// ---- The queries of a task

int padded(int size, int width) { return (size + width - 1) / width * width; }

// What a thread keeps for the queries it works on: up to MAX_QUERIES, each with its own row in every array.
template <class Form>
struct Queries {
    typedef typename Form::Query Query;
    typedef typename Form::Weight Weight;

    int count = 0;
    int q_stride, o_stride;
    Query* q;                                    // [MAX_QUERIES, q_stride], zeros behind Dk
    float* o;                                    // [MAX_QUERIES, o_stride], not yet divided by the sum
    int first_seen[MAX_QUERIES];                 // the keys that a query sees: from here
    int stop_seen[MAX_QUERIES];                  // to here
    float largest[MAX_QUERIES];                  // score so far
    float sum[MAX_QUERIES];                      // of the weights so far, relative to the largest
    alignas(64) float scores[MAX_QUERIES][TILE];
    // A pair may reach over the end.
    alignas(64) Weight weights[MAX_QUERIES][TILE + W];

    explicit Queries(const Plan& plan)
        : q_stride(padded(plan.k_size, Form::WIDTH)), o_stride(padded(plan.v_size, Form::WIDTH)), weights{} {
        const size_t q_bytes = padded(MAX_QUERIES * q_stride * int(sizeof(Query)), 64);
        memory_ = static_cast<char*>(std::aligned_alloc(64, q_bytes + size_t(MAX_QUERIES) * o_stride * 4));
        if (memory_ == nullptr) std::abort();
        std::memset(memory_, 0, q_bytes);
        q = reinterpret_cast<Query*>(memory_);
        o = reinterpret_cast<float*>(memory_ + q_bytes);
    }
    ~Queries() { std::free(memory_); }
    Queries(const Queries&) = delete;
    Queries& operator=(const Queries&) = delete;

  private:
    char* memory_;
};

// Only bf16 queries meet bf16 keys unwidened.
void copy_query(Bf16* to, const char* from, int32_t, int size) { std::memcpy(to, from, size * sizeof(Bf16)); }

template <class From>
void widen_query(float* to, const char* from, int size) {
    const From* elements = reinterpret_cast<const From*>(from);
    int d = 0;
    for (; d + W <= size; d += W) write(to + d, widen(elements + d));
    if (d < size) write(to + d, widen_first(elements + d, size - d));
}

void copy_query(float* to, const char* from, int32_t type, int size) {
    switch (type) {
        case FLOAT32: return widen_query<float>(to, from, size);
        case BFLOAT16: return widen_query<Bf16>(to, from, size);
        default: return widen_query<Half>(to, from, size);
    }
}

// Take up queries `first` to `first + count` of a task, counted row by row.
template <class Form>
void begin(Queries<Form>& queries, const Call& call, const Task& task, int first, int count) {
    const Plan& plan = call.plan;
    const Part& part = *task.part;
    queries.count = count;
    std::fill_n(queries.o, count * queries.o_stride, 0.0f);
    for (int i = 0; i < count; i++) {
        const int row = (first + i) / plan.heads_per_kv, head = (first + i) % plan.heads_per_kv;
        const int64_t at = (part.first_row + row) * plan.row_stride +
                           (task.head * plan.heads_per_kv + head) * plan.head_stride;
        const char* from = call.q + at * (plan.q_type == FLOAT32 ? 4 : 2);
        copy_query(queries.q + i * queries.q_stride, from, plan.q_type, plan.k_size);
        const int last = part.ahead + row;
        queries.first_seen[i] = plan.window ? std::max(0, last + 1 - plan.window) : 0;
        queries.stop_seen[i] = last + 1;
        queries.largest[i] = MINUS_INFINITY;
        queries.sum[i] = 0.0f;
    }
}

// Write what the queries have come to.
template <class Form>
void finish(Queries<Form>& queries, const Call& call, const Task& task, int first) {
    const Plan& plan = call.plan;
    const Part& part = *task.part;
    const int heads = plan.kv_heads * plan.heads_per_kv;
    float* all_o = part.is_partial ? plan.partial_o : call.o;
    float* all_lse = part.is_partial ? plan.partial_lse : call.lse;
    for (int i = 0; i < queries.count; i++) {
        const int row = (first + i) / plan.heads_per_kv, head = (first + i) % plan.heads_per_kv;
        const int64_t at = int64_t(part.out_row + row) * heads + task.head * plan.heads_per_kv + head;
        float* o = queries.o + i * queries.o_stride;
        const float factor = queries.sum[i] > 0.0f ? 1.0f / queries.sum[i] : 0.0f;
        for (int d = 0; d < plan.v_size; d += Form::WIDTH) {
            Floats sums[Form::SUMS];
            for (int s = 0; s < Form::SUMS; s++) sums[s] = read<Floats>(o + d + s * W) * factor;
            Form::in_order(sums);
            for (int s = 0; s < Form::SUMS; s++) write(o + d + s * W, sums[s]);
        }
        std::memcpy(all_o + at * plan.v_size, o, plan.v_size * sizeof(float));
        all_lse[at] = queries.sum[i] > 0.0f ? queries.largest[i] + std::log(queries.sum[i]) : MINUS_INFINITY;
    }
}

// ---- Scores: queries times keys

// Products of `Q` queries with four keys, over the elements that `load` loads at `d`.
template <class Form, int Q, class Load>
INLINE void add_products(Floats (&sums)[Q][4], const typename Form::Query* q, int q_stride,
                         const typename Form::Stored* const (&keys)[4], int d, const Load& load) {
    typename Form::Keys loaded[4];
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
template <class Form, int Q>
void score_run(Queries<Form>& queries, int first, const Run<typename Form::Stored>& run, int size,
               Ahead<typename Form::Stored>& ahead) {
    typedef typename Form::Stored Stored;
    const auto* q = queries.q + first * queries.q_stride;
    for (int key = 0; key < run.count; key += 4) {
        // Behind the last key it is taken again, as what comes there may be anything.
        const Stored* keys[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) keys[k] = run.keys + ptrdiff_t(std::min(key + k, run.count - 1)) * size;
        ahead.step(4 * size * int(sizeof(Stored)));
        Floats sums[Q][4] = {};
        int d = 0;
        for (; d + Form::WIDTH <= size; d += Form::WIDTH)
            add_products<Form, Q>(sums, q, queries.q_stride, keys, d, Form::load);
        if (d < size)
            add_products<Form, Q>(sums, q, queries.q_stride, keys, d,
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

// ---- Weights: the softmax so far

INLINE Floats scaled(Floats scores, float scale, float softcap) {
    scores *= scale;
    return softcap == 0.0f ? scores : hyperbolic_tangent(scores / softcap) * softcap;
}

// Turn a query's scores over the keys of a tile into weights, 0 for keys that it doesn't see.
template <class Form>
void weigh(Queries<Form>& queries, int i, const Tile<typename Form::Stored>& tile, const Plan& plan) {
    const int count = tile.count;
    const int first = queries.first_seen[i] - tile.first_key;
    const int stop = std::min(count, queries.stop_seen[i] - tile.first_key);
    float* scores = queries.scores[i];
    Floats largest = broadcast(queries.largest[i]);
    for (int key = 0; key < count; key += W) {
        const Ints number = count_up() + key;
        const Floats x = scaled(read<Floats>(scores + key), plan.scale, plan.softcap);
        const Floats seen = (number >= first) & (number < stop) ? x : broadcast(MINUS_INFINITY);
        write(scores + key, seen);
        largest = larger(seen, largest);
    }
    const float before = queries.largest[i], now = largest_lane(largest);
    if (now == MINUS_INFINITY) {
        std::fill_n(queries.weights[i], TILE, typename Form::Weight{});
        return;
    }
    Floats sum = {};
    for (int key = 0; key < count; key += W) {
        const Floats x = read<Floats>(scores + key);
        const Floats weights = x == MINUS_INFINITY ? Floats{} : exponential(x - now);
        Form::write_weights(queries.weights[i] + key, weights);
        sum += weights;
    }
    const float kept = before == MINUS_INFINITY ? 0.0f : std::exp(before - now);
    queries.largest[i] = now;
    queries.sum[i] = queries.sum[i] * kept + sum_of_lanes(sum);
    if (kept != 1.0f) {
        float* o = queries.o + i * queries.o_stride;
        for (int d = 0; d < queries.o_stride; d += W) write(o + d, read<Floats>(o + d) * kept);
    }
}

// ---- Outputs: weights times values

// Add `Form::KEYS` rows of values to the sums of `Q` queries, `C` loads of each row.
template <class Form, int Q, int C, class Load>
INLINE void add_rows(Floats (&sums)[Q][C][Form::SUMS], const typename Form::Weight* weights,
                     const typename Form::Stored* from, int size, bool has_second, const Load& load) {
    typename Form::Weights loaded[Q];
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++) loaded[i] = Form::load_weights(weights + i * (TILE + W));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        typename Form::Keys values[Form::KEYS];
        values[0] = load(from + c * Form::WIDTH);
        if constexpr (Form::KEYS == 2)
            values[1] = has_second ? load(from + size + c * Form::WIDTH) : typename Form::Keys{};
        Form::interleave(values);
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) Form::add_values(sums[i][c], loaded[i], values);
    }
}

// Add the values of a run to the outputs of `Q` queries, in `C` loads' worth of columns from `d` on.
template <class Form, int Q, int C, class Load>
INLINE void add_columns(Queries<Form>& queries, int first, const Run<typename Form::Stored>& run, int size, int d,
                        Ahead<typename Form::Stored>& ahead, const Load& load) {
    typedef typename Form::Stored Stored;
    Floats sums[Q][C][Form::SUMS];
    float* o = queries.o + first * queries.o_stride + d;
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
#pragma GCC unroll 2
            for (int s = 0; s < Form::SUMS; s++)
                sums[i][c][s] = read<Floats>(o + i * queries.o_stride + c * Form::WIDTH + s * W);
    const auto* weights = queries.weights[first] + run.first;
    const Stored* from = run.values + d;
    int key = 0;
    for (; key + Form::KEYS <= run.count; key += Form::KEYS, from += Form::KEYS * size) {
        ahead.step(Form::KEYS * C * Form::WIDTH * int(sizeof(Stored)));
        add_rows<Form, Q, C>(sums, weights + key, from, size, true, load);
    }
    if (key < run.count) add_rows<Form, Q, C>(sums, weights + key, from, size, false, load);
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
#pragma GCC unroll 2
            for (int s = 0; s < Form::SUMS; s++)
                write(o + i * queries.o_stride + c * Form::WIDTH + s * W, sums[i][c][s]);
}

// Add the values of a run to the outputs of `Q` queries from number `first` on.
template <class Form, int Q>
void add_run(Queries<Form>& queries, int first, const Run<typename Form::Stored>& run, int size,
             Ahead<typename Form::Stored>& ahead) {
    constexpr int WIDTH = Form::WIDTH, C = 4 / Form::SUMS;
    int d = 0;
    for (; d + C * WIDTH <= size; d += C * WIDTH)
        add_columns<Form, Q, C>(queries, first, run, size, d, ahead, Form::load);
    for (; d + WIDTH <= size; d += WIDTH) add_columns<Form, Q, 1>(queries, first, run, size, d, ahead, Form::load);
    if (d < size)
        add_columns<Form, Q, 1>(queries, first, run, size, d, ahead, [&](const typename Form::Stored* from) {
            return Form::load_first(from, size - d);
        });
}

// ---- A task

// Call `work` with how many queries it takes as a constant, for all queries in groups of about the same size.
template <class Work>
INLINE void in_groups(int count, const Work& work) {
    const int num_groups = (count + GROUP - 1) / GROUP;
    for (int g = 0, first = 0; g < num_groups; g++) {
        const int size = (count - first + num_groups - g - 1) / (num_groups - g);
        switch (size) {
            case 1: work(first, std::integral_constant<int, 1>()); break;
            case 2: work(first, std::integral_constant<int, 2>()); break;
#if defined(__AVX512F__) || defined(__aarch64__)
            case 3: work(first, std::integral_constant<int, 3>()); break;
            case 4: work(first, std::integral_constant<int, 4>()); break;
#endif
        }
        first += size;
    }
}

// Take the queries over one tile, while the following one is on its way.
template <class Form>
void attend(Queries<Form>& queries, const Tile<typename Form::Stored>& tile,
            const Tile<typename Form::Stored>& following, const Plan& plan) {
    typedef typename Form::Stored Stored;
    Ahead<Stored> keys_ahead(following, &Run<Stored>::keys, plan.k_size);
    in_groups(queries.count, [&](int first, auto size) {
        for (int r = 0; r < tile.num_runs; r++)
            score_run<Form, size>(queries, first, tile.runs[r], plan.k_size, keys_ahead);
    });
    for (int i = 0; i < queries.count; i++)
        weigh(queries, i, tile, plan);
    Ahead<Stored> values_ahead(following, &Run<Stored>::values, plan.v_size);
    in_groups(queries.count, [&](int first, auto size) {
        for (int r = 0; r < tile.num_runs; r++)
            add_run<Form, size>(queries, first, tile.runs[r], plan.v_size, values_ahead);
    });
}

// One task after the other. The next one is known before this one ends, so that its first tile comes in meanwhile.
template <class Form>
class Worker {
  public:
    explicit Worker(const Call& call) : call_(call), queries_(call.plan) {}

    template <class Take>
    void run(const Take& take) {
        const int num_tasks = call_.plan.num_parts * call_.plan.kv_heads;
        int number = take();
        if (number >= num_tasks) return;
        begin_task(number);
        while (number < num_tasks) {
            const int next = take();
            run_task(task_at(call_.plan, number), next, next < num_tasks);
            number = next;
        }
    }

  private:
    void begin_task(int number) {
        const Task task = task_at(call_.plan, number);
        lay_out(*following_, call_, task, task.part->first_key);
    }

    void run_task(const Task& task, int next, bool has_next) {
        const int total = task.part->num_rows * call_.plan.heads_per_kv;
        for (int first = 0; first < total; first += MAX_QUERIES) {
            begin(queries_, call_, task, first, std::min(MAX_QUERIES, total - first));
            for (int key = task.part->first_key; key < task.part->stop_key; key += tile_->count) {
                std::swap(tile_, following_);
                const int key_after = key + tile_->count;
                if (key_after < task.part->stop_key)
                    lay_out(*following_, call_, task, key_after);
                else if (first + MAX_QUERIES < total)
                    lay_out(*following_, call_, task, task.part->first_key);
                else if (has_next)
                    begin_task(next);
                else
                    following_->num_runs = 0;
                attend(queries_, *tile_, *following_, call_.plan);
            }
            finish(queries_, call_, task, first);
        }
    }

    const Call& call_;
    Queries<Form> queries_;
    Tile<typename Form::Stored> one_, other_;
    Tile<typename Form::Stored>*tile_ = &one_, *following_ = &other_;
};

template <class Form>
void run_tasks(const Call& call) {
    share(call.plan.parallel, call.plan.num_threads, [&](const auto& take) { Worker<Form>(call).run(take); });
}

void run_tasks(const Call& call) {
    switch (call.plan.kv_type) {
        case FLOAT32: return run_tasks<Widened<float>>(call);
        case FLOAT16: return run_tasks<Widened<Half>>(call);
        default: break;
    }
#if defined(__AVX512BF16__)
    if (call.plan.q_type == BFLOAT16) return run_tasks<Paired>(call);
#endif
    run_tasks<Widened<Bf16>>(call);
}

// ---- Merging

// One head of one row from its partials, `stride` heads apart.
void merge_head(const Call& call, int64_t to, int64_t from, int64_t stride, int num_parts) {
    const int size = call.plan.v_size;
    const float *part_o = call.plan.partial_o + from * size, *part_lse = call.plan.partial_lse + from;
    float* o = call.o + to * size;
    float largest = MINUS_INFINITY, sum = 0.0f;
    for (int n = 0; n < num_parts; n++) largest = std::max(largest, part_lse[n * stride]);
    std::fill_n(o, size, 0.0f);
    call.lse[to] = largest;
    if (largest == MINUS_INFINITY) return;
    for (int n = 0; n < num_parts; n++) {
        const float weight = std::exp(part_lse[n * stride] - largest);
        sum += weight;
        for (int d = 0; d < size; d++) o[d] += weight * part_o[n * stride * size + d];
    }
    for (int d = 0; d < size; d++) o[d] /= sum;
    call.lse[to] = largest + std::log(sum);
}

void merge_parts(const Call& call) {
    const int64_t heads = call.plan.kv_heads * call.plan.heads_per_kv;
    for (int m = 0; m < call.plan.num_merges; m++) {
        const Merge& merge = call.plan.merges[m];
        for (int64_t n = 0; n < merge.num_rows * heads; n++)
            merge_head(call, merge.row * heads + n, merge.partial_row * heads + n, merge.num_rows * heads,
                       merge.num_parts);
    }
}

}  // namespace
}  // namespace pannier

extern "C" EXPORT void pannier_paged_attention(const pannier::Plan* plan, const void* q, const void* keys,
                                               const void* values, float* o, float* lse) {
    const pannier::Call call = {*plan, static_cast<const char*>(q), static_cast<const char*>(keys),
                                static_cast<const char*>(values), o, lse};
    pannier::run_tasks(call);
    pannier::merge_parts(call);
}
