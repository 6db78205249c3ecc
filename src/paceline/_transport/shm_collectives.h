/* Collectives: entering, agreeing on what was called, and moving or reducing the payloads. */
#ifndef PACELINE_SHM_COLLECTIVES_H
#define PACELINE_SHM_COLLECTIVES_H

#include "shm_life.h"

/* ---- payloads ---- */

static uint64_t give_bytes(const Op *op, int d) { return op->give ? op->give[d] : own_bytes(op); }
static const uint8_t *give_at(const Op *op, int d) { return op->src ? op->src[d] : op->in + d * own_bytes(op); }
static uint8_t *take_at(const Op *op, int s) { return op->dst ? op->dst[s] : op->out + s * own_bytes(op); }

static int is_personal(const Op *op) {
    return op->kind == SCATTER || op->kind == ALL_TO_ALL || op->kind == REDUCE_SCATTER;
}

static int gives(const Op *op, int r) { /* whether rank r has a payload for somebody */
    switch (op->kind) {
    case BARRIER: return 0;
    case BROADCAST: case SCATTER: return r == op->root;
    default: return 1;
    }
}

static int takes(const Op *op, int r) {
    return op->kind == GATHER ? r == op->root : op->kind != BARRIER && !(op->kind == BROADCAST && r == op->root);
}

static uint64_t total_given(Engine *e, const Op *op) {
    if (!gives(op, e->rank)) return 0;
    if (!is_personal(op)) return own_bytes(op);
    uint64_t sum = 0;
    for (int d = 0; d < e->n; d++) sum += give_bytes(op, d);
    return sum;
}

static uint64_t offset_in_segment(Engine *e, const uint8_t *p, uint64_t bytes) {
    uint8_t *base = e->base[e->rank];
    if (p < base + heap_at(e->n) || p > base + e->segment || bytes > (uint64_t)(base + e->segment - p)) return 0;
    return (uint64_t)(p - base) + 1;
}

static void enter(Engine *e, Op *op) {
    op->seq = ++e->seq;
    Control *me = control(e, e->rank);
    int turn = op->seq & 1;
    uint64_t bytes = total_given(e, op);
    Told *told = &e->told[e->rank]; /* others could write to what is in shared memory */
    Call *c = &told->call;
    *c = (Call){.kind = op->kind, .dtype = op->dtype, .reduce = op->reduce, .root = op->root, .count = op->count};
    c->tables = op->give || op->take;
    c->small = bytes <= e->small;
    int reduces = op->kind == ALL_REDUCE || op->kind == REDUCE;
    int shared = gives(op, e->rank) && !op->src && (!reduces || op->in == op->out);
    if (reduces) c->small = bytes <= e->flat;
    if (op->kind == ALL_REDUCE && shared && bytes > e->direct && offset_in_segment(e, op->in, bytes)) c->small = 0;
    if (c->tables)
        for (int r = 0; r < e->n; r++) {
            told->give[r] = gives(op, e->rank) && is_personal(op) ? give_bytes(op, r) : bytes;
            told->take[r] = takes(op, e->rank) && op->take ? op->take[r] : own_bytes(op);
        }
    if (!c->small && shared && (uintptr_t)op->in % op->itemsize == 0) c->offset = offset_in_segment(e, op->in, bytes);
    me->call[turn] = *c;
    if (c->tables) {
        memcpy(me->give[turn], told->give, sizeof told->give);
        memcpy(me->take[turn], told->take, sizeof told->take);
    }
    if (c->small && bytes) {
        uint8_t *to = slot(e, e->rank, op->seq);
        if (!is_personal(op) || !op->src) memcpy(to, op->in, bytes);
        else
            for (int d = 0; d < e->n; d++) {
                memcpy(to, give_at(op, d), give_bytes(op, d));
                to += give_bytes(op, d);
            }
    }
    advance(e, op->seq, 1);
}

/* ---- agreement ---- */

static const Call *call_of(Engine *e, const Op *op, int r) { (void)op; return &e->told[r].call; }

