"""What a checkpoint says of its model, in the words of the section ``model``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config.names import field_types

# Names that Megatron gave to the same setting before.
_OLDER_NAMES = {"norm_epsilon": "layernorm_epsilon"}


def model_settings(common: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return for each setting of the model that the step knows the value to take, then others that say the same.

    A checkpoint of megalite has the settings as its user wrote them, and the numbers that followed from what was left
    out; one of Megatron has the numbers only. Megatron's does not keep the true size of the vocabulary: the padded one
    is the nearest that is known.
    """
    args = vars(common["args"])
    written = common.get("megalite", {}).get("config", {}).get("model", {})
    known: dict[str, tuple[Any, ...]] = {}
    for key in field_types("model"):
        resolved = args.get(key, args.get(_OLDER_NAMES.get(key, "")))
        values = (written[key], resolved) if key in written else (resolved,)
        if values[0] is not None or len(values) > 1:
            known[key] = tuple(value for index, value in enumerate(values) if index == 0 or value is not None)
    _correct_groups(known, args)
    _correct_vocabulary(known, common)
    return {key: values for key, values in known.items() if values != (None,)}


def _correct_groups(known: dict[str, tuple[Any, ...]], args: Mapping[str, Any]) -> None:
    if not args.get("group_query_attention"):
        # Megatron's default of 1, or the number of heads: without groups it says nothing.
        known.pop("num_query_groups", None)


def _correct_vocabulary(known: dict[str, tuple[Any, ...]], common: Mapping[str, Any]) -> None:
    ours = common.get("megalite")
    if ours is not None:
        known["vocab_size"] = (*known.get("vocab_size", (None,))[:1], ours.get("vocab_size"))
        return
    given, padded = (vars(common["args"]).get(key) for key in ("vocab_size", "padded_vocab_size"))
    if given is not None:
        # Some versions count the end of a document and some do not.
        known["vocab_size"] = (given, given + 1, given if padded is None else padded)
    elif padded is not None:
        known["vocab_size"] = (padded,)
