"""The Hub: heads fetched from it, a folder sent to it in one commit, and every failure as one line with its remedy.

Tokens come from where huggingface_hub looks for them (HF_TOKEN, `hf auth login`) and are never taken, shown or kept here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id

from heads.errors import HeadwayError

HEAD_FILES = ("config.json", "model.safetensors", "manifest.json")
REMEDIES = {
    401: "the token is missing, wrong or expired, or there is no such repository: run `hf auth login`, or set HF_TOKEN",
    403: "this token may not do that: give it write access there, or log in as somebody who has it",
    404: "there is no such repository, branch or organisation, or this token may not see it: check the name",
    409: "somebody else is changing the repository: wait until they are done, then run again",
    412: "somebody else changed the repository meanwhile: look at it, then run again",
    429: "too many requests: wait{wait}, then run again",
    500: "the Hub is in trouble: run again later",
}
HIDDEN = "<token>"
_TOKEN = re.compile(r"\bhf_\w{8,}")
_LONGEST = 200  # characters of what a server says


@dataclass(frozen=True)
class Destination:
    """A model repository, one of its branches (None: the default one), and who may see it."""

    repo: str
    revision: str | None
    private: bool


def is_repo_id(name: str) -> bool:
    """Whether a text is an `organisation/name` as the Hub takes them."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def check_repo_id(name: str) -> None:
    """Raise HeadwayError for what is no `organisation/name` of the Hub."""
    if not is_repo_id(name):
        raise HeadwayError(f"{name!r}: no name on the Hub; give organisation/name, of letters, digits, - _ and .")


def resolve_head(name: str | Path, revision: str | None = None, files: Sequence[str] = HEAD_FILES) -> Path:
    """The local folder of a head: a folder, or a Hub id whose `files` are fetched once and kept in the Hub's cache.

    Raises HeadwayError where there is neither, and for a revision of a folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise HeadwayError(f"{folder}: a folder has no revision '{revision}'; leave it out, or give a Hub id")
        return folder
    if not is_repo_id(str(name)):
        raise HeadwayError(f"{folder}: no such folder; give the folder of a trained head (it holds {HEAD_FILES[0]})")
    at = f", revision '{revision}'" if revision else ""
    with hub_errors(f"{name}: no such folder, and not to be had from the Hub{at}"):
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(files)))


def push(folder: Path, to: Destination, message: str, stale: re.Pattern[str], endpoint: str | None = None) -> str:
    """Send all files of `folder` in one commit and return its address; contents that the Hub has already are not sent again.

    Files there whose paths match `stale` and that are not in `folder` are removed by the same commit. `endpoint` null: the one
    that huggingface_hub is set to. Raises HeadwayError for every failure; then nothing was committed.
    """
    api = HfApi(endpoint=endpoint)
    with hub_errors(to.repo), _quiet():
        if get_token() is None:
            raise HeadwayError(f"{to.repo}: nobody is logged in; run `hf auth login`, or set HF_TOKEN")
        _make_repo(api, to)
        if to.revision is not None:
            api.create_branch(to.repo, branch=to.revision, exist_ok=True)
        found = api.model_info(to.repo, revision=to.revision)
        if bool(found.private) != to.private:
            seen = "private" if found.private else "public"
            raise HeadwayError(f"{to.repo}: exists and is {seen}; give --{seen}, or change it in its settings")
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        there = [sibling.rfilename for sibling in found.siblings or ()]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationDelete(name) for name in there if stale.match(name) and name not in paths),
            *(CommitOperationAdd(name, path) for name, path in paths.items()),
        ]
        done = api.create_commit(
            to.repo, operations, commit_message=message, revision=to.revision, parent_commit=found.sha
        )
    return str(done.commit_url)


def _make_repo(api: HfApi, to: Destination) -> None:
    """Make the repository where it is missing; one that is there may be written by those who could not make it."""
    try:
        api.create_repo(to.repo, private=to.private)
    except HfHubHTTPError as refused:
        if refused.response.status_code not in (401, 403, 409):
            raise
        try:
            api.model_info(to.repo)
        except HfHubHTTPError:
            raise refused from None


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn all that huggingface_hub raises into a HeadwayError that begins with `what`.

    The original error is not chained: what a server sent back may hold anything, the token it was given included.
    """
    try:
        yield
    except (HTTPError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise _explained(what, error) from None


def _explained(what: str, error: BaseException) -> HeadwayError:
    cause = _cause(error)
    said = _said(cause)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        wait = cause.response.headers.get("Retry-After", "")
        remedy = REMEDIES.get(min(500, status), "check names and options, then run again")
        remedy = remedy.format(wait=f" {wait} s" if wait.isdecimal() else " a few minutes")
        return HeadwayError(f"{what}: the Hub answered {status} ({said}); {remedy}")
    if isinstance(cause, OfflineModeIsEnabled):
        return HeadwayError(f"{what}: HF_HUB_OFFLINE is set; unset it, or give a local folder")
    if isinstance(cause, HTTPError | ConnectionError):
        return HeadwayError(f"{what}: the connection to the Hub failed ({said}); check the network, then run again")
    if isinstance(cause, OSError):
        return HeadwayError(f"{what}: {said}; mend that, then run again")
    return HeadwayError(f"{what}: the Hub did not do what was expected ({said}); run again later")


def _cause(error: BaseException) -> BaseException:
    """The first of a chain of errors that tells about the connection; uploads and downloads in threads wrap it."""
    chain = [error]
    while (before := chain[-1].__cause__) is not None:
        chain.append(before)
    return next((each for each in chain if isinstance(each, HTTPError | OfflineModeIsEnabled)), error)


def _said(error: BaseException) -> str:
    """What an error says, on one line, not too long, without a token that a server sent back."""
    text = getattr(error, "server_message", None) or str(error) or type(error).__name__
    if isinstance(error, HfHubHTTPError):
        sent = error.response.request.headers.get("Authorization", "").removeprefix("Bearer ")
        text = text.replace(sent, HIDDEN) if sent else text
    return _short(_TOKEN.sub(HIDDEN, text))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's warnings about each retry name addresses with signatures, and every failure is told once anyway."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)
