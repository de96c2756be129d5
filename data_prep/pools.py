"""Where a set's prompts are taken from: the sources that were given, and user turns that the target invents on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from data_prep import synthesize
from data_prep.conversations import SAMPLES, read_conversations, split_heldout
from data_prep.plan import sha_of
from data_prep.prompts import Prompt, Sieve, Tally, denied_turns, load_prompts
from data_prep.seeds import Seeds
from data_prep.work import Work
from heads.errors import HeadwayError
from heads.target import DEFAULT_TARGET, Target

SYNTHETIC = "self-synthesis"
LAW = ("seed", "batch_size", "max_user_tokens", "temperature", "top_p", "dtype")  # what decides the invented turns
BUNDLED_HELD_OUT = 64  # of the bundled conversations: what heads are measured on by default


def bundled_evaluation() -> list[str]:
    """The user turns of the bundled conversations that are measured on."""
    _, heldout = split_heldout(read_conversations(SAMPLES), BUNDLED_HELD_OUT)
    return [message["content"] for row in heldout for message in row.messages if message["role"] == "user"]


class Pools:
    """Prompts by their source, each in the order of a hash of its id, so that some of them are a fair sample.

    One sieve holds for all: no prompt is in two pools, none is denied or measured on. Of the embedded target the bundled
    conversations' user turns are the first of its self-synthesis. Raises HeadwayError for a source without a usable row.
    """

    def __init__(self, sources: Sequence[str], deny: Iterable[str], turns: Turns, target: str) -> None:
        self.sieve, self.tally = Sieve([*denied_turns(deny), *bundled_evaluation()]), Tally()
        self.turns = turns
        self.prompts: dict[str, list[Prompt]] = {source: self._load(source) for source in sources}
        self.prompts[SYNTHETIC] = self._load(str(SAMPLES)) if target == DEFAULT_TARGET else []
        self.kind = {prompt.id: source for source, pool in self.prompts.items() for prompt in pool}

    def _load(self, source: str) -> list[Prompt]:
        tally = Tally()
        found = sorted(load_prompts([source], "train", self.sieve, tally), key=lambda prompt: sha_of(prompt.id))
        if not found:
            raise HeadwayError(f"{source}: no row can be used; {tally.faults()}; mend it, or leave it out")
        self.tally.absorb(tally)
        return found

    def take(self, source: str, first: int, count: int) -> list[Prompt]:
        """Up to `count` prompts from number `first` on. Those of self-synthesis never end: the target invents them."""
        pool = self.prompts[source]
        while source == SYNTHETIC and len(pool) < first + count:
            missing = first + count - len(pool)
            for prompt in self.turns.more(missing + missing // 20 + 1):  # some of them the sieve refuses
                if self.sieve.refuses(prompt.messages) is None:
                    pool.append(prompt)
                    self.kind[prompt.id] = source
        return pool[first : first + count]


class Turns:
    """User turns that the target invents, the same ones in the same order however they are asked for.

    Raises HeadwayError when the work file belongs to other settings, and as `synthesize.opening_turns`.
    """

    def __init__(self, settings: synthesize.Settings, work: Path) -> None:
        self.settings, self.path = settings, work
        self.done = 0

    def more(self, count: int) -> list[Prompt]:
        """The next `count` user turns as prompts. The target is in memory only meanwhile."""
        settings = replace(self.settings, count=self.done + count)
        author = synthesize.Author(Target.load(settings.target, settings.dtype, settings.device), settings.batch_size)
        drawn = {name: getattr(settings, name) for name in LAW} | {"fingerprint": author.target.fingerprint}
        with Work(self.path, drawn) as work:
            turns = synthesize.opening_turns(author, work, settings, Seeds())
        new = list(turns.items())[self.done :]
        self.done += count
        return [Prompt(identity, [{"role": "user", "content": text}], [], SYNTHETIC) for identity, (text, _) in new]
