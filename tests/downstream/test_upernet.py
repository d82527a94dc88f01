"""UperNet: losses are means over all pixels, and every part learns."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from downstream.ade20k import UperNet, mean_overlap
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


@pytest.mark.parametrize("size", [(64, 100), (50, 33)])
def test_logits_are_as_large_as_the_images(network: UperNet, size: tuple[int, int]) -> None:
    assert network.eval()(torch.rand(1, 3, *size)).shape == (1, 150, *size)


def test_the_figure_is_the_mean_of_the_classes_that_occur() -> None:
    overlap = mean_overlap()
    overlap.update(torch.tensor([[[3, 3, 7, 7]]]), torch.tensor([[[3, 3, 3, 255]]]))
    overlap.update(torch.tensor([[[7, 7, 9, 9]]]), torch.tensor([[[7, 7, 7, 255]]]))
    # Class 3: 2 of 3. Class 7: 2 of 4, one in the first image. Class 9: 0 of 1, one is ignored.
    assert overlap.compute().item() == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
