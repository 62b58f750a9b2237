"""Measure memory and time of preparing a large corpus: ``python -m benchmarks.prepare --help``.

The corpus is generated: words of random syllables with frequencies by Zipf's law, one target word
for each source word, and sentences as long as those of news. Some pairs are blank, repeated, far
too long, or of very different lengths. Then the command ``prepare`` runs in a process of its own,
and twice a second the memory of all its processes is added up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from annotated_transformer.engine.records import processor_name
from benchmarks.records import keep, origin

TYPES = 200_000  # different words of a language
BLOCK = 50_000  # pairs written at a time


def words(seed: int) -> list[str]:
    """Generate the words of a language."""
    chance = np.random.default_rng(seed)
    syllables = [a + b + c for a in "bdfghklmnprstvwz" for b in "aeiouäöü" for c in ("", "n", "r")]
    found: dict[str, None] = {}
    while len(found) < TYPES:
        lengths = chance.integers(1, 5, TYPES)
        drawn = chance.integers(0, len(syllables), (TYPES, 4))
        for row, length in zip(drawn.tolist(), lengths.tolist(), strict=True):
            found.setdefault("".join(syllables[i] for i in row[:length]))
    return sorted(list(found)[:TYPES], key=len)  # frequent words are short


def write_corpus(folder: Path, pairs: int, seed: int = 0) -> None:
    """Write ``train.de`` and ``train.en``, and a thousand more pairs for validation."""
    chance = np.random.default_rng(seed)
    source, target = (np.array(words(n), dtype=object) for n in (1, 2))
    for split, count in (("train", pairs), ("valid", 1000)):
        sides = [(folder / f"{split}.{name}").open("w", encoding="utf-8") for name in ("de", "en")]
        for start in range(0, count, BLOCK):
            for pair in sentences(min(BLOCK, count - start), source, target, chance):
                for side, line in zip(sides, pair, strict=True):
                    side.write(line + "\n")
        for side in sides:
            side.close()


def sentences(
    count: int, source: np.ndarray, target: np.ndarray, chance: np.random.Generator
) -> list[tuple[str, str]]:
    """Generate pairs, of which one in fifty has to be removed."""
    lengths = np.clip(np.exp(chance.normal(3.0, 0.5, count)), 1, 100).astype(int)
    drawn = (TYPES ** chance.random(int(lengths.sum()))).astype(int) - 1  # Zipf: uniform logarithm
    found: list[tuple[str, str]] = []
    end = 0
    for length, kind in zip(lengths.tolist(), chance.integers(0, 250, count).tolist(), strict=True):
        numbers = drawn[end : end + length]
        end += length
        pair = " ".join(source[numbers]) + ".", " ".join(target[numbers]) + "."
        if kind == 0:
            pair = pair[0], ""
        elif kind in (1, 2) and found:
            pair = found[-1]
        elif kind == 3:
            pair = " ".join([pair[0]] * 300), pair[1]
        elif kind == 4:
            pair = pair[0], pair[1] + " and so on" * (2 * length)
        found.append(pair)
    return found


def usage(parent: int) -> tuple[int, int, float]:
    """Return the memory and processor time of a process and all its children.

    Returns:
        Bytes of memory, each page counted once, divided among those who share it; the sum of
        what each process has, shared pages counted for each; seconds of processor time.
    """
    family, shares, sizes, ticks = [parent], 0, 0, 0
    for pid in family:
        try:
            for thread in (Path("/proc") / str(pid) / "task").iterdir():
                family += [int(child) for child in (thread / "children").read_text().split()]
            rollup = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        kib = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
        shares += 1024 * kib["Pss:"]
        sizes += 1024 * kib["Rss:"]
        ticks += sum(map(int, fields[11:15]))  # its own, and those of children that have ended
    return shares, sizes, ticks / os.sysconf("SC_CLK_TCK")


def measure(command: list[str]) -> dict[str, object]:
    """Run ``prepare``; return the seconds and peak memory of each step, and its output."""
    steps: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stderr=output)
        said, last, used = "", time.monotonic(), 0.0
        while process.poll() is None:
            output.seek(0)
            said = output.read()
            now = [step for step in ("learning", "encoding") if f"\n{step} " in said]
            start = {"seconds": 0.0, "processor_seconds": 0.0}
            step = steps.setdefault(now[-1] if now else "cleaning", start)
            step["seconds"] += time.monotonic() - last
            last = time.monotonic()
            once, twice, total = usage(process.pid)
            step["processor_seconds"] += max(0.0, total - used)
            used = max(used, total)
            step["peak_bytes"] = max(step.get("peak_bytes", 0), once)
            step["peak_bytes_shared_twice"] = max(step.get("peak_bytes_shared_twice", 0), twice)
            time.sleep(0.5)
        if process.returncode:
            raise SystemExit(said)
    return {"steps": steps, "said": said.splitlines()}


def main() -> None:
    """Write a corpus, prepare it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.prepare")
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--vocabulary", type=int, default=37_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the corpus; a temporary one unless given")
    parser.add_argument("--record", type=Path, help="results/prepare-5m.json for all five million")
    options = parser.parse_args()
    if options.record is None and options.pairs == 5_000_000:
        options.record = Path("results/prepare-5m.json")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_corpus(folder, options.pairs)
        size = sum(path.stat().st_size for path in folder.iterdir())
        train, valid = (
            [str(folder / f"{s}.{x}") for x in ("de", "en")] for s in ("train", "valid")
        )
        command = [sys.executable, "-m", "annotated_transformer", "prepare", str(folder / "out")]
        command += ["--train-files", *train, "--valid-files", *valid, "--quiet"]
        command += ["--vocabulary", str(options.vocabulary), "--workers", str(options.workers)]
        result = measure(command)
        out = folder / "out"
        shards = sum(path.stat().st_size for path in (out / "shards").iterdir())
    record = {
        **origin("benchmarks.prepare"),
        "seed": 0,
        "hardware": {"processor": processor_name(), "gpu": None},
        "pairs": options.pairs,
        "text_bytes": size,
        "shard_bytes": shards,
        "vocabulary": options.vocabulary,
        "workers": options.workers,
        **result,
    }
    record["said"] = [line.replace(name, "FOLDER") for line in record["said"]]
    if options.record:
        keep(record, options.record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
