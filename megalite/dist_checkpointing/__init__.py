"""Checkpoints whose tensors are stored in global coordinates: saved at one topology, loaded at any other.

A library of its own: it needs torch and process groups, no model. ``mapping`` has the leaves of a sharded state dict,
``serialization`` saves and loads them, ``strategies.base`` shows the way of the bytes.
"""
