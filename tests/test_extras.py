"""What happens if a package of an extra is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from bruno.cli.main import _failed
from bruno.data.tables import read_parquet
from bruno.extras import MissingPackageError, imports_of

HIDDEN = """
import sys
hidden = sys.argv.pop(1)
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from bruno.__main__ import main
main()
"""
EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_error_names_the_package_and_the_extra():
    named = pytest.raises(MissingPackageError, match=r"pictures need matplotlib: .*bruno\[plots\]")
    with named as caught, imports_of("plots", "pictures"):
        raise ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_on_the_command_line_it_is_one_line_with_exit_code_2(capsys):
    assert _failed(MissingPackageError("the digits need scikit-learn: pip install 'bruno[data]'"), {}) == 2
    assert capsys.readouterr().err == "error: the digits need scikit-learn: pip install 'bruno[data]'\n"


def test_the_package_that_reads_parquet_is_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"machines\.parquet` needs pyarrow: .*bruno\[data\]"):
        read_parquet(tmp_path / "machines.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "extra", "line"),
    [
        ("rich", "cli", "--help"),
        ("sklearn", "data", "train digits --steps 3"),
        ("pooch", "data", "train omniglot --steps 3 --data-dir ."),
        ("matplotlib", "plots", f"sample omniglot-small --given {EXAMPLES}/known/a"),
        ("matplotlib", "plots", f"anomaly watch omniglot-small {EXAMPLES}/stream"),
        ("fastapi", "serve", "serve omniglot-small"),
        ("httptools", "serve", "serve omniglot-small"),
        ("pyarrow", "data", "train table --data machines.parquet"),
        ("onnx", "onnx", "export omniglot-small out --onnx"),
    ],
)
def test_commands_name_the_extra_that_is_missing(package, extra, line, tmp_path, monkeypatch):
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path))
    (tmp_path / "machines.parquet").touch()
    program = [sys.executable, "-c", HIDDEN, package, *line.split()]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert f"pip install 'bruno[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
