"""What a visitor of the page does."""

import threading
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from itertools import pairwise

from bruno.page.files import PageHandler

ZIGZAG = [(0.2, 0.2), (0.8, 0.3), (0.2, 0.6), (0.8, 0.8)]
CORNER = [(0.3, 0.2), (0.3, 0.8), (0.8, 0.8)]
CROSSED_CIRCLE = [
    (0.5, 0.1),
    (0.85, 0.3),
    (0.85, 0.7),
    (0.5, 0.9),
    (0.15, 0.7),
    (0.15, 0.3),
    (0.5, 0.1),
    (0.5, 0.9),
]


def opened(browser, site, **context):
    """The page in a new window; its problems and requests are recorded."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(180_000)
    page.problems, page.addresses = [], []
    page.on("pageerror", lambda error: page.problems.append(error))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("request", lambda request: page.addresses.append(request.url))
    page.goto(site)
    return page


@contextmanager
def served(folder, handler: type[PageHandler]):
    """The address of a folder, served by another handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def open_panel(page, name):
    page.click(f"[data-panel={name}]")
    page.wait_for_selector(f"#{name}[aria-busy=false]")
    return page.locator(f"#{name}")


def wait_until(page, condition, seconds=180):
    """Wait for a JavaScript expression to hold; the page's own policy forbids Playwright's way."""
    for _ in range(20 * seconds):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not true in {seconds} s: {condition}")


def updated(page, panel, change):
    """Wait for the panel to work on a change and to finish."""
    section = page.locator(f"#{panel}")
    section.evaluate("(root) => root.setAttribute('aria-busy', 'waiting')")
    change()
    page.wait_for_selector(f"#{panel}[aria-busy=false]")


def draw(page, pad, points):
    """Draw a stroke with the mouse."""
    places = _places(pad, points)
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()


def draw_by_touch(page, pad, points):
    """Draw a stroke with a finger."""
    places = _places(pad, points)
    device = page.context.new_cdp_session(page)

    def touch(kind, *touched):
        device.send(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in touched]}
        )

    touch("touchStart", places[0])
    for (x0, y0), (x1, y1) in pairwise(places):
        for k in range(1, 9):
            touch("touchMove", (x0 + (x1 - x0) * k / 8, y0 + (y1 - y0) * k / 8))
    touch("touchEnd")
    device.detach()


def shaky(points, by=0.02):
    """The points, slightly moved."""
    return [(x + by * (-1) ** i, y - by) for i, (x, y) in enumerate(points)]


def _places(pad, points):
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    return [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
