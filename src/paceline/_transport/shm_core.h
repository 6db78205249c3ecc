/* What everything else stands on: the records, the map of a segment, waiting, waking and faults.
 * The essay at the top of shm.c says how they work together.
 */
#ifndef PACELINE_SHM_CORE_H
#define PACELINE_SHM_CORE_H

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm_reduce.h"

#define MAX_RANKS 64
#define ALIGN 64                 /* slices end on cache lines */
#define SLOT ((size_t)128 << 10) /* a payload up to this travels with the call itself */
#define WINDOW ((size_t)1 << 20)
#define RING ((size_t)256 << 10)
#define PAGE ((size_t)65536) /* as large as pages are anywhere; what is mapped apart must not share one */
#define EXPORT __attribute__((visibility("default")))

/* The numbers of the enums below are part of the interface with shm.py. */
enum { BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, REDUCE_SCATTER, SEND, RECV };
enum {
    DONE = 0, AGAIN = 1,
    TIMED_OUT = -1, PEER_DIED = -2, PEER_LEFT = -3, PEER_ABORTED = -4, ABORTED = -5, MISMATCH = -6,
    LEFT = -7, /* only ever written down, never returned: this rank went home in peace */
    CLOSED = -8, FORKED = -9, /* only ever returned: the engine was closed here, or belongs to the parent */
    GARBLED = -10,            /* a rank's memory holds what no rank writes there */
    NO_MEMORY = -11, BAD_CALL = -12
};

typedef struct {
    uint32_t kind, dtype, reduce;
    int32_t root;
    uint64_t count;  /* elements this rank gives (or, for a receiver, takes) */
    uint64_t offset; /* 1 + where the payload lies in the owner's segment; 0: it is not in there */
    uint32_t tables; /* whether `give` and `take` below hold */
    uint32_t small;  /* the payload is in the slot */
} Call;

typedef struct {
    _Alignas(128) _Atomic uint64_t progress; /* its low half is the futex that others sleep on */
    _Alignas(128) _Atomic uint32_t sleepers;
    _Alignas(128) _Atomic uint32_t bell; /* rung by peers whose channels to or from here moved */
    _Atomic uint32_t bell_sleepers;
    _Alignas(128) _Atomic int32_t fault;
    _Atomic uint64_t culprits, fault_seq;
    _Atomic uint32_t fault_kind;
    _Alignas(128) Call call[2];
    uint64_t give[2][MAX_RANKS], take[2][MAX_RANKS]; /* bytes to and from each rank */
    uint8_t nonce[32];
    struct robust_list held;           /* see shm_life.h */
    _Alignas(128) _Atomic uint32_t life; /* a thread of the owner; when it dies, the kernel says so here */
} Control;

typedef struct {
    _Alignas(128) _Atomic uint64_t head; /* bytes ever written, by the sender */
    _Alignas(128) _Atomic uint64_t tail; /* bytes ever read, by the receiver */
    _Alignas(128) _Atomic uint64_t refused; /* 1 + number of a message that did not fit, by the receiver */
    _Atomic uint64_t refused_sent, refused_wanted;
    _Atomic uint32_t refused_sent_dtype, refused_wanted_dtype;
    _Alignas(128) uint8_t ring[RING];
} Channel;

typedef struct {
    int64_t tag;
    uint64_t bytes, number;
    uint32_t dtype, pad;
} Header;

typedef struct Op {
    /* what is asked; _LAYOUT in clib.py has the same fields up to `out` */
    struct Engine *engine;
    uint32_t kind, dtype, reduce, itemsize;
    int32_t root, mode; /* root: of a rooted collective, or the peer of a transfer, -1 for any */
    int64_t tag, timeout_ns, patience_ns;
    uint64_t count;
    const uint8_t *in;
    uint8_t *out;
    const uint8_t *const *src; /* one for each rank, or NULL: equal stretches of `in` */
    uint8_t *const *dst;       /* one for each rank, or NULL: equal stretches of `out` */
    const uint64_t *give;      /* bytes for each rank, or NULL: `count` elements each */
    const uint64_t *take;
    int64_t deadline;
    /* what came of it */
    int32_t status, reporter;
    uint64_t culprits, seq;
    int32_t side_a, side_b, source, pad;
    Call call_a, call_b;
    uint64_t bytes_a, bytes_b;
    /* the engine's own */
    struct Op *next;
    uint32_t started, entered, path, tick, ticks, exit_wait, awaited, queued, done, waited;
    uint64_t piece, windows, moved;
    int64_t left; /* when its caller came back from starting it */
} Op;

enum { P_INLINE, P_TWO_PHASE, P_DIRECT, P_EXCHANGE };

