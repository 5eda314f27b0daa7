"""Text to token files: what is a document, what is an error, and that workers change nothing."""

from __future__ import annotations

import gzip
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.data import documents as module
from megalite.data import preprocess as preprocess_module
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.utils.errors import ConfigError, DataError

TOOL = Path(__file__).resolve().parents[3] / "tools" / "preprocess_data.py"


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def run(tmp_path: Path, *inputs: Path, **options: object):
    counts = preprocess(PreprocessOptions(inputs=inputs, output_prefix=tmp_path / "out", **options))
    return counts, IndexedDataset(tmp_path / "out")


def documents(data: IndexedDataset) -> list[list[int]]:
    return [data.get(i).tolist() for i in range(len(data))]


def test_one_document_a_line_or_a_file(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"text": "h\u00e9"}, {"text": "yo", "other": 1})
    (tmp_path / "b.txt").write_bytes(b"two\r\n\nparts")
    counts, data = run(tmp_path, a, tmp_path / "b.txt")
    assert documents(data) == [[104, 0xC3, 0xA9, 256], [121, 111, 256], [*b"two\r\n\nparts", 256]]
    assert data.dtype == np.uint16 and data.document_indices.tolist() == [0, 1, 2, 3]
    assert (counts.documents, counts.tokens, counts.bytes_read) == (3, 19, a.stat().st_size + 11)
    meta = data.meta()
    assert (meta.tokenizer, meta.vocab_size, meta.eod, meta.max_token_id) == ("ByteTokenizer", 257, 256, 256)


def test_key_suffix_and_eod_options(tmp_path):
    a = lines(tmp_path / "a.data", {"body": "x"}, {"body": "y"})
    _, data = run(tmp_path, a, jsonl=True, json_key="body", append_eod=False)
    assert documents(data) == [[120], [121]]


def test_ids_as_text(tmp_path):
    _, data = run(
        tmp_path, lines(tmp_path / "a.jsonl", {"text": "5 70000"}), tokenizer_type="NullTokenizer", vocab_size=80000
    )
    assert documents(data) == [[5, 70000, 80000]] and data.dtype == np.int32
    bad = lines(tmp_path / "b.jsonl", {"text": ""}, {"text": "5 x"})
    with pytest.raises(DataError, match=r"b\.jsonl:2: 'x' is not a token id"):
        run(tmp_path, bad, tokenizer_type="NullTokenizer", vocab_size=80000, overwrite=True)


def test_documents_without_text_are_counted_and_left_out(tmp_path):
    """TOK-01."""
    a = lines(tmp_path / "a.jsonl", {"text": ""}, {"text": " \n\t"}, "\n", {"text": "x"})
    (tmp_path / "empty.txt").write_text("")
    counts, data = run(tmp_path, a, tmp_path / "empty.txt")
    assert documents(data) == [[120, 256]] and counts.empty_documents == 4


BAD_LINES = {
    '{"text": "x"\n': "Expecting",
    '["text"]\n': "it holds list, not an object",
    '{"txt": "x"}\n': "it has no key 'text', only 'txt'",
    "{}\n": "it has no key 'text', only none",
    '{"text": 5}\n': "'text' holds int, not a text",
    '{"text": null}\n': "'text' holds NoneType",
    '{"text": "\\ud800"}\n': "surrogates not allowed",
    "[" * 100_000 + "\n": "recursion",
}


@pytest.mark.parametrize("line, problem", BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_or_counted(tmp_path, line, problem):
    a = lines(tmp_path / "a.jsonl", {"text": "x"}, line, {"text": "y"})
    with pytest.raises(DataError, match=rf"a\.jsonl:2 is not a usable JSON line: .*{problem}"):
        run(tmp_path, a)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    counts, data = run(tmp_path, a, skip_bad_lines=True)
    assert documents(data) == [[120, 256], [121, 256]] and counts.bad_lines == 1


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xffcd")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 2"):
        run(tmp_path, tmp_path / "a.txt")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}')
    assert documents(run(tmp_path, tmp_path / "a.jsonl")[1]) == [[120, 256]]


