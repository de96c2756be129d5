"""Publishing against a stand-in for the Hub: what comes back, uploads cut in the middle, every status, nothing half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import heads
from eval.contenders import build
from eval.decode import Settings, decode
from heads import publish
from heads.errors import HeadwayError
from heads.formats.layouts import read_head
from heads.target import Target
from tests.conftest import save_tiny_target
from tests.heads.foreign import same
from tests.heads.hub_server import TOKEN, HubServer
from tests.heads.published import BASE, REPO, Proved, make_proved, run, use

LAYOUTS = ("--layouts", "vllm", "sglang", "speculators")
ROOT = Path(publish.__file__).parents[1]
PUT = r"PUT /lfs/"


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any, tiny_conversations: Path) -> Proved:
    folder = tmp_path_factory.mktemp("proved")
    target = save_tiny_target(folder / "a target", tiny_tokenizer, num_hidden_layers=8)
    return make_proved(folder, target, tiny_conversations)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HubServer]:
    server = HubServer(part_size=getattr(request, "param", None))
    use(server, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    yield server
    server.close()
    assert not list((tmp_path / "scratch").iterdir()), "nothing half done on this disk"
    assert server.tokens <= {f"Bearer {TOKEN}", None}


@pytest.mark.parametrize("hub", [None, 20_000], ids=["whole", "in parts"], indirect=True)
def test_what_comes_back_is_what_was_sent_and_drafts_the_same(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run(monkeypatch, *proved.arguments(*LAYOUTS, "--revision", "v1"))
    assert hub.repos[REPO].private
    assert hub.repos[REPO].messages == ["initial commit", hub.repos[REPO].messages[1]]
    files = hub.repos[REPO].files("v1")
    engines = {
        f"{name}/{file}"
        for name in LAYOUTS[1:]
        for file in ("config.json", "headway.json", "model.safetensors", "SERVING.md")
    }
    reports = {f"report.{kind}" for kind in ("json", "md", "html")}
    own = {"config.json", "model.safetensors", "manifest.json", "README.md", "certificate.json"}
    assert set(files) == own | reports | engines | {".gitattributes"}
    assert set(hub.repos[REPO].files("main")) == {".gitattributes"}
    assert hub.url in capsys.readouterr().out

    original = heads.load_head(proved.head)
    back = heads.load_head(REPO, revision="v1")
    same(back, original)
    assert back.config == original.config
    assert files["model.safetensors"] == (proved.head / "model.safetensors").read_bytes()
    for name in LAYOUTS[1:]:
        folder = proved.head.parent / f"back-{name}-{hub.part_size}"
        folder.mkdir()
        for file in ("config.json", "headway.json", "model.safetensors"):
            (folder / file).write_bytes(files[f"{name}/{file}"])
        same(read_head(folder, str(proved.target)).head, original)
    target = Target.load(str(proved.target), "float32", "cpu")
    settings, prompts = Settings(max_new_tokens=12), [[5, 60, 7], [200, 9]]
    hub.repos[REPO].branches["main"] = hub.repos[REPO].branches["v1"]
    here, there = (
        decode(target, build(name, target, None).drafter, prompts, settings) for name in (str(proved.head), REPO)
    )
    assert [(row.drafted, row.accepted) for row in there.rounds] == [(row.drafted, row.accepted) for row in here.rounds]
    assert [output.ids for output in there.outputs] == [output.ids for output in here.outputs]


@pytest.mark.parametrize("hub", [None, 20_000], ids=["whole", "in parts"], indirect=True)
def test_a_cut_upload_goes_on_without_sending_again_what_is_there(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch
):
    """The second connection for a weight file of speculators is cut, as often as the library tries."""
    run(monkeypatch, *proved.arguments(*LAYOUTS, "--repo", "an-org/other"))
    sizes = {sha256(content).hexdigest(): len(content) for content in hub.objects.values()}
    victim = sha256(hub.repos["an-org/other"].files()["speculators/model.safetensors"]).hexdigest()
    hub.objects.clear()
    hub.uploaded.clear()
    part = "" if hub.part_size is None else "/2"
    hub.plant(rf"{PUT}{victim}{part}$", "cut")
    with pytest.raises(HeadwayError, match=rf"^{REPO}: the connection to the Hub failed .*run again$"):
        run(monkeypatch, *proved.arguments(*LAYOUTS))
    assert hub.repos[REPO].messages == ["initial commit"], "all or nothing"
    assert set(hub.objects) == set(sizes) - {victim}
    hub.faults.clear()
    hub.uploaded.clear()
    run(monkeypatch, *proved.arguments(*LAYOUTS))
    assert {oid: sum(received) for oid, received in hub.uploaded.items()} == {victim: sizes[victim]}
    assert len(hub.repos[REPO].messages) == 2
    same(heads.load_head(REPO), heads.load_head(proved.head))
    hub.uploaded.clear()
    run(monkeypatch, *proved.arguments(*LAYOUTS))
    assert len(hub.repos[REPO].messages) == 2, "the same again is no commit"
    assert not hub.uploaded


def test_a_short_interruption_is_not_even_noticed(proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    hub.plant(PUT, "cut", times=2)
    hub.plant("/preupload/", 500, times=1)
    run(monkeypatch, *proved.arguments())
    same(heads.load_head(REPO), heads.load_head(proved.head))


def test_the_next_publication_replaces_the_one_before_and_leaves_other_files(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch
):
    run(monkeypatch, *proved.arguments(*LAYOUTS, "--public"))
    repo = hub.repos[REPO]
    assert not repo.private
    repo.commit("main", repo.files() | {"LICENSE": b"mine", "vllm/extra.bin": b"old", "images/a.png": b"x"}, "by hand")
    with pytest.raises(HeadwayError, match=r"exists and is public; give --public"):
        run(monkeypatch, *proved.arguments())
    run(monkeypatch, *proved.arguments("--layouts", "vllm", "--public"))
    places = {name.partition("/")[0] for name in repo.files()}
    assert places >= {"LICENSE", "images", "vllm", "README.md", "certificate.json"}
    assert not places & {"sglang", "speculators"}
    assert "vllm/extra.bin" not in repo.files()


ENDPOINTS = {
    "repos/create": r"POST /api/repos/create",
    "branch": r"POST .*/branch/",
    "info": r"GET /api/models/",
    "validate-yaml": r"validate-yaml",
    "preupload": r"/preupload/",
    "batch": r"/objects/batch",
    "upload": PUT,
    "commit": r"/commit/",
}
SAID = {
    401: "run `hf auth login`, or set HF_TOKEN",
    403: "give it write access there",
    404: "check the name",
    409: "wait until they are done",
    412: "look at it, then run again",
    429: "wait 7 s, then run again",
    500: "run again later",
    503: "run again later",
}


@pytest.mark.parametrize("status", SAID)
@pytest.mark.parametrize("place", ENDPOINTS)
def test_every_status_is_one_line_and_nothing_is_committed(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, place: str, status: int,
):  # fmt: skip
    """The stand-in even sends the token back in its error."""
    hub.plant(ENDPOINTS[place], status, headers={"Retry-After": "7"})
    arguments = proved.arguments("--revision", "v1")
    if status == 409 and place in (
        "repos/create",
        "branch",
    ):  # it says that they are there already: then all else goes on
        hub.plant(ENDPOINTS["commit"], 409)
    with pytest.raises(HeadwayError) as caught:
        run(monkeypatch, *arguments)
    text = str(caught.value)
    if (place, status) == ("branch", 409):  # it is there already, says the Hub, and then it is not
        status = 404
    assert text.startswith(f"{REPO}: the Hub answered {status} (")
    assert SAID[status] in text
    assert "\n" not in text
    assert len(text) < 500
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert all(repo.messages == ["initial commit"] for repo in hub.repos.values())
    shown = capfd.readouterr()
    assert TOKEN not in text + shown.out + shown.err + caplog.text
    assert shown.err == ""


def test_no_connection_at_all(proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    hub.plant("/commit/", "cut")
    with pytest.raises(HeadwayError, match=rf"^{REPO}: the connection to the Hub failed"):
        run(monkeypatch, *proved.arguments())
    options = publish.Options(
        proved.head, REPO, reports=(proved.report,), certificate=proved.certificate, base_model=BASE, license="mit"
    )
    with pytest.raises(HeadwayError, match=rf"^{REPO}: the connection to the Hub failed"):
        publish.publish(options, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(publish.sys.modules["huggingface_hub"].constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HeadwayError, match=r"HF_HUB_OFFLINE is set; unset it"):
        run(monkeypatch, *proved.arguments())


def test_without_a_token_nothing_is_asked(proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HeadwayError, match=r"nobody is logged in; run `hf auth login`, or set HF_TOKEN"):
        run(monkeypatch, *proved.arguments())
    assert not hub.requests


def test_somebody_else_commits_meanwhile(proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    run(monkeypatch, *proved.arguments())
    repo, fault = hub.repos[REPO], hub.fault

    def interfere(request: str) -> Any:
        if "/preupload/" in request and "theirs" not in repo.messages:
            repo.commit("main", repo.files() | {"config.json": b"{}"}, "theirs")
        return fault(request)

    monkeypatch.setattr(hub, "fault", interfere)
    with pytest.raises(HeadwayError, match=r"the Hub answered 412 \(A commit has happened since.*look at it"):
        run(monkeypatch, *proved.arguments("--layouts", "vllm"))
    assert repo.messages[-1] == "theirs"


def test_a_dry_run_lists_every_file_and_sends_no_request(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run(monkeypatch, *proved.arguments(*LAYOUTS, "--dry_run", "--revision", "v1"))
    said = capsys.readouterr().out
    assert not hub.requests
    run(monkeypatch, *proved.arguments(*LAYOUTS, "--revision", "v1"))
    files = hub.repos[REPO].files("v1")
    del files[".gitattributes"]
    listed = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in said.splitlines()[: len(files)]}
    assert listed == {name: len(content) for name, content in files.items()}
    assert f"{sum(listed.values()):,}  bytes in {len(files)} files for the private repository {REPO}, branch v1" in said
    assert "nothing was sent" in said


def test_as_a_program_it_shows_no_token_even_when_told_to_show_all(proved: Proved, hub: HubServer, tmp_path: Path):
    """A process of its own with HF_ENDPOINT and HF_DEBUG, which shows all requests: one line of error, exit code 2."""
    hub.plant("/commit/", 403)
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1",
        "HF_HOME": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "heads" / "publish.py"), *proved.arguments()]
    done = subprocess.run(
        command, check=False, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {REPO}: the Hub answered 403 ")
    assert [line for line in done.stderr.splitlines() if "error: " in line] == [last]
    assert TOKEN not in done.stdout + done.stderr


def test_the_manifest_of_a_head_from_elsewhere_stays_whole(
    proved: Proved, hub: HubServer, monkeypatch: pytest.MonkeyPatch
):
    run(monkeypatch, *proved.arguments())
    was = json.loads((proved.head / "manifest.json").read_text())
    now = heads.load_head(REPO).manifest
    assert now == {"target": was["target"] | {"name": BASE}, "recipe": {"target": BASE}}
    assert torch.equal(heads.load_head(REPO).fc.weight, heads.load_head(proved.head).fc.weight)
