"""The Triton kernels as launches compile them: what ``static_cost.py`` counts.

All for vil_tiny's D = 384 channels and M = 16 states, bfloat16 activations, channels next to each
other in memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from triton.runtime.jit import JITFunction

from vil.kernels.triton import (
    conv,
    exact_keys,
    exact_segments,
    longhorn_exact,
    sequential,
    sequential_segments,
    sequential_tokens,
    tuning,
)


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that is fixed when it is compiled.

    Attributes:
        name: Selects it on the command line, unique.
        kernel: The function under ``triton.jit``.
        signature: Triton type of every run-time argument, ":16" after it for multiples of 16, which
            is what launches infer of aligned pointers and of sizes; without effect where the
            kernel says that it is not to be specialised.
        constexprs: Values of the compile-time arguments, and of what a launch fixes: a pointer that
            is None, a size that is 1.
        blocks: Kernel of ``tuning`` whose BLOCK_D and warps it takes, or warps of a program.
        unit: What ``units`` counts.
        units: Units that one lane does in one iteration of each of the loops, or in all if there is
            no loop.
        on_amd: Compile-time arguments that are others on AMD.
        loops: How many of the longest innermost loops are counted.
        max_registers: Limit that launches set, if any.
        fusion: Whether launches let products and sums become one instruction.
    """

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, int | bool | str | None]
    blocks: str | int
    unit: str
    units: int
    on_amd: dict[str, int | bool | str] = field(default_factory=dict)
    loops: int = 1
    max_registers: int | None = None
    fusion: bool = True


D = 384  # vil_tiny's

_CONV_BLOCK, _CONV_WARPS = tuning.blocks_for("sm_90", "conv", D)
_CONV_CONSTEXPRS = {"D": D, "UNIT": 2, "BLOCK_L": conv.BLOCK_L}
_CONV_SIZES = dict.fromkeys(("B", "L", "x_stride_b", "x_stride_l", "stride_l"), "i32")
_CONV_INPUTS = {"x_ptr": "*bf16:16", "weight_ptr": "*fp32:16", "bias_ptr": "*fp32:16"}
_CONV_ORDER = {"order_ptr": "*i32", "positions": "i32", "order_stride_b": "i32"}
_CONV_UNITS = conv.BLOCK_L * _CONV_BLOCK // (32 * _CONV_WARPS)


def _conv(name: str, taps: int = 4) -> Variant:
    """Return a variant of the convolution, forward or backward and in an order or not, as its name says."""
    signature, constexprs = {**_CONV_INPUTS, **_CONV_SIZES}, {**_CONV_CONSTEXPRS, "K": taps}
    if "order" in name:
        signature |= _CONV_ORDER
    else:
        constexprs |= dict.fromkeys(_CONV_ORDER)
    if "forward" in name:
        kernel = conv._forward_kernel
        signature |= {"out_ptr": "*bf16:16"}
    else:
        kernel = conv._backward_kernel
        signature |= dict.fromkeys(("grad_ptr", "dx_ptr"), "*bf16:16")
        signature |= dict.fromkeys(("dweight_ptr", "dbias_ptr"), "*fp32:16")
    return Variant(name, kernel, signature, constexprs, "conv", "element of x", _CONV_UNITS)


_EXACT_PACKED = dict.fromkeys(("keys_ptr", "gram_ptr", "kappa_ptr"), "*fp32:16")
_EXACT_INPUTS = {
    **dict.fromkeys(("x_ptr", "dt_ptr", "z_ptr"), "*bf16:16"),
    **_EXACT_PACKED,
    "bias_ptr": "*fp32:16",
    "B": "i32:16",
    **dict.fromkeys(("L", "segments", "segment_chunks"), "i32"),
    **dict.fromkeys(
        ("x_stride_dir", "x_stride_b", "dt_stride_dir", "dt_stride_b", "z_stride_b"), "i32:16"
    ),
}
_EXACT_CONSTEXPRS = {
    "REVERSE": False,
    "x_stride_l": 384,
    "dt_stride_l": 384,
    "z_stride_l": 768,
    "D": D,
    "BLOCK_M": 16,
    "PRECISION": "tf32",
}
# What launches pass for sequences of both directions that are not cut, and for one direction.
_WHOLE = {"segments": 1, "entry_ptr": None}
_LOW_RANK = {"RANK": 12, "dt_stride_l": 44}
_FULL = {"RANK": 0, "dt_weight_ptr": None}
_ONE_WAY = {"z_ptr": None, "z_stride_l": 0}
_ONE = {**_ONE_WAY, "y_ptr": None}


