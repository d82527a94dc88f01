"""What can be set, what it means, and which values it takes.

Field names are those of timm's trainer. The defaults are what the four published ImageNet recipes share; a recipe
states what it changes, and the command line overrides the recipe. The range of a setting is its type, which pydantic
checks (``recipes.py``).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field

from vil.messages import brief
from vil.timm_arguments import NOT_OF_A_MODEL
from vil.training.errors import ConfigError

MODEL_SIZES = ("patch_size", "embed_dim", "depth", "patch_stride")
MODEL_ARGUMENTS = ("num_classes", "in_chans", "img_size", *MODEL_SIZES)  # settings of their own
_STEPS_PER_EPOCH = 16  # that a batch_size of None aims at
_BATCHES = (8, 64)  # a GPU of a few gigabytes has to hold it at 224 px

T = TypeVar("T")
Free = Annotated[T, "free"]
"""May be another when a run goes on."""
Changeable = Annotated[T, "changeable"]
"""May be another when a run goes on with run.allow_changes."""


def _rule(words: str, holds: Any) -> AfterValidator:
    """Return what refuses a value of the right type, in words that follow "must be"."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


_LARGEST = 2**31 - 1  # that PyTorch takes for a number of threads, say
Count = Annotated[int, Field(ge=1, le=_LARGEST)]
CountFromZero = Annotated[int, Field(ge=0, le=_LARGEST)]
Workers = Annotated[int, Field(ge=0, le=1024)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's
Number = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]
CropPct = Annotated[float, Field(gt=0, le=2)]
Text = Annotated[str, _rule("text that is not empty", lambda text: text and "\0" not in text)]
_Ascending = _rule("two numbers, first <= second", lambda ends: ends[0] <= ends[1])
_Channels = Annotated[tuple[T, ...], _rule("at least one value", bool)]
_Sizes = Annotated[
    tuple[Count, ...],
    _rule("different sizes, at least one", lambda sizes: 0 < len(sizes) == len({*sizes})),
]


