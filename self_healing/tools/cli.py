"""
The command line: `self-healing run`, `demo`, `report`, `check`, `clean`, `replay`, `doctor`, `chaos`, `judge`,
`config` and `rules`.

What a command needs is imported when it runs, so that one that needs little does not wait for TRL and the model code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from .. import __version__
from ..system.files import jsonable
from .chaos.faults import GRAMMAR, KINDS, FaultError


# Without rich markup: it takes `[@STEP]` for markup of its own, and gives each flag a `<bool>`.
app = typer.Typer(
    name="self-healing",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"self-healing-trl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Keeps Hugging Face Trainer and TRL runs alive and correct."""


def _failed(message: object, code: int = 2) -> typer.Exit:
    typer.echo(str(message), err=True)
    return typer.Exit(code)


class Preset(StrEnum):
    """The presets of [`HealingConfig`]."""

    DEFAULT = "default"
    AGGRESSIVE = "aggressive"
    CONSERVATIVE = "conservative"


_RunDir = Annotated[Path, typer.Argument(help="The output_dir (or healing_dir) of a run.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Settings = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings (self-healing config writes one).")
]
# Of `report`, by the state of the run; 2 is a directory without a journal.
_EXIT_CODES = {"stopped": 1, "left": 1, "died": 1, "running": 3, "unknown": 4}


@app.command()
def demo(
    healing: Annotated[
        bool, typer.Option("--healing/--no-healing", help="Heal the faults as well, or show the plain trainer alone.")
    ] = True,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos/--no-chaos", help="Then have a job run out of memory, hang and be killed (half a minute)."
        ),
    ] = True,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where all of it goes. Left out, a fresh directory below outputs/.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.", min=0)] = 0,
) -> None:
    """
    See faults strike a small model, plain and healed. Takes two minutes, offline.

    Exit code 0: all that was to be healed was; 1: something was not, or TRL is missing; 2: the directory is in use.
    """
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise _failed(
            f"The demo trains with TRL, and {' and '.join(missing)} cannot be imported here. "
            "Please install it: pip install 'self-healing-trl[trl]', or in a clone: pip install -e '.[trl]'",
            1,
        )

    from .demo.show import run_demo, run_rehearsal

    # Named by the time, so that the journals of two demos do not run into one.
    directory = Path(time.strftime("outputs/demo-%Y%m%d-%H%M%S")) if output_dir is None else output_dir
    if directory.is_dir() and any(directory.iterdir()):
        raise _failed(
            f"There is something in {directory} already, and the demo begins in a directory of its own. "
            "Please name another one with --output-dir, or leave it out."
        )
    problems = run_demo(directory, healing=healing, seed=seed).problems
    if healing and chaos:
        problems = problems + run_rehearsal(directory / "chaos", seed=seed).problems
    if healing:
        typer.echo(f"Again: self-healing report {shlex.quote(str(directory))}")
    if problems:
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: _RunDir,
    as_json: _AsJson = False,
    briefing: Annotated[
        bool, typer.Option("--agent", help="Print at most 60 lines of Markdown for whoever decides what to do next.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write it to this file, as one self-contained page with charts.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Which run to show, if there are several: its name or a beginning.", show_default="the newest"
        ),
    ] = None,
) -> None:
    """
    Show the state of a run, its incidents and what to do next. All of it is read from its files.

    Exit code 0: it ended, or wrote nothing yet; 1: it stopped, left or died before its end; 3: it goes on;
    4: not known; 2: no report.
    """
    if as_json and briefing:
        raise _failed("--json and --agent each print all there is to print. Please choose one of them.")

    from ..report.healing_report import HealingReport
    from ..report.journals import read_journals
    from ..report.reading import read_run

    try:
        found = read_run(run_dir, run, charts=as_json or briefing or html is not None)
        # What cannot be read is among the remarks of the other.
        summary = HealingReport.of_journals(read_journals(run_dir), run and found.run)
    except (OSError, ValueError) as error:
        raise _failed(error) from None
    if html is not None:
        from ..report.page.rendering import write_page

        try:
            write_page(found, html)
        except OSError as error:
            raise _failed(f"{html} cannot be written: {error.strerror}. Please name a file that can be.") from None
        typer.echo(f"Written: {html}", err=as_json or briefing)
    try:
        if as_json:
            typer.echo(json.dumps(found.to_dict()))
        elif briefing:
            from ..report.output import briefing_of

            typer.echo(briefing_of(found), nl=False)
        elif html is None:
            from ..report.output import show

            show(found, summary, Console(highlight=False))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        typer.echo(f"The report cannot be printed: {error.strerror}.", err=True)
        # What is left in the buffer is not tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(2) from None
    raise typer.Exit(_EXIT_CODES.get(summary.status.state if summary.status is not None else "", 0))


