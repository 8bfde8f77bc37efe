"""The page: everything of the document is on it, nothing of a dump runs, and JSON says the same."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from slime_ext.analysis.document import Bin, Curve, Document, Effect, Finding, Numbers, Point, to_json
from slime_ext.analysis.report import render, write_report
from slime_ext.analysis.report.distribution import distribution
from slime_ext.analysis.report.page import TILES, pictures
from slime_ext.analysis.report.scales import Scale
from tests.analysis.documents import EVIL, document

NAMES = ("distribution", "timeline", "position", "staleness", "probability", "outcome")


@pytest.fixture(scope="module")
def found():
    return document()


@pytest.fixture(scope="module")
def page(found):
    return render(found)


def test_findings_come_before_everything_else(page):
    places = [page.index(f'id="{name}"') for name in ("findings", "numbers", "pictures", "whatif", "worst")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_is_drawn_with_its_sentence(found, name):
    picture = next(p for p in pictures([found]) if p.name == name)
    assert picture.how.endswith(".") and not picture.missing
    assert len(list(ET.fromstring(picture.svg).iter())) > 10


def test_nothing_is_fetched_and_nothing_runs(page):
    tags = " ".join(re.findall(r"<[^>]*>", page))
    assert not re.findall(r"<(?:script|link|iframe|img|object)\b|\bon\w+=|\b(?:src|href)=", tags)
    assert not re.findall(r"@import|url\(", page)
    assert "default-src 'none'" in page


def test_text_of_a_dump_is_text(page):
    assert EVIL not in page and "<script" not in page
    assert page.count("&lt;script&gt;") == 2


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_correction_that_one_run_cannot_have_stands_with_the_other(found, lacking):
    lame = found.model_copy(
        update={"effects": tuple(Effect(name=e.name, unavailable="lacks it") for e in found.effects)}
    )
    runs = [lame, found] if lacking == 0 else [found, lame]
    table = render(*runs).split('id="whatif"')[1].split("</table>")[0]
    assert "gauge s" + str(1 - lacking) in table and "gauge s" + str(lacking) not in table


def test_pictures_escape_labels():
    point = Point(x=0, count=1, mean=0.1, absolute=0.1, label=EVIL)
    svg = pictures([Document(name="x", curves=(Curve(name="outcome", points=(point, point)),))])
    assert "<script" not in "".join(p.svg for p in svg) and "&lt;script" in "".join(p.svg for p in svg)


@pytest.mark.parametrize("severity", ["error", "warning", "note"])
def test_a_finding_shows_severity_evidence_and_fix(severity):
    finding = Finding(name="n", severity=severity, title="T 1", evidence="E 2", fix="F 3")
    page = render(Document(name="x", findings=(finding,)))
    assert f'<article class="finding {severity}"' in page
    assert all(text in page for text in ("T 1", "E 2", "F 3"))


def test_an_empty_analysis_still_is_a_page():
    page = render(Document(name="empty"))
    assert "No detector found a fault" in page and page.count('class="missing"') == 5


def test_a_document_survives_json(found):
    assert Document.model_validate_json(to_json(found)) == found


def test_numbers_that_do_not_exist_are_null():
    assert '"k3": null' in to_json(Document(name="x", total=Numbers(k3=float("nan"))))


def test_every_number_of_json_is_on_the_page_or_in_a_picture():
    shown = {name for name, _ in TILES}
    assert len(TILES) >= 15 and len(shown) == len(TILES)
    schema = Document.model_json_schema()
    assert all("description" in p or "title" in p for p in schema["$defs"]["Effect"]["properties"].values())


def test_two_runs_stand_side_by_side(found):
    page = render(found, document("stale", 0.4))
    assert page.count('<span class="key s1">') >= 3 and 'class="second"' in page
    assert 'class="line s1"' in page and "healthy" in page and "stale" in page


def test_the_recommended_correction_is_the_first_row(page):
    rows = re.findall(r"<tr( class=\"chosen\")?>\s*<td><b>(\w+)</b>", page)
    assert rows[0] == (' class="chosen"', "token_is") and sum(bool(c) for c, _ in rows) == 1


def test_a_bar_is_as_long_as_its_number_says(found, page):
    effect = next(e for e in found.effects if e.name == "geo_rs")
    row = page[page.index("<b>geo_rs</b>") :]
    width = re.search(r'sequences kept">.*?width:([\d.]+)%', row, re.S)[1]
    assert float(width) == pytest.approx(100 * effect.kept_sequences / effect.sequences, abs=0.05)


def test_the_distribution_adds_up_to_all_tokens():
    bins = (
        Bin(low=-9, high=-0.01, count=1),
        Bin(low=-1e-3, high=1e-3, count=998),
        Bin(low=0.5, high=3, count=1),
    )
    svg = distribution([Document(name="x", distribution=bins)]).svg
    shares = [float(s) for s in re.findall(r"nats[^:]*: ([\d.]+)% of the tokens", svg)]
    assert sum(shares) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [
        (Scale(0, 10, 0, 100), 5, 50),
        (Scale(0, 10, 0, 100), 99, 100),
        (Scale(0, 10, 100, 0), 0, 100),
        (Scale(1, 100, 0, 100, "log"), 10, 50),
        (Scale(-9, 9, 0, 100, "symlog"), 0, 50),
        (Scale(1, 1, 0, 100), 1, 50),
    ],
)
def test_a_scale_maps_numbers_to_places(scale, value, place):
    assert scale(value) == place


@pytest.mark.parametrize("kind", ["linear", "log", "symlog"])
@pytest.mark.parametrize("high", [1e-5, 0.3, 1.0, 7.0, 4000.0])
def test_ticks_are_few_round_and_inside(kind, high):
    low = {"linear": 0.0, "log": high / 1000, "symlog": -high}[kind]
    ticks = Scale(low, high, 0, 1, kind, knee=high / 100).ticks()
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-3 * abs(low) <= t <= high * 1.001 for t in ticks)


def test_an_axis_that_does_not_reach_0_has_no_tick_there():
    assert Scale(32, 30000, 0, 1, "symlog").ticks() == [100, 1000, 10000]


def test_the_page_is_written_where_it_was_asked_for(tmp_path, found):
    path = write_report(found, tmp_path / "deep" / "report.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
