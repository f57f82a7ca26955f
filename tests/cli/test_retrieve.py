"""`bruno retrieve search` and `bruno retrieve measure`."""

import shutil
from pathlib import Path

import pytest

import bruno
from cli.commandline import picture_of, run, values_of, words

pytestmark = pytest.mark.filterwarnings("ignore::bruno.trained.UnfamiliarDataWarning")  # enlarged images


@pytest.fixture
def collection(digits, workplace) -> Path:
    """A copy of the files of `digits` that may be changed; ./run is the run."""
    shutil.copytree(digits, workplace, dirs_exist_ok=True)
    return workplace / "collection"


def search(query: str, *arguments: object) -> str:
    return run(
        "retrieve", "search", "run", "--query", query, "--collection", "collection", "--top", "10", *arguments
    )


def test_a_collection_is_ranked_and_encoded_once(collection):
    assert "encoded 60 of 60 elements" in search("support/8")
    names = values_of("run", "retrieval")["names"]
    assert sum(Path(name).name.startswith("8") for name in names) >= 7
    assert "encoded" not in search("support/8")
    assert values_of("run", "retrieval")["names"] == names
    found = bruno.open("run").retrieve("support/8", "collection", top=10)
    assert list(found.names) == names
    assert picture_of("run", "retrieval").std() > 3


def test_only_new_and_changed_files_are_encoded(collection):
    search("support/8")
    shutil.copy("queries/8/8-00.png", collection / "8-new.png")
    assert "encoded 1 of 61 elements" in search("support/8")
    shutil.copy("queries/2/2-00.png", collection / "8-new.png")  # the same name
    assert "encoded 1 of 61 elements" in search("support/8")
    (collection / "8-new.png").rename(collection / "0-first.png")
    assert "encoded 1 of 61 elements" in search("support/8")
    updated = values_of("run", "retrieval")
    assert "settings of the reader changed; encoding again" in words(search("support/8", "--invert"))
    assert "settings of the reader changed; encoding again" in words(search("support/8"))
    whole = values_of("run", "retrieval")
    assert updated["names"] == whole["names"]
    assert updated["scores"] == pytest.approx(whole["scores"], abs=1e-3)
    (collection / "0-first.png").unlink()
    assert "encoded 0 of 60 elements" in search("support/8")


def test_an_index_that_is_not_valid_is_made_again_unless_it_is_named(collection):
    search("support/8")
    [kept] = Path().glob("collection-*.index")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    assert "not valid; encoding again" in words(search("support/8"))
    Path("named.index").write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"named\.index"):
        search("support/8", "--index", "named.index")
    assert Path("named.index").read_bytes() == whole[:100]


def test_links_to_missing_files_are_skipped_on_request(collection):
    (collection / "gone.png").symlink_to("nowhere.png")
    assert "skipped 1" in search("support/8", "--skip-bad")


def test_retrieval_beats_chance_on_unseen_digits(in_digits, pictures):
    assert "chance" in run("retrieve", "measure", "run", "--queries", "20", "--shot", "1,5")
    by_shots = values_of("run", "retrieval-quality-test")["by_shots"]
    assert by_shots[1]["qualities"]["BRUNO"]["average_precision"] > by_shots[1]["chance"] + 0.2
    assert picture_of("run", "retrieval-quality-test").std() > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "support/2", "--collection", "queries/2", "--index", "no/x.index"], r"no/x\.index"),
        (
            ["--query", "support/2", "--collection", "collection", "--top", "0"],
            r"`--top` .*at least 1; got 0",
        ),
        (["--query", "support/2", "--collection", "nowhere"], r"nowhere"),
        (["--query", "nowhere", "--collection", "collection"], r"nowhere"),
    ],
)
def test_a_mistake_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("retrieve", "search", "run", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--queries", "1"], r"`--queries` .*at least 2; got 1"), (["--shot", "x"], r"`--shot` .*got 'x'")],
)
def test_a_mistake_in_measuring_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises(ValueError, match=message):
        run("retrieve", "measure", "run", *arguments)


def test_a_search_needs_a_query_and_a_collection(in_digits):
    assert "--collection" in run("retrieve", "search", "run", "--query", "support/2", code=2)
    assert "--query" in run("retrieve", "search", "run", "--collection", "collection", code=2)
