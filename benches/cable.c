/* cable WAY[:BACK] NEAR FAR [NEAR FAR ...]: joins pairs of interfaces of this network namespace by cables with delay.
 *
 * What arrives at one end of a cable leaves at the other one so many microseconds later, in the same order. So a kernel
 * without netem gets distance. Give ends of veth pairs that have no address. Frames keep the headers of segmentation
 * offload, so that 64 KiB pass at once. It ends when it is killed, and needs CAP_NET_RAW.
 *
 * WAY holds for frames from NEAR to FAR, BACK for the others; without BACK, WAY holds for both. Each is
 * MICROSECONDS[,NAME=VALUE...]:
 *
 *   rate=MBIT/QUEUE  lets one frame after the other enter, at MBIT Mbit/s; drops a frame if more than QUEUE bytes
 *                    wait before it. Times are computed, so a late wake-up costs no rate
 *   loss=P           drops each frame with probability P
 *   jitter=MEAN/DEV  adds microseconds of a normal distribution, never below zero; frames keep their order
 *   police=MBIT/LEN  drops a frame that exceeds a token bucket of MBIT Mbit/s and LEN bytes, behind `rate`
 *   seed=N           the seed of loss and jitter, 1 by default
 *
 * Headers of Ethernet count.
 *
 * A frame is a packet only if the hosts do not segment late: `ethtool -K eth0 tso off`. On SIGUSR1 it prints a line
 * for each end, and begins to count anew: the interface where frames arrived, then frames, bytes, and frames that were
 * lost, exceeded the policer, or found no room.
 *
 *   cc -O2 -o cable cable.c -lm
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define ENDS_MAX 256
#define FRAME_MAX (80 << 10)    /* Bytes: a segment of 64 KiB with its headers. */
#define CABLE_BYTES (32u << 20) /* Bytes on the way in one direction; what does not fit is dropped. */
#define AT_ONCE_MAX 32          /* Frames taken from one end before the others have their turn. */
#define RETRY_NS 50000          /* Pause after an interface had no room. */

/* One frame on the way. Records follow each other in a circle; one with the length 0 leads back to its beginning. */
struct record {
    uint64_t due_ns;
    uint64_t len;
    char bytes[];
};

/* How frames travel in one direction. */
struct way {
    uint64_t delay_ns;
    double rate, queue_len; /* Bytes a nanosecond, and bytes; the rate 0 means no limit. */
    double loss, jitter_ns, spread_ns;
    double police_rate, police_len; /* Bytes a nanosecond, and bytes; the length 0 means no policer. */
    uint64_t seed;
};

/* One end: what arrived here, and is to leave at the other end. */
struct end {
    int socket;
    const char *interface;
    const struct way *way;
    char *circle;
    size_t head, tail, used;
    uint64_t random, last_due_ns;
    double free_ns; /* When all frames before have entered. */
    double tokens;
    uint64_t filled_ns; /* When the tokens were counted. */
    struct { uint64_t frames, bytes, lost, policed, full; } seen;
} ends[ENDS_MAX];

static volatile sig_atomic_t asked; /* Whether the counters are wanted. */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static size_t record_size(size_t len) { return (sizeof(struct record) + len + 15) / 16 * 16; }

static void ask(int signal) {
    (void)signal;
    asked = 1;
}

/* Reads MICROSECONDS[,NAME=VALUE...]. */
static struct way read_way(char *text) {
    struct way way = { .seed = 1 };
    char *rest, *option = strtok_r(text, ",", &rest);
    double mbit;
    way.delay_ns = option == NULL ? 0 : strtoull(option, NULL, 10) * 1000;
    while ((option = strtok_r(NULL, ",", &rest)) != NULL) {
        if (sscanf(option, "loss=%lf", &way.loss) == 1) continue;
        if (sscanf(option, "seed=%" SCNu64, &way.seed) == 1) continue;
        if (sscanf(option, "jitter=%lf/%lf", &way.jitter_ns, &way.spread_ns) == 2) {
            way.jitter_ns *= 1000;
            way.spread_ns *= 1000;
            continue;
        }
        if (sscanf(option, "rate=%lf/%lf", &way.rate, &way.queue_len) == 2) {
            way.rate /= 8000;
            continue;
        }
        if (sscanf(option, "police=%lf/%lf", &mbit, &way.police_len) == 2) {
            way.police_rate = mbit / 8000;
            continue;
        }
        fprintf(stderr, "cable: unknown option %s\n", option);
        exit(2);
    }
    return way;
}

