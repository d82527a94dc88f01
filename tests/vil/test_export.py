"""Every block of docs/export.md, at one layer and 32 px."""

import re
from functools import partial
from pathlib import Path

import pytest
import timm
import torch._inductor.config as inductor

from tests.documents.pages import read

PAGE = read("export")
SECTIONS = {
    section.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", section, re.S))
    for section in re.split(r"^#+ ", PAGE, flags=re.M)[1:]
}
SETUP = SECTIONS.pop("Exporting")
NEEDED = {"ONNX": ("onnxscript", "onnxruntime"), "int8": ("torchao",)}
# Code compiled around the operators need not be fast; otherwise tuning takes half of the time.
QUICK = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": False,
}


@pytest.mark.ci
@pytest.mark.parametrize("section", SECTIONS)
def test_code_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDED.get(section, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    create = partial(timm.create_model, depth=1, img_size=32, embed_dim=32)
    monkeypatch.setattr(timm, "create_model", create)
    with inductor.patch(QUICK):
        exec((SETUP + SECTIONS[section]).replace("224, 224", "32, 32"), {})
    assert list(tmp_path.iterdir())  # the exported files
