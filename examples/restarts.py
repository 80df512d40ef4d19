"""
A job that is started again when its process is gone, and goes on from its newest checkpoint that can be trusted.

```bash
torchrun --nproc-per-node 1 --max-restarts 3 examples/restarts.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name trl-lib/Capybara \
    --output_dir outputs/restarts \
    --save_steps 50
```

Nothing in the script says so: under a launcher that starts a job again (torchrun, `accelerate launch`, SLURM with
requeue, Kubernetes), [`SelfHealingTrainer`] resumes by itself, and a crash loop ends within its budget. To see it,
have it killed:

```bash
self-healing chaos examples/restarts.py --faults sigkill@50 --restarts 1 -- --offline-tiny --output_dir outputs/killed
```
"""

import os

from datasets import load_dataset
from offline import parse, show, text_of, tiny
from trl import SFTConfig, SFTTrainer

from self_healing import SelfHealingTrainer


def main() -> None:
    script_args, training_args, model_args, healing, offline = parse(SFTConfig, save_steps=20, save_total_limit=2)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt:
        print(f"Started again: {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} restarts.", flush=True)
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        trainer = SFTTrainer(
            material.model, args=training_args, processing_class=material.tokenizer, **text_of(material)
        )
    else:
        material = None
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        trainer = SFTTrainer(
            model_args.model_name_or_path, args=training_args, train_dataset=dataset[script_args.dataset_train_split]
        )

    healer = SelfHealingTrainer(trainer, healing)
    healer.train()
    trainer.save_model(training_args.output_dir)
    show(healer, material)


if __name__ == "__main__":
    main()
