/* Collectives over shared memory, for the ranks of one host.
 *
 * The memory. Every rank owns one segment and every rank maps all of them. A segment holds
 *
 *     Control | slots | windows | channels | heap
 *
 * `Control` says how far its owner is; slots carry small payloads, windows large ones in pieces,
 * channels carry point-to-point messages, and the heap holds tensors that live in shared memory.
 * Only the owner writes to its segment, with two exceptions: a receiver moves the tail of the channel
 * it reads, and an all-reduce of heap tensors writes each result to every rank's tensor.
 *
 * Progress. A rank tells the others one growing number: (operation << 24) + tick. Tick 1 of an
 * operation is "entered": the description of the call, and a small payload, can be read. A rank
 * that has seen every other rank enter operation k knows that all of them are done with k - 1;
 * so what it wrote for k - 1 may be overwritten, and two slots, used in turn, are enough. Large
 * payloads move in windows: in tick t a rank publishes window t, works on window t - 1 and, where
 * there is a third step, collects the results of window t - 2; it starts tick t when all others
 * have finished t - 1. One round of flags per window, two buffers of each kind.
 *
 * Agreement. After entering, every rank compares the descriptions of all ranks, so all of them
 * come to the same verdict on a mismatch, before any payload is used; the group stays usable.
 *
 * Faults. A waiting rank looks every few milliseconds whether a rank it waits for is dead, has left
 * or has written down a fault of its own; then it writes the fault down itself, so the news spreads
 * even to ranks that wait for somebody else. After a fault the group is over.
 *
 * Who runs. An operation is a resumable state (`coll_step`, `pump_step`), and whoever needs progress
 * drives it: a caller that waits, a caller that pokes in passing, or the lane's thread, which exists
 * once something was submitted and nobody waits for it. At most one of them at a time ("running").
 * Collectives run in the order of submission; point-to-point transfers have a lane of their own and
 * overtake each other as their peers allow.
 *
 * Starting and waiting at once. Waking the thread costs more than a small all-reduce, and then it is
 * in the way of the caller. So where callers have come for their collectives at once a few times in
 * a row, the next one is left to its caller (`due`): the thread does not drive it. It looks every half
 * a millisecond whether the caller has come, until there was nothing to look at for a while, and takes
 * up what nobody came for; after that it is woken for each, as before. A small one is even driven for
 * a moment while it is started, and is often done then, without any thread. Every so often that is
 * left out, to see whether callers still come at once.
 *
 * The end. Threads that are in a call are counted. Closing lets nothing new begin, ends what is
 * still under way as an abort does, and waits until nobody is inside; only then may the caller unmap
 * the memory. The engine itself stays until pl_free, for those who come too late and are refused.
 * shm_life.h says what holds in forked children.
 */
#define _GNU_SOURCE
#ifndef PACELINE_SOURCE
#define PACELINE_SOURCE 0
#endif
#include "shm_collectives.h"
#include "shm_transfers.h"
#include "shm_sums.h"

/* ---- lanes: whoever needs progress drives ---- */

static void drive(Lane *l, int64_t until, int spin) { /* the mutex is held before and after */
    l->running = 1;
    pthread_mutex_unlock(&l->mutex);
    l->turn(l, until, spin);
    pthread_mutex_lock(&l->mutex);
    l->running = 0;
    pthread_cond_broadcast(&l->changed);
}

static int has_work(Lane *l) { return l->pending > 0; } /* the mutex is held */

#define OFTEN 3             /* so many in a row make a habit */
#define AT_ONCE 300000      /* ns between starting and waiting */
#define GRACE 300000        /* ns that a caller has to come */
#define LOOK 500000         /* ns between two looks of a thread that is not woken */
#define REST 20000000       /* ns without anything to look at, after which it looks no more */
#define TRY 200000          /* ns for which a start may drive */
#define TRIED ((uint64_t)1 << 20) /* bytes: larger ones would take longer than that */
#define SEE 128             /* one in so many is not tried */

static void wait_until(Lane *l, pthread_cond_t *what, int64_t until) { /* the mutex is held before and after */
    struct timespec t = {until / 1000000000, until % 1000000000};
    pthread_cond_timedwait(what, &l->mutex, &t);
}