static void listen_to_all(Engine *e, const Op *op) {
    int turn = op->seq & 1;
    for (int r = 0; r < e->n; r++) {
        if (r == e->rank) continue;
        const Control *c = control(e, r);
        e->told[r].call = c->call[turn];
        if (!e->told[r].call.tables) continue;
        memcpy(e->told[r].give, c->give[turn], sizeof e->told[r].give);
        memcpy(e->told[r].take, c->take[turn], sizeof e->told[r].take);
    }
    __asm__ volatile("" ::: "memory"); /* from here on only the copies */
}

static int differ(Engine *e, Op *op, int a, int b, uint64_t bytes_a, uint64_t bytes_b) {
    op->side_a = a;
    op->side_b = b;
    op->call_a = *call_of(e, op, a);
    op->call_b = *call_of(e, op, b);
    op->bytes_a = bytes_a;
    op->bytes_b = bytes_b;
    return op->status = MISMATCH;
}

static int garbled(Engine *e, Op *op, int r) { return fault(e, op, GARBLED, e->rank, (uint64_t)1 << r); }

/* Bytes that rank s has for rank d, and that rank d wants from rank s, by their own words. */
static uint64_t given(Engine *e, const Op *op, int s, int d) {
    const Told *t = &e->told[s];
    return t->call.tables ? t->give[d] : t->call.count * op->itemsize;
}

static uint64_t taken(Engine *e, const Op *op, int d, int s) {
    const Told *t = &e->told[d];
    return t->call.tables ? t->take[s] : t->call.count * op->itemsize;
}

/* Whether what rank r told could be true: what does not exist, or does not fit into its memory, could not. */
static int credible(Engine *e, const Op *op, int r) {
    const Call *c = call_of(e, op, r);
    uint64_t total = 0, each;
    if (c->kind > REDUCE_SCATTER || c->reduce >= R_COUNT || c->dtype > 255 || c->root < -1 || c->root >= e->n) return 0;
    if (__builtin_mul_overflow(c->count, (uint64_t)op->itemsize, &each) || each >> 62) return 0;
    if (!gives(op, r)) return 1;
    for (int d = 0; d < (is_personal(op) ? e->n : 1); d++)
        if (__builtin_add_overflow(total, given(e, op, r, d), &total) || total >> 62) return 0;
    if (c->small && total > SLOT) return 0;
    if (!c->offset) return 1;
    uint64_t at = c->offset - 1;
    return at >= heap_at(e->n) && at <= e->segment && total <= e->segment - at && at % op->itemsize == 0;
}

/* The same question with the same answer on every rank. */
static int agree(Engine *e, Op *op) {
    int tables = 0;
    listen_to_all(e, op);
    const Call *first = call_of(e, op, 0);
    for (int r = 0; r < e->n; r++)
        if (call_of(e, op, r)->kind > REDUCE_SCATTER) return garbled(e, op, r);
    for (int r = 0; r < e->n; r++) {
        const Call *c = call_of(e, op, r);
        if (c->kind != first->kind || c->dtype != first->dtype || c->reduce != first->reduce || c->root != first->root)
            return differ(e, op, 0, r, 0, 0);
        tables |= c->tables;
    }
    for (int r = 0; r < e->n; r++)
        if (r != e->rank && !credible(e, op, r)) return garbled(e, op, r);
    if (!tables) {
        for (int r = 0; r < e->n; r++)
            if (call_of(e, op, r)->count != first->count) return differ(e, op, 0, r, 0, 0);
        return DONE;
    }
    for (int s = 0; s < e->n; s++)
        for (int d = 0; d < e->n; d++) {
            if (!gives(op, s) || !takes(op, d)) continue;
            uint64_t sent = given(e, op, s, d);
            uint64_t wanted = taken(e, op, d, op->kind == REDUCE_SCATTER ? d : s);
            if (sent != wanted) return differ(e, op, s, d, sent, wanted);
        }
    return DONE;
}

/* ---- reductions of equal tensors ---- */

typedef struct { uint64_t at, len; } Stretch; /* in elements */

