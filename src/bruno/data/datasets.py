"""Named datasets and user files: where they are, how they are split, and a cache of parsed examples."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bruno import limits
from bruno.data.archives import READ_ERRORS, file_stamp
from bruno.data.cifar import CIFAR10_CLASSES, read_cifar10_binary, read_cifar10_python, read_cifar10_sheets
from bruno.data.examples import Examples, concatenate
from bruno.data.formats import read_idx, read_npz
from bruno.data.images import Size, normalise_drawings, read_images
from bruno.data.synthetic import draw_characters
from bruno.data.tables import is_table, read_table
from bruno.files import check_regular

_FORMAT = 6  # version of the cached files and of how files are parsed: increase it to ignore older caches
_UNCHECKED = "BRUNO_UNCHECKED_DATA"  # environment variable: read published files whatever their checksums
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
        content_sha256: SHA-256 of the decompressed content of a .gz, which may be compressed again; if known.
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


class MissingDataError(FileNotFoundError):
    """Files of a dataset are missing and could not be downloaded; the message names them and their folder."""


def load_examples(
    name: str,
    split: str = "train",
    *,
    data_dir: str | Path | None = None,
    size: int | None = None,
    original: bool = False,
    grey: bool = True,
    group: str = "",
    columns: Sequence[str] = (),
    table_format: str = "",
    missing: bool = False,
    skip_bad: bool = False,
    min_count: int = 1,
    download: bool = True,
    drawings: bool = False,
    invert: bool | None = None,
) -> Examples:
    """Load a split of a named dataset, or of a folder, archive, npz or table given by its path.

    Args:
        name: one of `DATASETS`, or a path.
        split: "train", "validation", "trainval" (both), "test", or "all". Where models are tested on unseen
            classes, the splits have different classes.
        data_dir: the folder that is searched first, by default $BRUNO_DATA; then ~/.cache/bruno, where
            downloads are saved.
        size: for user images: resize to this height and width.
        original: return images in their published size instead.
        grey: for user images: one channel; otherwise three.
        group: for a table: the group column, which assigns rows to sets; without one, consecutive rows form
            sets.
        columns: for a table: the columns to read, in this order; by default all that are numbers.
        table_format: for a table: words for what is not to be detected, such as "semicolon decimal-comma".
        missing: for a table: read missing cells as NaN.
        skip_bad: for user files: skip elements that cannot be read; `Examples.skipped` names them.
        min_count: with skip_bad, also skip classes with fewer elements. Other classes keep their split.
        download: download missing files.
        drawings: normalise line drawings, `original` ones too; see `bruno.data.drawings.normalise_drawing`.
        invert: for drawings: whether ink is darker than paper; by default found out.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}; got {split!r}.")
    if name in DATASETS:
        if size:
            raise ValueError(f"`size` must be omitted for {name}, which has a fixed size; got {size}.")
        source, folder = DATASETS[name], None if data_dir is None else Path(data_dir)
        parsed = _parsed(name, source, folder, download, original)
        part = parsed if split == "all" else source.split(parsed, split)
        return _normalised(part, invert) if drawings else part
    examples = load_path(
        Path(name),
        size=None if original else size,
        grey=grey,
        group=group,
        columns=columns,
        table_format=table_format,
        missing=missing,
        skip_bad=skip_bad,
        drawings=drawings,
        invert=invert,
    )
    part = examples if split == "all" else split_by_class(examples, split)
    if not skip_bad:
        return part
    skipped = examples.with_at_least(min_count).skipped  # the same for all splits: reported once
    return replace(part.with_at_least(min_count), skipped=skipped)


