"""The launcher of this process: which it is, how often it has restarted the job, and whether it will again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from .config.healing_config import HealingConfig
from .system.processes import Process


# EX_TEMPFAIL of sysexits.h: "temporary failure, try again later".
EXIT_FOR_RESTART = 75


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this process."""

    launcher: str
    restarts: int
    restarts_left: int | None
    by_agent: bool = False
    agent_age: float | None = None
    agent_is_parent: bool = False
    requeued: bool = False
    job: str = ""
    rendezvous: str = ""
    in_a_pod: bool = False

    @property
    def started_again(self) -> bool:
        """Whether the launcher has started the job before this."""
        return self.restarts > 0


def launch_of(environment: Mapping[str, str] | None = None) -> Launch:
    """Reads the launch from the environment variables of torchrun and SLURM."""
    environment = os.environ if environment is None else environment
    requeued = _number(environment, "SLURM_RESTART_COUNT")
    job = environment.get("SLURM_JOB_ID", "")
    in_a_pod = "KUBERNETES_SERVICE_HOST" in environment
    if "TORCHELASTIC_RUN_ID" in environment:
        restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT")
        left = _number(environment, "TORCHELASTIC_MAX_RESTARTS") - restarts
        agent_age, agent_is_parent = _agent()
        # A requeued job starts another torchrun, whose own count begins at 0 again.
        return Launch(
            "torchrun",
            restarts + requeued,
            max(left, 0),
            by_agent=restarts > 0,
            agent_age=agent_age,
            agent_is_parent=agent_is_parent,
            requeued=requeued > 0,
            job=job,
            rendezvous=environment["TORCHELASTIC_RUN_ID"],
            in_a_pod=in_a_pod,
        )
    if job:
        return Launch("slurm", requeued, None, requeued=requeued > 0, job=job)
    return Launch("none", 0, None, in_a_pod=in_a_pod)


def of_all_ranks(launches: Sequence[Launch]) -> Launch:
    """Puts together what the ranks of a job know of its launch."""
    ages = [launch.agent_age for launch in launches]
    known = [age for age in ages if age is not None]
    return replace(
        launches[0],
        restarts=max(launch.restarts for launch in launches),
        by_agent=any(launch.by_agent for launch in launches),
        # The one that has been there longest: a node may have been replaced.
        agent_age=max(known) if known and len(known) == len(ages) else None,
        requeued=any(launch.requeued for launch in launches),
    )


def _agent() -> tuple[float | None, bool]:
    """Looks how old torchrun is, the nearest process above this one that it did not start; and whether next to it."""
    try:
        for distance, process in enumerate(psutil.Process().parents()):
            if "TORCHELASTIC_RUN_ID" not in process.environ():
                return Process.of(process.pid).age, distance == 0
    except psutil.Error:
        # In a process namespace of its own, or as another user.
        pass
    return None, False


def restarts_on_exit(config: HealingConfig) -> bool:
    """Whether a process that ends with [`EXIT_FOR_RESTART`] is started again, as far as can be known."""
    if config.launcher_restarts != "auto":
        return config.launcher_restarts == "yes"
    return (launch_of().restarts_left or 0) > 0


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0
