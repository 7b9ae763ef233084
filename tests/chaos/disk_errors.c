/* Delay or fail what a process writes to files below CHAOS_DISK_FOLDER, as CHAOS_DISK_CONTROL says.

   The control file has three 32-bit numbers: microseconds that each sync takes longer, the error of writes,
   and the error of syncs; 0 is none. A test changes them while the process runs. Preload with LD_PRELOAD. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int32_t delay_us, write_error, sync_error;
};

static const volatile struct control *control;
static const char *folder;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CHAOS_DISK_CONTROL");
    folder = getenv("CHAOS_DISK_FOLDER");
    if (!name || !folder)
        return;
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        abort();
    void *found = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED)
        abort();
    control = found;
    close(file);
}

static int is_ours(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static int write_error(int file) {
    return control && control->write_error && is_ours(file) ? control->write_error : 0;
}

/* Wait if syncs are slow, and return the error of this one. */
static int sync_error(int file) {
    if (!control || !(control->delay_us || control->sync_error) || !is_ours(file))
        return 0;
    for (int32_t left = control->delay_us; left > 0 && control->delay_us; left -= 10000)
        usleep(10000);
    return control->sync_error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(result, name, check, parameters, arguments)                                                     \
    result name parameters {                                                                                 \
        static __typeof__(&name) real;                                                                       \
        int error = check(file);                                                                             \
        if (error) {                                                                                         \
            errno = error;                                                                                   \
            return -1;                                                                                       \
        }                                                                                                    \
        if (!real)                                                                                           \
            real = REAL(name);                                                                               \
        return real arguments;                                                                               \
    }

WRAP(ssize_t, pwrite, write_error, (int file, const void *bytes, size_t count, off_t at),
     (file, bytes, count, at))
WRAP(ssize_t, pwrite64, write_error, (int file, const void *bytes, size_t count, off64_t at),
     (file, bytes, count, at))
WRAP(ssize_t, pwritev, write_error, (int file, const struct iovec *parts, int count, off_t at),
     (file, parts, count, at))
WRAP(ssize_t, pwritev64, write_error, (int file, const struct iovec *parts, int count, off64_t at),
     (file, parts, count, at))
WRAP(ssize_t, pwritev2, write_error, (int file, const struct iovec *parts, int count, off_t at, int flags),
     (file, parts, count, at, flags))
WRAP(ssize_t, pwritev64v2, write_error, (int file, const struct iovec *parts, int count, off64_t at, int flags),
     (file, parts, count, at, flags))
WRAP(int, ftruncate64, write_error, (int file, off64_t size), (file, size))
WRAP(int, fsync, sync_error, (int file), (file))
WRAP(int, fdatasync, sync_error, (int file), (file))
