// Causal attention inside chunks: blocks of queries over those keys of their chunk that they see.

#include <algorithm>

#include "../parallel.h"
#include "../query_block.h"

namespace pannier {
namespace {

// What Python says: cpu.py has the same, field by field.
struct ChunkCall {
    const char *q, *k, *v;
    float *o, *lse;          // [T, H, Dv], [T, H]
    const int64_t* lengths;  // of the chunks
    Parallel parallel;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides, in elements
    int32_t num_chunks, num_threads, kv_heads, heads_per_kv, k_size, v_size, window, type;
    float scale, softcap;
};

// A block of queries of one KV head in one chunk, counted row by row.
struct Task {
    int64_t start;  // row of q where the chunk begins
    int head, first, count;
};

// From numbers, of which a thread gets ever larger ones, to tasks: chunk by chunk, the last queries of each first, as
// they see the most keys, and what takes long shouldn't begin when all others end.
class Tasks {
  public:
    explicit Tasks(const ChunkCall& call) : call_(call) {}

    bool find(int number, Task& task) {
        for (; chunk_ < call_.num_chunks; chunk_++) {
            const int queries = int(call_.lengths[chunk_]) * call_.heads_per_kv;
            const int blocks = (queries + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
            const int here = number - before_;
            if (here < blocks * call_.kv_heads) {
                const int first = (blocks - 1 - here / call_.kv_heads) * BLOCK_QUERIES;
                task = {start_, here % call_.kv_heads, first, std::min(BLOCK_QUERIES, queries - first)};
                return true;
            }
            before_ += blocks * call_.kv_heads;
            start_ += call_.lengths[chunk_];
        }
        return false;
    }

  private:
    const ChunkCall& call_;
    int chunk_ = 0, before_ = 0;  // how many tasks come before this chunk
    int64_t start_ = 0;
};

template <class T>
Query query_at(const ChunkCall& call, const Task& task, int i) {
    const int row = (task.first + i) / call.heads_per_kv;
    const int head = task.head * call.heads_per_kv + (task.first + i) % call.heads_per_kv;
    const int64_t at = (task.start + row) * call.kv_heads * call.heads_per_kv + head;
    return {reinterpret_cast<const T*>(call.q) + (task.start + row) * call.q_row + head * call.q_head,
            call.o + at * call.v_size, call.lse + at, call.window ? std::max(0, row + 1 - call.window) : 0, row + 1};
}

template <class Form>
void run_task(QueryBlock<Form>& block, const ChunkCall& call, const Task& task) {
    typedef typename Form::Stored T;
    Query queries[BLOCK_QUERIES];
    for (int i = 0; i < task.count; i++) queries[i] = query_at<T>(call, task, i);
    block.begin(queries, task.count);
    const T* keys = reinterpret_cast<const T*>(call.k) + task.start * call.k_row + task.head * call.k_head;
    const T* values = reinterpret_cast<const T*>(call.v) + task.start * call.v_row + task.head * call.v_head;
    const int stop = queries[task.count - 1].stop_seen;
    for (int key = queries[0].first_seen; key < stop; key += TILE_KEYS)
        block.attend(keys + key * call.k_row, call.k_row, values + key * call.v_row, call.v_row, key,
                     std::min(TILE_KEYS, stop - key));
    block.finish();
}

template <class Form>
void run_tasks(const ChunkCall& call) {
    share(call.parallel, call.num_threads, [&](const auto& take) {
        Tasks tasks(call);
        Task task;
        if (!tasks.find(take(), task)) return;
        QueryBlock<Form> block(call.k_size, call.v_size, call.scale, call.softcap);
        do run_task(block, call, task);
        while (tasks.find(take(), task));
    });
}

}  // namespace
}  // namespace pannier

extern "C" EXPORT void pannier_chunk_attention(const pannier::ChunkCall* call) {
    using namespace pannier;
    switch (call->type) {
        case FLOAT32: return run_tasks<Singles<float>>(*call);
        case FLOAT16: return run_tasks<Singles<Half>>(*call);
#if defined(__AVX512BF16__)
        default: return run_tasks<Pairs>(*call);
#else
        default: return run_tasks<Singles<Bf16>>(*call);
#endif
    }
}