/* Returns a random number from 0 up to, but not, 1 (splitmix64). */
static double draw(struct end *end) {
    uint64_t z = end->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) / (double)(1ull << 53);
}

/* Returns when a frame has entered; 0 if there is no room for it. */
static uint64_t entered_ns(struct end *end, double len, uint64_t now) {
    const struct way *way = end->way;
    if (way->rate == 0) return now;
    double begins = fmax(end->free_ns, (double)now);
    if ((begins - (double)now) * way->rate > way->queue_len) return 0;
    end->free_ns = begins + len / way->rate;
    return (uint64_t)end->free_ns;
}

/* Tells whether the policer drops a frame of so many bytes. */
static int exceeds(struct end *end, double len, uint64_t now) {
    const struct way *way = end->way;
    if (way->police_len == 0) return 0;
    end->tokens = fmin(way->police_len, end->tokens + (double)(now - end->filled_ns) * way->police_rate);
    end->filled_ns = now;
    if (end->tokens < len) return 1;
    end->tokens -= len;
    return 0;
}

/* Returns when a frame that has entered now leaves; never before an earlier one. */
static uint64_t due_ns(struct end *end, uint64_t now) {
    const struct way *way = end->way;
    uint64_t due = now + way->delay_ns;
    if (way->jitter_ns > 0 || way->spread_ns > 0) {
        double normal = sqrt(-2 * log(1 - draw(end))) * cos(2 * M_PI * draw(end));
        due += (uint64_t)fmax(0, way->jitter_ns + way->spread_ns * normal);
    }
    if (due < end->last_due_ns) due = end->last_due_ns;
    end->last_due_ns = due;
    return due;
}

static void print_seen(int count) {
    for (int i = 0; i < count; i++) {
        struct end *end = &ends[i];
        printf("%s %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", end->interface, end->seen.frames,
               end->seen.bytes, end->seen.lost, end->seen.policed, end->seen.full);
        memset(&end->seen, 0, sizeof end->seen);
    }
    fflush(stdout);
}

