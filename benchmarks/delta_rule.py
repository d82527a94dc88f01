"""The delta rule of flash-linear-attention in both directions: another recurrence, timed beside ours.

Its state is one matrix for a head of 64 channels, 64 keys long, where ours is 16 numbers for a channel;
what is equal is the number of tokens and channels. Both directions get the same queries, keys and
values and are averaged, as many passes over the tokens as our scans make. There is no gate.

    S_t = S_(t-1) + b_t (v_t - S_(t-1) k_t) k_t^T,   y_t = S_t q_t / sqrt(64),   |k| = |q| = 1

Letters: B batch, L tokens, D channels, H = D / 64 heads.
"""

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD = 64  # channels of a head
DELTA_RULE = "chunked delta rule (fla)"


def find() -> tuple[Callable[..., Tensor], str]:
    """Return the contestant's function, and why it cannot run on this machine, "" if it can."""
    try:
        function = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
    except ModuleNotFoundError as error:
        missing = "fla" in (error.name or "")
        return both_ways(None), "not installed" if missing else f"cannot be imported: {error}"
    except Exception as error:  # made for another torch or triton, or there is no GPU
        lines = str(error).splitlines() or [type(error).__name__]
        return both_ways(None), f"cannot be imported: {lines[0]}"
    return both_ways(function), ""


def both_ways(function: Callable[..., tuple[Tensor, object]] | None) -> Callable[..., Tensor]:
    """Return a function of q, k, v, (B, L, D), and b, (B, L, H), to (B, L, D).

    Args:
        function: ``fla.ops.delta_rule.chunk_delta_rule`` or its like: takes q, k, v, (B, L, H, 64).
    """

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD)) for t in (q, k, v))
        forth, _ = function(q, k, v, b, use_qk_l2norm_in_kernel=True)
        flipped = (t.flip(1) for t in (q, k, v, b))
        back, _ = function(*flipped, use_qk_l2norm_in_kernel=True)
        return ((forth + back.flip(1)) / 2).flatten(2)

    return run


def inputs_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return q, k, v and b, made of the inputs of a bidirectional scan."""
    heads = inputs["z"].shape[-1] // HEAD
    b = torch.sigmoid(inputs["dt"][0, ..., :heads])
    return {"q": inputs["x"][0], "k": inputs["x"][1], "v": inputs["z"], "b": b}


def exact(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Compute the same for one sequence without its batch axis, token by token."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in (q, k, v))
    q, k, b = F.normalize(q, dim=-1) / HEAD**0.5, F.normalize(k, dim=-1), b.mT.unsqueeze(-1)
    forth = _one_way(v, q, k, b)
    back = _one_way(*(t.flip(1) for t in (v, q, k, b))).flip(1)
    return ((forth + back) / 2).transpose(0, 1).flatten(1)


def _one_way(v: Tensor, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """Scan v, q and k, (H, L, 64), with steps b, (H, L, 1): (H, L, 64)."""
    state, read = v.new_zeros(v.shape[0], HEAD, HEAD), []
    for t in range(v.shape[1]):
        key = k[:, t, :, None]
        error = v[:, t, :, None] - state @ key
        state = state + b[:, t, :, None] * error @ key.mT
        read.append((state @ q[:, t, :, None]).squeeze(-1))
    return torch.stack(read, 1)
