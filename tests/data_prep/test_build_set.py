"""The set: enough tokens in the mix that was asked for, nothing measured on, the same set after every interruption."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import build_set as script
from data_prep import regenerate
from data_prep.build_set import FIRST_MEAN, Progress, Settings, build, wanted
from data_prep.conversations import SAMPLES, read_conversations, split_heldout
from data_prep.pools import SYNTHETIC, Pools, Turns
from data_prep.prompts import Prompt
from heads.embedded import EMBEDDED
from heads.errors import HeadwayError, sha256_file
from heads.target import Target

Make = Callable[..., Settings]


def put(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Made-up answers, of as many tokens as the prompt has letters, and made-up user turns; how often each was asked."""
    asked: list[int] = []

    def answer(settings: regenerate.Settings) -> None:
        prompts = rows(settings.prompts)
        asked.append(len(prompts))
        lines = []
        for row in prompts:
            text = row["messages"][0]["content"]
            told = [*row["messages"], {"role": "assistant", "content": text.upper()}]
            lines.append({"id": row["id"], "messages": told, "token_ids": [[1] * (len(text) - 1), [1]]})
        settings.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def more(self: Turns, count: int) -> list[Prompt]:
        first, self.done = self.done, self.done + count
        return [
            Prompt(f"syn-{n}", [{"role": "user", "content": f"invented {n:03d}"}], [], SYNTHETIC)
            for n in range(first, first + count)
        ]

    monkeypatch.setattr(regenerate, "regenerate", answer)
    monkeypatch.setattr(Turns, "more", more)
    return asked


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path) -> Make:
    """Settings of a set of 3,000 tokens: one source of 200 rows of 10 letters, one of 3 rows of 20; keywords override."""
    large = put(tmp_path / "large.jsonl", *(f"large {n:04d}" for n in range(200)))
    small = put(tmp_path / "small.jsonl", *("small".ljust(19) + str(n) for n in range(3)))

    def make(**changes: Any) -> Settings:
        usual: dict[str, Any] = {"out": tmp_path / "set", "source": [large, small], "target": str(tiny_target_dir)}
        return Settings(**(usual | {"tokens": 3000, "synthetic": 0.5} | changes))

    return make


def kinds(found: list[dict[str, Any]]) -> Counter[str]:
    """Answer tokens by the first word of the prompt."""
    counted: Counter[str] = Counter()
    for row in found:
        counted[row["messages"][0]["content"].split()[0]] += sum(map(len, row["token_ids"]))
    return counted


def test_the_mix(settings: Make, made: list[int]) -> None:
    progress = build(settings())
    out = settings().out
    found = rows(out / "conversations.jsonl")
    counted = kinds(found)
    assert len({row["id"] for row in found}) == len(found)
    assert counted["small"] == 60  # all that it has
    assert counted["large"] == pytest.approx(750, abs=10)
    assert 2970 <= counted.total() <= 3100
    assert counted["invented"] == counted.total() - counted["large"] - 60
    by_source = dict(
        zip([*settings().source, SYNTHETIC], [counted[k] for k in ("large", "small", "invented")], strict=True)
    )
    assert progress.tokens == by_source
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tokens"] == by_source
    assert sum(manifest["prompts"].values()) == sum(made) == len(found)
    assert manifest["conversations_sha256"] == sha256_file(out / "conversations.jsonl")


def test_without_sources_it_is_all_invented(settings: Make, made: list[int]) -> None:
    progress = build(settings(source=[], tokens=500))
    assert set(progress.tokens) == {SYNTHETIC}
    assert 495 <= progress.tokens[SYNTHETIC] < 560


