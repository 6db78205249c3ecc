/* Drives the C engine with threads as ranks, for the sanitizers of the compiler (`make sanitize`).
 *
 * Every rank is a thread with an engine of its own; all share one mapping of each segment, so that a
 * sanitizer sees that it is the same memory. Segments lie between pages that nobody may touch, and
 * tensors are from malloc, so that a step out of either is noticed. Checks the numbers, too.
 */
#include "../../../src/paceline/_transport/shm.c"

#include <stdio.h>
#include <sys/eventfd.h>

#define HEAP ((uint64_t)8 << 20)
#define GUARD ((uint64_t)1 << 20)
#define CHECK(what, ...)                                                                           \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "line %d: %s: ", __LINE__, #what);                                     \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct World World;
typedef struct {
    World *world;
    int rank;
    Engine *engine;
    uint64_t used; /* of the heap */
    unsigned seed;
} Rank;

struct World {
    int n, died[MAX_RANKS];
    uint8_t *base[MAX_RANKS];
    uint64_t segment;
    Rank ranks[MAX_RANKS];
    pthread_barrier_t together;
};

static void open_world(World *w, int n, uint64_t window) {
    memset(w, 0, sizeof *w);
    w->n = n;
    w->segment = pl_heap_at(n) + HEAP;
    for (int r = 0; r < n; r++) {
        uint8_t *all = mmap(NULL, w->segment + 2 * GUARD, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(all != MAP_FAILED, "no room for rank %d", r);
        w->base[r] = all + GUARD;
        CHECK(!mprotect(w->base[r], w->segment, PROT_READ | PROT_WRITE), "rank %d", r);
        w->died[r] = eventfd(0, EFD_CLOEXEC);
    }
    pthread_barrier_init(&w->together, NULL, n);
    for (int r = 0; r < n; r++) {
        int watch[MAX_RANKS];
        for (int i = 0; i < n; i++) watch[i] = i == r ? -1 : w->died[i];
        w->ranks[r] = (Rank){.world = w, .rank = r, .seed = (unsigned)r + 1};
        w->ranks[r].engine = pl_open(r, n, (void *const *)w->base, watch, w->segment, 2, window ? window : pl_window(n, 2, 0));
        CHECK(w->ranks[r].engine, "rank %d", r);
    }
}

static void close_world(World *w) {
    for (int r = 0; r < w->n; r++) {
        CHECK(pl_close(w->ranks[r].engine), "rank %d", r);
        pl_free(w->ranks[r].engine);
    }
    for (int r = 0; r < w->n; r++) {
        munmap(w->base[r] - GUARD, w->segment + 2 * GUARD);
        close(w->died[r]);
    }
    pthread_barrier_destroy(&w->together);
}

static void on_all_ranks(World *w, void *(*body)(void *)) {
    pthread_t threads[MAX_RANKS];
    for (int r = 0; r < w->n; r++) CHECK(!pthread_create(&threads[r], NULL, body, &w->ranks[r]), "rank %d", r);
    for (int r = 0; r < w->n; r++) pthread_join(threads[r], NULL);
}

/* ---- calls ---- */

static const uint32_t ITEM[T_COUNT] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 2, 4, 8};

static int finish_op(Op *op, int status) {
    while (status == AGAIN) status = pl_wait(op, 1000000);
    return status;
}

static int call(Rank *me, Op *op, int mode) { /* mode 3: quietly, moved along by poking */
    op->engine = me->engine;
    op->mode = mode == 3 ? 2 : mode;
    op->patience_ns = 1000000;
    if (!op->timeout_ns) op->timeout_ns = 30000000000;
    int status = pl_start(op);
    while (mode == 3 && !pl_test(op)) pl_poke(me->engine);
    return finish_op(op, status);
}

static uint8_t *room(Rank *me, uint64_t bytes, int shared) {
    if (!shared) return malloc(bytes ? bytes : 1);
    uint64_t at = (me->used + 127) / 128 * 128;
    CHECK(at + bytes <= HEAP, "the heap is too small for %llu bytes", (unsigned long long)bytes);
    me->used = at + bytes;
    return me->world->base[me->rank] + pl_heap_at(me->world->n) + at;
}

