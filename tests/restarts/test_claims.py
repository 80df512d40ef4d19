"""What is done about an exception that left `train()`, asked of healers without a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from self_healing import Action, HealingConfig, Incident
from self_healing.healers.assembly import assemble
from self_healing.healers.oom.healer import MemoryOutsideOfModel


def test_memory_that_runs_out_twice_in_a_step_ends_the_run_where_the_batch_is_to_stay(tmp_path: Path) -> None:
    run = assemble(HealingConfig(oom_reduce_batch=False), tmp_path, wrapped=True)
    state = SimpleNamespace(global_step=0)
    healer = MemoryOutsideOfModel(run, SimpleNamespace(state=state))
    remedies = []
    for state.global_step in (3, 4, 4):
        claim = healer.claim(MemoryError(), Incident("1", 7, "made up"))
        assert claim is not None
        remedies.append(claim.remedy)
    assert remedies == [Action.FREE_MEMORY, Action.FREE_MEMORY, Action.STOP]
