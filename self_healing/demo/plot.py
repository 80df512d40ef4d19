"""A curve in characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


# The dots of a braille character, by column and row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


def braille_curve(
    values: Mapping[int, float], steps: int, width: int, height: int, low: float, high: float
) -> list[str]:
    """
    Draws a curve, two dots wide and four high for each character.

    Args:
        values (`Mapping[int, float]`):
            By step, from 1.
        steps (`int`):
            The step at the right edge.
        width (`int`), height (`int`):
            In characters.
        low (`float`), high (`float`):
            The values at the lower and the upper edge; what lies beyond is drawn there.

    Returns:
        `list[str]`: Lines from top to bottom.
    """
    across, down = 2 * width, 4 * height
    cells = [[_BLANK] * width for _ in range(height)]
    last: tuple[int, int] | None = None
    for step in sorted(values):
        column = min(int((step - 1) / max(steps - 1, 1) * across), across - 1)
        share = (values[step] - low) / (high - low) if high > low else 0.5
        row = round((1 - min(max(share, 0.0), 1.0)) * (down - 1))
        for x, y in _joined(last or (column, row), (column, row)):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        last = column, row
    return ["".join(" " if cell == _BLANK else chr(cell) for cell in line) for line in cells]


def _joined(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line between two dots, both included: a curve, not a cloud."""
    across, down = end[0] - start[0], end[1] - start[1]
    count = max(abs(across), abs(down), 1)
    for part in range(count + 1):
        yield start[0] + round(across * part / count), start[1] + round(down * part / count)
