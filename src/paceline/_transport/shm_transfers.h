/* Point to point: messages through channels, matched by sender and tag.
 *
 * A channel is a ring of bytes from one rank to another: a header, then the payload. The receiver
 * matches headers with what was asked for, in the order of asking; a message that nobody asked for is
 * put aside once somebody waits for another one behind it.
 */
#ifndef PACELINE_SHM_TRANSFERS_H
#define PACELINE_SHM_TRANSFERS_H

#include "shm_core.h"

#define LONGEST 8000000 /* ns between two looks at which transfers cannot go on */

static void ring_write(Channel *c, uint64_t at, const void *from, uint64_t bytes) {
    uint64_t i = at % RING, first = RING - i < bytes ? RING - i : bytes;
    memcpy(c->ring + i, from, first);
    memcpy(c->ring, (const uint8_t *)from + first, bytes - first);
}

static void ring_read(Channel *c, uint64_t at, void *to, uint64_t bytes) {
    uint64_t i = at % RING, first = RING - i < bytes ? RING - i : bytes;
    memcpy(to, c->ring + i, first);
    memcpy((uint8_t *)to + first, c->ring, bytes - first);
}

static void unlink_op(Op **list, Op *op) {
    for (Op **p = list; *p; p = &(*p)->next)
        if (*p == op) {
            *p = op->next;
            return;
        }
}

static void append_op(Op **list, Op *op) {
    while (*list) list = &(*list)->next;
    op->next = NULL;
    *list = op;
}

static void settle(Lane *l, Op **list, Op *op, int status) {
    unlink_op(list, op);
    op->next = NULL;
    l->engine->settled++;
    finish(l, op, status);
}

static int mismatched(Op *op, int from, int to, uint64_t sent, uint64_t wanted, uint32_t sent_dtype, uint32_t wanted_dtype) {
    op->side_a = from;
    op->side_b = to;
    op->bytes_a = sent;
    op->bytes_b = wanted;
    op->call_a = (Call){.kind = SEND, .dtype = sent_dtype};
    op->call_b = (Call){.kind = RECV, .dtype = wanted_dtype};
    return MISMATCH;
}

static int refused(Engine *e, Op *op, int to) { /* did `to` turn down an earlier message of ours? */
    Channel *c = channel(e, e->rank, to);
    uint64_t number = atomic_load_explicit(&c->refused, memory_order_acquire);
    if (number == e->refused_seen[to]) return 0;
    e->refused_seen[to] = number;
    return mismatched(op, e->rank, to, c->refused_sent, c->refused_wanted, c->refused_sent_dtype, c->refused_wanted_dtype);
}

static int fits(Engine *e, Op *op, int from, const Header *h) {
    if (h->bytes == own_bytes(op) && h->dtype == op->dtype) return 1;
    Channel *c = channel(e, from, e->rank);
    c->refused_sent = h->bytes;
    c->refused_wanted = own_bytes(op);
    c->refused_sent_dtype = h->dtype;
    c->refused_wanted_dtype = op->dtype;
    atomic_store_explicit(&c->refused, h->number + 1, memory_order_release);
    mismatched(op, from, e->rank, h->bytes, own_bytes(op), h->dtype, op->dtype);
    return 0;
}

static int send_step(Engine *e, Op *op) {
    Channel *c = channel(e, e->rank, op->root);
    uint64_t head = e->head[op->root];
    uint64_t used = head - atomic_load_explicit(&c->tail, memory_order_acquire);
    if (used > RING) return e->bad_channels |= (uint64_t)1 << op->root, 0;
    uint64_t room = RING - used, before_ = head;
    if (!op->started) {
        if (room < sizeof(Header)) return 0;
        Header h = {op->tag, own_bytes(op), ++e->sent[op->root], op->dtype, 0};
        ring_write(c, head, &h, sizeof h);
        head += sizeof h;
        room -= sizeof h;
        op->started = 1;
    }
    uint64_t bytes = own_bytes(op) - op->moved;
    if (bytes > room) bytes = room;
    if (bytes > RING / 4) bytes = RING / 4; /* the receiver starts on it while the rest is written */
    if (bytes) ring_write(c, head, op->in + op->moved, bytes);
    op->moved += bytes;
    head += bytes;
    if (head == before_ && op->moved < own_bytes(op)) return 0;
    e->head[op->root] = head;
    e->moved_to |= (uint64_t)1 << op->root;
    atomic_store_explicit(&c->head, head, memory_order_release);
    ring_bell(e, op->root);
    return 1;
}

static Op *wanting(Engine *e, int from, const Header *h) { /* the oldest receive that this message is for */
    for (Op *op = e->receiving; op; op = op->next)
        if ((op->root == from || op->root < 0) && op->tag == h->tag && !op->started) return op;
    return NULL;
}

static int somebody_waits(Engine *e, int from) {
    for (Op *op = e->receiving; op; op = op->next)
        if ((op->root == from || op->root < 0) && !op->started) return 1;
    return 0;
}

