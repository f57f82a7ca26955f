"""`bruno anomaly keyed` and `bruno anomaly accept --store`: a stream for every key."""

import builtins
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import bruno
from bruno.tasks.detector import Detector
from bruno.trained import KeyedDetector
from cli.commandline import run, run_main, values_of

HEADER = "time,machine,heat,speed\n"
WATCH = ["anomaly", "keyed", "run", "--threshold", "-5", "--store", "s.db", "--json"]


@pytest.fixture
def stream(trained_once, workplace) -> list[str]:
    return write_stream(trained_once)


def write_stream(trained_once: Path) -> list[str]:
    """Rows of three machines in random order, an outlier of m1 in line 72; run/ is the model."""
    shutil.copytree(trained_once, "run")
    random = np.random.default_rng(1)
    machine = random.integers(0, 3, 80)
    rows = random.normal(60, 5, (3, 2))[machine] + random.normal(0, 1, (80, 2))
    machine[70], rows[70] = 1, 300.0
    lines = [f"{i},m{m},{a:.3f},{b:.3f}\n" for i, (m, (a, b)) in enumerate(zip(machine, rows, strict=True))]
    Path("stream.csv").write_text(HEADER + "".join(lines))
    return lines


def judged(*arguments: object, stdin: str | None = None) -> list[dict]:
    output = run(*WATCH, *arguments, stdin=stdin).splitlines()
    return [json.loads(line) for line in output if line.startswith("{")]


def scores(*arguments: object, stdin: str | None = None) -> list[float]:
    return [line["score"] for line in judged(*arguments, stdin=stdin)]


def opened(**settings: object) -> KeyedDetector:
    trained = bruno.open("run")
    return KeyedDetector(trained, "s.db", Detector(trained.model, -5.0), **settings)


def counts() -> dict[str, int]:
    with opened() as judge:
        return {name: int(judge.posterior(name).evidence.count) for name in judge}


# --- files -----------------------------------------------------------------------------------------------


def test_rows_are_judged_in_the_sets_of_their_keys(stream):
    found = judged("stream.csv")
    assert [line["element"] for line in found] == [f"stream.csv, line {i}" for i in range(2, 82)]
    keys = [line["group"] for line in found]
    assert keys == [line.split(",")[1] for line in stream]
    trained = bruno.open("run")
    with KeyedDetector(trained, detector=Detector(trained.model, -5.0)) as judge:
        x = np.array([line.split(",")[2:] for line in stream], dtype=float)
        np.testing.assert_array_equal(judge.step(keys, x).score, [line["score"] for line in found])
    assert [line["element"] for line in found if line["outlier"]] == ["stream.csv, line 72"]
    assert values_of("run", "anomaly")["groups"]["m1"]["outliers"] == 1


def test_a_table_is_continued_after_the_rows_that_were_judged(stream):
    whole = scores("stream.csv")
    Path("s.db").unlink()
    Path("stream.csv").write_text(HEADER + "".join(stream[:33]))
    first = scores("stream.csv")
    assert scores("stream.csv") == []
    Path("stream.csv").write_text(HEADER + "".join(stream))
    assert first + scores("stream.csv") == whole
    assert sum(counts().values()) == 79


@pytest.mark.parametrize("written", [-1, -3, -9])
@pytest.mark.parametrize("source", ["stream.csv", "-"])
def test_a_half_written_line_is_judged_once_it_is_complete(stream, source, written):
    def judged_of(text: str) -> list[str]:
        Path("stream.csv").write_text(text)
        given, stdin = ([source], None) if source != "-" else (["-", "--replay", "--group", "machine"], text)
        output = run(*WATCH, *given, stdin=stdin)
        assert ("half written" in output) == (not text.endswith("\n"))
        return [line for line in output.splitlines() if line.startswith("{")]

    text = HEADER + "".join(stream)
    whole = judged_of(text)
    Path("s.db").unlink()
    half = HEADER + "".join(stream[:33])
    assert judged_of(half[:written]) + judged_of(half) + judged_of(text) == whole


def test_a_last_line_without_a_newline_is_judged_if_no_later_run_continues(stream):
    text = (HEADER + "".join(stream))[:-1]
    Path("stream.csv").write_text(text)
    trained = bruno.open("run")
    assert len(list(trained.watch_keys("stream.csv", detector=Detector(trained.model, -5.0)))) == 80
    assert len(judged("-", "--group", "machine", stdin=text)) == 80


