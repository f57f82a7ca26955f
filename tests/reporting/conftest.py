import io

import pytest
from PIL import Image


@pytest.fixture
def figures(monkeypatch):
    """Figures in the order in which they were rendered, to look at their axes."""
    from matplotlib.figure import Figure

    rendered, savefig = [], Figure.savefig

    def record(figure, *arguments, **options):
        rendered.append(figure)
        return savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return rendered


@pytest.fixture(scope="session")
def decode():
    """PNG bytes to an image."""
    return lambda png: Image.open(io.BytesIO(png))
