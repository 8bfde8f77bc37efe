"""The page in a real browser: no error, every picture drawn, findings in sight, no sideways scrolling.

Needs Debian's chromium (``apt-get install chromium``) and the package playwright; skipped without them.
"""

from __future__ import annotations

import shutil
from itertools import product

import pytest

from slime_ext.tools.analysis.page.page import write_report
from tests.tools.analysis.documents import document

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SWITCHES = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
).split()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
PAPER = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
DRAWN = """() => [...document.querySelectorAll("figure img")].map(image => {
    const box = image.getBoundingClientRect();
    return [image.dataset.picture, box.width, box.height, image.complete ? image.naturalWidth : 0];
})"""
FILTER = "image => getComputedStyle(image).filter"
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(e =>
    e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".text")
).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield found
        found.close()


@pytest.mark.parametrize("other", [None, ("stale", 0.4)], ids=["one run", "two runs"])
def test_the_page_on_wide_and_narrow_screens_light_and_dark(browser, tmp_path, other):
    against = other and document(*other)
    path = write_report(document(noise=0.1), tmp_path / "report.html", against)
    for width, scheme in product(WIDTHS, SCHEMES):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page, said = context.new_page(), []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda r, said=said: r.url.startswith("file:") or said.append(r.url))
        page.goto(path.as_uri())
        every_picture_is_drawn(page)
        the_first_finding_is_in_sight(page)
        nothing_sticks_out_sideways(page)
        it_follows_light_and_dark(page, scheme)
        it_prints_on_white(page)
        assert not said and "off-policy analysis" in page.title()  # nothing of the dump ran
        context.close()


def every_picture_is_drawn(page):
    drawn = page.evaluate(DRAWN)
    names = {"distribution", "timeline", "position", "staleness", "probability"}
    assert {name for name, *_ in drawn} >= names
    assert all(width > 300 and height > 150 and shown > 300 for _, width, height, shown in drawn)


def the_first_finding_is_in_sight(page):
    box = page.locator("[data-finding]").first.bounding_box()
    assert box["width"] > 250 and box["y"] + box["height"] < 900
    assert page.locator("[data-finding]").first.get_by_text("What to do.").is_visible()


def nothing_sticks_out_sideways(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == []


def it_follows_light_and_dark(page, scheme):
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[scheme]
    is_inverted = page.locator("[data-picture=position]").evaluate(FILTER) != "none"
    assert is_inverted == (scheme == "dark")


def it_prints_on_white(page):
    page.emulate_media(media="print")
    assert page.locator("[data-picture=position]").evaluate(FILTER) == "none"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER["light"]
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
