"""One optimizer step, and the evaluation of several models in one pass."""

import copy
import dataclasses

import pytest
import torch

from tests.training.run_files import val_data
from vil.training.distributed import World
from vil.training.engine import _average_unless, evaluate, train_step
from vil.training.loader import Step
from vil.training.passes import ScoringPass
from vil.training.settings import ModelConfig
from vil.training.setup import TrainSetup, build, build_optimizer


@pytest.fixture
def training(config) -> TrainSetup:
    """Return a model with an average that differs from it."""
    training = build(config, World(), 4)
    with torch.no_grad():
        for parameter in training.ema.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    return training


@pytest.mark.parametrize("amp", [False, True])
def test_models_scored_together_score_as_alone(training, config, amp) -> None:
    chosen = config.changed("data", validation_batch_size=5)  # 12 images: 5, 5, 2
    data = val_data(chosen)
    run = dataclasses.replace(config.run, amp=amp)
    models = [training.model, training.ema.module, training.model]
    scorers = [ScoringPass(model, run, torch.device("cpu")) for model in models]
    together = evaluate(scorers, data)
    alone = [evaluate([scorer], data)[0] for scorer in scorers]
    untimed = [[s._replace(images_per_s=0.0) for s in scores] for scores in (together, alone)]
    assert untimed[0] == untimed[1]
    assert together[0].loss != together[1].loss
    assert not any(module.training for model in models for module in model.modules())


def test_a_step_clips_the_gradient_and_then_moves_the_average(training, config) -> None:
    averages = dict(training.ema.module.named_parameters())
    before = {name: average.clone() for name, average in averages.items()}
    images = torch.arange(8 * 3 * 16 * 16).view(8, 3, 16, 16).to(torch.uint8)
    step = Step(0, [(images, torch.arange(8) % 4)], {})
    result = train_step(training, step, config.changed("optim", clip_grad=0.01))

    weights = dict(training.model.named_parameters())
    norm = torch.stack([w.grad.norm() for w in weights.values() if w.grad is not None]).norm()
    assert result.grad_norm > 0.1
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    decay = config.optim.model_ema_decay
    for name, average in averages.items():
        moved = decay * before[name] + (1 - decay) * weights[name]
        torch.testing.assert_close(average, moved)


# Only adamw decides on the device, and only the ResNet has BatchNorm.
@pytest.mark.parametrize(("name", "opt"), [("vil_tiny", "sgd"), ("test_resnet", "adamw")])
def test_a_step_whose_loss_is_not_finite_changes_nothing(config, name, opt) -> None:
    if name != "vil_tiny":
        model = ModelConfig(name=name, num_classes=4, img_size=16, in_chans=3)
        config = dataclasses.replace(config, model=model)
    config = config.changed("optim", opt=opt)
    training = build(config, World(), 4)
    with torch.no_grad():  # so that the average would move towards the model
        for parameter in training.ema.module.parameters():
            parameter.add_(0.1)
    parts = [training.model, training.ema.module]
    before = [{n: v.clone() for n, v in part.state_dict().items()} for part in parts]
    training.model.register_forward_pre_hook(lambda _, images: (images[0] * torch.nan,))
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    train_step(training, Step(0, [(images, torch.arange(8) % 4)], {}), config)
    for part, values in zip(parts, before, strict=True):
        for key, value in part.state_dict().items():
            assert torch.equal(value, values[key]), key


def test_an_average_on_a_gpu_is_that_of_timm(training) -> None:
    """There, whether a step is bad is not read: it would wait for the device."""
    own = copy.deepcopy(training.ema)
    own.update(training.model)
    _average_unless(torch.tensor(True), training.ema, training.model)
    _average_unless(torch.tensor(False), training.ema, training.model)
    for one, other in zip(own.parameters(), training.ema.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9, 0.99)])  # the default, which is for two
def test_an_optimizer_of_three_moments_steps(config, betas) -> None:
    training = build(config.changed("optim", opt="adan", opt_betas=betas), World(), 4)
    before = training.model.head.bias.clone()
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    train_step(training, Step(0, [(images, torch.arange(8) % 4)], {}), config)
    assert not torch.equal(training.model.head.bias, before)
    own = betas if len(betas) == 3 else (0.98, 0.92, 0.99)
    assert training.optimizer.param_groups[0]["betas"] == own


def test_each_image_of_a_step_has_its_own_dropout(config) -> None:
    """Of the same image in both micro-batches and on both ranks, other features are dropped."""
    config = config.changed("model", args=("drop_rate=0.5",)).changed("run", grad_accum_steps=2)
    config = config.changed("augment", reprob=0.0, mixup=0.0, cutmix=0.0)
    training, dropped = build(config, World(), 4), []
    training.model.head.register_forward_pre_hook(lambda _, x: dropped.append(x[0] == 0))
    image = torch.full((4, 3, 16, 16), 128, dtype=torch.uint8)
    step = Step(0, [(image, torch.arange(4))] * 2, {})
    for rank in (0, 1):
        alone = dataclasses.replace(training, world=World(rank, 1))
        train_step(alone, step, config)
    assert len(dropped) == 4
    assert all(0.2 < each.float().mean() < 0.8 for each in dropped)
    assert len({tuple(each.flatten().tolist()) for each in dropped}) == 4


def test_epsilon_slows_small_gradients(config) -> None:
    moved = []
    for eps in (1e-8, 1e-3):
        weight = torch.nn.Linear(1, 1, bias=False)
        weight.weight.grad, before = torch.full((1, 1), 1e-3), weight.weight.item()
        options = dataclasses.replace(config.optim, opt_eps=eps, weight_decay=0.0)
        build_optimizer(weight, options, lr=0.5).step()
        moved.append(before - weight.weight.item())
    assert moved == pytest.approx([0.5, 0.25], rel=1e-3)
