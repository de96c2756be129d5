"""What `--tap_format` and `--top_k_logits` keep: against a store of the same target in fp32, and against its own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.collect import Settings, collect
from data_prep.packed_states import FORMATS
from data_prep.store import FeatureStore
from heads.errors import HeadwayError
from heads.target import TargetEnds


@pytest.fixture
def make(tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path) -> Any:
    """`make("name", taps="1")`: settings of a store of the tiny target in tmp_path/name."""

    def made(name: str, **changes: Any) -> Settings:
        usual = {"conversations": tiny_conversations, "target": str(tiny_target_dir), "dtype": "float32"}
        return Settings(**(usual | {"out": tmp_path / name, "taps": "1,3", "held_out": 4} | changes))

    return made


def collected(settings: Settings) -> FeatureStore:
    collect(settings)
    return FeatureStore.open(settings.out)


@pytest.mark.parametrize("tap_format", ["int8", "fp8"])
def test_packed_taps_are_those_of_the_target_and_the_rest_is_untouched(make: Any, tap_format: str) -> None:
    """Bounds are counted from fp32 states: nothing is rounded to bf16 before it is packed."""
    exact = collected(make("exact", store_dtype="float32"))
    plain, packed = collected(make("plain")), collected(make("packed", tap_format=tap_format))
    assert [plain.manifest["tap_format"], packed.manifest["tap_format"]] == ["bf16", tap_format]
    for true, bf16, read in zip(exact, plain, packed, strict=True):
        assert read.id == true.id
        for name in ("ids_T", "turn_T", "last_TH", "top1_T", "lse_T"):
            assert torch.equal(getattr(read, name), getattr(bf16, name)), name
        assert read.last_TH.dtype == torch.bfloat16
        for tap in (1, 3):
            true_TH = true.taps[tap].double()
            assert torch.equal(bf16.taps[tap], true.taps[tap].bfloat16())
            largest_T1 = true_TH.abs().amax(1, keepdim=True)  # 32 channels: one group a row
            int8_TH = (largest_T1 / 127 / 2 * (1 + 2**-7)).expand_as(true_TH)
            fp8_TH = torch.maximum(true_TH.abs() / 16, largest_T1 / 448 / 1024 * (1 + 2**-7))
            error_TH = (read.taps[tap].double() - true_TH).abs()
            assert bool((error_TH <= (int8_TH if tap_format == "int8" else fp8_TH)).all())
            assert float(error_TH.max()) > 0


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("tap_format", FORMATS)
def test_the_announced_size_is_that_of_the_files(
    make: Any, tap_format: str, top_k: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: said before the first pass, and by a dry run; held against the free disk in the same bytes."""
    settings = make("store", tap_format=tap_format, top_k_logits=top_k, tokens_per_second=1.0, dry_run=True)
    collect(settings)
    announced = capsys.readouterr().out.split("bytes a token: ")[1].splitlines()[0].split(", ")
    a_token = sum(int(part.rsplit(" ", 1)[1].replace(",", "")) for part in announced)
    store = collected(make("store", tap_format=tap_format, top_k_logits=top_k))
    said = capsys.readouterr().out
    needed = a_token * store.tokens
    assert f"{needed / 1e6:,.1f} MB to write" in said
    assert said.index("MB to write") < said.index("tokens/s")
    shards = [path.read_bytes() for path in store.folder.glob("features-*.safetensors")]
    headers = sum(8 + int.from_bytes(shard[:8], "little") for shard in shards)
    bounds = 8 * (len(store) + len(shards))
    assert sum(map(len, shards)) == needed + headers + bounds

    usage = type("Usage", (), {"free": needed - 1})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(HeadwayError, match="MB are free; free some, give another --out, fewer taps, --tap_format int8"):
        collect(make("other", tap_format=tap_format, top_k_logits=top_k))
    assert not make("other").out.exists()
    usage.free = needed
    collect(make("other", tap_format=tap_format, top_k_logits=top_k))


def test_top_k_logits_are_those_of_the_stored_state(make: Any, tiny_target_dir: Path) -> None:
    store, ends = collected(make("store", top_k_logits=5)), TargetEnds.load(str(tiny_target_dir), dtype="float32")
    assert store.layout.top_k == 5
    probabilities = []
    for row in store:
        assert row.top_k_ids_TK is not None
        assert row.top_k_logits_TK is not None
        assert row.top_k_ids_TK.dtype == torch.int64
        assert row.top_k_logits_TK.dtype == torch.float32
        served_T = torch.cat([row.turn_T[1:] > 0, torch.tensor([False])])
        assert bool((row.top_k_ids_TK[~served_T] == -1).all())
        assert bool((row.top_k_logits_TK[~served_T] == 0).all())
        logits_RV = ends.logits(row.last_TH[served_T].float())
        largest_RK, ids_RK = logits_RV.sort(descending=True)
        assert torch.equal(row.top_k_ids_TK[served_T], ids_RK[:, :5])
        assert torch.equal(row.top_k_ids_TK[served_T][:, 0], row.top1_T[served_T])
        torch.testing.assert_close(row.top_k_logits_TK[served_T], largest_RK[:, :5], rtol=1e-5, atol=1e-5)
        given_RK = (row.top_k_logits_TK - row.lse_T[:, None])[served_T].exp()
        torch.testing.assert_close(given_RK, logits_RV.softmax(-1).gather(1, ids_RK[:, :5]), rtol=1e-4, atol=1e-6)
        probabilities.append(given_RK.sum(1))
    assert 0 < float(torch.cat(probabilities).mean()) < 1


def test_taps_of_several_methods_are_collected_at_once(make: Any) -> None:
    """One pass for heads that read 1 and 3, 0 and 2, or none: each finds what a store of its own would hold."""
    together = collected(make("together", taps="0,1,2,3", tap_format="int8"))
    assert together.taps == (0, 1, 2, 3)
    for taps in ("1,3", "0,2", ""):
        alone = collected(make(f"alone-{taps}", taps=taps, tap_format="int8"))
        for left, right in zip(together, alone, strict=True):
            assert torch.equal(left.last_TH, right.last_TH)
            assert list(right.taps) == [int(tap) for tap in taps.split(",") if tap]
            assert all(torch.equal(left.taps[tap], right.taps[tap]) for tap in right.taps)


def test_a_store_goes_on_in_its_own_format_alone(make: Any) -> None:
    collect(make("store"))
    for changes, said in (
        ({"tap_format": "int8"}, "tap_format bf16, this run has int8"),
        ({"top_k_logits": 2}, "top_k_logits 0, this run has 2"),
    ):
        with pytest.raises(HeadwayError, match=f"{said}; give a new --out or delete the folder"):
            collect(make("store", **changes))
    collect(make("store", tap_format="bf16"))  # what it is by default


@pytest.mark.parametrize("count", [-1, 289])
def test_more_logits_than_there_are_tokens_are_refused(make: Any, count: int) -> None:
    with pytest.raises(HeadwayError, match=f"--top_k_logits {count}: give 0 to 288, the vocabulary"):
        collect(make("store", top_k_logits=count))
    assert not make("store").out.exists()
