#!/usr/bin/env bash
# Runs a Python program on extensions that are built with AddressSanitizer, in a copy of this checkout:
#     tests/asan.sh -m pytest -q tests/test_leases.py tests/test_readers.py
#     tests/asan.sh tests/soak.py 60
# PYTHON names an interpreter that has the packages of '.[test]', cython and setuptools; ASAN_COPY where the copy is to be.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
copy=${ASAN_COPY:-${TMPDIR:-/tmp}/sparseflow-asan}
mkdir -p "$copy"
git ls-files -z | xargs -0 cp --parents --update --preserve=mode,timestamps -t "$copy"
cd "$copy"
CFLAGS="-fsanitize=address -fno-omit-frame-pointer" LDFLAGS="-fsanitize=address" \
    "$python" -c "import setuptools; setuptools.setup()" build_ext --inplace > build.log 2>&1 || { tail -50 build.log; exit 1; }
# Python's own allocator would hide what is wrong with Python's objects; what Python keeps until its end is no leak; and a SIGBUS
# is for whoever the tests expect it to go to.
export PYTHONPATH=$copy PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
LD_PRELOAD=$(gcc -print-file-name=libasan.so) exec "$python" "$@"