static void drop(Rank *me, uint8_t *p, int shared) {
    (void)me;
    if (!shared) free(p);
}

/* Small numbers that every type has, different by rank and place. */
static int number(int rank, uint64_t i) { return (int)((i * 7 + (uint64_t)rank * 3) % 5) + 1; }

static void put(uint8_t *p, uint32_t type, uint64_t i, double x) {
    switch (type) {
    case T_U8: case T_BOOL: p[i] = (uint8_t)x; break;
    case T_I8: ((int8_t *)p)[i] = (int8_t)x; break;
    case T_I16: ((int16_t *)p)[i] = (int16_t)x; break;
    case T_U16: ((uint16_t *)p)[i] = (uint16_t)x; break;
    case T_I32: ((int32_t *)p)[i] = (int32_t)x; break;
    case T_U32: ((uint32_t *)p)[i] = (uint32_t)x; break;
    case T_I64: ((int64_t *)p)[i] = (int64_t)x; break;
    case T_U64: ((uint64_t *)p)[i] = (uint64_t)x; break;
    case T_F16: ((half_t *)p)[i] = f32_to_f16((float)x); break;
    case T_BF16: ((uint16_t *)p)[i] = f32_to_bf16((float)x); break;
    case T_F32: ((float *)p)[i] = (float)x; break;
    default: ((double *)p)[i] = x;
    }
}

static double get(const uint8_t *p, uint32_t type, uint64_t i) {
    switch (type) {
    case T_U8: case T_BOOL: return p[i];
    case T_I8: return ((const int8_t *)p)[i];
    case T_I16: return ((const int16_t *)p)[i];
    case T_U16: return ((const uint16_t *)p)[i];
    case T_I32: return ((const int32_t *)p)[i];
    case T_U32: return ((const uint32_t *)p)[i];
    case T_I64: return (double)((const int64_t *)p)[i];
    case T_U64: return (double)((const uint64_t *)p)[i];
    case T_F16: return f16_to_f32(((const half_t *)p)[i]);
    case T_BF16: return bf16_to_f32(((const uint16_t *)p)[i]);
    case T_F32: return ((const float *)p)[i];
    default: return ((const double *)p)[i];
    }
}

static void fill(uint8_t *p, uint32_t type, uint64_t count, int rank) {
    for (uint64_t i = 0; i < count; i++) put(p, type, i, type == T_BOOL ? number(rank, i) & 1 : number(rank, i));
}

static double expected(int n, uint32_t type, uint32_t reduce, uint64_t i) {
    int64_t x = type == T_BOOL ? number(0, i) & 1 : number(0, i);
    for (int r = 1; r < n; r++) {
        int64_t y = type == T_BOOL ? number(r, i) & 1 : number(r, i);
        switch (reduce) {
        case R_SUM: case R_AVG: x = type == T_BOOL ? x | y : x + y; break;
        case R_PRODUCT: x = x * y; break;
        case R_MIN: x = x < y ? x : y; break;
        case R_MAX: x = x > y ? x : y; break;
        case R_BAND: x &= y; break;
        case R_BOR: x |= y; break;
        default: x ^= y;
        }
    }
    if (reduce != R_AVG) return (double)x;
    int is_float = type == T_F16 || type == T_BF16 || type == T_F32 || type == T_F64;
    if (!is_float) return (double)(x / n);
    return type == T_F64 ? (double)x / n : (double)((float)x / (float)n);
}

static int close_enough(double found, double wanted, uint32_t type) {
    double off = found > wanted ? found - wanted : wanted - found;
    return off <= (type == T_BF16 ? 0.01 : type == T_F16 ? 0.001 : 0) * wanted;
}

/* ---- everything that goes well ---- */

