"""The annotation of a setting: the section it stands in, and the numbers it takes."""

from dataclasses import dataclass


SECTIONS = (
    "preset",
    "nonfinite",
    "detection",
    "clipping",
    "rollback",
    "memory",
    "data",
    "recovery",
    "hangs",
    "restarts",
    "journal",
)


class ConfigurationError(ValueError):
    """A setting cannot be used; the message names it, its value, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotates a field of [`HealingConfig`] with its section in TOML and the numbers it takes."""

    section: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def allows(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
