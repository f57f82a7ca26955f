"""A model and its training as data: frozen attrs classes, from and to dictionaries and TOML.

Every setting carries its description and its checks; `bruno.settings` defines how.
"""

import math
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import attrs

from bruno import limits
from bruno.checks import check_all_differ, check_between, check_levels
from bruno.settings import Check, choice, from_dict, nearest, parse_settings, setting, to_dict, typed

__all__ = [
    "DataConfig",
    "FlowConfig",
    "ModelConfig",
    "ProcessConfig",
    "Recipe",
    "TrainConfig",
    "from_dict",
    "load_recipe",
    "presets",
    "to_dict",
]

_PRESETS = Path(__file__).parent / "presets"
# Upper limits of settings, far above any use: a larger value would exhaust memory or never end.
_MAX_COUPLINGS = 1000
_MAX_BLOCKS = 100
_MAX_UNITS = 2**16
_MAX_ELEMENTS = 2**20
_MAX_STEPS = 10**9
_MAX_PIXELS = 10_000  # height or width of an image
_LARGEST = 1e9  # any other number


def _from(least: float, most: float) -> Check:
    return partial(check_between, least=least, most=most)


def _check_range(name: str, value: float, rule: str, holds: Callable[[float], bool]) -> None:
    if not holds(value):
        raise ValueError(f"`{name}` must be {rule}; got {value}.")


_FRACTION_BELOW_ONE = partial(_check_range, rule="at least 0 and below 1", holds=lambda value: 0 <= value < 1)
_FRACTION = partial(_check_range, rule="from 0 to 1", holds=lambda value: 0 <= value <= 1)
_ABOVE_ZERO = partial(
    _check_range, rule=f"above 0 and at most {_LARGEST:g}", holds=lambda value: 0 < value <= _LARGEST
)
_DOF = partial(
    _check_range, rule=f"above 2 and at most {_LARGEST:g}", holds=lambda value: 2 < value <= _LARGEST
)
_ALPHA = partial(_check_range, rule="between 0 and 0.5", holds=lambda value: 0 < value < 0.5)
_BINS = partial(_check_range, rule="from 2 to 128", holds=lambda value: 2 <= value <= 128)
_SEED = partial(_check_range, rule="from 0 to 2**63 - 1", holds=lambda value: 0 <= value < 2**63)


@attrs.frozen(slots=False, field_transformer=typed)
class FlowConfig:
    """The bijection between elements and latents: "conv" for images, "dense" for rows and small images."""

    SECTION: ClassVar[str] = "flow"

    kind: str = choice("couplings", "conv", "dense")
    scales: int = setting(2, "scales of the convolutional couplings, each half as large", _from(1, 16))
    depth: int = setting(
        3, "couplings with each kind of mask in a scale; the last scale has one more", _from(1, _MAX_BLOCKS)
    )
    mixing: bool = setting(False, "mix channels by learnt 1 × 1 convolutions between couplings")
    filters: int = setting(64, "filters of a convolution", _from(1, _MAX_UNITS))
    blocks: int = setting(8, "residual blocks of a convolutional coupling", _from(0, _MAX_BLOCKS))
    squeeze_first: bool = setting(False, "run the first couplings at half the resolution, which is faster")
    couplings: int = setting(
        6, "dense couplings; after the convolutional ones, if any", _from(0, _MAX_COUPLINGS)
    )
    units: int = setting(1024, "hidden units of a dense coupling", _from(1, _MAX_UNITS))
    weight_norm: bool = setting(True, "normalise the weights and initialise their scale from data")
    coupling: str = choice("transform of a coupling; affine maps follow splines", "affine", "spline")
    spline_scales: int = setting(0, "number of scales with splines, from the first; 0: all", _from(0, 16))
    spline_dense: bool = setting(False, "also use splines in the dense couplings after convolutional ones")
    bins: int = setting(8, "bins of a spline", _BINS)
    interval: float = setting(5.0, "a spline is the identity outside [-interval, interval]", _ABOVE_ZERO)

    def __attrs_post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.spline_scales > self.scales:
            raise ValueError(
                f"`flow.spline_scales` must be at most {self.scales}, the number of scales, or 0 for all; "
                f"got {self.spline_scales}."
            )


@attrs.frozen(slots=False, field_transformer=typed)
class ProcessConfig:
    """The exchangeable process of the latents, and the initial values of its parameters."""

    SECTION: ClassVar[str] = "process"

    kind: str = choice("process", "student-t", "gaussian")
    dof: float = setting(1000.0, "initial degrees of freedom", _DOF)
    variance: float = setting(1.0, "initial variance of a latent", _ABOVE_ZERO)
    correlation: float = setting(0.1, "initial correlation of two elements of a set", _FRACTION_BELOW_ONE)
    leading: int = setting(
        0, "number of leading dimensions, which have their own initial correlation", _from(0, sys.maxsize)
    )
    leading_correlation: float = setting(
        0.9, "initial correlation of the leading dimensions", _FRACTION_BELOW_ONE
    )


