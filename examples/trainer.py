"""
The plain `Trainer` of transformers with one callback: no TRL in the loop, and everything that heals inside a step.

```bash
python examples/trainer.py \
    --model_name_or_path Qwen/Qwen3-0.6B-Base \
    --dataset_name roneneldan/TinyStories \
    --output_dir outputs/stories \
    --per_device_train_batch_size 8 \
    --max_steps 1000
```

Without a Hub and without a GPU: `python examples/trainer.py --offline-tiny --output_dir outputs/tiny-trainer`.

The callback alone does not survive an exception that ends `train()`, nor go on from a checkpoint by itself; the
wrapper of the other examples does.
"""

from datasets import Dataset, load_dataset
from offline import parse, text_of, tiny, unigram_loss
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from self_healing import HealingReport, SelfHealingCallback
from self_healing.tools.demo.model import TINY


def tokenised(dataset: Dataset, tokenizer: AutoTokenizer, length: int) -> Dataset:
    return dataset.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=length),
        batched=True,
        remove_columns=dataset.column_names,
    )


def main() -> None:
    script_args, training_args, model_args, healing, offline = parse(TrainingArguments)
    if offline.offline_tiny:
        material = tiny(training_args.seed)
        model, tokenizer, data, length = material.model, material.tokenizer, text_of(material), TINY.tokens
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.dtype)
        tokenizer, length = AutoTokenizer.from_pretrained(model_args.model_name_or_path), 1024
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        data = {"train_dataset": dataset[script_args.dataset_train_split]}
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        callbacks=[SelfHealingCallback(healing)],
        **{name: tokenised(each, tokenizer, length) for name, each in data.items()},
    )

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    report = HealingReport.from_run_dir(healing.healing_dir or training_args.output_dir)
    print(f"{report}\nJournal: {report.journal}")
    if offline.offline_tiny:
        loss, alone = trainer.evaluate()["eval_loss"], unigram_loss(material)
        print(f"Held-out loss: {loss:.3f}; the frequencies of tokens alone would give {alone:.3f}.")


if __name__ == "__main__":
    main()
