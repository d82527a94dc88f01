"""The Python code of the documentation runs, each page from start to end in one session.

tests/vil runs docs/export.md with smaller models, and docs/speed.md, which registers counters with other packages.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub.utils import EntryNotFoundError
from PIL import Image
from timm.models import save_for_hf

import vil
from tests.documents.pages import ROOT, blocks

PAGES = sorted({"README", *(path.stem for path in (ROOT / "docs").glob("*.md"))} - {"export", "speed"})
OPTIONAL = (
    "pytorch_grad_cam",
    "lightly",
)  # not installed for the tests: blocks that import a missing one are skipped


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that pages name; fake mmengine, which needs a compiled mmcv."""
    small = timm.create_model("vil_tiny", num_classes=2, img_size=32, embed_dim=32, depth=2)
    small.pretrained_cfg |= {
        "num_classes": 2,
        "label_names": ["cat", "dog"],
        "input_size": (3, 32, 32),
    }
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 2}
    save_for_hf(small, tmp_path / "my_model", model_args=sizes, safe_serialization=True)
    (tmp_path / "output" / "finetune").mkdir(parents=True)
    torch.save(timm.create_model("vil_tiny").state_dict(), tmp_path / "output/finetune/best.pt")
    torch.save(timm.create_model("vim_tiny").state_dict(), tmp_path / "vim_t_midclstok_76p1acc.pth")
    Image.new("RGB", (40, 30)).save(tmp_path / "photo.jpg")

    def download(repo_id: str, filename: str, **_: object) -> Path:
        if (tmp_path / filename).exists():
            return tmp_path / filename
        raise EntryNotFoundError(filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    registry = SimpleNamespace(register_module=lambda: lambda cls: cls)
    contents = {"": {}, "model": {"BaseModule": torch.nn.Module}, "registry": {"MODELS": registry}}
    for name, content in contents.items():
        module = ModuleType(f"mmengine.{name}".rstrip("."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the namespace of a module, in which a page's classes and functions find their names.

    Models that a page registers are removed from timm afterwards, so that other tests do not find them.
    """
    for name, registered in vars(timm.models._registry).items():
        if name.startswith("_mod") and isinstance(registered, (dict, set)):
            monkeypatch.setattr(timm.models._registry, name, registered.copy())
    module = ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return vars(module)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page == "README" else pytest.mark.ci) for page in PAGES if blocks(page)],
)
def test_the_python_of_a_page_runs(page: str, session: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "scans":  # it replaces this function, which monkeypatch puts back
        from transformers.models.mamba import modeling_mamba

        monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", modeling_mamba.mamba_selective_scan)
    for block in blocks(page):
        if any(f"from {name}" in block and find_spec(name) is None for name in OPTIONAL):
            continue
        exec(compile(block, f"{page}.md", "exec"), session)
    modules = [value for value in session.values() if isinstance(value, torch.nn.Module)]
    own = [m for module in modules for m in module.modules() if isinstance(m, vil.VisionLonghorn)]
    assert own or not modules


@pytest.mark.nightly
def test_the_notebook_runs_to_what_it_shows(workplace: Path, session: dict[str, object]) -> None:
    """Run its cells in order; the accuracy that it shows must be reached to within two points."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    before = torch.get_num_threads()
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), session)
    finally:
        torch.set_num_threads(before)
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", ())]
    shown = [line for out in outputs for line in out.get("text", ())]
    (said,) = (float(line.split("%")[0]) for line in shown if "held-out digits" in line)
    assert 100 * session["reached"] == pytest.approx(said, abs=2)
    assert session["accuracy"](session["model"], session["larger"]) > 0.6
    assert (workplace / "my_digits" / "model.safetensors").is_file()
    digits = session["test_x"]
    assert torch.equal(session["again"](digits), session["model"](digits))