def test_the_same_set_after_every_interruption(
    settings: Make, made: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build(settings())
    expected = (settings().out / "conversations.jsonl").read_bytes()
    rounds = len(made)
    assert rounds >= 2
    answer = regenerate.regenerate
    for number in range(rounds):
        shutil.rmtree(settings().out)
        made.clear()

        def killed(given: regenerate.Settings, number: int = number) -> None:
            if len(made) == number:
                raise KeyboardInterrupt
            answer(given)

        monkeypatch.setattr(regenerate, "regenerate", killed)
        with pytest.raises(KeyboardInterrupt):
            build(settings())
        monkeypatch.setattr(regenerate, "regenerate", answer)
        build(settings())
        assert (settings().out / "conversations.jsonl").read_bytes() == expected
        assert len(made) == rounds  # no round was answered twice
    build(settings())
    assert len(made) == rounds
    larger = build(settings(tokens=4000))
    assert (settings().out / "conversations.jsonl").read_bytes().startswith(expected)
    assert 3960 <= larger.tokens.total() < 4100


def test_another_set_is_refused(settings: Make, made: list[int], tmp_path: Path) -> None:
    build(settings())
    before = sha256_file(settings().out / "conversations.jsonl")
    for changes, names in (
        ({"seed": 1}, "seed"),
        ({"deny": [put(tmp_path / "d.jsonl", "x")]}, "deny"),
        ({"source": settings().source[:1], "max_new_tokens": 9}, "sources, max_new_tokens"),
    ):
        with pytest.raises(HeadwayError, match=rf"holds a set made with other {names};"):
            build(settings(**changes))
    put(tmp_path / "small.jsonl", "edited")
    with pytest.raises(HeadwayError, match="other sources"):
        build(settings())
    assert sha256_file(settings().out / "conversations.jsonl") == before
    with pytest.raises(HeadwayError, match="holds files but no set"):
        build(settings(out=tmp_path))


def test_a_source_without_a_usable_row_is_refused(settings: Make, made: list[int], tmp_path: Path) -> None:
    """What it would have given, self-synthesis would take over, and nobody would know. Of a row both have, the first keeps it."""
    bad, same = tmp_path / "bad.jsonl", put(tmp_path / "same.jsonl", "large 0003", "large 0004")
    bad.write_text('{"title": "a"}\n{"question": "b"\n')
    for source, reasons in (
        (str(bad), r"2 left out: 1 x none of the known fields \(first: .*bad.jsonl, line 1\), 1 x malformed JSON"),
        (same, "2 left out: 2 x the same user turns as an earlier row"),
    ):
        with pytest.raises(HeadwayError, match=rf"{Path(source).name}: no row can be used; {reasons}"):
            build(settings(source=[*settings().source, source]))
    assert not settings().out.exists()
    pools = Pools(settings().source, [], Turns(Settings(tmp_path), tmp_path / "work"), "other")  # type: ignore[arg-type]
    assert pools.tally.kept == dict(zip(settings().source, (200, 3), strict=True))


def test_nothing_that_is_measured_on(settings: Make, made: list[int], tmp_path: Path) -> None:
    _, heldout = split_heldout(read_conversations(SAMPLES), 64)
    mine = put(tmp_path / "mine.jsonl", "LARGE  0007", "Invented 003", "invented 004")
    bundled = put(tmp_path / "more.jsonl", *(row.messages[0]["content"] for row in heldout), "a new one")
    build(settings(source=[*settings().source, bundled], deny=[mine], tokens=4000))
    texts = {row["messages"][0]["content"] for row in rows(settings().out / "conversations.jsonl")}
    assert {"a new one", "invented 002", "invented 005"} <= texts
    assert not texts & {row.messages[0]["content"] for row in heldout}
    assert not texts & {"large 0007", "invented 003", "invented 004"}


def test_the_embedded_targets_own_turns_come_first(tmp_path: Path, made: list[int]) -> None:
    _, heldout = split_heldout(read_conversations(SAMPLES), 64)
    pool = Pools([], [], Turns(Settings(tmp_path), tmp_path / "work"), EMBEDDED)  # type: ignore[arg-type]
    bundled = len(read_conversations(SAMPLES)) - 64
    taken = pool.take(SYNTHETIC, 0, bundled + 5)
    known = {row.id for row in read_conversations(SAMPLES)} - {row.id for row in heldout}
    assert {prompt.id for prompt in taken[:bundled]} == known
    assert [prompt.id for prompt in taken[bundled:]] == [f"syn-{n}" for n in range(5)]


def test_rounds_by_hand(settings: Make) -> None:
    given = settings(tokens=9000, synthetic=0.4)
    large, small = given.source
    first = wanted(given, Progress(), {large: 200, small: 3})
    # a tenth of 2,700 tokens is 2 answers of 150; of the others' 6,300 and 4.5 more rounds of those 2: 4
    assert first[large] == 2
    assert first[small] == 2
    assert first[SYNTHETIC] == -(-(9000 - 2 * 2 * 10 * FIRST_MEAN) // (10 * FIRST_MEAN))
    asked, tokens = Counter({large: 2, small: 2, SYNTHETIC: 3}), Counter({large: 200, small: 100, SYNTHETIC: 600})
    counts = wanted(given, Progress(asked, tokens), {large: 198, small: 1})
    assert counts == {large: 25, small: 1, SYNTHETIC: -(-(9000 - 900 - 25 * 100 - 1 * 50) // 200)}
    done = Progress(asked, Counter({large: 2700, small: 2700, SYNTHETIC: 3599}))
    assert wanted(given, done, {large: 9, small: 9}) == {large: 0, small: 0, SYNTHETIC: 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 0}, "--tokens 0"),
        ({"synthetic": 1.5}, "--synthetic 1.5"),
        ({"source": ["a.jsonl", "a.jsonl"]}, "given twice"),
        ({"out": SAMPLES}, "is a file"),
    ],
)
def test_bad_settings(settings: Make, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        settings(**changes)


def test_for_real(
    settings: Make, talks: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line, the target's own turns and answers, into a file that training reads."""
    given = settings()
    command = ["build_set.py", "--out", str(given.out), "--source", *given.source, "--target", given.target]
    command += ["--tokens", "400", "--max_new_tokens", "12", "--dtype", "float32", "--batch_size", "8"]
    monkeypatch.setattr("sys.argv", command)
    script.main()
    said = capsys.readouterr().out.splitlines()[-1]
    found = read_conversations(given.out / "conversations.jsonl")
    tokens = sum(sum(map(len, row["token_ids"])) for row in rows(given.out / "conversations.jsonl"))
    assert 396 <= tokens < 800
    assert f"conversations.jsonl: {tokens:,} answer tokens in " in said
    assert f"of {SYNTHETIC} (" in said
    assert {row.id.split("-")[0] for row in found} == {"syn", "p"}