def _exact(
    name: str,
    kernel: JITFunction,
    bf16: Iterable[str],
    fp32: Iterable[str],
    fixed: dict[str, int | bool | str | None],
    unit: str = "token-channel and direction",
    bodies: int = 1,
) -> Variant:
    """Return a variant of a kernel over segments.

    Args:
        name: Of the variant.
        kernel: The function under ``triton.jit``.
        bf16: Pointers that not all such kernels take, in bfloat16.
        fp32: The same in float32.
        fixed: What is fixed when this variant is compiled, None for a pointer that is not given.
        unit: What the tokens of a lane are counted by.
        bodies: Loops of a direction.
    """
    table = next(f"exact_{part}" for part in ("forward", "backward", "summary") if part in name)
    loops = bodies if "z_ptr" in fixed else 2 * bodies
    pointers = {**dict.fromkeys(bf16, "*bf16:16"), **dict.fromkeys(fp32, "*fp32:16")}
    return Variant(
        name=name,
        kernel=kernel,
        signature={**_EXACT_INPUTS, **pointers},
        constexprs={**_EXACT_CONSTEXPRS, **fixed},
        blocks=table,
        unit=unit,
        units=tuning.CHUNK * loops,
        on_amd={"PRECISION": "ieee"},
        loops=loops,
    )


def _exact_forward(name: str, **fixed: int | bool | str | None) -> Variant:
    pointers = ("skip_ptr", "states_ptr", "entry_ptr", "final_ptr")
    given = ("out_ptr", "y_ptr", "dt_weight_ptr")
    return _exact(name, longhorn_exact._forward_kernel, given, pointers, fixed)


def _exact_backward(name: str, **fixed: int | bool | str | None) -> Variant:
    outputs = ("sums_ptr", "dskip_ptr", "dbias_ptr", "dinitial_ptr")
    return _exact(
        name,
        longhorn_exact._backward_kernel,
        ("dout_ptr", "y_ptr", "dx_ptr", "ddt_ptr", "dz_ptr"),
        ("skip_ptr", "states_ptr", "entry_ptr", *outputs),
        fixed,
    )


def _exact_summary(name: str, **fixed: int | bool | str | None) -> Variant:
    kernel = exact_segments._summary_kernel
    unit = "token-channel, direction and state started from"
    return _exact(name, kernel, ("dout_ptr",), ("summary_ptr",), {"M": 16, **fixed}, unit, bodies=2)


_SEQUENTIAL_FP32 = (
    "rows", "rates", "skip", "bias", "y", "states", "scratch", "drows", "drates", "dskip", "dbias",
    "entry", "final", "dentry", "dinitial", "ends", "products", "initial",
)  # fmt: skip
_SEQUENTIAL_TYPES = {"B": "i32", "L": "i32", "segments": "i32", "key_norm": "fp32"} | {
    f"{name}_ptr": "*fp32:16" for name in _SEQUENTIAL_FP32
}
_SEQUENTIAL_CONSTEXPRS = {
    "N": 2, "REVERSE": 0, "D": D, "M": 16, "INTERVAL": tuning.CHUNK,
}  # fmt: skip
_BOTH = {"entry_ptr": None, "ENTRY": False, "final_ptr": None, "segments": 1}
_BOTH_BACK = {
    "dentry_ptr": None, "ENTRY": False, "dinitial_ptr": None, "segments": 1,
    "BITS": 5, "GROUP": 2, "PRECISION": "tf32",
}  # fmt: skip
_LONGHORN = {"MAMBA": False, "rates_ptr": None}


def _sequential(
    name: str,
    kernel: JITFunction,
    table: str,
    updates: int,
    loops: int,
    max_registers: int | None = None,
    **fixed: int | bool | str | None,
) -> Variant:
    """Return a variant of a token-by-token kernel.

    Args:
        name: Of the variant.
        kernel: The function under ``triton.jit``.
        table: Its name in ``tuning``.
        updates: (token, state) pairs of one channel in one iteration of each loop.
        loops: As of ``Variant``.
        max_registers: As of ``Variant``.
        **fixed: What is fixed when this variant is compiled, None for a pointer that is not given.
    """
    fixed = {**_SEQUENTIAL_CONSTEXPRS, **fixed}
    on_amd = {"PRECISION": "ieee"} if "PRECISION" in fixed else {}
    run_time = [a for a in kernel.arg_names if a not in fixed and a not in ("BLOCK_D", "FAST")]
    return Variant(
        name=name,
        kernel=kernel,
        signature={
            a: _SEQUENTIAL_TYPES.get(a, "*bf16:16" if a.endswith("_ptr") else "i32:16")
            for a in run_time
        },
        constexprs=fixed,
        blocks=table,
        unit="update",
        units=updates,
        on_amd=on_amd,
        loops=loops,
        max_registers=max_registers,
    )


def _sequential_forward(name: str, **fixed: int | bool | str | None) -> Variant:
    kernel = sequential._forward_kernel
    if not fixed["SAVE"]:
        fixed["states_ptr"] = None
    return _sequential(name, kernel, "sequential_forward", 2 * 16, 2, **fixed)


def _sequential_summary(name: str, **fixed: int | bool | str | None) -> Variant:
    kernel = sequential_segments._summary_kernel
    return _sequential(name, kernel, "sequential_forward", 16, 1, **fixed)


_BACKWARD = (sequential._backward_kernel, "sequential_backward", 2 * 16, 2)