static int from_stash(Lane *l, Engine *e, Op *op) {
    for (int from = 0; from < e->n; from++) {
        if (op->root >= 0 && op->root != from) continue;
        for (Stash **p = &e->stash[from]; *p; p = &(*p)->next) {
            Stash *s = *p;
            if (s->header.tag != op->tag) continue;
            int good = fits(e, op, from, &s->header);
            if (good) memcpy(op->out, s->data, s->header.bytes);
            op->source = from;
            *p = s->next;
            free(s);
            settle(l, &e->receiving, op, good ? DONE : MISMATCH);
            return 1;
        }
    }
    return 0;
}

/* Files a message that is whole now. A receive that was asked for while it came has not found it: no message
 * that was filed before is for a receive that waits, so that the oldest one gets this one. */
static void keep(Lane *l, Engine *e, int from, Stash *stash) {
    Stash **p = &e->stash[from];
    while (*p) p = &(*p)->next;
    stash->next = NULL;
    *p = stash;
    Op *op = wanting(e, from, &stash->header);
    if (op) from_stash(l, e, op);
}

/* Decides where the message at the head of the channel goes; 0 when nobody wants it yet. */
static int direct_message(Lane *l, Engine *e, int from, Incoming *in) {
    Op *op = wanting(e, from, &in->header);
    if (op && fits(e, op, from, &in->header)) {
        op->started = 1;
        op->source = from;
        in->op = op;
        return 1;
    }
    if (op) {
        in->drop = 1;
        settle(l, &e->receiving, op, MISMATCH);
        return 1;
    }
    if (!somebody_waits(e, from)) return 0;
    in->stash = malloc(sizeof(Stash) + in->header.bytes);
    if (in->stash) in->stash->header = in->header;
    else e->no_room = 1;
    return in->stash != NULL;
}

static int recv_step(Lane *l, Engine *e, int from) {
    Channel *c = channel(e, from, e->rank);
    Incoming *in = &e->incoming[from];
    uint64_t tail = e->tail[from];
    uint64_t ready = atomic_load_explicit(&c->head, memory_order_acquire) - tail;
    if (ready > RING) return e->bad_channels |= (uint64_t)1 << from, 0;
    if (!in->open) {
        if (ready < sizeof(Header)) return 0;
        *in = (Incoming){.open = 1};
        ring_read(c, tail, &in->header, sizeof(Header));
        if (in->header.bytes >> 62 || in->header.dtype > 255) return e->bad_channels |= (uint64_t)1 << from, 0;
        tail += sizeof(Header);
        ready -= sizeof(Header);
        e->tail[from] = tail;
        atomic_store_explicit(&c->tail, tail, memory_order_release);
    }
    if (!in->op && !in->stash && !in->drop && !direct_message(l, e, from, in)) return 0;
    uint64_t bytes = in->header.bytes - in->moved;
    if (bytes > ready) bytes = ready;
    uint8_t *to = in->op ? in->op->out : in->stash ? in->stash->data : NULL;
    if (to && bytes) ring_read(c, tail, to + in->moved, bytes);
    in->moved += bytes;
    e->tail[from] = tail + bytes;
    atomic_store_explicit(&c->tail, tail + bytes, memory_order_release);
    if (bytes) {
        e->moved_from |= (uint64_t)1 << from;
        ring_bell(e, from);
    }
    if (in->moved < in->header.bytes) return bytes > 0;
    if (in->op) settle(l, &e->receiving, in->op, DONE);
    if (in->stash) keep(l, e, from, in->stash);
    in->open = 0;
    return 1;
}

static void absorb(Lane *l, Engine *e) { /* takes over what was submitted since the last turn */
    for (;;) {
        pthread_mutex_lock(&l->mutex);
        Op *op = l->first;
        if (op) {
            l->first = op->next;
            if (!l->first) l->last = NULL;
        }
        pthread_mutex_unlock(&l->mutex);
        if (!op) return;
        Op **list = op->kind == SEND ? &e->sending : &e->receiving;
        append_op(list, op);
        if (op->root >= 0 && refused(e, op, op->root)) settle(l, list, op, MISMATCH);
        else if (op->kind == RECV) from_stash(l, e, op);
    }
}

static int pump_step(Lane *l, Engine *e) {
    int moved = 0;
    uint64_t busy = 0; /* only the oldest send to a rank moves */
    for (Op *op = e->sending, *next; op; op = next) {
        next = op->next;
        if (busy >> op->root & 1) continue;
        busy |= (uint64_t)1 << op->root;
        moved |= send_step(e, op);
        if (op->started && op->moved == own_bytes(op)) settle(l, &e->sending, op, DONE);
    }
    for (int from = 0; from < e->n; from++)
        if (from != e->rank && e->receiving) moved |= recv_step(l, e, from);
    return moved;
}

static void forget(Engine *e, Op *op) { /* a receive that ends early must not be written to later */
    for (int r = 0; r < e->n; r++)
        if (e->incoming[r].open && e->incoming[r].op == op) {
            e->incoming[r].op = NULL;
            e->incoming[r].drop = 1;
        }
}