static Stretch stretch(uint64_t start, uint64_t len, int n, int part, uint32_t itemsize) {
    uint64_t unit = ALIGN / itemsize ? ALIGN / itemsize : 1;
    uint64_t each = ((len + n - 1) / n + unit - 1) / unit * unit;
    uint64_t from = each * part < len ? each * part : len;
    uint64_t to = each * (part + 1) < len ? each * (part + 1) : len;
    return (Stretch){start + from, to - from};
}

static Stretch window_of(const Op *op, uint64_t t) {
    uint64_t at = t * op->piece;
    return (Stretch){at, op->count - at < op->piece ? op->count - at : op->piece};
}

/* Ticks are counted in 24 bits, so what is very large does not move in windows that are very small. */
static size_t window_for(Engine *e, uint64_t bytes) { return bytes / e->window < 1u << 20 ? e->window : WINDOW; }

static int keeps(Engine *e, const Op *op) { return op->kind != REDUCE || e->rank == op->root; }


static void combine(Engine *e, const Op *op, void *dst, const void *const *src, uint64_t count) {
    REDUCERS[op->dtype][op->reduce](&dst, 1, src, e->n, count);
}

static void reduce_inline(Engine *e, Op *op) {
    const void *src[MAX_RANKS];
    if (!keeps(e, op)) return;
    for (int r = 0; r < e->n; r++) src[r] = slot(e, r, op->seq);
    combine(e, op, op->out, src, op->count);
}

/* Each rank reduces one stretch of all tensors where they lie and writes it to all of them. */
static void reduce_direct(Engine *e, Op *op) {
    Stretch mine = stretch(0, op->count, e->n, e->rank, op->itemsize);
    void *tensor[MAX_RANKS];
    for (int r = 0; r < e->n; r++) {
        uint64_t offset = call_of(e, op, r)->offset - 1;
        tensor[r] = e->base[r] + offset + mine.at * op->itemsize;
    }
    REDUCERS[op->dtype][op->reduce](tensor, e->n, (const void *const *)tensor, e->n, mine.len);
}

/* Publish what the others reduce, reduce one stretch of the last window, collect those before it. */
static void two_phase_tick(Engine *e, Op *op, uint64_t t) {
    uint64_t each = op->piece * op->itemsize / e->n; /* room for one stretch in a window */
    if (t < op->windows) {
        Stretch w = window_of(op, t);
        for (int i = 1; i < e->n; i++) {
            int d = (e->rank + i) % e->n;
            Stretch s = stretch(w.at, w.len, e->n, d, op->itemsize);
            memcpy(published(e, e->rank, t) + d * each, op->in + s.at * op->itemsize, s.len * op->itemsize);
        }
    }
    if (t >= 1 && t <= op->windows) {
        Stretch w = window_of(op, t - 1), s = stretch(w.at, w.len, e->n, e->rank, op->itemsize);
        const void *src[MAX_RANKS];
        void *dst[] = {result(e, e->rank, t - 1), op->out + s.at * op->itemsize};
        for (int r = 0; r < e->n; r++)
            src[r] = r == e->rank ? op->in + s.at * op->itemsize : published(e, r, t - 1) + e->rank * each;
        REDUCERS[op->dtype][op->reduce](dst, keeps(e, op) ? 2 : 1, src, e->n, s.len);
    }
    if (t >= 2 && keeps(e, op)) {
        Stretch w = window_of(op, t - 2);
        for (int i = 1; i < e->n; i++) {
            int r = (e->rank + i) % e->n;
            Stretch s = stretch(w.at, w.len, e->n, r, op->itemsize);
            memcpy(op->out + s.at * op->itemsize, result(e, r, t - 2), s.len * op->itemsize);
        }
    }
}

static void plan_reduction(Engine *e, Op *op) {
    int direct = op->kind == ALL_REDUCE, small = 1;
    for (int r = 0; r < e->n; r++) {
        direct &= call_of(e, op, r)->offset != 0;
        small &= call_of(e, op, r)->small != 0;
    }
    if (small) {
        op->path = P_INLINE;
    } else if (direct) {
        op->path = P_DIRECT;
        op->ticks = op->exit_wait = 1;
    } else {
        uint64_t unit = (uint64_t)e->n * ALIGN;
        op->piece = window_for(e, own_bytes(op)) / unit * unit / op->itemsize;
        op->windows = (op->count + op->piece - 1) / op->piece;
        op->path = P_TWO_PHASE;
        op->ticks = op->windows + 2;
    }
}

