/* The one place that knows how work is spread over threads.
 *
 * A step is a list of operations, each a number of independent units. It runs in one parallel region: phase after phase, a
 * barrier between them. Each worker has a stretch of every phase for itself, so that it reads weights from one end to the
 * other, and takes from the ends of the others' stretches when its own is done. While a worker waits at a barrier it
 * prefetches what it will read next, so that the small operations in between cost no memory time.
 *
 * OpenMP's threads do not survive fork(), and a child that waits for them waits for ever: a child computes alone.
 *
 * OpenMP ends the process when it cannot start a thread. So before a region that needs more threads than the last one of its
 * caller, as many are started to see whether they can be; they end at once, and OpenMP gets their stacks. */
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*sf_unit)(void *argument, long unit, int worker);
typedef const char *(*sf_locate)(const void *argument, long unit);

struct sf_operation {
    sf_unit function;
    void *argument;
    long units;
    sf_locate locate; /* where a unit's weights begin, or NULL */
    int alone;        /* too little work to share */
    int joined;       /* needs nothing of the operation before it */
};

struct sf_phase {
    int first, last; /* operations */
    int alone;       /* one worker does them all, in order */
    int32_t items;   /* handed out: units, or 1 */
    int32_t done;    /* atomic */
};

struct sf_stretch {
    uint64_t range; /* atomic: first item << 32 | end */
    char padding[56];
};

enum {
    SF_AHEAD_BYTES = 128 * 1024, /* prefetched at a barrier: well within the second-level cache */
    SF_AHEAD_ONCE = 512,         /* between two looks at the barrier */
    SF_SPINS = 20000,            /* looks before the processor is given away: some 100 us */
};

static int sf_forked = 0;

static void sf_in_child(void) { sf_forked = 1; }

static inline int sf_watch_forks(void) { return pthread_atfork(NULL, NULL, sf_in_child); }

static __thread int sf_team = 1; /* threads of the last region of this thread, which OpenMP keeps for the next */

static void *sf_pass(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* How many of `threads` a region of this thread can have. */
static inline int sf_startable(int threads)
{
    if (sf_forked || threads <= sf_team)
        return sf_forked ? 1 : threads;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *started = malloc((threads - 1) * sizeof *started);
    int count = 0;
    pthread_mutex_lock(&gate); /* so that all are there at once */
    while (started && count < threads - 1 && pthread_create(&started[count], NULL, sf_pass, &gate) == 0)
        count++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < count; i++)
        pthread_join(started[i], NULL);
    free(started);
    return count + 1;
}

static inline void sf_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Phases of the operations; returns how many. */
static inline int sf_phases(const struct sf_operation *operations, int count, struct sf_phase *phases)
{
    int number = 0;
    for (int i = 0; i < count; i++) {
        struct sf_phase *last = &phases[number - 1];
        if (number > 0 && (last->alone ? operations[i].alone : operations[i].joined)) {
            last->last = i + 1;
        } else {
            last = &phases[number++];
            *last = (struct sf_phase){.first = i, .last = i + 1, .alone = operations[i].alone};
        }
        last->items = last->alone ? 1 : last->items + (int32_t)operations[i].units;
    }
    return number;
}

static inline void sf_do_item(const struct sf_operation *operations, const struct sf_phase *phase, long item, int worker)
{
    for (int i = phase->first; i < phase->last; i++) {
        const struct sf_operation *operation = &operations[i];
        if (phase->alone) {
            for (long unit = 0; unit < operation->units; unit++)
                operation->function(operation->argument, unit, worker);
        } else if (item < operation->units) {
            operation->function(operation->argument, item, worker);
            return;
        } else {
            item -= operation->units;
        }
    }
}

static inline long sf_take(struct sf_stretch *stretches, int worker, int threads)
{
    for (int i = 0; i < threads; i++) {
        uint64_t *range = &stretches[(worker + i) % threads].range;
        uint64_t now = __atomic_load_n(range, __ATOMIC_RELAXED);
        while ((now >> 32) < (now & UINT32_MAX)) {
            const uint64_t left = i == 0 ? now + ((uint64_t)1 << 32) : now - 1;
            if (__atomic_compare_exchange_n(range, &now, left, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                return i == 0 ? (long)(now >> 32) : (long)(left & UINT32_MAX);
        }
    }
    return -1;
}

/* Where the worker's first unit of the first phase from `phase` on that reads weights begins, or NULL. */
static inline const char *sf_next_weights(const struct sf_operation *operations, const struct sf_phase *phases, int number,
                                          int phase, int worker, int threads)
{
    for (; phase < number; phase++) {
        long item = (long)phases[phase].items * worker / threads;
        if (phases[phase].alone)
            continue;
        for (int i = phases[phase].first; i < phases[phase].last; i++) {
            if (item < operations[i].units) {
                if (operations[i].locate)
                    return operations[i].locate(operations[i].argument, item);
                break;
            }
            item -= operations[i].units;
        }
    }
    return NULL;
}

static inline void sf_await(const struct sf_operation *operations, struct sf_phase *phases, int number, int phase, int worker,
                            int threads)
{
    const char *ahead = NULL, *end = NULL;
    long looks = 0;
    while (__atomic_load_n(&phases[phase - 1].done, __ATOMIC_ACQUIRE) < phases[phase - 1].items) {
        if (looks++ == 0) {
            ahead = sf_next_weights(operations, phases, number, phase, worker, threads);
            end = ahead ? ahead + SF_AHEAD_BYTES : NULL;
        }
        if (ahead < end) {
            for (const char *stop = ahead + SF_AHEAD_ONCE; ahead < stop; ahead += 64)
                __builtin_prefetch(ahead, 0, 2);
        } else if (looks < SF_SPINS) {
            sf_pause();
        } else {
            sched_yield();
        }
    }
}

/* phases [count]; stretches [count * threads] */
static inline void sf_run(const struct sf_operation *operations, int count, int threads, struct sf_phase *phases,
                          struct sf_stretch *stretches)
{
    threads = threads <= 1 ? 1 : sf_startable(threads);
    if (threads <= 1) {
        for (int i = 0; i < count; i++)
            for (long unit = 0; unit < operations[i].units; unit++)
                operations[i].function(operations[i].argument, unit, 0);
        return;
    }
    const int number = sf_phases(operations, count, phases);
    for (int phase = 0; phase < number; phase++)
        for (int worker = 0; worker < threads; worker++)
            stretches[phase * threads + worker].range = (uint64_t)((long)phases[phase].items * worker / threads) << 32
                                                        | (uint64_t)((long)phases[phase].items * (worker + 1) / threads);
    sf_team = threads;
#pragma omp parallel num_threads(threads)
    {
        const int worker = omp_get_thread_num();
        for (int phase = 0; phase < number; phase++) {
            int32_t finished = 0;
            if (phase > 0)
                sf_await(operations, phases, number, phase, worker, threads);
            for (long item; (item = sf_take(stretches + phase * threads, worker, threads)) >= 0; finished++)
                sf_do_item(operations, &phases[phase], item, worker);
            if (finished)
                __atomic_fetch_add(&phases[phase].done, finished, __ATOMIC_RELEASE);
        }
    }
}