static void open_end(struct end *end, const char *interface) {
    struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
    int on = 1, bytes = 32 << 20;
    address.sll_ifindex = (int)if_nametoindex(interface);
    if (address.sll_ifindex == 0) fail(interface);
    end->socket = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
    if (end->socket < 0) fail("a packet socket");
    if (setsockopt(end->socket, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
    if (setsockopt(end->socket, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING");
    setsockopt(end->socket, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
    setsockopt(end->socket, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
    if (bind(end->socket, (struct sockaddr *)&address, sizeof address)) fail(interface);
    end->circle = malloc(CABLE_BYTES);
    if (end->circle == NULL) fail("memory");
}

/* Makes room for a record of `size` bytes; returns NULL if the cable is full. */
static struct record *push(struct end *end, size_t size) {
    size_t rest = CABLE_BYTES - end->tail;
    /* The record that leads back takes the rest. */
    size_t needed = size + sizeof(struct record) <= rest ? size : rest + size;
    if (end->used + needed + sizeof(struct record) > CABLE_BYTES) return NULL;
    if (needed != size) {
        ((struct record *)(end->circle + end->tail))->len = 0;
        end->tail = 0;
    }
    struct record *record = (struct record *)(end->circle + end->tail);
    end->tail += size;
    end->used += needed;
    return record;
}

/* Returns the oldest record, or NULL. */
static struct record *oldest(struct end *end) {
    if (end->used == 0) return NULL;
    struct record *record = (struct record *)(end->circle + end->head);
    if (record->len == 0) {
        end->used -= CABLE_BYTES - end->head;
        end->head = 0;
        record = (struct record *)end->circle;
    }
    return record;
}

static void take_arrived(struct end *end) {
    static char frame[FRAME_MAX];
    for (int count = 0; count < AT_ONCE_MAX; count++) {
        ssize_t len = recv(end->socket, frame, sizeof frame, 0);
        if (len <= 0) return;
        uint64_t now = now_ns(), bytes = (uint64_t)len - sizeof(struct virtio_net_hdr);
        end->seen.frames++;
        end->seen.bytes += bytes;
        if (end->way->loss > 0 && draw(end) < end->way->loss) {
            end->seen.lost++;
            continue;
        }
        now = entered_ns(end, (double)bytes, now);
        if (now == 0) {
            end->seen.full++;
            continue;
        }
        if (exceeds(end, (double)bytes, now)) {
            end->seen.policed++;
            continue;
        }
        struct record *record = push(end, record_size((size_t)len));
        if (record == NULL) {
            end->seen.full++;
            continue;
        }
        record->due_ns = due_ns(end, now);
        record->len = (uint64_t)len;
        __builtin_memcpy(record->bytes, frame, (size_t)len);
    }
}

/* Sends what is due; returns when the next frame is, or UINT64_MAX. */
static uint64_t send_due(struct end *from, struct end *to) {
    struct record *record;
    while ((record = oldest(from)) != NULL) {
        if (record->due_ns > now_ns()) return record->due_ns;
        if (send(to->socket, record->bytes, record->len, 0) < 0 && (errno == EAGAIN || errno == ENOBUFS))
            return now_ns() + RETRY_NS;
        size_t size = record_size(record->len);
        from->head += size;
        from->used -= size;
    }
    return UINT64_MAX;
}

int main(int argc, char **argv) {
    int count = argc - 2;
    if (count < 2 || count % 2 || count > ENDS_MAX) {
        fprintf(stderr, "usage: cable WAY[:BACK] NEAR FAR [NEAR FAR ...]\n");
        return 2;
    }
    char *back = strchr(argv[1], ':');
    if (back != NULL) *back++ = '\0';
    struct way ways[2];
    ways[1] = back == NULL ? (struct way){ 0 } : read_way(back);
    ways[0] = read_way(argv[1]);
    if (back == NULL) ways[1] = ways[0];
    struct sigaction action = { .sa_handler = ask };
    /* It is delivered while this process waits, and never lost between a look at `asked` and the wait. */
    sigset_t blocked, waiting;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &blocked, &waiting);
    sigaction(SIGUSR1, &action, NULL);
    struct pollfd polled[ENDS_MAX];
    for (int i = 0; i < count; i++) {
        const struct way *way = &ways[i % 2];
        /* Ends with the same seed draw differently. */
        ends[i] = (struct end){ .way = way, .interface = argv[i + 2], .tokens = way->police_len,
                                .filled_ns = now_ns(), .random = way->seed << 16 | (uint64_t)i };
        open_end(&ends[i], argv[i + 2]);
        polled[i] = (struct pollfd){ .fd = ends[i].socket, .events = POLLIN };
    }
    for (;;) {
        if (asked) {
            asked = 0;
            print_seen(count);
        }
        uint64_t next = UINT64_MAX, now;
        for (int i = 0; i < count; i++) {
            uint64_t due = send_due(&ends[i], &ends[i ^ 1]);
            if (due < next) next = due;
        }
        now = now_ns();
        uint64_t left = next <= now ? 0 : next - now;
        struct timespec wait = { (time_t)(left / 1000000000u), (long)(left % 1000000000u) };
        if (ppoll(polled, (nfds_t)count, next == UINT64_MAX ? NULL : &wait, &waiting) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take_arrived(&ends[i]);
    }
}
