/* cable MICROSECONDS NEAR FAR [NEAR FAR ...]: joins pairs of interfaces of this network namespace by cables with delay.
 *
 * What arrives at one end of a cable leaves at the other one so many microseconds later, in the same order. So a kernel
 * without netem gets distance. Give ends of veth pairs that have no address. Frames keep the headers of segmentation
 * offload, so that 64 KiB pass at once. It ends when it is killed, and needs CAP_NET_RAW.
 *
 *   cc -O2 -o cable cable.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
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

/* One end: what arrived here, and is to leave at the other end. */
struct end {
    int socket;
    char *circle;
    size_t head, tail, used;
} ends[ENDS_MAX];

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

static void take_arrived(struct end *end, uint64_t delay_ns) {
    static char frame[FRAME_MAX];
    for (int count = 0; count < AT_ONCE_MAX; count++) {
        ssize_t len = recv(end->socket, frame, sizeof frame, 0);
        if (len <= 0) return;
        struct record *record = push(end, record_size((size_t)len));
        if (record == NULL) continue;
        record->due_ns = now_ns() + delay_ns;
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
        fprintf(stderr, "usage: cable MICROSECONDS NEAR FAR [NEAR FAR ...]\n");
        return 2;
    }
    uint64_t delay_ns = strtoull(argv[1], NULL, 10) * 1000;
    struct pollfd polled[ENDS_MAX];
    for (int i = 0; i < count; i++) {
        open_end(&ends[i], argv[i + 2]);
        polled[i] = (struct pollfd){ .fd = ends[i].socket, .events = POLLIN };
    }
    for (;;) {
        uint64_t next = UINT64_MAX, now;
        for (int i = 0; i < count; i++) {
            uint64_t due = send_due(&ends[i], &ends[i ^ 1]);
            if (due < next) next = due;
        }
        now = now_ns();
        uint64_t left = next <= now ? 0 : next - now;
        struct timespec wait = { (time_t)(left / 1000000000u), (long)(left % 1000000000u) };
        if (ppoll(polled, (nfds_t)count, next == UINT64_MAX ? NULL : &wait, NULL) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take_arrived(&ends[i], delay_ns);
    }
}
