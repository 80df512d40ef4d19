"""
Known errors of fine-tuning runs: from the text of an exception, or an exit code, to its cause and its cure.

The table is data, in `known_errors.toml` next to this file. It only advises: type and experiments decide how a failure
is healed, never its text.
"""

from __future__ import annotations

import functools
import logging
import re
import tomllib
import traceback
from dataclasses import dataclass
from importlib import resources


logger = logging.getLogger(__name__)

# Of the text of an exception that is searched: some carry whole tensors.
_LONGEST = 50_000


@dataclass(frozen=True, slots=True)
class KnownError:
    """One row of the table."""

    name: str
    cause: str
    fix: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    error: KnownError
    pattern: re.Pattern[str] | None
    exit_codes: frozenset[int]


@functools.cache
def _table() -> tuple[_Row, ...]:
    text = resources.files(__package__).joinpath("known_errors.toml").read_text(encoding="utf-8")
    return tuple(
        _Row(
            KnownError(name, row["cause"], row["fix"], row.get("reference")),
            re.compile(row["pattern"], re.DOTALL) if "pattern" in row else None,
            frozenset(row.get("exit_codes", ())),
        )
        for name, row in tomllib.loads(text).items()
    )


def known_errors() -> tuple[KnownError, ...]:
    """Returns all rows of the table, in the order they are tried."""
    return tuple(row.error for row in _table())


def match_known_error(
    error: BaseException | None, exit_code: int | None = None, trained: str = ""
) -> KnownError | None:
    """
    Looks an error up; the first row that matches wins. Never raises.

    The exception's own words are looked up first, with its type and notes, then those of the exceptions it came from;
    one out of a data loader worker carries the traceback there in its text. The lines of code of the traceback here
    are not searched: they quote messages that were never raised.

    Args:
        error (`BaseException`, *optional*):
            The exception.
        exit_code (`int`, *optional*):
            Exit code of the process: negative for a signal, as Python and torchrun tell it, or above 128, as a
            shell does.
        trained (`str`, *optional*):
            What is trained, for rows that are not for all: `"[objective sft]"`, with `"[taken away: 'text']"`.

    Example:

    ```python
    >>> match_known_error(None, exit_code=-9).name
    'killed'
    ```
    """
    try:
        return _match(error, exit_code, trained)
    except Exception:
        # An exception whose own `__str__` raises, for one.
        logger.debug("An error could not be looked up in the table of known errors.", exc_info=True)
        return None


def _match(error: BaseException | None, exit_code: int | None, trained: str) -> KnownError | None:
    for text in _texts(error):
        for row in _table():
            if row.pattern is not None and row.pattern.search(text + trained):
                return row.error
    if exit_code is not None:
        for row in _table():
            if exit_code in row.exit_codes:
                return row.error
    return None


def _texts(error: BaseException | None) -> list[str]:
    if error is None:
        return []
    found: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        # With notes, as Python prints it; the type with its module, which tells what torch.compile raises.
        found.append("".join(traceback.format_exception_only(current))[:_LONGEST])
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found
