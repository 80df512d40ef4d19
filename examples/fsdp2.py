"""
Sharded training (FSDP2) that heals itself: all ranks vote before each step, and decide the same.

```bash
torchrun --nproc-per-node 8 --max-restarts 3 examples/fsdp2.py \
    --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name trl-lib/Capybara \
    --output_dir outputs/fsdp2 \
    --fsdp \
    --per_device_train_batch_size 1
```

What heals inside of a step, and going back to a snapshot, work as on one process; an exception is left to the
launcher. On two processes without a GPU:

```bash
torchrun --nproc-per-node 2 examples/fsdp2.py --offline-tiny --output_dir outputs/tiny-fsdp2
```
"""

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import load_dataset
from offline import parse, show, text_of, tiny
from torch.distributed.tensor import DTensor
from trl import SFTConfig, SFTTrainer

from self_healing import SelfHealingTrainer


def shard_on_the_cpu() -> None:
    """Has accelerate 1.15 take the CPU for a device to shard over; else it trains under DDP, and does not say so."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_TORCH_DEVICE="cpu")
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    torch.distributed.init_process_group("gloo")


def main() -> None:
    if not torch.cuda.is_available():
        shard_on_the_cpu()
    # A resume of sharded training is not healed yet: the weights are saved once, in the end.
    script_args, training_args, model_args, healing, offline = parse(SFTConfig, ddp_backend="gloo", save_strategy="no")
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        trainer = SFTTrainer(
            material.model, args=training_args, processing_class=material.tokenizer, **text_of(material)
        )
    else:
        if not training_args.fsdp:
            raise SystemExit("Please add --fsdp: without it the model is copied to each process, and not sharded.")
        material = None
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        trainer = SFTTrainer(
            model_args.model_name_or_path, args=training_args, train_dataset=dataset[script_args.dataset_train_split]
        )

    healer = SelfHealingTrainer(trainer, healing)
    healer.train()
    sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    if trainer.is_world_process_zero():
        print(f"The weights are {'' if sharded else 'not '}sharded over {training_args.world_size} processes.")
    trainer.save_model(training_args.output_dir)
    show(healer, material)


if __name__ == "__main__":
    main()
