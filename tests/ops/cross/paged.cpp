// Attention over blocks, in whatever build this is, beside its definition.

#include "../../../kernels/pannier/ops/paged_attention/cpu.cpp"
#include "check.h"

using namespace pannier;

constexpr int BLOCKS = 12, KV_HEADS = 2, NUM_KEYS = 100, ROWS = 3;

template <class Q, class T>
double worst_of(Random& random, int q_type, int kv_type, int block_size, int heads_per_kv, int k_size, int v_size,
                int window, float cap) {
    const int heads = KV_HEADS * heads_per_kv;
    const auto q = stored_numbers<Q>(random, ROWS * heads * k_size);
    const auto keys = stored_numbers<T>(random, 128 * KV_HEADS * k_size);
    const auto values = stored_numbers<T>(random, 128 * KV_HEADS * v_size);
    std::vector<float> key_scales(128 * KV_HEADS, 1.0f), value_scales = key_scales;
    if (IS_SCALED<T>)
        for (auto scales : {&key_scales, &value_scales})
            for (float& scale : *scales) scale = 0.01f + 0.005f * random.number();
    std::vector<int32_t> table;
    for (int block = (NUM_KEYS + block_size - 1) / block_size - 1; block >= 0; block--) table.push_back(block);
    std::vector<float> o(ROWS * heads * v_size, NAN), lse(ROWS * heads, NAN);
    const int ahead = NUM_KEYS - ROWS, first_key = window ? std::max(0, ahead + 1 - window) : 0;
    const int together = ROWS * heads_per_kv <= FEW_QUERIES ? KV_HEADS : 1;
    std::vector<Part> parts;
    for (int head = 0; head < KV_HEADS; head += together)
        parts.push_back({0, first_key, NUM_KEYS, ahead, 0, ROWS, 0, 0, head, together});
    Plan plan = {};
    plan.parts = parts.data(), plan.tables = table.data(), plan.num_parts = int(parts.size());
    plan.num_threads = 1;
    plan.row_stride = heads * k_size, plan.head_stride = k_size, plan.kv_heads = KV_HEADS;
    plan.heads_per_kv = heads_per_kv, plan.k_size = k_size, plan.v_size = v_size, plan.block_size = block_size;
    plan.window = window, plan.q_type = q_type, plan.kv_type = kv_type, plan.scale = 1.5f, plan.softcap = cap;
    pannier_paged_attention(&plan, q.data(), keys.data(), values.data(), o.data(), lse.data(), key_scales.data(),
                            value_scales.data());
    double worst = 0;
    for (int at = 0; at < ROWS * heads; at++) {
        const int last = ahead + at / heads, g = at % heads / heads_per_kv;
        Definition<Q, T> exact = {&q[at * k_size], k_size, v_size, plan.scale, cap, {}};
        for (int key = window ? std::max(0, last - window + 1) : 0; key <= last; key++) {
            const int slot = (table[key / block_size] * KV_HEADS + g) * block_size + key % block_size;
            exact.see(&keys[slot * k_size], &values[slot * v_size], key_scales[slot], value_scales[slot]);
        }
        worst = std::fmax(worst, exact.distance(&o[at * v_size], lse[at]));
    }
    return worst;
}

int main() {
    Random random;
    double worst = 0;
    const int sizes[][2] = {{64, 64}, {5, 33}, {80, 128}};
    for (const auto& [k_size, v_size] : sizes)
        for (int block_size : {1, 16, 64})
            for (int heads_per_kv : {1, 3, 20})
                for (int window : {0, 7})
                    for (float cap : {0.0f, 2.0f}) {
                        const auto check = [&](auto query, int q_type, auto stored, int kv_type) {
                            worst = std::fmax(worst, worst_of<decltype(query), decltype(stored)>(
                                                         random, q_type, kv_type, block_size, heads_per_kv, k_size,
                                                         v_size, window, cap));
                        };
                        check(float{}, FLOAT32, float{}, FLOAT32);
                        check(Bf16{}, BFLOAT16, Bf16{}, BFLOAT16);
                        check(Half{}, FLOAT16, Half{}, FLOAT16);
                        check(float{}, FLOAT32, int8_t{}, INT8);
                        check(Bf16{}, BFLOAT16, Fp8{}, FLOAT8);
                    }
    return verdict("attention over blocks", worst);
}
