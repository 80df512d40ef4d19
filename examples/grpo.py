"""
GRPO with a reward that can be checked, healing itself: grade-school mathematics, where an answer is right or wrong.

```bash
python examples/grpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name openai/gsm8k --dataset_config main \
    --output_dir outputs/grpo \
    --per_device_train_batch_size 8 \
    --num_generations 8 \
    --learning_rate 1e-6
```

Without a Hub and without a GPU: `python examples/grpo.py --offline-tiny --output_dir outputs/tiny-grpo`. There the
tiny model is to answer in digits, which can be checked as well, and which it learns within a minute. That all of its
answers are cut off, at 8 tokens, is a red flag and is reported as one.
"""

import re

from datasets import Dataset, load_dataset
from offline import parse, show, tiny
from trl import GRPOConfig, GRPOTrainer, get_peft_config

from self_healing import SelfHealingTrainer


def right_number(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """1 where the last number of a completion is the one after the `####` of the answer, else 0."""
    said = [re.findall(r"-?[\d,]*\d", completion) for completion in completions]
    wanted = [each.rpartition("####")[2].strip().replace(",", "") for each in answer]
    return [float(bool(last) and last[-1].replace(",", "") == right) for last, right in zip(said, wanted, strict=True)]


def digits(completions: list[str], **kwargs: object) -> list[float]:
    """The share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, each)) / max(len(each), 1) for each in completions]


def main() -> None:
    script_args, training_args, model_args, healing, offline = parse(
        GRPOConfig, max_steps=40, max_completion_length=8, num_generations=8, per_device_train_batch_size=32
    )
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        model, tokenizer, reward = material.model, material.tokenizer, digits
        data = Dataset.from_dict({"prompt": [text[:40] for text in material.training]})
    else:
        model, tokenizer, reward = model_args.model_name_or_path, None, right_number
        data = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        data = data[script_args.dataset_train_split].rename_column("question", "prompt")
    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=reward,
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
