"""
Callback for ms-swift: imported by a file named under `--external_plugins`, it is there as `--callbacks self_healing`.

Written against `swift.callbacks.callbacks_map` of ms-swift 4.6, whose entries are called with the training arguments
and the trainer.
"""

from __future__ import annotations

from swift.callbacks import callbacks_map
from transformers import Trainer, TrainingArguments

from ...callback import SelfHealingCallback
from .entering import settings_of_the_process


NAME = "self_healing"


def self_healing_callback(args: TrainingArguments, trainer: Trainer) -> SelfHealingCallback:
    """Makes the callback for a trainer of ms-swift that is still being built, with the preset of the process."""
    # Not a class: transformers builds a callback again from its state in a checkpoint, which knows no trainer.
    return SelfHealingCallback(settings_of_the_process())


callbacks_map[NAME] = self_healing_callback
