"""Cases of every kernel: inputs, launcher, float64 reference.

``errors(case)`` uses the emulator (``runtime``) or Triton's interpreter, depending on which one
executes Triton kernels in this process.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch

from vil.kernels.interface import ScanArgs

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Inputs of one operation, and their special properties."""

    op: str  # exact, longhorn, mamba, conv, mixer, model
    B: int
    L: int
    D: int
    M: int = 16
    dtype: str = "f32"
    directions: int = 2
    reverse: bool = False
    splits: bool = False
    extreme: str = ""  # extreme values, or the name of a mixer or model
    K: int = 4  # taps; blocks of a model
    parameters: str = "f32"
    strides: str = "backbone"
    quick: bool | int = False  # in --quick; or the only architecture there
    initial: bool = True
    saved: bool = True
    kappa_scale: float = 1.0
    order: int = 0  # phases that the convolution takes the tokens in; 0 for none

    @property
    def name(self) -> str:
        """Name of the case, printed and matched by --only."""
        sizes = "-".join(f"{size}{getattr(self, size)}" for size in "BLDM")
        others = [f for f in fields(self) if f.name not in ("op", *"BLDM", "dtype", "quick")]
        changed = [f"{f.name}={getattr(self, f.name)}" for f in others if getattr(self, f.name) != f.default]
        return "-".join([self.op, sizes, self.dtype, *changed])


def _randn(generator: torch.Generator):
    return lambda *shape: torch.randn(*shape, generator=generator)


# Rows between the sequences of an input, more than a kernel loads ahead.
GAP = 32


def _apart(t: torch.Tensor, odd: bool = False) -> torch.Tensor:
    """Return a copy of (..., L, C) with rows of NaN, which belong to no tensor, after each sequence.

    A kernel that reads past a sequence would otherwise get the next one, unnoticed. With ``odd``,
    neither the first address nor the rows are aligned.
    """
    *lead, L, width = t.shape
    row = width + odd * (1 + width % 2)
    rows = math.prod(lead) * (L + GAP)
    memory = torch.full((odd + rows * row,), math.nan, dtype=t.dtype)
    apart = memory[int(odd) :].view(*lead, L + GAP, row)[..., :L, :width]
    return apart.copy_(t)


