/* Record what a process does to the files below CHAOS_DISK_FOLDER in the file CHAOS_DISK_RECORD.

   Each record has the header below, one or two paths, and the written bytes. It is appended after the call has
   succeeded; only SYNC_BEGINS and OUTPUT (bytes for the standard output) come before their call. One lock holds the
   calls in the order of their records. Preload with LD_PRELOAD. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, WRITE, TRUNCATE, SYNC_BEGINS, SYNC, RENAME, LINK, UNLINK, OUTPUT };

struct header {
    uint16_t kind, path, other, unused;
    uint64_t at, size;
};

static int record = -1;
static const char *folder;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CHAOS_DISK_RECORD");
    folder = getenv("CHAOS_DISK_FOLDER");
    if (!name || !folder)
        return;
    record = REAL(open64)(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (record < 0)
        abort();
}

/* Put the path of an open file into `path`; return 0 if it is not below the folder. */
static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = record < 0 ? -1 : readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Put the path of a name relative to an open folder into `path`; return 0 if it is not below the folder. */
static int path_at(int at, const char *name, char *path) {
    char base[PATH_MAX];
    if (record < 0)
        return 0;
    if (name[0] == '/')
        base[0] = 0;
    else if (at == AT_FDCWD ? !getcwd(base, sizeof base) : (path_of(at, base), 0))
        return 0;
    snprintf(path, PATH_MAX, base[0] ? "%s/%s" : "%s%s", base, name);
    return strncmp(path, folder, strlen(folder)) == 0;
}

static void put(const struct iovec *parts, int count) {
    for (int index = 0; index < count; index++)
        for (size_t done = 0; done < parts[index].iov_len;) {
            ssize_t some = REAL(write)(record, (char *)parts[index].iov_base + done, parts[index].iov_len - done);
            if (some < 0)
                abort();
            done += some;
        }
}

static void note(enum kind kind, const char *path, const char *other, uint64_t at, const struct iovec *data, int count,
                 size_t size) {
    struct header header = {kind, strlen(path), strlen(other), 0, at, size};
    struct iovec head[3] = {{&header, sizeof header}, {(void *)path, header.path}, {(void *)other, header.other}};
    int error = errno;
    put(head, 3);
    for (int index = 0; index < count && size; index++) {
        struct iovec part = data[index];
        if (part.iov_len > size)
            part.iov_len = size;
        size -= part.iov_len;
        put(&part, 1);
    }
    errno = error;
}

#define NOTED(result, call, path, ...)                                                                       \
    pthread_mutex_lock(&lock);                                                                               \
    result done = call;                                                                                      \
    if (done != (result)-1)                                                                                  \
        note(__VA_ARGS__);                                                                                   \
    pthread_mutex_unlock(&lock);                                                                             \
    return done;

#define WRITES(name, offset, first, many, parameters, arguments)                                             \
    ssize_t name parameters {                                                                                \
        char path[PATH_MAX];                                                                                 \
        if (!path_of(file, path))                                                                            \
            return REAL(name) arguments;                                                                     \
        NOTED(ssize_t, REAL(name) arguments, path, WRITE, path, "", offset, first, many, done)               \
    }

