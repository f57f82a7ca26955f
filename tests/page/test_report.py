"""The page of results in a narrow window."""

import pytest
from visitor import opened

from bruno.reporting.page import write_page
from bruno.reporting.results import Result

pytestmark = pytest.mark.slow
WIDE = Result("wide", "Wide", {}, tuple(f"column {i}" for i in range(12)), (("99.7 ± 0.3",) * 12,) * 3)
LONG = Result("long", "Long", {}, ("element", "note"), (("x" * 300, "words " * 60),) * 3)
FOLDED = Result("folded", "Folded", {}, WIDE.columns, WIDE.rows * 20)


def test_tables_scroll_in_a_narrow_window_and_cells_do_not_overlap(browser, tmp_path):
    path = write_page(tmp_path / "report.html", "Title", "Lead", [WIDE, LONG, FOLDED])
    page = opened(browser, path.as_uri(), viewport={"width": 400, "height": 800})
    page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == 400  # only the tables scroll
    scrolled = page.evaluate(
        """[...document.querySelectorAll('.scroll')].map((around) => {
          around.scrollLeft = 1e6;
          const right = (element) => element.getBoundingClientRect().right;
          return [around.scrollLeft, Math.abs(right(around.querySelector('table')) - right(around))];
        })"""
    )
    assert len(scrolled) == 3
    assert all(left > 0 and beyond <= 1 for left, beyond in scrolled)  # up to the last column
    cells = "[...document.querySelectorAll('td')]"
    assert page.evaluate(f"{cells}.every((cell) => cell.scrollWidth <= cell.clientWidth)")
    page.context.close()