static void all_reduce(Rank *me, uint32_t type, uint32_t reduce, uint64_t count, int shared, int mode, int kind) {
    uint64_t used = me->used;
    uint8_t *tensor = room(me, count * ITEM[type], shared);
    fill(tensor, type, count, me->rank);
    Op op = {.kind = kind, .dtype = type, .reduce = reduce, .itemsize = ITEM[type], .root = kind == REDUCE ? 0 : -1,
             .count = count, .in = tensor, .out = tensor};
    CHECK(call(me, &op, mode) == DONE, "status %d", op.status);
    for (uint64_t i = 0; i < count && (kind == ALL_REDUCE || me->rank == 0); i++) {
        double found = get(tensor, type, i), wanted = expected(me->world->n, type, reduce, i);
        CHECK(close_enough(found, wanted, type), "type %u reduction %u count %llu at %llu: %g, not %g", type, reduce,
              (unsigned long long)count, (unsigned long long)i, found, wanted);
    }
    drop(me, tensor, shared);
    me->used = used;
}

static void reduce_scatter(Rank *me, uint64_t count, int shared) {
    int n = me->world->n;
    uint64_t used = me->used;
    uint8_t *all = room(me, count * n * 4, shared), *mine = malloc(count * 4 + 1);
    fill(all, T_F32, count * n, me->rank);
    Op op = {.kind = REDUCE_SCATTER, .dtype = T_F32, .itemsize = 4, .root = -1, .count = count, .in = all, .out = mine};
    CHECK(call(me, &op, 0) == DONE, "status %d", op.status);
    for (uint64_t i = 0; i < count; i++)
        CHECK(get(mine, T_F32, i) == expected(n, T_F32, R_SUM, me->rank * count + i), "at %llu", (unsigned long long)i);
    free(mine);
    drop(me, all, shared);
    me->used = used;
}

static void moves(Rank *me, uint64_t count, int shared) {
    int n = me->world->n;
    uint64_t used = me->used;
    uint8_t *one = room(me, count * 4, shared), *all = malloc(count * n * 4 + 1), *part = malloc(count * 4 + 1);
    Op broadcast = {.kind = BROADCAST, .dtype = T_I32, .itemsize = 4, .root = n - 1, .count = count, .in = one, .out = one};
    fill(one, T_I32, count, me->rank);
    CHECK(call(me, &broadcast, 0) == DONE, "status %d", broadcast.status);
    for (uint64_t i = 0; i < count; i++) CHECK(get(one, T_I32, i) == number(n - 1, i), "broadcast");
    Op gather = {.kind = ALL_GATHER, .dtype = T_I32, .itemsize = 4, .root = -1, .count = count, .in = one, .out = all};
    fill(one, T_I32, count, me->rank);
    CHECK(call(me, &gather, 1) == DONE, "status %d", gather.status);
    for (uint64_t i = 0; i < count * n; i++) CHECK(get(all, T_I32, i) == number(i / count, i % count), "all_gather");
    Op swap = {.kind = ALL_TO_ALL, .dtype = T_I32, .itemsize = 4, .root = -1, .count = count / n, .in = one, .out = part};
    CHECK(call(me, &swap, 0) == DONE, "status %d", swap.status);
    for (uint64_t i = 0, each = count / n; i < each * n; i++)
        CHECK(get(part, T_I32, i) == number(i / each, me->rank * each + i % each), "all_to_all");
    drop(me, one, shared);
    free(all);
    free(part);
    me->used = used;
}

/* Unequal parts: rank s has s + d + 1 elements for rank d. */
static void uneven(Rank *me, uint64_t times) {
    int n = me->world->n, r = me->rank;
    const uint8_t *src[MAX_RANKS];
    uint8_t *dst[MAX_RANKS];
    uint64_t give[MAX_RANKS], take[MAX_RANKS];
    for (int o = 0; o < n; o++) {
        give[o] = take[o] = (uint64_t)(r + o + 1) * times;
        uint8_t *block = malloc(give[o]);
        memset(block, 16 * r + o, give[o]);
        src[o] = block;
        dst[o] = malloc(take[o]);
    }
    Op op = {.kind = ALL_TO_ALL, .dtype = T_U8, .itemsize = 1, .root = -1, .src = src, .dst = dst, .give = give, .take = take};
    CHECK(call(me, &op, 0) == DONE, "status %d", op.status);
    for (int o = 0; o < n; o++) {
        CHECK(dst[o][0] == 16 * o + r && dst[o][take[o] - 1] == 16 * o + r, "from %d: %d", o, dst[o][0]);
        free((void *)src[o]);
        free(dst[o]);
    }
}

