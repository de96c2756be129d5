"""What a finished run writes down about its head and its target, for a later examination (eval/doctor.py)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

from heads import load_head
from heads.mapped import MappedHead
from heads.target import fingerprint, fingerprint_parts

Run = Callable[..., Path]


def test_the_manifest_says_what_the_head_is_and_each_part_of_its_target(run: Run, tiny_target_dir: Path):
    folder = run("--optim.max_steps=2")
    manifest, config = (json.loads((folder / name).read_text()) for name in ("manifest.json", "config.json"))
    assert manifest["target"]["fingerprint"] == fingerprint(tiny_target_dir)
    assert manifest["target"]["parts"] == fingerprint_parts(tiny_target_dir)
    assert manifest["head"]["config"] == config
    head = load_head(folder)
    assert isinstance(head, MappedHead)
    ids = head.target_ids().tolist()
    assert 0 < len(ids) < head.config.vocab_size
    assert manifest["head"]["map_sha256"] == hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()
