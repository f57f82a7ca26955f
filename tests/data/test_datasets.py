import ast
import dataclasses
import functools
import gzip
import hashlib
import logging
import os
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import FILES, as_folder, as_idx, as_zip, picture

import bruno.data
from bruno.data import (
    DATASETS,
    Examples,
    MissingDataError,
    dataset_status,
    load_examples,
    load_path,
)
from bruno.data.datasets import OMNIGLOT_FIRST, SPLITS, RemoteFile, split_by_class
from bruno.data.published import fetch, locate, locate_compact

SHARED = Path(__file__).parents[3] / "shared" / "data"
REAL = Path(os.environ.get("BRUNO_DATA") or SHARED)
needs_omniglot = pytest.mark.skipif(not (REAL / "omniglot").is_dir(), reason="needs the Omniglot archives")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def unchecked(monkeypatch):
    """Read files in the place of published ones whatever their checksums."""
    monkeypatch.setenv("BRUNO_UNCHECKED_DATA", "1")


def test_digits_are_installed_with_scikit_learn():
    train, test = load_examples("digits"), load_examples("digits", "test")
    assert train.shape == (1, 8, 8)
    assert set(train.names) | set(test.names) == set(map(str, range(10)))
    assert not set(train.names) & set(test.names)
    assert len(train) + len(test) == 1797


@pytest.mark.usefixtures("unchecked")
def test_files_are_found_and_parsed_once(tmp_path, cache, monkeypatch):
    folder = tmp_path / "data"
    write_other_mnist(folder)
    first = load_examples("mnist", data_dir=folder)
    assert first.names == ("0", "1", "2", "3")
    assert all(locate("mnist", folder).values())
    assert len(list((cache / "parsed").iterdir())) == 1
    monkeypatch.setattr("bruno.data.datasets.read_idx", lambda *_: pytest.fail("parsed again"))
    assert torch.equal(load_examples("mnist", "test", data_dir=folder).elements, first.elements)
    monkeypatch.setenv("BRUNO_DATA", str(folder))
    assert len(load_examples("mnist")) == 4


def test_saved_examples_replace_the_published_files(tmp_path):
    Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4) // 2, ("0", "test/0")).save(
        tmp_path / "mnist.npz"
    )
    assert len(load_examples("mnist", "test", data_dir=tmp_path)) == 2
    assert len(load_examples("mnist", "test", data_dir=str(tmp_path))) == 2


