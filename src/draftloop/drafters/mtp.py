"""Multi-token prediction: a module that was trained with the target, and is in its checkpoint, drafts.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; there one module drafts one token.
Here the first module of the checkpoint makes all drafts, each step from the hidden state of the one before,
as vLLM runs it; what a round runs is in drafters/pairs.py.
"""

from __future__ import annotations

from draftloop.drafters.files import read_shapes
from draftloop.drafters.mtp_config import MtpConfig, of_target, parse
from draftloop.drafters.mtp_model import MtpModule
from draftloop.drafters.pairs import PairDrafter
from draftloop.errors import ConfigError
from draftloop.models.decoder import FINAL_HIDDEN
from draftloop.models.resolve import read_json


class MtpDrafter(PairDrafter[MtpConfig, MtpModule]):
    """The weights come from the target's folder, or are random where the target's are."""

    name = "mtp"
    options = frozenset({"model", "draft_sample_method", "attention_backend", "max_model_len"})
    aux_layers = (FINAL_HIDDEN,)

    def find(self) -> MtpConfig:
        spec, target = self.spec, self.target
        if spec.model not in (None, target.name):
            raise ConfigError(
                f"speculative method 'mtp' drafts with what is in the checkpoint of {target.name!r}, but 'model' is "
                f"{spec.model!r}; leave it out, or use the method that it was made for ('gemma4_mtp' for an assistant "
                "of Gemma 4)"
            )
        if target.folder is None or target.load_format == "dummy":
            return of_target(target.config)
        self.folder = target.folder
        config = read_json(target.folder / "config.json")
        found, self.names = parse(config, read_shapes(target.folder), target=target.config, name=target.name)
        return found

    def details(self) -> list[str]:
        module = f"{self.config.style.name} style module in the target's checkpoint"
        if self.config.num_modules > 1:
            module += f" (the first of {self.config.num_modules} makes all drafts)"
        return [module]

    def load(self, *, progress: bool) -> None:
        self.head = self.make(MtpModule)
        self.head.settle()
