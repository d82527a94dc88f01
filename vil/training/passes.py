"""The passes of a model in training and evaluation; on a GPU, they can be recorded as CUDA graphs.

In eager mode, Python launches every kernel of a pass. For small models this takes longer than the kernels themselves. A
CUDA graph launches all kernels of a pass at once. They are the same kernels, so all results have the same bits. With
``torch.compile`` they are those of the compiled model.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vil.kernels.backends import automatic_backend
from vil.messages import first_line
from vil.training.errors import ConfigError
from vil.training.settings import RunConfig

# Passes before a recording: they load libraries and choose algorithms, which it cannot.
_WARM_UPS = 3


def uses_graphs(run: RunConfig, device: torch.device) -> bool:
    """Return whether a run records its passes in CUDA graphs."""
    return run.cuda_graphs and device.type == "cuda"


def describe(run: RunConfig, device: torch.device) -> str:
    """Return device, precision, whether the run compiles and, on a GPU, whether it uses CUDA graphs."""
    words = [str(device), "bfloat16 autocast" if run.amp else "float32"]
    words += ["compiled"] if run.torchcompile else []
    if device.type == "cuda":
        words.append("CUDA graphs" if run.cuda_graphs else "no CUDA graphs (run.cuda_graphs False)")
    return ", ".join(words)


class TrainingPass(nn.Module):
    """Forward pass and loss of a micro-batch, whose backward pass adds to the gradients of the parameters."""

    def __init__(self, model: nn.Module, criterion: nn.Module, run: RunConfig, device: torch.device) -> None:
        """Keep the model, which returns logits (B, classes), and the criterion of logits and targets; copy nothing."""
        super().__init__()
        self.model, self.criterion = model, criterion
        self.amp, self.parts = run.amp, run.grad_accum_steps
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.graphs = _Graphs(self._with_gradients, model) if uses_graphs(run, device) else None

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of images (B, C, H, W), divided by the number of micro-batches per step.

        In evaluation mode, nothing is recorded.
        """
        if self.graphs is None or not self.training:
            return self._loss(images, targets)
        loss, *gradients = self.graphs(images, targets)
        return _Differentiated.apply(loss, gradients, self.parts > 1, *self.trained)

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.amp):
            return self.criterion(self.model(images), targets) / self.parts

    def _with_gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor | None, ...]:
        loss = self._loss(images, targets)
        return loss.detach(), *torch.autograd.grad(loss, self.trained, allow_unused=True)


class ScoringPass(nn.Module):
    """Forward pass of a model in evaluation."""

    def __init__(self, model: nn.Module, run: RunConfig, device: torch.device) -> None:
        """Keep the model, without copying it; arguments as for ``TrainingPass``."""
        super().__init__()
        self.model, self.amp = model, run.amp
        self.graphs = _Graphs(self._logits, model) if uses_graphs(run, device) else None

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, C, H, W); the next pass may overwrite them."""
        [logits] = self._logits(images) if self.graphs is None else self.graphs(images)
        return logits

    def _logits(self, images: Tensor) -> tuple[Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.amp):
            return (self.model(images),)


class _Differentiated(torch.autograd.Function):
    """A loss whose gradients are known already; only its own backward pass may follow."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], copied: bool, *_: Tensor) -> Tensor:
        ctx.gradients, ctx.copied = gradients, copied
        return loss.clone()  # the next pass overwrites the loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # PyTorch makes a gradient without another owner a parameter's own, and copies any other one. Without a copy,
        # the next micro-batch would overwrite what it should add to.
        own = [g if g is None or ctx.copied else g.detach() for g in ctx.gradients]
        return None, None, None, *own


class _Recording(NamedTuple):
    """A CUDA graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Sequence[Tensor | None]


class _Graphs:
    """A function of tensors on a GPU, recorded as one CUDA graph per combination of shapes and dtypes."""

    everywhere: ClassVar["weakref.WeakSet[_Graphs]"] = weakref.WeakSet()
    """All of the process. Their graphs share memory: each reads only its inputs and the weights."""

    def __init__(self, function: Callable[..., Sequence[Tensor | None]], model: nn.Module) -> None:
        """Record nothing yet.

        The function, which calls the model, may change its buffers. Apart from the weights and the random states, it
        must not depend on anything that changes between calls.
        """
        self.function, self.model = function, model
        self.recordings: dict[Any, _Recording] = {}
        self.pool: Any = None
        self.everywhere.add(self)

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor | None]:
        """Return the function's results, in memory that the next call overwrites; raise ConfigError if it cannot
        record.
        """
        key = tuple((argument.shape, argument.dtype) for argument in arguments)
        if key not in self.recordings:
            self.recordings[key] = self._record(tuple(a.clone() for a in arguments))
        graph, inputs, outputs = self.recordings[key]
        for own, argument in zip(inputs, arguments, strict=True):
            own.copy_(argument)
        graph.replay()
        return outputs

    def _record(self, inputs: tuple[Tensor, ...]) -> _Recording:
        """Record the function; weights, buffers and random states stay as they are."""
        device = inputs[0].device
        rng = torch.random.fork_rng([device], device_type=device.type)
        with rng, _unchanged(self.model.buffers()):
            with _on_side_stream(device):
                with _compiling():
                    self.function(*inputs)
                for _ in range(_WARM_UPS):
                    self.function(*inputs)
            graph = torch.cuda.CUDAGraph()
            # The memory of existing graphs, or new memory: that of former graphs cannot be used again.
            pools = [graphs.pool for graphs in self.everywhere if graphs.recordings]
            self.pool = pools[0] if pools else torch.cuda.graph_pool_handle()
            try:
                # Meanwhile, other threads may use CUDA: those of the loader and of NCCL.
                with (
                    _without_garbage(),
                    torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"),
                ):
                    return _Recording(graph, inputs, self.function(*inputs))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ConfigError(
                    f"this model cannot be recorded in CUDA graphs ({first_line(error)}); pass "
                    f"--run.no-cuda-graphs (eval.py: --no-cuda-graphs)"
                ) from error


def _compiling() -> AbstractContextManager:
    """Compile the scans' kernels of a block at the same time instead of launching them, if there are any."""
    if automatic_backend("cuda", double=False) != "triton":
        return nullcontext()
    from vil.kernels.triton.launch import compiling  # triton may be missing

    return compiling()


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Collect garbage before a block and not inside: the end of a former graph would disturb a recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors at the end of a block."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    """Run a block on a new stream, between the work before and after it."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
    main.wait_stream(side)
