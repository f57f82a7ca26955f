"""Data sets by name: where their files are, how they are split, one compact file after the first parse."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bruno.data.examples import Examples, concatenate
from bruno.data.readers import read_cifar10, read_csv, read_idx, read_images, read_npz
from bruno.data.synthetic import draw_characters

_FORMAT = 5  # of the compact files, and of how files are read: older ones are not used
SPLITS = ("train", "validation", "trainval", "test", "all")
OMNIGLOT_FIRST = ("Alphabet_of_the_Magi/character01", "Angelic/character01")  # of each archive
OMNIGLOT_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its place below the data folder, its SHA-256, and where to get it."""

    path: str
    sha256: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """A data set that can be asked for by name.

    `read` gives it in the size that models take, `read_original` in the one it was published in, if larger.
    """

    title: str
    files: tuple[RemoteFile, ...]
    read: Callable[[list[Path]], Examples]
    split: Callable[[Examples, str], Examples]
    read_original: Callable[[list[Path]], Examples] | None = None


class MissingDataError(FileNotFoundError):
    """A data set's files are neither here nor to be had; says which ones and where to put them."""


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
    skip_bad: bool = False,
    min_count: int = 1,
    download: bool = True,
) -> Examples:
    """The examples of a split of a named data set, or of a folder, archive, npz or CSV by its path.

    Args:
        name: one of `DATASETS`, or a path.
        split: "train", "validation", both as "trainval", "test", or "all"; the classes of the first two and
            of test differ where a model is meant to be tried on classes it has not seen.
        data_dir: where files are looked for first; $BRUNO_DATA if left out. Then in ~/.cache/bruno, where
            downloads go.
        size: for your own images: resize to this height and width.
        original: images in the size they were published in instead.
        grey: for your own images: one channel or three.
        group: for a CSV: the column that says which set a row belongs to.
        columns: for a CSV: those to read, in this order; all others if left out.
        skip_bad: for your own files: leave out what cannot be read, and count it.
        min_count: with skip_bad, leave out classes with fewer elements, too. The others stay in their split.
        download: fetch what is missing.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}; got {split!r}.")
    if name in DATASETS:
        if size:
            raise ValueError(f"`size` must be left out for {name}, which has its own; got {size}.")
        source, folder = DATASETS[name], None if data_dir is None else Path(data_dir)
        parsed = _parsed(name, source, folder, download, original)
        return parsed if split == "all" else source.split(parsed, split)
    examples = load_path(
        Path(name),
        size=None if original else size,
        grey=grey,
        group=group,
        columns=columns,
        skip_bad=skip_bad,
    )
    part = examples if split == "all" else split_by_class(examples, split)
    if not skip_bad:
        return part
    left_out = examples.with_at_least(min_count).skipped  # the same for all splits: to be said once
    return replace(part.with_at_least(min_count), skipped=left_out)


def load_path(
    path: Path,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool = True,
    group: str = "",
    columns: Sequence[str] = (),
    skip_bad: bool = False,
) -> Examples:
    """All examples of a folder, archive, npz or CSV; the arguments are those of `load_examples`.

    What takes long to parse is kept as one compact file, made anew when the files change or are to be read
    in another way. An npz is not: it is such a file already, and as fast to read.
    """
    if not path.exists():
        raise ValueError(
            f"`data` must be one of {', '.join(DATASETS)}, or a path; there is nothing at {str(path)!r}. "
            "Name it (--set data.name=PATH to train, --data PATH for another's)."
        )
    kind = path.suffix.lower()
    if kind == ".npz":
        return read_npz(path, size=size, grey=grey)
    if kind == ".csv":
        return _cached(
            f"{path.resolve()} {group!r} {tuple(columns)} {skip_bad}",
            _stamp(path),
            lambda: read_csv(path, group, columns=columns, skip_bad=skip_bad),
        )
    return _cached(
        f"{path.resolve()} {size} {grey} {skip_bad}",
        _stamp(path),
        lambda: read_images(path, size=size, grey=grey, skip_bad=skip_bad),
    )


def split_by_class(examples: Examples, split: str) -> Examples:
    """Every tenth class is for test, every tenth for validation: a model meets them for the first time there.

    Of fewer than twenty classes two are for each, of fewer than ten the same two for both, of three or four
    one. With fewer than three all classes are for all.
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
    """Where each file of a named data set is, or None where it is missing."""
    return {remote.path: _find(remote.path, data_dir) for remote in DATASETS[name].files}