static void messages(Rank *me, uint64_t bytes) {
    int n = me->world->n, next = (me->rank + 1) % n, last = (me->rank + n - 1) % n;
    if (n == 1) return;
    uint8_t *sent[2], *got[2];
    Op send[2], recv[2];
    for (int i = 0; i < 2; i++) {
        sent[i] = malloc(bytes + 1);
        got[i] = malloc(bytes + 1);
        memset(sent[i], me->rank + 10 * i, bytes + 1);
        send[i] = (Op){.kind = SEND, .dtype = T_U8, .itemsize = 1, .root = next, .tag = i, .count = bytes, .in = sent[i],
                       .engine = me->engine, .mode = 1, .timeout_ns = 30000000000};
        CHECK(pl_start(&send[i]) == AGAIN, "status %d", send[i].status);
    }
    for (int i = 1; i >= 0; i--) { /* the other way round: the first is put aside */
        recv[i] = (Op){.kind = RECV, .dtype = T_U8, .itemsize = 1, .root = i ? last : -1, .tag = i, .count = bytes, .out = got[i]};
        CHECK(call(me, &recv[i], 0) == DONE, "status %d", recv[i].status);
        CHECK(!bytes || (got[i][0] == last + 10 * i && got[i][bytes - 1] == last + 10 * i), "%d", got[i][0]);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(finish_op(&send[i], AGAIN) == DONE, "status %d", send[i].status);
        free(sent[i]);
        free(got[i]);
    }
}

static void misfits(Rank *me) { /* calls that do not fit are an error everywhere, and the group goes on */
    int n = me->world->n;
    if (n == 1) return;
    float x[8] = {0};
    Op op = {.kind = ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = -1, .count = 4 + (me->rank == 1), .in = (uint8_t *)x,
             .out = (uint8_t *)x};
    CHECK(call(me, &op, 0) == MISMATCH, "status %d", op.status);
    Op bad = {.kind = 99, .itemsize = 4, .engine = me->engine};
    CHECK(pl_start(&bad) == BAD_CALL, "status %d", bad.status);
    if (me->rank == 0) {
        Op send = {.kind = SEND, .dtype = T_F32, .itemsize = 4, .root = 1, .tag = 7, .count = 4, .in = (uint8_t *)x};
        CHECK(call(me, &send, 0) == DONE, "status %d", send.status);
    } else if (me->rank == 1) {
        Op recv = {.kind = RECV, .dtype = T_F32, .itemsize = 4, .root = 0, .tag = 7, .count = 5, .out = (uint8_t *)x};
        CHECK(call(me, &recv, 0) == MISMATCH, "status %d", recv.status);
    }
    Op barrier = {.kind = BARRIER, .itemsize = 1, .root = -1};
    CHECK(call(me, &barrier, 0) == DONE, "status %d", barrier.status);
}

static const uint64_t SIZES[] = {0, 1, 15, 16, 17, 1000, 9000, 40000, 140001};

static void *go_well(void *arg) {
    Rank *me = arg;
    for (uint32_t type = 0; type < T_COUNT; type++)
        for (uint32_t reduce = 0; reduce < R_COUNT; reduce++)
            for (int shared = 0; shared < 2 && pl_reduces(type, reduce); shared++)
                all_reduce(me, type, reduce, shared ? 5003 : 67, shared, reduce % 4, ALL_REDUCE);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
        for (int shared = 0; shared < 2; shared++) {
            all_reduce(me, T_F32, R_SUM, SIZES[i], shared, (int)i % 4, ALL_REDUCE);
            all_reduce(me, T_F32, R_MAX, SIZES[i], shared, 0, REDUCE);
            reduce_scatter(me, SIZES[i], shared);
            moves(me, SIZES[i], shared);
        }
    for (uint64_t times = 1; times <= 40000; times *= 200) uneven(me, times);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) messages(me, SIZES[i] * 4);
    misfits(me);
    return NULL;
}

