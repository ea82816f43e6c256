// Makes MPICH over UCX give way while it waits, as Open MPI does with mpi_yield_when_idle: otherwise, with more ranks than
// cores, each message waits for the scheduler's next tick. Loaded before UCX by LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>

typedef unsigned progress(void *worker);

unsigned ucp_worker_progress(void *worker) {
    static progress *next;
    if (!next) next = (progress *)dlsym(RTLD_NEXT, "ucp_worker_progress");
    unsigned events = next(worker);
    if (!events) sched_yield();
    return events;
}