VARIANTS = (
    _sequential_forward("diagonal_forward", SAVE=False, **_BOTH, **_LONGHORN),
    _sequential_forward("diagonal_forward_saving", SAVE=True, **_BOTH, **_LONGHORN),
    _sequential(
        "diagonal_backward",
        *_BACKWARD,
        sequential.MOST_REGISTERS,
        drates_ptr=None,
        **_BOTH_BACK,
        **_LONGHORN,
    ),
    _sequential_summary("diagonal_summary", ADJOINT=0, dout_ptr=None, z_ptr=None, **_LONGHORN),
    _sequential_summary("diagonal_summary_adjoint", ADJOINT=1, x_ptr=None, **_LONGHORN),
    _sequential_forward("mamba_forward", SAVE=False, MAMBA=True, **_BOTH),
    _sequential_forward("mamba_forward_saving", SAVE=True, MAMBA=True, **_BOTH),
    _sequential("mamba_backward", *_BACKWARD, MAMBA=True, **_BOTH_BACK),
    _sequential_summary("mamba_summary", ADJOINT=0, dout_ptr=None, z_ptr=None, MAMBA=True),
    _sequential_summary("mamba_summary_adjoint", ADJOINT=1, x_ptr=None, MAMBA=True),
    Variant(
        name="sequential_carry",
        kernel=sequential_segments._carry_kernel,
        signature={
            **dict.fromkeys(("ends_ptr", "products_ptr", "initial_ptr"), "*fp32:16"),
            "B": "i32:16",
            "segments": "i32",
        },
        constexprs={
            "N": 2,
            "REVERSE": 0,
            "ADJOINT": 0,
            "INITIAL": True,
            "SIZE": 16 * 384,
            "BLOCK": 256,
        },
        blocks=4,
        unit="segment and state of a channel",
        units=2,
    ),
    Variant(
        name="sequential_pack",
        kernel=sequential_tokens._pack_kernel,
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16:16"),
            "rows_ptr": "*fp32:16",
            "B": "i32:16",
            "L": "i32",
            "key_norm": "fp32",
            **{f"{n}_stride_{axis}": "i32" for n in "qk" for axis in ("dir", "b", "l")},
        },
        constexprs={
            "q_stride_m": 1,
            "k_stride_m": 1,
            "STATES": 16,
            "M": 16,
            "BLOCK_M": 16,
            "TOKENS": 16,
        },
        fusion=False,
        blocks=4,
        unit="token and direction",
        units=16,
    ),
    _exact_forward("exact_forward", **_WHOLE, **_LOW_RANK, states_ptr=None, final_ptr=None),
    _exact_forward("exact_forward_saving", **_WHOLE, **_LOW_RANK, final_ptr=None),
    _exact_forward("exact_forward_one", **_ONE, **_FULL),
    _exact_backward("exact_backward", **_WHOLE, dinitial_ptr=None),
    _exact_backward("exact_backward_one", **_ONE, dz_ptr=None),
    _exact_summary("exact_summary", **_ONE_WAY, dout_ptr=None),
    _exact_summary("exact_summary_adjoint", **_ONE_WAY),
    Variant(
        name="exact_carry",
        kernel=exact_segments._carry_kernel,
        signature={
            **dict.fromkeys(("summary_ptr", "start_ptr", "entry_ptr"), "*fp32:16"),
            "B": "i32:16",
            "segments": "i32",
        },
        constexprs={"DESCENDING": False, "D": D, "M": 16, "BLOCK_M": 16},
        blocks=1,
        unit="segment of a channel",
        units=1,
    ),
    Variant(
        name="exact_keys",
        kernel=exact_keys._keys_kernel,
        signature={
            **dict.fromkeys(("keys_ptr", "sums_ptr"), "*fp32:16"),
            **dict.fromkeys(("dq_ptr", "dk_ptr"), "*bf16:16"),
            "B": "i32:16",
            **dict.fromkeys(("L", "blocks"), "i32"),
            "key_norm": "fp32",
        },
        constexprs={"REVERSE": False, "M": 16, "BLOCK_M": 16, "PRECISION": "tf32"},
        blocks=1,
        unit="token, direction and block of channels",
        units=tuning.CHUNK,
        on_amd={"PRECISION": "ieee"},
    ),
    Variant(
        name="exact_gram",
        kernel=exact_keys._gram_kernel,
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16:16"),
            **_EXACT_PACKED,
            "B": "i32:16",
            "L": "i32",
            "key_norm": "fp32",
            **{f"{name}_stride_{axis}": "i32" for name in "qk" for axis in ("dir", "b", "l")},
        },
        constexprs={"REVERSE": False, "M": 16, "BLOCK_M": 16, "PRECISION": "tf32"},
        blocks=1,
        unit="token and direction",
        units=tuning.CHUNK,
        on_amd={"PRECISION": "ieee"},
    ),
    _conv("conv_forward"),
    _conv("conv_backward"),
    _conv("conv_forward_order"),
    _conv("conv_backward_order"),
    _conv("conv_forward_order_of_8", taps=8),  # what four taps become at most, at another grid
    _conv("conv_backward_order_of_8", taps=8),
)
