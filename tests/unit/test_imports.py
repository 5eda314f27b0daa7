"""The layers: imports go down only, and extras are imported by the function that needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    {"utils"},
    {"config", "metrics"},
    {"parallel", "dist_checkpointing", "data"},
    {"model", "optimizer"},
    {"checkpoint", "resilience"},
    {"training"},
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
EXTRAS = {
    "transformer_engine",
    "nvidia_resiliency_ext",
    "tensorboard",
    "wandb",
    "tokenizers",
    "sentencepiece",
    "transformers",
    "safetensors",
    "matplotlib",
    "megatron",
    "torch.utils.tensorboard",
}
MODULES = sorted((ROOT / "megalite").rglob("*.py"))


def _imported(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the modules, and for ``from`` imports also the names, that ``node`` imports; relative ones resolved."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = list(package[: len(package) - node.level + 1]) if node.level else []
        module = ".".join(base + ([node.module] if node.module else []))
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)


def wrong_arrows(text: str, module: str) -> list[str]:
    """Return the imports of ``module`` (dotted) that go to its own layer or above; imports for typing count too."""
    own = module.split(".")
    found = set()
    for node in ast.walk(ast.parse(text)):
        for target in _imported(node, tuple(own[:-1])):
            parts = target.split(".")
            # The package's own face holds the version only, and names of it resolve to a layer or to that.
            if parts[0] != "megalite" or len(parts) < 2 or parts[1] not in LEVEL:
                continue
            if len(own) < 3:
                found.add(f"{module} -> {parts[1]}")
            elif parts[1] != own[1] and LEVEL[parts[1]] >= LEVEL[own[1]]:
                found.add(f"{module} -> {parts[1]}")
    return sorted(found)


def extras_at_the_top(text: str) -> list[str]:
    """Return the optional packages that importing a module of this text would import."""
    found = []
    waiting: list[ast.AST] = list(ast.parse(text).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for target in _imported(node, ()):
            if any(target == extra or target.startswith(f"{extra}.") for extra in EXTRAS):
                found.append(target)
        waiting += list(ast.iter_child_nodes(node))
    return sorted(set(found))


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    # A package's __init__ keeps its name, so that the last part is always the module within its package.
    return ".".join(parts)


def test_every_package_has_a_layer() -> None:
    folders = {path.name for path in (ROOT / "megalite").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LEVEL)
    assert len(MODULES) > 50


@pytest.mark.parametrize("package", sorted(LEVEL))
def test_imports_go_down_only(package: str) -> None:
    paths = [path for path in MODULES if path.relative_to(ROOT / "megalite").parts[0] == package]
    assert paths
    assert [arrow for path in paths for arrow in wrong_arrows(path.read_text(), _dotted(path))] == []


def test_the_package_itself_imports_no_layer() -> None:
    assert wrong_arrows((ROOT / "megalite" / "__init__.py").read_text(), "megalite.__init__") == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_importing_a_module_loads_no_extra(path: Path) -> None:
    assert extras_at_the_top(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "module", "arrows"),
    [
        ("from megalite.parallel.state import X", "megalite.data.build", ["parallel"]),
        ("import megalite.training.loop", "megalite.utils.files", ["training"]),
        ("from megalite import model", "megalite.optimizer.optimizer", ["model"]),
        ("def f():\n    from megalite.checkpoint import load", "megalite.resilience.signals", ["checkpoint"]),
        ("from ..training import loop", "megalite.model.gpt", ["training"]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megalite.training.context import C",
            "megalite.checkpoint.save",
            ["training"],
        ),
        ("import megalite.config.schema", "megalite.__init__", ["config"]),
        ("from megalite.config.schema import Config", "megalite.metrics.flops", ["config"]),
        ("from . import files", "megalite.utils.dist", []),
        ("from megalite import __version__\nimport torch", "megalite.checkpoint.state", []),
        ("from megalite.utils.dist import Group", "megalite.parallel.state", []),
    ],
    ids=range(11),
)
def test_the_reader_of_imports_sees_every_form(text: str, module: str, arrows: list[str]) -> None:
    assert wrong_arrows(text, module) == [f"{module} -> {arrow}" for arrow in arrows]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import transformer_engine.pytorch as te", ["transformer_engine.pytorch"]),
        ("try:\n    import wandb\nexcept ImportError:\n    wandb = None", ["wandb"]),
        ("from torch.utils import tensorboard", ["torch.utils.tensorboard"]),
        ("class A:\n    import safetensors", ["safetensors"]),
        ("def f():\n    import wandb", []),
        ("import megalite.data.tokenizers", []),
    ],
    ids=range(6),
)
def test_the_reader_of_extras_sees_every_form(text: str, found: list[str]) -> None:
    assert extras_at_the_top(text) == found
