"""UperNet: losses are means over all pixels, and every part learns."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from downstream.ade20k import SceneOptions, Segmentation, UperNet, mean_overlap
from downstream.features import make_features
from vil.training.sampler import seed_everything


@pytest.fixture
def network() -> UperNet:
    seed_everything(0)
    return UperNet(make_features("vil_tiny_pyramid", embed_dim=16, depth=2, img_size=64))


def test_losses_are_means_over_all_pixels(network: UperNet) -> None:
    network.eval()
    images, labels = torch.rand(2, 3, 64, 64), torch.randint(150, (2, 64, 64))
    expected = F.cross_entropy(network(images), labels)
    torch.testing.assert_close(network.loss(images, labels)[0], expected)
    labels[0] = 255
    expected = F.cross_entropy(network(images)[1:], labels[1:]) / 2
    torch.testing.assert_close(network.loss(images, labels)[0], expected)
    labels[1] = 255
    assert [loss.item() for loss in network.loss(images, labels)] == [0, 0]


def test_heads_have_the_published_sizes(network: UperNet) -> None:
    shapes = {name: tuple(each.shape) for name, each in network.named_parameters()}
    assert shapes["decode_head.classifier.1.weight"] == (150, 16, 1, 1)
    assert shapes["auxiliary_head.classifier.1.weight"] == (150, 256, 1, 1)
    assert shapes["auxiliary_head.convs.0.conv.weight"] == (256, 16, 3, 3)
    assert sum(name.startswith("auxiliary_head.convs") for name in shapes) == 3


def test_every_parameter_gets_a_gradient(network: UperNet) -> None:
    loss, auxiliary = network.loss(torch.rand(2, 3, 64, 64), torch.randint(150, (2, 64, 64)))
    (loss + 0.4 * auxiliary).backward()
    none = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert none == []


def test_the_second_head_reads_the_third_map(network: UperNet) -> None:
    maps = [each.detach().requires_grad_() for each in network.backbone(torch.rand(2, 3, 64, 64))]
    network.auxiliary_head(maps).square().sum().backward()
    assert [each.grad is not None for each in maps] == [False, False, True, False]


def test_a_task_weighs_the_losses_and_validates_by_overlapping_windows(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            widths.append(images.shape[-1])
            return F.one_hot((255 * images[:, 0]).long(), 150).movedim(-1, 1).float()

        def loss(self, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tensor(1.0), torch.tensor(10.0)

    rates = {"lr": 1.0, "weight_decay": 0.0, "layer_decay": 1.0}
    options = SceneOptions(output=tmp_path, generated=2, img_size=48, **rates)
    task, widths = Segmentation(options, Net(), Net(), range(32), range(1)), []
    image, labels = torch.randint(150, (3, 48, 144)) / 255, torch.zeros(48, 144).long()
    assert task.losses([[image], [labels]])[0].item() == pytest.approx(5)
    task.validation_step([[image], [(255 * image[0]).long()]], 0)
    assert widths == [48] * 4  # from 0, 32, 64 and 96: the stride is two thirds of a window
    assert task.overlap.compute().item() == 1


@pytest.mark.parametrize("size", [(64, 100), (50, 33)])
def test_logits_are_as_large_as_the_images(network: UperNet, size: tuple[int, int]) -> None:
    assert network.eval()(torch.rand(1, 3, *size)).shape == (1, 150, *size)


def test_the_figure_is_the_mean_of_the_classes_that_occur() -> None:
    overlap = mean_overlap()
    overlap.update(torch.tensor([[[3, 3, 7, 7]]]), torch.tensor([[[3, 3, 3, 255]]]))
    overlap.update(torch.tensor([[[7, 7, 9, 9]]]), torch.tensor([[[7, 7, 7, 255]]]))
    # Class 3: 2 of 3. Class 7: 2 of 4, one in the first image. Class 9: 0 of 1, one is ignored.
    assert overlap.compute().item() == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
