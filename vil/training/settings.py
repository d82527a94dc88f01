"""All options of the trainer, with their meaning, defaults and valid values.

Field names follow timm's trainer. Defaults are the values shared by the four published ImageNet recipes.
Recipes override defaults, and the command line overrides recipes. The type of an option defines its valid
range, which pydantic checks (``recipes.py``).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field

from vil.messages import short_repr
from vil.preprocess import MAX_PIXELS, ImageSpec
from vil.timm_models import NOT_OF_A_MODEL
from vil.training.errors import ConfigError

MODEL_SIZES = ("patch_size", "embed_dim", "depth", "patch_stride")
MODEL_ARGUMENTS = ("num_classes", "in_chans", "img_size", *MODEL_SIZES)  # each has its own option
_STEPS_PER_EPOCH = 16  # target of the default batch size (None)
_BATCHES = (8, 64)  # fits a GPU with a few gigabytes at 224 px

T = TypeVar("T")
Free = Annotated[T, "free"]
"""May change when a run is resumed."""
Changeable = Annotated[T, "changeable"]
"""May change when a run is resumed with run.allow_changes."""


def _rule(words: str, holds: Any) -> AfterValidator:
    """Return a pydantic validator that rejects values with the message "must be {words}"."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


_LARGEST = 2**31 - 1  # PyTorch's limit for values such as numbers of threads
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
_Betas = Annotated[tuple[ShareBelowOne, ...], _rule("two or three numbers", lambda betas: len(betas) in (2, 3))]
_Channels = Annotated[tuple[T, ...], _rule("at least one value", bool)]
_Sizes = Annotated[
    tuple[Count, ...],
    _rule("different sizes, at least one", lambda sizes: 0 < len(sizes) == len({*sizes})),
]


class Section:
    """Base class of options; pydantic rejects unknown names and converts no types."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Model options; None keeps the default of the named model."""

    name: Text | None = None
    """Name of any timm model; None uses the model of model.pretrained."""
    pretrained: Text | None = None
    """Initial weights of a new run: a checkpoint, a folder of release.py, a .safetensors file, a file with a state
    dict (such as official Vision Mamba weights), local-dir:FOLDER, hf-hub:NAME, or a timm model's name. Model and
    preprocessing options that are not set come from here. The head is re-initialised if the classes differ."""
    pretrained_ema: bool = False
    """Start from the averaged weights (EMA) of model.pretrained."""
    num_classes: Count | None = None
    """Number of classes; None counts the classes of the data."""
    in_chans: Literal[1, 3] | None = None
    """Image channels: 3 reads images as RGB, 1 as grey. None uses the value of model.pretrained, else 3."""
    img_size: Count | None = None
    """Height and width in pixels; None uses the value of model.pretrained, else 224."""
    patch_size: Count | None = None
    """Patch height and width in pixels."""
    embed_dim: Count | None = None
    """Channels of a token."""
    depth: Count | None = None
    """Number of blocks."""
    patch_stride: Count | None = None
    """Distance between neighbouring patches in pixels; patches overlap if it is below patch_size."""
    drop_path_rate: ShareBelowOne = 0.0
    """Drop-path rate of the last block; it grows linearly from 0 at the first block."""
    args: tuple[Text, ...] = ()
    """Additional model arguments as key=value, such as global_pool=avg norm_layer=layernorm."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for timm's model entry point that identify the model."""
        options = {key: getattr(self, key) for key in MODEL_ARGUMENTS}
        return {key: v for key, v in options.items() if v is not None} | parse_args(self.args)