struct Engine;

typedef struct Lane {
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* for callers: something ended, or nobody drives any more */
    pthread_cond_t wanted;  /* for the thread alone: there is something for it */
    int running, closing, has_thread;
    int pending;    /* operations that were submitted and are not done */
    int for_thread; /* those among them that nobody needs to wait for */
    int prompt;     /* how many of these in a row a caller came for at once; see shm.c */
    int looks;      /* the thread looks by itself every now and then; it need not be woken */
    int tries;      /* how often a caller drove what it only meant to start */
    int64_t due;    /* when the thread takes up what was left to a caller; 0: it leaves nothing to them */
    int64_t latest; /* when something was last left to a caller */
    pthread_t thread;
    Op *first, *last; /* submitted and not done */
    struct Engine *engine;
    int64_t (*turn)(struct Lane *, int64_t until, int spin); /* drives; see coll_turn and pump_turn */
} Lane;

typedef struct Stash { /* a message nobody had asked for when it came */
    struct Stash *next;
    Header header;
    uint8_t data[];
} Stash;

typedef struct {
    int open;       /* a header was read and its payload is not finished */
    Header header;
    Op *op;         /* where the payload goes; NULL with stash NULL: nobody wants it yet */
    Stash *stash;
    int drop;
    uint64_t moved;
} Incoming;

/* What a rank told of its call, copied out of its memory once and looked at only here: what is in
 * shared memory may be anything, and may be something else the next moment. */
typedef struct {
    Call call;
    uint64_t give[MAX_RANKS], take[MAX_RANKS];
} Told;

typedef struct Engine {
    int rank, n;
    uint8_t *base[MAX_RANKS];
    int watch[MAX_RANKS]; /* readable or hung up when that rank's process is gone */
    uint64_t segment;
    int spins;        /* looks at a flag before the core is offered to others */
    int yields;       /* and how often, and how long, it is offered before going to sleep */
    int64_t yield_ns;
    size_t window, small, flat, direct;
    uint64_t seq;
    Lane coll, pump;
    Incoming incoming[MAX_RANKS];
    Stash *stash[MAX_RANKS];
    uint64_t sent[MAX_RANKS], refused_seen[MAX_RANKS];
    uint64_t head[MAX_RANKS], tail[MAX_RANKS]; /* of the channels to and from each rank: our side of them */
    Told told[MAX_RANKS];                      /* of the collective under way */
    uint64_t bad_words, bad_channels;          /* ranks whose memory is garbled, for collectives and transfers */
    int no_room;                               /* no memory for a message that nobody waits for yet */
    Op *sending, *receiving; /* the pump's own, touched by the running thread only */
    uint64_t settled;
    int64_t weeded;                /* when it was last seen that all of them can go on */
    uint64_t moved_to, moved_from; /* ranks to and from which payloads have moved since */
    struct Engine *next_alive; /* of this process; see shm_life.h */
    uint32_t generation;    /* of the process it was opened in; see shm_life.h */
    _Atomic int inside;     /* threads that are in a call, with this memory under them */
    _Atomic int state;
} Engine;

enum { OPEN, CLOSING /* nothing new begins */, SHUT /* nobody comes in */, ENDED };

/* ---- the map of a segment ---- */

static size_t slots_at(void) { return (sizeof(Control) + PAGE - 1) / PAGE * PAGE; }
static size_t windows_at(void) { return slots_at() + 2 * SLOT; }
static size_t channels_at(void) { return windows_at() + 4 * WINDOW; }
static size_t heap_at(int n) { return (channels_at() + (size_t)n * sizeof(Channel) + PAGE - 1) / PAGE * PAGE; }

static Control *control(Engine *e, int r) { return (Control *)e->base[r]; }
static uint8_t *slot(Engine *e, int r, uint64_t seq) { return e->base[r] + slots_at() + (seq & 1) * SLOT; }
static uint8_t *published(Engine *e, int r, uint64_t t) { return e->base[r] + windows_at() + (t & 1) * WINDOW; }
static uint8_t *result(Engine *e, int r, uint64_t t) { return e->base[r] + windows_at() + (2 + (t & 1)) * WINDOW; }
static Channel *channel(Engine *e, int from, int to) {
    return (Channel *)(e->base[from] + channels_at()) + to;
}

