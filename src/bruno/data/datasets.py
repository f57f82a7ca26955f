"""Named datasets: their published files, how they are read, and how they are split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bruno.data.cifar import CIFAR10_CLASSES, read_cifar10_binary, read_cifar10_python, read_cifar10_sheets
from bruno.data.examples import Examples, concatenate
from bruno.data.formats import read_idx
from bruno.data.images import read_images
from bruno.data.synthetic import draw_characters
from bruno.extras import imports_of

SPLITS = ("train", "validation", "trainval", "test", "all")
OMNIGLOT_FIRST = ("Alphabet_of_the_Magi/character01", "Angelic/character01")  # first class of each archive
OMNIGLOT_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")


@dataclass(frozen=True)
class RemoteFile:
    """A published file.

    Attributes:
        path: its path below the data folder.
        sha256: SHA-256 of the file.
        mirrors: its URLs.
        content_sha256: SHA-256 of the decompressed content of a .gz, which may have been recompressed; empty
            if unknown.
    """

    path: str
    sha256: str
    mirrors: tuple[str, ...]
    content_sha256: str = ""


@dataclass(frozen=True)
class LocalForm:
    """Other files of a dataset, which are read where they exist and never downloaded."""

    paths: tuple[str, ...]
    read: Callable[[list[Path]], Examples]


@dataclass(frozen=True)
class Dataset:
    """A named dataset.

    `read` returns images at the size of the models, `read_original` at the published size, if it is larger.
    `local_forms` are read, in this order, where `files` are missing.
    """

    title: str
    files: tuple[RemoteFile, ...]
    read: Callable[[list[Path]], Examples]
    split: Callable[[Examples, str], Examples]
    read_original: Callable[[list[Path]], Examples] | None = None
    local_forms: tuple[LocalForm, ...] = ()


def split_by_class(examples: Examples, split: str) -> Examples:
    """Return a split of the classes: every tenth for test, another tenth for validation, the rest for train.

    With 10 to 19 classes, two are for test and two for validation; with 5 to 9, the same two are for both;
    with 3 or 4, the same one is for both. With fewer than 3, every split has all classes.
    """
    classes = range(len(examples.names))
    if len(classes) < 3:
        return examples
    every = min(10, len(classes) // 2) if len(classes) >= 5 else len(classes)
    test = [i for i in classes if i % every == every - 1]
    validation = [i for i in classes if i % every == every - 2] if len(classes) >= 10 else test
    held_out = {*test, *validation}
    chosen = {
        "train": [i for i in classes if i not in held_out],
        "validation": validation,
        "trainval": [i for i in classes if i not in test],
        "test": test,
    }
    return examples.of_classes(chosen[split])


def _read_digits(_: list[Path]) -> Examples:
    """Return scikit-learn's 1,797 handwritten digits, 8 × 8 with 17 grey values."""
    with imports_of("data", "the digits"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes a second to import

    digits = load_digits()
    pixels = digits.images.astype(np.uint8)[:, None]
    return Examples(pixels, digits.target, tuple(map(str, range(10))), levels=17)


def _split_digits(examples: Examples, split: str) -> Examples:
    """Return seven digits for training or three unseen ones for validation and test."""
    held_out = (2, 5, 8)
    seen = [i for i in range(10) if i not in held_out]
    return examples.of_classes(seen if split.startswith("train") else held_out)


def _read_omniglot(paths: list[Path], size: int | None = 28) -> Examples:
    parts = []
    for path, first in zip(paths, OMNIGLOT_FIRST, strict=True):
        part = read_images(path, size=size).inverted()
        if part.names[0] != first:
            raise ValueError(
                f"{path}: must be Omniglot's archive, whose first class is {first}; got {part.names[0]}. "
                f"Download it from {_OMNIGLOT[0]}{path.name}."
            )
        parts.append(part)
    return concatenate(parts)


def _split_omniglot(examples: Examples, split: str) -> Examples:
    """Return a split of Vinyals et al. (2016): 1,200 characters for trainval, 423 for test.

    Five alphabets of trainval are for validation.
    """

    def is_test(name: str) -> bool:
        alphabet, character = name.split("/")
        return name in evaluation and (
            alphabet > "Gurmukhi" or (alphabet == "Gurmukhi" and character > "character41")
        )

    evaluation = set(examples.names[examples.names.index(OMNIGLOT_FIRST[1]) :])  # the second archive
    validation = {name for name in examples.names if name.split("/")[0] in OMNIGLOT_VALIDATION}
    wanted = {
        "test": is_test,
        "validation": lambda name: name in validation,
        "trainval": lambda name: not is_test(name),
        "train": lambda name: not is_test(name) and name not in validation,
    }[split]
    return examples.of_classes(i for i, name in enumerate(examples.names) if wanted(name))


def _read_two_idx(paths: list[Path]) -> Examples:
    return _join(read_idx(*paths[:2]), read_idx(*paths[2:]))


def _read_both_splits(read: Callable[[Path, bool], Examples], paths: list[Path]) -> Examples:
    """Read a published archive that contains both splits."""
    return _join(read(paths[0], True), read(paths[0], False))


def _read_cifar10_sheets(paths: list[Path]) -> Examples:
    half = len(CIFAR10_CLASSES)
    return _join(read_cifar10_sheets(paths[:half]), read_cifar10_sheets(paths[half:]))


def _join(train: Examples, test: Examples) -> Examples:
    """Join the published splits; the names of test classes start with test/."""
    return concatenate([train, replace(test, names=tuple(f"test/{name}" for name in test.names))])


def _split_as_published(examples: Examples, split: str) -> Examples:
    """Return the published split: train and test have the same classes, and validation is test.

    Do not report test results of a model that was selected by validation.
    """
    test = not split.startswith("train")
    wanted = [i for i, name in enumerate(examples.names) if name.startswith("test/") == test]
    part = examples.of_classes(wanted)
    return replace(part, names=tuple(name.removeprefix("test/") for name in part.names))


def _idx_files(
    folder: str, mirrors: tuple[str, ...], hashes: tuple[str, ...], contents: tuple[str, ...]
) -> tuple[RemoteFile, ...]:
    """Training and test files; `hashes` are SHA-256 of the .gz files, `contents` of decompressed files."""
    names = [
        f"{part}-{kind}.gz"
        for part in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    return tuple(
        RemoteFile(f"{folder}/{name}", digest, tuple(mirror + name for mirror in mirrors), content)
        for name, digest, content in zip(names, hashes, contents, strict=True)
    )


_OMNIGLOT = (
    "https://github.com/brendenlake/omniglot/raw/master/python/",
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
)

DATASETS = {
    "digits": Dataset("1,797 handwritten digits of scikit-learn, 8 × 8", (), _read_digits, _split_digits),
    "drawn": Dataset(
        "40 synthetic characters, drawn 20 times each, 28 × 28",
        (),
        lambda _: draw_characters(),
        split_by_class,
    ),
    "omniglot": Dataset(
        "Omniglot, 1,623 characters, drawn by 20 people each, 28 × 28",
        (
            RemoteFile(
                "omniglot/images_background.zip",
                "f81e8e83fe258ecd474acfbf7e2fde4303001a915ab60f95feb2d67af4b9605e",
                tuple(mirror + "images_background.zip" for mirror in _OMNIGLOT),
            ),
            RemoteFile(
                "omniglot/images_evaluation.zip",
                "954a767dfd0c0fdd379eb2b5759045319377c3fbfefbd04ea938bb7760234fa6",
                tuple(mirror + "images_evaluation.zip" for mirror in _OMNIGLOT),
            ),
        ),
        _read_omniglot,
        _split_omniglot,
        functools.partial(_read_omniglot, size=None),
    ),
    "mnist": Dataset(
        "MNIST, 70,000 handwritten digits, 28 × 28",
        _idx_files(
            "mnist",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        _read_two_idx,
        _split_as_published,
    ),
    "fashion-mnist": Dataset(
        "Fashion-MNIST, 70,000 articles of clothing, 28 × 28",
        _idx_files(
            "fashion-mnist",
            (
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        _read_two_idx,
        _split_as_published,
    ),
    "cifar10": Dataset(
        "CIFAR-10, 60,000 colour photographs, 32 × 32",
        (
            RemoteFile(
                "cifar10/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            ),
        ),
        functools.partial(_read_both_splits, read_cifar10_binary),
        _split_as_published,
        local_forms=(
            LocalForm(
                ("cifar10/cifar-10-python.tar.gz",),
                functools.partial(_read_both_splits, read_cifar10_python),
            ),
            LocalForm(
                tuple(
                    f"cifar10/{part}-{name}.webp" for part in ("train", "test") for name in CIFAR10_CLASSES
                ),
                _read_cifar10_sheets,
            ),
        ),
    ),
}


def split_dataset(name: str, examples: Examples, split: str) -> Examples:
    """Return a split of all examples of a named dataset; raises if the split has no classes."""
    part = DATASETS[name].split(examples, split)
    if not part.names:
        raise ValueError(
            f"`split` must be one that {name}.npz has; got {split!r}. Save the file again, with all splits: "
            f"load_examples({name!r}, 'all').save(PATH)."
        )
    return part
