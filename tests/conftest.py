"""Checks the shapes in the signatures of the package, during tests only."""

import os
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings

pytest_plugins = ["session_fixtures", "missing_packages"]

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("long", settings.get_profile("repeatable"), max_examples=100)
settings.load_profile("repeatable")


def pytest_configure(config):
    """Prepare every process that runs tests: not one that only hands them to workers."""
    if not config.option.markexpr:  # `make test-long`
        settings.load_profile("long")
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        if not jaxtyping.config.jaxtyping_disable:  # $JAXTYPING_DISABLE, as `make test-fast` sets it
            _check_shapes()
        _share_the_cores()


def _check_shapes():
    """Install the checks before any test imports the package, for the whole session."""
    from missing_packages import missing_package

    try:
        import typechecker  # noqa: F401
    except ModuleNotFoundError as error:
        if not missing_package(error):
            raise
    else:
        jaxtyping.install_import_hook(_modules_with_shapes(), "typechecker.check").__enter__()


def _modules_with_shapes():
    """The modules whose signatures have shapes; mypy checks the types of all."""
    source = Path(__file__).parents[1] / "src"
    files = [file for file in source.rglob("*.py") if "from jaxtyping import" in file.read_text("utf-8")]
    return [".".join(file.relative_to(source).with_suffix("").parts) for file in files]


def _share_the_cores():
    """Divide the cores between the workers, before torch is imported, and let compiled functions run."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    import bruno.threads  # noqa: F401, I001
    import torch

    # torch.compile cannot trace the shape checks: compiled functions run without them.
    compile = torch.compile
    torch.compile = lambda *args, **kwargs: _without_shape_checks(compile(*args, **kwargs))


@contextmanager
def _no_shape_checks():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _without_shape_checks(function):
    """The function, with shape checks disabled while it runs."""

    @wraps(function)
    def unchecked(*args, **kwargs):
        with _no_shape_checks():
            return function(*args, **kwargs)

    return unchecked


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Run slow tests without shape checks, which take up to half of their time, unless all tests are run."""
    is_slow = item.get_closest_marker("slow") is not None
    with _no_shape_checks() if is_slow and item.config.option.markexpr else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_command_line():
    """Build the command line once: that takes 30 ms, and two thousand tests use it."""
    import typer.testing

    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", built)
        patch.setattr("typer.testing._get_command", built)
        yield


@pytest.fixture
def without_pictures(monkeypatch):
    """Do not render pictures, which takes half of the time of many commands; tests/reporting renders them."""
    from PIL import Image

    def blank(figure, file, **options):
        Image.new("L", (1, 1)).save(file, "png")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", blank)
    monkeypatch.setattr("matplotlib.figure.Figure.get_layout_engine", lambda figure: None)


@pytest.fixture
def without_shape_checks():
    """Disable shape checks, for tests that pass wrong shapes and types to see the package's own errors."""
    with _no_shape_checks():
        yield


# Whole commands, training runs and streams, clusters, browsers, trained estimators and plots: most of their
# tests take a second or so.
SLOW_FOLDERS = {"cli", "estimators", "cluster", "page"}
SLOW_FILES = {"test_docs.py", "test_fit.py", "test_pretrained.py", "test_trained.py", "test_verdict.py"}
SLOW_FILES |= {"test_run.py", "test_checkpoints.py", "test_clock.py", "test_received_run.py"}
SLOW_FILES |= {"test_keyed.py", "test_commits.py", "test_calibration.py", "test_familiarity.py"}
SLOW_FILES |= {"test_explanation.py", "test_stability.py", "test_plots.py", "test_timelines.py"}
SLOW_FILES |= {"test_element_plots.py", "test_outlier_plots.py", "test_explanation_plots.py"}
SLOW_FILES |= {"test_detection_summary.py", "test_batch_criteria.py", "test_planted.py", "test_drift.py"}
SLOW_FILES |= {"test_elements.py", "test_readers.py", "test_connections.py", "test_export.py"}
SLOW_FILES |= {"test_doctests.py", "test_page.py", "test_drawings.py"}


def pytest_ignore_collect(collection_path, config):
    """Do not import the slow files where they are not run: that takes a third of the time of `test-fast`."""
    return True if "not slow" in config.option.markexpr and _is_slow_file(collection_path) else None


def _is_slow_file(path):
    return path.name in SLOW_FILES or path.name in SLOW_FOLDERS or path.parent.name in SLOW_FOLDERS


def pytest_collection_modifyitems(items):
    """Mark end-to-end tests, and those that need a trained model, as slow."""
    for item in items:
        if _needs_a_model(item) or _is_slow_file(item.path):
            item.add_marker(pytest.mark.slow)
    items.sort(key=_needs_a_model)  # last: while one worker trains the model, the others have work to do


def _needs_a_model(item):
    return not {"digits_run", "digits_model"}.isdisjoint(item.fixturenames)
