"""Compute kernels: float32 and integer arithmetic on arrays and tile-packed weights, threaded, without the GIL.

Every kernel exists for each instruction set of `isa` and gives the same bits in all of them, for any number of threads
and however many tokens are fed at once. Kernels know nothing of files, leases or the model's configuration.
"""
