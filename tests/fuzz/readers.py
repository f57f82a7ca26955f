"""Every reader of the package, with valid files to mutate."""

import contextlib
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow.parquet import write_table as write_parquet

import bruno
from bruno import Bruno, FlowConfig, ModelConfig, Posterior
from bruno.checkpoint import read, write
from bruno.config import load_recipe, to_dict
from bruno.data import ElementReader, Examples, load_path
from bruno.data.cifar import read_cifar10_binary, read_cifar10_python, read_cifar10_sheets
from bruno.data.formats import read_idx, read_npz
from bruno.data.frames import read_frame
from bruno.data.images import decode as decode_image
from bruno.data.images import read_images
from bruno.data.table_format import TableFormat
from bruno.reporting.page import page
from bruno.reporting.results import Result, read_results
from bruno.streams.codec import Ranks, SetRecord, decode, encode
from bruno.streams.store import Store
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.detector import Detector
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.groups import Groups
from bruno.tasks.index import Index
from bruno.tasks.robust_evidence import Cutoffs
from bruno.tasks.stream_evidence import StreamEvidence
from bruno.trained import KeyedDetector, Trained
from bruno.trained.states import Excluded, SetState, WatchState
from bruno.training.run import Run
from fuzz.mutations import VALUES, mutated, mutated_value

Case = Callable[[Path, random.Random], Callable[[], Any]]


@dataclass(frozen=True)
class Reader:
    """A reader under test.

    Attributes:
        prepare: writes a mutated file into a folder and returns a function that reads it.
        cases: number of files in `make test-long`; `make test` has a third of them.
    """

    prepare: Case
    cases: int


def of_bytes(
    suffix: str,
    contents: list[bytes],
    read: Callable[[Path], Any],
    wrap: Callable[[bytes], bytes] = bytes,
) -> Case:
    """Mutate one of some contents, then wrap it, and read it from a file."""

    def prepare(folder: Path, random: random.Random) -> Callable[[], Any]:
        path = folder / f"file{suffix}"
        path.write_bytes(wrap(mutated(random.choice(contents), random)))
        return lambda: read(path)

    return prepare


# --- images and archives --------------------------------------------------------------------------------


def images() -> dict[str, bytes]:
    """Small images in every format."""
    pixels = np.arange(6 * 7 * 4, dtype=np.uint8).reshape(6, 7, 4)
    made = {}
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        for mode in ("L", "RGB", "RGBA", "P", "I;16"):
            image = Image.fromarray(pixels).convert(mode if mode != "I;16" else "I")
            image = image.convert("I;16") if mode == "I;16" else image
            file = io.BytesIO()
            try:
                image.save(file, kind)
            except (OSError, KeyError):  # a mode that the format lacks
                continue
            made[f"{kind} {mode}"] = file.getvalue()
    return made


