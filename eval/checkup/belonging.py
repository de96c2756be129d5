"""Whether a head belongs to the target at hand: the fingerprint, part by part, and the sizes."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eval.checkup.finding import Code, Finding
from eval.checkup.folder import HeadFolder
from eval.checkup.stated import Stated
from heads.formats.layout import TargetFacts
from heads.target import fingerprint_parts


def check_fingerprint(folder: HeadFolder, target: TargetFacts) -> list[Finding]:
    """What is another than when the head was trained: model, tokenizer, template. Nothing where the manifest has no fingerprint."""
    trained = folder.manifest.get("target") or {}
    then, parts = trained.get("fingerprint"), trained.get("parts")
    if then is None:
        return []
    where = f"target '{target.name}', {target.folder}"
    made_for = f"the head was made for '{trained.get('name')}' ({str(then)[:12]})"
    if parts is None:
        if then == target.fingerprint:
            return []
        what = f"{made_for}, this one is {target.fingerprint[:12]}; which part differs, its manifest does not say"
        return [Finding(Code.OTHER_TARGET, where, what, _MENDS[Code.OTHER_TARGET])]
    now = fingerprint_parts(target.folder)
    changed = [part for part in now if now[part] != parts.get(part)]
    model = [part for part in changed if part in ("config", "weights")]
    found = []
    if model:
        what = f"{made_for}, whose {' and '.join(model)} {'are' if model != ['config'] else 'is'} not this one's"
        found.append(Finding(Code.OTHER_TARGET, where, what, _MENDS[Code.OTHER_TARGET]))
    for part, code in (("tokenizer", Code.OTHER_TOKENIZER), ("template", Code.OTHER_TEMPLATE)):
        if part in changed:
            what = f"its {_SAID[part]} is not the one that the head was trained with"
            found.append(Finding(code, where, what, _MENDS[code]))
    return found


_SAID = {"tokenizer": "tokenizer", "template": "chat template"}
_MENDS = {
    Code.OTHER_TARGET: "give the target of the training, or go on training the head on this one",
    Code.OTHER_TOKENIZER: "put the tokenizer of the training back beside the target's weights",
    Code.OTHER_TEMPLATE: "serve with the chat template of the training, or go on training on texts of this one",
}


def check_sizes(folder: HeadFolder, stated: Stated, target: TargetFacts) -> list[Finding]:
    """Sizes of the head, settled, that are not the target's; a vocabulary that is only padded differently is said so."""
    found = []
    hidden, vocabulary = stated.config.get("hidden_size"), stated.config.get("vocab_size")
    for what, own, theirs in (
        ("hidden size", hidden, target.hidden_size),
        ("vocabulary", vocabulary, target.vocab_size),
    ):
        if isinstance(own, int) and own != theirs:
            said = f"the head is made for a {what} of {own}, the target has {theirs}"
            if what == "vocabulary" and hidden == target.hidden_size:
                said += " (the tokens alone, without or with other padding rows, are not enough)"
            found.append(Finding(Code.OTHER_TARGET, str(folder.weights), said, "give the target of this head"))
    return found


def check_embedding(folder: HeadFolder, named: dict[str, Tensor], target: TargetFacts) -> list[Finding]:
    """A copy of the embedding in the file that is not the target's: the one sign that heads without papers carry."""
    own_VH = named.get("embed_tokens.weight")
    if own_VH is None:
        return []
    embedding_VH = target.embedding_VH
    # either side may have been rounded to bfloat16 or float16 on its way here
    same = own_VH.shape == embedding_VH.shape and torch.allclose(
        own_VH.float(), embedding_VH.float(), rtol=2**-7, atol=1e-6
    )
    if same:
        return []
    what = f"is not the embedding of '{target.name}': the head belongs to another model, or has an embedding of its own"
    where = f"{folder.weights}: `embed_tokens.weight`"
    return [Finding(Code.OTHER_TARGET, where, what, _MENDS[Code.OTHER_TARGET])]


def check_target_output(target: TargetFacts) -> list[Finding]:
    """A target that is not tied and whose files hold no output matrix: it would be loaded with a random one."""
    names = _weight_names(target)
    tied = getattr(target.config, "tie_word_embeddings", None)
    embedding = any(name.endswith("embed_tokens.weight") for name in names)
    if tied is not False or not embedding or any(name.endswith("lm_head.weight") for name in names):
        return []
    where = f"{target.folder / 'config.json'}: `tie_word_embeddings`"
    what = "false, and no file of the target holds `lm_head.weight`: its output would be random"
    return [Finding(Code.LM_HEAD_LOST, where, what, 'write "tie_word_embeddings": true, or add the matrix')]


def _weight_names(target: TargetFacts) -> list[str]:
    names: list[str] = []
    for path in sorted(target.folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names += file.keys()
        except (SafetensorError, OSError):  # loading the target says so, with the reason
            return []
    return names
