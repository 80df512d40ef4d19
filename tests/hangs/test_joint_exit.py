"""`JointExit` in a made-up run, in which nothing is ended: what is written down of the failure of another rank."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from self_healing import FailureType, HealingConfig
from self_healing.healers.hangs.healer import JointExit
from self_healing.journal.journal import Journal
from self_healing.ranks.messages import Failure, Position
from self_healing.ranks.session import OtherRanks


def test_a_rank_was_where_it_waited_and_not_where_it_leaves_meanwhile(tmp_path: Path) -> None:
    config = HealingConfig(hang_action="notify")
    run = SimpleNamespace(config=config, journal=Journal(tmp_path, config, "run"), ranks=OtherRanks("run"), step=7)
    waits = Position(7, "step", 40, 2.0, 60.0, collective="all_gather", line="model.py:3, in forward: gather()")
    seen = [waits]
    joint_exit = JointExit(
        run,  # type: ignore[arg-type]
        position=lambda: seen.pop() if seen else Position(7, "step", 40, 2.1, 60.0, line="in call_off: with lock"),
        at_the_end=lambda: False,
        before_exit=lambda why, failure, code: None,
    )
    joint_exit.begin()
    joint_exit.failed(Failure(1, 7, FailureType.USER_CODE, "ValueError: only there"))
    for _ in range(1000):
        if run.journal.incidents and run.journal.incidents[0].outcome == "reported":
            break
        time.sleep(0.02)
    evidence = run.journal.incidents[0].evidence
    assert (evidence["waits_at"], evidence["collective"]) == (waits.line, "all_gather")
    assert "Rank 0: waits in all_gather" in evidence["diagnosis"]
