"""
Run by test_collectives.py under torchrun: counts the collectives of healthy runs, without and with healing, and the
calls of Python that a healthy step has more.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conftest import VOTES, build_tokenizer, leave_together, sft_trainer
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

from self_healing import HealingConfig, SelfHealingCallback


# A run of so many steps, and one of some more: what lies between them is that of the steps.
SHORT, LONG = 3, 5
# Nor is one of them named here because it does not get to run: of that all ranks would be told in a collective.
PATIENT = {"collective_timeout_check_seconds": 1000.0, "hang_floor_seconds": 1000.0}

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
of_steps = importlib.import_module("counts")


def collectives_in(profiled: profile) -> list[str]:
    """In their order. Not by its `events()`, the tree of all operators, which takes longer to make than the run."""
    found = [each for each in profiled.profiler.kineto_results.events() if each.name().startswith("c10d::")]
    return [each.name() for each in sorted(found, key=lambda each: each.start_ns())]


def main(directory: Path) -> None:
    tokenizer = build_tokenizer()
    asked = VOTES.questions

    def counts(healed: bool, steps: int) -> tuple[Counter[str], Counter[str]]:
        """Of a whole run: by operation, and by what was asked."""
        set_seed(1234)
        trainer = sft_trainer(
            directory / f"{healed}-{steps}",
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(**PATIENT))] if healed else None,
            ddp_backend="gloo",
            max_steps=steps,
        )
        before = len(asked)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            trainer.train()
        return Counter(collectives_in(profiled)), Counter(asked[before:])

    counts(healed=False, steps=1)
    results: dict[str, Any] = {}
    for name, healed in (("plain", False), ("healed", True)):
        (short, short_by), (long, long_by) = counts(healed, SHORT), counts(healed, LONG)
        results[name] = {
            "per_step": {each: (long[each] - short[each]) / (LONG - SHORT) for each in long},
            "per_step_by_question": {each: (long_by[each] - short_by[each]) / (LONG - SHORT) for each in long_by},
            "run": long,
            "run_by_question": long_by,
        }
    of_steps.WARM, of_steps.MEASURED = 8, 16
    results["calls"] = of_steps.added("sft", "fp32", 2, **PATIENT)["calls"]
    (directory / f"results.{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_together()