def test_a_table_with_other_rows_before_is_refused(stream, capsys):
    scores("stream.csv")
    before = counts()
    for lines in (stream[:20], stream[1:] + stream, [stream[0]] * 100):
        Path("stream.csv").write_text(HEADER + "".join(lines))
        ended = run_main(capsys, *WATCH, "stream.csv")
        assert ended.code == 2
        assert "stream.csv: must begin with the rows" in ended.errors
    assert counts() == before


def test_rows_before_a_bad_row_count_and_a_corrected_table_continues(stream, capsys):
    whole = scores("stream.csv")
    Path("s.db").unlink()
    for bad in ("40,,1.0,2.0\n", "40,m1,one,2.0\n", "40,m1\n"):
        Path("stream.csv").write_text(HEADER + "".join(stream[:40]) + bad)
        ended = run_main(capsys, *WATCH, "stream.csv")
        assert ended.code == 2
        assert "stream.csv, line 42: " in ended.errors
    Path("stream.csv").write_text(HEADER + "".join(stream))
    assert scores("stream.csv") == whole[40:]


def test_rows_that_cannot_be_read_are_skipped_on_request(stream):
    Path("stream.csv").write_text(HEADER + stream[0] + "1,m1,one,2.0\n" + stream[1])
    assert len(scores("stream.csv", "--skip-bad")) == 2
    assert scores("stream.csv", "--skip-bad") == []


def test_p_values_are_included(stream):
    found = run("anomaly", "keyed", "run", "stream.csv", "--store", "s.db", "--json", "--rate", "0.05")
    lines = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    assert [line["p"] is None for line in lines] == [line["seen"] == 0 for line in lines]


@pytest.mark.parametrize("kind", [["keyed", "--store", "s.db"], ["watch"]], ids=["keyed", "watch"])
def test_outliers_are_explained_on_request(stream, kind):
    """Line 72 is far in both columns; line 73 in one."""
    machine, *rest = stream[71].split(",")[1:]
    Path("stream.csv").write_text(HEADER + "".join(stream[:71]) + f"71,{machine},{rest[0]},300\n")
    command = ["anomaly", *kind, "run", "stream.csv", "--threshold", "-5", "--explain"]
    lines = [json.loads(line) for line in run(*command, "--json").splitlines() if line.startswith("{")]
    explained = {line["element"]: line.get("contributions") for line in lines}
    outliers = [line["element"] for line in lines if line["outlier"]]
    assert [name for name, found in explained.items() if found is not None] == outliers
    assert {"stream.csv, line 72", "stream.csv, line 73"} <= set(outliers)
    both, one = explained["stream.csv, line 72"], explained["stream.csv, line 73"]
    assert list(both) == ["heat", "speed"]
    assert one["speed"] < one["heat"]
    found = values_of("run", "explanation")
    at = found["names"].index("stream.csv, line 73")
    assert found["contributions"][at] == pytest.approx(list(one.values()))
    score = next(line["score"] for line in lines if line["element"] == "stream.csv, line 73")
    assert found["scores"][at] == pytest.approx(score, rel=1e-4, abs=1e-3)
    total = found["scores"][at] - found["baseline"][at]
    assert sum(found["contributions"][at]) == pytest.approx(total, abs=1e-5 * (1 + abs(total)))
    Path("s.db").unlink(missing_ok=True)
    assert "outlier: speed −" in run(*command)


@pytest.mark.parametrize("kind", [["keyed", "--store", "s.db"], ["watch"]], ids=["keyed", "watch"])
def test_the_score_of_a_broken_row_without_evidence_is_explained(stream, kind):
    """The first row of a set is judged by log p(x) alone, compared with a typical row."""
    Path("stream.csv").write_text(HEADER + "0,m1,-9999,60\n" + "".join(stream[:9]))
    command = ["anomaly", *kind, "run", "stream.csv", "--rate", "0.05", "--explain", "--json"]
    first, *_ = [json.loads(line) for line in run(*command).splitlines() if line.startswith("{")]
    assert (first["seen"], first["p"], first["out_of_distribution"]) == (0, None, True)
    assert first["score"] < -10
    found = values_of("run", "explanation")
    assert found["scores"][0] == pytest.approx(first["score"], rel=1e-4)
    assert first["contributions"]["heat"] < min(-10, first["contributions"]["speed"])


