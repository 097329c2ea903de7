// Work on the threads that torch has anyway.
#pragma once

#include <atomic>

namespace pannier {

// GOMP_parallel of the OpenMP library that torch itself uses, as found by Python. A library of our own would bring a
// second set of threads that spin for work on the same cores.
typedef void (*Parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);

// Call `work(take)` on each thread; `take()` gives each number from 0 to num_tasks - 1 once, to whoever asks first, and
// num_tasks or more when all are taken. One thread means this one, without a region: waking others takes microseconds.
template <class Work>
void share(Parallel parallel, int num_threads, const Work& work) {
    struct Shared {
        const Work& work;
        std::atomic<int> next;
        void run() {
            work([this] { return next.fetch_add(1, std::memory_order_relaxed); });
        }
    } shared{work, {0}};
    if (num_threads <= 1 || parallel == nullptr)
        shared.run();
    else
        parallel([](void* data) { static_cast<Shared*>(data)->run(); }, &shared, unsigned(num_threads), 0);
}

}  // namespace pannier
