"""Regeneration: the target's own words on every prompt, whatever servers do and whenever the run is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep import answer_server
from data_prep.conversations import parse_conversation, read_conversations, render_all
from data_prep.dialogue import Answer, Dialogue, read_answer
from data_prep.journal import Journal
from data_prep.prompts import Prompt
from data_prep.regenerate import Settings, regenerate
from data_prep.render import prompt_ids
from heads.errors import HeadwayError
from heads.target import Target
from tests.conftest import TEXT, write_conversations
from tests.data_prep.fake_server import FakeServer, script

ROOT = Path(__file__).parents[2]
Make = Callable[..., Settings]
Serve = Callable[..., FakeServer]
MODEL = "the-target"


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faulty servers are left alone for moments only."""
    monkeypatch.setattr(answer_server, "FIRST_REST", 0.01)
    monkeypatch.setattr(answer_server, "LONGEST_REST", 0.1)


@pytest.fixture
def serve(tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[Serve]:
    """Starts fake servers, and stops them at the end."""
    servers: list[FakeServer] = []

    def start(**manners: Any) -> FakeServer:
        servers.append(FakeServer(tiny_tokenizer, MODEL, **manners))
        return servers[-1]

    yield start
    for server in servers:
        if not server.closing:
            server.close()


def make_prompts(count: int, turns: int = 3) -> list[dict[str, Any]]:
    """Rows of 1 to `turns` user turns, some with a system turn, some with other people's answers."""
    source = random.Random(5)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "be kind"}] if number % 3 == 0 else []
        for turn in range(1 + number % turns):
            words = " ".join(source.choices(TEXT.split(), k=source.randint(1, 6)))
            messages.append({"role": "user", "content": f"{number} {words} {turn}"})
            if number % 2:
                messages.append({"role": "assistant", "content": "somebody else's words"})
        rows.append({"id": f"p{number:03d}", "messages": messages, "finish_reason": "unanswered"})
    return rows


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path) -> Make:
    """Settings over 24 prompts; keywords override."""

    def make(**changes: Any) -> Settings:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            write_conversations(prompts, make_prompts(24))
        usual: dict[str, Any] = {
            "prompts": prompts,
            "out": tmp_path / "out.jsonl",
            "target": str(tiny_target_dir),
            "model": MODEL,
            "max_new_tokens": 64,
            "dtype": "float32",
            "device": "cpu",
            "concurrency": 8,
            "timeout": 20.0,
            "patience": 20.0,
        }
        return Settings(**(usual | changes))

    return make


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def work_of(settings: Settings) -> Path:
    return settings.out.with_name(f"{settings.out.name}.work")


def expected(tokenizer: Any, prompts: list[dict[str, Any]], most: int = 64) -> list[list[dict[str, str]]]:
    """What the scripted target makes of prompts, written out turn by turn."""
    conversations = []
    for row in prompts:
        messages: list[dict[str, str]] = []
        for message in row["messages"]:
            if message["role"] == "assistant":
                continue
            messages.append(message)
            if message["role"] == "user":
                said = script(prompt_ids(tokenizer, messages))
                ids = tokenizer(said, add_special_tokens=False)["input_ids"]
                if len(ids) + 1 > most:
                    messages.append({"role": "assistant", "content": tokenizer.decode(ids[:most])})
                    break
                messages.append({"role": "assistant", "content": said})
        conversations.append(messages)
    return conversations


def as_expected(settings: Settings, tokenizer: Any, rows: list[dict[str, Any]]) -> bool:
    found = rows_of(settings.out)
    return [row["id"] for row in found] == [row["id"] for row in rows] and [
        row["messages"] for row in found
    ] == expected(tokenizer, rows, settings.max_new_tokens)


# --- by servers