@pytest.mark.parametrize("kind", [["keyed", "--store", "s.db"], ["watch"]], ids=["keyed", "watch"])
def test_the_most_unusual_column_of_outliers_is_named(stream, kind):
    """Line 72 is far in both columns; line 73 in one; in line 74 a cell is missing."""
    machine, *rest = stream[71].split(",")[1:]
    odd = f"71,{machine},{rest[0]},300\n72,{machine},-200,\n"
    Path("stream.csv").write_text(HEADER + "".join(stream[:71]) + odd)
    run("anomaly", *kind, "run", "stream.csv", "--threshold", "-5", "--json")
    found = values_of("run", "anomaly-outliers")
    columns = dict(zip(found["names"], found["columns"], strict=True))
    assert columns["stream.csv, line 72"] is not None
    assert (columns["stream.csv, line 73"]["column"], columns["stream.csv, line 73"]["value"]) == (1, 300)
    assert columns["stream.csv, line 73"]["expected"] == pytest.approx(60, abs=20)
    assert (columns["stream.csv, line 74"]["column"], columns["stream.csv, line 74"]["value"]) == (0, -200)


def test_all_rows_may_be_one_set(stream):
    found = judged("stream.csv", "--one-set", "--count-all")
    assert [line["seen"] for line in found] == list(range(80))


# --- standard input --------------------------------------------------------------------------------------


def test_rows_of_standard_input_are_judged_like_those_of_a_table(stream):
    whole = scores("stream.csv")
    Path("s.db").unlink()
    assert scores("-", stdin=HEADER + "".join(stream)) == whole


def test_rows_are_counted_once_by_an_offset_column(stream):
    whole = scores("stream.csv")
    Path("s.db").unlink()
    first = judged("-", "--offset", "time", stdin=HEADER + "".join(stream[:50]))
    rest = judged("-", "--offset", "time", stdin=HEADER + "".join(stream[20:]))
    assert [line["score"] for line in first + rest] == whole
    assert rest[0]["element"] == "offset 50"


def test_standard_input_that_begins_again_is_continued(stream):
    whole = scores("stream.csv")
    Path("s.db").unlink()
    first = scores("-", "--replay", stdin=HEADER + "".join(stream[:50]))
    assert first + scores("-", "--replay", stdin=HEADER + "".join(stream)) == whole
    assert scores("-", "--replay", stdin=HEADER + "".join(stream)) == []  # without an error


@pytest.mark.parametrize("bad", ["", "1.5", "x", "9" * 30])
def test_an_offset_must_be_a_whole_number(stream, bad):
    text = HEADER + f"{bad},m1,1.0,2.0\n"
    assert "offset must be a whole number" in str(error_of("-", "--offset", "time", stdin=text))
    assert "`offset` must be a column" in str(error_of("-", "--offset", "hour", stdin=text))


def error_of(*arguments: object, stdin: str) -> Exception:
    with pytest.raises(ValueError) as found:  # noqa: PT011
        run(*WATCH, *arguments, stdin=stdin)
    return found.value


def test_a_row_is_judged_as_it_arrives_and_committed_while_nothing_does(stream):
    trained = bruno.open("run")
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w", buffering=1) as source:
        watch = trained.watch_keys(lines, "s.db", Detector(trained.model, -5.0), commit_seconds=0.01)
        rows = iter(watch)
        source.write(HEADER + stream[0])
        assert next(rows).judgement.seen == 0
        source.write(stream[1])
        assert next(rows).element.name.endswith("line 3")
        source.close()
        assert list(rows) == []
        watch.keyed.close()


# --- reports that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5])
def test_rows_that_are_not_reported_do_not_count(stream, capsys, monkeypatch, after):
    """As with `| head`: the state is never ahead of standard output."""
    monkeypatch.setattr("bruno.trained.arrivals._BATCH", 16)
    printed, real = [], builtins.print

    def failing(*text: str, **options: object) -> None:
        if text and text[0].startswith("{"):
            if len(printed) == 32 + after:
                raise BrokenPipeError(32, "Broken pipe")
            printed.append(json.loads(text[0])["score"])
        real(*text, **options)

    whole = scores("stream.csv")
    Path("s.db").unlink()
    monkeypatch.setattr(builtins, "print", failing)
    ended = run_main(capsys, *WATCH, "stream.csv")
    assert ended.code == 1
    assert "the last 16 rows may not have been reported" in ended.errors
    monkeypatch.setattr(builtins, "print", real)
    assert scores("stream.csv") == whole[32:]
    assert printed == whole[: 32 + after]


# --- feedback --------------------------------------------------------------------------------------------


