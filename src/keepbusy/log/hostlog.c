/* A log of what this process asks of its GPU: one row for each call of the CUDA driver and of NCCL.

   How it gets in. Libraries find the driver's functions with dlsym, cuGetProcAddress, or as symbols that the linker
   resolves. `hostlog_start` goes through the tables of symbols of all loaded libraries and puts its own dlsym,
   cuGetProcAddress, driver and NCCL functions there. A library that is loaded later is treated when somebody asks dlsym
   for one of its functions. Where the driver was in use before, libraries keep its functions in tables of their own:
   these are looked for in their data. The program needs no variable in its environment, and its children inherit
   nothing.

   What is written. The file `rows` holds rows of 32 bytes, in chunks; a chunk belongs to one thread, which writes there
   without a lock. The file `names` holds a line of JSON for each thing that rows refer to by number: what was called,
   Python stacks, streams, threads, communicators. Both files are complete after each call, however the process ends.

   What it must never do: fail a call that would have succeeded, take Python's lock (its holder may wait for a lock that
   the caller of the driver holds), or write into a forked child. On anything unexpected it stops and says why. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
#define THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))
typedef int result; /* CUresult and ncclResult_t: 0 is success */

/* ---- what a row says --------------------------------------------------------------------------------------------- */

#define KINDS(X)                                                                                                       \
    X(launch) X(copy_to_gpu) X(copy_to_host) X(copy_on_gpu) X(copy) X(set_memory) X(host_function) X(graph_launch)     \
    X(stream_sync) X(event_sync) X(context_sync) X(stream_query) X(event_query) X(event_record) X(event_wait)          \
    X(stream_create) X(stream_destroy) X(capture_begin) X(capture_end) X(graph_create) X(graph_destroy)                \
    X(allocate) X(free) X(allocate_host) X(free_host) X(register_host) X(unregister_host) X(map_memory)                \
    X(unmap_memory) X(load_code) X(unload_code) X(all_reduce) X(broadcast) X(reduce) X(all_gather) X(reduce_scatter)   \
    X(send) X(receive) X(group_start) X(group_end) X(communicator) X(note) X(thinned) X(resumed)
enum kind {
    NO_KIND,
#define X(name) KIND_##name,
    KINDS(X)
#undef X
};
static const char *const kind_names[] = {
    "",
#define X(name) #name,
    KINDS(X)
#undef X
};

struct row {
    u64 begin;  /* ticks; lines of `names` say when they were; 0: no row was written here */
    u64 value;  /* bytes, an event, a graph, elements of a collective, a note: by kind */
    u32 took;   /* ticks; with the highest bit, units of 1024 ticks */
    u32 call;   /* number of a "call" in `names`: kind, function, shape */
    u32 stack;  /* number of a "stack"; 0: this thread runs no Python */
    u16 stream; /* number of a "stream"; 0: none */
    u8 thread;  /* number of a "thread" */
    u8 flags;
};
enum { FAILED = 1, CAPTURED = 2, PAGEABLE = 4, BLOCKING = 8, GRAPH = 16 };
#define CHUNK_ROWS (1u << 15)
#define CHUNK_BYTES (CHUNK_ROWS * sizeof(struct row))

/* ---- state ------------------------------------------------------------------------------------------------------- */

static atomic_bool on;                  /* rows are written */
static atomic_bool thinned;             /* but for those of what comes often */
static _Atomic(const char *) stopped;   /* why it stopped before the end, or NULL */
static int rows_file = -1, names_file = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for what is seldom: chunks, names */

static bool use_counter; /* the processor's, which is read faster than the system's clock */

static u64 nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec;
}

static u64 now(void) {
    if (!use_counter)
        return nanoseconds();
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    u64 ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#endif
}

static void stop(const char *why) {
    const char *none = NULL;
    atomic_compare_exchange_strong(&stopped, &none, why);
    atomic_store(&on, false);
}

/* ---- lines of `names` -------------------------------------------------------------------------------------------- */

struct text {
    char *start;
    size_t size, room;
};

static void add(struct text *text, const char *from, size_t size) {
    if (text->size + size > text->room) {
        size_t room = 2 * (text->size + size) + 256;
        char *start = realloc(text->start, room);
        if (!start) {
            stop("no memory was left for a line of text");
            return;
        }
        text->start = start;
        text->room = room;
    }
    memcpy(text->start + text->size, from, size);
    text->size += size;
}

__attribute__((format(printf, 2, 3))) static void add_format(struct text *text, const char *format, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    if (size > 0)
        add(text, buffer, (size_t)size < sizeof buffer ? (size_t)size : sizeof buffer - 1);
}

static void add_character(struct text *text, u32 c) {
    if (c == '"' || c == '\\')
        add_format(text, "\\%c", (char)c);
    else if (c >= 0x20 && c < 0x7f)
        add(text, &(char){(char)c}, 1);
    else if (c < 0x10000)
        add_format(text, "\\u%04x", c);
    else
        add_format(text, "\\u%04x\\u%04x", 0xd7c0 + (c >> 10), 0xdc00 + (c & 0x3ff));
}

static void add_string(struct text *text, const char *string) {
    add(text, "\"", 1);
    for (; *string; string++)
        add_character(text, (u8)*string);
    add(text, "\"", 1);
}

/* The lock is held. */
static void write_line(struct text *text) {
    add(text, "\n", 1);
    for (size_t done = 0; done < text->size;) {
        ssize_t written = write(names_file, text->start + done, text->size - done);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            stop("its file of names could not be written");
            break;
        }
        done += (size_t)written;
    }
    free(text->start);
}

/* The lock is held. */
static void write_clock(void) {
    struct text text = {0};
    add_format(&text, "{\"ticks\":%llu,\"nanoseconds\":%llu}", (unsigned long long)now(),
               (unsigned long long)nanoseconds());
    write_line(&text);
}

/* ---- numbers for things that come back: stacks, calls, streams --------------------------------------------------- */

struct table {
    struct {
        _Atomic u64 hash; /* 0: free */
        u32 number;
    } *slots; /* open addressing */
    u32 size, used, most;
};

static bool make_table(struct table *table, u32 size, u32 most) {
    *table = (struct table){calloc(size, sizeof *table->slots), size, 0, most};
    return table->slots != NULL;
}

static u64 mix(u64 hash, u64 value) {
    return (hash ^ value) * 0x9e3779b97f4a7c15u;
}

static u64 finished(u64 hash) {
    hash ^= hash >> 32;
    return hash ? hash : 1;
}

/* Without a lock: a slot's number is written before its hash. */
static u32 known(const struct table *table, u64 hash, u32 *free_slot) {
    for (u32 slot = (u32)hash & (table->size - 1);; slot = (slot + 1) & (table->size - 1)) {
        u64 found = atomic_load_explicit(&table->slots[slot].hash, memory_order_acquire);
        if (found == hash)
            return table->slots[slot].number;
        if (!found) {
            *free_slot = slot;
            return 0;
        }
    }
}