#define ONE (&(struct iovec){(void *)bytes, count})
#define CURRENT (lseek(file, 0, SEEK_CUR) - done)
WRITES(pwrite, at, ONE, 1, (int file, const void *bytes, size_t count, off_t at), (file, bytes, count, at))
WRITES(pwrite64, at, ONE, 1, (int file, const void *bytes, size_t count, off64_t at), (file, bytes, count, at))
WRITES(pwritev, at, parts, count, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
WRITES(pwritev64, at, parts, count, (int file, const struct iovec *parts, int count, off64_t at),
       (file, parts, count, at))
WRITES(pwritev2, at, parts, count, (int file, const struct iovec *parts, int count, off_t at, int flags),
       (file, parts, count, at, flags))
WRITES(pwritev64v2, at, parts, count, (int file, const struct iovec *parts, int count, off64_t at, int flags),
       (file, parts, count, at, flags))
WRITES(writev, CURRENT, parts, count, (int file, const struct iovec *parts, int count), (file, parts, count))

ssize_t write(int file, const void *bytes, size_t count) {
    char path[PATH_MAX];
    if (record >= 0 && file == STDOUT_FILENO) {
        pthread_mutex_lock(&lock);
        note(OUTPUT, "", "", 0, ONE, 1, count);
        pthread_mutex_unlock(&lock);
    }
    if (!path_of(file, path))
        return REAL(write)(file, bytes, count);
    NOTED(ssize_t, REAL(write)(file, bytes, count), path, WRITE, path, "", CURRENT, ONE, 1, done)
}

#define TRUNCATES(name, type)                                                                                \
    int name(int file, type size) {                                                                          \
        char path[PATH_MAX];                                                                                 \
        if (!path_of(file, path))                                                                            \
            return REAL(name)(file, size);                                                                   \
        NOTED(int, REAL(name)(file, size), path, TRUNCATE, path, "", size, NULL, 0, 0)                       \
    }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

/* What is written while it syncs need not be on disk: the record of its beginning tells what was before. */
#define SYNCS(name)                                                                                          \
    int name(int file) {                                                                                     \
        char path[PATH_MAX];                                                                                 \
        if (!path_of(file, path))                                                                            \
            return REAL(name)(file);                                                                         \
        pthread_mutex_lock(&lock);                                                                           \
        note(SYNC_BEGINS, path, "", pthread_self(), NULL, 0, 0);                                             \
        pthread_mutex_unlock(&lock);                                                                         \
        int done = REAL(name)(file);                                                                         \
        pthread_mutex_lock(&lock);                                                                           \
        if (!done)                                                                                           \
            note(SYNC, path, "", pthread_self(), NULL, 0, 0);                                                \
        pthread_mutex_unlock(&lock);                                                                         \
        return done;                                                                                         \
    }
SYNCS(fsync)
SYNCS(fdatasync)

/* A file that is created or emptied. */
#define OPENS(name, first, at, ...)                                                                          \
    int name(first const char *file, int flags, ...) {                                                       \
        char path[PATH_MAX];                                                                                 \
        va_list more;                                                                                        \
        va_start(more, flags);                                                                               \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                              \
        va_end(more);                                                                                        \
        if (!(flags & (O_CREAT | O_TRUNC)) || flags & O_DIRECTORY || !path_at(at, file, path))               \
            return REAL(name)(__VA_ARGS__, mode);                                                            \
        pthread_mutex_lock(&lock);                                                                           \
        struct stat before;                                                                                  \
        int existed = !stat(path, &before);                                                                  \
        int done = REAL(name)(__VA_ARGS__, mode);                                                            \
        if (done >= 0 && !existed)                                                                           \
            note(CREATE, path, "", 0, NULL, 0, 0);                                                           \
        else if (done >= 0 && flags & O_TRUNC)                                                               \
            note(TRUNCATE, path, "", 0, NULL, 0, 0);                                                         \
        pthread_mutex_unlock(&lock);                                                                         \
        return done;                                                                                         \
    }
#define AT int at,
#define NONE
OPENS(open, NONE, AT_FDCWD, file, flags)
OPENS(open64, NONE, AT_FDCWD, file, flags)
OPENS(openat, AT, at, at, file, flags)
OPENS(openat64, AT, at, at, file, flags)

#define MOVES(name, kind, from_at, to_at, parameters, arguments)                                             \
    int name parameters {                                                                                    \
        char path[PATH_MAX], other[PATH_MAX];                                                                \
        if (!(path_at(from_at, from, path) & path_at(to_at, to, other)))                                     \
            return REAL(name) arguments;                                                                     \
        NOTED(int, REAL(name) arguments, path, kind, path, other, 0, NULL, 0, 0)                             \
    }
MOVES(rename, RENAME, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), (from, to))
MOVES(renameat, RENAME, a, b, (int a, const char *from, int b, const char *to), (a, from, b, to))
MOVES(link, LINK, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), (from, to))
MOVES(linkat, LINK, a, b, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))

#define REMOVES(name, at, parameters, arguments)                                                             \
    int name parameters {                                                                                    \
        char path[PATH_MAX];                                                                                 \
        if (!path_at(at, file, path))                                                                        \
            return REAL(name) arguments;                                                                     \
        NOTED(int, REAL(name) arguments, path, UNLINK, path, "", 0, NULL, 0, 0)                              \
    }
REMOVES(unlink, AT_FDCWD, (const char *file), (file))
REMOVES(unlinkat, at, (int at, const char *file, int flags), (at, file, flags))
