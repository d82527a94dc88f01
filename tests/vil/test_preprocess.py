"""An ImageSpec survives a pretrained_cfg, and only notes that it wrote are followed."""

import dataclasses
import json

import pytest
import timm

import vil
from vil.preprocess import ImageSpec, read_note

SPEC = ImageSpec(
    in_chans=1,
    img_size=(32, 48),
    mean=(0.25,),
    std=(0.5,),
    interpolation="bilinear",
    crop_pct=0.9,
    crop_mode="border",
    background="white",
    exif_rotation=True,
    decoder="torchvision",
    max_pixels=1234,
)


def test_a_pretrained_cfg_in_json_gives_the_same_spec() -> None:
    cfg = json.loads(json.dumps(SPEC.pretrained_cfg(val_fraction=0.125)))
    found = ImageSpec.of(cfg)
    lists = {key: tuple(getattr(found, key)) for key in ("img_size", "mean", "std")}
    assert dataclasses.replace(found, **lists) == SPEC
    assert read_note(cfg)["val_fraction"] == 0.125
    assert ImageSpec.of({}) == ImageSpec()


def test_what_is_stated_wins_and_colours_are_averaged() -> None:
    stated = ImageSpec.of(SPEC.pretrained_cfg(), crop_pct=1.0, background="black", mean=None)
    assert stated == dataclasses.replace(SPEC, crop_pct=1.0, background="black")
    grey = ImageSpec.of({"mean": (0.1, 0.2, 0.6), "input_size": (3, 8, 8)}, in_chans=1)
    assert (grey.mean, len(grey.std)) == (pytest.approx((0.3,)), 1)


def test_notes_of_others_are_no_options() -> None:
    for notes in (None, "white", ["transparent pixels on white", '{"background": "white"}']):
        assert ImageSpec.of({"notes": notes}).background == "none"


WRONG = [
    ({"background": "red"}, "background of images must be one of none, white, black, got 'red'"),
    ({"background": ["white"]}, "background of images must be one of none, white, black"),
    ({"exif_rotation": "yes"}, "exif_rotation of images must be one of False, True, got 'yes'"),
    ({"max_pixels": 1e9}, "max_pixels of images must be a whole number above 0"),
    ({"mean": (0.5, 2.0, 0.5)}, "mean of images must be 3 numbers from 0 to 1, got"),
    ({"std": (0.0, 0.5, 0.5)}, "std of images must be 3 numbers from 1e-09 to 1"),
    ({"std": (0.5,)}, "std of images must be 3 numbers"),
    ({"crop_pct": -1.0}, "crop_pct of images must be above 0, at most 2, got -1.0"),
    ({"crop_mode": "middle"}, "crop_mode of images must be one of center, squash, border"),
    ({"interpolation": "best"}, "interpolation of images must be one of bicubic, "),
]


@pytest.mark.parametrize(("values", "told"), WRONG, ids=str)
def test_values_out_of_range_are_refused(values: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ImageSpec(**values)


def test_all_pretrained_models_of_timm_have_a_spec() -> None:
    for name in timm.list_pretrained():
        cfg = timm.get_pretrained_cfg(name).to_dict()
        if cfg["input_size"][0] in (1, 3):
            assert ImageSpec.of(cfg).crop_pct == cfg["crop_pct"]


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ('{"val_fraction": 1}', "val_fraction must be at least 0 and below 1, got 1"),
        ('{"rotation": 9}', "a note of pretrained_cfg has rotation, unknown to this version"),
        ("[1]", "is not a JSON object"),
        ("{", "is not a JSON object"),
    ],
)
def test_a_wrong_note_is_an_error(note: str, told: str, tmp_path) -> None:
    model = timm.create_model("vil_tiny", depth=1, embed_dim=16)
    model.pretrained_cfg["notes"] = [f"vision-longhorn {note}"]
    with pytest.raises(ValueError, match=told):
        vil.create_transform(model)
    timm.models.save_for_hf(model, tmp_path / "small", safe_serialization=True)
    with pytest.raises(ValueError, match=rf"small: .*{told}"):
        vil.load(tmp_path / "small")