def load_path(
    path: Path,
    *,
    size: Size | None = None,
    grey: bool = True,
    group: str = "",
    columns: Sequence[str] = (),
    table_format: str = "",
    prefer: str = "",
    missing: bool = False,
    skip_bad: bool = False,
    drawings: bool = False,
    invert: bool | None = None,
) -> Examples:
    """Load all examples of a folder, archive, npz or table; for the arguments see `load_examples`.

    `prefer` is the format of similar tables: it is chosen if several fit a table equally well.

    Parsed examples are cached, and parsed again when a file or an argument changes. An npz is not cached: it
    is as fast to read as the cache.
    """
    if not path.exists():
        raise ValueError(
            f"`data` must be one of {', '.join(DATASETS)}, or an existing path; got {str(path)!r}. "
            "Set it (--set data.name=PATH to train, --data PATH for other commands)."
        )
    if not path.is_dir():
        check_regular(path)
    kind = path.suffix.lower()
    if kind == ".npz":
        return read_npz(path, size=size, grey=grey, missing=missing, drawings=drawings, invert=invert)
    if is_table(path) and not path.is_dir():
        return _cached(
            f"{path.resolve()} {group!r} {tuple(columns)} {skip_bad} {table_format} {prefer} {missing}",
            file_stamp(path),
            lambda: read_table(
                path,
                group,
                columns=columns,
                skip_bad=skip_bad,
                table_format=table_format,
                prefer=prefer,
                missing=missing,
            ),
        )
    return _cached(
        f"{path.resolve()} {size} {grey} {skip_bad}" + f" drawings {invert}" * drawings,
        file_stamp(path),
        lambda: read_images(path, size=size, grey=grey, skip_bad=skip_bad, drawings=drawings, invert=invert),
    )


def _normalised(examples: Examples, invert: bool | None) -> Examples:
    """Examples of one channel and 256 grey values as drawings of their own size; others raise."""
    if len(examples.shape) != 3 or examples.shape[0] != 1 or examples.levels != 256:
        raise ValueError(
            f"`drawings` must be omitted for elements other than grey images; got {examples.shape}."
        )
    size = (examples.shape[1], examples.shape[2])
    drawn = normalise_drawings(examples.elements.numpy(), size, invert=invert)
    return replace(examples, elements=torch.from_numpy(drawn))


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


def locate(name: str, data_dir: Path | None = None) -> dict[str, Path | None]:
    """Return the path of each file of a named dataset, None for missing ones."""
    return {remote.path: _find(remote.path, data_dir) for remote in DATASETS[name].files}


def locate_compact(name: str, data_dir: Path | None = None, original: bool = False) -> Path | None:
    """Return the path of NAME.npz, a dataset saved by `Examples.save`, which is preferred to published files.

    With `original`, NAME-original.npz, with images at their published size.
    """
    return _find(f"{name}-original.npz" if original else f"{name}.npz", data_dir)


def is_available(name: str, data_dir: Path | None = None) -> bool:
    """Whether a named dataset can be read without a download."""
    return (
        locate_compact(name, data_dir) is not None
        or all(locate(name, data_dir).values())
        or locate_local_form(name, data_dir) is not None
    )


def locate_local_form(name: str, data_dir: Path | None = None) -> tuple[LocalForm, list[Path]] | None:
    """Return the first complete local form of a named dataset, with the paths of its files."""
    for form in DATASETS[name].local_forms:
        paths = [found for path in form.paths if (found := _find(path, data_dir))]
        if len(paths) == len(form.paths):
            return form, paths
    return None


def expected_path(remote: RemoteFile, data_dir: Path | None = None) -> Path:
    """Return the path at which to put a published file by hand: below data_dir, $BRUNO_DATA or the cache."""
    return _folders(data_dir)[0] / remote.path


def cache_dir() -> Path:
    """Return $BRUNO_CACHE, or ~/.cache/bruno."""
    return Path(os.environ.get("BRUNO_CACHE") or Path.home() / ".cache" / "bruno")


def _parsed(name: str, source: Dataset, data_dir: Path | None, download: bool, original: bool) -> Examples:
    read = (source.read_original if original else None) or source.read
    larger = read is source.read_original
    if compact := locate_compact(name, data_dir, larger):
        try:
            return Examples.load(compact)
        except ValueError as error:
            files = ", ".join(remote.path for remote in source.files) or "the package"
            raise ValueError(f"{error} Move or rename it to read {name} from {files} instead.") from error
    if not source.files:
        return read([])
    local = locate_local_form(name, data_dir)
    if local and not all(locate(name, data_dir).values()):
        form, paths = local
        return _cached(f"{name} {larger}", _stamp(paths), lambda: form.read(paths))
    paths = [
        _find(remote.path, data_dir) or _fetch(name, remote, data_dir, download) for remote in source.files
    ]
    unchecked = bool(os.environ.get(_UNCHECKED))

    def parse() -> Examples:
        for path, remote in zip(paths, source.files, strict=True):
            if not unchecked:
                _check_published(path, remote)
        return read(paths)

    # Unchecked examples have their own cache, which is not used once files are to be checked.
    return _cached(f"{name} {larger}" + " unchecked" * unchecked, _stamp(paths), parse)


