"""The page in Debian's Chromium, driven by Playwright."""

import shutil
import threading
from queue import Queue

import pytest

from bruno.page import serve_page, write_page
from bruno.page.files import BUILT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> str:
    """The address of the page."""
    if not (BUILT / "page.json").is_file():
        pytest.skip("the page is not built. Build it with: make page")
    folder, addresses = tmp_path_factory.mktemp("page"), Queue()
    write_page(folder)
    arguments = {"ready": addresses.put}
    threading.Thread(target=serve_page, args=(folder,), kwargs=arguments, daemon=True).start()
    return addresses.get(timeout=60)


@pytest.fixture(scope="session")
def browser(site):
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium was found. Install it with: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, site, **context):
    """The page in a new window, with the first samples drawn; its problems and requests are recorded."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(180_000)
    page.problems, page.addresses = [], []
    page.on("pageerror", lambda error: page.problems.append(error))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("request", lambda request: page.addresses.append(request.url))
    page.goto(site)
    page.wait_for_selector("#more[aria-busy=false]")
    return page


@pytest.fixture(scope="session")
def desktop(browser, site):
    return opened(browser, site, viewport={"width": 1100, "height": 800})


@pytest.fixture(scope="session")
def phone(browser, site):
    size = {"width": 390, "height": 844}
    return opened(browser, site, viewport=size, has_touch=True, is_mobile=True, color_scheme="dark")
