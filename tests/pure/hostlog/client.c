/* What uses the driver as CUDA's runtime does (dlopen, dlsym, cuGetProcAddress), and NCCL as PyTorch does (linked). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { char bytes[128]; } id;
int ncclCommInitRank(void **, int, id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
typedef int (*get_t)(const char *, void **, int, uint64_t, void *);
typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static get_t get;
static void *driver;
static launch_t launch_, launch_own;
static int (*to_gpu)(uint64_t, const void *, size_t, void *), (*to_host)(void *, uint64_t, size_t), (*sync_)(void *), (*record)(void *, void *);
static int (*wait_)(void *, void *, unsigned), (*create)(void **, unsigned, int), (*begin_)(void *, int), (*end_)(void *, void **);
static int (*instantiate)(void **, void *, uint64_t), (*replay)(void *, void *), (*unload)(void *), (*set_current)(void *);

static void *found(const char *name, uint64_t flags)
{
    void *f = NULL;
    get(name, &f, 12080, flags, NULL);
    return f;
}

int client_start(void)
{
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    get_t first = driver ? (get_t)dlsym(driver, "cuGetProcAddress_v2") : NULL;
    if (!first || first("cuGetProcAddress", (void **)&get, 12080, 0, NULL)) return 1;
    launch_ = found("cuLaunchKernel", 0); launch_own = found("cuLaunchKernel", 2); to_gpu = found("cuMemcpyHtoDAsync", 0);
    to_host = found("cuMemcpyDtoH", 0); sync_ = found("cuStreamSynchronize", 0); record = found("cuEventRecord", 0);
    wait_ = found("cuStreamWaitEvent", 0); create = found("cuStreamCreateWithPriority", 0); begin_ = found("cuStreamBeginCapture", 0);
    end_ = found("cuStreamEndCapture", 0); instantiate = found("cuGraphInstantiate", 0); replay = found("cuGraphLaunch", 0);
    unload = found("cuModuleUnload", 0); set_current = found("cuCtxSetCurrent", 0);
    return 0;
}
int client_launch(uint64_t f, unsigned grid, uint64_t stream) { return launch_((void *)f, grid, 1, 1, 128, 1, 1, 0, (void *)stream, NULL, NULL); }
int client_launch_own(uint64_t f, unsigned grid) { return launch_own((void *)f, grid, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL); }
int client_launch_by_dlsym(uint64_t f) { return ((launch_t)dlsym(driver, "cuLaunchKernel"))((void *)f, 7, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL); }
int client_copies(uint64_t bytes) { char host[2]; uint64_t even = (uint64_t)(host + 1) & ~1ull; return to_gpu(0, (void *)even, bytes, NULL) | to_gpu(0, (void *)(even | 1), bytes, NULL) | to_host((void *)even, 0, bytes); }
int client_events(void) { return record((void *)0x500, NULL) | wait_((void *)4096, (void *)0x500, 0) | sync_((void *)4096); }
int client_graph(void)
{
    void *stream, *graph, *exec;
    return create(&stream, 1, -2) | begin_(stream, 0) | client_launch(64, 3, (uint64_t)stream) | end_(stream, &graph) | instantiate(&exec, graph, 0) | replay(exec, stream);
}
int client_wait_for_all(void)
{
    int (*all)(void) = NULL, (*all_of)(void *) = NULL;
    return get("cuCtxSynchronize", (void **)&all, 12080, 0, NULL) | all() | get("cuCtxSynchronize", (void **)&all_of, 13000, 0, NULL) | all_of((void *)88);
}
int client_unload(void) { return unload(NULL); }
int client_context(uint64_t c) { return set_current((void *)c); }
int client_reduce(uint64_t count)
{
    void *comm;
    id same;
    memset(&same, 7, sizeof same);
    return ncclCommInitRank(&comm, 4, same, 2) | ncclAllReduce(NULL, NULL, count, 7, 0, comm, NULL);
}