def test_files_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    # Small pieces, so that there are many more of them than workers may hold at once.
    monkeypatch.setattr(module, "_CHUNK_BYTES", 500)
    random = np.random.RandomState(0)
    a = lines(tmp_path / "a.jsonl", *({"text": f"{n} " + "ab" * random.randint(0, 60)} for n in range(500)))
    (tmp_path / "b.txt").write_text("a text file\n" * 1000)
    for workers in (1, 3):
        options = PreprocessOptions(
            inputs=(a, tmp_path / "b.txt", a), output_prefix=tmp_path / f"out{workers}", workers=workers
        )
        assert preprocess(options).documents == 1001
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"out1.{suffix}").read_bytes() == (tmp_path / f"out3.{suffix}").read_bytes()
    assert bytes(IndexedDataset(tmp_path / "out3").get(499)[:4].astype(np.uint8)) == b"499 "


def test_an_error_in_a_worker_is_the_same_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100)
    a = lines(tmp_path / "a.jsonl", *[{"text": "x" * 50}] * 100, "{\n", *[{"text": "x" * 50}] * 100, "[\n")
    with pytest.raises(DataError, match=r"a\.jsonl:101 is not a usable JSON line"):
        run(tmp_path, a, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_failed_run_leaves_the_old_output_alone(tmp_path):
    good = lines(tmp_path / "good.jsonl", {"text": "x"})
    bad = lines(tmp_path / "bad.jsonl", "{\n")
    run(tmp_path, good)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError):
        run(tmp_path, good, bad, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_input_without_any_text_writes_nothing(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"text": ""})
    with pytest.raises(DataError, match="hold no text: 1 empty documents"):
        run(tmp_path, a)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_usage_errors_come_before_any_work(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"text": "x"})
    with pytest.raises(DataError, match=r"input .*b\.jsonl does not exist"):
        run(tmp_path, a, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        run(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="--workers is 0"):
        run(tmp_path, a, workers=0)
    with pytest.raises(ConfigError, match="no input"):
        run(tmp_path)
    with pytest.raises(ConfigError, match="output folder .*missing"):
        preprocess(PreprocessOptions(inputs=(a,), output_prefix=tmp_path / "missing" / "out"))
    run(tmp_path, a)
    with pytest.raises(ConfigError, match=r"out\.bin exists already.*--overwrite"):
        run(tmp_path, a)
    run(tmp_path, a, overwrite=True)


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess_module, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 30)
    seen = []
    options = PreprocessOptions(
        inputs=(lines(tmp_path / "a.jsonl", *[{"text": "xyz"}] * 10),), output_prefix=tmp_path / "out"
    )
    preprocess(options, lambda counts: seen.append(counts.bytes_read / counts.input_size))
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == 1.0


