/* Many threads at once, some of which end: for the sanitizers. Says how many calls were made and how many failed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
const char *hostlog_start(int, int, uint64_t, int, const void *);
const char *hostlog_stop(void);
static int (*client_launch)(uint64_t, unsigned, uint64_t);
static const unsigned each = 20000;
static void *work(void *which)
{
    for (unsigned i = 0; i < each; i++) client_launch(64 + (i & 63), 1 + (unsigned)(uintptr_t)which % 3, 4096 + 8 * (i & 7));
    return NULL;
}
int main(int count, char **arguments)
{
    (void)count;
    int rows = open(arguments[1], O_RDWR | O_CREAT, 0600), names = open(arguments[2], O_RDWR | O_CREAT, 0600);
    const char *why = hostlog_start(rows, names, 1 << 28, 1, NULL);
    void *client = dlopen(arguments[3], RTLD_NOW);
    if (why || !client || ((int (*)(void))dlsym(client, "client_start"))()) { fprintf(stderr, "%s %s\n", why ? why : "", client ? "" : dlerror()); return 1; }
    client_launch = (int (*)(uint64_t, unsigned, uint64_t))dlsym(client, "client_launch");
    for (int round = 0; round < 2; round++) {
        pthread_t threads[8];
        for (uintptr_t i = 0; i < 8; i++) pthread_create(&threads[i], NULL, work, (void *)i);
        for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    }
    why = hostlog_stop();
    printf("%u %s\n", 16 * each, why ? why : "");
    return 0;
}
