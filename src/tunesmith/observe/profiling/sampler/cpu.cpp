// A thread outside of Python that wakes every 20 ms or so and measures: how late it woke (processors are short), how
// long it then waited for the interpreter's lock (Python code is running), whether the training thread slept meanwhile
// (then another one runs Python, and training waits for it), and the resident memory.
// The figures are sums for each stage of the training step; Python says by `stage` which one it is in.
// While it has the lock it calls `look`, which reads Python's stacks: each time that the training thread waits, and
// once in five times that it runs, so that a look takes hardly any time from it. What the thread waits for is read
// from the kernel before the lock is asked for, because a thread that is about to run Python waits for the lock then.

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>

// From Python.h, which need not be installed. The process that loads this library has them.
extern "C" int PyGILState_Ensure(void);
extern "C" void PyGILState_Release(int);

namespace {

constexpr int kStages = 64;  // as in api.py; the first is the time outside of all stages
constexpr int64_t kPeriodNs = 20'000'000;
// A free lock is taken in a microsecond; to wait for one is to sleep and to be woken.
constexpr int64_t kBlockedNs = 20'000;
// Python gives the lock away within 5 ms; who has it longer is C code.
constexpr int64_t kHeldNs = 15'000'000;
constexpr int kRunningPerLook = 5;

// What a thread does, as in stacks.py. `argument` is a file descriptor, where there is one.
enum Does : int { kUnknown, kRuns, kFutex, kLock, kSleeps, kFile, kPolls, kChild, kFileLock, kSyncs, kFolder, kFault,
                  kDevice, kOther };

struct Figures {
    std::atomic<int64_t> asks, blocked, training_waits, waited_ns, late_ns, peak_bytes;
};

}  // namespace

