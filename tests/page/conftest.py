"""The page in Debian's Chromium, driven by Playwright."""

import shutil
import threading
from queue import Queue

import pytest
from visitor import opened

from bruno.page import serve_page, write_page
from bruno.page.files import BUILT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of the page."""
    if not (BUILT / "page.json").is_file():
        pytest.skip("the page is not built. Build it with: make page")
    folder = tmp_path_factory.mktemp("page")
    write_page(folder)
    return folder


@pytest.fixture(scope="session")
def site(written) -> str:
    """The address of the page."""
    addresses = Queue()
    arguments = {"ready": addresses.put}
    threading.Thread(target=serve_page, args=(written,), kwargs=arguments, daemon=True).start()
    return addresses.get(timeout=300)


@pytest.fixture(scope="module")
def browser():
    """Chromium. While Playwright runs, its event loop blocks those of other modules."""
    from playwright import sync_api  # the tests of other modules do not need it

    if CHROMIUM is None:
        pytest.skip("no Chromium was found. Install it with: apt-get install chromium")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def desktop(browser, site):
    page = opened(browser, site, viewport={"width": 1100, "height": 800}, reduced_motion="reduce")
    page.wait_for_selector("#more[aria-busy=false]")
    return page


@pytest.fixture(scope="module")
def phone(browser, site):
    size = {"width": 390, "height": 844}
    page = opened(browser, site, viewport=size, has_touch=True, is_mobile=True, color_scheme="dark")
    page.wait_for_selector("#more[aria-busy=false]")
    return page
