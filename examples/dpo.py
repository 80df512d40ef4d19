"""
Direct preference optimisation that heals itself: any model and preference dataset of the Hub, every setting a flag.

```bash
python examples/dpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --output_dir outputs/dpo \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 1e-6
```

Without a Hub and without a GPU: `python examples/dpo.py --offline-tiny --output_dir outputs/tiny-dpo`. There the tiny
model learns to prefer the end of a docstring to the same words in another order.
"""

import copy
import random

from datasets import Dataset, load_dataset
from offline import parse, show, tiny
from trl import DPOConfig, DPOTrainer, get_peft_config

from self_healing import SelfHealingTrainer


def preferences(texts: list[str]) -> Dataset:
    """Pairs of answers: the second half of a text as it is, and with its words shuffled."""
    rng, rows = random.Random(0), []
    for text in texts:
        words = text.split()
        half = len(words) // 2
        shuffled = rng.sample(words[half:], len(words) - half)
        prompt, chosen, rejected = (" ".join(part) for part in (words[:half], words[half:], shuffled))
        rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
    return Dataset.from_list(rows)


def main() -> None:
    script_args, training_args, model_args, healing, offline = parse(DPOConfig, max_steps=60, learning_rate=1.5e-3)
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        model, tokenizer, data = material.model, material.tokenizer, preferences(material.training)
        # Of a model that has a name, TRL loads it by that; of one with an adapter, it is the model without.
        reference = None if model_args.use_peft else copy.deepcopy(model)
    else:
        model, tokenizer, reference = model_args.model_name_or_path, None, None
        data = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        data = data[script_args.dataset_train_split]
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=training_args,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )

    healer = SelfHealingTrainer(trainer, healing)
    healer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    show(healer)


if __name__ == "__main__":
    main()