/* ---- what goes wrong ---- */

static void *be_aborted(void *arg) { /* rank 1 aborts while the others wait */
    Rank *me = arg;
    float x[4] = {0};
    Op barrier = {.kind = BARRIER, .itemsize = 1, .root = -1};
    CHECK(call(me, &barrier, 0) == DONE, "status %d", barrier.status);
    if (me->rank == 1) {
        pl_abort(me->engine);
        return NULL;
    }
    Op op = {.kind = me->rank ? RECV : ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = me->rank ? 1 : -1, .count = 4,
             .in = (uint8_t *)x, .out = (uint8_t *)x};
    CHECK(call(me, &op, 0) == PEER_ABORTED && op.culprits == 2, "status %d, ranks %llx", op.status, (unsigned long long)op.culprits);
    return NULL;
}

static void *lose_one(void *arg) { /* rank 1 dies in the middle */
    Rank *me = arg;
    World *w = me->world;
    uint8_t *tensor = calloc(300000, 4);
    if (me->rank == 1) {
        CHECK(write(w->died[1], &(uint64_t){1}, 8) == 8, "rank 1 dies");
    } else {
        Op op = {.kind = ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = -1, .count = 300000, .in = tensor, .out = tensor};
        CHECK(call(me, &op, me->rank % 2) == PEER_DIED && op.culprits == 2, "status %d", op.status);
    }
    free(tensor);
    return NULL;
}

static void *miss_one(void *arg) { /* rank 1 does not come */
    Rank *me = arg;
    float x[4] = {0};
    if (me->rank == 1) return NULL;
    for (int r = 2; me->rank == 0 && r < me->world->n; r++) /* its time begins when all others are there */
        while (!reached(me->engine, r, (uint64_t)1 << 24 | 1)) pause_briefly();
    Op op = {.kind = ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = -1, .count = 4, .in = (uint8_t *)x, .out = (uint8_t *)x,
             .timeout_ns = me->rank ? 30000000000 : 50000000};
    CHECK(call(me, &op, 0) == TIMED_OUT && op.culprits == 2, "status %d", op.status);
    return NULL;
}

static void make_a_habit(Lane *l) { /* as if its callers came at once; returns when the thread looks by itself */
    for (int looks = 0; !looks; pause_briefly()) {
        pthread_mutex_lock(&l->mutex);
        l->prompt = OFTEN;
        l->latest = now_ns();
        looks = l->looks;
        pthread_cond_signal(&l->wanted);
        pthread_mutex_unlock(&l->mutex);
    }
}

static void come_back_late(Lane *l) { /* as if starting had taken longer than the thread looks */
    pthread_mutex_lock(&l->mutex);
    int64_t now = now_ns();
    if (l->due) {
        l->latest = now - REST - 1;
        l->due = now + 4 * LOOK; /* the thread looks before that */
    }
    pthread_mutex_unlock(&l->mutex);
}

static void *wait_for_nothing(void *arg) { /* what rank 0 starts it does not come for */
    Rank *me = arg;
    Lane *l = &me->engine->coll;
    for (int turn = 0; turn < 5; turn++) {
        float x[4] = {1, 1, 1, 1};
        Op op = {.kind = ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = -1, .count = 4, .in = (uint8_t *)x, .out = (uint8_t *)x};
        CHECK(call(me, &op, 1) == DONE, "status %d", op.status); /* there is a thread now */
        if (me->rank == 0) {
            make_a_habit(l);
            op.mode = 1;
            pl_start(&op);
            come_back_late(l);
        }
        pthread_barrier_wait(&me->world->together);
        if (me->rank) CHECK(call(me, &op, 0) == DONE, "status %d", op.status);
        for (int64_t end = now_ns() + 60000000000; !pl_test(&op); pause_briefly()) CHECK(now_ns() < end, "nobody has taken it up");
        CHECK(x[0] == (float)(me->world->n * me->world->n), "%g", x[0]);
    }
    return NULL;
}

