// The queries that a thread works on: what they see, and their softmax so far.
//
// A *form* says how stored keys and values meet queries and weights:
//   Query, QUERY_PARTS     what an element of a query becomes, and how many of them
//   Weights                what the weights of a tile's keys become
//   QUERIES, WEIGHED       queries that are held, and those of them that have weights at a time
//   WIDTH                  elements of a row that are loaded at once, which in_order puts in order at the end
//   HAS_SCALES             whether keys and values are multiples of scales
//   MOST_STEPS             if weights are multiples of a step: so many at most; else 1
#pragma once

#include <cmath>
#include <cstdlib>

#include "tile.h"

namespace pannier {

INLINE int padded(int size, int width) { return (size + width - 1) / width * width; }

// Up to Form::QUERIES, each with its own row in every array.
template <class Form>
struct Queries {
    typedef typename Form::Query Query;
    static constexpr int N = Form::QUERIES;

    int first = 0, count = 0;  // those that are worked on
    int q_stride, o_stride;
    Query* q;              // [N, q_stride], zeros behind Dk
    float* o;              // [N, o_stride], not yet divided by the sum
    int first_seen[N];     // the keys that a query sees: from here
    int stop_seen[N];      // to here
    float largest[N];      // score so far
    float unit[N];         // products of keys and a query are multiples of this
    int offset[N];         // and so much more than they should be
    alignas(64) float sums[N][W];  // of the weights so far, relative to the largest, in lanes
    // For as many queries as are worked on at once: scores with the keys of a tile, then weights as multiples of a step.
    alignas(64) float scores[Form::WEIGHED][TILE];
    alignas(64) typename Form::Weights weights[Form::WEIGHED];
    float step[Form::WEIGHED];
    Scales scales;

