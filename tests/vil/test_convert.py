"""Checkpoints with the official Vision Mamba names, compared with its forward pass written out."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub.utils import EntryNotFoundError
from torch import Tensor, nn

import vil
from tests.training.run_files import completed
from vil.training.distributed import World
from vil.training.resolve import read_source
from vil.training.settings import ModelConfig, TrainConfig
from vil.training.setup import build

SIZES = {"img_size": 48, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_classes": 7}
TINY = {"img_size": 224, "patch_size": 16, "embed_dim": 192, "depth": 24, "num_classes": 1000}
INNER, RANK, STATES = 64, 2, 16  # of SIZES


def official_state_dict(sizes: dict[str, int] = SIZES, stride: int = 16) -> dict[str, Tensor]:
    """Return a random checkpoint with the official names and shapes."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, scale: float = 0.1) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    dim, inner, rank = sizes["embed_dim"], 2 * sizes["embed_dim"], sizes["embed_dim"] // 16
    patches = ((sizes["img_size"] - 16) // stride + 1) ** 2
    state = {
        "cls_token": randn(1, 1, dim),
        "pos_embed": randn(1, patches + 1, dim),
        "patch_embed.proj.weight": randn(dim, 3, 16, 16, scale=0.03),
        "patch_embed.proj.bias": randn(dim),
        "norm_f.weight": 1 + randn(dim),
        "head.weight": randn(sizes["num_classes"], dim),
        "head.bias": randn(sizes["num_classes"]),
    }
    for i in range(sizes["depth"]):
        mixer = {
            "in_proj.weight": randn(2 * inner, dim, scale=0.3),
            "out_proj.weight": randn(dim, inner, scale=0.3),
        }
        for b, _b, log in (("", "", "A_log"), ("_b", "_b", "A_b_log")):
            mixer |= {
                f"conv1d{b}.weight": randn(inner, 1, 4, scale=0.5),
                f"conv1d{b}.bias": randn(inner),
                f"x_proj{b}.weight": randn(rank + 2 * STATES, inner, scale=0.3),
                f"dt_proj{b}.weight": randn(inner, rank),
                f"dt_proj{b}.bias": randn(inner) - 2,
                f"D{_b}": 1 + randn(inner),
                log: torch.arange(1.0, STATES + 1).log() + randn(inner, STATES),
            }
        state |= {f"layers.{i}.mixer.{name}": tensor for name, tensor in mixer.items()}
        state[f"layers.{i}.norm.weight"] = 1 + randn(dim)
    return state


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def direction(p: dict[str, Tensor], xz: Tensor, b: str, A_log: Tensor, skip: Tensor) -> Tensor:
    """Run one direction of the official mixer on xz (B, 2E, L), including the gate."""
    length = xz.shape[-1]
    x, z = xz.chunk(2, dim=1)
    u = F.conv1d(x, p[f"conv1d{b}.weight"], p[f"conv1d{b}.bias"], padding=3, groups=INNER)
    u = F.silu(u[..., :length])
    projected = torch.einsum("re,bel->brl", p[f"x_proj{b}.weight"], u)
    dt, key, query = projected.split([RANK, STATES, STATES], dim=1)
    dt = torch.einsum("er,brl->bel", p[f"dt_proj{b}.weight"], dt)
    dt = F.softplus(dt + p[f"dt_proj{b}.bias"][:, None])
    state, outputs = torch.zeros(*u.shape[:2], STATES), []
    for t in range(length):
        decay = torch.exp(dt[:, :, t, None] * -torch.exp(A_log))
        state = decay * state + (dt * u)[:, :, t, None] * key[:, None, :, t]
        outputs.append((state * query[:, None, :, t]).sum(-1))
    return (torch.stack(outputs, -1) + skip[:, None] * u) * F.silu(z)


def official_logits(state: dict[str, Tensor], images: Tensor, stride: int = 16) -> Tensor:
    """Return Vision Mamba's logits: middle class token, bimamba v2, divided output."""
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=stride)
    x = x.flatten(2).transpose(1, 2)
    middle = x.shape[1] // 2
    token = state["cls_token"].expand(x.shape[0], -1, -1)
    x = torch.cat([x[:, :middle], token, x[:, middle:]], 1) + state["pos_embed"]
    for i in range(SIZES["depth"]):
        prefix = f"layers.{i}.mixer."
        p = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
        xz = (rms_norm(x, state[f"layers.{i}.norm.weight"]) @ p["in_proj.weight"].T).mT
        y = direction(p, xz, "", p["A_log"], p["D"])
        y_b = direction(p, xz.flip(-1), "_b", p["A_b_log"], p["D_b"]).flip(-1)
        x = x + ((y + y_b) / 2).mT @ p["out_proj.weight"].T
    return rms_norm(x, state["norm_f.weight"])[:, middle] @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("route", ["load_state_dict", "checkpoint_path", "overlay"])
