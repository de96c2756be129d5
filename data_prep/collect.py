"""Run the frozen target over conversations and write a feature store.

    python data_prep/collect.py --conversations FILE --out DIR
    accelerate launch --multi_gpu --num_processes 8 data_prep/collect.py --conversations FILE --out DIR --taps 2,16,29

(`--multi_gpu` starts several processes on a machine without GPUs too; there they talk through gloo.)

Rank r of W takes the conversations whose hash is r modulo W, sorts them by length and finishes one shard after the
other, so a killed run that is started again writes the same bytes as one that was left alone. Shapes: T positions.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from jsonargparse import ArgumentParser

from data_prep.conversations import read_conversations, split_heldout
from data_prep.forecast import describe_coverage, disk_space, given, nearest, pilot
from data_prep.meter import Meter
from data_prep.packed_states import PLAIN, TapFormat
from data_prep.plan import (
    Planned,
    Source,
    cut_batches,
    cut_shards,
    describe,
    parse_taps,
    plan,
    refuse_changed,
    share_of_rank,
)
from data_prep.shards import (
    DTYPES,
    Entry,
    Layout,
    StoredConversation,
    entries_by_id,
    finished_shards,
    free_names,
    sweep,
    write_shard,
)
from data_prep.store_manifest import (
    MANIFEST,
    SCHEMA,
    TAP_CONVENTION,
    finish,
    read_manifest,
    refuse_other,
    write_manifest,
)
from data_prep.target_states import run_target
from heads.command_line import parse_arguments
from heads.errors import HeadwayError, run_script, sha256_file
from heads.target import DEFAULT_TARGET, Target
from heads.versions import versions

BARRIER_WAIT = timedelta(days=7)  # ranks with less to do wait for the others


@dataclass(frozen=True)
class Settings:
    """What to collect, from what, where to.

    Args:
        conversations: JSON lines file of conversations
        out: folder of the feature store; one that was not finished is continued
        target: embedded name, local folder or Hub id
        taps: layers whose input is stored, such as 2,15,27; empty stores the last state alone (enough for Medusa)
        dtype: of the target; auto is bfloat16 where the device is fast at it, else float32
        store_dtype: of the last state on disk
        tap_format: of the taps on disk; int8 and fp8 take half the bytes of bf16; null is that of store_dtype
        top_k_logits: largest logits kept of each position whose next token is supervised; 0 keeps none
        max_length: longer conversations are cut to this many tokens
        max_tokens: take a random but stable subset of about this many tokens, instead of everything
        held_out: conversations left out, for measuring
        batch_tokens: tokens of a forward pass, padding included
        shard_tokens: tokens of a shard, the unit of resuming
        dry_run: print the plan, with the hours at the speed of a short pilot on the target, and write nothing
        tokens_per_second: speed of one process in an earlier run; a dry run then times no pilot and loads no weights
    """

    conversations: Path
    out: Path
    target: str = DEFAULT_TARGET
    taps: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    store_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    tap_format: TapFormat | None = None
    top_k_logits: int = 0
    max_length: int = 2048
    max_tokens: int | None = None
    held_out: int = 64
    batch_tokens: int = 4096
    shard_tokens: int = 16384
    dry_run: bool = False
    tokens_per_second: float | None = None


def collect(settings: Settings) -> None:
    """Collect what is not in the store yet and complete it.

    Raises HeadwayError for bad settings or input before anything is written, and for a state that is not finite.
    """
    state = join_ranks()
    say: Callable[[str], None] = print if state.is_main_process else lambda _: None
    check(settings)
    source = describe(settings.target, settings.dtype, state.device)
    if not 0 <= settings.top_k_logits <= source.vocab_size:
        raise HeadwayError(f"--top_k_logits {settings.top_k_logits}: give 0 to {source.vocab_size}, the vocabulary")
    taps = parse_taps(settings.taps, source.layers)
    training, _ = split_heldout(read_conversations(settings.conversations), settings.held_out)
    planned = plan(training, source, settings.max_length, settings.max_tokens, say)
    manifest = describe_run(settings, source, taps, state.num_processes)
    layout = Layout.of(manifest)
    finished, complete = already_there(settings.out, manifest, state.is_main_process)
    refuse_changed(settings.out, finished, planned)
    pending = [row for row in planned if row.entry.id not in finished]
    announce(settings, source, planned, pending, layout, say)
    if settings.dry_run:
        if state.is_main_process:
            forecast(pending, settings, layout, state)
        return
    if complete and not pending:
        say(f"{settings.out}: complete, nothing to do")
        return
    state.wait_for_everyone()  # no rank writes while another still looks
    if state.is_main_process:
        settings.out.mkdir(parents=True, exist_ok=True)
        for name in sweep(settings.out):
            say(f"removed {name}, half written when the last run stopped")
        write_manifest(settings.out, manifest)
    state.wait_for_everyone()
    share = share_of_rank(pending, state.process_index, state.num_processes)
    if share:
        collect_share(Target.load(settings.target, settings.dtype, str(state.device)), share, settings, layout, state)
    state.wait_for_everyone()
    if state.is_main_process:
        totals = finish(settings.out, manifest, finished_shards(settings.out, checksums=False))["totals"]
        say(f"{settings.out}: complete, {totals['conversations']:,} conversations, {totals['tokens']:,} tokens")


def join_ranks() -> PartialState:
    """This process among those that were launched, on its device.

    Raises HeadwayError when `accelerate launch --cpu` was told to start several: it starts one and says nothing.
    """
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    # Without `cpu` accelerate ignores the ranks of a machine that has no accelerator.
    state = PartialState(cpu=forced or not torch.accelerator.is_available(), timeout=BARRIER_WAIT)
    if forced and "MASTER_ADDR" in os.environ and state.num_processes == 1:
        raise HeadwayError(
            "accelerate launch --cpu: starts one process whatever --num_processes says; "
            "give --multi_gpu in its place, on CPUs too"
        )
    return state


def check(settings: Settings) -> None:
    """Raise HeadwayError for a setting out of range, or an --out that is something else than a store."""
    for name in ("max_length", "max_tokens", "batch_tokens", "shard_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise HeadwayError(f"--{name} {value}: give a positive number")
    if settings.tokens_per_second is not None and not settings.dry_run:
        raise HeadwayError("--tokens_per_second is for a --dry_run; a run that collects measures its own speed")
    if settings.held_out < 0:
        raise HeadwayError(f"--held_out {settings.held_out}: give 0 or a positive number")
    out = settings.out
    if not nearest(out).is_dir():
        raise HeadwayError(f"{nearest(out)}: is a file; give --out a folder")
    if out.exists() and not (out / MANIFEST).exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise HeadwayError(f"{out}: holds files but no feature store; give --out a new folder")


def describe_run(settings: Settings, source: Source, taps: tuple[int, ...], processes: int) -> dict[str, Any]:
    """The manifest of a store that is not complete: what makes it, out of what."""
    arguments = asdict(settings) | {"conversations": settings.conversations.name, "processes": processes}
    for name in ("out", "dry_run", "tokens_per_second"):
        del arguments[name]
    return {
        "schema": SCHEMA,
        "kind": "features",
        "complete": False,
        "target": {"name": source.name, "fingerprint": source.fingerprint, "dtype": source.dtype},
        "dtype": settings.store_dtype,
        "hidden_size": source.hidden_size,
        "vocab_size": source.vocab_size,
        "taps": list(taps),
        "tap_format": settings.tap_format
        or next(name for name in PLAIN if PLAIN[name] == DTYPES[settings.store_dtype]),
        "top_k_logits": settings.top_k_logits,
        "tap_convention": TAP_CONVENTION,
        "max_length": settings.max_length,
        "conversations": settings.conversations.name,
        "conversations_sha256": sha256_file(settings.conversations),
        "arguments": arguments,
        "versions": {"python": platform.python_version(), **versions("headway", "torch", "transformers")},
    }


def already_there(out: Path, manifest: dict[str, Any], checksums: bool) -> tuple[dict[str, Entry], bool]:
    """Finished conversations of the store in `out`, by id, and whether it is complete; refuses another run's store."""
    if not (out / MANIFEST).exists():
        return {}, False
    old = read_manifest(out)
    refuse_other(out, old, manifest)
    return entries_by_id(out, finished_shards(out, checksums=checksums)), old["complete"]