Background = Literal["none", "white", "black"]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data set, preprocessing and loading."""

    dataset: Literal["digits", "folder", "wds"] = "folder"
    """scikit-learn's handwritten digits, one folder per class, or webdataset shards."""
    path: Free[Text | None] = None
    """Root folder of the data (folder, wds)."""
    train_split: Text = "train"
    """Sub-folder (folder), or shards (wds): a split of _info.json, or a pattern such as train-{000..511}.tar."""
    val_split: Text = "validation"
    """Sub-folder or shards for validation, as train_split; for `validation`, a folder data set also looks for `val`."""
    val_fraction: ShareBelowOne = 0.0
    """Above 0, validate on this fraction of the images of each class in path/<class>/*, at least one, chosen by a hash,
    and train on the others (folder). The run's choice stays the same when images are added. 0 uses the sub-folders of
    the splits."""
    images_per_class: Count | None = None
    """Training images per class; None takes all. Smaller subsets are contained in larger ones."""
    img_sizes: _Sizes | None = None
    """Train at several image sizes in pixels: each step draws one size for all its images. Validation uses
    model.img_size. None trains at model.img_size only."""
    batch_size: Count | None = 1024
    """Images per optimizer step, over all processes and micro-batches. None uses 8 to 64, by the number of images."""
    validation_batch_size: Free[Count | None] = None
    """Images per process and step in validation; None uses the size of a training micro-batch."""
    aug_repeats: CountFromZero = 3
    """Repeated augmentation: consecutive draws of each image; 0 or 1 disables it."""
    shuffle_shards: Count = 16
    """Number of shards (wds) whose images are shuffled together. Each epoch also shuffles the shards."""
    max_bad_images: Free[ShareBelowOne] = 0.001
    """Maximum fraction of unreadable or unlabelled images of a split before the run stops. In training, unreadable
    images are replaced and unlabelled ones left out. A run reads all held-out images once before its first step, and
    leaves out the unreadable ones. It names all, also in skipped.txt."""
    max_pixels: Count = MAX_PIXELS
    """Maximum pixels of an image; larger images count as unreadable."""
    exif_rotation: bool = False
    """Apply the EXIF orientation of photographs; the published recipes ignored it."""
    background: Background = "none"
    """Colour behind transparent pixels. `none` drops transparency and keeps the colours below it, as timm does."""
    decoder: Literal["torchvision", "pillow"] | None = None
    """Package that decodes, crops and resizes JPEG files; the pixels are nearly equal, and torchvision is faster.
    Pillow opens all other files. None is torchvision."""
    num_workers: Free[Workers | None] = None
    """Data-loading workers per training process; 0 loads in that process. None uses one per core, at most 8."""
    mean: _Channels[Share] | None = None
    """Mean of each channel, pixels in [0, 1]; None uses the values of model.pretrained, else ImageNet's."""
    std: _Channels[ShareAboveZero] | None = None
    """Standard deviation of each channel; None uses the values of model.pretrained, else ImageNet's."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation of every resize; None uses the value of model.pretrained, else bicubic."""
    crop_pct: CropPct | None = None
    """Validation resizes to img_size / crop_pct and crops the centre. None uses the value of model.pretrained, else
    0.875."""
    crop_mode: Literal["center", "squash", "border"] | None = None
    """How validation resizes: its shorter side (center), both sides (squash), or its longer side with a border of the
    mean colour (border). None uses the value of model.pretrained, else center."""


