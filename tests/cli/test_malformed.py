"""Malformed command lines: each ends with exit code 2, prints one line and writes nothing."""

import json
import os
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
from typer.main import get_command

import bruno
from bruno.checkpoint import write
from bruno.cli.main import COMMANDS, app
from bruno.tasks.detector import Detector
from bruno.training.run import Run
from cli.commandline import make_images, run_main

# A valid line of each command that opens a model.
WITH_MODEL = {
    "finetune": "finetune run --out new --steps 1",
    "evaluate": "evaluate run",
    "verdict": "verdict run",
    "sample": "sample run",
    "repeat": "repeat run",
    "fewshot": "fewshot run",
    "classify": "classify run images/a/0.png --support images",
    "anomaly watch": "anomaly watch run images/a",
    "anomaly keyed": "anomaly keyed run rows.csv --store new",
    "anomaly batch": "anomaly batch run images/a",
    "anomaly accept": "anomaly accept run 1 --state state",
    "anomaly measure": "anomaly measure run",
    "calibrate": "calibrate run",
    "retrieve search": "retrieve search run --query images/a --collection images/b",
    "retrieve measure": "retrieve measure run",
    "specks": "specks run",
    "inspect": "inspect run",
}
BAD_MODELS = [
    "''",
    "/proc/self/mem",
    "LONG",
    "loops/self",
    "nowhere",
    "empty",
    "text.txt",
    "odd-run",
    "run/recipe.json",
    "posterior-run",
    "pipe",
    "images",
]
BAD_MODEL_OPTIONS = [
    "--checkpoint worst",
    "--device tpu",
    "--device cuda:99",
    "--seed -1",
    "--seed 9223372036854775808",
    "--seed 1_0",
    "--seed １",  # a full-width digit
    "--seed x",
    "--data-dir nowhere",
    "--data-dir ''",
    "--data-dir text.txt",
    "--drawings=yes",
    "--data-dir loops/self",
    "--data-dir LONG",
    "--no-such-option",
]
BAD_DATA = [
    "--data ''",
    "--data nowhere",
    "--data text.txt",
    "--data pipe",
    "--data empty",
    "--data torn.zip",
    "--data loops",
    "--data loops/self",
    "--data LONG",
    "--split most",
    "--classes nine",
    "--classes 2,2",
    "--invert",
    "--data images --split test",
]
WITH_DATA = ["evaluate", "sample", "repeat", "fewshot", "anomaly measure", "retrieve measure", "inspect"]
# Commands that need arguments.
BARE = [
    "train",
    "finetune",
    "evaluate",
    "verdict",
    "sample",
    "repeat",
    "fewshot",
    "classify",
    "anomaly watch",
    "anomaly keyed",
    "anomaly batch",
    "anomaly accept",
    "anomaly measure",
    "calibrate",
    "retrieve search",
    "retrieve measure",
    "specks",
    "inspect",
    "report",
    "export",
    "serve",
]
# Arguments, one line each.
OTHERS = {
    "train": """
        digits --no-verdict --steps 0
        ''
        digits --out ''
        digits --data ''
        digits --set data.name=
        digits --data ' '
        digits --group g
        digits --set data.columns=['a']
        digits --set data.format=semicolon
        images --data images --group g
        digits --data nowhere
        digits --data pipe
        table --data rows.csv --group nobody
        table --data rows.csv --group
        table --data letters.csv --group g --skip-bad
        digits --skip-bad=1
        table --data rows.csv --set data.format=pipes
        table --data rows.csv --set data.format=3
        table --data rows.csv --set data.columns=[z]
        table --data rows.parquet
        table --data stray.csv --group g
        table --data long.csv
        table --data null.parquet
        digits --out pipe
        digits --out /dev/null
        digits --out loops/self
        digits --data loops/self
        digits --out LONG
        digits --data LONG
        digits --set data.drawings=3
        table --set missing=guess
        digits --set train.steps=1e400
        digits --set 'train.learning_rate='
        digitz
        digits extra
        text.txt
        nowhere.toml
        odd.toml
        deep.toml
        pipe.toml
        digits --set
        digits --set train
        digits --set train.batch=0
        digits --set train.batch=1_0.5
        digits --set train.batch=1000000000000
        digits --set train.batch=1e12
        digits --set train=[1]
        digits --set flow.couplings=100000000
        digits --set flow.units=0
        digits --set flow.filters=99999999
        digits --set train.shift=1000000
        digits --set train.shift=8
        digits --set train.learning_rate=inf
        digits --set train.learning_rate=nan
        digits --set train.seed=-1
        digits --set flow.kind=cnn
        digits --set process.dof=1
        digits --set process.correlation=1
        digits --set process.variance=0
        digits --set data.name=nowhere
        digits --set data.name=pipe
        digits --set data.name=text.txt
        digits --set data.name=loops
        digits --set data.name=torn.zip
        digits --set data.name=empty
        digits --set data.classes=[x]
        digits --set data.size=99999
        digits --set a.b.c=1
        digits --set train.steps=[[[[[[[[[[[[[[[[
        digits --set x=1
        digits --set alpha=2
        table --set data.name=rows.csv --set data.group=nobody
        table --set data.name=rows.csv
        table --set data.name=letters.csv --set data.group=g
        digits --steps 0
        digits --steps 1.5
        digits --steps 1_000
        digits --steps １０
        digits --steps 99999999999999999999
        digits --minutes 0
        digits --minutes -1
        digits --minutes nan
        digits --minutes inf
        digits --minutes 1_0
        digits --steps 1 --minutes 1
        digits --save-every -1
        digits --save-every inf
        digits --validate 1
        digits --validate -2
        digits --validate 10000000000
        digits --out text.txt
        digits --out run
        digits --resume --out empty
        digits --resume --out nowhere
        digits --seed -1
        digits --seed 1_0
        digits --device mps
        omniglot --data-dir nowhere
        digits --resume --out run --set flow.units=99
    """,
    "finetune": """
        run --out new --no-verdict --steps 0
        run --out new --data nowhere
        run --out new --minutes nan
        run --out new --minutes 0
        run --out new --save-every nan
        run --out pipe
        run --out new --way nan
        run --out text.txt
        run --out new --way 1
        run --out new --way 99
        run --out new --shot 0
        run --out new --shot 9999
        run --out new --episodes 0
        run --out new --generative -1
        run --out new --generative nan
        run --out new --trials 1
        run --out new --trials -1
        run --out new --split most
        run --out new --split most --trials 0
        run --out new --set flow.units=99
        run --out new --steps 0
        run --out new --resume
        run --out run
        run --out new --set data.name=nowhere
    """,
    "evaluate": """
        run --sets 0
        run --set-size -1
        run --sets nan
        run --sets 1
        run --sets 1000000000000
        run --set-size 0
        run --sets x
        run extra
    """,
    "verdict": """
        run --elements 0
        run --elements 1000000000000
        run --elements x
        run --split train
        run --split trainval
        run --split other
        run extra
    """,
    "sample": """
        run --given images/a/bad.png --skip-bad
        run --given ''
        run --given text.txt --skip-bad
        run --samples -1
        run --temperature inf
        run --prefixes nan
        run --skip-bad=1
        run --given rows.csv
        run --samples 0
        run --samples 1000000000000000000
        run --samples 1_0
        run --sets 0
        run --sets 99
        run --set-size 0
        run --set-size 99999
        run --prefixes x
        run --prefixes 5-1
        run --prefixes 0-99999999
        run --prefixes 99
        run --prefixes 1_0
        run --prefixes ２
        run --temperature -1
        run --temperature nan
        run --prior --given images/a
        run --prior --sets 2
        run --given nowhere
        run --given empty
        run --given images/a --data images
        run --given pipe
    """,
    "repeat": """
        run --given text.txt --skip-bad
        run --repeats x
        run --repeats 0
        run --samples nan
        run --temperature inf
        run --samples 0
        run --samples 1000000000
        run --given nowhere
        run --set-size 0
        run --temperature -1
        run --given images/a --split test
    """,
    "fewshot": """
        run --noise=1
        run --views=1
        run --way nan
        run --shot 0-99999999
        run --trials 0
        run --way 1
        run --way x
        run --shot 0
        run --shot
        run --trials 1
        run --trials 10000000000
        run --threshold 2
        run --threshold nan
        run --rotated-decoys --no-rotations
        run --way 1_0
    """,
    "classify": """
        run images/a/0.png --support images --none-rate 2
        run images/a/0.png --support images --none-rate nan
        run images/a/0.png --support images --none-rate -1
        run text.txt --support images --skip-bad
        run images/a/0.png --support images --invert=1
        run images/a/0.png --support images --views=1
        run images/a/0.png --support images --temperature nan
        run images/a/0.png --support images --calibrate --data nowhere
        run images/a/0.png --support images/a/0.png
        run images/a/0.png
        run --support images
        run nowhere.png --support images
        run images/a/0.png --support nowhere
        run images/a/0.png --support empty
        run pipe --support images
        run images/a/0.png --support images --prior x
        run images/a/0.png --support images --prior 1
        run images/a/0.png --support images --prior 0.5,0.1_5
        run images/a/0.png --support images --prior 2,-1
        run images/a/0.png --support images --temperature 0
        run images/a/0.png --support images --data images
        run images/a/0.png --support images --calibrate --temperature 2
        run text.txt --support images
    """,
    "anomaly watch": """
        run --classes 2,x
        run --set-class x
        run --set-class 2 --classes 5,8
        run images/a --set-class 2 --threshold 0
        run images/a --within
        run ''
        run '' --skip-bad --threshold 0
        run images/a --typical ''
        run images/a --state ''
        run images/a --within --count-all --threshold 0
        run images/a --within --count-all --data images
        run images/a --count-all=1
        run images/a --one-set=1
        run images/a --group
        run images/a --json=1
        run images/a --explain=1
        run text.txt --skip-bad --threshold 0
        run images/a --invert=1
        run rows.csv --threshold 0
        run /dev/zero --threshold 0
        run images/a --threshold 0 --state /dev/null
        run images/a --threshold 0 --state loops/self
        run loops/self --threshold 0
        run images/a --rate -1
        run images/a --rate inf
        run nowhere
        run empty
        run pipe
        run text.txt
        run - images/a
        run images/a --rate 0
        run images/a --rate 1
        run images/a --rate nan
        run images/a --threshold nan
        run images/a --threshold 0 --rate 0.1
        run images/a --threshold 0 --sets 9
        run images/a --sets 0
        run images/a --sets 1000000000000
        run images/a --set-size 1
        run images/a --set-size 99999999999
        run images/a --typical nowhere
        run images/a --state nowhere/state
        run images/a --state images
        run images/a --state text.txt
        run images/a --data nowhere
        run images/a --sets 5
        run images/a --window 20
        run images/a --half-life 5
        run images/a --offset time
        run images/a --replay
        run images/a --commit-rows 5
        run images/a --commit-seconds 5
    """,
    "anomaly keyed": """
        run rows.csv
        run rows.csv --store
        run rows.csv --store new --rate 2
        run rows.csv --store new --threshold nan
        run rows.csv --store new --threshold 0 --rate 0.1
        run rows.csv --store new --count-all=1
        run rows.csv --store new --data nowhere
        run rows.csv --store new --one-set=1
        run rows.csv --store new --group
        run rows.csv --store new --invert=1
        run text.txt --store new --skip-bad --threshold 0
        run rows.csv --store new --explain=1
        run rows.csv --store new --json=1
        run rows.csv --store new --classes 2
        run images/a --store ''
        run images/a --store loops/self
        run images/a --store dangling
        run images/a --store nowhere/state
        run images/a --store images
        run images/a --store text.txt
        run images/a --store pipe
        run images/a --store run/model.safetensors
        run images/a --store new --window 19
        run images/a --store new --window x
        run images/a --store new --window 0
        run images/a --store new --window 1_000
        run images/a --store new --window 1000000000000
        run images/a --store new --half-life 0
        run images/a --store new --half-life nan
        run images/a --store new --half-life inf
        run images/a --store new --window 20 --half-life 5
        run images/a --store new --commit-rows 0
        run images/a --store new --commit-rows x
        run images/a --store new --commit-seconds -1
        run images/a --store new --commit-seconds nan
        run images/a --store new --offset time
        run images/a --store new --replay
        run images/a --store new --state other
        run images/a --store new --typical images/b
        run images/a --store new --within
        run - images/a --store new
        run nowhere --store new
        run empty --store new
        run --store new
    """,
    "anomaly batch": """
        run --set-class x
        run images/a --classes 2,5
        run images/a --explain --false-discovery-rate 0
        run images/a --json --false-discovery-rate 0
        run images/a --false-discovery-rate 0
        run images/a --false-discovery-rate 2
        run images/a --false-discovery-rate nan
        run images/a --false-discovery-rate 0.1 --rate 0.1
        run images/a --false-discovery-rate 0.1 --threshold 0
        run images/a --data nowhere
        run images/a --count-all=1
        run images/a --one-set=1
        run images/a --group
        run text.txt --skip-bad
        run images/a --invert=1
        run /dev/zero
        run nowhere
        run images/a/0.png
        run images/a --rate 2
        run images/a --sets 1000000000000
        run images/a --threshold inf
    """,
    "anomaly accept": """
        run 1 --state loops/self
        run 1 --state /dev/null
        run 1 --state torn.zip
        run nobody --state state
        run 1 --state odd.state
        run 1
        run --state state
        run 1 --state nowhere
        run 1 --state text.txt
        run 1 --state pipe
        run 1 --state run/model.safetensors
        run 1 --state images
        run 1 --state state --store state
        run 1 --store nowhere
        run 1 --store text.txt
        run 1 --store pipe
        run 1 --store images
        run 1 --store run/model.safetensors
    """,
    "calibrate": """
        run text.txt --skip-bad
        run images --skip-bad=1
        run --group machine
        run images --invert=1
        run rows.csv
        run /dev/zero
        run loops/self
        run nowhere
        run text.txt
        run pipe
        run empty
        run torn.zip
        run loops
        run images extra
        run images --orders 0
    """,
    "anomaly measure": """
        run --sets nan
        run --rotations=1
        run --set-size -1
        run --sets 1
        run --sets 1000000000000
        run --set-size 1
    """,
    "retrieve search": """
        run --query images/a --collection images/b --index pipe
        run --query images/a --collection images/b --index /dev/null
        run --query text.txt --collection images/b --skip-bad
        run --query images/a --collection images/b --invert=1
        run --query images/a --collection images/b --index state
        run
        run --query images/a
        run --query nowhere --collection images/b
        run --query images/a --collection nowhere
        run --query images/a --collection empty
        run --query images/a --collection images/b --top 0
        run --query images/a --collection images/b --top x
        run --query images/a --collection images/b --index text.txt
        run --query pipe --collection images/b
        run --query images/a --collection images/b --index nowhere/index
    """,
    "retrieve measure": """
        run --shot 0-99999999
        run --queries nan
        run --shot 0
        run --shot x
        run --queries 1
        run --queries 1000000000000
    """,
    "specks": """
        run --classes nine
        run --data nowhere
        run --split most
        run --invert
        run --temperature nan
        run --temperature -1
        run --data pipe
        run --samples 1
        run --samples 1000000000000
        run --given 0
        run --given 99999
    """,
    "inspect": """
        run --sets nan
        run --sets 1
        run --sets 1000000000000
    """,
    "demo": """
        --out text.txt/new
        --out pipe/new
        --show=1
        --steps nan
        --out loops/self/new
        extra
        --steps 0
        --steps x
        --seed -1
        --steps 1_0
    """,
    "study": """
        --full-size=1
        --steps nan
        --out pipe
        extra
        --steps 0
        --data nowhere
        --data digits,
        --out text.txt
        --device tpu
        --seed -1
        --data pipe
        --data-dir nowhere
    """,
    "report": """
        run --out pipe
        run --out /dev/null
        run --out rows.csv
        run --out run/model.safetensors
        run --out ''
        loops/self
        pipe
        run --out loops/self/page.html
        nowhere
        empty
        text.txt
        run --out nowhere/page.html
        run --out images
        run extra
    """,
    "page": """
        --port 0 --open --out text.txt
        --port x --open
        --out text.txt
    """,
    "export": """
        run text.txt --onnx
        run new --onnx --int8
        run text.txt
        run rows.csv
        run ''
        run new --half=1
        run pipe
        run /dev/null
        run loops/self/new
        state new
        run
        nowhere new
        run nowhere/new
        run images
        run new --checkpoint worst
        text.txt new
        empty new
        posterior-run new
    """,
    "serve": """
        nowhere
        text.txt
        empty
        images
        pipe
        posterior-run
        LONG
        run run
        run nowhere
        run other=nowhere
        b/c=run
        run --host 0.0.0.0
        run --host nobody.invalid
        run --host ''
        run --port 65536
        run --port -1
        run --port x
        run --token-file nowhere
        run --token-file text.txt
        run --token-file pipe
        run --token-file empty
        run --allow-host 'a b' --port 0
        run --allow-host a:80 --port 0
        run --store text.txt --port 0
        run --store text.txt/x --port 0
        run --max-body 0
        run --max-elements 0
        run --max-waiting 1.5
        run --timeout 0
        run --timeout nan
        run --batching=1
        run --checkpoint worst --port 0
        run --device tpu --port 0
        run --no-such-option
    """,
    "presets": """
        pipe.toml
        /dev/zero
        digitz
        text.txt
        odd.toml
        deep.toml
        digits extra
        --no-such-option
    """,
    "data": """
        --data-dir pipe
        extra
        --data-dir nowhere
        --data-dir text.txt
    """,
}
LINES = [*BARE]
LINES += [f"{command} {rest.strip()}" for command in OTHERS for rest in OTHERS[command].strip().splitlines()]
LINES += [line.replace(" run", f" {bad}", 1) for line in WITH_MODEL.values() for bad in BAD_MODELS]
LINES += [f"{line} {bad}" for line in WITH_MODEL.values() for bad in BAD_MODEL_OPTIONS]
LINES += [f"{WITH_MODEL[command]} {bad}" for command in WITH_DATA for bad in BAD_DATA]
LINES += ["nonsense", "--nonsense", "anomaly nonsense", "retrieve nonsense", "train digits --set ''"]


