"""The page as a person uses it, on a desktop and a phone."""

import pytest
from visitor import (
    CORNER,
    CROSSED_CIRCLE,
    ZIGZAG,
    draw,
    draw_by_touch,
    open_panel,
    shaky,
    updated,
    wait_until,
)

pytestmark = pytest.mark.slow
LIT = "(all) => all.map((pad, i) => pad.classList.contains('odd') ? i : -1).filter((i) => i >= 0)"
DRAW = {"desktop": draw, "phone": draw_by_touch}


def pictures(section):
    return section.locator(".samples canvas").evaluate_all("(all) => all.map((one) => one.toDataURL())")


def highest(section):
    """Index of the tile with the highest bar: A to E, or 5 for none of these."""
    tiles = "(all) => all.map((tile) => tile.classList.contains('highest'))"
    marked = section.locator(".pads .pad").evaluate_all(tiles)
    assert marked.count(True) == 1
    return marked.index(True)


@pytest.mark.long  # drawing by mouse and by touch is also in the tests below
@pytest.mark.parametrize("device", DRAW)
def test_sixteen_more_are_drawn_after_each_stroke(device, request):
    page = request.getfixturevalue(device)
    section = open_panel(page, "more")
    updated(page, "more", section.locator(".other").click)
    before = pictures(section)
    assert len(before) == len(set(before)) == 16
    pads = section.locator(".pad canvas")
    updated(page, "more", lambda: DRAW[device](page, pads.nth(0), ZIGZAG))
    once = pictures(section)
    assert not set(once) & set(before)
    updated(page, "more", lambda: DRAW[device](page, pads.nth(1), ZIGZAG))
    assert "given the others" in section.locator(".number").text_content()
    assert not set(pictures(section)) & set(once)
    updated(page, "more", section.locator(".undo").nth(1).click)
    assert pictures(section) == once


def test_undo_takes_back_strokes_and_clearing(desktop):
    section = open_panel(desktop, "more")
    updated(desktop, "more", section.locator(".other").click)
    pad = section.locator(".pad").nth(0)
    seen = [picture_of(pad)]
    for points in (ZIGZAG, CORNER):
        updated(desktop, "more", lambda points=points: draw(desktop, pad.locator("canvas"), points))
        seen.append(picture_of(pad))
    updated(desktop, "more", pad.locator(".clear").click)
    seen.append(picture_of(pad))
    assert len(set(seen)) == 4
    for expected in seen[-2::-1]:
        updated(desktop, "more", pad.locator(".undo").click)
        assert picture_of(pad) == expected
    assert not pad.locator(".undo").is_visible()


def picture_of(pad):
    return pad.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")


def test_everything_fits_on_a_phone(phone):
    for name in ("more", "apart", "odd", "forget"):
        open_panel(phone, name)
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
        widths = phone.locator(f"#{name} .pad").evaluate_all("(all) => all.map((one) => one.clientWidth)")
        assert all(width >= 100 for width in widths)  # wide enough for a finger


def test_a_drawing_is_recognised_and_a_different_symbol_is_none_of_these(desktop):
    section = open_panel(desktop, "apart")
    pads, query = section.locator(".pads .pad canvas"), section.locator(".query canvas")
    assert highest(section) == 1  # of our own examples
    for i, points in enumerate((ZIGZAG, CORNER)):
        updated(desktop, "apart", lambda i=i, points=points: draw(desktop, pads.nth(i), points))
    updated(desktop, "apart", lambda: draw(desktop, query, shaky(CORNER)))
    assert highest(section) == 1
    updated(desktop, "apart", section.locator(".query .clear").click)
    assert section.locator("meter").count() == 0
    updated(desktop, "apart", lambda: draw(desktop, query, CROSSED_CIRCLE))
    assert highest(section) == 5
    assert section.locator("meter").count() == 4  # three symbols and none of these


@pytest.mark.parametrize("device", [pytest.param("desktop", marks=pytest.mark.long), "phone"])
def test_the_odd_one_out_lights_up(device, request):
    page = request.getfixturevalue(device)
    section = open_panel(page, "odd")
    assert len(section.locator(".pad").evaluate_all(LIT)) == 1  # of our own examples
    updated(page, "odd", section.locator(".blank").click)
    pads = section.locator(".pad canvas")
    for i in range(4):
        updated(page, "odd", lambda i=i: DRAW[device](page, pads.nth(i), shaky(ZIGZAG, 0.01 * i)))
    assert section.locator(".pad").evaluate_all(LIT) == []  # these go together
    updated(page, "odd", lambda: DRAW[device](page, pads.nth(4), CROSSED_CIRCLE))
    assert section.locator(".pad").evaluate_all(LIT) == [4]


def test_the_predictive_narrows_and_forgetting_is_exact(desktop):
    section = open_panel(desktop, "forget")
    slider, cloud = section.locator("input"), section.locator(".map")
    shown = {}
    for count in ("0", "6", "2", "6", "0"):
        updated(desktop, "forget", lambda count=count: slider.fill(count))
        now = cloud.evaluate("(canvas) => canvas.toDataURL()"), pictures(section)
        assert shown.setdefault(count, now) == now
    assert len(set(map(str, shown.values()))) == 3
    coloured = """(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, i) => i % 4 === 3 && value > 80).length;
    }"""
    areas = []
    for count in ("0", "1", "7"):
        updated(desktop, "forget", lambda count=count: slider.fill(count))
        areas.append(cloud.evaluate(coloured))
    assert areas[0] > 2 * areas[1] > 2 * areas[2]


def test_any_example_can_be_forgotten(desktop):
    section = open_panel(desktop, "forget")
    updated(desktop, "forget", lambda: section.locator("input").fill("1"))
    one = pictures(section)
    second, first = (section.locator(".seen button").nth(i) for i in (1, 0))
    for toggle in (second, first, first, second):
        updated(desktop, "forget", toggle.click)
    assert pictures(section) == one
    trace = section.locator(".number").text_content().split("leaves ")[1]
    assert "no trace" in trace or float(trace.removeprefix("a trace of ").rstrip(".")) < 1e-12


def test_the_keyboard_draws(desktop):
    section = open_panel(desktop, "more")
    pad = section.locator(".pad").nth(2)
    pad.locator("canvas").focus()
    before = picture_of(pad)

    def stroke():
        for key in (" ", *["ArrowDown"] * 5, *["ArrowRight"] * 5, " "):
            desktop.keyboard.press(key)

    updated(desktop, "more", stroke)
    drawn = picture_of(pad)
    assert drawn != before
    updated(desktop, "more", lambda: desktop.keyboard.press("Control+z"))
    assert picture_of(pad) != drawn


def test_the_keyboard_chooses_a_panel(desktop):
    open_panel(desktop, "more")
    desktop.focus("#tab-more")
    for key, panel in (("ArrowRight", "apart"), ("ArrowLeft", "more"), ("ArrowLeft", "forget")):
        desktop.keyboard.press(key)
        assert desktop.is_visible(f"#{panel}")
        assert desktop.evaluate("document.activeElement.dataset.panel") == panel


def test_examples_come_one_after_the_other_where_motion_is_wanted(phone):
    open_panel(phone, "forget")
    wait_until(phone, "document.querySelector('#forget input').value === '3'")
    assert phone.locator(".seen [aria-pressed=true]").count() == 3


def test_nothing_is_loaded_from_elsewhere(desktop, phone, site):
    for page in (desktop, phone):
        assert page.problems == []
        assert all(address.startswith((site, "blob:", "data:")) for address in page.addresses)