struct Sampler {  // the first three members are read and written by api.py
    std::atomic<int32_t> stage, is_stopped;
    Figures figures[kStages];
    pid_t process;
    pthread_t thread;
    int statm, trainer, trainer_call, trainer_times;  // /proc files: memory, and three of the thread that started this
    std::atomic<void (*)(int, long, int64_t)> look;  // what it does, argument, ns since the look before
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

char state_of(int stat) {
    char text[128];
    const ssize_t size = pread(stat, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    const char* name_end = strrchr(text, ')');  // "tid (name) state ..."
    return name_end && name_end[1] == ' ' ? name_end[2] : 0;
}

// True for an address within the interpreter's own state, where the lock of the interpreter is.
bool is_of_interpreter(unsigned long address) {
    static unsigned long begin = 0, end = 0;
    static bool is_known = [] {
        void* symbol = dlsym(RTLD_DEFAULT, "_PyRuntime");
        Dl_info info;
        const ElfW(Sym)* entry = nullptr;
        if (symbol && dladdr1(symbol, &info, (void**)&entry, RTLD_DL_SYMENT) && entry) {
            begin = reinterpret_cast<unsigned long>(symbol);
            end = begin + entry->st_size;
        }
        return true;
    }();
    return is_known && begin <= address && address < end;
}

int first_polled(unsigned long address, unsigned long count) {
    pollfd first;
    iovec here = {&first, sizeof first}, there = {reinterpret_cast<void*>(address), sizeof first};
    return count && process_vm_readv(getpid(), &here, 1, &there, 1, 0) == sizeof first ? first.fd : -1;
}

Does call_of(long number, const unsigned long* given, long* argument) {
    *argument = -1;
    switch (number) {
        case SYS_futex:
            if (is_of_interpreter(given[0])) return kLock;
            // OpenMP's threads wait for each other by the plain call, locks and conditions by the one with bits.
            return (given[1] & FUTEX_CMD_MASK) == FUTEX_WAIT ? kRuns : kFutex;
        case SYS_nanosleep: case SYS_clock_nanosleep:
            return kSleeps;
        case SYS_read: case SYS_write: case SYS_readv: case SYS_writev: case SYS_pread64: case SYS_pwrite64:
        case SYS_preadv: case SYS_pwritev: case SYS_recvfrom: case SYS_recvmsg: case SYS_sendto: case SYS_sendmsg:
        case SYS_connect: case SYS_accept: case SYS_accept4: case SYS_sendfile: case SYS_splice:
        case SYS_copy_file_range: case SYS_ftruncate: case SYS_fallocate: case SYS_getdents64:
            *argument = given[0];
            return kFile;
        case SYS_ppoll:
#ifdef SYS_poll
        case SYS_poll:
#endif
            *argument = first_polled(given[0], given[1]);
            return kPolls;
        case SYS_epoll_pwait: case SYS_pselect6:
#ifdef SYS_epoll_wait
        case SYS_epoll_wait: case SYS_select:
#endif
            return kPolls;
        case SYS_wait4: case SYS_waitid:
            return kChild;
        case SYS_flock:
            *argument = given[0];
            return kFileLock;
        case SYS_fcntl:
            *argument = given[0];
            return given[1] == F_SETLKW || given[1] == F_OFD_SETLKW ? kFileLock : kFile;
        case SYS_fsync: case SYS_fdatasync: case SYS_sync_file_range: case SYS_syncfs:
            *argument = given[0];
            return kSyncs;
        case SYS_sync: case SYS_msync:
            return kSyncs;
        case SYS_openat: case SYS_newfstatat: case SYS_statx: case SYS_unlinkat: case SYS_renameat2: case SYS_mkdirat:
        case SYS_close: case SYS_fstat: case SYS_faccessat: case SYS_truncate: case SYS_linkat: case SYS_readlinkat:
#ifdef SYS_open
        case SYS_open: case SYS_stat: case SYS_lstat: case SYS_unlink: case SYS_rename: case SYS_mkdir: case SYS_rmdir:
        case SYS_access: case SYS_link:
#endif
            return kFolder;
        case SYS_ioctl:
            *argument = given[0];
            return kDevice;
        default:
            return kOther;
    }
}

// What a thread does by its state and its file `syscall` in /proc, which says in which call of the kernel it waits.
Does does(char state, int call, long* argument) {
    *argument = -1;
    if (state == 'R') return kRuns;
    char text[256];
    const ssize_t size = state ? pread(call, text, sizeof text - 1, 0) : 0;
    if (size <= 0) return kUnknown;
    text[size] = 0;
    long number = -1;
    unsigned long given[3] = {0, 0, 0};
    if (sscanf(text, "%ld %lx %lx %lx", &number, &given[0], &given[1], &given[2]) < 1) return kRuns;  // "running"
    if (number < 0) return state == 'D' ? kFault : kRuns;
    return call_of(number, given, argument);
}

// Nanoseconds that a thread has run, or has waited for a core.
int64_t runnable_ns(int schedstat) {
    char text[128];
    const ssize_t size = pread(schedstat, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    long long ran = 0, delayed = 0;
    return sscanf(text, "%lld %lld", &ran, &delayed) == 2 ? ran + delayed : 0;
}

void* run(void* argument) {
    Sampler& sampler = *static_cast<Sampler*>(argument);
    uint32_t random = 1;
    int64_t last = now_ns(), running_ns = 0;
    int num_running = 0;
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
        const char trainer_state = state_of(sampler.trainer);
        const bool trainer_sleeps = trainer_state == 'S';
        long what_for = -1;
        Does what = does(trainer_state, sampler.trainer_call, &what_for);
        const int64_t runnable = what == kRuns ? runnable_ns(sampler.trainer_times) : 0;
        const int64_t asked = now_ns();
        const int state = PyGILState_Ensure();
        const int64_t waited = now_ns() - asked;
        // The training thread ran, then came to wait for the lock itself.
        if (what == kRuns && waited > kHeldNs && runnable_ns(sampler.trainer_times) - runnable < waited / 2) what = kLock;
        const int64_t now = now_ns(), elapsed = now - last;
        last = now;
        running_ns += what == kRuns ? elapsed : 0;
        num_running += what == kRuns;
        if (auto look = sampler.look.load(); look && (what != kRuns || num_running >= kRunningPerLook)) {
            look(what, what_for, what == kRuns ? running_ns : elapsed);
            if (what == kRuns) running_ns = num_running = 0;
        }
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

void end(Sampler* sampler) {
    for (const int file : {sampler->statm, sampler->trainer, sampler->trainer_call, sampler->trainer_times}) close(file);
    delete sampler;
}

}  // namespace

extern "C" Sampler* sampler_start() {
    Sampler* sampler = new Sampler();  // all zeros
    sampler->process = getpid();
    sampler->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    sampler->trainer = open("/proc/thread-self/stat", O_RDONLY | O_CLOEXEC);
    sampler->trainer_call = open("/proc/thread-self/syscall", O_RDONLY | O_CLOEXEC);
    sampler->trainer_times = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    sigset_t all, before;  // signals are for Python's main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&sampler->thread, nullptr, run, sampler);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!failed) return sampler;
    end(sampler);
    return nullptr;
}

// `look` is called with the interpreter's lock; null calls nothing any more.
extern "C" void sampler_look(Sampler* sampler, void (*look)(int, long, int64_t)) { sampler->look.store(look); }

// What another thread of this process does; the caller may have the interpreter's lock.
extern "C" int sampler_does(int thread, long* argument) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    const int stat = open(path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", thread);
    const int call = open(path, O_RDONLY | O_CLOEXEC);
    const Does found = does(state_of(stat), call, argument);
    close(stat);
    close(call);
    return found;
}

// The caller must not hold the interpreter's lock, for which the thread may be waiting.
extern "C" void sampler_stop(Sampler* sampler) {
    if (sampler->process != getpid()) return;  // in a forked process there is no such thread
    sampler->is_stopped.store(1);
    pthread_join(sampler->thread, nullptr);
    end(sampler);
}
