"""The operations of ``reference.py`` by Triton kernels: which kernel file serves what.

In float32. Asking for what no kernel serves is an error.
"""

from vil.kernels.plan import ScanKey, plans
from vil.kernels.triton.chunk import ChunkPlan
from vil.kernels.triton.conv import ConvPlan
from vil.kernels.triton.recurrent import RecurrentPlan
from vil.kernels.triton.scan_plan import ScanPlan

# Of a recurrence its plan, and the largest d_state: beyond, programs outgrow registers or shared memory.
_FAMILIES: dict[str, tuple[type[ScanPlan], int]] = {
    "longhorn_exact": (ChunkPlan, 128),
    "longhorn": (RecurrentPlan, 64),
    "mamba": (RecurrentPlan, 64),
}


@plans
def scan_plan(key: ScanKey) -> ScanPlan:
    """Return the plan of a scan.

    Raises:
        NotImplementedError: No kernel serves it.
    """
    if key.recurrence not in _FAMILIES:
        raise NotImplementedError(
            f'the backend "triton" does not serve the recurrence {key.recurrence}; use "reference"'
        )
    family, most = _FAMILIES[key.recurrence]
    if key.states > most:
        raise NotImplementedError(
            f'the backend "triton" serves up to {most} states of {key.recurrence}, k has {key.states}; '
            'use "reference"'
        )
    return family(key)


conv_plan = plans(ConvPlan)
writes_halves = True
