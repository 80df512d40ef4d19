"""
The command line: `self-healing demo`, `report` and `config`.

What a command needs is imported when it runs, so that one that needs little does not wait for TRL and the model code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


app = typer.Typer(
    name="self-healing",
    help="Keeps Hugging Face Trainer and TRL runs alive and correct.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Preset(StrEnum):
    """The presets of [`HealingConfig`]."""

    DEFAULT = "default"
    AGGRESSIVE = "aggressive"
    CONSERVATIVE = "conservative"


@app.command()
def demo(
    healing: Annotated[
        bool,
        typer.Option("--healing/--no-healing", help="Heal the faults, or show what they do to the plain trainer."),
    ] = True,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Where the journal goes. Left out, a fresh directory below outputs/.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.", min=0)] = 0,
) -> None:
    """Train a small language model while three faults strike: about a minute on two cores, offline."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"The demo trains with TRL, and {' and '.join(missing)} cannot be imported here. "
            "Please install it: pip install 'self-healing[trl]'",
            err=True,
        )
        raise typer.Exit(1)

    import torch

    from .demo import fresh_run_dir, run_demo

    # Matrices this small only get slower when they are spread over many cores.
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    directory = fresh_run_dir() if output_dir is None else output_dir
    result = run_demo(directory, healing=healing, seed=seed)
    if healing:
        typer.echo(f"Again: self-healing report {directory}")
    if result.problems:
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="The output_dir (or healing_dir) of a run.", show_default=False)],
) -> None:
    """Show the incidents of a run, read from its journal."""
    from rich.console import Console

    from .report import HealingReport

    try:
        picture = HealingReport.from_run_dir(run_dir)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False)
    if picture.healthy:
        console.print("Nothing had to be healed.")
    else:
        console.print(picture.table())
        console.print(
            f"{len(picture.incidents)} incidents, {picture.steps_lost} steps and {picture.seconds_lost:.1f} s lost."
        )
    console.print(f"Journal: {picture.journal}", soft_wrap=True)


@app.command()
def config(
    preset: Annotated[Preset, typer.Option(help="Which settings to start from.")] = Preset.DEFAULT,
) -> None:
    """Print a configuration as TOML, to be edited and read with HealingConfig.from_toml."""
    from .config import HealingConfig

    makers: dict[Preset, Callable[[], HealingConfig]] = {
        Preset.DEFAULT: HealingConfig,
        Preset.AGGRESSIVE: HealingConfig.aggressive,
        Preset.CONSERVATIVE: HealingConfig.conservative,
    }
    typer.echo(makers[preset]().to_toml(), nl=False)


if __name__ == "__main__":
    app()