/* The lock is held. 0: the table is full. */
static u32 add_number(struct table *table, u64 hash, u32 slot) {
    if (table->used == table->most)
        return 0;
    table->slots[slot].number = ++table->used;
    atomic_store_explicit(&table->slots[slot].hash, hash, memory_order_release);
    return table->used;
}

static struct table calls, stacks, streams, code_objects;
static atomic_uint kernels_unloaded, code_destroyed; /* an address from before may mean something else now */

/* Of each thread, within one line of the processor's cache: between two calls of the driver the program fills it. */
static THREAD_LOCAL struct thread {
    struct row *next, *end; /* where its rows go */
    void *context;          /* the driver's */
    const void *stream, *context_of_stream; /* of the last row; what number it has */
    u16 stream_number;
    u8 number; /* of the thread; 0: it has made no row */
    struct recent *recent; /* of calls and stacks that it has asked for lately, their numbers */
} this_thread __attribute__((aligned(64)));

/* Close together: the tables are large, and between two calls of the driver the program fills the caches. */
#define RECENT 512u
struct recent {
    u64 hash;
    u32 number;
};

static struct recent *recent(u64 hash) {
    return &this_thread.recent[hash & (RECENT - 1)];
}

/* 0: ask the table, and remember what it says. */
static u32 known_lately(u64 hash) {
    return this_thread.recent && recent(hash)->hash == hash ? recent(hash)->number : 0;
}

static u32 remembered(u64 hash, u32 number) {
    if (this_thread.recent)
        *recent(hash) = (struct recent){hash, number};
    return number;
}

/* ---- Python stacks ----------------------------------------------------------------------------------------------- */

/* Where CPython of this version keeps what is read here; Python fills it in, and tries it before it is used. */
struct python_layout {
    void *(*thread_state)(void);            /* PyGILState_GetThisThreadState */
    int (*line_of)(void *code, int offset); /* PyCode_Addr2Line */
    u32 frame_holder;                       /* in a thread's state, the address of what holds its frame, 0: itself */
    u32 current_frame, previous, code, instruction, owner;
    u32 first_owner_in_c; /* frames of this owner and above are the interpreter's own */
    u32 filename, name, first_instruction;
    u32 length, state, kind_bit, ascii, compact; /* of strings: fields, and the sizes of their heads */
};
static struct python_layout python;

static const char *address_at(const char *object, u32 offset) {
    const char *address;
    memcpy(&address, object + offset, sizeof address);
    return address;
}

/* The frames of the thread that calls, innermost first. They are its own and it is in C: nobody changes them now. */
static const char *first_frame(void) {
    const char *state = python.thread_state ? python.thread_state() : NULL;
    if (state && python.frame_holder)
        state = address_at(state, python.frame_holder);
    return state ? address_at(state, python.current_frame) : NULL;
}

static const char *code_of(const char *frame) {
    return (const char *)((uintptr_t)address_at(frame, python.code) & ~(uintptr_t)3); /* CPython 3.14 tags it */
}

static u64 hash_of_frames(const char *frame) {
    u64 hash = atomic_load_explicit(&code_destroyed, memory_order_relaxed) + 1;
    for (; frame; frame = address_at(frame, python.previous))
        if ((u8)frame[python.owner] < python.first_owner_in_c)
            hash = mix(hash, (u64)address_at(frame, python.code) ^ (u64)address_at(frame, python.instruction) << 20);
    return finished(hash);
}

static void add_python_string(struct text *text, const char *string) {
    u64 length;
    u32 state;
    memcpy(&length, string + python.length, sizeof length);
    memcpy(&state, string + python.state, sizeof state);
    u32 width = state >> python.kind_bit & 7;
    const char *characters = string + (state >> (python.kind_bit + 4) & 1 ? python.ascii : python.compact);
    add(text, "\"", 1);
    for (u64 i = 0; i < length; i++)
        add_character(text, width == 1   ? ((const u8 *)characters)[i]
                            : width == 2 ? ((const u16 *)characters)[i]
                                         : ((const u32 *)characters)[i]);
    add(text, "\"", 1);
}

static void add_frames(struct text *text, const char *frame) {
    const char *before = "[";
    for (; frame; frame = address_at(frame, python.previous)) {
        if ((u8)frame[python.owner] >= python.first_owner_in_c)
            continue;
        const char *code = code_of(frame);
        long offset = address_at(frame, python.instruction) - (code + python.first_instruction);
        add(text, before, strlen(before));
        add_python_string(text, address_at(code, python.filename));
        add_format(text, ",%d,", python.line_of((void *)(uintptr_t)code, (int)offset));
        add_python_string(text, address_at(code, python.name));
        add(text, "]", 1);
        before = ",[";
    }
}

/* Before the driver is called, so that what is needed after is in the cache by then. */
static u64 stack_hash(void) {
    const char *frame = first_frame();
    u64 hash = frame ? hash_of_frames(frame) : 0;
    if (this_thread.recent)
        __builtin_prefetch(recent(hash));
    return hash;
}

static u32 stack_number(u64 hash) {
    u32 slot, number = hash ? known_lately(hash) : 0;
    if (number || !hash)
        return number;
    if ((number = known(&stacks, hash, &slot)))
        return remembered(hash, number);
    pthread_mutex_lock(&lock);
    number = known(&stacks, hash, &slot);
    if (!number && (number = add_number(&stacks, hash, slot))) {
        struct text text = {0};
        add_format(&text, "{\"stack\":%u,\"frames\":[", number);
        add_frames(&text, first_frame());
        add(&text, "]}", 2);
        write_line(&text);
        for (const char *frame = first_frame(); frame; frame = address_at(frame, python.previous)) {
            u64 code = finished(mix(1, (uintptr_t)code_of(frame)));
            if (!known(&code_objects, code, &slot))
                add_number(&code_objects, code, slot);
        }
    }
    pthread_mutex_unlock(&lock);
    return number;
}

/* Python destroys a code object: another one may get its address. CPython 3.12 and later say so. */
int hostlog_code_event(int event, const void *code) {
    u32 slot;
    if (event == 1 && atomic_load(&on) && known(&code_objects, finished(mix(1, (uintptr_t)code)), &slot))
        atomic_fetch_add(&code_destroyed, 1);
    return 0;
}

/* ---- what was called, and on which stream ------------------------------------------------------------------------ */

static result (*name_of_function)(const char **, void *), (*name_of_kernel)(const char **, void *);

struct shape {
    u32 grid[3], block[3], shared;
};

