// The keys and values of new tokens into their blocks, cast to the cache's dtype.

#include <algorithm>
#include <type_traits>

#include "../parallel.h"
#include "../vector.h"

namespace pannier {
namespace {

constexpr int64_t ROWS = 16;               // that a thread takes at a time
constexpr int64_t SHARED_BYTES = 1 << 18;  // so many take longer to write than other threads take to wake up

// Rows [N, G, size] of any strides but the last, and where they go: [P, G, K, size].
struct Rows {
    const char* from;
    int64_t row_stride, head_stride;  // in elements
    char* to;
    int64_t size;
};

// The same for keys and values.
struct Call {
    const int64_t* slots;
    int64_t num_rows, kv_heads, block_size;
    int32_t from_type, to_type;
};

template <class From, class To>
void copy_elements(const From* from, To* to, int64_t size) {
    if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to, from, size * sizeof(To));
    } else {
        for (int64_t d = 0; d < size; d++) to[d] = narrow(widen_one(read<From>(from + d)), To{});
    }
}

template <class From, class To>
void copy_row(const Call& call, const Rows& rows, int64_t row) {
    const int64_t block = call.slots[row] / call.block_size, offset = call.slots[row] % call.block_size;
    for (int64_t head = 0; head < call.kv_heads; head++) {
        const int64_t from = row * rows.row_stride + head * rows.head_stride;
        const int64_t to = ((block * call.kv_heads + head) * call.block_size + offset) * rows.size;
        copy_elements(reinterpret_cast<const From*>(rows.from) + from, reinterpret_cast<To*>(rows.to) + to, rows.size);
    }
}

template <class From>
void copy_row_from(const Call& call, const Rows& rows, int64_t row) {
    switch (call.to_type) {
        case FLOAT32: return copy_row<From, float>(call, rows, row);
        case BFLOAT16: return copy_row<From, Bf16>(call, rows, row);
        default: return copy_row<From, Half>(call, rows, row);
    }
}

void copy_any_row(const Call& call, const Rows& rows, int64_t row) {
    switch (call.from_type) {
        case FLOAT32: return copy_row_from<float>(call, rows, row);
        case BFLOAT16: return copy_row_from<Bf16>(call, rows, row);
        default: return copy_row_from<Half>(call, rows, row);
    }
}

}  // namespace
}  // namespace pannier

// 0, or 1 when a slot isn't one of the cache's; then nothing is written.
extern "C" EXPORT int pannier_store_kv(
    pannier::Parallel parallel, int num_threads, int from_type, int to_type, const int64_t* slots, int64_t num_rows,
    int64_t num_slots, int64_t kv_heads, int64_t block_size, void* keys, int64_t k_size, const void* k,
    int64_t k_row_stride, int64_t k_head_stride, void* values, int64_t v_size, const void* v, int64_t v_row_stride,
    int64_t v_head_stride) {
    using namespace pannier;
    for (int64_t row = 0; row < num_rows; row++)
        if (slots[row] < 0 || slots[row] >= num_slots) return 1;
    const Call call = {slots, num_rows, kv_heads, block_size, from_type, to_type};
    const Rows key_rows = {static_cast<const char*>(k), k_row_stride, k_head_stride, static_cast<char*>(keys), k_size};
    const Rows value_rows = {static_cast<const char*>(v), v_row_stride, v_head_stride, static_cast<char*>(values),
                             v_size};
    const bool small = num_rows * kv_heads * (k_size + v_size) * 2 < SHARED_BYTES;
    share(parallel, small ? 1 : num_threads, [&](const auto& take) {
        for (int64_t first = take() * ROWS; first < num_rows; first = take() * ROWS)
            for (int64_t row = first; row < std::min(first + ROWS, num_rows); row++) {
                copy_any_row(call, key_rows, row);
                copy_any_row(call, value_rows, row);
            }
    });
    return 0;
}
