"""Compute the least time of a bidirectional scan on a GPU from bytes moved and instructions issued.

With N = B L D token-channels, each with 2 M state updates in both directions, and R lane-instructions
per second (multiprocessors x 4 schedulers x 32 lanes x the highest clock),

    time = max(bytes per token-channel x N / bandwidth, instructions x N / R)

where bandwidth is measured with a large copy on the device in the same run, counting reads and
writes. Training is the sum of its forward and its backward. Tables: ``COSTS`` and ``BYTES``.

Letters: B batch, L tokens, D channels of the scan, M states per channel.
"""

from dataclasses import dataclass

PASSES = ("inference", "training forward", "forward + backward")
M = 16


@dataclass(frozen=True)
class Cost:
    """Cost of one token-channel in each pass, both directions together."""

    inference: float
    forward: float  # in training, including tensors saved for the backward pass
    backward: float


# Instructions that a lane issues for M = 16, counted in machine code compiled for sm_90. Diagonal:
# per update. Exact: per token-channel and direction, independent of M. Mamba: a bound, not a count,
# of one exponential per update, at an eighth of the rate of other instructions.
COSTS = {
    "longhorn": Cost(7.3 * 2 * M, 7.3 * 2 * M, 24 * 2 * M),
    "longhorn_exact": Cost(52 * 2, 60 * 2, 100 * 2),
    "mamba": Cost(8 * 2 * M, 8 * 2 * M, 8 * 2 * M),
}

# Inference: x, dt of both directions, z, out. Training adds the sum of the scans and float32 states
# every 16 tokens. Backward: these again, the gradients, and partial sums of the q and k gradients.
BYTES = Cost(12, 22, 44)


@dataclass(frozen=True)
class Device:
    """Rates of a GPU that the roofline needs.

    Attributes:
        name: Name from the driver.
        multiprocessors: Number of multiprocessors, each with 4 schedulers of 32 lanes.
        clock_hz: Highest clock of the multiprocessors in Hz, from the driver.
        bandwidth: Bytes per second of a large copy, reads and writes counted.
    """

    name: str
    multiprocessors: int
    clock_hz: float
    bandwidth: float

    @property
    def lane_instructions(self) -> float:
        """Instructions per second of all lanes together."""
        return self.multiprocessors * 4 * 32 * self.clock_hz


def roofline_ms(task: str, pass_name: str, shape: tuple[int, int, int], device: Device) -> float:
    """Return the least time of a pass in ms, by the design's roofline.

    Args:
        task: A recurrence.
        pass_name: One of ``PASSES``.
        shape: (B, L, D).
        device: Rates of the GPU.
    """
    B, L, D = shape
    N, cost = B * L * D, COSTS[task]

    def bound(instructions: float, bytes_moved: float) -> float:
        issue = instructions * N / device.lane_instructions
        return 1e3 * max(issue, bytes_moved * N / device.bandwidth)

    if pass_name == "inference":
        return bound(cost.inference, BYTES.inference)
    forward = bound(cost.forward, BYTES.forward)
    if pass_name == "training forward":
        return forward
    return forward + bound(cost.backward, BYTES.backward)
