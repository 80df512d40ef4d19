"""The table of versions with which the tests passed: what it says is on record, and it is written where it belongs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import compatibility
import pytest
from compatibility import BEGIN, LIBRARIES, PAGE, main, read_record, table
from matrix import END, MatrixError, with_table


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with the two comments, and no record yet."""
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{BEGIN}\n\nold\n\n{END}\n\nAfter.\n", encoding="utf-8")
    monkeypatch.setattr(compatibility, "PAGE", page)
    monkeypatch.setattr(compatibility, "RECORD", tmp_path / "compatibility.json")
    return page


def passed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compatibility.py", *arguments])
    main()


def test_what_has_passed_is_put_on_record_with_the_versions_here(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(monkeypatch, "newest")
    passed(monkeypatch, "oldest")
    assert {name: read_record()["newest"][name] for name in LIBRARIES} == {name: version(name) for name in LIBRARIES}
    text = page.read_text(encoding="utf-8")
    assert "| tests passed with | oldest, `make test-oldest`, 20" in text
    assert f"| transformers | {version('transformers')} | {version('transformers')} |" in text
    assert (text.startswith("Before.\n"), text.endswith("After.\n"), "old\n" in text) == (True, True, False)


def test_one_that_has_not_passed_has_no_column(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(monkeypatch, "oldest")
    assert "newest" not in page.read_text(encoding="utf-8").partition(BEGIN)[2]


def test_a_page_without_the_comments_is_an_error_that_shows_them(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text("Nothing here.\n", encoding="utf-8")
    with pytest.raises(MatrixError, match="make test-newest"):
        passed(monkeypatch, "oldest")
    # What has passed is known all the same.
    assert "oldest" in read_record()


def test_the_table_in_the_page_is_up_to_date() -> None:
    record, page = read_record(), PAGE.read_text(encoding="utf-8")
    assert not record or page == with_table(page, table(record), BEGIN), "python tests/compatibility.py"
