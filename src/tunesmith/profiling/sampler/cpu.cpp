// A thread outside of Python that wakes every 20 ms or so and measures: how late it woke (processors are short), how
// long it then waited for the interpreter's lock (Python code is running), whether the training thread slept meanwhile
// (then another one runs Python, and training waits for it), and the resident memory.
// The figures are sums for each stage of the training step; Python says by `stage` which one it is in.

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

// From Python.h, which need not be installed. The process that loads this library has them.
extern "C" int PyGILState_Ensure(void);
extern "C" void PyGILState_Release(int);

namespace {

constexpr int kStages = 64;  // as in api.py; the first is the time outside of all stages
constexpr int64_t kPeriodNs = 20'000'000;
// A free lock is taken in a microsecond; to wait for one is to sleep and to be woken.
constexpr int64_t kBlockedNs = 20'000;

struct Figures {
    std::atomic<int64_t> asks, blocked, training_waits, waited_ns, late_ns, peak_bytes;
};

}  // namespace

struct Sampler {  // the first three members are read and written by api.py
    std::atomic<int32_t> stage, is_stopped;
    Figures figures[kStages];
    pid_t process;
    pthread_t thread;
    int statm, trainer;  // /proc files: memory, and the state of the thread that started the sampler
};

namespace {

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

int64_t resident_bytes(int statm) {
    char text[128];
    const ssize_t size = pread(statm, text, sizeof text - 1, 0);
    long pages = 0;
    if (size <= 0) return 0;
    text[size] = 0;
    return sscanf(text, "%*s %ld", &pages) == 1 ? pages * sysconf(_SC_PAGESIZE) : 0;
}

bool sleeps(int stat) {
    char text[128];
    const ssize_t size = pread(stat, text, sizeof text - 1, 0);
    if (size <= 0) return false;
    text[size] = 0;
    const char* name_end = strrchr(text, ')');  // "tid (name) state ..."
    return name_end && name_end[1] == ' ' && name_end[2] == 'S';
}

void* run(void* argument) {
    Sampler& sampler = *static_cast<Sampler*>(argument);
    uint32_t random = 1;
    while (true) {
        // The period varies by a quarter, so that it never keeps step with what it samples.
        random = random * 1664525u + 1013904223u;
        const int64_t period = kPeriodNs * 3 / 4 + int64_t(random >> 8) * (kPeriodNs / 2) / (1 << 24);
        const int64_t start = now_ns();
        const timespec pause = {0, period};
        nanosleep(&pause, nullptr);
        if (sampler.is_stopped.load()) return nullptr;

        Figures& figures = sampler.figures[sampler.stage.load() & (kStages - 1)];
        const int64_t woken = now_ns();
        const bool trainer_sleeps = sleeps(sampler.trainer);
        const int64_t asked = now_ns();
        const int state = PyGILState_Ensure();
        const int64_t waited = now_ns() - asked;
        PyGILState_Release(state);
        figures.asks += 1;
        figures.blocked += waited > kBlockedNs;
        figures.waited_ns += waited;
        figures.training_waits += waited > kBlockedNs && trainer_sleeps;
        figures.late_ns += woken - start - period;
        const int64_t bytes = resident_bytes(sampler.statm);
        if (bytes > figures.peak_bytes.load()) figures.peak_bytes.store(bytes);
    }
}

}  // namespace

extern "C" Sampler* sampler_start() {
    Sampler* sampler = new Sampler();  // all zeros
    sampler->process = getpid();
    sampler->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    sampler->trainer = open("/proc/thread-self/stat", O_RDONLY | O_CLOEXEC);
    sigset_t all, before;  // signals are for Python's main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&sampler->thread, nullptr, run, sampler);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!failed) return sampler;
    close(sampler->statm);
    close(sampler->trainer);
    delete sampler;
    return nullptr;
}

// The caller must not hold the interpreter's lock, for which the thread may be waiting.
extern "C" void sampler_stop(Sampler* sampler) {
    if (sampler->process != getpid()) return;  // in a forked process there is no such thread
    sampler->is_stopped.store(1);
    pthread_join(sampler->thread, nullptr);
    close(sampler->statm);
    close(sampler->trainer);
    delete sampler;
}
