// Attention inside chunks, in whatever build this is, beside its definition.

#include "../../../kernels/pannier/ops/chunk_attention/cpu.cpp"
#include "check.h"

using namespace pannier;

template <class T>
double worst_of(Random& random, int type, int heads_per_kv, int k_size, int v_size, int window, float cap) {
    const std::vector<int64_t> lengths = {1, 0, 67, 5};
    const int rows = 73, kv_heads = 2, heads = kv_heads * heads_per_kv;
    const auto q = stored_numbers<T>(random, rows * heads * k_size);
    const auto k = stored_numbers<T>(random, rows * kv_heads * k_size);
    const auto v = stored_numbers<T>(random, rows * kv_heads * v_size);
    std::vector<float> o(rows * heads * v_size, NAN), lse(rows * heads, NAN);
    ChunkCall call = {};
    call.q = reinterpret_cast<const char*>(q.data());
    call.k = reinterpret_cast<const char*>(k.data());
    call.v = reinterpret_cast<const char*>(v.data());
    call.o = o.data(), call.lse = lse.data(), call.lengths = lengths.data();
    call.q_row = heads * k_size, call.k_row = kv_heads * k_size, call.v_row = kv_heads * v_size;
    call.q_head = call.k_head = k_size, call.v_head = v_size;
    call.num_chunks = int(lengths.size()), call.num_threads = 1, call.kv_heads = kv_heads;
    call.heads_per_kv = heads_per_kv, call.k_size = k_size, call.v_size = v_size, call.window = window;
    call.type = type, call.scale = 1.5f, call.softcap = cap;
    pannier_chunk_attention(&call);
    double worst = 0;
    int start = 0;
    for (int64_t length : lengths) {
        for (int row = start; row < start + length; row++)
            for (int h = 0; h < heads; h++) {
                const int at = row * heads + h, g = h / heads_per_kv;
                Definition<T> exact = {&q[at * k_size], k_size, v_size, call.scale, cap, {}};
                for (int key = window ? std::max(start, row - window + 1) : start; key <= row; key++)
                    exact.see(&k[(key * kv_heads + g) * k_size], &v[(key * kv_heads + g) * v_size]);
                worst = std::fmax(worst, exact.distance(&o[at * v_size], lse[at]));
            }
        start += int(length);
    }
    return worst;
}

int main() {
    Random random;
    double worst = 0;
    const int sizes[][2] = {{64, 64}, {5, 33}, {80, 128}};
    for (const auto& [k_size, v_size] : sizes)
        for (int heads_per_kv : {1, 3, 20})
            for (int window : {0, 7})
                for (float cap : {0.0f, 2.0f}) {
                    const auto check = [&](auto number, int type) {
                        typedef decltype(number) T;
                        worst = std::fmax(worst, worst_of<T>(random, type, heads_per_kv, k_size, v_size, window, cap));
                    };
                    check(float{}, FLOAT32), check(Bf16{}, BFLOAT16), check(Half{}, FLOAT16);
                }
    return verdict("attention inside chunks", worst);
}
