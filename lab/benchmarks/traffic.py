"""Count the bytes that one block of a model moves through memory, without a GPU or any computation.

    python -m lab.benchmarks.traffic [MODEL] [--img-size 224] [--fast-norm]

The block runs forward and backward on fake tensors, in bfloat16 under autocast, with 128 images. Each
PyTorch operation counts as one kernel that reads its inputs and writes its outputs once. Launches of our own
kernels are recorded instead of run; ``TOUCHES`` says how often each argument is read and written. Data that several
programs read at about the same time counts once: neighbouring tokens of the convolution, keys for every block of
channels. Caches are not modelled, nor that the backward pass of a normalisation or a sum may be two kernels. So a
GPU moves more bytes, or fewer where a written tensor is still in its L2 cache when it is read.

Autocast is the CPU's, which casts the same operations of these models to bfloat16 as the GPU's. Kernels use the
block sizes and sequence splits of an H200. The program prints the bytes per token of three passes, next to timm's
deit_tiny_patch16_224 with fused attention, and the least time of an H200 to move them. It then prints the bytes
that all blocks keep for the backward pass. ``--fast-norm`` lets norms take and return bfloat16, as timm's scripts
do with this option.
"""

import argparse
import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fast_norm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vil  # noqa: F401  (names the models)
from vil.kernels import backends, registration
from vil.kernels.ops import use_backend
from vil.kernels.plan import forget_plans
from vil.kernels.triton import tuning
from vil.kernels.triton.launch import Launch, recording
from vil.kernels.triton.states import saved_shapes

IMAGES = 128
PASSES = ("inference", "training forward", "forward + backward")
PEER = "deit_tiny_patch16_224"

# H200.
BANDWIDTH = 4.8e12  # bytes per second
MULTIPROCESSORS = 132

# Kernel -> argument -> (reads, writes) of each element. An argument that is None at a launch counts as 0.
# A scan that saves states writes `y` once more (see `touches`). Parameters are read once.
_SCAN = dict.fromkeys(("x", "dt", "z", "bias", "skip"), (1, 0))
_DIAGONAL = _SCAN | {"kq": (1, 0), "rates": (1, 0)}
_EXACT = _SCAN | dict.fromkeys(("keys", "gram", "kappa", "dt_weight"), (1, 0))
_FORWARD = {"y": (1, 1), "out": (0, 1), "states": (0, 1), "final": (0, 1), "split_states": (1, 0)}
_BACKWARD = dict.fromkeys(("dx", "ddt", "dz", "dskip", "dbias", "dinitial"), (0, 1))
_BACKWARD |= {"dout": (1, 0), "y": (1, 0), "states": (1, 0)}
_OF_FRAGMENTS = dict.fromkeys(("operands", "c", "last", "split_states"), (1, 0)) | {"sums": (0, 1), "dweight": (0, 1)}
_CONV = {"x": (1, 0), "weight": (1, 0), "bias": (1, 0), "order": (1, 0)}
TOUCHES: dict[str, dict[str, tuple[int, int]]] = {
    "pack_kernel": {"q": (1, 0), "k": (1, 0), "kq": (0, 1)},
    "diagonal_forward_kernel": _DIAGONAL | _FORWARD,
    # The scratch memory of the programs that run at one time stays in L2.
    "diagonal_backward_kernel": _DIAGONAL
    | _BACKWARD
    | {"split_states": (1, 0), "scratch": (0, 0), "dkq": (0, 1), "drates": (0, 1)},
    "gram_kernel": {
        "q": (1, 0), "k": (1, 0), "keys": (0, 1), "gram": (0, 1), "kappa": (0, 1),
    },
    "exact_forward_kernel": _EXACT | _FORWARD,
    "exact_backward_kernel": _EXACT | _BACKWARD | {"split_states": (1, 0), "sums": (0, 1)},
    "operands_kernel": {"q": (1, 0), "k": (1, 0), "operands": (0, 1), "gram": (0, 1), "kappa": (0, 1)},
    "fragments_forward_kernel": _EXACT | _FORWARD | {"operands": (1, 0), "c": (0, 1), "last": (0, 1)},
    # x, dt, z, the gradient and C are loaded by each direction on its own.
    "fragments_backward_kernel": _EXACT | _BACKWARD | _OF_FRAGMENTS,
    "small_gradients_kernel": {"sums": (1, 0), "dk": (0, 1), "dq": (0, 1), "dlow": (0, 1)},
    "keys_kernel": {"keys": (1, 0), "sums": (1, 0), "dq": (0, 1), "dk": (0, 1)},
    "conv_forward_kernel": _CONV | {"out": (0, 1)},
    "conv_backward_kernel": _CONV
    | {"grad": (1, 0), "dx": (0, 1), "dweight": (0, 1), "dbias": (0, 1)},
    "small_weights_kernel": {"x_proj": (1, 0), "dt_weight": (1, 0), "small": (0, 1), "dt": (0, 1)},
}  # fmt: skip


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True)
class Move:
    """A tensor that a kernel reads or writes.

    Attributes:
        what: Name of the argument, or elements per token (else the shape) and dtype.
        bytes: Bytes of all elements, times the number of reads or writes of each.
        written: Whether the tensor is written; otherwise it is read.
    """

    what: str
    bytes: int
    written: bool