class Section:
    """Options that pydantic checks as they are written: no other names, no other types."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model; what is None stays as the named model defines it."""

    name: Text | None = None
    """Any model of timm by its name; None is the model that model.pretrained is of."""
    pretrained: Text | None = None
    """Weights that a new run starts from: a checkpoint, a folder of release.py, a .safetensors file, a file with a
    state dict (the official Vision Mamba's), local-dir:FOLDER, hf-hub:NAME, or a timm model's name. What it says of
    its model and images holds where nothing is set here. A head for other classes is new."""
    pretrained_ema: bool = False
    """Start from the averaged weights of that checkpoint."""
    num_classes: Count | None = None
    """Number of classes; None counts those of the data."""
    in_chans: Literal[1, 3] | None = None
    """Image channels: 3 reads images as RGB, 1 as grey; None is as of model.pretrained, or 3."""
    img_size: Count | None = None
    """Height and width in pixels; None is as of model.pretrained, or 224."""
    patch_size: Count | None = None
    """Patch height and width in pixels."""
    embed_dim: Count | None = None
    """Channels of a token."""
    depth: Count | None = None
    """Number of blocks."""
    patch_stride: Count | None = None
    """Distance of neighbouring patches in pixels; below patch_size they overlap."""
    drop_path_rate: ShareBelowOne = 0.0
    """Drop-path rate of the last block; the rate grows linearly from 0 at the first."""
    args: tuple[Text, ...] = ()
    """Further arguments of the model as key=value, such as global_pool=avg norm_layer=layernorm."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where the images come from and how they are resized and normalised."""

    dataset: Literal["digits", "folder", "wds"] = "folder"
    """scikit-learn's handwritten digits, a folder per class, or webdataset shards."""
    path: Free[Text | None] = None
    """Root folder of the data (folder, wds)."""
    train_split: Text = "train"
    """Sub-folder (folder), or shards (wds): a split of _info.json, or a pattern such as train-{000..511}.tar."""
    val_split: Text = "validation"
    """The same for validation; in a folder `validation` also finds `val`."""
    images_per_class: Count | None = None
    """Training images of each class, those of a smaller number among those of a larger; None takes all."""
    img_sizes: _Sizes | None = None
    """Train at several sizes, in pixels: each step draws one for all of its images. Validation stays at
    model.img_size. None trains at model.img_size only."""
    batch_size: Count | None = 1024
    """Images per optimiser step, over all processes and micro-batches; None is 8 to 64, by the number of images."""
    validation_batch_size: Free[Count | None] = None
    """Images per process and step in validation; those of a training micro-batch if None."""
    aug_repeats: CountFromZero = 3
    """Repeated augmentation: draws of each image in a row; 0 or 1 is off."""
    shuffle_shards: Count = 16
    """Shards (wds) whose images are shuffled together; each epoch draws an order of the shards."""
    max_bad_images: Free[ShareBelowOne] = 0.001
    """Largest share of the training images that may be unreadable or unlabelled before the run stops. Each is
    replaced, and named in skipped.txt. In validation none is tolerated."""
    max_pixels: Count = 89_478_485
    """Most pixels of an image, in its file and as validation resizes it; a larger one counts as unreadable."""
    exif_rotation: bool = False
    """Turn photographs as their EXIF orientation says, which the published recipes ignored."""
    num_workers: Free[Workers | None] = None
    """Loader processes of each training process; 0 loads in it; None is one per core, at most 8."""
    mean: _Channels[Share] | None = None
    """Mean of each channel, pixels in [0, 1]; None is as of model.pretrained, or ImageNet's."""
    std: _Channels[ShareAboveZero] | None = None
    """Standard deviation of each channel, likewise."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation of every resize; None is as of model.pretrained, or bicubic."""
    crop_pct: CropPct | None = None
    """Validation resizes to img_size / crop_pct and keeps the centre; None is as of model.pretrained, or 0.875."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Section):
    """Augmentation of the training images, in the order it is applied."""

    degrees: Number = 0.0
    """Rotation by up to this angle, either way."""
    translate: Share = 0.0
    """Shift by up to this fraction of the image."""
    zoom: Annotated[tuple[Positive, Positive], _Ascending] = (1.0, 1.0)
    """Range of the scale factor about the centre."""
    scale: Annotated[tuple[ShareAboveZero, ShareAboveZero], _Ascending] = (0.08, 1.0)
    """Random resized crop: range of the area, as a fraction of the image."""
    ratio: Annotated[tuple[Positive, Positive], _Ascending] = (3 / 4, 4 / 3)
    """Random resized crop: range of width / height."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    aa: Text | None = "rand-m9-mstd0.5-inc1"
    """Auto-augment policy."""
    reprob: Share = 0.25
    """Probability of random erasing."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """What random erasing fills in."""
    recount: Count = 1
    """Most regions that random erasing fills."""
    mixup: Number = 0.8
    """Alpha of mixup; 0 is off."""
    cutmix: Number = 1.0
    """Alpha of cutmix; 0 is off."""
    mixup_prob: Share = 1.0
    """Probability that a batch is mixed at all."""
    mixup_switch_prob: Share = 0.5
    """Probability of cutmix where both are on."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """Share mixing parameters over the batch, a pair, or nothing."""
    mix_size: Count | None = None
    """Images that share one draw of mixup or cutmix, the published batch of one GPU, so that the result does not
    depend on how a batch is divided among processes. None is all that one process trains on at a time."""
    smoothing: ShareBelowOne = 0.1
    """Label smoothing."""

    @property
    def mixes(self) -> bool:
        """Whether training mixes images and labels."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimiser and weight average."""

    opt: Text = "adamw"
    """Any optimiser that timm.optim.create_optimizer_v2 knows."""
    lr_base: Changeable[Number] = 1e-3
    """Peak rate of a batch of lr_base_size images; that of data.batch_size images follows by lr_base_scale.
    warmup_lr and min_lr are not scaled."""
    lr_base_size: Count = 512
    """Images that lr_base is meant for; 512 is DeiT's rule."""
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    """Whether the rate is in proportion to the batch, as DeiT's is, or to its root, which suits small batches."""
    opt_betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """Decay of the two moments."""
    opt_eps: Number = 1e-8
    """Added to the denominator."""
    layer_decay: ShareAboveZero | None = None
    """Factor of the learning rate from one block to the one below, for fine-tuning; None is one rate for all."""
    weight_decay: Number = 0.05
    """Decay of matrices; none on vectors nor on what model.no_weight_decay() names."""
    clip_grad: Positive | None = None
    """Largest norm of the gradient; None does not clip."""
    best: Literal["raw", "ema"] = "raw"
    """Whether best.pt is of the best top-1 of the weights, or of the averaged ones."""
    max_bad_steps: Free[CountFromZero] = 10
    """Steps that may have a loss or a gradient that is not finite before the run stops. Such a step changes no
    weight; its images are named in skipped.txt."""
    model_ema_decay: Share | None = 0.99996
    """Decay per step of the averaged weights; None keeps no average."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Learning rate by epoch. Epoch e trains at the rate of e - 1, as DeiT and Vim did."""

    sched: Changeable[Literal["cosine", "constant"]] = "cosine"
    """Shape after the warm-up."""
    epochs: Changeable[Count] = 300
    """Epochs in all, warm-up included."""
    warmup_epochs: Changeable[CountFromZero | None] = 5
    """Epochs of linear warm-up; None is a tenth of the epochs, at most 5."""
    warmup_lr: Changeable[Number] = 1e-6
    """Rate at the start of the warm-up."""
    min_lr: Changeable[Number] = 1e-5
    """Rate at the end of the cosine."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """This run: where it writes, on what it computes."""

    output: Free[Text | None] = None
    """Output folder. A run in it is continued, if its settings are the same. None is output/<recipe>."""
    allow_changes: Free[bool] = False
    """Let this start go on with another schedule, lr_base, amp or torchcompile than the run had so far."""
    seed: Seed = 0
    """Seed of the initial weights, the data order and the augmentation."""
    device: Free[Text] = "auto"
    """cpu, cuda, ...; auto takes CUDA where there is one."""
    amp: Changeable[bool] = False
    """Autocast to bfloat16."""
    torchcompile: Changeable[bool] = False
    """Compile the model."""
    grad_accum_steps: Free[Count] = 1
    """Micro-batches that each process divides its part of a batch into, one after the other."""
    num_threads: Free[Threads | None] = None
    """Threads of operations on the CPU; None leaves it to torch."""
    log_interval: Free[Count] = 50
    """Steps between two readings of the loss."""
    save_minutes: Free[Number] = 10.0
    """Minutes between two checkpoints within an epoch."""
    tracker: Free[Literal["tensorboard", "wandb"] | None] = None
    """Where steps.csv and log.csv are shown, too, by a package to be installed; wandb takes WANDB_PROJECT etc."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Train a vision model. --config FILE names a YAML recipe, configs/digits.yaml if absent; the
    options below override it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """Heights and widths of training images in pixels; each step draws one."""
        return self.data.img_sizes or (self.model.img_size,)

    @property
    def peak_lr(self) -> float:
        """Learning rate at the end of the warm-up."""
        ratio = self.data.batch_size / self.optim.lr_base_size
        return self.optim.lr_base * (ratio**0.5 if self.optim.lr_base_scale == "sqrt" else ratio)

    def micro_batch(self, world_size: int) -> int:
        """Return the images that one process trains on at a time."""
        batch, parts = self.data.batch_size, world_size * self.run.grad_accum_steps
        if batch % parts:
            raise ConfigError(
                f"data.batch_size must be a multiple of {world_size} processes x "
                f"run.grad_accum_steps {self.run.grad_accum_steps}, got {batch}",
                everywhere=True,
            )
        micro = batch // parts
        mix_size = self.augment.mix_size or micro
        if micro % mix_size or (self.augment.mixes and mix_size % 2):
            raise ConfigError(
                f"augment.mix_size must be even and divide the {micro} images that one process "
                f"trains on at a time, got {mix_size}",
                everywhere=True,
            )
        return micro

    def contradictions(self) -> Iterator[str]:
        """Say what of these settings does not go together, or is missing; nothing if all is right."""
        model, data, schedule = self.model, self.data, self.schedule
        if ":" in (model.name or ""):
            yield f"model.name takes no weights, got {model.name}; pass --model.pretrained {model.name}"
        if model.pretrained is None and model.name is None:
            yield "model.name is missing: a model of timm, vil_tiny say, or --model.pretrained SOURCE"
        if model.pretrained is None and model.pretrained_ema:
            yield "model.pretrained_ema has no use without model.pretrained"
        try:
            parse_args(model.args)
        except ConfigError as error:
            yield str(error)
        if data.dataset == "digits" and data.path is not None:
            yield f"data.path has no use for data.dataset {data.dataset}, got {data.path}"
        if data.dataset != "digits" and data.path is None:
            yield f"data.dataset {data.dataset} needs --data.path, the root folder of the data"
        yield from self.other_channels()
        if (schedule.warmup_epochs or 0) > schedule.epochs:
            yield (
                f"schedule.warmup_epochs {schedule.warmup_epochs} is longer than the run, schedule.epochs "
                f"{schedule.epochs}: {schedule.epochs // 10}, say"
            )
        if self.optim.best == "ema" and self.optim.model_ema_decay is None:
            yield "optim.best ema needs averaged weights, --optim.model-ema-decay 0.9999 say"
        tracker = self.run.tracker
        # A mere folder of that name, such as wandb leaves behind, is found, too, without an origin.
        if tracker is not None and getattr(find_spec(tracker), "origin", None) is None:
            yield f"run.tracker {tracker} needs its package, pip install {tracker}"

    def other_channels(self) -> Iterator[str]:
        """Say which of mean and std has not a value for each channel of the model."""
        for name in ("mean", "std"):
            values, channels = getattr(self.data, name), self.model.in_chans
            if None not in (values, channels) and len(values) != channels:
                yield f"data.{name} must have model.in_chans = {channels} values, got {values}"


