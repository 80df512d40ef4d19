"""Writes rows of a step that are to blame to the quarantine file, with where in the data they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from ..config.healing_config import HealingConfig
from ..failures.recipes import Action
from ..hf.batches import content_hash, row_text
from ..hf.dataloader import RowSource
from ..hf.step import Window
from ..run.healer import CarryOut, HealingContext
from .quarantine import Quarantine, QuarantinedRow


class RowQuarantine:
    """Writes down the rows that a diagnosis names."""

    def __init__(self, config: HealingConfig, quarantine: Quarantine) -> None:
        self.config = config
        self._quarantine = quarantine

    def table(self) -> dict[Action, CarryOut]:
        """Maps the action to the method that carries it out."""
        return {Action.QUARANTINE_ROWS: self._quarantine_rows}

    def _quarantine_rows(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        window, diagnosis, trainer = context.step_in_hand, context.diagnosis, context.running.trainer
        if diagnosis is None:
            raise ValueError("quarantine_rows needs the diagnosis that names the rows")
        keep_text = self.config.quarantine_text
        rows = quarantined_rows(window, diagnosis.poison, trainer.processing_class, keep_text)
        self._quarantine.add(rows, window.step, window.epoch, context.incident.id)
        context.incident.evidence["rows"] = [
            {"dataset_index": row.dataset_index, "content_hash": row.content_hash, "prompt": row.prompt}
            for row in rows
        ]
        return {"rows": context.incident.evidence["rows"], "file": str(self._quarantine.path)}


def quarantined_rows(
    window: Window, poison: Mapping[int, list[int]], tokenizer: Any, keep_text: bool = True
) -> list[QuarantinedRow]:
    """Describes the rows to be dropped with all that is known; without their text, if that is not to be kept."""
    rows = []
    for index, bad in poison.items():
        layout, batch = window.layout(index), window.prepared[index]
        sources = window.sources(index)
        if layout is None:
            continue
        for row in bad:
            source = sources[row] if row < len(sources) else RowSource()
            prompt_keys = ("prompt_ids", "prompt_input_ids") if window.objective.online and keep_text else ()
            text_keys = ("input_ids", "completion_ids", "prompt_ids") if keep_text else ()
            text = row_text(batch, layout, row, tokenizer, text_keys) if text_keys else None
            rows.append(
                QuarantinedRow(
                    dataset_index=source.dataset_index,
                    segment=source.segment,
                    stream_ordinal=source.stream_ordinal,
                    content_hash=content_hash(batch, layout, row),
                    prompt=row_text(batch, layout, row, tokenizer, prompt_keys) if prompt_keys else None,
                    preview=None if text is None else text[:200],
                    micro_batch=index,
                    row=row,
                )
            )
    return rows
