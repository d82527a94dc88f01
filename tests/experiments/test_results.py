"""The documents written from records: up to date, and naming where they are from."""

from pathlib import Path
from string import Template

import pytest

from experiments import results


@pytest.mark.ci
def test_documents_are_what_the_records_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pictures are drawn anew elsewhere: their bytes depend on matplotlib's version."""
    monkeypatch.setattr(results, "IMAGES", tmp_path)
    found = results.placeholders()
    for name in results.DOCUMENTS:
        template = Template((results.TEMPLATES / name).read_text())
        document = results.ROOT / "docs" / name
        assert document.read_text() == template.substitute(found), (
            "run python -m experiments.results"
        )
    for picture in tmp_path.glob("*.png"):
        assert (results.ROOT / "docs" / "images" / picture.name).exists()


def test_every_record_tells_where_it_is_from() -> None:
    visions = [f"vision_{name}" for name in ("digits", "fractals", "ablations")]
    for name in (
        "mqar_short",
        "mqar_long",
        *visions,
        "finetune",
        "dense",
        "faithfulness_digits",
        "faithfulness_fractals",
    ):
        text = results.provenance(name)
        commit = results.load(name)["environment"]["commit"]
        assert f"commit {commit}, seeds 0, 1, 2" in text
        assert "dirty" not in commit
