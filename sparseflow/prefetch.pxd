"""Reading ahead, as C calls."""

from libc.stdint cimport int32_t

from sparseflow.slots cimport Table


# Read ahead those of the keys [n], likeliest first, that have no slot, when nothing else is to be read, while more than `spare`
# slots are free or idle. How many reads that began. Does nothing unless the table is `direct`.
cdef int32_t table_prefetch(Table* table, const int32_t* keys, Py_ssize_t n, int32_t spare) noexcept nogil
# Under the lock: take note of what was read ahead and has arrived, and give up what was meant for `layer`, which has chosen.
cdef void settle_ahead(Table* table, int32_t layer) noexcept nogil
