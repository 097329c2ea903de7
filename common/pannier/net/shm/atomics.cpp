// What rings in shared memory need and Python can't say: loads and stores in an order that the other process sees.
//
// The one place where order is subtle is sleep. A writer moves its counter and then looks whether the reader sleeps; a
// reader says that it sleeps and then looks at the counters. Both in sequentially consistent order, so that at least
// one of the two sees the other: no message waits for a reader that sleeps.

#include <cstdint>
#include <time.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

static void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// The counter `word` as its writer left it, and all that was written before it.
EXPORT uint64_t pannier_shm_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// Set a counter that nobody sleeps for.
EXPORT void pannier_shm_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Set a counter after what it counts was written; 1 if its reader slept, which is told to one caller only.
EXPORT int pannier_shm_post(uint64_t *word, uint64_t value, uint32_t *asleep) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    return __atomic_load_n(asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(asleep, 0, __ATOMIC_SEQ_CST);
}

// The first ring from `first` on, around, that has more written than was read; -1 if none has.
EXPORT int pannier_shm_find(const uint64_t *const *written, const uint64_t *const *read, int count, int first) {
    for (int i = 0; i < count; ++i) {
        const int ring = first + i < count ? first + i : first + i - count;
        if (__atomic_load_n(written[ring], __ATOMIC_SEQ_CST) != *read[ring]) return ring;
    }
    return -1;
}

// The same, looking for up to `budget_ns`.
EXPORT int pannier_shm_spin(const uint64_t *const *written, const uint64_t *const *read, int count, int64_t budget_ns) {
    const int64_t end = now_ns() + budget_ns;
    do {
        for (int i = 0; i < 32; ++i) {
            const int ring = pannier_shm_find(written, read, count, 0);
            if (ring >= 0) return ring;
            pause_core();
        }
    } while (now_ns() < end);
    return -1;
}

EXPORT void pannier_shm_wake(uint32_t *const *asleep, int count) {
    for (int i = 0; i < count; ++i) __atomic_store_n(asleep[i], 0, __ATOMIC_SEQ_CST);
}

// Say on all links that this process sleeps from now on; 1 if it must not, since a ring has something.
EXPORT int pannier_shm_fall_asleep(uint32_t *const *asleep, int num_links, const uint64_t *const *written,
                                   const uint64_t *const *read, int num_rings) {
    for (int i = 0; i < num_links; ++i) __atomic_store_n(asleep[i], 1, __ATOMIC_SEQ_CST);
    if (pannier_shm_find(written, read, num_rings, 0) < 0) return 0;
    pannier_shm_wake(asleep, num_links);
    return 1;
}
