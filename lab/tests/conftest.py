"""Set an environment variable before torch is imported."""

import os

# Loops of small operations run many times slower with several OpenMP threads on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
