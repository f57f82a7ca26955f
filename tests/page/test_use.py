"""The page as a person uses it, on a desktop and a phone."""

import pytest

pytestmark = pytest.mark.slow
ZIGZAG = [(0.2, 0.2), (0.8, 0.3), (0.2, 0.6), (0.8, 0.8)]
CORNER = [(0.3, 0.2), (0.3, 0.8), (0.8, 0.8)]


def open_panel(page, name):
    page.click(f"[data-panel={name}]")
    page.wait_for_selector(f"#{name}[aria-busy=false]")
    return page.locator(f"#{name}")


def updated(page, panel, change):
    """Wait for the panel to work on a change and to finish."""
    section = page.locator(f"#{panel}")
    section.evaluate("(root) => root.setAttribute('aria-busy', 'waiting')")
    change()
    page.wait_for_selector(f"#{panel}[aria-busy=false]")


def draw(page, pad, points):
    """Draw a stroke with the mouse."""
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()


def pictures(section):
    return section.locator(".samples canvas").evaluate_all("(all) => all.map((one) => one.toDataURL())")


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_sixteen_more_are_drawn_after_each_stroke(device, request):
    page = request.getfixturevalue(device)
    section = open_panel(page, "more")
    before = pictures(section)
    assert len(before) == len(set(before)) == 16
    pads = section.locator(".pad canvas")
    updated(page, "more", lambda: draw(page, pads.nth(0), ZIGZAG))
    once = pictures(section)
    assert not set(once) & set(before)
    updated(page, "more", lambda: draw(page, pads.nth(1), ZIGZAG))
    assert "given the others" in section.locator(".number").text_content()
    assert not set(pictures(section)) & set(once)
    updated(page, "more", section.locator(".undo").nth(1).click)
    assert pictures(section) == once


def test_everything_fits_on_a_phone(phone):
    for name in ("more", "apart", "odd", "forget"):
        open_panel(phone, name)
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
        inside = "(all) => all.every((one) => one.scrollWidth <= one.clientWidth)"
        assert phone.locator(f"#{name} .pad").evaluate_all(inside)


def test_a_drawing_is_recognised_and_a_stranger_is_none_of_these(desktop):
    section = open_panel(desktop, "apart")
    pads, query = section.locator(".pads .pad canvas"), section.locator(".query canvas")
    assert section.locator(".highest span").text_content() == "B"  # of our own examples
    for i, points in enumerate((ZIGZAG, CORNER)):
        updated(desktop, "apart", lambda i=i, points=points: draw(desktop, pads.nth(i), points))
    updated(desktop, "apart", section.locator(".query .clear").click)
    shaky = [(x + 0.03, y - 0.02) for x, y in CORNER]
    updated(desktop, "apart", lambda: draw(desktop, query, shaky))
    assert section.locator(".highest span").text_content() == "B"
    updated(desktop, "apart", section.locator(".query .clear").click)
    circle = [(0.5, 0.1), (0.85, 0.3), (0.85, 0.7), (0.5, 0.9), (0.15, 0.7), (0.15, 0.3), (0.5, 0.1)]
    updated(desktop, "apart", lambda: draw(desktop, query, [*circle, (0.5, 0.9)]))
    assert section.locator(".highest span").text_content() == "None of these"


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_the_odd_one_out_lights_up(device, request):
    page = request.getfixturevalue(device)
    section = open_panel(page, "odd")
    lit = "(all) => all.map((pad, i) => pad.classList.contains('odd') ? i : -1).filter((i) => i >= 0)"
    assert section.locator(".pad").evaluate_all(lit) == [3]


def test_the_predictive_narrows_and_forgetting_is_exact(desktop):
    section = open_panel(desktop, "forget")
    slider, curve = section.locator("input"), section.locator(".now")
    curves = {}
    for count in ("0", "6", "2", "6", "0"):
        updated(desktop, "forget", lambda count=count: slider.fill(count))
        shape = curve.get_attribute("d"), pictures(section)
        assert curves.setdefault(count, shape) == shape
    assert curves["0"][0] != curves["6"][0]
    assert section.locator(".prior").get_attribute("d") == curves["0"][0]


def test_the_keyboard_draws(desktop):
    section = open_panel(desktop, "more")
    pad = section.locator(".pad canvas").nth(2)
    pad.focus()
    before = pad.evaluate("(canvas) => canvas.toDataURL()")

    def stroke():
        for key in (" ", *["ArrowDown"] * 5, *["ArrowRight"] * 5, " "):
            desktop.keyboard.press(key)

    updated(desktop, "more", stroke)
    drawn = pad.evaluate("(canvas) => canvas.toDataURL()")
    assert drawn != before
    updated(desktop, "more", lambda: desktop.keyboard.press("Backspace"))
    assert pad.evaluate("(canvas) => canvas.toDataURL()") != drawn


def test_nothing_is_loaded_from_elsewhere(desktop, phone, site):
    for page in (desktop, phone):
        assert page.problems == []
        assert all(address.startswith((site, "blob:", "data:")) for address in page.addresses)