def test_an_alarm_is_accepted_by_the_name_of_the_row(stream):
    scores("stream.csv", "--window", "30")
    output = run("anomaly", "accept", "run", "stream.csv, line 72", "--store", "s.db")
    assert output.strip().endswith("accepted 1 element; 0 remain excluded")
    with opened(window=30) as judge:
        assert judge.store.latest_excluded(9) == []


@pytest.mark.parametrize(("kind", "option"), [("keyed", "--store"), ("watch", "--state")])
def test_an_alarm_is_accepted_by_the_name_in_the_table(stream, kind, option):
    watch = ["anomaly", kind, "run", "--threshold", "-5", option, "s"]
    for folder in ("data", "more"):
        Path(folder).mkdir()
        shutil.copy("stream.csv", folder)
        assert "│ stream.csv, line 72 " in run(*watch, f"{folder}/stream.csv")
    accept = ["anomaly", "accept", "run", option, "s"]
    with pytest.raises(ValueError, match=r"`names` .*; got 'stream.csv, line 72', which matches ") as error:
        run(*accept, "stream.csv, line 72")
    assert "'data/stream.csv, line 72'" in str(error.value)
    assert "'more/stream.csv, line 72'" in str(error.value)
    assert "accepted 1 element; 1 remain" in run(*accept, "more/stream.csv, line 72")
    for wrong in ("line 72", "am.csv, line 72", "stream.csv, line 7", "more/stream.csv, line 72"):
        with pytest.raises(ValueError, match=rf"`names` .*'data/stream.csv, line 72'; got '{wrong}'"):
            run(*accept, wrong)
    assert "accepted 1 element; 0 remain" in run(*accept, "stream.csv, line 72")


# --- bad input -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled_once(trained_once, tmp_path_factory) -> Path:
    """A folder with a model, streams, a store that has judged one of them, and bad stores."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_stream(trained_once)
        scores("stream.csv")
        write_bad_files()
    return folder


def write_bad_files() -> None:
    shutil.copy("s.db", "damaged.db")
    content = bytearray(Path("damaged.db").read_bytes())
    content[4096:] = b"\xa5" * len(content[4096:])
    Path("damaged.db").write_bytes(content)
    Path("text.db").write_text("not a store")
    shutil.copy("stream.csv", "fresh.csv")
    Path("other.csv").write_text("machine,heat,pressure\nm1,1.0,2.0\n")
    Path("keyless.csv").write_text("heat,speed\n1.0,2.0\n")
    Path("nameless.csv").write_text("machine,heat,speed\n,1.0,2.0\n")
    bruno.save(bruno.Bruno.from_config(bruno.open("run").model.config), "other.safetensors")


@pytest.fixture
def filled(filled_once, workplace) -> Path:
    shutil.copytree(filled_once, workplace, dirs_exist_ok=True)
    return Path("s.db")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run keyless.csv --store s.db", "`--group` must be a column"),
        ("run keyless.csv --store new.db", "`--group` must be a column"),
        ("run nameless.csv --store s.db", "line 2: must have the key"),
        ("run fresh.csv --store s.db --group heater", "'heater'"),
        ("run other.csv --store s.db", "'speed'"),
        ("other.safetensors stream.csv --store s.db --group machine", "must be a store of this model"),
        ("run stream.csv --store s.db --window 50", "`--window`"),
        ("run stream.csv --store s.db --half-life 9", "`--half-life`"),
        ("run stream.csv --store damaged.db", "damaged.db: is damaged"),
        ("run stream.csv --store text.db", "`--store`"),
        ("run stream.csv --store nowhere/s.db", "`--store`"),
        ("run stream.csv", "'--store'"),
        ("run stream.csv --store s.db --state t.state", "--state"),
        ("run stream.csv --store s.db --replay", "`--replay`"),
        ("run - stream.csv --store s.db", "`-`"),
        ("run --store s.db", "'STREAM'"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(filled, capsys, line, message):
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    ended = run_main(capsys, "anomaly", "keyed", *line.split(), "--threshold", "-5")
    errors = [one for one in ended.errors.splitlines() if not one.startswith("warning: ")]
    assert ended.code == 2, ended
    assert len(errors) == 1
    assert message in errors[0]
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_a_store_in_use_is_refused(filled, capsys, monkeypatch):
    with opened():
        monkeypatch.setattr("bruno.trained.keyed.WAIT", 0.0)
        ended = run_main(capsys, *WATCH, "stream.csv")
    assert ended.code == 2
    assert "another process has it open" in ended.errors
