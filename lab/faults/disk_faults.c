/* Calls of the C library that fail as a disk makes them fail, for the files below some folders only.

   Preloaded (LD_PRELOAD), it passes every call on until disk_faults_arm() names folders, here called disks,
   and which calls are to fail. From then on it counts the calls on each disk, of each kind and of all, in
   memory shared with all processes forked later, and writes a line about each to a file.

   Paths must be absolute: relative ones count as on no disk. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DISKS = 4, FILES = 65536, PATH = 4096 };
enum { OPEN, READ, WRITE, SYNC, CLOSE, TRUNCATE, RENAME, LINK, UNLINK, MKDIR, STAT, LIST, LOCK, ALL };
enum { HALF = -1 }; /* in the place of an errno: only half of the bytes are read or written */

static const char *const NAMES[] = {"open", "read", "write", "sync", "close", "truncate", "rename",
                                    "link", "unlink", "mkdir", "stat", "list", "lock"};

static struct {
    char folders[DISKS][PATH];
    int disk, kind, error, log;
    long first, last;
} plan;

static long (*counts)[ALL + 1]; /* of calls on each disk so far; NULL until armed */
static char *opened[FILES];     /* paths of open files on a disk */
static char writable[FILES];

/* Begin to count.

   folders   absolute paths, at most DISKS, a line each
   disk      number of the folder whose calls are to fail
   kind      of the calls, or ALL
   first     number of the first of them that fails, from 0
   last      number of the last
   error     errno, or HALF
   log       file to write to, open for appending */
