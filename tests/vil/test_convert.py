"""Checkpoints with the names of the official Vision Mamba, against its forward pass written out."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import vil  # noqa: F401  (registers the models)

SIZES = {"img_size": 48, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_classes": 7}
INNER, RANK, STATES, PATCHES = 64, 2, 16, 9


def official_state_dict() -> dict[str, Tensor]:
    """Return a random checkpoint with the official names and shapes."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, scale: float = 0.1) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    dim = SIZES["embed_dim"]
    state = {
        "cls_token": randn(1, 1, dim),
        "pos_embed": randn(1, PATCHES + 1, dim),
        "patch_embed.proj.weight": randn(dim, 3, 16, 16, scale=0.03),
        "patch_embed.proj.bias": randn(dim),
        "norm_f.weight": 1 + randn(dim),
        "head.weight": randn(7, dim),
        "head.bias": randn(7),
    }
    for i in range(SIZES["depth"]):
        mixer = {
            "in_proj.weight": randn(2 * INNER, dim, scale=0.3),
            "out_proj.weight": randn(dim, INNER, scale=0.3),
        }
        for b, _b, log in (("", "", "A_log"), ("_b", "_b", "A_b_log")):
            mixer |= {
                f"conv1d{b}.weight": randn(INNER, 1, 4, scale=0.5),
                f"conv1d{b}.bias": randn(INNER),
                f"x_proj{b}.weight": randn(RANK + 2 * STATES, INNER, scale=0.3),
                f"dt_proj{b}.weight": randn(INNER, RANK),
                f"dt_proj{b}.bias": randn(INNER) - 2,
                f"D{_b}": 1 + randn(INNER),
                log: torch.arange(1.0, STATES + 1).log() + randn(INNER, STATES),
            }
        state |= {f"layers.{i}.mixer.{name}": tensor for name, tensor in mixer.items()}
        state[f"layers.{i}.norm.weight"] = 1 + randn(dim)
    return state


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def direction(p: dict[str, Tensor], xz: Tensor, b: str, A_log: Tensor, skip: Tensor) -> Tensor:
    """One direction of the official mixer on xz (B, 2E, L), gate included."""
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


def official_logits(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """Vision Mamba's forward pass: middle class token, bimamba v2, divided output."""
    x = F.conv2d(
        images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16
    )
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
    return (
        rms_norm(x, state["norm_f.weight"])[:, middle] @ state["head.weight"].T + state["head.bias"]
    )


@pytest.mark.parametrize("route", ["load_state_dict", "checkpoint_path", "pretrained_cfg_overlay"])
def test_official_checkpoint_gives_the_official_logits(route: str, tmp_path) -> None:
    state = official_state_dict()
    path = tmp_path / "official.pth"
    torch.save({"model": state}, path)
    if route == "load_state_dict":
        model = timm.create_model("vim_tiny", **SIZES)
        model.load_state_dict(state)
    elif route == "checkpoint_path":
        model = timm.create_model("vim_tiny", checkpoint_path=path, **SIZES)
    else:
        overlay = {"file": path, "num_classes": 7, "input_size": (3, 48, 48)}
        model = timm.create_model(
            "vim_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **SIZES
        )
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = model.eval()(images), official_logits(state, images)
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-5
    assert "layers.0.norm.weight" in state  # the caller's own dict is left alone


def test_rotary_checkpoint_is_refused() -> None:
    state = official_state_dict() | {"rope.freqs_cos": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"^the checkpoint has rotary position embeddings"):
        timm.create_model("vim_tiny", **SIZES).load_state_dict(state)
