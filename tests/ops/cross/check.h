// What the checks of operators in a foreign build share: numbers to give them, and a look at what they make of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

struct Random {
    uint64_t state = 1;
    // -1 to 1.
    float number() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return float(int32_t(state >> 32)) / 2147483648.0f;
    }
};

// `size` random numbers as stored, those of types that have scales up to 100.
template <class T>
std::vector<T> stored_numbers(Random& random, size_t size) {
    std::vector<T> numbers(size);
    for (T& number : numbers) {
        if constexpr (pannier::IS_SCALED<T>) {
            const auto narrowed = pannier::narrow_all(pannier::broadcast(100 * random.number()), T{});
            std::memcpy(&number, &narrowed, 1);
        } else {
            number = pannier::narrow(random.number(), T{});
        }
    }
    return numbers;
}

// One query over the keys that it sees, as attention is defined.
template <class Q, class T = Q>
struct Definition {
    const Q* q;
    int k_size, v_size;
    double scale, softcap;
    std::vector<double> o;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;

    void see(const T* k, const T* v, double k_scale = 1, double v_scale = 1) {
        double score = 0;
        for (int d = 0; d < k_size; d++) score += double(pannier::widen_one(q[d])) * pannier::widen_one(k[d]);
        score *= scale * k_scale;
        if (softcap != 0) score = softcap * std::tanh(score / softcap);
        const double now = std::fmax(largest, score), kept = std::exp(largest - now), weight = std::exp(score - now);
        o.resize(v_size);
        for (int d = 0; d < v_size; d++) o[d] = o[d] * kept + weight * v_scale * pannier::widen_one(v[d]);
        sum = sum * kept + weight;
        largest = now;
    }

    // How far from it a partial is, relative above 1.
    double distance(const float* our_o, float our_lse) const {
        if (sum == 0) return std::isinf(our_lse) && our_lse < 0 ? 0 : std::numeric_limits<double>::infinity();
        const double lse = largest + std::log(sum);
        double worst = std::fabs(our_lse - lse) / std::fmax(1, std::fabs(lse));
        for (int d = 0; d < v_size; d++) {
            const double error = std::fabs(our_o[d] - o[d] / sum);
            worst = error > worst || error != error ? error : worst;
        }
        return worst;
    }
};

// 0 where all is well, as a program returns.
inline int verdict(const char* what, double worst) {
    std::printf("%s: %.2g at most\n", what, worst);
    return worst < 1e-5 ? 0 : 1;
}
