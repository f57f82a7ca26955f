"""The layout of the package: data flows down this list, and imports only point up it."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import bruno

SOURCE = Path(bruno.__file__).parent
# A package has the place of the last module that its __init__ imports.
LAYOUT = """
    bruno.threads bruno.lazy_open
    bruno
    bruno.text bruno.extras bruno.limits bruno.provenance bruno.files bruno.signals bruno.devices
    bruno.kinds bruno.arrays
    bruno.checks bruno.settings bruno.config
    bruno.data.archives bruno.data.examples bruno.data.sampling bruno.data.augmentation bruno.data.synthetic
    bruno.data.synthetic_tiles bruno.data.related_columns
    bruno.data.drawings bruno.data.images bruno.data.table_rows bruno.data.table_format bruno.data.columns
    bruno.data.frames bruno.data.tables bruno.data.formats bruno.data.cifar
    bruno.data.quality bruno.data.file_readers bruno.data.reader bruno.data.datasets bruno.data.published
    bruno.data.loading bruno.data
    bruno.flow.bijection bruno.flow.dropout bruno.flow.networks bruno.flow.compression bruno.flow.spline
    bruno.flow.coupling bruno.flow.mixing bruno.flow.realnvp bruno.flow.preprocessing
    bruno.flow.imputation bruno.flow
    bruno.process.checks bruno.process.evidence bruno.process.distributions bruno.process.coefficients
    bruno.process.step_density bruno.process.element_density bruno.process.exchangeable
    bruno.process.processes bruno.process
    bruno.components bruno.known_models bruno.posterior bruno.model bruno.checkpoint bruno.weights
    bruno.onnx.formulas bruno.onnx.functions bruno.onnx.export bruno.onnx bruno.page.files
    bruno.page.symbols bruno.page.build bruno.page
    bruno.training.distributed bruno.training.cuda_graph bruno.training.muon bruno.training.schedule
    bruno.training.objective bruno.training.trainer bruno.training.step_cost bruno.training.log
    bruno.training.checkpoints bruno.training.clock bruno.training.run bruno.training
    bruno.reporting bruno.reporting.results bruno.reporting.figure
    bruno.reporting.images bruno.reporting.plots bruno.reporting.scores bruno.reporting.timelines
    bruno.reporting.element_plots bruno.reporting.explanation_plots bruno.reporting.outlier_plots
    bruno.reporting.page
    bruno.tasks.progress bruno.tasks.metrics bruno.tasks.evaluation bruno.tasks.scorers bruno.tasks.episodes
    bruno.tasks.few_shot
    bruno.tasks.conformal bruno.tasks.robust_evidence bruno.tasks.stream_evidence
    bruno.tasks.batch_criteria bruno.tasks.groups
    bruno.tasks.calibration
    bruno.tasks.temperature bruno.tasks.classification
    bruno.tasks.null_distributions bruno.tasks.set_scores bruno.tasks.explanation bruno.tasks.generation
    bruno.tasks.specks bruno.tasks.drift bruno.tasks.anomaly bruno.tasks.detector bruno.tasks.stream_summary
    bruno.tasks.attribution bruno.tasks.planted_faults bruno.tasks.contamination bruno.tasks.planted_outliers
    bruno.tasks.anomaly_benchmark bruno.tasks.familiarity bruno.tasks.index
    bruno.tasks.retrieval bruno.tasks.analysis bruno.tasks.stability bruno.tasks bruno.streams.encoder
    bruno.streams.evidence bruno.streams.densities bruno.streams.fast_densities bruno.streams.codec
    bruno.streams.store bruno.streams.rows bruno.streams.sets bruno.streams.window bruno.streams.judgements
    bruno.streams.updates bruno.streams bruno.recipe_data
    bruno.trained.arrivals bruno.trained.base bruno.trained.data bruno.trained.calibration
    bruno.trained.folders bruno.trained.evaluation bruno.trained.sample_files bruno.trained.generation
    bruno.trained.classification bruno.trained.states
    bruno.trained.explanation bruno.trained.outliers bruno.trained.stream_elements
    bruno.trained.watch bruno.trained.batch bruno.trained.detection
    bruno.trained.keyed bruno.trained.keyed_watch bruno.trained.retrieval bruno.trained.verdict
    bruno.trained.jobs bruno.trained.files bruno.trained bruno.fit bruno.finetuning bruno.fit_rows
    bruno.sklearn.base
    bruno.sklearn.sample bruno.sklearn.classifier bruno.sklearn.outliers bruno.sklearn.transformer
    bruno.sklearn bruno.river bruno.ray.evidence bruno.ray.workers bruno.ray.jobs bruno.ray
    bruno.reporting.summaries.base bruno.reporting.summaries.evaluation
    bruno.reporting.summaries.generation
    bruno.reporting.summaries.classification bruno.reporting.summaries.detection
    bruno.reporting.summaries.explanation bruno.reporting.summaries.outliers
    bruno.reporting.summaries.retrieval
    bruno.reporting.summaries.analysis bruno.reporting.summaries bruno.demo
    bruno.serving.settings bruno.serving.steps bruno.serving.batching bruno.serving.sets bruno.serving.jobs
    bruno.serving.decoding bruno.serving.metrics bruno.serving.service bruno.serving.schemas
    bruno.serving.guard bruno.serving.http bruno.serving.documentation bruno.serving.static
    bruno.serving.routes bruno.serving.app bruno.serving.server bruno.serving
    bruno.cli bruno.cli.names bruno.cli.options bruno.cli.output bruno.cli.anomaly_options
    bruno.cli.anomaly bruno.cli.calibrate bruno.cli.classify bruno.cli.data bruno.cli.page bruno.cli.demo
    bruno.cli.evaluate bruno.cli.export bruno.cli.fewshot bruno.cli.finetune bruno.cli.inspect
    bruno.cli.presets bruno.cli.repeat bruno.cli.report bruno.cli.retrieve bruno.cli.sample
    bruno.cli.serve bruno.cli.specks bruno.cli.study bruno.cli.train bruno.cli.verdict
    bruno.cli.main bruno.__main__