@dataclass(frozen=True)
class Kernel:
    """A kernel and the tensors that it moves.

    Attributes:
        name: Name of a PyTorch operation, or of the function of one of our kernels.
        moves: Reads, then writes.
        launch: Recorded launch if the kernel is ours, else None.
    """

    name: str
    moves: tuple[Move, ...]
    launch: Launch | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all moves."""
        return sum(move.bytes for move in self.moves)


def touches(one: Launch) -> Iterator[tuple[str, Tensor, int, int]]:
    """Yield each tensor of a launch: its name, the tensor, its reads and its writes.

    Raises:
        KeyError: If ``TOUCHES`` lacks the kernel or one of its tensors.
    """
    known = TOUCHES[one.kernel.__name__]
    for argument, tensor in one.arguments.items():
        if isinstance(tensor, Tensor):
            name = argument.removesuffix("_ptr")
            reads, writes = known[name]
            kept = one.arguments.get("states_ptr", one.arguments.get("c_ptr"))
            if name == "y" and writes and kept is not None:
                writes += 1
            yield name, tensor, reads, writes


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded axis counts once."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in axes if stride)


class Counter(TorchDispatchMode):
    """Record in ``kernels`` what PyTorch operations and our own launches move."""

    def __init__(self, tokens: int, launches: list[Launch]) -> None:
        """Take the number of tokens, to describe tensors per token, and the list of recorded launches."""
        super().__init__()
        self.tokens, self.kernels, self._launches = tokens, [], launches

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Record an operation, or what our own and composite operations consist of."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query about a tensor, no kernel
            return func(*args, **kwargs)
        with self:
            if func.namespace == "vil":
                result = getattr(registration, f"_{func._opname}")._init_fn(*args, **kwargs)
                self._note_launches()
                return result
            if func.has_kernel_for_dispatch_key(_COMPOSITE):
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note_launches()
        self._note(func, (args, kwargs), result)
        return result

    def _note_launches(self) -> None:
        for one in self._launches:
            reads, writes = [], []
            for name, tensor, read, written in touches(one):
                if read:
                    reads.append(Move(name, read * _bytes(tensor), False))
                if written:
                    writes.append(Move(name, written * _bytes(tensor), True))
            self.kernels.append(Kernel(one.kernel.__name__, (*reads, *writes), one))
        self._launches.clear()

    def _note(self, func: Any, inputs: Any, result: Any) -> None:
        aliases = [r.alias_info for r in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        if views or func._opname == "_unsafe_view" or "empty" in func._opname:
            return
        read = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        moves = [Move(self._describe(t), _bytes(t), False) for t in read]
        moves += [Move(self._describe(t), _bytes(t), True) for t in written]
        self.kernels.append(Kernel(func._opname, tuple(moves)))

    def _describe(self, tensor: Tensor) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.numel() % self.tokens:
            return f"{tuple(tensor.shape)} {dtype}".replace(",)", ")")
        return f"{tensor.numel() // self.tokens} {dtype}"


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """Replace RMSNorm, one kernel on GPUs only, by LayerNorm, which also writes a mean (4 bytes a token)."""
    return F.layer_norm(x, shape, weight, None, 1e-6 if eps is None else eps)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[list[Launch]]:
    """Let our kernels accept CPU tensors as if on an H200; yield the list of recorded launches."""
    with (
        mock.patch.object(backends, "_check_serves"),
        mock.patch.object(tuning, "architecture", return_value="sm_90"),
        mock.patch.object(tuning, "processors", return_value=MULTIPROCESSORS),
        mock.patch.object(registration, "operator_saves", lambda _, *scan: saved_shapes(*scan)),
        use_backend("triton"),
        recording() as launches,
        mock.patch.object(torch, "rms_norm", _rms_norm),
        warnings.catch_warnings(),
    ):
        # Our alignment check reads the pointer of a fake tensor: it is 0, which counts as aligned.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        forget_plans()
        try:
            yield launches
        finally:
            forget_plans()


def _inputs_of_block(model: nn.Module, images: Tensor) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments that the first block of a model gets when the model is given images."""
    given: list[tuple[tuple, dict[str, Any]]] = []
    hook = model.blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    with hook:
        model(images)
    return given[0]