static void rest(Lane *l, int64_t now) { /* of the thread; the mutex is held before and after */
    l->looks = l->prompt >= OFTEN && now - l->latest < REST;
    if (l->looks) wait_until(l, &l->wanted, now + LOOK);
    else if (l->for_thread && now < l->due) wait_until(l, &l->wanted, l->due); /* its caller came back late, if at all */
    else pthread_cond_wait(&l->wanted, &l->mutex);
}

static void *lane_thread(void *lane) {
    Lane *l = lane;
    pthread_mutex_lock(&l->mutex);
    while (!l->closing) {
        int64_t now = now_ns();
        if (l->running || !l->for_thread || now < l->due) {
            rest(l, now);
            continue;
        }
        if (l->due) l->prompt = 0; /* nobody came */
        l->due = 0;
        /* no spinning here: beside a rank that computes it costs more than it gains, also with idle cores */
        drive(l, now + 20000000, 0);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static int worth_a_try(Lane *l, const Op *op) { /* the mutex is held */
    return op->mode == 1 && l->due && own_bytes(op) <= TRIED && ++l->tries % SEE;
}

static void see_to_it(Lane *l) { /* it is left to its caller: have the thread look whether one comes; the mutex is held */
    if (l->due && l->for_thread && !l->looks) pthread_cond_signal(&l->wanted);
}

static void hand_over(Lane *l) { /* whoever drove goes away; the mutex is held */
    int will_look = l->due && l->looks;
    if (l->for_thread && !l->running && !will_look) pthread_cond_signal(&l->wanted);
}

static void note_habit(Lane *l, Op *op, int64_t now) { /* somebody waits for `op`; the mutex is held */
    if (op->mode != 1 || op->waited || l != &l->engine->coll) return;
    op->waited = 1;
    if (now - op->left >= AT_ONCE) l->prompt = 0;
    else if (l->prompt < OFTEN) l->prompt++;
}

static void lane_open(Lane *l, Engine *e, int64_t (*turn)(Lane *, int64_t, int)) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&l->mutex, NULL);
    pthread_cond_init(&l->changed, &clock);
    pthread_cond_init(&l->wanted, &clock);
    pthread_condattr_destroy(&clock);
    l->engine = e;
    l->turn = turn;
}

static void lane_close(Lane *l) {
    pthread_mutex_lock(&l->mutex);
    l->closing = 1;
    pthread_cond_broadcast(&l->changed);
    pthread_cond_broadcast(&l->wanted);
    pthread_mutex_unlock(&l->mutex);
    if (l->has_thread) pthread_join(l->thread, NULL);
    pthread_mutex_destroy(&l->mutex);
    pthread_cond_destroy(&l->changed);
    pthread_cond_destroy(&l->wanted);
}

static void leave_to_thread(Lane *l, int64_t now) { /* the operation that was just submitted */
    l->for_thread++;
    if (!l->has_thread) {
        sigset_t all, old; /* signals are for Python's threads */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        l->has_thread = pthread_create(&l->thread, NULL, lane_thread, l) == 0;
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    l->due = 0;
    if (l->pending > 1) l->prompt = 0; /* nobody has come for the one before */
    if (l->prompt >= OFTEN) {
        l->latest = now;
        l->due = now + GRACE;
        return;
    }
    if (l == &l->engine->pump && l->running) ring_bell(l->engine, l->engine->rank);
    pthread_cond_signal(&l->wanted);
}

static void submit(Lane *l, Op *op, int64_t now) {
    op->next = NULL;
    l->pending++;
    if (l->last) l->last->next = op;
    else l->first = op;
    l->last = op;
    if (op->mode == 1) leave_to_thread(l, now);
}

static int await_op(Lane *l, Op *op, int64_t until) { /* the mutex is held before and after */
    while (!op->done) {
        if (!l->running) drive(l, until, 1);
        else {
            if (l == &l->engine->pump) ring_bell(l->engine, l->engine->rank);
            wait_until(l, &l->changed, until);
        }
        if (!op->done && now_ns() >= until) break;
    }
    hand_over(l);
    return op->done ? op->status : AGAIN;
}

/* ---- the interface with shm.py ---- */

EXPORT uint64_t pl_op_bytes(void) { return sizeof(Op); }
EXPORT uint64_t pl_heap_at(int n) { return heap_at(n); }
EXPORT uint64_t pl_nonce_at(void) { return offsetof(Control, nonce); }

/* A number that two libraries share only if they read each other's memory alike: the text they were
 * built from (setup.py hashes it), and what the compiler made of it. */
EXPORT uint64_t pl_build(void) {
    const uint64_t facts[] = {
        PACELINE_SOURCE, sizeof(void *), sizeof(Control), sizeof(Channel), sizeof(Header), sizeof(Call),
        SLOT, WINDOW, RING, ALIGN, MAX_RANKS, T_COUNT, R_COUNT, __BYTE_ORDER__,
    };
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof facts; i++) hash = (hash ^ ((const uint8_t *)facts)[i]) * 1099511628211u;
    return hash;
}