def with_checksums(content: bytes) -> bytes:
    """A PNG with the right checksum of every chunk, so that mutations reach the decoder."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    result, place = bytearray(content[:8]), 8
    while place + 8 <= len(content):
        (size,) = struct.unpack(">I", content[place : place + 4])
        body = content[place + 4 : place + 8 + size]
        result += content[place : place + 4] + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + size
    return bytes(result)


def tar(kind: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, content in archived().items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def archived() -> dict[str, bytes]:
    long = "x" * 120  # needs an extended header
    return {f"a/{long}.png": images()["PNG L"], "b/1.png": images()["PNG RGB"], "b/é.png": images()["PNG L"]}


def read_archive(path: Path) -> None:
    for skip_bad in (False, True):
        read_images(path, size=4, skip_bad=skip_bad)


# --- arrays, tables, datasets ---------------------------------------------------------------------------


def arrays(**parts: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **parts)
    return file.getvalue()


def saved_examples() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), [0, 0, 1, 1], ("a", "b")).save(path)
        with np.load(path) as content:
            return arrays(**content)


def rezipped(folder: Path, random: random.Random) -> Callable[[], Any]:
    """One array of an npz is mutated inside the zip, whose checksums stay right."""
    parts = {
        "images": np.zeros((3, 4, 4), np.uint8),
        "rows": np.ones((3, 2)),
        "labels": np.array(["a", "b", "a"]),
    }
    del parts[random.choice(("images", "rows"))]
    files = {}
    for name, array in parts.items():
        file = io.BytesIO()
        np.save(file, array)
        files[f"{name}.npy"] = file.getvalue()
    chosen = random.choice(sorted(files))
    files[chosen] = mutated(files[chosen], random)
    path = folder / "file.npz"
    path.write_bytes(zipped(files, random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))))
    return lambda: read_npz(path)


TABLE = 'g,a,b\nx,1.5,2\nx,-3e2,4\ny,5,6\n"y",7,8\n'


def read_table(path: Path) -> None:
    for skip_bad in (False, True):
        load_path(path, group="g", skip_bad=skip_bad)


def read_rows(path: Path) -> None:
    for skip_bad in (False, True):
        list(ElementReader((2,), 0, group="g", skip_bad=skip_bad).read([path]))


TABLES = [
    TABLE.encode(),
    TABLE.replace("5,6", "NA,").encode("utf-16"),
    'g;a;b\nx;1,5;"2"\n\nx;-3;1.234,5\ny;5;6\n'.encode("cp1252"),
    b"x\t1\t2\nx\t3\t4\ny\t5\t6\n",
]


def read_any_table(path: Path) -> None:
    """Read a table in several ways, each of which may fail."""
    for options in ({}, {"missing": True, "skip_bad": True}, {"table_format": "semicolon decimal-comma"}):
        with contextlib.suppress(ValueError):
            load_path(path, **options)


def parquet() -> bytes:
    """A table of text, numbers, missing cells and dates."""
    columns = {"g": ["x", "x", "y"], "a": [1.5, None, 3.0], "b": [1, 2, 3], "c": ["1", "x", ""]}
    file = io.BytesIO()
    write_parquet(pyarrow.table(columns), file, compression="NONE", data_page_version="2.0")
    return file.getvalue()


def read_parquet(path: Path) -> None:
    read_table(path)
    read_rows(path)


CELLS = [*VALUES, b"x", np.nan, np.datetime64("2020-01-01"), 1j, (), object()]


def frame(folder: Path, random: random.Random) -> Callable[[], Any]:
    """A frame with columns of any kind of cells."""
    rows = random.choice((0, 1, 5))
    made: dict[Any, Any] = {"g": list("xxyyz")[:rows], "a": [1.5, 2, 3, 4, 5][:rows]}
    for name in ("a", "b", random.choice((None, 3, "", "\ud800"))):
        cells = np.empty(rows, object)
        cells[:] = [random.choice(CELLS) for _ in range(rows)]
        kind = random.choice((object, object, float, "U", "M8[ns]", complex, bool))
        try:
            made[name] = cells.astype(kind)
        except (ValueError, TypeError, OverflowError):
            made[name] = cells

    class Frame(dict):
        columns = tuple(made)

    flag = random.random() < 0.5
    return lambda: read_frame(Frame(made), random.choice(("", "g")), missing=flag, skip_bad=flag)


def table_format(folder: Path, random: random.Random) -> Callable[[], Any]:
    words = mutated(b"semicolon decimal-comma thousands-point no-header utf-8", random)
    return lambda: TableFormat(**TableFormat.parse(words.decode(errors="replace")))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def read_idx_pair(path: Path) -> None:
    labels = path.with_name("labels.gz")
    labels.write_bytes(gzip.compress(idx(np.arange(3, dtype=np.uint8))))
    read_idx(path, labels)
    read_idx(labels, path)


def cifar_python(folder: Path, random: random.Random) -> Callable[[], Any]:
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
    files = {
        name: pickle.dumps(batch, 2) for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))
    }
    files["batches.meta"] = pickle.dumps({b"label_names": [b"a", b"b"]}, 2)
    path = mutated_archive(folder, files, random)
    return lambda: read_cifar10_python(path, train=random.random() < 0.5)


def cifar_binary(folder: Path, random: random.Random) -> Callable[[], Any]:
    names = ("test_batch.bin", *(f"data_batch_{i}.bin" for i in range(1, 6)))
    files = dict.fromkeys(names, bytes(2 * 3073)) | {"batches.meta.txt": b"a\nb\n"}
    path = mutated_archive(folder, files, random)
    return lambda: read_cifar10_binary(path, train=random.random() < 0.5)


def sheet() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 32), (1, 2, 3)).save(file, "WEBP", lossless=True)
    return file.getvalue()


def mutated_archive(folder: Path, files: dict[str, bytes], random: random.Random) -> Path:
    """A tar.gz of these files, one of them mutated."""
    chosen = random.choice(sorted(files))
    files = files | {chosen: mutated(files[chosen], random)}
    path, file = folder / "cifar.tar.gz", io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"c/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.write_bytes(file.getvalue())
    return path


# --- recipes, results, models ---------------------------------------------------------------------------


def as_toml(values: dict[str, Any]) -> str:
    lines = []
    for name, section in values.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        else:
            lines.insert(0, f"{name} = {json.dumps(section)}")
    return "\n".join(lines)


def recipe_toml(folder: Path, random: random.Random) -> Callable[[], Any]:
    values, path = to_dict(load_recipe("digits")), folder / "recipe.toml"
    if random.random() < 0.5:
        text = as_toml(values).encode()
        path.write_bytes(mutated(text, random))
    else:
        changed = mutated_value(json.loads(json.dumps(values)), random)
        text = as_toml(changed) if isinstance(changed, dict) else str(changed)
        path.write_bytes(text.encode(errors="replace"))
    return lambda: load_recipe(str(path))


def recipe_json(folder: Path, random: random.Random) -> Callable[[], Any]:
    values = json.loads(json.dumps(to_dict(load_recipe("digits"))))
    (folder / "recipe.json").write_bytes(mutated_json(values, random))
    return lambda: Run(folder).recipe


def mutated_json(values: Any, random: random.Random) -> bytes:
    """JSON of mutated values, or mutated JSON."""
    if random.random() < 0.5:
        return mutated(json.dumps(values).encode(), random)
    return json.dumps(mutated_value(values, random)).encode()


def results(folder: Path, random: random.Random) -> Callable[[], Any]:
    if not (folder / "results").exists():
        Result("a", "Title", {"x": 1.5}, ("c", "d"), (("1", "2"),), "note").write(folder, config={}, seed=0)
        (folder / "valid.json").write_bytes((folder / "results" / "a.json").read_bytes())
    record = json.loads((folder / "valid.json").read_text())
    (folder / "results" / "a.json").write_bytes(mutated_json(record, random))
    return lambda: page("title", "lead", read_results(folder))


def log(folder: Path, random: random.Random) -> Callable[[], Any]:
    entry = {"index": 3, "loss": 1.0, "bits_per_dim": 1.5, "accuracy": None, "seconds": 2.0, "note": ""}
    lines = [mutated_json({**entry, "index": index}, random) for index in range(4)]
    (folder / "log.jsonl").write_bytes(b"\n".join(lines))

    def read() -> None:
        for one in Run(folder).read_log():  # what the learning curve does with them
            f"{one['index']:,} {one['seconds']:,.0f}"
            float(one.get("bits_per_dim") or 0), float(one.get("validation") or 0)

    return read


@cache
def model() -> Bruno:
    torch.manual_seed(0)
    made = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=1, units=2)))
    made.initialise(torch.randn(8, 3))
    return made.requires_grad_(False)


def saved(thing: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        thing.save(path) if isinstance(thing, Index) else bruno.save(thing, path)
        return path.read_bytes()


def posterior() -> Posterior:
    return model().condition(torch.randn(4, 3))


def index() -> Index:
    return Index.of(model(), torch.randn(4, 3))


def calibration() -> GroupCalibration:
    rows = Examples(torch.randn(24, 3), torch.arange(24) // 6, tuple("abcd"))
    groups = Groups.of(model(), rows, generator=torch.Generator().manual_seed(0))
    return GroupCalibration(model(), groups, fixed_cutoffs(model(), groups), -50.0, "rows", True)


def watched() -> WatchState:
    """States of two sets, the first elements of which can still be reconsidered."""
    z, stream, within = torch.randn(5, 3), StreamEvidence.empty(3), WithinSet.empty(3)
    for one in z:
        stream = stream.add(model(), one, torch.tensor(0.0), Cutoffs((-9.0,)), torch.tensor(True))
        within = within.add(one)
    state = SetState(stream, within)
    return WatchState({"a": state, "b": state}, (Excluded("line 3", "a", z[0], 0),))


def parts_of(thing: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the header of a calibration or of states."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        thing.save(path, *([model()] if isinstance(thing, WatchState) else []))
        return read(path, "cpu")


def as_file(tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path, tensors, header)
        return path.read_bytes()


def read_calibration(path: Path) -> None:
    found = GroupCalibration.load(path, model())
    for scores in (found.stream(), found.stream(count_all=True), found.batch(4)):
        scores.p_value(0.0, 3, 0.2), scores.p_value(0.0, 3, 0.001), scores.threshold(3, 0.5)


def read_watched(path: Path) -> None:
    """Read states as a watch does, and continue: judge another element, and accept one."""
    states = WatchState.load(path, model())
    for state in states.sets.values():
        Detector(model(), 0.0).step(state.stream, torch.zeros(3))
        p = state.within.p_value(model(), torch.zeros(3))
        state.within.add(torch.zeros(3)), state.drift.add(p.uniform)
    states.accepting([one.name for one in states.excluded]).save(path, model())


def with_right_checksum(tensors: dict[str, torch.Tensor], header: dict[str, Any], read) -> Case:
    """Mutate the header and the tensors of a file that `write` then gives a valid checksum."""

    def prepare(folder: Path, random: random.Random) -> Callable[[], Any]:
        parts = {name: _mutated_tensor(tensor, random) for name, tensor in tensors.items()}
        if random.random() < 0.2:
            del parts[random.choice(sorted(parts))]
        changed = mutated_value(json.loads(json.dumps(header)), random) if random.random() < 0.7 else header
        path = folder / "file.safetensors"
        write(path, parts, changed if isinstance(changed, dict) else header)
        return lambda: read(path)

    return prepare


def _mutated_tensor(tensor: torch.Tensor, random: random.Random) -> torch.Tensor:
    chance = random.random()
    if chance < 0.8:
        return tensor
    if chance < 0.85:
        return tensor.to(
            random.choice((torch.int32, torch.bool, torch.complex64, torch.half, torch.bfloat16))
        )
    if chance < 0.9:
        return tensor.flatten()[:-1].clone()
    if chance < 0.95:
        value = random.choice((-1, 0, 2**30))
        return torch.full_like(tensor, value % 256 if tensor.dtype == torch.uint8 else value)
    return tensor.double() * random.choice((float("nan"), float("inf"), -1.0))


def checkpoint(folder: Path, random: random.Random) -> Callable[[], Any]:
    state = {f"model.{name}": tensor for name, tensor in model().state_dict().items()}
    header = {"kind": "training", "config": to_dict(model().config), "step": 1, "seconds": 1.0}
    header |= {"train": {}, "metrics": {}, "provenance": {}}
    with_right_checksum(state, header, None)(folder, random)
    (folder / "file.safetensors").rename(folder / "checkpoint-00000001.safetensors")
    return lambda: Run(folder).model()


@cache
def saved_state(folder: Path) -> Path:
    owner = Trained(model(), None, folder)
    with owner.watch(torch.randn(6, 3), Detector(model(), 1.0), state=folder / "valid.state") as watched:
        list(watched)
    return folder / "valid.state"


def store(folder: Path, random: random.Random) -> Callable[[], Any]:
    """A store with mutated bytes, or with a mutated state whose checksum is right."""
    path = folder / "state.db"
    for old in folder.glob("state.db*"):
        old.unlink()
    if random.random() < 0.6:
        path.write_bytes(mutated(saved_store(), random))
    else:
        path.write_bytes(saved_store())
        opened = Store(path, FINGERPRINT)
        opened.put([("a", mutated(opened.states(["a"])["a"], random))])
        opened.put_elements([("a", number, mutated(bytes(24), random)) for number in range(25)])
        opened.commit()
        opened.close()
    return lambda: read_store(path)


@cache
def saved_store() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        detector = Detector(model(), -5.0)
        with KeyedDetector(Trained(model(), None, Path(folder)), path, detector, window=20) as judge:
            judge.step(["a"] * 25 + ["b"], torch.randn(26, 3), ids=[str(i) for i in range(26)])
        return path.read_bytes()


def read_store(path: Path) -> None:
    owner = Trained(model(), None, path.parent)
    with KeyedDetector(owner, path, Detector(model(), -5.0), window=20, wait=0.0) as judge:
        judge.step(["a", "b"], torch.zeros(2, 3))
        judge.accept(*judge.store.latest_excluded(1))
        list(judge)


def record(folder: Path, random: random.Random) -> Callable[[], Any]:
    """The bytes of a set: mutated, with a right checksum or not."""
    within = WithinSet(posterior().evidence, torch.randn(4, 3))
    mean, first, flags = np.zeros(3), np.ones((5, 3)), np.ones(5, np.uint8)
    ranks = Ranks(within, DriftTest()) if random.random() < 0.5 else None
    valid = encode(SetRecord(4.0, mean, mean, 5, 4, 7, first, flags, ranks), FINGERPRINT)
    body = mutated(valid[:-4], random)
    right = struct.pack("<I", zlib.crc32(body, zlib.crc32(b"")))
    data = body + (right if random.random() < 0.8 else valid[-4:])
    return lambda: decode(data, FINGERPRINT, 3)


PICTURES, FILES = images(), archived()
PNGS = [content for name, content in PICTURES.items() if name.startswith("PNG")]
TARS = [tar(tarfile.GNU_FORMAT), tar(tarfile.PAX_FORMAT)]
NPZ = arrays(images=np.zeros((2, 3, 3), np.uint8), labels=[0, 1])
IDX = idx(np.zeros((3, 2, 2), np.uint8))
WEIGHTS, CONFIG = model().state_dict(), to_dict(model().config)
EVIDENCE = {name: getattr(posterior().evidence, name) for name in ("count", "mean", "scatter")}
FINGERPRINT = model().fingerprint()
CALIBRATION, WATCHED = parts_of(calibration()), parts_of(watched())
INDEX_HEADER = {"kind": "index", "model": FINGERPRINT, "names": list("abcd"), "source": ""}


def compressed(content: bytes) -> bytes:
    return gzip.compress(content, 1)


def read_image(path: Path) -> None:
    list(ElementReader((1, 4, 4), 256).read([path]))


def read_state(path: Path) -> None:
    bruno.load(path, model=model()).score(torch.zeros(3))


READERS: dict[str, Reader] = {
    "images": Reader(
        of_bytes(".img", list(PICTURES.values()), lambda path: decode_image(path.read_bytes(), 4, grey=True)),
        600,
    ),
    "PNG": Reader(of_bytes(".png", PNGS, read_image, with_checksums), 300),
    "zip": Reader(of_bytes(".zip", [zipped(FILES)], read_archive), 300),
    "zip, deflated": Reader(of_bytes(".zip", [zipped(FILES, zipfile.ZIP_DEFLATED)], read_archive), 300),
    "tar": Reader(of_bytes(".tar", TARS, read_archive), 600),
    "tar.gz": Reader(of_bytes(".tgz", TARS, read_archive, compressed), 200),
    "tar.gz, damaged": Reader(of_bytes(".tgz", [compressed(TARS[0])], read_archive), 200),
    "tar.xz": Reader(of_bytes(".txz", [lzma.compress(TARS[0])], read_archive), 100),
    "npz": Reader(of_bytes(".npz", [NPZ], read_npz), 400),
    "npz, inside": Reader(rezipped, 600),
    "saved examples": Reader(of_bytes(".npz", [saved_examples()], Examples.load), 300),
    "CSV": Reader(of_bytes(".csv", [TABLE.encode()], read_table), 200),
    "rows": Reader(of_bytes(".csv", [TABLE.encode(), b"1,2\n3,4\n"], read_rows), 400),
    "tables of all formats": Reader(of_bytes(".csv", TABLES, read_any_table), 60),
    "Parquet": Reader(of_bytes(".parquet", [parquet()], read_parquet), 300),
    "frame": Reader(frame, 300),
    "table format": Reader(table_format, 200),
    "idx": Reader(of_bytes(".gz", [IDX], read_idx_pair, compressed), 300),
    "idx, damaged": Reader(of_bytes(".gz", [compressed(IDX)], read_idx_pair), 300),
    "CIFAR-10, Python version": Reader(cifar_python, 100),
    "CIFAR-10, binary version": Reader(cifar_binary, 50),
    "CIFAR-10, sheets": Reader(of_bytes(".webp", [sheet()], lambda path: read_cifar10_sheets([path])), 50),
    "recipe.toml": Reader(recipe_toml, 300),
    "recipe.json": Reader(recipe_json, 300),
    "results": Reader(results, 60),
    "log": Reader(log, 300),
    "model": Reader(of_bytes(".safetensors", [saved(model())], bruno.load), 300),
    "model, right checksum": Reader(
        with_right_checksum(WEIGHTS, {"kind": "model", "config": CONFIG}, bruno.load), 200
    ),
    "checkpoint": Reader(checkpoint, 150),
    "state": Reader(of_bytes(".state", [saved(posterior())], read_state), 300),
    "state, right checksum": Reader(
        with_right_checksum(EVIDENCE, {"kind": "posterior", "model": FINGERPRINT}, read_state), 200
    ),
    "calibration": Reader(of_bytes(".safetensors", [as_file(*CALIBRATION)], read_calibration), 200),
    "calibration, right checksum": Reader(with_right_checksum(*CALIBRATION, read_calibration), 100),
    "watched states": Reader(of_bytes(".state", [as_file(*WATCHED)], read_watched), 200),
    "watched states, right checksum": Reader(with_right_checksum(*WATCHED, read_watched), 120),
    "store": Reader(store, 150),
    "bytes of a set": Reader(record, 300),
    "index": Reader(of_bytes(".index", [saved(index())], Index.load), 200),
    "index, right checksum": Reader(
        with_right_checksum({"latents": index().latents}, INDEX_HEADER, Index.load), 200
    ),
}


def failures(
    name: str, seeds: Iterable[int], folder: Path, *, debug: bool = False
) -> Iterator[tuple[int, Exception]]:
    """The seeds of files at which a reader raises anything but ValueError and OSError, and the error.

    With `debug`, it is raised.
    """
    for seed in seeds:
        here = folder / str(seed)
        here.mkdir()
        read = READERS[name].prepare(here, random.Random(f"{name} {seed}"))
        try:
            read()
        except (ValueError, OSError):
            pass
        except Exception as error:
            if debug:
                raise
            yield seed, error
        shutil.rmtree(here)
