"""
What a Hugging Face stream still gives after some of its samples have raised: with its functions guarded one by one,
and with nothing but the public `state_dict` and `load_state_dict` of the stream.

```bash
python benchmarks/streams.py          # measures; writes benchmarks/results/streams.json
```

Each stream has 1,024 samples in 4 shards, and a function that raises for 5 of them. Counted are the other samples:
those that never come, and those that come twice. By the public route a stream that has raised is opened again where
its `state_dict` says it stands, as long as that leads on.
"""

import argparse
import json
import logging
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, interleave_datasets
from torch.utils.data import DataLoader

from self_healing.healers.data import streams as stream_guard
from self_healing.healers.data.guard import Guard
from self_healing.healers.data.quarantine import Quarantine
from self_healing.healers.data.streams import GuardedStream


RESULT = Path(__file__).with_name("results") / "streams.json"
ROWS, SHARDS, BUFFER, BATCH = 1024, 4, 100, 16
BAD = frozenset({5, 170, 171, 600, 1023})


def check(number: int) -> None:
    if number in BAD:
        raise ValueError(f"cannot decode {number}")


def double(row: dict[str, Any]) -> dict[str, Any]:
    check(row["number"])
    return {"twice": 2 * row["number"]}


def double_all(batch: dict[str, Any]) -> dict[str, Any]:
    for number in batch["number"]:
        check(number)
    return {"twice": [2 * number for number in batch["number"]]}


def double_with_index(row: dict[str, Any], index: int) -> dict[str, Any]:
    return double(row)


def any_number(row: dict[str, Any]) -> bool:
    check(row["number"])
    return True


def any_numbers(batch: dict[str, Any]) -> list[bool]:
    for number in batch["number"]:
        check(number)
    return [True] * len(batch["number"])


def again(row: dict[str, Any]) -> dict[str, Any]:
    return {"again": row["twice"]}


def numbers_of(shards: list[int]) -> Iterator[dict[str, int]]:
    share = ROWS // SHARDS
    for shard in shards:
        yield from ({"number": share * shard + position} for position in range(share))


def source() -> IterableDataset:
    return Dataset.from_list([{"number": number} for number in range(ROWS)]).to_iterable_dataset(num_shards=SHARDS)


def halves() -> list[IterableDataset]:
    rows = [{"number": number} for number in range(ROWS)]
    # Known beforehand: else the first samples are mapped for them, before anything guards the stream.
    features = Features({"number": Value("int64"), "twice": Value("int64")})
    parts = [Dataset.from_list(rows[half::2]).to_iterable_dataset(num_shards=2) for half in (0, 1)]
    return [part.map(double, features=features) for part in parts]


STREAMS: dict[str, Callable[[], IterableDataset]] = {
    "mapped": lambda: source().map(double),
    "mapped twice": lambda: source().map(double).map(again),
    "mapped with indices": lambda: source().map(double_with_index, with_indices=True),
    "mapped in batches of 16": lambda: source().map(double_all, batched=True, batch_size=BATCH),
    "filtered": lambda: source().filter(any_number),
    "filtered in batches of 16": lambda: source().filter(any_numbers, batched=True, batch_size=BATCH),
    "generated, then mapped": lambda: IterableDataset.from_generator(
        numbers_of, gen_kwargs={"shards": list(range(SHARDS))}
    ).map(double),
    "mapped, then shuffled (buffer of 100)": lambda: source().map(double).shuffle(seed=3, buffer_size=BUFFER),
    "shuffled (buffer of 100), then mapped": lambda: source().shuffle(seed=3, buffer_size=BUFFER).map(double),
    "two mapped streams, interleaved": lambda: interleave_datasets(halves(), stopping_strategy="all_exhausted"),
    "two mapped streams, concatenated": lambda: concatenate_datasets(halves()),
    "mapped, as tensors": lambda: source().map(double).with_format("torch"),
}


def read(stream: IterableDataset, workers: int, directory: Path) -> dict[str, Any]:
    """Which samples come."""
    guard = Guard(Quarantine(directory).watch("a run", "some data"), seed=7)
    given: list[int] = []
    error = None
    limit = 30.0 if workers else 0.0
    guarded = GuardedStream(stream, guard)
    try:
        for batch in DataLoader(guarded, batch_size=8, num_workers=workers, collate_fn=list, timeout=limit):
            given.extend(int(sample["number"]) for sample in batch)
            if len(given) > 2 * ROWS:
                error = "going round"
                break
    except Exception as raised:
        error = type(raised).__name__
    came = Counter(given)
    wanted = set(range(ROWS)) - BAD
    return {
        "missing": len(wanted - set(came)),
        "twice": sum(came.values()) - len(came),
        "ended_with": error,
    }


def measure() -> dict[str, Any]:
    routes = {"functions guarded": stream_guard.hugging_face, "public state": None}
    streams: dict[str, Any] = {}
    for name, make in STREAMS.items():
        for workers in (0, 2):
            for route, module in routes.items():
                # What is done without the module is the public route.
                stream_guard.hugging_face = module  # type: ignore[assignment]
                with tempfile.TemporaryDirectory() as directory:
                    found = read(make(), workers, Path(directory))
                streams.setdefault(name, {}).setdefault(f"{workers} workers", {})[route] = found
    stream_guard.hugging_face = routes["functions guarded"]  # type: ignore[assignment]
    return {
        "streams": streams,
        "samples": ROWS,
        "bad": len(BAD),
        "versions": {
            "datasets": datasets.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def show(result: dict[str, Any]) -> None:
    print("| stream | workers | missing, guarded | missing, public | twice, public | the public route ends with |")
    print("|---|---|---|---|---|---|")
    for name, by_workers in result["streams"].items():
        for workers, routes in by_workers.items():
            guarded, public = routes["functions guarded"], routes["public state"]
            ending = public["ended_with"] or "–"
            told = (guarded["missing"], public["missing"], public["twice"], ending)
            print(f"| {name} | {workers.split()[0]} | " + " | ".join(map(str, told)) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.disable(logging.ERROR)
    measured = measure()
    RESULT.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    show(measured)
