// Attention of query rows over keys and values that lie in blocks.
//
// Keys are gone through tile by tile, and while one is worked on what comes next is fetched into a cache. The softmax
// goes along with it, with the largest score and the sum so far; a long sequence may be split into parts that are
// merged at the end. What happens with a tile is in few_rows.h for decode rows, in many_rows.h for chunks.
//
// A *query* here is one query head of one row. The letters in comments are those of pannier/ops/__init__.py.

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "integers.h"
#include "many_rows.h"
#include "pairs.h"

namespace pannier {
namespace {

// A few queries.
template <class F>
class FewRows {
  public:
    typedef F Form;
    typedef typename Form::Stored T;
    Queries<Form> queries;

    explicit FewRows(const Plan& plan) : queries(plan) {}

    // Take the queries over one tile. While its keys are multiplied its values are fetched, and then the keys of the
    // following one: the nearest cache has room for that, and what is fetched no further than there comes too late.
    void attend(const Tile<T>& tile, const Tile<T>& following, const Plan& plan) {
        Ahead<T> values_ahead(tile, &Run<T>::values, &Run<T>::value_scales, plan.v_size);
        in_groups<GROUP>(queries.count, [&](int first, auto size) {
            for (int r = 0; r < tile.num_runs; r++)
                Form::Loops::template score_run<size>(queries, first, tile.runs[r], plan.k_size, values_ahead);
        });
        values_ahead.finish();
        if constexpr (IS_SCALED<T>) queries.scales.take(tile);
        for (int i = 0; i < queries.count; i++)
            weigh(queries, queries.first + i, i, tile.first_key, tile.count, plan);
        Ahead<T> keys_ahead(following, &Run<T>::keys, &Run<T>::key_scales, plan.k_size);
        in_groups<GROUP>(queries.count, [&](int first, auto size) {
            for (int r = 0; r < tile.num_runs; r++)
                Form::Loops::template add_run<size>(queries, first, tile.runs[r], plan.v_size, keys_ahead);
        });
        keys_ahead.finish();
    }
};

// One part after the other. The next one is known before this one ends, so that its first keys come in meanwhile.
template <class Few, class Many>
class Worker {
    typedef typename Few::Stored T;

  public:
    explicit Worker(const Call& call) : call_(call) {}

    template <class Take>
    void run(const Take& take) {
        const Plan& plan = call_.plan;
        int number = take();
        if (number >= plan.num_parts) return;
        begin_part(plan.parts[number]);
        while (number < plan.num_parts) {
            const Part& part = plan.parts[number];
            number = take();
            const Part* next = number < plan.num_parts ? plan.parts + number : nullptr;
            if (part.num_rows * plan.heads_per_kv <= FEW_QUERIES)
                run_part(held(few_), part, FEW_QUERIES, next);
            else
                run_part(held(many_), part, MANY_QUERIES, next);
        }
    }

  private:
    void begin_part(const Part& part) { lay_out(*following_, call_, part, part.first_head, part.first_key); }

    template <class Rows>
    Rows& held(std::unique_ptr<Rows>& rows) {
        if (!rows) rows.reset(new Rows(call_.plan));
        return *rows;
    }

    // `step` queries of each head go over the keys together. Heads take their turns tile by tile: a block's tiles of all
    // heads lie one behind the other, and long reads are what memory is fast at.
    template <class Rows>
    void run_part(Rows& rows, const Part& part, int step, const Part* next) {
        const int total = part.num_rows * call_.plan.heads_per_kv;
        auto& queries = rows.queries;
        for (int first = 0; first < total; first += step) {
            queries.count = std::min(step, total - first);
            each_head(queries, part, [&](int head) { begin(queries, call_, part, head, first); });
            for (int key = part.first_key; key < part.stop_key; key += tile_->count)
                each_head(queries, part, [&](int head) {
                    std::swap(tile_, following_);
                    const int key_after = key + tile_->count;
                    if (head + 1 < part.first_head + part.num_heads)
                        lay_out(*following_, call_, part, head + 1, key);
                    else if (key_after < part.stop_key)
                        lay_out(*following_, call_, part, part.first_head, key_after);
                    else if (first + step < total)
                        begin_part(part);
                    else if (next != nullptr)
                        begin_part(*next);
                    else
                        following_->num_runs = 0;
                    rows.attend(*tile_, *following_, call_.plan);
                });
            each_head(queries, part, [&](int head) { finish(queries, call_, part, head, first); });
        }
    }