/* ---- time, sleeping, waking ---- */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` does nothing on most cores; isb waits a little */
#endif
}

static void futex_wait(void *word, uint32_t seen, int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void futex_wake(void *word) { syscall(SYS_futex, word, FUTEX_WAKE, MAX_RANKS, NULL, NULL, 0); }

static inline void *low_half(_Atomic uint64_t *word) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return word;
#else
    return (uint8_t *)word + 4;
#endif
}

static void advance(Engine *e, uint64_t seq, uint64_t tick) {
    Control *me = control(e, e->rank);
    /* In one order for all, with the two of sleep_on: whoever comes second sees what the first did. */
    atomic_store(&me->progress, seq << 24 | tick);
    if (atomic_load(&me->sleepers)) futex_wake(low_half(&me->progress));
}

static inline int reached(Engine *e, int r, uint64_t target) {
    return atomic_load_explicit(&control(e, r)->progress, memory_order_acquire) >= target;
}

static void ring_bell(Engine *e, int r) {
    Control *c = control(e, r);
    atomic_fetch_add_explicit(&c->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&c->bell_sleepers, memory_order_seq_cst)) futex_wake(&c->bell);
}

/* ---- faults ---- */

static int gone(Engine *e, int r) {
    if (atomic_load(&control(e, r)->life) & FUTEX_OWNER_DIED) return 1;
    struct pollfd p = {e->watch[r], POLLIN | POLLHUP, 0};
    return e->watch[r] >= 0 && poll(&p, 1, 0) > 0;
}

static int fault(Engine *e, Op *op, int status, int reporter, uint64_t culprits) {
    Control *me = control(e, e->rank);
    op->status = status;
    op->reporter = reporter;
    op->culprits = culprits;
    if (atomic_load(&me->fault) == 0) { /* the first one stands */
        me->culprits = culprits;
        me->fault_seq = op->seq;
        me->fault_kind = op->kind;
        atomic_store(&me->fault, status);
    }
    atomic_thread_fence(memory_order_release); /* before this rank uses its memory again: see read_too_late */
    futex_wake(low_half(&me->progress));
    for (int r = 0; r < e->n; r++)
        if (r != e->rank) ring_bell(e, r);
    return status;
}

static uint64_t everyone(Engine *e) { return (uint64_t)-1 >> (64 - e->n); }
static uint64_t others(Engine *e) { return everyone(e) & ~((uint64_t)1 << e->rank); }

static int is_fault(int status) {
    return status == LEFT || status == GARBLED || status == NO_MEMORY || (status <= TIMED_OUT && status >= ABORTED);
}

static uint64_t failed(Engine *e) { /* those that have said why they go no further, this rank too */
    uint64_t mask = 0;
    for (int r = 0; r < e->n; r++)
        if (atomic_load(&control(e, r)->fault)) mask |= (uint64_t)1 << r;
    return mask;
}

/* What ranks in `failed` said that stands in the way of progress that needs those in `needed`; 0: nothing. */
static int obstacle(Engine *e, Op *op, uint64_t failed, uint64_t needed) {
    if (!failed) return 0;
    Control *me = control(e, e->rank);
    int mine = atomic_load(&me->fault);
    if (mine) { /* an operation that comes after the fault, or an abort from another thread */
        op->status = mine;
        op->reporter = e->rank;
        op->culprits = me->culprits & everyone(e);
        return is_fault(mine) ? mine : GARBLED;
    }
    for (int r = 0; r < e->n; r++) {
        uint64_t bit = (uint64_t)1 << r;
        if (r == e->rank || !(failed & bit)) continue;
        int theirs = atomic_load(&control(e, r)->fault);
        if (theirs == LEFT && !(needed & bit)) continue;
        if (theirs == LEFT || theirs == ABORTED)
            return fault(e, op, theirs == ABORTED ? PEER_ABORTED : PEER_LEFT, r, bit);
        if (theirs && !is_fault(theirs)) return fault(e, op, GARBLED, e->rank, bit);
        uint64_t culprits = theirs ? control(e, r)->culprits & everyone(e) : 0;
        if (theirs) return fault(e, op, theirs, r, culprits ? culprits : bit);
    }
    return 0;
}

static uint64_t dead(Engine *e, uint64_t needed) {
    uint64_t found = 0;
    for (int r = 0; r < e->n; r++)
        if (needed >> r & 1 && gone(e, r)) found |= (uint64_t)1 << r;
    return found;
}

/* ---- operations ---- */

static uint64_t own_bytes(const Op *op) { return op->count * op->itemsize; }

/* Tells whoever waits for `op`; takes it off the lane's list if it is still there. */
static void finish(Lane *l, Op *op, int status) {
    pthread_mutex_lock(&l->mutex);
    for (Op **p = &l->first; *p; p = &(*p)->next)
        if (*p == op) {
            *p = op->next;
            break;
        }
    l->last = l->first;
    while (l->last && l->last->next) l->last = l->last->next;
    op->status = status;
    op->done = 1;
    l->pending--;
    l->for_thread -= op->mode == 1;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
}

#endif
