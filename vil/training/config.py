"""The training configuration: typed sections.

Field names are those of timm's trainer. The defaults are what the four published ImageNet recipes
share; a recipe states what it changes, and the command line overrides the recipe.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from vil.training.errors import ConfigError

MODEL_SIZES = ("patch_size", "embed_dim", "depth", "patch_stride")
MODEL_ARGUMENTS = ("num_classes", "in_chans", "img_size", *MODEL_SIZES)  # settings of their own
_STEPS_PER_EPOCH = 16  # that a batch_size of None aims at
_BATCHES = (8, 64)  # a GPU of a few gigabytes has to hold it at 224 px


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model; what is None stays as the named model defines it."""

    name: str | None = None
    """Any model of timm by its name; None is the model that model.pretrained is of."""
    pretrained: str | None = None
    """Weights that a new run starts from: a checkpoint of train_imagenet.py, a folder of release.py, a
    .safetensors file, a file with a state dict (the official Vision Mamba's), local-dir:FOLDER,
    hf-hub:NAME, or the name of a timm model that has weights. What it says of its model and its images
    holds where nothing is set here. Embeddings of other sizes are resampled, a head for other classes
    is new."""
    pretrained_ema: bool = False
    """Start from the averaged weights of that checkpoint."""
    num_classes: int | None = None
    """Number of classes; None counts those of the data."""
    in_chans: int | None = None
    """Image channels: 3 reads images as RGB, 1 as grey; None is as of model.pretrained, or 3."""
    img_size: int | None = None
    """Height and width in pixels, in training and in evaluation; None is as of model.pretrained, or
    224."""
    patch_size: int | None = None
    """Patch height and width in pixels."""
    embed_dim: int | None = None
    """Channels of a token."""
    depth: int | None = None
    """Number of blocks."""
    patch_stride: int | None = None
    """Distance of neighbouring patches in pixels; below patch_size they overlap."""
    drop_path_rate: float = 0.0
    """Drop-path rate of the last block; the rate grows linearly from 0 at the first."""
    args: tuple[str, ...] = ()
    """Further arguments of the model as key=value, such as global_pool=avg norm_layer=layernorm."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images come from and how they are resized and normalised."""

    dataset: Literal["digits", "folder", "wds", "fractals"] = "folder"
    """scikit-learn's handwritten digits, a folder per class, webdataset shards, or fractals that are
    computed as they are read, model.num_classes classes of them at model.img_size, or at the largest of
    data.img_sizes for training."""
    path: str | None = None
    """Root folder of the data (folder, wds)."""
    train_split: str = "train"
    """Sub-folder (folder), or shards (wds): a split of _info.json, or a brace pattern such as
    train-{000..511}.tar."""
    val_split: str = "validation"
    """The same for validation; in a folder `validation` also finds `val`."""
    images_per_class: int | None = None
    """Training images of each class, the first ones of an order that no seed changes, so that the
    images of a smaller number are among those of a larger; None takes all (fractals: 1000)."""
    fractal_seed: int = 0
    """Names the data set (fractals); apart from run.seed, so that runs can vary on the same images."""
    img_sizes: tuple[int, ...] | None = None
    """Train at several sizes: each step draws one of these heights and widths, in pixels, for all of its
    images. Validation stays at model.img_size. None trains at model.img_size only."""
    batch_size: int | None = 1024
    """Images per optimiser step, over all processes and accumulated micro-batches; None is the power of
    two that makes 16 steps of an epoch or more, 8 to 64."""
    validation_batch_size: int | None = None
    """Images per process and step in validation; those of a training micro-batch if None."""
    aug_repeats: int = 3
    """Repeated augmentation: draws of each image in a row; 0 or 1 is off."""
    shuffle_shards: int = 16
    """Shards (wds) whose images are shuffled together; the order of the shards is drawn anew each
    epoch."""
    max_bad_images: float = 0.001
    """Largest share of the training images that may turn out unreadable or unlabelled before the run
    stops. Each is replaced, counted and named in skipped.txt. In validation none is tolerated."""
    exif_rotation: bool = False
    """Turn photographs as their EXIF orientation says; off in the published recipes, which ignored
    it."""
    num_workers: int | None = None
    """Loader processes of each training process; 0 loads in the training process; None is one per core
    that the process may use, at most 8."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, pixels in [0, 1]; None is as of model.pretrained, or ImageNet's."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel, likewise."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation of every resize; None is as of model.pretrained, or bicubic."""
    crop_pct: float | None = None
    """Validation resizes to img_size / crop_pct and keeps the centre; None is as of model.pretrained, or
    0.875."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of the training images, in the order it is applied."""

    degrees: float = 0.0
    """Rotation by up to this angle, either way."""
    translate: float = 0.0
    """Shift by up to this fraction of the image."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Range of the scale factor about the centre."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Random resized crop: range of the area, as a fraction of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Random resized crop: range of width / height."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    aa: str | None = "rand-m9-mstd0.5-inc1"
    """Auto-augment policy."""
    reprob: float = 0.25
    """Probability of random erasing."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """What random erasing fills in."""
    recount: int = 1
    """Most regions that random erasing fills."""
    mixup: float = 0.8
    """Alpha of mixup; 0 is off."""
    cutmix: float = 1.0
    """Alpha of cutmix; 0 is off."""
    mixup_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    mixup_switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """Share mixing parameters over the batch, a pair, or nothing."""
    mix_size: int | None = None
    """Images that share one draw of mixup or cutmix, the published batch of one GPU: the result does
    not depend then on how a batch is divided among processes. None is all that one process trains
    on at a time."""
    smoothing: float = 0.1
    """Label smoothing."""

    @property
    def mixes(self) -> bool:
        """Whether training mixes images and labels."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser and weight average."""

    opt: str = "adamw"
    """Any optimiser that timm.optim.create_optimizer_v2 knows."""
    lr_base: float = 1e-3
    """Peak rate of a batch of lr_base_size images. That of data.batch_size images follows by
    lr_base_scale, whatever the number of processes and micro-batches; warmup_lr and min_lr are not
    scaled."""
    lr_base_size: int = 512
    """Images that lr_base is meant for; 512 is DeiT's rule."""
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    """Whether the rate is in proportion to the batch, as DeiT's is, or to its square root, which suits
    adamw at small batches."""
    opt_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    opt_eps: float = 1e-8
    """Added to the denominator."""
    layer_decay: float | None = None
    """Factor of the learning rate from one block to the one below it, 0.75 say, for fine-tuning; None is
    one rate for all."""
    weight_decay: float = 0.05
    """Decay of matrices; none on vectors nor on what model.no_weight_decay() names."""
    clip_grad: float | None = None
    """Largest norm of the gradient; None does not clip."""
    best: Literal["raw", "ema"] = "raw"
    """Whether best.pt is of the epoch with the best top-1 of the weights, or of the averaged ones."""
    max_bad_steps: int = 10
    """Steps of the run that may have a loss or a gradient that is not finite before it stops. Such a
    step changes no weight; it is counted, and its images are named in skipped.txt."""
    model_ema_decay: float | None = 0.99996
    """Decay per step of the averaged weights; None keeps no average."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by epoch. Epoch e trains at the rate of e - 1, as DeiT and Vim did."""

    sched: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    epochs: int = 300
    """Epochs in all, warm-up included."""
    warmup_epochs: int | None = 5
    """Epochs of linear warm-up; None is a tenth of the epochs, at most 5."""
    warmup_lr: float = 1e-6
    """Rate at the start of the warm-up."""
    min_lr: float = 1e-5
    """Rate at the end of the cosine."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """This run: where it writes, on what it computes."""

    output: str | None = None
    """Output folder. A run that is in it is continued, if its configuration is the same. None is
    output/<recipe>."""
    allow_changes: bool = False
    """Continue the run in the output folder with other settings than it had so far: of schedule, augment
    and optim (not its opt), amp, torchcompile and drop path. changes.csv says what changed at which
    step. Holds for this start only."""
    seed: int = 0
    """Seed of the initial weights, the data order and the augmentation."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes CUDA where there is one."""
    amp: bool = False
    """Autocast to bfloat16."""
    torchcompile: bool = False
    """Compile the model."""
    grad_accum_steps: int = 1
    """Micro-batches that each process divides its part of a batch into, one after the other."""
    num_threads: int | None = None
    """Threads of operations on the CPU; None leaves it to torch."""
    log_interval: int = 50
    """Steps between two readings of the loss."""
    save_minutes: float = 10.0
    """Minutes between two checkpoints within an epoch; there is one after each epoch, too."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """Where steps.csv and log.csv are shown, too, by a package to be installed; wandb takes its own
    environment variables, as WANDB_PROJECT and WANDB_MODE=offline."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
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
        """Return the images that one process trains on at a time.

        Args:
            world_size: Number of processes.

        Raises:
            ConfigError: the batch cannot be divided among them and their micro-batches, or
                augment.mix_size does not divide what remains.
        """
        batch, parts = self.data.batch_size, world_size * self.run.grad_accum_steps
        if batch % parts:
            raise ConfigError(
                f"data.batch_size must be a multiple of {world_size} processes x "
                f"run.grad_accum_steps {self.run.grad_accum_steps}, got {batch}"
            )
        micro = batch // parts
        mix_size = self.augment.mix_size or micro
        if micro % mix_size or (self.augment.mixes and mix_size % 2):
            raise ConfigError(
                f"augment.mix_size must be even and divide the {micro} images that one process "
                f"trains on at a time, got {mix_size}"
            )
        return micro