def announce(
    settings: Settings,
    source: Source,
    planned: Sequence[Planned],
    pending: Sequence[Planned],
    layout: Layout,
    say: Callable[[str], None],
) -> None:
    """Say what is to be collected and written. Raises HeadwayError when it does not fit on the disk."""
    tokens = sum(row.entry.length for row in planned)
    supervised = sum(row.entry.supervised for row in planned)
    say(
        f"{settings.conversations}: {len(planned):,} conversations ({settings.held_out} held out), {tokens:,} tokens, "
        f"{supervised:,} supervised ({supervised / tokens:.1%}), target {source.name} in {source.dtype}"
    )
    if len(pending) < len(planned):
        say(
            f"{settings.out}: {len(planned) - len(pending):,} conversations are there, {len(pending):,} are to be collected"
        )
    needed = sum(row.entry.length for row in pending) * layout.bytes_per_token()
    remedy = "free some, give another --out, fewer taps, --tap_format int8 or a --max_tokens"
    space = disk_space(settings.out, needed, remedy)
    parts = ", ".join(f"{part} {count:,}" for part, count in layout.bytes_by_part().items())
    formats = f"last state in {layout.dtype}" + (f", taps in {layout.tap_format}" if layout.taps else "")
    say(f"{settings.out}: {space}; {formats}; bytes a token: {parts}")
    supervised_ids = torch.cat([row.ids_T[row.turn_T > 0] for row in planned])
    say(describe_coverage(torch.bincount(supervised_ids, minlength=source.vocab_size)))