/* The bytes that move in one step. Ranks must use the same: ask with numbers that all of them have
 * agreed on. `cores`: the fewest that any rank may run on; `asked`: 0 to choose. 0: that cannot be. */
EXPORT uint64_t pl_window(int n, int cores, uint64_t asked) {
    if (n < 1 || n > MAX_RANKS || (asked && (asked < (uint64_t)n * ALIGN || asked > WINDOW))) return 0;
    if (asked || n > cores) return asked ? asked : WINDOW;
    size_t fitting = WINDOW / 8; /* the buffers of a window stay in the caches */
    return fitting < (size_t)n << 13 ? (size_t)n << 13 : fitting;
}

EXPORT void *pl_map(int fd, uint64_t bytes, int own) { return map_segment(fd, bytes, own); }
EXPORT void pl_unmap(void *p) { unmap_segment(p); }
EXPORT void pl_discard(void *p, uint64_t bytes) { /* the first is for shared pages, the second for private ones */
    if (madvise(p, bytes, MADV_REMOVE)) madvise(p, bytes, MADV_DONTNEED);
}

/* `segment`: bytes of every rank's memory; `window`: from pl_window; both agreed on by all ranks.
 * `cores`: those of this rank, which only says how it waits. NULL: no memory, or numbers that cannot be. */
EXPORT Engine *pl_open(int rank, int n, void *const *base, const int *watch, uint64_t segment, int cores, uint64_t window) {
    if (n < 1 || n > MAX_RANKS || rank < 0 || rank >= n || segment < heap_at(n) || pl_window(n, 1, window) != window)
        return NULL;
    Engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->rank = rank;
    e->n = n;
    e->segment = segment;
    e->generation = atomic_load(&generation);
    for (int r = 0; r < n; r++) {
        e->base[r] = base[r];
        e->watch[r] = watch[r];
    }
    int crowded = n > cores; /* then a spinning rank keeps the core from the one it waits for */
    e->spins = crowded ? 1 : 400;
    e->yields = crowded ? 4 : 64;
    e->yield_ns = crowded ? 20000 : 50000;
    e->window = window;
    e->small = SLOT;
    e->direct = SLOT / 8; /* shared tensors above this are better reduced where they lie */
    e->flat = SLOT * 2 / n; /* every rank reads all of it: worth it while that is little */
    if (e->flat > SLOT) e->flat = SLOT;
    lane_open(&e->coll, e, coll_turn);
    lane_open(&e->pump, e, pump_turn);
    begin_life(e);
    return e;
}

/* ---- coming in and going out ---- */

static int come_in(Engine *e, int latest) { /* whether a call may begin; then go_out follows */
    if (forked(e)) return 0;
    atomic_fetch_add(&e->inside, 1);
    if (atomic_load(&e->state) <= latest) return 1;
    atomic_fetch_sub(&e->inside, 1);
    return 0;
}

static void go_out(Engine *e) { atomic_fetch_sub(&e->inside, 1); }

static int refusal(const Engine *e) { return forked(e) ? FORKED : CLOSED; }

static Lane *lane_of(Engine *e, const Op *op) { return op->kind >= SEND ? &e->pump : &e->coll; }

