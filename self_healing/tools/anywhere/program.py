"""The program that `self-healing run` starts: found, looked at, and put in the place of this process."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn


NOT_FOUND, NOT_EXECUTABLE, REFUSED = 127, 126, 2
# Asked of the Python that will run the program: whether it reads PYTHONPATH and `sitecustomize`, and has this package.
# Its working directory does not count, which a script's `sys.path` does not begin with.
_QUESTION = """
import sys
sys.path[:] = [each for each in sys.path if each]
hooked = any(type(each).__module__ == "_self_healing_hook" for each in sys.meta_path)
import importlib.util, os
spec = importlib.util.find_spec("self_healing")
home = os.path.dirname(spec.origin) if spec is not None and spec.origin else ""
ours = os.path.isdir(os.path.join(home, "tools", "anywhere"))
print("hooked" if hooked else "deaf", "found" if ours else "missing")
"""


class ProgramError(Exception):
    """The program cannot be run, or would not be healed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def find_program(command: Sequence[str]) -> str:
    """Finds the program of a command as a shell does."""
    name = command[0]
    found = shutil.which(name)
    if found is not None:
        return found
    if Path(name).exists():
        how = f"Please make it so (chmod +x {shlex.quote(name)}), and name it with its directory."
        if name.endswith(".py"):
            how = f"Did you mean: self-healing run -- python {shlex.join(command)}"
        raise ProgramError(f"{name} is not an executable file. {how}", NOT_EXECUTABLE)
    advice = (
        "Please leave out the quotes: pass the program and each argument as separate words."
        if " " in name
        else "Is the environment active in which it is installed?"
    )
    raise ProgramError(f"There is no program {name!r}, neither on the PATH nor in {Path.cwd()}. {advice}", NOT_FOUND)


def python_of(program: str, arguments: Sequence[str]) -> list[str] | None:
    """Finds the Python that runs a program, with the switches it is given; `None` for what is not Python."""
    if _is_python(program):
        return [program, *_switches_in(arguments)]
    try:
        with open(program, "rb") as file:
            begins = file.read(4096).decode("utf-8", "replace")
    except OSError:
        return None
    if not begins.startswith("#!"):
        return None
    words = begins[2:].partition("\n")[0].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S" and "=" not in word]
        words[:1] = [shutil.which(word) or word for word in words[:1]]
    return [words[0], *_switches_in(words[1:])] if words and _is_python(words[0]) else None


def _is_python(program: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?", Path(program).name) is not None


def _switches_in(arguments: Sequence[str]) -> list[str]:
    """The options of one letter in front of what Python runs, without those that name it or take a value."""
    options = takewhile(lambda each: re.match("-[A-Za-z]", each), arguments)
    letters = [re.split("[cmWX]", each[1:])[0] for each in options]
    return [f"-{each}" for each in letters if each]


def refuse_what_would_not_be_healed(python: Sequence[str], given: Mapping[str, str]) -> None:
    """Asks a Python whether it hears of us, before a program runs for hours that is not healed."""
    answer = subprocess.run(
        [*python, "-c", _QUESTION], env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    ).stdout.split()
    if len(answer) < 2:
        # `python --version`, or one that does not start: it will say so itself.
        return
    if "deaf" in answer:
        raise ProgramError(
            f"Nothing would be healed by {shlex.join(python)}: -I and -E have Python ignore PYTHONPATH, and -S what "
            "is run when it starts. Please leave that option out, or use SelfHealingTrainer in the script.",
            REFUSED,
        )
    if "missing" in answer:
        raise ProgramError(
            f"Nothing would be healed by {python[0]}, which runs this program and has no self-healing-trl. Please "
            f"install it there: {python[0]} -m pip install self-healing-trl; or name the Python that has it: "
            f"{sys.executable}",
            REFUSED,
        )


def become(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Puts a program in the place of this process: signals, terminal and exit code are its own."""
    # Python ignores these, and what is ignored stays so in the program that follows.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        raise ProgramError(f"{program} cannot be executed: {error.strerror}.", NOT_EXECUTABLE) from error
