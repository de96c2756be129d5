"""Two heads of one store replayed on the conversations that both left out: tau of each, and the ratio with its interval.

    python benchmarks/compare_heads.py --first HEAD --second HEAD --result eagle-start     # writes benchmarks/results/eagle-start.json

The interval is a paired bootstrap over those conversations: what two trainings differ by, apart from what conversations do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from results_file import write_result
from tap_formats import STEPS, figures_of, ratio

from data_prep.store import FeatureStore
from eval.replay import replay
from heads import load_head
from heads.errors import HeadwayError
from heads.target import TargetEnds
from train.sampler import split_rows


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    """The settings of two recipes that are not the same, by their dotted names."""
    found: dict[str, list[Any]] = {}
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key), second.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= {f"{key}.{name}": pair for name, pair in differing(ours, theirs).items()}
        elif ours != theirs and key != "out":
            found[key] = [ours, theirs]
    return found


def measure(first: Path, second: Path, result: str) -> None:
    """Replay both.

    Args:
        first: folder of a head
        second: folder of another head, trained on the same store
        result: name of the file in benchmarks/results/
    """
    heads = [load_head(folder) for folder in (first, second)]
    data = [head.manifest["recipe"]["data"] for head in heads]
    if data[0] != data[1]:
        raise HeadwayError(
            f"{second}: trained on {data[1]}, {first} on {data[0]}; give heads of one store and one split"
        )
    store = FeatureStore.open(data[0]["features"])
    ends = TargetEnds.load(heads[0].manifest["target"]["name"], "float32")
    rows = split_rows(store, data[0]["held_out"])[1]
    ledgers = [replay(head, ends, (store[row] for row in rows), STEPS).ledger for head in heads]
    figures = {
        "differ": differing(*(head.manifest["recipe"] for head in heads)),
        "conversations": data[0]["held_out"],
        "tokens": store.tokens,
        "first": figures_of(ledgers[0]),
        "second": figures_of(ledgers[1]),
        "second_over_first": ratio(*ledgers),
    }
    print(figures)
    write_result(result, figures)


if __name__ == "__main__":
    auto_cli(measure, as_positional=False)
