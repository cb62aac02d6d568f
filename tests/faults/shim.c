/* Stands between a process and the C library's file system calls below one folder: records them, lets some of them
 * fail, kills the process at one of them; and plays with locks, the clock and the host's name.
 *
 * Loaded with LD_PRELOAD, it does nothing until one of the functions at the end is called (from Python, with ctypes).
 * Watched calls are counted and made one at a time, so their order in a record is the order in which they happened.
 *
 * CPython calls the C library through its symbols, so all that featcache has it call passes here. What featcache does
 * not call does not: `link`, `writev`, `sendfile`, `truncate` by name, and what numpy's `tofile` writes from the C
 * library's buffers. Whoever begins to call one of these adds it: else what it does is in no record, and power cuts at
 * the end of a command (`power_loss.py`) leave too little. Maps (`mmap`) do not pass here either; featcache maps for
 * reading only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SAVED_FDS 65536

enum kind { OPEN, WRITE, TRUNCATE, ALLOCATE, SYNC, RENAME, MKDIR, UNLINK, RMDIR, READ_OPEN, READ, LOCK, LIST, KINDS };
static const char *NAMES[KINDS] = {"open",   "write", "truncate",  "allocate", "sync", "rename", "mkdir",
                                   "unlink", "rmdir", "read_open", "read",     "lock", "list"};
enum action { NOTHING, KILL, ERROR, SHORT, TORN, LOST };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static unsigned struck_kinds;
static long strike_at = -1, strikes, counted;
static enum action struck_action;
static int struck_error;
static int record = -1, record_data;
static int locks; /* 0 real, 1 always granted, 2 fail, 3 of this host alone */
static int lock_error;
static char host[64], lock_folder[PATH_MAX];
static int shadow[SAVED_FDS];
static double clock_offset, clock_jump;
static unsigned long clock_calls;

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int real_open(const char *path, int flags, mode_t mode) {
    REAL(int, "open64", const char *, int, ...);
    return real(path, flags, mode);
}
static ssize_t real_write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    return real(fd, data, size);
}
static ssize_t real_pwrite(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return real(fd, data, size, at);
}
static int real_close(int fd) {
    REAL(int, "close", int);
    return real(fd);
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(before_fork, after_fork, after_fork); }

/* Which calls are watched */

