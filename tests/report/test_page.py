"""The HTML page of a report: nothing is loaded, nothing of a run becomes markup, and a long run fits."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from made_up_report import SAMPLE_TEXT, made_up_incident, made_up_report

from self_healing.report.page.rendering import page_of


# What would end a script, an attribute, a comment or a template, and what would begin a tag or an entity.
HOSTILE = (
    """ </script><script>alert(1)</script><!--<img src=x onerror=alert(1)> " ' ` & &lt; {{ 7 * 7 }} ]]> \u2028 """
)


class Parsed(HTMLParser):
    """The elements of a page with their attributes, the text of its scripts, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and all(attributes.get(key.rstrip("_")) == value for key, value in wanted.items())
        ]

    @property
    def drawn(self) -> Any:
        return json.loads(self.scripts[0])


@functools.cache
def parsed() -> Parsed:
    return Parsed(page_of(made_up_report()))


# ---- by itself ----


def test_the_page_loads_nothing() -> None:
    for tag, attributes in parsed().elements:
        for name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/svg+xml,")), (tag, attributes)
    assert not {"iframe", "object", "embed", "base"} & {tag for tag, _ in parsed().elements}
    page = page_of(made_up_report())
    assert "@import" not in page
    assert "url(" not in page


def test_the_policy_of_the_page_forbids_what_it_does_not_do() -> None:
    policy = parsed().all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


# ---- what comes from a run ----


def test_no_text_of_a_run_becomes_markup() -> None:
    harmless, hostile = Parsed(page_of(made_up_report(mark="x"))), Parsed(page_of(made_up_report(mark=HOSTILE)))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [attributes.keys() for _, attributes in hostile.elements] == [
        attributes.keys() for _, attributes in harmless.elements
    ]
    # Two scripts of our own, with one block of data before them.
    assert hostile.scripts[1:] == harmless.scripts[1:]
    assert len(hostile.scripts) == 3
    assert hostile.text.count("{{ 7 * 7 }}") > 30
    # Samples are not quoted.
    assert SAMPLE_TEXT not in page_of(made_up_report())


# ---- what is shown ----


def test_the_state_and_what_to_do_come_first() -> None:
    text = parsed().text
    told = [
        text.index(part) for part in ("The run died", "Step 2000 of 4000", "What to do next", "Start the job again")
    ]
    assert told == sorted(told)
    assert told[-1] < text.index("Charts", told[0])


# ---- long runs ----


def test_a_reward_that_was_logged_in_each_of_a_million_steps_has_no_more_points_than_the_steps_have() -> None:
    report, steps = made_up_report(), range(1, 1_000_001)
    report.series["logged"]["reward"] = {"step": steps, "value": [0.5] * len(steps)}
    (line,) = next(chart["lines"] for chart in Parsed(page_of(report)).drawn["charts"] if chart["name"] == "reward")
    assert line["label"] == "reward, one log in 123"
    assert (len(line["steps"]), line["steps"][-1]) == (8_131, 999_999)


def test_of_too_many_incidents_the_worst_are_told() -> None:
    incidents = [made_up_incident(number, number, "fatal" if number == 2 else "resolved") for number in range(1, 401)]
    page = Parsed(page_of(replace(made_up_report(), incidents=incidents)))
    told = [story["id"] for story in page.all("div", class_="story") if "id" in story]
    assert (len(told), told[0], told[-1]) == (300, "incident-2", "incident-400")
    assert "And 100 more" in page.text
