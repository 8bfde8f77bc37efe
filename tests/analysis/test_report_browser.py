"""The page in a real browser: no error, every picture drawn, findings in sight, no sideways scrolling.

Needs Debian's chromium (``apt-get install chromium``) and the package playwright; skipped without them.
"""

from __future__ import annotations

import shutil

import pytest

from slime_ext.analysis.report import write_report
from tests.analysis.documents import document

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
DRAWN = """() => [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const size = mark => mark.getBBox().width + mark.getBBox().height;
    const marks = [...svg.querySelectorAll("path, use")].filter(size).length;
    return [svg.dataset.picture, box.width, box.height, marks];
})"""
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


@pytest.fixture(scope="module", params=["one", "two"])
def path(request, tmp_path_factory):
    against = document("stale", 0.4) if request.param == "two" else None
    return write_report(document(noise=0.1), tmp_path_factory.mktemp("page") / "report.html", against)


@pytest.fixture(
    scope="module", params=[(w, s) for w in WIDTHS for s in SCHEMES], ids=lambda p: f"{p[0]}-{p[1]}"
)
def shown(browser, path, request):
    """The loaded page, and everything that the browser complained about."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: r.url.startswith("file:") or said.append(r.url))
    page.goto(path.as_uri())
    yield page, said, scheme
    context.close()


def test_it_loads_without_a_word_and_nothing_of_the_dump_runs(shown):
    page, said, _ = shown
    assert not said
    assert "off-policy analysis" in page.title()


def test_every_picture_is_drawn(shown):
    page, _, _ = shown
    drawn = page.evaluate(DRAWN)
    assert {name for name, *_ in drawn} >= {
        "distribution",
        "timeline",
        "position",
        "staleness",
        "probability",
    }
    assert all(width > 300 and height > 150 and marks > 3 for _, width, height, marks in drawn)


def test_the_first_finding_is_in_sight(shown):
    page, _, _ = shown
    box = page.locator("[data-finding]").first.bounding_box()
    assert box["width"] > 250 and box["y"] + box["height"] < 900
    assert page.locator("[data-finding]").first.get_by_text("What to do.").is_visible()


def test_nothing_sticks_out_sideways(shown):
    page, _, _ = shown
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == []


def test_it_follows_light_and_dark(shown):
    page, _, scheme = shown
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[scheme]


def test_it_prints_on_white(shown):
    page, _, scheme = shown
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER["light"]
    if scheme == "dark" and page.viewport_size["width"] == WIDTHS[0]:
        assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.emulate_media(media="screen")
