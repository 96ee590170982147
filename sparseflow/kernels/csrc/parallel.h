/* The one place that knows how work is spread over threads: OpenMP, units handed out as workers come free. */
#include <omp.h>

typedef void (*sf_unit)(void *argument, long unit, int worker);

static inline void sf_parallel_for(sf_unit function, void *argument, long units, int threads)
{
    if (threads > units)
        threads = (int)units;
    if (threads <= 1) {
        for (long unit = 0; unit < units; unit++)
            function(argument, unit, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long unit = 0; unit < units; unit++)
        function(argument, unit, omp_get_thread_num());
}
