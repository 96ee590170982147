# C only: estimate.pxd says what other Cython modules may call; Python sees nothing of it.
