/* Whose memory it is: mappings, forked children, tensors that an ended group may still write to; and
 * how the others learn that a rank is dead.
 *
 * A forked child is not this rank. It inherits mappings, so whatever it wrote or freed there would be
 * its parent's. In the child, before fork() returns, this rank's own segment is therefore mapped
 * again at the same addresses as a private view of the same file: a page that the child writes to
 * becomes its own. A page that it has only read shows what the parent has in it now, not what it had
 * at the fork; true copies would cost each data-loading worker as much memory as all gradients. The
 * peers' segments are not inherited at all, and every call into the engine is refused.
 *
 * A rank that was stopped in the middle of an all-reduce and goes on later still writes to the
 * tensors of all others, since it maps their files, and nothing can take that mapping from it. So
 * when such an operation fails, the owner maps the pages of that one tensor privately in the same
 * way (what its threads write meanwhile is never lost), and when the group ends it makes copies of
 * all of them. The addresses stay, and what was in them stays. After the end of a group nobody shares
 * anything: what is left of a segment, for tensors that outlive the group, becomes private too.
 *
 * Sockets and process descriptors tell of a death when the kernel has freed the memory of the dead,
 * which takes 0.1 s for each gigabyte. A robust futex tells before that: one thread of each process,
 * which does nothing else and never ends, "holds" a word in the segment of each of its groups, and
 * when it dies the kernel marks these words. A forked child has no such thread, and holds nothing.
 */
#ifndef PACELINE_SHM_LIFE_H
#define PACELINE_SHM_LIFE_H

#include "shm_core.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct Mapping {
    struct Mapping *next;
    uint8_t *at;
    uint64_t bytes;
    int own, fd;                      /* fd: of this rank's own segment, while that is shared */
    uint8_t *private_at, *private_end; /* pages of it that are not shared any more */
} Mapping;

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static Mapping *mappings;
static _Atomic uint32_t generation; /* one more in each forked child */

static int map_privately(const Mapping *m, uint8_t *from, uint8_t *to) {
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    return from >= to || mmap(from, to - from, PROT_READ | PROT_WRITE, flags, m->fd, from - m->at) != MAP_FAILED;
}

static int stop_sharing(Mapping *m) { /* all of it */
    uint8_t *end = m->at + m->bytes;
    int done = m->private_at ? map_privately(m, m->at, m->private_at) && map_privately(m, m->private_end, end)
                             : map_privately(m, m->at, end);
    if (!done) return 0;
    close(m->fd);
    m->fd = -1;
    return 1;
}

/* ---- the life of this process ---- */

static struct robust_list_head holding = {
    {&holding.list}, (long)offsetof(Control, life) - (long)offsetof(Control, held), NULL};
static uint32_t holder;      /* its thread; 0: there is none */
static Engine *alive;        /* those whose words it holds; the links in shared memory are for the kernel */

static void *hold(void *started) {
    if (!syscall(SYS_set_robust_list, &holding, sizeof holding)) holder = (uint32_t)syscall(SYS_gettid);
    sem_post(started);
    while (holder) pause();
    return NULL;
}

