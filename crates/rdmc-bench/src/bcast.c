// MPI_Bcast on the work of `rdmc bench`, which compiles and starts this.
//
//   bcast BYTES WARM_UP ROUNDS MESSAGES BURSTS BURST_MIN LEAVE
//
// A round: the root fills its buffer with other content than before, all meet at a barrier, MPI_Bcast, all meet again,
// every rank checks every byte. A burst: messages in a row, checked as they come; MESSAGES, or 2, 4, 8, … times as many, as
// take BURST_MIN nanoseconds. The clock is one for all processes of a host. Rank 0 prints, all times in nanoseconds:
//
//   rdmc-bench round LAST SKEW CPU    from the root's start to the last rank's return; from the first other rank's return to
//                                     the last; user and system time of all ranks
//   rdmc-bench burst LAST MESSAGES
//   rdmc-bench end WRONG              messages that were wrong
//
// LEAVE is 1 to end without MPI_Finalize, which does not return with some versions of MPICH over TCP.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { STARTED, ENDED, CPU, FIGURES };
enum { DISTINCT = 256, MESSAGES_MAX = 1 << 22 };

static int rank, ranks;
static int64_t wrong;

static int64_t clock_of(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

static void *memory(size_t bytes) {
    void *taken = NULL;
    if (posix_memalign(&taken, 4096, bytes + 8)) {
        fprintf(stderr, "no memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(taken, 0, bytes + 8);
    return taken;
}

static const uint64_t START = UINT64_C(0x9e3779b97f4a7c15), STEP = UINT64_C(0xd1b54a32d192ed03);

static void fill(unsigned char *bytes, size_t len, uint64_t seed) {
    uint64_t value = seed * START;
    size_t at = 0;
    for (; at + 8 <= len; at += 8, value += STEP) memcpy(bytes + at, &value, 8);
    memcpy(bytes + at, &value, len - at);
}

static int is_right(const unsigned char *bytes, size_t len, uint64_t seed) {
    uint64_t value = seed * START, word, difference = 0;
    size_t at = 0;
    for (; at + 8 <= len; at += 8, value += STEP) {
        memcpy(&word, bytes + at, 8);
        difference |= word ^ value;
    }
    return !difference && !memcmp(bytes + at, &value, len - at);
}

// Collects what every rank measured: at rank 0 when the last rank and the first other one had returned, and the time of all
// processors.
static void collect(int64_t mine[FIGURES], int64_t *all, int64_t *last_after, int64_t *skew, int64_t *cpu_of_all) {
    MPI_Gather(mine, FIGURES, MPI_INT64_T, all, FIGURES, MPI_INT64_T, 0, MPI_COMM_WORLD);
    if (rank) return;
    int64_t first = INT64_MAX, last = 0, cpu = all[CPU];
    for (int other = 1; other < ranks; other++) {
        int64_t *figures = all + other * FIGURES;
        if (figures[ENDED] < first) first = figures[ENDED];
        if (figures[ENDED] > last) last = figures[ENDED];
        cpu += figures[CPU];
    }
    *last_after = last - all[STARTED];
    *skew = last - first;
    *cpu_of_all = cpu;
}

static void one_round(unsigned char *bytes, size_t len, uint64_t seed, int64_t *all, int counts) {
    int64_t mine[FIGURES];
    if (!rank) fill(bytes, len, seed);
    MPI_Barrier(MPI_COMM_WORLD);
    mine[CPU] = clock_of(CLOCK_PROCESS_CPUTIME_ID);
    mine[STARTED] = clock_of(CLOCK_MONOTONIC);
    MPI_Bcast(bytes, (int)len, MPI_BYTE, 0, MPI_COMM_WORLD);
    mine[ENDED] = clock_of(CLOCK_MONOTONIC);
    mine[CPU] = clock_of(CLOCK_PROCESS_CPUTIME_ID) - mine[CPU];
    // Nobody checks while others still receive.
    MPI_Barrier(MPI_COMM_WORLD);
    wrong += !is_right(bytes, len, seed);
    int64_t last, skew, cpu;
    collect(mine, all, &last, &skew, &cpu);
    if (rank || !counts) return;
    printf("rdmc-bench round %lld %lld %lld\n", (long long)last, (long long)skew, (long long)cpu);
    fflush(stdout);
}

// Returns what the burst took, at every rank.
static int64_t one_burst(unsigned char *ring, size_t len, uint64_t seed, long messages, int64_t *all) {
    int64_t mine[FIGURES];
    for (long slot = 0; !rank && slot < DISTINCT; slot++) fill(ring + slot * len, len, seed + slot);
    MPI_Barrier(MPI_COMM_WORLD);
    mine[CPU] = clock_of(CLOCK_PROCESS_CPUTIME_ID);
    mine[STARTED] = clock_of(CLOCK_MONOTONIC);
    for (long message = 0; message < messages; message++) {
        unsigned char *bytes = rank ? ring : ring + message % DISTINCT * len;
        MPI_Bcast(bytes, (int)len, MPI_BYTE, 0, MPI_COMM_WORLD);
        if (rank) wrong += !is_right(bytes, len, seed + message % DISTINCT);
    }
    mine[ENDED] = clock_of(CLOCK_MONOTONIC);
    mine[CPU] = clock_of(CLOCK_PROCESS_CPUTIME_ID) - mine[CPU];
    MPI_Barrier(MPI_COMM_WORLD);
    int64_t last, skew, cpu;
    collect(mine, all, &last, &skew, &cpu);
    MPI_Bcast(&last, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    return last;
}

int main(int argc, char **argv) {
    if (argc != 8) {
        fprintf(stderr, "bcast BYTES WARM_UP ROUNDS MESSAGES BURSTS BURST_MIN LEAVE\n");
        return 2;
    }
    size_t len = strtoull(argv[1], NULL, 10);
    long warm_up = atol(argv[2]), rounds = atol(argv[3]), messages = atol(argv[4]), bursts = atol(argv[5]);
    int64_t burst_min = atoll(argv[6]);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    unsigned char *bytes = memory(bursts ? len * DISTINCT : len);
    int64_t *all = memory(sizeof(int64_t) * FIGURES * ranks), everywhere = 0;
    uint64_t seed = 1;
    for (long round = 0; round < warm_up + rounds; round++) one_round(bytes, len, seed++, all, round >= warm_up);
    // Not counted, as they are the warm-up.
    while (bursts && one_burst(bytes, len, seed, messages, all) < burst_min && messages < MESSAGES_MAX) {
        messages *= 2;
        seed += DISTINCT;
    }
    for (long burst = 0; burst < bursts; burst++) {
        seed += DISTINCT;
        int64_t last = one_burst(bytes, len, seed, messages, all);
        if (!rank) printf("rdmc-bench burst %lld %ld\n", (long long)last, messages);
    }
    MPI_Reduce(&wrong, &everywhere, 1, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (!rank) {
        printf("rdmc-bench end %lld\n", (long long)everywhere);
        fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (atoi(argv[7])) {
        // What was printed is forwarded meanwhile.
        usleep(200000);
        _exit(0);
    }
    MPI_Finalize();
    return 0;
}