def test_every_turn_is_answered_in_order(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(delay=0.05)  # so that some are asked at once
    totals = regenerate(settings(server=server.url))
    prompts = make_prompts(24)
    assert as_expected(settings(), tiny_tokenizer, prompts)
    assert not work_of(settings()).exists()
    turns = sum(message["role"] == "user" for row in prompts for message in row["messages"])
    assert totals is not None
    assert (totals.conversations, totals.answers, totals.cut) == (24, turns, 0)
    assert set(server.answered.values()) == {1}
    assert len(server.bodies) == turns
    assert 1 < server.most_at_once <= 8
    for row, conversation in zip(rows_of(settings().out), read_conversations(settings().out), strict=True):
        assert row["made_by"]["temperature"] == 0
        (sequence,) = render_all(tiny_tokenizer, conversation, [tiny_tokenizer.eos_token_id])
        for turn, ids in enumerate(row["token_ids"], 1):
            assert [token for token, at in zip(sequence.ids, sequence.turn, strict=True) if at == turn] == ids
    assert sum(len(ids) for row in rows_of(settings().out) for ids in row["token_ids"]) == totals.tokens


def test_cut_answers_end_their_conversations(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve()
    totals = regenerate(settings(server=server.url, max_new_tokens=5))
    assert as_expected(settings(max_new_tokens=5), tiny_tokenizer, make_prompts(24))
    rows = rows_of(settings().out)
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert totals is not None
    assert 5 < len(cut) == totals.cut < 24
    for row in rows:
        assert [len(ids) == 5 and ids[-1] != tiny_tokenizer.eos_token_id for ids in row["token_ids"]] == [
            row in cut and turn == len(row["token_ids"]) for turn in range(1, len(row["token_ids"]) + 1)
        ]


MANNERS = ["429", "500", "503", "408", "drop", "half", "no JSON", "no choices", "abort"]


def test_faults_are_ridden_out(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A third of the requests fails, in every way."""
    source = random.Random(3)
    seen: set[str] = set()

    def spoil(body: dict[str, Any], number: int) -> str:
        manner = source.choice(MANNERS) if source.random() < 0.33 else "fine"
        seen.add(manner)
        return manner

    first, second = serve(spoil=spoil), serve(spoil=spoil)
    regenerate(settings(server=f"{first.url}, {second.url}/"))
    assert as_expected(settings(), tiny_tokenizer, make_prompts(24))
    assert set((first.answered + second.answered).values()) == {1}
    assert min(len(first.bodies), len(second.bodies)) > 8
    assert seen == {"fine", *MANNERS}


def test_slow_answers_are_asked_for_again(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(spoil=lambda body, number: "slow" if number in (2, 5) else "fine")
    regenerate(settings(server=server.url, timeout=0.5))
    assert as_expected(settings(), tiny_tokenizer, make_prompts(24))


def test_retry_after_is_kept_to(settings: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    server = answer_server.Server("http://a/v1")
    monkeypatch.setattr(answer_server, "LONGEST_REST", 30.0)
    server.did_badly(now, answer_server.Fault("429", rest=8.0))
    assert 104 <= server.rests_until <= 108
    server.did_badly(now + 1, answer_server.Fault("500"))  # another of the same time counts for nothing
    assert (server.faults, server.faulty_since) == (1, now)
    for _ in range(40):
        server.did_badly(server.rests_until, answer_server.Fault("500"))
        assert server.rests_until - now < 40 * 30
    assert (server.faults, server.faulty_since) == (41, now)
    server.did_well()
    assert (server.faults, server.rests_until) == (0, 0.0)


def test_a_server_that_dies_and_comes_back(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """The run stops with what it has; started again it asks for the rest alone."""

    def die(body: dict[str, Any], number: int) -> str:
        if number > 20:
            server.http.drop_all()
            server.http.socket.close()
            server.http.fake.closing = True
            return "drop"
        return "fine"

    server = serve(spoil=die)
    with pytest.raises(HeadwayError, match=r"no answer for \d+ s .* run the same command again"):
        regenerate(settings(server=server.url, patience=0.3))
    assert not settings().out.exists()
    recorded = work_of(settings()).read_bytes().splitlines()[1:]
    assert 10 < len(recorded) <= 20
    again = serve()
    regenerate(settings(server=again.url))
    assert as_expected(settings(), tiny_tokenizer, make_prompts(24))
    assert len(again.bodies) == 48 - len(recorded)


def test_one_of_two_servers_dies(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    def die(body: dict[str, Any], number: int) -> str:
        return "500" if number > 5 else "fine"

    first, second = serve(spoil=die), serve(delay=0.02)
    regenerate(settings(server=f"{first.url},{second.url}"))
    assert as_expected(settings(), tiny_tokenizer, make_prompts(24))
    assert sum(second.answered.values()) == 43


def test_a_request_that_always_fails(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """The others are answered; then the row is named, and nothing is written until it is mended."""

    def spoil(body: dict[str, Any], number: int) -> str:
        return "500" if any(message["content"].startswith("7 ") for message in body["messages"]) else "fine"

    server = serve(spoil=spoil)
    with pytest.raises(HeadwayError, match=r"1 conversations got no answer.*prompts\.jsonl.*'p007'.*status 500"):
        regenerate(settings(server=server.url))
    assert not settings().out.exists()
    rest = [row for row in make_prompts(24) if row["id"] != "p007"]
    write_conversations(settings().prompts, rest)
    asked = len(server.bodies)
    regenerate(settings(server=server.url))
    assert as_expected(settings(), tiny_tokenizer, rest)
    assert len(server.bodies) == asked


@pytest.mark.parametrize("with_ids", [True, False])
def test_another_prompt_at_the_server(settings: Make, serve: Serve, with_ids: bool) -> None:
    server = serve(with_ids=with_ids)
    prompt = server.prompt
    server.prompt = lambda body: [*prompt(body)[:3], *prompt(body)[2:]]  # type: ignore[method-assign]
    with pytest.raises(
        HeadwayError, match=r"prompts\.jsonl.*conversation 'p\d+': the prompt.*tokenizer or chat template"
    ):
        regenerate(settings(server=server.url))
    assert not settings().out.exists()


def test_a_server_that_says_nothing_of_its_prompts(settings: Make, serve: Serve) -> None:
    server = serve()
    respond = server.respond
    server.respond = lambda body: {"choices": respond(body)["choices"]}  # type: ignore[method-assign]
    with pytest.raises(HeadwayError, match="does not say how many tokens a prompt has"):
        regenerate(settings(server=server.url))


def test_refusals_name_the_row(settings: Make, serve: Serve) -> None:
    server = serve(spoil=lambda body, number: "400")
    with pytest.raises(HeadwayError, match=r"prompts\.jsonl.*conversation 'p\d+': status 400: .*something is wrong"):
        regenerate(settings(server=server.url))


def test_without_ids_the_text_is_checked(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(with_ids=False)
    regenerate(settings(server=server.url))
    assert as_expected(settings(), tiny_tokenizer, make_prompts(24))
    ids = [ids for row in rows_of(settings().out) for ids in row["token_ids"]]
    assert all(each[-1] == tiny_tokenizer.eos_token_id for each in ids)


def test_ids_that_the_text_does_not_give(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A target that writes `the` letter by letter: its text would be learnt as one token that it never wrote."""
    split = tiny_tokenizer.convert_tokens_to_ids(["t", "h", "e"])
    assert tiny_tokenizer.tokenize("the") == ["the"]

    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        said = server.say(body, prompt)
        if len(body["messages"]) > 2:
            said |= {"token_ids": [*split, tiny_tokenizer.eos_token_id], "message": {"content": "the"}}
        return said

    server = serve(answer=answer)
    totals = regenerate(settings(server=server.url))
    assert totals is not None
    reason = "the text is not tokenised to what the target wrote"
    several = [row for row in make_prompts(24) if sum(each["role"] == "user" for each in row["messages"]) > 1]
    assert (totals.conversations, totals.answers) == (24, 24)
    assert totals.ended_early == {reason: len(several)}
    assert all(len(row["token_ids"]) == 1 for row in rows_of(settings().out))


def test_blank_answers_are_left_out(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        blank = {"message": {"content": ""}, "token_ids": [tiny_tokenizer.eos_token_id], "finish_reason": "stop"}
        return blank if body["messages"][-1]["content"].startswith("4 ") else server.say(body, prompt)

    server = serve(answer=answer)
    totals = regenerate(settings(server=server.url))
    assert totals is not None
    assert totals.left_out == {"the answer is blank": 1}
    assert [row["id"] for row in rows_of(settings().out)] == [f"p{number:03d}" for number in range(24) if number != 4]
    server.answer = lambda body, prompt: {
        "message": {"content": None},
        "token_ids": [tiny_tokenizer.eos_token_id],
        "finish_reason": "stop",
    }
    settings().out.unlink()
    with pytest.raises(HeadwayError, match="no answer can be kept: 24 x the answer is blank"):
        regenerate(settings(server=server.url))


def test_another_model_and_no_server(settings: Make, serve: Serve) -> None:
    server = serve()
    with pytest.raises(HeadwayError, match=rf"serves '{MODEL}', not 'other'; start it on the target, or give --model"):
        regenerate(settings(server=server.url, model="other"))
    server.model = settings().target  # vLLM's name of a target that was started by its folder
    assert regenerate(settings(server=server.url, model="")) is not None
    settings().out.unlink()
    server.close()
    with pytest.raises(HeadwayError, match=r"server http://127\.0\.0\.1:\d+/v1: does not say what it serves"):
        regenerate(settings(server=server.url))
    with pytest.raises(HeadwayError, match="--server localhost:80: is no URL"):
        regenerate(settings(server="localhost:80"))
    assert not work_of(settings()).exists()


def test_long_prompts(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """Room for an answer is what the server's length leaves; without any, the row is counted."""
    rows = make_prompts(4, turns=1)
    rows[1]["messages"] = [{"role": "user", "content": "1 " + "cat " * 600}]
    text = "2 cat"
    while len(prompt_ids(tiny_tokenizer, [{"role": "user", "content": text}])) < 505:
        text += " cat"
    rows[2]["messages"] = [{"role": "user", "content": text}]
    room = 512 - len(prompt_ids(tiny_tokenizer, rows[2]["messages"]))
    write_conversations(settings().prompts, rows)
    server = serve()
    totals = regenerate(settings(server=server.url))
    assert totals is not None
    assert totals.left_out == {"the prompt leaves no room for an answer": 1}
    assert {body["max_tokens"] for body in server.bodies} == {64, room}


def test_sampling_options_reach_the_server(settings: Make, serve: Serve) -> None:
    server = serve()
    regenerate(settings(server=server.url, temperature=0.7, top_p=0.9, template_options={"enable_thinking": False}))
    assert {(body["temperature"], body["top_p"], body["repetition_penalty"]) for body in server.bodies} == {
        (0.7, 0.9, 1)
    }
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.bodies)
    seeds = {json.dumps(body["messages"]): body["seed"] for body in server.bodies}
    assert len(set(seeds.values())) == len(seeds) == 48
    made_by = rows_of(settings().out)[0]["made_by"]
    assert (made_by["temperature"], made_by["top_p"], made_by["seed"]) == (0.7, 0.9, 0)
    assert read_conversations(settings().out)[0].template_options == {"enable_thinking": False}
    settings().out.unlink()
    server.bodies.clear()
    regenerate(settings(server=server.url, temperature=0.7))
    assert {json.dumps(body["messages"]): body["seed"] for body in server.bodies} == seeds


# --- killed and started again


def started(settings: Settings, *more: str) -> subprocess.Popen[str]:
    """The script in a process of its own."""
    given = {"prompts": settings.prompts, "out": settings.out, "target": settings.target, "server": settings.server}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return subprocess.Popen(
        [sys.executable, "data_prep/regenerate.py", *arguments, "--model", MODEL, "--max_new_tokens", "64", *more],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_and_started_again(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """kill -9 in the middle, and a last line that was only half written."""
    server = serve(delay=0.05)
    given = settings(server=server.url)
    process = started(given, "--concurrency", "4")
    while not work_of(given).exists() or len(work_of(given).read_bytes().splitlines()) < 15:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not given.out.exists()
    content = work_of(given).read_bytes()
    *lines, last = content.splitlines(keepends=True)
    work_of(given).write_bytes(b"".join(lines) + last[: len(last) // 2])
    server.bodies.clear()
    process = started(given)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "the last line was cut when the last run stopped" in out
    assert as_expected(given, tiny_tokenizer, make_prompts(24))
    assert len(server.bodies) == 48 - (len(lines) - 1)
    assert not work_of(given).exists()


def interrupted(settings: Settings, server: FakeServer) -> int:
    """A run that stops after some answers; how many."""
    stop_at = len(server.bodies) + 25
    server.spoil = lambda body, number: "400" if number > stop_at else "fine"
    with pytest.raises(HeadwayError, match="status 400"):
        regenerate(settings)
    server.spoil = lambda body, number: "fine"
    return len(work_of(settings).read_bytes().splitlines()) - 1


def test_rows_filtered_and_reordered_between_runs(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """cases.md 12: an answer belongs to its conversation's id and prompt, never to a place in the file."""
    server = serve()
    given = settings(server=server.url)
    done = interrupted(given, server)
    assert 15 < done <= 25
    rows = make_prompts(24)
    recorded = {json.loads(line)["id"] for line in work_of(given).read_bytes().splitlines()[1:]}
    kept = [row for number, row in enumerate(rows) if number % 5]
    random.Random(1).shuffle(kept)
    changed = next(row for row in kept if row["id"] in recorded)  # the same id, another question
    changed["messages"] = [{"role": "user", "content": "what is the moon made of"}]
    write_conversations(given.prompts, kept)
    server.bodies.clear()
    regenerate(given)
    assert as_expected(given, tiny_tokenizer, kept)
    turns = sum(message["role"] == "user" for row in kept for message in row["messages"])
    assert turns - done < len(server.bodies) < turns
    assert sum(body["messages"] == changed["messages"] for body in server.bodies) == 1


def test_every_place_to_stop(settings: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A work file of any number of lines, and half of the next one: the same bytes, and only the rest is asked for."""
    server = serve()
    given = settings(server=server.url)
    interrupted(given, server)
    regenerate(given)
    whole = given.out.read_bytes()
    given.out.unlink()
    interrupted(given, server)
    lines = work_of(given).read_bytes().splitlines(keepends=True)
    for kept in (0, 1, len(lines) // 2, len(lines) - 1):
        work_of(given).write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        server.bodies.clear()
        regenerate(given)
        assert given.out.read_bytes() == whole
        assert len(server.bodies) == 48 - max(0, kept - 1)
        given.out.unlink()


def test_other_settings_and_foreign_files(settings: Make, serve: Serve) -> None:
    server = serve()
    given = settings(server=server.url)
    interrupted(given, server)
    with pytest.raises(
        HeadwayError, match=r"out\.jsonl\.work: line 1: was begun with other settings \(.*temperature 0\.0, now 0\.5"
    ):
        regenerate(settings(server=server.url, temperature=0.5))
    with (
        Journal(work_of(given), json.loads(work_of(given).read_bytes().splitlines()[0])),
        pytest.raises(HeadwayError, match="another process is writing it"),
    ):
        regenerate(given)
    lines = work_of(given).read_bytes().splitlines(keepends=True)
    work_of(given).write_bytes(lines[0] + b"{]\n" + b"".join(lines[2:]))
    with pytest.raises(HeadwayError, match=r"out\.jsonl\.work: line 2: is not what was written there"):
        regenerate(given)
    work_of(given).unlink()
    given.out.write_text("something of the user's", encoding="utf-8")
    with pytest.raises(HeadwayError, match=r"out\.jsonl: is there already"):
        regenerate(given)
    assert given.out.read_text(encoding="utf-8") == "something of the user's"


def test_nothing_is_written_by_a_plan(settings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert regenerate(settings(server="http://127.0.0.1:9/v1", dry_run=True)) is None
    said = capsys.readouterr().out
    prompts = read_prompt_tokens(settings())
    assert f"24 conversations, 0 answers there, 48 to be written (greedy, http://127.0.0.1:9/v1): {prompts:,}" in said
    assert "at most 3,072 tokens" in said
    assert sorted(path.name for path in settings().out.parent.iterdir()) == ["prompts.jsonl"]


def read_prompt_tokens(settings: Settings) -> int:
    """Tokens of the prompts up to their first answers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.target)
    firsts = []
    for row in make_prompts(24):
        roles = [message["role"] for message in row["messages"]]
        firsts.append(row["messages"][: roles.index("user") + 1])
    return sum(len(prompt_ids(tokenizer, messages)) for messages in firsts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_new_tokens": 0}, "--max_new_tokens 0"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"batch_size": -1}, "--batch_size -1"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top_p"),
        ({"top_p": 0.9}, "--top_p 0.9: is for sampled answers"),
        ({"timeout": 0.0}, "--timeout"),
    ],
)
def test_bad_settings(settings: Make, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        settings(**changes)


# --- thoughts and tools

THINKING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}


@pytest.fixture
def thinking_dir(tmp_path: Path, tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """The tiny target with a template that has thoughts and tools."""
    folder = tmp_path / "thinking"
    folder.mkdir()
    for path in tiny_target_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target_dir)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder)
    return folder


def written(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def tool_prompt(names: list[str]) -> dict[str, Any]:
    """A question, the results of the tools that somebody else's model called, and another question."""
    calls = [
        {"id": f"old{n}", "type": "function", "function": {"name": name, "arguments": {}}}
        for n, name in enumerate(names)
    ]
    results = [{"role": "tool", "content": f"sun {n}", "tool_call_id": f"old{n}"} for n, _ in enumerate(names)]
    asked = [
        {"role": "user", "content": "how is it in Rome"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    return {"id": "t1", "messages": [*asked, *results, {"role": "user", "content": "thank you"}], "tools": TOOLS}


@pytest.mark.parametrize("parsed", [True, False], ids=["the server reads calls", "raw text"])
def test_tools_and_thoughts(settings: Make, serve: Serve, thinking_dir: Path, parsed: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(thinking_dir)
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    texts = [f"<think>\nthe sun\n</think>\n\nlet me see{call_text}", "it is red", "<think>\nwell\n</think>\n\ngood"]
    messages: list[dict[str, Any]] = [
        {
            "content": "let me see",
            "reasoning": "the sun",
            "tool_calls": [
                {"id": "new1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
            ],
        },
        {"content": "it is red"},
        {"content": "good", "reasoning": "well"},
    ]

    def answer(body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message = messages[turn] if parsed else {"content": texts[turn]}
        return {"message": message, "token_ids": written(tokenizer, texts[turn]), "finish_reason": "stop"}

    server = serve(answer=answer)
    server.tokenizer = tokenizer
    write_conversations(settings().prompts, [tool_prompt(["weather"])])
    totals = regenerate(settings(server=server.url, target=str(thinking_dir)))
    assert totals is not None
    assert (totals.answers, totals.ended_early) == (3, {})
    (row,) = rows_of(settings().out)
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    first, result = row["messages"][1:3]
    assert (first["content"], first["reasoning_content"]) == ("let me see", "the sun")
    assert first["tool_calls"][0]["function"] == CALL["function"]
    assert result["tool_call_id"] == ("new1" if parsed else "old0")
    assert row["messages"][-1]["reasoning_content"] == "well"
    assert row["token_ids"] == [written(tokenizer, text) for text in texts]
    assert row["tools"] == TOOLS
    assert all(body["tools"] == TOOLS for body in server.bodies)
    read_conversations(settings().out)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["weather", "weather"], "tool turns follow, but the answer did not call those tools"),
        ([], "the answer called tools whose results are not there"),
    ],
)
def test_results_of_other_calls(thinking_dir: Path, names: list[str], says: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(thinking_dir)
    row = tool_prompt(names)
    if not names:
        row["messages"].pop(1)
    dialogue = Dialogue(Prompt("t1", row["messages"], TOOLS, "row 1"), tokenizer, [tokenizer.eos_token_id], {})
    ids = written(tokenizer, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert dialogue.take(Answer(ids, len(ids), cut=False)) is not None
    assert dialogue.ended
    assert dialogue.left_out == says
    assert [message["role"] for message in dialogue.row({})["messages"]] == ["user", "assistant"]


def test_reading_an_answer() -> None:
    def read(text: str, *, with_calls: bool = True) -> dict[str, Any]:
        return {key: value for key, value in read_answer(text, with_calls=with_calls).items() if key != "role"}

    assert read("plain") == {"content": "plain"}
    assert read("<think>\na\n</think>\n\nb") == {"reasoning_content": "a", "content": "b"}
    assert read("a</think>b") == {"reasoning_content": "a", "content": "b"}
    assert read("b <think>a</think>") == {"reasoning_content": "b <think>a", "content": ""}
    assert read('<tool_call>{"name": "f"}</tool_call>') == {
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    for bad in ("<tool_call>{]</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>[]</tool_call>"):
        assert read(bad) == {"content": bad}
    assert read('<tool_call>{"name": "f"}</tool_call>', with_calls=False)["content"].startswith("<tool_call>")


# --- in this process


@pytest.fixture
def talks(tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The tiny target, loaded once, says nothing but words that begin with a blank, and stops."""
    target = Target.load(str(tiny_target_dir), "float32", "cpu")
    monkeypatch.setattr(Target, "load", lambda *_: target)
    words = [index for token, index in tiny_tokenizer.get_vocab().items() if token[0] == "Ġ" and len(token) > 1]
    bias_V = torch.full((len(tiny_tokenizer),), -1e4)
    bias_V[words] = 0.0
    bias_V[tiny_tokenizer.eos_token_id] = 0.5
    logits = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, last: logits(self, last) + bias_V)
    return target


def argmax_answers(target: Target, row: dict[str, Any]) -> bool:
    """Whether every token of a row's answers is the target's best one behind all before it."""
    (sequence,) = render_all(target.tokenizer, parse_conversation(row, "row"), target.eos_ids)
    best_T = target.logits(target.states(torch.tensor([sequence.ids])).last)[0].argmax(-1).tolist()
    return all(best_T[t - 1] == token for t, token in enumerate(sequence.ids) if sequence.turn[t])


def test_in_this_process(settings: Make, talks: Target) -> None:
    totals = regenerate(settings(batch_size=7, max_new_tokens=12))
    assert totals is not None
    rows = rows_of(settings().out)
    prompts = {row["id"]: row for row in make_prompts(24)}
    assert [row["id"] for row in rows] == [identity for identity in prompts if identity in {row["id"] for row in rows}]
    assert len(rows) + sum(totals.left_out.values()) == 24
    assert set(totals.left_out) <= {"the answer is blank"}  # the stop token came first
    assert all(argmax_answers(talks, row) for row in rows)
    assert totals.answers > 24
    assert 0 < totals.cut < 20
    for row in rows:
        users = [message["content"] for message in prompts[row["id"]]["messages"] if message["role"] == "user"]
        asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert asked == users[: len(asked)]
        assert row["messages"][-1]["role"] == "assistant"
        assert row["made_by"]["by"] == "transformers, float32"


def test_in_this_process_killed_and_sampled(settings: Make, talks: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(batch_size=5, max_new_tokens=12, temperature=1.0, top_p=0.9)
    regenerate(given)
    whole = given.out.read_bytes()
    given.out.unlink()
    append, appended = Journal.append, []

    def stop(self: Journal, entry: dict[str, Any]) -> None:
        if len(appended) == 17:
            raise KeyboardInterrupt
        appended.append(entry)
        append(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            regenerate(given)
    rows = make_prompts(24)[::-1]
    write_conversations(given.prompts, rows)
    regenerate(given)
    assert given.out.read_bytes().splitlines() == whole.splitlines()[::-1]
    given.out.unlink()
    regenerate(settings(batch_size=5, max_new_tokens=12, temperature=1.0, top_p=0.9, seed=1))
    assert given.out.read_bytes().splitlines() != whole.splitlines()[::-1]
