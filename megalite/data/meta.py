"""What is known of a token file without reading it: ``<prefix>.meta.json``, an addition to Megatron's two files."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path

logger = logging.getLogger(__name__)


def meta_path(prefix: Path) -> Path:
    """Return ``<prefix>.meta.json``."""
    return Path(f"{prefix}.meta.json")


@dataclass(frozen=True)
class DatasetMeta:
    """Tokenizer and extent of a token file; the tokenizer's fields are None for files made without one."""

    max_token_id: int
    num_tokens: int
    tokenizer: str | None = None
    vocab_size: int | None = None
    eod: int | None = None
    tokenizer_sha256: str | None = None
    """Of the file that the tokenizer was read from."""

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


def _parse(text: bytes) -> DatasetMeta:
    raw = json.loads(text)
    known = {field.name for field in fields(DatasetMeta)}
    if not isinstance(raw, dict) or not {"max_token_id", "num_tokens"} <= set(raw):
        raise ValueError("the fields 'max_token_id' and 'num_tokens' are missing")
    for name in known - {"tokenizer", "tokenizer_sha256"}:
        value = raw.get(name)
        required = name in ("max_token_id", "num_tokens")
        if (value is None and required) or (value is not None and type(value) is not int):
            raise ValueError(f"{name!r} is {value!r}, not an integer")
    for name in ("tokenizer", "tokenizer_sha256"):
        if not isinstance(raw.get(name), (str, type(None))):
            raise ValueError(f"{name!r} is {raw[name]!r}, not a text")
    return DatasetMeta(**{name: value for name, value in raw.items() if name in known})


def read_meta(prefix: Path, num_tokens: int) -> DatasetMeta | None:
    """Return the meta data of a token file that holds ``num_tokens`` tokens, or None.

    A file that cannot be read, or that speaks of another number of tokens, is named in a WARNING and not used: what it
    would say can be found by reading the tokens.
    """
    path = meta_path(prefix)
    try:
        meta = _parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s. Run tools/preprocess_data.py again to replace it.", path, error)
        return None
    if meta.num_tokens != num_tokens:
        logger.warning(
            "%s is not used: it was written for %d tokens, the data has %d. Remove it or run tools/preprocess_data.py "
            "again.",
            path,
            meta.num_tokens,
            num_tokens,
        )
        return None
    return meta
