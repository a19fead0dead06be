"""Do two models mean the same by a token id?"""

from __future__ import annotations

from pathlib import Path

from draftloop.errors import ConfigError
from draftloop.models.resolve import read_json


def same_tokenizer(ours: Path | None, theirs: Path | None) -> bool:
    """True unless some id that both tokenizers know stands for different tokens.

    Vocabularies of unlike size are fine where one merely continues the other (padding, extra
    special tokens). Folders without a tokenizer.json (shapes, tests) are taken at their word.
    """
    if ours is None or theirs is None or ours.resolve() == theirs.resolve():
        return True
    if not all((folder / "tokenizer.json").is_file() for folder in (ours, theirs)):
        return True
    mine, other = _tokens_by_id(ours), _tokens_by_id(theirs)
    shared = mine.keys() & other.keys()
    return bool(shared) and all(mine[token_id] == other[token_id] for token_id in shared)


def _tokens_by_id(folder: Path) -> dict[int, str]:
    path = folder / "tokenizer.json"
    file = read_json(path)
    try:
        vocab = file.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):  # unigram: [token, score] pairs, the id is the index
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        added = {entry["id"]: entry["content"] for entry in file.get("added_tokens", [])}
        return {index: token for token, index in vocab.items()} | added
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no tokenizer as tokenizers writes them: {error!r}; download it again") from error