    template <class Queries, class Work>
    static void each_head(Queries& queries, const Part& part, const Work& work) {
        for (int n = 0; n < part.num_heads; n++) {
            queries.first = n * queries.count;
            work(part.first_head + n);
        }
    }

    const Call& call_;
    std::unique_ptr<FewRows<Few>> few_;
    std::unique_ptr<Many> many_;
    Tile<T> one_, other_;
    Tile<T>*tile_ = &one_, *following_ = &other_;
};

template <class Few, class Many>
void run_parts(const Call& call) {
    share(call.plan.parallel, call.plan.num_threads, [&](const auto& take) { Worker<Few, Many>(call).run(take); });
}

// ---- Which form: what the stored type, the queries' and the processor allow

template <class T>
void run_widened(const Call& call) {
    run_parts<Widened<T>, ManyRows<float, T>>(call);
}

void run_bf16(const Call& call) {
#if defined(__AVX512BF16__)
    if (call.plan.q_type == BFLOAT16) return run_parts<Paired<Bf16>, ManyRows<Bf16, Bf16>>(call);
#endif
    run_widened<Bf16>(call);
}

void run_int8(const Call& call) {
#if defined(__AVX512BF16__)
    if (call.plan.q_type == BFLOAT16) return run_parts<Integers, ManyRows<Bf16, int8_t>>(call);
#endif
#if defined(__AVX512VNNI__)
    return run_parts<Integers, ManyRows<float, int8_t>>(call);
#else
    run_widened<int8_t>(call);
#endif
}

void run_fp8(const Call& call) {
#if defined(__AVX512BF16__)
    if (call.plan.q_type == BFLOAT16) return run_parts<Paired<Fp8>, ManyRows<Bf16, Fp8>>(call);
#endif
    run_widened<Fp8>(call);
}

void run_parts(const Call& call) {
    switch (call.plan.kv_type) {
        case FLOAT32: return run_widened<float>(call);
        case BFLOAT16: return run_bf16(call);
        case FLOAT16: return run_widened<Half>(call);
        case INT8: return run_int8(call);
        default: return run_fp8(call);
    }
}

// ---- Merging

// One head of one row from its partials, `stride` heads apart.
void merge_head(const Call& call, int64_t to, int64_t from, int64_t stride, int num_parts) {
    const int size = call.plan.v_size;
    const float *part_o = call.plan.partial_o + from * size, *part_lse = call.plan.partial_lse + from;
    float* o = call.o + to * size;
    float largest = MINUS_INFINITY, sum = 0.0f;
    bool is_empty = true;
    for (int n = 0; n < num_parts; n++) {
        largest = std::max(largest, part_lse[n * stride]);
        is_empty &= part_lse[n * stride] == MINUS_INFINITY;
    }
    std::fill_n(o, size, 0.0f);
    call.lse[to] = MINUS_INFINITY;
    if (is_empty) return;
    for (int n = 0; n < num_parts; n++) {
        const float weight = std::exp(part_lse[n * stride] - largest);
        sum += weight;
        for (int d = 0; d < size; d++) o[d] += weight * part_o[n * stride * size + d];
    }
    for (int d = 0; d < size; d++) o[d] /= sum;
    call.lse[to] = largest + std::log(sum);
}

void merge_rows(const Call& call, const Merge& merge) {
    const int64_t heads = call.plan.kv_heads * call.plan.heads_per_kv;
    for (int64_t n = 0; n < merge.num_rows * heads; n++)
        merge_head(call, merge.row * heads + n, merge.partial_row * heads + n, merge.num_rows * heads, merge.num_parts);
}

void merge_parts(const Call& call) {
    const Plan& plan = call.plan;
    const bool is_quick = plan.num_merges < 2 * plan.num_threads;  // as quick as waking other threads
    share(plan.parallel, is_quick ? 1 : plan.num_threads, [&](const auto& take) {
        for (int m = take(); m < plan.num_merges; m = take()) merge_rows(call, plan.merges[m]);
    });
}

}  // namespace
}  // namespace pannier

extern "C" EXPORT void pannier_paged_attention(const pannier::Plan* plan, const void* q, const void* keys,
                                               const void* values, float* o, float* lse, const float* key_scales,
                                               const float* value_scales) {
    const pannier::Call call = {*plan, static_cast<const char*>(q), static_cast<const char*>(keys),
                                static_cast<const char*>(values), o, lse, key_scales, value_scales};
    pannier::run_parts(call);
    pannier::merge_parts(call);
}