static int is_watched(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The path of what a descriptor, or AT_FDCWD, stands for; whether there is one. */
static int fd_name(int fd, char *found) {
    char link[64] = "/proc/self/cwd";
    if (fd != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, found, PATH_MAX - 1);
    if (length < 0) return 0;
    found[length] = 0;
    return 1;
}

/* The absolute path of what a call is about; whether it is watched. */
static int at_path(int folder, const char *path, char *found) {
    if (!root_length || !path) return 0;
    if (path[0] == '/') {
        snprintf(found, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX];
        if (!fd_name(folder, base) || (size_t)snprintf(found, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return is_watched(found);
}

static int fd_path(int fd, char *found) { return root_length && fd_name(fd, found) && is_watched(found); }

/* Counting and striking; all under the mutex */

/* What is to happen at this call: the action, or NOTHING. */
static enum action now(enum kind kind) {
    if (strike_at < 0 || !(struck_kinds >> kind & 1)) return NOTHING;
    long number = counted++;
    if (number < strike_at || (strikes >= 0 && number >= strike_at + strikes)) return NOTHING;
    if (struck_action == KILL) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (struck_action == ERROR || struck_action == LOST) errno = struck_error;
    return struck_action;
}

static unsigned long inode(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}
static unsigned long fd_inode(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}
static unsigned long parent_inode(const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    return inode(parent);
}

/* A line for what has happened, and the bytes that were written. */
static void note(enum kind kind, int ok, unsigned long ino, long offset, long length, const char *path,
                 const char *other, const void *data) {
    if (record < 0) return;
    int kept = errno;
    char line[2 * PATH_MAX + 256];
    int with_data = data && record_data && length > 0;
    int size = snprintf(line, sizeof line, "%s\t%d\t%lu\t%ld\t%ld\t%lu\t%lu\t%d\t%s\t%s\n", NAMES[kind], ok, ino, offset,
                        length, parent_inode(path), other ? parent_inode(other) : 0, with_data, path, other ? other : "");
    struct iovec parts[2] = {{line, size}, {(void *)data, length}};
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    if (real(record, parts, with_data ? 2 : 1) < 0) abort();
    errno = kept;
}

/* Make a call that returns 0, unless it is struck, and note what it has done to `from`, or made there. */
#define CHANGING(kind, failed, call, offset, length, from, to) \
    pthread_mutex_lock(&mutex); \
    int result; \
    if (now(kind) == NOTHING) { \
        unsigned long ino = inode(from); \
        result = call; \
        if (!result) note(kind, 1, ino ? ino : inode(from), offset, length, from, to, 0); \
    } else { \
        result = failed; \
    } \
    pthread_mutex_unlock(&mutex); \
    return result

/* Opening */

static int opened(int folder, const char *path, int flags, mode_t mode) {
    REAL(int, "openat64", int, const char *, int, ...);
    char found[PATH_MAX];
    if (host[0] && path && !strcmp(path, "/proc/sys/kernel/random/boot_id")) {
        char boot[PATH_MAX];
        snprintf(boot, sizeof boot, "%s/boot-%s", lock_folder, host);
        return real(AT_FDCWD, boot, flags, mode);
    }
    if (!at_path(folder, path, found)) return real(folder, path, flags, mode);
    int changes = flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY;
    enum kind kind = changes ? OPEN : READ_OPEN;
    pthread_mutex_lock(&mutex);
    int result = -1;
    if (now(kind) == NOTHING) {
        unsigned long before = changes && record >= 0 ? inode(found) : 0;
        result = real(folder, path, flags, mode);
        if (result >= 0 && changes) {
            note(OPEN, 1, fd_inode(result), !before, !!(flags & O_TRUNC), found, 0, 0);
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }
int open(const char *path, int flags, ...) {
    MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return opened(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) __attribute__((alias("openat")));

/* Reading */

#define READING(kind, failed, call) \
    pthread_mutex_lock(&mutex); \
    __typeof__(call) result = now(kind) == NOTHING ? call : failed; \
    pthread_mutex_unlock(&mutex); \
    return result
#define READING_FILE(fd, call) \
    char path[PATH_MAX]; \
    if (!fd_path(fd, path)) return call; \
    READING(READ, -1, call)
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    READING_FILE(fd, real(fd, data, size));
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
    READING_FILE(fd, real(fd, data, size, at));
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off64_t, int);
    READING_FILE(fd, real(fd, parts, count, at, flags));
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(ssize_t, "preadv64", int, const struct iovec *, int, off64_t);
    READING_FILE(fd, real(fd, parts, count, at));
}
void *opendir(const char *path) {
    REAL(void *, "opendir", const char *);
    char found[PATH_MAX];
    if (!at_path(AT_FDCWD, path, found)) return real(path);
    READING(LIST, NULL, real(path));
}

/* Writing */

static ssize_t written(int fd, const void *data, size_t size, off64_t at) {
    char path[PATH_MAX];
    if (!fd_path(fd, path)) return at < 0 ? real_write(fd, data, size) : real_pwrite(fd, data, size, at);
    pthread_mutex_lock(&mutex);
    ssize_t result = -1;
    enum action action = now(WRITE);
    if (action != ERROR && action != LOST) {
        int partly = (action == SHORT || action == TORN) && size > 1;
        off64_t offset = at;
        if (at < 0) offset = fcntl(fd, F_GETFL) & O_APPEND ? lseek64(fd, 0, SEEK_END) : lseek64(fd, 0, SEEK_CUR);
        size_t count = partly ? size / 2 : size;
        result = at < 0 ? real_write(fd, data, count) : real_pwrite(fd, data, count, at);
        if (result > 0) note(WRITE, 1, fd_inode(fd), offset, result, path, 0, data);
        if (action == TORN) {
            kill(getpid(), SIGKILL);
            for (;;) pause();
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}
ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, -1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, data, size, at); }

int ftruncate64(int fd, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    char path[PATH_MAX];
    if (!fd_path(fd, path)) return real(fd, size);
    CHANGING(TRUNCATE, -1, real(fd, size), size, 0, path, NULL);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(int, "posix_fallocate64", int, off64_t, off64_t);
    char path[PATH_MAX];
    if (!fd_path(fd, path)) return real(fd, at, size);
    CHANGING(ALLOCATE, errno, real(fd, at, size), at, size, path, NULL);
}

/* Flushing */

static void lose(int fd) {
    char zeros[4096] = {0}, self[64];
    struct stat found;
    if (fstat(fd, &found) || !S_ISREG(found.st_mode)) return;
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd); /* it may be open for reading only */
    int again = real_open(self, O_WRONLY, 0);
    for (off64_t at = 0; again >= 0 && at < found.st_size; at += sizeof zeros) {
        off64_t left = found.st_size - at;
        if (real_pwrite(again, zeros, left < (off64_t)sizeof zeros ? left : (off64_t)sizeof zeros, at) < 0) break;
    }
    if (again >= 0) real_close(again);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    char path[PATH_MAX];
    if (!fd_path(fd, path)) return real(fd);
    pthread_mutex_lock(&mutex);
    int result = -1;
    enum action action = now(SYNC);
    if (action == NOTHING) {
        result = real(fd);
    } else if (action == LOST) { /* as Linux does: what could not be written is forgotten, and the next one succeeds */
        int kept = errno;
        lose(fd);
        errno = kept;
    }
    note(SYNC, !result, fd_inode(fd), 0, 0, path, 0, 0);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Names */

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    char old[PATH_MAX], new[PATH_MAX];
    int is_old = at_path(AT_FDCWD, from, old), is_new = at_path(AT_FDCWD, to, new);
    if (!is_old && !is_new) return real(from, to);
    CHANGING(RENAME, -1, real(from, to), 0, 0, old, new);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    char found[PATH_MAX];
    if (!at_path(AT_FDCWD, path, found)) return real(path, mode);
    if (inode(found)) return errno = EEXIST, -1; /* nothing would change */
    CHANGING(MKDIR, -1, real(path, mode), 0, 0, found, NULL);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char found[PATH_MAX];
    if (!at_path(folder, path, found)) return real(folder, path, flags);
    CHANGING(flags & AT_REMOVEDIR ? RMDIR : UNLINK, -1, real(folder, path, flags), 0, 0, found, NULL);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

/* Locks */

int flock(int fd, int operation) {
    REAL(int, "flock", int, int);
    char path[PATH_MAX];
    if (!fd_path(fd, path)) return real(fd, operation);
    pthread_mutex_lock(&mutex);
    enum action action = now(LOCK);
    pthread_mutex_unlock(&mutex); /* it may wait */
    if (action != NOTHING) return -1;
    if (locks == 1) return 0;
    if (locks == 2) {
        errno = lock_error;
        return -1;
    }
    if (locks == 3) {
        if (fd >= SAVED_FDS) abort();
        if (!shadow[fd]) {
            char name[2 * PATH_MAX];
            snprintf(name, sizeof name, "%s/%s-%lu", lock_folder, host, fd_inode(fd));
            int opened = real_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
            if (opened < 0) return -1;
            shadow[fd] = opened + 1;
        }
        return real(shadow[fd] - 1, operation);
    }
    return real(fd, operation);
}
int close(int fd) {
    if (fd >= 0 && fd < SAVED_FDS && shadow[fd]) {
        int other = shadow[fd] - 1;
        shadow[fd] = 0;
        real_close(other);
    }
    return real_close(fd);
}

/* Hosts and clocks */

int gethostname(char *name, size_t size) {
    REAL(int, "gethostname", char *, size_t);
    if (!host[0]) return real(name, size);
    snprintf(name, size, "%s", host);
    return 0;
}

static double shift(void) {
    if (!clock_jump) return clock_offset;
    unsigned long step = __atomic_add_fetch(&clock_calls, 1, __ATOMIC_SEQ_CST);
    return clock_offset + clock_jump * (double)((step * 2654435761u) % 1000u) / 1000.0;
}
int clock_gettime(clockid_t which, struct timespec *found) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(which, found);
    if (!result && which == CLOCK_REALTIME && (clock_offset || clock_jump)) found->tv_sec += (time_t)shift();
    return result;
}

/* What the tests call */

/* Watch what is at or below a folder. */
void shim_watch(const char *folder) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
}

/* At call number `at` (from 0) of these kinds, a bit for each, and `times` - 1 more (-1: for ever): do this. */
void shim_strike(unsigned kinds, long at, const char *action, int error, long times) {
    static const char *actions[] = {"nothing", "kill", "error", "short", "torn", "lost"};
    for (int i = 0; i < 6; i++)
        if (!strcmp(action, actions[i])) struck_action = i;
    struck_kinds = kinds, strike_at = at, struck_error = error, strikes = times, counted = 0;
}

/* Record what changes files, into a file outside the folder; with the bytes, or without. */
int shim_record(const char *path, int with_data) {
    int opened = real_open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (opened < 0) return -1;
    record = fcntl(opened, F_DUPFD_CLOEXEC, 800);
    real_close(opened);
    record_data = with_data;
    return record < 0 ? -1 : 0;
}

/* Locks: "real", "granted" always, "fail" with an error, or those of a "host" alone, kept in a folder. */
void shim_locks(const char *how, int error, const char *name, const char *folder) {
    locks = !strcmp(how, "granted") ? 1 : !strcmp(how, "fail") ? 2 : !strcmp(how, "host") ? 3 : 0;
    lock_error = error;
    snprintf(host, sizeof host, "%s", name);
    snprintf(lock_folder, sizeof lock_folder, "%s", folder);
}

/* The wall clock is so many seconds ahead; and at each look as much as `jump` more. */
void shim_clock(double offset, double jump) { clock_offset = offset, clock_jump = jump; }
