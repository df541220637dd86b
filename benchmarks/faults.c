/* Calls of the system that fail once, for `benchmarks.faults`: a library that LD_PRELOAD puts before the system's.

   fault_arm(folder, call, n, error) makes the n-th call of that kind on files below a folder fail with an error; SHORT_WRITE
   instead writes half of what was asked. fault_count(call) returns how many there were since. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ_OPEN, WRITE_OPEN, READ, WRITE, FALLOCATE, FSYNC, RENAME, MKDIR, UNLINK, CLOSE, MMAP, LOCK, STAT, KINDS };
enum { SHORT_WRITE = -1 };

static char root[4096];
static int armed = -1, error_number;
static long armed_count, counts[KINDS];

void fault_arm(const char *folder, int call, long n, int error) {
    memset(counts, 0, sizeof counts);
    snprintf(root, sizeof root, "%s", folder);
    armed = call, armed_count = n, error_number = error;
}

void fault_disarm(void) { root[0] = 0; }

long fault_count(int call) { return counts[call]; }

/* The error with which a call fails, 0 if it does not. */
static int hit(int call, const char *path) {
    if (!root[0] || strncmp(path, root, strlen(root))) return 0;
    return ++counts[call] == armed_count && call == armed ? error_number : 0;
}

static int hit_fd(int call, int fd) {
    char link[64], path[4096];
    if (!root[0] || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return hit(call, path);
}

static int hit_at(int call, int folder, const char *name) {
    char path[8300], link[64];
    ssize_t length;
    if (!root[0] || !name) return 0;
    if (!strncmp(name, "/proc/self/fd/", 14)) return hit_fd(call, atoi(name + 14));
    if (name[0] == '/') return hit(call, name);
    if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    length = readlink(link, path, 4096);
    if (length < 0) return 0;
    snprintf(path + length, sizeof path - length, "/%s", name);
    return hit(call, path);
}

#define FAIL_IF(condition) do { int e_ = (condition); if (e_) { errno = e_; return -1; } } while (0)

static int do_open(int folder, const char *name, int flags, mode_t mode) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
    FAIL_IF(hit_at(writes ? WRITE_OPEN : READ_OPEN, folder, name));
    return syscall(SYS_openat, folder, name, flags, mode);
}

#define MODE mode_t mode = 0; if (flags & O_CREAT) { va_list a; va_start(a, flags); mode = va_arg(a, int); va_end(a); }
int open(const char *name, int flags, ...) { MODE return do_open(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return do_open(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return do_open(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return do_open(folder, name, flags, mode); }

ssize_t read(int fd, void *data, size_t size) {
    FAIL_IF(hit_fd(READ, fd));
    return syscall(SYS_read, fd, data, size);
}

ssize_t write(int fd, const void *data, size_t size) {
    int e = hit_fd(WRITE, fd);
    if (e == SHORT_WRITE) size = size > 1 ? size / 2 : size;
    else FAIL_IF(e);
    return syscall(SYS_write, fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int e = hit_fd(WRITE, fd);
    if (e == SHORT_WRITE && count && parts[0].iov_len > 1) return syscall(SYS_write, fd, parts[0].iov_base, parts[0].iov_len / 2);
    if (e != SHORT_WRITE) FAIL_IF(e);
    return syscall(SYS_writev, fd, parts, count);
}

static int do_fallocate(int fd, off_t start, off_t size) {
    int e = hit_fd(FALLOCATE, fd);
    if (e) return e;
    return syscall(SYS_fallocate, fd, 0, start, size) && errno != EOPNOTSUPP ? errno : 0;
}
int posix_fallocate(int fd, off_t start, off_t size) { return do_fallocate(fd, start, size); }
int posix_fallocate64(int fd, off_t start, off_t size) { return do_fallocate(fd, start, size); }

int fsync(int fd) { FAIL_IF(hit_fd(FSYNC, fd)); return syscall(SYS_fsync, fd); }
int fdatasync(int fd) { FAIL_IF(hit_fd(FSYNC, fd)); return syscall(SYS_fdatasync, fd); }

int renameat(int old_folder, const char *old, int new_folder, const char *new) {
    FAIL_IF(hit_at(RENAME, new_folder, new));
    return syscall(SYS_renameat2, old_folder, old, new_folder, new, 0);
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int mkdirat(int folder, const char *name, mode_t mode) {
    FAIL_IF(hit_at(MKDIR, folder, name));
    return syscall(SYS_mkdirat, folder, name, mode);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int folder, const char *name, int flags) {
    FAIL_IF(hit_at(UNLINK, folder, name));
    return syscall(SYS_unlinkat, folder, name, flags);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }

int close(int fd) {
    int e = hit_fd(CLOSE, fd), result = syscall(SYS_close, fd);  /* Linux closes it in any case */
    FAIL_IF(e);
    return result;
}

static void *do_mmap(void *address, size_t size, int protection, int flags, int fd, off_t start) {
    int e = fd >= 0 ? hit_fd(MMAP, fd) : 0;
    if (e) { errno = e; return (void *)-1; }
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, start);
}
void *mmap(void *a, size_t n, int p, int f, int fd, off_t s) { return do_mmap(a, n, p, f, fd, s); }
void *mmap64(void *a, size_t n, int p, int f, int fd, off_t s) { return do_mmap(a, n, p, f, fd, s); }

int flock(int fd, int operation) { FAIL_IF(hit_fd(LOCK, fd)); return syscall(SYS_flock, fd, operation); }

int fstatat(int folder, const char *name, struct stat *about, int flags) {
    FAIL_IF(name[0] ? hit_at(STAT, folder, name) : hit_fd(STAT, folder));
    return syscall(SYS_newfstatat, folder, name, about, flags);
}
int stat(const char *name, struct stat *about) { return fstatat(AT_FDCWD, name, about, 0); }
int lstat(const char *name, struct stat *about) { return fstatat(AT_FDCWD, name, about, AT_SYMLINK_NOFOLLOW); }
int fstat(int fd, struct stat *about) { FAIL_IF(hit_fd(STAT, fd)); return syscall(SYS_fstat, fd, about); }
int fstatat64(int folder, const char *n, struct stat64 *a, int f) { return fstatat(folder, n, (struct stat *)a, f); }
int stat64(const char *name, struct stat64 *about) { return stat(name, (struct stat *)about); }
int lstat64(const char *name, struct stat64 *about) { return lstat(name, (struct stat *)about); }
int fstat64(int fd, struct stat64 *about) { return fstat(fd, (struct stat *)about); }
