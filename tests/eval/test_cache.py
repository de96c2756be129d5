"""Slot cache, position limits, refusals, and what a round costs the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from eval import passes, probe
from eval.cache import SlotCache
from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.none import NoDrafter
from eval.passes import TargetPasses
from eval.sampling import Sampling
from eval.tree import DraftTree
from eval.verify import HostVerified, Verified
from heads.errors import HeadwayError
from heads.target import Target
from tests.eval.test_architectures import EIGHT, GROUPED, MODELS, SIZES, Case, make_case, save_tiny_model
from tests.fake_cuda import fake_cuda

NEW = 24


@pytest.fixture(scope="module")
def case(tiny_target_dir: Path) -> Case:
    return make_case(Target.load(str(tiny_target_dir), dtype="float64", device="cpu"), new=NEW)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[SlotCache]:
    """Every cache that a decode call uses."""
    caches: list[SlotCache] = []
    init = SlotCache.__init__

    def spy(cache: SlotCache, *args: Any, **kwargs: Any) -> None:
        init(cache, *args, **kwargs)
        caches.append(cache)

    monkeypatch.setattr(SlotCache, "__init__", spy)
    return caches


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_cache_holds_what_a_plain_prefill_of_the_text_holds(case: Case, grown: list[SlotCache], tree: bool) -> None:
    """cases.md 21: after every round, one slot a token of prompt and output but the last; and its keys and values."""
    lengths: list[int] = []

    class Watched(type(case.scripted(3, 4, tree))):  # type: ignore[misc]
        def draft(self, sequences: list[list[int]], root_B: torch.Tensor, length: int | None = None) -> DraftTree:
            if not lengths:
                self.stopped = [False] * len(sequences)
            for row, ids in enumerate(sequences):
                if len(ids) < len(case.prompts[row]) + len(case.texts[row]):
                    assert grown[0].lengths[row] == len(ids) - 1
                    assert int(grown[0].lengths_B[row]) == len(ids) - 1
            lengths.append(len(sequences[2]))
            return super().draft(sequences, root_B)

    plain = case.scripted(3, 4, tree)
    decode(case.target, Watched(plain.texts, 3, 4, tree), case.prompts, Settings(max_new_tokens=NEW))
    assert len(set(lengths)) > 3
    for row, (prompt, text) in enumerate(zip(case.prompts, case.texts, strict=True)):
        ids = [*prompt, *text][:-1]
        cached = case.target.model(torch.tensor([ids]), use_cache=True)
        for ours, theirs in zip(grown[0].layers, (cached.get("cache") or cached.past_key_values).layers, strict=True):
            torch.testing.assert_close(ours.keys[row, :, : len(ids)], theirs.keys[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(ours.values[row, :, : len(ids)], theirs.values[0], rtol=0, atol=1e-10)


def test_a_second_call_gives_what_it_gives_alone(case: Case) -> None:
    drafter = case.scripted(3, 4, tree=True)
    decode(case.target, drafter, case.prompts, Settings(max_new_tokens=NEW))
    again = decode(case.target, drafter, case.prompts[::-1], Settings(max_new_tokens=NEW))
    assert [output.ids for output in again.outputs] == case.texts[::-1]


def test_moves_only_the_path(case: Case) -> None:
    """Rows of different length: the path's slots go behind each row's tokens, everything else stays where it is."""
    cache = SlotCache(1, 2, 10, torch.device("cpu"))
    cache.grow(torch.tensor([3, 1]), [3, 1])
    cache.begin(5)
    slots = torch.arange(cache.capacity, dtype=torch.float64)
    keys = slots[None, None, :, None].expand(2, 1, -1, 2).clone()
    layer = cache.layers[0]
    layer.lazy_initialization(keys, keys)
    layer.keys.copy_(keys)
    layer.values.copy_(-keys)
    cache.move_path(torch.tensor([[0, 2, 4], [0, 3, -1]]))
    assert layer.keys[0, 0, :8, 0].tolist() == [0, 1, 2, 3, 5, 7, 6, 7]
    assert layer.keys[1, 0, :8, 0].tolist() == [0, 1, 4, 3, 4, 5, 6, 7]
    assert torch.equal(layer.values, -layer.keys)


def test_a_pass_that_does_not_fit_is_an_error() -> None:
    cache = SlotCache(1, 1, 64, torch.device("cpu"))
    cache.grow(torch.tensor([60]), [60])
    with pytest.raises(ValueError, match="cache of 64 slots, 65 needed"):
        cache.begin(5)


# --- the target's last position ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "llama", "phi3-longrope"])
def short(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Case:
    """A target whose positions end exactly where the longest prompt's text does."""
    kind, settings = MODELS[request.param]
    limit = "original_max_position_embeddings" if "longrope" in request.param else "max_position_embeddings"
    folder = save_tiny_model(
        tmp_path_factory.mktemp("short"), tiny_tokenizer, kind, settings | {limit: 19 + NEW, "eos_token_id": None}
    )
    return make_case(Target.load(str(folder), dtype="float64", device="cpu"), new=NEW)


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_end_at_the_last_position(short: Case, tree: bool) -> None:
    """cases.md 27: the longest text fills the target's positions; drafts get shorter there, tokens stay the same."""
    drafter = short.scripted(6, 10**9, tree)
    settings = Settings(max_new_tokens=NEW, stop_ids=())
    for batch in ([2], [2, 0, 4], [0, 1, 2, 3, 4]):
        ledger = decode(short.target, drafter, [short.prompts[row] for row in batch], settings)
        assert [output.ids for output in ledger.outputs] == [short.texts[row] for row in batch]
        for row in ledger.rounds:
            depth = row.drafted // (2 if tree else 1)
            root = len(short.prompts[batch[row.prompt]]) + row.position - 1
            assert root + depth < 19 + NEW


