/* A disk with a bad sector, for LD_PRELOAD: reading the file named by EIO_PATH fails with EIO from byte EIO_FROM on. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_bad(int descriptor, size_t size, off_t at) {
    const char *path = getenv("EIO_PATH"), *from = getenv("EIO_FROM");
    char link[64], target[PATH_MAX];
    if (path == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return 0;
    target[length] = 0;
    if (strcmp(target, path) != 0) return 0;
    return at + (off_t)size > (from == NULL ? 0 : atoll(from));
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define BAD(...) if (is_bad(__VA_ARGS__)) { errno = EIO; return -1; }

static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    return size;
}

ssize_t read(int fd, void *data, size_t size) {
    off_t at = lseek(fd, 0, SEEK_CUR);
    BAD(fd, size, at < 0 ? 0 : at)
    return NEXT(read)(fd, data, size);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) { BAD(fd, size, at) return NEXT(pread)(fd, data, size, at); }

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    BAD(fd, size, at)
    return NEXT(pread64)(fd, data, size, at);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
    BAD(fd, total(parts, count), at)
    return NEXT(preadv)(fd, parts, count, at);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    BAD(fd, total(parts, count), at)
    return NEXT(preadv64)(fd, parts, count, at);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    BAD(fd, total(parts, count), at)
    return NEXT(preadv2)(fd, parts, count, at, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    BAD(fd, total(parts, count), at)
    return NEXT(preadv64v2)(fd, parts, count, at, flags);
}