int disk_faults_arm(const char *folders, int disk, int kind, long first, long last, int error, int log)
{
    memset(&plan, 0, sizeof plan);
    for (int i = 0; *folders; i++) {
        size_t length = strcspn(folders, "\n");
        if (i == DISKS || length >= PATH)
            return -1;
        memcpy(plan.folders[i], folders, length);
        folders += length + (folders[length] == '\n');
    }
    plan.disk = disk, plan.kind = kind, plan.first = first, plan.last = last;
    plan.error = error, plan.log = log;
    void *memory = mmap(NULL, DISKS * sizeof *counts, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -1;
    counts = memory;
    return 0;
}

static int disk_of(const char *path)
{
    if (counts && path && path[0] == '/')
        for (int i = 0; i < DISKS && plan.folders[i][0]; i++) {
            size_t length = strlen(plan.folders[i]);
            if (!strncmp(path, plan.folders[i], length) && (!path[length] || path[length] == '/'))
                return i;
        }
    return -1;
}

/* Count a call and return what it is to fail with; 0 if it is not. */
static int fault(int kind, const char *function, const char *path)
{
    int disk = disk_of(path);
    if (disk < 0)
        return 0;
    long of_kind = __atomic_fetch_add(&counts[disk][kind], 1, __ATOMIC_SEQ_CST);
    long of_all = __atomic_fetch_add(&counts[disk][ALL], 1, __ATOMIC_SEQ_CST);
    long number = plan.kind == ALL ? of_all : of_kind;
    int hit = disk == plan.disk && (plan.kind == ALL || plan.kind == kind) &&
                plan.first <= number && number <= plan.last;
    char line[PATH + 100];
    int length = snprintf(line, sizeof line, "%d\t%s\t%s\t%d\t%s\n", disk, NAMES[kind], function, hit, path);
    syscall(SYS_write, plan.log, line, length);
    return hit ? plan.error : 0;
}

/* Count a call and tell whether it is to fail; errno is then set. */
static int fails(int kind, const char *function, const char *path)
{
    int error = fault(kind, function, path);
    if (error > 0)
        errno = error;
    return error > 0;
}

static const char *path_of(int file) { return file >= 0 && file < FILES ? opened[file] : NULL; }

static void note(int file, const char *path, int flags)
{
    if (file < 0 || file >= FILES)
        return;
    free(opened[file]);
    opened[file] = disk_of(path) < 0 ? NULL : strdup(path);
    writable[file] = (flags & O_ACCMODE) != O_RDONLY;
}

/* Return a path that may be relative to an open folder; the buffer holds it then. */
static const char *below(int folder, const char *path, char *buffer)
{
    if (!path || path[0] == '/' || folder == AT_FDCWD || !path_of(folder))
        return path;
    snprintf(buffer, PATH, path[0] ? "%s/%s" : "%s", path_of(folder), path);
    return buffer;
}

/* The function of this name that a program would have without this file. */
#define REAL(name)                                            \
    static __typeof__(name) *real;                            \
    if (!real)                                                \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

/* ------------------------------------------------------------------------------------ open and close */

#define OPENING(name)                                         \
    int name(const char *path, int flags, ...)                \
    {                                                         \
        REAL(name)                                            \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = va_arg(rest, mode_t);                   \
        va_end(rest);                                         \
        if (fails(OPEN, #name, path))                         \
            return -1;                                        \
        int file = real(path, flags, mode);                   \
        note(file, path, flags);                              \
        return file;                                          \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                      \
    int name(int folder, const char *path, int flags, ...)    \
    {                                                         \
        REAL(name)                                            \
        char buffer[PATH];                                    \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = va_arg(rest, mode_t);                   \
        va_end(rest);                                         \
        const char *whole = below(folder, path, buffer);      \
        if (fails(OPEN, #name, whole))                        \
            return -1;                                        \
        int file = real(folder, path, flags, mode);           \
        note(file, whole, flags);                             \
        return file;                                          \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

/* What a program calls that was compiled with checks (_FORTIFY_SOURCE). */
int __open_2(const char *path, int flags) { return open(path, flags, 0); }
int __open64_2(const char *path, int flags) { return open64(path, flags, 0); }
int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return openat64(folder, path, flags, 0); }

#define OPENING_STREAM(name)                                                                 \
    FILE *name(const char *path, const char *mode)                                           \
    {                                                                                        \
        REAL(name)                                                                           \
        return fails(OPEN, #name, path) ? NULL : real(path, mode);                           \
    }
OPENING_STREAM(fopen)
OPENING_STREAM(fopen64)

/* A network disk tells here that what was written is lost. The file is closed all the same. */
int close(int file)
{
    REAL(close)
    char *path = file >= 0 && file < FILES ? opened[file] : NULL;
    if (!path)
        return real(file);
    opened[file] = NULL;
    int error = writable[file] ? fault(CLOSE, "close", path) : 0;
    free(path);
    int result = real(file);
    if (error > 0) {
        errno = error;
        return -1;
    }
    return result;
}

/* ------------------------------------------------------------------------------------ read and write */

#define MOVING(kind, name, ...)                                                              \
    {                                                                                        \
        REAL(name)                                                                           \
        const char *path = path_of(file);                                                    \
        int error = path ? fault(kind, #name, path) : 0;                                     \
        if (error > 0) {                                                                     \
            errno = error;                                                                   \
            return -1;                                                                       \
        }                                                                                    \
        if (error == HALF && size > 1)                                                       \
            size /= 2;                                                                       \
        return real(file, bytes, size, ##__VA_ARGS__);                                       \
    }
ssize_t read(int file, void *bytes, size_t size) MOVING(READ, read)
ssize_t pread(int file, void *bytes, size_t size, off_t at) MOVING(READ, pread, at)
ssize_t pread64(int file, void *bytes, size_t size, off64_t at) MOVING(READ, pread64, at)
ssize_t readv(int file, const struct iovec *bytes, int size) MOVING(READ, readv)
ssize_t write(int file, const void *bytes, size_t size) MOVING(WRITE, write)
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) MOVING(WRITE, pwrite, at)
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) MOVING(WRITE, pwrite64, at)
ssize_t writev(int file, const struct iovec *bytes, int size) MOVING(WRITE, writev)

ssize_t __read_chk(int file, void *bytes, size_t size, size_t room)
{
    return size > room ? abort(), -1 : read(file, bytes, size);
}

ssize_t __pread64_chk(int file, void *bytes, size_t size, off64_t at, size_t room)
{
    return size > room ? abort(), -1 : pread64(file, bytes, size, at);
}

#define MAPPING(name, offset)                                                                \
    void *name(void *at, size_t size, int access, int flags, int file, offset from)          \
    {                                                                                        \
        REAL(name)                                                                           \
        const char *path = flags & MAP_ANONYMOUS ? NULL : path_of(file);                     \
        return path && fails(READ, #name, path) ? MAP_FAILED                                 \
                                                : real(at, size, access, flags, file, from); \
    }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

#define ON_FILE(kind, name, parameters, ...)                                                 \
    int name parameters                                                                      \
    {                                                                                        \
        REAL(name)                                                                           \
        const char *path = path_of(file);                                                    \
        return path && fails(kind, #name, path) ? -1 : real(__VA_ARGS__);                    \
    }
ON_FILE(SYNC, fsync, (int file), file)
ON_FILE(SYNC, fdatasync, (int file), file)
ON_FILE(TRUNCATE, ftruncate, (int file, off_t size), file, size)
ON_FILE(TRUNCATE, ftruncate64, (int file, off64_t size), file, size)
ON_FILE(STAT, fstat, (int file, struct stat *found), file, found)
ON_FILE(STAT, fstat64, (int file, struct stat64 *found), file, found)
ON_FILE(LOCK, flock, (int file, int operation), file, operation)

#define CONTROLLING(name)                                                                    \
    int name(int file, int command, ...)                                                     \
    {                                                                                        \
        REAL(name)                                                                           \
        va_list rest;                                                                        \
        va_start(rest, command);                                                             \
        void *argument = va_arg(rest, void *);                                               \
        va_end(rest);                                                                        \
        const char *path = path_of(file);                                                    \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||   \
                    command == F_OFD_SETLKW;                                                 \
        if (locks && path && fails(LOCK, #name, path))                                       \
            return -1;                                                                       \
        int result = real(file, command, argument);                                          \
        if (path && (command == F_DUPFD || command == F_DUPFD_CLOEXEC))                      \
            note(result, path, writable[file] ? O_RDWR : O_RDONLY);                          \
        return result;                                                                       \
    }
CONTROLLING(fcntl)
CONTROLLING(fcntl64)

/* --------------------------------------------------------------------------------------------- names */

#define ON_PATH(kind, name, parameters, ...)                                                 \
    int name parameters                                                                      \
    {                                                                                        \
        REAL(name)                                                                           \
        return fails(kind, #name, path) ? -1 : real(__VA_ARGS__);                            \
    }
ON_PATH(TRUNCATE, truncate, (const char *path, off_t size), path, size)
ON_PATH(TRUNCATE, truncate64, (const char *path, off64_t size), path, size)
ON_PATH(RENAME, rename, (const char *from, const char *path), from, path)
ON_PATH(LINK, link, (const char *from, const char *path), from, path)
ON_PATH(LINK, symlink, (const char *from, const char *path), from, path)
ON_PATH(UNLINK, unlink, (const char *path), path)
ON_PATH(UNLINK, rmdir, (const char *path), path)
ON_PATH(UNLINK, remove, (const char *path), path)
ON_PATH(MKDIR, mkdir, (const char *path, mode_t mode), path, mode)
ON_PATH(STAT, stat, (const char *path, struct stat *found), path, found)
ON_PATH(STAT, stat64, (const char *path, struct stat64 *found), path, found)
ON_PATH(STAT, lstat, (const char *path, struct stat *found), path, found)
ON_PATH(STAT, lstat64, (const char *path, struct stat64 *found), path, found)
ON_PATH(STAT, access, (const char *path, int mode), path, mode)
ON_PATH(STAT, statvfs, (const char *path, struct statvfs *found), path, found)
ON_PATH(STAT, statvfs64, (const char *path, struct statvfs64 *found), path, found)

#define ON_PATH_AT(kind, name, parameters, ...)                                              \
    int name parameters                                                                      \
    {                                                                                        \
        REAL(name)                                                                           \
        char buffer[PATH];                                                                   \
        return fails(kind, #name, below(folder, path, buffer)) ? -1 : real(__VA_ARGS__);     \
    }
ON_PATH_AT(RENAME, renameat, (int from_folder, const char *from, int folder, const char *path),
           from_folder, from, folder, path)
ON_PATH_AT(LINK, linkat, (int from_folder, const char *from, int folder, const char *path, int flags),
           from_folder, from, folder, path, flags)
ON_PATH_AT(UNLINK, unlinkat, (int folder, const char *path, int flags), folder, path, flags)
ON_PATH_AT(MKDIR, mkdirat, (int folder, const char *path, mode_t mode), folder, path, mode)
ON_PATH_AT(STAT, faccessat, (int folder, const char *path, int mode, int flags), folder, path, mode, flags)
ON_PATH_AT(STAT, fstatat, (int folder, const char *path, struct stat *found, int flags), folder, path,
           found, flags)
ON_PATH_AT(STAT, fstatat64, (int folder, const char *path, struct stat64 *found, int flags), folder, path,
           found, flags)

/* What a program calls that was compiled with a C library older than 2.33. */
int __xstat64(int version, const char *path, struct stat64 *found)
{
    return (void)version, stat64(path, found);
}

int __lxstat64(int version, const char *path, struct stat64 *found)
{
    return (void)version, lstat64(path, found);
}

int __fxstat64(int version, int file, struct stat64 *found)
{
    return (void)version, fstat64(file, found);
}

int __fxstatat64(int version, int folder, const char *path, struct stat64 *found, int flags)
{
    return (void)version, fstatat64(folder, path, found, flags);
}

/* ------------------------------------------------------------------------------------------ listings */

DIR *opendir(const char *path)
{
    REAL(opendir)
    if (fails(LIST, "opendir", path))
        return NULL;
    DIR *listing = real(path);
    if (listing)
        note(dirfd(listing), path, O_RDONLY);
    return listing;
}

#define LISTING(name, entry)                                                                 \
    struct entry *name(DIR *listing)                                                         \
    {                                                                                        \
        REAL(name)                                                                           \
        const char *path = path_of(dirfd(listing));                                          \
        return path && fails(LIST, #name, path) ? NULL : real(listing);                      \
    }
LISTING(readdir, dirent)
LISTING(readdir64, dirent64)

int closedir(DIR *listing)
{
    REAL(closedir)
    note(dirfd(listing), NULL, O_RDONLY);
    return real(listing);
}
