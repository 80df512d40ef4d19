"""Run by test_distributed.py under torchrun: the same short runs on two processes, healthy and struck."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from conftest import POISON_WORD, TEXTS, OutputFault, PoisonToken, build_tokenizer, journal, losses, sft_trainer
from transformers import set_seed

from self_healing import SelfHealingCallback


def digest(trainer: Any) -> str:
    content = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        content.update(value.numpy().tobytes())
    return content.hexdigest()


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    tokenizer = build_tokenizer()
    results: dict[str, Any] = {}

    def run(name: str, healed: bool = True, struck_rank: int | None = None, poison: bool = False) -> None:
        set_seed(1234)
        texts = [f"{text} {POISON_WORD}" if poison and index in (5, 17) else text for index, text in enumerate(TEXTS)]
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            texts=texts,
            callbacks=[SelfHealingCallback()] if healed else None,
            ddp_backend="gloo",
            max_steps=4,
        )
        fired = 0
        if poison:
            fault: Any = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
        else:
            fault = OutputFault(trainer.model, strike=lambda forward: forward == 4 and rank == struck_rank)
        trainer.train()
        fired = fault.fired
        results[name] = {
            "weights": digest(trainer),
            "losses": losses(trainer),
            "steps": trainer.state.global_step,
            "fired": fired,
            "outcomes": journal(directory / name, "outcome") if rank == 0 else [],
        }

    run("plain", healed=False)
    run("healthy")
    run("struck_on_0", struck_rank=0)
    run("struck_on_1", struck_rank=1)
    run("poison", poison=True)
    (directory / f"results.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
