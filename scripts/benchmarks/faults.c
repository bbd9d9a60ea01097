/* Faults at chosen system calls, for scripts/benchmarks/faults.py. Loaded with LD_PRELOAD.
 *
 * Counted are the calls that change files below one folder: opening for writing, writing, syncing, renaming, linking,
 * deleting, making folders. At a chosen call the process is killed, or the call fails, with all that follow it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, KILL, KILL_HALF_WRITTEN, FAIL, CLOCK };

static char folder[4096];
static long chosen = -1, seen = 0;
static int action = NOTHING, failure = 0, jumps = 0;

void faults_arm(const char *path, long call, int what, int error)
{
    snprintf(folder, sizeof folder, "%s", path);
    chosen = call;
    seen = 0;
    action = what;
    failure = error;
}

long faults_seen(void) { return seen; }

static int is_below(const char *path)
{
    char full[4096];
    size_t length = strlen(folder);
    if (!length || !path)
        return 0;
    if (path[0] != '/') {
        if (!getcwd(full, sizeof full))
            return 0;
        return !strncmp(full, folder, length);
    }
    return !strncmp(path, folder, length);
}

static int is_file_below(int descriptor)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    return path[0] == '/' && is_below(path); /* no pipe */
}

/* Whether this call fails; a killed process does not come back. */
static int fails(int is_counted)
{
    if (!is_counted || action == NOTHING || action == CLOCK)
        return 0;
    long number = seen++;
    if (chosen < 0 || number < chosen)
        return 0;
    if (action == FAIL) {
        errno = failure;
        return 1;
    }
    if (number == chosen)
        kill(getpid(), SIGKILL);
    return 0;
}

#define REAL(type, name) \
    static type real; \
    if (!real) \
        real = (type)dlsym(RTLD_NEXT, name)

/* For calls that free space a full disk is no reason to fail. */
static int frees_and_fails(int is_counted) { return (action != FAIL || failure != ENOSPC) && fails(is_counted); }

ssize_t write(int descriptor, const void *bytes, size_t size)
{
    typedef ssize_t (*function)(int, const void *, size_t);
    REAL(function, "write");
    int is_counted = is_file_below(descriptor);
    if (is_counted && action == KILL_HALF_WRITTEN && seen == chosen)
        real(descriptor, bytes, size / 2);
    if (fails(is_counted))
        return -1;
    return real(descriptor, bytes, size);
}

ssize_t writev(int descriptor, const struct iovec *parts, int number)
{
    typedef ssize_t (*function)(int, const struct iovec *, int);
    REAL(function, "writev");
    return fails(is_file_below(descriptor)) ? -1 : real(descriptor, parts, number);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size)
{
    typedef ssize_t (*function)(int, int, off64_t *, size_t);
    REAL(function, "sendfile64");
    return fails(is_file_below(out)) ? -1 : real(out, in, offset, size);
}

int fsync(int descriptor)
{
    typedef int (*function)(int);
    REAL(function, "fsync");
    return fails(is_file_below(descriptor)) ? -1 : real(descriptor);
}

int ftruncate64(int descriptor, off64_t size)
{
    typedef int (*function)(int, off64_t);
    REAL(function, "ftruncate64");
    return frees_and_fails(is_file_below(descriptor)) ? -1 : real(descriptor, size);
}

#define OPEN(name, declared, given) \
    int name declared \
    { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        typedef int (*function) declared; \
        REAL(function, #name); \
        int writes = (flags & O_ACCMODE) != O_RDONLY; \
        return fails(writes && is_below(path)) ? -1 : real given; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

#define OF_PATH(name, declared, given, path, check) \
    int name declared \
    { \
        typedef int (*function) declared; \
        REAL(function, #name); \
        return check(is_below(path)) ? -1 : real given; \
    }
OF_PATH(rename, (const char *from, const char *to), (from, to), to, frees_and_fails)
OF_PATH(link, (const char *from, const char *to), (from, to), to, fails)
OF_PATH(unlink, (const char *path), (path), path, frees_and_fails)
OF_PATH(unlinkat, (int at, const char *path, int flags), (at, path, flags), path, frees_and_fails)
OF_PATH(rmdir, (const char *path), (path), path, frees_and_fails)
OF_PATH(mkdir, (const char *path, mode_t mode), (path, mode), path, fails)
OF_PATH(renameat2, (int at, const char *from, int to_at, const char *to, unsigned flags), (at, from, to_at, to, flags), to,
        frees_and_fails)

/* The time of day jumps by years, forth and back, at each look. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
    typedef int (*function)(clockid_t, struct timespec *);
    REAL(function, "clock_gettime");
    int result = real(clock, time);
    if (action == CLOCK && clock == CLOCK_REALTIME)
        time->tv_sec += ++jumps % 3 ? 300000000L * (jumps % 5 - 2) : 0;
    return result;
}
