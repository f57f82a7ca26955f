"""The first visit, and visits without a network."""

import json
import threading

import pytest
from visitor import opened, served, wait_until

from bruno.page.files import PageHandler

pytestmark = pytest.mark.slow
WEIGHTS = "/omniglot-small.weights.bin.gz"


@pytest.fixture
def slow_host(written):
    """A host that stops halfway through the weights, and has the browser inflate one of the graphs."""
    go_on, asked = threading.Event(), []

    class Handler(PageHandler):
        def copyfile(self, source, outputfile):
            if self.path.startswith(WEIGHTS):
                outputfile.write(source.read(1_000_000))
                outputfile.flush()
                go_on.wait(timeout=120)
            super().copyfile(source, outputfile)

        def end_headers(self):
            asked.append(self.path)
            if "encode.onnx" in self.path:
                self.send_header("Content-Encoding", "gzip")
            super().end_headers()

    with served(written, Handler) as address:
        yield address, go_on, asked
        go_on.set()


def test_the_page_shows_its_progress_and_then_works_offline(browser, written, slow_host):
    address, go_on, asked = slow_host
    page = opened(browser, address, reduced_motion="reduce")
    progress = "document.querySelector('#loading progress').value"
    wait_until(page, f"{progress} > 0.5")
    assert page.evaluate(progress) < 0.7
    contents = json.loads((written / "page.json").read_text())
    model, runtime = (
        sum(file["bytes"] for file in files) / 1e6
        for files in (contents["models"]["omniglot-small"]["files"].values(), [contents["runtime"]])
    )
    loading = f"Loading the model and its runtime ({model + runtime:.1f} MB, once)"
    assert page.locator("#loading span").text_content() == loading
    assert f"({model:.1f} MB)" in page.locator("fieldset label").first.text_content()
    assert page.locator("#more .pad canvas").first.is_visible()  # the visitor may draw meanwhile
    go_on.set()
    page.wait_for_selector("#more[aria-busy=false]")
    page.wait_for_selector("#offline", state="visible")
    assert sum(WEIGHTS in path for path in asked) == 1
    page.evaluate("caches.open('bruno-models').then((cache) => cache.put('old.gz?0', new Response('')))")
    page.context.set_offline(True)
    page.reload()
    page.wait_for_selector("#more[aria-busy=false]")
    assert page.locator("#more .samples canvas").first.evaluate("(canvas) => canvas.pixels.some(Boolean)")
    kept = page.evaluate(
        "caches.open('bruno-models').then(async (cache) => (await cache.keys()).map(({ url }) => url))"
    )
    assert len(kept) == 7
    assert all("old.gz" not in url for url in kept)  # files of earlier versions are removed
    page.context.close()


def test_a_missing_model_is_reported(browser, written):
    class Handler(PageHandler):
        def do_GET(self):  # noqa: N802
            self.send_error(404) if self.path.startswith(WEIGHTS) else super().do_GET()

    with served(written, Handler) as address:
        page = opened(browser, address)
        wait_until(page, "document.getElementById('loading').textContent.includes('404')")
        page.context.close()
