/* What a process does to files below a folder: counted, cut short by a kill, refused as by a bad disk, or recorded.

   Preloaded: every call goes through here to the C library. faults.py says what the kinds of faults are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, FAIL, FAIL_FROM_HERE, RECORD };
enum { PASS, DO, HALF, REFUSE }; /* not counted; counted; by half, and then the end; not at all */

static char folder[4096];
static long armed, done, number;
static int what, error_number, log_file = -1;
static pthread_mutex_t *lock; /* one order for all processes that are forked from here */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void prepare(void) {
    pthread_mutexattr_t kind;
    lock = mmap(NULL, sizeof *lock, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(lock, &kind);
}
static void take(void) { if (pthread_mutex_lock(lock) == EOWNERDEAD) pthread_mutex_consistent(lock); }
static void give(void) { pthread_mutex_unlock(lock); }

/* From now on what this process does below a folder counts; the fault comes at `last`, 0: at none.
   `log`: a descriptor. */
void faults_arm(const char *under, int fault, long last, int error, int log) {
    snprintf(folder, sizeof folder, "%s", under);
    done = 0, number = last, what = fault, error_number = error, log_file = log;
    armed = 1;
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }
static void put(const void *data, size_t size) {
    for (const char *rest = data; size;) {
        ssize_t count = syscall(SYS_write, log_file, rest, size);
        if (count < 0) abort();
        rest += count, size -= count;
    }
}
/* A line of the log; tabs stand between its fields. */
static void record(const char *name, const char *path, const char *other, unsigned long file, long offset, long size) {
    char line[3 * 4096];
    if (log_file >= 0) put(line, snprintf(line, sizeof line, "%s\t%s\t%s\t%lu\t%ld\t%ld\n", name, path, other, file, offset, size));
}

/* The whole path of a name, or of a descriptor where there is none. */
static const char *whole(int at, const char *name, char *path) {
    char link[64];
    if (name && *name == '/') { snprintf(path, 4096, "%s", name); return path; }
    if (at == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd"); else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t size = syscall(SYS_readlink, link, path, 4095);
    path[size < 0 ? 0 : size] = 0;
    if (name) snprintf(path + strlen(path), 4096 - strlen(path), "/%s", name);
    return path;
}
static int is_below(const char *path) {
    size_t size = strlen(folder);
    return !strncmp(path, folder, size) && (size == 1 || !path[size] || path[size] == '/');
}
static int is_file(int file) {
    struct stat s;
    return !fstat(file, &s) && (S_ISREG(s.st_mode) || S_ISDIR(s.st_mode));
}
static unsigned long identity(int at, const char *name) {
    struct stat s;
    return (name ? fstatat(at, name, &s, AT_SYMLINK_NOFOLLOW) : fstat(at, &s)) ? 0 : s.st_ino;
}
static int makes_room(const char *name) { return strstr(name, "unlink") || strstr(name, "rmdir") || strstr(name, "truncate"); }

static int counts(int at, const char *given, char *path) {
    if (!armed) return 0;
    return (given || is_file(at)) && is_below(whole(at, given, path));
}

/* What becomes of an operation. But for PASS the lock is held until `end`. */
static int begin(const char *name, int at, const char *given, char *path) {
    if (!counts(at, given, path)) return PASS;
    take();
    done++;
    if (what != RECORD) record(name, path, "", 0, 0, 0);
    if (what == KILL_BEFORE && done == number) return HALF;
    if (what == FAIL && done == number) return REFUSE;
    if (what == FAIL_FROM_HERE && number && done >= number && !makes_room(name)) return done == number ? HALF : REFUSE;
    return DO;
}
static void end(int outcome) {
    int kept = errno;
    if (outcome == HALF && what == KILL_BEFORE) die();
    if (outcome == DO && what == KILL_AFTER && done == number) die();
    if (outcome != PASS) give();
    errno = outcome == REFUSE || outcome == HALF ? error_number : kept;
}

/* Operations on names: `log` records one that succeeded, where that is asked. */
#define NAMED(result, name, at, path, parameters, log, ...) \
    result name parameters { \
        char where[4096]; int outcome = begin(#name, at, path, where); \
        result got = outcome == HALF || outcome == REFUSE ? -1 : REAL(name)(__VA_ARGS__); \
        if (outcome == DO && what == RECORD && got >= 0) { log; } \
        end(outcome); return got; }
#define MADE(at, path) record("mkdir", where, "", identity(at, path), 0, 0)
#define REMOVED record("remove", where, "", 0, 0, 0)
#define MOVED(kind, at, from) char origin[4096]; record(kind, whole(at, from, origin), where, identity(b, to), 0, 0)
NAMED(int, mkdir, AT_FDCWD, path, (const char *path, mode_t mode), MADE(AT_FDCWD, path), path, mode)
NAMED(int, mkdirat, at, path, (int at, const char *path, mode_t mode), MADE(at, path), at, path, mode)
NAMED(int, rmdir, AT_FDCWD, path, (const char *path), REMOVED, path)
NAMED(int, unlink, AT_FDCWD, path, (const char *path), REMOVED, path)
NAMED(int, unlinkat, at, path, (int at, const char *path, int flags), REMOVED, at, path, flags)
NAMED(int, renameat, b, to, (int a, const char *from, int b, const char *to), MOVED("rename", a, from), a, from, b, to)
NAMED(int, renameat2, b, to, (int a, const char *from, int b, const char *to, unsigned flags), MOVED("rename", a, from), a, from, b, to, flags)
NAMED(int, linkat, b, to, (int a, const char *from, int b, const char *to, int flags), MOVED("link", a, from), a, from, b, to, flags)
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
NAMED(int, symlink, AT_FDCWD, path, (const char *target, const char *path), abort(), target, path)
NAMED(int, symlinkat, at, path, (const char *target, int at, const char *path), abort(), target, at, path)

#define SHORTENED record("truncate", where, "", identity(AT_FDCWD, path), 0, size)
NAMED(int, truncate, AT_FDCWD, path, (const char *path, off_t size), SHORTENED, path, size)
NAMED(int, truncate64, AT_FDCWD, path, (const char *path, off64_t size), SHORTENED, path, size)
#define SET record("truncate", where, "", identity(file, NULL), 0, size)
NAMED(int, ftruncate, file, NULL, (int file, off_t size), SET, file, size)
NAMED(int, ftruncate64, file, NULL, (int file, off64_t size), SET, file, size)
#define FLUSHED record("fsync", where, "", identity(file, NULL), 0, 0)
NAMED(int, fsync, file, NULL, (int file), FLUSHED, file)
NAMED(int, fdatasync, file, NULL, (int file), FLUSHED, file)

/* Only what may make or empty a file counts. */
#define OPENED(name, at, parameters, ...) \
    int name parameters { \
        va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        char where[4096]; int outcome = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) ? begin(#name, at, path, where) : PASS; \
        struct stat s; int was_there = outcome == DO && !fstatat(at, path, &s, 0); \
        int got = outcome == HALF || outcome == REFUSE ? -1 : REAL(name)(__VA_ARGS__, flags, mode); \
        if (outcome == DO && what == RECORD && got >= 0 && !was_there) record("create", where, "", identity(got, NULL), 0, 0); \
        if (outcome == DO && what == RECORD && got >= 0 && was_there && flags & O_TRUNC) record("truncate", where, "", s.st_ino, 0, 0); \
        end(outcome); return got; }
OPENED(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPENED(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPENED(openat, at, (int at, const char *path, int flags, ...), at, path)
OPENED(openat64, at, (int at, const char *path, int flags, ...), at, path)

/* Bytes that were written come from the file again: one way for all calls. */
static void record_bytes(int file, const char *path, long offset, long size) {
    char name[64], *bytes = malloc(size + 1);
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    int again = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY, 0);
    if (again < 0 || syscall(SYS_pread64, again, bytes, size, offset) != size) abort();
    record("write", path, "", identity(file, NULL), offset, size);
    put(bytes, size);
    syscall(SYS_close, again);
    free(bytes);
}
static long end_of(int file) { /* of what was just written */
    struct stat s;
    return fcntl(file, F_GETFL) & O_APPEND ? (fstat(file, &s), s.st_size) : lseek(file, 0, SEEK_CUR);
}
#define WRITTEN(name, offset, parameters, half, ...) \
    ssize_t name parameters { \
        char where[4096]; int outcome = begin(#name, file, NULL, where); \
        ssize_t got = outcome == REFUSE ? -1 : outcome == HALF ? (half) : REAL(name)(__VA_ARGS__); \
        if (outcome == DO && what == RECORD && got > 0) record_bytes(file, where, offset, got); \
        int kept = got; end(outcome); return outcome == HALF && kept <= 0 ? -1 : got; }
WRITTEN(write, end_of(file) - got, (int file, const void *data, size_t size), REAL(write)(file, data, size / 2), file, data, size)
WRITTEN(pwrite, at, (int file, const void *data, size_t size, off_t at), REAL(pwrite)(file, data, size / 2, at), file, data, size, at)
WRITTEN(pwrite64, at, (int file, const void *data, size_t size, off64_t at), REAL(pwrite64)(file, data, size / 2, at), file, data, size, at)
WRITTEN(writev, end_of(file) - got, (int file, const struct iovec *data, int count), REAL(writev)(file, data, count / 2), file, data, count)
WRITTEN(sendfile, end_of(file) - got, (int file, int from, off_t *at, size_t size), REAL(sendfile)(file, from, at, size / 2), file, from, at, size)
WRITTEN(sendfile64, end_of(file) - got, (int file, int from, off64_t *at, size_t size), REAL(sendfile64)(file, from, at, size / 2), file, from, at, size)
size_t fwrite(const void *data, size_t width, size_t count, FILE *stream) { /* numpy's way to write an array */
    char where[4096];
    int file = fileno(stream), outcome = begin("fwrite", file, NULL, where);
    if (outcome == PASS) return REAL(fwrite)(data, width, count, stream);
    size_t got = outcome == REFUSE ? 0 : REAL(fwrite)(data, width, outcome == HALF ? count / 2 : count, stream);
    fflush(stream);
    if (what == RECORD && got) record_bytes(file, where, end_of(file) - got * width, got * width);
    end(outcome);
    return got;
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    char where[4096];
    if (!counts(to, NULL, where)) return REAL(copy_file_range)(from, a, to, b, size, flags);
    errno = EXDEV; /* whoever calls it takes another way then */
    return -1;
}
