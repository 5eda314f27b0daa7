"""Checkpoints whose tensors are stored in global coordinates: saved at one topology, loaded at any other.

A library of its own: it needs torch and process groups, no model. ``mapping`` has the leaves of a sharded state dict,
``serialization`` saves and loads them, ``strategies.base`` shows the way of the bytes.
"""

from megalite.dist_checkpointing.core import CheckpointingConfig, is_complete, read_marker
from megalite.dist_checkpointing.fingerprint import fingerprint, fingerprint_by_key, fingerprint_of_plain
from megalite.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megalite.dist_checkpointing.optimizer import flat_range_to_blocks, sharded_tensors_of_range
from megalite.dist_checkpointing.serialization import (
    LoadOptions,
    PreparedSave,
    SaveCache,
    SaveOptions,
    StrictHandling,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_objects,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensor_metadata,
    prepare_save,
    save,
    write_marker,
)

__all__ = [
    "CheckpointingConfig",
    "LoadOptions",
    "LocalNonpersistentObject",
    "PreparedSave",
    "SaveCache",
    "SaveOptions",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "fingerprint",
    "fingerprint_by_key",
    "fingerprint_of_plain",
    "flat_range_to_blocks",
    "is_complete",
    "is_main_replica",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_objects",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensor_metadata",
    "prepare_save",
    "read_marker",
    "save",
    "sharded_tensors_of_range",
    "write_marker",
]