static void start_holder(void) { /* the registry is locked */
    pthread_t thread;
    sem_t started;
    sigset_t all, old;
    if (holder || sem_init(&started, 0, 0)) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (!pthread_create(&thread, NULL, hold, &started)) {
        while (sem_wait(&started)) continue;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    sem_destroy(&started);
}

static struct robust_list *link_of(Engine *e) { return e ? &control(e, e->rank)->held : &holding.list; }

static void begin_life(Engine *e) {
    pthread_mutex_lock(&registry);
    start_holder();
    if (holder && e->base[e->rank]) {
        Control *me = control(e, e->rank);
        atomic_store(&me->life, holder);
        me->held.next = link_of(alive);
        __atomic_store_n(&holding.list.next, &me->held, __ATOMIC_SEQ_CST); /* whole whenever the kernel looks */
        e->next_alive = alive;
        alive = e;
    }
    pthread_mutex_unlock(&registry);
}

static void end_life(Engine *e) { /* before the memory goes */
    pthread_mutex_lock(&registry);
    struct robust_list *before = &holding.list;
    for (Engine **p = &alive; *p; before = link_of(*p), p = &(*p)->next_alive) {
        if (*p != e) continue;
        __atomic_store_n(&before->next, link_of(e->next_alive), __ATOMIC_SEQ_CST);
        atomic_store(&control(e, e->rank)->life, 0);
        *p = e->next_alive;
        break;
    }
    pthread_mutex_unlock(&registry);
}

/* ---- forked children ---- */

static void before_fork(void) { pthread_mutex_lock(&registry); }
static void in_parent(void) { pthread_mutex_unlock(&registry); }

static void in_child(void) {
    atomic_fetch_add(&generation, 1);
    holder = 0;
    alive = NULL;
    holding.list.next = &holding.list;
    for (Mapping **p = &mappings, *m; (m = *p);) {
        if (m->fd >= 0 && !stop_sharing(m)) mprotect(m->at, m->bytes, PROT_NONE); /* rather a crash than wrong numbers */
        if (m->own) p = &m->next;
        else *p = m->next; /* not inherited; its addresses may soon be something else's */
    }
    pthread_mutex_init(&registry, NULL);
}

static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

static int forked(const Engine *e) { return e->generation != atomic_load_explicit(&generation, memory_order_relaxed); }

/* ---- mappings ---- */

/* Maps a segment; `own`: this rank's, whose descriptor is kept until it is unmapped. */
static void *map_segment(int fd, uint64_t bytes, int own) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    Mapping *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    pthread_mutex_lock(&registry);
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) free(m);
    else {
        if (!own) madvise(at, bytes, MADV_DONTFORK), madvise(at, bytes, MADV_DONTDUMP); /* in its owner's core file */
        *m = (Mapping){.next = mappings, .at = at, .bytes = bytes, .own = own, .fd = own ? fd : -1};
        mappings = m;
    }
    pthread_mutex_unlock(&registry);
    return at == MAP_FAILED ? NULL : at;
}

static void unmap_segment(void *at) {
    pthread_mutex_lock(&registry);
    for (Mapping **p = &mappings, *m; (m = *p); p = &m->next) {
        if (m->at != at) continue;
        *p = m->next;
        munmap(m->at, m->bytes);
        if (m->fd >= 0) close(m->fd);
        free(m);
        break;
    }
    pthread_mutex_unlock(&registry);
}

static Mapping *own_mapping(Engine *e) { /* the registry is locked */
    Mapping *m = mappings;
    while (m && m->at != e->base[e->rank]) m = m->next;
    return m && m->fd >= 0 ? m : NULL;
}

/* ---- tensors that others may still write to ---- */

static void set_apart(Engine *e, const uint8_t *from, uint64_t bytes) {
    pthread_mutex_lock(&registry);
    Mapping *m = own_mapping(e);
    if (m && !m->private_at) { /* after a fault no other operation begins, so there is one at most */
        uint8_t *at = m->at + (from - m->at) / PAGE * PAGE;
        uint8_t *end = m->at + (from + bytes - m->at + PAGE - 1) / PAGE * PAGE;
        if (end > m->at + m->bytes) end = m->at + m->bytes;
        if (map_privately(m, at, end)) m->private_at = at, m->private_end = end;
    }
    pthread_mutex_unlock(&registry);
}

static void part(Engine *e) { /* the group has ended here */
    pthread_mutex_lock(&registry);
    Mapping *m = own_mapping(e);
    if (m && m->private_at && madvise(m->private_at, m->private_end - m->private_at, MADV_POPULATE_WRITE))
        for (uint8_t *p = m->private_at; p < m->private_end; p += 4096) /* an older kernel */
            __atomic_fetch_add(p, 0, __ATOMIC_RELAXED); /* a write that loses nobody else's */
    if (m) stop_sharing(m);
    pthread_mutex_unlock(&registry);
}

#endif
