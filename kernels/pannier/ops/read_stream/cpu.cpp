// Every byte is loaded once; what is made of them is only there so that no compiler leaves the loads out.

#include <algorithm>

#include "../parallel.h"
#include "../vector.h"

namespace pannier {
namespace {

constexpr int64_t PIECE = 1 << 20;  // bytes that a thread takes at a time
constexpr int LOADS = 8;            // that don't wait for one another
constexpr int AHEAD = 8192;         // bytes; prefetching behind the end does nothing

uint32_t read_piece(const char* from, int64_t bytes) {
    Bits seen[LOADS] = {};
    const char* stop = from + bytes;
    for (; from + LOADS * VECTOR_BYTES <= stop; from += LOADS * VECTOR_BYTES)
#pragma GCC unroll 8
        for (int i = 0; i < LOADS; i++) {
            if (i * VECTOR_BYTES % 64 == 0) __builtin_prefetch(from + i * VECTOR_BYTES + AHEAD, 0, 2);
            seen[i] ^= read<Bits>(from + i * VECTOR_BYTES);
        }
    uint32_t all = 0;
    for (; from < stop; from++) all ^= uint8_t(*from);
    for (int i = 1; i < LOADS; i++) seen[0] ^= seen[i];
    for (int lane = 0; lane < W; lane++) all ^= seen[0][lane];
    return all;
}

}  // namespace
}  // namespace pannier

extern "C" EXPORT uint32_t pannier_read_stream(pannier::Parallel parallel, int num_threads, const char* from,
                                               int64_t bytes) {
    using namespace pannier;
    std::atomic<uint32_t> all{0};
    share(parallel, num_threads, [&](const auto& take) {
        for (int64_t at = take() * PIECE; at < bytes; at = take() * PIECE)
            all ^= read_piece(from + at, std::min(PIECE, bytes - at));
    });
    return all;
}
