"""The operations of ``reference.py`` by Triton kernels, in float32: selection of the kernel file.

An operation that no kernel supports raises an error.
"""

import contextlib
from collections.abc import Callable

from vil.kernels.interface import ScanKey, ScanPlan
from vil.kernels.plan import plans
from vil.kernels.triton import tuning
from vil.kernels.triton.conv import ConvPlan
from vil.kernels.triton.diagonal import DiagonalPlan
from vil.kernels.triton.exact import ExactPlan, ShortPlan
from vil.kernels.triton.fragment_plan import FragmentPlan
from vil.kernels.triton.weights import small_weights  # noqa: F401  (as ``interface.Backend``)

# Recurrence -> plan and largest d_state. Larger states exceed registers or shared memory.
_FAMILIES: dict[str, tuple[Callable[[ScanKey], ScanPlan], int]] = {
    "longhorn_exact": (ExactPlan, 128),
    "longhorn": (DiagonalPlan, 64),
    "mamba": (DiagonalPlan, 64),
}


@plans
def scan_plan(key: ScanKey) -> ScanPlan:
    """Return the plan of a scan.

    Raises:
        NotImplementedError: If no kernel supports the recurrence, the state size or the dtype.
    """
    if key.recurrence not in _FAMILIES:
        raise NotImplementedError(f'backend "triton" does not support recurrence {key.recurrence}; use "reference"')
    family, max_states = _FAMILIES[key.recurrence]
    if key.states > max_states:
        raise NotImplementedError(
            f'backend "triton" supports up to {max_states} states of {key.recurrence}, '
            f'k has {key.states}; use "reference"'
        )
    if family is ExactPlan and FragmentPlan.fits(key):
        family = FragmentPlan
    elif family is ExactPlan and key.shape[2] < tuning.CHUNK:
        family = ShortPlan
    return family(key)


conv_plan = plans(ConvPlan)
writes_halves, arena = True, contextlib.nullcontext()