"""
ORDER = LAYOUT.split()
# Names that the package imports when they are used, and their modules.
LAZY = {f"bruno.{name}": f"bruno.{home}" for name, home in bruno._HOME.items()}
# A type that is only named: a posterior is a value of its model.
NAMED = {"bruno.posterior": {"bruno.model"}}


def name_of(path: Path) -> str:
    parts = ("bruno", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def functions_of(module: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree_of(module)) if isinstance(node, kinds)]


def imports_of(module: str) -> set[str]:
    """The modules of the package that a module imports, and the packages that run before them."""
    names = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bruno"
        ):
            names.add(f"bruno.{node.attr}")
    found = set()
    for name in names:
        parts = LAZY.get(name, name).split(".")
        if parts[0] == "bruno":
            found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & MODULES.keys()
    return found - {module}


def test_every_module_has_its_place():
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("module", [name for name in ORDER if name != "bruno"])
def test_imports_only_point_up(module):
    above = set(ORDER[: ORDER.index(module)])
    own_packages = {name for name in MODULES if module.startswith(f"{name}.")}
    below = imports_of(module) - above - own_packages - NAMED.get(module, set())
    assert not below, f"{module} imports {below}, which are below it"


def hidden_imports(tree: ast.Module) -> list[str]:
    """Imports of the package that `imports_of` does not see: relative ones, and those by another name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found += [f"import {one.name} as {one.asname}" for one in node.names if is_alias(one)]
    return found


def is_alias(one: ast.alias) -> bool:
    """Whether an import gives the package another name; an alias of a module is seen."""
    return one.name == "bruno" and one.asname not in (None, "bruno")


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_the_package_are_visible(module):
    assert hidden_imports(tree_of(module)) == []


@pytest.mark.parametrize("code", ["from . import fit", "from .fit import train", "import bruno as b"])
def test_an_invisible_import_is_found(code):
    assert hidden_imports(ast.parse(code)) == [code]


def test_a_name_of_the_package_is_an_import_of_its_module():
    assert "bruno.fit" in imports_of("bruno.cli.train")  # bruno.train
    assert "bruno.trained" in imports_of("bruno.cli.options")  # bruno.open


def test_the_list_in_contributing_has_this_order():
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    rooms = page.split("src/bruno/\n")[1].split("```")[0].splitlines()
    names = [name for room in rooms for name in re.split(" {2,}", room.strip())[0].split()]
    modules = [f"bruno.{name.removesuffix('.py').rstrip('/').replace('/', '.')}" for name in names]
    listed = [module for module in modules if module in MODULES]  # presets/ has no modules
    assert listed == sorted(listed, key=ORDER.index)
    assert {name for name in MODULES if name.count(".") == 1} - {"bruno.__main__"} <= set(listed)


@pytest.mark.parametrize(
    "command", [["-c", "import bruno"], ["-m", "bruno", "--help"], ["-m", "bruno", "--version"]]
)
def test_torch_is_imported_only_to_compute(command):
    code = [sys.executable, "-X", "importtime", *command]
    loaded = subprocess.run(code, capture_output=True, text=True, check=True).stderr
    modules = {line.split("|")[-1].strip() for line in loaded.splitlines()}
    assert not modules & {"torch", "numpy", "matplotlib", "sklearn", "PIL", "fastapi", "uvicorn"}


@pytest.mark.slow
def test_packages_are_attributes_of_the_package():
    code = "import bruno; bruno.trained.export, bruno.onnx, bruno.provenance, bruno.weights.pretrained_names"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_optional_packages_are_imported_only_where_they_are_used():
    optional = "{'matplotlib', 'sklearn', 'pooch', 'pyarrow', 'jinja2', 'typer', 'rich', 'scipy', 'onnx'}"
    code = "import bruno.reporting.summaries, sys; print(sys.modules.keys() & " + optional + ")"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_functions_fit_on_a_screen():
    """At most 60 lines, with the docstring."""
    lines = {
        f"{module}.{function.name}": function.end_lineno - function.lineno + 1
        for module in MODULES
        for function in functions_of(module)
    }
    assert {name: count for name, count in lines.items() if count > 60} == {}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("bruno.cli.")])
def test_commands_are_thin(module):
    """A function has at most 10 parameters."""
    for function in functions_of(module):
        assert len(function.args.args) + len(function.args.kwonlyargs) <= 10, function.name
