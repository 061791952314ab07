/* Sets the wall clock of one process: to the real time it adds the nanoseconds that stand in the file CLINCH_KIT_CLOCK. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile long long *step;

__attribute__((constructor)) static void open_step(void) {
    const char *path = getenv("CLINCH_KIT_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        step = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && step && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        /* Seconds apart, for which there is more room. */
        long long by = *step, nanos = now->tv_nsec + by % SECOND;
        now->tv_sec += by / SECOND + (nanos >= SECOND) - (nanos < 0);
        now->tv_nsec = nanos + (nanos < 0 ? SECOND : nanos >= SECOND ? -SECOND : 0);
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &fine))
        return -1;
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec fine;
    if (clock_gettime(CLOCK_REALTIME, &fine))
        return -1;
    if (now)
        *now = fine.tv_sec;
    return fine.tv_sec;
}
