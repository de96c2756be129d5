"""Examine a head before it is served: its files, its config, its target, and what it drafts.

    python eval/doctor.py --head DIR                                    # the target that its manifest names, seconds
    python eval/doctor.py --head DOWNLOADED --target DIR_OR_HUB_ID --conversations FILE --json

Any layout: ours, EAGLE-3's and EAGLE-1's, speculators, Medusa's. Every finding says what is wrong, where and how to mend it. The probe
replays 8 conversations of 64 answer tokens against what the head's manifest promises; where it promises nothing, or more than
is there, likely repairs are tried and the one that helps is named. Exit code 0: sound. 1: not sound. 2: bad input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser
from transformers.utils.logging import disable_progress_bar

from data_prep.store import MANIFEST, FeatureStore
from eval.checkup.examine import examine
from eval.checkup.folder import HeadFolder
from eval.checkup.report import as_json, lines
from eval.checkup.texts import ProbeTexts, given_texts, stored_texts
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script, sha256_file
from heads.formats.layout import TargetFacts
from heads.target import Target, TargetEnds


@dataclass(frozen=True)
class Options:
    """What to examine, and on which texts.

    Args:
        head: folder of a head in any layout
        target: embedded name, local folder or Hub id; null: the one that the head's manifest names
        store: feature store of the target, whose held-out conversations are replayed; no layer of the target runs then
        conversations: JSON lines file of conversations with answers of the target, run through it here. Without either: the
            bundled ones, answered here by another target than the embedded one
        count: conversations of the probe
        tokens: answer tokens of each
        dtype: of the target when it runs here; auto as in measure.py
        device: auto is CUDA where there is one
        json: print one JSON object instead of words
    """

    head: Path
    target: str | None = None
    store: Path | None = None
    conversations: Path | None = None
    count: int = 8
    tokens: int = 64
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    json: bool = False


def doctor(options: Options) -> int:
    """Examine, print, and return the exit code. Raises HeadwayError for bad input."""
    if options.store is not None and options.conversations is not None:
        raise HeadwayError("--store and --conversations: give one of them")
    for name, least in (("count", 1), ("tokens", 2)):
        if getattr(options, name) < least:
            raise HeadwayError(f"--{name} {getattr(options, name)}: give at least {least}")

    def texts(target: TargetFacts, folder: HeadFolder) -> ProbeTexts:
        if options.store is None:
            running = Target.load(target.name, options.dtype, options.device)
            return given_texts(running, options.conversations, options.count, options.tokens)
        return _of_store(options.store, target, folder, options)

    checkup = examine(options.head, options.target, texts)
    if options.json:
        print(json.dumps(as_json(checkup), indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(checkup)))
    return 0 if checkup.sound else 1


def _of_store(path: Path, target: TargetFacts, folder: HeadFolder, options: Options) -> ProbeTexts:
    store = FeatureStore.open(path, checksums=False)
    collected = store.manifest["target"]
    if collected["fingerprint"] != target.fingerprint:
        raise HeadwayError(
            f"{path}: collected from target '{collected['name']}' ({collected['fingerprint'][:12]}), not from '{target.name}' as it "
            f"is now ({target.fingerprint[:12]}); give a store of this target, or --conversations"
        )
    ends = TargetEnds.load(target.name, options.dtype, options.device)
    return stored_texts(store, ends, folder.manifest, sha256_file(path / MANIFEST), options.count, options.tokens)


def main() -> int:
    """Parse the command line and examine."""
    disable_progress_bar()
    parser = ArgumentParser(description="Examine a head: files, config, target, drafts.", exit_on_error=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_class_arguments(Options, skip={"json"})
    return doctor(Options(**parse_arguments(parser).as_dict()))


if __name__ == "__main__":
    run_script(main)