def _far(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of (..., L, C) whose rows of one token lie together, 2^27 elements after those of the last.

    Scans copy rows farther apart. Offsets in elements pass 32 bits after 16 tokens. Only the pages of these rows
    take memory.
    """
    *lead, L, width = t.shape
    memory = torch.from_numpy(np.zeros((L << 27) * t.element_size(), np.uint8))  # the runtime's torch.empty fills
    far = memory.view(t.dtype).view(L, 1 << 27)[:, : t[..., 0, :].numel()].view(L, *lead, width)
    return far.movedim(0, -2).copy_(t)


def scan_inputs(c: Case) -> tuple[ScanArgs, torch.Tensor, torch.Tensor | None]:
    """Return the arguments of a scan and the gradients of its output and its last state."""
    g = torch.Generator().manual_seed(hash((c.L, c.D, c.M)) % 2**31)
    randn, dtype, N = _randn(g), DTYPES[c.dtype], c.directions
    pad = 3 if c.strides != "aligned" else 0
    x_dbl = _apart(randn(N, c.B, c.L, pad + 2 * c.M).to(dtype))
    k, q = x_dbl[..., pad : pad + c.M], x_dbl[..., pad + c.M :]
    x, dt = randn(N, c.B, c.L, c.D).to(dtype), randn(N, c.B, c.L, c.D).to(dtype)
    z = _apart(randn(c.B, c.L, 2 * c.D).to(dtype))[..., c.D :] if N == 2 else None
    if c.extreme in ("beta60", "keys1e3"):
        dt = torch.where(dt < -0.4, -60.0, torch.where(dt > 0.4, 60.0, dt.float())).to(dtype)
    if c.extreme == "keys1e3":
        k = (k.float() * (1e3 / k.float().norm(dim=-1, keepdim=True))).to(dtype)
    if c.extreme == "keys0":
        k = k * 0
    if c.strides == "transposed":
        x, dt, q, k = (t.mT.contiguous().mT for t in (x, dt, q, k))
        z = None if z is None else z.mT.contiguous().mT
    else:
        odd = c.strides == "odd"
        x, dt = _apart(x, odd), _apart(dt, odd)
        z = _apart(z, odd) if N == 2 and odd else z
    if c.extreme == "far":
        x, dt, q, k = (_far(t) for t in (x, dt, q, k))
        z = None if z is None else _far(z)
    A = -randn(N, c.D, c.M).exp() if c.op == "mamba" else None
    D, bias = randn(N, c.D), randn(N, c.D)
    initial = randn(1, c.B, c.D, c.M) if N == 1 and c.initial else None
    dout = randn(c.B, c.L, c.D).to(dtype)
    dfinal = randn(1, c.B, c.D, c.M) if N == 1 else None
    return ScanArgs(x, dt, A, q, k, D, bias, z, initial), dout, dfinal


def _recurrence(c: Case) -> str:
    return {"exact": "longhorn_exact"}.get(c.op, c.op)


def scan_reference(c: Case, inputs: ScanArgs, dout: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[list, list]:
    """Return the outputs and gradients of the float64 reference."""
    from vil.kernels import reference

    leaves = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    args, options = ScanArgs(*leaves), (_recurrence(c), c.reverse, c.kappa_scale)
    outputs = [t for t in reference.scan(args, *options) if t is not None]
    grads = [g.double() for g in (dout, dfinal) if g is not None]
    gradients = torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads)
    outputs = [o.detach() for o in outputs]
    if c.directions == 2:  # also the float32 sum before the gate, where no rounding hides errors
        with torch.no_grad():
            args = args._replace(z=None)
            ways = [ScanArgs(*(None if t is None else t[n : n + 1] for t in args)) for n in (0, 1)]
            sums = [reference.scan(way, _recurrence(c), n == 1, c.kappa_scale)[0] for n, way in enumerate(ways)]
            outputs.append(sum(sums))
    return outputs, list(gradients)


def scan_run(c: Case, inputs: ScanArgs, dout: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[list, list]:
    """Return the outputs and gradients of the kernels."""
    from vil.kernels.interface import scan_key
    from vil.kernels.triton import backend

    plan = backend.scan_plan(scan_key(inputs, _recurrence(c), c.reverse, c.kappa_scale))
    out, final, y_pre_gate, states = plan.forward(inputs, True)
    plain = out
    if c.op != "exact" or c.D >= 200:  # another specialisation, slow to compile
        plain, *_ = plan.forward(inputs, False)
    saved = (y_pre_gate, states) if c.saved else None
    grads = plan.backward(inputs, dout, dfinal, saved)
    if not torch.equal(out, plain):
        raise AssertionError("the output differs if states are saved")
    outputs = [out, y_pre_gate] if c.directions == 2 else [out, final]
    return outputs, [g for g in grads if g is not None]


def scan_results(c: Case) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (ours, truth) of every output and gradient of a scan."""
    inputs, dout, dfinal = scan_inputs(c)
    truths, gradients = scan_reference(c, inputs, dout, dfinal)
    outputs, grads = scan_run(c, inputs, dout, dfinal)
    names = ["out", "sum" if c.directions == 2 else "final"]
    names += ["d" + name for name, t in inputs._asdict().items() if t is not None]
    pairs = zip([*outputs, *grads], [*truths, *gradients], strict=True)
    return dict(zip(names, pairs, strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of a relative to the largest value of b."""
    if a.shape != b.shape:
        raise AssertionError(f"shape {tuple(a.shape)} is not {tuple(b.shape)}")
    if not torch.isfinite(a).all():
        return math.inf
    return float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))


@contextmanager
def in_splits(on: bool) -> Iterator[None]:
    """Cut scans into splits of two chunks (one if there are few); small inputs would not be cut.

    Splits after which states are saved are of sixteen chunks.
    """
    from vil.kernels.plan import forget_plans
    from vil.kernels.triton import tuning

    def splits(kernel, warps, chunks, *_):
        if kernel == "fragments_backward":
            return -(-chunks // 16), 16
        return (chunks, 1) if chunks < 4 else (-(-chunks // 2), 2)

    old = tuning.num_splits
    if on:
        tuning.num_splits = splits
        forget_plans()
    try:
        yield
    finally:
        tuning.num_splits = old
        forget_plans()


def errors(c: Case) -> dict[str, float]:
    """Return the error of every output and gradient, relative to its largest value."""
    others = {"conv": conv_errors, "mixer": mixer_errors, "model": model_errors}
    with in_splits(c.splits):
        if c.op in others:
            return others[c.op](c)
        return {n: relative(a, b) for n, (a, b) in scan_results(c).items()}


def conv_order(c: Case) -> torch.Tensor | None:
    """Return the tokens by phase, with gaps after each and without every fifth token, or None."""
    if not c.order:
        return None
    phases = [[t for t in range(phase, c.L, c.order) if t % 5 != 1] + [-1] * (c.K - 1) for phase in range(c.order)]
    return torch.tensor([entry for phase in phases for entry in phase], dtype=torch.int32)


def conv_errors(c: Case) -> dict[str, float]:
    """Return the errors of the convolution, forward and backward."""
    from vil.kernels import reference
    from vil.kernels.interface import conv_key
    from vil.kernels.triton import conv

    g = torch.Generator().manual_seed(c.L * c.D + c.K)
    randn, dtype, pdtype = _randn(g), DTYPES[c.dtype], DTYPES[c.parameters]
    x = _apart((randn(c.B, c.L, 2 * c.D) * (1e3 if c.extreme else 1)).to(dtype))[..., : c.D]
    weight, bias = randn(2, c.D, c.K).to(pdtype), randn(2, c.D).to(pdtype)
    grad = randn(2, c.B, c.L, c.D).to(dtype)
    if c.extreme:  # whole numbers, whose products add up exactly
        x, weight, bias = _apart(x.round()), (4 * weight).round(), bias.round()
    if c.strides == "odd":
        x = x[..., 1:]
        weight, bias, grad = weight[:, 1:], bias[:, 1:], grad[..., 1:]
    if c.strides == "transposed":
        x = x.mT.contiguous().mT
    order = conv_order(c)
    exact = (*(t.double() for t in (x, weight, bias)), order)
    gradients = reference.causal_conv1d_bidirectional_backward(grad.double(), *exact)
    truth = (reference.causal_conv1d_bidirectional(*exact), *gradients)
    plan = conv.ConvPlan(conv_key(x, weight, order))
    out, (dx, *others) = (
        plan.forward(x, weight, bias, order),
        plan.backward(grad, x, weight, bias, order),
    )
    if order is not None:  # tokens without a place have rows that nothing writes
        absent = torch.arange(c.L) % 5 == 1
        out, dx = (t.masked_fill(absent[:, None], 0) for t in (out, dx))
    ours = (out, dx, *others)
    names = ("out", "dx", "dweight", "dbias")
    return {n: relative(a, b) for n, a, b in zip(names, ours, truth, strict=True)}


def mixer_errors(c: Case) -> dict[str, float]:
    """Return the errors of the whole mixer and its gradients."""
    from vil.block import BidirectionalMixer
    from vil.kernels import mixer, ops

    recurrence = c.extreme
    torch.manual_seed(0)
    m = BidirectionalMixer(c.D, recurrence, d_state=c.M)
    with torch.no_grad():
        m.dt_bias.normal_()
        m.D.normal_()
    A = None if m.A_log is None else -m.A_log.exp()
    xz = torch.randn(c.B, c.L, 4 * c.D).to(DTYPES[c.dtype])
    weights = (m.conv_weight, m.conv_bias, m.x_proj_weight, m.dt_weight, m.dt_bias, A, m.D)
    given = {"xz": xz} | mixer.MixerParams(*weights)._asdict()
    given = {name: t for name, t in given.items() if t is not None}
    grad = torch.randn(c.B, c.L, 2 * c.D).to(xz)

    def run(backend: str, dtype: torch.dtype | None) -> list[torch.Tensor]:
        leaves = {n: t.detach().clone().to(dtype or t.dtype) for n, t in given.items()}
        xz, *params = (leaves[name].requires_grad_() for name in given)
        params = mixer.MixerParams(**({"A": None} | dict(zip([*given][1:], params, strict=True))))
        with ops.use_backend(backend):
            out = mixer.run(xz, params, recurrence, True)
            grads = torch.autograd.grad(out, [*leaves.values()], grad.to(out.dtype))
        return [out.detach(), *grads]

    names = ["out", *("d" + name for name in given)]
    truth, ours = run("reference", torch.float64), run("triton", None)
    return {n: relative(a, b) for n, a, b in zip(names, ours, truth, strict=True)}


def model_errors(c: Case) -> dict[str, float]:
    """Return the errors of the logits and of the worst gradient of a model of K blocks."""
    import timm

    import vil  # noqa: F401  (registers the models)
    from vil.kernels import ops

    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": c.D, "depth": c.K}
    model = timm.create_model(c.extreme, **size, num_classes=3)
    images = torch.randn(c.B, 3, 16, 16)
    results = []
    for backend in ("reference", "triton"):
        model = model.double() if backend == "reference" else model.float()
        model.zero_grad()
        with ops.use_backend(backend):
            logits = model(images.double() if backend == "reference" else images)
            logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    error = {"logits": relative(results[1][0], results[0][0])}
    pairs = zip(results[1][1:], results[0][1:], strict=True)
    error["gradients"] = max(relative(a, b) for a, b in pairs)
    return error


def all_cases() -> list[Case]:
    """Return every case, in an order in which cases reuse compiled kernels."""
    cases = []

    def add(op, B, L, D, **k):
        cases.append(Case(op, B, L, D, **k))

    for op in ("longhorn", "mamba"):
        longhorn = op == "longhorn"
        # one specialisation, several lengths: ragged groups, chunks, one token more than a chunk
        for L in (5, 17, 37, 50):
            add(op, 2, L, 40, M=4, dtype="f32")
        for L in (17, 37, 197):
            add(op, 2, L, 200, M=16, dtype="bf16", quick=90 * (longhorn and L == 37))
        for dtype in ("bf16", "f16"):  # what the project's own tests and its selfcheck run
            add(op, 1, 18, 32, M=4, dtype=dtype)
            add(op, 1, 197, 384, M=16, dtype=dtype)
        add(op, 1, 197, 384, M=16)
        add(op, 2, 1, 40, M=4)
        add(op, 1, 33, 64, M=16, dtype="f32")
        add(op, 1, 50, 24, M=5, dtype="f16")
        add(op, 2, 64, 96, M=16, dtype="bf16")
        add(op, 1, 5, 8, M=64)
        add(op, 1, 37, 384, M=16, dtype="bf16")
        for reverse in (False, True):
            quick = 80 if reverse and not longhorn else False
            add(op, 2, 19, 40, M=5, directions=1, reverse=reverse, quick=quick)
        add(op, 2, 5, 8, M=4, directions=1, initial=False)
        add(op, 2, 67, 40, M=4, splits=True, quick=80 if longhorn else 90)
        add(op, 2, 67, 40, M=4, directions=1, splits=True)
        add(op, 2, 67, 40, M=4, directions=1, reverse=True, splits=True)
        add(op, 2, 67, 136, M=16, dtype="bf16", splits=True)
        add(op, 1, 18, 32, M=4, extreme="keys1e3")
        add(op, 1, 18, 32, M=4, extreme="beta60")
        add(op, 1, 18, 32, M=4, extreme="keys0")
        add(op, 2, 5, 36, M=4, strides="transposed")
        add(op, 2, 21, 37, M=4, strides="odd", dtype="bf16", quick=90 if longhorn else 80)
        add(op, 2, 7, 40, M=4, saved=False)
    # exact: compiling is slow, so few specialisations and several lengths for each. More than 64
    # channels: products of whole warp groups on sm_90.
    for L in (37, 17, 197):
        add("exact", 2, L, 72, M=4, dtype="bf16", quick=L == 37)
    add("exact", 2, 37, 72, M=4, dtype="bf16", extreme="beta60")
    add("exact", 2, 197, 72, M=4, dtype="bf16", extreme="keys1e3")
    add("exact", 2, 37, 72, M=4, dtype="bf16", saved=False)
    add("exact", 2, 37, 72, M=4, dtype="bf16", extreme="far", quick=90)
    for L in (37, 197):
        add("exact", 2, L, 72, M=4, dtype="f32")
    add("exact", 2, 37, 72, M=4, dtype="f32", extreme="keys1e3")
    add("exact", 2, 67, 24, M=4, dtype="bf16", splits=True)
    add("exact", 1, 290, 36, M=16, dtype="bf16", splits=True, quick=80)  # also splits of the backward pass
    add("exact", 2, 67, 24, M=4, dtype="f16", splits=True)
    for reverse in (False, True):
        add("exact", 1, 520, 24, M=8, dtype="bf16", directions=1, reverse=reverse, splits=True)
    for reverse in (False, True):
        add("exact", 2, 37, 24, M=16, dtype="f32", directions=1, reverse=reverse)
    add("exact", 2, 37, 200, M=16, dtype="bf16")
    for dtype in ("f16", "bf16"):  # what the project's own tests and its selfcheck run
        add("exact", 1, 20, 32, M=16, dtype=dtype)
        add("exact", 1, 197, 384, M=16, dtype=dtype)
    add("exact", 2, 37, 72, M=4, dtype="f16")
    add("exact", 2, 37, 40, M=4, dtype="bf16")
    add("exact", 2, 50, 384, M=16, dtype="bf16")
    add("exact", 1, 21, 37, M=4, dtype="bf16", strides="odd")
    add("exact", 1, 20, 40, M=32, dtype="bf16")
    for M in (20, 40):  # 8 and 16 lanes for the states of a channel
        add("exact", 3, 50, 24, M=M, dtype="bf16", splits=True)
        add("exact", 1, 99, 24, M=M, directions=1, reverse=M == 20, splits=True)
    for L in (67, 197):  # 3 and 7 splits: the loop over them is a pipeline of copies
        add("exact", 2, L, 24, M=4, dtype="bf16", directions=1, splits=True)
    add("exact", 2, 1, 72, M=4, dtype="f32")
    add("exact", 2, 5, 72, M=4, dtype="f32")
    # convolution
    for L in (1, 3, 17, 70):
        add("conv", 2, L, 70, K=4)
    for K in (1, 2, 3, 8):
        add("conv", 1, 5, 3, K=K)
    add("conv", 2, 37, 200, dtype="bf16", quick=90)
    add("conv", 2, 197, 384, dtype="bf16")
    add("conv", 2, 17, 16, dtype="f16", parameters="f16")
    add("conv", 2, 17, 16, dtype="bf16", parameters="bf16")
    add("conv", 1, 17, 16, extreme="large")
    add("conv", 2, 17, 6, strides="transposed")
    add("conv", 2, 17, 41, strides="odd", dtype="bf16", quick=80)
    add("conv", 600, 37, 8)  # programs that take several tiles
    for L in (5, 70):
        add("conv", 2, L, 70, order=2)
    add("conv", 2, 37, 200, dtype="bf16", order=2, quick=90)
    add("conv", 2, 37, 40, dtype="bf16", K=8, order=3)
    add("conv", 2, 17, 41, strides="odd", dtype="bf16", order=2, quick=80)
    add("conv", 600, 37, 8, order=2)
    # a factor on |k|^2
    for op in ("longhorn", "exact"):
        add(op, 2, 37, 40, M=4, dtype="f32", kappa_scale=4.0)
        add(op, 2, 37, 72, M=4, dtype="bf16", kappa_scale=4.0, quick=90 if op == "exact" else 80)
        add(op, 2, 67, 40, M=4, dtype="f32", kappa_scale=0.25, splits=True)
    # the mixer and whole models
    for recurrence in ("longhorn", "mamba", "longhorn_exact"):
        add("mixer", 2, 21, 12, M=4, extreme=recurrence, quick=90 * (recurrence == "longhorn"))
    add("mixer", 2, 21, 12, M=4, dtype="bf16", extreme="longhorn")
    for model in ("vil_tiny", "vim_tiny", "vil_tiny_exact"):
        add("model", 1, 17, 16, extreme=model, K=1)
        add("model", 2, 17, 16, extreme=model, K=2, quick=80 * (model == "vil_tiny"))
    for dtype in ("f32", "bf16"):
        add("exact", 2, 67, 72, M=4, dtype=dtype, splits=True)  # both directions
        add("exact", 2, 67, 24, M=4, dtype=dtype, directions=1, reverse=True, splits=True)
    add("exact", 1, 37, 24, M=128, dtype="bf16")
    add("exact", 1, 37, 24, M=64, dtype="f32")
    add("exact", 2, 5, 72, M=4, dtype="bf16")
    add("exact", 1, 5, 24, M=16, dtype="bf16", directions=1, reverse=True)
    add("mixer", 2, 21, 12, M=4, dtype="bf16", extreme="longhorn_exact")
    add("mixer", 2, 21, 12, M=4, dtype="bf16", extreme="mamba")
    # step sizes made of three numbers in the kernel, by products of whole warp groups on sm_90
    for dtype in ("bf16", "f32"):
        add("mixer", 2, 37, 36, M=4, dtype=dtype, extreme="longhorn_exact")
        for recurrence in ("longhorn", "mamba", "longhorn_exact"):
            add("mixer", 2, 37, 36, M=4, dtype=dtype, extreme=recurrence, splits=True)
    # step sizes of 4, 24 and 2 numbers, which the kernels in registers take; 3 they do not
    add("mixer", 2, 37, 64, M=4, dtype="bf16", extreme="longhorn_exact", quick=True)
    add("mixer", 1, 20, 384, M=16, dtype="bf16", extreme="longhorn_exact")
    add("mixer", 1, 290, 32, M=16, dtype="bf16", extreme="longhorn_exact", splits=True)
    return cases
