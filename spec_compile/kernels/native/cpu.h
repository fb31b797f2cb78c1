// What kernels on a CPU find there: its instructions, and the OpenMP runtime.
#pragma once

#include <cstdint>

#include <dlfcn.h>

// The last LEVEL of level.h that this CPU has.
inline int level_of_cpu() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    if (!__builtin_cpu_supports("avx512bf16")) return 2;
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") ? 4 : 3;
#else
    return 0;
#endif
}

// The OpenMP runtime that torch has loaded. With threads of another one, both would spin on the same cores.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    void (*barrier)();
    int (*thread)();
    int (*threads)();

    OpenMP() {
        *reinterpret_cast<void**>(&parallel) = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        *reinterpret_cast<void**>(&barrier) = dlsym(RTLD_DEFAULT, "GOMP_barrier");
        *reinterpret_cast<void**>(&thread) = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
        *reinterpret_cast<void**>(&threads) = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    }
    bool present() const { return parallel && barrier && thread && threads; }
};

inline const OpenMP& openmp() {
    static const OpenMP runtime;
    return runtime;
}

// Call body(part) for all parts, on so many threads.
template <class Body> void for_parts(int64_t parts, unsigned threads, const Body& body) {
    if (threads == 1 || !openmp().present()) {
        for (int64_t part = 0; part < parts; part++) body(part);
        return;
    }
    struct Job {
        int64_t parts;
        const Body& body;
    } job{parts, body};
    auto share = [](void* argument) {
        const Job& job = *static_cast<const Job*>(argument);
        for (int64_t part = openmp().thread(); part < job.parts; part += openmp().threads()) job.body(part);
    };
    openmp().parallel(share, &job, threads, 0);
}
