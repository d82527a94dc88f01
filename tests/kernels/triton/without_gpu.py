"""Let Triton specialise and compile for a GPU that is not there: imported first in a subprocess."""

import os

os.environ.pop("TRITON_INTERPRET", None)  # what the interpreter wraps cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget

from vil.kernels import backends
from vil.kernels.triton import tuning


class Driver:
    """What Triton asks before it launches anything."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())
tuning.architecture = lambda device: "sm_90"
backends._check_serves = lambda name, device, asked_by: None
