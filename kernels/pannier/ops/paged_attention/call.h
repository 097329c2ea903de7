// What Python says of a call: cpu_plan.py has the same, field by field.
#pragma once

#include "../parallel.h"
#include "../vector.h"

namespace pannier {

constexpr int TILE = 64;  // keys between two looks at the largest score

// A task: rows of one segment over a range of its keys, for some KV heads.
struct Part {
    int32_t table;                 // where in `tables` its blocks begin
    int32_t first_key, stop_key;   // counted from the first token of the first block
    int32_t ahead;                 // row r sees keys up to ahead + r, and no more than `window` of them
    int32_t first_row, num_rows;   // of q
    int32_t out_row;               // of o, or of the partials
    int32_t is_partial;            // others have the rest of the keys
    int32_t first_head, num_heads;
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
    const float *key_scales, *value_scales;  // [P, G, K], where the stored type has scales
};

}  // namespace pannier