@pytest.fixture(scope="module")
def prepared(tiny_run, tmp_path_factory):
    """A folder with a run, images of two classes, and files that no command can use."""
    folder = tmp_path_factory.mktemp("malformed")
    before = Path.cwd()
    os.chdir(folder)
    try:
        shutil.copytree(tiny_run, "run")
        make_images({"a": 4, "b": 4}, 8)
        for name in ("empty", "odd-run", "loops/a"):
            Path(name).mkdir(parents=True)
        Path("loops/a/0.png").write_bytes(Path("images/a/0.png").read_bytes())
        Path("loops/a/again").symlink_to("..")
        Path("loops/self").symlink_to("self")
        Path("dangling").symlink_to("not-there")
        Path("text.txt").write_text("not a model, an image or a table")
        Path("torn.zip").write_bytes(b"PK\x03\x04 torn")
        Path("odd-run/recipe.json").write_text(json.dumps([1, 2]))
        Path("odd.toml").write_text("[data]\nname = 3\n")
        Path("deep.toml").write_text("x = " + "[" * 100_000)
        Path("rows.csv").write_text("g,a\nx,1\nx,2\ny,3\ny,4\n")
        Path("stray.csv").write_text('g,a\nx,1\n"x,2\ny,3\n' + "y,4\n" * 30)
        Path("long.csv").write_text("1" * 200_000)
        Path("rows.parquet").write_bytes(b"PAR1 torn PAR1")
        Path("null.parquet").touch()
        watched = bruno.open("run", device="cpu").watch(
            "images/a", Detector(Run("run").model()), state="state"
        )
        with warnings.catch_warnings(), watched:
            warnings.simplefilter("ignore")
            list(watched)
        write(Path("odd.state"), {}, {"kind": "posterior", "model": Run("run").model().fingerprint()})
        Path("letters.csv").write_text("g,a\nx,one\ny,two\n")
        for name in ("pipe", "pipe.toml"):
            os.mkfifo(name)
        shutil.copytree(tiny_run, "posterior-run")
        for path in Path("posterior-run").glob("*.safetensors"):
            path.write_bytes(b"not a checkpoint")
    finally:
        os.chdir(before)
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    found = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {path: (at.st_size, at.st_mtime_ns) for path, at in ((path, os.lstat(path)) for path in found)}


