"""A real vLLM server answers 200 prompts, through two kills; its tokens are our argmax (benchmarks/server_answers.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.server_answers import measure

PROMPTS = 200


@pytest.mark.servers
def test_answers_of_a_server_that_is_killed(tmp_path: Path) -> None:
    figures = measure(PROMPTS, log=str(tmp_path / "server.log"))
    assert 0 < figures["client_killed_at"] < figures["server_killed_at"] < PROMPTS
    assert figures["exit_code_without_server"] == 2
    assert not figures["written_without_server"]
    assert figures["first_kept"]
    assert figures["of_them_unchanged"] == figures["recorded_before_the_last_start"]
    assert figures["ids_in_order_once"]
    assert figures["on_their_prompts"]
    assert figures["conversations"] >= 0.95 * PROMPTS  # the rest: texts that are not tokenised to what was written
    assert figures["tokens"] > 20 * PROMPTS
    assert figures["share"] >= 0.999
    assert len(figures["not_our_argmax"]) == min(50, figures["tokens"] - figures["our_argmax"])
