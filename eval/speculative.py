"""`generate` for people who have a target and a head: transformers' GenerationConfig and streamers in, its result out.

    decoder = SpeculativeDecoder.from_pretrained("smollm2-135m-instruct", "artifacts/demo/medusa")
    ids = decoder.generate(input_ids, GenerationConfig(max_new_tokens=128), streamer=TextStreamer(decoder.tokenizer))

Shapes: B rows, T prompt positions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, StopStringCriteria

from eval.adaptive import LengthController
from eval.contenders import BASELINE, build
from eval.decode import Settings, decode
from eval.drafters import Drafter
from eval.ledger import Ledger
from eval.sampling import Sampling
from heads.errors import HeadwayError
from heads.target import DEFAULT_TARGET, Target, as_ids

# Options of GenerationConfig that `generate` follows. Any other one that is set to more than its default is refused.
FOLLOWED = {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature",
            "top_k", "top_p", "min_p", "repetition_penalty", "bad_words_ids", "sequence_bias", "eos_token_id",
            "pad_token_id"}  # fmt: skip
# Options that change nothing here: names of tokens that nothing reads, and records of where the config comes from.
WITHOUT_EFFECT = {"bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
                  "disable_compile", "early_stopping", "length_penalty"}  # fmt: skip
SAMPLED_ONLY = {"temperature", "top_k", "top_p", "min_p"}


class SpeculativeDecoder:
    """A target with a drafter, and a controller of its draft length if there is one. After each `generate`, `ledger` holds its rounds and seconds."""

    def __init__(self, target: Target, drafter: Drafter, controller: LengthController | None = None) -> None:
        self.target, self.drafter, self.controller, self.tokenizer = target, drafter, controller, target.tokenizer
        self.ledger = Ledger()

    @classmethod
    def from_pretrained(
        cls, target: str = DEFAULT_TARGET, head: str = BASELINE, *, dtype: str = "auto", device: str = "auto"
    ) -> SpeculativeDecoder:
        """Load a target, and a head by its folder or a drafter by its name (`eval.contenders.build`)."""
        loaded = Target.load(target, dtype, device)
        contender = build(head, loaded, None)
        return cls(loaded, contender.drafter, contender.controller)

    def generate(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """What the target's own `generate` returns: the given ids [B, T] and behind them the new ones, right-padded.

        Prompts may be padded on either side: `attention_mask` [B, T] tells padding; without one it is the pad token,
        unless that is a stop token too. `seed` fixes sampling; None takes one from torch's global generator. Raises
        HeadwayError for an option that is not followed.
        """
        if input_ids.dim() != 2:
            raise HeadwayError(f"input_ids of shape {list(input_ids.shape)}: give [rows, positions]")
        if streamer is not None and len(input_ids) != 1:
            raise HeadwayError(f"a streamer follows one row, not {len(input_ids)}; decode one prompt at a time")
        config = self._filled(generation_config, input_ids.shape[1])
        prompts = self._prompts(input_ids, attention_mask, config)
        settings = self._settings(config, input_ids.shape[1], seed)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        self.ledger = decode(self.target, self.drafter, prompts, settings, _tell(streamer), self.controller)
        if streamer is not None:
            streamer.end()
        return self._joined(input_ids, config)

    def _filled(self, given: GenerationConfig | None, width: int) -> GenerationConfig:
        """The config with the target's own values, then transformers' defaults, where it has none; all followed."""
        config = copy.deepcopy(given) if given is not None else GenerationConfig()
        config.update(**self.target.model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        defaults = GenerationConfig._get_default_generation_params()
        if config.max_length is None and config.max_new_tokens is None:  # the default length is of what is new
            config.max_new_tokens = max(1, min(defaults["max_length"], self.target.max_positions - width))
        config.update(**defaults, defaults_only=True)
        for name, value in config.to_dict().items():
            if name in FOLLOWED | WITHOUT_EFFECT or value is None or value == defaults.get(name) or value is False:
                continue
            raise HeadwayError(f"generation_config.{name} = {value!r}: not supported; remove it")
        if config.do_sample and config.temperature == 0:
            raise HeadwayError("generation_config.temperature = 0 with do_sample; set do_sample=False for greedy")
        return config

    def _prompts(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None, config: GenerationConfig) -> list[list[int]]:
        pad = config.pad_token_id
        if mask_BT is None:
            padded = pad is not None and pad not in as_ids(config.eos_token_id)
            mask_BT = ids_BT != pad if padded else torch.ones_like(ids_BT)
        if mask_BT.shape != ids_BT.shape:
            raise HeadwayError(f"attention_mask of shape {list(mask_BT.shape)}: it must be {list(ids_BT.shape)}")
        prompts = []
        for row, (ids, kept) in enumerate(zip(ids_BT.tolist(), mask_BT.bool().tolist(), strict=True)):
            inside = [place for place, keep in enumerate(kept) if keep]
            if not inside or inside[-1] - inside[0] + 1 != len(inside):
                raise HeadwayError(f"attention_mask row {row}: one unbroken run of tokens is needed, padding around it")
            prompts.append(ids[inside[0] : inside[-1] + 1])
        return prompts

    def _settings(self, config: GenerationConfig, width: int, seed: int | None) -> Settings:
        most = config.max_new_tokens if config.max_new_tokens is not None else config.max_length - width
        if most < 1:
            raise HeadwayError(f"max_length {config.max_length}: the input has {width} tokens; set max_new_tokens")
        least = config.min_new_tokens
        if least is None:
            least = max(0, (config.min_length or 0) - width)
        biases, bad_words = _biases(config.sequence_bias), config.bad_words_ids or ()
        law: dict[str, Any] = {"temperature": 0.0}
        if config.do_sample:
            law = {name: value for name in SAMPLED_ONLY if (value := getattr(config, name)) is not None}
        sampling = Sampling(
            **law,
            repetition_penalty=config.repetition_penalty,
            logit_bias=biases,
            bad_words=bad_words,
        )
        ends = None
        if config.stop_strings:
            criterion = StopStringCriteria(self.tokenizer, config.stop_strings)

            def ends(ids: list[int]) -> bool:
                return bool(criterion(torch.tensor([ids]), None))

        return Settings(
            max_new_tokens=most,
            min_new_tokens=least,
            sampling=sampling,
            stop_ids=as_ids(config.eos_token_id),
            ends=ends,
            seed=int(torch.randint(2**62, ())) if seed is None else seed,
        )

    def _joined(self, input_ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
        new = [output.ids for output in self.ledger.outputs]
        stops = as_ids(config.eos_token_id)
        pad = config.pad_token_id if config.pad_token_id is not None else (stops[0] if stops else 0)
        longest = max(map(len, new))
        rows = [ids + [pad] * (longest - len(ids)) for ids in new]
        return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype).to(input_ids.device)], 1)


def _tell(streamer: Any) -> Any:
    if streamer is None:
        return None
    # one token a call, as transformers does: some streamers take no more
    return lambda _, tokens: [streamer.put(torch.tensor([token])) for token in tokens]


def _biases(given: Any) -> dict[int, float]:
    """transformers' sequence_bias as token biases. Raises HeadwayError for a sequence of several tokens."""
    pairs = given.items() if isinstance(given, dict) else (given or ())
    biases = {}
    for sequence, bias in pairs:
        if len(sequence) != 1:
            raise HeadwayError(
                f"generation_config.sequence_bias: {list(sequence)} has several tokens; give single ones"
            )
        biases[int(sequence[0])] = float(bias)
    return biases
