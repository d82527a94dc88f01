"""Settings of every test run, made before anything imports Triton."""

import os

# Loops of small operations run many times slower with several OpenMP threads on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # its kernels then run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