static void wake_after_a_rest(Lane *l) { /* returns when the thread has been awake, long after the last call */
    for (int looks = 1; looks; pause_briefly()) {
        pthread_mutex_lock(&l->mutex);
        looks = l->looks;
        l->latest = now_ns() - 2 * REST;
        pthread_cond_signal(&l->wanted);
        pthread_mutex_unlock(&l->mutex);
    }
}

static void *keep_a_habit(void *arg) { /* a pause between two calls does not end it */
    Rank *me = arg;
    Lane *l = &me->engine->coll;
    for (int prompt = OFTEN - 1; prompt <= OFTEN; prompt++) {
        float x[4] = {1, 1, 1, 1};
        Op op = {.kind = ALL_REDUCE, .dtype = T_F32, .itemsize = 4, .root = -1, .count = 4, .in = (uint8_t *)x, .out = (uint8_t *)x};
        CHECK(call(me, &op, 1) == DONE, "status %d", op.status); /* there is a thread now */
        make_a_habit(l);
        pthread_mutex_lock(&l->mutex);
        l->prompt = prompt;
        l->tries = 0;
        pthread_mutex_unlock(&l->mutex);
        wake_after_a_rest(l);
        op.mode = 1;
        int status = pl_start(&op);
        while (status == AGAIN) status = pl_wait(&op, 1000000000);
        CHECK(status == DONE, "status %d", status);
        pthread_mutex_lock(&l->mutex);
        CHECK(l->prompt == 0 || l->prompt == OFTEN, "%d calls in a row", l->prompt); /* 0: it was kept from coming at once */
        CHECK(l->tries == (prompt == OFTEN), "tried %d times", l->tries);
        pthread_mutex_unlock(&l->mutex);
        pthread_barrier_wait(&me->world->together);
    }
    return NULL;
}

/* Rank 1 tells what cannot be, and rank 0 says so and names it. */
enum {
    FAR_OFFSET, LOW_OFFSET, ODD_OFFSET, WRAPPED_OFFSET, HUGE_COUNT, HUGE_PART, LARGE_SLOT, NO_SUCH_KIND, FAR_AHEAD, NO_SUCH_FAULT,
    FULL_CHANNEL, HUGE_MESSAGE, EMPTY_CHANNEL, LIES
};

static uint32_t asked_for(int lie) {
    if (lie == FULL_CHANNEL || lie == HUGE_MESSAGE) return RECV;
    if (lie == EMPTY_CHANNEL) return SEND;
    return lie == HUGE_COUNT || lie == HUGE_PART || lie == LARGE_SLOT ? ALL_GATHER : ALL_REDUCE;
}

static void tell_a_lie(World *w, Engine *e, int lie, uint64_t count) {
    Control *c = (Control *)w->base[1];
    Channel *from = channel(e, 1, 0), *to = channel(e, 0, 1);
    Call *told = &c->call[1];
    Header header = {.tag = 5, .bytes = (uint64_t)-16, .dtype = T_F32};
    *told = (Call){.kind = asked_for(lie), .dtype = T_F32, .root = -1, .count = count, .offset = 1 + pl_heap_at(w->n)};
    switch (lie) {
    case FAR_OFFSET: told->offset = w->segment - 64; break;
    case LOW_OFFSET: told->offset = 1; break;
    case ODD_OFFSET: told->offset += 2; break;
    case WRAPPED_OFFSET: told->offset = (uint64_t)-1; break;
    case HUGE_COUNT: told->count = (uint64_t)1 << 62; break;
    case HUGE_PART: told->tables = 1; c->give[1][0] = (uint64_t)-64; break;
    case LARGE_SLOT: told->small = 1; told->count = SLOT; break;
    case NO_SUCH_KIND: told->kind = 77; break;
    case NO_SUCH_FAULT: atomic_store(&c->fault, -99); return;
    case FULL_CHANNEL: atomic_store(&from->head, RING + sizeof header); break;
    case HUGE_MESSAGE: memcpy(from->ring, &header, sizeof header); atomic_store(&from->head, sizeof header); break;
    case EMPTY_CHANNEL: atomic_store(&to->tail, 64); break;
    }
    atomic_store(&c->progress, lie == FAR_AHEAD ? (uint64_t)9 << 24 : (uint64_t)1 << 24 | 1);
    ring_bell(e, 0);
}