def forecast(pending: Sequence[Planned], settings: Settings, layout: Layout, state: PartialState) -> None:
    """Say how long the collection will take."""
    rows = share_of_rank(pending, 0, 1)
    if not rows:
        print(f"{settings.out}: complete, nothing to do")
        return
    if settings.tokens_per_second is not None:
        speed = given(settings.tokens_per_second)
    else:
        target = Target.load(settings.target, settings.dtype, str(state.device))

        def run(batch: Sequence[Planned]) -> int:
            compute(target, batch, layout)
            return sum(row.entry.length for row in batch)

        speed = pilot(list(cut_batches(rows, settings.batch_tokens)), run)
    tokens = sum(row.entry.length for row in rows)
    print(f"{settings.out}: {speed.hours(tokens, state.num_processes)}; a dry run, nothing was written")


def compute(target: Target, batch: Sequence[Planned], layout: Layout) -> list[StoredConversation]:
    """What a store of this layout keeps of a batch; taps in the target's own dtype where they are yet to be packed."""
    tap_dtype = PLAIN.get(layout.tap_format, target.dtype)
    return run_target(target, batch, layout.taps, DTYPES[layout.dtype], tap_dtype=tap_dtype, top_k=layout.top_k)


def collect_share(
    target: Target, rows: Sequence[Planned], settings: Settings, layout: Layout, state: PartialState
) -> None:
    """Write the shards of one rank, in order; a shard is packed and goes to disk while the next one is computed."""
    names = free_names(settings.out, state.process_index, state.num_processes)
    writing: Future[None] | None = None
    label = f"rank 0 of {state.num_processes}: " if state.num_processes > 1 else ""
    tokens = sum(row.entry.length for row in rows)
    with ThreadPoolExecutor(1) as pool, Meter(label, tokens, state.is_main_process) as meter:
        for shard in cut_shards(rows, settings.shard_tokens):
            computed: list[StoredConversation] = []
            for batch in cut_batches(shard, settings.batch_tokens):
                computed += compute(target, batch, layout)
                meter.advance(sum(row.entry.length for row in batch))
            if writing is not None:
                writing.result()  # at most one shard waits for the disk
            entries = [row.entry for row in shard]
            writing = pool.submit(write_shard, settings.out, next(names), layout, entries, computed)
        if writing is not None:
            writing.result()


def main() -> None:
    """Parse the command line and collect."""
    parser = ArgumentParser(
        description="Run the target over conversations; write a feature store.", exit_on_error=False
    )
    parser.add_argument("--dry_run", action="store_true", help="print the plan, time a pilot, write nothing")
    parser.add_class_arguments(Settings, skip={"dry_run"})
    collect(Settings(**parse_arguments(parser).as_dict()))


if __name__ == "__main__":
    run_script(main)
