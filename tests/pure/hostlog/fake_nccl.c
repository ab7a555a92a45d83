/* NCCL without a network. Built as libnccl.so.2. */
#include <stddef.h>
typedef struct { char bytes[128]; } id;
int ncclCommInitRank(void **comm, int n, id i, int rank) { (void)n; (void)i; (void)rank; *comm = (void *)0x9000; return 0; }
int ncclAllReduce(const void *f, void *t, size_t n, int type, int op, void *comm, void *s)
{ (void)f; (void)t; (void)n; (void)type; (void)op; (void)comm; (void)s; return 0; }
