/* Counts what a process's armed thread does to files, and can kill the process before the k-th operation.

   Preloaded: every call goes through here to the C library. A write that is to be the last is done by half. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define EVERY -1
static long armed_thread, done, deadly;
static int log_file = -1;

/* From now on operations of this thread, or of all, count; the number `last` does not happen. `log`: a descriptor. */
void tracer_arm(long last, int log, int every_thread) {
    done = 0, deadly = last, log_file = log, armed_thread = every_thread ? EVERY : syscall(SYS_gettid);
}
void tracer_disarm(void) { armed_thread = 0; }

static int is_counted(const char *name, const char *path) {
    if (!armed_thread || (armed_thread != EVERY && armed_thread != syscall(SYS_gettid))) return 0;
    long number = __sync_add_and_fetch(&done, 1);
    if (log_file >= 0) dprintf(log_file, "%s %s\n", name, path);
    return deadly && number == deadly;
}
static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); pause(); }
static int is_regular(int file) {
    struct stat s;
    return file != log_file && !fstat(file, &s) && (S_ISREG(s.st_mode) || S_ISDIR(s.st_mode));
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define TRACED(result, name, path, parameters, ...) \
    result name parameters { if (is_counted(#name, path)) die(); return REAL(name)(__VA_ARGS__); }
#define TRACED_FILE(result, name, parameters, ...) \
    result name parameters { if (is_regular(file) && is_counted(#name, "")) die(); return REAL(name)(__VA_ARGS__); }
#define TRACED_OPEN(name, path, parameters, ...) \
    int name parameters { \
        va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) && is_counted(#name, path)) die(); \
        return REAL(name)(__VA_ARGS__, flags, mode); }

TRACED_OPEN(open, path, (const char *path, int flags, ...), path)
TRACED_OPEN(open64, path, (const char *path, int flags, ...), path)
TRACED_OPEN(openat, path, (int at, const char *path, int flags, ...), at, path)
TRACED_OPEN(openat64, path, (int at, const char *path, int flags, ...), at, path)
TRACED(int, mkdir, path, (const char *path, mode_t mode), path, mode)
TRACED(int, mkdirat, path, (int at, const char *path, mode_t mode), at, path, mode)
TRACED(int, rmdir, path, (const char *path), path)
TRACED(int, unlink, path, (const char *path), path)
TRACED(int, unlinkat, path, (int at, const char *path, int flags), at, path, flags)
TRACED(int, rename, to, (const char *from, const char *to), from, to)
TRACED(int, renameat, to, (int a, const char *from, int b, const char *to), a, from, b, to)
TRACED(int, renameat2, to, (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to, flags)
TRACED(int, link, to, (const char *from, const char *to), from, to)
TRACED(int, symlink, to, (const char *from, const char *to), from, to)
TRACED(int, truncate, path, (const char *path, off_t size), path, size)
TRACED(int, truncate64, path, (const char *path, off64_t size), path, size)
TRACED_FILE(int, ftruncate, (int file, off_t size), file, size)
TRACED_FILE(int, ftruncate64, (int file, off64_t size), file, size)
TRACED_FILE(int, fsync, (int file), file)
TRACED_FILE(int, fdatasync, (int file), file)

#define TRACED_WRITE(name, parameters, half, ...) \
    ssize_t name parameters { \
        if (is_regular(file) && is_counted(#name, "")) { half; die(); } \
        return REAL(name)(__VA_ARGS__); }
TRACED_WRITE(write, (int file, const void *data, size_t size), REAL(write)(file, data, size / 2), file, data, size)
TRACED_WRITE(pwrite64, (int file, const void *data, size_t size, off64_t at), REAL(pwrite64)(file, data, size / 2, at), file, data, size, at)
TRACED_WRITE(writev, (int file, const struct iovec *data, int count), REAL(writev)(file, data, count / 2), file, data, count)
