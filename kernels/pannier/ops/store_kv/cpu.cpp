// The keys and values of new tokens into their blocks, cast to the cache's dtype or quantised as in quantise.py.

#include <algorithm>
#include <type_traits>

#include "../parallel.h"
#include "../vector.h"

namespace pannier {
namespace {

constexpr int64_t ROWS = 16;               // that a thread takes at a time
constexpr int64_t SHARED_BYTES = 1 << 18;  // so many take longer to write than other threads take to wake up

// Rows [N, G, size] of any strides but the last, and where they go: [P, G, K, size], scales [P, G, K].
struct Rows {
    const char* from;
    int64_t row_stride, head_stride;  // in elements
    char* to;
    int64_t size;
    float* scales;
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

// The largest magnitude; if an element isn't finite, this isn't a number.
template <class From>
float largest_element(const From* from, int64_t size) {
    Floats largest = {}, zeros = {};
    const auto look = [&](Floats x) {
        largest = larger((Floats)((Bits)x & 0x7fffffff), largest);
        zeros += x * 0.0f;
    };
    int64_t d = 0;
    for (; d + W <= size; d += W) look(widen(from + d));
    if (d < size) look(widen_first(from + d, int(size - d)));
    return largest_lane(largest) + sum_of_lanes(zeros);
}

// Returns the scale.
template <class From, class To>
float quantise_elements(const From* from, To* to, int64_t size) {
    const float limit = std::is_same_v<To, Fp8> ? 448.0f : 127.0f;
    const float scale = largest_element(from, size) / limit;
    if (!(scale > 0.0f)) {
        std::memset(to, 0, size);
        return scale;
    }
    const auto multiples = [&](Floats x) {
        x /= scale;
        x = x > limit ? broadcast(limit) : x;  // digits are missing where the scale is subnormal
        return narrow_all(larger(broadcast(-limit), x), To{});
    };
    int64_t d = 0;
    for (; d + W <= size; d += W) write(to + d, multiples(widen(from + d)));
    if (d < size) {
        const Bytes rest = multiples(widen_first(from + d, int(size - d)));
        std::memcpy(to + d, &rest, size - d);
    }
    return scale;
}

template <class From, class To>
void copy_row(const Call& call, const Rows& rows, int64_t row) {
    const int64_t block = call.slots[row] / call.block_size, offset = call.slots[row] % call.block_size;
    for (int64_t head = 0; head < call.kv_heads; head++) {
        const int64_t from = row * rows.row_stride + head * rows.head_stride;
        const int64_t to = (block * call.kv_heads + head) * call.block_size + offset;
        const From* elements = reinterpret_cast<const From*>(rows.from) + from;
        To* stored = reinterpret_cast<To*>(rows.to) + to * rows.size;
        if constexpr (IS_SCALED<To>)
            rows.scales[to] = quantise_elements(elements, stored, rows.size);
        else
            copy_elements(elements, stored, rows.size);
    }
}

template <class From>
void copy_row_from(const Call& call, const Rows& rows, int64_t row) {
    switch (call.to_type) {
        case FLOAT32: return copy_row<From, float>(call, rows, row);
        case BFLOAT16: return copy_row<From, Bf16>(call, rows, row);
        case INT8: return copy_row<From, int8_t>(call, rows, row);
        case FLOAT8: return copy_row<From, Fp8>(call, rows, row);
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
    int64_t v_head_stride, float* key_scales, float* value_scales) {
    using namespace pannier;
    for (int64_t row = 0; row < num_rows; row++)
        if (slots[row] < 0 || slots[row] >= num_slots) return 1;
    const Call call = {slots, num_rows, kv_heads, block_size, from_type, to_type};
    const Rows key_rows = {static_cast<const char*>(k), k_row_stride, k_head_stride, static_cast<char*>(keys), k_size,
                           key_scales};
    const Rows value_rows = {static_cast<const char*>(v), v_row_stride, v_head_stride, static_cast<char*>(values),
                             v_size, value_scales};
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
