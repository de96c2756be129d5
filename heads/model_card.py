"""README.md of a published head: metadata that the Hub reads, figures and proofs, how to serve, use and train it on.

Names, figures and notes come from manifests and reports, which anybody may have written: Markdown shows them as plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from heads.formats.recognise import HEADWAY
from heads.private_paths import markdown_text
from heads.proof import CERTIFICATE, MeasuredReport

LIBRARY, TASK = "headway", "text-generation"
TITLES = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa"}
TRAINERS = {"eagle3": "train/eagle.py", "eagle": "train/eagle.py"}
COLUMNS = ("data set", "drafter", "tau [95 %]", "decode speedup [95 %]", "prompts x tokens", "temperature", "verdict")


@dataclass(frozen=True)
class Served:
    """A folder of the repository in an engine's layout: lines for a shell that serve it, what else reads it."""

    folder: str
    commands: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What the card is about. `target`: what our own scripts take for --target; `trained_for`: the manifest's entry."""

    repo: str
    revision: str | None
    kind: str
    license: str
    base_model: str
    target: str
    trained_for: dict[str, Any]
    weights_sha256: str
    served: tuple[Served, ...]
    reports: tuple[tuple[str, MeasuredReport], ...]
    certificate: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The repository without its organisation."""
        return self.repo.rpartition("/")[2]

    @property
    def title(self) -> str:
        return TITLES.get(self.kind, self.kind)


def model_card(facts: Facts) -> ModelCard:
    """The card. Raises ValueError where huggingface_hub's own checks of metadata object."""
    results = list(_results(facts.reports))
    data = ModelCardData(
        base_model=facts.base_model,
        library_name=LIBRARY,
        license=facts.license,
        model_name=facts.name,
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-head", facts.kind, HEADWAY, *(each.folder for each in facts.served)],
        eval_results=results or None,
    )
    sections = [_head(facts), _figures(facts), _proof(facts), _serve(facts), _use(facts), _train(facts), _origin(facts)]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def _results(reports: Sequence[tuple[str, MeasuredReport]]) -> Iterator[EvalResult]:
    """Tau and decode speedup of every run of the head, by data set."""
    for _, report in reports:
        target, protocol = report.content["target"], report.content["protocol"]
        for run in report.runs:
            settings = run["settings"]
            arguments = {
                "drafter": " ".join(run["drafter"].split()),
                "draft_length": settings["draft_length"],
                "temperature": settings["temperature"],
                "prompts": run["prompts"],
                "max_new_tokens": protocol["max_new_tokens"],
                "dtype": target["dtype"],
            }
            figures = {"tau": run["tau"]["micro"], "decode_speedup": run["speedup"]["decode"]}
            for metric, value in figures.items():
                if value is not None:
                    yield EvalResult(
                        task_type=TASK,
                        dataset_type=report.slug,
                        dataset_name=" ".join(report.dataset.split()),
                        metric_type=metric,
                        metric_name=f"{metric.replace('_', ' ')} ({arguments['drafter']})",
                        metric_value=round(float(value), 4),
                        metric_args=arguments,
                    )


def _head(facts: Facts) -> list[str]:
    base = f"[{markdown_text(facts.base_model)}](https://huggingface.co/{facts.base_model})"
    return [
        f"# {markdown_text(facts.name)}",
        "",
        f"A {facts.title} draft head for {base}: it lets the model write several tokens a pass. The head proposes, the model",
        "checks all proposals at once and keeps those that follow its own law, so its output stays exactly what it was.",
    ]