/* ---- exchanges: everything that moves and, for reduce-scatter, reduces ---- */

static uint64_t before(Engine *e, const Op *op, int s, int d) { /* where block d begins in s's payload */
    uint64_t sum = 0;
    if (is_personal(op))
        for (int i = 0; i < d; i++) sum += given(e, op, s, i);
    return sum;
}

static void plan_exchange(Engine *e, Op *op) {
    op->path = P_EXCHANGE;
    uint64_t longest = 0; /* of what comes in windows, for one rank */
    int all_direct = 1;
    for (int s = 0; s < e->n; s++) all_direct &= call_of(e, op, s)->offset != 0;
    for (int s = 0; s < e->n; s++) {
        if (!gives(op, s) || call_of(e, op, s)->small) continue;
        if (call_of(e, op, s)->offset && (op->kind != REDUCE_SCATTER || all_direct)) {
            op->exit_wait = 1;
            continue;
        }
        for (int d = 0; d < e->n; d++)
            if (given(e, op, s, d) > longest) longest = given(e, op, s, d);
    }
    int shares = is_personal(op) ? e->n : 1; /* of a window, one for each receiver */
    op->piece = window_for(e, longest * shares) / shares;
    if (shares > 1) op->piece = op->piece / ALIGN * ALIGN;
    op->windows = (longest + op->piece - 1) / op->piece;
    op->moved = op->kind == REDUCE_SCATTER && !all_direct; /* direct payloads are not to be used */
    op->ticks = op->windows ? op->windows + 1 : op->exit_wait;
}

/* Where s's payload for this rank can be read as a whole, or NULL when it comes in windows. */
static const uint8_t *whole(Engine *e, const Op *op, int s) {
    const Call *c = call_of(e, op, s);
    if (s == e->rank) return is_personal(op) ? give_at(op, s) : op->in;
    if (c->small) return slot(e, s, op->seq) + before(e, op, s, e->rank);
    if (c->offset && !op->moved) return e->base[s] + c->offset - 1 + before(e, op, s, e->rank);
    return NULL;
}

static void take_whole(Engine *e, Op *op) {
    if (op->kind == REDUCE_SCATTER) {
        const void *src[MAX_RANKS];
        for (int s = 0; s < e->n; s++)
            if (!(src[s] = whole(e, op, s))) return;
        combine(e, op, op->out, src, op->count);
        return;
    }
    if (!takes(op, e->rank)) return;
    for (int i = 0; i < e->n; i++) {
        int s = (e->rank + i) % e->n;
        const uint8_t *from = gives(op, s) ? whole(e, op, s) : NULL;
        uint8_t *to = op->kind == BROADCAST || op->kind == SCATTER ? op->out : take_at(op, s);
        uint64_t bytes = given(e, op, s, e->rank);
        if (from && from != to && bytes) memcpy(to, from, bytes);
    }
}

/* What says that the memory of others, read where it lies, may not have held their payloads any more; 0: nothing. Whoever
 * gives up uses its memory again, but says so before. This rank has not told that it has read, so nobody has ended well. */
static int read_too_late(Engine *e, Op *op) {
    atomic_thread_fence(memory_order_acquire); /* the reads come first */
    return obstacle(e, op, failed(e), others(e));
}

static void publish_window(Engine *e, Op *op, uint64_t t) {
    const Call *c = call_of(e, op, e->rank);
    if (!gives(op, e->rank) || c->small || (c->offset && !op->moved)) return;
    for (int i = 1; i < e->n; i++) {
        int d = is_personal(op) ? (e->rank + i) % e->n : 0;
        uint64_t bytes = is_personal(op) ? give_bytes(op, d) : own_bytes(op), at = t * op->piece;
        const uint8_t *from = is_personal(op) ? give_at(op, d) : op->in;
        if (at < bytes)
            memcpy(published(e, e->rank, t) + d * op->piece, from + at, bytes - at < op->piece ? bytes - at : op->piece);
        if (!is_personal(op)) break;
    }
}