/* Starts an operation that is described in full.
 * mode 0: drive it here, for at most `patience_ns`; 1: leave it to the thread; 2: to whoever waits or pokes.
 * What became of an operation that was left to others is told by pl_wait, unless it is DONE already. */
EXPORT int pl_start(Op *op) {
    int64_t now = now_ns();
    memset((uint8_t *)op + offsetof(Op, status), 0, sizeof *op - offsetof(Op, status));
    op->deadline = op->timeout_ns < 0 ? INT64_MAX : now + op->timeout_ns;
    Engine *e = op->engine;
    if (!possible(e, op)) return op->status = BAD_CALL;
    if (!come_in(e, OPEN)) return op->status = refusal(e);
    op->status = AGAIN;
    op->queued = 1;
    Lane *l = lane_of(e, op);
    pthread_mutex_lock(&l->mutex);
    op->left = now;
    submit(l, op, now);
    int status = AGAIN;
    if (op->mode == 0) status = await_op(l, op, now + op->patience_ns);
    else if (worth_a_try(l, op)) {
        if (await_op(l, op, now + TRY) == DONE) status = DONE;
        op->left = now_ns();
        if (l->due) l->due = op->left + GRACE; /* 0: another caller has called the thread meanwhile */
    }
    if (status == AGAIN && op->mode == 1) see_to_it(l);
    pthread_mutex_unlock(&l->mutex);
    go_out(e);
    return status;
}

EXPORT int pl_wait(Op *op, int64_t patience_ns) {
    Engine *e = op->engine;
    if (!come_in(e, CLOSING)) return op->done && !forked(e) ? op->status : refusal(e);
    Lane *l = lane_of(e, op);
    int64_t now = now_ns();
    pthread_mutex_lock(&l->mutex);
    note_habit(l, op, now);
    int status = await_op(l, op, now + patience_ns);
    pthread_mutex_unlock(&l->mutex);
    go_out(e);
    return status;
}

EXPORT int pl_test(Op *op) { /* 1 when the engine has nothing to do with it any more */
    Engine *e = op->engine;
    if (!op->queued || !come_in(e, CLOSING)) return 1;
    Lane *l = lane_of(e, op);
    pthread_mutex_lock(&l->mutex);
    int done = op->done;
    pthread_mutex_unlock(&l->mutex);
    go_out(e);
    return done;
}

EXPORT void pl_poke(Engine *e) { /* moves the oldest collective along, without waiting */
    if (!come_in(e, OPEN)) return;
    Lane *l = &e->coll;
    if (!pthread_mutex_trylock(&l->mutex)) {
        while (l->first && !l->running) {
            Op *op = l->first;
            drive(l, 0, 0);
            if (l->first == op) break;
        }
        hand_over(l);
        pthread_mutex_unlock(&l->mutex);
    }
    go_out(e);
}

static void say(Engine *e, int status) {
    Control *me = control(e, e->rank);
    int none = 0;
    atomic_compare_exchange_strong(&me->fault, &none, status);
    atomic_thread_fence(memory_order_release); /* as in fault */
    for (int r = 0; r < e->n; r++) { /* those who wait for this rank, and our own threads */
        futex_wake(low_half(&control(e, r)->progress));
        ring_bell(e, r);
    }
}

EXPORT void pl_abort(Engine *e) {
    if (!come_in(e, CLOSING)) return;
    say(e, ABORTED);
    go_out(e);
}

static void pause_briefly(void) {
    struct timespec moment = {0, 50000};
    nanosleep(&moment, NULL);
}

static int end_what_is_left(Engine *e, Lane *l) { /* 1: there was something */
    pthread_mutex_lock(&l->mutex);
    int found = has_work(l);
    if (found) say(e, ABORTED);
    while (has_work(l)) {
        int64_t until = now_ns() + 10000000;
        if (!l->running) drive(l, until, 0);
        else wait_until(l, &l->changed, until);
    }
    pthread_mutex_unlock(&l->mutex);
    return found;
}

/* Leaves the group; whoever still waits in it is freed. 1: from now on nobody touches the memory. 0: somebody else
 * closes it, or has closed it, or it is the parent's. */