def _figures(facts: Facts) -> list[str]:
    if not facts.reports:
        return []
    lines = ["## Figures", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
    for _, report in facts.reports:
        protocol = report.content["protocol"]
        for run in report.runs:
            tau, speed = run["tau"], run["speedup"]
            cells = (
                report.dataset,
                f"{run['drafter']}, {run['settings']['draft_length']} drafts",
                _number(tau["micro"], tau["ci95"], ""),
                _number(speed["decode"], speed["ci95"], "x"),
                f"{run['prompts']} x {protocol['max_new_tokens']}",
                f"{run['settings']['temperature']:g}",
                run["verdict"],
            )
            lines.append(_row([markdown_text(str(cell)) for cell in cells]))
    machines = dict.fromkeys(_machine(report) for _, report in facts.reports)
    return [
        *lines,
        "",
        "tau: tokens a pass of the model, its own one included. Decode speedup: tokens per second after the first one, over",
        f"the same loop without a draft, interleaved prompt by prompt. Measured on {'; '.join(machines)}.",
    ]


def _machine(report: MeasuredReport) -> str:
    target, machine = report.content["target"], report.content["made_by"]["machine"]
    return markdown_text(f"{machine['cuda'] or machine['processor']}, {target['dtype']}")


def _proof(facts: Facts) -> list[str]:
    lines = ["## Proof", "", *_unproved(facts)]
    lines += [
        f"* `{place}`: the whole measurement; greedy ids equal the plain ones in fp32." for place, _ in facts.reports
    ]
    if facts.certificate is not None:
        exact = sum(rule["lossless"] for rule in facts.certificate["rules"])
        caught, tests = len(facts.certificate["mutants"]), len(facts.certificate["chi_square"])
        prompts = int(facts.certificate["greedy"][0]["prompts"])
        lines += [
            f"* `{CERTIFICATE}`: {exact} rules of verification enumerated and exact, {caught} wrong ones caught, {tests}",
            f"  chi-square tests of the decode loop passed, greedy ids identical in fp32 on {prompts} prompts.",
        ]
    return [*lines, f"* Weights: SHA-256 `{facts.weights_sha256}`."]


def _unproved(facts: Facts) -> list[str]:
    missing, unknown = [], []
    if not facts.reports:
        missing, unknown = ["no report"], ["how fast it is"]
    if facts.certificate is None:
        missing, unknown = [*missing, "no certificate"], [*unknown, "that it leaves the model's text as it is"]
    if not missing:
        return []
    return [
        f"**Published without proof: {' and '.join(missing)} came with this head.**",
        f"Nobody has shown here {' and '.join(unknown)}; find out before you use it:",
        "",
        *_shell(f"python eval/measure.py --target {facts.target} --head {facts.repo} --out report"),
        "",
    ]


def _serve(facts: Facts) -> list[str]:
    lines = ["## Serve it", ""] if facts.served else []
    for served in facts.served:
        fetch = f"hf download {facts.repo}{_revision(facts)} --include '{served.folder}/*' --local-dir {facts.name}"
        lines += [f"`{served.folder}/`, in the layout that {_readers(served.folder)} read:", ""]
        lines += [*_shell(fetch, *served.commands), ""]
        lines += [f"* {markdown_text(note)}" for note in served.notes]
        lines += [""] if served.notes else []
    return lines[:-1]


def _readers(folder: str) -> str:
    readers = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM and speculators"}
    return readers.get(folder, "TensorRT-LLM's Medusa converter and TGI")


def _use(facts: Facts) -> list[str]:
    at = f', revision="{facts.revision}"' if facts.revision else ""
    return [
        "## Use it from Python",
        "",
        "With Headway installed:",
        "",
        "```python",
        "import heads",
        "from eval.speculative import SpeculativeDecoder",
        "from heads.hub import resolve_head",
        "",
        f'head = heads.load_head("{facts.repo}"{at})  # a torch module',
        f'folder = str(resolve_head("{facts.repo}"{at}))',
        f'decoder = SpeculativeDecoder.from_pretrained("{facts.target}", folder)  # decodes with it',
        "```",
    ]


def _train(facts: Facts) -> list[str]:
    trainer = TRAINERS.get(facts.kind)
    if trainer is None:
        return []
    files = "config.json model.safetensors manifest.json"
    return [
        "## Go on training it",
        "",
        *_shell(
            f"hf download {facts.repo}{_revision(facts)} {files} --local-dir {facts.name}",
            f"python data_prep/collect.py --target {facts.target} --conversations mine.jsonl --out features",
            f"accelerate launch {trainer} --config RECIPE.yaml --target {facts.target} --head.parent {facts.name} "
            "--data.features features --out heads/next",
        ),
    ]


def _origin(facts: Facts) -> list[str]:
    name, fingerprint = (
        markdown_text(str(facts.trained_for["name"])),
        markdown_text(facts.trained_for["fingerprint"][:16]),
    )
    base = "" if facts.trained_for["name"] == facts.base_model else f", which others have as {facts.base_model}"
    return [
        "## Target",
        "",
        f"Trained for {name}, fingerprint {fingerprint}{base}. manifest.json says on what, and how.",
    ]


def _revision(facts: Facts) -> str:
    return f" --revision {facts.revision}" if facts.revision else ""


def _shell(*commands: str) -> list[str]:
    return ["```bash", *commands, "```"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, interval: list[float] | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
