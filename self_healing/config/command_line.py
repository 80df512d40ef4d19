"""Settings that presets change, as parsers of command lines have to see them."""

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LeftOut:
    """
    The default of a setting that presets change, as parsers of command lines hand it over where nothing was given.
    """

    value: Any

    def __str__(self) -> str:
        return str(self.value)


class Switch(argparse.Action):
    """`--name` and `--no_name`, for a setting that is on by default and that presets change."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not values if (option_string or "").startswith("--no") else values)