static void be_told(int lie) {
    World *w = malloc(sizeof *w);
    open_world(w, 2, 0);
    Rank *me = &w->ranks[0];
    uint64_t count = 20000;
    uint8_t *tensor = room(me, count * 4, 1), *all = malloc(count * 8);
    memset(tensor, 0, count * 4);
    tell_a_lie(w, me->engine, lie, count);
    uint32_t kind = asked_for(lie);
    Op op = {.kind = kind, .dtype = T_F32, .itemsize = 4, .root = kind >= SEND ? 1 : -1, .tag = kind == RECV ? 6 : 0, .count = count,
             .in = tensor, .out = kind == ALL_REDUCE ? tensor : all, .timeout_ns = 5000000000};
    CHECK(call(me, &op, 0) == GARBLED && op.culprits == 2, "lie %d: status %d, ranks %llx", lie, op.status,
          (unsigned long long)op.culprits);
    free(all);
    close_world(w);
    free(w);
}

/* ---- messages that are moved along by hand ---- */

static void ask(Rank *me, Op *op, uint32_t kind, int64_t tag, uint8_t *memory, uint64_t bytes) {
    *op = (Op){.kind = kind, .dtype = T_U8, .itemsize = 1, .root = kind == SEND ? 0 : -1, .tag = tag, .count = bytes,
               .in = memory, .out = memory, .engine = me->engine, .mode = 2, .timeout_ns = 30000000000};
    CHECK(pl_start(op) == AGAIN, "status %d", op->status);
}

/* Three messages of one tag: what is asked for while the first one is put aside comes in order, but for what does
 * not fit, and the last one is left halfway. */
static void put_aside(void) {
    World *w = malloc(sizeof *w);
    open_world(w, 2, 0);
    Rank *sender = &w->ranks[1], *me = &w->ranks[0];
    uint64_t bytes = 3 * RING;
    uint8_t *sent = malloc(3 * bytes), *got = calloc(2, bytes), *other = malloc(1);
    Op send[3], recv[2], elsewhere;
    for (int i = 0; i < 3; i++) {
        memset(sent + i * bytes, i + 1, bytes);
        ask(sender, &send[i], SEND, 7, sent + i * bytes, bytes);
    }
    CHECK(pl_wait(&send[0], 0) == AGAIN, "it does not fit into the channel");
    ask(me, &elsewhere, RECV, 5, other, 1);
    CHECK(pl_wait(&elsewhere, 0) == AGAIN && me->engine->incoming[1].stash, "nothing is put aside");
    ask(me, &recv[0], RECV, 7, got, bytes - 1);
    ask(me, &recv[1], RECV, 7, got + bytes, bytes);
    while (pl_wait(&recv[1], 0) == AGAIN) pl_wait(&send[1], 0);
    CHECK(recv[0].status == MISMATCH && recv[1].status == DONE, "status %d, %d", recv[0].status, recv[1].status);
    CHECK(got[0] == 0 && got[bytes] == 2 && got[2 * bytes - 1] == 2, "%d %d", got[0], got[bytes]);
    pl_wait(&send[2], 0);
    pl_wait(&elsewhere, 0);
    CHECK(me->engine->incoming[1].open && me->engine->incoming[1].stash, "the last one is not halfway");
    close_world(w);
    free(sent);
    free(got);
    free(other);
    free(w);
    puts("messages are put aside");
}

