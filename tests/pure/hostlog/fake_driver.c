/* A CUDA driver without a GPU: counts what it is asked, and answers as libcuda does. Built as libcuda.so.1. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static __thread void *context;
static int capturing, asked[2];

int cuCtxGetCurrent(void **c) { *c = context; return 0; }
int cuCtxSetCurrent(void *c) { context = c; return 0; }
int cuStreamIsCapturing(void *s, int *status) { *status = capturing && s; return 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t p) { (void)attribute; *(int *)data = 1; return p & 1; } /* odd: pageable */
int cuFuncGetName(const char **name, void *f) { *name = f == (void *)64 ? "_Z4gelu\"Pf" : NULL; return !*name; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void *s, void **p, void **e)
{ (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)sh; (void)s; (void)p; (void)e; __atomic_fetch_add(&asked[0], 1, __ATOMIC_RELAXED); return f ? (int)(gx == 666) : 1; }
int cuLaunchKernel_ptsz(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void *s, void **p, void **e)
{ __atomic_fetch_add(&asked[1], 1, __ATOMIC_RELAXED); return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sh, s, p, e); }
int cuMemcpyHtoDAsync_v2(uint64_t d, const void *h, size_t n, void *s) { (void)d; (void)h; (void)n; (void)s; return 0; }
int cuMemcpyDtoH_v2(void *h, uint64_t d, size_t n) { (void)d; (void)h; (void)n; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxSynchronize_v2(void *c) { return c != (void *)88; } /* since 13.0 */
int cuStreamSynchronize(void *s) { (void)s; return 0; }
int cuEventRecord(void *e, void *s) { (void)e; (void)s; return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)e; (void)s; (void)f; return 0; }
int cuStreamCreateWithPriority(void **s, unsigned f, int p) { (void)f; (void)p; *s = (void *)4096; return 0; }
int cuStreamBeginCapture_v2(void *s, int m) { (void)s; (void)m; capturing = 1; return 0; }
int cuStreamEndCapture(void *s, void **g) { (void)s; *g = (void *)0x6000; capturing = 0; return 0; }
int cuGraphInstantiateWithFlags(void **e, void *g, uint64_t f) { (void)g; (void)f; *e = (void *)0x7000; return 0; }
int cuGraphLaunch(void *e, void *s) { (void)e; (void)s; return 0; }
int cuModuleUnload(void *m) { (void)m; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status);
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) { return cuGetProcAddress_v2(name, found, version, flags, NULL); }

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status)
{
    (void)status;
#define IS(wanted, function) if (!strcmp(name, wanted)) *found = (void *)function
    *found = NULL;
    IS("cuLaunchKernel", (flags & 2 ? cuLaunchKernel_ptsz : cuLaunchKernel));
    IS("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2); IS("cuMemcpyDtoH", cuMemcpyDtoH_v2); IS("cuStreamSynchronize", cuStreamSynchronize);
    IS("cuEventRecord", cuEventRecord); IS("cuStreamWaitEvent", cuStreamWaitEvent); IS("cuCtxSetCurrent", cuCtxSetCurrent);
    IS("cuStreamCreateWithPriority", cuStreamCreateWithPriority); IS("cuStreamBeginCapture", cuStreamBeginCapture_v2);
    IS("cuStreamEndCapture", cuStreamEndCapture); IS("cuGraphInstantiate", cuGraphInstantiateWithFlags); IS("cuGraphLaunch", cuGraphLaunch);
    IS("cuModuleUnload", cuModuleUnload); IS("cuCtxSynchronize", (version >= 13000 ? (void *)cuCtxSynchronize_v2 : (void *)cuCtxSynchronize));
    if (!strcmp(name, "cuGetProcAddress")) *found = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    return *found ? 0 : 500;
}
int fake_asked(int own) { return asked[own]; }
