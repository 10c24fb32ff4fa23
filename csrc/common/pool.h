// Threads that share a job: torch's OpenMP team where torch is loaded and uses GNU's runtime, else threads of a pool, made when
// first needed. The threads of a team spin for a while after each of torch's operations, and would keep threads of a pool from
// the cores; a second OpenMP runtime would spin as well. So the runtime is the one that torch has loaded, found by its name, and
// nothing is linked. Each extension that includes this has a pool of its own.

#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__GNUC__) && defined(__x86_64__)
#define HAS_X86_VECTORS 1
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#define HAS_FORK 1
#include <dlfcn.h>
#include <unistd.h>
#endif

namespace {

// Rounding mode and treatment of subnormal numbers are per thread; helpers take over the caller's.
inline uint32_t control_word() {
#ifdef HAS_X86_VECTORS
    return _mm_getcsr();
#else
    return 0;
#endif
}
inline void set_control_word([[maybe_unused]] uint32_t word) {
#ifdef HAS_X86_VECTORS
    _mm_setcsr(word);
#endif
}

// While an object exists, results below 2^-126 are zero in this thread and in the helpers of its jobs. An operation with such a
// result, which is subnormal, takes 140 cycles otherwise.
class FlushedSubnormals {
public:
    FlushedSubnormals() { set_control_word(own_ | FLUSH_TO_ZERO); }
    ~FlushedSubnormals() { set_control_word(own_); }
    FlushedSubnormals(const FlushedSubnormals&) = delete;
    FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;

private:
    static constexpr uint32_t FLUSH_TO_ZERO = 0x8000;
    uint32_t own_ = control_word();
};

// GOMP_parallel(function, argument, threads, flags): the entry of GNU's OpenMP runtime that the compiler calls for a parallel
// region. Null without such a runtime in the process, and in a forked child, where a team of the parent has no threads.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);

#ifdef HAS_FORK
const pid_t LOADED_BY = getpid();
#endif

inline ParallelRegion parallel_region() {
#ifdef HAS_FORK
    static const auto found = reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return LOADED_BY == getpid() ? found : nullptr;
#else
    return nullptr;
#endif
}

class Team {
public:
    explicit Team(ParallelRegion region) : region_(region) {}

    void run(int threads, const std::function<void()>& job) const {
        Call call{&job, control_word()};
        region_(work, &call, unsigned(threads), 0);
    }

private:
    struct Call {
        const std::function<void()>* job;
        uint32_t control;
    };

    static void work(void* argument) {
        const Call& call = *static_cast<Call*>(argument);
        const uint32_t own = control_word();
        set_control_word(call.control);
        (*call.job)();
        set_control_word(own);
    }

    ParallelRegion region_;
};

class Pool {
public:
    void run(int threads, const std::function<void()>& job) {
        std::unique_lock<std::mutex> turn(one_caller_, std::try_to_lock);
        if (threads <= 1 || !turn.owns_lock()) return job();
        const int helpers = grow_to(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            control_ = control_word();
            wanted_ = helpers;
        }
        wake_.notify_all();
        job();
        std::unique_lock<std::mutex> lock(mutex_);
        wanted_ = 0;      // helpers that have not woken up by now are not needed
        done_.wait(lock, [&] { return started_ == finished_; });
        job_ = nullptr;
    }

private:
    int grow_to(int threads) {
        try {
            for (; size_ < threads; ++size_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
        }
        return std::min(size_, threads);
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return wanted_ > 0; });
            --wanted_;
            ++started_;
            const std::function<void()>* job = job_;
            const uint32_t control = control_;
            lock.unlock();
            set_control_word(control);
            (*job)();
            lock.lock();
            ++finished_;
            if (started_ == finished_) done_.notify_one();
        }
    }

    std::mutex one_caller_, mutex_;
    std::condition_variable wake_, done_;
    const std::function<void()>* job_ = nullptr;
    uint32_t control_ = 0;
    int size_ = 0, wanted_ = 0;
    int64_t started_ = 0, finished_ = 0;
};

// Never destroyed, since its threads never end; a forked child has none of them and starts a pool of its own.
inline Pool& pool() {
    static std::mutex mutex;
    static Pool* current = nullptr;
#ifdef HAS_FORK
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) {
        owner = getpid();
        current = new Pool;
    }
#else
    std::lock_guard<std::mutex> lock(mutex);
    if (current == nullptr) current = new Pool;
#endif
    return *current;
}

// Runs job on `threads` threads, the caller's among them, until all have returned. job must share the work out itself and be
// complete with fewer threads: inside a parallel region, when another caller is using the pool, or when the system grants none,
// the caller works alone.
inline void run_on_threads(int threads, const std::function<void()>& job) {
    if (threads <= 1) return job();
    if (const ParallelRegion region = parallel_region()) return Team(region).run(threads, job);
    pool().run(threads, job);
}

}  // namespace