@attrs.frozen(slots=False, field_transformer=typed)
class ModelConfig:
    """A model of sets: the shape and kind of their elements, the flow and the process."""

    shape: tuple[int, ...] = setting(attrs.NOTHING, "shape of an element: (1, 28, 28) or (7,)")
    levels: int = setting(256, "values that a pixel can take; 0 for rows of real numbers")
    pixels: str = choice("map of pixels to real numbers", "logit", "gaussianise", "mixture")
    alpha: float = setting(1e-6, "margin of that map at both ends, as a fraction of its range", _ALPHA)
    flow: FlowConfig = attrs.field(factory=FlowConfig)
    process: ProcessConfig = attrs.field(factory=ProcessConfig)
    missing: str = choice("missing numbers of rows", "reject", "impute")
    scales: str = choice("scales of columns: standardised, or chosen for each", "linear", "auto")

    def __attrs_post_init__(self) -> None:
        """Check the settings without a range."""
        if self.levels and self.missing != "reject":
            hint = "Rows have `levels` 0." if len(self.shape) == 1 else "The preset 'images' is for images."
            raise ValueError(f"`missing` must be 'reject' for images; got {self.missing!r}. {hint}")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ValueError(f"`shape` must be positive sizes such as (1, 28, 28) or (7,); got {self.shape}.")
        limits.MEMORY.check_argument("shape", self.shape, 4 * math.prod(self.shape))
        check_levels(self.levels)


@attrs.frozen(slots=False, field_transformer=typed)
class TrainConfig:
    """Training settings: on sets of one class, on few-shot episodes, or on a weighted sum of both losses.

    Schedules depend on the completed fraction of the run, so that they are the same for runs that are limited
    by minutes and by steps.
    """

    SECTION: ClassVar[str] = "train"

    steps: int = setting(1000, "optimiser steps", _from(1, _MAX_STEPS))
    minutes: float = setting(
        0.0, "minutes to train instead of `steps`; 0: train by steps", _from(0, _MAX_STEPS)
    )
    batch: int = setting(32, "sets per step", _from(1, _MAX_ELEMENTS))
    set_size: int = setting(20, "set size: elements per set", _from(1, _MAX_ELEMENTS))
    generative: float = setting(1.0, "weight of bits/dim in the loss", _from(0, _LARGEST))
    discriminative: float = setting(
        0.0, "weight of the episodes' cross-entropy in the loss", _from(0, _LARGEST)
    )
    onset: float = setting(0.0, "fraction of the run before cross-entropy starts", _FRACTION_BELOW_ONE)
    episodes: int = setting(8, "few-shot episodes per step", _from(1, _MAX_ELEMENTS))
    way: int = setting(20, "classes per episode", _from(2, _MAX_ELEMENTS))
    shot: int = setting(1, "support elements of each class of an episode", _from(1, _MAX_ELEMENTS))
    queries: int = setting(1, "query elements of each class of an episode", _from(1, _MAX_ELEMENTS))
    shared: bool = setting(False, "compute bits/dim on the episodes' elements instead of on separate sets")
    episode_noise: str = choice("dequantisation noise of the elements of episodes", "full", "varied", "none")
    optimiser: str = choice("optimiser", "adamw", "adam", "rmsprop", "muon")
    learning_rate: float = setting(1e-3, "learning rate of the flow", _from(0, _LARGEST))
    process_learning_rate: float = setting(
        3.0, "learning rate of the process, as a multiple of `learning_rate`", _from(0, _LARGEST)
    )
    weight_decay: float = setting(0.0, "weight decay of the flow", _from(0, _LARGEST))
    dropout: float = setting(0.0, "dropout rate in the networks of the flow", _FRACTION_BELOW_ONE)
    warmup: float = setting(
        0.02, "fraction of the run in which the learning rate warms up", _FRACTION_BELOW_ONE
    )
    decay: str = choice("schedule of the learning rate", "linear", "cosine", "exponential", "none")
    final_learning_rate: float = setting(
        0.0, "final learning rate, as a fraction of `learning_rate`", _FRACTION_BELOW_ONE
    )
    clip: float = setting(0.0, "gradient clipping: largest norm; 0: none", _from(0, _LARGEST))
    ema: float = setting(0.0, "decay of the moving average of the weights; 0: none", _FRACTION_BELOW_ONE)
    mirror: bool = setting(False, "mirror each whole set with probability 1/2")
    shift: int = setting(0, "shift each image by up to this many pixels", _from(0, _MAX_PIXELS))
    slant: float = setting(0.0, "initial strength of random linear maps of whole sets", _from(0, _LARGEST))
    warp: float = setting(0.0, "initial strength of random linear maps of single images", _from(0, _LARGEST))
    restyle: float = setting(
        0.0,
        "initial fraction of images with another pen, filter and contrast; needs data.original",
        _FRACTION,
    )
    fade: float = setting(
        1.0, "last fraction of the run, over which augmentation decreases to 0; 0: never", _FRACTION
    )
    precision: str = choice("dtype of the networks on a GPU", "bfloat16", "float32")
    graph: bool = setting(True, "on a GPU, compile the step and capture it as one CUDA graph")
    recompute: bool = setting(False, "activation checkpointing: less memory for more time")
    seed: int = setting(0, "seed of all random numbers", _SEED)

    def __attrs_post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.onset and not self.generative:
            raise ValueError(
                f"`train.onset` must be 0 if `train.generative` is 0: no other loss starts earlier; got "
                f"{self.onset}."
            )
        if not self.generative and not self.discriminative:
            raise ValueError("`train.generative` or `train.discriminative` must be above 0; got 0 for both.")
        if self.shared and not (self.generative and self.discriminative):
            raise ValueError("`train.shared` needs weights above 0 for both losses; one of them is 0.")
        if self.shared and self.episode_noise != "full":
            raise ValueError(
                "`train.shared` must be false unless `train.episode_noise` is 'full', as bits/dim need "
                f"elements with noise; got {self.episode_noise!r}."
            )
        if self.decay == "exponential" and not self.final_learning_rate:
            raise ValueError("`train.final_learning_rate` must be above 0 for an exponential decay; got 0.")

    @property
    def min_count(self) -> int:
        """Number of elements that every class must have."""
        sets = self.set_size * bool(self.generative and not self.shared)
        return max(1, sets, (self.shot + self.queries) * bool(self.discriminative))

    @property
    def elements(self) -> int:
        """Number of elements encoded in a step."""
        sets = self.batch * self.set_size * bool(self.generative and not self.shared)
        return sets + self.episodes * self.way * (self.shot + self.queries) * bool(self.discriminative)


