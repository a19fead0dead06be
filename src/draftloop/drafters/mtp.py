"""Multi-token prediction: a module that was trained with the target, and is in its checkpoint, drafts.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; there one module drafts one token.
Here the first module of the checkpoint makes all drafts, each step from the hidden state of the one before,
as vLLM runs it; what a round runs is in drafters/pairs.py.
"""

from __future__ import annotations

from draftloop.attention.registry import attention_backend, resolve_attention_name
from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Target
from draftloop.drafters.files import read_shapes
from draftloop.drafters.fill import fill, fill_dummy
from draftloop.drafters.mtp_config import MtpConfig, of_target, parse
from draftloop.drafters.mtp_model import MtpModule
from draftloop.drafters.pairs import PairDrafter
from draftloop.errors import ConfigError
from draftloop.models.decoder import FINAL_HIDDEN, Decoder
from draftloop.models.dense import attention_shape
from draftloop.models.resolve import read_json


class MtpDrafter(PairDrafter[MtpConfig, MtpModule]):
    """The weights come from the target's folder, or are random where the target's are."""

    name = "mtp"
    options = frozenset({"model", "draft_sample_method", "attention_backend", "max_model_len"})
    aux_layers = (FINAL_HIDDEN,)

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        if spec.model not in (None, target.name):
            raise ConfigError(
                f"speculative method 'mtp' drafts with what is in the checkpoint of {target.name!r}, but 'model' is "
                f"{spec.model!r}; leave it out, or use the method that it was made for ('gemma4_mtp' for an assistant "
                "of Gemma 4)"
            )
        self.names = dict[str, str]()
        if target.folder is None or target.load_format == "dummy":
            self.config = of_target(target.config)
        else:
            self.folder = target.folder
            config = read_json(target.folder / "config.json")
            self.config, self.names = parse(config, read_shapes(target.folder), target=target.config, name=target.name)
        self.longest = min(spec.max_model_len or target.max_model_len, target.max_model_len)
        name = resolve_attention_name(spec.attention_backend or "auto", target.device.type)
        self.backend_class = attention_backend(name, target.device.type)

    def describe(self) -> str:
        module = f"{self.config.style.name} style module in the target's checkpoint"
        if self.config.num_modules > 1:
            module += f" (the first of {self.config.num_modules} makes all drafts)"
        parts = [super().describe(), module]
        if self.longest < self.target.max_model_len:
            parts.append(f"rows stop drafting at {self.longest} tokens")
        return ", ".join(parts)

    def borrow(self, target: Decoder) -> None:
        self._embed_tokens, self._lm_head = target.embed_tokens, target.lm_head

    def load(self, *, progress: bool) -> None:
        target, config = self.target, self.config
        shape = attention_shape(config.model, page_size=target.page_size, dtype=target.dtype)
        self.backend_class.check(shape, target.device.type)
        self.head = MtpModule(
            config,
            self.backend_class(shape, target.device),
            device=target.device,
            dtype=target.dtype,
            max_positions=target.max_positions,
            embed_tokens=self._embed_tokens,
            lm_head=self._lm_head,
        )
        del self._embed_tokens, self._lm_head
        if self.folder is None:
            fill_dummy(self.head, vocab_size=target.vocab_size, seed=target.seed)
            return
        fill(self.head, self.folder, self.names, vocab_size=target.vocab_size, name=target.name)
        self.head.settle()
