"""Save and load of a sharded state dict, under the names that users of Megatron know."""

from megalite.dist_checkpointing.loading import (
    LoadOptions,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_objects,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensor_metadata,
    read_index,
)
from megalite.dist_checkpointing.saving import PreparedSave, SaveCache, SaveOptions, prepare_save, save, write_marker
from megalite.dist_checkpointing.validation import StrictHandling

__all__ = [
    "LoadOptions",
    "PreparedSave",
    "SaveCache",
    "SaveOptions",
    "StrictHandling",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_objects",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensor_metadata",
    "prepare_save",
    "read_index",
    "save",
    "write_marker",
]
