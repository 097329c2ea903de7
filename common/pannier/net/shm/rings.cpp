// Rings of messages in shared memory: one process writes, one reads, in order. `ring.py` says what lies in them.
//
// The one place where order is subtle is sleep. A writer moves its counter and then looks whether the reader sleeps; a
// reader says that it sleeps and then looks at the counters. Both in sequentially consistent order, so that at least
// one of the two sees the other: no message waits for a reader that sleeps.

#include <cstdint>
#include <cstring>
#include <time.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

static const uint64_t SLOTS = 64;
static const int64_t FULL = -1;
static const int NOTHING = -1, NONSENSE = -2;

struct Slot { // where a message is: places count from the ring's first byte
    uint64_t place, header_length, payload_length, unused;
};

struct Ring {
    // In memory that both processes share.
    uint8_t *bytes;
    uint64_t capacity;
    Slot *slots;
    uint64_t *written; // messages since the beginning
    uint64_t *freed;
    uint32_t *asleep; // whether the reader sleeps
    // This process's own: how many messages it has written, or read, and where those that it wrote begin and end.
    uint64_t position;
    uint64_t starts[SLOTS], ends[SLOTS];
};

struct Message {
    uint64_t header, header_length;
    uint64_t payload, payload_length;
};

static uint64_t aligned(uint64_t size) { return (size + 63) & ~uint64_t(63); }

// Where `size` bytes in one piece are free: behind the newest message, or at the front; FULL if nowhere. The memory is
// a ring, but an empty one starts at the front again: a lane that asks and waits in turn stays in the caches.
static int64_t find_room(const Ring *ring, uint64_t size) {
    const uint64_t freed = __atomic_load_n(ring->freed, __ATOMIC_ACQUIRE), under_way = ring->position - freed;
    if (under_way == 0) return size <= ring->capacity ? 0 : FULL;
    if (under_way >= SLOTS) return FULL;
    const uint64_t oldest = ring->starts[freed % SLOTS], newest = ring->ends[(ring->position - 1) % SLOTS];
    const bool is_around = newest <= oldest;
    if (newest + size <= (is_around ? oldest : ring->capacity)) return int64_t(newest);
    return !is_around && size <= oldest ? 0 : FULL;
}

// Write a header; the place of its payload, or FULL.
EXPORT int64_t pannier_shm_reserve(Ring *ring, const char *header, uint64_t header_length, uint64_t payload_length) {
    const uint64_t start = aligned(header_length), size = start + aligned(payload_length);
    const int64_t place = find_room(ring, size);
    if (place == FULL) return FULL;
    memcpy(ring->bytes + place, header, header_length);
    const uint64_t slot = ring->position % SLOTS;
    ring->slots[slot] = {uint64_t(place), header_length, payload_length, 0};
    ring->starts[slot] = uint64_t(place);
    ring->ends[slot] = uint64_t(place) + size;
    return place + int64_t(start);
}

// Let the reader see what was reserved; 1 if it slept, which is told to one writer only: it is to be rung.
EXPORT int pannier_shm_publish(Ring *ring) {
    ring->position += 1;
    __atomic_store_n(ring->written, ring->position, __ATOMIC_SEQ_CST);
    return __atomic_load_n(ring->asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(ring->asleep, 0, __ATOMIC_SEQ_CST);
}

// Show the next message of a ring that has one. The writer may have gone mad: nothing is believed that leads outside.
static bool show(const Ring *ring, Message *message) {
    if (__atomic_load_n(ring->written, __ATOMIC_ACQUIRE) - ring->position > SLOTS) return false;
    const Slot slot = ring->slots[ring->position % SLOTS]; // a copy: what was checked can't be changed any more
    const uint64_t capacity = ring->capacity;
    if (slot.place > capacity || slot.header_length > capacity || slot.payload_length > capacity) return false;
    const uint64_t payload = slot.place + aligned(slot.header_length);
    if (payload + slot.payload_length > capacity || slot.place % 64) return false;
    *message = {slot.place, slot.header_length, payload, slot.payload_length};
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
    ring->position += 1;
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