def marked(word: str) -> set[str]:
    """Return the settings, as section.key, that are annotated as Free ("free") or Changeable ("changeable")."""
    return {
        f"{section.name}.{key}"
        for section in fields(TrainConfig)
        for key, form in get_type_hints(section.default_factory, include_extras=True).items()
        if word in getattr(form, "__metadata__", ())
    }


def suitable_batch(num_images: int) -> int:
    """Return the batch for a number of training images where none is set."""
    least, most = _BATCHES
    share = min(max(num_images // _STEPS_PER_EPOCH, least), most, num_images)
    return 1 << (share.bit_length() - 1)


def parse_args(args: tuple[str, ...]) -> dict[str, Any]:
    """Read model.args: Python's literals where they are some, text elsewhere."""
    parsed = key_values("model.args", args)
    for key in parsed:
        if key in NOT_OF_A_MODEL:
            raise ConfigError(
                f"model.args takes arguments that say which model it is, got {key}={brief(parsed[key])}"
            )
        if key in ("name", "drop_path_rate", *MODEL_ARGUMENTS):
            raise ConfigError(f"model.args: {key} is a setting, model.{key}")
    return parsed


def key_values(option: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Read the words of an option: Python's literals where they are some, text elsewhere."""
    parsed = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{option} takes key=value, got {word}")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = value
    return parsed
