"""The page: everything of the document is on it, nothing of a dump runs, and JSON says the same."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy
import pytest

from slime_ext.tools.analysis.document import (
    Bin,
    Document,
    Effect,
    Finding,
    Looked,
    Moment,
    Numbers,
    adapter,
    json_of,
)
from slime_ext.tools.analysis.findings.recommend import recommend
from slime_ext.tools.analysis.page.drawing import COLOURS
from slime_ext.tools.analysis.page.numbers import TILES, tiles
from slime_ext.tools.analysis.page.page import render
from slime_ext.tools.analysis.page.pictures import _shares, pictures
from tests.tools.analysis.documents import EVIL, document

NAMES = ("distribution", "timeline", "position", "staleness", "probability")
UNDRAWN = {"distribution": (), "timeline": (), "curves": ()}  # a page without pictures


@pytest.fixture(scope="module")
def found():
    return document()


@pytest.fixture(scope="module")
def page(found):
    return render(found)


def test_findings_come_before_everything_else(page):
    places = [page.index(f'id="{name}"') for name in ("findings", "numbers", "pictures", "whatif", "worst")]
    assert places == sorted(places)


def test_every_picture_is_drawn_with_its_sentence(found):
    drawn = {picture.name: picture for picture in pictures([found])}
    assert set(NAMES) <= set(drawn)
    for picture in drawn.values():
        assert picture.how.endswith(".")
        root = ET.fromstring(picture.svg)
        assert sum(e.tag.endswith(("}use", "}path")) for e in root.iter()) >= 4, picture.name


def test_nothing_is_fetched_and_nothing_runs(page):
    tags = " ".join(re.findall(r"<[^>]*>", page))
    assert not re.findall(r"<(?:script|link|iframe|object)\b|\bon\w+=|\bhref=\"(?!#)", tags)
    assert not re.findall(r"\bsrc=\"(?!data:image/svg\+xml;base64,)", tags)  # where a script does not run
    assert not re.findall(r"@import|url\((?!#)|http-equiv=\"refresh", page)


def test_a_browser_is_told_to_load_and_run_nothing(page):
    """The policy is a <meta http-equiv> of the head, before all that it is for."""
    found = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append((tag, dict(attributes)))

    Tags().feed(page)
    names = [tag for tag, _ in found]
    policies = [(i, a) for i, (_, a) in enumerate(found) if a.get("http-equiv") == "Content-Security-Policy"]
    ((place, policy),) = policies
    assert names[place] == "meta" and place < min(names.index("style"), names.index("body"))
    rules = dict(rule.split(maxsplit=1) for rule in policy["content"].split(";"))
    assert rules == {"default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:"}


def test_text_of_a_dump_is_text(page):
    assert EVIL not in page and "<script" not in page
    assert page.count("&lt;script&gt;") == 2


def test_a_correction_that_one_run_cannot_have_stands_with_the_other(found):
    lame = replace(found, effects=tuple(Effect(name=e.name, unavailable="lacks it") for e in found.effects))
    for lacking, runs in enumerate(([lame, found], [found, lame])):
        table = render(*runs).split('id="whatif"')[1].split("</table>")[0]
        assert f"gauge s{1 - lacking}" in table and f"gauge s{lacking}" not in table


def test_a_finding_shows_severity_evidence_and_fix():
    for severity in ("error", "warning", "note"):
        finding = Finding(name="temperature", severity=severity, title="T 1", evidence="E 2", fix="F 3")
        page = render(Document(name="x", findings=(finding,)))
        assert f'<article id="temperature-0" class="finding {severity}"' in page
        assert all(text in page for text in ("T 1", "E 2", "F 3"))


def test_an_empty_analysis_still_is_a_page():
    page = render(Document(name="empty"))
    assert "The checks that ran found no fault" in page and page.count('class="missing"') == 5


def test_a_document_survives_json(found):
    assert adapter().validate_json(json_of(found)) == found


def test_two_runs_stand_side_by_side(found):
    page = render(found, document("stale", 0.4))
    assert page.count('<span class="key s1">') >= 3 and 'class="second"' in page
    assert "healthy" in page and "stale" in page
    assert COLOURS["s1"] in pictures([found, document("stale", 0.4)])[0].svg


def test_the_recommended_correction_is_the_first_row(found):
    named = replace(found.recommendation, name="token_tis")
    page = render(replace(found, recommendation=named))
    rows = re.findall(r"<tr( class=\"chosen\")?>\s*<td><b>(\w+)</b>", page)
    assert rows[0] == (' class="chosen"', "token_tis") and sum(bool(c) for c, _ in rows) == 1


def test_a_bar_is_as_long_as_its_numbersays(found, page):
    effect = next(e for e in found.effects if e.name == "geo_rs")
    row = page[page.index("<b>geo_rs</b>") :]
    width = re.search(r'sequences kept">.*?width:([\d.]+)%', row, re.S)[1]
    assert float(width) == pytest.approx(100 * effect.kept_sequences / effect.sequences, abs=0.05)


def test_colours_are_the_light_ones_of_the_style_sheet(found):
    style = files("slime_ext.tools.analysis.page").joinpath("style.css").read_text()
    light, *_ = re.findall(r":root \{(.*?)\}", style, re.S)
    named = dict(re.findall(r"--(\w+): (#\w+)", light))
    assert COLOURS.items() <= named.items()
    for picture in pictures([found]):
        assert set(re.findall(r"#[0-9a-f]{6}\b", picture.svg)) <= set(COLOURS.values()), picture.name


def test_a_picture_in_the_page_is_the_picture(found, page):
    (first, *_) = pictures([found])
    addresses = re.findall(r"<img src=\"data:image/svg\+xml;base64,([^\"]*)\" alt=\"([^\"]*)\"", page)
    assert (b64decode(addresses[0][0]).decode(), addresses[0][1]) == (first.svg, first.title)


def test_tiles_say_where_a_number_is_healthy_as_docs_metrics_does():
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = {
        "k3": "`k3_kl`",
        "ratio": "`ratio_p01`",
        "ESS of tokens": "`ess_ratio`",
        "χ², token": "`chi2_token`",
    }
    rows |= {"ESS of whole": "`ess_sequence`", "χ², sequence": "`chi2_sequence`"}
    for begin, name in rows.items():
        (tile,) = [t for t in TILES if t.name.startswith(begin) and t.range]
        lines = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
        row = next(line for line in lines if line.count(" | ") == 3)  # of the table of all metrics
        assert tile.range.split(",")[0] in row, (begin, row)
    verdicts = {tile.name: tile.runs[0][1] for tile in tiles([Numbers(k3=1e-4, ess_token=0.8)])}
    assert (verdicts["k3, nats per token"], verdicts["ESS of tokens"]) == ("good", "bad")
    assert tiles([Numbers(k3=0.5)])[0].runs == [("0.5", "bad")]


def test_little_that_was_looked_at_is_never_green():
    def page(*states):
        rows = [Looked(name="layer", state=state, detail="x") for state in states]
        return render(document(findings=(), detectors=tuple(rows), **UNDRAWN))

    few = page("nothing", "could not look", "could not look")
    assert "1 of 3 checks ran" in few and 'finding note" data-finding="none"' in few
    assert 'finding good" data-finding="none"' in page("nothing", "nothing", "could not look")


def test_nothing_green_stands_beside_an_error():
    error = replace(document().findings[0], severity="error")
    recommendation = recommend((), document().total, (error,))
    text = render(document(findings=(error,), recommendation=recommendation, **UNDRAWN))
    assert "No correction is recommended before the faults are fixed" in text and "finding good" not in text
    assert "--custom-" not in text


def test_the_page_says_the_headline_once_and_shows_the_histogram_before_the_numbers():
    error = replace(document().findings[0], severity="error", threshold="0.1", title="The title.")
    found = document(findings=(error,))
    found = replace(found, headline=f"Fix first: {error.title}")
    text = render(found)
    assert text.count(error.title) == 1
    assert text.index('id="picture-distribution"') < text.index('<dl class="tiles')
    assert text.count('id="picture-distribution"') == 1
    assert "<summary>How sure</summary><p>Threshold: 0.1." in text


def test_an_estimate_that_cannot_be_true_is_not_shown():
    def chi2(**values):
        return {t.name: t.runs for t in tiles([Numbers(**values)]) if "χ²" in t.name}

    assert chi2(chi2_token=-2e-4, chi2_sequence=-0.623) == {}
    assert chi2(chi2_token=-2e-4, chi2_sequence=11.0) == {"χ², sequence": [("11", "bad")]}
    found = chi2(chi2_token=0.0, chi2_sequence=11.0)
    assert found == {"χ², token": [("0", "good")], "χ², sequence": [("11", "bad")]}


def test_five_corrections_are_shown_and_the_rest_is_folded(page):
    shown, folded = page.split('<details class="more">')
    assert shown.count('data-name="ESS"') <= 5 < shown.count("<tr") and 'data-name="ESS"' in folded


def marks(svg, colour):
    """Places of the dots of a colour."""
    dots = [e for e in ET.fromstring(svg).iter() if e.tag.endswith("}use") and colour in e.get("style", "")]
    return [(float(e.get("x")), float(e.get("y"))) for e in dots]


def test_marks_lie_where_their_numbers_say():
    numbers = [Numbers(tokens=1, reward=r) for r in (0.0, 0.5, 1.0)]
    moments = tuple(Moment(rollout_id=i, numbers=n) for i, n in enumerate(numbers))
    a, b, c = marks(pictures([Document(name="x", timeline=moments)])[1].svg, f"fill: {COLOURS['s0']}")
    assert b == pytest.approx(((a[0] + c[0]) / 2, (a[1] + c[1]) / 2)) and a[0] < c[0] and a[1] > c[1]


def test_the_bars_of_the_distribution_add_up_to_all_tokens():
    places = ((-9, -0.01, 1), (-1e-3, 1e-3, 998), (0.5, 3, 1))
    bins = [Bin(low=low, high=high, count=count) for low, high, count in places]
    shares = _shares(bins, numpy.linspace(-0.1, 0.1, 82))
    assert shares.sum() == pytest.approx(1) and shares[0] > 0 < shares[-1]  # those beyond lie in the last
    assert shares[40] == pytest.approx(0.998)