@app.command()
def check(
    run_dir: Annotated[Path, typer.Argument(help="The output_dir of a run, or one checkpoint.")],
    as_json: _AsJson = False,
) -> None:
    """
    Tell which checkpoints of a run can be resumed from, and why not.

    Exit code 0: one of them can; 1: none can; 2: there is no such directory.
    """
    if not run_dir.is_dir():
        raise _failed(f"There is no directory {run_dir}. Please name the output_dir of a run, or a checkpoint.")

    from ..checkpoints.choice import vet_all
    from ..checkpoints.marker import checkpoints_in, number_of
    from ..checkpoints.vetting import vet
    from ..system.files import PINNED_DIR, STATE_FILE

    named = number_of(run_dir.resolve()) is not None
    # `trainer.save_state()` leaves one in the output_dir, too.
    single = named or (not checkpoints_in(run_dir) and (run_dir / STATE_FILE).is_file())
    verdicts = [vet(run_dir)] if single else vet_all(run_dir)
    # As a resume chooses: one that lacks the part of a process only if there is no other.
    usable = [verdict for verdict in verdicts if verdict.usable]
    chosen = next((verdict for verdict in usable if verdict.whole), usable[0] if usable else None)
    if as_json:
        found = {"resume_from": chosen and chosen.path, "checkpoints": [asdict(verdict) for verdict in verdicts]}
        typer.echo(json.dumps(found, indent=2))
        raise typer.Exit(0 if usable else 1)
    # In a file, a line that is searched for is in one piece.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    picture = Table(
        "checkpoint", Column("step", justify="right"), "verdict", "standing", "reason", box=None, pad_edge=False
    )
    regular = {(each.step, each.standing, each.reason) for each in verdicts if Path(each.path).parent == run_dir}
    for verdict in verdicts:
        known = (verdict.step, verdict.standing, verdict.reason) in regular
        if known and Path(verdict.path).parent.name == PINNED_DIR:
            # Hard links to the same files.
            continue
        name = str(run_dir) if single else str(Path(verdict.path).relative_to(run_dir))
        told = Text("can be resumed from", "green") if verdict.usable else Text("no", "bold red")
        step = "" if verdict.step is None else str(verdict.step)
        picture.add_row(Text(name), step, told, verdict.standing, Text(verdict.reason))
    if verdicts:
        console.print(picture)
    if chosen is None:
        none = "None can be resumed from." if verdicts else f"There is no checkpoint in {run_dir}."
        console.print(none, soft_wrap=True)
        raise typer.Exit(1)
    how = repr(chosen.path) if single else "True"
    console.print(f"resume_from_checkpoint={how} takes {chosen.path} (step {chosen.step}).", soft_wrap=True)


@app.command()
def clean(run_dir: Annotated[Path, typer.Argument(help="The output_dir of a run that has ended.")]) -> None:
    """
    Free the shared memory that killed runs have left on this machine. Nothing on disk is touched.

    Exit code 0: freed, or there was nothing; 1: it is in use, or cannot be removed; 2: there is no such directory.
    """
    from ..rollback.shared_memory import directory_of, processes_using, remove_states

    directory, using = directory_of(run_dir), processes_using(run_dir)
    if using:
        raise _failed(
            f"{directory} is in use by process {', '.join(map(str, using))}. Please end the run first; it frees the "
            "memory itself if it ends well.",
            1,
        )
    # What is left in memory outlives an output_dir that was removed.
    if not directory.exists() and not run_dir.is_dir():
        raise _failed(
            f"There is no directory {run_dir}, and nothing of it in memory. Please name the output_dir of a run."
        )
    if not directory.exists():
        typer.echo(f"Runs of {run_dir} have left nothing in {directory.parent}.")
        return
    freed = remove_states(run_dir)
    if directory.exists():
        raise _failed(f"{directory} could not be removed: please look at whose it is.", 1)
    typer.echo(f"Freed {freed / 1e6:,.0f} MB: {directory}")


