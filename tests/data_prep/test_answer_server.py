"""Answers by servers: faults ridden out, other models and other prompts refused, and what is sent to them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from data_prep import answer_server
from data_prep.conversations import read_conversations
from data_prep.regenerate import regenerate
from data_prep.render import prompt_ids
from heads.errors import HeadwayError
from tests.conftest import write_conversations
from tests.data_prep.regenerating import MODEL, Make, Serve, as_expected, make_prompts, rows_of, work_of

MANNERS = ["429", "500", "503", "408", "drop", "half", "no JSON", "no choices", "abort"]


def test_faults_are_ridden_out(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """A third of the requests fails, in every way."""
    source = random.Random(3)
    seen: set[str] = set()

    def spoil(body: dict[str, Any], number: int) -> str:
        manner = source.choice(MANNERS) if source.random() < 0.33 else "fine"
        seen.add(manner)
        return manner

    first, second = serve(spoil=spoil), serve(spoil=spoil)
    regenerate(regeneration(server=f"{first.url}, {second.url}/"))
    assert as_expected(regeneration(), tiny_tokenizer, make_prompts(24))
    assert set((first.answered + second.answered).values()) == {1}
    assert min(len(first.bodies), len(second.bodies)) > 8
    assert seen == {"fine", *MANNERS}


def test_slow_answers_are_asked_for_again(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    server = serve(spoil=lambda body, number: "slow" if number in (2, 5) else "fine")
    regenerate(regeneration(server=server.url, timeout=0.5))
    assert as_expected(regeneration(), tiny_tokenizer, make_prompts(24))


def test_retry_after_is_kept_to(regeneration: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_server_that_dies_and_comes_back(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
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
        regenerate(regeneration(server=server.url, patience=0.3))
    assert not regeneration().out.exists()
    recorded = work_of(regeneration()).read_bytes().splitlines()[1:]
    assert 10 < len(recorded) <= 20
    again = serve()
    regenerate(regeneration(server=again.url))
    assert as_expected(regeneration(), tiny_tokenizer, make_prompts(24))
    assert len(again.bodies) == 48 - len(recorded)


def test_one_of_two_servers_dies(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    def die(body: dict[str, Any], number: int) -> str:
        return "500" if number > 5 else "fine"

    first, second = serve(spoil=die), serve(delay=0.02)
    regenerate(regeneration(server=f"{first.url},{second.url}"))
    assert as_expected(regeneration(), tiny_tokenizer, make_prompts(24))
    assert sum(second.answered.values()) == 43


def test_a_request_that_always_fails(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """The others are answered; then the row is named, and nothing is written until it is mended."""

    def spoil(body: dict[str, Any], number: int) -> str:
        return "500" if any(message["content"].startswith("7 ") for message in body["messages"]) else "fine"

    server = serve(spoil=spoil)
    with pytest.raises(HeadwayError, match=r"1 conversations got no answer.*prompts\.jsonl.*'p007'.*status 500"):
        regenerate(regeneration(server=server.url))
    assert not regeneration().out.exists()
    rest = [row for row in make_prompts(24) if row["id"] != "p007"]
    write_conversations(regeneration().prompts, rest)
    asked = len(server.bodies)
    regenerate(regeneration(server=server.url))
    assert as_expected(regeneration(), tiny_tokenizer, rest)
    assert len(server.bodies) == asked


@pytest.mark.parametrize("with_ids", [True, False])
def test_another_prompt_at_the_server(regeneration: Make, serve: Serve, with_ids: bool) -> None:
    server = serve(with_ids=with_ids)
    prompt = server.prompt
    server.prompt = lambda body: [*prompt(body)[:3], *prompt(body)[2:]]  # type: ignore[method-assign]
    with pytest.raises(
        HeadwayError, match=r"prompts\.jsonl.*conversation 'p\d+': the prompt.*tokenizer or chat template"
    ):
        regenerate(regeneration(server=server.url))
    assert not regeneration().out.exists()


def test_a_server_that_says_nothing_of_its_prompts(regeneration: Make, serve: Serve) -> None:
    server = serve()
    respond = server.respond
    server.respond = lambda body: {"choices": respond(body)["choices"]}  # type: ignore[method-assign]
    with pytest.raises(HeadwayError, match="does not say how many tokens a prompt has"):
        regenerate(regeneration(server=server.url))


def test_refusals_name_the_row(regeneration: Make, serve: Serve) -> None:
    server = serve(spoil=lambda body, number: "400")
    with pytest.raises(HeadwayError, match=r"prompts\.jsonl.*conversation 'p\d+': status 400: .*something is wrong"):
        regenerate(regeneration(server=server.url))


def test_another_model_and_no_server(regeneration: Make, serve: Serve) -> None:
    server = serve()
    with pytest.raises(HeadwayError, match=rf"serves '{MODEL}', not 'other'; start it on the target, or give --model"):
        regenerate(regeneration(server=server.url, model="other"))
    server.model = regeneration().target  # vLLM's name of a target that was started by its folder
    assert regenerate(regeneration(server=server.url, model="")) is not None
    regeneration().out.unlink()
    server.close()
    with pytest.raises(HeadwayError, match=r"server http://127\.0\.0\.1:\d+/v1: does not say what it serves"):
        regenerate(regeneration(server=server.url))
    with pytest.raises(HeadwayError, match="--server localhost:80: is no URL"):
        regenerate(regeneration(server="localhost:80"))
    assert not work_of(regeneration()).exists()


def test_long_prompts(regeneration: Make, serve: Serve, tiny_tokenizer: Any) -> None:
    """Room for an answer is what the server's length leaves; without any, the row is counted."""
    rows = make_prompts(4, turns=1)
    rows[1]["messages"] = [{"role": "user", "content": "1 " + "cat " * 600}]
    text = "2 cat"
    while len(prompt_ids(tiny_tokenizer, [{"role": "user", "content": text}])) < 505:
        text += " cat"
    rows[2]["messages"] = [{"role": "user", "content": text}]
    room = 512 - len(prompt_ids(tiny_tokenizer, rows[2]["messages"]))
    write_conversations(regeneration().prompts, rows)
    server = serve()
    totals = regenerate(regeneration(server=server.url))
    assert totals is not None
    assert totals.left_out == {"the prompt leaves no room for an answer": 1}
    assert {body["max_tokens"] for body in server.bodies} == {64, room}


def test_sampling_options_reach_the_server(regeneration: Make, serve: Serve) -> None:
    server = serve()
    regenerate(regeneration(server=server.url, temperature=0.7, top_p=0.9, template_options={"enable_thinking": False}))
    assert {(body["temperature"], body["top_p"], body["repetition_penalty"]) for body in server.bodies} == {
        (0.7, 0.9, 1)
    }
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.bodies)
    seeds = {json.dumps(body["messages"]): body["seed"] for body in server.bodies}
    assert len(set(seeds.values())) == len(seeds) == 48
    made_by = rows_of(regeneration().out)[0]["made_by"]
    assert (made_by["temperature"], made_by["top_p"], made_by["seed"]) == (0.7, 0.9, 0)
    assert read_conversations(regeneration().out)[0].template_options == {"enable_thinking": False}
    regeneration().out.unlink()
    server.bodies.clear()
    regenerate(regeneration(server=server.url, temperature=0.7))
    assert {json.dumps(body["messages"]): body["seed"] for body in server.bodies} == seeds
