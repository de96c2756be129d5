"""What steers invented user turns: a system turn before them, topics, a language, their first words.

A chat model goes on as the user whom its system turn speaks of. A system turn that makes it an expert who is asked
about the topic works best: of the embedded 135M target about two user turns in three are then about the topic, one that
only says what the user asks about is hardly heeded. A language holds where the target speaks it well enough to be
moved by a sentence; a small or English target goes on in English, and only first words in the language (--openings)
carry it over, at the cost of nonsense where it does not know the language.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heads.errors import HeadwayError


@dataclass(frozen=True)
class Seed:
    """The system turn before one user turn ("" for none), and that turn's first words."""

    system: str = ""
    opening: str = ""

    def turn(self) -> list[dict[str, str]]:
        """The system turn as messages: one, or none."""
        return [{"role": "system", "content": self.system}] if self.system else []


class Seeds:
    """Seed number n of a run: topic n modulo the topics, and an opening that moves on when the topics are through, so
    that all pairs come.

    `topics` and `openings` are a file with one a line, or a list separated by semicolons. Raises HeadwayError for one
    that holds nothing.
    """

    def __init__(self, system: str = "", topics: str = "", language: str = "", openings: str = "") -> None:
        self.system, self.language = system.strip(), language.strip()
        self.topics = _listed("--topics", topics)
        self.openings = _listed("--openings", openings)

    def __getitem__(self, number: int) -> Seed:
        topic = self.topics[number % len(self.topics)]
        opening = self.openings[number // len(self.topics) % len(self.openings)]
        expert = f"You are an expert on {topic}, and help people with their questions about {topic}." if topic else ""
        spoken = f"The user writes in {self.language}, and you answer in {self.language}." if self.language else ""
        return Seed(" ".join(filter(None, (self.system, expert, spoken))), opening)


def _listed(name: str, given: str) -> list[str]:
    """The entries of a file or a list; one empty entry where none was asked for."""
    if not given:
        return [""]
    path = Path(given).expanduser()
    try:
        found = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else given.split(";")
    except UnicodeDecodeError as error:
        raise HeadwayError(f"{name} {given}: is not UTF-8; save it as UTF-8") from error
    except OSError:  # a list too long to be a file name
        found = given.split(";")
    entries = [entry.strip() for entry in found if entry.strip()]
    if not entries:
        raise HeadwayError(f"{name} {given}: holds nothing; give a file with one a line, or a list separated by ';'")
    return entries