static void take_window(Engine *e, Op *op, uint64_t t) {
    uint64_t at = t * op->piece;
    const void *src[MAX_RANKS];
    uint64_t mine = is_personal(op) ? e->rank * op->piece : 0;
    if (!takes(op, e->rank)) return;
    for (int i = 0; i < e->n; i++) {
        int s = (e->rank + i) % e->n;
        src[s] = s == e->rank && op->kind == REDUCE_SCATTER ? give_at(op, s) + at : published(e, s, t) + mine;
        if (op->kind == REDUCE_SCATTER || s == e->rank || !gives(op, s) || whole(e, op, s)) continue;
        uint64_t bytes = given(e, op, s, e->rank);
        uint8_t *to = op->kind == BROADCAST || op->kind == SCATTER ? op->out : take_at(op, s);
        if (at < bytes) memcpy(to + at, src[s], bytes - at < op->piece ? bytes - at : op->piece);
    }
    if (op->kind == REDUCE_SCATTER && at < own_bytes(op)) {
        uint64_t left = own_bytes(op) - at;
        combine(e, op, op->out + at, src, (left < op->piece ? left : op->piece) / op->itemsize);
    }
}

static void exchange_tick(Engine *e, Op *op, uint64_t t) {
    if (t < op->windows) publish_window(e, op, t);
    if (t >= 1) take_window(e, op, t - 1);
}

/* ---- one step after another ---- */

static void alone(Op *op) { /* a group of one */
    uint8_t *to = op->dst ? op->dst[0] : op->out;
    const uint8_t *from = op->src ? op->src[0] : op->in;
    uint64_t bytes = op->take ? op->take[0] : own_bytes(op);
    if (to && from && to != from && bytes) memmove(to, from, bytes);
}

static int all_reached(Engine *e, Op *op, uint64_t tick) {
    uint64_t target = op->seq << 24 | tick;
    for (; op->awaited < (uint32_t)e->n; op->awaited++) {
        if ((int)op->awaited == e->rank) continue;
        uint64_t theirs = atomic_load_explicit(&control(e, op->awaited)->progress, memory_order_acquire);
        if (theirs < target) return 0;
        /* they cannot be further than waiting for us at the next operation */
        if (theirs > ((op->seq + 1) << 24 | 1)) e->bad_words |= (uint64_t)1 << op->awaited;
    }
    op->awaited = 0;
    return 1;
}

/* Whether a call that is to begin can be described at all. */
static int possible(const Engine *e, const Op *op) {
    if (op->kind > RECV || op->itemsize < 1 || op->itemsize > 16) return 0;
    if (op->root >= e->n || op->root < -1 || op->count > (uint64_t)1 << 58) return 0;
    int reduces = op->kind == ALL_REDUCE || op->kind == REDUCE || op->kind == REDUCE_SCATTER;
    int rooted = op->kind == REDUCE || op->kind == BROADCAST || op->kind == GATHER || op->kind == SCATTER || op->kind == SEND;
    if (rooted && op->root < 0) return 0;
    return !reduces || (op->dtype < T_COUNT && op->reduce < R_COUNT && REDUCERS[op->dtype][op->reduce]);
}

static uint64_t next_tick(const Op *op) { return op->entered ? op->tick + 1 : 1; }

