"""The page of a report in a real browser: it asks for nothing, logs nothing, and incidents lead to their stories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, Tab, chromium
from made_up_report import made_up_report
from test_page import HOSTILE

from self_healing.report.page.rendering import write_page


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"),
]

# How many pixels of a chart's canvas are near the colour of its line, which a style sheet gives.
CURVE = """(() => {
  const canvas = document.querySelector("#chart-loss canvas"), wanted = document.createElement("canvas");
  const pen = wanted.getContext("2d", {willReadFrequently: true});
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--curve");
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < all.length; at += 4) {
    found += all[at + 3] > 200
      && Math.abs(all[at] - red) + Math.abs(all[at + 1] - green) + Math.abs(all[at + 2] - blue) < 12;
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(made_up_report(), path)
    return path


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_page_is_drawn_asks_for_nothing_and_fits(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.show(page, width, dark=dark)
    assert tab.logged == []
    assert [url for url in tab.requested if not url.startswith("data:")] == [page.as_uri()]
    assert tab.ask("document.querySelectorAll('.plot canvas').length") == 5
    assert tab.ask(CURVE) > 200
    assert tab.ask("document.documentElement.scrollWidth") == width


def test_hostile_text_is_shown_and_does_nothing(tab: Tab, tmp_path: Path) -> None:
    write_page(made_up_report(mark=HOSTILE), tmp_path / "page.html")
    tab.show(tmp_path / "page.html")
    assert tab.logged == []
    assert len(tab.requested) == len({*tab.requested}) == 1 + sum(url.startswith("data:") for url in tab.requested)
    assert tab.ask("document.querySelectorAll('.plot canvas').length") == 5
    assert "alert(1)" in tab.ask("document.querySelector('h1 + p').textContent")


def test_an_incident_on_a_chart_leads_to_its_story(tab: Tab, page: Path) -> None:
    tab.show(page)
    assert not tab.ask("document.getElementById('incident-3').checkVisibility()")
    tab.click("#chart-memory .mark-at:nth-child(3)")
    assert tab.ask("document.getElementById('incident-3').checkVisibility()")
    assert tab.ask("location.hash") == "#incident-3"
    assert tab.ask("document.activeElement.textContent").split()[:3] == ["3", "Incident", "3:"]
    assert tab.ask("document.activeElement.getBoundingClientRect().top") == pytest.approx(16, abs=200)
    assert tab.ask("document.querySelectorAll('.mark-at.current').length") == 5
    # And again, after it was closed.
    tab.ask("document.activeElement.click()")
    assert not tab.ask("document.getElementById('incident-3').checkVisibility()")
    tab.click("#chart-memory .mark-at:nth-child(3)")
    assert tab.ask("document.getElementById('incident-3').checkVisibility()")
    assert tab.ask("document.activeElement.matches('summary')")


def test_the_keyboard_meets_each_incident_once_and_opens_it(tab: Tab, page: Path) -> None:
    tab.show(page)
    met = []
    for _ in range(60):
        tab.press("Tab", 9)
        if tab.ask("document.activeElement.classList.contains('mark-at')"):
            met.append(tab.ask("document.activeElement.getAttribute('aria-label')"))
            if len(met) == 2:
                tab.press("Enter", 13, "\r")
                break
    assert [label.partition(",")[0] for label in met] == ["Incident 1", "Incident 2"]
    assert tab.ask("[...document.querySelectorAll('.mark-at')].filter((mark) => mark.tabIndex === 0).length") == 6
    assert tab.ask("document.getElementById('incident-2').checkVisibility()")


def test_a_story_shows_its_step_on_the_charts(tab: Tab, page: Path) -> None:
    tab.show(page)
    whole = tab.ask("[...document.querySelectorAll('.range input')].map((one) => Number(one.value))")
    tab.click("#chart-loss .mark-at:nth-child(3)")
    tab.click("#incident-3 button.show")
    step = int(tab.ask("document.querySelector('#incident-3 button').dataset.step"))
    shown = tab.ask("[...document.querySelectorAll('.range input')].map((one) => Number(one.value))")
    assert whole[0] < shown[0] < step < shown[1] < whole[1]
    assert tab.ask("document.querySelectorAll('#chart-seconds .mark-at').length") == 1
    tab.ask("document.querySelector('.range [type=reset]').click()")
    tab.frames()
    assert tab.ask("[...document.querySelectorAll('.range input')].map((one) => Number(one.value))") == whole