def test_compressed_files_hold_the_same_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 200)
    a = lines(tmp_path / "a.jsonl", *({"text": f"line {n}"} for n in range(100)))
    (tmp_path / "b.txt").write_text("plain\n" * 50)
    _, expected = run(tmp_path, a, tmp_path / "b.txt")
    packed = [Path(f"{path}.gz") for path in (a, tmp_path / "b.txt")]
    for path in packed:
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    for workers in (1, 2):
        counts, data = run(tmp_path, *packed, workers=workers, overwrite=True)
        assert documents(data) == documents(expected)
        # The progress counts what lies on disk.
        assert counts.bytes_read == counts.input_size == sum(path.stat().st_size for path in packed)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-12], lambda data: data[:30] + b"\0" * 20 + data[50:], lambda data: b"no gzip at all"]
)
def test_a_damaged_compressed_file_is_named(tmp_path, damage):
    content = b"".join(json.dumps({"text": f"line {n * n}"}).encode() + b"\n" for n in range(100))
    (tmp_path / "a.jsonl.gz").write_bytes(damage(gzip.compress(content)))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is no whole gzip file"):
        run(tmp_path, tmp_path / "a.jsonl.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]


class _Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_standard_input_is_json_lines(tmp_path, monkeypatch):
    content = b'{"text": "x"}\n{"text": "yo"}\n'
    for workers in (1, 2):
        monkeypatch.setattr(sys, "stdin", _Stdin(content))
        counts, data = run(tmp_path, Path("-"), workers=workers, overwrite=True)
        assert documents(data) == [[120, 256], [121, 111, 256]]
        assert (counts.input_size, counts.bytes_read) == (None, len(content))
    monkeypatch.setattr(sys, "stdin", _Stdin(b'{"text": "x"}\n{\n'))
    with pytest.raises(DataError, match=r"standard input:2 is not a usable JSON line"):
        run(tmp_path, Path("-"), overwrite=True)
    with pytest.raises(ConfigError, match="'-', standard input, stands alone"):
        run(tmp_path, Path("-"), Path("-"), overwrite=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_that_are_left_out_are_named_and_counted(tmp_path, monkeypatch, caplog, workers):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100)
    caplog.set_level(logging.WARNING, logger="megalite")
    a = lines(tmp_path / "a.jsonl", {"text": "x"}, "{\n", *[{"text": "x" * 90}] * 3, *['{"txt": "y"}\n'] * 20)
    counts, data = run(tmp_path, a, skip_bad_lines=True, workers=workers)
    assert counts.bad_lines == 21 and len(data) == 4
    said = [record.getMessage() for record in caplog.records]
    assert "a.jsonl:2 is not a usable JSON line: Expecting" in said[0] and said[0].endswith("; the line is left out")
    assert "a.jsonl:6 is not a usable JSON line: it has no key 'text'" in said[1]
    # Ten are named, so that a file of the wrong kind does not fill the screen.
    assert len(said) == 11 and "only counted from here on" in said[10]


def test_workers_do_not_wait_for_torch():
    code = "import sys, megalite.data.preprocess; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOOL.parents[1], timeout=60).returncode == 0


def _tool(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_the_command_reads_standard_input_and_says_what_it_leaves_out(tmp_path):
    text = '{"text": "x"}\n{\n{"text": "y"}\n'
    options = ("--output-prefix", tmp_path / "out", "--skip-bad-lines", "--tokenizer-type", "ByteTokenizer")
    result = _tool("--input", "-", *options, input=text)
    assert result.returncode == 0 and documents(IndexedDataset(tmp_path / "out")) == [[120, 256], [121, 256]]
    assert "2 documents, 4 tokens; skipped 0 empty documents and 1 bad lines" in result.stdout
    assert "standard input:2 is not a usable JSON line" in result.stderr


def test_the_command_hands_tokenizer_files_on(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"text": "x"})
    options = ("--input", a, "--output-prefix", tmp_path / "out", "--tokenizer-model", tmp_path / "none")
    result = _tool(*options, "--tokenizer-type", "HFTokenizer", "--tokenizer-eod", "</s>")
    assert result.returncode == 3 and "the tokenizer file" in result.stderr and "none cannot be read" in result.stderr


def test_the_command_prints_counts_and_exits_by_the_error(tmp_path):
    a = lines(tmp_path / "a.jsonl", {"text": "x"}, {"text": ""})
    result = _tool("--input", a, "--output-prefix", tmp_path / "out", "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "1 documents, 2 tokens; skipped 1 empty documents and 0 bad lines" in result.stdout
    assert "MB/s" in result.stdout
    again = _tool("--input", a, "--output-prefix", tmp_path / "out")
    assert again.returncode == 2 and again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
    missing = _tool("--input", tmp_path / "none", "--output-prefix", tmp_path / "new", "--no-append-eod")
    assert missing.returncode == 3 and "does not exist" in missing.stderr and missing.stderr.count("\n") == 1
