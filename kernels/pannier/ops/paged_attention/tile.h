// Where the keys and values of a part lie, tile by tile, and how what comes next is fetched while a tile is worked on.
#pragma once

#include <algorithm>

#include "call.h"

namespace pannier {

// Keys that lie one behind the other, and their values.
template <class T>
struct Run {
    const T *keys, *values;
    const float *key_scales, *value_scales;
    int first, count;  // within the tile
};

template <class T>
struct Tile {
    int first_key = 0, count = 0;
    int num_runs = 0;
    Run<T> runs[TILE];
};

// A head's keys from `first_key` to the end of the part or of the tile. Tiles end where whole blocks do.
template <class T>
void lay_out(Tile<T>& tile, const Call& call, const Part& part, int head, int first_key) {
    const Plan& plan = call.plan;
    const int stop = std::min(part.stop_key, first_key - first_key % TILE + TILE);
    tile.first_key = first_key;
    tile.count = stop - first_key;
    tile.num_runs = 0;
    for (int key = first_key; key < stop;) {
        const int offset = key % plan.block_size;
        const int count = std::min(plan.block_size - offset, stop - key);
        const int64_t block = plan.tables[part.table + key / plan.block_size];
        const int64_t row = (block * plan.kv_heads + head) * plan.block_size + offset;
        Run<T>& run = tile.runs[tile.num_runs++];
        run.keys = reinterpret_cast<const T*>(call.keys) + row * plan.k_size;
        run.values = reinterpret_cast<const T*>(call.values) + row * plan.v_size;
        run.first = key - first_key;
        run.count = count;
        if constexpr (IS_SCALED<T>) {
            run.key_scales = call.key_scales + row;
            run.value_scales = call.value_scales + row;
        }
        key += count;
    }
}

// What the keys and values of a tile are multiples of; zeros behind them.
struct Scales {
    alignas(64) float keys[TILE], values[TILE];
    float largest_value;
    bool some_are_none;  // no numbers

    template <class T>
    void take(const Tile<T>& tile) {
        for (int r = 0; r < tile.num_runs; r++) {
            const Run<T>& run = tile.runs[r];
            std::memcpy(keys + run.first, run.key_scales, run.count * sizeof(float));
            std::memcpy(values + run.first, run.value_scales, run.count * sizeof(float));
        }
        std::fill(keys + tile.count, keys + TILE, 0.0f);
        std::fill(values + tile.count, values + TILE, 0.0f);
        Floats largest = {}, zeros = {};
        for (int key = 0; key < TILE; key += W) {
            largest = larger(read<Floats>(values + key), largest);
            zeros += read<Floats>(values + key) * 0.0f;
        }
        largest_value = largest_lane(largest);
        some_are_none = sum_of_lanes(zeros) != 0.0f;
    }

    // 0, or no number if a value's scale is none.
    float none_among(int first, int stop) const {
        float none = 0.0f;
        if (some_are_none)
            for (int key = first; key < stop; key++) none += values[key] * 0.0f;
        return none;
    }
};

enum Cache { SECOND = 2, NEAREST = 3 };  // as __builtin_prefetch has them

// Fetches the keys, or the values, of a tile into a cache, some bytes at a time; their scales at once.
template <class T, Cache CACHE = NEAREST>
class Ahead {
  public:
    Ahead(const Tile<T>& tile, const T* Run<T>::*rows, const float* Run<T>::*scales, int size)
        : run_(tile.runs), stop_(tile.runs + tile.num_runs), rows_(rows), row_bytes_(size * int(sizeof(T))) {
        if constexpr (IS_SCALED<T>)
            for (const Run<T>* run = run_; run < stop_; run++)
                for (int key = 0; key < run->count; key += 16) __builtin_prefetch(run->*scales + key, 0, CACHE);
        begin_run();
    }

    INLINE void step(int bytes) {
        const char *at = at_, *stop = std::min(at + bytes, end_);
        for (; at < stop; at += 64) __builtin_prefetch(at, 0, CACHE);
        at_ = at;
        if (at >= end_ && run_ < stop_) {
            run_++;
            begin_run();
        }
    }

    // All that is left, where rows have more bytes than those beside which they were fetched.
    void finish() {
        while (run_ < stop_) step(int(end_ - at_));
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

}  // namespace pannier