static uint64_t away(Engine *e, uint64_t among) { /* those that left in peace */
    uint64_t mask = 0;
    for (int r = 0; r < e->n; r++)
        if (among >> r & 1 && atomic_load(&control(e, r)->fault) == LEFT) mask |= (uint64_t)1 << r;
    return mask;
}

static int goes_on(Engine *e, const Op *op) { /* did it, or one that it is queued behind, move since the last look? */
    if (op->kind == SEND) return e->moved_to >> op->root & 1;
    return op->started && e->moved_from >> op->source & 1;
}

/* What ends a transfer for good, or 0. `failing` and `lost`: those that were so before this rank heard everybody out. */
static int transfer_fault(Engine *e, Op *op, uint64_t failing, uint64_t lost, int64_t now) {
    uint64_t peers = op->root >= 0 ? (uint64_t)1 << op->root : others(e);
    int alone_now = away(e, peers) == peers; /* one sender left is enough to wait for any */
    int status = obstacle(e, op, failing, alone_now ? peers : 0);
    if (status) return status;
    lost &= peers & ~away(e, peers);
    if (lost) return fault(e, op, PEER_DIED, e->rank, lost);
    if (now < op->deadline || goes_on(e, op)) return 0;
    op->culprits = peers;
    op->reporter = e->rank;
    /* half a message in the channel would garble the next one */
    return op->kind == SEND && op->started ? fault(e, op, TIMED_OUT, e->rank, peers) : TIMED_OUT;
}

/* Takes what is in the channels now, and not what comes meanwhile, which may never end. */
static void hear_out(Lane *l, Engine *e) {
    for (int from = 0; from < e->n; from++) {
        if (from == e->rank) continue;
        uint64_t ready = atomic_load_explicit(&channel(e, from, e->rank)->head, memory_order_acquire) - e->tail[from];
        uint64_t end = e->tail[from] + (ready < RING ? ready : RING);
        while (e->receiving && (int64_t)(end - e->tail[from]) > 0 && recv_step(l, e, from)) continue;
    }
}

/* Ends all transfers when a channel cannot be believed any more, or what comes cannot be kept. */
static void give_up(Lane *l, Engine *e) {
    Op **lists[] = {&e->sending, &e->receiving};
    for (int i = 0; i < 2; i++)
        while (*lists[i]) {
            Op *op = *lists[i];
            int status = e->bad_channels ? GARBLED : NO_MEMORY;
            fault(e, op, status, e->rank, e->bad_channels ? e->bad_channels : (uint64_t)1 << e->rank);
            forget(e, op);
            settle(l, lists[i], op, status);
        }
}

/* Ends the transfers that cannot go on; 1 when something changed. */
static int weed(Lane *l, Engine *e, int64_t now) {
    Op **lists[] = {&e->sending, &e->receiving};
    uint64_t settled = e->settled, lost = dead(e, others(e)), failing = failed(e);
    hear_out(l, e); /* what was sent before the trouble counts */
    for (int i = 0; i < 2; i++)
        for (Op *op = *lists[i]; op; op = op->next) {
            int status = transfer_fault(e, op, failing, lost, now);
            if (!status) continue;
            forget(e, op);
            settle(l, lists[i], op, status);
            return 1;
        }
    e->weeded = now;
    e->moved_to = e->moved_from = 0;
    return e->settled != settled;
}

/* Moves transfers until some are done or `until` has come (0: never waits). */
static int64_t pump_turn(Lane *l, int64_t until, int spin) {
    Engine *e = l->engine;
    Control *me = control(e, e->rank);
    int64_t start = now_ns(), now = start, slice = 1000000;
    if (!e->sending && !e->receiving) e->weeded = start; /* what begins now is not looked at for a while */
    for (uint64_t settled = e->settled;; now = now_ns()) {
        uint32_t heard = atomic_load(&me->bell);
        absorb(l, e);
        int moved = pump_step(l, e);
        if (now - e->weeded >= LONGEST) weed(l, e, now); /* others may move for ever */
        if (e->bad_channels || e->no_room) give_up(l, e);
        if (e->settled != settled || (!e->sending && !e->receiving)) return DONE;
        if (moved) continue;
        if (!until) return AGAIN;
        if (spin && now - start < e->yield_ns) {
            for (int i = 0; i < e->spins && atomic_load(&me->bell) == heard; i++) relax();
            sched_yield();
            continue;
        }
        atomic_fetch_add(&me->bell_sleepers, 1);
        int64_t ns = until - now < slice ? until - now : slice;
        if (atomic_load(&me->bell) == heard && ns > 0) futex_wait(&me->bell, heard, ns);
        atomic_fetch_sub(&me->bell_sleepers, 1);
        if (atomic_load(&me->bell) != heard) continue;
        now = now_ns();
        if (weed(l, e, now)) continue;
        if (now >= until) return AGAIN;
        if (slice < LONGEST) slice *= 2;
    }
}

#endif