def test_saved_examples_of_one_split_name_the_split_that_they_lack(tmp_path):
    images = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
    Examples(images, torch.arange(4) // 2, ("0", "1")).save(tmp_path / "mnist.npz")
    assert len(load_examples("mnist", data_dir=tmp_path)) == 4
    with pytest.raises(
        ValueError, match=r"`split`.*mnist\.npz.*'validation'.*load_examples\('mnist', 'all'\)"
    ):
        load_examples("mnist", "validation", data_dir=tmp_path)
    small = {"filters": 4, "depth": 1, "units": 4}
    with pytest.raises(ValueError, match=r"`split`.*mnist\.npz.*'validation'"):
        bruno.train("mnist-even", tmp_path / "run", data_dir=tmp_path, data={"classes": ["0"]}, flow=small)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_strings_or_path_objects(tmp_path, kind):
    file = tmp_path / "mnist.npz"
    Examples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4) // 2, ("0", "1")).save(file)
    np.savez(tmp_path / "mine.npz", images=np.zeros((4, 2, 2), np.uint8), labels=np.arange(4) // 2)
    assert len(bruno.data.load_path(kind(tmp_path / "mine.npz"))) == 4
    assert bruno.data.is_available("mnist", kind(tmp_path))
    assert locate_compact("mnist", kind(tmp_path)) == file


@pytest.mark.usefixtures("unchecked")
def test_images_are_returned_in_their_original_size_on_request(tmp_path, cache):
    folder = tmp_path / "data"
    (folder / "omniglot").mkdir(parents=True)
    for remote, first in zip(DATASETS["omniglot"].files, OMNIGLOT_FIRST, strict=True):
        alphabet, character = first.split("/")
        made = as_zip(folder, {f"{alphabet}/{character}/1.png": picture(255, (105, 105))})
        made.rename(folder / remote.path)
    assert load_examples("omniglot", data_dir=folder).shape == (1, 28, 28)
    assert load_examples("omniglot", data_dir=folder, original=True).shape == (1, 105, 105)
    assert load_examples("omniglot", data_dir=folder).shape == (1, 28, 28)  # each size has its own cache
    folder = as_folder(tmp_path / "user", FILES)
    before, after = (load_examples(str(folder), size=4, original=flag).shape for flag in (False, True))
    assert before == (1, 4, 4) != after
    assert load_examples("digits", original=True).shape == (1, 8, 8)  # published in this size


def test_saved_examples_replace_the_published_files_in_their_original_size(tmp_path):
    names = [*OMNIGLOT_FIRST]
    Examples(torch.zeros(2, 1, 9, 9, dtype=torch.uint8), torch.arange(2), tuple(names)).save(
        tmp_path / "omniglot-original.npz"
    )
    examples = load_examples("omniglot", "trainval", data_dir=tmp_path, original=True, download=False)
    assert examples.shape == (1, 9, 9)
    with pytest.raises(MissingDataError):
        load_examples("omniglot", data_dir=tmp_path, download=False)


def test_a_user_folder_is_split_by_class(tmp_path):
    files = {f"{i:02d}/{name.replace('/', '-')}": FILES[name] for i in range(20) for name in FILES}
    path = as_folder(tmp_path / "own", files)
    parts = {split: set(load_examples(str(path), split).names) for split in ("train", "validation", "test")}
    assert [len(names) for names in parts.values()] == [16, 2, 2]
    assert not parts["train"] & parts["test"]
    assert len(load_examples(str(path), "trainval").names) == 18


@pytest.mark.parametrize(
    ("classes", "parts"), [(2, (2, 2, 2)), (4, (3, 1, 1)), (5, (3, 2, 2)), (9, (7, 2, 2)), (12, (8, 2, 2))]
)
def test_the_number_of_held_out_classes_grows_with_the_classes(classes, parts):
    examples = Examples(torch.zeros(classes, 1), torch.arange(classes), tuple(map(str, range(classes))))
    split = {name: split_by_class(examples, name).names for name in ("train", "validation", "test")}
    assert tuple(map(len, split.values())) == parts
    assert classes < 3 or not {*split["train"]} & {*split["validation"], *split["test"]}


def test_images_of_an_npz_are_resized_and_converted(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), np.uint8)
    np.savez(tmp_path / "a.npz", images=colours, labels=[0, 0, 1, 1])
    path = str(tmp_path / "a.npz")
    assert load_examples(path, "all").shape == (1, 6, 8)
    assert load_examples(path, "all", size=4, grey=False).shape == (3, 4, 4)
    unchanged = load_examples(path, "all", grey=False).elements
    assert np.array_equal(unchanged.numpy(), colours.transpose(0, 3, 1, 2))


def test_a_changed_folder_is_parsed_again(tmp_path):
    path = as_folder(tmp_path / "own", FILES)
    assert len(load_examples(str(path))) == 3
    as_folder(path, {"dogs/2.png": FILES["dogs/1.png"]})
    assert len(load_examples(str(path))) == 4


@pytest.mark.parametrize("keep", [0, 300, -30])
def test_a_damaged_cache_is_replaced(tmp_path, cache, keep):
    path = as_folder(tmp_path / "own", FILES)
    first = load_examples(str(path))
    [kept] = (cache / "parsed").iterdir()
    kept.write_bytes(kept.read_bytes()[:keep])
    assert torch.equal(load_examples(str(path)).elements, first.elements)
    assert len(Examples.load(kept)) == 3


def test_files_that_were_skipped_once_raise_without_skip_bad(tmp_path):
    path = as_folder(tmp_path / "own", {**FILES, "dogs/2.png": b"broken"})
    assert load_examples(str(path), skip_bad=True).skipped == ("dogs/2.png",)
    assert load_examples(str(path), skip_bad=True).skipped == ("dogs/2.png",)  # from the cache
    with pytest.raises(ValueError, match=r"dogs/2.png cannot be used"):
        load_examples(str(path))


