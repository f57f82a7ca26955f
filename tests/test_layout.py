"""The map of the package: data flows down this list, imports only point up it."""

import ast
from pathlib import Path

import pytest

import bruno

SOURCE = Path(bruno.__file__).parent
ORDER = [
    "bruno.threads",
    "bruno.provenance",
    "bruno.files",
    "bruno.signals",
    "bruno.data.archives",
    "bruno.data.examples",
    "bruno.data.synthetic",
    "bruno.data.readers",
    "bruno.data.elements",
    "bruno.data.datasets",
    "bruno.data.sampling",
    "bruno.data.augmentation",
    "bruno.data",
    "bruno.config",
    "bruno.flow.bijection",
    "bruno.flow.networks",
    "bruno.flow.coupling",
    "bruno.flow.realnvp",
    "bruno.flow.preprocessing",
    "bruno.flow",
    "bruno.process.checks",
    "bruno.process.evidence",
    "bruno.process.distributions",
    "bruno.process.coefficients",
    "bruno.process.step_density",
    "bruno.process.processes",
    "bruno.process",
    "bruno.model",
    "bruno.checkpoint",
    "bruno.weights",
    "bruno.training.distributed",
    "bruno.training.objective",
    "bruno.training.schedule",
    "bruno.training.cuda_graph",
    "bruno.training.trainer",
    "bruno.training.log",
    "bruno.training.clock",
    "bruno.training.checkpoints",
    "bruno.training.run",
    "bruno.training",
    "bruno.tasks.progress",
    "bruno.tasks.metrics",
    "bruno.tasks.evaluation",
    "bruno.tasks.scorers",
    "bruno.tasks.few_shot",
    "bruno.tasks.classification",
    "bruno.tasks.generation",
    "bruno.tasks.familiarity",
    "bruno.tasks.anomaly",
    "bruno.tasks.anomaly_benchmark",
    "bruno.tasks.retrieval",
    "bruno.tasks.analysis",
    "bruno.tasks.stability",
    "bruno.tasks",
    "bruno",
    "bruno.reporting.images",
    "bruno.reporting.plots",
    "bruno.reporting.results",
    "bruno.reporting",
    "bruno.reporting.images",
    "bruno.reporting.figure",
    "bruno.reporting.plots",
    "bruno.reporting.element_plots",
    "bruno.reporting.results",
    "bruno.reporting.page",
    "bruno.cli.options",
    "bruno.cli.opening",
    "bruno.cli.training",
    "bruno.cli.finetuning",
    "bruno.cli.listing",
    "bruno.cli.pages",
    "bruno.cli.generation",
    "bruno.cli.classification",
    "bruno.cli.judging",
    "bruno.cli.streams",
    "bruno.cli.retrieval",
    "bruno.cli.inspection",
    "bruno.cli.exporting",
    "bruno.cli.demo",
    "bruno.cli",
    "bruno.__main__",
]


def name_of(path: Path) -> str:
    parts = ("bruno", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def test_every_module_has_its_place():
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_point_up(module):
    tree = ast.parse(MODULES[module].read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    above = set(ORDER[: ORDER.index(module)])
    ours = {name for name in imported if name.split(".")[0] == "bruno"}
    assert ours <= above, f"{module} imports {ours - above}, which stand below it"