@contextlib.contextmanager
def _saving(block: nn.Module) -> Iterator[dict[int, int]]:
    """Yield a dict of the bytes of each storage kept for the backward pass, by address, without parameters."""
    parameters, kept = {id(p) for p in block.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def count(name: str, img_size: int) -> tuple[int, dict[str, list[Kernel]], int]:
    """Return the tokens of all images, one block's kernels by pass, and the bytes that all blocks keep.

    Args:
        name: Name of a timm model that has ``blocks``.
        img_size: Height and width in pixels.
    """
    depth = len(timm.create_model(name, img_size=img_size, device="meta").blocks)
    model = timm.create_model(name, img_size=img_size, depth=1)
    block, found = model.blocks[0], {}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cpu", torch.bfloat16),
        _as_on_a_gpu() as launches,
    ):
        images = torch.empty(IMAGES, 3, img_size, img_size)
        (x, *rest), named = _inputs_of_block(model.eval(), images)
        launches.clear()
        tokens = x.shape[0] * x.shape[1]

        def run(training: bool) -> tuple[list[Kernel], int, int]:
            """Return the kernels, the number of forward kernels, and the bytes that all blocks keep."""
            block.train(training)
            given = x.detach().requires_grad_(training)
            counter = Counter(tokens, launches)
            with torch.set_grad_enabled(training), counter:
                with _saving(block) as kept:
                    out = block(given, *rest, **named)
                forward = len(counter.kernels)
                if training:
                    wanted = [given, *block.parameters()]
                    torch.autograd.grad(out, wanted, torch.empty_like(out))
            return counter.kernels, forward, depth * sum(kept.values())

        found["inference"], *_ = run(training=False)
        both, forward, kept = run(training=True)
    found["training forward"], found["forward + backward"] = both[:forward], both
    return tokens, found, kept


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="vil_tiny", metavar="MODEL")
    parser.add_argument("--img-size", type=int, default=224, help="pixels; default: 224")
    parser.add_argument("--fast-norm", action="store_true", help="as timm's scripts take it")
    args = parser.parse_args(arguments)
    set_fast_norm(args.fast_norm)
    rows = [
        "| block of | pass | bytes per token | ns per token | x deit |",
        "|---|---|---|---|---|",
    ]
    peer_tokens, peer, peer_kept = count(PEER, args.img_size)
    tokens, own, own_kept = count(args.model, args.img_size)
    for name in PASSES:
        of_peer = sum(kernel.bytes for kernel in peer[name]) / peer_tokens
        of_own = sum(kernel.bytes for kernel in own[name]) / tokens
        peer_ns, ns = (1e9 * moved / BANDWIDTH for moved in (of_peer, of_own))
        rows.append(f"| {PEER} | {name} | {of_peer:.0f} | {peer_ns:.2f} | |")
        rows.append(f"| {args.model} | {name} | {of_own:.0f} | {ns:.2f} | {of_own / of_peer:.2f} |")
    rows += [
        "",
        f"Kept for the backward pass of {IMAGES} images: {PEER} {peer_kept / 2**30:.2f} GiB, ",
    ]
    print("\n".join(rows) + f"{args.model} {own_kept / 2**30:.2f} GiB.")


if __name__ == "__main__":
    main()
