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
machine has: `python examples/sft.py --offline-tiny --output_dir outputs/tiny`.
"""

from datasets import load_dataset
from offline import parse, show, text_of, tiny
from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from self_healing import SelfHealingTrainer


def main() -> None:
    script_args, training_args, model_args, healing, offline = parse(SFTConfig)
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        model, tokenizer, data = material.model, material.tokenizer, text_of(material)
    else:
        material, model, tokenizer = None, model_args.model_name_or_path, None
        training_args.model_init_kwargs = {
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(training_args.model_init_kwargs or {}),
        }
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
        evaluates = training_args.eval_strategy != "no"
        data = {
            "train_dataset": dataset[script_args.dataset_train_split],
            "eval_dataset": dataset[script_args.dataset_test_split] if evaluates else None,
        }
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        processing_class=tokenizer,
        quantization_config=None if offline.offline_tiny else get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **data,
    )

    healer = SelfHealingTrainer(trainer, healing)
    healer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    show(healer, material)


if __name__ == "__main__":
    main()