def suitable_batch(num_images: int) -> int:
    """Return the batch for a number of training images where none is set."""
    least, most = _BATCHES
    share = min(max(num_images // _STEPS_PER_EPOCH, least), most, num_images)
    return 1 << (share.bit_length() - 1)


def data_contradictions(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    """Say what the kind of data lacks, or has no use for; nothing if all is right."""
    if data.dataset in ("digits", "fractals") and data.path is not None:
        yield f"data.path has no use for data.dataset {data.dataset}, got {data.path}"
    if data.dataset in ("folder", "wds") and data.path is None:
        yield f"data.dataset {data.dataset} needs --data.path, the root folder of the data"
    if data.dataset == "fractals" and model.num_classes is None:
        yield "data.dataset fractals needs --model.num-classes, 1000 say"


def other_classes(split: str, found: int, model: ModelConfig) -> Iterator[str]:
    """Say so if a split of the data has another number of classes than the model is to have."""
    if model.num_classes not in (None, found):
        yield (
            f"the {split} data has {found} classes, model.num_classes is {model.num_classes}; "
            f"leave it out, or pass --model.num-classes {found}"
        )


def too_few_images(data: DataConfig, name: str | int, count: int) -> Iterator[str]:
    """Say so if the class with the fewest training images has not as many as are asked for."""
    if data.images_per_class is not None and count < data.images_per_class:
        yield (
            f"data.images_per_class must be at most the {count} training images that class {name} "
            f"has, got {data.images_per_class}"
        )


def parse_args(args: tuple[str, ...]) -> dict[str, Any]:
    """Read model.args: Python's literals where they are some, text elsewhere.

    Raises:
        ConfigError: one is not key=value, or is a setting of its own.
    """
    parsed = key_values("model.args", args)
    for key in parsed:
        if key in ("name", "drop_path_rate", *MODEL_ARGUMENTS):
            raise ConfigError(f"model.args: {key} is a setting, model.{key}")
    return parsed


def key_values(option: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Read the words of an option: Python's literals where they are some, text elsewhere.

    Raises:
        ConfigError: one is not key=value.
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