static u32 call_number(enum kind kind, const void *function, const struct shape *shape) {
    u64 hash = mix(mix(1, (u64)kind | (u64)atomic_load_explicit(&kernels_unloaded, memory_order_relaxed) << 8),
                   (uintptr_t)function);
    if (shape) {
        hash = mix(hash, shape->grid[0] | (u64)shape->grid[1] << 32);
        hash = mix(hash, shape->grid[2] | (u64)shape->shared << 32);
        hash = mix(hash, shape->block[0] | (u64)shape->block[1] << 20 | (u64)shape->block[2] << 40);
    }
    hash = finished(hash);
    u32 slot, number = known_lately(hash);
    if (number)
        return number;
    if ((number = known(&calls, hash, &slot)))
        return remembered(hash, number);
    const char *name = NULL;
    if (kind == KIND_launch && (!name_of_function || name_of_function(&name, (void *)(uintptr_t)function)) &&
        (!name_of_kernel || name_of_kernel(&name, (void *)(uintptr_t)function)))
        name = NULL;
    pthread_mutex_lock(&lock);
    number = known(&calls, hash, &slot);
    if (!number && (number = add_number(&calls, hash, slot))) {
        struct text text = {0};
        add_format(&text, "{\"call\":%u,\"kind\":\"%s\"", number, kind_names[kind]);
        if (function)
            add_format(&text, ",\"function\":%llu", (unsigned long long)(uintptr_t)function);
        if (name) {
            add_format(&text, ",\"name\":");
            add_string(&text, name);
        }
        if (shape)
            add_format(&text, ",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u", shape->grid[0],
                       shape->grid[1], shape->grid[2], shape->block[0], shape->block[1], shape->block[2],
                       shape->shared);
        add(&text, "}", 1);
        write_line(&text);
    } else if (!number)
        stop("more than 65,000 different calls were made");
    pthread_mutex_unlock(&lock);
    return number;
}

static result (*ask_context)(void **);