def _stamp(paths: list[Path]) -> str:
    """A text that changes with the files."""
    return "".join(f"{path.resolve()} {file_stamp(path)}" for path in paths)


def _check_published(path: Path, remote: RemoteFile) -> None:
    """Raise unless a file has the published content: numbers on another one cannot be compared."""
    check_regular(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != remote.sha256 and not (
        remote.content_sha256 and _content_digest(path) == remote.content_sha256
    ):
        raise ValueError(
            f"{path}: must have the published content, SHA-256 {remote.sha256[:12]}…; got {digest[:12]}…. "
            f"Delete it to download it again, or set {_UNCHECKED}=1 to read it as it is."
        )


def _content_digest(path: Path) -> str:
    """SHA-256 of the decompressed content of a .gz; empty if it cannot be decompressed within the limit."""
    digest, amount = hashlib.sha256(), 0
    try:
        with gzip.open(path) as file:
            while (part := file.read(1 << 20)) and amount <= limits.MEMORY.value:
                digest.update(part)
                amount += len(part)
    except READ_ERRORS:
        return ""
    return digest.hexdigest()


def _folders(data_dir: Path | None) -> list[Path]:
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"`data_dir` must be an existing folder; got {str(data_dir)!r}.")
    chosen = data_dir or os.environ.get("BRUNO_DATA")
    return [Path(chosen), cache_dir()] if chosen else [cache_dir()]


def _find(file: str, data_dir: Path | None) -> Path | None:
    return next((folder / file for folder in _folders(data_dir) if (folder / file).is_file()), None)


def _fetch(name: str, remote: RemoteFile, data_dir: Path | None, download: bool) -> Path:
    problems = ["download is disabled"]
    if download:
        import pooch  # type: ignore[import-untyped]  # only needed to download

        terminal = sys.stderr.isatty()
        pooch.get_logger().setLevel("INFO" if terminal else "WARNING")
        problems = []
        for url in remote.mirrors:
            try:
                target = cache_dir() / remote.path  # never write into a user's data folder
                got = pooch.retrieve(
                    url, f"sha256:{remote.sha256}", target.name, target.parent, progressbar=terminal
                )
                return Path(got)
            except Exception as error:
                problems.append(f"{url}: {_cause(error)}")
    raise MissingDataError(
        f"{name} needs {remote.path} (SHA-256 {remote.sha256[:12]}…), which is missing: put it at "
        f"{expected_path(remote, data_dir)}, or set another folder with --data-dir or $BRUNO_DATA. "
        + "; ".join(problems)
    )


def _cause(error: BaseException) -> str:
    """Return the message of the root cause, without those of the library layers that wrap it."""
    while error.__context__:
        error = error.__context__
    return " ".join(str(error).split())


def _cached(key: str, stamp: str, parse: Callable[[], Examples]) -> Examples:
    """Return the cached examples of a key and stamp, or parse and cache them. Also works without a cache.

    Deletes examples that were cached for the same key with another stamp.
    """
    name, version = (
        hashlib.sha256(f"{_FORMAT}{text}".encode(errors="surrogatepass")).hexdigest()[:16]
        for text in (key, stamp)
    )
    path = cache_dir() / "parsed" / f"{name}-{version}.npz"
    if path.is_file():
        try:
            return Examples.load(path)
        except ValueError:  # damaged: parse again
            pass
    examples = parse()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        examples.save(path)
        for old in path.parent.glob(f"{name}-*.npz"):
            if old != path:
                old.unlink(missing_ok=True)
    except OSError:
        pass
    return examples


# --- named datasets ------------------------------------------------------------------------------------


def _read_digits(_: list[Path]) -> Examples:
    """Return scikit-learn's 1,797 handwritten digits, 8 × 8 with 17 grey values."""
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
    """Training and test files; `hashes` are SHA-256 of the .gz files, `contents` of what they hold."""
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