    explicit Queries(const Plan& plan)
        : q_stride(padded(plan.k_size, Form::WIDTH) * Form::QUERY_PARTS),
          o_stride(padded(plan.v_size, Form::WIDTH)),
          weights{} {
        const size_t q_bytes = padded(N * q_stride * int(sizeof(Query)), 64);
        memory_ = static_cast<char*>(std::aligned_alloc(64, q_bytes + padded(N * o_stride * 4, 64)));
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

// ---- Queries from `q`, in any of its types

template <class From>
void widen_query(float* to, const char* from, int size) {
    const From* elements = reinterpret_cast<const From*>(from);
    int d = 0;
    for (; d + W <= size; d += W) write(to + d, widen(elements + d));
    if (d < size) write(to + d, widen_first(elements + d, size - d));
}

inline void copy_query(float* to, const char* from, int32_t type, int size) {
    switch (type) {
        case FLOAT32: return widen_query<float>(to, from, size);
        case BFLOAT16: return widen_query<Bf16>(to, from, size);
        default: return widen_query<Half>(to, from, size);
    }
}

// Only bf16 queries are brought into bf16.
inline void copy_query(Bf16* to, const char* from, int32_t, int size) { std::memcpy(to, from, size * sizeof(Bf16)); }

// ---- The beginning and the end of a part

// Take up queries `first` on of a KV head, counted row by row: those that are worked on.
template <class Form>
void begin(Queries<Form>& queries, const Call& call, const Part& part, int kv_head, int first) {
    const Plan& plan = call.plan;
    std::fill_n(queries.o + queries.first * queries.o_stride, queries.count * queries.o_stride, 0.0f);
    for (int n = 0; n < queries.count; n++) {
        const int row = (first + n) / plan.heads_per_kv, head = (first + n) % plan.heads_per_kv;
        const int64_t at = (part.first_row + row) * plan.row_stride +
                           (kv_head * plan.heads_per_kv + head) * plan.head_stride;
        const int i = queries.first + n;
        const char* from = call.q + at * (plan.q_type == FLOAT32 ? 4 : 2);
        queries.unit[i] = 1.0f;
        Form::take_query(queries, i, from, plan);
        const int last = part.ahead + row;
        queries.first_seen[i] = plan.window > 0 ? last + 1 - plan.window : 0;
        queries.stop_seen[i] = last + 1;
        queries.largest[i] = MINUS_INFINITY;
        write(queries.sums[i], Floats{});
    }
}

// Write what they have come to.
template <class Form>
void finish(Queries<Form>& queries, const Call& call, const Part& part, int kv_head, int first) {
    const Plan& plan = call.plan;
    const int heads = plan.kv_heads * plan.heads_per_kv;
    float* all_o = part.is_partial ? plan.partial_o : call.o;
    float* all_lse = part.is_partial ? plan.partial_lse : call.lse;
    for (int n = 0; n < queries.count; n++) {
        const int row = (first + n) / plan.heads_per_kv, head = (first + n) % plan.heads_per_kv;
        const int64_t at = int64_t(part.out_row + row) * heads + kv_head * plan.heads_per_kv + head;
        const int i = queries.first + n;
        const float sum = sum_of_lanes(read<Floats>(queries.sums[i]));
        const bool is_empty = sum == 0.0f;
        const float factor = is_empty ? 0.0f : 1.0f / sum;
        float* o = queries.o + i * queries.o_stride;
        for (int d = 0; d < plan.v_size; d += Form::WIDTH) {
            Floats sums[Form::WIDTH / W];
            for (int s = 0; s < Form::WIDTH / W; s++) sums[s] = read<Floats>(o + d + s * W) * factor;
            Form::in_order(sums);
            for (int s = 0; s < Form::WIDTH / W; s++) write(o + d + s * W, sums[s]);
        }
        std::memcpy(all_o + at * plan.v_size, o, plan.v_size * sizeof(float));
        all_lse[at] = is_empty ? MINUS_INFINITY : queries.largest[i] + std::log(sum);
    }
}

// ---- The softmax so far

// Scores, scaled and capped, -inf for keys that the query doesn't see; the largest of them.
template <class Form, bool SEES_ALL>
INLINE float score_tile(Queries<Form>& queries, int i, float* scores, int count, int first, int stop,
                        const Plan& plan) {
    const float scale = plan.scale * queries.unit[i];
    Floats largest = broadcast(MINUS_INFINITY);
    for (int key = 0; key < count; key += W) {
        Floats x = read<Floats>(scores + key) * scale;
        if constexpr (Form::HAS_SCALES) x *= read<Floats>(queries.scales.keys + key);
        if (plan.softcap != 0.0f) x = hyperbolic_tangent(x / plan.softcap) * plan.softcap;
        if constexpr (!SEES_ALL) {
            const Ints number = count_up() + key;
            x = (number >= first) & (number < stop) ? x : broadcast(MINUS_INFINITY);
        }
        write(scores + key, x);
        largest = larger(x, largest);
    }
    return largest_lane(largest);
}

// The smallest power of two that isn't below e^x, for x of at most 0.
INLINE float power_above(float x) {
    const int exponent = x > -87.0f ? int(x * 1.44269504f) : -126;  // a cut is a rounding up
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    return read<float>(&bits);
}

// Weights of scores relative to `now`, as multiples of a step where the form has some; their sum in lanes.
template <class Form, bool SEES_ALL>
INLINE Floats weigh_tile(Queries<Form>& queries, int at, int count, float now, float per_step) {
    Floats sum = {};
    for (int key = 0; key < count; key += W) {
        const Floats x = read<Floats>(queries.scores[at] + key);
        Floats weights = exponential(x - now);
        if constexpr (!SEES_ALL) weights = x == MINUS_INFINITY ? Floats{} : weights;
        sum += weights;
        if constexpr (Form::HAS_SCALES) {
            weights *= read<Floats>(queries.scales.values + key);
            // What isn't seen may not be a number.
            if constexpr (!SEES_ALL) weights = x == MINUS_INFINITY ? Floats{} : weights;
        }
        Form::write_weights(queries.weights[at], key, weights, per_step);
    }
    return sum;
}

// Turn a query's scores with the `count` keys of a tile into weights, 0 for keys that it doesn't see; `at` is where it
// stands among those that are worked on.
template <class Form>
void weigh(Queries<Form>& queries, int i, int at, int first_key, int count, const Plan& plan) {
    const int first = queries.first_seen[i] - first_key;
    const int stop = std::min(count, queries.stop_seen[i] - first_key);
    if (first >= stop) {
        queries.weights[at] = {};
        queries.step[at] = 0.0f;
        return;
    }
    float* scores = queries.scores[at];
    const bool sees_all = first <= 0 && stop == count && count % W == 0;
    const float here = sees_all ? score_tile<Form, true>(queries, i, scores, count, first, stop, plan)
                                : score_tile<Form, false>(queries, i, scores, count, first, stop, plan);
    const float before = queries.largest[i], now = std::max(before, here);
    float per_step = 1.0f;
    if constexpr (Form::MOST_STEPS > 1.0f) {
        const float most = queries.scales.largest_value * power_above(here - now);
        per_step = most > 0x1p-100f ? Form::MOST_STEPS / most : 0.0f;
        queries.step[at] = most / Form::MOST_STEPS + queries.scales.none_among(std::max(first, 0), stop);
    }
    const Floats sum = sees_all ? weigh_tile<Form, true>(queries, at, count, now, per_step)
                                : weigh_tile<Form, false>(queries, at, count, now, per_step);
    float* sums = queries.sums[i];
    if (before == now) {
        write(sums, read<Floats>(sums) + sum);
        return;
    }
    const float kept = before == MINUS_INFINITY ? 0.0f : std::exp(before - now);
    queries.largest[i] = now;
    write(sums, read<Floats>(sums) * kept + sum);
    float* o = queries.o + i * queries.o_stride;
    for (int d = 0; d < queries.o_stride; d += W) write(o + d, read<Floats>(o + d) * kept);
}

}  // namespace pannier
