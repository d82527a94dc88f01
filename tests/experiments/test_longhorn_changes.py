"""Changes of Longhorn against loops over their definitions in float64, in recall and in images."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.longhorn_changes import CHANGED, CHANGES, CHUNK, STRONGEST, decayed_scan, log_decay
from experiments.mixer import ALL, Mixer
from experiments.recurrences import Sizes
from experiments.variants import ChangedMixer
from vil.mixer import BidirectionalMixer

L, N, E = CHUNK + 8, 3, 4  # more tokens than a chunk


def drawn(*shape: int) -> Tensor:
    return torch.randn(2, L, *shape, dtype=torch.float64, requires_grad=True)


def loop(x: Tensor, beta: Tensor, q: Tensor, k: Tensor, kept: Tensor, exact: bool) -> Tensor:
    """Decay the state, write to it by Eq. 6 or Eq. 7, and read it; kept is (B, L, 1)."""
    state, outputs = x.new_zeros(len(x), x.shape[2], k.shape[2]), []
    b = beta.sigmoid()
    eps = b / (1 + b * k.square().sum(-1, keepdim=True))
    for t in range(x.shape[1]):
        state = kept[:, t, :, None] * state
        key, step = k[:, t, None], eps[:, t, :, None]
        known = (state * key).sum(-1, keepdim=True) * key if exact else state * key.square()
        state = state + step * (x[:, t, :, None] * key - known)
        outputs.append((state * q[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def changed(change: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if change == "unit_keys":
        return q, k / k.square().sum(-1, keepdim=True).sqrt()
    if change == "silu":
        return q * q.sigmoid(), k * k.sigmoid()
    return q, k


@pytest.mark.parametrize("form", ["diagonal", "exact"])
def test_decay_comes_before_the_write(form: str) -> None:
    """With its gradients, over more than one chunk, from no decay to the strongest."""
    x, beta, q, k, logit = inputs = drawn(E), drawn(E), drawn(N), drawn(N), drawn(1)
    decay = log_decay(3 * logit)
    assert decay.min() == STRONGEST
    ys = (
        decayed_scan(x, beta, q, k, decay, form),
        loop(x, beta, q, k, decay.exp(), form == "exact"),
    )
    torch.testing.assert_close(*ys)
    weights = torch.randn_like(ys[0])
    grads = (torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True) for y in ys)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_chunk_survives_the_strongest_decay_in_float32() -> None:
    x, beta, q, k = (tensor.float() for tensor in (drawn(E), drawn(E), drawn(N), drawn(N)))
    decay = torch.full((2, L, 1), STRONGEST)
    y = decayed_scan(x, beta, q, k, decay, "exact")
    torch.testing.assert_close(y, loop(x, beta, q, k, decay.exp(), True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CHANGED)
def test_changed_recurrence_is_the_loop_over_what_it_is_given(name: str) -> None:
    base, _, change = name.partition("+")
    torch.manual_seed(0)
    module = CHANGED[name](Sizes(2, E, N, 1)).double()
    x = drawn(E)
    beta, k, q = module.x_proj(x).split([1, N, N], dim=-1)
    q, k = changed(change, q, k)
    kept = module.decay_proj(x).sigmoid() if change == "decay" else torch.ones_like(x[..., :1])
    expected = loop(x, module.dt_proj(beta), q, k, kept, base == "longhorn_exact")
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_change_does_not_touch_starts_as_without_it(name: str) -> None:
    base, _, change = name.partition("+")
    states = []
    for recurrence in (base, name):
        torch.manual_seed(0)
        states.append(Mixer(8, recurrence, d_state=N).state_dict())
    plain, own = states
    other = {"spread_steps": {"recurrence.dt_proj.bias"}}.get(change, set())
    assert {key for key in plain if not torch.equal(plain[key], own[key])} == other
    added = {"recurrence.decay_proj.weight", "recurrence.decay_proj.bias"}
    assert own.keys() - plain.keys() == (added if change == "decay" else set())


def test_step_sizes_start_over_a_range() -> None:
    bias = Mixer(64, "longhorn+spread_steps").recurrence.dt_proj.bias
    assert bias.min() > -4
    assert bias.max() < 4
    assert bias.std() > 2
    assert bias.unique().numel() == bias.numel()


# ------------------------------------------------------------------------------------ in images


def mixers(recurrence: str, change: str) -> tuple[BidirectionalMixer, ChangedMixer]:
    torch.manual_seed(0)
    mixer = BidirectionalMixer(8, recurrence, d_state=N).double()
    return mixer, ChangedMixer(mixer, change).double()


@pytest.mark.parametrize("recurrence", ["longhorn", "longhorn_exact"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_mixer_is_two_loops(recurrence: str, change: str) -> None:
    _, mixer = mixers(recurrence, change)
    tokens = torch.randn(2, L, 8, dtype=torch.float64)
    values, z = mixer.in_proj(tokens).chunk(2, dim=-1)
    total = 0
    for i in range(2):
        x = values.flip(1) if i else values
        x = F.conv1d(
            F.pad(x.mT, (3, 0)), mixer.conv_weight[i].unsqueeze(1), mixer.conv_bias[i], groups=16
        )
        x = F.silu(x).mT
        low, k, q = (x @ mixer.x_proj_weight[i].mT).split([1, N, N], dim=-1)
        q, k = changed(change, q, k)
        beta = low @ mixer.dt_weight[i].mT + mixer.dt_bias[i]
        kept = torch.ones_like(x[..., :1])
        if change == "decay":
            logit = (x * mixer.decay_weight[i]).sum(-1, keepdim=True) + mixer.decay_bias[i]
            kept = logit.sigmoid()
        y = loop(x, beta, q, k, kept, recurrence == "longhorn_exact") + mixer.D[i] * x
        total = total + (y.flip(1) if i else y)
    expected = mixer.out_proj(total / 2 * F.silu(z))
    torch.testing.assert_close(mixer(tokens), expected)


@pytest.mark.parametrize("recurrence", ["longhorn", "longhorn_exact"])
def test_changed_mixer_without_effect_is_the_mixer(
    recurrence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the library's own operator: a change of queries and keys to themselves."""
    monkeypatch.setattr("experiments.variants.change_keys", lambda change, q, k: (q, k))
    mixer, same = mixers(recurrence, "silu")
    tokens = torch.randn(2, L, 8, dtype=torch.float64)
    torch.testing.assert_close(same(tokens), mixer(tokens))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_backbone_trains_whole_and_differs(change: str) -> None:
    small = {"depth": 2, "img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 32}
    images, outputs = torch.randn(2, 1, 16, 16), []
    for name in ("vil_tiny", f"{change}_diagonal"):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=10, **small)
        outputs.append(model(images))
    outputs[1].square().sum().backward()
    assert not torch.allclose(*outputs)
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    decayed = {name for name in model.no_weight_decay() if "decay" in name}
    assert not decayed
    mask = torch.ones(2, 16, 16, dtype=torch.bool)
    mask[:, :4, :4] = False
    with pytest.raises(ValueError, match="takes no mask"):
        model(images, mask)
    with pytest.raises(ValueError, match="grid_aware"):
        timm.create_model(f"{change}_diagonal", grid_aware=True, **small)


def test_names_are_not_those_of_published_recurrences() -> None:
    assert len(ALL) == 11 + 2 * len(CHANGES)
    with pytest.raises(ValueError, match=r"longhorn\+unit_keys"):
        Mixer(8, "longhorn+nothing")


def test_changed_mixer_names_a_bad_argument_and_refuses_other_weights() -> None:
    mamba, mixer = (BidirectionalMixer(8, name, d_state=N) for name in ("mamba", "longhorn"))
    with pytest.raises(ValueError, match=r"must be of one of .*'mamba'"):
        ChangedMixer(mamba, "silu")
    with pytest.raises(ValueError, match=r"change must be one of .*'swish'"):
        ChangedMixer(mixer, "swish")
    changed = ChangedMixer(mixer, "silu")
    ChangedMixer(mixer, "silu").load_state_dict(changed.state_dict())
    for other in (mixer, ChangedMixer(mixer, "unit_keys")):
        with pytest.raises(RuntimeError, match="longhorn\\+silu"):
            other.load_state_dict(changed.state_dict())
