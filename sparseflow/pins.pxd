"""What a lease does with its pins, as C calls without the GIL. A lease is used by one thread at a time."""

from libc.stdint cimport uintptr_t

from sparseflow.slots cimport Pins, Table, Waiter


cdef enum Outcome:
    RESERVED                # all pinned
    WAIT                    # too few slots now; somebody will release some
    NEVER                   # too few slots, and nobody can
    CLOSED                  # the store is


# Pin `pins.keys`. With `patient`, waits up to 50 ms for a release. After WAIT the waiter stays in the queue: call again, or
# table_leave_queue. After RESERVED, table_fetch must follow.
cdef Outcome table_reserve(Table* table, Pins* pins, Waiter* waiter, bint counted, bint patient) noexcept nogil
# After RESERVED, of a table that is not direct: what the end of the file took with it is pending again, and table_admit tells.
cdef void table_recheck(Table* table, Pins* pins) noexcept nogil
cdef void table_leave_queue(Table* table, Waiter* waiter) noexcept nogil
cdef void table_fetch(Table* table, Pins* pins) noexcept nogil          # asks for the first of what is pending
cdef uintptr_t table_address(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil
cdef bint table_ready(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil    # whether table_admit would not wait
cdef int table_admit(Table* table, Pins* pins, Py_ssize_t i) noexcept nogil     # waits for one expert: 0 or an errno
cdef void table_release(Table* table, Pins* pins) noexcept nogil