/* As far as it goes without waiting: DONE, AGAIN or a verdict. */
static int coll_step(Engine *e, Op *op) {
    if (!op->started) {
        if (e->n == 1) return alone(op), DONE;
        int status = obstacle(e, op, failed(e), 0); /* a rank that comes late must not find it all well */
        if (status) return status;
        enter(e, op);
        op->started = 1;
    }
    if (!op->entered) {
        if (!all_reached(e, op, 1)) return AGAIN;
        if (e->bad_words) return fault(e, op, GARBLED, e->rank, e->bad_words);
        int verdict = agree(e, op);
        if (verdict != DONE) return verdict;
        op->entered = 1;
        if (op->kind == ALL_REDUCE || op->kind == REDUCE) plan_reduction(e, op);
        else plan_exchange(e, op);
        if (op->path == P_INLINE) reduce_inline(e, op);
        if (op->path == P_EXCHANGE) take_whole(e, op);
        verdict = op->path == P_EXCHANGE && op->exit_wait ? read_too_late(e, op) : DONE;
        if (verdict != DONE) return verdict;
    }
    while (op->tick < op->ticks) {
        if (op->tick > 0 && !all_reached(e, op, op->tick + 1)) return AGAIN;
        if (e->bad_words) return fault(e, op, GARBLED, e->rank, e->bad_words);
        if (op->path == P_DIRECT) reduce_direct(e, op);
        if (op->path == P_TWO_PHASE) two_phase_tick(e, op, op->tick);
        if (op->path == P_EXCHANGE) exchange_tick(e, op, op->tick);
        op->tick++;
        advance(e, op->seq, op->tick + 1);
    }
    if (op->exit_wait && !all_reached(e, op, op->ticks + 1)) return AGAIN;
    return DONE;
}

static uint64_t lagging(Engine *e, uint64_t target) {
    uint64_t mask = 0;
    for (int r = 0; r < e->n; r++)
        if (r != e->rank && !reached(e, r, target)) mask |= (uint64_t)1 << r;
    return mask;
}

/* Until the awaited rank moves on: DONE; AGAIN when `until` came first; or a fault. */
static int sleep_on(Engine *e, Op *op, int64_t until, int spin) {
    Control *c = control(e, op->awaited);
    uint64_t target = op->seq << 24 | next_tick(op);
    int64_t start = now_ns(), now = start, slice = 1000000;
    for (int i = 0; spin && i < e->spins; i++, relax())
        if (reached(e, op->awaited, target)) return DONE;
    /* The awaited rank may need this very core. While both stay runnable the kernel moves one of them
     * to an idle core; it does nothing for ranks that take turns sleeping. */
    for (int i = 0; spin && (i < e->yields || now - start < e->yield_ns); i++) {
        sched_yield();
        if (reached(e, op->awaited, target)) return DONE;
        now = now_ns();
    }
    for (;;) {
        atomic_fetch_add(&c->sleepers, 1); /* see advance */
        uint32_t seen = (uint32_t)atomic_load(&c->progress);
        int64_t limit = op->deadline < until ? op->deadline : until;
        int64_t ns = limit - now < slice ? limit - now : slice;
        if (!reached(e, op->awaited, target) && ns > 0) futex_wait(low_half(&c->progress), seen, ns);
        atomic_fetch_sub(&c->sleepers, 1);
        if (reached(e, op->awaited, target)) return DONE;
        /* In this order: a rank that fails when all have come has ended this call, and spoils the next. */
        uint64_t failing = failed(e), late = lagging(e, target);
        if (!late) return DONE;
        int status = obstacle(e, op, failing, late);
        if (status) return status;
        uint64_t lost = dead(e, late);
        if (lost && (lost &= lagging(e, target))) {
            status = obstacle(e, op, failed(e), lost); /* it may have left in peace just before */
            return status ? status : fault(e, op, PEER_DIED, e->rank, lost);
        }
        now = now_ns();
        if (now >= op->deadline) {
            late = lagging(e, target);
            return late ? fault(e, op, TIMED_OUT, e->rank, late) : DONE;
        }
        if (now >= until) return AGAIN;
        if (slice < 8000000) slice *= 2;
    }
}

/* Drives the oldest collective until it is done or `until` has come (0: never waits). */
static int64_t coll_turn(Lane *l, int64_t until, int spin) {
    Op *op = l->first;
    int status;
    while ((status = coll_step(l->engine, op)) == AGAIN) {
        if (!until) return AGAIN;
        status = sleep_on(l->engine, op, until, spin);
        if (status == AGAIN) return AGAIN;
        if (status != DONE) break;
    }
    if (status < 0 && status != MISMATCH && op->started && op->kind == ALL_REDUCE && op->in == op->out)
        if (offset_in_segment(l->engine, op->in, own_bytes(op))) set_apart(l->engine, op->in, own_bytes(op));
    finish(l, op, status);
    return DONE;
}

#endif
