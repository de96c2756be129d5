"""Random EAGLE heads, texts with every kind of turn, and the plainest way to compute their loss.

Shapes as in heads/eagle.py, T tokens of a text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.eagle import Eagle1Config, Eagle1Head, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.served import served_rows
from heads.vocabulary import DraftVocabulary
from tests.heads.plain_eagle import PlainUnroll

H, V, D, S = 16, 30, 21, 3


KINDS = ("eagle", "eagle-2-layers", "eagle3", "eagle3-full", "eagle3.1-2-layers", "eagle3-norms-elsewhere")


generator = torch.Generator()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


OUTPUT_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


EMBED_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def embed(ids: Tensor) -> Tensor:
    return EMBED_VH[ids]


def make_head(kind: str, seed: int = 0) -> EagleHead:
    """A random double-precision head: 4 heads of size 6 over 2 key-value heads, taps 1, 2 and 5."""
    torch.manual_seed(seed)
    generator.manual_seed(seed)
    layers = 2 if "2-layers" in kind else 1
    shape: dict[str, Any] = {"hidden_size": H, "vocab_size": V, "num_layers": layers, "intermediate_size": 24}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    if kind.startswith("eagle3"):
        new = kind.startswith("eagle3.1")
        ids_D = torch.arange(V) if "full" in kind else torch.randperm(V, generator=generator)[:D].sort().values
        draft = None if "full" in kind else D
        switches = {"norm_before_residual": True, "norm_before_fc": True} if "elsewhere" in kind else {}
        switches |= {"fc_norm": new, "norm_output": new}
        config = Eagle3Config(**shape, draft_vocab_size=draft, taps=(1, 2, 5), **switches)
        head: EagleHead = Eagle3Head.from_target(config, OUTPUT_VH, DraftVocabulary(ids_D, V))
    else:
        head = Eagle1Head(Eagle1Config(**shape))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            spread = 0.3 if "norm" in name else 0.2
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return head.double()


Text = dict[str, Tensor]


def texts(seed: int = 0) -> list[Text]:
    """Texts with turns of 1 to 7 tokens, turns that touch, a hole in a turn, turns at either end, and one that is served nowhere."""
    turns = [
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 0, 0, 3, 3, 3],
        [1, 1, 1, 2, 2, 2, 2, 2, 0, 2, 2, 2, 0],
        [0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    generator.manual_seed(seed)
    made = []
    for turn in turns:
        ids_T = torch.randint(V, (len(turn),), generator=generator)
        made.append(
            {"ids": ids_T, "turn": torch.tensor(turn), "last": random(len(turn), H), "taps": random(len(turn), 3 * H)}
        )
    return made


def batch(head: EagleHead, parts: list[Text]) -> dict[str, Tensor]:
    """The head's forward arguments for several texts."""
    rows, segments, begin, count = [], [], 0, 0
    for part in parts:
        index_P, segment_P = served_rows(part["turn"])
        rows.append(index_P + begin)
        segments.append(segment_P + count)
        begin, count = begin + len(part["ids"]), count + len(index_P)
    index_P, last_XH = torch.cat(rows), torch.cat([part["last"] for part in parts])
    return {
        "ids_X": torch.cat([part["ids"] for part in parts]),
        "lengths_B": torch.tensor([len(part["ids"]) for part in parts]),
        "index_P": index_P,
        "segment_P": torch.cat(segments),
        "states_XF": torch.cat([part["taps"] for part in parts]) if head.taps else last_XH,
        "last_PH": last_XH[index_P],
    }


def output_of(head: EagleHead) -> Any:
    """The target's output function over the head's draft vocabulary; a soft cap makes it more than a product."""
    ids_D = head.target_ids()
    return lambda last: 3 * torch.tanh(last.double() @ OUTPUT_VH[ids_D].T / 3)


def losses_of(head: EagleHead) -> dict[str, float]:
    return {"kl": 1.0} if head.taps else {"smooth_l1": 1.0, "kl": 0.1}


def forward(head: EagleHead, parts: list[Text], losses: dict[str, float] | None = None, **more: Any) -> Any:
    losses = losses or losses_of(head)
    return head(**batch(head, parts), embed=embed, output=output_of(head), losses=losses, steps=S, **more)


def served(turn_T: Tensor, t: int, step: int) -> bool:
    """By the definition: tokens t+1 .. t+2+step supervised, in one turn."""
    turns = turn_T[t + 1 : t + 3 + step].tolist()
    return len(turns) == step + 2 and turns[0] > 0 and len(set(turns)) == 1


def plain(head: EagleHead, parts: list[Text]) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Loss sums and figures of every step, row by row."""
    figures = {name: [0] * S for name in ("counts", "served", "correct", "reached", "accepted")}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(S)]
    ids, output = head.target_ids().tolist(), output_of(head)
    for part in parts:
        states_TF = part["taps"] if head.taps else part["last"]
        hidden: list[Tensor] = []

        def keep(last: Tensor, hidden: list[Tensor] = hidden) -> Tensor:
            hidden.append(last)
            return output(last)

        logits_STD = PlainUnroll(head)(states_TF, embed(part["ids"]), S, keep)
        for t in range(len(part["ids"])):
            prefix = True
            for step in range(S):
                if not served(part["turn"], t, step):
                    continue
                label = int(part["ids"][t + 2 + step])
                right = ids[int(logits_STD[step, t].argmax())] == label
                figures["served"][step] += 1
                figures["correct"][step] += right
                figures["reached"][step] += prefix
                prefix = prefix and right
                figures["accepted"][step] += prefix
                if label not in ids:
                    continue
                figures["counts"][step] += 1
                law_D = output(part["last"][t + 1 + step]).softmax(-1)
                loss = F.kl_div(logits_STD[step, t].log_softmax(-1), law_D, reduction="sum")
                if not head.taps:
                    loss = 0.1 * loss + F.smooth_l1_loss(hidden[step][t], part["last"][t + 1 + step])
                sums[step] = sums[step] + loss
    return sums, figures