@app.command()
def replay(
    run_dir: _RunDir,
    incident: Annotated[
        str | None, typer.Argument(help="Its id or its step. Left out, the newest whose batch was kept.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Whose weights to use, in place of those kept or of the newest checkpoint.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model comes from: a directory, or a name on the Hub.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the incidents whose batch was kept.")] = False,
    as_json: _AsJson = False,
) -> None:
    """
    Compute the step of an incident again. Names the module and row in which the first NaN or Inf appears, if any does.

    Exit code 0: it did not come back; 1: it comes back; 2: it could not be replayed.
    """
    import traceback
    import warnings

    # Of several devices the Trainer would put a replica of the model on each, and split the batch between them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    from transformers.utils import logging as transformers_logging

    from .replay import kept_incidents
    from .replay import replay as replayed
    from .replay_model import ReplayError

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        if show:
            typer.echo(
                "\n".join(map(str, kept_incidents(run_dir))) or f"No batch was kept for any incident in {run_dir}."
            )
            return
        found = replayed(run_dir, incident, checkpoint=checkpoint, model=model)
    except ReplayError as error:
        raise _failed(error) from None
    except Exception as error:
        raise _failed(f"{traceback.format_exc()}\nThe step could not be computed: {error}") from None
    typer.echo(json.dumps(jsonable(found.to_dict()), indent=2) if as_json else str(found))
    raise typer.Exit(1 if found.came_back else 0)


@app.command()
def doctor(
    directory: Annotated[
        Path, typer.Argument(help="The output_dir of a run, or where its script lies.", show_default="here")
    ] = Path("."),
    as_json: _AsJson = False,
) -> None:
    """
    Look at this machine before a run. Shows versions, device, launcher, memory, disk, and what will be healed here.

    Under torchrun (torchrun --nproc-per-node 8 -m self_healing doctor) at all ranks: whether each computes right, and
    their sums are. Rank 0 prints.

    Exit code 0: all will work; 1: something will not; 2: neither the directory exists nor the one it would be made in.
    """
    from ..system.processes import end_at_once
    from .doctor import check_up, print_checkup
    from .doctor_machine import is_in_job, look_at_job

    # A run makes its output_dir, but neither a disk nor a mount that is not there.
    if not os.path.exists(directory) and not os.path.exists(directory.parent):
        raise _failed(
            f"{directory} does not exist, and neither does {directory.parent}. Please check the path, or "
            "make the directory first if a run is to write there."
        )

    job = None
    if is_in_job():
        job = look_at_job()
        # Threads of gloo outlive the process group, and what they free while the interpreter ends aborts the process
        # (torch 2.13, https://github.com/pytorch/pytorch/pull/179291).
        if job.rank != 0:
            end_at_once(0 if job.works else 1)
    found = check_up(directory, job=job)
    if as_json:
        typer.echo(json.dumps({"works": found.works, **asdict(found)}, indent=2))
    else:
        print_checkup(found, Console(highlight=False))
    if job is not None:
        end_at_once(0 if found.works else 1)
    if not found.works:
        raise typer.Exit(1)


