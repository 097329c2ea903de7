"""What holds for every test."""

import os

# Before torch is imported, and for child processes too. Tests share few cores with the processes they start, and
# OpenMP threads that wait for one another on busy cores are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