def test_the_table_covers_every_command_with_at_least_200_lines():
    assert OTHERS.keys() == COMMANDS.keys()
    assert len(set(LINES)) >= 200


def options() -> list[tuple[str, tuple[str, ...]]]:
    """Each command and each of its options, by all of its names."""
    found = []
    for name in COMMANDS:
        parser = get_command(app)
        for word in name.split():
            parser = parser.commands[word]
        found += [
            (name, (*parameter.opts, *parameter.secondary_opts))
            for parameter in parser.params
            if parameter.param_type_name == "option" and parameter.name != "help"
        ]
    return found


@pytest.mark.parametrize(("command", "names"), options(), ids=lambda part: str(part))
def test_the_table_has_a_line_with_every_option(command, names):
    lines = [shlex.split(line) for line in LINES if line.startswith(f"{command} ")]
    assert any(word.split("=")[0] in names for line in lines for word in line)


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_a_malformed_line_has_exit_code_2_and_one_line_and_writes_nothing(
    line, prepared, monkeypatch, capsys
):
    monkeypatch.chdir(prepared)
    before = contents(prepared)
    ended = run_main(capsys, *shlex.split(line.replace("LONG", "a" * 5000)))  # too long for a file name
    errors = [shown for shown in ended.errors.splitlines() if not shown.startswith("warning: ")]
    assert ended.code == 2, ended
    assert len(errors) == 1, ended.errors
    assert errors[0].startswith("error: ")
    assert contents(prepared) == before