#ifndef __SANITIZE_THREAD__ /* to write without asking is a race, and meant to be one */
/* Rank 1 writes what it likes into its own memory while the others work; whatever they make of it, they stay
 * within bounds and come to an end. */
static void *be_lied_to(void *arg) {
    Rank *me = arg;
    World *w = me->world;
    if (me->rank == 1) {
        Control *c = (Control *)w->base[1];
        uint64_t values[] = {0, 1, 2, 77, (uint64_t)-1, (uint64_t)1 << 63, ((uint64_t)1 << 63) - 1, w->segment,
                             w->segment + 1, pl_heap_at(w->n), 1 << 24, (1 << 24) + 1, (uint64_t)rand_r(&me->seed)};
        for (int i = 0; i < 400; i++) {
            uint64_t x = values[rand_r(&me->seed) % (sizeof values / sizeof *values)];
            int where = rand_r(&me->seed) % 6;
            uint8_t *p = where < 3 ? (uint8_t *)&c->call + rand_r(&me->seed) % (sizeof c->call + sizeof c->give + sizeof c->take) / 8 * 8
                       : where < 5 ? (uint8_t *)channel(me->engine, 1, rand_r(&me->seed) % w->n) + rand_r(&me->seed) % 1024 / 8 * 8
                                   : (uint8_t *)channel(me->engine, 0, 1) + rand_r(&me->seed) % 512 / 8 * 8;
            memcpy(p, &x, 8);
            if (i % 3 == 0) { /* and says that it has come */
                uint64_t seq = (uint64_t)(i / 3 + 1);
                atomic_store(&c->progress, i % 30 ? seq << 24 | 1 : x);
            }
            for (int r = 0; r < w->n; r++) ring_bell(me->engine, r);
            struct timespec moment = {0, 20000};
            nanosleep(&moment, NULL);
        }
        return NULL;
    }
    uint8_t *in = malloc(4000), *out = malloc(4000 * w->n);
    memset(in, 1, 4000);
    for (int i = 0; i < 60; i++) {
        static const uint32_t kinds[] = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, RECV, SEND};
        uint32_t kind = kinds[i % 7];
        int rooted = kind == BROADCAST || kind == RECV || kind == SEND;
        uint64_t count = kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? 1000 / (uint64_t)w->n : 1000;
        Op op = {.kind = kind, .dtype = T_F32, .itemsize = 4, .root = rooted ? 1 : -1, .count = count, .timeout_ns = 3000000,
                 .in = in, .out = out};
        if (call(me, &op, 0) < TIMED_OUT && op.status != MISMATCH) break;
    }
    free(in);
    free(out);
    return NULL;
}

#endif

static void run(const char *name, int n, uint64_t window, void *(*body)(void *)) {
    World *w = malloc(sizeof *w);
    open_world(w, n, window);
    on_all_ranks(w, body);
    close_world(w);
    free(w);
    printf("%s, %d ranks\n", name, n);
    fflush(stdout);
}

int main(void) {
    run("all goes well", 1, 0, go_well);
    run("all goes well", 2, 0, go_well);
    run("all goes well", 3, 0, go_well);
    run("all goes well, in the smallest windows", 2, 128, go_well);
    for (int n = 2; n <= 4; n += 2) {
        run("one aborts", n, 0, be_aborted);
        run("one dies", n, 0, lose_one);
        run("one does not come", n, 0, miss_one);
    }
    run("one waits for nothing", 2, 0, wait_for_nothing);
    run("a habit is kept", 2, 0, keep_a_habit);
    for (int lie = 0; lie < LIES; lie++) be_told(lie);
    puts("one tells what cannot be");
    put_aside();
#ifndef __SANITIZE_THREAD__
    for (int i = 0; i < 20; i++) run("one lies", 3, 0, be_lied_to);
#endif
    return 0;
}
