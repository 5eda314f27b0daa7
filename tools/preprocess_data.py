"""Turn text into the token files that training reads: <prefix>.bin, <prefix>.idx and <prefix>.meta.json.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --workers 8
    zcat dump.gz | python tools/preprocess_data.py --input - --output-prefix data/corpus
    python tools/preprocess_data.py --index configs/run.yaml --data.data_path=data/corpus

A .jsonl or .json file, and standard input, has one JSON object a line; any other file is one document of plain text.
Either may be compressed and then ends in .gz.

--index builds nothing but the index tables that a new run of a configuration needs, so that its ranks find them.
Settings on top of the file are written --section.key=value; --world-size N is needed if the file leaves
global_batch_size out.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.data.preprocess import PreprocessCounts, PreprocessOptions, preprocess
from megalite.data.tokenizers import TOKENIZER_TYPES
from megalite.utils.errors import MegaliteError

_LINE_SECONDS = 10.0


def _parse(arguments: Sequence[str]) -> PreprocessOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="FILE", help="read in this order; - is standard input"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="path of the output without suffix")
    parser.add_argument("--tokenizer-type", default="ByteTokenizer", choices=TOKENIZER_TYPES)
    parser.add_argument("--vocab-size", type=int, help="number of ids of NullTokenizer, its end id not counted")
    parser.add_argument("--tokenizer-model", type=Path, metavar="FILE", help="tokenizer.json, its folder, or a .model")
    parser.add_argument("--tokenizer-eod", metavar="TEXT", help="the token that ends documents, if its files name none")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSON line (default: text)")
    parser.add_argument("--jsonl", action="store_true", help="read every input as JSON lines, whatever its suffix")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-document id",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that encode (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="name and count unusable JSON lines instead of failing"
    )
    options = vars(parser.parse_args(arguments))
    return PreprocessOptions(inputs=tuple(options.pop("input")), **options)


def _build_index(arguments: Sequence[str]) -> int:
    # Imported here: all other uses need no torch, and start in a fraction of the time.
    from megalite.config.loader import load_config
    from megalite.training.prepare_index import build_index
    from megalite.utils.logging import setup_logging

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--index", type=Path, required=True, metavar="CONFIG.yaml")
    parser.add_argument("--world-size", type=int)
    options, overrides = parser.parse_known_args(arguments)
    setup_logging(0)
    started, total = time.monotonic(), 0
    for report in build_index(load_config(options.index, overrides), options.world_size):
        total += report.size
        sources = f"{report.num_sources} source{'s' * (report.num_sources > 1)}"
        print(
            f"{report.name}: {report.num_samples} samples of {sources}, tables of {report.size / 1e6:.3f} MB, "
            f"{report.seconds:.2f} s",
            flush=True,
        )
    print(f"index tables of {total / 1e6:.3f} MB in {time.monotonic() - started:.2f} s")
    return 0


def _progress_printer(started: float) -> Callable[[PreprocessCounts], None]:
    terminal = sys.stderr.isatty()
    last = started

    def show(counts: PreprocessCounts) -> None:
        nonlocal last
        now = time.monotonic()
        if not terminal and now - last < _LINE_SECONDS:
            return
        last = now
        rate = counts.bytes_read / 1e6 / (now - started)
        text = f"{counts.documents} documents, {counts.tokens} tokens, {rate:.1f} MB/s"
        if counts.input_size is not None:
            share = counts.bytes_read / max(1, counts.input_size)
            bar = f"[{'#' * int(30 * share):<30}] " if terminal else ""
            text = f"{bar}{share:4.0%} {text}"
        print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return show


def _write_dataset(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    # A scheduler's signal must remove the half output as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        counts = preprocess(options, _progress_printer(started))
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    if sys.stderr.isatty():
        print(file=sys.stderr)
    skipped = f"skipped {counts.empty_documents} empty documents and {counts.bad_lines} bad lines"
    print(f"{options.output_prefix}: {counts.documents} documents, {counts.tokens} tokens; {skipped}")
    print(f"read {counts.bytes_read} bytes in {seconds:.2f} s, {counts.bytes_read / 1e6 / seconds:.1f} MB/s")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_index = any(argument.partition("=")[0] == "--index" for argument in arguments)
    try:
        return _build_index(arguments) if is_index else _write_dataset(arguments)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
