import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import bruno
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.config import TrainConfig, load_recipe, to_dict
from bruno.data import load_examples
from bruno.data.sampling import SetSampler
from bruno.reporting.images import png
from bruno.reporting.page import describe_recipe, learning_curve_result, page, report, write_page
from bruno.reporting.results import Result, read_results
from bruno.training.run import Run
from bruno.training.trainer import Trainer

PICTURE = png(np.zeros((2, 2, 1), np.uint8))
RESULT = Result("one", "A <title>", {"accuracy": 0.5}, ("a", "b"), (("1", "2 & 3"),))
LOG = [{"index": i, "seconds": 60.0 * i, "bits_per_dim": 3.0 / i} for i in range(1, 31)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a log and a result."""
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    RESULT.write(tmp_path, config={}, seed=0)
    return tmp_path


def test_a_page_needs_no_other_file_and_shows_its_results(tmp_path):
    replace(RESULT, picture=PICTURE, note="How to read it").write(tmp_path, config={}, seed=0)
    text = page("Title", "Lead & all", read_results(tmp_path))
    assert "A &lt;title&gt;" in text
    assert "2 &amp; 3" in text
    assert "Lead &amp; all" in text
    assert "How to read it" in text
    assert re.findall(r'src="([^"]{10})', text) == ["data:image"]
    assert "http" not in text
    assert "seed 0" in text


def test_a_long_table_is_folded():
    rows = tuple((str(i), "x") for i in range(20))
    assert "<details>" in page("t", "", [replace(RESULT, rows=rows)])
    assert "<details>" not in page("t", "", [replace(RESULT, rows=rows[:5])])


def test_every_tag_of_a_page_is_closed():
    class Balanced(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "img"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Balanced()
    long = replace(RESULT, rows=(("1", "2"),) * 20, picture=PICTURE, note="n", provenance={"seed": 1})
    parser.feed(page("t", "lead", [RESULT, long, replace(RESULT, rows=()), RESULT]))
    assert parser.open == []


@pytest.mark.parametrize("text", ['"><script>alert(1)</script>', "{{ 7 * 7 }}", "' onerror='x", "\udcff"])
def test_text_is_shown_as_it_is(tmp_path, text):
    results = [replace(RESULT, title=text, note=text, columns=(text,), rows=((text,),), picture=PICTURE)]
    written = write_page(tmp_path / "page.html", text, text, results).read_text("utf-8")
    assert "<script" not in written
    assert "49" not in re.sub(r'base64,[^"]*', "", written).split("</style>")[1]
    assert not re.search(r"<[^>]*' onerror=", written)


@pytest.mark.parametrize(
    "provenance",
    [{}, {"commit": None}, {"hardware": "a lot"}, {"hardware": {}, "packages": None}, {"seed": [1]}],
)
def test_incomplete_provenance_is_accepted(provenance):
    assert "None" not in page("t", "", [replace(RESULT, provenance=provenance)])


def test_a_page_has_links_to_many_results():
    assert "<nav>" not in page("t", "", [RESULT])
    text = page("t", "", [RESULT] * 5)
    targets = re.findall(r'href="#([^"]*)"', text)
    assert len(targets) == 5
    assert targets == re.findall(r'<section id="([^"]*)"', text)


def test_a_report_has_the_results_and_the_learning_curve(folder):
    learning_curve_result(LOG[:3]).write(folder, config={}, seed=0)  # from earlier in the run
    path = report(folder)
    text = path.read_text("utf-8")
    assert path == folder / "report.html"
    assert re.findall("<h2>(.*)</h2>", text) == ["A &lt;title&gt;", "Learning curve"]
    assert "30 steps in 1,800 s" in text
    assert f"<title>{folder.name}</title>" in text


def test_a_report_describes_the_recipe_of_the_run(folder):
    recipe = load_recipe("digits", ["train.seed=3"])
    (folder / "recipe.json").write_text(json.dumps(to_dict(recipe)))
    assert describe_recipe(recipe) in report(folder, folder / "page.html").read_text("utf-8")


def test_a_report_from_inside_the_folder_has_its_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert f"<title>{folder.name}</title>" in report(".").read_text("utf-8")


def test_a_report_marks_results_of_earlier_checkpoints(tmp_path):
    config = ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=4))
    sampler = SetSampler(load_examples("digits"))
    run = Run(tmp_path)
    run.save(Trainer(Bruno.from_config(config), sampler, TrainConfig(steps=1, batch=2, set_size=2)))
    now = run.model("last").fingerprint()
    for name, model in (("old", "0" * len(now)), ("now", now), ("neither", "")):
        replace(RESULT, name=name, model=model).write(tmp_path, config={}, seed=0)
    assert report(tmp_path).read_text("utf-8").count("From an earlier checkpoint") == 1


def test_a_recipe_is_described_by_data_process_flow_and_seed():
    recipe = load_recipe("digits", ["train.seed=3", "data.name=/some/folder/digits"])
    described = describe_recipe(recipe)
    assert described.startswith("digits, ")
    assert f"{recipe.process.kind} process" in described
    assert f"{recipe.flow.kind} flow" in described
    assert described.endswith("seed 3")


def test_a_report_of_nothing_raises(tmp_path):
    with pytest.raises(ValueError, match=r"`folder` .*nowhere does not exist"):
        report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"`folder` .*log or results.*neither"):
        report(tmp_path)


def test_a_report_that_cannot_be_written_raises(folder):
    for out in (folder / "no" / "page.html", folder / "results"):
        with pytest.raises(ValueError, match=rf"`out` .*got {re.escape(str(out))}"):
            report(folder, out)


@pytest.mark.slow
def test_importing_reporting_imports_no_drawing_library():
    code = f"""
import importlib, sys, types
bruno = sys.modules["bruno"] = types.ModuleType("bruno")  # without the imports of its __init__
bruno.__path__ = {list(bruno.__path__)}
for name in ("images", "plots", "element_plots", "results", "page"):
    importlib.import_module(f"bruno.reporting.{{name}}")
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "bruno.reporting.page" in loaded
    assert not {"matplotlib", "jinja2", "PIL", "bruno.tasks", "bruno.cli"} & loaded
