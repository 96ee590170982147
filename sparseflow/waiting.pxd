"""Who waits for slots, in which order, and who would wait for ever, as C calls. Threads: all are called under the table's lock."""

from libc.stdint cimport int32_t

from sparseflow.extents cimport pthread_t
from sparseflow.slots cimport Pins, Table, Waiter


cdef bint fits(Table* table, Pins* pins) noexcept nogil             # whether it could be pinned now, if it were its turn
cdef bint holds_lease(Table* table, pthread_t thread) noexcept nogil
cdef bint waits_for_ever(Table* table, Pins* pins) noexcept nogil   # of a request by a thread that holds a lease

cdef void wait_for_release(Table* table, Waiter* waiter) noexcept nogil     # queued; unlocks for 50 ms, or until something was released
cdef void dequeue(Table* table, Waiter* waiter) noexcept nogil
cdef void wake(Table* table) noexcept nogil                         # something was released: those who wait should look again