@app.command(epilog=f"KIND is one of: {', '.join(KINDS)}.")
def chaos(
    script: Annotated[Path, typer.Argument(help="The training script; it is not changed.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, after a `--`.")] = None,
    faults: Annotated[
        str, typer.Option(help=f"What to inject: {GRAMMAR}; several with commas between them, or all.")
    ] = "all",
    seed: Annotated[int, typer.Option(help="Seed of what is drawn at random: steps and order.", min=0)] = 0,
    restarts: Annotated[int, typer.Option(help="How often torchrun starts the script again.", min=0)] = 0,
    nproc_per_node: Annotated[int, typer.Option(help="Processes that train together, under torchrun.", min=1)] = 1,
    ledger: Annotated[
        Path | None, typer.Option(help="Where to write what has struck. Left out, a new chaos-....jsonl here.")
    ] = None,
) -> None:
    """
    Run a script while faults strike, and show what it survived.

    Exit code 0: it survived every fault, and ended well; 1: it did not, or none struck; 2: it was not started.
    """
    from .chaos.rehearsal import rehearse, survival_table

    if not script.is_file():
        raise _failed(f"There is no script {script}. Please name a Python file that trains.")
    book = Path(time.strftime("chaos-%Y%m%d-%H%M%S.jsonl")) if ledger is None else ledger
    if book.exists() and book.stat().st_size > 0:
        raise _failed(
            f"{book} holds an earlier rehearsal, and what has struck there would not strike again. "
            "Please name another file with --ledger, or remove it."
        )
    try:
        code, rows = rehearse(script, faults, arguments or (), seed, restarts, book, nproc_per_node)
    except FaultError as error:
        raise _failed(error) from None
    console = Console(highlight=False)
    if rows:
        console.print(survival_table(rows))
    else:
        console.print("No fault struck: the script made no Trainer, or never called train().")
    all_survived = bool(rows) and all(row.survived for row in rows)
    ending = "normally" if code == 0 else f"with exit code {code}"
    verdict = "Every fault was survived." if all_survived and code == 0 else "Not every fault was survived."
    console.print(f"The script ended {ending}. {verdict}")
    if book.exists():
        console.print(f"Ledger: {book}", soft_wrap=True)
    if code != 0 or not all_survived:
        raise typer.Exit(1)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments: trl sft ..., python train.py ...")
    ],
    preset: Annotated[
        Preset | None,
        typer.Option(help="Which settings to use. Left out, those that SELF_HEALING_PRESET names in the environment."),
    ] = None,
    settings: _Settings = None,
) -> None:
    """
    Run a program that trains, healed. For example: self-healing run -- trl sft --config sft.yaml

    Nothing in the program changes, and its exit code is this command's. Codes 2, 126 and 127: nothing was started.
    """
    import logging

    from ..config.healing_config import HealingConfig
    from ..config.schema import ConfigurationError
    from ..healers.numerics.detectors.rules import RuleError
    from ..journal.terminal import chosen_level
    from .anywhere.entering import PRESET_VARIABLE, environment, read_settings
    from .anywhere.program import ProgramError, become, find_program, python_of, refuse_what_would_not_be_healed

    if preset is not None and settings is not None:
        raise _failed(
            f"[self_healing] --preset {preset} and --config {settings} both give all settings. Please choose one of "
            "them: in a file, `healing_preset` under [preset] gives those that are left out."
        )
    try:
        chosen: HealingConfig | None = None
        if settings is not None:
            chosen = read_settings(settings)
        elif preset is not None:
            chosen = HealingConfig.from_dict({"healing_preset": preset.value})
        elif (named := os.environ.get(PRESET_VARIABLE)) and named not in list(Preset):
            raise ConfigurationError(
                f"{PRESET_VARIABLE} is {named!r}, which is not one of: {', '.join(Preset)}. Please change it, or "
                "unset it."
            )
        program = find_program(command)
        env = environment(chosen)
        python = python_of(program, command[1:])
        if python is not None:
            refuse_what_would_not_be_healed(python, env)
        if chosen_level() <= logging.INFO:
            # Which settings are in force is known in `train()`: the program may have its own, or name a preset.
            origin = f"the settings of {settings}" if settings is not None else preset and f"preset {preset}"
            given = f" (given: {origin})" if origin else ""
            typer.echo(
                f"[self_healing] Every Trainer of this program is healed{given}, and says so when it begins to train.",
                err=True,
            )
        become(program, command, env)
    except ProgramError as error:
        raise _failed(f"[self_healing] {error}", error.code) from None
    except (ConfigurationError, RuleError, OSError) as error:
        raise _failed(f"[self_healing] {error}") from None


