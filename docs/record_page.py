"""Record the page in use, by mouse in Chromium, as an animated WebP: `python docs/record_page.py`.

Needs the built page (`make page`), Playwright and a Chromium. What it draws are symbols of its own.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

from bruno.data.synthetic import smooth_curve, vary_strokes
from bruno.page import serve_page, write_page
from bruno.page.symbols import SYMBOLS

HEART = (
    ((0.50, 0.34), (0.34, 0.20), (0.18, 0.34), (0.28, 0.60), (0.50, 0.82)),
    ((0.50, 0.34), (0.66, 0.20), (0.82, 0.34), (0.72, 0.60), (0.50, 0.82)),
)
BOLT = (((0.62, 0.15), (0.36, 0.50)), ((0.36, 0.50), (0.64, 0.50)), ((0.64, 0.50), (0.38, 0.86)))
SIZE = {"width": 920, "height": 640}
QUALITY = 70
POINTER = """() => {
    const dot = document.createElement("div");
    dot.id = "pointer";
    Object.assign(dot.style, {
        position: "fixed", width: "18px", height: "18px", margin: "-9px", borderRadius: "50%",
        background: "rgb(232 89 12 / 55%)", zIndex: 9, pointerEvents: "none",
    });
    document.body.append(dot);
}"""


class Recorder:
    """A mouse whose pointer is shown, and the frames with their durations in milliseconds."""

    def __init__(self, page: Page) -> None:
        self.page, self.random = page, np.random.default_rng(4)
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []
        page.evaluate(POINTER)

    def keep(self, milliseconds: int) -> None:
        """Show the page as it is now."""
        self.frames.append(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))
        self.durations.append(milliseconds)

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.page.mouse.move(x, y)
        place = "([x, y]) => Object.assign(pointer.style, { left: `${x}px`, top: `${y}px` })"
        self.page.evaluate(place, [x, y])

    def draw(self, pad: Locator, strokes: Any, frames: int = 3) -> None:
        """Draw a symbol as a hand does: each time a little different."""
        box = pad.bounding_box()
        assert box
        for points in vary_strokes([np.array(stroke) for stroke in strokes], self.random):
            curve = smooth_curve(points, 8) * [box["width"], box["height"]] + [box["x"], box["y"]]
            self.move(*curve[0])
            self.page.mouse.down()
            for i, place in enumerate(curve[1:], 1):
                self.move(*place)
                if i % -(-len(curve) // frames) == 0:
                    self.keep(90)
            self.page.mouse.up()
            self.keep(90)

    def click(self, selector: str) -> None:
        """Click an element."""
        box = self.page.locator(selector).bounding_box()
        assert box
        self.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.keep(350)
        self.page.mouse.down()
        self.page.mouse.up()

    def wait(self, panel: str, milliseconds: int) -> None:
        """Wait for the model, then show its answer."""
        self.page.wait_for_timeout(600)  # until the pen has rested
        self.page.wait_for_selector(f"#{panel}[aria-busy=false]")
        self.page.wait_for_timeout(400)  # for fades
        self.keep(milliseconds)

    def write(self, path: Path) -> None:
        """Write the frames as a WebP that repeats."""
        first, *others = self.frames
        options = {"duration": self.durations, "loop": 0, "quality": QUALITY, "method": 6}
        first.save(path, save_all=True, append_images=others, **options)


def use(recorder: Recorder) -> None:
    """Visit all four panels."""
    page = recorder.page
    recorder.wait("more", 1500)
    for i, pause in enumerate((1300, 2200)):
        recorder.draw(page.locator("#more .pad canvas").nth(i), HEART)
        recorder.wait("more", pause)
    recorder.click("#tab-apart")
    recorder.wait("apart", 1000)
    for symbol, pause in ((SYMBOLS["fork"], 1500), (BOLT, 2000)):
        page.locator(".query .clear").click()
        recorder.draw(page.locator(".query canvas"), symbol)
        recorder.wait("apart", pause)
    recorder.click("#tab-odd")
    recorder.wait("odd", 1900)
    recorder.click("#tab-forget")
    recorder.wait("forget", 400)
    box = page.locator("#forget input").bounding_box()
    assert box
    for share in (3 / 7, 0.02, 1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 0.98):
        recorder.move(box["x"] + 8 + share * (box["width"] - 16), box["y"] + box["height"] / 2)
        page.mouse.down()
        recorder.wait("forget", 450)
    page.mouse.up()
    recorder.keep(2500)


def main() -> None:
    """Parse the options, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "page.webp")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    arguments = parser.parse_args()
    addresses: Queue[str] = Queue()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_page(folder)
        serving = {"args": (folder,), "kwargs": {"ready": addresses.put}, "daemon": True}
        threading.Thread(target=serve_page, **serving).start()
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, reduced_motion="reduce")
        page.add_init_script("let x = 1; Math.random = () => (x = (x * 48271) % 2147483647) / 2147483647;")
        page.goto(addresses.get(timeout=60))
        page.wait_for_selector("#more[aria-busy=false]", timeout=180_000)
        recorder = Recorder(page)
        use(recorder)
        browser.close()
    recorder.write(arguments.out)
    seconds, size = sum(recorder.durations) / 1000, arguments.out.stat().st_size
    print(f"{arguments.out}: {len(recorder.frames)} frames, {seconds:.0f} s, {size:,} bytes")


if __name__ == "__main__":
    main()
