"""Tokens on a grid that is not the trained one: compared with the definition, and at its limits."""

import gc
import itertools

import pytest
import timm
import torch
from torch import Tensor

from tests.grids import Grid
from tests.grids import convolve as convolve_on
from vil.kernels import ops, reference
from vil.kernels.interface import ScanArgs
from vil.kernels.order import kappa_scale
from vil.kernels.plan import MAX_KEPT
from vil.sizes import TokenLayout, _recent_tables, fit

K, D = 4, 3


def parameters(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, D, K, dtype=torch.float64, generator=generator)
    return weight, torch.randn(2, D, dtype=torch.float64, generator=generator)


def tokens(grid: Grid, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, grid.length, D, dtype=torch.float64, generator=generator)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, grid: Grid) -> Tensor:
    return convolve_on(x, weight, bias, grid.layout(weight.shape[2]))


def by_address(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    """Convolve maps (B, H, W, D) patch by patch, without a class token and with integer ratios."""
    B, H, W, _ = x.shape
    out = bias[:, None, None, None].expand(2, B, H, W, D).clone()
    for direction, i, j, distance in itertools.product((0, 1), range(H), range(W), range(K)):
        row, column = i, j + distance * columns * (1 if direction == 1 else -1)
        while column < 0:
            row, column = row - rows, column + W
        while column >= W:
            row, column = row + rows, column - W
        if 0 <= row < H:
            out[direction, :, i, j] += weight[direction, :, K - 1 - distance] * x[:, row, column]
    return torch.nn.functional.silu(out)


@pytest.mark.parametrize("ratio", [(1, 2), (2, 2), (3, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("trained", [(2, 3), (3, 2), (4, 4)])
def test_taps_meet_the_patch_that_lies_where_it_did(trained: tuple[int, int], ratio: tuple[int, int]) -> None:
    rows, columns = ratio
    H, W = trained[0] * rows, trained[1] * columns
    grid = Grid(H, W, trained, class_token=0)
    x, (weight, bias) = tokens(grid), parameters()
    expected = by_address(x.unflatten(1, (H, W)), weight, bias, rows, columns)
    torch.testing.assert_close(convolve(x, weight, bias, grid).unflatten(2, (H, W)), expected)


@pytest.mark.parametrize("eighths", range(8, 33))
def test_a_parabola_of_values_is_met_where_it_says(eighths: int) -> None:
    """Ratios 1 to 4 in steps of 1/8, away from row ends."""
    W, ratio = 3 * eighths, eighths / 8
    grid = Grid(1, W, (1, 24), class_token=0)
    column = torch.arange(W, dtype=torch.float64) + 100  # large, where SiLU is linear
    x = (column**2)[None, :, None].expand(1, W, D).contiguous()
    weight, bias = torch.zeros(2, D, K, dtype=torch.float64), torch.zeros(2, D).double()
    weight[0, :, 1], weight[1, :, 2] = 1.0, 1.0
    out, margin = convolve(x, weight, bias, grid)[:, 0, :, 0], 8 * (eighths // 8)
    near = {"rtol": 1e-7, "atol": 0}  # the layout's factors are in units of 2^-30
    torch.testing.assert_close(out[0, margin:], (column - 2 * ratio)[margin:] ** 2, **near)
    torch.testing.assert_close(out[1, :-margin], (column + ratio)[:-margin] ** 2, **near)


@pytest.mark.parametrize("patch", [(4, 4), (8, 4)], ids=str)
@pytest.mark.parametrize("size", [(6, 16), (9, 24), (6, 12), (12, 20)])
def test_class_token_meets_the_centres_of_the_trained_patches(size: tuple[int, int], patch: tuple[int, int]) -> None:
    """For values that rise evenly over the image, its result is the same at every grid."""

    def own_result(H: int, W: int) -> Tensor:
        y, x = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (H, W))
        values = 3 * y[:, None] / H + 2 * x / W
        values = torch.cat([values.flatten()[: H * W // 2], values.flatten()[H * W // 2 - 1 :]])
        values[H * W // 2] = 1.0  # the class token
        x = values[None, :, None].expand(1, -1, D)
        grid = Grid(H, W, (3, 8), patch, patch)
        return convolve(x, *parameters(), grid)[:, :, H * W // 2]

    torch.testing.assert_close(own_result(*size), own_result(3, 8), rtol=1e-5, atol=1e-6)


def test_patches_at_half_the_stride_are_the_trained_ones_every_second() -> None:
    """If patches overlap, 7 x 7 instead of 4 x 4 puts taps at 2 times the distance, not 7 / 4."""
    grid = Grid(7, 7, (4, 4), (4, 4), (2, 2))
    assert grid.tokens_per_ref == 4.0
    maps = tokens(grid)[:, :49].unflatten(1, (7, 7))
    coarse, class_token = maps[:, ::2, ::2].flatten(1, 2), tokens(grid)[:, 49:]
    own = torch.cat([coarse[:, :8], class_token, coarse[:, 8:]], 1)
    finer = maps.flatten(1, 2)
    finer = torch.cat([finer[:, :24], class_token, finer[:, 24:]], 1)
    weight, bias = parameters()
    out = convolve(finer, weight, bias, grid)
    expected = reference.causal_conv1d_bidirectional(own, weight, bias)
    torch.testing.assert_close(out[:, :, 24], expected[:, :, 8])
    patches = torch.cat([out[:, :, :24], out[:, :, 25:]], 2).unflatten(2, (7, 7))[:, :, ::2, ::2]
    alone = reference.causal_conv1d_bidirectional(coarse, weight, bias)
    torch.testing.assert_close(patches.flatten(2, 3), alone)


@pytest.mark.parametrize("size", [(8, 8), (6, 7), (3, 3), (2, 9), (16, 4), (1, 1)])
def test_every_token_is_written_once_and_keeps_a_constant(size: tuple[int, int]) -> None:
    weight, bias = torch.zeros(2, D, K, dtype=torch.float64), torch.zeros(2, D).double()
    for class_token in (0, 1):
        grid = Grid(*size, (4, 4), class_token=class_token)
        weight[:] = 0
        weight[..., K - 1] = 1.0  # the tap of a token itself
        x = tokens(grid)
        own = torch.nn.functional.silu(x).expand(2, -1, -1, -1)
        torch.testing.assert_close(convolve(x, weight, bias, grid), own)
        weight[:] = 1 / K
        constant = convolve(torch.ones_like(x), weight, bias, grid)
        within = constant[:, :, size[0] * size[1] // 2] if class_token else constant[0, :, -1]
        if class_token or size != (1, 1):  # all taps are within the image
            torch.testing.assert_close(within, torch.sigmoid(torch.ones_like(within)))


def scanned(recurrence: str, tokens_per_ref: list[int], repeats: int, scale: float) -> Tensor:
    """Return the state, as queries read it, after a token that was split into equal tokens."""
    generator = torch.Generator().manual_seed(2)
    x, dt = torch.randn(2, 1, 1, 1, D, dtype=torch.float64, generator=generator)
    k = scale * torch.randn(1, 1, 1, 4, dtype=torch.float64, generator=generator)
    start = torch.randn(1, D, 4, dtype=torch.float64, generator=generator)
    A = -torch.rand(1, D, 4, dtype=torch.float64, generator=generator) if "mamba" in recurrence else None
    dt = dt - 4 if recurrence == "mamba" else dt
    weight = torch.ones(1, 9, 1, dtype=torch.float64)  # rows: step size, keys, queries
    layout = TokenLayout(tokens_per_ref, None, None, None, None)
    own = fit(weight, weight, A, layout, recurrence, 1)
    k_factor, q_factor = own.x_proj_weight[0, 1, 0], own.x_proj_weight[0, 5, 0]
    k = (k * k_factor).expand(1, 1, repeats, 4)
    x, dt = x.expand(1, 1, repeats, D), dt.expand(1, 1, repeats, D)
    state = (start / q_factor)[None]
    args = ScanArgs(x, dt, own.A, k, k, D=None, bias=None, z=None, initial_state=state)
    _, state, *_ = reference.scan(args, recurrence, False, kappa_scale(recurrence, tokens_per_ref))
    return state[0] * q_factor


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("tokens_per_ref", [4, 9])
def test_equal_tokens_together_do_what_one_did(recurrence: str, tokens_per_ref: int) -> None:
    """They agree to first order: a step a tenth as long leaves a hundredth of the difference."""
    errors = []
    for scale in (0.3, 0.3 / 10**0.5):  # of the key; the second makes |k|^2 a tenth
        one, split = (scanned(recurrence, [m, 1], m, scale) for m in (1, tokens_per_ref))
        still = scanned(recurrence, [1, 1], 1, 0.0) if recurrence != "mamba" else one.new_zeros(())
        errors.append((split - one).abs().max().item() / (one - still).abs().max().item())
    if recurrence == "mamba":  # its step does not depend on the key, but dt is small
        assert errors[0] < 0.02
    else:
        assert errors[0] < 0.05
        assert errors[1] < errors[0] / 5


@pytest.mark.ci
def test_mamba_forgets_exactly_as_much() -> None:
    one, split = (scanned("mamba", [m, 1], m, 0.0) for m in (1, 9))
    torch.testing.assert_close(one, split, rtol=1e-12, atol=1e-12)


@pytest.mark.ci
@pytest.mark.parametrize("recurrence", ["longhorn", "longhorn_exact"])
def test_steps_on_a_coarser_grid_stay_stable(recurrence: str) -> None:
    """A step never exceeds 1 / |k|^2, however long the key is."""
    for scale in (0.1, 1.0, 100.0):
        state = scanned(recurrence, [1, 16], 1, scale)
        one = scanned(recurrence, [1, 1], 1, scale)
        assert state.abs().max() < 10 * one.abs().max() + 10 / scale


def test_what_the_operator_makes_is_the_layout_and_its_own() -> None:
    grids, like = [8, 8, 4, 4, 4, 4, 4, 4, 1], torch.ones(1)
    torch.library.opcheck(torch.ops.vil.token_tables, (grids, K, like))
    made, again = (torch.ops.vil.token_tables(grids, K, like) for _ in range(2))
    layout = Grid(8, 8, (4, 4)).layout(K)
    expected = (layout.order, layout.taps, layout.cls_index, layout.cls_taps)
    for tensor, other, kept in zip(made, again, expected, strict=True):
        assert not tensor.is_floating_point()  # trainers cast such inputs of a block
        assert torch.equal(tensor, kept)
        assert tensor.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_no_table(dtype: torch.dtype) -> None:
    """They are kept for all models of the process, whoever made them first."""
    expected = Grid(7, 11, (4, 4)).layout(K)
    torch.set_default_dtype(dtype)
    try:
        _recent_tables.cache_clear()
        made = Grid(7, 11, (4, 4)).layout(K)
        model = timm.create_model("vil_tiny", img_size=8, patch_size=4, embed_dim=16, depth=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.ref_feat_bits.dtype == torch.float32
    for one, other in zip(made[1:], expected[1:], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_memory_for_image_sizes_is_bounded() -> None:
    """After more sizes than are kept, further ones keep no more tables; these have integers, unlike other tensors."""
    model = timm.create_model("vil_tiny", img_size=8, patch_size=4, embed_dim=16, depth=1).eval()
    sizes, counts = itertools.product(range(5, 30), range(5, 31)), []  # 650
    for number, (rows, columns) in enumerate(sizes, 1):
        with torch.no_grad():
            model(torch.zeros(1, 3, 4 * rows, 4 * columns))
        if number in (MAX_KEPT + 40, 650):
            gc.collect()
            tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
            counts.append(sum(not value.is_floating_point() for value in tensors))
            del tensors
    assert counts[1] < counts[0] + MAX_KEPT / 2
