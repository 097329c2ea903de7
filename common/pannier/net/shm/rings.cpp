// Rings of messages in shared memory: one process writes, one reads, in order. `ring.py` says what lies in them.
//
// The one place where order is subtle is sleep. A writer moves its counter and then looks whether the reader sleeps; a
// reader says that it sleeps and then looks at the counters. Both in sequentially consistent order, so that at least
// one of the two sees the other: no message waits for a reader that sleeps.

#include <cstdint>
#include <cstring>
#include <time.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Ring {
    // In memory that both processes share.
    uint8_t *bytes;
    uint64_t capacity;
    uint64_t *written; // bytes since the beginning, skipped ones included
    uint64_t *freed;
    uint32_t *asleep; // whether the reader sleeps
    // This process's own: where it stands, and the size of the message that is reserved, or shown.
    uint64_t position;
    uint64_t size;
};

struct Message { // places count from the ring's first byte
    uint64_t header, header_length;
    uint64_t payload, payload_length;
};

struct Lengths {
    uint64_t header, payload;
};

static const uint64_t SKIP = ~uint64_t(0); // in place of a header's length: go on at the ring's start
static const int64_t FULL = -1;
static const int NOTHING = -1, NONSENSE = -2;

static uint64_t aligned(uint64_t size) { return (size + 63) & ~uint64_t(63); }

// Write a header; the place of its payload, or FULL. What is too large for an empty ring is the caller's to refuse.
EXPORT int64_t pannier_shm_reserve(Ring *ring, const char *header, uint64_t header_length, uint64_t payload_length) {
    const uint64_t start = aligned(sizeof(Lengths) + header_length), size = start + aligned(payload_length);
    const uint64_t freed = __atomic_load_n(ring->freed, __ATOMIC_ACQUIRE);
    uint64_t place = ring->position % ring->capacity;
    const uint64_t rest = ring->capacity - place;
    const bool is_empty = freed == ring->position;
    const bool to_start = place > 0 && (size > rest || (is_empty && rest + size <= ring->capacity));
    if (ring->position - freed + size + (to_start ? rest : 0) > ring->capacity) return FULL;
    if (to_start) {
        const Lengths skip = {SKIP, 0};
        memcpy(ring->bytes + place, &skip, sizeof skip);
        ring->position += rest;
        place = 0;
    }
    const Lengths lengths = {header_length, payload_length};
    memcpy(ring->bytes + place, &lengths, sizeof lengths);
    memcpy(ring->bytes + place + sizeof lengths, header, header_length);
    ring->size = size;
    return int64_t(place + start);
}

// Let the reader see what was reserved; 1 if it slept, which is told to one writer only: it is to be rung.
EXPORT int pannier_shm_publish(Ring *ring) {
    ring->position += ring->size;
    ring->size = 0;
    __atomic_store_n(ring->written, ring->position, __ATOMIC_SEQ_CST);
    return __atomic_load_n(ring->asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(ring->asleep, 0, __ATOMIC_SEQ_CST);
}

// Show the next message of a ring that has one. The writer may have gone mad: nothing is believed that leads outside.
static bool show(Ring *ring, Message *message) {
    const uint64_t written = __atomic_load_n(ring->written, __ATOMIC_ACQUIRE);
    uint64_t there = written - ring->position, place = ring->position % ring->capacity;
    Lengths lengths;
    memcpy(&lengths, ring->bytes + place, sizeof lengths);
    if (lengths.header == SKIP) {
        const uint64_t rest = ring->capacity - place;
        if (place == 0 || rest >= there) return false;
        ring->position += rest;
        there -= rest;
        place = 0;
        memcpy(&lengths, ring->bytes, sizeof lengths);
    }
    if (lengths.header > ring->capacity || lengths.payload > ring->capacity) return false; // else sums overflow
    const uint64_t start = aligned(sizeof lengths + lengths.header), size = start + aligned(lengths.payload);
    if (size > there || size > ring->capacity - place) return false;
    ring->size = size;
    *message = {place + sizeof lengths, lengths.header, place + start, lengths.payload};
    return true;
}

static int find(Ring *const *rings, int count, int first) {
    for (int i = 0; i < count; ++i) {
        const int ring = first + i < count ? first + i : first + i - count;
        if (__atomic_load_n(rings[ring]->written, __ATOMIC_SEQ_CST) != rings[ring]->position) return ring;
    }
    return NOTHING;
}

// The first ring from `first` on, around, that has a message, and the message, which stays until it is released.
// NOTHING if none has; NONSENSE if what one has is no message.
EXPORT int pannier_shm_receive(Ring *const *rings, int count, int first, Message *message) {
    const int ring = find(rings, count, first);
    return ring < 0 || show(rings[ring], message) ? ring : NONSENSE;
}

// Give the memory of the message that was shown back to the writer.
EXPORT void pannier_shm_release(Ring *ring) {
    ring->position += ring->size;
    ring->size = 0;
    __atomic_store_n(ring->freed, ring->position, __ATOMIC_RELEASE);
}

static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

static void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Whether a ring has a message, or gets one within so many nanoseconds.
EXPORT int pannier_shm_spin(Ring *const *rings, int count, int64_t budget_ns) {
    if (find(rings, count, 0) >= 0) return 1;
    if (budget_ns <= 0) return 0;
    const int64_t end = now_ns() + budget_ns;
    do {
        for (int i = 0; i < 32; ++i) {
            pause_core();
            if (find(rings, count, 0) >= 0) return 1;
        }
    } while (now_ns() < end);
    return 0;
}

EXPORT void pannier_shm_wake(Ring *const *rings, int count) {
    for (int i = 0; i < count; ++i) __atomic_store_n(rings[i]->asleep, 0, __ATOMIC_SEQ_CST);
}

// Say to all writers that this process sleeps from now on; 0 if it must not, since a ring has a message.
EXPORT int pannier_shm_fall_asleep(Ring *const *rings, int count) {
    for (int i = 0; i < count; ++i) __atomic_store_n(rings[i]->asleep, 1, __ATOMIC_SEQ_CST);
    if (find(rings, count, 0) < 0) return 1;
    pannier_shm_wake(rings, count);
    return 0;
}
