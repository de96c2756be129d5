"""Let the target answer the user turns of a file of prompts: conversations in its own words.

python data_prep/regenerate.py --prompts FILE --out FILE
python data_prep/regenerate.py --prompts FILE --out FILE --server http://localhost:8000/v1,http://other:8000/v1
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heads.target import DEFAULT_TARGET


@dataclass(frozen=True)
class Settings:
    """What to answer, how, and who answers.

    Args:
        prompts: JSON lines file; assistant turns found there are replaced
        out: conversations to write; a run that was killed goes on from the work file beside it
        target: embedded name, local folder or Hub id
        server: base URLs of OpenAI-compatible servers of the target, separated by commas; empty: answer in this process
        model: the name under which the servers serve the target, where it is not the target's own
        temperature: 0 answers greedily, 1 samples from the target's own law
        top_p: of sampled answers
        max_new_tokens: an answer that has not ended by then is cut, and marked with finish_reason "length"
        seed: of sampled answers
        concurrency: answers in flight at each server
        batch_size: rows of a forward pass in this process
        dtype: of the target in this process; auto is bfloat16 where the device is fast at it, else float32
        device: of the target in this process: auto, cpu, cuda, cuda:1 ...
        dry_run: print the plan and stop
    """

    prompts: Path
    out: Path
    target: str = DEFAULT_TARGET
    server: str = ""
    model: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    concurrency: int = 64
    batch_size: int = 96
    dtype: str = "auto"
    device: str = "auto"
    dry_run: bool = False


@dataclass(frozen=True)
class Totals:
    """What a run wrote: conversations, answers in them, tokens of those answers; `left_out` counts by reason."""

    conversations: int
    answers: int
    tokens: int
    left_out: dict[str, int]


def regenerate(settings: Settings) -> Totals:
    """Answer every prompt that the work file does not hold yet and write the conversations in the order of the prompts.

    Raises HeadwayError for bad settings or prompts, a server of another model, and where nothing is left to write.
    """
    raise NotImplementedError
