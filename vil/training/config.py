"""The training configuration: typed sections.

Field names are those of timm's trainer. The defaults are what the four published ImageNet recipes
share; a recipe states what it changes, and the command line overrides the recipe.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vil.forms import Range, Rule
from vil.messages import said
from vil.timm_arguments import NOT_OF_A_MODEL
from vil.training.errors import ConfigError

MODEL_SIZES = ("patch_size", "embed_dim", "depth", "patch_stride")
MODEL_ARGUMENTS = ("num_classes", "in_chans", "img_size", *MODEL_SIZES)  # settings of their own
_STEPS_PER_EPOCH = 16  # that a batch_size of None aims at
_BATCHES = (8, 64)  # a GPU of a few gigabytes has to hold it at 224 px

# What a setting may be, beside its type; a number or a text without such a range fails a test.
_LARGEST = 2**31 - 1  # that PyTorch takes for a number of threads, say
_Count = Annotated[int, Range(1, _LARGEST)]
_CountFromZero = Annotated[int, Range(0, _LARGEST)]
_Seed = Annotated[int, Range(0, 2**32 - 1)]  # NumPy's
_Number = Annotated[float, Range(0)]
_Positive = Annotated[float, Range(0, open="low")]
_Share = Annotated[float, Range(0, 1)]
_ShareBelowOne = Annotated[float, Range(0, 1, open="high")]
_ShareAboveZero = Annotated[float, Range(0, 1, open="low")]
_Text = Annotated[str, Rule("that is not empty", lambda text: text != "" and "\0" not in text)]
_Channels = Rule("of at least one value", bool)
_Ascending = Rule("of two numbers, first <= second", lambda ends: ends[0] <= ends[1])
_Different = Rule("of different sizes, at least one", lambda sizes: 0 < len(sizes) == len({*sizes}))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model; what is None stays as the named model defines it."""

    name: _Text | None = None
    """Any model of timm by its name; None is the model that model.pretrained is of."""
    pretrained: _Text | None = None
    """Weights that a new run starts from: a checkpoint of train_imagenet.py, a folder of release.py, a
    .safetensors file, a file with a state dict (the official Vision Mamba's), local-dir:FOLDER,
    hf-hub:NAME, or the name of a timm model that has weights. What it says of its model and its images
    holds where nothing is set here. Embeddings of other sizes are resampled, a head for other classes
    is new."""
    pretrained_ema: bool = False
    """Start from the averaged weights of that checkpoint."""
    num_classes: _Count | None = None
    """Number of classes; None counts those of the data."""
    in_chans: Literal[1, 3] | None = None
    """Image channels: 3 reads images as RGB, 1 as grey; None is as of model.pretrained, or 3."""
    img_size: _Count | None = None
    """Height and width in pixels, in training and in evaluation; None is as of model.pretrained, or
    224."""
    patch_size: _Count | None = None
    """Patch height and width in pixels."""
    embed_dim: _Count | None = None
    """Channels of a token."""
    depth: _Count | None = None
    """Number of blocks."""
    patch_stride: _Count | None = None
    """Distance of neighbouring patches in pixels; below patch_size they overlap."""
    drop_path_rate: _ShareBelowOne = 0.0
    """Drop-path rate of the last block; the rate grows linearly from 0 at the first."""
    args: tuple[_Text, ...] = ()
    """Further arguments of the model as key=value, such as global_pool=avg norm_layer=layernorm."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images come from and how they are resized and normalised."""

    dataset: Literal["digits", "folder", "wds", "fractals"] = "folder"
    """scikit-learn's handwritten digits, a folder per class, webdataset shards, or fractals that are
    computed as they are read, model.num_classes classes of them at model.img_size, or at the largest of
    data.img_sizes for training."""
    path: _Text | None = None
    """Root folder of the data (folder, wds)."""
    train_split: _Text = "train"
    """Sub-folder (folder), or shards (wds): a split of _info.json, or a brace pattern such as
    train-{000..511}.tar."""
    val_split: _Text = "validation"
    """The same for validation; in a folder `validation` also finds `val`."""
    images_per_class: _Count | None = None
    """Training images of each class, the first ones of an order that no seed changes, so that the
    images of a smaller number are among those of a larger; None takes all (fractals: 1000)."""
    fractal_seed: _Seed = 0
    """Names the data set (fractals); apart from run.seed, so that runs can vary on the same images."""
    img_sizes: Annotated[tuple[_Count, ...], _Different] | None = None
    """Train at several sizes: each step draws one of these heights and widths, in pixels, for all of its
    images. Validation stays at model.img_size. None trains at model.img_size only."""
    batch_size: _Count | None = 1024
    """Images per optimiser step, over all processes and accumulated micro-batches; None is the power of
    two that makes 16 steps of an epoch or more, 8 to 64."""
    validation_batch_size: _Count | None = None
    """Images per process and step in validation; those of a training micro-batch if None."""
    aug_repeats: _CountFromZero = 3
    """Repeated augmentation: draws of each image in a row; 0 or 1 is off."""
    shuffle_shards: _Count = 16
    """Shards (wds) whose images are shuffled together; the order of the shards is drawn anew each
    epoch."""
    max_bad_images: _ShareBelowOne = 0.001
    """Largest share of the training images that may turn out unreadable or unlabelled before the run
    stops. Each is replaced, counted and named in skipped.txt. In validation none is tolerated."""
    max_pixels: _Count = 89_478_485
    """Most pixels of an image, as it is in its file and as validation resizes it before the crop; Pillow's
    limit, against small files that fill the memory. A larger image counts as unreadable."""
    exif_rotation: bool = False
    """Turn photographs as their EXIF orientation says; off in the published recipes, which ignored
    it."""
    num_workers: Annotated[int, Range(0, 1024)] | None = None
    """Loader processes of each training process; 0 loads in the training process; None is one per core
    that the process may use, at most 8."""
    mean: Annotated[tuple[_Share, ...], _Channels] | None = None
    """Mean of each channel, pixels in [0, 1]; None is as of model.pretrained, or ImageNet's."""
    std: Annotated[tuple[_ShareAboveZero, ...], _Channels] | None = None
    """Standard deviation of each channel, likewise."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation of every resize; None is as of model.pretrained, or bicubic."""
    crop_pct: Annotated[float, Range(0, 2, open="low")] | None = None
    """Validation resizes to img_size / crop_pct and keeps the centre, which is padded above 1; None is as
    of model.pretrained, or 0.875."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of the training images, in the order it is applied."""

    degrees: _Number = 0.0
    """Rotation by up to this angle, either way."""
    translate: _Share = 0.0
    """Shift by up to this fraction of the image."""
    zoom: Annotated[tuple[_Positive, _Positive], _Ascending] = (1.0, 1.0)
    """Range of the scale factor about the centre."""
    scale: Annotated[tuple[_ShareAboveZero, _ShareAboveZero], _Ascending] = (0.08, 1.0)
    """Random resized crop: range of the area, as a fraction of the image."""
    ratio: Annotated[tuple[_Positive, _Positive], _Ascending] = (3 / 4, 4 / 3)
    """Random resized crop: range of width / height."""
    hflip: _Share = 0.5
    """Probability of a horizontal flip."""
    aa: _Text | None = "rand-m9-mstd0.5-inc1"
    """Auto-augment policy."""
    reprob: _Share = 0.25
    """Probability of random erasing."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """What random erasing fills in."""
    recount: _Count = 1
    """Most regions that random erasing fills."""
    mixup: _Number = 0.8
    """Alpha of mixup; 0 is off."""
    cutmix: _Number = 1.0
    """Alpha of cutmix; 0 is off."""
    mixup_prob: _Share = 1.0
    """Probability that a batch is mixed at all."""
    mixup_switch_prob: _Share = 0.5
    """Probability of cutmix where both are on."""
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    """Share mixing parameters over the batch, a pair, or nothing."""
    mix_size: _Count | None = None
    """Images that share one draw of mixup or cutmix, the published batch of one GPU: the result does
    not depend then on how a batch is divided among processes. None is all that one process trains
    on at a time."""
    smoothing: _ShareBelowOne = 0.1
    """Label smoothing."""

    @property
    def mixes(self) -> bool:
        """Whether training mixes images and labels."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser and weight average."""

    opt: _Text = "adamw"
    """Any optimiser that timm.optim.create_optimizer_v2 knows."""
    lr_base: _Number = 1e-3
    """Peak rate of a batch of lr_base_size images. That of data.batch_size images follows by
    lr_base_scale, whatever the number of processes and micro-batches; warmup_lr and min_lr are not
    scaled."""
    lr_base_size: _Count = 512
    """Images that lr_base is meant for; 512 is DeiT's rule."""
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    """Whether the rate is in proportion to the batch, as DeiT's is, or to its square root, which suits
    adamw at small batches."""
    opt_betas: tuple[_ShareBelowOne, _ShareBelowOne] = (0.9, 0.999)
    """Decay of the two moments."""
    opt_eps: _Number = 1e-8
    """Added to the denominator."""
    layer_decay: _ShareAboveZero | None = None
    """Factor of the learning rate from one block to the one below it, 0.75 say, for fine-tuning; None is
    one rate for all."""
    weight_decay: _Number = 0.05
    """Decay of matrices; none on vectors nor on what model.no_weight_decay() names."""
    clip_grad: _Positive | None = None
    """Largest norm of the gradient; None does not clip."""
    best: Literal["raw", "ema"] = "raw"
    """Whether best.pt is of the epoch with the best top-1 of the weights, or of the averaged ones."""
    max_bad_steps: _CountFromZero = 10
    """Steps of the run that may have a loss or a gradient that is not finite before it stops. Such a
    step changes no weight; it is counted, and its images are named in skipped.txt."""
    model_ema_decay: _Share | None = 0.99996
    """Decay per step of the averaged weights; None keeps no average."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by epoch. Epoch e trains at the rate of e - 1, as DeiT and Vim did."""

    sched: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    epochs: _Count = 300
    """Epochs in all, warm-up included."""
    warmup_epochs: _CountFromZero | None = 5
    """Epochs of linear warm-up; None is a tenth of the epochs, at most 5."""
    warmup_lr: _Number = 1e-6
    """Rate at the start of the warm-up."""
    min_lr: _Number = 1e-5
    """Rate at the end of the cosine."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """This run: where it writes, on what it computes."""

    output: _Text | None = None
    """Output folder. A run that is in it is continued, if its configuration is the same. None is
    output/<recipe>."""
    allow_changes: bool = False
    """Continue the run in the output folder with other settings than it had so far: of schedule, augment
    and optim (not its opt), amp, torchcompile and drop path. changes.csv says what changed at which
    step. Holds for this start only."""
    seed: _Seed = 0
    """Seed of the initial weights, the data order and the augmentation."""
    device: _Text = "auto"
    """cpu, cuda, ...; auto takes CUDA where there is one."""
    amp: bool = False
    """Autocast to bfloat16."""
    torchcompile: bool = False
    """Compile the model."""
    grad_accum_steps: _Count = 1
    """Micro-batches that each process divides its part of a batch into, one after the other."""
    num_threads: Annotated[int, Range(1, 1024)] | None = None
    """Threads of operations on the CPU; None leaves it to torch."""
    log_interval: _Count = 50
    """Steps between two readings of the loss."""
    save_minutes: _Number = 10.0
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
        ConfigError: one is not key=value, is a setting of its own, or makes something else than a model
            to train.
    """
    parsed = key_values("model.args", args)
    for key in parsed:
        if key in NOT_OF_A_MODEL:
            raise ConfigError(
                f"model.args takes arguments that say which model it is, got {key}={said(parsed[key])}"
            )
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
