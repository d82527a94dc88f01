"""Maps of every model: exact where they claim to be, patches in place, errors for other inputs."""

import pytest
import timm
import torch
from torch import Tensor, nn

from vil import maps
from vil.kernels import ops
from vil.tokens import class_token_first

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
NAMES = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
KINDS = ({}, {"class_token": False, "global_pool": "avg"}, {"patch_stride": 4})
SIZES = ((32, 32), (48, 64), (16, 24))  # the trained size, and others with grid orders


def small(name: str = "vil_tiny", dtype: torch.dtype = torch.float32, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pictures(height: int = 32, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, height, width, generator=generator, dtype=dtype)


def scanned(model: nn.Module, images: Tensor, block: int) -> Tensor:
    """Return the input (B, E, L) of the output projection of a block, class token first."""
    given: list[Tensor] = []
    hook = model.blocks[block].mixer.proj.register_forward_pre_hook(
        lambda _, args: given.append(args[0])
    )
    with torch.no_grad():
        model.forward_features(images)
    hook.remove()
    return class_token_first(given[0], model.num_prefix_tokens).mT


@pytest.mark.pairs
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_matrices_times_values_are_the_mixer(
    name: str, kwargs: dict, dtype: torch.dtype, tolerance: float
) -> None:
    model = small(name, dtype, **kwargs)
    for size in SIZES:
        images = pictures(*size, dtype=dtype)
        matrices, values = maps.channel_matrices(model, images, block=0)
        expected = scanned(model, images, 0)
        error = (matrices @ values[..., None]).sum(0).squeeze(-1) - expected
        assert matrices.dtype == values.dtype == dtype
        assert error.abs().max() < tolerance * expected.abs().max()
        mean = matrices.sum(0).abs().mean(1)
        torch.testing.assert_close(maps.token_matrix(model, images, 0), mean)


def test_rollout_is_the_product_over_blocks() -> None:
    model, images = small(), pictures()
    rolled = maps.rollout(model, images)
    expected = torch.eye(17).expand(2, -1, -1)
    for block in (0, 1):
        matrix = maps.token_matrix(model, images, block)
        expected = (torch.eye(17) + matrix / matrix.sum(-1, keepdim=True)) / 2 @ expected
    torch.testing.assert_close(rolled, expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 17))


@pytest.mark.parametrize("name", NAMES)
def test_patches_are_in_their_places(name: str) -> None:
    """In the first block, without a convolution, a patch's step and decay depend on it alone."""
    model = small(name, d_conv=1, resize_below_scale=0)
    with torch.no_grad():
        model.pos_embed.zero_()
    images = pictures(24, 40)[:1].repeat(2, 1, 1, 1)
    images[1, :, 8:16, 32:40] = 3.0
    for values in (maps.step_size(model, images, 0), maps.decay(model, images, 0)):
        assert values.shape == (2, 3, 5)
        assert values.min() >= 0
        assert (values[0] != values[1]).nonzero().tolist() == [[1, 4]]


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_what_a_scan_forgets(name: str) -> None:
    """Measured by a scan of one token over unit states; the query reads each of them."""
    model, images = small(name, img_size=8, class_token=False, global_pool="avg"), pictures(8, 8)
    [scan] = maps._scans(model, images, [0])
    kept = 0.0
    for direction in (0, 1):
        for j in range(16):
            state = torch.zeros(2, 64, 16)
            state[..., j] = 1
            query = state[:, :1, :]
            tensors = (torch.zeros(2, 1, 64), scan.args.dt[direction])
            last = (query, scan.args.k[direction], None, scan.args.bias[direction])
            with ops.use_backend("reference"):
                if name == "vim_tiny":
                    read = ops.mamba_scan(
                        *tensors, scan.args.A[direction], *last, initial_state=state
                    )
                else:
                    exact = "longhorn_exact" if name.endswith("exact") else "longhorn"
                    read = ops.longhorn_scan(*tensors, *last, recurrence=exact, initial_state=state)
            kept = kept + read.mean((1, 2)) / 32
    torch.testing.assert_close(maps.decay(model, images, 0), (1 - kept)[:, None, None])


def test_what_cannot_be_shown_is_an_error_that_names_it() -> None:
    model, images = small(), pictures()
    deit = timm.create_model("deit_tiny_patch16_224", depth=1)
    for function in (maps.token_matrix, maps.rollout, maps.step_size, maps.decay):
        with pytest.raises(ValueError, match="model must be or contain exactly one model"):
            function(deit, images)
        with pytest.raises(ValueError, match="images must be floating-point"):
            function(model, images[0])
    with pytest.raises(ValueError, match="block must be from -2 to 1, got 2"):
        maps.token_matrix(model, images, 2)
