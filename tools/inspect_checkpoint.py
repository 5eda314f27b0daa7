"""Look into a checkpoint without loading it: python tools/inspect_checkpoint.py COMMAND FOLDER ...

    show FOLDER                  format, origin, topology, bytes by part and rank, files
    keys FOLDER [PATTERN]        every tensor and object; --chunks: where each rectangle lies
    verify FOLDER                everything that is wrong with it; status 3 if anything is
    diff FOLDER OTHER            how two steps differ; --values: element by element; status 1 if they do

FOLDER is a step (iter_0000100), or a save folder, of which the published step is taken, or --step N. With --json all is
printed as JSON. A folder that cannot be read is one message and status 3.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.checkpoint.inspection import difference, find_step, is_equal, keys, summary, verify
from megalite.utils.errors import MegaliteError

_SHOWN_ITEMS = 40


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("show", "format, origin, topology, bytes by part and rank, files"),
        ("keys", "every tensor and object"),
        ("verify", "everything that is wrong"),
        ("diff", "how two steps differ"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", type=Path, help="a step, or a save folder")
        command.add_argument("--step", type=int, metavar="N", help="iteration of the save folder")
        command.add_argument("--json", action="store_true", help="print JSON")
        if name == "keys":
            command.add_argument("pattern", nargs="?", help="part of a key, or a shell pattern")
            command.add_argument(
                "--chunks", action="store_true", help="offset, sizes, file and bytes of every rectangle"
            )
        if name == "diff":
            command.add_argument("other", type=Path, help="a step, or a save folder")
            command.add_argument("--other-step", type=int, metavar="N", help="iteration of the other save folder")
            command.add_argument("--values", action="store_true", help="compare every element")
    return parser


def _size(number: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:,.1f} {unit}"
    return f"{number:,.0f} B"


def _print_summary(found: dict[str, Any]) -> None:
    def line(name: str, value: Any) -> None:
        print(f"{name:<18} {value}")

    line("folder", found["folder"])
    line("format", found["format"] + ("" if found["complete"] else "  (not a complete torch_dist checkpoint)"))
    if "iteration" in found:
        grid = " ".join(f"{axis.upper()}={size}" for axis, size in found["topology"].items())
        line("iteration", found["iteration"])
        line("written by", f"{found['written_by']} at {grid}" + (f", run {found['run_id']}" if found["run_id"] else ""))
        line("consumed samples", found["consumed_train_samples"])
        line("optimizer", found["optimizer_layout"] or "none")
        line("hashes", ", ".join(found["integrity"]) or "none")
        line("holds", f"{found['tensors']} tensors in {found['chunks']} chunks, {found['objects']} objects")
        for part, sizes in found["parts"].items():
            counts = f"{sizes['tensors']:>5} tensors {sizes['elements']:>16,} elements"
            print(f"  {part:<22} {counts} {_size(sizes['bytes']):>10}")
        spread = {name: _size(value) for name, value in found["bytes_per_rank"].items()}
        line("bytes per rank", f"min {spread['min']}, mean {spread['mean']}, max {spread['max']}")
        for rank, parts in list(found["ranks"].items())[:_SHOWN_ITEMS]:
            print(f"  rank {rank:<5} " + ", ".join(f"{part} {_size(size)}" for part, size in sorted(parts.items())))
        _print_rest(len(found["ranks"]))
    line("files", len(found["files"]))
    for name, size in list(found["files"].items())[:_SHOWN_ITEMS]:
        print(f"  {name:<28} {size:>16,} bytes")
    _print_rest(len(found["files"]))


def _print_rest(count: int) -> None:
    if count > _SHOWN_ITEMS:
        print(f"  ... and {count - _SHOWN_ITEMS} more (--json has all)")


def _print_keys(rows: list[dict[str, Any]]) -> None:
    width = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        kind = f"{row['dtype']} {row['shape']}, {row['num_chunks']} chunks" if row["kind"] == "tensor" else "object"
        print(f"{row['key']:<{width}}  {kind}, {row['bytes']:,} bytes")
        for chunk in row.get("chunks", []):
            end = chunk["first_byte"] + chunk["length"]
            print(f"    {chunk['sizes']} at {chunk['offset']}: {chunk['file']} bytes {chunk['first_byte']} to {end}")
        if row["kind"] == "object" and "file" in row:
            print(f"    {row['file']} bytes {row['first_byte']} to {row['first_byte'] + row['length']}")
    print(f"{len(rows)} keys")


def _print_difference(found: dict[str, Any]) -> None:
    for name, title in (("only_in_first", "only in the first"), ("only_in_second", "only in the second")):
        for key in found[name]:
            print(f"{title}: {key}")
    for key, (one, other) in found["shapes"].items():
        print(f"{key}: {one} against {other}")
    for name, (one, other) in found["common"].items():
        print(f"{name}: {one} against {other}")
    for key, entry in found.get("values", {}).items():
        print(f"{key}: {entry['elements']:,} of {entry['of']:,} elements differ, by at most {entry['largest']:.6g}")
    for key in found.get("objects", []):
        print(f"{key}: objects differ")
    if is_equal(found):
        print("equal" if "values" in found else "equal in keys, shapes and plain values (--values compares elements)")


def _run(args: argparse.Namespace) -> int:
    folder = find_step(args.folder, args.step)
    status = 0
    if args.command == "show":
        found, show = summary(folder), _print_summary
    elif args.command == "keys":
        found, show = keys(folder, args.pattern, args.chunks), _print_keys
    elif args.command == "verify":
        found, show = verify(folder), _print_findings
        status = 3 if found else 0
    else:
        found, show = difference(folder, find_step(args.other, args.other_step), args.values), _print_difference
        status = 0 if is_equal(found) else 1
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return status


def _print_findings(findings: list[dict[str, Any]]) -> None:
    for entry in findings:
        print(entry["text"])
    print(f"{len(findings)} problems" if findings else "sound: files, index, checksums and hashes agree")


def main() -> int:
    args = _parser().parse_args()
    try:
        return _run(args)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