def test_no_draft_past_the_last_position_is_even_fed(case: Case) -> None:
    passes = TargetPasses(case.target, 2, 30, drafts=4)
    passes.limit = 12
    passes.prefill([case.prompts[1], case.prompts[3]])  # 7 and 4 tokens
    tree = DraftTree.chain(torch.tensor([5, 6]), torch.full((2, 6), 9))
    assert passes.fit(tree).counts_B.tolist() == [4, 6]
    assert passes.fit(tree).positions().max(1).values.tolist() == [4, 6]
    passes.limit = 13
    assert passes.fit(tree).counts_B.tolist() == [5, 6]
    passes.limit = 14
    assert passes.fit(tree) is tree


def test_texts_longer_than_the_target_are_refused_at_once(short: Case) -> None:
    with pytest.raises(HeadwayError, match=f"has {19 + NEW} positions, {20 + NEW} are asked for"):
        decode(short.target, NoDrafter(), [short.prompts[2]], Settings(max_new_tokens=NEW + 1))


# --- targets that are refused -----------------------------------------------------------------------------------------

HYBRID = EIGHT | {"layer_types": ["linear_attention", "full_attention"] * 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MambaConfig": (SIZES | {"state_size": 4}, "mamba.*keeps a recurrent state"),
    "Mamba2Config": (SIZES | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}, "mamba2.*recurrent state"),
    "JambaConfig": (GROUPED | {"use_mamba_kernels": False, "num_experts": 2}, "jamba.*recurrent state"),
    "Qwen3NextConfig": (HYBRID | {"num_experts": 2, "moe_intermediate_size": 16}, "qwen3_next.*linear_attention"),
    "RecurrentGemmaConfig": (GROUPED | {"lru_width": 32}, "recurrent_gemma.*recurrent state"),
    "RwkvConfig": (SIZES, "rwkv.*recurrent state"),
    "Lfm2Config": (GROUPED | {"layer_types": ["conv", "full_attention"] * 2}, "lfm2.*layers of type conv"),
    "BloomConfig": ({"vocab_size": 288, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "bloom.*takes no position_ids"),
    "FalconConfig": (SIZES | {"alibi": True, "new_decoder_architecture": False}, "falcon.*ALiBi"),
    "GPTNeoConfig": (
        {"vocab_size": 288, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "gpt_neo.*causal mask of its own",
    ),
    "BartConfig": (
        {"vocab_size": 288, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "bart.*takes no position_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_targets_that_cannot_roll_back_are_refused_by_name(
    kind: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings, message = REFUSED[kind]
    target = Target.load(str(save_tiny_model(tmp_path, tiny_tokenizer, kind, settings)), "float32", "cpu")
    with pytest.raises(HeadwayError, match=f"(?s){tmp_path}.*{message}.*choose another target"):
        decode(target, NoDrafter(), [[5, 6, 7]])


def test_encoder_decoders_are_no_targets(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = T5Config(vocab_size=288, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(HeadwayError, match="'t5' is no causal language model"):
        Target.load(str(tmp_path), "float32", "cpu")


def test_an_attention_that_takes_no_mask_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.target.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(HeadwayError, match="'flash_attention_2' takes no mask"):
        decode(case.target, NoDrafter(), [[5, 6, 7]])


# --- architectures that no test knows ---------------------------------------------------------------------------------


def test_an_unknown_architecture_is_probed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound one passes and is decoded; one whose layers ignore the mask is refused."""
    monkeypatch.setattr(probe, "TESTED", frozenset())
    assert (
        decode(case.target, NoDrafter(), case.prompts[:1], Settings(max_new_tokens=NEW)).outputs[0].ids == case.texts[0]
    )
    assert case.target in probe._passed
    probe._passed.discard(case.target)
    monkeypatch.setattr(passes, "lean_decoder", lambda _: None)  # so that the layers' own forward is what runs
    for layer in case.target.layers:
        forward = layer.forward

        def deaf(hidden: torch.Tensor, *args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return _forward(hidden, *args, **(kwargs | {"attention_mask": None}))

        monkeypatch.setattr(layer, "forward", deaf)
    with pytest.raises(HeadwayError, match="states of a drafted tree differ from a plain pass"):
        decode(case.target, NoDrafter(), case.prompts[:1])
    assert case.target not in probe._passed


# --- a round on a device that is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_a_round_stays_on_the_device(
    kind: str,
    sampling: Sampling,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill and rounds of a ragged batch on fake CUDA tensors: no mixed devices, one transfer to the host a round.

    Fake tensors have no numbers, so anything that reads one raises; only `Verified.host` is told what it would read.
    """
    folder = save_tiny_model(tmp_path, tiny_tokenizer, *MODELS[kind])
    read: list[int] = []

    def host(verified: Verified, positions: Sequence[int], live: Sequence[bool] | None = None) -> HostVerified:
        assert verified.next_B.device.type == "cuda"
        rows = len(positions)
        read.append(rows)
        return HostVerified([4] * rows, [1] * rows, [[0, 2]] * rows, [[7, 8]] * rows)

    monkeypatch.setattr(Verified, "host", host)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    # every row has a draft: a tensor without elements cannot be made fake and moved in inference mode
    found = [[8, 9, *prompt] for prompt in case.prompts]
    runs: list[tuple[Drafter, list[list[int]]]] = [
        (NoDrafter(), case.prompts),
        (LookupDrafter(3, 2), found),
        (case.scripted(3, 4, tree=True), case.prompts),
    ]
    with fake_cuda(), torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    target = Target(model.eval().requires_grad_(False), kind, folder)
    with fake_cuda():
        for drafter, prompts in runs:
            read.clear()
            ledger = decode(target, drafter, prompts, Settings(max_new_tokens=9, sampling=sampling, stop_ids=()))
            rounds = max(sum(row.prompt == 0 for row in ledger.rounds), 1)
            assert len(read) == 1 + rounds, "one for the prefill's token, one a round"
