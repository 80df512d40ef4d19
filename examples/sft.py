"""
Supervised fine-tuning that heals itself: any model and dataset of the Hub, every setting a flag.

Full fine-tuning:

```bash
python examples/sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name trl-lib/Capybara \
    --output_dir outputs/capybara \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 2e-5 \
    --packing
```

With LoRA, and with healing set otherwise (`--help` lists every setting under "self-healing"):

```bash
python examples/sft.py ... --use_peft --lora_r 32 --learning_rate 2e-4 --nan_patience 5 --max_recovery_attempts 20
```

All flags may stand in a YAML file, given by `--config run.yaml`. Without a Hub and without a GPU, on text that every
machine has: `python examples/sft.py --offline_tiny --output_dir outputs/tiny`.
"""

from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from rich.console import Console
from transformers.utils import is_torch_bf16_gpu_available
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from self_healing import HealingConfig, SelfHealingTrainer


@dataclass
class ExampleArguments:
    """
    What this script adds to the settings of TRL and of the healing.

    Args:
        offline_tiny (`bool`, *optional*, defaults to `False`):
            Train a tiny model with random weights on docstrings of the standard library instead.
    """

    offline_tiny: bool = field(
        default=False,
        metadata={"help": "Train a tiny model with random weights on docstrings of the standard library instead."},
    )


def from_the_hub(script_args: ScriptArguments, training_args: SFTConfig, model_args: ModelConfig) -> SFTTrainer:
    if model_args.model_name_or_path is None or script_args.dataset_name is None:
        raise SystemExit("Please name --model_name_or_path and --dataset_name, or set --offline_tiny.")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    dataset = load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )
    return SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def offline(training_args: SFTConfig, model_args: ModelConfig) -> SFTTrainer:
    from self_healing.demo import DemoSize, small_llama, stdlib_docstrings, train_tokenizer

    texts = stdlib_docstrings()[:512]
    size = DemoSize(tokens=64, vocabulary=512, width=32, layers=2)
    tokenizer = train_tokenizer(texts, size.vocabulary)
    training_args.max_length = size.tokens
    return SFTTrainer(
        model=small_llama(tokenizer, size, training_args.seed),
        args=training_args,
        train_dataset=Dataset.from_dict({"text": texts[32:]}),
        eval_dataset=Dataset.from_dict({"text": texts[:32]}) if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )


def main() -> None:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, HealingConfig, ExampleArguments))
    # TRL trains in bf16 unless told otherwise, and refuses to start where there is none.
    parser.set_defaults(bf16=is_torch_bf16_gpu_available())
    script_args, training_args, model_args, healing, example_args = parser.parse_args_and_config()

    if example_args.offline_tiny:
        trainer = offline(training_args, model_args)
    else:
        trainer = from_the_hub(script_args, training_args, model_args)

    healer = SelfHealingTrainer(trainer, healing)
    healer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)

    if trainer.is_world_process_zero():
        report = healer.get_report()
        Console().print(report.table() if report.incidents else f"Nothing had to be healed. Journal: {report.journal}")


if __name__ == "__main__":
    main()
