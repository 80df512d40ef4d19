"""`python -m self_healing`, for launchers that start a module: the command line."""

from .tools.cli import app


if __name__ == "__main__":
    app(prog_name="self-healing")