IMAGE_OPTIONS = (
    *("mean", "std", "interpolation", "crop_pct", "crop_mode"),
    *("background", "exif_rotation", "decoder", "max_pixels"),
)
"""Options of ``DataConfig`` that are fields of ``ImageSpec``."""
_SPLITS = (DataConfig.train_split, DataConfig.val_split)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Section):
    """Augmentation of the training images, in the order of application."""

    degrees: Number = 0.0
    """Maximum rotation angle in degrees, in either direction."""
    translate: Share = 0.0
    """Maximum shift as a fraction of the image."""
    zoom: Annotated[tuple[Positive, Positive], _Ascending] = (1.0, 1.0)
    """Range of the scale factor around the centre."""
    scale: Annotated[tuple[ShareAboveZero, ShareAboveZero], _Ascending] = (0.08, 1.0)
    """Random resized crop: range of the area as a fraction of the image."""
    ratio: Annotated[tuple[Positive, Positive], _Ascending] = (3 / 4, 4 / 3)
    """Random resized crop: range of width / height."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    aa: Text | None = "rand-m9-mstd0.5-inc1"
    """Auto-augment policy."""
    reprob: Share = 0.25
    """Probability of random erasing."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """Fill mode of random erasing."""
    recount: Count = 1
    """Maximum number of regions that random erasing fills."""
    mixup: Number = 0.8
    """Mixup alpha; 0 disables it."""
    cutmix: Number = 1.0
    """CutMix alpha; 0 disables it."""
    mixup_prob: Share = 1.0
    """Probability of applying mixup or cutmix to a batch."""
    mixup_switch_prob: Share = 0.5
    """Probability of cutmix instead of mixup if both are enabled."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """Draw mixing parameters per batch, per pair or per image."""
    mix_size: Count | None = None
    """Images that share one draw of mixup or cutmix. Set it to the published batch of one GPU, so the result does
    not depend on how a batch is split over processes. None uses the micro-batch of one process."""
    smoothing: ShareBelowOne = 0.1
    """Label smoothing."""

    @property
    def mixes(self) -> bool:
        """Whether training mixes images and labels."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and weight averaging (EMA)."""

    opt: Text = "adamw"
    """Any optimizer of timm.optim.create_optimizer_v2."""
    lr_base: Changeable[Number] = 1e-3
    """Peak learning rate for a batch of lr_base_size images, scaled to data.batch_size by lr_base_scale. warmup_lr
    and min_lr are not scaled."""
    lr_base_size: Count = 512
    """Batch size that lr_base refers to; 512 is DeiT's rule."""
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    """Scale the learning rate with the batch size, as DeiT does, or with its square root, which suits small batches."""
    opt_betas: _Betas = (0.9, 0.999)
    """Decay rates of the moments: two, or three for adan. If you leave the default, adan uses its own three."""
    opt_eps: Number = 1e-8
    """Epsilon that the optimizer adds to the denominator."""
    layer_decay: ShareAboveZero | None = None
    """Layer-wise learning-rate decay for fine-tuning: factor from each block to the one below. None disables it."""
    weight_decay: Number = 0.05
    """Weight decay of matrices. Vectors and parameters named by model.no_weight_decay() are not decayed."""
    clip_grad: Positive | None = None
    """Maximum gradient norm; None disables clipping."""
    best: Literal["raw", "ema"] = "raw"
    """Select best.pt by the top-1 of the raw weights or of the averaged weights."""
    max_bad_steps: Free[CountFromZero] = 10
    """Number of steps with a non-finite loss or gradient to tolerate before the run stops. These steps change
    nothing; their images are listed in skipped.txt."""
    model_ema_decay: Share | None = 0.99996
    """Decay of the averaged weights (EMA) per step; None disables averaging."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Learning-rate schedule."""

    by: Changeable[Literal["epoch", "step"]] = "epoch"
    """When the rate changes. epoch: once an epoch, and epoch e uses the rate of epoch e - 1, as in DeiT and Vim. step:
    at each step, with a warm-up from 0 to the peak and a cosine from there to min_lr at the end of the run; this suits
    short runs."""
    sched: Changeable[Literal["cosine", "constant"]] = "cosine"
    """Shape of the schedule after the warm-up."""
    epochs: Changeable[Count] = 300
    """Total number of epochs, including warm-up."""
    warmup_epochs: Changeable[CountFromZero | None] = 5
    """Epochs of linear warm-up; None uses a tenth of the epochs, at most 5."""
    warmup_lr: Changeable[Number] = 1e-6
    """Learning rate at the start of the warm-up; with schedule.by step, the warm-up starts at 0."""
    min_lr: Changeable[Number] = 1e-5
    """Learning rate at the end of the cosine."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Output, device and execution of this run."""

    output: Free[Text | None] = None
    """Output folder; None uses output/<recipe>. A run in it is resumed if its settings are the same."""
    allow_changes: Free[bool] = False
    """Allow this start to resume with a different schedule, lr_base, amp or torchcompile."""
    seed: Seed = 0
    """Seed of the initial weights, the data order and the augmentation."""
    device: Free[Text] = "auto"
    """cpu, cuda, ...; auto uses CUDA if available."""
    amp: Changeable[bool] = False
    """Autocast to bfloat16."""
    torchcompile: Changeable[bool] = False
    """Compile the model with torch.compile."""
    cuda_graphs: Free[bool] = True
    """On a GPU, record training and evaluation in CUDA graphs, one for each shape of a batch."""
    grad_accum_steps: Free[Count] = 1
    """Number of micro-batches per step on each process (gradient accumulation)."""
    num_threads: Free[Threads | None] = None
    """CPU threads per operation; None keeps PyTorch's default."""
    log_interval: Free[Count] = 50
    """Steps between loss readings."""
    save_minutes: Free[Number] = 10.0
    """Minutes between checkpoints within an epoch."""
    tracker: Free[Literal["tensorboard"] | None] = None
    """Also send steps.csv and log.csv to this tracker; install its package."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Train a vision model. --config FILE selects a YAML recipe (default: configs/digits.yaml); the
    options below override it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """Training image sizes in pixels; each step draws one."""
        return self.data.img_sizes or (self.model.img_size,)

    @property
    def images(self) -> ImageSpec:
        """How images are opened and prepared, once the settings are complete."""
        size, data = self.model.img_size, {key: getattr(self.data, key) for key in IMAGE_OPTIONS}
        return ImageSpec(in_chans=self.model.in_chans, img_size=(size, size), **data)

    @property
    def peak_lr(self) -> float:
        """Learning rate at the end of the warm-up."""
        ratio = self.data.batch_size / self.optim.lr_base_size
        return self.optim.lr_base * (ratio**0.5 if self.optim.lr_base_scale == "sqrt" else ratio)

    def changed(self, section: str, **options: Any) -> "TrainConfig":
        """Return a copy with other options in one section: ``config.changed("data", path="photos")``."""
        return replace(self, **{section: replace(getattr(self, section), **options)})

    def micro_batch(self, world_size: int) -> int:
        """Return the images per micro-batch of a process; raise ConfigError if batch_size or mix_size does not fit."""
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
        """Yield a message for each missing option and each conflict between options."""
        model, data, schedule = self.model, self.data, self.schedule
        if ":" in (model.name or ""):
            yield (f"model.name must be a timm model, got {model.name}; pass --model.pretrained {model.name}")
        if model.pretrained is None and model.name is None:
            yield "model.name is missing; pass --model.name vil_tiny, or --model.pretrained SOURCE"
        if model.pretrained is None and model.pretrained_ema:
            yield "model.pretrained_ema needs --model.pretrained"
        try:
            parse_args(model.args)
        except ConfigError as error:
            yield str(error)
        if data.val_fraction and data.dataset != "folder":
            yield f"data.val_fraction needs data.dataset folder, got {data.dataset}"
        if data.val_fraction and (data.train_split, data.val_split) != _SPLITS:
            yield "data.train_split and data.val_split have no effect with data.val_fraction"
        if data.dataset == "digits" and data.path is not None:
            yield f"data.dataset {data.dataset} needs no data.path, got {data.path}"
        if data.dataset != "digits" and data.path is None:
            yield f"data.dataset {data.dataset} needs --data.path, the root folder of the data"
        yield from self.other_channels()
        yield from self.rising_rates()
        if (schedule.warmup_epochs or 0) > schedule.epochs:
            yield (
                f"schedule.warmup_epochs {schedule.warmup_epochs} is longer than the run, schedule.epochs "
                f"{schedule.epochs}; try {schedule.epochs // 10}"
            )
        if schedule.by == "step" and schedule.warmup_lr != ScheduleConfig.warmup_lr:
            yield (
                f"schedule.warmup_lr has no effect with schedule.by step, whose warm-up starts at "
                f"0, got {schedule.warmup_lr:g}; leave it unset"
            )
        if self.optim.best == "ema" and self.optim.model_ema_decay is None:
            yield "optim.best ema needs averaged weights, such as --optim.model-ema-decay 0.9999"
        tracker = self.run.tracker
        # find_spec also finds a plain folder of that name, but without an origin.
        if tracker is not None and getattr(find_spec(tracker), "origin", None) is None:
            yield f"run.tracker {tracker} needs its package; run pip install {tracker}"

    def rising_rates(self) -> Iterator[str]:
        """Yield a message for each rate above the peak that the schedule begins or ends with; needs the batch size."""
        schedule, batch = self.schedule, self.data.batch_size
        ends = {"min_lr": schedule.sched == "cosine"}
        ends["warmup_lr"] = schedule.by == "epoch" and schedule.warmup_epochs != 0
        for name in ends if batch else ():
            rate, option = getattr(schedule, name), name.replace("_", "-")
            if ends[name] and rate > self.peak_lr * (1 + 1e-9):
                yield (
                    f"schedule.{name} {rate:g} is above the peak rate {self.peak_lr:g} (optim.lr_base "
                    f"{self.optim.lr_base:g} for data.batch_size {batch}); pass --schedule.{option} "
                    f"{self.peak_lr / 100:g}, or raise optim.lr_base"
                )

    def other_channels(self) -> Iterator[str]:
        """Yield a message if mean or std does not have one value per image channel."""
        for name in ("mean", "std"):
            values, channels = getattr(self.data, name), self.model.in_chans
            if None not in (values, channels) and len(values) != channels:
                yield f"data.{name} must have model.in_chans = {channels} values, got {values}"


def marked(word: str) -> set[str]:
    """Return the options, as section.key, annotated with Free ("free") or Changeable ("changeable")."""
    return {
        f"{section.name}.{key}"
        for section in fields(TrainConfig)
        for key, form in get_type_hints(section.default_factory, include_extras=True).items()
        if word in getattr(form, "__metadata__", ())
    }


def suitable_batch(num_images: int) -> int:
    """Return the default batch size for a number of training images: a power of 2, at most 64."""
    least, most = _BATCHES
    share = min(max(num_images // _STEPS_PER_EPOCH, least), most, num_images)
    return 1 << (share.bit_length() - 1)


def parse_args(args: tuple[str, ...]) -> dict[str, Any]:
    """Parse model.args with ``key_values``; raise ConfigError for arguments that must not be there."""
    parsed = key_values("model.args", args)
    for key in parsed:
        if key in NOT_OF_A_MODEL:
            raise ConfigError(f"model.args must only define the model, got {key}={short_repr(parsed[key])}")
        if key in ("name", "drop_path_rate", *MODEL_ARGUMENTS):
            raise ConfigError(f"model.args must not contain {key}, use the option model.{key}")
    return parsed


def key_values(option: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Parse key=value words; values are Python literals if possible, else strings.

    Raises ConfigError, which names the option, for other words.
    """
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
