"""Commands only parse options, call the library and render its results."""

import ast
import inspect
from pathlib import Path

import pytest
from typer.main import get_command

import bruno
from bruno import Trained
from bruno.cli.main import COMMANDS, app
from bruno.demo import demo
from bruno.page import serve_page, write_page
from bruno.reporting.page import report
from bruno.serving import Limits, create_app, serve
from bruno.tasks import stability_studies
from bruno.trained import export

# The functions behind each command. Options have the names of their parameters, except:
CALLS = {
    "demo": (demo,),
    "train": (bruno.train,),
    "finetune": (bruno.open, bruno.finetune),
    "evaluate": (bruno.open, Trained.evaluate),
    "verdict": (bruno.open, Trained.verdict),
    "sample": (bruno.open, Trained.write_samples),
    "repeat": (bruno.open, Trained.sample_repeats),
    "fewshot": (bruno.open, Trained.few_shot),
    "classify": (bruno.open, Trained.classify),
    "anomaly watch": (
        bruno.open,
        Trained.detector,
        Trained.watch,
        Trained.synthetic_stream,
    ),
    "anomaly keyed": (bruno.open, Trained.detector, Trained.watch_keys),
    "anomaly batch": (bruno.open, Trained.judge_batch, Trained.synthetic_stream),
    "anomaly accept": (bruno.open, Trained.accept, Trained.accept_in_store),
    "calibrate": (bruno.open, Trained.calibrate),
    "anomaly measure": (bruno.open, Trained.measure_anomaly),
    "retrieve search": (bruno.open, Trained.retrieve),
    "retrieve measure": (bruno.open, Trained.measure_retrieval),
    "specks": (bruno.open, Trained.measure_specks),
    "inspect": (bruno.open, Trained.inspect),
    "study": (stability_studies,),
    "report": (report,),
    "export": (export,),
    "page": (write_page, serve_page),
    "serve": (serve, create_app, Limits),
    "data": (bruno.data.dataset_status,),
    "presets": (bruno.load_recipe,),
}
RENAMED = {
    "model": "path",
    "preset": "recipe",
    "validate": "validation_sets",
    "allow_host": "hosts",
    "token_file": "token",
    "max_body": "body",
    "max_elements": "elements",
    "max_waiting": "waiting",
    "timeout": "seconds",
}
RENDERED = {"as_json", "show", "help"}  # options about output
OTHERWISE = {
    "train": {"verdict"},  # Trained.verdict, like that of fine-tuning
    "finetune": {"verdict"},
    "report": {"model"},  # the folder
    "retrieve search": {"seed"},  # nothing is random
    "anomaly accept": {"seed"},
}
# Settings of a recipe are keyword arguments of `bruno.train` and `bruno.finetune`.
SETTINGS = {"settings", "steps", "minutes", "seed", "data", "group", "skip_bad"}


def test_every_command_has_its_library_calls_listed():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", CALLS)
def test_every_option_is_a_parameter_of_the_library(command):
    parser = get_command(app)
    for word in command.split():
        parser = parser.commands[word]
    options = {parameter.name for parameter in parser.params} - RENDERED - OTHERWISE.get(command, set())
    known = {name for call in CALLS[command] for name in inspect.signature(call).parameters}
    if "settings" in known:
        options -= SETTINGS
    assert {name for name in options if name not in known and RENAMED.get(name) not in known} == set()


@pytest.mark.parametrize(
    "path", sorted(Path(bruno.__file__).parent.glob("cli/*.py")), ids=lambda path: path.stem
)
def test_commands_do_not_compute(path):
    """They import no tensors or arrays, no model internals and no private names."""
    forbidden = {"torch", "numpy", "PIL", "matplotlib", "bruno.model", "bruno.checkpoint", "bruno.weights"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules, names = [alias.name for alias in node.names], []
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module], [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            assert module not in forbidden
            assert not module.startswith(("torch.", "bruno.flow", "bruno.process"))
        assert not any(name.startswith("_") for name in names)
