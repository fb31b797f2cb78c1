// The OpenMP runtime that torch has loaded. With threads of another one, both would spin on the same cores.
#pragma once

#include <dlfcn.h>

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
