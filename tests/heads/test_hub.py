"""Heads loaded from the Hub: only their own files, by branch and commit, from the cache when there is no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import heads
from heads import convert
from heads.checkpoint import read_manifest, weights_sha256
from heads.errors import HeadwayError, sha256_file
from heads.hub import is_repo_id, resolve_head
from tests.conftest import save_tiny_target
from tests.heads.foreign import eagle3_config, eagle3_head, eagle3_tensors, medusa_head, same, save
from tests.heads.hub_repo import Repo
from tests.heads.hub_server import LFS_KINDS, HubServer
from tests.heads.published import use

REPO = "an-org/a.head_1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    use(server, monkeypatch, tmp_path / "cache", token=None)
    yield server
    server.close()


def put(hub: HubServer, folder: Path, branch: str = "main", **more: bytes) -> str:
    """Make a folder's files a commit of REPO."""
    repo = hub.repos.setdefault(REPO, Repo(private=False))
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | more
    repo.lfs |= {name for name in files if name.endswith(LFS_KINDS)}
    return repo.commit(branch, files, branch)


def test_a_head_by_name_branch_and_commit_and_nothing_else_is_fetched(hub: HubServer, tmp_path: Path):
    first, second = medusa_head(50), eagle3_head(288)
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    evil = {"pytorch_model.bin": b"pickled", "README.md": b"a card", "vllm/model.safetensors": b"other"}
    commit = put(hub, tmp_path / "first", **evil)
    put(hub, tmp_path / "second", "v2")
    same(heads.load_head(REPO), first)
    same(heads.load_head(REPO, revision="v2", dtype=torch.float32), second)
    same(heads.load_head(REPO, revision=commit), first)
    fetched = {path.rpartition("/")[2] for method, path in hub.requests if method == "GET" and "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors", "manifest.json"}
    assert not any("vllm" in path for _, path in hub.requests)
    assert read_manifest(REPO) == first.manifest
    assert weights_sha256(REPO) == sha256_file(tmp_path / "first" / "model.safetensors")
    assert hub.tokens == {None}


def test_from_the_cache_without_a_network_and_a_clear_line_where_it_holds_nothing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = medusa_head(50)
    head.save_pretrained(tmp_path / "head")
    put(hub, tmp_path / "head")
    heads.load_head(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    same(heads.load_head(REPO), head)
    for name, revision in ((REPO, "v9"), ("an-org/unknown", None)):
        with pytest.raises(HeadwayError, match=rf"^{name}: no such folder, .*HF_HUB_OFFLINE is set; unset it"):
            heads.load_head(name, revision=revision)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()
    same(heads.load_head(REPO), head)
    with pytest.raises(HeadwayError, match=r"^an-org/unknown: no such folder, .*connection to the Hub failed.*network"):
        heads.load_head("an-org/unknown")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "hf auth login"),
        (403, "give it write access"),
        (404, "check the name"),
        (429, "a few minutes"),
        (500, "later"),
    ],
)
def test_each_status_is_one_line(hub: HubServer, tmp_path: Path, status: int, says: str):
    medusa_head(50).save_pretrained(tmp_path / "head")
    put(hub, tmp_path / "head")
    hub.plant("GET /api/models/", status)
    with pytest.raises(HeadwayError) as caught:
        heads.load_head(REPO)
    assert str(caught.value).startswith(
        f"{REPO}: no such folder, and not to be had from the Hub: the Hub answered {status} ("
    )
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_not_whole_is_said(hub: HubServer, tmp_path: Path):
    medusa_head(50).save_pretrained(tmp_path / "head")
    put(hub, tmp_path / "head")
    with pytest.raises(HeadwayError, match=r"revision 'v9': the Hub answered 404 .*check the name"):
        heads.load_head(REPO, revision="v9")
    with pytest.raises(HeadwayError, match=r"an-org/unknown: no such folder, .* answered 404"):
        heads.load_head("an-org/unknown")
    (tmp_path / "head" / "model.safetensors").unlink()
    put(hub, tmp_path / "head", "half", **{"pytorch_model.bin": b"pickled"})
    with pytest.raises(HeadwayError, match=r"model\.safetensors: no such file"):
        heads.load_head(REPO, revision="half")
    with pytest.raises(HeadwayError, match=r"a folder has no revision 'v1'"):
        heads.load_head(tmp_path / "head", revision="v1")


@pytest.mark.parametrize(
    "name", ["nowhere", "/no/where", "a/b/c", "an-org/-x", "an-org/x..y", "an org/x", "~/x", "an-org/x\n"]
)
def test_a_path_is_not_looked_for_on_the_hub(hub: HubServer, name: str):
    assert not is_repo_id(name)
    with pytest.raises(HeadwayError, match=r"no such folder; give the folder of a trained head"):
        resolve_head(name)
    assert not hub.requests


def test_a_public_head_in_another_layout_is_converted_from_the_hub(
    hub: HubServer, tmp_path: Path, tiny_tokenizer: object, monkeypatch: pytest.MonkeyPatch
):
    target = save_tiny_target(tmp_path / "target", tiny_tokenizer, num_hidden_layers=8)  # type: ignore[arg-type]
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    tensors = eagle3_tensors(vocab)
    put(hub, save(tmp_path / "raw", eagle3_config(vocab), tensors, "pytorch_model.bin"), **{"big.gguf": b"not this"})
    arguments = ["--head", REPO, "--target", target, "--to", "headway", "--out", tmp_path / "ours"]
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    convert.main()
    assert torch.equal(heads.load_head(tmp_path / "ours").state_dict()["fc.weight"], tensors["fc.weight"])
    assert not any("gguf" in path for _, path in hub.requests)
