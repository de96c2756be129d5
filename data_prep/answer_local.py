"""Answers by the target in this process: one batch for all turns of all conversations.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data_prep.dialogue import TOO_LONG, Answer, Dialogue
from data_prep.nucleus import Sampler
from data_prep.writer import Choose, Queue, Text, Writer, greedy
from heads.target import Target


def answer_locally(
    dialogues: Sequence[Dialogue],
    take: Callable[[Dialogue, Answer], None],
    target: Target,
    rows: int,
    most: int,
    law: tuple[float, float] | None,
    seed: Callable[[Dialogue], int],
) -> None:
    """Answer every turn of `dialogues`, up to `rows` at a time, with at most `most` tokens; `take` is given each answer
    and moves its dialogue on. `law` is (temperature, top_p) of sampled answers, None answers greedily; `seed` gives the
    due answer's coins.

    Raises HeadwayError as Writer does.
    """
    queue = Queue()

    def ask(dialogue: Dialogue) -> None:
        room = min(most, target.max_positions - len(dialogue.prompt))
        if room < 1:
            dialogue.leave(TOO_LONG)
        else:
            queue.add(Text(dialogue.prompt, room, seed(dialogue), dialogue))

    for dialogue in dialogues:
        ask(dialogue)
    choose: Choose = greedy if law is None else Sampler(*law)
    for text in Writer(target, rows).write(queue, choose):
        dialogue = text.key
        take(dialogue, Answer(text.written, len(text.written), text.written[-1] not in target.eos_ids))
        if not dialogue.ended:
            ask(dialogue)