def locate_compact(name: str, data_dir: Path | None = None, original: bool = False) -> Path | None:
    """A data set as one file that `Examples.save` wrote, NAME.npz in a data folder: it is taken first.

    Images in the size they were published in are looked for in NAME-original.npz.
    """
    return _find(f"{name}-original.npz" if original else f"{name}.npz", data_dir)


def is_available(name: str, data_dir: Path | None = None) -> bool:
    """Whether a named data set can be read without a download."""
    return locate_compact(name, data_dir) is not None or all(locate(name, data_dir).values())


def expected_path(remote: RemoteFile, data_dir: Path | None = None) -> Path:
    """Where a published file is to be put by hand: below data_dir, $BRUNO_DATA or the cache."""
    return _folders(data_dir)[0] / remote.path


def cache_dir() -> Path:
    """$BRUNO_CACHE, or ~/.cache/bruno."""
    return Path(os.environ.get("BRUNO_CACHE") or Path.home() / ".cache" / "bruno")


def _parsed(name: str, source: Dataset, data_dir: Path | None, download: bool, original: bool) -> Examples:
    read = (source.read_original if original else None) or source.read
    larger = read is source.read_original
    if compact := locate_compact(name, data_dir, larger):
        try:
            return Examples.load(compact)
        except ValueError as error:
            files = ", ".join(remote.path for remote in source.files) or "what is built in"
            raise ValueError(
                f"{error} It is in the way: move or rename it. {name} is read from {files}."
            ) from error
    if not source.files:
        return read([])
    paths = [
        _find(remote.path, data_dir) or _fetch(name, remote, data_dir, download) for remote in source.files
    ]
    return _cached(f"{name} {larger}", "".join(map(_stamp, paths)), lambda: read(paths))


def _folders(data_dir: Path | None) -> list[Path]:
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"`--data-dir` must be a folder that is there; there is no {data_dir}.")
    named = (
        [data_dir] if data_dir else [Path(os.environ["BRUNO_DATA"])] if os.environ.get("BRUNO_DATA") else []
    )
    return [*named, cache_dir()]


def _find(file: str, data_dir: Path | None) -> Path | None:
    return next((folder / file for folder in _folders(data_dir) if (folder / file).is_file()), None)


def _fetch(name: str, remote: RemoteFile, data_dir: Path | None, download: bool) -> Path:
    problems = ["downloading is switched off"]
    if download:
        import pooch  # type: ignore[import-untyped]  # only here: everything else works without it

        terminal = sys.stderr.isatty()
        pooch.get_logger().setLevel("INFO" if terminal else "WARNING")
        problems = []
        for url in remote.mirrors:
            try:
                target = cache_dir() / remote.path  # the data folder is its owner's
                got = pooch.retrieve(
                    url, f"sha256:{remote.sha256}", target.name, target.parent, progressbar=terminal
                )
                return Path(got)
            except Exception as error:
                problems.append(f"{url}: {_cause(error)}")
    raise MissingDataError(
        f"{name} needs {remote.path} (SHA-256 {remote.sha256[:12]}…), which is not there: put it at "
        f"{expected_path(remote, data_dir)}, or name another folder with --data-dir or $BRUNO_DATA. "
        + "; ".join(problems)
    )


def _cause(error: BaseException) -> str:
    """What went wrong first: a library for the network wraps it into what each of its layers has to say."""
    while error.__context__:
        error = error.__context__
    return " ".join(str(error).split())


def _cached(what: str, state: str, parse: Callable[[], Examples]) -> Examples:
    """Parse once; after that the compact file is read instead. No cache is no reason to fail.

    What was kept of the same in an earlier state is deleted.
    """
    name, version = (hashlib.sha256(f"{_FORMAT}{key}".encode()).hexdigest()[:16] for key in (what, state))
    path = cache_dir() / "parsed" / f"{name}-{version}.npz"
    if path.is_file():
        try:
            return Examples.load(path)
        except ValueError:  # damaged: it is made again
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


def _stamp(path: Path) -> str:
    """Changes when the file, or one below the folder, does."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = ((file, file.stat() if file.exists() else file.lstat()) for file in files)  # links may dangle
    states = (f" {file.relative_to(path)} {at.st_size} {at.st_mtime_ns}" for file, at in facts)
    return str(path.resolve()) + "".join(states)


# --- the named ones ------------------------------------------------------------------------------------


def _read_digits(_: list[Path]) -> Examples:
    """scikit-learn's 1,797 handwritten digits, 8 × 8 with 17 grey values."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # a second's import that most commands do not need

    digits = load_digits()
    pixels = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    names = tuple(map(str, range(10)))
    return Examples(pixels, torch.from_numpy(digits.target).long(), names, levels=17)