@app.command()
def judge(
    log: Annotated[Path, typer.Argument(help="A trainer_state.json, a directory with one, or a CSV file.")],
    objective: Annotated[
        str | None, typer.Option(help="What was trained, such as sft or grpo.", show_default="told by the columns")
    ] = None,
    settings: _Settings = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens the model knows.", min=2)] = None,
    as_json: _AsJson = False,
) -> None:
    """
    Tell what would have been done in a run, from its log. Nothing is trained.

    Exit code 0: nothing, or only reports; 1: something would have been healed or stopped; 2: there is no such log.
    """
    from ..config.healing_config import HealingConfig
    from .judge import judge_log

    try:
        config = None if settings is None else HealingConfig.from_toml(settings)
        found = judge_log(log, objective, config, vocabulary)
    except OSError as error:
        raise _failed(f"{log} cannot be read: {error.strerror}. Please check the path.") from None
    except ValueError as error:
        raise _failed(error) from None
    if as_json:
        typer.echo(json.dumps([jsonable(asdict(each)) for each in found], indent=2))
    else:
        for each in found:
            told = each.evidence.get("diagnosis") or ", ".join(_told_number(*item) for item in each.evidence.items())
            typer.echo(f"step {each.step}: {each.symptom.removeprefix('rule:')} -> {each.done} ({told})")
        if not found:
            typer.echo("Nothing stands out in this log.")
    if any(each.acts for each in found):
        raise typer.Exit(1)


def _told_number(name: str, value: object) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


@app.command()
def config(preset: Annotated[Preset, typer.Option(help="Which settings to start from.")] = Preset.DEFAULT) -> None:
    """
    Print a configuration as TOML. Edit it, and read it with HealingConfig.from_toml.

    Exit code 0: printed; 2: there is no such preset.
    """
    from ..config.healing_config import HealingConfig

    typer.echo(HealingConfig(healing_preset=preset.value).to_toml(), nl=False)


@app.command("rules")
def show_rules(
    objective: Annotated[
        str | None, typer.Option(help="Only the rules for this kind of training, such as grpo.")
    ] = None,
    own: Annotated[
        Path | None, typer.Option("--rules", help="A TOML file of your own, merged over the table.")
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print TOML, to be edited and given to --rules.")] = False,
) -> None:
    """
    Print the table of rules on logged metrics that is in force.

    Exit code 0: printed; 2: there is no such objective, or the file cannot be read.
    """
    from ..healers.numerics.detectors.rules import OBJECTIVES, RuleError, load_rules, rules_for, rules_to_toml

    if objective is not None and objective not in OBJECTIVES:
        raise _failed(f"There is no objective {objective!r}. Please choose one of: {', '.join(OBJECTIVES)}.")
    try:
        table = load_rules(own)
    except OSError as error:
        raise _failed(f"{own} cannot be read: {error.strerror}. Please check the path.") from None
    except RuleError as error:
        raise _failed(error) from None
    if toml:
        # Also those that are switched off: left out, they would be on again when the file is read.
        chosen = [rule for rule in table if objective is None or objective in rule.objectives]
        typer.echo(rules_to_toml(chosen), nl=False)
        return

    console = Console(highlight=False)
    picture = Table(show_lines=True, expand=True)
    for title, share in (("rule, metric", 5), ("healthy", 2), ("red flag, remedy", 5)):
        picture.add_column(title, ratio=share, overflow="fold")
    picture.add_column("then", width=8)
    for rule in rules_for(table, objective) if objective is not None else [rule for rule in table if rule.enabled]:
        name = Text.assemble((rule.name, "bold"), f"\n{rule.metric}", (f"\n{', '.join(rule.objectives)}", "dim"))
        lasting = f"{rule.steps} steps, {rule.observations} logs" if rule.steps > 1 else f"{rule.observations} logs"
        red_flag = Text.assemble(f"{rule.describe()}; for {lasting}\n", (rule.remedy, "dim"))
        picture.add_row(name, Text(rule.healthy), red_flag, Text(f"{rule.severity}\n{rule.action}"))
    console.print(picture)


if __name__ == "__main__":
    app()
