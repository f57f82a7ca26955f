"""The examples in docstrings run, in every module that has some."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import bruno

SOURCE = Path(bruno.__file__).parent
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text("utf-8")]


class Finder(doctest.DocTestFinder):
    """Also finds the examples of functions that the shape checks wrap."""

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object))


def name_of(path: Path) -> str:
    parts = ("bruno", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_examples_give_the_results_they_show(path):
    module = importlib.import_module(name_of(path))
    tests = [test for test in Finder().find(module, module.__name__) if test.examples]
    assert sum(len(test.examples) for test in tests) == path.read_text("utf-8").count(">>> ")
    for test in tests:
        report: list[str] = []
        outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert outcome.failed == 0, "".join(report)
