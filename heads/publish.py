"""Publish a head on the Hub: weights in the layouts asked for, its reports, its certificate, a model card, in one commit.

    python heads/publish.py --head artifacts/demo/eagle3 --repo org/name --layouts vllm sglang speculators \\
        --report artifacts/demo/report --certificate artifacts/demo/certificate --dry_run
    python heads/publish.py --head DIR --repo org/name --report DIR --certificate DIR --public --revision v1

Without --dry_run it sends what --dry_run lists. Stopped at any moment, the same command goes on: what was sent is not sent again, and
nothing can be seen before the one commit at the end. The token is the one of `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from jsonargparse import ArgumentParser

import heads  # noqa: F401 - registers the kinds of heads
from heads.checkpoint import load_head
from heads.command_line import parse_arguments
from heads.embedded import EMBEDDED
from heads.errors import HeadwayError, run_script
from heads.formats.files import DTYPES
from heads.formats.layouts import WRITTEN
from heads.formats.recognise import HEADWAY
from heads.hub import Destination, check_repo_id, is_repo_id, push
from heads.proof import Identity, read_certificate, read_report
from heads.staging import EMBEDDED_HUB_ID, Publication, stage

OURS = re.compile(
    rf"(?:{'|'.join(WRITTEN)}|reports)/|report\.(?:json|md|html)$|certificate\.json$",
)
"""Paths in a repository that a publication may have written and the next one no longer does."""
BRANCH, LICENSE = re.compile(r"[\w.-]+(?:/[\w.-]+)*"), re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Options:
    """What to publish, where to.

    Args:
        head: folder of a head in our own layout
        repo: organisation/name on the Hub
        layouts: keys of heads.formats.layouts.WRITTEN; our own is always there
        reports: folders that eval/measure.py wrote, one a data set
        certificate: folder that eval/certify.py wrote
        public: everybody may see it
        revision: branch, made where it is missing; null: the default one
        target: where the target is on this machine; null: as the head's manifest names it
        base_model: the target's Hub id; null: the manifest's name of it, where that is one
        license: of the head, as the Hub spells it; null: that of the embedded target
        dtype: of the weights in engines' layouts; auto keeps the head's
        draft_tokens: drafted a round in the serving commands; null: 4, and all heads of Medusa
        without_proof: publish without report or certificate, which the card then says
    """

    head: Path
    repo: str
    layouts: tuple[str, ...] = (HEADWAY,)
    reports: tuple[Path, ...] = ()
    certificate: Path | None = None
    public: bool = False
    revision: str | None = None
    target: str | None = None
    base_model: str | None = None
    license: str | None = None
    dtype: str = "auto"
    draft_tokens: int | None = None
    without_proof: bool = False


def prepare(options: Options) -> Publication:
    """Check all that is given, before anything is written or sent. Raises HeadwayError."""
    check_repo_id(options.repo)
    if options.revision is not None and not BRANCH.fullmatch(options.revision):
        raise HeadwayError(f"--revision {options.revision!r}: give the name of a branch, such as v1")
    if not options.head.is_dir():
        raise HeadwayError(f"{options.head}: no such folder; give the folder of a trained head")
    head = load_head(options.head)
    identity = Identity.of(options.head)
    if not options.without_proof and (not options.reports or options.certificate is None):
        raise HeadwayError(
            f"{options.head}: give its --report (eval/measure.py) and its --certificate (eval/certify.py), or "
            "--without_proof, which the model card will say"
        )
    target = identity.manifest["target"].get("name")
    return Publication(
        repo=options.repo,
        revision=options.revision,
        head=head,
        identity=identity,
        layouts=tuple(dict.fromkeys(name for name in options.layouts if name != HEADWAY)),
        reports=tuple(read_report(folder, identity) for folder in options.reports),
        certificate=None if options.certificate is None else read_certificate(options.certificate, identity),
        target=options.target or target,
        base_model=_base_model(options, target),
        license=_license(options, target),
        dtype=options.dtype,
        draft_tokens=options.draft_tokens,
    )


def publish(options: Options, dry_run: bool = False, endpoint: str | None = None) -> str | None:
    """Stage, list, and unless it is a dry run, send. The commit's address. Raises HeadwayError; then nothing was committed."""
    publication = prepare(options)
    with tempfile.TemporaryDirectory(prefix="headway-publish-") as scratch:
        folder = Path(scratch)
        stage(publication, folder)
        where = f"{'public' if options.public else 'private'} repository {options.repo}"
        where += f", branch {options.revision}" if options.revision else ""
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for name, size in sizes.items():
            print(f"{size:>14,}  {name}")
        print(f"{sum(sizes.values()):>14,}  bytes in {len(sizes)} files for the {where}")
        if dry_run:
            print(
                "dry run: nothing was sent. One commit would hold these files, make what is missing of repository and branch,"
            )
            print("and remove what an earlier publication left in folders of layouts and reports that are not listed.")
            return None
        to = Destination(options.repo, options.revision, not options.public)
        address = push(folder, to, f"Publish {head_line(publication)}", OURS, endpoint)
    print(f"published: {address}")
    return address


