/* The one place that knows how work is spread over threads: OpenMP, units handed out as workers come free.
 * OpenMP's threads do not survive fork(), and a child that waits for them waits for ever: a child computes alone. */
#include <omp.h>
#include <pthread.h>

typedef void (*sf_unit)(void *argument, long unit, int worker);

static int sf_forked = 0;

static void sf_in_child(void) { sf_forked = 1; }

static inline int sf_watch_forks(void) { return pthread_atfork(NULL, NULL, sf_in_child); }

static inline void sf_parallel_for(sf_unit function, void *argument, long units, int threads)
{
    if (threads > units)
        threads = (int)units;
    if (threads <= 1 || sf_forked) {
        for (long unit = 0; unit < units; unit++)
            function(argument, unit, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long unit = 0; unit < units; unit++)
        function(argument, unit, omp_get_thread_num());
}