/* `handle` 0 is the default stream: of the context, or of the thread where the caller was compiled for that. */
static u16 stream_number(const void *handle, bool default_of_thread) {
    if (!this_thread.context && ask_context)
        ask_context(&this_thread.context); /* it was set before the log began */
    uintptr_t h = (uintptr_t)handle;
    bool of_thread = h == 2 || (h == 0 && default_of_thread);
    if (h <= 2)
        handle = of_thread ? (void *)2 : NULL;
    bool again = this_thread.stream == handle && this_thread.context_of_stream == this_thread.context;
    if (this_thread.stream_number && again)
        return this_thread.stream_number;
    u64 hash = mix(mix(1, (uintptr_t)handle), h <= 2 ? (uintptr_t)this_thread.context : 0);
    hash = finished(of_thread ? mix(hash, (uintptr_t)&this_thread) : hash);
    u32 slot, number = known(&streams, hash, &slot);
    if (!number) {
        pthread_mutex_lock(&lock);
        number = known(&streams, hash, &slot);
        if (!number && (number = add_number(&streams, hash, slot))) {
            struct text text = {0};
            add_format(&text, "{\"stream\":%u,\"handle\":%llu,\"context\":%llu}", number,
                       (unsigned long long)(uintptr_t)handle, (unsigned long long)(uintptr_t)this_thread.context);
            write_line(&text);
        }
        pthread_mutex_unlock(&lock);
        if (!number) {
            stop("more than 3,000 streams were used");
            return 0;
        }
    }
    this_thread.stream = handle;
    this_thread.context_of_stream = this_thread.context;
    this_thread.stream_number = (u16)number;
    return this_thread.stream_number;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static pthread_cond_t chunk_taken = PTHREAD_COND_INITIALIZER;
static struct row *ready_chunk; /* the next one; under `lock`, as all of these */
static u64 chunks, most_chunks;
static bool preparing;
static u32 threads;
static struct ended {
    struct thread thread;
    struct ended *next;
} *ended; /* threads whose numbers and chunks can be taken over */
static pthread_key_t at_thread_end;

/* The lock is held. NULL, and why. */
static struct row *new_chunk(const char **why) {
    int before = errno, error = 0;
    void *rows = MAP_FAILED;
    u64 at = chunks * CHUNK_BYTES;
    if (chunks == most_chunks)
        *why = "the log reached its limit of size";
    else if ((error = posix_fallocate(rows_file, (off_t)at, CHUNK_BYTES))) /* a write to a page without room kills */
        *why = error == ENOSPC ? "the disk is full" : "the file of its rows could not grow";
    else if ((rows = mmap(NULL, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, rows_file, (off_t)at)) == MAP_FAILED)
        *why = "the file of its rows could not be mapped";
    else
        chunks++;
    errno = before;
    return rows == MAP_FAILED ? NULL : rows;
}

/* A thread of its own keeps one chunk ready. The first write to each page of a file takes 12 us. */
static void *prepare_chunks(void *nothing) {
    pthread_mutex_lock(&lock);
    while (atomic_load(&on)) {
        const char *why; /* whoever needs a chunk and gets none says it */
        struct row *chunk = new_chunk(&why);
        pthread_mutex_unlock(&lock);
        for (u64 page = 0; chunk && page < CHUNK_BYTES; page += 4096)
            *((volatile char *)chunk + page) = 0;
        pthread_mutex_lock(&lock);
        if (!chunk)
            break;
        for (ready_chunk = chunk; ready_chunk;)
            pthread_cond_wait(&chunk_taken, &lock);
    }
    preparing = false;
    pthread_mutex_unlock(&lock);
    return nothing;
}

/* The lock is held. */
static void start_preparing(void) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are for its own threads */
    preparing = !pthread_create(&thread, NULL, prepare_chunks, NULL);
    if (preparing)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static bool next_chunk(void) {
    if (this_thread.end)
        munmap(this_thread.end - CHUNK_ROWS, CHUNK_BYTES);
    pthread_mutex_lock(&lock);
    const char *why = NULL;
    this_thread.next = ready_chunk ? ready_chunk : new_chunk(&why);
    if (why)
        stop(why);
    this_thread.end = this_thread.next ? this_thread.next + CHUNK_ROWS : NULL;
    ready_chunk = NULL;
    write_clock();
    if (preparing)
        pthread_cond_signal(&chunk_taken);
    else if (this_thread.next)
        start_preparing();
    pthread_mutex_unlock(&lock);
    return this_thread.next;
}

static void introduce_thread(void) {
    pthread_mutex_lock(&lock);
    struct ended *former = ended;
    if (former) {
        this_thread.next = former->thread.next;
        this_thread.end = former->thread.end;
        this_thread.number = former->thread.number;
        this_thread.recent = former->thread.recent;
        ended = former->next;
        free(former);
    } else if (threads == 255)
        stop("more than 255 threads called the driver at the same time");
    else
        this_thread.number = (u8)++threads;
    if (!this_thread.recent)
        this_thread.recent = calloc(RECENT, sizeof *this_thread.recent);
    if (this_thread.number) {
        struct text text = {0};
        add_format(&text, "{\"thread\":%u,\"id\":%ld,\"since\":%llu}", this_thread.number, syscall(SYS_gettid),
                   (unsigned long long)nanoseconds());
        write_line(&text);
        pthread_setspecific(at_thread_end, &this_thread);
    }
    pthread_mutex_unlock(&lock);
}

static void thread_ended(void *nothing) {
    (void)nothing;
    struct ended *entry = malloc(sizeof *entry);
    if (entry) {
        pthread_mutex_lock(&lock);
        *entry = (struct ended){this_thread, ended};
        ended = entry;
        pthread_mutex_unlock(&lock);
    }
    memset(&this_thread, 0, sizeof this_thread);
}

static void put(u32 call, u64 stack, u64 begin, u64 took, u64 value, u16 stream, u8 flags) {
    if (!this_thread.number)
        introduce_thread();
    if (!this_thread.number || (this_thread.next == this_thread.end && !next_chunk()))
        return;
    struct row *row = this_thread.next++;
    row->value = value;
    row->took = took >> 31 ? (u32)(took >> 10) | 1u << 31 : (u32)took;
    row->call = call;
    row->stack = stack_number(stack);
    row->stream = stream;
    row->thread = this_thread.number;
    row->flags = flags;
    __atomic_store_n(&row->begin, begin, __ATOMIC_RELEASE);
    if (this_thread.next != this_thread.end)
        __builtin_prefetch(this_thread.next, 1);
}

/* ---- the driver's functions -------------------------------------------------------------------------------------- */

static result (*ask_capturing)(void *stream, int *status);
static result (*ask_pointer)(void *data, int attribute, u64 pointer);
static atomic_int captures; /* streams that record a graph now */

static u8 captured(void *stream) {
    int status = 0;
    if (!atomic_load_explicit(&captures, memory_order_relaxed) || !ask_capturing || ask_capturing(stream, &status))
        return 0;
    return status ? CAPTURED : 0;
}

/* Memory of the host that the driver doesn't know is pageable. */
static u8 pageable(const void *host) {
    u32 memory_type = 0;
    return ask_pointer && ask_pointer(&memory_type, 2, (uintptr_t)host) ? PAGEABLE : 0;
}

/* The symbol that the library exports, the name that cuGetProcAddress is asked for, and the CUDA version from which it
   means this symbol. Without a wrapper: the symbol has other parameters than the one before, and is not logged. */
struct function {
    const char *symbol, *name;
    int since;
    bool own; /* for callers that were compiled to have a default stream in each thread */
    void *wrapper, **real;
};
#define ENTRY(wrapped, symbol, name, since, own)                                                                       \
    static const struct function entry_##wrapped##_##since = {symbol,  name, since, own, (void *)log_##wrapped,        \
                                                              (void **)&real_##wrapped};                               \
    LISTED(entry_##wrapped##_##since)
#define LISTED(entry) static const struct function *const listed_##entry SECTION = &entry;
#define SECTION __attribute__((section("functions"), used)) /* of which the linker says where it starts and stops */
extern const struct function *const __start_functions[], *const __stop_functions[];

/* `log_f` stands for `real_f`. What it does after the call is given last. TWO: in both forms of the default stream. */
#define ONE(f, suffix, since, ...) WRAP_AS(f, false, __VA_ARGS__) ENTRY(f, #f suffix, #f, since, false)
#define TWO(f, suffix, own_suffix, since, ...)                                                                         \
    ONE(f, suffix, since, __VA_ARGS__)                                                                                 \
    WRAP_AS(f##_own, true, __VA_ARGS__) ENTRY(f##_own, #f suffix own_suffix, #f, since, true)
#define BOTH(f, suffix, since, ...) TWO(f, suffix, "_ptsz", since, __VA_ARGS__)
#define COPIES(f, suffix, since, ...) TWO(f, suffix, "_ptds", since, __VA_ARGS__)
#define WRAP_AS(f, is_own, parameters, arguments, ...)                                                                 \
    static result(*real_##f) parameters;                                                                               \
    static result log_##f parameters {                                                                                 \
        if (!atomic_load_explicit(&on, memory_order_relaxed))                                                          \
            return real_##f arguments;                                                                                 \
        const bool own = is_own;                                                                                       \
        u64 stack = stack_hash(), begin = now();                                                                       \
        result r = real_##f arguments;                                                                                 \
        u64 took = now() - begin;                                                                                      \
        u8 flags = r ? FAILED : 0;                                                                                     \
        (void)own, (void)stack, (void)took, (void)flags;                                                               \
        __VA_ARGS__;                                                                                                   \
        return r;                                                                                                      \
    }
/* Graphs and communicators must be known when rows are written again. */
static inline bool left_out(enum kind kind, u8 flags) {
    return atomic_load_explicit(&thinned, memory_order_relaxed) && !(flags & CAPTURED) &&
           (kind <= KIND_event_wait || (kind >= KIND_allocate && kind <= KIND_unmap_memory) || kind == KIND_note);
}

#define PUT(call, value, stream) put(call, stack, begin, took, (u64)(uintptr_t)(value), stream, flags)
#define ROW(kind, value, stream)                                                                                       \
    if (!left_out(KIND_##kind, flags))                                                                                 \
    PUT(call_number(KIND_##kind, NULL, NULL), value, stream_number(stream, own))
#define HOST_ROW(kind, value)                                                                                          \
    if (!left_out(KIND_##kind, flags))                                                                                 \
    PUT(call_number(KIND_##kind, NULL, NULL), value, 0)
#define LAUNCH(function, gx, gy, gz, bx, by, bz, shared, stream)                                                       \
    flags |= captured(stream);                                                                                         \
    struct shape shape = {{gx, gy, gz}, {bx, by, bz}, shared};                                                         \
    if (!left_out(KIND_launch, flags))                                                                                 \
    PUT(call_number(KIND_launch, function, &shape), 0, stream_number(stream, own))
#define COPY(kind, bytes, stream, more)                                                                                \
    flags |= captured(stream) | (more);                                                                                \
    ROW(kind, bytes, stream)

struct launch_config {
    u32 grid[3], block[3], shared;
    void *stream, *attributes;
    u32 count;
};
struct copy_2d { /* CUDA_MEMCPY2D */
    size_t from_at[2];
    u32 from_type;
    const void *from_host;
    u64 from[3];
    size_t to_at[2];
    u32 to_type;
    void *to_host;
    u64 to[3];
    size_t width, height;
};
struct copy_3d { /* CUDA_MEMCPY3D */
    size_t from_at[4];
    u32 from_type;
    const void *from_host;
    u64 from[5];
    size_t to_at[4];
    u32 to_type;
    void *to_host;
    u64 to[5];
    size_t width, height, depth;
};
enum { HOST = 1, DEVICE = 2 }; /* CUmemorytype */
#define COPY_BY_TYPES(c, bytes, stream, more)                                                                          \
    if ((c)->from_type == HOST && (c)->to_type != HOST) {                                                              \
        COPY(copy_to_gpu, bytes, stream, pageable((c)->from_host) | (more));                                           \
    } else if ((c)->to_type == HOST && (c)->from_type != HOST) {                                                       \
        COPY(copy_to_host, bytes, stream, pageable((c)->to_host) | (more));                                            \
    } else {                                                                                                           \
        COPY(copy, bytes, stream, more);                                                                               \
    }

typedef void *stream_t;
BOTH(cuLaunchKernel, "", 4000,
     (void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, stream_t s, void **p, void **e),
     (f, gx, gy, gz, bx, by, bz, shared, s, p, e), LAUNCH(f, gx, gy, gz, bx, by, bz, shared, s))
BOTH(cuLaunchKernelEx, "", 11060, (const struct launch_config *c, void *f, void **p, void **e), (c, f, p, e),
     LAUNCH(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream))
BOTH(cuLaunchCooperativeKernel, "", 9000,
     (void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, stream_t s, void **p),
     (f, gx, gy, gz, bx, by, bz, shared, s, p), LAUNCH(f, gx, gy, gz, bx, by, bz, shared, s))
BOTH(cuLaunchHostFunc, "", 10000, (stream_t s, void (*f)(void *), void *data), (s, f, data),
     flags |= captured(s); ROW(host_function, 0, s))
BOTH(cuGraphLaunch, "", 10000, (void *exec, stream_t s), (exec, s), flags |= GRAPH | captured(s); ROW(graph_launch, exec, s))

BOTH(cuMemcpyHtoDAsync, "_v2", 3020, (u64 to, const void *from, size_t n, stream_t s), (to, from, n, s),
     COPY(copy_to_gpu, n, s, pageable(from)))
BOTH(cuMemcpyDtoHAsync, "_v2", 3020, (void *to, u64 from, size_t n, stream_t s), (to, from, n, s),
     COPY(copy_to_host, n, s, pageable(to)))
BOTH(cuMemcpyDtoDAsync, "_v2", 3020, (u64 to, u64 from, size_t n, stream_t s), (to, from, n, s),
     COPY(copy_on_gpu, n, s, 0))
BOTH(cuMemcpyAsync, "", 4000, (u64 to, u64 from, size_t n, stream_t s), (to, from, n, s), COPY(copy, n, s, 0))
BOTH(cuMemcpyPeerAsync, "", 4000, (u64 to, void *to_context, u64 from, void *from_context, size_t n, stream_t s),
     (to, to_context, from, from_context, n, s), COPY(copy_on_gpu, n, s, 0))
BOTH(cuMemcpy2DAsync, "_v2", 3020, (const struct copy_2d *c, stream_t s), (c, s),
     COPY_BY_TYPES(c, c->width * c->height, s, 0))
BOTH(cuMemcpy3DAsync, "_v2", 3020, (const struct copy_3d *c, stream_t s), (c, s),
     COPY_BY_TYPES(c, c->width * c->height * c->depth, s, 0))
COPIES(cuMemcpyHtoD, "_v2", 3020, (u64 to, const void *from, size_t n), (to, from, n),
     COPY(copy_to_gpu, n, NULL, pageable(from) | BLOCKING))
COPIES(cuMemcpyDtoH, "_v2", 3020, (void *to, u64 from, size_t n), (to, from, n),
     COPY(copy_to_host, n, NULL, pageable(to) | BLOCKING))
COPIES(cuMemcpyDtoD, "_v2", 3020, (u64 to, u64 from, size_t n), (to, from, n), COPY(copy_on_gpu, n, NULL, BLOCKING))
COPIES(cuMemcpy, "", 4000, (u64 to, u64 from, size_t n), (to, from, n), COPY(copy, n, NULL, BLOCKING))
COPIES(cuMemcpy2D, "_v2", 3020, (const struct copy_2d *c), (c), COPY_BY_TYPES(c, c->width * c->height, NULL, BLOCKING))
COPIES(cuMemcpy3D, "_v2", 3020, (const struct copy_3d *c), (c),
     COPY_BY_TYPES(c, c->width * c->height * c->depth, NULL, BLOCKING))
BOTH(cuMemsetD8Async, "", 3020, (u64 to, u8 v, size_t n, stream_t s), (to, v, n, s), COPY(set_memory, n, s, 0))
BOTH(cuMemsetD16Async, "", 3020, (u64 to, u16 v, size_t n, stream_t s), (to, v, n, s), COPY(set_memory, 2 * n, s, 0))
BOTH(cuMemsetD32Async, "", 3020, (u64 to, u32 v, size_t n, stream_t s), (to, v, n, s), COPY(set_memory, 4 * n, s, 0))
BOTH(cuMemsetD2D8Async, "", 3020, (u64 to, size_t pitch, u8 v, size_t w, size_t h, stream_t s), (to, pitch, v, w, h, s),
     COPY(set_memory, w * h, s, 0))
BOTH(cuMemsetD2D32Async, "", 3020, (u64 to, size_t pitch, u32 v, size_t w, size_t h, stream_t s),
     (to, pitch, v, w, h, s), COPY(set_memory, 4 * w * h, s, 0))
COPIES(cuMemsetD8, "_v2", 3020, (u64 to, u8 v, size_t n), (to, v, n), COPY(set_memory, n, NULL, BLOCKING))
COPIES(cuMemsetD32, "_v2", 3020, (u64 to, u32 v, size_t n), (to, v, n), COPY(set_memory, 4 * n, NULL, BLOCKING))

BOTH(cuStreamSynchronize, "", 2000, (stream_t s), (s), ROW(stream_sync, 0, s))
BOTH(cuStreamQuery, "", 2000, (stream_t s), (s), ROW(stream_query, r, s))
BOTH(cuStreamWaitEvent, "", 3020, (stream_t s, void *e, u32 f), (s, e, f), flags |= captured(s); ROW(event_wait, e, s))
BOTH(cuEventRecord, "", 2000, (void *e, stream_t s), (e, s), flags |= captured(s); ROW(event_record, e, s))
BOTH(cuEventRecordWithFlags, "", 11010, (void *e, stream_t s, u32 f), (e, s, f),
     flags |= captured(s); ROW(event_record, e, s))
ONE(cuEventSynchronize, "", 2000, (void *e), (e), HOST_ROW(event_sync, e))
ONE(cuEventQuery, "", 2000, (void *e), (e), HOST_ROW(event_query, e))
ONE(cuCtxSynchronize, "", 2000, (void), (), HOST_ROW(context_sync, 0))
WRAP_AS(cuCtxSynchronize_v2, false, (void *context), (context), HOST_ROW(context_sync, 0))
ENTRY(cuCtxSynchronize_v2, "cuCtxSynchronize_v2", "cuCtxSynchronize", 13000, false)
ONE(cuStreamCreate, "", 2000, (stream_t *s, u32 f), (s, f), if (!r) ROW(stream_create, 0, *s))
ONE(cuStreamCreateWithPriority, "", 5050, (stream_t *s, u32 f, int priority), (s, f, priority),
     if (!r) ROW(stream_create, (int64_t)priority, *s))
ONE(cuStreamDestroy, "_v2", 4000, (stream_t s), (s), ROW(stream_destroy, 0, s))
BOTH(cuStreamBeginCapture, "_v2", 10010, (stream_t s, int mode), (s, mode),
     if (!r) atomic_fetch_add(&captures, 1); ROW(capture_begin, mode, s))
BOTH(cuStreamEndCapture, "", 10000, (stream_t s, void **graph), (s, graph),
     atomic_fetch_sub(&captures, atomic_load(&captures) > 0); ROW(capture_end, r ? 0 : *graph, s))
#define GRAPH_CREATE(exec, graph) PUT(call_number(KIND_graph_create, graph, NULL), r ? NULL : *(exec), 0)
ONE(cuGraphInstantiateWithFlags, "", 11040, (void **exec, void *graph, u64 f), (exec, graph, f),
     GRAPH_CREATE(exec, graph))
ENTRY(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", "cuGraphInstantiate", 12000, false)
WRAP_AS(cuGraphInstantiate, false, (void **exec, void *graph, void **node, char *log, size_t n),
     (exec, graph, node, log, n), GRAPH_CREATE(exec, graph))
ENTRY(cuGraphInstantiate, "cuGraphInstantiate_v2", "cuGraphInstantiate", 11000, false)
BOTH(cuGraphInstantiateWithParams, "", 12000, (void **exec, void *graph, void *p), (exec, graph, p),
     GRAPH_CREATE(exec, graph))
ONE(cuGraphExecDestroy, "", 10000, (void *exec), (exec), HOST_ROW(graph_destroy, exec))

ONE(cuMemAlloc, "_v2", 3020, (u64 *to, size_t n), (to, n), HOST_ROW(allocate, n))
BOTH(cuMemAllocAsync, "", 11020, (u64 *to, size_t n, stream_t s), (to, n, s), ROW(allocate, n, s))
BOTH(cuMemAllocFromPoolAsync, "", 11020, (u64 *to, size_t n, void *pool, stream_t s), (to, n, pool, s),
     ROW(allocate, n, s))
ONE(cuMemFree, "_v2", 3020, (u64 p), (p), HOST_ROW(free, p))
BOTH(cuMemFreeAsync, "", 11020, (u64 p, stream_t s), (p, s), ROW(free, p, s))
ONE(cuMemHostAlloc, "", 2020, (void **to, size_t n, u32 f), (to, n, f), HOST_ROW(allocate_host, n))
ONE(cuMemAllocHost, "_v2", 3020, (void **to, size_t n), (to, n), HOST_ROW(allocate_host, n))
ONE(cuMemFreeHost, "", 2000, (void *p), (p), HOST_ROW(free_host, p))
ONE(cuMemHostRegister, "_v2", 6050, (void *p, size_t n, u32 f), (p, n, f), HOST_ROW(register_host, n))
ONE(cuMemHostUnregister, "", 4000, (void *p), (p), HOST_ROW(unregister_host, p))
ONE(cuMemMap, "", 10020, (u64 p, size_t n, size_t at, u64 handle, u64 f), (p, n, at, handle, f),
     HOST_ROW(map_memory, n))
ONE(cuMemUnmap, "", 10020, (u64 p, size_t n), (p, n), HOST_ROW(unmap_memory, n))

#define UNLOADED                                                                                                       \
    atomic_fetch_add(&kernels_unloaded, 1);                                                                            \
    HOST_ROW(unload_code, 0)
ONE(cuModuleLoadData, "", 2000, (void **m, const void *image), (m, image), HOST_ROW(load_code, 0))
ONE(cuModuleLoadDataEx, "", 2010, (void **m, const void *image, u32 n, void *o, void **v), (m, image, n, o, v),
     HOST_ROW(load_code, 0))
ONE(cuModuleUnload, "", 2000, (void *m), (m), UNLOADED)
ONE(cuLibraryLoadData, "", 12000, (void **l, const void *code, void *o, void **v, u32 n, void *lo, void **lv, u32 ln),
     (l, code, o, v, n, lo, lv, ln), HOST_ROW(load_code, 0))
ONE(cuLibraryUnload, "", 12000, (void *l), (l), UNLOADED)

#define CONTEXT_CHANGED                                                                                                \
    if (ask_context && ask_context(&this_thread.context))                                                              \
        this_thread.context = NULL;
ONE(cuCtxSetCurrent, "", 4000, (void *c), (c), CONTEXT_CHANGED)
ONE(cuCtxPushCurrent, "_v2", 4000, (void *c), (c), CONTEXT_CHANGED)
ONE(cuCtxPopCurrent, "_v2", 4000, (void **c), (c), CONTEXT_CHANGED)

/* ---- NCCL -------------------------------------------------------------------------------------------------------- */

struct nccl_id {
    char bytes[128];
};
#define COLLECTIVE(kind, count, type, peer, comm, stream)                                                              \
    flags |= captured(stream);                                                                                         \
    struct shape shape = {{(u32)(type), (u32)(peer), 0}, {0}, 0};                                                      \
    PUT(call_number(KIND_##kind, comm, &shape), count, stream_number(stream, own))
ONE(ncclAllReduce, "", 0, (const void *f, void *t, size_t n, int type, int op, void *comm, stream_t s),
     (f, t, n, type, op, comm, s), COLLECTIVE(all_reduce, n, type, 0, comm, s))
ONE(ncclBroadcast, "", 0, (const void *f, void *t, size_t n, int type, int root, void *comm, stream_t s),
     (f, t, n, type, root, comm, s), COLLECTIVE(broadcast, n, type, root, comm, s))
ONE(ncclBcast, "", 0, (void *p, size_t n, int type, int root, void *comm, stream_t s), (p, n, type, root, comm, s),
     COLLECTIVE(broadcast, n, type, root, comm, s))
ONE(ncclReduce, "", 0, (const void *f, void *t, size_t n, int type, int op, int root, void *comm, stream_t s),
     (f, t, n, type, op, root, comm, s), COLLECTIVE(reduce, n, type, root, comm, s))
ONE(ncclAllGather, "", 0, (const void *f, void *t, size_t n, int type, void *comm, stream_t s),
     (f, t, n, type, comm, s), COLLECTIVE(all_gather, n, type, 0, comm, s))
ONE(ncclReduceScatter, "", 0, (const void *f, void *t, size_t n, int type, int op, void *comm, stream_t s),
     (f, t, n, type, op, comm, s), COLLECTIVE(reduce_scatter, n, type, 0, comm, s))
ONE(ncclSend, "", 0, (const void *p, size_t n, int type, int peer, void *comm, stream_t s), (p, n, type, peer, comm, s),
     COLLECTIVE(send, n, type, peer, comm, s))
ONE(ncclRecv, "", 0, (void *p, size_t n, int type, int peer, void *comm, stream_t s), (p, n, type, peer, comm, s),
     COLLECTIVE(receive, n, type, peer, comm, s))
ONE(ncclGroupStart, "", 0, (void), (), HOST_ROW(group_start, 0))
ONE(ncclGroupEnd, "", 0, (void), (), HOST_ROW(group_end, 0))

/* Ranks of one communicator know it by the number of its id. */
static void communicator(void *comm, const char *from, u64 id, int ranks, int rank) {
    struct text text = {0};
    add_format(&text, "{\"communicator\":%llu,\"%s\":%llu,\"ranks\":%d,\"rank\":%d}",
               (unsigned long long)(uintptr_t)comm, from, (unsigned long long)id, ranks, rank);
    pthread_mutex_lock(&lock);
    write_line(&text);
    pthread_mutex_unlock(&lock);
}

static u64 hash_of_id(const struct nccl_id *id) {
    u64 hash = 1, word;
    for (size_t at = 0; at < sizeof *id; at += sizeof word) {
        memcpy(&word, id->bytes + at, sizeof word);
        hash = mix(hash, word);
    }
    return hash;
}
#define COMMUNICATOR(comm, from, id, ranks, rank)                                                                      \
    if (!r)                                                                                                            \
        communicator(comm, from, id, ranks, rank);                                                                     \
    HOST_ROW(communicator, r ? 0 : (uintptr_t)(comm))
ONE(ncclCommInitRank, "", 0, (void **comm, int n, struct nccl_id id, int rank), (comm, n, id, rank),
     COMMUNICATOR(*comm, "id", hash_of_id(&id), n, rank))
ONE(ncclCommInitRankConfig, "", 0, (void **comm, int n, struct nccl_id id, int rank, void *c), (comm, n, id, rank, c),
     COMMUNICATOR(*comm, "id", hash_of_id(&id), n, rank))
ONE(ncclCommInitRankScalable, "", 0, (void **comm, int n, int rank, int ids, struct nccl_id *id, void *c),
     (comm, n, rank, ids, id, c), COMMUNICATOR(*comm, "id", hash_of_id(id), n, rank))
ONE(ncclCommSplit, "", 0, (void *comm, int color, int key, void **made, void *c), (comm, color, key, made, c),
     COMMUNICATOR(*made, "of", (uintptr_t)comm, color, key))

/* ---- which function stands for which ----------------------------------------------------------------------------- */

#define FOR_FUNCTIONS(f)                                                                                               \
    for (const struct function *const *at_ = __start_functions, *f; at_ < __stop_functions && (f = *at_); at_++)

static bool of_interest(const char *name) {
    return (name[0] == 'c' && name[1] == 'u') || !strncmp(name, "nccl", 4) || !strcmp(name, "dlsym");
}

/* What to give for `real`: the wrapper of that function, or itself. */
static void *wrapped(const struct function *function, void *real) {
    if (!function || !function->wrapper || !real || real == function->wrapper)
        return real;
    void *none = NULL;
    __atomic_compare_exchange_n(function->real, &none, real, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return function->wrapper;
}

static const struct function *by_symbol(const char *symbol) {
    FOR_FUNCTIONS(f)
    if (!strcmp(f->symbol, symbol))
        return f;
    return NULL;
}

static const struct function *by_name(const char *name, int version, bool own) {
    const struct function *best = NULL;
    for (int wanted = own; !best && wanted >= 0; wanted--) /* most have one form only */
        FOR_FUNCTIONS(f)
            if (f->own == wanted && f->since <= version && !strcmp(f->name, name) && (!best || best->since < f->since))
                best = f;
    return best;
}

static result (*real_get_2)(const char *, void **, int, u64, void *), (*real_get)(const char *, void **, int, u64);
static result log_get_2(const char *name, void **found, int version, u64 flags, void *status) {
    result r = real_get_2(name, found, version, flags, status);
    if (!r && found)
        *found = wrapped(by_name(name, version, flags & 2), *found);
    return r;
}
ENTRY(get_2, "cuGetProcAddress_v2", "cuGetProcAddress", 12000, false)

static result log_get(const char *name, void **found, int version, u64 flags) {
    result r = real_get(name, found, version, flags);
    if (!r && found)
        *found = wrapped(by_name(name, version, flags & 2), *found);
    return r;
}
ENTRY(get, "cuGetProcAddress", "cuGetProcAddress", 11030, false)

/* ---- getting in -------------------------------------------------------------------------------------------------- */

static unsigned long long seen_loads; /* of libraries; under `scanning` */
static pthread_mutex_t scanning = PTHREAD_MUTEX_INITIALIZER;
static void scan(void);

/* In place of dlsym. What RTLD_NEXT and RTLD_DEFAULT find depends on the caller, which the linker knows by the return
   address. So dlsym is called last then: the compiler makes that a jump, which keeps the address. */
static void *log_dlsym(void *handle, const char *symbol) {
    if (!atomic_load(&stopped))
        scan();
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || !of_interest(symbol))
        return dlsym(handle, symbol);
    return wrapped(by_symbol(symbol), dlsym(handle, symbol));
}

#if defined(__x86_64__)
#define TO_SYMBOL(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define TO_SYMBOL(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_ABS64)
#else
#error "keepbusy logs the driver's calls on x86-64 and aarch64"
#endif

struct object {
    u64 base;
    const char *strings;
    const ElfW(Sym) * symbols;
    u64 relro, relro_end;
    bool is_nccl; /* what it calls of its own functions is no call of the program's */
};

static void replace(const struct object *object, void **slot, void *by) {
    if (*slot == by)
        return;
    u64 page = (u64)sysconf(_SC_PAGESIZE), start = (u64)(uintptr_t)slot & ~(page - 1);
    bool sealed = start >= (object->relro & ~(page - 1)) && start < object->relro_end;
    if (sealed && mprotect((void *)(uintptr_t)start, page, PROT_READ | PROT_WRITE))
        return;
    __atomic_store_n(slot, by, __ATOMIC_RELEASE);
    if (sealed)
        mprotect((void *)(uintptr_t)start, page, PROT_READ);
}

static struct known_function {
    u64 real;
    void *wrapper;
} known_functions[2 * 128]; /* of a driver that was in use before the log began */
static u32 known_count;
static u64 first_known, last_known;

/* One that the driver exports is one that it gives to who asks it. */
static void know_function(const struct function *function, void *real) {
    if (!function->wrapper || !real || known_count == sizeof known_functions / sizeof *known_functions)
        return;
    known_functions[known_count++] = (struct known_function){(uintptr_t)real, function->wrapper};
    first_known = first_known && first_known < (uintptr_t)real ? first_known : (uintptr_t)real;
    last_known = last_known > (uintptr_t)real ? last_known : (uintptr_t)real;
}

static void treat_tables(const struct object *object, u64 start, u64 size) {
    for (u64 at = (start + 7) & ~7ull; at + 8 <= start + size; at += 8) {
        u64 word = *(volatile u64 *)at;
        if (word - first_known > last_known - first_known)
            continue;
        for (u32 i = 0; i < known_count; i++)
            if (known_functions[i].real == word)
                replace(object, (void **)at, known_functions[i].wrapper);
    }
}

static void treat(const struct object *object, const ElfW(Rela) * relocations, size_t size) {
    for (size_t i = 0; i < size / sizeof *relocations; i++) {
        const ElfW(Rela) *relocation = &relocations[i];
        if (!TO_SYMBOL(ELF64_R_TYPE(relocation->r_info)) || relocation->r_addend)
            continue;
        const ElfW(Sym) *symbol = &object->symbols[ELF64_R_SYM(relocation->r_info)];
        const char *name = object->strings + symbol->st_name;
        if (symbol->st_shndx != SHN_UNDEF || !of_interest(name) || (object->is_nccl && name[0] == 'n'))
            continue;
        void **slot = (void **)(uintptr_t)(object->base + relocation->r_offset);
        if (!strcmp(name, "dlsym")) {
            replace(object, slot, (void *)log_dlsym);
            continue;
        }
        const struct function *function = by_symbol(name);
        if (function && function->wrapper && __atomic_load_n(function->real, __ATOMIC_ACQUIRE))
            replace(object, slot, function->wrapper);
    }
}

static int treat_object(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    (void)data;
    const char *file = strrchr(info->dlpi_name, '/') ? strrchr(info->dlpi_name, '/') + 1 : info->dlpi_name;
    if (!strncmp(file, "libcuda.so", 10) || !strncmp(file, "linux-vdso", 10) || !strncmp(file, "ld-linux", 8))
        return 0;
    struct object object = {.base = info->dlpi_addr, .is_nccl = !strncmp(file, "libnccl.so", 10)};
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        u64 own_place = (u64)treat_object - info->dlpi_addr - header->p_vaddr;
        if (header->p_type == PT_LOAD && own_place < header->p_memsz)
            return 0; /* this library */
        if (header->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + header->p_vaddr);
        if (header->p_type == PT_GNU_RELRO) {
            object.relro = info->dlpi_addr + header->p_vaddr;
            object.relro_end = object.relro + header->p_memsz;
        }
    }
    for (int i = 0; i < info->dlpi_phnum && known_count; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && header->p_flags & PF_W)
            treat_tables(&object, info->dlpi_addr + header->p_vaddr, header->p_memsz);
    }
    const ElfW(Rela) *calls_of = NULL, *others = NULL;
    size_t calls_size = 0, others_size = 0, relative = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        u64 value = dynamic->d_un.d_ptr, address = value < info->dlpi_addr ? value + info->dlpi_addr : value;
        switch (dynamic->d_tag) {
        case DT_STRTAB: object.strings = (const char *)address; break;
        case DT_SYMTAB: object.symbols = (const ElfW(Sym) *)address; break;
        case DT_JMPREL: calls_of = (const ElfW(Rela) *)address; break;
        case DT_PLTRELSZ: calls_size = value; break;
        case DT_RELA: others = (const ElfW(Rela) *)address; break;
        case DT_RELASZ: others_size = value; break;
        case DT_RELACOUNT: relative = value; break;
        }
    }
    if (!object.strings || !object.symbols)
        return 0;
    if (calls_of)
        treat(&object, calls_of, calls_size);
    if (others && others_size > relative * sizeof *others)
        treat(&object, others + relative, others_size - relative * sizeof *others);
    return 0;
}

static bool was_in_use; /* the driver, before the log began */

static int count_loads(struct dl_phdr_info *info, size_t size, void *loads) {
    (void)size;
    *(unsigned long long *)loads = info->dlpi_adds;
    return 1;
}

static void find_real(const char *library, const char *prefix) {
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return;
    FOR_FUNCTIONS(f)
    if (!strncmp(f->symbol, prefix, strlen(prefix))) {
        void *real = dlsym(handle, f->symbol);
        wrapped(f, real);
        if (was_in_use)
            know_function(f, real);
    }
#define FIND(variable, symbol)                                                                                         \
    if (!variable)                                                                                                     \
    *(void **)&variable = dlsym(handle, symbol)
    FIND(ask_context, "cuCtxGetCurrent");
    FIND(ask_capturing, "cuStreamIsCapturing");
    FIND(ask_pointer, "cuPointerGetAttribute");
    FIND(name_of_function, "cuFuncGetName");
    FIND(name_of_kernel, "cuKernelGetName");
    dlclose(handle);
}

static void scan(void) {
    unsigned long long loads = 0;
    dl_iterate_phdr(count_loads, &loads);
    if (loads == __atomic_load_n(&seen_loads, __ATOMIC_ACQUIRE))
        return;
    if (pthread_mutex_trylock(&scanning)) /* another thread is at it, and may wait for a library that this one loads */
        return;
    if (loads != seen_loads) {
        find_real("libcuda.so.1", "cu"); /* before: the linker's lock is held while it goes through its objects */
        find_real("libnccl.so.2", "nccl");
        dl_iterate_phdr(treat_object, NULL);
        was_in_use = false; /* who comes later asks us */
        known_count = 0;
        __atomic_store_n(&seen_loads, loads, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&scanning);
}

/* ---- for Python -------------------------------------------------------------------------------------------------- */

static void in_forked_child(void) {
    stop("forked children are not logged");
}

/* The stack of the caller as a line of JSON, to be held against what Python says. */
int hostlog_stack(const struct python_layout *layout, char *into, size_t room) {
    struct text text = {0};
    python = *layout;
    add(&text, "[", 1);
    add_frames(&text, first_frame());
    add(&text, "]", 2);
    int fits = text.start && text.size <= room;
    if (fits)
        memcpy(into, text.start, text.size);
    free(text.start);
    return fits;
}

/* NULL, or why nothing is logged. The two files are there, empty and open. */
const char *hostlog_start(int rows, int names, u64 most_bytes, int counter, const struct python_layout *layout) {
    if (rows_file >= 0)
        return "it was started before in this process";
    was_in_use = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    rows_file = rows;
    names_file = names;
    most_chunks = most_bytes / CHUNK_BYTES;
    if (!make_table(&calls, 1u << 17, 65000) || !make_table(&stacks, 1u << 17, 65000) ||
        !make_table(&streams, 1u << 12, 3000) || !make_table(&code_objects, 1u << 17, 65000) ||
        pthread_key_create(&at_thread_end, thread_ended) || pthread_atfork(NULL, NULL, in_forked_child))
        return "no memory was left for its tables";
    python = layout ? *layout : (struct python_layout){0}; /* one that was tried in vain may be there */
    use_counter = counter;
    write_clock();
    atomic_store(&on, true);
    scan();
    return NULL;
}

/* The program says what it does now: `value` means something to it, and stands in a row with its stack. */
void hostlog_note(u64 value) {
    if (atomic_load(&on) && !left_out(KIND_note, 0))
        put(call_number(KIND_note, NULL, NULL), stack_hash(), now(), 0, value, 0, 0);
}

/* Rows of what comes often are left out from now on, or written again. */
void hostlog_thin(int thin) {
    if (!atomic_load(&on) || atomic_load(&thinned) == !!thin)
        return;
    put(call_number(thin ? KIND_thinned : KIND_resumed, NULL, NULL), 0, now(), 0, 0, 0, 0);
    atomic_store(&thinned, thin);
}

/* Calls that are made meanwhile leave no row. */
void hostlog_pause(int paused) {
    atomic_store(&on, !paused && rows_file >= 0 && !atomic_load(&stopped));
}

int hostlog_is_on(void) {
    return atomic_load(&on);
}

/* NULL, or why it had stopped before. */
const char *hostlog_stop(void) {
    if (atomic_exchange(&on, false)) {
        pthread_mutex_lock(&lock);
        write_clock();
        pthread_mutex_unlock(&lock);
    }
    return atomic_load(&stopped);
}