def head_line(publication: Publication) -> str:
    """A few words that name the head."""
    return (
        f"{publication.head.config.kind} head {publication.identity.weights_sha256[:12]} for {publication.base_model}"
    )


def _base_model(options: Options, target: Any) -> str:
    """A Hub id that others find the target under; never a folder of this machine."""
    if options.base_model is not None:
        check_repo_id(options.base_model)
        return options.base_model
    if target == EMBEDDED:
        return EMBEDDED_HUB_ID
    if isinstance(target, str) and is_repo_id(target) and not Path(target).exists():
        return target
    raise HeadwayError(
        f"{options.head}: was trained for '{target}', a folder here; give --base_model the target's Hub id, which others can find"
    )


def _license(options: Options, target: Any) -> str:
    if options.license is not None and LICENSE.fullmatch(options.license):
        return options.license
    if options.license is None and target == EMBEDDED:
        return "apache-2.0"
    raise HeadwayError(f"{options.head}: give --license, as the Hub spells it, such as apache-2.0, mit or llama3.1")


def main() -> None:
    """Parse the command line, publish."""
    parser = ArgumentParser(description="Publish a head on the Hub, with what proves it.", exit_on_error=False)
    parser.add_argument("--head", type=Path, required=True, help="folder of a head in our own layout")
    parser.add_argument("--repo", required=True, help="organisation/name on the Hub")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=[HEADWAY, *WRITTEN],
        default=[HEADWAY],
        help="who is to read it; our own layout is always there, each other one in a folder of its name",
    )
    parser.add_argument("--report", nargs="+", type=Path, default=[], help="folders of eval/measure.py, one a data set")
    parser.add_argument("--certificate", type=Path, help="folder of eval/certify.py")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument("--private", action="store_true", help="nobody else may see it (default)")
    seen.add_argument("--public", action="store_true", help="everybody may see it")
    parser.add_argument("--revision", help="branch, made where it is missing; null: the default one")
    parser.add_argument("--target", help="where the target is here; null: as the head's manifest names it")
    parser.add_argument("--base_model", help="Hub id of the target; needed where the head was trained for a folder")
    parser.add_argument("--license", help="of the head, as the Hub spells it, such as apache-2.0")
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="of weights in engines' layouts; auto keeps the head's",
    )
    parser.add_argument("--draft_tokens", type=int, help="tokens drafted a round; null: 4, and all heads of Medusa")
    parser.add_argument("--dry_run", action="store_true", help="list what would be sent, and send nothing")
    parser.add_argument(
        "--without_proof", action="store_true", help="without report or certificate, as the card will say"
    )
    given = parse_arguments(parser)
    options = Options(
        head=given.head,
        repo=given.repo,
        layouts=tuple(given.layouts),
        reports=tuple(given.report),
        certificate=given.certificate,
        public=given.public,
        revision=given.revision,
        target=given.target,
        base_model=given.base_model,
        license=given.license,
        dtype=given.dtype,
        draft_tokens=given.draft_tokens,
        without_proof=given.without_proof,
    )
    if not sys.stderr.isatty():
        disable_progress_bars()
    publish(options, given.dry_run)


if __name__ == "__main__":
    run_script(main)