EXPORT int pl_close(Engine *e) {
    int open = OPEN;
    if (forked(e) || !atomic_compare_exchange_strong(&e->state, &open, CLOSING)) return 0;
    for (int left = 1; left;) {
        left = end_what_is_left(e, &e->coll) + end_what_is_left(e, &e->pump);
        left += atomic_load(&e->inside); /* who came in before may be about to submit */
        if (left) pause_briefly();
    }
    atomic_store(&e->state, SHUT);
    while (atomic_load(&e->inside)) pause_briefly();
    say(e, LEFT);
    lane_close(&e->coll);
    lane_close(&e->pump);
    end_life(e);
    part(e);
    atomic_store(&e->state, ENDED);
    return 1;
}

/* Nobody can call with it any more; at most, another thread is about to end in pl_close. */
EXPORT void pl_free(Engine *e) {
    while (!forked(e) && atomic_load(&e->state) != OPEN && atomic_load(&e->state) != ENDED) pause_briefly();
    if (!forked(e)) end_life(e);
    for (int r = 0; r < e->n; r++) {
        /* in a child the thread that moved it may have been about to file it */
        if (!forked(e) && e->incoming[r].open) free(e->incoming[r].stash);
        for (Stash *s = e->stash[r], *next; s; s = next) {
            next = s->next;
            free(s);
        }
    }
    free(e);
}

/* How far rank r is: the operation it entered last, and its description. It may go on meanwhile, and write the
 * same record for the operation after the next; then this looks again, but not for ever at a rank that lies. */
EXPORT uint64_t pl_position(Engine *e, int r, Call *call) {
    if (!come_in(e, CLOSING)) return 0;
    Control *c = control(e, r);
    uint64_t seq = atomic_load(&c->progress) >> 24;
    for (int looks = 0; looks < 1000; looks++) {
        *call = c->call[seq & 1];
        atomic_thread_fence(memory_order_acquire);
        uint64_t now = atomic_load(&c->progress) >> 24;
        if (now == seq) break;
        seq = now;
    }
    go_out(e);
    return seq;
}

EXPORT int pl_reduces(uint32_t dtype, uint32_t reduce) {
    return dtype < T_COUNT && reduce < R_COUNT && REDUCERS[dtype][reduce] != NULL;
}

/* ---- sums in any order ---- */

EXPORT void pl_largest(uint32_t *most, const uint32_t *const *x, const uint64_t *n, uint64_t tensors) {
    for (uint64_t t = 0; t < tensors; t++) most[t] = largest_bits(x[t], n[t]);
}

EXPORT void pl_add_whole(
    int64_t *const *sum, const float *const *x, const uint64_t *n, const double *scale, const uint8_t *fresh, uint64_t tensors
) {
    for (uint64_t t = 0; t < tensors; t++) (fresh[t] ? put_whole : add_whole)(sum[t], x[t], n[t], scale[t]);
}

/* What became of each term is left in `levels`; see add_term. */
EXPORT void pl_add_terms(
    int64_t *const *sum, const float *const *x, const uint64_t *n, const int32_t *takes, const uint8_t *fresh,
    int32_t *levels, uint64_t tensors, const Grid *grid, double weight
) {
    for (uint64_t t = 0; t < tensors; t++) levels[t] = add_term(sum[t], x[t], n[t], grid, weight, takes[t], fresh[t]);
}

EXPORT void pl_means_of_whole(int64_t *const *sum, const uint64_t *n, const double *unit, uint64_t tensors, double weight) {
    for (uint64_t t = 0; t < tensors; t++) mean_of_whole(sum[t], n[t], unit[t], weight);
}

/* Copies of some tensors, one behind the other. */
EXPORT void pl_keep(float *kept, const float *const *x, const uint64_t *n, uint64_t tensors) {
    for (uint64_t t = 0; t < tensors; kept += n[t++]) memcpy(kept, x[t], n[t] * sizeof *kept);
}

EXPORT void pl_changed(uint8_t *changed, const float *kept, const float *const *x, const uint64_t *n, uint64_t tensors) {
    for (uint64_t t = 0; t < tensors; kept += n[t++]) changed[t] = memcmp(kept, x[t], n[t] * sizeof *kept) != 0;
}
