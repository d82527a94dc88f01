"""Parameters and multiply-adds of the models: ``python -m vil.complexity`` prints the table.

PyTorch's FlopCounterMode knows the operators as soon as ``vil`` is imported. fvcore and calflops are told
by the two functions here, which give what each takes, in the units of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import vil  # noqa: F401  (registers the models)
from vil.block import BidirectionalMixer

_PATTERNS = ("vil_*", "vim_*")
_ALIKE = ("*_exact_pyramid", "vim_*_pyramid")  # what their levels add is what those of vil_* add


def count_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Count the multiply-adds of one forward pass of one image, scans and convolutions included.

    Matrix products and convolutions as torch's FlopCounterMode counts them, and per direction,
    token, channel and state 4 for the diagonal Longhorn and the Mamba scan and 3 for the exact
    Longhorn scan, plus skip and gate. Exponentials, divisions, norms and activations are not
    counted. Nothing is computed: the model's layers run on shapes alone.

    Args:
        model: Any image model.
        input_size: (channels, height, width) of the image.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = next(model.parameters()).dtype
    image = torch.empty(1, *input_size, device="meta", dtype=dtype)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(model, shapes, (image,))
    finally:
        model.train(training)
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, trainable or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def fvcore_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Return what fvcore needs to count the operators, by their names: ::

        FlopCountAnalysis(model, images).set_op_handle(**vil.complexity.fvcore_handles())

    Multiply-adds, which are fvcore's flops. With convolutions and linear layers they make the number of
    ``count_macs``; fvcore may add others, such as norms other than RMSNorm.
    """
    names = {str(operator).replace(".", "::"): count for operator, count in flop_registry.items()}

    def handle(count: Callable[..., int]) -> Callable[[Sequence[Any], Sequence[Any]], int]:
        return lambda inputs, outputs: count(*map(_traced, inputs), out_val=None) // 2

    return {name: handle(count) for name, count in names.items() if name.startswith("vil::")}


def _traced(value: Any) -> Any:
    """Return the shape of a tensor in a traced graph, or the number, text or None that it has."""
    return tuple(value.type().sizes()) if value.isCompleteTensor() else value.toIValue()


def calflops_hooks() -> dict[type[nn.Module], Callable[[nn.Module, tuple, Any], None]]:
    """Return what calflops needs to count the mixers, by the type of module: ::

        calflops.pytorch_ops.MODULE_HOOK_MAPPING.update(vil.complexity.calflops_hooks())

    calflops counts calls of functions that it replaces, and knows modules that call others by hooks. An
    operator that is called outside of a model is not counted.
    """
    return {BidirectionalMixer: _count_mixer}


def _count_mixer(mixer: BidirectionalMixer, inputs: tuple[Tensor, ...], output: Any) -> None:
    # Its projections are modules, which calflops counts apart.
    xz = (*inputs[0].shape[:2], mixer.in_proj.out_features)
    weights = (mixer.conv_weight, mixer.conv_bias, mixer.x_proj_weight, mixer.dt_weight)
    rest = (mixer.dt_bias, mixer.A_log, mixer.D, mixer.recurrence)
    flops = flop_registry[torch.ops.vil.mixer](xz, *weights, *rest, out_val=None)
    mixer.__flops__ += flops
    mixer.__macs__ += flops // 2


def table() -> str:
    """Return a Markdown table of the models of this package at their default image size.

    A pyramid is counted as ``features_only`` gives it, without a head.
    """
    rows = []
    for name in timm.list_models(_PATTERNS, exclude_filters=list(_ALIKE)):
        only = {"features_only": True} if name.endswith("_pyramid") else {}
        model = timm.create_model(name, device="meta", **only)
        backbone = model.model if only else model
        macs = count_macs(model, model.default_cfg["input_size"])
        recurrence = backbone.blocks[0].mixer.recurrence
        size = f"{backbone.embed_dim} | {count_parameters(model):,} | {macs / 1e9:.2f}"
        rows.append((backbone.embed_dim, f"| `{name}` | {recurrence} | {size} |"))
    rows = [row for _, row in sorted(rows, key=lambda item: item[0])]
    head = ["| model | recurrence | channels | parameters | GMACs |", "|---|---|---|---|---|"]
    return "\n".join(head + rows)


def _main() -> None:
    print(table())


if __name__ == "__main__":
    _main()
