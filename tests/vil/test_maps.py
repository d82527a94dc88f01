"""Maps of every model: exact where they claim to be, patches in place, errors for other inputs."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.small import images, small
from vil import maps
from vil.profile import count_macs
from vil.tokens import class_token_first

NAMES = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
KINDS = ({}, {"class_token": False, "global_pool": "avg"}, {"patch_stride": 4})
SIZES = ((32, 32), (48, 64), (16, 24))  # the trained size, and others with grid orders


def scanned(model: nn.Module, images: Tensor, block: int) -> Tensor:
    """Return the input (B, E, L) of the output projection of a block, class token first."""
    given: list[Tensor] = []
    hook = model.blocks[block].mixer.proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        model.forward_features(images)
    hook.remove()
    return class_token_first(given[0], model.num_prefix_tokens).mT


@pytest.mark.pairs
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_matrices_times_values_are_the_mixer(name: str, kwargs: dict, dtype: torch.dtype, tolerance: float) -> None:
    model = small(name, **kwargs).to(dtype)
    for block, size in zip((0, 1, -2), SIZES, strict=True):
        x = images(*size).to(dtype)
        matrices, values = maps.channel_matrices(model, x, block)
        expected = scanned(model, x, block)
        error = (matrices @ values[..., None]).sum(0).squeeze(-1) - expected
        assert matrices.dtype == values.dtype == dtype
        assert error.abs().max() < tolerance * expected.abs().max()
        mean = matrices.sum(0).abs().mean(1)
        torch.testing.assert_close(maps.token_matrix(model, x, block), mean)
        patches = matrices[..., model.num_prefix_tokens :, model.num_prefix_tokens :]
        assert not patches[0].triu(1).any()  # from the first token to the last
        assert not patches[1].tril(-1).any()


@pytest.mark.parametrize("look", [maps.token_matrix, lambda model, x: count_macs(model, x.shape[1:])])
def test_looking_leaves_each_module_in_its_own_mode(look: Callable) -> None:
    model = small(pos_drop_rate=0.5).train()
    model.blocks[0].eval()  # as frozen parts are
    seen, x = look(model, images()), images()
    assert not model.blocks[0].training
    assert not model.blocks[0].mixer.training
    assert all(part.training for part in (model, model.pos_drop, model.blocks[1].mixer))
    assert torch.equal(torch.as_tensor(seen), torch.as_tensor(look(small(), x)))  # without dropout


def test_a_compiled_block_has_the_same_maps() -> None:
    model, x = small(), images(48, 64)
    expected = maps.token_matrix(model, x, 0)
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(x)  # compiled code does not call hooks that come later
    assert torch.equal(maps.token_matrix(model, x, 0), expected)


def test_no_images_have_empty_maps() -> None:
    model, x = small(), images(count=0)
    matrices, values = maps.channel_matrices(model, x)
    assert (matrices.shape, values.shape) == ((2, 0, 64, 17, 17), (2, 0, 64, 17))
    matrix = maps.token_matrix(model, x)
    assert (matrix.shape, maps.pooled_reads(model, x, matrix).shape) == ((0, 17, 17), (0, 4, 4))


@pytest.mark.parametrize("kwargs", KINDS[:2], ids=str)
def test_pooled_reads_are_the_rows_of_what_the_head_pools(kwargs: dict) -> None:
    model, x = small(**kwargs), images(32, 64)
    prefix, count = model.num_prefix_tokens, 32 + model.num_prefix_tokens
    matrix = torch.rand(2, count, count)
    read = maps.pooled_reads(model, x, matrix)
    rows = matrix[:, :1] if prefix else matrix  # the class token alone, or all patches
    for row, column in ((0, 0), (0, 7), (3, 1)):
        expected = rows[:, :, prefix + 8 * row + column].mean(1)
        torch.testing.assert_close(read[:, row, column], expected)


def test_what_cannot_be_shown_is_an_error_that_names_it() -> None:
    model, x = small(), images()
    deit = timm.create_model("deit_tiny_patch16_224", depth=1)
    with pytest.raises(ValueError, match="model must be or contain exactly one model"):
        maps.token_matrix(deit, x)
    with pytest.raises(ValueError, match="images must be floating-point"):
        maps.token_matrix(model, x[0])
    with pytest.raises(ValueError, match="block must be from -2 to 1, got 2"):
        maps.token_matrix(model, x, 2)
