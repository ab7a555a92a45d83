/* Asks for the next function of this name: the linker answers by who asks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#ifdef SECOND
int marker(void) { return 2; }
#else
int marker(void) { return 1; }
int next_marker(void) { int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "marker"); return next ? next() : -1; }
#endif