def test_a_dangling_link_can_be_skipped(tmp_path):
    path = as_folder(tmp_path / "own", FILES)
    (path / "cats" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    assert load_examples(str(path), skip_bad=True).skipped == ("cats/gone.png",)


def test_skipped_small_classes_do_not_change_the_split_of_others(tmp_path):
    files = {f"{i:02d}/{name}.png": picture(1) for i in range(20) for name in ("1", "2")}
    del files["03/2.png"]
    path = str(as_folder(tmp_path / "own", files))
    for split in ("train", "test"):
        every = load_examples(path, split)
        enough = load_examples(path, split, skip_bad=True, min_count=2)
        assert enough.names == tuple(name for name in every.names if name != "03")
        assert enough.skipped == ("03 (only 1)",)
    assert "03" in load_examples(path, min_count=2).names  # kept without skip_bad


@pytest.mark.parametrize("name", ["t.csv", "T.CSV"])
def test_a_table_is_cached_for_each_group_column(tmp_path, cache, monkeypatch, name):
    path = tmp_path / name
    path.write_text("machine,plant,a\n1,7,0.5\n2,7,1.5\n")
    first = load_examples(str(path), group="machine")
    assert load_examples(str(path), group="plant").names == ("7",)
    path.write_text("machine,plant,a\n1,7,0.25\n2,7,1.5\n")
    second = load_examples(str(path), group="machine")
    assert not torch.equal(second.elements, first.elements)
    assert len(list((cache / "parsed").iterdir())) == 2  # the cache of the old table is deleted
    monkeypatch.setattr("bruno.data.loading.read_table", lambda *_, **__: pytest.fail("parsed again"))
    assert torch.equal(load_examples(str(path), group="machine").elements, second.elements)


def test_commas_in_the_names_of_columns_do_not_confuse_the_cache(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('machine,"a,b",a,b\n1,1,2,3\n2,4,5,6\n')
    assert load_examples(str(path), "all", group="machine", columns=("a", "b")).shape == (2,)
    assert load_examples(str(path), "all", group="machine", columns=("a,b",)).shape == (1,)


def test_a_foreign_file_in_place_of_saved_examples_is_named(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros((2, 28, 28)), y_train=[0, 1])  # the format of Keras
    with pytest.raises(ValueError, match=r"mnist.npz: .*x_train, y_train.*mnist/train-images-idx3-ubyte.gz"):
        load_examples("mnist", data_dir=tmp_path)


@pytest.mark.usefixtures("unchecked")
def test_a_foreign_archive_in_place_of_omniglot_is_named(tmp_path):
    (tmp_path / "omniglot").mkdir()
    for remote in DATASETS["omniglot"].files:
        as_zip(tmp_path, FILES).rename(tmp_path / remote.path)
    message = r"images_background.zip: .*Alphabet_of_the_Magi/character01; got cats"
    with pytest.raises(ValueError, match=message):
        load_examples("omniglot", data_dir=tmp_path)


def test_missing_data_and_bad_arguments_are_named(tmp_path):
    with pytest.raises(MissingDataError, match=rf"images_background.zip .*put it at {tmp_path}"):
        load_examples("omniglot", data_dir=tmp_path, download=False)
    assert locate("omniglot", tmp_path)["omniglot/images_background.zip"] is None
    with pytest.raises(ValueError, match=r"^`name` .*digits, .*'nowhere'\.$"):
        load_examples("nowhere")
    with pytest.raises(ValueError, match=r"^`path` must be an existing path; got 'nowhere'\.$"):
        load_path("nowhere")
    with pytest.raises(ValueError, match=r"^`table_format` .*digits, .*'semicolon'"):
        load_examples("digits", table_format="semicolon")
    table = tmp_path / "t.csv"
    table.write_text("machine,a\nm1,1.5\nm1,2.5\n")
    with pytest.raises(ValueError, match=r"t.csv: `table_format` .*got 'pipes'"):
        load_examples(str(table), table_format="pipes")
    with pytest.raises(ValueError, match=r"`size` .*digits.*; got 16"):
        load_examples("digits", size=16)
    with pytest.raises(ValueError, match=r"`split` .*train.*; got 'dev'"):
        load_examples("digits", "dev")
    with pytest.raises(ValueError, match=r"`data_dir` .*folder; got '.*gone'"):
        load_examples("mnist", data_dir=tmp_path / "gone")


@pytest.fixture
def server(tmp_path):
    """Serve a folder over HTTP on this machine: (folder, address)."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_missing_files_are_downloaded_from_the_first_mirror_that_has_them(server, tmp_path, cache):
    folder, address = server
    (folder / "file.bin").write_bytes(b"data" * 1000)
    digest = hashlib.sha256(b"data" * 1000).hexdigest()
    remote = RemoteFile("x/file.bin", digest, (f"{address}/nothing.bin", f"{address}/file.bin"))
    (tmp_path / "mine").mkdir()
    path = fetch("x", remote, tmp_path / "mine", download=True)
    assert path.read_bytes() == b"data" * 1000
    assert path.is_relative_to(cache)
    assert not any((tmp_path / "mine").iterdir())  # never write into a user's data folder


def test_a_download_is_logged_and_prints_nothing(server, cache, capfd, caplog, monkeypatch):
    folder, address = server
    (folder / "file.bin").write_bytes(b"data")
    remote = RemoteFile("x/file.bin", hashlib.sha256(b"data").hexdigest(), (f"{address}/file.bin",))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    level = pooch.get_logger().level
    with caplog.at_level(logging.INFO, "bruno"):
        fetch("x", remote, None, download=True)
    assert caplog.messages == [f"downloading x/file.bin into {cache / 'x'}"]
    assert capfd.readouterr() == ("", "")
    assert pooch.get_logger().level == level


def test_the_status_of_a_dataset_has_its_places_or_where_to_put_what_is_missing(tmp_path):
    first, *others = DATASETS["mnist"].files
    (tmp_path / first.path).parent.mkdir()
    (tmp_path / first.path).touch()
    saved = tmp_path / "fashion-mnist.npz"
    saved.touch()
    found = {one.name: one for one in dataset_status(tmp_path)}
    assert list(found) == list(DATASETS)
    assert found["mnist"].missing == {tmp_path / remote.path: remote.mirrors for remote in others}
    assert (found["mnist"].state, found["mnist"].places) == ("missing", ())
    assert (found["fashion-mnist"].state, found["fashion-mnist"].places) == ("available", (saved,))
    assert (found["digits"].state, found["digits"].missing) == ("built in", {})


def test_a_wrong_checksum_or_a_missing_network_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(b"something else")
    remote = RemoteFile("x/file.bin", "0" * 64, ((tmp_path / "file").as_uri(), "http://127.0.0.1:9/file.bin"))
    message = r"put it at .*x/file.bin.*file.bin: \[Errno \d+\] Connection refused$"
    with pytest.raises(MissingDataError, match=message):
        fetch("x", remote, tmp_path, download=True)
    assert not (tmp_path / "x" / "file.bin").exists()


@given(st.integers(1, 60))
def test_the_splits_by_class_partition_the_classes(classes):
    examples = Examples(torch.zeros(classes, 1), torch.arange(classes), tuple(map(str, range(classes))))
    names = {split: split_by_class(examples, split).names for split in SPLITS if split != "all"}
    train, validation, test = (set(names[split]) for split in ("train", "validation", "test"))
    assert all(names.values())
    if classes < 3:
        assert train == validation == test == set(examples.names)
        return
    assert train | validation | test == set(examples.names)
    assert not train & (validation | test)
    assert validation == test if classes < 10 else not validation & test
    assert set(names["trainval"]) == set(examples.names) - test


def test_https_mirrors_come_first():
    for source in DATASETS.values():
        for remote in source.files:
            insecure = [not url.startswith("https://") for url in remote.mirrors]
            assert insecure == sorted(insecure)


@pytest.mark.slow
@needs_omniglot
def test_omniglot_splits_are_the_published_ones(monkeypatch):
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: b"")  # names matter here, pixels do not
    monkeypatch.setattr("bruno.data.images.decode", lambda *_, **__: np.zeros((1, 1, 1), np.uint8))
    source = DATASETS["omniglot"]
    drawings = source.read(list(locate("omniglot", REAL).values()))
    lists = {"train": "train", "validation": "val", "trainval": "trainval", "test": "test"}
    for split, name in lists.items():
        published = (REAL / "omniglot" / "splits" / "vinyals" / f"{name}.txt").read_text().split()
        part = source.split(drawings, split)
        assert set(part.names) == {path.rsplit("/", 1)[0] for path in published}
        assert set(part.counts.tolist()) == {20}


@needs_omniglot
@pytest.mark.usefixtures("unchecked")
def test_ink_of_omniglot_is_bright(tmp_path):
    (tmp_path / "omniglot").mkdir()
    for remote, first in zip(DATASETS["omniglot"].files, OMNIGLOT_FIRST, strict=True):
        with zipfile.ZipFile(REAL / remote.path) as whole:
            names = [name for name in whole.namelist() if f"/{first}/" in name and name.endswith(".png")]
            part = as_zip(tmp_path, {name.split("/", 1)[1]: whole.read(name) for name in names})
        part.rename(tmp_path / remote.path)
    examples = load_examples("omniglot", "all", data_dir=tmp_path)
    assert examples.elements.shape == (40, 1, 28, 28)
    assert 5 < examples.elements.float().mean() < 60


def test_optional_dependencies_are_imported_only_where_they_are_needed():
    optional = {"sklearn", "pooch", "pyarrow", "matplotlib"}
    for path in Path(bruno.data.__file__).parent.glob("*.py"):
        statements = ast.parse(path.read_text()).body
        names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & optional, path.name


def write_other_mnist(folder: Path) -> dict[str, bytes]:
    """Write small files of the format of MNIST; returns their contents, not compressed, by path."""
    contents = {}
    for remote in DATASETS["mnist"].files:
        array = np.zeros((4, 2, 2), np.uint8) if "images" in remote.path else np.arange(4, dtype=np.uint8)
        (folder / remote.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / remote.path).write_bytes(as_idx(array))
        contents[remote.path] = gzip.decompress(as_idx(array))
    return contents


def test_files_that_differ_from_the_published_ones_are_errors_unless_asked(tmp_path, monkeypatch):
    write_other_mnist(tmp_path)
    wrong = r"train-images-idx3-ubyte.gz: .*SHA-256 440fcabf73cc…; got .*BRUNO_UNCHECKED_DATA=1"
    with pytest.raises(ValueError, match=wrong):
        load_examples("mnist", data_dir=tmp_path)
    monkeypatch.setenv("BRUNO_UNCHECKED_DATA", "1")
    assert len(load_examples("mnist", data_dir=tmp_path)) == 4
    monkeypatch.delenv("BRUNO_UNCHECKED_DATA")
    with pytest.raises(ValueError, match=wrong):  # not from the cache of unchecked files
        load_examples("mnist", data_dir=tmp_path)


def test_published_content_may_be_compressed_again(tmp_path, monkeypatch):
    contents = write_other_mnist(tmp_path)
    published = [
        dataclasses.replace(remote, content_sha256=hashlib.sha256(contents[remote.path]).hexdigest())
        for remote in DATASETS["mnist"].files
    ]
    source = dataclasses.replace(DATASETS["mnist"], files=tuple(published))
    monkeypatch.setitem(DATASETS, "mnist", source)
    assert len(load_examples("mnist", data_dir=tmp_path)) == 4
    damaged = tmp_path / published[0].path
    damaged.write_bytes(damaged.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: .*SHA-256"):
        load_examples("mnist", data_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_files_of_this_machine_have_the_published_content(name, monkeypatch):
    if not all(locate(name, REAL).values() if REAL.is_dir() else [False]):
        pytest.skip(f"needs the files of {name}")
    assert len(load_examples(name, "all", data_dir=REAL)) == 70_000
