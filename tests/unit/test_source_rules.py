"""What holds for every source file: its size, and calls that are made elsewhere or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "megalite").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
PROGRAM = ROOT / "train.py"
SOURCES = [*PACKAGE, *TOOLS, PROGRAM]

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and number of lines of every function, nested ones too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


def _is_true(call: ast.Call, name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def forbidden_calls(text: str) -> list[str]:
    """Return the calls that a module of the package must not make, as they are written."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and node.exc is not None and "SystemExit" in ast.unparse(node.exc):
            found.append("SystemExit")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        runs_code = name in ("pickle.load", "pickle.loads", "eval", "exec", "yaml.unsafe_load", "yaml.full_load")
        is_unsafe_load = name == "torch.load" and not _is_true(node, "weights_only")
        if name in ("print", "sys.exit", "exit", "quit") or runs_code or is_unsafe_load:
            found.append(name)
        if name in ("np.load", "numpy.load") and _is_true(node, "allow_pickle"):
            found.append(f"{name} with allow_pickle")
    return found


def _names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_names)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < MAX_FILE_LINES
    assert [entry for entry in functions(text) if entry[1] > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", SOURCES, ids=_names)
def test_sources_are_ascii(path: Path) -> None:
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("path", PACKAGE, ids=_names)
def test_the_package_neither_prints_nor_exits_nor_unpickles(path: Path) -> None:
    assert forbidden_calls(path.read_text()) == []


@pytest.mark.parametrize("path", [*TOOLS, PROGRAM], ids=_names)
def test_programs_unpickle_nothing(path: Path) -> None:
    allowed = {"print", "sys.exit", "SystemExit"}
    assert set(forbidden_calls(path.read_text())) <= allowed


def test_the_way_in_is_short() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= 60
    loop = dict(functions((ROOT / "megalite" / "training" / "loop.py").read_text()))
    assert loop["train"] <= MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("print(1)", ["print"]),
        ("import sys\ndef f():\n    sys.exit(1)", ["sys.exit"]),
        ("raise SystemExit(2)", ["SystemExit"]),
        ("import pickle\npickle.load(f)", ["pickle.load"]),
        ("torch.load(f)", ["torch.load"]),
        ("torch.load(f, weights_only=False)", ["torch.load"]),
        ("torch.load(f, weights_only=True)", []),
        ("np.load(f, allow_pickle=True)", ["np.load with allow_pickle"]),
        ("logger.info('print(1)')", []),
    ],
    ids=range(9),
)
def test_the_reader_of_calls_sees_every_form(text: str, found: list[str]) -> None:
    assert forbidden_calls(text) == found