def test_official_checkpoint_gives_the_official_logits(route: str, tmp_path: Path) -> None:
    state, path = official_state_dict(), tmp_path / "official.pth"
    torch.save({"model": state}, path)
    overlay = {"file": path, "num_classes": 7, "input_size": (3, 48, 48)}
    arguments = {
        "load_state_dict": {},
        "checkpoint_path": {"checkpoint_path": path},
        "overlay": {"pretrained": True, "pretrained_cfg_overlay": overlay},
    }
    model = timm.create_model("vim_tiny", **arguments[route], **SIZES)
    if route == "load_state_dict":
        model.load_state_dict(state)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = model.eval()(images), official_logits(state, images)
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-5
    assert "layers.0.norm.weight" in state  # the caller's dict is not changed


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Tensor]], list]:
    """Return a function that puts an official checkpoint on the hub and returns its downloads."""

    def put(state: dict[str, Tensor]) -> list[tuple[str, str]]:
        other = {name: value + 1 for name, value in state.items()}
        rest = {"epoch": 299, "scaler": {"scale": 1.0}, "args": argparse.Namespace(lr=5e-4)}
        torch.save({"model": state, "model_ema": other, **rest}, tmp_path / "official.pth")
        asked: list[tuple[str, str]] = []

        def download(repo_id: str, filename: str, **_: object) -> str:
            if not filename.endswith(".pth"):
                raise EntryNotFoundError(filename)
            asked.append((repo_id, filename))
            return str(tmp_path / "official.pth")

        monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
        return asked

    return put


@pytest.mark.parametrize(
    ("name", "repository", "file"),
    [
        ("vim_tiny", "hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
        ("vim_tiny_finer", "hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
        ("vim_tiny_pyramid", "hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
        ("vim_small", "hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
        ("vim_small_finer", "hustvl/Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth"),
        ("vim_base", "hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
    ],
)
def test_published_weights_come_from_the_hub(name: str, repository: str, file: str, hub: Callable) -> None:
    stride = 8 if "finer" in name else 16
    state = official_state_dict(stride=stride)
    asked = hub(state)
    overlay = {"num_classes": 7, "input_size": (3, 48, 48)}  # as in the small file
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **SIZES)
    assert asked == [(repository, file)]
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = model.eval()(images), official_logits(state, images, stride)
    assert (logits - expected).abs().max() < 1e-5
    assert f"{name}.midclstok_in1k" in timm.list_models(pretrained=True)


def test_published_weights_load_by_name(hub: Callable) -> None:
    state = official_state_dict(TINY)
    asked = hub(state)
    name = "vim_tiny.midclstok_in1k"
    for model in (vil.load(name), vil.load("vim_tiny", num_classes=5), build_pretrained(name)):
        assert torch.equal(model.norm.weight, state["norm_f.weight"])
        assert torch.equal(model.blocks[23].mixer.D[1], state["layers.23.mixer.D_b"])
        cfg = timm.data.resolve_model_data_config(model)
        assert (cfg["input_size"], cfg["crop_pct"]) == ((3, 224, 224), 0.875)
        assert (cfg["interpolation"], cfg["mean"][0]) == ("bicubic", 0.485)
    assert len(asked) == 3


def build_pretrained(source: str) -> nn.Module:
    """Build the model of a training run that starts from weights, without its data."""
    config = TrainConfig(model=ModelConfig(pretrained=source, num_classes=1000, drop_path_rate=0.1))
    weights = read_source(config.model.pretrained, config.model.pretrained_ema)
    return build(completed(config, weights), World(), 1, weights).model


def test_rotary_checkpoint_is_refused() -> None:
    state = official_state_dict() | {"rope.freqs_cos": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"^the checkpoint has rotary position embeddings"):
        timm.create_model("vim_tiny", **SIZES).load_state_dict(state)
