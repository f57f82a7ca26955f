"""The four jobs from the command line, with a model of digits and with files as a user has them."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import bruno
from bruno import Bruno
from bruno.checkpoint import read, read_about
from bruno.cli import app
from bruno.config import load_recipe, to_dict
from bruno.data import ElementReader, Examples, load_examples
from bruno.training.run import Run

DIGITS = ("2", "5", "8")  # which the model never saw


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception and not code:
        raise result.exception
    assert result.exit_code == code
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of digits, with their images as files of another size beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    run("train", "digits", "--steps", "800", "--out", folder / "run", "--device", "cpu", "--validate", "0")
    unseen = load_examples("digits", "test")
    for label, name in enumerate(DIGITS):
        images = unseen.elements[unseen.labels == label][:40, 0].numpy()
        for part, some in (("support", images[:5]), ("collection", images[5:25]), ("queries", images[25:35])):
            place = folder / part / (name if part != "collection" else "")
            place.mkdir(parents=True, exist_ok=True)
            for i, pixels in enumerate(some):
                image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
                image.resize((24, 24)).save(place / f"{name}-{i:02d}.png")
    return folder


def result(trained: Path, name: str) -> dict:
    record = json.loads((trained / "run" / "results" / f"{name}.json").read_text())
    assert record["config"]["data"]["name"] == "digits"
    assert record["provenance"]["packages"]["torch"]
    return record["values"]


def picture(trained: Path, name: str) -> np.ndarray:
    with Image.open(trained / "run" / "results" / f"{name}.png") as image:
        return np.asarray(image.convert("L"))


@pytest.mark.slow
def test_samples_from_nothing_from_a_set_and_from_one_image_again(trained):
    run("sample", trained / "run", "--prior", "--samples", "9")
    with np.load(trained / "run" / "results" / "samples-prior.npz") as file:
        assert file["samples"].shape == (9, 1, 8, 8)
    run("sample", trained / "run", "--given", trained / "support" / "2", "--samples", "3")
    with np.load(trained / "run" / "results" / "samples.npz") as file:
        assert file["samples"].shape == (6, 3, 1, 8, 8)
        assert file["inputs"].shape == (5, 1, 8, 8)
        assert file["seen"].tolist() == [0, 1, 2, 3, 4, 5]
        assert 0 < file["samples"].max() <= 16
    output = run("sample", trained / "run", "--repeats", "--given", trained / "support" / "5" / "5-00.png")
    assert "mean variance of a pixel" in output
    variance = result(trained, "samples-repeats")["variance"]
    assert variance[-1] < variance[0]
    run("sample", trained / "run", "--length", "100", "--prefixes", "98-100", "--samples", "2")
    assert result(trained, "samples")["seen"] == [98, 99, 100]
    assert picture(trained, "samples").std() > 10
    run("sample", trained / "run", "--sets", "3", "--length", "4", "--prefixes", "0,1,4", "--samples", "2")
    with np.load(trained / "run" / "results" / "samples.npz") as file:
        assert file["samples"].shape == (3, 3, 2, 1, 8, 8)
        assert file["inputs"].shape == (3, 4, 1, 8, 8)
        assert len(np.unique(file["inputs"][:, 0], axis=0)) == 3  # sets of three classes


@pytest.mark.slow
def test_few_shot_beats_chance_and_says_how_often_it_was_asked(trained):
    assert "3-way 1-shot" in run("fewshot", trained / "run", "--trials", "2")  # there are no 5 or 20
    output = run("fewshot", trained / "run", "--way", "3", "--shot", "1,5", "--trials", "20")
    assert "3-way 5-shot" in output
    values = result(trained, "few-shot-test")
    assert [r["episodes"] for r in values["bruno"]] == [240, 240]  # three digits, four turns, twenty trials
    assert values["bruno"][0]["accuracy"] > 0.6
    assert values["bruno"][1]["accuracy"] > 0.85
    assert picture(trained, "few-shot-test").std() > 10
    run("fewshot", trained / "run", "--way", "3", "--shot", "1,5", "--trials", "20", "--no-noise")
    quiet = result(trained, "few-shot-test-without-noise")
    assert not quiet["noise"]
    assert quiet["pixels"] == values["pixels"]  # the same episodes
    assert quiet["bruno"] != values["bruno"]
    assert quiet["bruno"][1]["accuracy"] > 0.85


@pytest.mark.slow
def test_ones_own_images_are_classified(trained):
    for name in DIGITS:
        run("classify", trained / "run", trained / "queries" / name, "--support", trained / "support")
        values = result(trained, "classification")
        given_to = np.argmax(values["probabilities"], 1)
        assert (given_to == DIGITS.index(name)).mean() >= 0.7
        assert np.allclose(np.sum(values["probabilities"], 1), 1)
    bad = trained / "queries" / "8" / "bad.png"
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad.png: cannot be used: it is not an image"):
        run("classify", trained / "run", bad.parent, "--support", trained / "support")
    output = run("classify", trained / "run", bad.parent, "--support", trained / "support", "--skip-bad")
    assert f"passed over {bad}" in output
    assert f"passed over {bad}" in run("sample", trained / "run", "--given", bad.parent, "--skip-bad")
    bad.unlink()
    sure = "0.998,0.001,0.001"
    run(
        "classify",
        trained / "run",
        trained / "queries" / "8",
        "--support",
        trained / "support",
        "--prior",
        sure,
    )
    biased = np.array(result(trained, "classification")["probabilities"])
    assert (biased[:, 0] > np.array(values["probabilities"])[:, 0]).all()
    output = run(
        "classify",
        trained / "run",
        trained / "queries" / "8",
        "--support",
        trained / "support",
        "--calibrate",
    )
    assert re.search(r"temperature \d+\.\d+, from \d+ episodes", output)
    assert 0.1 < result(trained, "classification")["temperature"] < 10


@pytest.mark.slow
def test_hidden_folders_are_no_classes(trained, tmp_path):
    support = shutil.copytree(trained / "support", tmp_path / "support")
    shutil.copytree(support / "2", support / "__MACOSX")
    (support / ".cache").mkdir()
    run("classify", trained / "run", trained / "queries" / "2", "--support", support)
    assert result(trained, "classification")["classes"] == list(DIGITS)


@pytest.mark.slow
def test_what_was_classified_is_shown_as_far_as_a_page_has_room(trained):
    queries = [trained / "queries" / name for name in DIGITS]
    record = trained / "run" / "results" / "classification.json"
    run("classify", trained / "run", queries[0] / "2-00.png", "--support", trained / "support")
    of_one = picture(trained, "classification")
    assert json.loads(record.read_text())["note"] == ""
    run("classify", trained / "run", *queries, "--support", trained / "support")
    of_many = picture(trained, "classification")
    assert json.loads(record.read_text())["note"] == "In the picture: the first 24 of 30."
    assert len(of_many) == pytest.approx(12 * len(of_one), abs=12)  # two in a row


@pytest.mark.slow
def test_the_odd_one_out_is_flagged_in_a_folder_and_on_standard_input(trained, tmp_path):
    stream = tmp_path / "stream"
    shutil.copytree(trained / "queries" / "5", stream)
    shutil.copy(trained / "queries" / "2" / "2-05.png", stream / "5-04-stranger.png")
    judge = [trained / "run", "--typical", trained / "support" / "5", "--threshold", "10"]
    assert "5-04-stranger.png  odd one out" in run("anomaly", *judge, stream)
    values = result(trained, "anomaly")
    assert values["names"][np.argmin(values["scores"])].endswith("5-04-stranger.png")
    piped = subprocess.run(
        [sys.executable, "-m", "bruno", "anomaly", *map(str, judge), "-"],
        input="".join(f"{path}\n" for path in sorted(stream.iterdir())),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "5-04-stranger.png  odd one out" in piped.stdout
    assert result(trained, "anomaly")["scores"] == values["scores"]
    output = run("anomaly", trained / "run", stream, "--batch", "--threshold", "10")
    assert re.search(r"stranger.png +│ odd one out", output), output
    assert re.search(r"1 of 11 are odd", output)
    run("anomaly", trained / "run", stream, "--batch", "--rate", "0.3", "--sets", "50")  # calibrated
    batch = result(trained, "anomaly-batch")
    assert 1 <= batch["outliers"] <= 6
    assert batch["names"][np.argmin(batch["scores"])].endswith("stranger.png")
    assert picture(trained, "anomaly").std() > 5


@pytest.mark.slow
def test_a_stream_for_programs_goes_on_where_it_stopped(trained, tmp_path):
    files = sorted((trained / "queries" / "5").iterdir())
    judge = ["anomaly", str(trained / "run"), "--threshold", "10", "--json"]

    def lines(*arguments: object) -> list[dict]:
        command = [sys.executable, "-m", "bruno", *judge, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert "are odd. The score is" in done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    whole = lines(*files)
    assert [line["element"] for line in whole] == [str(file) for file in files]
    assert [line["seen"] for line in whole] == list(range(len(files)))
    assert set(whole[0]) == {"element", "score", "seen", "threshold", "outlier", "out_of_distribution"}
    state = ["--state", tmp_path / "known"]
    parts = lines(*files[:4], *state) + lines(*files[4:], *state)
    assert [line["seen"] for line in parts] == list(range(len(files)))
    np.testing.assert_allclose([x["score"] for x in parts], [x["score"] for x in whole], atol=1e-4)
    output = run(*judge[:-1], files[0], *state, "--typical", trained / "support" / "5")
    assert f"after {len(files)} elements; {trained / 'support' / '5'} was for its beginning" in output
    with pytest.raises(ValueError, match="`--state` must be in a folder that is there"):
        run(*judge[:-1], files[0], "--state", tmp_path / "no" / "known")


@pytest.mark.slow
def test_an_interrupted_stream_leaves_its_results(trained, monkeypatch):
    read = ElementReader.read

    def interrupted(self, paths):
        yield from itertools.islice(read(self, paths), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(ElementReader, "read", interrupted)
    run("anomaly", trained / "run", trained / "queries" / "5", "--threshold", "0", code=130)
    assert result(trained, "anomaly")["elements"] == 3


@pytest.mark.slow
def test_a_stream_that_is_terminated_keeps_what_it_knows(trained, tmp_path):
    judge = ["anomaly", str(trained / "run"), "-", "--threshold", "0", "--state", str(tmp_path / "known")]
    with subprocess.Popen(
        [sys.executable, "-m", "bruno", *judge], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        files = sorted((trained / "queries" / "5").iterdir())[:3]
        service.stdin.write("".join(f"{file}\n" for file in files))
        service.stdin.flush()
        for _ in files:  # they are judged, and it waits for more
            service.stdout.readline()
        service.terminate()
        assert service.wait() == 128 + signal.SIGTERM
    known = bruno.load(tmp_path / "known", model=Run(trained / "run").model())
    assert known.evidence.count == 3


@pytest.mark.slow
def test_an_empty_stream_leaves_no_state(trained, tmp_path):
    command = ["anomaly", str(trained / "run"), "-", "--threshold", "0", "--state", str(tmp_path / "known")]
    done = subprocess.run(
        [sys.executable, "-m", "bruno", *command], input="", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "`stream` must hold at least one element; it is empty" in done.stderr
    assert not (tmp_path / "known").exists()


@pytest.mark.slow
def test_nothing_disturbs_while_what_a_stream_knows_is_kept(trained, tmp_path, monkeypatch):
    def disturbed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        bruno.save(*arguments)

    monkeypatch.setattr("bruno.cli.streams.save", disturbed)
    state = tmp_path / "known"
    run("anomaly", trained / "run", trained / "queries" / "5", "--threshold", "0", "--state", state)
    assert bruno.load(state, model=Run(trained / "run").model()).evidence.count == 10


@pytest.mark.slow
def test_what_a_stream_knows_is_kept_before_its_picture_is_drawn(trained, tmp_path, monkeypatch):
    def impatient(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("bruno.cli.judging.score_timeline", impatient)
    state = tmp_path / "known"
    stream = [trained / "queries" / "5", "--threshold", "0", "--state", state]
    run("anomaly", trained / "run", *stream, code=130)
    assert bruno.load(state, model=Run(trained / "run").model()).evidence.count == 10


@pytest.mark.slow
def test_a_stream_with_a_bad_element_leaves_the_results_before_it(trained):
    good, bad = trained / "queries" / "5", trained / "run" / "log.jsonl"
    with pytest.raises(ValueError, match=r"log.jsonl: cannot be used"):
        run("anomaly", trained / "run", good, bad, good, "--threshold", "0")
    assert result(trained, "anomaly")["elements"] == len(list(good.iterdir()))


@pytest.mark.slow
def test_files_of_the_same_name_are_told_apart(trained):
    support = trained / "support"
    same = [support / name / f"{name}-00.png" for name in ("2", "5")]
    for path in same:
        path.with_name("same.png").write_bytes(path.read_bytes())
    output = run(
        "classify", trained / "run", *(path.with_name("same.png") for path in same), "--support", support
    )
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    told = "".join(image.strip() for _, image, *_ in rows)  # a long path is folded
    for path in same:
        path.with_name("same.png").unlink()
    assert all(f"{path.parent.name}/same.png" in told for path in same)


@pytest.mark.slow
def test_a_ranking_needs_no_index_that_can_be_kept(trained, tmp_path):
    where = ["--query", trained / "support" / "2", "--collection", trained / "queries" / "2"]
    output = run("retrieve", trained / "run", *where, "--index", tmp_path)  # a folder
    assert "and not kept" in output
    assert len(result(trained, "retrieval")["names"]) > 1


@pytest.mark.slow
def test_of_a_long_stream_only_the_latest_is_kept(trained, monkeypatch):
    monkeypatch.setattr("bruno.cli.judging._KEPT", 4)
    run(
        "anomaly", trained / "run", trained / "queries" / "5", trained / "queries" / "2", "--threshold", "100"
    )
    values = result(trained, "anomaly")
    assert (values["elements"], values["outliers"]) == (20, 19)  # the first is not judged
    assert [Path(name).name for name in values["names"]] == [f"2-0{i}.png" for i in range(6, 10)]


@pytest.mark.slow
def test_a_calibrated_stream_and_its_quality(trained):
    output = run("anomaly", trained / "run", "--sets", "100")
    assert "of another class  odd one out" in output
    made_up = result(trained, "anomaly")["names"]
    run("anomaly", trained / "run", "--threshold", "0")
    assert result(trained, "anomaly")["names"] == made_up  # however it is judged
    run("anomaly", trained / "run", "--measure", "--sets", "12")
    for part in result(trained, "anomaly-quality-test")["contamination"]:
        assert "IsolationForest, pixels" in part["qualities"]
        assert part["qualities"]["BRUNO, leave one out"]["area"] > 0.7
    assert picture(trained, "anomaly-quality-test").std() > 10
    assert "12 sets of 10 elements" in run(
        "anomaly", trained / "run", "--measure", "--sets", "12", "--length", "10"
    )


@pytest.mark.slow
def test_a_collection_is_ranked_and_encoded_once(trained):
    where = ["--query", trained / "support" / "8", "--collection", trained / "collection", "--top", "10"]
    assert "encoded 60 once" in run("retrieve", trained / "run", *where)
    names = result(trained, "retrieval")["names"]
    assert sum(Path(name).name.startswith("8") for name in names) >= 7
    assert "encoded" not in run("retrieve", trained / "run", *where)
    assert result(trained, "retrieval")["names"] == names
    shutil.copy(trained / "queries" / "8" / "8-00.png", trained / "collection" / "8-new.png")
    assert "encoding it again" in run("retrieve", trained / "run", *where)
    shutil.copy(trained / "queries" / "2" / "2-00.png", trained / "collection" / "8-new.png")
    assert "encoding it again" in run("retrieve", trained / "run", *where)  # the name is the same
    assert "encoding it again" in run("retrieve", trained / "run", *where, "--invert")
    [kept] = trained.glob("collection-*.index")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    assert "encoding it again" in run("retrieve", trained / "run", *where, "--invert")
    (trained / "named.index").write_bytes(whole[:100])
    with pytest.raises(ValueError, match="Name another file with --index, or delete this one"):
        run("retrieve", trained / "run", *where, "--index", trained / "named.index")
    link = trained / "collection" / "gone.png"
    link.symlink_to("nowhere.png")
    assert "left out 1" in run("retrieve", trained / "run", *where, "--skip-bad")
    link.unlink()
    output = run("retrieve", trained / "run", "--measure", "--queries", "20", "--shot", "1,5")
    assert "chance" in output
    by_shots = result(trained, "retrieval-quality-test")["by_shots"]
    assert by_shots[1]["qualities"]["BRUNO"]["average_precision"] > by_shots[1]["chance"] + 0.2
    assert picture(trained, "retrieval-quality-test").std() > 10


@pytest.mark.slow
def test_rows_of_a_table_from_training_to_a_stream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    scale = np.array([1, 1, 1e5])  # of which weight is in grams
    means = generator.normal(60, 5, (31, 1, 3))
    rows = (means + generator.normal(0, 1, (31, 30, 3))) * scale
    rows[30, 25, 0] += 8
    text = "".join(f"m{m},{a:.3f},{b:.3f},{c:.3f}\n" for m in range(30) for a, b, c in rows[m])
    Path("machines.csv").write_text("machine,heat,speed,weight\n" + text)
    Path("stream.csv").write_text("heat,speed,weight\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows[30]))
    data = ["--set", "data.name=machines.csv", "--set", "data.group=machine"]
    run("train", "table", *data, "--steps", "500", "--out", "runs/machines", "--device", "cpu")
    output = run("anomaly", "runs/machines", "stream.csv")
    assert "3 of 30 sets were held out, too few: all tell what is odd" in output
    assert "what is odd is learnt from" not in output
    Path("two.csv").write_text("".join(Path("machines.csv").read_text().splitlines(keepends=True)[:61]))
    told = run("anomaly", "runs/machines", "stream.csv", "--data", "two.csv")
    assert "what is odd is learnt from 2 classes of 60 elements: others may be judged" in told
    assert "stream.csv, line 27  odd one out" in output
    assert output.count("odd one out") == 1
    broken = Path("stream.csv").read_text().splitlines()
    broken[9:9] = ["-999,-999,-999"]
    Path("broken.csv").write_text("\n".join([*broken, "-999,-999,-999"]))
    out_of_distribution = "odd one out, unlike anything in any set"
    for batch in ([], ["--batch"]):
        output = run("anomaly", "runs/machines", "broken.csv", *batch)
        assert output.count(out_of_distribution) == 2
        assert output.count("odd one out") == 3 + len(batch)  # the title has it too; none of those after it
        told = "3 of 32 are odd, 2 of them unlike anything in any set, which did not count as seen"
        assert told in " ".join(output.split())
        name = "anomaly-batch" if batch else "anomaly"
        values = json.loads(Path(f"runs/machines/results/{name}.json").read_text())["values"]
        assert (values["outliers"], values["out_of_distribution"]) == (3, 2)
    Path("typical.csv").write_text("\n".join(broken[:11]))
    output = run("anomaly", "runs/machines", "stream.csv", "--typical", "typical.csv")
    assert "--typical: 1 of 10 unlike anything in any set did not count as seen" in output
    assert output.count("odd one out") == 1
    rotated = "".join(f"{c},x,{a},{b}\n" for a, b, c in rows[30])
    Path("rotated.csv").write_text("weight,note,heat,speed\n" + rotated)  # found by their names
    assert run("anomaly", "runs/machines", "rotated.csv").count("odd one out") == 1
    Path("rotated.csv").write_text("weight,warmth,speed\n1,2,3\n")
    with pytest.raises(ValueError, match=r"rotated.csv, columns must be heat, speed, weight.*'heat' is not"):
        run("anomaly", "runs/machines", "rotated.csv")
    of_one = ["sample", "runs/machines", "--given", "stream.csv"]
    assert "rows that were drawn" not in run(*of_one, "--prefixes", "5", "--samples", "2")
    output = run(*of_one, "--prefixes", "0,30", "--samples", "50")
    assert "The last 10 of 100 rows that were drawn." in output
    table = Path("runs/machines/results/samples.csv").read_text().splitlines()
    assert table[0] == "set,seen,heat,speed,weight"
    assert len(table) == 1 + 2 * 50
    with np.load("runs/machines/results/samples.npz") as file:
        assert file["samples"].shape == (2, 50, 3)
        assert (np.abs(file["samples"][1].mean(0) - rows[30].mean(0)) / scale).max() < 1
    output = run("sample", "runs/machines", "--repeats", "--given", "stream.csv")
    assert "mean variance of a column, in training 1, over 30 rows" in output
    spread = json.loads(Path("runs/machines/results/samples-repeats.json").read_text())["values"]["variance"]
    assert spread[-1] < spread[0] < 2
    output = run("anomaly", "runs/machines", "machines.csv", "--threshold", "-3")
    assert "machines.csv, line 901" in output
    assert output.count("machine is m1, and was m0; all are judged as one set") == 1
    assert "nearest columns %" in run(
        "fewshot", "runs/machines", "--way", "3", "--shot", "5", "--trials", "5"
    )
    found = json.loads(Path("runs/machines/results/few-shot-test.json").read_text())["values"]
    assert found["columns"][0]["accuracy"] > 0.8
    run("retrieve", "runs/machines", "--measure", "--queries", "5", "--data", "machines.csv")
    few = "machine,heat,speed,weight\n" + "".join(f"a,60,{i},6e6\n" for i in range(25))
    Path("few.csv").write_text(few + "lonely,60,60,6e6\n")
    output = run("evaluate", "runs/machines", "--data", "few.csv")
    assert "sets are of 1 element, not of 20: 'lonely' has 1" in output
    for job in (["anomaly", "runs/machines", "stream.csv"], ["anomaly", "runs/machines", "--measure"]):
        with pytest.raises(ValueError, match=r"every class must have at least 2 elements.*'lonely' has 1"):
            run(*job, "--data", "few.csv")
    for name, some in (("same", rows[30, :5]), ("other", rows[0, :5])):
        Path("support", name).mkdir(parents=True)
        np.savetxt(Path("support", name, "rows.csv"), some, delimiter=",")
    run("classify", "runs/machines", "stream.csv", "--support", "support")
    Path("one.csv").write_text("machine,heat,speed,weight\n1,60,60,6e6\n1,61,61,6e6\n")
    with pytest.raises(ValueError, match=r"`--support` must name at least two classes; one.csv has one"):
        run("classify", "runs/machines", "stream.csv", "--support", "one.csv")
    run("classify", "runs/machines", "stream.csv", "--support", "machines.csv")
    found = json.loads(Path("runs/machines/results/classification.json").read_text())["values"]
    assert sorted(found["classes"]) == sorted(f"m{m}" for m in range(30))
    assert found["support"] == [30] * 30
    where = ["--query", "support/same", "--collection", "stream.csv"]
    assert "encoded 30 once" in run("retrieve", "runs/machines", *where)
    assert "encoded" not in run("retrieve", "runs/machines", *where)
    where[3] = Path("stream.csv").resolve()
    assert "encoded" not in run("retrieve", "runs/machines", *where)  # the same, named in another way
    found = json.loads(Path("runs/machines/results/retrieval.json").read_text())["values"]["names"]
    assert all(name.startswith(f"{where[3]}, line ") for name in found)
    for name in ("few-shot-test", "retrieval-quality-machines", "classification"):
        assert Path(f"runs/machines/results/{name}.png").stat().st_size > 1000


@pytest.mark.slow
def test_inspection_and_one_page_of_everything(trained):
    run("inspect", trained / "run", "--sets", "20")
    names = ("correlations", "degrees-of-freedom", "toy-comparison", "gain-by-position")
    for name in names:
        result(trained, name)
        assert picture(trained, name).std() > 3
    run("report", trained / "run")
    text = (trained / "run" / "report.html").read_text()
    assert "Learning curve" in text
    assert text.count("data:image/png;base64") >= len(names) + 1
    assert "http" not in text


@pytest.mark.slow
def test_an_exported_model_needs_no_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("export", trained / "run", "model.safetensors", "--half")
    run("fewshot", "model.safetensors", "--way", "3", "--shot", "5", "--trials", "20")
    run("fewshot", trained / "run", "--way", "3", "--shot", "5", "--trials", "20")
    record = json.loads((tmp_path / "model" / "results" / "few-shot-test.json").read_text())
    exported, original = record["values"], result(trained, "few-shot-test")
    assert exported["bruno"][0]["accuracy"] == pytest.approx(original["bruno"][0]["accuracy"], abs=0.02)
    run("sample", "model.safetensors", "--prior", "--samples", "4")
    run("evaluate", "model.safetensors", "--sets", "4", "--length", "3")
    run("evaluate", "model.safetensors", "--sets", "4", "--length", "2", "--data", "digits")
    assert Path("model/results/bits-digits-test.png").is_file()
    assert len(json.loads(Path("model/results/bits-test.json").read_text())["values"]["by_position"]) == 3


@pytest.mark.slow
def test_a_models_file_says_what_it_was_made_from_and_can_be_rounded_too(trained, tmp_path):
    whole, half = trained / "run" / "model.safetensors", tmp_path / "half.safetensors"
    run("export", whole, half, "--half")
    run("export", trained / "run", tmp_path / "from-run.safetensors", "--half")
    assert half.read_bytes() == (tmp_path / "from-run.safetensors").read_bytes()
    about = read_about(half)
    assert about == read_about(whole)
    assert about["recipe"] == json.loads((trained / "run" / "recipe.json").read_text())
    _, header = read(Run(trained / "run").checkpoints[-1], "cpu")
    assert about["provenance"] == header["provenance"]  # of where it was trained
    with pytest.raises(ValueError, match="there is no nowhere"):
        run("export", "nowhere", half)
    for out in (tmp_path, tmp_path / "missing" / "model.safetensors"):
        with pytest.raises(ValueError, match="`out` must be a file in a folder that is there"):
            run("export", whole, out)


def test_a_model_of_the_package_needs_no_data(tmp_path, monkeypatch):
    recipe = load_recipe("omniglot", ["flow.kind=dense", "flow.couplings=2", "flow.units=8"])
    model = Bruno.from_config(recipe.model((1, 28, 28), 256))
    (tmp_path / "weights").mkdir()
    bruno.save(model, tmp_path / "weights" / "tiny.safetensors", about={"recipe": to_dict(recipe)})
    monkeypatch.setattr("bruno.weights._WEIGHTS", tmp_path / "weights")
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    said = (
        r"omniglot is not on this machine: all built-in characters .* \(`--data drawn`\); `--data omniglot`"
    )
    assert re.search(said, run("sample", "tiny", "--length", "2", "--samples", "2"))
    run("fewshot", "tiny", "--way", "5", "--shot", "1", "--trials", "2", "--no-rotations")
    record = json.loads((tmp_path / "runs/pretrained-tiny/results/few-shot-drawn.json").read_text())
    assert record["values"]["split"] == "drawn"
    run("evaluate", "tiny", "--length", "2")
    assert (tmp_path / "runs/pretrained-tiny/results/bits-drawn.json").is_file()
    run("report", "tiny")
    assert "Few-shot classification, drawn" in (tmp_path / "runs/pretrained-tiny/report.html").read_text()
    (tmp_path / "data").mkdir()
    names = ("Angelic/character01", "Gurmukhi/character42", "Gurmukhi/character43")  # the last two for test
    published = Examples(torch.zeros(12, 1, 28, 28, dtype=torch.uint8), torch.arange(12) // 4, names)
    monkeypatch.setattr("bruno.data.datasets.OMNIGLOT_FIRST", (names[0], names[0]))
    published.save(tmp_path / "data" / "omniglot.npz")
    assert "not on this machine" not in run("evaluate", "tiny", "--length", "2", "--data-dir", "data")
    assert "8 sets" in run("evaluate", "tiny", "--length", "2", "--sets", "8", "--data-dir", "data")
    assert (tmp_path / "runs/pretrained-tiny/results/bits-test.json").is_file()


@pytest.mark.slow
def test_the_study_runs_and_is_drawn(tmp_path):
    digits = load_examples("digits")
    np.savez(tmp_path / "mine.npz", images=digits.elements[:, 0], labels=digits.labels)
    run(
        "study", "--out", tmp_path, "--steps", "2", "--device", "cpu", "--data", f"digits,{tmp_path}/mine.npz"
    )
    assert (tmp_path / "results" / "study-mine.json").is_file()
    record = json.loads((tmp_path / "results" / "study-digits.json").read_text())
    assert len(record["rows"]) == len(record["values"]["curves"]) == 12
    assert (tmp_path / "results" / "study-digits.png").stat().st_size > 1000
    run("report", tmp_path)
    assert "What upsets training, on digits" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "RUN", "--prior", "--repeats"], "`--prior` is given nothing"),
        (["sample", "RUN", "--sets", "2", "--repeats"], "`--sets` must be 1 with --prior, --repeats"),
        (["sample", "RUN", "--sets", "4"], "`--sets` must be at least 1 and at most 3; got 4"),
        (["sample", "RUN", "--length", "999"], "`--length` must be from 1 to"),
        (["sample", "RUN", "--given", "nowhere.png"], "nowhere.png: there is no such file"),
        (["sample", "RUN", "--prefixes", "1,0"], "`--prefixes` must have 0 first"),
        (
            ["sample", "RUN", "--prefixes", "0-9999"],
            "`--prefixes` must be at least 0 and at most 8; got 9999",
        ),
        (["sample", "RUN", "--prefixes", "5-2"], "`--prefixes` takes numbers, as 1,5 or 480-500; got '5-2'"),
        (["sample", "RUN", "--prior", "--split", "train"], "`--split` is a part of a known data set"),
        (["evaluate", "RUN", "--data", "support", "--split", "test"], "leave out test"),
        (["anomaly", "RUN", "queries/2", "--threshold", "0", "--split", "train"], "leave out train"),
        (["sample", "RUN", "--prefixes", "1-2-3"], "`--prefixes` takes numbers, as 1,5 or 480-500"),
        (
            ["sample", "RUN", "--prior", "--data", "digits"],
            "`--prior` is given nothing; leave out --data.",
        ),
        (
            ["classify", "RUN", "queries/2", "--support", "support", "--data", "digits"],
            "`--data` is to calibrate on; leave it out, or add --calibrate",
        ),
        (
            ["anomaly", "RUN", "queries/2", "--threshold", "0", "--data", "digits"],
            "nothing to calibrate; leave out --data.",
        ),
        (
            ["retrieve", "RUN", "--query", "support/2", "--collection", "queries", "--data", "digits"],
            "add --measure, or leave out --data.",
        ),
        (
            ["retrieve", "RUN", "--query", "support/2", "--collection", "queries/2", "--index", "no/x.index"],
            "`--index` must be in a folder that is there; there is no no",
        ),
        (["study", "--out", "run/recipe.json"], "`--out` must be a folder; run/recipe.json is a file"),
        (["sample", "RUN", "--prefixes", "a"], "`--prefixes` takes numbers, as 1,5 or 480-500; got 'a'"),
        (["fewshot", "RUN", "--way", "30"], "got 30"),
        (["fewshot", "RUN", "--way", "1"], "`--way` must be at least 2; got 1"),
        (["fewshot", "RUN", "--shot", "0"], "`--shot` must be at least 1; got 0"),
        (["fewshot", "RUN", "--trials", "0"], "`--trials` must be at least 1; got 0"),
        (["anomaly", "RUN", ".", "--state", "."], "`--state` must be a file that can be written; . cannot"),
        (["anomaly", "RUN", ".", "--typical", "no"], "`--typical` no: there is no such file or folder"),
        (["fewshot", "RUN", "--way", "3", "--shot", "1000"], "1000"),
        (["classify", "RUN", "queries/2", "--support", "queries/2"], "at least two class folders"),
        (["classify", "RUN", "run/log.jsonl", "--support", "support"], "log.jsonl: cannot be used"),
        (["anomaly", "RUN", "run/results"], "must be a folder of images; there is none in it"),
        (["retrieve", "RUN", "--query", "support/2"], "`--query` and `--collection` must both be given"),
        (["report", "support"], "has neither"),
        (["sample", "RUN", "--temperature", "nan"], "`--temperature` must be at least 0; got nan"),
        (["sample", "RUN", "--repeats", "--samples", "0"], "`--samples` must be at least 1; got 0"),
        (["sample", "RUN", "--prefixes", "0-1000000000"], "`--prefixes` takes at most 10,000 numbers"),
        (["fewshot", "RUN", "--threshold", "-1"], "`--threshold` must be at least 0 and at most 1; got -1"),
        (["classify", "RUN", "queries/2", "--support", "support", "--prior", "a"], "`--prior` takes numbers"),
        (
            ["classify", "RUN", "queries/2", "--support", "support", "--prior", "1,2"],
            "3 classes; got 2",
        ),
        (
            ["classify", "RUN", "queries/2", "--support", "support", "--calibrate", "--temperature", "2"],
            "leave out --temperature 2.0",
        ),
        (["anomaly", "RUN", "nowhere"], "nowhere: there is no such file"),
        (["anomaly", "RUN", "--threshold", "0", "--rate", "0.1"], "nothing to calibrate; leave out --rate."),
        (
            ["anomaly", "RUN", "queries/2", "--measure"],
            "`--measure` draws its own sets; leave out the stream",
        ),
        (["anomaly", "RUN", "--rate", "0.1", "--measure"], "`--measure` draws its own sets; leave out"),
        (["anomaly", "RUN", "--threshold", "0", "--sets", "9"], "nothing to calibrate; leave out --sets."),
        (["sample", "RUN", "--repeats", "--prefixes", "3"], "leave out --prefixes"),
        (["sample", "RUN", "--given", "support/2", "--data", "digits"], "leave out --data"),
        (["sample", "RUN", "--given", "support/2", "--length", "5"], "`--length` is of sets that are drawn"),
        (["sample", "RUN", "--prior", "--length", "5"], "leave it out with --prior or --given"),
        (
            ["retrieve", "RUN", "--query", "support/2", "--collection", "queries", "--shot", "2"],
            "add --measure",
        ),
        (["train", "digits", "--set", 'data.classes=[1, "a"]'], "`data.classes` must be a word; got 1"),
        (["retrieve", "RUN", "--query", "support/2", "--measure"], "`--measure` draws its own queries"),
        (["sample", "run/model.safetensors", "--checkpoint", "best"], "`--checkpoint` is for a run's folder"),
        (["report", "omniglot"], "`run` must have results; omniglot has none yet"),
        (["anomaly", "RUN", "queries/2", "-"], "`-` must be the only stream"),
        (["anomaly", "RUN", "queries/2", "--rate", "5"], "`--rate` must be between 0 and 1"),
        (
            ["anomaly", "RUN", "queries/2", "--threshold", "nan"],
            "must be a finite number; got nan",
        ),
        (["anomaly", "RUN", "queries/2", "--batch", "--keep-out"], "leave out --keep-out."),
        (
            ["anomaly", "RUN", "queries/2", "--batch", "--length", "9"],
            "as long as itself; leave out --length",
        ),
        (
            ["retrieve", "RUN", "--query", "support/2", "--collection", "collection", "--top", "0"],
            "`--top` must",
        ),
        (["inspect", "RUN", "--sets", "0"], "`--sets` must be at least 2; got 0"),
        (["study", "--data", "digits,nowhere", "--out", "study"], "nothing at 'nowhere'"),
        (["sample", "nowhere"], "`run` must be a run's folder, a model's file, or of"),
    ],
)
def test_mistakes_are_told(trained, arguments, message, monkeypatch):
    monkeypatch.chdir(trained)
    Path("run/results").mkdir(exist_ok=True)
    for path in Path("run/results").glob("*.png"):
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        run(*("run" if word == "RUN" else word for word in arguments))
