"""A standard Lightning module trains, logs a value, saves a checkpoint and loads it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.small_models import backbone_in

lightning = pytest.importorskip("lightning")
smp = pytest.importorskip("segmentation_models_pytorch")


class Segmenter(lightning.LightningModule):
    """A module as in Lightning's own guide."""

    def __init__(self, encoder: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = smp.FPN(f"tu-{encoder}", encoder_weights=None, classes=3)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_module_trains_saves_and_comes_back(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(4, 3, 64, 64), torch.randint(0, 3, (4, 64, 64)))
    module = Segmenter("vil_test_pyramid")
    before = {name: p.detach().clone() for name, p in backbone_in(module).named_parameters()}
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=2))
    assert trainer.global_step == 2
    assert trainer.callback_metrics["loss"].isfinite()
    after = dict(backbone_in(module).named_parameters())
    assert not [name for name, p in before.items() if torch.equal(p, after[name])]
    (path,) = tmp_path.rglob("*.ckpt")
    loaded = Segmenter.load_from_checkpoint(path, weights_only=True)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.eval()(x), module.eval()(x))