def _split_digits(examples: Examples, split: str) -> Examples:
    """Seven digits to learn from, three that no model has seen."""
    held_out = (2, 5, 8)
    learnt = [i for i in range(10) if i not in held_out]
    return examples.of_classes(learnt if split.startswith("train") else held_out)


def _read_omniglot(paths: list[Path], size: int | None = 28) -> Examples:
    parts = []
    for path, first in zip(paths, OMNIGLOT_FIRST, strict=True):
        part = read_images(path, size=size).inverted()
        if part.names[0] != first:
            raise ValueError(
                f"{path}: is not Omniglot's archive of that name: its first class must be {first}; "
                f"it is {part.names[0]}. Get it from {_OMNIGLOT[0]}{path.name}."
            )
        parts.append(part)
    return concatenate(parts)


def _split_omniglot(examples: Examples, split: str) -> Examples:
    """Vinyals et al. (2016): 1,200 characters to learn from (five alphabets to validate), 423 for test."""

    def is_test(name: str) -> bool:
        alphabet, character = name.split("/")
        return name in evaluation and (
            alphabet > "Gurmukhi" or (alphabet == "Gurmukhi" and character > "character41")
        )

    evaluation = set(examples.names[examples.names.index(OMNIGLOT_FIRST[1]) :])  # it comes second
    validation = {name for name in examples.names if name.split("/")[0] in OMNIGLOT_VALIDATION}
    wanted = {
        "test": is_test,
        "validation": lambda name: name in validation,
        "trainval": lambda name: not is_test(name),
        "train": lambda name: not is_test(name) and name not in validation,
    }[split]
    return examples.of_classes(i for i, name in enumerate(examples.names) if wanted(name))


def _read_two_idx(paths: list[Path]) -> Examples:
    train, test = read_idx(*paths[:2]), read_idx(*paths[2:])
    test_names = tuple(f"test/{name}" for name in test.names)
    return concatenate([train, Examples(test.elements, test.labels, test_names)])


def _read_cifar10(paths: list[Path]) -> Examples:
    train, test = (read_cifar10(paths[0], train=flag) for flag in (True, False))
    return concatenate([train, Examples(test.elements, test.labels, tuple(f"test/{n}" for n in test.names))])


def _split_as_published(examples: Examples, split: str) -> Examples:
    """The same classes in train and test; validation is test, so choose nothing by it that you report."""
    test = not split.startswith("train")
    wanted = [i for i, name in enumerate(examples.names) if name.startswith("test/") == test]
    part = examples.of_classes(wanted)
    return Examples(part.elements, part.labels, tuple(n.removeprefix("test/") for n in part.names))


def _idx_files(folder: str, mirrors: tuple[str, ...], hashes: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    names = [
        f"{part}-{kind}.gz"
        for part in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    return tuple(
        RemoteFile(f"{folder}/{name}", digest, tuple(mirror + name for mirror in mirrors))
        for name, digest in zip(names, hashes, strict=True)
    )


_OMNIGLOT = (
    "https://github.com/brendenlake/omniglot/raw/master/python/",
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
)

DATASETS = {
    "digits": Dataset("scikit-learn's handwritten digits", (), _read_digits, _split_digits),
    "drawn": Dataset(
        "40 characters from the project's own pen, 28 × 28",
        (),
        lambda _: draw_characters(),
        split_by_class,
    ),
    "omniglot": Dataset(
        "Omniglot, 1,623 characters by 20 hands, 28 × 28",
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
        ),
        _read_two_idx,
        _split_as_published,
    ),
    "fashion-mnist": Dataset(
        "Fashion-MNIST, 70,000 articles of clothing, 28 × 28",
        _idx_files(
            "fashion-mnist",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            ),
            (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        _read_two_idx,
        _split_as_published,
    ),
    "cifar10": Dataset(
        "CIFAR-10, 60,000 colour photographs, 32 × 32",
        (
            RemoteFile(
                "cifar10/cifar-10-python.tar.gz",
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
            ),
        ),
        _read_cifar10,
        _split_as_published,
    ),
}
