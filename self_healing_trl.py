"""
The command `self-healing`: makes sure that what is imported as `self_healing` is this project, and runs it.

It lies outside of the package, because `self-healing` on PyPI is another project with the same import name: where that
one is installed, `self_healing.tools.cli` may not be there to say so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


DISTRIBUTION = "self-healing-trl"
NAMESAKE = "self-healing"

_FIX = (
    f"pip uninstall {DISTRIBUTION} {NAMESAKE}; pip install '{DISTRIBUTION}[trl]' (in a clone: pip install -e '.[trl]')"
)


def main() -> None:
    """Runs the command line, if it is this project's."""
    origin, namesake = _origin(), _namesake()
    if not _is_ours(origin):
        place = "nowhere" if origin is None else origin.parent
        sys.exit(
            f"self_healing is imported from {place}, and that is not self-healing-trl. {namesake or ''}Nothing was "
            f"run. Please put it right: {_FIX}"
        )
    if namesake is not None:
        print(
            f"{namesake}This command still finds {DISTRIBUTION}, but the next installation, or the removal of either, "
            f"may change that. Please put it right: {_FIX}",
            file=sys.stderr,
        )
    from self_healing.tools.cli import app

    app()


def _origin() -> Path | None:
    """The file that `import self_healing` would run."""
    spec = importlib.util.find_spec("self_healing")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _is_ours(origin: Path | None) -> bool:
    # Not by its place: of two distributions in one directory, the later one has overwritten the file.
    return origin is not None and "SelfHealingCallback" in origin.read_text(encoding="utf-8")


def _namesake() -> str | None:
    """Says that the other project is installed, if it is."""
    try:
        other = importlib.metadata.distribution(NAMESAKE)
    except importlib.metadata.PackageNotFoundError:
        return None
    # A clone that was installed to be edited, before it was given its own name, puts no file into the package.
    if not any(file.as_posix() == "self_healing/__init__.py" for file in other.files or ()):
        return None
    return (
        f"`{NAMESAKE}` {other.version} is installed: another distribution, imported as `self_healing` as well, which "
        "overwrites its files. "
    )