@attrs.frozen(slots=False, field_transformer=typed)
class DataConfig:
    """The data that a model learns from."""

    SECTION: ClassVar[str] = "data"

    name: str = setting(attrs.NOTHING, "a named dataset, or the path of a folder, archive, npz or table")
    split: str = choice("split to train on", "train", "trainval")
    rotations: bool = setting(False, "use every class four times, rotated by multiples of 90 degrees")
    original: bool = setting(False, "augment images at their original size and downsample them last")
    classes: tuple[str, ...] = setting((), "use only these classes; empty: all")
    size: int = setting(
        0, "user images: resize to this height and width; 0: do not resize", _from(0, _MAX_PIXELS)
    )
    colour: bool = setting(False, "user images: three channels instead of one")
    invert: bool = setting(False, "user images: turn dark ink on bright paper into bright ink")
    backdrop: str = choice("user images: behind transparent pixels; empty: chosen once", "", "black", "white")
    # Recipes in older files do not have this setting; it is true for Omniglot.
    drawings: bool = setting(
        attrs.Factory(lambda data: data.name == "omniglot", takes_self=True),
        "user images: normalise polarity, frame, pen and sharpness of line drawings",
    )
    group: str = setting("", "table: the group column, which names the set of a row; empty: blocks of rows")
    columns: tuple[str, ...] = setting((), "table: the columns of a row; empty: all that are numbers")
    format: str = setting("", 'table: words such as "semicolon decimal-comma"; empty: detect the format')
    skip_bad: bool = setting(False, "skip files and rows that cannot be read")

    def __attrs_post_init__(self) -> None:
        """Check that the data are named, and no class or column twice."""
        if not self.name.strip():
            raise ValueError(f"`data.name` must be a dataset or a path; got {self.name!r}.")
        check_all_differ("data.classes", self.classes)
        check_all_differ("data.columns", self.columns)


@attrs.frozen(slots=False, field_transformer=typed)
class Recipe:
    """Everything that defines a training run: one TOML file, or a preset."""

    data: DataConfig
    pixels: str = choice("map of pixels to real numbers", "logit", "gaussianise", "mixture")
    alpha: float = setting(1e-6, "margin of that map at both ends, as a fraction of its range", _ALPHA)
    missing: str = choice("missing numbers of rows", "reject", "impute")
    scales: str = choice("scales of columns: standardised, or chosen for each", "linear", "auto")
    flow: FlowConfig = attrs.field(factory=FlowConfig)
    process: ProcessConfig = attrs.field(factory=ProcessConfig)
    train: TrainConfig = attrs.field(factory=TrainConfig)

    def model(self, shape: tuple[int, ...], levels: int) -> ModelConfig:
        """The model for elements of this shape."""
        return ModelConfig(
            shape, levels, self.pixels, self.alpha, self.flow, self.process, self.missing, self.scales
        )


def presets() -> dict[str, str]:
    """The presets with their titles, which are the first lines of their files."""
    files = sorted(_PRESETS.glob("*.toml"))
    return {file.stem: file.read_text("utf-8").splitlines()[0].lstrip("# ") for file in files}


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A preset by name or a TOML file by path, changed by ``section.key=value`` settings."""
    name = str(name)
    path = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not path.is_file():
        hint = nearest(name, presets(), "the presets are")
        raise ValueError(f"`preset` must be a preset or a .toml file; got {name!r}, {hint}")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also of undecodable text, numbers and nesting
        raise ValueError(f"{path}: is not TOML: {error}.") from error
    for section, value in parse_settings(overrides).items():
        before = values.get(section, {})
        values[section] = before | value if isinstance(value, dict) and isinstance(before, dict) else value
    return from_dict(Recipe, values)
